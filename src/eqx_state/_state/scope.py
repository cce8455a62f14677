"""The mutable scope: which modules may be written, and for how long.

A scope owns private copies of modules. An `Ownership` is stored beside the fields of
each owned `es.Module`. There is no global stack of scopes: a module without an
`Ownership` cannot be written, whatever scope is open around the code.

A scope remembers the trace in which it was opened. A write in another trace would leak
that trace's tracers, and is an error.
"""

import dataclasses
import functools as ft
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Final, Self

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .._compat import trace_state
from .._tree.base import (
    BaseModule,
    is_eqx_module,
    is_module,
    OPEN_SCOPES,
    ownership_of,
    set_ownership,
)
from .._tree.context import Context, ROOT
from .._tree.dtypes import as_inside, as_jax, fit_leaf, is_numeric
from .._tree.observe import mark, Observer, OBSERVING
from .._tree.walk import copy_tree, is_array, modules_in, name_of, Visit, walk
from .._typing import KeyPath


# --- `equinox.nn.Shared` inside a scope: its call returns the scope's own modules.
#
# `eqx.nn.Shared` stores a tied node once, leaves placeholders ("holes" here) in its
# other places, and on each call builds the full tree with `eqx.tree_at`. That copies
# every module in it, and a copy does not belong to the scope, so it could not be
# written.
#
# So the instances in a private copy change their class to `ScopedShared`. Its call
# rebuilds only the containers and modules that lead to a hole, and uses everything
# else as it is: a tied module is one object in all its places, and can be written
# through any of them. When the scope is left, `closed_copy` changes the class back,
# so that no one outside ever sees the subclass, and the treedef is the old one.


@ft.cache
def _hole_type() -> Any:
    """The class of the placeholder for a tied node, which Equinox does not export."""
    return type(eqx.nn.Shared("tied", lambda x: x, lambda x: x).pytree)


def _is_hole(x: Any) -> bool:
    return isinstance(x, _hole_type())


def _is_whole(x: Any) -> bool:
    return not any(map(_is_hole, jtu.tree_leaves(x, is_leaf=_is_hole)))


class ScopedShared(eqx.nn.Shared):
    """An `eqx.nn.Shared` in a scope."""

    def __call__(self) -> Any:
        """The tree, with the tied nodes in all their places."""
        # This is surprisingly subtle: `where` returns nodes, and does not say where in
        # the tree it found them. So first each place gets a new hole, whose `id` then
        # identifies the place. In both `tree_map`s the nodes without a hole below are
        # leaves, and so are not copied.
        tree = jtu.tree_map(
            lambda x: _hole_type()() if _is_hole(x) else x,
            self.pytree,
            is_leaf=_is_whole,
        )
        holes, nodes = self.where(tree), self.get(self.pytree)
        if _is_hole(holes):
            holes, nodes = [holes], [nodes]
        at = {id(hole): node for hole, node in zip(holes, nodes, strict=True)}
        return jtu.tree_map(lambda x: at.get(id(x), x), tree, is_leaf=_is_whole)


def scope_shared(node: Any) -> None:
    """Make `node` an `ScopedShared` if it is an `eqx.nn.Shared` with `es.Module`s."""
    if type(node) is eqx.nn.Shared and any(modules_in(node)):
        object.__setattr__(node, "__class__", ScopedShared)


def closed_copy(tree: Any) -> Any:
    """A copy that no scope owns, with Equinox's class in place of `ScopedShared`."""
    tree = copy_tree(tree)
    for visit in walk(tree):
        if isinstance(visit.node, ScopedShared):
            object.__setattr__(visit.node, "__class__", eqx.nn.Shared)
    return tree


Kinds = tuple[type, ...]


def is_any_open() -> bool:
    """Whether any scope is open; if not, no module is owned."""
    return bool(OPEN_SCOPES)


def is_open_here() -> bool:
    """Whether this code runs inside a scope: one that this thread has opened."""
    return threading.get_ident() in [*OPEN_SCOPES.values()]


# Who keeps what is sown: the key of an observer, the path of a part of the model that
# it watches, and the path of this part in the observer's own model.
Reports = tuple[tuple[Hashable, KeyPath, KeyPath], ...]

# The values that were sown, by `sow.Key`. An `OrderedDict` because JAX sorts the keys
# of a dict, and the order is a part of the result.
Sown = OrderedDict[Any, list[Any]]


