"""What the leaves of a call are called, in our errors and in those of JAX.

The paths are those of `(function, args, kwargs)`.
"""

import contextlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._tree._walk import name_of
from .._typing import KeyPath


def where(path: KeyPath) -> str:
    """A place in a call, as the caller knows it."""
    which, path = path[0].idx, path[1:]
    if which == 0:
        name = "the function"
    elif which == 1:
        name, path = f"argument {path[0].idx}", path[1:]
    else:
        name, path = f"argument `{path[0].key}`", path[1:]
    return f"{name}, at `{name_of(path)}`," if path else name


def parameters(f: Any, paths: list[KeyPath]) -> list[str]:
    """What JAX would call these leaves if it jitted `f` itself."""
    names = []
    with contextlib.suppress(TypeError, ValueError):  # it may have no signature
        found = inspect.signature(f).parameters.values()
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD  # or a kind before it
        names = [p.name for p in found if p.kind <= positional]

    def name(path: KeyPath) -> str:
        which, path = path[0].idx, path[1:]
        if which == 0:
            return name_of(path)
        if which == 2:
            return f"{path[0].key}{jtu.keystr(path[1:])}"
        i = path[0].idx
        return f"{names[i] if i < len(names) else f'args[{i}]'}{jtu.keystr(path[1:])}"

    return [name(path) for path in paths]


def call_it(run: Callable[..., Any], name: str, origin: Any, names: list[str]) -> None:
    """Let JAX's errors name the user's function and arguments instead of `run`.

    JAX looks for the source of a function behind `__wrapped__`, and for the names of
    its arguments in its signature. The function itself is not kept alive.
    """
    run.__name__ = run.__qualname__ = name
    is_function = isinstance(origin, types.FunctionType)
    source = origin if is_function else origin.__call__  # of an object or of its class
    if (code := getattr(source, "__code__", None)) is not None:
        run.__wrapped__ = types.SimpleNamespace(__name__=name, __code__=code)
    if len(set(names)) == len(names):
        kind = inspect.Parameter.POSITIONAL_ONLY
        run.__signature__ = inspect.Signature(
            [inspect.Parameter(_Name(name), kind) for name in names]
        )


class _Name(str):
    """The name of a parameter that may be `model.weight`, too."""

    def isidentifier(self) -> bool:
        return True
