"""Layers of equal structure, run by one loop: the program has the size of one layer."""

import functools as ft
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final, Generic, overload, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

from .._compat import manual_axes
from .._errors import public_name
from .._interop import takes_key
from .._kinds.kinds import Rng, State
from .._state.init import init
from .._state.lazy import check_initialized, Initializer, missing
from .._state.module import Module
from .._state.scope import enter_layer, is_observed
from .._transforms.checkpoint import checkpoint as remat
from .._transforms.loops import scan
from .._tree.compare import check_not_repeated, difference
from .._tree.dtypes import is_readable
from .._tree.keys import data_of, is_key, is_typed, key_at, num_key_axes
from .._tree.modules import replace
from .._tree.parts import check_stack, slice_at, without_axis
from .._tree.walk import is_array, is_numpy, leaves
from .._typing import PyTree


# --- Several layers as one, whose arrays have an extra first axis.


def _stack(layers: Any) -> tuple[PyTree, int]:
    """The layers as one, with an extra first axis in each array; and their number."""
    if not (layers := list(layers)):
        raise ValueError("`es.nn.Stacked` needs at least one layer.")
    for layer in layers:
        if isinstance(layer, type):
            raise TypeError(_A_CLASS.format(public_name(layer)))
    check_not_repeated(layers)
    if missing(layers) is not None:
        return Initializer(ft.partial(_stack_drawn, layers)), len(layers)
    return _stacked(layers), len(layers)


def _stack_drawn(layers: list[Any], key: Any) -> PyTree:
    return _stacked([init(x, key_at(key, f"[{i}]")) for i, x in enumerate(layers)])


def _stacked(layers: list[Any]) -> PyTree:
    for i, layer in enumerate(layers):
        if _form(layer) != _form(layers[0]):
            different = difference(layers[0], layer, _form)
            raise ValueError(_DIFFER.format(i, different))
    return _checked(jtu.tree_map(lambda *column: _as_one(column), *layers), len(layers))


def _checked(stacked: PyTree, length: int) -> PyTree:
    """The stacked layers; `ValueError` if two of them have equal keys in one place."""
    for visit in leaves(stacked):
        x = visit.node
        is_drawn = visit.is_a(Rng) or visit.is_a(State) and is_typed(x)
        if is_drawn and is_readable(x):
            data = np.asarray(data_of(x))
            data = data.reshape(length, -1, data.shape[-1])
            for column in data.swapaxes(0, 1):  # a layer may have several keys
                if len(np.unique(column, axis=0)) < length:
                    raise ValueError(_EQUAL_KEYS.format(visit.name or "its key"))
    return stacked


_EQUAL_KEYS: Final = """`es.nn.Stacked`: two layers have the same key, `{}`, and would \
draw the same numbers. Make each layer from a key of its own: \
`es.nn.Stacked.make(lambda key: es.nn.Dropout(0.5, key=key), jax.random.split(key, \
n))`. Or give the layers new keys first: `es.nn.Stacked(es.reseed(layers, 42))`."""


def _form(tree: PyTree) -> tuple[Any, list[Any]]:
    """Everything in a tree except the values of its arrays."""
    flat, treedef = jtu.tree_flatten(tree)
    return treedef, [(x.shape, x.dtype) if is_array(x) else (type(x), x) for x in flat]


def _as_one(column: tuple[Any, ...]) -> Any:
    first = column[0]
    if not is_array(first):
        return first
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in column):
        return jax.ShapeDtypeStruct((len(column), *first.shape), first.dtype)
    return np.stack(column) if all(map(is_numpy, column)) else jnp.stack(column)


_A_CLASS: Final = """`es.nn.Stacked` was given the class `{0}`, and takes layers: \
`es.nn.Stacked.make(lambda key: {0}(..., key=key), jax.random.split(key, n))`."""

_DIFFER: Final = """`es.nn.Stacked`: layers 0 and {} differ, {}. One program runs all \
layers, so they may differ only in the values of their arrays. Put layers that must \
differ into a list, or into several stacks. Wrap Equinox's stateful layers, whose \
state indices differ: `es.nn.Stateful(eqx.nn.BatchNorm(...))`."""


_Layer = TypeVar("_Layer")
_Made = TypeVar("_Made")


