"""`es.nn.BatchNorm` over 50 training steps, against PyTorch, Flax and Equinox.

All agree on the output in train mode, which is normalized by the mean and the biased
variance of the batch; Equinox's `mode="ema"` is the exception. They differ in the
running averages, and in eval mode:

- `es` with `debias=False`, and Flax:
  `average = momentum * average + (1 - momentum) * batch`, from 0 and 1.
- PyTorch: the same, but its `momentum` is our `1 - momentum`, and it averages the
  unbiased variance, which is `n / (n - 1)` times as large.
- Equinox, `mode="batch"`: the same averages, both divided by `1 - momentum**steps` in
  eval mode. With `debias=True`, `es` stores these quotients, but without the remainder
  of the initial 1 in the variance.
- Equinox, `mode="ema"`: the first batch replaces 0 and 1. In train mode, too, the
  running averages normalize, with their values after the update.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import torch_reference as reference

import eqx_state as es


STEPS, MOMENTUM, EPS = reference.STEPS, reference.MOMENTUM, reference.EPS
SHAPES = reference.SHAPES
OPTIONS = {"momentum": MOMENTUM, "eps": EPS}
AXES = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}


def deviation(a, b):
    """The largest difference of two trees; relative for numbers above 1."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in pairs]
    assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)
    return max(float(np.max(np.abs(x - y) / np.maximum(1, abs(y)))) for x, y in pairs)


def assert_equal_to_1e_5(a, b):
    assert deviation(a, b) < 1e-5


@pytest.fixture(params=SHAPES)
def shape_name(request):
    return request.param


def inputs(name, step):
    return jnp.asarray(reference.inputs(name, step))


def affine(norm):
    return norm.replace(
        weight=jnp.asarray(reference.WEIGHT), bias=jnp.asarray(reference.BIAS)
    )


# --- Three ways to lay out a batch ----------------------------------------------------


def whole(**options):
    return affine(es.nn.BatchNorm(3, debias=False, **OPTIONS, **options))


@eqx.filter_jit
def step_whole(norm, x):
    return es.mutable(norm)(x)


def channels_last(norm, x):
    y, norm = step_whole(norm, jnp.moveaxis(x, 1, -1))
    return jnp.moveaxis(y, -1, 1), norm


@eqx.filter_jit
def step_each(norm, x):
    return es.mutable(es.vmap(norm, axis_name="batch"))(x)


