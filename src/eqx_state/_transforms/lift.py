"""The lifting core: how state passes through a JAX transform. All transforms use it.

A lifted transform reaches owned modules through the function, its closure and its
arguments. In the inner trace these very objects have to hold that trace's values,
because the function may close over `self`, and no copy would be seen by the closure. So
their contents are swapped for the time of the trace. After it the old contents are put
back, the writes leave the trace as ordinary outputs, and are committed to the objects
outside.
"""

import collections
import contextlib
import copy
import dataclasses
import functools as ft
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .._errors import NotInitializedError, show, TraceError
from .._state.collect import leave, Owned, Snapshot
from .._state.init import check_initialized
from .._state.module import Module
from .._state.scope import (
    alone,
    closed_copy,
    is_any_open,
    is_owned,
    OpenShared,
    own,
    Place,
    Scope,
    Sown,
    Watch,
)
from .._state.sow import carried_out
from .._state.write import trace_message
from .._tree.base import (
    BaseModule,
    fields_of,
    get_place,
    is_eqx_module,
    is_module,
    set_place,
)
from .._tree.compare import check_not_shared, identical, modules_below, same
from .._tree.context import children, is_leaf, with_children
from .._tree.observe import OBSERVING
from .._tree.walk import dynamic_names, is_array, leaves, modules_in, Visit, walk
from .._typing import KeyPath
from .transform import Transform


# --- What functions hold: modules in closures, defaults, bound methods and partials.
#
# JAX takes a function for a leaf, and what it holds stays hidden from a transform.
# Every transform looks through functions for the modules that a scope owns: those are
# swapped in place, and no function is touched.


ATOMS: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
DICTS: Final = (dict, collections.OrderedDict, collections.defaultdict)
PARTIALS: Final = (ft.partial, jtu.Partial, eqx.Partial)


def is_model(x: Any) -> bool:
    """Whether `x` is a module, and not what merely wraps a function."""
    is_wrapper = type(x) is eqx.Partial or isinstance(x, Transform)
    return is_eqx_module(x) and not is_wrapper


def held(x: Any) -> list[tuple[Any, Any]] | None:
    """The objects that `x` holds one level down, each with its key.

    `None` for a model, an array, or any other object. An instance of a subclass is not
    looked into either: it may hold more than can be copied. A cell is a level of its
    own, since several functions may share it.
    """
    cls = type(x)
    if cls in ATOMS:
        return None
    if cls is types.FunctionType:
        closure, defaults = x.__closure__ or (), x.__defaults__ or ()
        end = x.__code__.co_argcount
        names = x.__code__.co_varnames[end - len(defaults) : end]
        return [
            *zip(x.__code__.co_freevars, closure, strict=True),
            *zip(names, defaults, strict=True),
            *(x.__kwdefaults__ or {}).items(),
        ]
    if cls is types.CellType:
        try:
            return [("", x.cell_contents)]
        except ValueError:  # assigned later in the enclosing function
            return []
    if cls in DICTS:  # also those that JAX cannot sort
        return [*x.items()]
    if cls in (list, tuple):
        return [*enumerate(x)]
    if cls is types.MethodType:
        return [("__func__", x.__func__), ("__self__", x.__self__)]
    if cls in PARTIALS:
        return [(name, getattr(x, name)) for name in ("func", "args", "keywords")]
    if isinstance(x, Transform):
        return [("f", x.f)]
    if is_eqx_module(x) or eqx.is_array(x) or is_leaf(x):
        return None
    try:
        return [*(children(x) or ())]
    except Exception:  # such as an `eqx.nn.State` that must not be used any more
        return None


def step(x: Any, key: Any) -> str:
    """How a name goes on from `x` to what it holds under this key."""
    if type(x) is types.CellType:
        return ""
    if type(x) in (*DICTS, list, tuple):
        return f"[{key!r}]"
    return f".{key}" if isinstance(key, str) else jtu.keystr((key,))


def reach(x: Any, *, objects: bool = False) -> Iterator[Any]:
    """Everything that `x` leads to, each once; but an owned module at each place.

    An owned module is not looked into. With `objects` the attributes of objects that
    are not pytrees are.
    """
    seen: dict[int, Any] = {}  # keeps them alive, so that no other gets their `id`
    todo = [x]
    while todo:
        x = todo.pop()
        if type(x) in ATOMS or id(x) in seen:
            continue
        yield x
        if is_owned(x):
            continue
        seen[id(x)] = x
        if is_model(x):
            below = jtu.tree_leaves(x, is_leaf=_is_opaque)
        else:
            below = [child for _, child in held(x) or ()]
            if objects:
                below += _attributes(x)
        todo += reversed(below)


