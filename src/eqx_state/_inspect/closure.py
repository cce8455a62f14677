"""The names of the arrays that a function closes over, for `es.audit`."""

import contextlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from .._transforms.transform import Bound, is_bound_method, layer_of
from .._tree.base import keystr
from .._tree.context import children, is_leaf
from .._tree.keys import is_typed
from .._tree.walk import is_array, is_numpy


_INSTALLED: Final = tuple(
    sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")
)


def wrappers(f: Any) -> Iterator[Any]:
    """A function, and what its transforms, partials and wrappers contain."""
    while f is not None:
        yield f
        layer = layer_of(f)
        f = getattr(f, "__wrapped__", None) if layer is None else layer.inner


def arrays_in(f: Any, classes: Iterable[type]) -> list[tuple[str, Any]]:
    """The arrays that a function closes over, also by the functions that it calls.

    They have names such as `model.weight`. `classes`: those of the models that the
    function is given.
    """
    found: list[tuple[str, Any]] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no `id` is reused
    todo = [("", f), *(("", cls) for cls in classes)]
    while todo:
        name, x = todo.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if is_array(x):
            found.append((name, x))
        else:
            todo += _below(name, x)
    return found


def is_constant(x: Any, constant: Any) -> bool:
    """Whether a constant of a jaxpr is an array, or JAX's copy of a NumPy array."""
    if x is constant:
        return True
    if not is_numpy(x) or x.shape != np.shape(constant) or is_typed(constant):
        return False
    return np.array_equal(x, constant)


def _below(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """The objects that `x` contains or refers to, with their names."""
    if (layer := layer_of(x)) is not None:
        yield name, layer.inner
        is_bound = is_bound_method(x) or isinstance(x, Bound)
        yield from (("self" if is_bound else name, y) for y in layer.args)
        yield from layer.keywords.items()
    elif hasattr(x, "__wrapped__"):  # such as `jax.jit(f)`
        yield name, x.__wrapped__
    elif isinstance(x, dict):  # JAX may not be able to sort the keys
        yield from ((f"{name}[{key!r}]", y) for key, y in x.items())
    elif not is_leaf(x):
        yield from ((f"{name}{keystr((key,))}", y) for key, y in children(x) or ())
    elif isinstance(x, types.FunctionType):
        if not _is_of_library(x):
            yield from _captured(x)
    elif isinstance(x, type):
        if not _is_of_library(x):
            yield from (("", y) for y in vars(x).values() if callable(y))
    elif not isinstance(x, types.ModuleType) and not _is_of_library(type(x)):
        values = dict(getattr(x, "__dict__", {}))
        yield from ((f"{name}.{key}", y) for key, y in values.items())


def _captured(f: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that a function names, and its closure."""
    names = dict.fromkeys(_names_in(f.__code__))
    yield from ((name, f.__globals__[name]) for name in names if name in f.__globals__)
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            yield name, cell.cell_contents


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:  # the functions inside
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _is_of_library(x: Any) -> bool:
    """Whether a function or a class is installed, and so not the user's own."""
    module = sys.modules.get(str(x.__module__))
    file = getattr(module, "__file__", None)
    is_ours = str(x.__module__).partition(".")[0] == "eqx_state"
    return is_ours or file is not None and str(file).startswith(_INSTALLED)