LAYOUTS = {
    "whole": (whole, step_whole),
    "channels last": (ft.partial(whole, channel_axis=-1), channels_last),
    "one example": (ft.partial(whole, axis_name="batch"), step_each),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    make, step = LAYOUTS[request.param]
    return make(), step


# --- PyTorch --------------------------------------------------------------------------


def test_equals_pytorch(layout, shape_name):
    norm, step = layout
    file = np.load(reference.FILE)
    outputs, mean, var = (file[f"{shape_name}_{x}"] for x in ("outputs", "mean", "var"))
    for i in range(STEPS):
        y, norm = step(norm, inputs(shape_name, i))
        if i % reference.EVERY == 0:
            assert_equal_to_1e_5(y, outputs[i // reference.EVERY])
        assert_equal_to_1e_5(norm.mean, mean[i])
        start = np.float32(MOMENTUM ** (i + 1))  # the weight of the initial 1
        n = np.float32(inputs(shape_name, i).size // 3)
        assert_equal_to_1e_5(norm.var, start + (var[i] - start) * (n - 1) / n)
    norm = norm.replace(var=jnp.asarray(var[-1])).eval()
    y, _ = step(norm, inputs(shape_name, STEPS))
    assert_equal_to_1e_5(y, file[f"{shape_name}_evaluated"])


# --- Flax -----------------------------------------------------------------------------


def test_equals_flax(layout, shape_name):
    linen = pytest.importorskip("flax.linen", reason="Flax needs a newer JAX")
    norm, step = layout
    # By default Flax computes the variance as E[x^2] - E[x]^2, which loses digits if
    # the mean is large: up to 2e-5 here.
    options = {"axis": 1, "use_fast_variance": False}
    theirs = linen.BatchNorm(momentum=MOMENTUM, epsilon=EPS, **options)
    params = {"scale": norm.weight, "bias": norm.bias}
    stats = {"mean": norm.mean, "var": norm.var}

    @jax.jit
    def their_step(stats, x):
        variables = {"params": params, "batch_stats": stats}
        y, new = theirs.apply(
            variables, x, use_running_average=False, mutable=["batch_stats"]
        )
        return y, new["batch_stats"]

    for i in range(STEPS):
        x = inputs(shape_name, i)
        y, norm = step(norm, x)
        expected, stats = their_step(stats, x)
        assert_equal_to_1e_5(y, expected)
        assert_equal_to_1e_5([norm.mean, norm.var], [stats["mean"], stats["var"]])
    x = inputs(shape_name, STEPS)
    variables = {"params": params, "batch_stats": stats}
    expected = theirs.apply(variables, x, use_running_average=True)
    assert_equal_to_1e_5(step(norm.eval(), x)[0], expected)


# --- Equinox --------------------------------------------------------------------------


def equinox_norm(mode):
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    layer, state = make(3, axis_name="batch", mode=mode, **OPTIONS)
    return affine_of(layer), state


def affine_of(layer):
    values = jnp.asarray(reference.WEIGHT), jnp.asarray(reference.BIAS)
    return eqx.tree_at(lambda n: (n.weight, n.bias), layer, values)


@eqx.filter_jit
def their_step(layer, state, x):
    return jax.vmap(layer, **AXES)(x, state)


def test_equals_equinox_in_batch_mode(layout, shape_name):
    norm, step = layout
    norm = norm.replace(count=jnp.zeros(3))  # as with `debias=True`
    theirs, state = equinox_norm("batch")
    for i in range(STEPS):
        x = inputs(shape_name, i)
        y, norm = step(norm, x)
        expected, state = their_step(theirs, state, x)
        assert_equal_to_1e_5(y, expected)
        left = np.float32(MOMENTUM ** (i + 1))
        mean, var = (x / (1 - left) for x in state.get(theirs.batch_state_index))
        assert_equal_to_1e_5([norm.mean, norm.var + left / (1 - left)], [mean, var])
    x = inputs(shape_name, STEPS)
    expected, _ = their_step(eqx.nn.inference_mode(theirs), state, x)
    norm = norm.replace(var=norm.var + left / (1 - left)).eval()
    assert_equal_to_1e_5(step(norm, x)[0], expected)


def test_equals_equinox_in_ema_mode(layout, shape_name):
    norm, step = layout
    theirs, state = equinox_norm("ema")
    for i in range(STEPS):
        x = inputs(shape_name, i)
        if i == 0:  # at first, the averages are those of the first batch
            first = norm.replace(momentum=0.0)
            _, first = step(first, x)
            norm = norm.replace(mean=first.mean, var=first.var)
        else:
            _, norm = step(norm, x)
        y, _ = step(norm.eval(), x)
        expected, state = their_step(theirs, state, x)
        assert_equal_to_1e_5(y, expected)
        kept = list(state.get(theirs.ema_state_index))
        assert_equal_to_1e_5([norm.mean, norm.var], kept)
    x = inputs(shape_name, STEPS)
    expected, _ = their_step(eqx.nn.inference_mode(theirs), state, x)
    assert_equal_to_1e_5(step(norm.eval(), x)[0], expected)


# --- Equinox's own layers, wrapped ----------------------------------------------------


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_equinoxs_batch_norm_wrapped(shape_name, mode):
    theirs, state = equinox_norm(mode)
    norm = es.nn.Stateful(
        affine_of(eqx.nn.BatchNorm(3, axis_name="batch", mode=mode, **OPTIONS))
    )
    for i in range(STEPS):
        y, norm = step_each(norm, inputs(shape_name, i))
        expected, state = their_step(theirs, state, inputs(shape_name, i))
        assert_equal_to_1e_5(y, expected)
    ours = jax.tree.leaves(es.filter(norm, es.BatchStat))
    assert sorted(map(str, ours)) == sorted(map(str, jax.tree.leaves(state)))


def test_equinoxs_spectral_norm_wrapped_and_trained():
    def make():
        linear = eqx.nn.Linear(4, 3, key=jr.key(0))
        return eqx.nn.SpectralNorm(linear, "weight", key=jr.key(1))

    theirs, state = eqx.nn.make_with_state(make)()
    model = es.nn.Stateful(make())

    def loss(model, x):
        return jnp.sum(jnp.square(model(x) - 1))

    @eqx.filter_jit
    def step(model, x):
        (value, model), grads = es.value_and_grad(loss)(model, x)
        return value, es.map(lambda p, g: p - 0.1 * g, model, grads, on=es.trainable)

    def their_loss(layer, state, x):
        y, state = layer(x, state)
        return jnp.sum(jnp.square(y - 1)), state

    @eqx.filter_jit
    def their_step(layer, state, x):
        f = eqx.filter_value_and_grad(their_loss, has_aux=True)
        (value, state), grads = f(layer, state, x)
        updates = jax.tree.map(lambda g: -0.1 * g, grads)
        return value, eqx.apply_updates(layer, updates), state

    for i in range(STEPS):
        x = jr.normal(jr.key(i), (4,))
        value, model = step(model, x)
        expected, theirs, state = their_step(theirs, state, x)
        assert_equal_to_1e_5(value, expected)
    assert_equal_to_1e_5(model.layer.uv_index.init, state.get(theirs.uv_index))
    assert_equal_to_1e_5(model.layer.layer, theirs.layer)
