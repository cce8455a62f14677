"""`es.nn.BatchNorm` and `es.nn.Dropout`, against Equinox and against NumPy."""

import inspect
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import rejects, reuses_keys

import eqx_state as es


def assert_close(a, b, tolerance=1e-5):
    a, b = (jax.tree.map(np.asarray, tree) for tree in (a, b))
    assert eqx.tree_equal(a, b, rtol=tolerance, atol=tolerance), f"{a}\n{b}"


def data(*shape, seed=0, dtype=jnp.float32):
    return (2 * jr.normal(jr.key(seed), shape) + 3).astype(dtype)


@eqx.filter_jit
def each(norm, x):
    """The output for a batch, of a layer that takes one example."""
    return es.mutable(es.vmap(norm, axis_name="batch"))(x)


@eqx.filter_jit
def run(layer, x, **kwargs):
    return es.mutable(layer)(x, **kwargs)


def with_affine(norm):
    """Replace ones and zeros, which would hide a mistake in the affine map."""
    size = norm.input_size
    return norm.replace(
        weight=jnp.linspace(0.5, 2.0, size), bias=jnp.linspace(-1.0, 1.0, size)
    )


# --- BatchNorm: fields ----------------------------------------------------------------


def test_batch_norm_declares_the_kinds_of_its_arrays():
    kinds = {part.name: part.kind for part in es.parts(es.nn.BatchNorm(3))}
    assert kinds == {
        "weight": es.Parameter,
        "bias": es.Parameter,
        "mean": es.BatchStat,
        "var": es.BatchStat,
        "count": es.BatchStat,
    }


def test_batch_norm_takes_the_arguments_of_equinox():
    ours = list(inspect.signature(es.nn.BatchNorm).parameters)
    theirs = inspect.signature(eqx.nn.BatchNorm).parameters
    assert ours[:2] == list(theirs)[:2] == ["input_size", "axis_name"]
    assert set(theirs) - set(ours) <= {"inference", "mode"}


def test_statistics_are_float32_for_narrower_parameters():
    dtype = jnp.bfloat16
    norm = es.nn.BatchNorm(3, dtype=dtype)
    assert norm.weight.dtype == norm.bias.dtype == dtype
    assert norm.mean.dtype == norm.var.dtype == jnp.float32
    y, new = es.mutable(norm)(data(8, 3, dtype=dtype))
    assert y.dtype == dtype
    assert new.mean.dtype == new.var.dtype == jnp.float32
    assert new.eval()(data(8, 3, dtype=dtype)).dtype == dtype


@jax.enable_x64(True)
def test_statistics_and_computation_have_the_requested_precision():
    norm = es.nn.BatchNorm(3, dtype=jnp.float64)
    assert {part.value.dtype for part in es.parts(norm)} == {jnp.dtype("float64")}
    x = data(8, 3, dtype=jnp.float64)
    expected, exact = es.mutable(norm)(x)
    # A float32 layer does not round a float64 input.
    y, new = es.mutable(es.nn.BatchNorm(3, dtype=jnp.float32))(x)
    assert y.dtype == jnp.float64
    assert_close(y, expected, 1e-12)
    assert new.mean.dtype == jnp.float32
    assert_close(new.mean, exact.mean.astype(jnp.float32), 1e-7)


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_parameters_are_real_floating_numbers(dtype):
    with pytest.raises(ValueError, match=r"normalizes real\snumbers.* dtype"):
        es.nn.BatchNorm(3, dtype=dtype)


def test_statistics_that_were_cast_are_averaged_in_float32():
    # A cast of the whole model also casts the statistics; the step itself is exact.
    x = data(64, 3, dtype=jnp.bfloat16)
    norm = jax.tree.map(lambda a: a.astype(jnp.bfloat16), es.nn.BatchNorm(3))
    y, new = es.mutable(norm)(x)
    assert new.mean.dtype == jnp.bfloat16
    expected, exact = es.mutable(es.nn.BatchNorm(3))(x)
    assert (y == expected).all()
    assert (new.var == exact.var.astype(jnp.bfloat16)).all()


