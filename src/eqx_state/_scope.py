"""The mutable scope: who may write which field of which module, and what comes out.

A scope owns private copies of modules. Ownership is a `Place` beside the fields of each
owned `es.Module`; nothing is global, and no module knows of a scope that it is not in.
The scope is stamped with the trace in which it was opened: a write in another trace
would leak that trace's tracers, and is an error.
"""

import contextlib
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._base import (
    BaseModule,
    fields_of,
    get_place,
    is_module,
    OPEN_SCOPES,
    set_place,
)
from ._compare import same
from ._compat import has_escaped, trace_state
from ._errors import TraceError
from ._fit import as_jax, fit, fit_leaf, is_numeric, same_type, show
from ._keys import is_key
from ._kinds import kind_name
from ._select import difference
from ._shared import closed_copy, open_shared, OpenShared
from ._strong import NUMBERS, strengthen_field, to_strong
from ._traverse import (
    check_apart,
    Context,
    declared_fields,
    drop_cached,
    flatten_apart,
    is_array,
    KeyPath,
    leaves,
    modules_in,
    name_of,
    ROOT,
    Visit,
    walk,
)


Kinds = tuple[type, ...]


def is_any_open() -> bool:
    """Whether any module may be owned by a scope now."""
    return bool(OPEN_SCOPES)


# What modules have sown, by name; JAX sorts a dictionary, but not this one.
Sown = OrderedDict[str, list[Any]]


