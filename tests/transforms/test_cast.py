"""`cast=`: other dtypes for a model inside of a call."""

import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

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


def test_without_rules_nothing_is_cast():
    layer = make_layer()
    for rules in (None, {}, {es.Parameter: None}, {es.Parameter: jnp.float32}):
        es.mutable(layer, cast=rules)(jnp.ones(2))
        assert seen.pop() == dtypes(layer)


def test_the_inputs_are_the_affair_of_the_caller():
    f = es.mutable(lambda m, x: x.dtype, cast=CAST)
    assert f(make_layer(), jnp.ones(2))[0] == jnp.float32


def test_models_in_containers_and_plain_layers():
    models = {"a": make_layer(), "b": [eqx.nn.Linear(2, 2, key=jr.key(0))]}

    def run(m, x):
        y = m["b"][0](x)
        assert y.dtype == HALF
        return m["a"](y)

    y, new = es.mutable(run, cast=CAST)(models, X)
    assert y.dtype == HALF
    assert new["b"][0].weight is models["b"][0].weight
    assert dtypes(new) == dtypes(models)


# --- Outside --------------------------------------------------------------------------


def test_what_was_not_written_is_the_very_same_array():
    layer = make_layer()
    old = {part.name: part.value for part in es.parts(layer)}
    _, new = es.mutable(layer, cast={...: HALF})(X)
    for part in es.parts(new):
        assert (part.value is old[part.name]) == (part.name not in ("mean", "count"))


def test_what_was_written_comes_back_in_its_own_dtype():
    layer = make_layer()
    _, new = es.mutable(layer, cast={...: HALF})(X)
    assert new.mean.dtype == jnp.float32
    assert new.mean[0] == jnp.mean(X * layer.weight.astype(HALF)).astype(jnp.float32)
    assert new.count == 1


def test_a_narrower_float_is_widened_to_float32_state():
    layer = make_layer()
    _, new = es.mutable(layer, cast=CAST)(X)
    assert new.mean.dtype == jnp.float32
    # Also where it is read again in the same call.
    assert es.mutable(lambda m, x: (m(x), m.mean.dtype)[1], cast=CAST)(layer, X)[0] == (
        jnp.float32
    )


def test_without_a_cast_it_is_an_error_as_ever():
    with pytest.raises(
        ValueError, match=r"`mean` was `f32\[1\]` and is now `bf16\[1\]"
    ):
        es.mutable(lambda m: setattr(m, "mean", jnp.ones(1, HALF)))(make_layer())


def test_a_wider_float_is_an_error_inside_a_cast_too():
    layer = make_layer()
    layer = eqx.tree_at(lambda m: m.mean, layer, jnp.zeros(1, HALF))
    with pytest.raises(
        ValueError, match=r"`mean` was `bf16\[1\]` and is now `f32\[1\]"
    ):
        es.mutable(lambda m: setattr(m, "mean", jnp.ones(1)), cast=CAST)(layer)
    with pytest.raises(
        ValueError, match=r"`mean` was `bf16\[1\]` and is now `f16\[1\]"
    ):
        es.mutable(lambda m: setattr(m, "mean", jnp.ones(1, jnp.float16)), cast=CAST)(
            layer
        )
    with pytest.raises(
        ValueError, match=r"`mean` was `bf16\[1\]` and is now `i32\[1\]"
    ):
        es.mutable(lambda m: setattr(m, "mean", jnp.ones(1, int)), cast=CAST)(layer)


def test_state_that_is_cast_takes_its_own_dtype():
    def run(m):
        m.mean = jnp.full(1, 1 / 3, jnp.float32)
        return m.mean.dtype

    dtype, new = es.mutable(run, cast={es.State: HALF})(make_layer())
    assert dtype == HALF
    assert new.mean.dtype == jnp.float32
    assert new.mean == HALF_OF_A_THIRD


def test_numbers_and_weak_types_take_the_dtype_inside():
    def run(m):
        m.mean = jnp.broadcast_to(1 / 3, (1,))
        return m.mean.dtype

    dtype, new = es.mutable(run, cast={es.State: HALF})(make_layer())
    assert (dtype, new.mean.dtype) == (HALF, jnp.float32)


def test_an_array_that_is_written_to_another_place_has_its_value_inside():
    def move(m):
        m.mean = m.weight

    layer = make_layer().replace(mean=jnp.zeros(2))
    _, new = es.mutable(move, cast={...: HALF})(layer)
    assert new.mean.tolist() == [1.0, HALF_OF_A_THIRD]
    assert new.mean.dtype == jnp.float32
    _, new = es.mutable(move, cast=CAST)(layer)
    assert new.mean.tolist() == [1.0, HALF_OF_A_THIRD]


