"""Seed 001 (Treex): programs V1 to V3 and the rows of PEERS.md which it describes.

A test is named after its row. Where a frozen module needs another spelling than the
seed's, or the seed has a fault, one line says so.
"""

import dataclasses
import itertools
from functools import partial
from typing import List  # noqa: UP035 (the seed's own spelling)

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqx_state as es


class Linear(es.Module):
    w: es.Parameter
    b: es.Parameter

    def __init__(self, din, dout):
        self.w = es.Initializer(lambda key: jr.uniform(key, (din, dout)))
        self.b = jnp.zeros((dout,))

    def __call__(self, x):
        return jnp.dot(x, self.w) + self.b


class MLP(es.Module):
    layers: List[eqx.nn.Linear]  # noqa: UP006

    def __init__(self, features):
        self.layers = [
            es.lazy(eqx.nn.Linear, din, dout)
            for din, dout in itertools.pairwise(features)
        ]

    def __call__(self, x):
        for linear in self.layers[:-1]:
            x = jax.nn.relu(linear(x))
        return self.layers[-1](x)


class Average(es.Module):
    count: es.State
    total: es.State

    def __init__(self):
        self.count = jnp.array(0)
        self.total = jnp.array(0.0)

    def __call__(self, x):
        self.count += x.size
        self.total += jnp.sum(x)
        return self.total / self.count.astype(x.dtype)


class Dropout(es.Module):
    rng: es.Rng
    rate: float = eqx.field(static=True)

    def __init__(self, rate):
        self.rng = es.Initializer(lambda key: key)
        self.rate = rate

    def __call__(self, x):
        if not self.training:
            return x
        key, self.rng = jr.split(self.rng)
        keep = jr.bernoulli(key, 1 - self.rate, x.shape)
        return jnp.where(keep, x / (1 - self.rate), 0.0)


class CountedLinear(es.Module):
    """A model whose leaves are not all parameters."""

    linear: Linear
    calls: es.State

    def __init__(self, din, dout):
        self.linear = Linear(din, dout)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return jax.vmap(self.linear)(x)


class MyModule(es.Module):
    a: es.Parameter
    b: es.Parameter

    def __init__(self):
        self.a = es.Initializer(lambda key: jr.uniform(key, (1,)))
        self.b = 2


class Dependent(es.Module):
    a: es.Parameter
    b: es.Parameter

    def __init__(self):
        self.a = None
        self.b = None

    def module_init(self, key):
        self.a = jr.uniform(key, (1,))
        self.b = 2.0 * self.a


