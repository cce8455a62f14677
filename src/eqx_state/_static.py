"""Static values, hashable and told apart by type.

To Python `1 == True == 1.0` and `0.0 == -0.0`, and a program that was traced for one of
them is wrong for another.
"""

import collections
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from ._compare import same


def typed(x: Any) -> Any:
    """A hashable form of `x` in which equal values are of one type.

    `nan` is equal to itself in it.
    """
    compare = type(x).__eq__  # a subclass may have one of its own
    if compare in (tuple.__eq__, list.__eq__):
        return type(x), tuple(map(typed, x))
    if compare in (frozenset.__eq__, set.__eq__):
        return type(x), frozenset(map(typed, x))
    if compare in (dict.__eq__, collections.OrderedDict.__eq__):
        factory = getattr(x, "default_factory", None)
        return type(x), factory, tuple((typed(k), typed(v)) for k, v in x.items())
    if compare is complex.__eq__:
        return type(x), typed(x.real), typed(x.imag)
    if isinstance(x, np.generic):
        return type(x), x.tobytes()
    if compare is float.__eq__:
        return type(x), x.hex()
    if _is_record(x):
        values = (getattr(x, f.name, None) for f in dataclasses.fields(x))
        return type(x), tuple(map(typed, values))
    if not is_hashable(x):
        return type(x), _ByEquality(x)
    if compare is eqx.Module.__eq__:
        leaves, treedef = jtu.tree_flatten(x)
        return structure(treedef), tuple(map(typed, leaves))
    return type(x), x


def structure(treedef: Any, static: Callable[[Any], Any] = typed) -> Any:
    """A treedef in a hashable form in which static values are told apart by type."""
    if (data := treedef.node_data()) is None:
        return _LEAF
    cls, aux = data
    # Of a dict it is the list of keys, of an Equinox module a tuple of values.
    if type(aux) in (list, tuple):
        aux = type(aux), tuple(map(static, aux))
    else:
        aux = static(aux)
    return cls, aux, tuple(structure(child, static) for child in treedef.children())


_LEAF: Final = "leaf"


def _is_record(x: Any) -> bool:
    """Whether `x` is a dataclass that is compared by its fields."""
    owner = next(c for c in type(x).__mro__ if "__eq__" in vars(c))
    parameters = vars(owner).get("__dataclass_params__")
    return parameters is not None and parameters.eq


def is_hashable(x: Any) -> bool:
    """Whether `x` can be looked up."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


class _ByEquality:
    """A static field without a hash, such as JAX allows: it is only compared."""

    def __init__(self, x: Any):
        self.x = x

    def __hash__(self) -> int:
        return hash(type(self.x))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _ByEquality) and same(self.x, other.x)


_ATOMS: Final = frozenset({int, float, complex, str, bytes, bool})


def canonical(x: Any) -> Any:
    """One object for all plain values that are equal, so that `is` can compare them."""
    is_plain = type(x) in _ATOMS or type(x) is tuple and _ATOMS.issuperset(map(type, x))
    return _canonical(_Typed(x)) if is_plain else x


class _Typed:
    def __init__(self, x: Any):
        self.x, self.key = x, typed(x)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Typed) and self.key == other.key


@ft.lru_cache(maxsize=4096)
def _canonical(x: _Typed) -> Any:
    return x.x