def test_containers_and_modules_that_are_written():
    class Holder(es.Module):
        stats: es.State[dict[str, Any]]
        inner: Any
        weight: es.Parameter

    def run(m):
        m.stats = {**m.stats, "a": m.weight}
        m.inner = dataclasses.replace(m.inner, mean=m.weight)

    class Inner(es.Module):
        mean: es.State

    stats = {"a": jnp.zeros(2), "b": jnp.zeros(2, int)}
    holder = Holder(stats, Inner(jnp.zeros(2)), jnp.full(2, 1 / 3))
    for rules in (CAST, {...: HALF}):
        _, new = es.mutable(run, cast=rules)(holder)
        assert dtypes(new) == dtypes(holder)
        assert new.stats["a"].tolist() == [HALF_OF_A_THIRD] * 2
        assert new.inner.mean.tolist() == [HALF_OF_A_THIRD] * 2
        assert new.stats["b"] is holder.stats["b"]


def test_another_structure_is_an_error_as_ever():
    def run(m):
        m.mean = (m.weight, m.weight)
        m.mean = (m.weight,)

    with pytest.raises(ValueError, match="changed it, first at `mean`"):
        es.mutable(run, cast=CAST)(make_layer())
    struct = jax.ShapeDtypeStruct((1,), HALF)
    with pytest.raises(ValueError, match="`mean`: .* is a `jax.ShapeDtypeStruct`"):
        es.mutable(lambda m: setattr(m, "mean", struct), cast=CAST)(make_layer())


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
    # A NumPy array of a dtype that JAX does not have by itself.
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
    # It is the gradient by hand, through the cast.
    expected = jax.grad(
        lambda w: jnp.sum((w.astype(HALF) * X).astype(jnp.float32) ** 2)
    )(layer.weight)
    assert (grads.weight == expected).all()
    grads, (aux, new) = es.grad(
        lambda m, x: (loss_fn(m, x), m.weight.dtype), has_aux=True, cast=CAST
    )(layer, X)
    assert (grads.weight == expected).all()
    assert (aux, new.mean.dtype) == (HALF, jnp.float32)


def test_a_cast_to_the_own_dtype_changes_nothing():
    layer, x = make_layer(), jnp.ones(2)
    plain = es.value_and_grad(loss_fn)(layer, x)
    same = es.value_and_grad(loss_fn, cast={...: jnp.float32})(layer, x)
    assert eqx.tree_equal(plain, same)


def test_frozen_parameters_are_cast_too():
    layer = es.freeze(make_layer(), lambda m: m.weight)
    grads, new = es.grad(loss_fn, cast=CAST)(layer, X)
    assert grads.weight is None
    assert new.weight is layer.weight
    assert seen[0]["weight"] == HALF


def test_argnums():
    a, b = make_layer(), make_layer()

    def both(x, a, b):
        return jnp.sum((a(x) + b(x)).astype(jnp.float32))

    grads, (new_a, new_b) = es.grad(both, argnums=(1, 2), cast=CAST)(X, a, b)
    assert [g.weight.dtype for g in grads] == [jnp.float32] * 2
    assert [new.count for new in (new_a, new_b)] == [1, 1]
    assert [s["weight"] for s in seen] == [HALF, HALF]
    # A path is one in the tuple, and an array is a parameter.
    rules = {es.path_matches("[1]*"): HALF}
    es.mutable(lambda x, a: a(x), argnums=(0, 1), cast=rules)(X, a)
    assert seen[-1]["weight"] == HALF
    grad, _ = es.grad(lambda m, x: jnp.sum(x), argnums=1, cast={...: HALF})(
        a, jnp.ones(2)
    )
    assert grad.dtype == jnp.float32


# --- With transforms ------------------------------------------------------------------


class Net(es.Module):
    cell: Layer
    norm: es.nn.BatchNorm
    total: es.State
    head: eqx.nn.Linear

    def __init__(self):
        self.cell = make_layer()
        self.norm = es.nn.BatchNorm(2, axis_name="batch")
        self.total = jnp.zeros(())
        self.head = eqx.nn.Linear(2, 1, key=jr.key(0))

    def __call__(self, xs):  # a sequence
        def step(h, x):
            y = es.checkpoint(self.cell)(x)
            self.total = self.total + jnp.sum(jax.lax.pmean(y, "batch"))
            return h + y, None

        h, _ = es.scan(step, jnp.zeros(2, xs.dtype), xs)
        return self.head(self.norm(h))


def net_loss(net, xs):
    ys = es.vmap(net, axis_name="batch", axes={es.path_matches("cell.mean"): None})(xs)
    return jnp.mean(ys.astype(jnp.float32) ** 2)


