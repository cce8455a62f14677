"""The arrays of a tree as `es.Part`s: path, name, kind."""

import contextlib
import functools as ft
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, TYPE_CHECKING

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import show
from .._kinds.kinds import Kind
from .._typing import KeyPath, PyTree
from .context import Stacks
from .keys import clone
from .walk import is_array, is_numpy, leaves, Visit


class Part:
    """One array of a tree, with its path, name and kind."""

    __slots__ = ("_kind", "_visit")

    def __init__(self, visit: Visit):
        self._visit = visit
        self._kind = visit.context.kind_of(visit.node)

    @property
    def path(self) -> KeyPath:
        """The key path, a tuple of JAX's keys.

        Paths are unique in a tree: a key that equals an earlier sibling's key, or has
        the same `repr`, gets a number.
        """
        return self._visit.path

    @property
    def name(self) -> str:
        """The path in Python syntax, such as `layers[0].norm.mean`."""
        return self._visit.name

    @property
    def kind(self) -> Kind | None:
        """The kind, or `None`."""
        return self._kind

    @property
    def value(self) -> Any:
        """The array, or its `jax.ShapeDtypeStruct`."""
        return self._visit.node

    @property
    def frozen(self) -> bool:
        """Whether the array, or a node that contains it, is frozen.

        `ValueError` if a path that was frozen here no longer fits the tree.
        """
        context = self._visit.context
        if context.lost is not None:
            around, lost = context.lost
            raise ValueError(_LOST.format(lost.removeprefix("."), around, lost))
        return context.frozen

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            is_of_array = hasattr(jax.Array, name)
            said = _OF_THE_ARRAY if is_of_array else _NO_ATTRIBUTE
            raise AttributeError(said.format(name))

    def __repr__(self) -> str:
        kind = None if self.kind is None else self.kind.__name__
        return f"Part(name={self.name!r}, kind={kind}, value={show(self.value)})"


def owners_of(part: Part) -> tuple[type, ...]:
    """The classes of the modules around an array, the outermost first."""
    return part._visit.context.owners


def part_of(visit: Visit) -> Part | None:
    """The `Part` for a leaf of a walk; `None` if the leaf is not an array."""
    return Part(visit) if is_array(visit.node) else None


def is_inexact(part: Part) -> bool:
    """Whether a part is a floating or complex array."""
    dtype = part._visit.node.dtype  # `value` would slice a stack
    return jnp.issubdtype(dtype, jnp.inexact)


def parts(tree: PyTree) -> list[Part]:
    """Every array in `tree`, with its path, name and kind, in the order of flattening.

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    A list of `es.Part`. It does not contain functions, strings or Python numbers.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        parts = es.parts([eqx.nn.Linear(2, 3, key=jr.key(0)), {"count": 0}])
        assert [(p.name, p.kind) for p in parts] == [
            ("[0].weight", es.Parameter),
            ("[0].bias", es.Parameter),
        ]
        ```
    """
    return [p for p in map(part_of, leaves(tree)) if p is not None]


# --- The arrays of a stack of layers (`es.nn.Stacked`), layer by layer.
#
# A stack contains one array for all of its layers, with an extra first axis. Files and
# filters see one array per layer instead: `blocks[0].w`, `blocks[1].w`, and so on,
# without that axis. A stack of stacks has two such axes.


Index = tuple[int, ...]  # of a layer: one number for each stack around it


class LayerPart(Part):
    """An array of one layer of a stack; `whole` is the stacked array."""

    __slots__ = ("_slice", "index", "whole")

    def __init__(self, whole: Part, index: Index, slice: Callable[[Index], Any]):
        path = layer_path(whole.path, stacks_of(whole), index)
        super().__init__(whole._visit._replace(path=path))
        self._slice = slice
        self.whole = whole
        self.index = index

    @property
    def value(self) -> Any:
        return self._slice(self.index)


def layers_of(part: Part, *, alike: bool = False) -> list[LayerPart]:
    """The parts of a stacked array, one for each layer; empty for any other array.

    With `alike`, all layers of a tracer share the slice of the first layer. That is
    enough for filters, which can only use shape and dtype there, and avoids adding one
    slice per layer to the program.
    """
    if not (stacks := stacks_of(part)):
        return []
    whole, is_cut = part.value, is_split(part)
    is_one = alike and isinstance(whole, jax.core.Tracer)

    @ft.cache
    def slice(index: Index) -> Any:
        return slice_at(whole, index) if is_cut else whole

    def value(index: Index) -> Any:
        return slice((0,) * len(index) if is_one else index)

    return [LayerPart(part, index, value) for index in indices(stacks)]


def stacks_of(part: Part) -> Stacks:
    """The stacks around an array, outermost first; none for a `LayerPart`."""
    return () if isinstance(part, LayerPart) else part._visit.context.stacks