# --- BatchNorm: numbers ---------------------------------------------------------------


def test_an_axis_name_that_no_transform_defines():
    norm = es.nn.BatchNorm(3, axis_name="batch")
    message = r"`es.nn.BatchNorm\(axis_name='batch'\)` averages over an axis"
    for run, x in ((norm, jnp.ones(3)), (es.vmap(norm), jnp.ones((1, 3)))):
        with pytest.raises(NameError, match=f"^{message}"):
            es.mutable(run)(x)
    with pytest.raises(NameError, match=r"predictions.* `es.vmap\(model.eval\(\)\)"):
        jax.vmap(norm)(jnp.ones((1, 3)))
    assert jax.vmap(norm.eval())(jnp.ones((1, 3))).shape == (1, 3)


def test_a_tuple_of_axis_names_reduces_over_both():
    norm = es.nn.BatchNorm(3, axis_name=("outer", "inner"))
    x = data(4, 5, 3)
    inner = es.vmap(norm, axis_name="inner")
    y, new = es.mutable(es.vmap(inner, axis_name="outer"))(x)
    flat, expected = es.mutable(es.nn.BatchNorm(3))(x.reshape(20, 3))
    assert_close(y.reshape(20, 3), flat)
    assert_close((new.mean, new.var), (expected.mean, expected.var))


def exactly(x, eps=1e-5):
    """The normalized input, computed in float64."""
    x = np.asarray(x, np.float64)
    return (x - x.mean(0)) / np.sqrt(x.var(0) + eps)


NORMALIZED = {
    "whole": lambda x: run(es.nn.BatchNorm(x.shape[1]), x)[0],
    "each": lambda x: each(es.nn.BatchNorm(x.shape[1], "batch"), x)[0],
    "masked": lambda x: run(es.nn.BatchNorm(x.shape[1]), x, mask=True)[0],
}


@pytest.mark.parametrize("way", NORMALIZED)
def test_a_constant_channel_is_mapped_to_0(way):
    # Because of rounding, the mean of equal numbers may differ from that number.
    values = jnp.array([255.0, 1e4, 1e4 / 3, 12345.678, -1e6 / 7])
    y = NORMALIZED[way](jnp.tile(values, (33, 1)))
    assert jnp.abs(y).max() < 1e-5


@pytest.mark.parametrize("way", NORMALIZED)
def test_small_differences_of_large_numbers_are_kept(way):
    thirds = jnp.arange(32.0)[:, None] % 3
    assert np.abs(NORMALIZED[way](1e4 + thirds) - exactly(1e4 + thirds)).max() < 5e-7
    x = data(100, 3) + jnp.array([[1e5, -1e4 / 3, 0.0]])
    assert np.abs(NORMALIZED[way](x) - exactly(x)).max() < 2e-6


def test_a_constant_channel_has_an_exact_gradient():
    x = jnp.full((100, 1), 1e4 / 3)
    weights = data(100, 1)
    grad = jax.grad(lambda x: jnp.sum(weights * run(es.nn.BatchNorm(1), x)[0]))(x)
    expected = (weights - weights.mean()) / np.sqrt(1e-5)
    assert_close(grad, expected, 1e-3)


def test_without_affine_there_are_no_parameters():
    norm = es.nn.BatchNorm(3, channelwise_affine=False)
    assert norm.weight is None
    assert norm.bias is None
    assert [part.kind for part in es.parts(norm)] == [es.BatchStat] * 3
    x = data(8, 3)
    y, new = es.mutable(norm)(x)
    expected, other = es.mutable(es.nn.BatchNorm(3))(x)
    assert_close(y, expected)
    assert_close(new.mean, other.mean)
    assert_close(new.eval()(x), other.eval()(x))


# --- BatchNorm: padding ---------------------------------------------------------------


def padded(x, n, value):
    """`x` with `n` rows of padding mixed in, and the mask."""
    filled = jnp.concatenate([x, jnp.full((n, *x.shape[1:]), value, x.dtype)])
    order = jr.permutation(jr.key(5), len(filled))
    return filled[order], order < len(x)