class Quiet(Layer):
    """Nothing in it differs between lanes."""

    def __call__(self, x):
        y = self.weight * x
        self.mean = jnp.mean(jax.lax.pmean(y, "batch"), keepdims=True)
        self.count = self.count + 1
        return y


def make_net() -> Net:
    layer = make_layer()
    fields = {
        f.name: getattr(layer, f.name) for f in dataclasses.fields(Layer) if f.init
    }
    return Net().replace(cell=Quiet(**fields))


XS = jr.normal(jr.key(1), (4, 3, 2))


@pytest.mark.parametrize("rules", [CAST, {...: HALF}], ids=["parameters", "all"])
@jax.numpy_dtype_promotion("standard")
def test_transforms_inside(rules):
    net = make_net()
    run = es.jit(es.value_and_grad(net_loss, cast=rules))
    (loss, new), grads = run(net, XS.astype(HALF))
    (exact, expected), exact_grads = es.value_and_grad(net_loss)(net, XS)
    assert dtypes(new) == dtypes(net)
    assert dtypes(grads) == dtypes(exact_grads)
    assert loss.dtype == jnp.float32
    assert jnp.allclose(loss, exact, rtol=0.1)
    assert new.cell.count == expected.cell.count == 3
    for name in ("total", "cell.mean", "norm.mean", "norm.var"):
        a, b = (es.state_dict(n)[name] for n in (new, expected))
        assert jnp.allclose(a, b, rtol=0.1, atol=0.02), name
    for a, b in zip(*map(jax.tree.leaves, (grads, exact_grads)), strict=True):
        assert jnp.allclose(a, b, rtol=0.1, atol=0.05)


@jax.numpy_dtype_promotion("standard")
def test_branches_and_loops_inside():
    class Branches(es.Module):
        weight: es.Parameter
        mean: es.State

        def __call__(self, x):
            def write(x):
                self.mean = self.weight * x

            es.cond(x[0] > 0, write, lambda x: None, x)
            es.fori_loop(0, 2, lambda i, _: write(self.mean), None)

    model = Branches(jnp.full(2, 1 / 3), jnp.ones(2))
    for rules in (CAST, {...: HALF}):
        for x in (X, -X, jnp.ones(2)):
            _, new = es.jit(es.mutable(model, cast=rules))(x)
            assert dtypes(new) == dtypes(model)


def test_it_is_traced_once_and_retraced_for_other_rules():
    traces = []

    @es.jit
    def step(model, x, rules):
        traces.append(rules)
        cast = dict(rules)
        (_, model), grads = es.value_and_grad(loss_fn, cast=cast)(model, x)
        return model, grads

    model = make_layer()
    for _ in range(3):
        model, _ = step(model, X, ((es.Parameter, HALF),))
    assert len(traces) == 1
    # The transform itself is a pytree: equal rules, equal structure.
    a, b = (es.mutable(model, cast={es.Parameter: HALF}) for _ in range(2))
    c = es.mutable(model, cast={es.Parameter: jnp.float16})
    assert jax.tree.structure(a) == jax.tree.structure(b) != jax.tree.structure(c)
    y, _ = eqx.filter_jit(a)(X)
    assert y.dtype == HALF


def test_capture_around():
    class Sower(es.Module):
        weight: es.Parameter
        mean: es.State

        def __call__(self, x):
            self.mean = self.weight * x
            self.sow("dtype", self.weight)
            return jnp.sum(self.mean)

    model = Sower(jnp.ones(2), jnp.zeros(2))
    grad = es.value_and_grad(lambda m, x: m(x), cast=CAST)
    ((_, new), grads), sown = es.capture(grad)(model, X)
    assert sown["dtype"].dtype == HALF
    assert new.mean.dtype == grads.weight.dtype == jnp.float32


def test_a_jitted_function_inside_is_compiled_for_what_is_around_it():
    @es.jit
    def run(m):
        m.mean = m.codes[:1]

    layer = make_layer().replace(codes=jnp.full(2, 1 / 3, HALF))
    for rules in (CAST, {es.State: HALF}, CAST):
        _, new = es.mutable(lambda m: run(m), cast=rules)(layer)
        assert new.mean.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"`mean` was `f32\[1\]` and is now `bf16"):
        es.mutable(lambda m: run(m))(layer)


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


def test_a_call_that_raises_changes_nothing():
    layer = make_layer()
    before = dtypes(layer)

    def run(m, x):
        m(x)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        es.mutable(run, cast=CAST)(layer, X)
    assert dtypes(layer) == before
    assert layer.count == 0


