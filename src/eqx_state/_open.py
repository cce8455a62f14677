"""Functions as pytrees: the modules that a function holds become nodes.

JAX takes a function for a leaf. What it closes over, its defaults, the object of a
bound method and the arguments of a partial would stay hidden from a transform.
"""

import dataclasses
import functools as ft
import types
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from ._scope import is_owned


@ft.partial(jtu.register_dataclass, data_fields=["parts"], meta_fields=["origin"])
@dataclasses.dataclass(frozen=True)
class Opened:
    """A function as a pytree: the modules that it holds, and what to put them into.

    `origin` is the function, or else the class of a bound method or of a partial.
    """

    origin: Any
    parts: Any


def open_function(f: Any, memo: dict[int, Any] | None = None) -> Any:
    """`f` as a pytree in which the modules that it closes over are nodes.

    Looks into cells, defaults, partials and bound methods. What holds no module stays
    as it is, and so do owned modules, whose identity matters.
    """
    # Each function is opened once; one that closes over itself stays as it is there.
    memo = {} if memo is None else memo

    def open_leaf(x: Any) -> Any:
        if id(x) in memo:
            return memo[id(x)]
        memo[id(x)] = x
        if isinstance(x, types.FunctionType):
            origin, parts = x, _open_held(x, memo)
        elif isinstance(x, types.MethodType):
            origin, parts = type(x), open_function((x.__func__, x.__self__), memo)
        elif isinstance(x, ft.partial):
            held = (x.func, x.args, x.keywords)
            origin, parts = type(x), open_function(held, memo)
        else:
            return x
        if _holds_module(parts):
            memo[id(x)] = Opened(origin, parts)
        return memo[id(x)]

    return jtu.tree_map(open_leaf, f, is_leaf=is_owned)


def _open_held(f: types.FunctionType, memo: dict[int, Any]) -> list[dict[Any, Any]]:
    """The cells, defaults and keyword defaults of a function that hold modules."""
    cells = {i: _contents(cell) for i, cell in enumerate(f.__closure__ or ())}
    held = (cells, dict(enumerate(f.__defaults__ or ())), f.__kwdefaults__ or {})
    opened = ({k: open_function(x, memo) for k, x in part.items()} for part in held)
    # The others are not rebuilt: a list or a `nonlocal` of the caller's stays the same.
    return [{k: x for k, x in part.items() if _holds_module(x)} for part in opened]


def _holds_module(tree: Any) -> bool:
    """Whether there is a module, the function it may be in not being looked into."""
    found: list[Any] = []

    def stop(x: Any) -> bool:
        if isinstance(x, eqx.Module):
            found.append(x)
        return bool(found)

    jtu.tree_leaves(tree, is_leaf=stop)
    return bool(found)


def close(tree: Any) -> Any:
    """The inverse of `open_function`."""

    def close_leaf(x: Any) -> Any:
        if not isinstance(x, Opened):
            return x
        parts = close(x.parts)
        if isinstance(x.origin, types.FunctionType):
            return _make_function(x.origin, parts)
        if issubclass(x.origin, types.MethodType):
            return x.origin(*parts)
        f, args, keywords = parts
        return x.origin(f, *args, **keywords)

    return jtu.tree_map(
        close_leaf, tree, is_leaf=lambda x: isinstance(x, Opened) or is_owned(x)
    )


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later in the function around
        return None


def _make_function(
    f: types.FunctionType, parts: list[dict[Any, Any]]
) -> types.FunctionType:
    cells, defaults, kwdefaults = parts
    new = types.FunctionType(
        f.__code__,
        f.__globals__,
        f.__name__,
        tuple(defaults.get(i, x) for i, x in enumerate(f.__defaults__ or ())) or None,
        tuple(
            types.CellType(cells[i]) if i in cells else cell
            for i, cell in enumerate(f.__closure__ or ())
        ),
    )
    new.__kwdefaults__ = {**(f.__kwdefaults__ or {}), **kwdefaults} or None
    new.__dict__.update(f.__dict__)
    return new