@pytest.mark.parametrize("value", [1e6, np.nan])
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
    # The padding is normalized with the same statistics.
    where = ~mask & jnp.isfinite(y[:, 0])
    like_rest = by_first_two(norm, filled[where], x)
    assert_close(y[where], like_rest, 1e-4)


def by_first_two(norm, x, batch):
    scale = norm.weight / jnp.sqrt(batch.var(0) + norm.eps)
    return (x - batch.mean(0)[None]) * scale[None] + norm.bias[None]


def test_a_mask_within_each_example():
    # Sequences of different lengths, so the lanes have different numbers of elements.
    x, lengths = data(4, 3, 6), jnp.array([6, 1, 0, 4])
    inside = jnp.arange(6)[None] < lengths[:, None]
    norm = es.nn.BatchNorm(3, "batch", momentum=0.0)

    def f(norm, x):
        return es.vmap(lambda x, m: norm(x, mask=m), axis_name="batch")(x, inside)

    _, new = es.mutable(f)(norm, x)
    rows = np.moveaxis(np.asarray(x), 1, -1)[np.asarray(inside)]
    assert_close((new.mean, new.var), (rows.mean(0), rows.var(0)))


def test_a_batch_that_is_padding_alone_changes_nothing():
    norm = run(es.nn.BatchNorm(3), data(8, 3))[1]
    y, new = run(norm, jnp.ones((8, 3)), mask=False)
    _, after_nan = run(norm, jnp.full((8, 3), jnp.nan), mask=False)
    assert eqx.tree_equal(new, norm)
    assert eqx.tree_equal(after_nan, norm)
    expected = (1 - norm.mean) / jnp.sqrt(norm.var + norm.eps)
    assert_close(y, jnp.tile(expected, (8, 1)))


EMPTY = {
    "whole": (None, (0, 3), lambda norm: norm),
    "each": ("batch", (0, 3), lambda norm: es.vmap(norm, axis_name="batch")),
    "two axes": (
        ("outer", "inner"),
        (2, 0, 3),
        lambda norm: es.vmap(es.vmap(norm, axis_name="inner"), axis_name="outer"),
    ),
}


@pytest.mark.parametrize("options", [{}, {"debias": False}], ids=str)
@pytest.mark.parametrize("way", EMPTY)
def test_an_empty_batch_does_not_count(way, options):
    axis_name, shape, mapped = EMPTY[way]
    new = es.nn.BatchNorm(3, axis_name, **options)
    full = data(*(size or 4 for size in shape))
    for norm in (new, es.mutable(mapped(new))(full)[1]):
        y, after = es.mutable(mapped(norm))(jnp.zeros(shape))
        assert y.shape == shape
        assert eqx.tree_equal(after, norm)
        # A later batch weighs as much as without the empty one.
        expected = es.mutable(mapped(norm))(full)
        assert eqx.tree_equal(es.mutable(mapped(after))(full), expected)
        loss_fn = lambda m, x: mapped(m)(x).sum()  # noqa: E731
        (_, after), grads = es.value_and_grad(loss_fn)(norm, jnp.zeros(shape))
        assert eqx.tree_equal(after, norm)
        assert all((g == 0).all() for g in jax.tree.leaves(grads))


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


def test_a_single_element_is_a_batch():
    x = data(8, 3)
    _, new = run(es.nn.BatchNorm(3), x, mask=(jnp.arange(8) == 5)[:, None])
    assert_close((new.mean, new.var), (x[5], jnp.zeros(3)))
    assert new.count.tolist() == [1, 1, 1]


