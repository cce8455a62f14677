"""`es.nn.BatchNorm` over 50 training steps, against PyTorch and Equinox.

All agree on the output in train mode, which is normalized by the mean and the biased
variance of the batch; Equinox's `mode="ema"` is the exception. They differ in the
running averages, and in eval mode:

- `es` with `debias=False`:
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
import numpy as np
import pytest
import torch_reference as reference

import eqx_state as es


STEPS, MOMENTUM, EPS = reference.STEPS, reference.MOMENTUM, reference.EPS
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


# Each layout of a batch with one of the shapes.
LAYOUTS = {
    "batch": (whole, step_whole),
    "image": (ft.partial(whole, channel_axis=-1), channels_last),
    "sequence": (ft.partial(whole, axis_name="batch"), step_each),
}


# --- PyTorch --------------------------------------------------------------------------


@pytest.mark.parametrize("shape_name", LAYOUTS)
def test_equals_pytorch(shape_name):
    make, step = LAYOUTS[shape_name]
    norm = make()
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


def test_equals_equinox_in_batch_mode():
    step, shape_name = step_whole, "sequence"
    norm = whole().replace(count=jnp.zeros(3))  # as with `debias=True`
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
