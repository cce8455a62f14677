"""The names of modules in profiles: each call of an `es.Module` is a named scope."""

import functools as ft
import types
from typing import Any, Final

import jax
import jax.tree_util as jtu

from .._tree.base import keystr, ownership_of


# The class attribute for the function that names the calls of a class. In a tuple,
# because `@beartype` replaces all functions of a class that it decorates.
_NAMES_CALLS: Final = "_eqx_state_names_calls"


def name_calls(cls: Any) -> None:
    """Run the `__call__` that a class defines in a `jax.named_scope`.

    If a transform decorates it, it remains the transform, with methods like `lower`.
    """
    call = vars(cls).get("__call__")
    if not isinstance(call, types.FunctionType):
        return

    @ft.wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:  # `@beartype` looks behind these
        try:
            if named not in getattr(type(args[0]), _NAMES_CALLS, ()):
                return call(*args, **kwargs)  # `super().__call__(x)`
            with jax.named_scope(_name_of(args[0])):
                return call(*args, **kwargs)
        except Exception as error:
            # Without this frame, which would be between any two layers.
            frames = error.__traceback__
            error.__traceback__ = frames and frames.tb_next
            raise

    cls.__call__ = named
    setattr(cls, _NAMES_CALLS, (named,))


def _name_of(module: Any) -> str:
    """`blocks[3]`, the last step of the path of an owned module; else its class."""
    name, ownership = "", ownership_of(module)
    for key in reversed(() if ownership is None else ownership.path):
        if isinstance(key, jtu.GetAttrKey):
            return key.name + name
        name = keystr((key,)) + name
    return name or type(module).__name__