def test_in_eval_mode_a_mask_changes_nothing():
    norm, x = run(es.nn.BatchNorm(3), data(8, 3))[1].eval(), data(8, 3, seed=1)
    mask = (jnp.arange(8) < 5)[:, None]
    for options in ({}, {"mask": mask}):
        y, vjp = jax.vjp(lambda norm, x, kw=options: norm(x, **kw), norm, x)
        norm_grad, x_grad = vjp(jnp.ones_like(y))
        expected = (x - norm.mean[None]) / jnp.sqrt(norm.var + norm.eps)[None]
        assert_close(y, expected)
        assert_close(x_grad[7], 1 / jnp.sqrt(norm.var + norm.eps))
        assert_close(norm_grad.bias, jnp.full(3, 8.0))


# --- BatchNorm: running averages ------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1 - 1e-9, None])
def test_running_averages_cover_all_batches_so_far(momentum):
    xs = data(1000, 8, 2) + jnp.sin(jnp.arange(1000.0) / 50)[:, None, None]

    def after_each(norm, xs):
        return es.scan(lambda _, x: (norm(x), (norm.mean, norm.var)), xs[0], xs)[1]

    norm = es.nn.BatchNorm(2, momentum=momentum)
    found, norm = es.jit(es.mutable(after_each))(norm, xs)
    assert norm.count.tolist() == [1000, 1000]
    exact, stay = np.asarray(xs, np.float64), 1 if momentum is None else momentum
    for got, batches in zip(found, (exact.mean(1), exact.var(1)), strict=True):
        total, weights, expected = 0.0, 0.0, []
        for batch in batches:
            total, weights = stay * total + batch, stay * weights + 1
            expected.append(total / weights)
        np.testing.assert_allclose(got, expected, rtol=2e-6)


def test_a_channel_of_padding_does_not_count_the_batch():
    x, last = data(8, 2), data(8, 2, seed=1)
    _, norm = run(es.nn.BatchNorm(2), x, mask=jnp.array([[True, False]]))
    assert norm.count.tolist() == [1, 0]
    assert (norm.mean[1], norm.var[1]) == (0, 1)
    _, norm = run(norm, last)
    assert_close(norm.mean[1], last[:, 1].mean())


def test_momentum_1_keeps_the_averages():
    _, norm = run(es.nn.BatchNorm(3), data(8, 3))
    _, new = run(es.configure(norm, momentum=1.0), data(8, 3, seed=1))
    assert_close((new.mean, new.var), (norm.mean, norm.var), 0)


def test_in_a_trace_the_layer_has_no_call_of_its_own():
    model, x = eqx.nn.Sequential([es.nn.BatchNorm(3), es.nn.BatchNorm(3)]), data(8, 3)
    program = (
        jax.jit(lambda model, x: es.mutable(model)(x)[0]).lower(model, x).as_text()
    )
    assert "rsqrt" in program
    assert "normalize" not in program


# --- BatchNorm: modes and gradients ---------------------------------------------------


def test_momentum_may_be_a_tracer():
    norm = es.nn.BatchNorm(2, debias=False)
    x = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    assert_close(es.mutable(norm)(x)[1].mean, jnp.array([0.02, 0.04]))

    @jax.jit
    def mean_after(norm, momentum):
        _, norm = es.mutable(es.configure(norm, momentum=momentum))(x)
        return norm.mean

    assert mean_after(norm, 0.5).tolist() == [1, 2]
    assert mean_after(norm, 0.75).tolist() == [0.5, 1]
    counted = es.nn.BatchNorm(2).replace(count=jnp.ones(2))
    assert_close(mean_after(counted, 0.5), jnp.array([4 / 3, 8 / 3]))


def test_a_subclass_may_have_leaves_that_are_not_arrays():
    class Named(es.nn.BatchNorm):
        name: Any

        def __init__(self, size):
            super().__init__(size)
            self.name = "first"

    x = jr.normal(jr.key(0), (8, 3))
    y, norm = es.mutable(Named(3))(x)
    expected, plain = es.mutable(es.nn.BatchNorm(3))(x)
    assert_close((y, norm.mean), (expected, plain.mean))


