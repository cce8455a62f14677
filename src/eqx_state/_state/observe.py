"""Observing calls: an `Observer` intercepts calls of modules in a private copy.

Python looks up `__call__` on the class, and patching a class would affect all models
and threads. Instead, each observed module of the private copy becomes an instance of a
generated subclass, whose `__call__` calls the `Observer`. The module's name in the
model is static data of the instance, a *tag*, which survives flattening: the call of
the copy in `eqx.filter_vmap(self.layer)(xs)` is observed, too.

The treedefs in the caches of JAX and `es.jit` contain tags, so a tag must not refer to
an observer, which it would keep alive. A module stores its tag under the observer's
key, and `OBSERVING` maps this key to the observer's innermost scope.
"""

import abc
import dataclasses
import functools as ft
import types
from collections.abc import Hashable, Mapping
from contextvars import ContextVar
from typing import Any, Final

import equinox as eqx

from .._compat import MISSING
from .._tree.base import OnlyInScope
from .._tree.unbuilt import fields_of
from .._tree.walk import all_modules, copy_tree
from .._typing import PyTree, Tree


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """The key of an observer. Observers with equal keys share compiled programs.

    `missed` has the names of modules whose outputs could not leave a JAX transform. It
    is compared, too: otherwise a new observer could run such a program without knowing
    that outputs are missing.
    """

    parts: tuple[Hashable, ...]
    missed: dict[str, None] = dataclasses.field(default_factory=dict, hash=False)


class Observer(abc.ABC):
    """Selects modules, and handles their calls."""

    key: ProgramKey

    @abc.abstractmethod
    def select(self, name: str, module: Any) -> Hashable:
        """The tag of a module, which `called` receives; `None` if not selected."""

    @abc.abstractmethod
    def called(self, scope: Any, tag: Any, call: Any, /, *args: Any, **kw: Any) -> Any:
        """Return the output of `call(*args, **kw)`, or a replacement.

        The module is the first argument: a call of a copy of it calls that copy.

        `scope` is the observer's innermost scope, that of the active transform. To get
        a value out of the trace, the observer has to sow it there.
        """

    def check(self, model: PyTree) -> None:  # noqa: B027 (optional)
        """Raise an error if the observer does not fit the model."""


# The innermost scope of each observer that is active in this thread. The scope that
# owns the module is not enough: `jax.vmap(self.linear)` calls a copy, which no scope
# owns.
OBSERVING: Final[ContextVar[Mapping[Hashable, Any]]] = ContextVar(
    "observing", default=types.MappingProxyType({})
)

_TAGS: Final = "_eqx_state_tags"


def tags_of(module: Any) -> dict[Hashable, Any]:
    """The tags of a module by the key of the observer, the outermost first."""
    return dict(fields_of(module).get(_TAGS, ()))


def can_be_observed(module: Any) -> bool:
    """Whether a module can be called and returns an output."""
    # The call of an `eqx.nn.Shared` returns a part of the model.
    return callable(module) and not isinstance(module, eqx.nn.Shared)


def tag(module: Any, name: str, observer: Observer) -> None:
    """Tag a module of a private copy if the observer selects it under this name."""
    if not can_be_observed(module):
        return
    tags = {key: x for key, x in tags_of(module).items() if key != observer.key}
    if (new := observer.select(name, module)) is not None:
        tags[observer.key] = new
    if tags != tags_of(module):
        _set_tags(module, tags)


def untagged(tree: Tree, key: Hashable) -> Tree:
    """`tree` without the tags of the observer with this key.

    If there are such tags, the result is a copy.
    """

    def tagged(tree: PyTree) -> list[Any]:
        # A module that the call has made by `dataclasses.replace` has no tags.
        observed = [x for x in all_modules(tree) if isinstance(x, _Quiet)]
        return [x for x in observed if key in (tags_of(x) or (key,))]

    if not tagged(tree):
        return tree
    tree = copy_tree(tree)
    for node in tagged(tree):
        _set_tags(node, {k: x for k, x in tags_of(node).items() if k != key})
    return tree


def _set_tags(module: Any, tags: dict[Hashable, Any]) -> None:
    cls = type(module)
    if issubclass(cls, _Quiet):
        cls = cls.__bases__[0]
    fields = fields_of(module)
    # A copy of an instance without tags has `MISSING` in their place.
    for name in [k for k, x in fields.items() if k == _TAGS or x is MISSING]:
        del fields[name]
    if tags:
        cls = _observed_class(cls)
        fields[_TAGS] = tuple(tags.items())
    object.__setattr__(module, "__class__", cls)


class _Quiet(OnlyInScope):
    """Skips the user's `__init_subclass__`, which may add the class to a registry."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def _eqx_state_leave(self) -> None:
        _set_tags(self, {})


# Not a leak: JAX's registry keeps every pytree class alive anyway.
_OBSERVED: Final[dict[type, type]] = {}


def _observed_class(cls: type) -> type:
    """The subclass of a module class whose calls are observed."""
    # Not `functools.cache`: two threads that create the subclass at once would use two,
    # and the layers of one list would have different structures.
    return _OBSERVED.get(cls) or _OBSERVED.setdefault(cls, _new_observed_class(cls))


def _new_observed_class(cls: Any) -> Any:
    """A subclass of a module class whose calls are observed."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        # In `type(layer).__call__(other, x)`, only `layer` may be observed.
        if not isinstance(self, observed):
            return cls.__call__(self, *args, **kwargs)
        call = inherited
        observing = OBSERVING.get()
        for key, tag in tags_of(self).items():
            if key in observing:
                scope = observing[key]
                call = ft.partial(scope.observer.called, scope, tag, call)
        return call(self, *args, **kwargs)

    def inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
        base: Any = super(observed, self)
        return base.__call__(*args, **kwargs)

    # `es.nn.Stacked` inspects the signature: does the layer take a key?
    ft.update_wrapper(__call__, cls.__call__, updated=())
    body = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {_TAGS: Any},
        _TAGS: eqx.field(default=(), init=False, repr=False, static=True),
    }
    # Python only lets `__class__` change to a class whose first base is the old one. It
    # looks up `__init_subclass__` in the MRO, so put `_Quiet` before that class there.
    meta = type(cls)
    meta = type(meta.__name__, (meta,), {"mro": _quiet_first})
    observed: Any = meta(cls.__name__, (cls, _Quiet), body)
    return observed


def _quiet_first(cls: Any) -> list[type]:
    own, *others = type.mro(cls)
    return [own, _Quiet, *(base for base in others if base is not _Quiet)]
