"""Finds what a transform reaches: owned modules in functions and arguments.

To JAX a function is a leaf, and the values that it captures are hidden. The transforms
of `es` therefore search functions (their closures, defaults and partials) for modules
that a scope owns.
"""

import collections
import functools as ft
import types
from collections.abc import Iterator
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._state.lazy import check_initialized
from .._state.module import Module
from .._state.scope import is_any_open, is_owned
from .._tree.base import is_eqx_module
from .._tree.compare import check_not_repeated
from .._tree.context import children
from .._tree.walk import is_array
from .transform import layer_of, Transform


_ATOMS: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
# The modules that are wrappers of a function.
WRAPPERS: Final = (eqx.Partial, Transform)
_DICTS: Final = (dict, collections.OrderedDict, collections.defaultdict)


def captured(x: Any) -> list[Any]:
    """The objects directly inside `x`: captured by a function, or in a container.

    Empty for an array, and for an object that is neither a function nor a pytree.
    """
    cls = type(x)
    if eqx.is_array(x):
        return []
    if cls is types.FunctionType:
        cells = filter(_is_assigned, x.__closure__ or ())
        defaults = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        return [*(cell.cell_contents for cell in cells), *defaults]
    if cls in _DICTS:  # includes dicts whose keys JAX cannot sort
        return [*x.values()]
    if cls in (list, tuple):
        return [*x]
    if (layer := layer_of(x)) is not None:
        return [layer.inner, layer.args, layer.keywords]
    try:
        return [child for _, child in children(x) or ()]
    except Exception:  # an outdated `eqx.nn.State` refuses to flatten
        return []


def _is_assigned(cell: types.CellType) -> bool:
    # In `def f(): return later`, called before `later = 1`, the cell is empty.
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def reachable(x: Any) -> Iterator[Any]:
    """Every object that is reachable from `x`, once; owned modules once per occurrence.

    Does not search inside owned modules, because a transform lifts them as a whole.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no `id` is reused
    todo = [x]
    while todo:  # no recursion: decorators and partials make long chains
        x = todo.pop()
        if type(x) in _ATOMS or id(x) in seen:
            continue
        yield x
        if is_owned(x):
            continue
        seen[id(x)] = x
        below = jtu.tree_leaves(x, is_leaf=_is_opaque) if is_model(x) else captured(x)
        todo += reversed(below)


def _is_opaque(x: Any) -> bool:
    # Stop at a `jtu.Partial`: its function is not among its children, but `captured`
    # finds it.
    return is_owned(x) or isinstance(x, jtu.Partial)


def is_model(x: Any) -> bool:
    """Whether `x` is a module, and not a wrapper of a function."""
    return is_eqx_module(x) and not isinstance(x, WRAPPERS)


def owned_in(x: Any) -> list[Any]:
    """The outermost owned modules reachable from `x`, once per occurrence."""
    return [y for y in reachable(x) if is_owned(y)] if is_any_open() else []


def models_in(x: Any) -> list[Any]:
    """The models reachable from `x`, through functions and containers."""
    return [y for y in reachable(x) if is_model(y)]


def closed_over(x: Any) -> list[Any]:
    """The models that the functions in `x` close over: to JAX, they are constants."""
    opaque = (types.FunctionType, types.MethodType, ft.partial)
    return models_in([captured(y) for y in reachable(x) if type(y) in opaque])


def check_given(*arguments: Any, may_initialize: bool = False) -> None:
    """Raise if an argument is not initialized, or has one stateful module twice.

    An argument that contains owned modules is exempt: a transform does not flatten
    them, so a repeated module remains one module. With `may_initialize`, the call
    itself may initialize the model.
    """
    for tree in arguments:
        if is_array(tree) or owned_in(tree):
            continue
        check_not_repeated(tree)
        is_init = getattr(tree, "__func__", None) is Module.init
        if not (may_initialize or is_init):
            check_initialized(tree)