def is_split(part: Part) -> bool:
    """Whether an array is in a stack and has the axes of all stacks around it.

    Some arrays of optimizers lack these axes and belong to all layers together:
    `optax.scale_by_factored_rms` stores one of shape `(1,)`.
    """
    sizes = tuple(n for _, n in stacks_of(part))
    return sizes != () and _has_axes(part.value, sizes) and not is_in_a_layer()


def _has_axes(x: Any, sizes: tuple[int, ...]) -> bool:
    return jnp.shape(x)[: len(sizes)] == sizes


# Whether the arrays of stacks are those of one layer. Their first axis may have the
# length of the stack by chance, and then shapes cannot tell.
_IN_A_LAYER: Final[ContextVar[bool]] = ContextVar("_IN_A_LAYER", default=False)


@contextlib.contextmanager
def in_a_layer() -> Iterator[None]:
    """Inside, the arrays of each stack lack its axis: a function sees one layer."""
    token = _IN_A_LAYER.set(True)
    try:
        yield
    finally:
        _IN_A_LAYER.reset(token)


def is_in_a_layer() -> bool:
    """Whether `in_a_layer` is active."""
    return _IN_A_LAYER.get()


def indices(stacks: Stacks) -> list[Index]:
    """The indices of all layers of nested stacks, in order; `()` without a stack."""
    return [*itertools.product(*(range(n) for _, n in stacks))]


def layer_path(path: KeyPath, stacks: Stacks, index: Index) -> KeyPath:
    """The key path of an array of a stack, as if the layers were in a list."""
    keys = list(path)
    for (at, _), i in zip(stacks, index, strict=True):
        keys[at] = jtu.SequenceKey(i)
    return tuple(keys)


def paths_of(visit: Visit) -> list[KeyPath]:
    """The key path of a node; in a stack, its path in each layer."""
    stacks = visit.context.stacks
    return [layer_path(visit.path, stacks, index) for index in indices(stacks)]


def without_axis(stack: Any) -> Visit | None:
    """The first array of an `es.nn.Stacked` that lacks the axis of its layers."""
    arrays = (v for v in leaves(stack.layers) if is_array(v.node))
    return next((v for v in arrays if v.node.shape[:1] != (len(stack),)), None)


def check_stack(stack: Any) -> None:
    """Raise `ValueError` if an array of an `es.nn.Stacked` lacks the axis of layers."""
    if (visit := without_axis(stack)) is not None:
        shape = visit.node.shape
        raise ValueError(_NO_AXIS.format(len(stack), shape, visit.name))


def check_has_axes(visit: Visit) -> None:
    """Raise `ValueError` if an array in stacks lacks the axes of their layers."""
    sizes = tuple(n for _, n in visit.context.stacks)
    if not _has_axes(visit.node, sizes):
        length = "×".join(map(str, sizes))
        raise ValueError(_NO_AXIS.format(length, jnp.shape(visit.node), visit.name))


def slice_at(x: Any, index: Any) -> Any:
    """The layer of a stacked array at an index, a slice, or a tuple of indices."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return _abstract_layer(x, index)
    if is_numpy(x):  # `...` returns an array, not a scalar, if no axis remains
        return x[(*index, ...)] if isinstance(index, tuple) else x[index, ...]
    # Clone keys, because indexing a key counts as its use for `jax_debug_key_reuse`.
    return clone(x)[index]


def _abstract_layer(x: jax.ShapeDtypeStruct, index: Any) -> jax.ShapeDtypeStruct:
    shape = np.broadcast_to(np.empty(()), x.shape)[index].shape
    sharding = x.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        fewer = len(x.shape) - len(shape)
        spec = jax.sharding.PartitionSpec(*sharding.spec[fewer:])
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)


_NO_AXIS: Final = """An `es.nn.Stacked` has {} layers and an array of shape {}, `{}`. \
If a function added this array, such as one that adds an adapter in `es.map_modules`, \
call the function for each layer: `es.nn.Stacked([add(b, key) for b, key in zip(stack, \
keys)])`. If the model is an ensemble, map over its members: `es.vmap(model, \
axes={{...: 0}})`. `es.per_layer` needs all layers: return the gradients from an \
`es.shard_map` over them, and update outside, `optimizer.update(grads, model)`."""

_OF_THE_ARRAY: Final = """An `es.Part` has no attribute `{0}`. A filter is called with \
an `es.Part`, which contains the array: `lambda part: part.value.{0}`."""

_NO_ATTRIBUTE: Final = """An `es.Part` has no attribute `{0}`. A filter is called with \
one array of the model, an `es.Part`, and not with the model. To select a node of the \
model, write `es.under(lambda model: model.{0})`."""

_LOST: Final = """`{0}` was frozen, or unfrozen, by its path, and the structure there \
has changed since. The path may now lead to a different layer, and a frozen layer \
could be trained. Clear the setting of the part that changed, and set it again:

    model = es.unfreeze(model, lambda m: m{1})
    model = es.freeze(model, lambda m: m{2})     # or the nodes to freeze now"""
