"""What functions hold: modules in closures, defaults, bound methods and partials.

JAX takes a function for a leaf, and what it holds stays hidden from a transform. Every
transform looks through functions for the modules that a scope owns: those are swapped
in place, and no function is touched.
"""

import collections
import functools as ft
import types
from collections.abc import Iterator
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._state._scope import is_any_open, is_owned
from .._tree._base import is_eqx_module
from .._tree._children import children, is_leaf
from ._transform import Transform


ATOMS: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
DICTS: Final = (dict, collections.OrderedDict, collections.defaultdict)
PARTIALS: Final = (ft.partial, jtu.Partial, eqx.Partial)


def is_model(x: Any) -> bool:
    """Whether `x` is a module, and not what merely wraps a function."""
    is_wrapper = type(x) is eqx.Partial or isinstance(x, Transform)
    return is_eqx_module(x) and not is_wrapper


def held(x: Any) -> list[tuple[Any, Any]] | None:
    """The objects that `x` holds one level down, each with its key.

    `None` for a model, an array, or any other object. An instance of a subclass is not
    looked into either: it may hold more than can be copied. A cell is a level of its
    own, since several functions may share it.
    """
    cls = type(x)
    if cls in ATOMS:
        return None
    if cls is types.FunctionType:
        closure, defaults = x.__closure__ or (), x.__defaults__ or ()
        end = x.__code__.co_argcount
        names = x.__code__.co_varnames[end - len(defaults) : end]
        return [
            *zip(x.__code__.co_freevars, closure, strict=True),
            *zip(names, defaults, strict=True),
            *(x.__kwdefaults__ or {}).items(),
        ]
    if cls is types.CellType:
        try:
            return [("", x.cell_contents)]
        except ValueError:  # assigned later in the enclosing function
            return []
    if cls in DICTS:  # also those that JAX cannot sort
        return [*x.items()]
    if cls in (list, tuple):
        return [*enumerate(x)]
    if cls is types.MethodType:
        return [("__func__", x.__func__), ("__self__", x.__self__)]
    if cls in PARTIALS:
        return [(name, getattr(x, name)) for name in ("func", "args", "keywords")]
    if isinstance(x, Transform):
        return [("f", x.f)]
    if is_eqx_module(x) or eqx.is_array(x) or is_leaf(x):
        return None
    try:
        return [*(children(x) or ())]
    except Exception:  # such as an `eqx.nn.State` that must not be used any more
        return None


def step(x: Any, key: Any) -> str:
    """How a name goes on from `x` to what it holds under this key."""
    if type(x) is types.CellType:
        return ""
    if type(x) in (*DICTS, list, tuple):
        return f"[{key!r}]"
    return f".{key}" if isinstance(key, str) else jtu.keystr((key,))


def reach(x: Any, *, objects: bool = False) -> Iterator[Any]:
    """Everything that `x` leads to, each once; but an owned module at each place.

    An owned module is not looked into. With `objects` the attributes of objects that
    are not pytrees are.
    """
    seen: dict[int, Any] = {}  # keeps them alive, so that no other gets their `id`
    todo = [x]
    while todo:
        x = todo.pop()
        if type(x) in ATOMS or id(x) in seen:
            continue
        yield x
        if is_owned(x):
            continue
        seen[id(x)] = x
        if is_model(x):
            below = jtu.tree_leaves(x, is_leaf=_is_opaque)
        else:
            below = [child for _, child in held(x) or ()]
            if objects:
                below += _attributes(x)
        todo += reversed(below)


def _attributes(x: Any) -> list[Any]:
    if isinstance(x, (type, types.ModuleType)):
        return []
    try:
        return [*object.__getattribute__(x, "__dict__").values()]
    except AttributeError:
        return []


def _is_opaque(x: Any) -> bool:
    # The function of JAX's partial is not one of its children.
    return is_owned(x) or isinstance(x, jtu.Partial)


def owned_in(tree: Any, *, objects: bool = False) -> list[Any]:
    """The outermost owned modules that a tree reaches, at each place where it does."""
    if not is_any_open():
        return []
    return [x for x in reach(tree, objects=objects) if is_owned(x)]


def models_in(x: Any) -> list[Any]:
    """The models that `x` leads to, through functions and containers."""
    return [y for y in reach(x) if is_model(y)]