@pytest.mark.parametrize("change", [es.eval, es.freeze])
def test_eval_and_frozen_keep_the_statistics_and_use_them(change):
    x = data(8, 3)
    _, norm = es.mutable(with_affine(es.nn.BatchNorm(3, momentum=0.2)))(x)
    still = change(norm)
    y, after = es.mutable(still)(x + 100)
    assert eqx.tree_equal(after, still)
    expected = (x + 100 - norm.mean[None]) / jnp.sqrt(norm.var + norm.eps)[None]
    assert_close(y, expected * norm.weight[None] + norm.bias[None], 1e-3)
    assert_close(still(x + 100), y)  # it writes nothing, so it needs no scope


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


def test_no_gradient_flows_through_the_running_averages():
    def total(scale):
        _, norm = es.mutable(es.nn.BatchNorm(3))(scale * data(8, 3))
        return jnp.sum(norm.mean) + jnp.sum(norm.var)

    assert jax.grad(total)(1.0) == 0


# --- BatchNorm: errors ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (3,)),
        ({"channel_axis": -1}, (3, 8)),
        ({"axis_name": "batch"}, ()),
    ],
)
def test_a_wrong_number_of_channels_is_an_error(options, shape):
    norm = es.nn.BatchNorm(3, **options).eval()
    with pytest.raises(ValueError, match=r"input_size=3.*channel_axis"):
        norm(jnp.ones(shape))


def test_complex_input_is_an_error():
    norm = es.nn.BatchNorm(3)
    with pytest.raises(ValueError, match=r"dtype complex64.*jnp.concatenate"):
        es.mutable(norm)(jnp.ones((8, 3), jnp.complex64))


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((1e-5,), {}),
        ((0,), {}),
        ((np.float32(1),), {}),
        ((jnp.ones(2),), {}),
        (("batch", 0.9), {}),
        ((("a", 0.9),), {}),
    ],
)
def test_only_size_and_name_are_positional_and_a_name_is_no_number(args, options):
    with pytest.raises(TypeError, match=r"eps=1e-5, momentum=|positional arguments"):
        es.nn.BatchNorm(4, *args, **options)


@pytest.mark.parametrize(
    ("cls", "options", "text"),
    [
        (es.nn.BatchNorm, {"momentum": 1.5}, r"number from 0 to 1.*PyTorch"),
        (es.nn.BatchNorm, {"momentum": -0.1}, r"number from 0 to 1"),
        (es.nn.BatchNorm, {"eps": -1e-5}, r"eps=-1e-05.*at least 0"),
        (es.nn.Dropout, {"p": 1.5}, r"p=1\.5.*from 0 to 1"),
        (es.nn.Dropout, {"p": float("nan")}, r"from 0 to 1"),
    ],
)
def test_a_setting_out_of_range_is_an_error_wherever_it_is_set(cls, options, text):
    with pytest.raises(ValueError, match=text):
        cls(3, **options) if cls is es.nn.BatchNorm else cls(**options)
    layer = es.nn.BatchNorm(3) if cls is es.nn.BatchNorm else es.nn.Dropout(key=0)
    for change in (
        lambda: es.configure([layer], **options),
        lambda: layer.replace(**options),
        lambda: es.configure(es.nn.Stacked([layer]), **options),
    ):
        with rejects(layer, ValueError, text):
            change()


def test_settings_that_depend_on_others():
    norm = es.nn.BatchNorm(3, debias=False)
    with rejects(norm, ValueError, "momentum=None` needs the number of batches"):
        es.configure(norm, momentum=None)
    with rejects(norm, TypeError, "called by a name"):
        es.configure(norm, axis_name=0.5)
    hollow = es.filter(norm, es.Parameter)
    assert es.configure(hollow, momentum=None).momentum is None
    with pytest.raises(ValueError, match="p=f32"):
        es.configure(es.nn.Dropout(key=0), p=jnp.float32(0.5))


# --- Dropout --------------------------------------------------------------------------


def test_dropout_stores_a_key_of_kind_rng():
    dropout = es.nn.Dropout(0.5, key=jr.key(0))
    assert [(p.name, p.kind) for p in es.parts(dropout)] == [("rng", es.Rng)]
    by_seed = es.nn.Dropout(0.5, key=0)
    assert by_seed.rng == dropout.rng