def _attributes(x: Any) -> list[Any]:
    if isinstance(x, (type, types.ModuleType)):
        return []
    try:
        return [*object.__getattribute__(x, "__dict__").values()]
    except AttributeError:
        return []


def _is_opaque(x: Any) -> bool:
    # The function of JAX's partial is not one of its children.
    return is_owned(x) or isinstance(x, jtu.Partial)


def owned_in(tree: Any, *, objects: bool = False) -> list[Any]:
    """The outermost owned modules that a tree reaches, at each place where it does."""
    if not is_any_open():
        return []
    return [x for x in reach(tree, objects=objects) if is_owned(x)]


def models_in(x: Any) -> list[Any]:
    """The models that `x` leads to, through functions and containers."""
    return [y for y in reach(x) if is_model(y)]


# --- The roots of a transform: the outermost owned modules that it reaches.
#
# All leaves of all roots are in one flat mapping by `Slot`. A name would not do as a
# key, since two leaves may have equal names.


# The index of a root, and of one of its leaves in the order of flattening.
Slot = tuple[int, int]

Values = dict[Slot, Any]


@dataclasses.dataclass(eq=False)
class Root:
    """An owned module that is not inside another one that the transform reaches.

    - `place`, `visits`: where it is in its model; paths and kinds are seen from there.
    - `original`: the module that a stand-in stands for; otherwise `module` itself.
    """

    module: BaseModule
    place: Place
    visits: list[Visit]
    original: BaseModule

    @property
    def is_stand_in(self) -> bool:
        return self.original is not self.module

    def __post_init__(self) -> None:
        self.leaves = [visit for visit in self.visits if visit.is_leaf]
        nodes = [visit for visit in self.visits if not visit.is_leaf]
        self.modules = [visit for visit in nodes if is_module(visit.node)]
        is_shared = any(isinstance(visit.node, OpenShared) for visit in nodes)
        tree = closed_copy(self.module) if is_shared else self.module
        self.structure = jtu.tree_structure(tree)


def roots_among(
    reached: Sequence[BaseModule], originals: dict[int, BaseModule]
) -> list[Root]:
    """The modules among `reached` that are not inside another one, each once.

    `originals`: the module that a stand-in stands for, by the `id` of the stand-in.
    """
    roots: list[Root] = []
    inside: set[int] = set()
    for module in reached:
        if id(module) in inside:
            continue
        place = get_place(module)
        visits = walk(module, place.path, place.context)
        root = Root(module, place, visits, originals.get(id(module), module))
        below = {id(visit.node) for visit in root.modules}
        # A closure may lead to a part before an argument leads to the whole.
        roots = [x for x in roots if id(x.module) not in below] + [root]
        inside |= below
    return roots


def pour(module: BaseModule, values: Iterator[Any]) -> None:
    """Put leaves, in the order of flattening, into a module and the modules inside it.

    Owned modules stay the objects that they are. All other nodes are rebuilt, so that a
    list that the caller holds, too, does not change.
    """

    def put(x: Any) -> Any:
        if is_owned(x):
            pour(x, values)
            return x
        return next(values)

    fields = module.__dict__
    for name in dynamic_names(type(module)):
        if name in fields:
            new = fields[name]
            if eqx.is_array(new):  # as most are: `tree_map` is slow for one leaf
                new = next(values)
            else:
                new = jtu.tree_map(put, new, is_leaf=is_owned)
            object.__setattr__(module, name, new)


# --- Stand-ins: modules that a transform reaches as an argument and through its
# function.
#
# A transform treats the modules in its function and its closure in one way (shared,
# carried, mapped by kind), and those among its arguments in another (sliced, mapped
# over an axis). One module may come both ways, but one object cannot hold a slice and
# the whole at the same time. So in the body the argument is a copy, the *stand-in*,
# and the closure keeps the original. Writes to the stand-in go to the original after
# the transform.
#
# For parameters, which are only read, this is what JAX does: an argument and a
# closure are two values. State is different: if it is written one way and read or
# written the other way, it would have two values at once. That is an error, and
# `Twice` finds it.


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


# --- Arguments and outputs: what JAX would trace, what may not be given, their names.


def check_given(*arguments: Any) -> None:
    """Raise `ValueError` if an argument has one stateful module in two places.

    In the trace they would be two modules. Owned modules are exempt: they are not
    flattened, and stay the objects that they are.
    """
    for tree in arguments:
        if not (is_array(tree) or owned_in(tree)):
            check_not_shared(tree)