class Stacked(Module, Generic[_Layer]):
    """Layers of equal structure that run one after the other: `x = layer(x)` for each.

    The arrays of all layers are stacked along an extra first axis, and
    [`es.scan`][eqx_state.scan] runs the layers. Compile time and program size therefore
    do not grow with the number of layers. Each layer has its own state and keys.

    In the pytree, `blocks.layers.w` is one stacked array. Files, `es.state_dict`,
    filters and rules see one array per layer instead: `blocks[3].w`, without the extra
    axis, as in a list of layers. You can therefore load a list into a stack, and a
    stack into a list. A filter must select an array in all layers or in none.

    `len(stacked)`, `stacked[3]` (a layer), `stacked[2:5]` (an `es.nn.Stacked`) and `for
    layer in stacked` work as for a list, but return copies.

    Inside `es.shard_map` over the axis of the layers, a stack has the layers of its
    shard, such as those of one stage of a pipeline: for all of the above, and when it
    is called. Shard all arrays of the stack, also its keys: `axes={...: P("stage")}`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.numpy as jnp
        import jax.random as jr


        class Block(es.Module):
            linear: eqx.nn.Linear
            dropout: es.nn.Dropout

            def __init__(self, key):
                a, b = jr.split(key)
                self.linear = eqx.nn.Linear(4, 4, key=a)
                self.dropout = es.nn.Dropout(0.1, key=b)

            def __call__(self, x):
                return x + self.dropout(jnp.tanh(self.linear(x)))


        keys = jr.split(jr.key(0), 12)
        blocks = es.nn.Stacked.make(Block, keys, checkpoint=True)
        y, blocks = es.mutable(blocks)(jnp.ones(4))
        assert blocks.layers.linear.weight.shape == (12, 4, 4)

        as_list = [Block(key) for key in keys]
        assert es.state_dict(blocks).keys() == es.state_dict(as_list).keys()
        ```
    """

    layers: _Layer | Any  # kinds that the layer's class declares apply to all layers
    checkpoint: Any = eqx.field(static=True)
    unroll: int | bool = eqx.field(static=True)
    _length: int = eqx.field(static=True)

    _eqx_state_is_stack: ClassVar[bool] = True

    def __init__(
        self,
        layers: Iterable[_Layer],
        *,
        checkpoint: Callable[..., bool] | bool | None = None,
        unroll: int | bool = 1,
    ):
        """**Arguments:**

        - `layers`: the layers, at least one: modules, or any callable pytrees, that
            differ only in the values of their arrays. If one of them is not
            initialized, neither is the stack, and `init` initializes all layers.
        - `checkpoint`: `True` to recompute the values inside a layer in the backward
            pass (remat), or a policy of `jax.checkpoint` that selects the values to
            store, such as `jax.checkpoint_policies.dots_saveable`. Default: `None`,
            store all.
        - `unroll`: how many layers a step of the loop runs, as for `jax.lax.scan`;
            `True` for all. Default: 1.

        **Raises:**

        - `TypeError`: one of the layers is a class.
        - `ValueError`: the layers differ (the message names the first path), there are
            none, a stateful layer occurs twice, or two layers have the same random key
            (unless this runs in a trace, where keys are unknown).
        """
        self.checkpoint = checkpoint or None
        self.unroll = unroll
        self.layers, self._length = _stack(layers)

    @staticmethod
    def make(
        make_layer: Callable[[Any], _Made],
        keys: Any,
        *,
        checkpoint: Callable[..., bool] | bool | None = None,
        unroll: int | bool = 1,
    ) -> "Stacked[_Made]":
        """The stack of `make_layer(key)` for each key, created by one `vmap`.

        **Arguments:**

        - `make_layer`: takes a key, and returns a layer.
        - `keys`: one for each layer: `jax.random.split(key, n)`.
        - `checkpoint`, `unroll`: as for `es.nn.Stacked`.

        **Raises:**

        - `TypeError`: `keys` is a single key, or a number.
        - `ValueError`: two layers have the same random key.

        !!! example

            ```python
            import equinox as eqx
            import eqx_state as es
            import jax.random as jr


            def make_layer(key):
                return eqx.nn.MLP(4, 4, 8, 1, key=key)


            stacked = es.nn.Stacked.make(make_layer, jr.split(jr.key(0), 3))
            assert stacked(jr.normal(jr.key(1), (4,))).shape == (4,)
            ```
        """
        if isinstance(keys, int) or _is_one_key(keys):
            raise TypeError(
                "`es.nn.Stacked.make` takes one key for each layer, and was given a"
                f" single {'number' if isinstance(keys, int) else 'key'}: pass"
                " `jax.random.split(key, n)`."
            )
        keys = keys if is_array(keys) else jnp.stack(keys)
        layers = eqx.filter_vmap(make_layer)(keys)
        if missing(layers) is not None:
            # The `vmap` does not map a placeholder, so create the layers one by one.
            # (Use indices: JAX cannot iterate over typed keys in a trace.)
            each = [make_layer(keys[i]) for i in range(len(keys))]
            return Stacked(each, checkpoint=checkpoint, unroll=unroll)
        empty: Stacked[Any] = Stacked([()], checkpoint=checkpoint, unroll=unroll)
        return replace(empty, layers=_checked(layers, len(keys)), _length=len(keys))

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """**Arguments:**

        - `x`: the input of the first layer: an array, or a pytree of arrays.
        - `*args`, `**kwargs`: passed to each layer unchanged, except that a PRNG key in
            `key=` is split, so that each layer has its own, as in
            `equinox.nn.Sequential`.

        **Returns:**

        The output of the last layer. The output of each layer must have the structure,
        shapes and dtypes of `x`.

        **Raises:**

        - `TypeError`: the output of a layer has a different structure, shape or dtype
            than `x`.
        - `ValueError`: an array lacks the axis of the layers.
        - `es.NotInitializedError`: `init` has not been called.
        """
        layers, length = _ready(self), len(self)
        keys = {}
        if "key" in kwargs and not takes_key(layers):
            # `equinox.nn.Sequential` and `Stateful` pass a key to every layer.
            del kwargs["key"]
        elif _is_one_key(kwargs.get("key")):
            keys = {"key": jr.split(kwargs.pop("key"), length)}
        is_remat = bool(self.checkpoint)  # `es.configure` may have set it to `False`
        policy = None if self.checkpoint is True else self.checkpoint
        # In a loop, XLA cannot merge the recomputation with the forward pass, so a
        # barrier against that would only cost time.
        is_loop = length > 1 and self.unroll is not True and self.unroll <= 1

        # `es.capture` may replace the output of each layer by a value of its own.
        numbers = jnp.arange(length) if is_observed() else None

        def step(x: Any, of_layer: Any) -> tuple[Any, None]:
            layer, named, number = of_layer
            if number is not None:
                enter_layer(number, length)
            if is_remat:
                layer = remat(layer, policy=policy, prevent_cse=not is_loop)
            return layer(x, *args, **kwargs, **named), None

        x, _ = scan(step, x, (layers, keys, numbers), length, unroll=self.unroll)
        return x

    def __len__(self) -> int:
        return _length_of_shard(self) or self._length

    def __iter__(self) -> Iterator[_Layer]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> _Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        layers = _ready(self)
        # Raises for an index that is out of range, like a list. JAX would return the
        # last layer instead.
        chosen = range(len(self))[index]
        if isinstance(chosen, range):
            return replace(self, layers=_take(layers, index), _length=len(chosen))
        return _take(layers, chosen)