def test_dropout_keeps_the_expectation():
    p = 0.8
    y, _ = run(es.nn.Dropout(p, key=jr.key(0)), jnp.ones((100, 1000)))
    assert abs(float(jnp.mean(y)) - 1) < 0.02
    assert abs(float(jnp.mean(y == 0)) - p) < 0.01
    values = np.unique(np.asarray(y))
    np.testing.assert_allclose(values, [0, 1 / (1 - p)], rtol=1e-6)


def test_p_0_is_the_identity_and_draws_nothing():
    dropout, x = es.nn.Dropout(0, key=jr.key(0)), data(10)
    y, new = es.mutable(dropout)(x)
    assert y is x
    assert eqx.tree_equal(new, dropout)


@reuses_keys
def test_p_1_drops_everything_without_nan():
    dropout, x = es.nn.Dropout(1, key=jr.key(0)), data(10)

    def loss_fn(x):
        return jnp.sum(run(dropout, x)[0])

    y, _ = run(dropout, x)
    assert (y == 0).all()
    assert (jax.grad(loss_fn)(x) == 0).all()


def test_a_key_argument_wins_and_the_stored_key_does_not_change():
    dropout, x = es.nn.Dropout(0.5, key=jr.key(0)), jnp.ones(100)
    y, new = run(dropout, x, key=jr.key(7))
    assert eqx.tree_equal(new, dropout)
    other, _ = run(es.nn.Dropout(0.5, key=jr.key(1)), x, key=jr.key(7))
    assert (y == other).all()
    # Nothing is written, so no scope is needed, as with Equinox's layer.
    assert (dropout(x, key=jr.key(7)) == y).all()
    assert (eqx.nn.Dropout(0.5)(x, key=jr.key(7)) == y).all()


def test_without_a_key_it_waits_for_init():
    dropout = es.nn.Dropout(0.5)
    assert isinstance(dropout.rng, es.Initializer)
    with pytest.raises(es.NotInitializedError, match="rng"):
        run(dropout, jnp.ones(3))
    ready = dropout.init(0)
    assert ready.initialized
    y, _ = run(ready, jnp.ones(100))
    assert set(y.tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("p", [1.5, float("nan")])
def test_an_invalid_p_is_an_error(p):
    with pytest.raises(ValueError, match=r"Dropout\(p="):
        es.nn.Dropout(p, key=jr.key(0))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (jnp.int32, [6, 4]),
        (bool, [1, 1]),
        (jnp.complex64, [6, 3.75]),
    ],
)
def test_dropout_keeps_other_dtypes(dtype, kept):
    x = jnp.full((20, 5), 3).astype(dtype)
    for p, expected in zip((0.5, 0.2), kept, strict=True):
        y, _ = run(es.nn.Dropout(p, key=jr.key(0)), x)
        assert (y.dtype, y.shape) == (dtype, (20, 5))
        # Integers are rounded, so their average is not too small.
        assert set(y.ravel().tolist()) == {0, expected}
    for p in (0.0, 1.0):
        assert run(es.nn.Dropout(p, key=jr.key(0)), x)[0].dtype == dtype


# --- Both layers ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [es.eval, es.train])
def test_a_gradient_keeps_one_array_of_the_size_of_the_input(mode):
    norm = mode(es.nn.BatchNorm(3))
    x = jnp.ones((5, 3))

    def f(x, weight):
        return es.mutable(norm.replace(weight=weight))(x)[0]

    _, pull = jax.vjp(f, x, norm.weight)
    kept = [a.shape for a in jax.tree.leaves(pull)]
    assert kept.count(x.shape) == 1


# --- Statistics that the lanes do not share -------------------------------------------


class Around(es.Module):
    norm: es.Module
    calls: es.State = 0.0

    def __call__(self, x):
        return self.norm(x)

    def counting(self, x):
        self.calls = self.calls + x.sum()
        return self.norm(x)

    def branch(self, x):
        return es.cond(x[0] > 1, self.norm, lambda x: x, x)

    def loop(self, x):
        def body(carry):
            i, y = carry
            return i + 1, self.norm(y)

        return es.while_loop(lambda carry: carry[0] < x[0] / 4, body, (0.0, x))