def check_all_initialized(models: list[Any]) -> None:
    """Raise `NotInitializedError`, which names the place, if a model is not ready."""
    for x in models:
        if getattr(x, "__func__", None) is not Module.init:
            check_initialized(x)


def why_not_called(f: Any, *args: Any) -> str | None:
    """Why `f` cannot be called with these arguments, as far as its signature says."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # it has none
        return None
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(error)
    return None


def positional_names(f: Any) -> list[str]:
    """The names of the positional parameters of `f`, if it has a signature."""
    while isinstance(f, Transform):
        f = f.f
    if isinstance(f, eqx.Partial):  # into which `inspect` does not look
        f = ft.partial(f.func, *f.args, **f.keywords)
    try:
        found = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return []
    last = inspect.Parameter.POSITIONAL_OR_KEYWORD  # or a kind before it
    return [p.name for p in found if p.kind <= last]


def argument_name(argument: int | str, below: KeyPath, names: list[str]) -> str:
    """A leaf of an argument, given by position or by name, as `model.layers[0].w`."""
    if isinstance(argument, int):
        is_named = argument < len(names)
        argument = names[argument] if is_named else f"args[{argument}]"
    return f"{argument}{jtu.keystr(below)}"


def is_mappable(visit: Visit) -> bool:
    """Whether JAX would trace a leaf: an array, or a number outside of a module."""
    return is_array(visit.node) or (
        visit.context.owner is None and eqx.is_array_like(visit.node)
    )


def is_traced(tree: Any) -> Any:
    """For each leaf of an argument or of an output, whether JAX would trace it.

    Owned modules count as leaves, and are never traced: the roots take care of them.
    """
    flags = [is_mappable(visit) for visit in leaves(tree)]
    traced = [not is_owned(x) and flag[0] for x, flag in by_entry(tree, flags)]
    return jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_owned), traced)


# --- Copies of functions that hold other modules: for `es.jit` and `es.vmap`.
#
# A module that no scope owns belongs to the caller, and cannot be swapped in place:
# another thread may be using it. So where a transform has to give such a module other
# values, it runs a copy of the function instead. Only the function that is
# transformed, and what it closes over, is ever copied; a function that is an argument
# or a field stays the object that it is.


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """Something on the way from a function to the modules that it holds.

    `refs` says what a copy has in place of each of `below`: the node of this number,
    the value `~ref` if negative, or the same object if `None`.
    """

    x: Any
    below: list[tuple[Any, Any]]  # as `held` lists it
    above: "list[tuple[Node, Any]]"  # the nodes that hold it, and its key there
    number: int | None = None  # among the nodes that are copied
    refs: list[int | None] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        name, node = "", self
        while node.number:  # up to the function, which has number 0
            node, key = node.above[0]
            name = step(node.x, key) + name
        return name.removeprefix(".")


class Opened:
    """A function, and what a copy of it may hold in place of its modules.

    `values` are those modules, and what lies in one container with them. It is the
    function itself if JAX sees all of them (`is_copied` is false).
    """

    def __init__(self, f: Any):
        self.f = f
        self.values: list[Any] = [f]
        self.nodes = _nodes(f)
        self.is_copied = any(map(_hides, self.nodes))
        if self.is_copied:
            self._find_values()

    def _find_values(self) -> None:
        self.values = []
        numbers = {id(node.x): node.number for node in self.nodes}
        known: dict[int, int] = {}
        for node in self.nodes:
            for _, x in node.below:
                if _is_free(x):  # once, so that it is one module in a copy, too
                    ref = ~known.setdefault(id(x), len(self.values))
                elif type(x) not in ATOMS and id(x) in numbers:
                    ref = numbers[id(x)]
                else:  # a setting beside a module may change together with it
                    is_beside = type(node.x) is not types.FunctionType
                    ref = ~len(self.values) if is_beside else None
                if ref == ~len(self.values):
                    self.values.append(x)
                node.refs.append(ref)

    @ft.cached_property
    def tree(self) -> Any:
        """The values as a pytree, in which each has its name."""
        if not self.is_copied:
            return self.f
        names: list[str] = []
        for node in self.nodes:
            for (key, _), ref in zip(node.below, node.refs, strict=True):
                if ref == ~len(names):
                    names.append((node.name + step(node.x, key)).removeprefix("."))
        return _Values(tuple(names), self.values)

    def copy(self, tree: Any) -> "Copy":
        """The function, which holds what `tree` has."""
        return Copy(self, tree)


class _Values(NamedTuple):
    """Values by name, as a pytree. Two may have one name."""

    names: tuple[str, ...]
    values: list[Any]


jtu.register_pytree_with_keys(
    _Values,
    lambda x: ([*zip(map(jtu.GetAttrKey, x.names), x.values, strict=True)], x.names),
    lambda names, values: _Values(names, [*values]),
)


def _nodes(f: Any) -> list[Node]:
    """The nodes that lead to a module, and the containers inside these, numbered."""
    if not held(f):  # a function without a closure, or a model: at each call
        return []
    nodes: dict[int, Node] = {}
    leading: list[Node] = []
    todo: list[tuple[Any, list[tuple[Node, Any]]]] = [(f, [])]
    while todo:  # no recursion: what a function holds may be a long chain
        x, above = todo.pop()
        if id(x) in nodes:
            nodes[id(x)].above += above
        elif (below := held(x)) is not None:
            node = nodes[id(x)] = Node(x, below, above)
            todo += [
                (y, [(node, k)]) for k, y in reversed(below) if type(y) not in ATOMS
            ]
            if type(x) is eqx.Partial:  # which is a module, whatever it holds
                leading.append(node)
        elif _is_free(x):
            leading += [node for node, _ in above]
    while leading:
        node = leading.pop()
        if node.number is not None:
            continue
        node.number = 0
        leading += [outer for outer, _ in node.above]
        if type(node.x) is not types.FunctionType:
            inside = [nodes.get(id(y)) for _, y in node.below]
            leading += [child for child in inside if child and _is_container(child.x)]
    found = [node for node in nodes.values() if node.number is not None]
    for number, node in enumerate(found):
        node.number = number
    return found


def _is_free(x: Any) -> bool:
    return is_model(x) and not is_owned(x)


def _is_container(x: Any) -> bool:
    return not callable(x) and type(x) is not types.CellType


def _hides(node: Node) -> bool:
    """Whether JAX does not see what lies below."""
    return isinstance(node.x, (types.FunctionType, types.MethodType, ft.partial))


class Copy:
    """A copy of a function, `f`, for a transform to run.

    Functions that share a cell or a container share the copy of it. Functions may lead
    back to themselves, so it takes two steps: cells, lists, dicts and functions are
    made empty, and filled when all are there. Tuples, methods and partials cannot be
    filled later; they are made of their parts, and form no circle among themselves.
    """

    def __init__(self, opened: Opened, tree: Any):
        self.f = tree
        self.made: dict[int, Any] = {}
        # Cells, lists and dicts, each with its contents when the call begins.
        self.given: list[tuple[Node, Any, list[Any]]] = []
        if opened.is_copied:
            self.nodes, self.values = opened.nodes, tree.values
            self.f = self._new(0, opened.f)
            for node in self.nodes:
                self._fill(node, self._new(node.number, node.x))
            pairs = [*zip(self.values, opened.values, strict=True)]
            pairs += [(self.made[i], node.x) for i, node in enumerate(self.nodes)]
            self.originals = {id(new): x for new, x in pairs}

    def _new(self, ref: int | None, x: Any) -> Any:
        """The object in place of `x` in the copy; it may still be empty."""
        if ref is None:
            return x
        if ref < 0:
            return self.values[~ref]
        if ref not in self.made:
            self.made[ref] = self._make(self.nodes[ref])
        return self.made[ref]

    def _below(self, node: Node) -> list[tuple[Any, Any]]:
        below = zip(node.refs, node.below, strict=True)
        return [(key, self._new(ref, x)) for ref, (key, x) in below]

    def _make(self, node: Node) -> Any:
        x, cls = node.x, type(node.x)
        if cls is types.CellType:
            return types.CellType()
        if cls is list or cls in DICTS:
            return copy.copy(x)
        if cls is types.FunctionType:
            closure = zip(node.refs, x.__closure__ or (), strict=False)
            new = types.FunctionType(
                x.__code__,
                x.__globals__,
                closure=tuple(self._new(ref, cell) for ref, cell in closure),
            )
            new.__dict__ = x.__dict__  # the caller sees what is counted there
            for name in ft.WRAPPER_ASSIGNMENTS:
                setattr(new, name, getattr(x, name))
            return new
        below = [child for _, child in self._below(node)]
        if cls is types.MethodType:
            return types.MethodType(*below)
        if cls in PARTIALS:
            f, args, keywords = below
            new: Any = cls(f, *args, **keywords)
            if cls is not eqx.Partial:
                new.__dict__.update(x.__dict__)
            return new
        if isinstance(x, Transform):
            return x.of(*below)
        return with_children(x, below)

    def _fill(self, node: Node, new: Any) -> None:
        """The second step."""
        if type(new) is types.FunctionType:
            defaults = self._below(node)[len(new.__closure__ or ()) :]
            by_position = len(node.x.__defaults__ or ())
            new.__defaults__ = tuple(child for _, child in defaults[:by_position])
            new.__kwdefaults__ = dict(defaults[by_position:])
        elif type(new) in (types.CellType, list, *DICTS):
            _put(new, self._below(node))
            self.given.append((node, new, _contents(new)))

    def _original(self, x: Any) -> Any:
        """The caller's object in place of a part of the copy."""
        if type(x) is types.MethodType:  # each look-up makes another one
            return types.MethodType(*map(self._original, (x.__func__, x.__self__)))
        return self.originals.get(id(x), x)

    def finish(self, out: Any) -> Any:
        """The output of the call, with the caller's functions in place of copies.

        The call may have put something into what it holds: that goes to the caller's,
        too, as if there were no copy. Raises `TraceError` if it is a module, which
        would come out only when the function is traced; and if other code, which has
        the caller's, has changed something there meanwhile.
        """
        for node, new, before in self.given:
            outside = [x for _, x in held(node.x) or ()]
            if not identical(outside, [x for _, x in node.below]):
                raise TraceError(_CHANGED_OUTSIDE.format(node.name))
            if identical(after := _contents(new), before):
                continue
            if not identical(models_in(after), models_in(before)):
                raise TraceError(_CHANGED.format(node.name))
            _put(node.x, [(k, self._original(y)) for k, y in held(new) or ()])
        if not self.made:
            return out
        return jtu.tree_map(lambda x: self._original(x) if callable(x) else x, out)


