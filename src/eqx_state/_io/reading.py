"""Arrays of a safetensors file, which can be read in parts.

`stored_arrays` opens a file, `as_one` joins the layers of a stack, and `placed_like`
reads the parts that a leaf needs and puts them on the leaf's devices.
"""

import contextlib
import functools as ft
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, IO, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._tree.dtypes import converted, fits
from .._tree.keys import clone, is_typed
from .._tree.parts import is_split, LayerPart, layers_of, Part
from .._tree.walk import is_numpy
from .._typing import KeyPath


Box: TypeAlias = tuple[slice, ...]  # a part of an array: slices of its first axes

# The metadata of a file contains JSON under this key: the version of this layout, and
# the implementation of each typed key, because the format stores only the key data.
ABOUT: Final = "eqx_state"
VERSION: Final = 1

# The dtypes that both safetensors and NumPy or JAX have.
DTYPES: Final = {
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
}


class Stored(NamedTuple):
    """An array whose parts are read when they are needed."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[Box], Any]  # a NumPy array, or typed keys; `()` reads everything

    def placed(self, sharding: jax.sharding.Sharding) -> jax.Array:
        """The array with this sharding. Reads only the shards of this process."""
        parts: dict[str, Any] = {}  # several devices may share a part

        def part(box: Box | None) -> Any:
            assert box is not None
            if str(box) not in parts:
                parts[str(box)] = self.read(box)
            return parts[str(box)]

        return jax.make_array_from_callback(self.shape, sharding, part)


def in_dtype(value: Any, dtype: Any, report: Callable[[], Any]) -> Any:
    """`value`, an array or a `Stored`, in a dtype. Calls `report` if that overflows."""
    if value.dtype == dtype:
        return value

    def convert(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if not fits(dtype, x):
            report()
        return converted(dtype, x)

    if not isinstance(value, Stored):
        return convert(value)
    return Stored(value.shape, dtype, lambda box: convert(value.read(box)))


# --- A file ---------------------------------------------------------------------------


def import_safetensors() -> Any:
    """The library, an optional dependency; `ImportError` says how to install it."""
    try:
        import safetensors.numpy
    except ImportError as e:
        raise ImportError(
            "`es.save` and `es.load` need safetensors, the extra `io` of eqx_state,"
            ' which is not installed: `python -m pip install "safetensors>=0.8"`.'
        ) from e
    return safetensors


@contextlib.contextmanager
def opened(path: str, caller: str) -> Iterator[tuple[Any, IO[bytes]]]:
    """An open safetensors file, with a checked header, and its bytes."""
    safetensors = import_safetensors()
    # Open with Python first, whose errors give the reason. For a file without read
    # permission, safetensors says that it does not exist.
    with open(path, "rb") as raw:
        try:
            file = safetensors.safe_open(path, framework="numpy")
        except safetensors.SafetensorError as e:
            raise _unreadable(caller, path, e) from e
        yield file, raw


@contextlib.contextmanager
def stored_arrays(path: str) -> Iterator[dict[str, Stored]]:
    """The arrays of a file by name. They can be read while the block runs."""
    with opened(path, "es.load") as (file, raw):
        try:
            about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
            if about.get("version", VERSION) > VERSION:
                raise ValueError("a later version of eqx_state wrote it")
            arrays = {name: _stored(file, name, raw) for name in file.keys()}
            for name, impl in about.get("keys", {}).items():
                arrays[name] = _typed(arrays[name], impl)
        except Exception as e:  # the file may contain any JSON under our key
            raise _unreadable("es.load", path, e) from e
        yield arrays


def _unreadable(caller: str, path: str, error: Exception) -> ValueError:
    return ValueError(
        f"`{caller}` cannot read `{path}`: it is not a safetensors file, is truncated,"
        f" or was written by a newer version. {error!r}"
    )


def _stored(file: Any, name: str, raw: IO[bytes]) -> Stored:
    view = file.get_slice(name)
    shape, code = tuple(view.get_shape()), view.get_dtype()
    # An unsupported dtype, such as F4, becomes one that no array has.
    dtype = np.dtype(DTYPES.get(code) or [(code, "V1")])
    mapped = ft.cache(ft.partial(_mapped, raw, name, shape, dtype))

    def read(box: Box) -> np.ndarray[Any, Any]:
        if 0 in shape:  # safetensors cannot slice it
            return np.empty(shape, dtype)[box]
        if code.startswith("F8"):
            return np.array(mapped()[box])
        if code == "BOOL":  # any byte but 0 is true; in NumPy's bools, only 1 is
            return view[box].view("uint8") != 0
        return view[box]

    return Stored(shape, dtype, read)


def _mapped(
    raw: IO[bytes], name: str, shape: tuple[int, ...], dtype: Any
) -> np.ndarray[Any, Any]:
    """A float8 array, which safetensors 0.8 cannot read: NumPy has no such dtype."""
    raw.seek(0)
    size = int.from_bytes(raw.read(8), "little")
    begin, _ = json.loads(raw.read(size))[name]["data_offsets"]
    return np.memmap(raw, dtype, "r", 8 + size + begin, shape)


def _typed(data: Stored, impl: str) -> Stored:
    """The typed PRNG keys with this key data."""
    shape = jax.ShapeDtypeStruct(data.shape, data.dtype)
    keys = jax.eval_shape(lambda data: jr.wrap_key_data(data, impl=impl), shape)
    # A box has at most the axes of the keys, so no key is split.
    return Stored(
        keys.shape, keys.dtype, lambda box: jr.wrap_key_data(data.read(box), impl=impl)
    )


# --- The layers of a stack ------------------------------------------------------------


def in_order(parts: Iterable[Part | None]) -> list[tuple[int, Part]]:
    """All arrays with their leaf indices, in the order of a list of layers.

    An array of a stack that lacks the stack's axis belongs to all layers together and
    has its name from the tree.
    """
    found: list[tuple[int, Part]] = []
    for i, part in enumerate(parts):
        if part is not None:
            layers = layers_of(part) if is_split(part) else [part]
            found += [(i, each) for each in layers]
    # All of `blocks[0]` comes before `blocks[1]`: sort nodes by the position of their
    # first leaf.
    seen: dict[KeyPath, int] = {}

    def position(entry: tuple[int, Part]) -> list[int]:
        path = entry[1].path
        return [seen.setdefault(path[: n + 1], len(seen)) for n in range(len(path))]

    return sorted(found, key=position)


def whole_of(part: Part) -> Part:
    """The stacked array of a `LayerPart`; any other part itself."""
    return part.whole if isinstance(part, LayerPart) else part


def shape_of(part: Part) -> tuple[int, ...]:
    """The shape of an array, without slicing it."""
    skipped = len(part.index) if isinstance(part, LayerPart) else 0
    return whole_of(part).value.shape[skipped:]


def as_one(layers: Sequence[Any], sizes: tuple[int, ...]) -> Any:
    """The arrays of the layers as one, with first axes of these sizes.

    If a layer is `Stored`, so is the result.
    """
    shape = *sizes, *layers[0].shape
    for layer in layers:
        if isinstance(layer, Stored):
            return Stored(shape, layer.dtype, ft.partial(_read, layers, sizes))
    if all(map(is_numpy, layers)):
        return np.stack(layers).reshape(shape)
    x = jnp.stack(layers).reshape(shape)
    # For `jax_debug_key_reuse`, reshaped keys count as used.
    return clone(x)


def _read(layers: Sequence[Any], sizes: tuple[int, ...], box: Box) -> Any:
    """A part of the joined array of several layers."""
    across, inside = box[: len(sizes)], box[len(sizes) :]
    chosen = np.arange(len(layers)).reshape(sizes)[across]
    each = (layers[int(i)] for i in chosen.flat)
    found = (x.read(inside) if isinstance(x, Stored) else x[inside] for x in each)
    first = next(found)
    if is_typed(first):
        return as_one([first, *found], chosen.shape)
    # `np.stack` needs a list of all layers: they would be in memory twice.
    out = np.empty((chosen.size, *first.shape), first.dtype)
    out[0] = first
    for i, x in enumerate(found, start=1):
        out[i] = x
    return out.reshape(*chosen.shape, *first.shape)


# --- The devices ----------------------------------------------------------------------


def placed_like(leaf: Any, value: Any) -> Any:
    """`value` as a NumPy or JAX array, like the leaf, and on its devices."""
    has_place = not isinstance(leaf, jax.core.Tracer) and not is_numpy(leaf)
    sharding = _sharding_of(leaf) if has_place else None
    if isinstance(value, Stored):
        if sharding is not None:
            return value.placed(sharding)
        value = value.read(())
    if isinstance(leaf, jax.core.Tracer) or isinstance(value, jax.core.Tracer):
        return value
    if is_numpy(leaf):
        array = np.asarray(value, dtype=leaf.dtype)
        return array if isinstance(leaf, np.ndarray) else array[()]
    # Copy directly, not through the default device.
    return jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)


def _sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding that a leaf specifies, if any."""
    # An abstract leaf may have none, and an uncommitted array is on the default device
    # only because none was chosen.
    sharding: Any = leaf.sharding if getattr(leaf, "committed", True) else None
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return sharding
    if mesh.empty:
        return None
    # An abstract mesh does not say which devices to use. Take those of the current
    # mesh; JAX raises if none is set.
    somewhere = jax.device_put(np.zeros(()), jax.sharding.PartitionSpec())
    return jax.sharding.NamedSharding(somewhere.sharding.mesh, sharding.spec)
