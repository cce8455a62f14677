"""Arrays that are not in memory: a shape, a dtype, and how to read a part."""

import functools as ft
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._tree._keys import is_typed
from .._tree._walk import is_numpy


Box = tuple[slice, ...]  # a part of an array: start and stop on each axis


class Stored:
    """An array that is read when it is needed, and only what is needed of it."""

    def __init__(self, shape: Iterable[int], dtype: Any, read: Callable[[Box], Any]):
        self.shape, self.dtype, self.read = tuple(shape), dtype, read

    def whole(self) -> Any:
        """All of it, as a NumPy array or as typed keys."""
        return self.read(tuple(slice(0, n) for n in self.shape))

    def placed(self, sharding: jax.sharding.Sharding, dtype: Any) -> jax.Array:
        """A JAX array, of which this process reads what its own devices hold."""

        @ft.cache  # devices that hold the same part ask for it one by one
        def read(*bounds: tuple[int, int, int]) -> Any:
            return self.read(tuple(slice(*each) for each in bounds))

        def read_box(box: Box | None) -> Any:
            assert box is not None
            indices = zip(box, self.shape, strict=True)
            return read(*(s.indices(n) for s, n in indices))

        return jax.make_array_from_callback(self.shape, sharding, read_box, dtype)


def typed(data: Stored, impl: str) -> Stored:
    """The typed PRNG keys of this data."""
    shape = jax.ShapeDtypeStruct(data.shape, data.dtype)
    keys = jax.eval_shape(lambda data: jr.wrap_key_data(data, impl=impl), shape)

    def read(box: Box) -> Any:
        words = slice(0, data.shape[-1])
        return jr.wrap_key_data(data.read((*box, words)), impl=impl)

    return Stored(keys.shape, keys.dtype, read)


def as_one(layers: Sequence[Any], sizes: tuple[int, ...]) -> Any:
    """The arrays of the layers of a stack as one, with axes of these sizes in front.

    What is to be read from a file still is.
    """
    shape = *sizes, *layers[0].shape
    for layer in layers:
        if isinstance(layer, Stored):
            return Stored(shape, layer.dtype, ft.partial(_read, layers, sizes))
    if all(map(is_numpy, layers)):
        return np.stack(layers).reshape(shape)
    x = jnp.stack(layers).reshape(shape)
    # `jax_debug_key_reuse` takes keys that were reshaped for used ones.
    return jr.clone(x) if is_typed(x) else x


def _read(layers: Sequence[Any], sizes: tuple[int, ...], box: Box) -> Any:
    """A part of the arrays of several layers as one."""
    across, inside = box[: len(sizes)], box[len(sizes) :]
    which = np.arange(len(layers)).reshape(sizes)[across]

    def read(layer: Any) -> Any:
        return layer.read(inside) if isinstance(layer, Stored) else layer[inside]

    found = (read(layers[int(i)]) for i in which.flat)
    first = next(found)
    if not is_numpy(first):
        return as_one([first, *found], which.shape)
    # One layer after the other, so that no layer is in memory twice.
    out = np.empty((which.size, *first.shape), first.dtype)
    out[0] = first
    for i, x in enumerate(found, start=1):
        out[i] = x
    return out.reshape(*which.shape, *first.shape)