def _contents(x: Any) -> list[Any]:
    keys = [*x] if isinstance(x, dict) else []
    return keys + [child for _, child in held(x) or ()]


def _put(x: Any, below: list[tuple[Any, Any]]) -> None:
    """Fill a cell, a list or a dict."""
    if type(x) is types.CellType:
        if below:
            ((_, x.cell_contents),) = below
        else:  # the call has deleted the name
            del x.cell_contents
    elif type(x) is list:
        x[:] = [child for _, child in below]
    else:
        x.clear()
        x.update(below)


_CHANGED: Final = """`{0}` was changed by a function under `es.jit` or `es.vmap` that \
has it from outside. What a transform changes there is lost: it runs a copy of the \
function, and runs it once. Take it as an argument, and return the new one:

    @es.jit
    def step({0}, x):
        ...
        return {0}"""


_CHANGED_OUTSIDE: Final = """`{0}` was changed while a function under `es.jit` or \
`es.vmap` that has it from outside was running, by code that has it in another way: \
through a global name or an object, say. The transform runs a copy of the function, \
which does not see that. Take `{0}` as an argument, and return the new one."""


# --- Structure that `init` makes inside a transform.
#
# A trace has a fixed set of inputs and outputs, and a call of `init` may change the
# very structure of a module in it. So the structure leaves the trace beside the
# arrays, with a note for each leaf: the position that it had before, if it had one,
# and otherwise its value.


