"""Names of the leaves of a call, for our errors and for those of JAX.

The key paths are those in `(function, args, kwargs)`.
"""

import inspect
import types
from typing import Any

from .._transforms._arguments import argument_name, positional_names
from .._tree._walk import name_of
from .._typing import KeyPath


def _split(path: KeyPath) -> tuple[int | str | None, KeyPath]:
    """An argument by position or keyword (`None`: the function), and the path in it."""
    which = path[0].idx
    if which == 0:
        return None, path[1:]
    return path[1].idx if which == 1 else path[1].key, path[2:]


def where(path: KeyPath) -> str:
    """A place in a call, for an error of ours."""
    argument, below = _split(path)
    name = f"argument `{argument}`" if isinstance(argument, str) else "the function"
    if isinstance(argument, int):
        name = f"argument {argument}"
    return f"{name}, at `{name_of(below)}`," if below else name


def parameters(f: Any, paths: list[KeyPath]) -> list[str]:
    """The names that JAX would give these leaves if it jitted `f` itself."""
    names = positional_names(f)

    def name(path: KeyPath) -> str:
        argument, below = _split(path)
        if argument is None:
            return name_of(below)
        return argument_name(argument, below, names)

    return [name(path) for path in paths]


def present(run: Any, name: str, origin: Any, names: list[str]) -> None:
    """Let JAX's errors name the user's function and arguments instead of `run`.

    JAX reads the source of a function off what `__wrapped__` leads to, and the names of
    the arguments off the signature. Only the code is needed: `origin` itself would be
    kept alive by its own programs.
    """
    run.__name__ = run.__qualname__ = name
    is_function = isinstance(origin, types.FunctionType)
    source = origin if is_function else origin.__call__  # of an object or of its class
    if (code := getattr(source, "__code__", None)) is not None:
        run.__wrapped__ = types.SimpleNamespace(__name__=name, __code__=code)
    if len(set(names)) == len(names):  # else JAX counts: `arrays[0]`
        kind = inspect.Parameter.POSITIONAL_ONLY
        run.__signature__ = inspect.Signature(
            [inspect.Parameter(_Name(name), kind) for name in names]
        )


class _Name(str):
    """A name that `inspect.Parameter` accepts though it is not an identifier."""

    def isidentifier(self) -> bool:
        return True
