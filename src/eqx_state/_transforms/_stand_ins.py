"""Stand-ins: modules that a transform reaches as an argument and through its function.

A transform treats the modules in its function and its closure in one way (shared,
carried, mapped by kind), and those among its arguments in another (sliced, mapped over
an axis). One module may come both ways, but one object cannot hold a slice and the
whole at the same time. So in the body the argument is a copy, the *stand-in*, and the
closure keeps the original. Writes to the stand-in go to the original after the
transform.

For parameters, which are only read, this is what JAX does: an argument and a closure
are two values. State is different: if it is written one way and read or written the
other way, it would have two values at once. That is an error, and `Twice` finds it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu

from .._state._nn_shared import closed_copy
from .._state._scope import is_owned, own, Watch
from .._tree._base import BaseModule, get_place, is_module
from .._tree._walk import modules_in, Visit, walk
from ._root import Root, Slot, Values


def owned_copy(module: Any, values: Iterator[Any] | None = None) -> Any:
    """A copy of an owned module in the same place, with these leaves or its own."""
    if values is None:
        for visit in modules_in(module):
            get_place(visit.node).note_all_read()
    place, copy = get_place(module), closed_copy(module)
    if values is not None:
        copy = jtu.tree_map(lambda _: next(values), copy)
    own(copy, place.scope, place.path, place.context)
    return copy


def by_entry(tree: Any, values: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each leaf of a tree, where owned modules count as leaves, with its `values`.

    `values` has one entry for each leaf proper, so a module comes with several.
    """
    rest = iter(values)
    for x in jtu.tree_leaves(tree, is_leaf=is_owned):
        count = jtu.tree_structure(x).num_leaves if is_owned(x) else 1
        yield x, tuple(itertools.islice(rest, count))


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A copy that stands for `original` as an argument.

    `meaning` has an entry for each leaf: the axis over which it is mapped, for example.
    """

    module: BaseModule
    original: BaseModule
    meaning: tuple[Any, ...]


def stand_in(
    tree: Any,
    meanings: Sequence[Any],
    usual: Callable[[BaseModule], Sequence[Any] | None] = lambda _: None,
) -> tuple[Any, list[StandIn]]:
    """`tree` with stand-ins for the owned modules whose meaning is not the usual one.

    A module that occurs several times with one meaning has one stand-in.
    """
    found = [x for x in by_entry(tree, meanings) if is_owned(x[0])]
    made: dict[tuple[int, tuple[Any, ...]], Any] = {}
    stand_ins = []
    # The largest first: if a module and a part of it are arguments, the stand-in of the
    # part is a part of the stand-in of the module.
    for module, meaning in sorted(found, key=lambda x: -len(x[1])):
        if (id(module), meaning) in made:
            continue
        usually = usual(module)
        if usually is not None and tuple(usually) == meaning:
            made[id(module), meaning] = module
            continue
        new = owned_copy(module)
        stand_ins.append(StandIn(new, module, meaning))
        for old_part, part in zip(
            extents(walk(module)), extents(walk(new)), strict=True
        ):
            key = id(old_part.module), meaning[old_part.start : old_part.stop]
            made.setdefault(key, part.module)
    entries = [
        made[id(x), meaning] if is_owned(x) else x
        for x, meaning in by_entry(tree, meanings)
    ]
    treedef = jtu.tree_structure(tree, is_leaf=is_owned)
    return jtu.tree_unflatten(treedef, entries), stand_ins


class Extent(NamedTuple):
    """A module in a tree, and the range of the tree's leaves that it has."""

    module: BaseModule
    start: int
    stop: int
    depth: int


def extents(visits: list[Visit]) -> list[Extent]:
    """Every `es.Module` that a walk has visited, parents first."""
    found, start = [], 0
    for visit in visits:
        if visit.is_leaf:
            start += 1
        elif is_module(visit.node):
            stop = start + jtu.tree_structure(visit.node).num_leaves
            found.append(Extent(visit.node, start, stop, len(visit.path)))
    return found


class Cell(NamedTuple):
    """Where a leaf is stored: in which field of the nearest `es.Module` around it.

    `index` counts the leaves of that module. Names would not do, since two leaves may
    have equal names.
    """

    owner: BaseModule
    field: str
    index: int


def cells(module: BaseModule) -> list[Cell]:
    """The cell of each leaf of a module."""
    visits = walk(module)
    paths = [visit.path for visit in visits if visit.is_leaf]
    found: list[Any] = [None for _ in paths]
    for owner, start, stop, depth in extents(visits):
        for k in range(start, stop):
            found[k] = Cell(owner, paths[k][depth].name, k - start)
    return found


class Twice:
    """The state that a transform reaches twice, and a check of how it is used.

    - `state`: the leaves of the roots that may be written.
    - `others`: for a leaf that is reached again, its first slot and its own cell.

    Reading both ways is fine. A write has to go to the stand-in, and then the other way
    must not even be read: it would give the value from before the transform. Writes are
    known after the trace, as values that differ. JAX cannot tell which values were
    read, so the modules note reads themselves (`Watch`).
    """

    def __init__(self, roots: list[Root], state: Values):
        self.others: dict[Slot, tuple[Slot, Cell]] = {}
        first: dict[tuple[int, int], Slot] = {}
        # Stand-ins first, so that the first slot of a leaf is that of a stand-in, which
        # is the one that may be written.
        for i in sorted(range(len(roots)), key=lambda i: not roots[i].is_stand_in):
            here = there = cells(roots[i].module)
            if roots[i].is_stand_in:
                there = cells(roots[i].original)
            for k, cell in enumerate(there):
                if (i, k) in state:
                    slot = first.setdefault((id(cell.owner), cell.index), (i, k))
                    if slot[0] != i:
                        self.others[i, k] = slot, here[k]
        self.watches: dict[int, Watch] = {}

    def watch(self) -> None:
        """Have the modules note reads of this state from now on."""
        fields: dict[int, tuple[BaseModule, set[str]]] = {}
        for _, cell in self.others.values():
            fields.setdefault(id(cell.owner), (cell.owner, set()))[1].add(cell.field)
        self.watches = {key: Watch(frozenset(x)) for key, (_, x) in fields.items()}
        for key, (owner, _) in fields.items():
            place = get_place(owner)
            place.watches = (*place.watches, self.watches[key])

    def check(self, written: Values, name: Callable[[Slot], str]) -> None:
        """Raise `ValueError` if state was written one way and used the other way."""
        for slot, (first, cell) in self.others.items():
            is_read = cell.field in self.watches[id(cell.owner)].read
            if slot in written or (is_read and first in written):
                full = name(slot)
                raise ValueError(_TWICE.format(full, full.rpartition(".")[2]))


_TWICE: Final = """`{0}` is reached twice: in an argument, of which the transform has \
other values (a slice, those of a lane, what is differentiated), and as a whole, \
through the function or in another argument. It was written, and also read or written \
in the other way, where it would have another value. Parameters may be reached both \
ways; write state in the argument only, and read it before:

    def body(x, layer):                              # wrong
        return layer(x) + self.layers.{1}.sum(), None

    total = self.layers.{1}.sum()                # right
    def body(x, layer):
        return layer(x) + total, None"""
