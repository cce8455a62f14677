"""`cast=`: different dtypes for a model inside a call."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqx_state as es


HALF = jnp.bfloat16
CAST = {es.Parameter: HALF}


class Layer(es.Module):
    weight: es.Parameter
    mean: es.BatchStat
    count: es.State
    phase: es.Parameter  # complex
    codes: es.Buffer
    key: es.Rng

    def __call__(self, x):
        seen.append({part.name: part.value.dtype for part in es.parts(self)})
        y = self.weight * x
        self.mean = jnp.mean(y, keepdims=True)
        self.count = self.count + 1
        return y


seen: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def _forget():
    seen.clear()


def make_layer() -> Layer:
    return Layer(
        jnp.array([1.0, 1 / 3]),
        jnp.zeros(1),
        0,
        jnp.ones(2, jnp.complex64),
        jnp.arange(2.0),
        jr.key(0),
    )


X = jnp.array([1.0, 3.0], HALF)
HALF_OF_A_THIRD = float(jnp.asarray(1 / 3, HALF))


def dtypes(tree: Any) -> dict[str, Any]:
    return {part.name: part.value.dtype for part in es.parts(tree)}


# --- Inside ---------------------------------------------------------------------------


def test_the_selected_arrays_have_the_dtype_inside():
    layer = make_layer()
    y, new = es.mutable(layer, cast=CAST)(X)
    assert y.dtype == HALF
    expected = dtypes(layer) | {"weight": HALF}
    assert seen == [expected]
    assert dtypes(new) == dtypes(layer)


@pytest.mark.parametrize("cast", [HALF, jnp.dtype(HALF), "bfloat16"], ids=repr)
def test_a_dtype_alone_is_for_parameters_and_buffers(cast):
    layer = make_layer()
    es.mutable(layer, cast=cast)(X)
    assert seen == [dtypes(layer) | dict.fromkeys(["weight", "codes"], HALF)]


def test_complex_arrays_integers_and_keys_are_never_cast():
    layer = make_layer()
    es.mutable(lambda m, x: m(x).sum(), cast={...: HALF})(layer, X)
    [inside] = seen
    assert inside == dtypes(layer) | dict.fromkeys(["weight", "mean", "codes"], HALF)


def test_rules_decide_and_none_leaves_arrays_alone():
    layer = make_layer()
    rules = {es.path_matches("weight"): jnp.float16, es.State: None, ...: "bfloat16"}
    with jax.numpy_dtype_promotion("standard"):
        es.mutable(layer, cast=rules)(jnp.ones(2, jnp.float16))
    assert seen == [dtypes(layer) | {"weight": jnp.float16, "codes": HALF}]


def test_moments_and_averages_are_not_parameters():
    model = {"w": jnp.ones(2)}
    optimizer = es.Optimizer(optax.sgd(0.1, momentum=0.9)).init(model)
    tree = model, optimizer, es.Ema(0.9).init(model)
    got, _ = es.mutable(
        lambda tree: [x.dtype for x in jax.tree.leaves(tree)],
        cast={es.Parameter: jnp.bfloat16},
    )(tree)
    assert got[0] == jnp.bfloat16
    assert jnp.bfloat16 not in got[1:]


# --- Outside --------------------------------------------------------------------------


def test_unwritten_arrays_are_returned_as_the_same_objects():
    layer = make_layer()
    old = {part.name: part.value for part in es.parts(layer)}
    _, new = es.mutable(layer, cast={...: HALF})(X)
    for part in es.parts(new):
        assert (part.value is old[part.name]) == (part.name not in ("mean", "count"))


def test_written_arrays_are_returned_in_their_own_dtype():
    layer = make_layer()
    _, new = es.mutable(layer, cast={...: HALF})(X)
    assert new.mean.dtype == jnp.float32
    assert new.mean[0] == jnp.mean(X * layer.weight.astype(HALF)).astype(jnp.float32)
    assert new.count == 1
    # A narrower float is widened, even if it is read again in the same call.
    dtype, new = es.mutable(lambda m, x: (m(x), m.mean.dtype)[1], cast=CAST)(layer, X)
    assert dtype == new.mean.dtype == jnp.float32


@pytest.mark.parametrize(("dtype", "name"), [("f4", "f32"), ("f2", "f16")])
def test_other_dtypes_are_not_converted(dtype, name):
    layer = make_layer().replace(mean=jnp.zeros(1, HALF))
    match = rf"`mean` was changed from `bf16\[1\]` to `{name}\[1\]"
    with pytest.raises(ValueError, match=match):
        es.mutable(lambda m: setattr(m, "mean", jnp.ones(1, dtype)), cast=CAST)(layer)


@pytest.mark.parametrize("dtype", ["float32", None], ids=["strong", "weak"])
def test_state_that_is_cast_takes_its_own_dtype(dtype):
    def run(m):
        m.mean = jnp.broadcast_to(jnp.asarray(1 / 3, dtype), (1,))
        return m.mean.dtype

    dtype, new = es.mutable(run, cast={es.State: HALF})(make_layer())
    assert dtype == HALF
    assert new.mean.dtype == jnp.float32
    assert new.mean == HALF_OF_A_THIRD


def test_an_array_assigned_to_a_different_field_has_its_cast_value():
    def move(m):
        m.mean = m.weight

    layer = make_layer().replace(mean=jnp.zeros(2))
    _, new = es.mutable(move, cast={...: HALF})(layer)
    assert new.mean.tolist() == [1.0, HALF_OF_A_THIRD]
    assert new.mean.dtype == jnp.float32
    _, new = es.mutable(move, cast=CAST)(layer)
    assert new.mean.tolist() == [1.0, HALF_OF_A_THIRD]


def test_an_array_in_the_place_of_a_text_has_no_dtype_to_return_to():
    class Noted(es.Module):
        weight: es.Parameter
        note: es.State = "cold"

    def run(m):
        m.note = m.weight

    _, new = es.mutable(run, cast=CAST)(Noted(jnp.ones(2)))
    assert new.note.dtype == HALF


def test_numpy_arrays():
    class Holder(es.Module):
        weight: es.Parameter
        table: es.Buffer
        mean: es.State

    def run(m):
        m.mean = m.table.mean(keepdims=True)
        return m.weight.dtype, m.table.dtype

    holder = Holder(np.ones(2), np.ones(2, np.float32), np.zeros(1, np.float32))
    (weight, table), new = es.mutable(run, cast={...: HALF})(holder)
    assert weight == table == HALF
    assert new.weight is holder.weight
    assert new.table is holder.table
    assert new.mean.dtype == jnp.float32
    # NumPy's float64, which JAX does not enable by default.
    _, new = es.mutable(
        lambda m: setattr(m, "weight", m.weight * 2), kinds=es.TreePart, cast=CAST
    )(holder)
    assert new.weight.dtype == jnp.float32


def test_float64():
    with jax.enable_x64(True):
        layer = make_layer()
        layer = layer.replace(weight=jnp.array([1.0, 1 / 3]), mean=jnp.zeros(1))
        assert layer.weight.dtype == jnp.float64
        rules = {es.Parameter: jnp.float32}
        grads, new = es.grad(lambda m, x: m(x).sum(), cast=rules)(layer, X.astype("f4"))
        assert grads.weight.dtype == new.mean.dtype == jnp.float64
        assert seen[0]["weight"] == jnp.float32


# --- Gradients ------------------------------------------------------------------------


def loss_fn(model, x):
    return jnp.sum(model(x).astype(jnp.float32) ** 2)


def test_gradients_have_the_dtype_of_the_parameters():
    layer = make_layer()
    (loss, new), grads = es.value_and_grad(loss_fn, cast=CAST)(layer, X)
    assert loss.dtype == grads.weight.dtype == new.mean.dtype == jnp.float32
    assert grads.mean is None
    assert seen[0]["weight"] == HALF
    # This equals the gradient by hand, through the cast.
    expected = jax.grad(
        lambda w: jnp.sum((w.astype(HALF) * X).astype(jnp.float32) ** 2)
    )(layer.weight)
    assert (grads.weight == expected).all()
    grads, (aux, new) = es.grad(
        lambda m, x: (loss_fn(m, x), m.weight.dtype), has_aux=True, cast=CAST
    )(layer, X)
    assert (grads.weight == expected).all()
    assert (aux, new.mean.dtype) == (HALF, jnp.float32)


def test_no_cast_or_a_cast_to_the_same_dtype_changes_nothing():
    layer, x = make_layer(), jnp.ones(2)
    plain = es.value_and_grad(loss_fn)(layer, x)
    for rules in (None, {}, {es.Parameter: None}, {...: jnp.float32}):
        same = es.value_and_grad(loss_fn, cast=rules)(layer, x)
        assert eqx.tree_equal(plain, same)


# --- With transforms ------------------------------------------------------------------


def test_with_argnums_paths_start_at_the_tuple():
    layer, cast = make_layer(), {es.path_matches("[1]*"): HALF}
    es.mutable(lambda x, layer: layer(x), argnums=(0, 1), cast=cast)(X, layer)
    assert seen[0]["weight"] == HALF


@pytest.mark.parametrize("rules", [CAST, {...: HALF}], ids=["parameters", "all"])
@jax.numpy_dtype_promotion("standard")
def test_state_keeps_its_dtype_in_the_transforms_inside(rules):
    class Net(es.Module):
        weight: es.Parameter
        mean: es.State

        def __call__(self, xs):
            def step(carry, x):
                self.mean = jax.lax.pmean(self.weight * x, "batch")
                return carry, self.mean + x

            return es.scan(step, None, xs)[1]

    def loss(net, xs):
        ys = es.vmap(net, axis_name="batch")(xs)
        return jnp.mean(ys.astype(jnp.float32) ** 2)

    net, xs = Net(jnp.full(2, 1 / 3), jnp.zeros(2)), jnp.ones((4, 3, 2))
    (_, expected), exact = es.value_and_grad(loss)(net, xs)
    (_, new), grads = es.jit(es.value_and_grad(loss, cast=rules))(net, xs.astype(HALF))
    assert (dtypes(new), dtypes(grads)) == (dtypes(net), dtypes(exact))
    assert jnp.allclose(new.mean, expected.mean, rtol=0.02)
    assert jnp.allclose(grads.weight, exact.weight, rtol=0.02)


def test_a_jitted_function_inside_is_compiled_for_each_cast_around_it():
    @es.jit
    def run(m):
        m.mean = m.codes[:1]

    layer = make_layer().replace(codes=jnp.full(2, 1 / 3, HALF))
    for rules in (CAST, {es.State: HALF}, CAST):
        _, new = es.mutable(lambda m: run(m), cast=rules)(layer)
        assert new.mean.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"`mean` was changed from `f32\[1\]` to `bf"):
        es.mutable(lambda m: run(m))(layer)


def test_of_equal_dtypes_inside_only_those_of_the_cast_can_hold_wider_ones():
    @es.jit
    def run(m, mean):
        m.mean = mean

    layer, mean = make_layer(), jnp.full(1, 1 / 3, jnp.float32)
    _, new = es.mutable(lambda m: run(m, mean), cast={...: HALF})(layer)
    assert new.mean == jnp.float32(HALF_OF_A_THIRD)
    half = layer.replace(mean=layer.mean.astype(HALF), codes=layer.codes.astype(HALF))
    with pytest.raises(ValueError, match=r"`mean` was changed from `bf16\[1\]` to `f3"):
        es.mutable(lambda m: run(m, mean), cast=CAST)(half)


def test_calls_nest():
    def outer(m, x):
        (y, inner), grads = es.value_and_grad(loss_fn, cast={es.Parameter: None})(m, x)
        m.mean = inner.mean
        assert grads.weight.dtype == HALF
        return y

    layer = make_layer()
    _, new = es.mutable(outer, cast={...: HALF})(layer, X)
    assert dtypes(new) == dtypes(layer)
    assert seen[0]["weight"] == HALF


# --- Bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cast", ["bfloat", jnp.int8, es.Parameter, jnp.ones(2)], ids=repr
)
def test_cast_is_a_dtype_or_a_mapping_from_filters(cast):
    match = r"`es\.grad\(cast=\.\.\.\)`: .* is not a real floating dtype.*to such dtyp"
    with pytest.raises(TypeError, match=match):
        es.grad(loss_fn, cast=cast)


def test_a_name_is_not_a_filter():
    with pytest.raises(TypeError, match=r"^`'weight'` is not a filter") as info:
        es.grad(loss_fn, cast={"weight": HALF})
    assert "`es.grad(cast=...)`: the keys of rules are filters" in str(info.value)
    assert "`{es.path_matches('weight'): value}`" in str(info.value)


def test_a_name_that_is_not_a_dtype():
    with pytest.raises(TypeError, match="'bfloat'.*real floating dtype"):
        es.mutable(lambda model: None, cast={es.Parameter: "bfloat"})


def test_a_module_that_is_assigned_has_the_dtypes_of_the_one_it_replaces():
    class Inner(es.Module):
        s: es.State

    class Outer(es.Module):
        inner: Inner

        def __call__(self):
            self.inner = Inner(jnp.float32(1 / 3))
            return self.inner.s

    y, new = es.mutable(Outer(Inner(jnp.float32(0))), cast={es.State: HALF})()
    assert (y.dtype, new.inner.s.dtype) == (HALF, jnp.float32)
    assert new.inner.s == jnp.float32(HALF(1 / 3))
