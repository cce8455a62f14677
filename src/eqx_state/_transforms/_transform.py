"""What the transforms of `es` are: callables made of a callable, and pytrees."""

import functools as ft
from typing import Any, ClassVar, Final, TYPE_CHECKING

import equinox as eqx
import jax.tree_util as jtu

from .._compat import boundary
from .._tree._base import is_eqx_module


class Transform(eqx.Module):
    """A callable made of a callable `f`: a pytree, and a decorator for methods."""

    f: Any
    # Whether a call makes a private copy of its own, and returns the new model.
    threads: ClassVar[bool] = False
    # Whether a call takes our frames out of the tracebacks of errors by itself.
    hides_frames: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in cls.__dict__ and not cls.hides_frames:
            cls.__call__ = boundary(cls.__call__)

    if not TYPE_CHECKING:
        # Equinox makes a pytree of each bound method, and while it does, warns of an
        # `f` such as `jax.jit(model)`.
        __getattribute__ = object.__getattribute__

    @property
    def __wrapped__(self) -> Any:
        return self.f

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        # `self` belongs to the innermost function: to a transform in between it would
        # be an argument, which `es.vmap` maps and `argnums=` counts.
        if isinstance(self.f, Transform):
            return self.of(self.f.__get__(instance, owner))
        return self.of(eqx.Partial(self.f, instance))

    def of(self, f: Any) -> Any:
        """The same transform of another function."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, f=f)
        return new


class Unbound(Transform):
    """The transform `f` of a method, with the object as the first argument."""

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.f.__get__(instance)(*args, **kwargs)

    @staticmethod
    def around(f: Transform) -> "Unbound":
        unbound = object.__new__(Unbound)
        unbound.__dict__.update(f=f)
        return unbound


def wrap(cls: type[Transform], f: Any, **options: Any) -> Any:
    """A transform of `f`, with the name and the documentation of `f`.

    Made without `__init__`, in which Equinox warns of functions such as
    `jax.vmap(model)`: that one cannot be trained is true, but this is not a layer of a
    model.
    """
    if not callable(f):
        name = type(f).__name__
        if is_eqx_module(f):
            raise TypeError(_NOT_CALLABLE.format(name, _method_of(type(f))))
        raise TypeError(_NOT_A_FUNCTION.format(name))
    if cls.threads and isinstance(f, type) and issubclass(f, eqx.Module):
        raise TypeError(_A_CLASS.format(f.__name__))
    transform = object.__new__(cls)
    transform.__dict__.update(f=f, **options)
    if jtu.all_leaves([f]):
        return eqx.module_update_wrapper(transform)
    # Data has no name, and must not be copied; but another transform may have one.
    named = f.__dict__ if is_eqx_module(f) else {}
    names = {name: named[name] for name in ft.WRAPPER_ASSIGNMENTS if name in named}
    transform.__dict__.update(names)
    return transform


def _method_of(cls: type) -> str:
    """The method that may be meant where a module of this class is called."""
    own = [name for name in vars(cls) if not name.startswith("_")]
    return next((name for name in own if callable(getattr(cls, name))), "method")


_NOT_CALLABLE: Final = """A `{0}` cannot be called: its class has no `__call__`. Name \
that method so, or give the one that you mean; its module is threaded and mapped all \
the same:

    es.mutable(model)(x)    # wrong: there is no `{0}.__call__`

    es.mutable(model.{1})(x)    # right"""


_NOT_A_FUNCTION: Final = """A transform was given a `{0}`, which cannot be called. It \
takes a function, a callable module or a bound method. A property is decorated from \
outside:

    @property
    @es.jit
    def norm(self): ..."""

_A_CLASS: Final = """A transform that threads state was given the class `{0}`, and its \
state is that of a model. Make one, and keep what comes back:

    y, model = es.mutable({0})(x)    # wrong

    model = {0}(...)
    y, model = es.mutable(model)(x)    # right"""
