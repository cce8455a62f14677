"""Programs that were written for other libraries, and compute the same here.

Each is named after the library, and says where a frozen module needs other words.
"""

import itertools
import typing
from functools import partial
from typing import Any, List  # noqa: UP035 (Treex's own spelling)

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_state as es


# --- PAX -----------------------------------------------------------------------------


class Counted(es.Module):
    weight: es.Parameter
    bias: es.Parameter
    count: es.State

    def __init__(self, weight=1.0, bias=0.0):
        self.weight = jnp.array(weight)
        self.bias = jnp.array(bias)
        self.count = jnp.array(0)

    def __call__(self, x):
        self.count += 1  # not `self.counter`, a name that PAX never makes
        return x * self.weight + self.bias


class Stack(es.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_flattened_module_keeps_its_flag():
    mod = Stack([1, 2, 3])
    assert repr(mod) == "Stack(layers=[1, 2, 3])"
    for mode in (mod, mod.eval()):
        leaves, treedef = jax.tree_util.tree_flatten(mode)
        assert leaves == [1, 2, 3]
        new = jax.tree_util.tree_unflatten(treedef, leaves)
        assert eqx.tree_equal(new, mode)
        assert new.training == mode.training
        assert hash(treedef) == hash(jax.tree.structure(new))
    assert jax.tree.structure(mod) != jax.tree.structure(mod.eval())


def test_the_flag_retraces_once_per_value():
    @jax.jit
    @eqx.debug.assert_max_traces(max_traces=2)
    def f(module):
        return (1.0 if module.training else -1.0) * module.bias

    fc = Counted(bias=3.0)
    outs = [f(fc), f(fc.eval()), f(fc.eval().train()), f(fc.eval())]
    assert outs == [3.0, -3.0, 3.0, -3.0]


# --- Treex ---------------------------------------------------------------------------


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


def mse(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def data(size, low, f):
    rng = np.random.default_rng(0)
    x = rng.uniform(low, 1, size=(size, 1))
    y = f(x) - 0.3 + rng.normal(scale=0.1, size=(size, 1))
    return x.astype(np.float32), y.astype(np.float32)


def test_mlp_trained_with_plain_jax():
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

        return lax.fori_loop(0, 3_000, step, model)

    before, model = mse(model, x, y), train(model)
    assert type(model) is MLP
    assert mse(model, x, y) < min(0.02, before / 4)  # the noise alone is 0.01
    model = model.eval()
    assert not model.training
    assert jax.vmap(model)(x).shape == (100, 1)


def test_the_model_comes_out_with_the_loss():
    def loss_fn(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    @partial(jax.value_and_grad, has_aux=True)
    def by_hand(params, model, x, y):
        return es.mutable(loss_fn)(model.update(params), x, y)

    x, y = jnp.ones((2, 3)), jnp.zeros((2, 5))
    model = CountedLinear(3, 5).init(42)
    params = model.filter(es.Parameter)
    expected = by_hand(params, model, x, y)
    (loss, new), grads = es.value_and_grad(loss_fn)(model, x, y)
    assert new.calls == 1
    assert eqx.tree_equal(((loss, new), grads), expected, rtol=1e-6)


def test_a_kind_hidden_behind_cast_is_still_a_kind():
    class Cache(es.TreePart):
        pass

    Alias = typing.cast(type[jax.Array], Cache)

    class MyModule(es.Module):
        memory: Alias

    (part,) = es.parts(MyModule(jnp.ones(1)))
    assert part.kind is Cache


# --- Brachy --------------------------------------------------------------------------


class Dropout(es.Module):
    """As in Brachy, `p` is the probability to keep."""

    rng: es.Rng
    p: es.Buffer

    def __call__(self, x):
        if not self.training:
            return x
        self.rng, subkey = jr.split(self.rng)
        return x * jr.bernoulli(subkey, self.p, x.shape).astype(x.dtype) / self.p


def dropout_apply(S, global_config, x):
    if not global_config["is_training"]:
        return S, x
    rng, subkey = jr.split(S["buffers"]["rng"])
    p = S["buffers"]["p"]
    y = x * jr.bernoulli(subkey, p, x.shape).astype(x.dtype) / p
    # Brachy writes into the caller's dict
    return {**S, "buffers": {**S["buffers"], "rng": rng}}, y


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_equals_the_pure_apply(jit, training):
    S = {"buffers": {"rng": jr.key(0), "p": jnp.array(0.5)}, "apply": dropout_apply}
    dropout = Dropout(jr.key(0), 0.5).train(training)
    x = jnp.ones(20)
    for _ in range(2):
        S, expected = jit(S["apply"])(S, {"is_training": training}, x)
        y, dropout = jit(es.mutable(dropout))(x)
        assert jnp.array_equal(y, expected)
        assert eqx.tree_equal(dropout.rng, S["buffers"]["rng"])
    assert eqx.tree_equal(dropout.rng, jr.key(0)) == (not training)


@jax.debug_key_reuse(False)  # one model is called twice, on purpose
def test_gradient_of_a_hyper_parameter():
    dropout = Dropout(jr.key(0), 0.5)
    x = jnp.ones(100)
    grads, _ = es.grad(lambda m, x: jnp.sum(m(x)), wrt=es.Buffer)(dropout, x)
    y, _ = es.mutable(dropout)(x)
    assert jnp.allclose(grads.p, -jnp.sum(y) / 0.5)
    assert grads.rng is None


@jax.debug_key_reuse(False)  # one model is called twice, on purpose
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_bind_apply_unbind(jit):
    model = Stack([Counted(), Dropout(jr.key(0), 0.5)])
    x = jnp.ones(8)
    apply, params, state = es.functional(model)
    y, state = jit(apply)(params, state, x)
    expected, new = es.mutable(model)(x)
    assert jnp.array_equal(y, expected)
    assert eqx.tree_equal(es.load_state_dict(model, {**params, **state}), new)
    # `bind_global_config`: the flags are in the model which is bound
    apply, params, state = es.functional(new.eval())
    y, _ = jit(apply)(params, state, x)
    assert jnp.array_equal(y, x)


def test_gradient_through_an_update_step():
    def loss(model):
        return 0.5 * (model.weight**2 + model.bias**2)

    def after(rate):
        model = Counted(3.0, 4.0)
        grads, model = es.grad(loss)(model)
        return loss(es.map(lambda p, g: p - rate * g, model, grads, on=es.trainable))

    assert jnp.allclose(jax.grad(after)(0.1), -25 * (1 - 0.1))


# --- Plain pytrees -------------------------------------------------------------------


class Box(es.Module):
    value: Any


class Affine(es.Module):
    W: es.Parameter
    b: es.Parameter

    def __call__(self, x):
        return jnp.dot(x, self.W) + self.b


def sgd(lr):
    return lambda p, g: p - lr * g


def with_functions(cls):
    jtu.register_pytree_node(
        cls, lambda c: ([c.a, c.b, c.c], c.name), lambda name, abc: cls(name, *abc)
    )


def with_methods(cls):
    cls.tree_flatten = lambda self: ((self.a, self.b, self.c), self.name)
    cls.tree_unflatten = classmethod(lambda cls, name, abc: cls(name, *abc))
    jtu.register_pytree_node_class(cls)


@pytest.mark.parametrize("register", [with_functions, with_methods])
def test_my_container_before_and_after_registration(register):
    class MyContainer:
        def __init__(self, name, a, b, c):
            self.name, self.a, self.b, self.c = name, a, b, c

    pair = [MyContainer("Alice", 1, 2, 3), MyContainer("Bob", 4, 5, 6)]
    boxes = Box(MyContainer("Carol", jnp.ones(1), jnp.arange(1), None))
    assert jax.tree.leaves(pair) == pair
    assert es.parts(boxes) == []

    register(MyContainer)
    assert jax.tree.leaves(pair) == [1, 2, 3, 4, 5, 6]
    assert [part.kind for part in es.parts(boxes)] == [es.Parameter, None]
    params = es.filter(boxes, es.Parameter)
    assert params.value.name == "Carol"
    assert (params.value.a, params.value.b) == (1.0, None)
    assert es.update(boxes, params).value.b == 0


def test_stacking_a_list_of_models_is_an_ensemble():
    models = [Affine(jr.normal(jr.key(i), (3, 2)), jnp.zeros(2)) for i in range(4)]
    x = jnp.arange(3.0)
    ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    expected = jnp.stack([model(x) for model in models])
    ys = es.vmap(ensemble, in_axes=None, axes={...: 0})(x)
    assert jnp.allclose(ys, expected)
    assert jnp.allclose(jax.vmap(lambda model: model(x))(ensemble), expected)


@pytest.mark.parametrize(
    "apply",
    [
        lambda model, x: jax.jit(lambda m, x: m(x))(model, x),
        lambda model, x: jax.jit(lambda x: model(x))(x),
        lambda model, x: jax.vmap(model)(x[None])[0],
        lambda model, x: jax.checkpoint(lambda m, x: m(x))(model, x),
        lambda model, x: lax.scan(lambda m, x: (m, m(x)), model, x[None])[1][0],
        lambda model, x: lax.cond(True, lambda m: m(x), lambda m: -m(x), model),
        lambda model, x: lax.fori_loop(0, 3, lambda _, m: m, model)(x),
    ],
    ids=["jit", "jit of a closure", "vmap", "checkpoint", "scan", "cond", "fori_loop"],
)
def test_plain_transforms_work_on_a_module(apply):
    model, x = Affine(jnp.ones((3, 2)), jnp.ones(2)), jnp.arange(3.0)
    assert jnp.allclose(apply(model, x), model(x))


def numpy_layer(rng, n_in, n_out):
    weights = rng.normal(size=(n_in, n_out)) * np.sqrt(2 / n_in)
    return dict(weights=weights, biases=np.ones(shape=(n_out,)))


def init_with_numpy(widths):
    rng = np.random.default_rng(11)
    return [numpy_layer(rng, *io) for io in itertools.pairwise(widths)]


def forward(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["weights"] + layer["biases"][None])
    return x @ last["weights"] + last["biases"][None]


def mlp_loss(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


def test_gradients_of_numpy_parameters():
    params = init_with_numpy([1, 8, 1])
    x = jnp.ones((2, 1))
    grads, same = es.grad(mlp_loss)(params, x, x)
    expected = jax.grad(mlp_loss)(jax.tree.map(jnp.asarray, params), x, x)
    assert eqx.tree_equal(grads, expected, rtol=1e-6)
    assert jax.tree.map(jnp.shape, same) == jax.tree.map(jnp.shape, params)


LOSSES = """
10.971409 1.0798324 0.37958255 0.17855294 0.09441521 0.054522194 0.03448924
0.024058027 0.018480862 0.015438682 0.01375394 0.0128103 0.012277315 0.011974388
0.011801447 0.011702419 0.011645544 0.011612837 0.011594015 0.011583163 0.011576912
"""


@pytest.fixture(scope="module")
def problem():
    """The true parameters and the samples, drawn as JAX drew when it was written."""
    with jax.threefry_partitionable(False):
        key = jr.PRNGKey(0)
        k1, k2 = jr.split(key)
        W_true = jr.normal(k1, (10, 5))
        b_true = jr.normal(k2, (5,))
        key_sample, key_noise = jr.split(k1)  # a key used twice, kept for the figures
        x = jr.normal(key_sample, (20, 10))
        y = x @ W_true + b_true[None] + 0.1 * jr.normal(key_noise, (20, 5))
    return W_true, b_true, x, y


def apply(params, x):
    if isinstance(params, Affine):
        return params(x)
    return jnp.dot(x, params["W"]) + params["b"]


def loss(params, x_batched, y_batched):
    def squared_error(x, y):
        error = y - apply(params, x)
        return jnp.inner(error, error) / 2.0

    return jnp.mean(jax.vmap(squared_error)(x_batched, y_batched), axis=0)


def jax_step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return value, jax.tree.map(sgd(0.3), params, grads)


def es_step(params, x, y):
    (value, params), grads = es.value_and_grad(loss)(params, x, y)
    return value, es.map(sgd(0.3), params, grads, on=es.trainable)


@pytest.mark.parametrize(("model", "step"), [(dict, jax_step), (Affine, es_step)])
def test_linear_regression_gives_the_figures_of_the_original(problem, model, step):
    W, b, x, y = problem
    params = model(W=jnp.zeros_like(W), b=jnp.zeros_like(b))
    losses = []
    for _ in range(102):
        value, params = jax.jit(step)(params, x, y)
        losses.append(value.item())  # taken before the step, not after it as there
    assert type(params) is model
    expected = [float(figure) for figure in LOSSES.split()]
    assert np.allclose(losses[1::5], expected, rtol=1e-5)
