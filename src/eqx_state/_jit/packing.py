"""Small arrays packed into a few buffers.

Each array that a compiled call takes or returns costs a few microseconds on the host,
however small it is. Between calls, the small arrays of a carry are therefore packed
into one buffer per dtype and sharding, and the program itself unpacks them.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from .._tree.dtypes import is_weak, to_strong


# To pack and unpack a larger array takes longer than the host time that this saves.
LIMIT: Final = 4096  # bytes


class BufferKey(NamedTuple):
    """The properties that the arrays of one buffer share."""

    dtype: Any
    sharding: Any
    is_committed: bool


class Pack(NamedTuple):
    """One buffer, and the numbers and shapes of the arrays in it."""

    key: BufferKey
    numbers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def join(self, arrays: Sequence[Array]) -> Array:
        """The buffer, in a trace."""
        flat = [lax.reshape(arrays[i], (arrays[i].size,)) for i in self.numbers]
        buffer = lax.concatenate(flat, 0)
        if isinstance(self.key.sharding, NamedSharding):
            # Without a constraint, XLA might shard the new buffer.
            return lax.with_sharding_constraint(buffer, self.key.sharding)
        return buffer

    def split(self, buffer: Array) -> list[Array]:
        """The arrays, in a trace.

        On a CPU, gather each array by indices. XLA compiles a slice and its offset
        together with the operation that uses the slice: for fifty equal layers at fifty
        offsets, it would compile fifty kernels, which makes compilation two to three
        times slower. Indices are an operand of the kernel, so that one kernel is
        enough. On other devices a gather may be slow, so use slices.
        """
        device = next(iter(self.key.sharding.device_set))
        arrays, start = [], 0
        for shape in self.shapes:
            end = start + _size(shape)
            if device.platform == "cpu":
                which = np.arange(start, end, dtype=np.int32).reshape(*shape, 1)
                arrays.append(lax.gather(buffer, which, _EACH, (1,), mode=_IN_BOUNDS))
            else:
                arrays.append(lax.reshape(buffer[start:end], shape))
            start = end
        return arrays

    def join_now(self, arrays: Sequence[Array]) -> Array:
        """The buffer, outside a trace."""
        # Join on the host: JAX would have to compile a program with hundreds of arrays.
        parts = jax.device_get([arrays[i] for i in self.numbers])
        buffer = np.concatenate([np.ravel(part) for part in parts])
        (new,) = _put([buffer], self.key.sharding, self.key.is_committed)
        return new

    def split_now(self, buffer: Array) -> list[Array]:
        """The arrays, outside a trace: copies on the devices of the buffer."""
        ends = np.cumsum([_size(shape) for shape in self.shapes])
        # Copy, because the array on the host may be a view of the buffer.
        parts = np.split(jax.device_get(buffer).copy(), ends[:-1])
        parts = [x.reshape(s) for x, s in zip(parts, self.shapes, strict=True)]
        return _put(parts, buffer.sharding, buffer.committed)


_EACH: Final = lax.GatherDimensionNumbers(
    offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,)
)
_IN_BOUNDS: Final = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def _put(values: list[np.ndarray], sharding: Any, is_committed: bool) -> list[Array]:
    if is_committed:  # always true for arrays on several devices
        return jax.device_put(values, sharding)
    # Leave the arrays uncommitted, so that JAX may move them to the device of the other
    # arrays in a computation.
    (device,) = sharding.device_set
    with jax.default_device(device):
        return jax.device_put(values)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arrays of a carry are stored between calls: packed or unpacked.

    - `buffers`: for each array, the key of its buffer, or `None` if the array cannot be
        packed; `shapes`: the shape of each array.
    - `keys`: for each array, the implementation of its typed keys, or `None` if it does
        not contain keys.
    - `weak`: the numbers of weakly typed arrays, which are not packed either.
    """

    buffers: tuple[BufferKey | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    keys: tuple[Any, ...]
    weak: tuple[int, ...]

    @staticmethod
    def of(arrays: Sequence[Array]) -> "Layout":
        """The layout for arrays that are not traced."""
        return Layout(
            tuple(map(_buffer_of, arrays)),
            tuple(x.shape for x in arrays),
            tuple(jr.key_impl(x) if _is_key(x) else None for x in arrays),
            tuple(i for i, x in enumerate(arrays) if is_weak(x)),
        )

    @ft.cached_property
    def packs(self) -> list[Pack]:
        found: dict[BufferKey, list[int]] = {}
        for i, buffer in enumerate(self.buffers):
            if buffer is not None and i not in self.weak:
                found.setdefault(buffer, []).append(i)
        # Never pack a single array. A slice of a whole buffer is the buffer itself, so
        # donating one (say, the array that `run.carry` returned) would delete the
        # other.
        return [
            Pack(buffer, tuple(numbers), tuple(self.shapes[i] for i in numbers))
            for buffer, numbers in found.items()
            if len(numbers) > 1
        ]

    @ft.cached_property
    def unpacked(self) -> list[int]:
        """The numbers of the arrays that are not packed."""
        packed = {i for pack in self.packs for i in pack.numbers}
        return [i for i in range(len(self.buffers)) if i not in packed]

    def after(self, arrays: Sequence[Array]) -> tuple["Layout", list[Array]]:
        """The layout for the new carry of a step, and the arrays to store.

        A strongly typed array remains strong. A weak one may become strong, as under
        `jax.jit`.
        """
        weak = tuple(i for i in self.weak if is_weak(arrays[i]))
        strong = [x if i in weak else to_strong(x) for i, x in enumerate(arrays)]
        is_same = weak == self.weak
        return self if is_same else dataclasses.replace(self, weak=weak), strong

    def pack(
        self, arrays: Sequence[Array], join: Callable[..., Array] = Pack.join
    ) -> list[Array]:
        """The buffers and arrays to store."""
        joined = [join(pack, arrays) for pack in self.packs]
        # Store typed keys as key data: a single typed key among the arguments or
        # results takes the whole call off JAX's fast path.
        unpacked = [arrays[i] for i in self.unpacked]
        return joined + [jr.key_data(x) if _is_key(x) else x for x in unpacked]

    def unpack(
        self, held: Sequence[Array], split: Callable[..., list[Array]] = Pack.split
    ) -> list[Array]:
        """The arrays, from the stored buffers and arrays."""
        rest = iter(held)
        arrays = {
            i: x
            for pack in self.packs
            for i, x in zip(pack.numbers, split(pack, next(rest)), strict=True)
        }
        for i, x in zip(self.unpacked, rest, strict=True):
            impl = self.keys[i]
            arrays[i] = x if impl is None else jr.wrap_key_data(x, impl=impl)
        return [arrays[i] for i in range(len(self.buffers))]


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _buffer_of(x: Array) -> BufferKey | None:
    """The key of the buffer for an array, or `None` if the array cannot be packed."""
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        # Do not pack on a mesh with other axes than `Auto`: there, the sharding of an
        # array is a part of its type, which the function sees.
        is_auto = set(sharding.mesh.axis_types) <= {AxisType.Auto}
        is_whole = is_auto and sharding.is_fully_replicated
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    else:
        is_whole = isinstance(sharding, SingleDeviceSharding)
    default = next(iter(sharding.device_set)).default_memory().kind
    is_here = x.sharding.memory_kind in (None, default)
    is_small = not _is_key(x) and 0 < x.nbytes <= LIMIT
    if is_whole and is_here and is_small:
        return BufferKey(x.dtype, sharding, x.committed)
    return None