def mse(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def data(size, low, f):
    rng = np.random.default_rng(0)
    x = rng.uniform(low, 1, size=(size, 1))
    y = f(x) - 0.3 + rng.normal(scale=0.1, size=(size, 1))
    return x.astype(np.float32), y.astype(np.float32)


# --- V1, V2, V3: the programs -------------------------------------------------------


def test_V1_mlp_trained_with_plain_jax():
    model = MLP([1, 12, 8, 1]).init(42)
    x, y = data(100, -1, lambda x: 1.4 * x**2)
    loss_fn = jax.jit(jax.grad(mse))

    def sdg(param, grad):
        return param - 0.01 * grad

    grads = loss_fn(model, x, y)
    assert type(grads) is MLP
    assert jax.tree.structure(grads) == jax.tree.structure(model)

    @jax.jit
    def train(model):
        def step(_, model):
            return jax.tree.map(sdg, model, loss_fn(model, x, y))

        return lax.fori_loop(0, 10_000, step, model)

    before, model = mse(model, x, y), train(model)
    assert type(model) is MLP
    assert mse(model, x, y) < min(0.02, before / 4)  # the noise alone is 0.01
    model = model.eval()
    assert not model.training
    assert jax.vmap(model)(x).shape == (100, 1)


def params_first_step(model, optimizer, x, y):
    @partial(jax.value_and_grad, has_aux=True)
    def loss_fn(params, model, x, y):
        model = model.update(params)
        return mse(model, x, y), model

    params = model.filter(es.Parameter)
    (loss, model), grads = loss_fn(params, model, x, y)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


def lifted_step(model, optimizer, x, y):
    (loss, model), grads = es.value_and_grad(mse)(model, x, y)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


@jax.numpy_dtype_promotion("standard")  # for `optax.adam`, which has `float ** int`
@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
@pytest.mark.parametrize("step", [params_first_step, lifted_step])
def test_V2_linear_regression_with_adam(step, jit):
    x, y = data(500, 0, lambda x: 1.4 * x)
    model = Linear(1, 1).init(42)
    optimizer = es.Optimizer(optax.adam(0.01)).init(model.filter(es.Parameter))
    train_step = jit(eqx.debug.assert_max_traces(step, max_traces=1))
    for _ in range(1000):
        loss, model, optimizer = train_step(model, optimizer, x, y)
    assert loss < 0.012
    model = model.eval()
    assert np.allclose(model.w, 1.4, atol=0.05)
    assert np.allclose(model.b, -0.3, atol=0.05)
    test = jnp.linspace(x.min(), x.max(), 100)[:, None]
    assert jax.vmap(model)(test).shape == (100, 1)


def test_V3_P1_average_updates_itself():
    average = Average()
    mean, average = es.mutable(average)(jnp.arange(4.0))
    assert (mean, average.count, average.total) == (1.5, 4, 6.0)
    mean, average = es.mutable(average)(jnp.full((2, 3), 2.0))
    assert (mean, average.count, average.total) == (1.8, 10, 18.0)
    assert jax.tree.leaves(average) == [10, 18.0]
    assert jax.tree.leaves(average.filter(es.State)) == [10, 18.0]
    assert jax.tree.leaves(average.filter(es.Parameter)) == []


@jax.debug_key_reuse(False)  # one model is called twice, on purpose
def test_V3_H1_dropout_splits_its_own_key():
    dropout = Dropout(0.5)
    assert repr(dropout) == "Dropout(rng=Initializer, rate=0.5)"
    dropout = dropout.init(42)
    x = jnp.ones(100)
    first, dropout1 = es.mutable(dropout)(x)
    second, _ = es.mutable(dropout1)(x)
    again, _ = es.mutable(dropout)(x)
    assert set(first.tolist()) == {0.0, 2.0}
    assert not jnp.array_equal(first, second)
    assert jnp.array_equal(first, again)
    expected = jr.split(dropout.rng)[1]
    assert jnp.array_equal(jr.key_data(dropout1.rng), jr.key_data(expected))
    unchanged, same = es.mutable(dropout.eval())(x)
    assert jnp.array_equal(unchanged, x)
    assert eqx.tree_equal(same, dropout.eval())


@pytest.mark.parametrize("base", [es.TreePart, es.State])
def test_V3_B11_own_kind(base):
    class Cache(base):
        pass

    class MyModule(es.Module):
        memory: Cache
        w: es.Parameter

        def remember(self, x):
            self.memory = x

    module = MyModule(jnp.zeros(2), jnp.ones(2))
    _, module = es.mutable(module.remember, kinds=Cache)(jnp.arange(2.0))
    (memory,) = jax.tree.leaves(module.filter(Cache))
    assert memory.tolist() == [0.0, 1.0]
    assert bool(jax.tree.leaves(module.filter(es.State))) == issubclass(Cache, es.State)
    assert module.filter(es.Parameter).memory is None


def test_V3_D3_D5_initializer_is_a_placeholder():
    module = MyModule()
    # a number in a kind is an array here, so `b=2` prints as one
    assert repr(module) == "MyModule(a=Initializer, b=i32[])"
    assert not module.initialized
    filled = module.init(42)
    assert repr(filled) == "MyModule(a=f32[1], b=i32[])"
    assert filled.initialized
    assert filled.b == 2
    assert 0 <= filled.a.item() < 1
    assert not module.initialized


def test_V3_D4_module_init_may_fill_every_field():
    module = Dependent()
    assert not module.initialized
    filled = module.init(42)
    assert filled.initialized
    assert filled.b == 2 * filled.a
    assert repr(filled) == "Dependent(a=f32[1], b=f32[1])"
    assert module.a is None


def test_V3_D4_initializers_are_called_first():
    class MyModule(es.Module):
        a: es.Parameter
        b: es.Parameter | None = None

        def module_init(self, key):
            self.b = jnp.concatenate([self.a, jr.normal(key, (1,))])

    module = MyModule(es.Initializer(lambda key: jr.uniform(key, (2,)))).init(0)
    assert jnp.array_equal(module.b[:2], module.a)


# --- G, H, I: state, keys, mode -----------------------------------------------------


def test_G2_the_model_comes_out_with_the_loss():
    def loss_fn(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    @partial(jax.value_and_grad, has_aux=True)
    def seed_loss(params, model, x, y):
        return es.mutable(loss_fn)(model.update(params), x, y)

    x, y = jnp.ones((2, 3)), jnp.zeros((2, 5))
    model = CountedLinear(3, 5).init(42)
    params = model.filter(es.Parameter)
    expected = seed_loss(params, model, x, y)
    (loss, new), grads = es.value_and_grad(loss_fn)(model, x, y)
    assert new.calls == 1
    assert eqx.tree_equal(((loss, new), grads), expected, rtol=1e-6)


class Wrapped(es.Module):
    inner: Average

    def __call__(self, x):
        return jax.vmap(lambda x: self.inner(x))(x)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: Average()(x), dataclasses.FrozenInstanceError),
        (
            lambda x: jax.jit(lambda model, x: model(x))(Average(), x),
            dataclasses.FrozenInstanceError,
        ),
        (lambda x: jax.vmap(Average())(x), dataclasses.FrozenInstanceError),
        (lambda x: es.mutable(Wrapped(Average()))(x), es.TraceError),
    ],
    ids=["eager", "jit", "vmap", "vmap of a closure"],
)
def test_G8_lost_updates_are_errors(call, error):
    with pytest.raises(error, match="count"):
        call(jnp.ones((3, 2)))


