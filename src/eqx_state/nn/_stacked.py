"""Layers of one structure as one: a program as small as that of a single layer."""

import functools as ft
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, Generic, NamedTuple, overload, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

from .._errors import show
from .._interop import takes_key
from .._state.init import check_initialized, init, Initializer, missing
from .._state.module import Module
from .._transforms.checkpoint import checkpoint as remat
from .._transforms.loops import scan
from .._transforms.transform import why_not_called
from .._tree.compare import check_not_shared, difference, same
from .._tree.keys import is_key, key_at, num_key_axes
from .._tree.parts import layer_of
from .._tree.walk import copy_tree, is_array, is_numpy, leaves
from .._typing import PyTree


# --- Several layers as one, each array with an axis more.


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


_Layer = TypeVar("_Layer")
_Made = TypeVar("_Made")


class Stacked(Module, Generic[_Layer]):
    """Layers of one structure, which run in turn: `x = layer(x)` for each of them.

    Each array has a first axis, along which it holds those of the layers, and
    [`es.scan`][eqx_state.scan] runs them. So the time to compile and the size of the
    program do not grow with the number of layers. State and keys are each layer's own.

    In a tree the arrays are as they are: `blocks.layers.w` is one array. In files and
    in `es.state_dict` they have the names that they have in a list of layers,
    `blocks[3].w`, so that each can be loaded from the other. Filters and rules are
    asked once for each layer, by that name and without the stack's axis. An array is
    selected in all layers or in none.

    `len(stacked)`, `stacked[3]` (a layer), `stacked[2:5]` (an `es.nn.Stacked`) and `for
    layer in stacked` are as for a list, but what they return are copies.

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

    layers: _Layer | Any  # what is said of one layer holds for all
    checkpoint: Any = eqx.field(static=True)
    unroll: int | bool = eqx.field(static=True)
    length: int = eqx.field(static=True)

    _eqx_state_is_stack: ClassVar[bool] = True

    def __init__(
        self,
        layers: Iterable[_Layer],
        *,
        checkpoint: Callable[..., bool] | bool | None = None,
        unroll: int | bool = 1,
    ):
        """**Arguments:**

        - `layers`: the layers, at least one: modules, or any pytrees that can be
            called, which differ in nothing but the values of their arrays. If one of
            them is not initialized, the stack is not, and `init` makes all of them.
        - `checkpoint`: `True` to recompute the values inside a layer in the backward
            pass (remat), or a policy of `jax.checkpoint`, which says what is kept, such
            as `jax.checkpoint_policies.dots_saveable`. Default: `None`, keep all.
        - `unroll`: how many layers a step of the loop runs, as for `jax.lax.scan`;
            `True` for all. Default: 1.

        **Raises:**

        - `ValueError`: the layers differ (the message has the first path), there are
            none, or a stateful one occurs twice; or `unroll` is not positive.
        - `TypeError`: `layers` is a single layer, or an option is of the wrong type.
        """
        self.checkpoint = _checked_policy(checkpoint)
        self.unroll = _checked_unroll(unroll)
        self.layers, self.length = stack(layers)

    @staticmethod
    def make(
        make_layer: Callable[[Any], _Made],
        keys: Any,
        *,
        checkpoint: Callable[..., bool] | bool | None = None,
        unroll: int | bool = 1,
    ) -> "Stacked[_Made]":
        """The stack of `make_layer(key)` for each key, made by one `vmap`.

        **Arguments:**

        - `make_layer`: takes a key, and returns a layer.
        - `keys`: one for each layer: `jax.random.split(key, n)`.
        - `checkpoint`, `unroll`: as for `es.nn.Stacked`.

        **Raises:**

        - `TypeError`: `make_layer` is not a function of a key; or `keys` is not an
            array with an axis for the layers, or a list of keys.

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
        if not callable(make_layer):
            raise TypeError(_MAKE.format(type(make_layer).__qualname__))
        keys = _checked_keys(keys)
        if (problem := why_not_called(make_layer, keys[0])) is not None:
            name = getattr(make_layer, "__qualname__", "make_layer")
            raise TypeError(_OTHER_ARGUMENTS.format(name, problem))
        layers: Any = Stack(eqx.filter_vmap(make_layer)(keys), len(keys))
        if missing(layers.layers) is not None:
            # A placeholder knows nothing of the `vmap` that it was made under.
            # (And JAX cannot iterate over typed keys in a trace.)
            layers = [make_layer(keys[i]) for i in range(len(keys))]
        return Stacked(layers, checkpoint=checkpoint, unroll=unroll)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """**Arguments:**

        - `x`: what the first layer takes: an array, or a pytree of arrays.
        - `*args`, `**kwargs`: given to each layer, as they are. Only a PRNG key that is
            passed as `key=` is split, so that each layer has one of its own, as in
            `equinox.nn.Sequential`.

        **Returns:**

        What the last layer returns. Each layer must return what the next one takes:
        with the structure, the shapes and the dtypes of `x`.

        **Raises:**

        - `TypeError`: a layer returned something unlike `x`.
        - `ValueError`: an array has another first axis than that of the layers.
        - `es.NotInitializedError`: the layers are to be made by `init`.
        """
        layers, length = _ready(self), self.length
        keys = {}
        if "key" in kwargs and not takes_key(layers):
            # `equinox.nn.Sequential` gives one to every layer, as does `Stateful`.
            del kwargs["key"]
        elif _is_one_key(kwargs.get("key")):
            keys = {"key": jr.split(kwargs.pop("key"), length)}
        is_remat = self.checkpoint is not None
        policy = None if self.checkpoint is True else self.checkpoint
        # In a loop nothing is common to forward and backward pass that XLA could merge
        # again, and a barrier would only be in its way.
        is_loop = length > 1 and self.unroll is not True and self.unroll <= 1

        def step(x: Any, layer_and_key: Any) -> tuple[Any, None]:
            layer, named = layer_and_key
            if is_remat:
                layer = remat(layer, policy=policy, prevent_cse=not is_loop)
            y = layer(x, *args, **kwargs, **named)
            _check_alike(x, y)
            return y, None

        x, _ = scan(step, x, (layers, keys), length, unroll=self.unroll)
        return x

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[_Layer]:
        return (self[i] for i in range(self.length))

    @overload
    def __getitem__(self, index: int) -> _Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            new = copy_tree(self)
            length = len(range(self.length)[index])
            object.__setattr__(new, "layers", _take(_ready(self), index))
            object.__setattr__(new, "length", length)
            return new
        try:
            index = operator.index(index)
        except TypeError:
            raise TypeError(_INDEX.format(type(index).__qualname__)) from None
        if not -self.length <= index < self.length:
            raise IndexError(_OUT_OF_RANGE.format(index, self.length))
        return _take(_ready(self), index)


