"""What the transforms of `es` are: callables made of a callable, and pytrees."""

import functools as ft
from typing import Any, ClassVar

import equinox as eqx
import jax.tree_util as jtu

from ._base import is_eqx_module


class Transform(eqx.Module):
    """A callable made of a callable `f`: a pytree, and a decorator for methods."""

    f: Any
    # Whether a call makes a private copy of its own, and returns the new model.
    threads: ClassVar[bool] = False

    @property
    def __wrapped__(self) -> Any:
        return self.f

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self.of(eqx.Partial(self.f, instance))

    def of(self, f: Any) -> Any:
        """The same transform of another function."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, f=f)
        return new


def wrap(cls: type[Transform], f: Any, **options: Any) -> Any:
    """A transform of `f`, with the name and the documentation of `f`.

    Made without `__init__`, in which Equinox warns of functions such as
    `jax.vmap(model)`: that one cannot be trained is true, but this is no layer of a
    model.
    """
    transform = object.__new__(cls)
    transform.__dict__.update(f=f, **options)
    if jtu.all_leaves([f]):
        return eqx.module_update_wrapper(transform)
    # Data has no name, and must not be copied; but another transform may have one.
    named = f.__dict__ if is_eqx_module(f) else {}
    names = {name: named[name] for name in ft.WRAPPER_ASSIGNMENTS if name in named}
    transform.__dict__.update(names)
    return transform