def test_I1_modes_reach_all_submodules():
    class Model(es.Module):
        dropout: list[Dropout]
        foreign: eqx.nn.Dropout
        w: es.Parameter

    model = Model([Dropout(0.5)], eqx.nn.Dropout(), jnp.ones(1)).init(0)
    evaluating = model.eval()
    assert model.training
    assert model.dropout[0].training
    assert not model.foreign.inference
    assert not evaluating.training
    assert not evaluating.dropout[0].training
    assert evaluating.foreign.inference
    assert eqx.tree_equal(evaluating.train(), model)


@pytest.mark.parametrize(
    "layer",
    [es.nn.Dropout(0.5, key=jr.key(1)), es.nn.BatchNorm(3, "batch")],
    ids=["dropout", "batch norm"],
)
def test_I2_mode_conditions_dropout_and_batch_norm(layer):
    x = jr.normal(jr.key(0), (64, 3))
    trained, new = es.mutable(es.vmap(layer, axis_name="batch"))(x)
    assert not eqx.tree_equal(new, layer)
    evaluating = new.eval()
    evaluated, same = es.mutable(es.vmap(evaluating, axis_name="batch"))(x)
    assert eqx.tree_equal(same, evaluating)
    assert not jnp.allclose(trained, evaluated)


# --- J, K: transforms, optimizer -----------------------------------------


def test_J1_a_module_is_an_argument_and_a_result_of_jit():
    @jax.jit
    def step(model, x):
        return es.mutable(model)(x)

    model = CountedLinear(3, 5).init(42)
    out, model = step(model, jnp.ones((2, 3)))
    assert out.shape == (2, 5)
    assert model.calls == 1
    _, model = step(model, jnp.ones((2, 3)))
    assert model.calls == 2


def test_K1_K6_the_optimizer_is_its_state():
    params = Linear(3, 5).init(42).filter(es.Parameter)
    optimizer = es.Optimizer(optax.adam(1e-3)).init(params)
    assert eqx.tree_equal(jax.jit(lambda o: o)(optimizer), optimizer)
    assert {part.kind for part in es.parts(optimizer)} == {es.OptState}
    assert jax.tree.leaves(es.filter(optimizer, es.Parameter)) == []
    assert len(jax.tree.leaves(optimizer.opt_state)) == 5  # count and two moments each


def test_K2_K4_updating_params_or_the_whole_model_agree():
    # in the seed these agree only when every leaf is a Parameter
    model = CountedLinear(3, 5).init(42)
    params = model.filter(es.Parameter)
    grads = jax.tree.map(jnp.ones_like, params)
    optimizer = es.Optimizer(optax.sgd(0.1, momentum=0.9)).init(params)
    new_params, optimizer1 = optimizer.update(grads, params)
    new_model, optimizer2 = optimizer.update(grads, model)
    assert eqx.tree_equal(model.update(new_params), new_model)
    assert eqx.tree_equal(optimizer1, optimizer2)
    assert jnp.allclose(new_model.linear.b, -0.1)
    assert new_model.calls == 0
