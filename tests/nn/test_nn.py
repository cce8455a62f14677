"""`es.nn.BatchNorm` and `es.nn.Dropout`, against Equinox and against NumPy."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import reuses_keys

import eqx_state as es


def assert_close(a, b, tolerance=1e-5):
    a, b = (jax.tree.map(np.asarray, tree) for tree in (a, b))
    assert eqx.tree_equal(a, b, rtol=tolerance, atol=tolerance), f"{a}\n{b}"


def data(*shape, seed=0, dtype=jnp.float32):
    return (2 * jr.normal(jr.key(seed), shape) + 3).astype(dtype)


@eqx.filter_jit
def each(norm, x):
    """The output of a layer that is made for one example, for all of a batch."""
    return es.mutable(es.vmap(norm, axis_name="batch"))(x)


@eqx.filter_jit
def run(layer, x, **kwargs):
    return es.mutable(layer)(x, **kwargs)


def by_numpy(x, weight, bias, mean, var, axis, eps, momentum):
    """The output for a whole batch, and the running averages after it."""
    axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    batch_mean, batch_var = x.mean(axes), x.var(axes)
    shape = [1] * x.ndim
    shape[axis] = -1

    def along(v):
        return v.reshape(shape)

    y = (x - along(batch_mean)) / np.sqrt(along(batch_var) + eps)
    y = y * along(weight) + along(bias)
    mean = momentum * mean + (1 - momentum) * batch_mean
    var = momentum * var + (1 - momentum) * batch_var
    return y, mean, var


def with_affine(norm):
    """Other values than ones and zeros, so that a mistake in them can be seen."""
    size = norm.input_size
    return norm.replace(
        weight=jnp.linspace(0.5, 2.0, size), bias=jnp.linspace(-1.0, 1.0, size)
    )


# --- BatchNorm: fields ----------------------------------------------------------------


def test_batch_norm_declares_what_its_arrays_are():
    kinds = {part.name: part.kind for part in es.parts(es.nn.BatchNorm(3))}
    assert kinds == {
        "weight": es.Parameter,
        "bias": es.Parameter,
        "mean": es.BatchStat,
        "var": es.BatchStat,
    }


def test_batch_norm_starts_as_the_identity_of_its_statistics():
    norm = es.nn.BatchNorm(3)
    assert_close((norm.mean, norm.var), (jnp.zeros(3), jnp.ones(3)))
    assert_close((norm.weight, norm.bias), (jnp.ones(3), jnp.zeros(3)))
    assert not any(part.value.weak_type for part in es.parts(norm))


def test_batch_norms_made_alike_are_equal_trees():
    # Equinox's are not: every `StateIndex` has a marker of its own.
    a, b = es.nn.BatchNorm(3, "batch"), es.nn.BatchNorm(3, "batch")
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))


def test_batch_norm_takes_the_arguments_of_equinox():
    ours = list(inspect.signature(es.nn.BatchNorm).parameters)
    theirs = inspect.signature(eqx.nn.BatchNorm).parameters
    assert ours[:2] == list(theirs)[:2] == ["input_size", "axis_name"]
    assert set(theirs) - set(ours) <= {"inference", "mode"}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn])
def test_statistics_are_float32_whatever_the_parameters_are(dtype):
    norm = es.nn.BatchNorm(3, dtype=dtype)
    assert norm.weight.dtype == norm.bias.dtype == dtype
    assert norm.mean.dtype == norm.var.dtype == jnp.float32
    y, new = es.mutable(norm)(data(8, 3, dtype=dtype))
    assert y.dtype == dtype
    assert new.mean.dtype == new.var.dtype == jnp.float32
    assert new.eval()(data(8, 3, dtype=dtype)).dtype == dtype


@jax.enable_x64(True)
def test_statistics_and_computation_are_as_wide_as_asked_for():
    norm = es.nn.BatchNorm(3, dtype=jnp.float64)
    assert {part.value.dtype for part in es.parts(norm)} == {jnp.dtype("float64")}
    x = data(8, 3, dtype=jnp.float64)
    expected, exact = es.mutable(norm)(x)
    # A float64 input is not rounded on the way through a float32 layer.
    y, new = es.mutable(es.nn.BatchNorm(3, dtype=jnp.float32))(x)
    assert y.dtype == jnp.float64
    assert_close(y, expected, 1e-12)
    assert new.mean.dtype == jnp.float32
    assert_close(new.mean, exact.mean.astype(jnp.float32), 1e-7)


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, bool])
def test_parameters_are_real_floating_numbers(dtype):
    with pytest.raises(ValueError, match=r"BatchNorm\(dtype=.*real floating"):
        es.nn.BatchNorm(3, dtype=dtype)


def test_half_precision_statistics_converge():
    norm = es.nn.BatchNorm(4, dtype=jnp.bfloat16)

    def step(norm, key):
        x = (2 * jr.normal(key, (64, 4)) + 3).astype(jnp.bfloat16)
        return es.mutable(norm)(x)[1], None

    norm, _ = jax.lax.scan(step, norm, jr.split(jr.key(0), 1000))
    assert_close(norm.mean, jnp.full(4, 3.0), 0.1)
    assert_close(norm.var, jnp.full(4, 4.0), 0.2)


def test_statistics_that_were_cast_are_averaged_in_float32():
    # Whoever casts a whole model gets what was asked for; the step is computed exactly.
    x = data(64, 3, dtype=jnp.bfloat16)
    norm = jax.tree.map(lambda a: a.astype(jnp.bfloat16), es.nn.BatchNorm(3))
    y, new = es.mutable(norm)(x)
    assert new.mean.dtype == jnp.bfloat16
    expected, exact = es.mutable(es.nn.BatchNorm(3))(x)
    assert (y == expected).all()
    assert (new.var == exact.var.astype(jnp.bfloat16)).all()


# --- BatchNorm: numbers ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "channel_axis", "axis"),
    [
        ((8, 3), None, 1),
        ((8, 3, 5), None, 1),
        ((4, 3, 2, 2), 1, 1),
        ((4, 2, 2, 3), -1, 3),
        ((4, 2, 3, 2), -2, 2),
        ((3, 8), 0, 0),
        ((8,), 0, 0),
    ],
)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
@pytest.mark.parametrize("momentum", [0.99, 0.3])
def test_a_batch_equals_numpy(shape, channel_axis, axis, eps, momentum):
    size = shape[axis]
    norm = es.nn.BatchNorm(size, eps=eps, momentum=momentum, channel_axis=channel_axis)
    norm = with_affine(norm)
    affine = np.asarray(norm.weight), np.asarray(norm.bias)
    mean, var = np.zeros(size, np.float32), np.ones(size, np.float32)
    for seed in range(3):
        x = data(*shape, seed=seed)
        expected, mean, var = by_numpy(
            np.asarray(x), *affine, mean, var, axis, eps, momentum
        )
        y, norm = es.mutable(norm)(x)
        assert_close(y, expected, 1e-4)
        assert_close((norm.mean, norm.var), (mean, var))
    assert_close((norm.weight, norm.bias), affine)


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 4), (4, 3, 2, 2)])
@pytest.mark.parametrize("momentum", [0.99, 0.5])
def test_one_example_at_a_time_equals_equinox_for_50_steps(shape, momentum):
    options = {"momentum": momentum, "eps": 1e-3}
    norm = with_affine(es.nn.BatchNorm(3, axis_name="batch", **options))
    theirs, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        3, axis_name="batch", mode="batch", **options
    )
    theirs = eqx.tree_at(lambda n: (n.weight, n.bias), theirs, (norm.weight, norm.bias))
    in_axes, out_axes = (0, None), (0, None)

    @eqx.filter_jit
    def their_step(state, x):
        return jax.vmap(theirs, in_axes, out_axes, axis_name="batch")(x, state)

    for seed in range(50):
        x = data(*shape, seed=seed)
        y, norm = each(norm, x)
        expected, state = their_step(state, x)
        assert_close(y, expected, 1e-4)

    x = data(*shape, seed=99)
    theirs = eqx.nn.inference_mode(theirs)
    expected, _ = jax.vmap(theirs, in_axes, out_axes)(x, state)
    assert_close((norm.mean, norm.var), state.get(theirs.batch_state_index))
    # In eval mode Equinox also divides these by this, which is soon 1.
    used = 1 - momentum**50
    expected_norm = norm.replace(mean=norm.mean / used, var=norm.var / used)
    assert_close(es.vmap(expected_norm.eval())(x), expected, 1e-4)


@pytest.mark.parametrize(
    ("shape", "channel_axis"), [((8, 3), 0), ((4, 3, 2, 5), 0), ((4, 2, 5, 3), -1)]
)
def test_both_forms_agree(shape, channel_axis):
    one = es.nn.BatchNorm(3, axis_name="batch", channel_axis=channel_axis)
    whole = es.nn.BatchNorm(3, channel_axis=channel_axis % (len(shape) - 1) + 1)
    one, whole = with_affine(one), with_affine(whole)
    for seed in range(50):
        x = data(*shape, seed=seed)
        y1, one = each(one, x)
        y2, whole = run(whole, x)
        assert_close(y1, y2, 1e-4)
        assert_close((one.mean, one.var), (whole.mean, whole.var))
    assert_close(es.vmap(one.eval())(x), whole.eval()(x), 1e-4)


def test_an_axis_that_no_transform_has_named_and_which_layer_wants_it():
    norm = es.nn.BatchNorm(3, axis_name="batch")
    model, x = eqx.nn.Sequential([eqx.nn.Identity(), norm]), jnp.ones(3)
    message = r"`es.nn.BatchNorm\(axis_name='batch'\)` averages over an axis"
    with pytest.raises(NameError, match=f"^{message}"):
        norm(x)
    for run, xs in ((model, x), (es.vmap(model), x[None])):
        with pytest.raises(NameError, match=rf"^`layers\[1\]`: {message}"):
            es.mutable(run)(xs)


def test_a_tuple_of_axis_names_reduces_over_both():
    norm = es.nn.BatchNorm(3, axis_name=("outer", "inner"))
    x = data(4, 5, 3)
    inner = es.vmap(norm, axis_name="inner")
    y, new = es.mutable(es.vmap(inner, axis_name="outer"))(x)
    flat, expected = es.mutable(es.nn.BatchNorm(3))(x.reshape(20, 3))
    assert_close(y.reshape(20, 3), flat)
    assert_close((new.mean, new.var), (expected.mean, expected.var))


def test_a_large_mean_does_not_spoil_the_variance():
    x = data(64, 2) + jnp.array([[1e4, 0.0]])
    y, _ = es.mutable(es.nn.BatchNorm(2))(x)
    assert_close(y.std(axis=0), jnp.ones(2), 1e-2)
    y, _ = each(es.nn.BatchNorm(2, "batch"), x)
    assert_close(y.std(axis=0), jnp.ones(2), 1e-2)


def exactly(x, eps=1e-5):
    """The normalized input, computed in float64."""
    x = np.asarray(x, np.float64)
    return (x - x.mean(0)) / np.sqrt(x.var(0) + eps)


NORMALIZED = {
    "whole": lambda x: run(es.nn.BatchNorm(x.shape[1]), x)[0],
    "each": lambda x: each(es.nn.BatchNorm(x.shape[1], "batch"), x)[0],
    "masked": lambda x: run(es.nn.BatchNorm(x.shape[1]), x, mask=True)[0],
    "eager": lambda x: es.mutable(es.nn.BatchNorm(x.shape[1]))(x)[0],
    "no affine": lambda x: run(
        es.nn.BatchNorm(x.shape[1], channelwise_affine=False), x
    )[0],
}


@pytest.mark.parametrize("way", NORMALIZED)
@pytest.mark.parametrize("size", [32, 33, 100, 1000])
def test_a_constant_channel_is_mapped_to_0(way, size):
    # The mean of equal numbers need not be that number: it is rounded on the way.
    values = jnp.array([255.0, 1e4, 1e4 / 3, 12345.678, -1e6 / 7])
    y = NORMALIZED[way](jnp.tile(values, (size, 1)))
    assert jnp.abs(y).max() < 1e-5


@pytest.mark.parametrize("way", NORMALIZED)
def test_small_differences_of_large_numbers_are_kept(way):
    thirds = jnp.arange(32.0)[:, None] % 3
    assert np.abs(NORMALIZED[way](1e4 + thirds) - exactly(1e4 + thirds)).max() < 5e-7
    x = data(100, 3) + jnp.array([[1e5, -1e4 / 3, 0.0]])
    assert np.abs(NORMALIZED[way](x) - exactly(x)).max() < 2e-6


def test_a_constant_channel_has_the_gradient_of_one():
    x = jnp.full((100, 1), 1e4 / 3)
    weights = data(100, 1)
    grad = jax.grad(lambda x: jnp.sum(weights * run(es.nn.BatchNorm(1), x)[0]))(x)
    expected = (weights - weights.mean()) / np.sqrt(1e-5)
    assert_close(grad, expected, 1e-3)


def test_eval_keeps_small_differences_of_large_numbers():
    x = 1e4 + jnp.arange(3.0)[:, None]
    norm = es.nn.BatchNorm(1).replace(mean=jnp.array([1e4])).eval()
    assert_close(norm(x), (x - 1e4) / np.sqrt(1 + 1e-5), 1e-6)


def test_statistics_converge_to_those_of_the_data():
    norm = es.nn.BatchNorm(2, momentum=0.9)
    x = data(100, 2)
    for _ in range(150):
        _, norm = run(norm, x)
    assert_close((norm.mean, norm.var), (x.mean(0), x.var(0)), 1e-4)
    assert_close(norm.eval()(x), es.mutable(norm)(x)[0], 1e-3)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("axis_name", [None, "batch"])
def test_half_precision_goes_in_and_comes_out(dtype, axis_name):
    norm = es.nn.BatchNorm(3, axis_name=axis_name)
    x = data(8, 3, dtype=dtype)
    step = each if axis_name else run
    y, new = step(norm, x)
    assert y.dtype == dtype
    assert {part.value.dtype for part in es.parts(new)} == {jnp.dtype("float32")}
    expected, exact = step(norm, x.astype(jnp.float32))
    assert_close(y.astype(jnp.float32), expected, 2e-2)
    assert_close((new.mean, new.var), (exact.mean, exact.var))
    assert new.eval().mean.dtype == jnp.float32
    assert es.nn.BatchNorm(3).eval()(x).dtype == dtype


def test_without_affine_there_are_no_parameters():
    norm = es.nn.BatchNorm(3, channelwise_affine=False)
    assert norm.weight is None
    assert norm.bias is None
    assert [part.kind for part in es.parts(norm)] == [es.BatchStat] * 2
    x = data(8, 3)
    y, new = es.mutable(norm)(x)
    expected, other = es.mutable(es.nn.BatchNorm(3))(x)
    assert_close(y, expected)
    assert_close(new.mean, other.mean)
    assert_close(new.eval()(x), other.eval()(x))


# --- BatchNorm: padding ---------------------------------------------------------------


def padded(x, n, value):
    """`x` and `n` rows of padding, mixed."""
    filled = jnp.concatenate([x, jnp.full((n, *x.shape[1:]), value, x.dtype)])
    order = jr.permutation(jr.key(5), len(filled))
    return filled[order], order < len(x)


@pytest.mark.parametrize("value", [0.0, 1e6, np.nan, np.inf])
@pytest.mark.parametrize("way", ["whole", "each"])
def test_a_mask_leaves_padding_out(way, value):
    x = data(8, 3)
    filled, mask = padded(x, 5, value)
    norm = with_affine(es.nn.BatchNorm(3, axis_name="batch" if way == "each" else None))
    if way == "each":
        expected, new = each(norm, x)

        def f(norm, x, mask):
            return es.vmap(lambda x, m: norm(x, mask=m), axis_name="batch")(x, mask)

        y, masked = es.mutable(f)(norm, filled, mask)
    else:
        expected, new = run(norm, x)
        y, masked = run(norm, filled, mask=mask[:, None])
    order = jnp.argsort(jr.permutation(jr.key(5), 13))[:8]
    assert_close(y[order], expected)
    assert_close((masked.mean, masked.var), (new.mean, new.var))
    # The padding is normalized like the rest.
    where = ~mask & jnp.isfinite(y[:, 0])
    like_rest = by_first_two(norm, filled[where], x)
    assert_close(y[where], like_rest, 1e-4)


def by_first_two(norm, x, batch):
    scale = norm.weight / jnp.sqrt(batch.var(0) + norm.eps)
    return (x - batch.mean(0)[None]) * scale[None] + norm.bias[None]


@pytest.mark.parametrize("way", ["whole", "each"])
def test_a_mask_within_each_example(way):
    # Sequences of several lengths: what the lanes have differs in number.
    x, lengths = data(4, 3, 6), jnp.array([6, 1, 0, 4])
    inside = jnp.arange(6)[None] < lengths[:, None]
    if way == "whole":
        _, new = run(es.nn.BatchNorm(3, momentum=0.0), x, mask=inside[:, None])
    else:
        norm = es.nn.BatchNorm(3, "batch", momentum=0.0)

        def f(norm, x):
            return es.vmap(lambda x, m: norm(x, mask=m), axis_name="batch")(x, inside)

        _, new = es.mutable(f)(norm, x)
    rows = np.moveaxis(np.asarray(x), 1, -1)[np.asarray(inside)]
    assert_close((new.mean, new.var), (rows.mean(0), rows.var(0)))


def test_a_mask_may_leave_one_example():
    x = data(8, 3)
    _, new = run(es.nn.BatchNorm(3, momentum=0.0), x, mask=jnp.arange(8)[:, None] == 5)
    assert_close(new.mean, x[5])


def test_a_mask_may_differ_between_channels():
    x = data(8, 2)
    mask = jnp.stack([jnp.arange(8) < 5, jnp.arange(8) >= 2], axis=1)
    _, new = run(es.nn.BatchNorm(2, momentum=0.0), x, mask=mask)
    expected = jnp.stack([x[:5, 0].mean(), x[2:, 1].mean()])
    assert_close(new.mean, expected)


@pytest.mark.parametrize(
    "mask", [True, 1, jnp.ones((8, 1)), np.ones((1, 3), bool), [[1], [1]] * 4]
)
def test_a_mask_that_leaves_nothing_out_is_as_none(mask):
    x = data(8, 3)
    expected, new = run(es.nn.BatchNorm(3), x)
    y, masked = run(es.nn.BatchNorm(3), x, mask=jnp.asarray(mask))
    assert_close(y, expected)
    assert_close(masked, new)


@pytest.mark.parametrize("way", ["whole", "each"])
def test_a_batch_that_is_padding_alone_changes_nothing(way):
    x = jnp.full((8, 3), jnp.nan)
    if way == "whole":
        norm = run(es.nn.BatchNorm(3), data(8, 3))[1]
        y, new = run(norm, jnp.ones((8, 3)), mask=False)
        _, after_nan = run(norm, x, mask=False)
    else:
        norm = each(es.nn.BatchNorm(3, "batch"), data(8, 3))[1]

        def f(norm, x):
            return es.vmap(lambda x: norm(x, mask=False), axis_name="batch")(x)

        y, new = es.mutable(f)(norm, jnp.ones((8, 3)))
        _, after_nan = es.mutable(f)(norm, x)
    assert eqx.tree_equal(new, norm)
    assert eqx.tree_equal(after_nan, norm)
    expected = (1 - norm.mean) / jnp.sqrt(norm.var + norm.eps)
    assert_close(y, jnp.tile(expected, (8, 1)))


def test_a_channel_that_is_padding_alone_changes_nothing():
    x, mask = data(8, 3), jnp.array([[True, False, True]])
    norm = es.nn.BatchNorm(3)
    _, new = run(norm, x, mask=mask)
    _, all_new = run(norm, x)
    assert (new.mean[1], new.var[1]) == (0, 1)
    assert_close(new.mean[::2], all_new.mean[::2])


def test_a_mask_leaves_padding_out_of_gradients():
    x, weights = data(8, 3), data(8, 3, seed=1)
    filled, mask = padded(x, 5, jnp.nan)
    order = jnp.argsort(jr.permutation(jr.key(5), 13))[:8]

    def loss(x):
        return jnp.sum(weights * run(es.nn.BatchNorm(3), x)[0])

    def masked_loss(filled):
        y, _ = run(es.nn.BatchNorm(3), filled, mask=mask[:, None])
        return jnp.sum(weights * y[order])

    grad = jax.grad(masked_loss)(filled)
    assert_close(grad[order], jax.grad(loss)(x), 1e-4)
    assert (grad[~mask] == 0).all()


@pytest.mark.parametrize("change", [es.eval, es.freeze], ids=["eval", "frozen"])
def test_a_mask_does_nothing_where_the_statistics_rest(change):
    norm, x = change(run(es.nn.BatchNorm(3), data(8, 3))[1]), data(8, 3)
    assert (norm(x, mask=jnp.arange(8)[:, None] < 3) == norm(x)).all()


@pytest.mark.parametrize("change", [es.train, es.eval])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (1, 8, 3), (8, 2)])
def test_a_mask_that_does_not_broadcast_is_an_error(change, shape):
    norm = change(es.nn.BatchNorm(3))
    with pytest.raises(ValueError, match=r"mask of shape .*\(8, 3\)"):
        es.mutable(norm)(data(8, 3), mask=jnp.ones(shape, bool))


# --- BatchNorm: modes and gradients ---------------------------------------------------


def test_a_momentum_may_be_computed():
    norm, x = es.nn.BatchNorm(2), jnp.array([[1.0, 2.0], [3.0, 6.0]])

    @jax.jit
    def mean_after(norm, momentum):
        _, norm = es.mutable(es.configure(norm, momentum=momentum))(x)
        return norm.mean

    assert mean_after(norm, 0.5).tolist() == [1, 2]
    assert mean_after(norm, 0.75).tolist() == [0.5, 1]


@pytest.mark.parametrize(
    "change", [es.eval, es.freeze, lambda n: n.freeze().eval()], ids=["eval", "f", "fe"]
)
def test_eval_and_frozen_keep_the_statistics_and_use_them(change):
    x = data(8, 3)
    _, norm = es.mutable(with_affine(es.nn.BatchNorm(3, momentum=0.2)))(x)
    still = change(norm)
    y, after = es.mutable(still)(x + 100)
    assert eqx.tree_equal(after, still)
    expected = (x + 100 - norm.mean[None]) / jnp.sqrt(norm.var + norm.eps)[None]
    assert_close(y, expected * norm.weight[None] + norm.bias[None], 1e-3)
    assert_close(still(x + 100), y)  # nothing is written: no scope is needed


def test_one_example_needs_no_axis_in_eval_mode():
    _, norm = each(es.nn.BatchNorm(3, axis_name="batch"), data(8, 3))
    x = data(5, 3, seed=1)
    one_by_one = jnp.stack([norm.eval()(row) for row in x])
    assert_close(one_by_one, jax.vmap(norm.eval())(x))


def test_a_frozen_part_of_a_model_stays_while_another_learns():
    layers = (es.nn.BatchNorm(3), es.nn.BatchNorm(3))
    model = eqx.nn.Sequential(layers)
    model = es.freeze(model, lambda m: m.layers[0])
    _, new = es.mutable(model)(data(8, 3))
    assert eqx.tree_equal(new.layers[0], model.layers[0])
    assert not eqx.tree_equal(new.layers[1], model.layers[1])


def test_gradients_flow_through_the_statistics_of_the_batch():
    x, target = data(8, 3), data(8, 3, seed=1)
    norm = with_affine(es.nn.BatchNorm(3))

    def by_hand(affine, x):
        mean = x.mean(0, keepdims=True)
        var = ((x - mean) ** 2).mean(0, keepdims=True)
        y = (x - mean) / jnp.sqrt(var + norm.eps)
        return jnp.mean((y * affine[0][None] + affine[1][None] - target) ** 2)

    affine = norm.weight, norm.bias
    expected, expected_x = jax.grad(by_hand, argnums=(0, 1))(affine, x)

    def loss_fn(norm, x):
        return jnp.mean((norm(x) - target) ** 2)

    grads, _ = es.grad(loss_fn)(norm, x)
    assert_close((grads.weight, grads.bias), expected, 1e-4)
    assert grads.mean is None
    assert grads.var is None

    grad_x = jax.grad(lambda x: es.mutable(loss_fn)(norm, x)[0])(x)
    assert_close(grad_x, expected_x, 1e-4)

    def loss_each(norm, x):
        return jnp.mean((es.vmap(norm, axis_name="batch")(x) - target) ** 2)

    one = with_affine(es.nn.BatchNorm(3, axis_name="batch"))
    grads, _ = es.grad(loss_each)(one, x)
    assert_close((grads.weight, grads.bias), expected, 1e-4)


def test_the_running_averages_carry_no_gradient():
    def total(scale):
        _, norm = es.mutable(es.nn.BatchNorm(3))(scale * data(8, 3))
        return jnp.sum(norm.mean) + jnp.sum(norm.var)

    assert jax.grad(total)(1.0) == 0


def test_a_constant_channel_is_no_nan():
    def loss_fn(norm, x):
        return jnp.sum(norm(x))

    grads, _ = es.grad(loss_fn)(es.nn.BatchNorm(3), jnp.ones((8, 3)))
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


# --- BatchNorm: mistakes --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (8, 4)),
        ({}, (3,)),
        ({"channel_axis": -1}, (3, 8)),
        ({"channel_axis": 2}, (8, 3)),
        ({"axis_name": "batch"}, (4,)),
        ({"axis_name": "batch"}, ()),
    ],
)
def test_another_number_of_channels_is_an_error(options, shape):
    norm = es.nn.BatchNorm(3, **options).eval()
    with pytest.raises(ValueError, match=r"input_size=3.*channel_axis"):
        norm(jnp.ones(shape))


def test_a_batch_for_a_layer_of_single_examples_says_so():
    norm = es.nn.BatchNorm(3, axis_name="batch")
    with pytest.raises(Exception, match="batch"):
        es.mutable(norm)(jnp.ones(3))


def test_a_batch_under_vmap_without_a_name_names_the_field():
    norm = es.nn.BatchNorm(3, channel_axis=0)
    with pytest.raises(ValueError, match=r"(mean|var)[\s\S]*axis_name"):
        es.mutable(es.vmap(norm))(data(8, 3, 2))


@pytest.mark.parametrize("change", [es.train, es.eval])
def test_complex_input_is_an_error(change):
    norm = change(es.nn.BatchNorm(3))
    with pytest.raises(ValueError, match=r"complex64[\s\S]*BatchNorm\(6\)"):
        es.mutable(norm)(jnp.ones((8, 3), jnp.complex64))


def test_a_numpy_array_of_float64_is_as_jax_takes_it():
    # Warnings are errors here, and JAX warns where a float64 is asked for.
    x = np.asarray(data(8, 3), np.float64)
    expected, new = es.mutable(es.nn.BatchNorm(3))(data(8, 3))
    y, after = es.mutable(es.nn.BatchNorm(3))(x)
    assert y.dtype == jnp.float32
    assert eqx.tree_equal((y, after), (expected, new))
    assert new.eval()(x).dtype == jnp.float32
    dropped, _ = es.mutable(es.nn.Dropout(0.5, key=0))(x)
    assert dropped.dtype == jnp.float32
    assert es.mutable(es.nn.Dropout(1.0, key=0))(x)[0].dtype == jnp.float32


def test_train_mode_outside_a_scope_is_an_error_that_changes_nothing():
    norm = es.nn.BatchNorm(3)
    with pytest.raises(Exception, match=r"BatchNorm\.mean"):
        norm(data(8, 3))
    assert (norm.mean == 0).all()


# --- Dropout --------------------------------------------------------------------------


def test_dropout_holds_a_key_of_kind_rng():
    dropout = es.nn.Dropout(0.5, key=jr.key(0))
    assert [(p.name, p.kind) for p in es.parts(dropout)] == [("rng", es.Rng)]
    by_seed = es.nn.Dropout(0.5, key=0)
    assert by_seed.rng == dropout.rng


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_keeps_the_expectation(p):
    y, _ = run(es.nn.Dropout(p, key=jr.key(0)), jnp.ones((100, 1000)))
    assert abs(float(jnp.mean(y)) - 1) < 0.02
    assert abs(float(jnp.mean(y == 0)) - p) < 0.01
    values = np.unique(np.asarray(y))
    np.testing.assert_allclose(values, [0, 1 / (1 - p)], rtol=1e-6)


@pytest.mark.parametrize("p", [0, 0.0])
def test_p_0_is_the_identity_and_draws_nothing(p):
    dropout, x = es.nn.Dropout(p, key=jr.key(0)), data(10)
    y, new = es.mutable(dropout)(x)
    assert y is x
    assert eqx.tree_equal(new, dropout)


@reuses_keys
@pytest.mark.parametrize("p", [1, 1.0])
def test_p_1_drops_everything_and_is_no_nan(p):
    dropout, x = es.nn.Dropout(p, key=jr.key(0)), data(10)

    def loss_fn(x):
        return jnp.sum(run(dropout, x)[0])

    y, _ = run(dropout, x)
    assert (y == 0).all()
    assert (jax.grad(loss_fn)(x) == 0).all()


@reuses_keys
def test_each_call_drops_others():
    dropout, x = es.nn.Dropout(0.5, key=jr.key(0)), jnp.ones(100)
    first, after_one = run(dropout, x)
    second, after_two = run(after_one, x)
    again, _ = run(dropout, x)
    assert not (first == second).all()
    assert (first == again).all()
    keys = jnp.stack([d.rng for d in (dropout, after_one, after_two)])
    assert len(np.unique(jr.key_data(keys), axis=0)) == 3


def test_each_example_drops_others_and_the_key_advances_once():
    dropout, x = es.nn.Dropout(0.5, key=jr.key(0)), jnp.ones((4, 100))
    y, new = es.mutable(es.vmap(dropout))(x)
    assert len(np.unique(np.asarray(y), axis=0)) == 4
    assert new.rng.shape == ()
    assert new.rng != dropout.rng


def test_a_given_key_wins_and_the_own_one_stays():
    dropout, x = es.nn.Dropout(0.5, key=jr.key(0)), jnp.ones(100)
    y, new = run(dropout, x, key=jr.key(7))
    assert eqx.tree_equal(new, dropout)
    other, _ = run(es.nn.Dropout(0.5, key=jr.key(1)), x, key=jr.key(7))
    assert (y == other).all()
    # Nothing is written, so that no scope is needed, as with Equinox's.
    assert (dropout(x, key=jr.key(7)) == y).all()
    assert (eqx.nn.Dropout(0.5)(x, key=jr.key(7)) == y).all()


def test_eval_draws_nothing():
    dropout, x = es.nn.Dropout(0.5, key=jr.key(0)).eval(), data(100)
    y, new = es.mutable(dropout)(x)
    assert y is x
    assert eqx.tree_equal(new, dropout)
    assert dropout(x) is x
    assert dropout(x, key=jr.key(1)) is x
    assert (jax.jit(lambda dropout, x: dropout(x))(dropout, x) == x).all()


def test_without_a_key_it_waits_for_init():
    dropout = es.nn.Dropout(0.5)
    assert isinstance(dropout.rng, es.Initializer)
    with pytest.raises(es.NotInitializedError, match="rng"):
        run(dropout, jnp.ones(3))
    ready = dropout.init(0)
    assert ready.initialized
    y, _ = run(ready, jnp.ones(100))
    assert set(y.tolist()) == {0.0, 2.0}


def test_two_dropouts_without_keys_get_different_ones():
    model = es.init([es.nn.Dropout(0.5), es.nn.Dropout(0.5)], 0)
    assert model[0].rng != model[1].rng


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_an_invalid_p_is_an_error(p):
    with pytest.raises(ValueError, match=r"Dropout\(p="):
        es.nn.Dropout(p, key=jr.key(0))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dropout_keeps_dtype_and_shape(dtype):
    x = data(4, 5, dtype=dtype)
    for p in (0.0, 0.25, 1.0):
        y, _ = run(es.nn.Dropout(p, key=jr.key(0)), x)
        assert (y.dtype, y.shape) == (dtype, (4, 5))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (jnp.int32, [6, 4]),
        (jnp.uint8, [6, 4]),
        (bool, [1, 1]),
        (jnp.complex64, [6, 3.75]),
    ],
)
def test_dropout_keeps_other_dtypes(dtype, kept):
    x = jnp.full((20, 5), 3).astype(dtype)
    for p, expected in zip((0.5, 0.2), kept, strict=True):
        y, _ = run(es.nn.Dropout(p, key=jr.key(0)), x)
        assert (y.dtype, y.shape) == (dtype, (20, 5))
        # Integers are rounded, and so not too small on average.
        assert set(y.ravel().tolist()) == {0, expected}
    for p in (0.0, 1.0):
        assert run(es.nn.Dropout(p, key=jr.key(0)), x)[0].dtype == dtype


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_dropout_of_a_numpy_array_is_as_jax_takes_it(dtype):
    y, _ = es.mutable(es.nn.Dropout(0.5, key=0))(np.ones(100, dtype))
    assert y.dtype == jnp.asarray(np.ones(1, dtype)).dtype
    assert set(y.tolist()) == {0, 2}


def test_dropout_takes_a_legacy_key():
    dropout = es.nn.Dropout(0.5, key=jr.PRNGKey(0))
    y, new = run(dropout, jnp.ones(100))
    assert set(y.tolist()) == {0.0, 2.0}
    assert new.rng.dtype == jnp.uint32
    assert not (new.rng == dropout.rng).all()


@reuses_keys
def test_gradients_flow_where_nothing_was_dropped():
    dropout, x = es.nn.Dropout(0.5, key=jr.key(0)), data(100)
    y, _ = run(dropout, x)
    grad = jax.grad(lambda x: jnp.sum(run(dropout, x)[0]))(x)
    assert_close(grad, jnp.where(y == 0, 0.0, 2.0))


def test_p_is_configurable():
    dropout = es.configure(es.nn.Dropout(0.5, key=jr.key(0)), p=0.0)
    x = jnp.ones(3)
    assert es.mutable(dropout)(x)[0] is x


# --- Both -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, 7])
def test_they_sit_in_sequential_and_accept_a_key(key):
    model = eqx.nn.Sequential(
        [
            eqx.nn.Linear(3, 4, key=jr.key(0)),
            es.nn.BatchNorm(4, axis_name="batch"),
            eqx.nn.Lambda(jax.nn.relu),
            es.nn.Dropout(0.5, key=jr.key(1)),
        ]
    )
    keys = None if key is None else jr.key(key)

    def forward(model, x):
        return es.vmap(lambda x: model(x, key=keys), axis_name="batch")(x)

    y, new = es.mutable(forward)(model, data(8, 3))
    assert y.shape == (8, 4)
    assert not (new.layers[1].mean == 0).all()
    drew = new.layers[3].rng != model.layers[3].rng
    assert drew == (key is None)


def test_they_accept_and_ignore_a_key_at_construction():
    norm = es.nn.BatchNorm(3, key=jr.key(0))
    assert eqx.tree_equal(norm, es.nn.BatchNorm(3))
    lazy = es.init(es.lazy(es.nn.BatchNorm, 3), 0)
    assert eqx.tree_equal(lazy, norm)
    assert isinstance(es.init(es.lazy(es.nn.Dropout, 0.5), 0), es.nn.Dropout)


def test_a_jitted_loop_compiles_once():
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model, x):
        return es.mutable(model)(x)

    model = eqx.nn.Sequential([es.nn.BatchNorm(3), es.nn.Dropout(0.5, key=jr.key(0))])
    for seed in range(3):
        _, model = step(model, data(8, 3, seed=seed))


def test_they_are_arguments_of_plain_jit():
    step = jax.jit(lambda model, x: es.mutable(model)(x))
    y, new = step(es.nn.BatchNorm(3), data(8, 3))
    expected, other = es.mutable(es.nn.BatchNorm(3))(data(8, 3))
    assert_close((y, new.mean, new.var), (expected, other.mean, other.var))
    _, dropout = step(es.nn.Dropout(0.5, key=jr.key(0)), data(8))
    assert dropout.rng != jr.key(0)


@pytest.mark.parametrize("mode", [es.eval, es.train])
def test_a_gradient_keeps_one_array_of_the_size_of_the_input(mode):
    norm = mode(es.nn.BatchNorm(3))
    x = jnp.ones((5, 3))

    def f(x, weight):
        return es.mutable(norm.replace(weight=weight))(x)[0]

    _, pull = jax.vjp(f, x, norm.weight)
    kept = [a.shape for a in jax.tree.leaves(pull)]
    assert kept.count(x.shape) == 1
