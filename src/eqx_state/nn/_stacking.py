"""Several layers as one, each array with an axis more."""

import functools as ft
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._state._init import init, Initializer, missing
from .._tree._aliasing import check_not_shared
from .._tree._compare import difference, same
from .._tree._keys import key_at
from .._tree._show import show
from .._tree._walk import is_array, is_numpy, leaves
from .._typing import PyTree


class Stack(NamedTuple):
    """Layers as one tree, and how many there are."""

    layers: PyTree
    length: int


def stack(layers: Any) -> Stack:
    """Layers as one, with a first axis in each array."""
    if isinstance(layers, Stack):
        return layers
    is_list = isinstance(layers, Iterable) and not is_array(layers)
    if not is_list or isinstance(layers, (Mapping, str)):
        raise TypeError(_NOT_LAYERS.format(type(layers).__qualname__))
    layers = list(layers)
    if not layers:
        raise ValueError(_NO_LAYERS)
    check_not_shared(layers)
    if missing(layers) is not None:
        return Stack(Initializer(ft.partial(_stack_drawn, layers)), len(layers))
    return Stack(_stacked(layers), len(layers))


def _stack_drawn(layers: list[Any], key: Any) -> PyTree:
    return _stacked([init(x, key_at(key, f"[{i}]")) for i, x in enumerate(layers)])


def _stacked(layers: list[Any]) -> PyTree:
    first = layers[0]
    visits, treedef = leaves(first), jtu.tree_structure(first)
    columns = [[visit.node] for visit in visits]
    for i, layer in enumerate(layers[1:], start=1):
        if jtu.tree_structure(layer) != treedef:
            text = difference(first, layer)
            raise ValueError(
                _DIFFER.format(i, text) + (_MARKED if ".marker`" in text else "")
            )
        for visit, column, x in zip(
            visits, columns, jtu.tree_leaves(layer), strict=True
        ):
            if not _is_alike(visit.node, x):
                at = f"`{visit.name}`" if visit.name else "the layer itself"
                text = f"first at {at}: expected `{show(visit.node)}`, got `{show(x)}`"
                raise ValueError(_DIFFER.format(i, text))
            column.append(x)
    return jtu.tree_unflatten(treedef, [_as_one(column) for column in columns])


def _is_alike(a: Any, b: Any) -> bool:
    """Whether two leaves differ in nothing but the values of an array."""
    if is_array(a) and is_array(b):
        return a.shape == b.shape and a.dtype == b.dtype
    return same(a, b)


def _as_one(column: list[Any]) -> Any:
    first = column[0]
    if not is_array(first):
        return first
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in column):
        return jax.ShapeDtypeStruct((len(column), *first.shape), first.dtype)
    return np.stack(column) if all(map(is_numpy, column)) else jnp.stack(column)


_NOT_LAYERS: Final = """`es.nn.Stacked` takes a list of layers, and was given a `{}`. \
To make several by one function:

    es.nn.Stacked(Block(key))                             # wrong
    es.nn.Stacked([Block(key) for key in keys])           # right
    es.nn.Stacked.make(Block, jax.random.split(key, n))   # right"""

_NO_LAYERS: Final = """`es.nn.Stacked` needs at least one layer: an empty list does \
not say what a layer is."""

_MARKED: Final = """

Equinox's stateful layers are told apart by such marks. Wrap each, which also lets it \
keep its own state: `es.nn.Stateful(eqx.nn.BatchNorm(...))`."""

_DIFFER: Final = """`es.nn.Stacked`: layers 0 and {} differ, {}. One program runs all \
of them, so they may differ in the values of their arrays only: not in structure, \
shapes, dtypes, static fields, functions or modes. Layers that have to differ belong \
in a list, or in several stacks."""
