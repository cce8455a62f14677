"""Functions as pytrees: the modules that a function holds become nodes.

JAX takes a function for a leaf. What it closes over, its defaults, the object of a
bound method and the arguments of a partial would stay hidden from a transform.
"""

import functools as ft
import types
from collections.abc import Callable
from typing import Any, Final

import jax.tree_util as jtu

from ._base import is_eqx_module
from ._compare import identical
from ._errors import TraceError
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


def open_function(f: Any) -> Any:
    """`f` as a pytree in which the modules that it closes over are nodes.

    Looks into cells, defaults, partials and bound methods. What holds no module stays
    as it is, and so do owned modules, whose identity matters.
    """
    return _Opening().open(f)


class _Opening:
    """Functions are opened once, those that refer to one another once on each way."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}
        self.around: set[int] = set()  # the functions that are being opened

    def open(self, tree: Any) -> Any:
        return jtu.tree_map(self.open_leaf, tree, is_leaf=_is_opaque)

    def open_leaf(self, x: Any) -> Any:
        if id(x) in self.memo or id(x) in self.around or (held := _held(x)) is None:
            return self.memo.get(id(x), x)
        if not isinstance(x, types.FunctionType):
            return self.opened(x, type(x), {n: self.open(y) for n, y in held.items()})
        self.around.add(id(x))
        opened = {name: self.open(y) for name, y in held.items()}
        # The others are not rebuilt: a list or a `nonlocal` of the caller's stays.
        kept = {n: y for n, y in opened.items() if _holds_module(y) or self.refers(y)}
        self.around.remove(id(x))
        return self.opened(x, x, kept)

    def opened(self, x: Any, origin: Any, held: dict[str, Any]) -> Any:
        refers = self.refers(held)
        new = Opened(origin, held) if refers or _holds_module(held) else x
        if not refers:
            self.memo[id(x)] = new
        return new

    def refers(self, tree: Any) -> bool:
        """Whether it holds a function around it: a leaf, which `close` replaces."""
        leaves = jtu.tree_leaves(tree, is_leaf=is_model)
        return any(id(x) in self.around for x in leaves)


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


def is_model(x: Any) -> bool:
    """Whether `x` is a module, and not a transform, whose function may hold one."""
    return is_eqx_module(x) and not isinstance(x, Transform)


def _holds_module(tree: Any) -> bool:
    """Whether there is a module, the function it may be in not being looked into."""
    found: list[Any] = []

    def stop(x: Any) -> bool:
        if is_model(x):
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


def close(tree: Any) -> tuple[Any, Callable[[], None]]:
    """Functions again, which hold what is in the tree now.

    And a check, for when they have been called: what is put into them is lost.
    """
    closing = _Closing()
    return closing.close(tree, {}), closing.check


class _Closing:
    """Functions that are made, and what they have been given to hold."""

    def __init__(self) -> None:
        # The name, the cell if it is in one, the value, and the modules in that.
        self.held: list[tuple[str, types.CellType | None, Any, list[Any]]] = []

    def check(self) -> None:
        """Raise `TraceError` if a call has put something else there."""
        for name, cell, value, modules in self.held:
            now = value if cell is None else _contents(cell)
            if not identical(_modules(now), modules):
                raise TraceError(
                    f"`{name}` was changed by a function under `es.jit` or `es.vmap`"
                    " that has it from outside. What a transform changes there is lost:"
                    " it runs a copy of the function, and runs it once. Take it as an"
                    " argument, and return the new one:\n\n"
                    "    @es.jit\n"
                    f"    def step({name}, x):\n"
                    "        ...\n"
                    f"        return {name}"
                )

    def close(self, tree: Any, around: dict[int, Any]) -> Any:
        """`tree`, in which functions that are made around it replace the old ones."""

        def close_leaf(x: Any) -> Any:
            if not isinstance(x, Opened):
                return around.get(id(x), x)
            if isinstance(x.origin, types.FunctionType):
                return self.make_function(x.origin, x.held, around)
            held = self.close(x.held, around)
            if issubclass(x.origin, types.MethodType):
                return x.origin(*held.values())
            return x.origin(held["func"], *held["args"], **held["keywords"])

        return jtu.tree_map(
            close_leaf, tree, is_leaf=lambda x: isinstance(x, Opened) or is_owned(x)
        )

    def make_function(
        self, f: types.FunctionType, held: dict[str, Any], around: dict[int, Any]
    ) -> types.FunctionType:
        """A function like `f` that holds other things under these names."""
        names = f.__code__.co_freevars
        old = dict(zip(names, f.__closure__ or (), strict=True))
        cells = {n: types.CellType() if n in held else cell for n, cell in old.items()}
        closure = tuple(cells.values())
        new = types.FunctionType(f.__code__, f.__globals__, f.__name__, None, closure)
        held = {n: self.close(x, {**around, id(f): new}) for n, x in held.items()}
        for name, value in held.items():
            if name in cells:
                cells[name].cell_contents = value
            self.held.append((name, cells.get(name), value, _modules(value)))
        defaults = _defaults(f)
        new.__defaults__ = tuple((defaults | held)[name] for name in defaults) or None
        kwdefaults = f.__kwdefaults__ or {}
        new.__kwdefaults__ = {n: held.get(n, x) for n, x in kwdefaults.items()} or None
        new.__dict__.update(f.__dict__)
        for name in ("__module__", "__qualname__", "__doc__"):
            setattr(new, name, getattr(f, name))
        return new


def _modules(tree: Any) -> list[Any]:
    return [x for x in jtu.tree_leaves(tree, is_leaf=is_model) if is_model(x)]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later in the function around
        return None
