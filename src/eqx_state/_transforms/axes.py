"""The axes of `es.vmap` and `es.shard_map`: over which axis each array is mapped.

An array of a module in the function is mapped by rules (`axes`), an array among the
arguments by its position (`in_axes`), where an entry may be rules. Here both become a
flat list with one axis for each leaf, so that the rest of a transform does not know
where an axis came from. An axis is an integer, or for `es.shard_map` a `PartitionSpec`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._kinds.kinds import is_kind, Rng
from .._state.scope import is_owned
from .._tree.base import BaseModule, get_place
from .._tree.keys import is_key
from .._tree.rules import Asked, check_rules, is_rules, most_derived
from .._tree.walk import is_array, leaves, modules_in, name_of, Visit
from .._typing import KeyPath, PyTree
from .lift import (
    by_entry,
    check_given,
    extents,
    is_model,
    Lifted,
    owned_in,
    Ran,
    Root,
    Slot,
    Values,
)
from .transform import argument_name, positional_names, Transform


class _Split:
    def __repr__(self) -> str:
        return "es.SPLIT"

    def __reduce__(self) -> str:
        return "SPLIT"  # so that copies and pickles are this very object


SPLIT: Final = _Split()
"""The axis of a PRNG key that is split, so that each lane gets its own key."""


class Manner(NamedTuple):
    """How a transform maps.

    - `what`, `entries`: its name, and that of its argument for the arguments' axes.
    - `shared`: the axis of what all lanes share. `example`: another one, in an error.
    - `read`: the axis that an entry says for an array.
    """

    what: str
    entries: str
    shared: Any
    example: str
    read: Callable[[Any, Any], Any] = lambda entry, x: entry


class Entry(NamedTuple):
    """What `in_axes` says of a leaf: `axis_of(visit)`, which is at `path` there.

    Of a module without leaves it is what will be made in it.
    """

    axis_of: Callable[[Visit], Any]
    path: KeyPath

    def of_new(self, root: Root, visit: Visit) -> Any:
        """The axis of an array that `init` has made in the root of which it is."""
        depth = len(root.place.path)
        below = len(root.leaves[0].path) - depth if root.leaves else 0
        start = self.path[: len(self.path) - below]
        return self.axis_of(_moved(visit, depth, start))


def _moved(visit: Visit, depth: int, start: KeyPath) -> Visit:
    """The visit with `start` in the place of the first `depth` keys of its path."""
    context = visit.context.seen_from(depth, len(start))
    return visit._replace(path=(*start, *visit.path[depth:]), context=context)


class _Axis(NamedTuple):
    """An axis as a leaf of a tree, in which a bare `None` would not be a leaf."""

    value: Any
    entry: Entry


def axis_by_rules(
    visit: Visit, key: Any, rules: Mapping[Any, Any], manner: Manner
) -> Any:
    """The axis of an array, given its key. By default only PRNG keys are mapped."""
    if not is_array(visit.node):
        return None
    if key is not None:
        axis = rules[key]
        if axis is SPLIT and not is_key(visit.node):
            message = _NOT_A_KEY.format(manner.what, visit.name, manner.example)
            raise ValueError(message)
        return manner.shared if axis is None else axis
    return SPLIT if visit.is_a(Rng) and is_key(visit.node) else manner.shared


def _addresses(module: BaseModule) -> list[tuple[int, int]]:
    """For each leaf the innermost `es.Module` that has it, and its number there."""
    found = {}
    for owner, start, stop in extents(module):  # parents first
        found |= {k: (id(owner), k - start) for k in range(start, stop)}
    return [found[k] for k in range(len(found))]


class FunctionAxes:
    """The axes of the modules in a function and in its closure, by rules.

    The rules are asked in each of these modules by the names that are seen from there,
    the outermost module if several contain an array. `known` has the key of an array of
    an owned module by its `Cell`, since a transform comes to the same array in several
    ways; arrays that only the arguments lead to are not in it. `tree` is the function
    as a pytree (`Opened`).
    """

    def __init__(
        self,
        rules: Mapping[Any, Any],
        function: Any,
        tree: PyTree,
        manner: Manner,
    ):
        self.rules, self.manner = rules, manner
        self.asked = Asked(rules, f"`{manner.what}(axes=...)`")
        self.by_kind = {k: rules[k] for k in rules if k is ... or is_kind(k)}
        self.known: dict[tuple[int, int], Any] = {}
        self.bound: dict[int, tuple[KeyPath, Callable[[Visit], Any]]] = {}
        self.visits = leaves(tree)
        self.keys = [most_derived(v.kind, self.by_kind) for v in self.visits]
        if self.asked.filters:
            self._ask(tree, owned_in(function))

    def _ask(self, tree: PyTree, owned: list[BaseModule]) -> None:
        self.keys = []
        for visit in leaves(tree, is_leaf=is_model):
            is_in_model = is_model(visit.node)
            self.keys += self._ask_in(visit) if is_in_model else [None]
        # The outermost first: what lies inside another one has its names from there.
        for module in sorted(owned, key=lambda x: len(get_place(x).path)):
            if id(module) not in self.bound:
                self._ask_in(Visit((), module, get_place(module).context, True))

    def _ask_in(self, model: Visit) -> list[Any]:
        """The keys of the leaves of a module, by the names that are seen from there."""
        key_of = self.asked.bind(model.node)
        keys = []
        for visit in leaves(model.node, (), model.context, is_leaf=is_owned):
            if not is_owned(visit.node):
                keys.append(key_of(visit))
                continue
            # Declarations further up in its model decide the kinds, too.
            place = get_place(visit.node)
            below = place.context.seen_from(len(place.path), len(visit.path))
            for inner in modules_in(visit.node, visit.path):
                self.bound.setdefault(id(inner.node), (inner.path, key_of))
            for address, inner in zip(
                _addresses(visit.node),
                leaves(visit.node, visit.path, below),
                strict=True,
            ):
                keys.append(key_of(inner))
                self.known.setdefault(address, keys[-1])
        return keys

    def of_function(self) -> list[Any]:
        """The axis of each leaf: arrays outside of a module are shared."""
        return [
            self._axis(visit, key) if _in_module(visit) else self._outside(visit)
            for visit, key in zip(self.visits, self.keys, strict=True)
        ]

    def of_module(
        self, module: BaseModule, visits: list[Visit] | None = None
    ) -> list[Any]:
        """The axis of each leaf of an owned module; `visits` are its leaves."""
        if visits is None:
            place = get_place(module)
            visits = leaves(module, place.path, place.context)
        keys = [most_derived(visit.kind, self.by_kind) for visit in visits]
        if self.known:
            keys = [
                self.known.get(address, key)
                for address, key in zip(_addresses(module), keys, strict=True)
            ]
        return [self._axis(visit, key) for visit, key in zip(visits, keys, strict=True)]

    def _axis(self, visit: Visit, key: Any) -> Any:
        return axis_by_rules(visit, key, self.rules, self.manner)

    def _outside(self, visit: Visit) -> Any:
        return self.manner.shared if is_array(visit.node) else None

    def of_new(self, root: Root, visit: Visit) -> Any:
        """The axis of an array that `init` has made in a root."""
        key = most_derived(visit.kind, self.by_kind)
        if id(root.module) in self.bound:
            start, key_of = self.bound[id(root.module)]
            key = key_of(_moved(visit, len(root.place.path), start))
        return None if key is None else self.rules[key]

    def check_matched(self) -> None:
        """Raise `ValueError` for a filter that matches in none of the modules."""
        entries, example = self.manner.entries, self.manner.example
        self.asked.check_matched(_IN_REACH.format(entries, example))


# Modules that only wrap values, and are not models of the user.
_CARRIERS: Final = (Transform, eqx.Partial)


def _in_module(visit: Visit) -> bool:
    owner = visit.context.owner
    return owner is not None and not issubclass(owner, _CARRIERS)


def argument_axes(
    in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any], manner: Manner
) -> tuple[list[Any], list[Entry], dict[int, Entry], list[Asked]]:
    """For each leaf of `(args, kwargs)` its axis and its entry; and the rules asked.

    Third are the entries of owned modules, by `id`: `init` may make arrays in one that
    has no leaves. Keyword arguments have axis 0.
    """
    asked: list[Asked] = []
    modules: dict[int, Entry] = {}
    if isinstance(in_axes, (tuple, list)):
        if len(in_axes) != len(args):
            counts = len(in_axes), len(args)
            raise ValueError(_ENTRIES.format(manner.what, manner.entries, *counts))
        entries = tuple(in_axes)
    else:
        entries = (in_axes,) * len(args)
    axes = jtu.tree_map(
        lambda entry, x: _axes_of_argument(entry, x, modules, asked, manner),
        (entries, dict.fromkeys(kwargs, 0)),
        (args, kwargs),
        # Unlike any other dict of axes, rules are one entry, and not a prefix.
        is_leaf=lambda x: x is None or is_rules(x),
    )
    axis_leaves = jtu.tree_leaves(axes, is_leaf=lambda x: isinstance(x, _Axis))
    values, found = ([x[i] for x in axis_leaves] for i in range(2))
    return values, found, modules, asked


def _axes_of_argument(
    entry: Any,
    argument: Any,
    modules: dict[int, Entry],
    all_asked: list[Asked],
    manner: Manner,
) -> Any:
    def axis_of(visit: Visit) -> Any:
        return manner.read(entry, visit.node) if is_array(visit.node) else None

    def axis_by_key(visit: Visit) -> Any:
        return axis_by_rules(visit, key_of(visit), entry, manner)

    if is_rules(entry):
        what = f"`{manner.what}({manner.entries}=...)`"
        check_rules(entry, what)
        asked = Asked(entry, what)
        all_asked.append(asked)
        key_of, axis_of = asked.bind(argument), axis_by_key
    for visit in leaves(argument, is_leaf=is_owned):
        if is_owned(visit.node):
            modules[id(visit.node)] = Entry(axis_of, visit.path)
    axes = [
        _Axis(axis_of(visit), Entry(axis_of, visit.path)) for visit in leaves(argument)
    ]
    return jtu.tree_unflatten(jtu.tree_structure(argument), axes)


_IN_REACH: Final = """ Names in `axes` begin at each module that the function or its \
closure holds. Modules among the arguments follow `{0}`: \
`{0}=({{es.path_matches("*.bias"): None, ...: {1}}}, {1})`."""

_NOT_A_KEY: Final = """`{0}`: `axes` says `es.SPLIT` for `{1}`, which is not a PRNG \
key. Only keys can be split; map an array over an axis, or share it: \
`axes={{es.State: {2}}}`, `axes={{es.State: None}}`."""

_ENTRIES: Final = """`{}`: `{}` has {} entries for {} positional arguments. Give one \
for each, or one for all."""


# --- All leaves that `es.vmap` or `es.shard_map` reaches, in one flat mapping.


# These take the place of a root's index in the slots of the function and of the
# arguments. Roots are counted from 0, so the numbers do not clash.
FUNCTION: Final = -2
ARGUMENTS: Final = -1


class Reached:
    """All leaves that a call of a mapping transform reaches, and the axis of each.

    Why one flat mapping? Leaves come from three places: the function, the arguments,
    and the owned modules that either of them reaches. Their axes have different
    sources, and a lane puts them back in different ways, but nothing else differs. By
    slot, sizes are checked, keys are split and axes are handed to JAX in one way for
    all.
    """

    def __init__(
        self,
        f: Any,
        axes: Mapping[Any, Any],
        in_axes: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        manner: Manner,
    ):
        by_argument, entries, modules, asked = argument_axes(
            in_axes, args, kwargs, manner
        )
        self.f = f
        self.by_rules = FunctionAxes(axes, f, f, manner)
        self.lifted = Lifted(f, (args, kwargs), by_argument)
        given = self.lifted.arguments
        if not self.lifted.is_initializing:
            check_given(f, *args, *kwargs.values())
        # `init` may have yet to make what a filter is meant for.
        if not self.lifted.is_initializing:
            self.by_rules.check_matched()
            for each in asked:
                each.check_matched()
        self.values: Values = dict(self.lifted.values)
        self.axes: dict[Slot, Any] = {}
        meanings = {id(x): own for x, own in by_entry(given, by_argument)}
        for i, root in enumerate(self.lifted.roots):
            own = meanings.get(id(root.module)) if root.is_copy else None
            if own is None:
                own = self.by_rules.of_module(root.module, root.leaves)
            self.axes.update(((i, k), axis) for k, axis in enumerate(own))
        # Owned modules are leaves in these trees, and have no axis there. Their own
        # leaves are in the mapping already, as those of the roots.
        self.trees = {FUNCTION: f, ARGUMENTS: given}
        self._add(FUNCTION, self.by_rules.of_function())
        self._add(ARGUMENTS, by_argument)

    def _add(self, where: int, axes: Sequence[Any]) -> None:
        for k, (x, own) in enumerate(by_entry(self.trees[where], axes)):
            self.values[where, k] = x
            self.axes[where, k] = None if is_owned(x) else own[0]

    def name(self, slot: Slot) -> str:
        """The name of a leaf, as the user of the function writes it."""
        where, k = slot
        if where not in self.trees:
            return self.lifted.name(slot)
        path = leaves(self.trees[where], is_leaf=is_owned)[k].path
        if where == ARGUMENTS:
            names = positional_names(self.f)
            argument = path[1].key if path[0].idx else path[1].idx
            return argument_name(argument, path[2:], names)
        f = self.trees[where]
        while isinstance(f, Transform):
            f, path = f.f, path[1:]
        return name_of(path)

    def call(self, inputs: Values) -> Ran:
        """Call the function in a lane that has these values."""
        values = {**self.values, **inputs}
        f = self._tree(FUNCTION, values)
        args, kwargs = self._tree(ARGUMENTS, values)
        return self.lifted.run(values, lambda: f(*args, **kwargs))

    def _tree(self, where: int, values: Values) -> Any:
        treedef = jtu.tree_structure(self.trees[where], is_leaf=is_owned)
        leaves = [values[where, k] for k in range(treedef.num_leaves)]
        return jtu.tree_unflatten(treedef, leaves)
