"""Stateful layers and models of Equinox, and ways to run them over a batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqx_state as es


def close(a, b, tolerance=1e-6):
    return bool(eqx.tree_equal(a, b, rtol=tolerance, atol=tolerance))


class Inner(eqx.nn.StatefulLayer):
    total: eqx.nn.StateIndex

    def __init__(self, size):
        self.total = eqx.nn.StateIndex({"sum": jnp.zeros(size), "n": jnp.array(0)})

    def __call__(self, x, state, *, key=None):
        old = state.get(self.total)
        new = {"sum": old["sum"] + 1, "n": old["n"] + 1}
        return x + new["sum"], state.set(self.total, new)


class Net(eqx.Module):
    """A user's model: parameters, a nested layer with state, a key and a counter."""

    linear: eqx.nn.Linear
    inner: Inner
    rng: eqx.nn.StateIndex
    calls: eqx.nn.StateIndex

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 3, key=key)
        self.inner = Inner(3)
        self.rng = eqx.nn.StateIndex(jr.key(1))
        self.calls = eqx.nn.StateIndex(0)

    def __call__(self, x, state, *, key=None):
        new, draw = jr.split(state.get(self.rng))
        state = state.set(self.rng, new)
        state = state.set(self.calls, state.get(self.calls) + 1)
        noise = jr.normal(draw if key is None else key, (3,))
        y, state = self.inner(jnp.tanh(self.linear(x)) + noise, state)
        return y, state


def batch_norm(mode):
    return lambda key: eqx.nn.BatchNorm(3, "batch", momentum=0.9, mode=mode)


def relu(x):
    return jax.nn.relu(x)  # `deepcopy` would copy the object `jax.nn.relu`


def spectral(key):
    key, subkey = jr.split(key)
    linear = eqx.nn.Linear(3, 3, key=key)
    return eqx.nn.SpectralNorm(linear, "weight", key=subkey)


def sequential(key):
    first, second, third = jr.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(3, 3, key=first),
            batch_norm("ema")(None),
            eqx.nn.Lambda(relu),
            spectral(second),
            eqx.nn.Sequential([eqx.nn.Identity(), batch_norm("batch")(None)]),
            eqx.nn.Linear(3, 3, key=third),
        ]
    )


class Twice(eqx.Module):
    a: Inner
    b: Inner

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __call__(self, x, state):
        y, state = self.a(x, state)
        return self.b(y, state)


class Counter(es.Module):
    count: es.State = 0

    def __call__(self, x, *, key=None):
        self.count = self.count + 1
        return x


def data(seed, n=8):
    return 2 * jr.normal(jr.key(seed), (n, 3)) + 1


def by_hand(layer, state, xs):
    """A batch in Equinox, with the state passed by hand."""
    axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
    return jax.vmap(layer, **axes)(xs, state)


@eqx.filter_jit
def _batched(model, *args, **kwargs):
    return es.mutable(es.vmap(model, axis_name="batch"))(*args, **kwargs)


def batched(model):
    """A compiled call in train mode over a batch."""
    return eqx.Partial(_batched, model)