class Scope:
    """Where writes are allowed: which kinds, and in which trace, until it is closed.

    `initialise`, when given, marks the scope of `init`, in which everything may be
    written: it is called with each new value and its path, and returns what to store.
    `captures`: whether what is sown is kept, in `sown`, by name.
    """

    def __init__(self, kinds: Kinds, initialise: Any = None, captures: bool = False):
        self.kinds = kinds
        self.initialise = initialise
        self.captures = captures
        self.sown: Sown = OrderedDict()
        self.trace = trace_state()
        self.is_open = True
        self.written: dict[int, tuple[BaseModule, str]] = {}
        self._lock = threading.RLock()
        self._is_transformed = False
        OPEN_SCOPES.add(id(self))

    @contextlib.contextmanager
    def alone(self, transform: bool) -> Iterator[None]:
        """No other thread writes, or runs a transform, in the scope meanwhile.

        A write is waited for. A transform is not: it may itself wait for this thread.
        """
        while not self._lock.acquire(timeout=0.001):
            if self._is_transformed:
                raise RuntimeError(_OTHER_THREAD)
        before, self._is_transformed = self._is_transformed, transform
        try:
            yield
        finally:
            self._is_transformed = before
            self._lock.release()

    def close(self) -> None:
        """From now on nothing can be written."""
        self.is_open = False
        self.written.clear()  # modules, which lead back here: garbage without a cycle
        OPEN_SCOPES.discard(id(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allows(self, kind: type | None) -> bool:
        if self.initialise is not None:
            return True
        return kind is not None and issubclass(kind, self.kinds)


@dataclasses.dataclass(slots=True)
class Watch:
    """Which of these fields of a module have been read."""

    fields: frozenset[str]
    read: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True)
class Place:
    """Where an owned module is.

    While a transform runs, the contents belong to a `thread`, and `watches` are for
    what is read of them.
    """

    scope: Scope
    path: KeyPath
    context: Context
    watches: tuple[Watch, ...] = ()
    thread: int | None = None

    def note_read(self, name: str) -> None:
        """While a transform runs: the field was read, if there is one of that name."""
        if self.thread != threading.get_ident():
            raise RuntimeError(_OTHER_THREAD)
        for watch in self.watches:
            watch.read.add(name)

    def note_all_read(self) -> None:
        """Whoever takes a copy may read everything."""
        for watch in self.watches:
            watch.read |= watch.fields


_OTHER_THREAD: Final = """Two threads are in one scope of `es.mutable`: while one of \
them wrote, or ran a transform of `es`, the other used the same private copy. During a \
transform its modules hold the values of a trace, which belongs to one thread. Use a \
scope in one thread at a time, or give each thread a scope of its own:

    threading.Thread(target=lambda: results.append(es.mutable(model)(x)))"""


def own(
    tree: Any, scope: Scope, path: KeyPath = (), context: Context = ROOT
) -> list[Visit]:
    """Give the modules of a private copy to a scope. Returns what a walk has found."""
    visits = walk(tree, path, context)
    for visit in visits:
        if not visit.is_leaf:
            open_shared(visit.node)
            if is_module(visit.node):
                set_place(visit.node, Place(scope, visit.path, visit.context))
    return visits


def is_owned(x: Any) -> bool:
    """Whether `x` is an `es.Module` in a scope that is open."""
    if not is_module(x):
        return False
    place = get_place(x)
    return place is not None and place.scope.is_open


def disown(tree: Any) -> Any:
    """`tree` with a frozen snapshot in place of each module that a scope has owned."""

    def owned(x: Any) -> bool:
        if is_module(x):
            return get_place(x) is not None
        return isinstance(x, OpenShared)

    if not any(owned(visit.node) for visit in walk(tree) if not visit.is_leaf):
        return tree
    return jtu.tree_map(
        lambda x: closed_copy(x) if owned(x) else x, tree, is_leaf=owned
    )


# --- Writing --------------------------------------------------------------------------


def write(module: BaseModule, place: Place, name: str, value: Any) -> None:
    """`module.name = value` inside a scope."""
    with place.scope.alone(transform=False):
        _write(module, place, name, value)


def _write(module: BaseModule, place: Place, name: str, value: Any) -> None:
    scope, cls = place.scope, type(module)
    where = f"{cls.__qualname__}.{name}"
    key = jtu.GetAttrKey(name)
    path = (*place.path, key)
    full_name = name_of(path)
    if not scope.is_open:
        raise _frozen(
            f"Cannot write `{where}`: the scope of `es.mutable` that owned this module"
            " has closed, and has returned the new model. A module kept from inside"
            " (in a closure, a generator, a thread) is only a snapshot. Write while"
            " the call runs, or call again: `y, model = es.mutable(model)(x)`."
        )
    if scope.trace != trace_state():
        raise TraceError(trace_message(full_name, where))
    context = place.context.enter(module, key)
    if scope.initialise is not None:
        value = scope.initialise(value, path, context)
    field = next((f for f in dataclasses.fields(module) if f.name == name), None)
    if field is None:
        raise _frozen(no_field_message(module, name, value))
    if field.metadata.get("static", False) and scope.initialise is None:
        raise _frozen(
            f"Cannot write `{where}`: a static field is part of the structure of the"
            " tree, which a call cannot change. Declare it `es.State` if it is an"
            " array; modes are switched from outside: `model = model.eval()`."
        )
    old = fields_of(module).get(name)
    if scope.initialise is None and is_array(old) and is_array(value):
        # Most writes: nothing in it is to be looked for, and nothing to be owned.
        new = to_strong(fit_leaf(old, value, full_name))
        _check_kind(old, Visit(path, new, context, True), scope, where)
    else:
        if scope.initialise is None:
            value = fit(old, value, full_name)
        value = strengthen_field(cls, name, value)
        _check_kinds(old, value, path, context, scope, where)
        new = _adopt(value, scope)
        for visit in modules_in(old):  # what was written there is replaced knowingly
            scope.written.pop(id(visit.node), None)
        own(new, scope, path, context)
    object.__setattr__(module, name, new)
    scope.written[id(module)] = module, full_name


def _belongs_to(x: Any, scope: Scope) -> bool:
    place = get_place(x) if is_module(x) else None
    return place is not None and place.scope is scope


def _adopt(value: Any, scope: Scope) -> Any:
    """`value` with copies of the modules that do not belong to `scope` already."""
    if all(v.is_leaf for v in walk(value)):
        return value
    return jtu.tree_map(lambda x: x, value, is_leaf=lambda x: _belongs_to(x, scope))


def _check_kinds(
    old: Any, new: Any, path: KeyPath, context: Context, scope: Scope, where: str
) -> None:
    """Every leaf that differs must be of a kind that the scope allows.

    A module that the scope owns already may move; what comes of it is seen at the end.
    """
    before = {v.path: v.node for v in leaves(old, path, context)}
    moved: KeyPath | None = None
    for visit in walk(new, path, context):
        if moved is not None and visit.path[: len(moved)] == moved:
            continue
        if not visit.is_leaf:
            moved = visit.path if _belongs_to(visit.node, scope) else None
            continue
        _check_kind(before.get(visit.path), visit, scope, where)


def _check_kind(old: Any, visit: Visit, scope: Scope, where: str) -> None:
    if not same(old, visit.node) and not scope.allows(_kind_at(visit)):
        raise _frozen(_kind_message(visit, where, scope, old))


def _kind_at(visit: Visit) -> type | None:
    """The kind of what is, or should be, an array here."""
    return visit.kind if is_array(visit.node) else visit.context.declared


def _kind_message(visit: Visit, where: str, scope: Scope, old: Any) -> str:
    kind, allowed = (
        _kind_at(visit),
        " and ".join(f"`{k.__name__}`" for k in scope.kinds),
    )
    if kind is None:
        what = "an array without a kind" if is_array(visit.node) else "no array"
        return (
            f"Cannot write `{where}`: `{visit.name}` is {what}, and this scope writes "
            f"{allowed}. What a forward pass changes is declared so: "
            f"`{visit.context.field}: es.State`."
        )
    if old is None:
        return (
            f"Cannot write `{where}`: `{visit.name}` is a `{kind.__name__}` that is not"
            " there yet, and a call keeps the structure of the model. Layers that take"
            " their shapes from an input make their arrays in `init`, which returns a"
            " new model:\n\n    model = model.init(42, x)"
        )
    return (
        f"Cannot write `{where}`: `{visit.name}` is a `{kind.__name__}`, and this scope"
        f" writes {allowed}. If it is meant, name the kind: `es.mutable(f,"
        f" kinds={kind_name(kind)})`, or `kinds=es.TreePart` for all. If it is no"
        f" `{kind.__name__}`, declare what it is: `{visit.context.field}: es.State`."
    )


def no_field_message(module: BaseModule, name: str, value: Any) -> str:
    """The error for a field that is assigned and that the class does not declare."""
    cls = type(module).__qualname__
    place = get_place(module)
    is_forward = place is not None and place.scope.initialise is None
    declared = _annotation_for(value, is_forward)
    constant = ""
    if type(value) in NUMBERS and not is_forward:
        constant = f" (or, for a constant, `{name}: {type(value).__name__}`)"
    return (
        f"Cannot write `{cls}.{name}`: `{cls}` has no field `{name}`. Declare it in the"
        f" class body, `{name}: {declared}`{constant}. {declared_fields(module)}"
    )


def _annotation_for(value: Any, is_forward: bool) -> str:
    """How to declare a field that is to hold `value`.

    `is_forward`: a forward pass assigns it, so it is state. Elsewhere training is the
    usual reason to hold an inexact array.
    """
    visits = walk(value)
    if not all(visit.is_leaf for visit in visits):
        return _class_name(type(value))  # a module, or a container of modules
    held = [visit.node for visit in visits]
    if held and all(map(is_key, held)):
        return "es.Rng"
    is_inexact = [is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x in held]
    if held and all(is_inexact) and not is_forward:
        return "es.Parameter"
    if isinstance(value, str):
        return "str"
    return "Callable" if callable(value) else "es.State"


def _class_name(cls: type) -> str:
    """A class as users write it: `eqx.nn.Linear`, `es.nn.BatchNorm`, `dict`."""
    library, _, _ = cls.__module__.partition("._")
    aliases = {"equinox": "eqx.", "eqx_state": "es."}
    first, dot, rest = library.partition(".")
    prefix = f"{aliases[first]}{rest}{dot}" if first in aliases else ""
    return prefix + cls.__name__


def _frozen(message: str) -> dataclasses.FrozenInstanceError:
    return dataclasses.FrozenInstanceError(message)


def trace_message(name: str, where: str = "", verb: str = "write") -> str:
    """What to say when state is written in a trace that it cannot leave."""
    field = f"`{where}` (`{name}`)" if where else f"`{name}`"
    return (
        f"Cannot {verb} {field} here: this code runs inside a JAX"
        " transform, which the mutable scope lies outside of. What is computed here is"
        " a tracer, and it would leak. Use the transform of `es`, which carries state"
        " through and is called as its namesake in JAX:\n\n"
        "    jax.vmap(lambda x: self.layer(x))(xs)    # wrong\n"
        "    es.vmap(lambda x: self.layer(x))(xs)     # right\n\n"
        "Likewise `es.scan`, `es.while_loop`, `es.fori_loop`, `es.cond`, `es.switch`,"
        " `es.checkpoint`, `es.jit`; for `jax.grad` it is `es.value_and_grad`, with the"
        " model as its argument. Or call `es.mutable` inside the transform, and return"
        " the new model from it."
    )


# --- Sowing ---------------------------------------------------------------------------


def sow(module: BaseModule, name: str, value: Any) -> None:
    """Note a value in the scope, if it captures."""
    place = get_place(module)
    if place is None or not (place.scope.is_open and place.scope.captures):
        return
    if not isinstance(name, str):
        raise TypeError(
            f"`{type(module).__qualname__}.sow`: the name is no string, but a"
            f" `{type(name).__name__}`. It comes first: `self.sow('name', value)`."
        )
    full_name = name_of((*place.path, jtu.GetAttrKey(name)))
    if place.scope.trace != trace_state():
        raise TraceError(trace_message(full_name, verb="sow"))
    values = jtu.tree_leaves(value)
    if any(map(has_escaped, values)):
        raise TraceError(
            f"Cannot sow `{full_name}`: it is a tracer of a JAX transform that is over."
            " Sow it where it is computed, under the transform of `es`."
        )
    if not all(map(_is_sowable, values)):
        shown = eqx.tree_pformat(value, short_arrays=True)
        raise TypeError(
            f"Cannot sow `{full_name}`: arrays, numbers and pytrees of them come out of"
            f" a transform, and this is `{shown}`."
        )
    value = jtu.tree_map(
        lambda x: x if isinstance(x, jax.Array) else as_jax(x, full_name), value
    )
    place.scope.sown.setdefault(full_name, []).append(value)


def _is_sowable(x: Any) -> bool:
    is_numpy = isinstance(x, (np.ndarray, np.generic))
    return is_numeric(x.dtype) if is_numpy else eqx.is_array_like(x)


# --- Leaving --------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """A tree at one moment: its leaves, and its structure."""

    leaves: list[Any]
    structure: Any

    @staticmethod
    def of(tree: Any) -> "Snapshot":
        return Snapshot(*jtu.tree_flatten(tree))

    @staticmethod
    def of_model(tree: Any) -> "Snapshot":
        """Of what a caller gives; `ValueError` if one stateful module is in it twice.

        In the tree that is made of it there is nothing to be seen of that any more.
        """
        return Snapshot(*flatten_apart(tree))

    def tree(self) -> Any:
        """A new tree of these leaves, which belongs to no scope."""
        return jtu.tree_unflatten(self.structure, self.leaves)


def own_arrays(visits: list[Visit], scope: Scope) -> list[Any]:
    """The leaves that were visited, with copies of the caller's NumPy arrays.

    What the scope may write becomes a JAX array, for which `self.n += 1` makes a new
    one. Constants stay NumPy arrays, which may be used as shapes, and are read-only.
    """

    def copy(visit: Visit) -> Any:
        x = visit.node
        if scope.allows(visit.kind) and is_numeric(x.dtype):
            return as_jax(x, visit.name)
        x = x.copy()
        x.flags.writeable = False
        return x

    return [
        copy(visit) if isinstance(visit.node, np.ndarray) else visit.node
        for visit in visits
        if visit.is_leaf
    ]


def collect(
    tree: Any,
    before: Snapshot,
    scope: Scope,
    place: Place | None = None,
    visits: list[Visit] | None = None,
) -> Snapshot:
    """The private copy `tree` after the call, checked against what was `before` it.

    `visits` is what a walk of `tree` has found, if there was one. Both snapshots have
    `eqx.nn.Shared` as Equinox has it.
    """
    path, context = ((), ROOT) if place is None else (place.path, place.context)
    visits = walk(tree, path, context) if visits is None else visits
    check_apart(visits)
    if any(isinstance(v.node, OpenShared) for v in visits if not v.is_leaf):
        tree = closed_copy(tree)
    structure = jtu.tree_structure(tree)
    if structure != before.structure and drop_cached(tree):
        structure = jtu.tree_structure(tree)
    leaves = [visit for visit in visits if visit.is_leaf]
    if structure == before.structure:
        old = before.leaves
    elif scope.initialise is not None:
        # Only `init` changes a structure.
        known = {v.path: v.node for v in walk(before.tree(), path, context)}
        old = [known.get(visit.path) for visit in leaves]
    else:
        raise ValueError(
            "A call keeps the structure of the model, and this one changed it,"
            f" {difference(before.tree(), closed_copy(tree))}. Give every field its"
            " final structure when the model is made: an array of zeros in place of"
            " `None`, a list of its final length, the mode by `train` and `eval` from"
            " outside, what takes its shape from an input by `model = model.init(42,"
            " x)`."
        )
    pairs = zip(leaves, old, strict=True)
    return Snapshot([_settle(visit, x, scope) for visit, x in pairs], structure)


def check_written(visits: list[Visit], scope: Scope) -> None:
    """What was written must be in what the call leaves, given as walks have found it.

    A container may have lost it, say.
    """
    inside = {id(visit.node) for visit in visits if not visit.is_leaf}
    for key, (module, name) in scope.written.items():
        if key not in inside and get_place(module).scope is scope:
            raise ValueError(
                f"`{name}` was written, and its module is no longer in the model, so"
                " that what was written cannot come out. Either it was replaced or"
                " taken out of a container: write to the new one, and replace"
                " containers instead of changing them, `self.layers ="
                " [*self.layers[:-1], new]`. Or it came back from a loop and was not"
                " assigned: `self.cell, ys = es.scan(step, self.cell, xs)`."
            )


def _settle(visit: Visit, old: Any, scope: Scope) -> Any:
    new = visit.node
    if same(old, new):
        return new
    if has_escaped(new):
        raise TraceError(
            f"`{visit.name}` holds a tracer of a JAX transform that is over: something"
            " was written into a container inside it. Replace the container instead of"
            " writing into it, and use the transform of `es`, which carries state"
            " through:\n\n"
            '    self.stats["a"] = x                     # wrong\n'
            '    self.stats = {**self.stats, "a": x}     # right'
        )
    if not scope.allows(_kind_at(visit)):
        raise _frozen(_kind_message(visit, visit.name, scope, old))
    if scope.initialise is None:
        new = fit_leaf(old, new, visit.name)
    if isinstance(new, (np.ndarray, np.generic)) and is_numeric(new.dtype):
        new = as_jax(new, visit.name)  # a copy: the writer may go on changing it
    new = to_strong(new)
    if scope.initialise is None and is_array(old) and not same_type(old, new):
        raise ValueError(
            f"`{visit.name}` was {show(old)} and is now {show(new)}. State keeps its"
            " shape and dtype, so that a step is compiled once. Give it its final"
            " shape and dtype when the model is made, or convert what is written:"
            " `value.astype(self.field.dtype)`."
        )
    return new