class Rebuilt(NamedTuple):
    """The structure of a root after the call, and where its leaves come from."""

    structure: Any
    positions: list[int | None]  # before the call; `None`: the leaf is new
    static: list[Any]  # in the places of new leaves that are not arrays


MADE_ONCE: Final = """`{}` is made by `init` in one {}, and each of them needs an \
array of its own. Initialize the modules one by one, and stack them:

    keys = jax.random.split(key, n)
    layers = eqx.filter_vmap(lambda key: Layer().init(key, x))(keys)"""


def take_apart(
    i: int, root: Root, before: Snapshot, after: Snapshot
) -> tuple[Snapshot, Rebuilt | None, Values, dict[Slot, Visit]]:
    """Take apart what a root has become: the leaves that it had, and all that is new.

    New arrays are numbered by their positions in the new structure. The last result
    says of each where it is.
    """
    pairs = zip(before.leaves, after.leaves, strict=False)
    if after.structure == before.structure and all(
        same(x, y) or (is_array(x) and is_array(y)) for x, y in pairs
    ):
        return after, None, {}, {}
    known, arrays, new = list(before.leaves), {}, {}
    position = {visit.path: k for k, visit in enumerate(root.leaves)}
    result = Rebuilt(after.structure, [], [])
    place = root.place
    for j, visit in enumerate(leaves(after.tree(), place.path, place.context)):
        k, x = position.get(visit.path), visit.node
        if not is_array(x):
            k = None
        elif k is not None and is_array(known[k]):
            known[k] = x
        else:
            k = None
            # The visit leaves the trace, and must not take a tracer with it.
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            arrays[i, j], new[i, j] = x, visit._replace(node=like)
        result.positions.append(k)
        result.static.append(None if is_array(x) else x)
    return before._replace(leaves=known), result, arrays, new


