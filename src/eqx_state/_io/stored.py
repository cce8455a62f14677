"""Arrays that are not in memory: a shape, a dtype, and how to read a part."""

import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._compat import is_in_trace
from .._tree.keys import is_typed
from .._tree.parts import Index, is_split, LayerPart, layers_of, Part, stacks_of
from .._tree.walk import is_numpy
from .._typing import KeyPath


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


# --- Stacks in files and state dicts, where each layer has arrays and names of its own.


Named: TypeAlias = dict[str, tuple[int, Part]]


def in_order(parts: Iterable[Part | None]) -> list[tuple[int, Part]]:
    """Every array with its index among the leaves, in the order of a list of layers.

    An array of a stack is there once for each layer, unless it lacks the stack's axis:
    then it belongs to all layers together, and has the name that it has in the tree.
    """
    found: list[tuple[tuple[int, ...], int, Part]] = []
    first: dict[KeyPath, int] = {}  # the index of the first leaf of each stack
    for i, part in enumerate(parts):
        if part is None:
            continue
        stacks, layers = stacks_of(part), layers_of(part) if is_split(part) else []
        for layer in layers:
            pairs = [
                (first.setdefault(part.path[: at + 1], i), k)
                for (at, _), k in zip(stacks, layer.index, strict=True)
            ]
            found.append(((*(n for pair in pairs for n in pair), i), i, layer))
        if not layers:
            found.append(((i,), i, part))
    return [(i, part) for _, i, part in sorted(found, key=lambda x: x[0])]


def whole_of(part: Part) -> Part:
    """The array of a stack that an array of a layer belongs to; else the array."""
    return part.whole if isinstance(part, LayerPart) else part


def shape_of(part: Part) -> tuple[int, ...]:
    """The shape of an array, which need not be sliced for it."""
    skipped = len(part.index) if isinstance(part, LayerPart) else 0
    return whole_of(part).value.shape[skipped:]


def by_leaf(places: Named, values: Mapping[str, Any]) -> dict[int, Any]:
    """One value for each leaf, of those in the places.

    A stack keeps the arrays of the layers that are not among them.
    """
    found: dict[int, Any] = {}
    for i, (whole, given) in _stacks(places).items():
        each = [
            values[given[layer.index]] if layer.index in given else layer.value
            for layer in layers_of(whole)
        ]
        found[i] = as_one(each, tuple(n for _, n in stacks_of(whole)))
    alone = {name: i for name, (i, _) in places.items() if i not in found}
    return found | {i: values[name] for name, i in alone.items()}


def lacking(places: Named) -> list[str]:
    """The layers without a place of abstract stacks, where other layers have one."""
    return [
        layer.name
        for whole, given in _stacks(places).values()
        if isinstance(whole.value, jax.ShapeDtypeStruct)
        for layer in layers_of(whole)
        if layer.index not in given
    ]


def _stacks(places: Named) -> dict[int, tuple[Part, dict[Index, str]]]:
    """By leaf, each array of a stack, and the name of each layer that has a place."""
    found: dict[int, tuple[Part, dict[Index, str]]] = {}
    for name, (i, part) in places.items():
        if isinstance(part, LayerPart):
            found.setdefault(i, (part.whole, {}))[1][part.index] = name
    return found


# --- Values put where the arrays of a tree are: on their devices, in their shards.


def placed_as(leaf: Any, value: Any) -> Any:
    """`value` as a NumPy or JAX array, whichever the leaf is, on its devices."""
    if isinstance(value, Stored):
        if not (is_numpy(leaf) or is_in_trace()):
            sharding = _sharding_of(leaf)
            if sharding is not None:
                return value.placed(sharding, leaf.dtype)
        value = value.whole()
    if any(isinstance(x, jax.core.Tracer) for x in (leaf, value)):
        return value
    if is_numpy(leaf):
        array = np.asarray(value, dtype=leaf.dtype)
        return array if isinstance(leaf, np.ndarray) else array[()]
    sharding = _sharding_of(leaf)
    # Straight there, through no other device.
    return jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)


def why_not_split(leaf: Any) -> str | None:
    """Why the shards that an abstract leaf says cannot be made; `None` if they can."""
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None:
        return None
    sharding = leaf.sharding
    how = getattr(sharding, "spec", sharding)
    if not is_in_trace():  # where nothing is put anywhere
        try:
            sharding = _sharding_of(leaf)
        except ValueError:
            return f"the mesh that is set lacks an axis of {how}"
        if sharding is None and not leaf.sharding.mesh.empty:
            return _NO_MESH_SET.format(how)
    try:
        (sharding or leaf.sharding).shard_shape(leaf.shape)
    except ValueError:
        return f"{leaf.shape} is not split into equal parts by {how}"
    return None


def _sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding that a leaf says, if it says any."""
    # An abstract leaf may lack one, and an array that is not committed lies on the
    # default device only by chance.
    if leaf.sharding is None or not getattr(leaf, "committed", True):
        return None
    if isinstance(getattr(leaf.sharding, "mesh", None), jax.sharding.AbstractMesh):
        # It only says how to shard. Where to is up to the mesh that is set.
        if jax.sharding.get_abstract_mesh().empty:
            return None
        whole = jax.device_put(np.zeros(()), jax.sharding.PartitionSpec())
        return jax.sharding.NamedSharding(whole.sharding.mesh, leaf.sharding.spec)
    return leaf.sharding


_NO_MESH_SET: Final = """{} is on an abstract mesh, which has no devices, and no mesh \
is set: `with jax.set_mesh(mesh):`"""