def _take(layers: PyTree, index: int | slice) -> PyTree:
    return jtu.tree_map(lambda x: slice_at(x, index) if is_array(x) else x, layers)


def _ready(stacked: Stacked[Any]) -> PyTree:
    """The layers of a stack; raises unless they are initialized and have its axis."""
    if isinstance(stacked.layers, Initializer):
        check_initialized(stacked)
    if _length_of_shard(stacked) and (visit := without_axis(stacked)) is not None:
        raise ValueError(_NOT_SHARDED.format(len(stacked), visit.name, len(visit.node)))
    check_stack(stacked)
    return stacked.layers


def _length_of_shard(stacked: Stacked[Any]) -> int | None:
    """The number of layers in one shard of a stack; `None` if it is not a shard."""
    if not (axes := manual_axes()):
        return None
    # `_length` is static, and so that of the whole stack. A first axis of a different
    # size may also be that of an ensemble: see whether the mesh can have split it.
    sizes = jax.sharding.get_abstract_mesh().shape
    num = math.prod(sizes[axis] for axis in axes)
    arrays = filter(is_array, jtu.tree_leaves(stacked.layers))
    size = next((len(x) for x in arrays if x.ndim), 0)
    parts, rest = divmod(stacked._length, size) if size else (0, 0)
    return size if parts > 1 and rest == 0 and num % parts == 0 else None


_NOT_SHARDED: Final = """This shard of an `es.nn.Stacked` has {} layers, but the first \
axis of its `{}` has size {}. In an `es.shard_map` over the layers, shard all arrays \
of a stack, also its keys: `axes={{...: P("stage")}}`; for a stack among the \
arguments, this mapping is its entry of `in_specs`."""


def _is_one_key(x: Any) -> bool:
    return is_key(x) and num_key_axes(x) == 0