def put_together(i: int, root: Root, result: Rebuilt, arrays: Values) -> None:
    """Give a root, or what it stands for, the structure and the leaves of a result."""
    now = jtu.tree_leaves(root.original)
    values = [
        now[k] if k is not None else arrays.get((i, j), static)
        for j, (k, static) in enumerate(
            zip(result.positions, result.static, strict=True)
        )
    ]
    _merge(root.original, jtu.tree_unflatten(result.structure, values))
    own(root.original, root.place.scope, root.place.path, root.place.context)


def _merge(root: BaseModule, tree: BaseModule) -> None:
    """Make `root` what `tree` is. The `es.Module`s in it keep their identity.

    A closure over one of them goes on seeing that object.
    """
    old = {visit.path: visit.node for visit in modules_in(root)}
    staying: dict[int, BaseModule] = {}
    for visit in reversed(list(modules_in(tree))):  # children first
        fields = jtu.tree_map(
            lambda x: staying.get(id(x), x),
            dict(fields_of(visit.node)),
            is_leaf=lambda x: id(x) in staying,
        )
        node = old.get(visit.path)
        if type(node) is type(visit.node) and is_owned(node):
            staying[id(visit.node)] = node
        else:
            node = visit.node
        node.__dict__.update(fields)


@jtu.register_static
class Static:
    """Takes a static value out of a trace, as a part of the output's treedef."""

    def __init__(self, value: Any):
        self.value = value


class Made(NamedTuple):
    """What `init` has made in a trace: new arrays, and the rest, which is static.

    The rest is, for each root that is another now, a `Rebuilt`; and for each array a
    `Visit` of its shape.
    """

    arrays: Values
    rest: Static


class Ran(NamedTuple):
    """The result of a call in a trace: its output, its writes, and what it sowed.

    - `sown`: for each scope, the values by name.
    - `made`: while initializing, what was missing before.
    """

    out: Any
    written: Values
    sown: list[Sown]
    made: Made | None = None

    def news(self) -> dict[Slot, Visit]:
        """The new arrays that `init` has made."""
        return {} if self.made is None else self.made.rest.value[1]


