"""`es.to_equinox`: converts a model for code that uses an `eqx.nn.State`."""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._kinds.kinds import Rng, State
from ._state.lazy import check_ready
from ._state.scope import Scope
from ._transforms.mutable import run_on_copy
from ._tree.combinators import not_, trainable
from ._tree.compare import is_hole
from ._tree.dtypes import to_strong
from ._tree.keys import reseed
from ._tree.modes import train
from ._tree.parts import parts
from ._tree.select import filter, map, partition
from ._tree.walk import map_leaves, modules_in
from ._typing import PyTree


def labeled_index(label: str, value: Any) -> eqx.nn.StateIndex[Any]:
    """An index into Equinox's state, with a label as its marker."""
    # Equinox's marker is a new `object()`, so the treedefs of two equal trees with an
    # index would differ.
    index = eqx.nn.StateIndex(value)
    object.__setattr__(index, "marker", label)
    return index


def strong_arrays(value: PyTree) -> PyTree:
    """`value` with strongly typed arrays as leaves, for an `eqx.nn.State`."""
    return jax.tree.map(lambda x: to_strong(jnp.asarray(x)), value)


def takes_key(f: Any) -> bool:
    """Whether `f` has a parameter `key`."""
    parameters = inspect.signature(f).parameters.values()
    return any(p.name == "key" or p.kind is p.VAR_KEYWORD for p in parameters)


class _Layer(eqx.nn.StatefulLayer):
    """A model with holes for its state, which each call takes and returns."""

    model: PyTree
    index: eqx.nn.StateIndex[dict[str, Any]]
    names: tuple[str, ...] = eqx.field(static=True)
    inference: bool
    made_for_inference: bool = eqx.field(static=True)

    # Write `__init__` out: in a generated one, type checkers would count `__call__` as
    # a field.
    def __init__(self, model: Any, index: Any, names: tuple[str, ...], inference: bool):
        self.model, self.index, self.names = model, index, names
        self.inference = self.made_for_inference = inference

    def __call__(
        self, x: Any, state: eqx.nn.State, *, key: Any = None
    ) -> tuple[Any, eqx.nn.State]:
        values = state.get(self.index)
        if set(values) != set(self.names):
            raise ValueError(
                "This layer of `es.to_equinox` got the state of a different model."
                " Convert a model as a whole:"
                " `es.to_equinox(eqx.nn.Sequential([a, b]))`."
            )
        # Make the gradients of constants and frozen arrays zero: `eqx.filter_grad`
        # differentiates every inexact array.
        model = map(jax.lax.stop_gradient, self.model, on=not_(trainable))
        model = map_leaves(lambda v: values.get(v.name, v.node), model, is_hole)
        if self.inference != self.made_for_inference:
            model = train(model, not self.inference)
        options, kept = {}, {}
        if key is not None and takes_key(model):
            options = {"key": key}
        elif key is not None:
            kept = _values(filter(model, Rng))
            model = reseed(model, key)
        out, model = run_on_copy(model, Scope((State,)), lambda m: m(x, **options))
        return out, state.set(self.index, {**_values(filter(model, State)), **kept})


def _values(tree: PyTree) -> dict[str, Any]:
    return {part.name: part.value for part in parts(tree)}


def to_equinox(model: PyTree) -> tuple[Any, eqx.nn.State]:
    """A callable model as Equinox's pair of a stateful layer and its `eqx.nn.State`.

    Use it in code that passes an `equinox.nn.State` to its layers, and in an
    `equinox.nn.Sequential`. The layer contains the parameters, so you can differentiate
    it with `equinox.filter_grad`; all other arrays in it (an `es.Buffer`, a frozen
    module) have a gradient of zero. The layer has Equinox's flag `inference`:
    `equinox.nn.inference_mode` switches every module inside to eval mode.

    Convert a model as a whole: you cannot combine two converted layers in one model,
    because both would use the same entry of the `equinox.nn.State`. Stateful Equinox
    layers can be part of the model as `es.nn.Stateful`, but their own
    `equinox.nn.State` cannot be combined with that of the converted layer.

    Under `jax.vmap`, with `in_axes=(0, None)` and `out_axes=(0, None)`, all lanes share
    the state, including its keys. Either pass each lane a `key`, or convert the model
    for a whole batch: `es.to_equinox(es.vmap(model, axis_name="batch"))`.

    **Arguments:**

    - `model`: an `es.Module`, or any callable pytree with `es.Module`s in it.

    **Returns:**

    - `layer`, an `equinox.nn.StatefulLayer`: `layer(x, state, key=...)` returns `(y,
        state)`. A `key` is passed on to the model. If the model does not take one, the
        call draws from keys that are derived from `key`, and the keys in the state do
        not change.
    - `state`: every `es.State` of the model, by name.

    **Raises:**

    - `ValueError`, from the layer: the state comes from a model whose states have
        different names.
    - `es.NotInitializedError`: the model still contains an `es.Initializer`.
    - `ValueError`: one stateful module occurs twice in the model.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax
        import jax.numpy as jnp
        import jax.random as jr

        layer, state = es.to_equinox(es.nn.BatchNorm(3, axis_name="batch"))
        axes = {"in_axes": (0, None), "out_axes": (0, None)}
        xs = jr.normal(jr.key(0), (8, 3))
        ys, state = jax.vmap(layer, axis_name="batch", **axes)(xs, state)

        assert jnp.allclose(ys.mean(axis=0), 0, atol=1e-5)

        layer = eqx.nn.inference_mode(layer)
        ys, state = jax.vmap(layer, **axes)(xs + 1, state)
        assert not jnp.allclose(ys.mean(axis=0), 0, atol=1e-5)
        ```
    """
    check_ready(model)
    state, rest = partition(model, State)
    values = strong_arrays(_values(state))
    index = labeled_index("es.to_equinox", values)
    modes = [visit.node.training for visit in modules_in(model)]
    inference = bool(modes) and not any(modes)
    holes = eqx.nn.delete_init_state(index)
    layer = _Layer(rest, holes, tuple(values), inference)
    return layer, eqx.nn.State(index)
