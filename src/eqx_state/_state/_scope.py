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
from typing import Any, ClassVar, Final, Self

import jax.tree_util as jtu

from .._compat import trace_state
from .._tree._base import BaseModule, get_place, is_module, OPEN_SCOPES, set_place
from .._tree._context import Context, ROOT
from .._tree._walk import name_of, Visit, walk
from .._typing import KeyPath
from ._fit import fit
from ._nn_shared import closed_copy, open_shared, OpenShared


Kinds = tuple[type, ...]


def is_any_open() -> bool:
    """Whether any module may be owned by a scope now."""
    return bool(OPEN_SCOPES)


# What modules have sown, by name; JAX sorts a dictionary, but not this one.
Sown = OrderedDict[str, list[Any]]


class Scope:
    """Where writes are allowed: which kinds, and in which trace, until it is closed.

    `captures`: whether what is sown is kept, in `sown`, by name.
    """

    # Whether it is the scope of `init`, in which the structure may change.
    is_initializing: ClassVar[bool] = False

    def __init__(self, kinds: Kinds, captures: bool = False):
        self.kinds = kinds
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

    def inner(self) -> "Scope":
        """A scope like this one, for the trace of a transform inside it."""
        return Scope(self.kinds, self.captures)

    def allows(self, kind: type | None) -> bool:
        """Whether an array of this kind may be written; `None` for anything else."""
        return kind is not None and issubclass(kind, self.kinds)

    def accept(self, old: Any, value: Any, path: KeyPath, context: Context) -> Any:
        """What is stored when `value` is written in the place of `old`."""
        return fit(old, value, name_of(path))


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


def disown(tree: Any, visits: list[Visit]) -> Any:
    """`tree` with a frozen snapshot in place of each module that a scope has owned.

    `visits`: what a walk of it has found.
    """

    def owned(x: Any) -> bool:
        if is_module(x):
            return get_place(x) is not None
        return isinstance(x, OpenShared)

    if not any(owned(visit.node) for visit in visits if not visit.is_leaf):
        return tree
    return jtu.tree_map(
        lambda x: closed_copy(x) if owned(x) else x, tree, is_leaf=owned
    )