class Lifted:
    """The owned modules that one lifted call reaches, and all their leaves.

    - `reached`: the modules, once for each place where one is reached.
    - `roots`: the outermost of them, each once.
    - `values`: the leaves of all roots.
    - `writable`: those of `values` that are arrays which the call may write.

    `stand_ins` are among the arguments; writes to one go to the original. With
    `may_initialize` an argument may be a model that the call itself initializes.
    """

    def __init__(
        self,
        functions: Any,
        *arguments: Any,
        stand_ins: Sequence[StandIn] = (),
        may_initialize: bool = False,
    ):
        self.given = functions, arguments
        self.in_function = owned_in(functions)
        # The arguments may be functions, too, and may lead to the same modules.
        self.reached = [*self.in_function, *owned_in(arguments)]
        # There may be several scopes: `es.mutable` calls nest, and a function may reach
        # modules of an outer one.
        scopes = [get_place(module).scope for module in self.reached]
        # Equinox's own modules, whose calls may be observed, do not lead to a scope.
        scopes += OBSERVING.get().values()
        self.scopes = list({id(scope): scope for scope in scopes}.values())
        with alone(self.scopes):
            originals = {id(x.module): x.original for x in stand_ins}
            self.roots = roots_among(self.reached, originals)
        if not self.roots and not may_initialize:
            check_all_initialized(jtu.tree_leaves(self.given, is_leaf=is_model))
        self.values: Values = {
            (i, k): visit.node
            for i, root in enumerate(self.roots)
            for k, visit in enumerate(root.leaves)
        }
        # Nothing new can be made in a loop or a branch, whose structure is fixed. While
        # `init` runs, transforms therefore first call their function without a trace.
        self.is_initializing = any(scope.is_initializing for scope in self.scopes)
        has_twice = stand_ins and not self.is_initializing
        self.twice = Twice(self.roots, self.writable) if has_twice else Twice([], {})

    @ft.cached_property
    def writable(self) -> Values:
        # Cached, and not worked out for each call: the kinds of all leaves are asked.
        # NumPy arrays are constants here (`_collect.enter`), which may be shapes.
        return {
            (i, k): visit.node
            for i, root in enumerate(self.roots)
            for k, visit in enumerate(root.leaves)
            if is_array(visit.node) and not isinstance(visit.node, np.ndarray)
            if root.place.scope.allows(visit.kind)
        }

    def name(self, slot: Slot) -> str:
        """The name of a leaf in the model."""
        i, k = slot
        return self.roots[i].leaves[k].name

    @ft.cached_property
    def _slots(self) -> dict[int, list[Slot]]:
        """The slots of each module in the roots, in the order of its leaves."""
        return {
            id(x.module): [(i, k) for k in range(x.start, x.stop)]
            for i, root in enumerate(self.roots)
            for x in extents(root.visits)
        }

    def slots(self, module: Any) -> list[Slot]:
        """The slots of an owned module that is a root, or inside one."""
        return self._slots[id(module)]

    def fill(self, tree: Any, new: Iterable[Any]) -> tuple[Any, Values]:
        """`tree` with other leaves. Those of owned modules come as values by slot."""
        new, values = iter(new), {}

        def put(x: Any) -> Any:
            if not is_owned(x):
                return next(new)
            values.update((slot, next(new)) for slot in self.slots(x))
            return x

        return jtu.tree_map(put, tree, is_leaf=is_owned), values

    def split(self, out: Any) -> tuple[Any, Any]:
        """The arrays that a call has computed, and the rest of its output.

        Arrays from outside that the call only returns do not pass through the trace,
        which would make new arrays of them. So a module that is returned still has its
        own parameters, and may be assigned: for a scope they are unchanged.
        """
        outside = {id(x) for x in self.values.values()}
        computed = jtu.tree_map(
            lambda x, traced: traced and id(x) not in outside, out, is_traced(out)
        )
        return eqx.partition(out, computed)

    def run(self, values: Values, call: Callable[[], Any]) -> Ran:
        """Run `call()` in the active trace, while the roots hold these values.

        This is surprisingly subtle; three decisions make it work.

        *Contents are swapped.* The obvious way would be to give the function copies
        that hold the values of the trace. That works for arguments, but `lambda x:
        self.layer(x)` holds the object itself, and would go on reading the outer values
        and writing to the outer scope. So the objects keep their identity, and their
        fields change.

        *Contents are restored*, whatever happens. JAX decides how often a function is
        traced: a loop traces its body again if the weak types of the carry have to
        settle, and a function that is passed as two branches is traced only once. So a
        trace must leave nothing behind in the objects, neither its tracers nor its
        writes. The writes are returned, leave the transform as outputs, and `commit`
        writes them, once.

        *Containers are checked.* Restoring a field puts back the list that it held, but
        not what was in the list: a function that has the list from outside may have
        changed it. There is no right way to merge such a change, so it is an error.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(alone(self.scopes))
            inner = {id(scope): scope.inner() for scope in self.scopes}
            for scope in inner.values():
                stack.enter_context(scope)
            stack.enter_context(alone(inner.values()))
            # Entered last, and so left first: the locks are held as long as contents
            # are swapped.
            stack.enter_context(self._restored())
            owned = [self._enter(i, values, inner) for i in range(len(self.roots))]
            self.twice.watch()
            out, after = leave(self._called(call), owned)
        self._check_containers()
        made = None
        if self.is_initializing:
            after, made = self._made([x.before for x in owned], after)
        written = self._written(values, after)
        self.twice.check(written, self.name)
        sown = [inner[id(scope)].sown for scope in self.scopes]
        return Ran(out, written, sown, made)

    def _made(
        self, before: list[Snapshot], after: list[Snapshot]
    ) -> tuple[list[Snapshot], Made]:
        """The snapshots of the old leaves only, and all that `init` has made."""
        known = []
        results: dict[int, Rebuilt] = {}
        arrays: Values = {}
        news: dict[Slot, Visit] = {}
        for i, root in enumerate(self.roots):
            old, result, made, new = take_apart(i, root, before[i], after[i])
            known.append(old)
            if result is not None:
                results[i] = result
                arrays |= made
                news |= new
        return known, Made(arrays, Static((results, news)))

    def _written(self, values: Values, after: list[Snapshot]) -> Values:
        """The leaves that differ from `values`; `ValueError` if one is not an array."""
        written = {}
        for i, new in enumerate(after):
            for k, x in enumerate(new.leaves):
                if same(old := values[i, k], x):
                    continue
                if is_array(old) and is_array(x):
                    written[i, k] = x
                else:
                    shown = self.name((i, k)), show(old), show(x)
                    raise ValueError(_NOT_AN_ARRAY.format(*shown))
        return written

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """Put the contents and places of all modules in the roots back at the end."""
        saved = [
            (v.node, dict(v.node.__dict__), get_place(v.node))
            for root in self.roots
            for v in root.modules
        ]
        try:
            yield
        finally:
            for module, fields, place in saved:
                module.__dict__.clear()
                module.__dict__.update(fields)
                set_place(module, place)

    def _enter(self, i: int, values: Values, inner: dict[int, Scope]) -> Owned:
        """Put these values into a root, and give the root to an inner scope.

        The inner scope belongs to the inner trace. With the outer one each write would
        be refused, as a write in another trace.
        """
        root = self.roots[i]
        scope = inner[id(root.place.scope)]
        path, context = root.place.path, root.place.context
        outer = [(visit.node, get_place(visit.node)) for visit in root.modules]
        new = [values[i, k] for k in range(len(root.leaves))]
        pour(root.module, iter(new))
        own(root.module, scope, path, context)
        for module, place in outer:
            # Without a place the module is not owned, and `pour` has replaced it.
            if place is not None:
                # An outer transform wants to know of reads in an inner one, too.
                get_place(module).watches = place.watches
                get_place(module).thread = threading.get_ident()
        return Owned(root.module, Snapshot(new, root.structure), scope, path, context)

    def _called(self, call: Callable[[], Any]) -> Any:
        """`call()`. If it fails at an Initializer, name that one in the error."""
        try:
            return call()
        except (NotInitializedError, TypeError):
            # Not before the call, because a function may close over a lazy model and
            # initialize it.
            if not self.roots:
                check_all_initialized(models_in(self.given))
            raise

    def _check_containers(self) -> None:
        """Raise `TraceError` if `call` changed a container of modules from outside."""
        for root in self.roots:
            modules = [visit.node for visit in root.modules]
            if not identical(modules_below(root.module), modules):
                raise TraceError(_CONTAINER_CHANGED)

    def commit(self, ran: Ran) -> None:
        """Write to the owned modules, and record what was sown: all or nothing."""
        with alone(self.scopes):
            self._commit(ran)

    def _commit(self, ran: Ran) -> None:
        # Everything that can raise comes first. If a transform of JAX lies between the
        # scope and us, the values are its tracers and must not reach the modules, none
        # of them: an `except` in user code would otherwise see a model half written.
        for i, k in ran.written:
            scope = self.roots[i].place.scope
            if not scope.is_here:
                raise TraceError(trace_message(scope, self.name((i, k))))
        sown = [
            (scope.sown, key, carried_out(scope, key, values))
            for scope, kept in zip(self.scopes, ran.sown, strict=True)
            for key, values in kept.items()
        ]
        by_root: dict[int, dict[int, Any]] = {}
        for (i, k), x in ran.written.items():
            by_root.setdefault(i, {})[k] = x
        for i, new in by_root.items():
            # To the original, which for a stand-in is another module than the root.
            original, scope = self.roots[i].original, self.roots[i].place.scope
            old = jtu.tree_leaves(original)
            pour(original, (new.get(k, x) for k, x in enumerate(old)))
            scope.written[id(original)] = original, self.name((i, next(iter(new))))
        # After the writes, since new leaves shift the positions of the others.
        if ran.made is not None:
            results = ran.made.rest.value[0]
            # Stand-ins last: another root may hold what one stands for, as it was.
            for i in sorted(results, key=lambda i: self.roots[i].is_stand_in):
                put_together(i, self.roots[i], results[i], ran.made.arrays)
        for kept, key, values in sown:
            kept.setdefault(key, []).extend(values)


_NOT_AN_ARRAY: Final = """`{0}` was `{1}`, and was written inside a transform: it is \
now `{2}`. Only arrays come out of a transform, so other state has to keep its value \
there. Make it an array,

    phase: es.State = "cold"    # wrong
    phase: es.State = 0         # right

or write it outside of the transform."""

_CONTAINER_CHANGED: Final = """A list or a dictionary of modules was changed inside a \
transform, by a function that has it from outside. The transform puts the modules back \
as they were, but not what is in such a container. Replace it instead of writing into \
it:

    layers[0], layers[1] = layers[1], layers[0]     # wrong
    self.layers = [self.layers[1], self.layers[0]]  # right"""