NOT_MAPPED = r"(?s)\A(?!.*es\.State: 0)"  # this would be the axis of the features
BATCHES = jnp.arange(24.0).reshape(2, 3, 4)
STATEFUL = es.nn.Stateful(eqx.nn.BatchNorm(4, axis_name="batch", mode="batch"))
OVER = {
    "no name": (es.nn.BatchNorm(4), [None], 'axis_name="batch", channel_axis=1)'),
    "inside": (es.nn.BatchNorm(4, "b"), ["a", "b"], 'axis_name=("a", "b"))'),
    "unnamed": (es.nn.BatchNorm(4, "b"), ["b", None], 'axis_name=("outer", "b"))'),
    "three": (es.nn.BatchNorm(4, ["a", "b"]), ["b", "a", "c"], '("c", "a", "b"))'),
    "stateful": (STATEFUL, ["batch", "a"], 'axis_name=("outer", "batch"))'),
}


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "__call__") for name in OVER), ("no name", "counting")],
)
def test_an_axis_that_the_norm_does_not_average_over_is_named(name, method):
    norm, names, fragment = OVER[name]

    def f(model, x):
        call = getattr(model, method)
        for axis_name in names:
            call = es.vmap(call, axis_name=axis_name)
        return call(x)

    x = BATCHES[None] if len(names) == 3 else BATCHES
    with rejects(Around(norm), ValueError, re.escape(fragment), NOT_MAPPED):
        es.mutable(f)(Around(norm), x)


@pytest.mark.parametrize(
    ("norm", "method"), [(es.nn.BatchNorm(4, "batch"), "branch"), (STATEFUL, "loop")]
)
def test_a_norm_that_not_all_lanes_call_belongs_outside(norm, method):
    model = Around(norm)

    def f(model, x):
        return es.vmap(getattr(model, method), axis_name="batch")(x)

    with rejects(model, ValueError, "[Cc]all the layer outside", NOT_MAPPED):
        es.mutable(f)(model, BATCHES[:, 0])


def test_a_norm_on_devices_is_told_the_mesh_axis():
    mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    spec = jax.sharding.PartitionSpec("data")
    fragment = re.escape('es.nn.BatchNorm(4, axis_name="data", channel_axis=1)')

    def f(model, x):
        return es.shard_map(model, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    with rejects(Around(es.nn.BatchNorm(4)), ValueError, fragment):
        es.mutable(f)(Around(es.nn.BatchNorm(4)), BATCHES[0])
    norm = es.nn.BatchNorm(4, axis_name="data", channel_axis=1)
    _, new = es.mutable(f)(Around(norm), BATCHES[0])
    assert new.norm.count[0] == 1


def test_state_of_the_user_may_be_mapped_also_around_a_norm():
    model = Around(es.nn.BatchNorm(4, axis_name="batch"))
    with rejects(model, ValueError, "axes=.es.State: 0"):
        es.mutable(lambda m, x: es.vmap(m.counting, axis_name="batch")(x))(
            model, BATCHES[0]
        )


def test_dropout_of_an_ensemble_without_vmap_says_how_to_map():
    ensemble = eqx.filter_vmap(lambda key: es.nn.Dropout(0.5, key=key))(
        jr.split(jr.key(0), 4)
    )
    fragments = r"keys of shape \(4,\)", r"in_axes=None, axes=\{\.\.\.: 0\}\)\(x\)"
    with rejects(ensemble, ValueError, *fragments):
        es.mutable(es.vmap(ensemble))(jnp.ones((3, 2)))
    with rejects(ensemble, ValueError, *fragments):
        es.mutable(ensemble)(jnp.ones(2), key=jr.split(jr.key(1), 4))
    ys, _ = es.mutable(es.vmap(ensemble, axes={...: 0}))(jnp.ones((4, 2)))
    assert ys.shape == (4, 2)