def _take(layers: PyTree, index: int | slice) -> PyTree:
    return jtu.tree_map(lambda x: layer_of(x, index) if is_array(x) else x, layers)


def _ready(stacked: Stacked[Any]) -> PyTree:
    """The layers of a stack, if they are initialized and have the stack's axis."""
    layers = stacked.layers
    if isinstance(layers, Initializer):
        check_initialized(stacked)
    for visit in leaves(layers):
        x = visit.node
        if is_array(x) and x.shape[:1] != (stacked.length,):
            where = f"layers.{visit.name}".rstrip(".")
            raise ValueError(_NO_AXIS.format(where, x.shape, stacked.length))
    return layers


def _is_one_key(x: Any) -> bool:
    return is_key(x) and num_key_axes(x) == 0


def _check_alike(x: PyTree, y: PyTree) -> None:
    """Raise `TypeError` unless the next layer can take what a layer returned."""
    before, after = jtu.tree_leaves(x), jtu.tree_leaves(y)
    is_alike = jtu.tree_structure(x) == jtu.tree_structure(y) and all(
        # JAX makes the first carry strong, and so may change its dtype.
        not (is_array(a) and is_array(b))
        or (a.shape == b.shape and (a.dtype == b.dtype or jax.typeof(a).weak_type))
        for a, b in zip(before, after, strict=True)
    )
    if not is_alike:
        raise TypeError(_UNALIKE.format(show(x), show(y)))


# --- Options --------------------------------------------------------------------------


def _checked_keys(keys: Any) -> Any:
    if _is_one_key(keys):
        raise TypeError(_KEYS.format("a single key"))
    if is_array(keys) and keys.ndim > 0:
        return keys
    if isinstance(keys, (list, tuple)) and keys and all(map(_is_one_key, keys)):
        return jnp.stack(keys)
    raise TypeError(_KEYS.format(f"a `{type(keys).__qualname__}`"))


def _checked_policy(checkpoint: Any) -> Any:
    if checkpoint is None or isinstance(checkpoint, bool):
        return checkpoint or None
    if not callable(checkpoint):
        raise TypeError(_POLICY.format(checkpoint))
    return checkpoint


def _checked_unroll(unroll: Any) -> int | bool:
    if isinstance(unroll, bool):
        return unroll
    try:
        number = operator.index(unroll)
    except TypeError:
        raise TypeError(_UNROLL.format(unroll)) from None
    if number < 1:
        raise ValueError(_UNROLL.format(unroll))
    return number


_MAKE: Final = """`es.nn.Stacked.make` takes a function of a key that returns a layer, \
and was given a `{}`: `es.nn.Stacked.make(Block, keys)`. Layers that are there already \
are stacked by `es.nn.Stacked(layers)`."""

_OTHER_ARGUMENTS: Final = """`es.nn.Stacked.make` calls `{0}` with a key and nothing \
else, and it takes other arguments: {1}. Write a function of the key that gives them:

    es.nn.Stacked.make(eqx.nn.Linear, keys)                                # wrong
    es.nn.Stacked.make(lambda key: eqx.nn.Linear(8, 8, key=key), keys)     # right"""

_KEYS: Final = """`es.nn.Stacked.make` takes one key for each layer, and was given {}:

    es.nn.Stacked.make(make_layer, key)                        # wrong
    es.nn.Stacked.make(make_layer, jax.random.split(key, n))   # right"""

_POLICY: Final = """`es.nn.Stacked(checkpoint={!r})`: it is `None` (keep all that the \
backward pass needs), `True` (recompute it), or a policy of `jax.checkpoint`, such as \
`jax.checkpoint_policies.dots_saveable`."""

_UNROLL: Final = """`es.nn.Stacked(unroll={!r})`: it is the number of layers that one \
step of the loop runs, at least 1, or `True` for all."""

_NO_AXIS: Final = """`{}` of an `es.nn.Stacked` has shape {}, and the first axis of \
each of its arrays has to be that of its {} layers. If these are several models, map \
over them: `es.vmap(model, axes={{...: 0}})`."""

_UNALIKE: Final = """A layer of an `es.nn.Stacked` was given `{}`, and returned `{}`. \
The next layer takes what it returns, by the same program, so structure, shapes and \
dtypes must stay. Change them before the stack or after it, or cast what the layer \
returns: `y.astype(x.dtype)`."""

_INDEX: Final = """A layer of an `es.nn.Stacked` is chosen by an integer or a slice, \
and not by a `{}`. For an index that is traced: `jax.tree.map(lambda w: w[i], \
stacked.layers)`."""

_OUT_OF_RANGE: Final = """There is no layer {}: the `es.nn.Stacked` has {} layers."""
