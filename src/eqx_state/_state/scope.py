"""The mutable scope: which modules may be written, and for how long.

A scope owns private copies of modules. Each owned `es.Module` stores an `Ownership`
beside its fields. A module without an `Ownership` cannot be written, whatever scopes
are open around the code.

A scope records the trace in which it was opened. A write in a different trace would
leak the tracers of that trace, and is an error.
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
from .._tree.observe import Observer, OBSERVING, tag
from .._tree.walk import copy_tree, is_array, modules_in, name_of, Visit, walk
from .._typing import KeyPath


# --- `equinox.nn.Shared` inside a scope: its call returns the scope's own modules.
#
# `eqx.nn.Shared` stores a tied node once, leaves placeholders ("holes" here) at its
# other positions, and on each call builds the full tree with `eqx.tree_at`. That copies
# every module in it, and the scope does not own the copies, so they could not be
# written.
#
# Instances in a private copy therefore change their class to `ScopedShared`. Its call
# rebuilds only the containers and modules that lead to a hole, and reuses everything
# else: a tied module is one object at all its positions, and can be written through
# each of them. When the scope closes, `closed_copy` restores the class, and with it the
# treedef.


@ft.cache
def _hole_type() -> Any:
    """The class of Equinox's placeholder for a tied node, which is private."""
    return type(eqx.nn.Shared("tied", lambda x: x, lambda x: x).pytree)


def _is_hole(x: Any) -> bool:
    return isinstance(x, _hole_type())


def _is_whole(x: Any) -> bool:
    return not any(map(_is_hole, jtu.tree_leaves(x, is_leaf=_is_hole)))


class ScopedShared(eqx.nn.Shared):
    """An `eqx.nn.Shared` in a scope."""

    def __call__(self) -> Any:
        """The tree, with the tied nodes at all their positions."""
        # `where` returns nodes, but not their positions. First put a new hole at each
        # position, whose `id` identifies it. In both `tree_map`s a node without a hole
        # below is a leaf, so it is not copied.
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
    """Make `node` a `ScopedShared` if it is an `eqx.nn.Shared` with `es.Module`s."""
    if type(node) is eqx.nn.Shared and any(modules_in(node)):
        object.__setattr__(node, "__class__", ScopedShared)


def closed_copy(tree: Any) -> Any:
    """A copy that no scope owns, with `eqx.nn.Shared` instead of `ScopedShared`."""
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
    """Whether this thread has an open scope."""
    return threading.get_ident() in [*OPEN_SCOPES.values()]


# The observers that record sown values. Each entry has the key of an observer, the path
# of a part of the scope's model, and the path of the same part in the observer's model.
Reports = tuple[tuple[Hashable, KeyPath, KeyPath], ...]

# The sown values by `sow.Key`. An `OrderedDict`, because JAX sorts the keys of a dict,
# and the order is a part of the result.
Sown = OrderedDict[Any, list[Any]]


class Scope:
    """Permission to write arrays of some kinds, in one trace and thread, until closed.

    - `observer`: intercepts the calls of modules, and records values in `sown`.
    - `reports`: the observers that record the sown values of modules in this scope.
    - `written`: the modules that were written, with the name of a written field.
    - `outer_dtypes`: inside a `cast`, for the path of each array that was cast, its
        dtype outside.
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

    def check_thread(self) -> None:
        """Raise `RuntimeError` in any thread but the one that opened the scope."""
        if self.is_open and self.thread != threading.get_ident():
            raise RuntimeError(_OTHER_THREAD)

    @property
    def is_here(self) -> bool:
        """Whether the scope's trace is active, so that it may store values."""
        return self.trace == trace_state()

    def close(self) -> None:
        """Reject all later writes."""
        self.is_open = False
        # The modules refer back to the scope. Break the cycle, so that they are freed
        # at once instead of by the garbage collector.
        self.written.clear()
        OPEN_SCOPES.pop(id(self), None)

    def __enter__(self) -> Self:
        OPEN_SCOPES[id(self)] = self.thread
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
    def cache_key(self) -> Any:
        """Hashable; equal for scopes in which a call has the same trace."""
        return (
            self.kinds,
            self.reports,
            self.observer and self.observer.key,
            None if self.outer_dtypes is None else tuple(self.outer_dtypes.items()),
        )

    def note_created(self, module: BaseModule, name: str, old: Any) -> None:
        """Record a field that was missing. Only an `InitScope` does this."""

    def is_changing(self, kind: type | None) -> bool:
        """Whether arrays of this kind may change in the scope, so are not constants."""
        return kind is not None and issubclass(kind, self.kinds)

    def allows(self, kind: type | None) -> bool:
        """Whether an array of this kind (`None`: any other leaf) may be written."""
        return self.is_changing(kind)

    def accept(self, old: Any, value: Any, path: KeyPath, context: Context) -> Any:
        """The value to store when `value` replaces `old`."""
        if is_array(old):  # the common case
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
    """The visited leaves, with copies of the caller's NumPy arrays.

    Arrays that the scope may write become JAX arrays, because `self.n += 1` would
    change a NumPy array in place. Constants remain NumPy arrays, because code may use
    them as shapes; their copies are read-only.
    """

    def copy(visit: Visit) -> Any:
        if not is_constant(visit, scope):
            return as_jax(visit.node, visit.name)
        x = visit.node.copy()
        x.flags.writeable = False
        return x

    return [
        copy(visit) if isinstance(visit.node, np.ndarray) else visit.node
        for visit in visits
        if visit.is_leaf
    ]


def is_constant(visit: Visit, scope: Scope) -> bool:
    """Whether an array is a NumPy array that stays one, see `own_arrays`."""
    if not isinstance(visit.node, np.ndarray):
        return False
    return not (scope.is_changing(visit.kind) and is_numeric(visit.node.dtype))


@dataclasses.dataclass(slots=True)
class Ownership:
    """The scope that owns a module, and the module's path and context."""

    scope: Scope
    path: KeyPath
    context: Context


_OTHER_THREAD: Final = """This thread wrote state, or ran a transform of `es`, in a \
scope of `es.mutable` that a different thread has opened. A scope and its private copy \
belong to one thread. Open a scope in each thread:

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
                tag(visit.node, visit.name, scope.observer)
            if is_module(visit.node):
                set_ownership(visit.node, Ownership(scope, visit.path, visit.context))
    return visits


def is_owned(x: Any) -> bool:
    """Whether `x` is an `es.Module` that an open scope owns."""
    if not is_module(x):
        return False
    ownership = ownership_of(x)
    return ownership is not None and ownership.scope.is_open


def disown(tree: Any, visits: list[Visit]) -> Any:
    """`tree` with each owned module replaced by a frozen snapshot.

    `visits`: a walk of `tree`.
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