def test_methods_and_decorators():
    class Model(es.Module):
        weight: es.Parameter

        def twice(self, x):
            return 2 * self.weight * x

    model = Model(jnp.ones(2))
    assert es.mutable(model.twice, cast=CAST)(X)[0].dtype == HALF

    @ft.partial(es.grad, cast=CAST)
    def loss(model, x):
        return jnp.sum(model.twice(x))

    assert loss(model, X)[0].weight.dtype == jnp.float32


# --- Bad input ------------------------------------------------------------------------


TRANSFORMS = [es.mutable, es.value_and_grad, es.grad]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "dtype",
    [jnp.int32, bool, jnp.complex64, "half-ish", 3, jnp.ones(2), jr.key(0).dtype],
    ids=["int", "bool", "complex", "text", "number", "array", "key"],
)
def test_a_dtype_is_a_real_floating_one(transform, dtype):
    match = rf"`es.{transform.__name__}\(cast=...\)`: the value for `es.Parameter`"
    with pytest.raises(TypeError, match=match):
        transform(loss_fn, cast={es.Parameter: dtype})
    with pytest.raises(TypeError, match=r"value for `...`.* cast to a real floating"):
        transform(loss_fn, cast={...: dtype})


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_rules_are_a_mapping_from_filters(transform):
    with pytest.raises(TypeError, match=r"rules are a mapping from filters to dtypes"):
        transform(loss_fn, cast=HALF)
    with pytest.raises(TypeError, match="the key `'weight'` is not a kind"):
        transform(loss_fn, cast={"weight": HALF})


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_filter_that_matches_nothing_is_an_error(transform):
    run = transform(loss_fn, cast={es.path_matches("wieght"): HALF})
    match = rf"es.{transform.__name__}\(cast=...\)`: the filter .*wieght.* matches no"
    with pytest.raises(ValueError, match=match):
        run(make_layer(), X)
    assert seen == []


def test_a_lazy_model_comes_after_its_init():
    lazy = make_layer().replace(weight=es.Initializer(lambda key: jnp.ones(2)))
    for transform in TRANSFORMS:
        with pytest.raises(es.NotInitializedError, match="`weight` is an `es.Init"):
            transform(loss_fn, cast={es.path_matches("weight"): HALF})(lazy, X)


def test_a_dtype_that_jax_does_not_have():
    with pytest.raises(ValueError, match="value for `es.Parameter` is float64, which"):
        es.mutable(loss_fn, cast={es.Parameter: np.float64})


# --- On data --------------------------------------------------------------------------


class Digits(es.Module):
    first: eqx.nn.Linear
    norm: es.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        a, b = jr.split(key)
        self.first = eqx.nn.Linear(64, 128, key=a)
        self.norm = es.nn.BatchNorm(128, axis_name="batch")
        self.last = eqx.nn.Linear(128, 10, key=b)

    def __call__(self, x):
        return self.last(jax.nn.relu(self.norm(self.first(x))))


def accuracy_after_training(cast, dtype):
    """The mean test accuracy of four networks, trained at once."""
    data = load_digits()
    images, labels = jnp.asarray(data.data / 16, jnp.float32), jnp.asarray(data.target)
    count, steps = 1280, 400

    def loss_fn(model, xs, ys):
        logits = es.vmap(model, axis_name="batch")(xs.astype(dtype))
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, ys).mean()

    @eqx.filter_jit
    @eqx.filter_vmap
    def fit(model):
        tx = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
        start = model, es.Optimizer(tx).init(model)
        arrays, rest = eqx.partition(start, eqx.is_array)

        def step(arrays, batch):
            model, optimizer = eqx.combine(arrays, rest)
            grad = es.grad(loss_fn, cast=cast)
            grads, model = grad(model, images[batch], labels[batch])
            after = optimizer.update(grads, model)
            return eqx.filter(after, eqx.is_array), None

        batches = jr.randint(jr.key(1), (steps, 64), 0, count)
        arrays, _ = jax.lax.scan(step, arrays, batches)
        model, _ = eqx.combine(arrays, rest)
        guessed = jnp.argmax(jax.vmap(model.eval())(images[count:]), axis=1)
        return model, jnp.mean(guessed == labels[count:])

    model, accuracies = fit(eqx.filter_vmap(Digits)(jr.split(jr.key(0), 4)))
    assert set(dtypes(model).values()) == {jnp.dtype("float32")}
    assert not (model.norm.mean == model.norm.mean.astype(HALF)).any()
    return jnp.mean(accuracies)


@jax.numpy_dtype_promotion("standard")  # `optax.adam` promotes by itself
def test_the_digits_are_learned_as_well_in_half_precision():
    exact = accuracy_after_training(None, jnp.float32)
    half = accuracy_after_training(CAST, HALF)
    assert exact > 0.9
    assert half >= exact - 0.005
