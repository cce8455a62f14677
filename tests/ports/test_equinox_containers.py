"""Our layers inside Equinox's containers: training, modes, keys, state."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import rejects

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


class Counter(es.Module):
    """Counts its calls, and records whether it received a key."""

    count: es.State = 0
    keyed: es.State = False

    def __call__(self, x, *, key=None):
        if self.training:
            self.keyed = key is not None
            self.count = self.count + 1
        return x


class Gain(es.Module):
    """An activation with a parameter and a running statistic."""

    gain: es.Parameter
    peak: es.BatchStat = 0.0

    def __call__(self, x):
        if self.training:
            peak = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(x)), "batch")
            self.peak = jnp.maximum(self.peak, peak)
        return self.gain * jnp.tanh(x)


def data(seed, n=8):
    return jr.normal(jr.key(seed), (n, 3)) + 1


def batched(model):
    return es.mutable(es.vmap(model, axis_name="batch"))


# --- Sequential -----------------------------------------------------------------------


# --- Other containers -----------------------------------------------------------------


def test_an_mlp_with_an_activation_that_has_state():
    # `eqx.nn.MLP` stores one activation per feature, and calls slices of it.
    model = eqx.nn.MLP(2, 2, 4, 2, activation=Counter(), key=jr.key(0))
    assert model.activation.count.shape == (2, 4)
    with rejects(model, FROZEN, r"Counter\.keyed", "copy"):
        es.mutable(model)(jnp.ones(2))
    gain = Gain(jnp.ones((2, 4)), jnp.zeros((2, 4)))
    model = es.eval(eqx.tree_at(lambda m: m.activation, model, gain))
    _, grads = es.value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones(2))
    assert (grads.activation.gain != 0).all()


def test_weight_norm_around_a_layer_of_ours():
    class Scaled(es.Module):
        weight: es.Parameter
        calls: es.State = 0

        def __call__(self, x):
            self.calls = self.calls + 1
            return self.weight @ x

    weight = jnp.arange(6.0).reshape(2, 3) + 1
    model = eqx.nn.WeightNorm(Scaled(weight))
    # `WeightNorm` calls a copy of the layer with a different weight, so writes are
    # lost.
    with pytest.raises(FROZEN, match=r"(?s)Scaled\.calls.*It is a copy"):
        es.mutable(model)(jnp.ones(3))


def test_our_state_beside_equinoxs_in_one_sequential():
    norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
    inner = eqx.nn.Sequential([es.nn.Stateful(norm), Counter()])
    _, new = batched(inner)(data(0))
    assert new.layers[0].layer.batch_counter.init == new.layers[1].count == 1
    # Equinox's own layer requires a state argument.
    bare = eqx.nn.Sequential([norm, Counter()])
    with pytest.raises((AttributeError, TypeError, ValueError), match="get|state"):
        batched(bare)(data(0))
