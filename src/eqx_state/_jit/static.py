"""Static values in a hashable form, compared by value and type.

In Python `1 == True == 1.0` and `0.0 == -0.0`, but a program that was traced for one of
them is wrong for the others.
"""

import collections
import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .._compat import GENERATED
from .._tree.compare import same


def typed(x: Any) -> Any:
    """A hashable form of `x`, equal for equal values of the same type.

    In this form `nan` equals itself.
    """
    compare = type(x).__eq__  # a subclass may define its own
    if type(x) in _ATOMS or (compare is object.__eq__ and is_hashable(x)):
        return type(x), x
    if compare in (tuple.__eq__, list.__eq__, collections.deque.__eq__):
        return type(x), tuple(map(typed, x))
    if compare in (frozenset.__eq__, set.__eq__):
        return type(x), frozenset(map(typed, x))
    if compare in (dict.__eq__, collections.OrderedDict.__eq__):
        factory = getattr(x, "default_factory", None)
        return type(x), factory, tuple((typed(k), typed(v)) for k, v in x.items())
    if type(x) is slice:  # `slice(1) == slice(True)`
        return slice, typed(x.start), typed(x.stop), typed(x.step)
    if type(x) is types.MethodType:  # its function may be a decorator with a `1`
        # Methods compare their objects by identity, so keep a method for the object.
        return types.MethodType, typed(x.__func__), types.MethodType(id, x.__self__)
    if compare is complex.__eq__:
        return type(x), typed(x.real), typed(x.imag)
    if compare is float.__eq__:
        return type(x), x.hex()
    if isinstance(x, (np.generic, np.ndarray)) and not x.dtype.hasobject:
        return type(x), x.dtype, x.shape, x.tobytes()  # `x.dtype` may have a unit
    if (names := _compared_fields(type(x))) is not None:
        return type(x), tuple(typed(getattr(x, name, None)) for name in names)
    if not is_hashable(x):
        return type(x), _ByEquality(deep_copy(x, {}))  # `x` may change in place
    if compare is eqx.Module.__eq__:
        leaves, treedef = jtu.tree_flatten(x)
        return key_of_treedef(treedef), tuple(map(typed, leaves))
    return type(x), x


# Types whose equal values are interchangeable. Those of floats are not: `0.0 == -0.0`.
_ATOMS: Final = frozenset({str, int, bool, type(None)})


def key_of_treedef(treedef: Any, static: Callable[[Any], Any] = typed) -> Any:
    """A treedef in a hashable form, with static values compared by type, too."""
    nodes = []
    todo = [treedef]  # no recursion: a tree may be deeper than Python's stack
    while todo:
        treedef = todo.pop()
        if (data := treedef.node_data()) is None:
            nodes.append(LEAF)
            continue
        cls, aux = data
        # `aux` is a list for a dict (its keys), and a tuple for a module.
        if type(aux) in (list, tuple):
            aux = type(aux), tuple(map(static, aux))
        else:
            aux = static(aux)
        below = treedef.children()
        nodes.append((cls, aux, len(below)))
        todo += reversed(below)
    return tuple(nodes)


LEAF: Final = "leaf"


def _compared_fields(cls: type) -> tuple[str, ...] | None:
    """The fields by which a dataclass compares its instances.

    `None` for any other class, and for a dataclass that defines `__eq__`.
    """
    owner = next(c for c in cls.__mro__ if "__eq__" in vars(c))
    # Only the code of `__eq__` shows whether it was generated.
    code = getattr(owner.__eq__, "__code__", None)
    if code is None or not code.co_qualname.startswith(GENERATED):
        return None
    return tuple(f.name for f in dataclasses.fields(owner) if f.compare)


def is_hashable(x: Any) -> bool:
    """Whether `x` can be hashed."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def is_fixed(x: Any) -> bool:
    """Whether `x` and its contents remain equal to the same values while `x` exists.

    A list does not. An object of a class with its own `__eq__` may not, even if it can
    be hashed.
    """
    cls = type(x)
    if cls in _ATOMS or cls.__eq__ is object.__eq__:  # equal only to itself
        return True
    if cls is types.MethodType:
        return is_fixed(x.__func__)
    if isinstance(x, _CONTAINERS) or not is_hashable(x):
        return False
    if cls.__eq__ in (tuple.__eq__, frozenset.__eq__):
        return all(map(is_fixed, x))
    if _compared_fields(cls) is not None:
        is_frozen = cls.__dataclass_params__.frozen
        return is_frozen and all(map(is_fixed, _fields(x).values()))
    owner = next(c for c in cls.__mro__ if "__eq__" in vars(c))
    return owner.__module__.partition(".")[0] in _IMMUTABLE


# Containers that can change in place.
_CONTAINERS: Final = (list, dict, set, collections.deque)

# Packages whose classes with an `__eq__` are immutable if they can be hashed: treedefs,
# dtypes, shardings, filters.
_IMMUTABLE: Final = frozenset({"builtins", "eqx_state", "jax", "jaxlib", "numpy"})


def can_change(x: Any) -> bool:
    """Whether `x` is or contains a container, dataclass or array that can change."""
    cls: Any = type(x)
    if cls in _ATOMS or cls.__eq__ is object.__eq__:
        return False
    if isinstance(x, (tuple, frozenset)):
        return any(map(can_change, x))
    if hasattr(cls, "__dataclass_params__") and not isinstance(x, eqx.Module):
        is_frozen = cls.__dataclass_params__.frozen
        return not is_frozen or any(map(can_change, _fields(x).values()))
    return isinstance(x, (*_CONTAINERS, np.ndarray))


def deep_copy(x: Any, memo: dict[int, Any]) -> Any:
    """`x`, with copies of all containers, dataclasses and NumPy arrays that can change.

    Anything else remains the same object: a function, or an object that is equal only
    to itself. Equal `id`s in `memo` get the same copy.
    """
    if not can_change(x):
        return x
    if id(x) not in memo:
        memo[id(x)] = _copied(x, memo)
    return memo[id(x)]


def _copied(x: Any, memo: dict[int, Any]) -> Any:
    if isinstance(x, (tuple, frozenset)):
        return getattr(x, "_make", type(x))([deep_copy(y, memo) for y in x])
    new: Any = copy.copy(x)
    if dataclasses.is_dataclass(x):
        for name, y in _fields(x).items():
            object.__setattr__(new, name, deep_copy(y, memo))
    elif isinstance(x, (list, dict, collections.deque)):
        for key in x if isinstance(x, dict) else range(len(x)):
            new[key] = deep_copy(x[key], memo)
    return new


def _fields(x: Any) -> dict[str, Any]:
    """The fields of a dataclass that are set."""
    names = (f.name for f in dataclasses.fields(x))
    return {name: getattr(x, name) for name in names if hasattr(x, name)}


class _ByEquality:
    """An unhashable static value, compared by `==`, as JAX compares it."""

    def __init__(self, x: Any):
        self.x = x

    def __hash__(self) -> int:
        return hash(type(self.x))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _ByEquality) and same(self.x, other.x)