class Scope:
    """Permission to write arrays of certain kinds, in one trace, until it is closed.

    - `observer`: what sees the calls of modules, and keeps values in `sown`.
    - `reports`: the observers that keep what modules of this scope sow.
    - `written`: the modules that were written, and the name of a field that was.
    - `outer_dtypes`: inside of a `cast`, the own dtype of each array that has another
        one here, by path.
    """

    # Whether this is an `InitScope`, in which the structure may change.
    is_initializing: ClassVar[bool] = False

    def __init__(
        self, kinds: Kinds, observer: Observer | None = None, reports: Reports = ()
    ):
        self.kinds = kinds
        self.observer = observer
        self.reports = reports
        self.sown: Sown = OrderedDict()
        self.trace = trace_state()
        self.is_open = True
        self.written: dict[int, tuple[BaseModule, str]] = {}
        self.outer_dtypes: Mapping[KeyPath, Any] | None = None
        self.thread = threading.get_ident()
        OPEN_SCOPES[id(self)] = threading.get_ident()

    def check_thread(self) -> None:
        """Raise `RuntimeError` in any thread but the one that opened the scope."""
        if self.is_open and self.thread != threading.get_ident():
            raise RuntimeError(_OTHER_THREAD)

    @property
    def is_here(self) -> bool:
        """Whether what this code computes may be kept: it is in the scope's trace."""
        return self.trace == trace_state()

    def close(self) -> None:
        """Refuse all writes from now on."""
        self.is_open = False
        # The modules lead back here through their places. Without the cycle they are
        # freed at once, instead of by the garbage collector.
        self.written.clear()
        OPEN_SCOPES.pop(id(self), None)

    def __enter__(self) -> Self:
        if self.observer is not None:
            observing = {**OBSERVING.get(), self.observer.key: self}
            self._token = OBSERVING.set(observing)
        return self

    def __exit__(self, *_: object) -> None:
        if self.observer is not None:
            OBSERVING.reset(self._token)
        self.close()

    def inner(self) -> "Scope":
        """A scope like this one, for the trace of a transform inside it."""
        new = Scope(self.kinds, self.observer, self.reports)
        new.outer_dtypes = self.outer_dtypes
        return new

    @property
    def signature(self) -> Any:
        """Hashable; equal for scopes in which a call is traced alike."""
        return (
            self.kinds,
            self.reports,
            self.observer and self.observer.key,
            None if self.outer_dtypes is None else tuple(self.outer_dtypes.items()),
        )

    def note_created(self, module: BaseModule, name: str, old: Any) -> None:
        """Take note of a field that was missing: see `InitScope`."""

    def is_changing(self, kind: type | None) -> bool:
        """Whether arrays of this kind are meant to change, and are not constants."""
        return kind is not None and issubclass(kind, self.kinds)

    def allows(self, kind: type | None) -> bool:
        """Whether an array of this kind may be written; `None` for anything else."""
        return self.is_changing(kind)

    def accept(self, old: Any, value: Any, path: KeyPath, context: Context) -> Any:
        """The value to store when `value` is written in the place of `old`."""
        if is_array(old):  # most of what is written
            return self.fit_leaf(old, value, path)
        structure = ft.partial(jtu.tree_structure, is_leaf=is_eqx_module)
        if structure(old) != structure(value):
            return value
        return jtu.tree_map_with_path(
            lambda below, a, b: self.fit_leaf(a, b, (*path, *below)),
            old,
            value,
            is_leaf=is_eqx_module,
        )

    def fit_leaf(self, old: Any, new: Any, path: KeyPath) -> Any:
        """`new` in the dtype that `old` has here; `ValueError` if it does not fit."""
        if self.outer_dtypes is not None:
            new = as_inside(old, new, self.outer_dtypes.get(path))
        return fit_leaf(old, new, name_of(path))


def own_arrays(visits: list[Visit], scope: Scope) -> list[Any]:
    """The leaves that were visited, with copies of the caller's NumPy arrays.

    Arrays that the scope may write become JAX arrays, because `self.n += 1` would
    change a NumPy array in place. Constants stay NumPy arrays, since they may be used
    as shapes, and the copies are read-only.
    """

    def copy(visit: Visit) -> Any:
        x = visit.node
        if scope.is_changing(visit.kind) and is_numeric(x.dtype):
            return as_jax(x, visit.name)
        x = x.copy()
        x.flags.writeable = False
        return x

    return [
        copy(visit) if isinstance(visit.node, np.ndarray) else visit.node
        for visit in visits
        if visit.is_leaf
    ]


@dataclasses.dataclass(slots=True)
class Ownership:
    """The position of an owned module: in which scope, and where in its model."""

    scope: Scope
    path: KeyPath
    context: Context


_OTHER_THREAD: Final = """This thread wrote state, or ran a transform of `es`, in a \
scope of `es.mutable` that another thread has opened. A scope and its private copy \
belong to one thread: give each thread a scope of its own,

    threading.Thread(target=lambda: results.append(es.mutable(model)(x)))"""


def own(
    tree: Any, scope: Scope, path: KeyPath = (), context: Context = ROOT
) -> list[Visit]:
    """Give the modules of a private copy to a scope. Returns the visits of a walk."""
    visits = walk(tree, path, context)
    for visit in visits:
        if not visit.is_leaf:
            scope_shared(visit.node)
            if scope.observer is not None:
                mark(visit.node, visit.name, scope.observer)
            if is_module(visit.node):
                set_ownership(visit.node, Ownership(scope, visit.path, visit.context))
    return visits


def is_owned(x: Any) -> bool:
    """Whether `x` is an `es.Module` in a scope that is open."""
    if not is_module(x):
        return False
    place = ownership_of(x)
    return place is not None and place.scope.is_open


def disown(tree: Any, visits: list[Visit]) -> Any:
    """`tree` with a frozen snapshot in place of each module that a scope has owned.

    `visits` are those of a walk of `tree`.
    """

    def owned(x: Any) -> bool:
        if is_module(x):
            return ownership_of(x) is not None
        return isinstance(x, ScopedShared)

    if not any(owned(visit.node) for visit in visits if not visit.is_leaf):
        return tree
    return jtu.tree_map(
        lambda x: closed_copy(x) if owned(x) else x, tree, is_leaf=owned
    )
