"""Observing calls: an `Observer` sees every call of `__call__` in a private copy.

Python looks up `__call__` on the class, and to patch a class would affect every other
model and thread. So in the private copy each observed module gets a subclass of its
class, whose `__call__` asks the `Observer`. The module's name in the model is static
data of the instance, a *mark*, which survives every transform that flattens the module:
the call of the copy in `eqx.filter_vmap(self.layer)(xs)` is observed, too.

JAX and `es.jit` keep treedefs longer than a call lasts, so a mark refers to no object.
It leads to the observer by way of `OBSERVING`.
"""

import abc
import dataclasses
import functools as ft
import types
from collections.abc import Hashable, Mapping
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import equinox as eqx

from .._typing import PyTree
from .base import fields_of
from .walk import copy_tree, walk


_Tree = TypeVar("_Tree")


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """Tells observers apart. Programs traced under one serve others with an equal key.

    `missed` has the names of modules whose outputs could not leave a transform of JAX.
    It counts, because a program with such calls must not serve a new observer, which
    would see nothing there and not know that it missed something.
    """

    parts: tuple[Hashable, ...]
    missed: dict[str, None] = dataclasses.field(default_factory=dict, hash=False)


class Observer(abc.ABC):
    """What to do with the calls of some modules."""

    key: ProgramKey

    @abc.abstractmethod
    def select(self, name: str, module: Any) -> Hashable:
        """The mark of a module, all that `called` has to know; `None`: not observed."""

    @abc.abstractmethod
    def called(self, scope: Any, mark: Any, call: Any, /, *args: Any, **kw: Any) -> Any:
        """The output of `call(*args, **kw)`, or another in its place.

        `scope` is the innermost scope of the observer, that of the active transform. To
        sow there is all that an observer can do with a value: it leaves the trace.
        """

    def check(self, model: PyTree) -> None:  # noqa: B027 (optional)
        """Raise an error if the observer does not fit the model."""


# For each observer that is active in this thread the innermost of its scopes. Why not
# the scope that owns the module? `jax.vmap(self.linear)` calls a copy of a layer of
# Equinox that no scope owns.
OBSERVING: Final[ContextVar[Mapping[Hashable, Any]]] = ContextVar(
    "observing", default=types.MappingProxyType({})
)

_MARKS: Final = "_eqx_state_marks"


def marks_of(module: Any) -> dict[Hashable, Any]:
    """The marks of a module by the key of the observer, that of the outermost first."""
    return dict(fields_of(module).get(_MARKS, ()))


def can_be_observed(module: Any) -> bool:
    """Whether a module can be called and returns an output."""
    # An `eqx.nn.Shared` returns a part of the model.
    return callable(module) and not isinstance(module, eqx.nn.Shared)


def mark(module: Any, name: str, observer: Observer) -> None:
    """Mark a module of a private copy, if it is to be observed under this name."""
    if not can_be_observed(module):
        return
    marks = {key: x for key, x in marks_of(module).items() if key != observer.key}
    if (new := observer.select(name, module)) is not None:
        marks[observer.key] = new
    if marks != marks_of(module):
        _set_marks(module, marks)


def unmarked(tree: _Tree, key: Hashable = None) -> _Tree:
    """`tree` without the marks of one observer, or of all: a copy if there are any."""

    def marked(tree: PyTree) -> list[Any]:
        nodes = [visit.node for visit in walk(tree) if not visit.is_leaf]
        return [x for x in nodes if (marks := marks_of(x)) and key in (None, *marks)]

    if not marked(tree):
        return tree
    tree = copy_tree(tree)
    for node in marked(tree):
        others = {k: x for k, x in marks_of(node).items() if k != key}
        _set_marks(node, {} if key is None else others)
    return tree


def _set_marks(module: Any, marks: dict[Hashable, Any]) -> None:
    cls = type(module)
    if issubclass(cls, _Quiet):
        cls = cls.__bases__[0]
    fields_of(module).pop(_MARKS, None)
    if marks:
        cls = _observed_class(cls)
        fields_of(module)[_MARKS] = tuple(marks.items())
    object.__setattr__(module, "__class__", cls)


class _Quiet:
    """Keeps the user's `__init_subclass__` from running, which may fill a registry."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


# Not a leak: JAX keeps every pytree class forever anyway.
@ft.cache
def _observed_class(cls: Any) -> Any:
    """A subclass of a module class whose calls are observed."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        base: Any = super(observed, self)
        call = base.__call__
        observing = OBSERVING.get()
        for key, mark in marks_of(self).items():
            if key in observing:
                scope = observing[key]
                call = ft.partial(scope.observer.called, scope, mark, call)
        return call(*args, **kwargs)

    # `es.nn.Stacked` looks whether a layer takes a key.
    ft.update_wrapper(__call__, cls.__call__, updated=())
    body = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {_MARKS: Any},
        _MARKS: eqx.field(default=(), init=False, repr=False, static=True),
    }
    # An instance can only change to a class whose first base is its own. Python asks
    # for `__init_subclass__` in the order of the MRO, though, so `_Quiet` comes first
    # there.
    meta = type(cls)
    meta = type(meta.__name__, (meta,), {"mro": _quiet_first})
    observed = meta(cls.__name__, (cls, _Quiet), body)
    return observed


def _quiet_first(cls: Any) -> list[type]:
    own, *others = type.mro(cls)
    return [own, _Quiet, *(base for base in others if base is not _Quiet)]
