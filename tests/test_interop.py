"""`es.to_equinox`: our models in code that passes Equinox's own state by hand."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import reuses_keys, untouched

import eqx_state as es


AXES = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}


class Cache(es.State):
    """A user-defined kind."""


class Net(es.Module):
    """All kinds, a plain Equinox layer, an array without a kind, and its own key."""

    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    cache: Cache
    scale: es.Buffer
    order: jax.Array

    def __init__(self, key):
        first, second = jr.split(key)
        self.linear = eqx.nn.Linear(3, 3, key=first)
        self.norm = es.nn.BatchNorm(3, axis_name="batch", momentum=0.9)
        self.dropout = es.nn.Dropout(0.5, key=second)
        self.cache = {"n": jnp.array(0), "key": jr.key(3)}
        self.scale = jnp.full(3, 2.0)
        self.order = jnp.array([2, 0, 1])

    def __call__(self, x):
        self.cache = {**self.cache, "n": self.cache["n"] + 1}
        x = self.norm(self.linear(x * self.scale)[self.order])
        return self.dropout(x)


class Keyed(es.Module):
    """Takes a key, and also draws from its own."""

    dropout: es.nn.Dropout
    stream: es.RngStream

    def __init__(self, key):
        first, second = jr.split(key)
        self.dropout = es.nn.Dropout(0.5, key=first)
        self.stream = es.RngStream(second)

    def __call__(self, x, *, key=None):
        return self.dropout(x, key=key) + jr.normal(self.stream(), x.shape)


def net():
    return Net(jr.key(0))


def data(seed, n=8):
    return 2 * jr.normal(jr.key(seed), (n, 3)) + 1


def batched(model):
    return es.mutable(es.vmap(model, axis_name="batch"))


def close(a, b, tolerance=1e-6):
    return bool(eqx.tree_equal(a, b, rtol=tolerance, atol=tolerance))


def same_values(state, model):
    """Whether an `eqx.nn.State` contains the `es.State` of a model."""
    ours = sorted(repr(p.value) for p in es.parts(es.filter(model, es.State)))
    return ours == sorted(map(repr, jax.tree.leaves(state)))


# --- The same as `es.mutable` ---------------------------------------------------------


def test_a_whole_batch_equals_es_mutable():
    model = net()
    with untouched(model):
        layer, state = es.to_equinox(es.vmap(model, axis_name="batch"))

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def call(layer, state, xs):
        return layer(xs, state)

    step = eqx.filter_jit(lambda model, xs: batched(model)(xs))
    for seed in range(3):
        y, state = call(layer, state, data(seed))
        expected, model = step(model, data(seed))
        assert close(y, expected)
        assert same_values(state, model)


def test_gradients_with_equinox_alone():
    layer, state = es.to_equinox(net())
    model = net()
    keys = jr.split(jr.key(5), 8)

    @ft.partial(eqx.filter_value_and_grad, has_aux=True)
    def loss(layer, state, xs):
        call = jax.vmap(lambda x, k: layer(x, state, key=k), 0, (0, None), "batch")
        y, state = call(xs, keys)
        return jnp.mean(y**2), state

    (_, state), grads = loss(layer, state, data(0))
    nonzero = {p.name for p in es.parts(grads) if (p.value != 0).any()}
    assert {"model.linear.weight", "model.norm.weight", "model.norm.bias"} <= nonzero
    assert "model.scale" not in nonzero
    trained = {p.name for p in es.parts(es.filter(layer, es.trainable))}
    expected = {f"model.{p.name}" for p in es.parts(es.filter(model, es.trainable))}
    assert trained == expected


# --- Like Equinox's own layers --------------------------------------------------------


def test_which_arrays_are_in_the_layer_and_which_in_the_state():
    layer, state = es.to_equinox(net())
    again = jax.tree.structure(es.to_equinox(net()))
    assert jax.tree.structure((layer, state)) == again
    assert hash(jax.tree.structure((layer, state))) == hash(again)
    assert isinstance(layer, eqx.nn.StatefulLayer)
    assert {p.name for p in es.parts(layer)} == {
        "model.linear.weight",
        "model.linear.bias",
        "model.norm.weight",
        "model.norm.bias",
        "model.scale",
        "model.order",
    }
    # In Equinox's layers, too, `inference` is a leaf.
    assert {type(x) for x in jax.tree.leaves(layer) if not eqx.is_array(x)} == {bool}
    assert len(jax.tree.leaves(state)) == 6
    assert {p.kind for p in es.parts(state)} == {es.State}


def test_serialization_and_substates(tmp_path):
    layer, state = es.to_equinox(es.nn.BatchNorm(3))
    _, state = layer(data(0), state)
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", (layer, state))
    like = es.to_equinox(es.nn.BatchNorm(3))
    again = eqx.tree_deserialise_leaves(tmp_path / "x.eqx", like)
    assert eqx.tree_equal(again, (layer, state))
    assert eqx.tree_equal(state.update(state.substate(layer)), again[1])


# --- Modes ----------------------------------------------------------------------------


def test_inference_mode_is_eval_mode():
    layer, state = es.to_equinox(es.vmap(net(), axis_name="batch"))
    y, state = layer(data(0), state)
    _, model = batched(net())(data(0))
    off = eqx.nn.inference_mode(layer)
    assert (layer.inference, off.inference) == (False, True)
    y, state = off(data(1), state)
    expected, model = batched(model.eval())(data(1))
    assert close(y, expected)
    y, state = eqx.nn.inference_mode(off, False)(data(2), state)
    expected, model = batched(model.train())(data(2))
    assert close(y, expected)
    assert same_values(state, model)


def test_the_flag_alone_switches_the_model():
    layer, state = es.to_equinox(es.nn.BatchNorm(3))
    layer = eqx.tree_at(lambda layer: layer.inference, layer, replace=True)
    assert close(layer(data(0), state)[0], es.nn.BatchNorm(3).eval()(data(0)))


def test_a_model_converted_in_eval_mode_can_train():
    layer, state = es.to_equinox(es.nn.BatchNorm(3).eval())
    assert layer.inference
    y, state = layer(data(0), state)
    assert close(y, data(0) / jnp.sqrt(1 + 1e-5))
    y, state = eqx.nn.inference_mode(layer, False)(data(0), state)
    expected, model = es.mutable(es.nn.BatchNorm(3))(data(0))
    assert close(y, expected)
    assert same_values(state, model)
    y, _ = es.eval(es.train(layer))(data(0), state)
    assert close(y, model.eval()(data(0)))


# --- Keys -----------------------------------------------------------------------------


@reuses_keys
def test_a_key_is_passed_on_to_a_model_that_takes_one():
    model = Keyed(jr.key(0))
    layer, state = es.to_equinox(model)
    for key in (jr.key(7), None, jr.key(8)):
        y, state = layer(jnp.ones(3), state, key=key)
        expected, model = es.mutable(model)(jnp.ones(3), key=key)
        assert close(y, expected)
    assert same_values(state, model)


def keys_in(state):
    return [x for x in jax.tree.leaves(state) if x.dtype == jr.key(0).dtype]


@reuses_keys
def test_a_key_for_a_model_that_takes_none_is_used_for_its_own_keys():
    layer, state = es.to_equinox(net())
    before = keys_in(state)
    axes = {**AXES, "in_axes": (0, None, 0)}
    call = jax.vmap(lambda x, state, key: layer(x, state, key=key), **axes)
    xs, keys = data(0).at[1:].set(1), jr.split(jr.key(1), 8)
    y, new = call(xs, state, keys)
    # Each example has its own mask.
    assert len({str(row) for row in np.asarray(y[1:] == 0)}) > 1
    assert keys_in(new)[0] == before[0]
    assert close(y, call(xs, state, keys)[0])
    shared, _ = jax.vmap(layer, **AXES)(xs, state)
    assert len({str(row) for row in np.asarray(shared[1:] == 0)}) == 1


# --- In both directions ---------------------------------------------------------------


# --- Bad input ------------------------------------------------------------------------


def test_a_model_before_init():
    with pytest.raises(es.NotInitializedError, match=r"`rng` is an `es.Initializer`"):
        es.to_equinox(es.nn.Dropout(0.5))


def test_the_state_of_a_different_model_is_rejected():
    norm, norm_state = es.to_equinox(es.nn.BatchNorm(2))
    _, other_state = es.to_equinox(eqx.nn.Sequential([es.nn.BatchNorm(2)]))
    with pytest.raises(ValueError, match=r"a different model.*eqx\.nn\.Sequential"):
        norm(jnp.ones((3, 2)), norm_state.update(other_state))
