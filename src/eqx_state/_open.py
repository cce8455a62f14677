"""Functions as pytrees: the modules that a function holds become nodes.

JAX takes a function for a leaf. What it closes over, its defaults, the object of a
bound method and the arguments of a partial would stay hidden from a transform.
"""

import functools as ft
import types
from typing import Any, Final

import jax.tree_util as jtu

from ._base import is_eqx_module
from ._scope import is_owned
from ._transform import Transform


@jtu.register_pytree_with_keys_class
class Opened:
    """A function as a pytree: what it holds by name, and what to put that into.

    `origin` is the function, or else the class of a bound method or of a partial.
    """

    def __init__(self, origin: Any, held: dict[str, Any]):
        self.origin = origin
        self.held = held

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        children = [(jtu.GetAttrKey(name), x) for name, x in self.held.items()]
        return children, (self.origin, tuple(self.held))

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return list(self.held.values()), (self.origin, tuple(self.held))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Opened":
        origin, names = aux
        return cls(origin, dict(zip(names, children, strict=True)))


def open_function(f: Any, memo: dict[int, Any] | None = None) -> Any:
    """`f` as a pytree in which the modules that it closes over are nodes.

    Looks into cells, defaults, partials and bound methods. What holds no module stays
    as it is, and so do owned modules, whose identity matters; two functions that refer
    to each other are not looked through.
    """
    # Each function is opened once; one that closes over itself stays as it is there.
    memo = {} if memo is None else memo

    def open_leaf(x: Any) -> Any:
        if id(x) in memo:
            return memo[id(x)]
        memo[id(x)] = x
        if (held := _held(x)) is None:
            return x
        opened = {name: open_function(y, memo) for name, y in held.items()}
        if isinstance(x, types.FunctionType):
            # The others are not rebuilt: a list or a `nonlocal` of the caller's stays.
            opened = {name: y for name, y in opened.items() if _holds_module(y)}
        if _holds_module(opened):
            origin = x if isinstance(x, types.FunctionType) else type(x)
            memo[id(x)] = Opened(origin, opened)
        return memo[id(x)]

    return jtu.tree_map(open_leaf, f, is_leaf=_is_opaque)


def _is_opaque(x: Any) -> bool:
    """A node that is looked into by us, or not at all, but not by JAX."""
    return is_owned(x) or isinstance(x, jtu.Partial)  # its function is no child of it


def _held(f: Any) -> dict[str, Any] | None:
    """What a callable holds, by name; `None` if it is not one to look into."""
    if isinstance(f, types.FunctionType):
        cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        held = {name: _contents(cell) for name, cell in cells}
        held |= _defaults(f) | (f.__kwdefaults__ or {})
        return {name: x for name, x in held.items() if _is_pytree(x)}
    if isinstance(f, types.MethodType):
        return {"__func__": f.__func__, "__self__": f.__self__}
    if isinstance(f, ft.partial):
        return {"func": f.func, "args": f.args, "keywords": f.keywords}
    return None


def _is_pytree(x: Any) -> bool:
    """Not so are dicts whose keys have no order, and what contains itself."""
    try:
        jtu.tree_structure(x)
    except Exception:
        return False
    return True


def _defaults(f: types.FunctionType) -> dict[str, Any]:
    defaults = f.__defaults__ or ()
    names = f.__code__.co_varnames[: f.__code__.co_argcount]
    return dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))


def _holds_module(tree: Any) -> bool:
    """Whether there is a module, the function it may be in not being looked into."""
    found: list[Any] = []

    def stop(x: Any) -> bool:
        # A transform is no model: what counts is whether its function holds one.
        if is_eqx_module(x) and not isinstance(x, Transform):
            found.append(x)
        return bool(found)

    jtu.tree_leaves(tree, is_leaf=stop)
    return bool(found)


def reaches_module(f: Any) -> bool:
    """Whether `open_function` may find a module in a function: quick, for each call.

    Where there is very much to look through, it may.
    """
    seen: set[int] = set()
    todo: list[Any] = [f]
    while todo:
        x = todo.pop()
        cls = type(x)
        if cls in _ATOMS or id(x) in seen:
            continue
        seen.add(id(x))
        if cls is types.FunctionType:
            todo += map(_contents, x.__closure__ or ())
            todo += x.__defaults__, x.__kwdefaults__
        elif cls is types.MethodType:
            todo += x.__self__, x.__func__
        elif isinstance(x, (tuple, list)):
            todo += x
        elif isinstance(x, dict):
            todo += x.values()
        elif isinstance(x, ft.partial):
            todo += x.func, x.args, x.keywords
        elif isinstance(x, Transform):
            todo.append(x.f)
        elif is_eqx_module(x) or not jtu.all_leaves((x,)):
            return True
        if len(seen) + len(todo) > _MANY:
            return True
    return False


_ATOMS: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MANY: Final = 300


def close(tree: Any) -> Any:
    """Functions again, which hold what is in the tree now."""

    def close_leaf(x: Any) -> Any:
        if not isinstance(x, Opened):
            return x
        held = {name: close(y) for name, y in x.held.items()}
        if isinstance(x.origin, types.FunctionType):
            return _make_function(x.origin, held)
        if issubclass(x.origin, types.MethodType):
            return x.origin(*held.values())
        return x.origin(held["func"], *held["args"], **held["keywords"])

    return jtu.tree_map(
        close_leaf, tree, is_leaf=lambda x: isinstance(x, Opened) or is_owned(x)
    )


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later in the function around
        return None


def _make_function(f: types.FunctionType, held: dict[str, Any]) -> types.FunctionType:
    """A function like `f` that holds other things under these names."""
    itself = types.CellType()  # where `f` calls itself, the new one does, too
    cells = [
        types.CellType(held[name])
        if name in held
        else itself
        if _contents(cell) is f
        else cell
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    ]
    new = types.FunctionType(
        f.__code__,
        f.__globals__,
        f.__name__,
        tuple((_defaults(f) | held)[name] for name in _defaults(f)) or None,
        tuple(cells),
    )
    itself.cell_contents = new
    kwdefaults = f.__kwdefaults__ or {}
    new.__kwdefaults__ = {n: held.get(n, x) for n, x in kwdefaults.items()} or None
    new.__dict__.update(f.__dict__)
    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(new, name, getattr(f, name))
    return new
