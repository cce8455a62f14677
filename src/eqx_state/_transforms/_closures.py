"""What functions hold: modules in closures, defaults, bound methods and partials.

JAX takes a function for a leaf, and what it holds stays hidden from a transform. Every
transform looks through functions for the modules that a scope owns: those are swapped
in place, and no function is touched.
"""

import collections
import functools as ft
import itertools
import types
from collections.abc import Iterator
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._state._scope import is_owned
from .._tree._base import is_eqx_module
from .._tree._walk import children, is_leaf
from ._transform import Transform


_ATOMS: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})


_DICTS: Final = (dict, collections.OrderedDict, collections.defaultdict)


_PARTIALS: Final = (ft.partial, jtu.Partial, eqx.Partial)


_MANY: Final = 300


def is_model(x: Any) -> bool:
    """Whether `x` is a module, and not what merely wraps a function."""
    is_wrapper = type(x) is eqx.Partial or isinstance(x, Transform)
    return is_eqx_module(x) and not is_wrapper


def held(x: Any) -> list[Any] | None:
    """What `x` holds one level down; `None` for what is not looked into.

    That is a model, an array, any other object, also one of a class that is derived
    from those below: it may hold more than can be copied. A cell is a level of its own,
    since several functions may share it.
    """
    cls = type(x)
    if cls in _ATOMS or eqx.is_array(x):
        return None
    if cls is types.FunctionType:
        defaults = _defaults(x).values(), (x.__kwdefaults__ or {}).values()
        return [*(x.__closure__ or ()), *itertools.chain(*defaults)]
    if cls is types.CellType:
        try:
            return [x.cell_contents]
        except ValueError:  # assigned later in the function around
            return []
    if cls in _DICTS:  # also those that JAX cannot sort
        return [*x.values()]
    if cls in (list, tuple):
        return [*x]
    if cls is types.MethodType:
        return [x.__func__, x.__self__]
    if cls in _PARTIALS:
        return [x.func, x.args, x.keywords]
    if isinstance(x, Transform):
        return [x.f]
    if is_eqx_module(x) or is_leaf(x):
        return None
    try:
        return [child for _, child in children(x) or ()]
    except Exception:  # such as an `eqx.nn.State` that is not to be used any more
        return None


def _names(x: Any) -> list[str]:
    """How a name goes on, for each of what `x` holds."""
    cls = type(x)
    if cls is types.FunctionType:
        names = *x.__code__.co_freevars, *_defaults(x), *(x.__kwdefaults__ or ())
        return [f".{name}" for name in names]
    if cls is types.CellType:
        return [""]
    if cls in _DICTS:
        return [f"[{key!r}]" for key in x]
    if cls is types.MethodType:
        return [".__func__", ".__self__"]
    if cls in _PARTIALS:
        return [".func", ".args", ".keywords"]
    if isinstance(x, Transform):
        return [".f"]
    return [jtu.keystr((key,)) for key, _ in children(x) or ()]


def _defaults(f: types.FunctionType) -> dict[str, Any]:
    defaults = f.__defaults__ or ()
    names = f.__code__.co_varnames[: f.__code__.co_argcount]
    return dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))


def _reach(x: Any, *, objects: bool = False) -> Iterator[Any]:
    """Everything that `x` leads to, each once; but an owned module at each place.

    An owned module is not looked into. With `objects` the attributes of objects that
    are not pytrees are.
    """
    seen: dict[int, Any] = {}  # the objects, so that no other gets their `id`
    todo = [x]
    while todo:
        x = todo.pop()
        if type(x) in _ATOMS or id(x) in seen:
            continue
        yield x
        if is_owned(x):
            continue
        seen[id(x)] = x
        below = held(x) or []
        if is_model(x):
            below = jtu.tree_leaves(x, is_leaf=_is_opaque)
        elif objects:
            below = below + _attributes(x)
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
    return [x for x in _reach(tree, objects=objects) if is_owned(x)]


def models_in(x: Any) -> list[Any]:
    """The models that `x` leads to, through functions and containers."""
    return [y for y in _reach(x) if is_model(y)]


def reaches_module(f: Any) -> bool:
    """Whether a function may hold a module: quick, for each call.

    `True` also where there is very much to look through.
    """
    for i, x in enumerate(_reach(f)):
        if i == _MANY or (is_eqx_module(x) and not isinstance(x, Transform)):
            return True
    return False
