"""`es.Ema`: the exponential moving average of a model."""

import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqx_state as es


class Net(es.Module):
    weight: es.Parameter
    mean: es.BatchStat
    key: es.Rng
    codes: es.Buffer
    dropout: eqx.nn.Dropout
    name: str

    def __call__(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x
        return self.weight * x


def make_net(seed: int = 0, dtype: Any = jnp.float32) -> Net:
    weight = jr.normal(jr.key(seed), (3,)).astype(dtype)
    mean, codes = jnp.full(3, float(seed)), jnp.arange(3)
    return Net(weight, mean, jr.key(seed), codes, eqx.nn.Dropout(0.5), "net")


NETS = [make_net(seed) for seed in range(5)]


def formula(values: Any, decays: Any, debias: bool) -> Any:
    """The average by its definition, in float64; it starts at the first value."""
    decays = np.asarray(decays)
    later = [np.prod(decays[i + 1 :]) for i in range(len(decays))]
    weights = (1 - decays) * later
    total = sum(w * np.asarray(x, float) for w, x in zip(weights, values, strict=True))
    if debias:
        return total / weights.sum()
    return np.prod(decays) * np.asarray(values[0], float) + total


def averaged(ema: es.Ema, nets: Any, update: Any = None) -> es.Ema:
    ema = ema.init(nets[0])
    for net in nets:
        ema = ema.update(net) if update is None else update(ema, net)
    return ema


def same(a: Any, b: Any) -> bool:
    return bool(eqx.tree_equal(a, b))


def schedule(step):
    return jnp.minimum(0.9, (1 + step) / (10 + step))


DECAYS = {
    "constant": (0.9, [0.9] * 5),
    "zero": (0.0, [0.0] * 5),
    "schedule": (schedule, [(1 + i) / (10 + i) for i in range(5)]),
}


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize(("decay", "decays"), DECAYS.values(), ids=list(DECAYS))
def test_it_equals_the_formula(decay, decays, debias):
    expected = formula([net.weight for net in NETS], decays, debias)
    assert jax.tree.leaves(es.Ema(decay, debias=debias)) == []
    update = es.jit(lambda ema, net: ema.update(net))
    for ema in (
        averaged(es.Ema(decay, debias=debias), NETS, update),
        averaged(es.Ema(decay, debias=debias), NETS),
    ):
        assert np.allclose(ema.model.weight, expected, rtol=1e-6)
        assert np.allclose(es.jit(lambda ema: ema.model)(ema).weight, expected, 1e-6)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("rest", [1e-3, 1e-7 * 1.25])
def test_a_decay_near_1_equals_the_formula(rest, debias):
    updates = 20_000
    noise = jr.normal(jr.key(1), (updates,))
    xs = jnp.arange(updates) / updates + 0.1 * noise
    step = lambda ema, x: (ema.update(x), None)  # noqa: E731
    expected = formula(np.asarray(xs), [1 - rest] * updates, debias)
    for decay in (1 - rest, lambda _: 1 - rest):
        ema, _ = jax.lax.scan(step, es.Ema(decay, debias=debias).init(xs[0]), xs)
        assert np.allclose(ema.model, expected, rtol=1e-5, atol=0)
        weight = -np.expm1(updates * np.log1p(-rest))
        assert np.allclose(ema.weight, weight, rtol=1e-6, atol=0)
    # Rounding errors of equal values do not add up.
    ema, _ = jax.lax.scan(step, es.Ema(0.9999).init(xs[0]), xs.at[:].set(xs[0]))
    assert ema.model == xs[0]


def test_a_schedule_means_the_number_that_it_returns():
    decay = jnp.asarray(0.3, jnp.bfloat16)  # `1 - decay` would be rounded in its dtype
    ema = averaged(es.Ema(lambda step: decay), NETS)
    expected = formula([net.weight for net in NETS], [float(decay)] * 5, True)
    assert np.allclose(ema.model.weight, expected, rtol=1e-6)


def test_a_decay_that_is_1_in_the_dtype_of_the_average_is_an_error():
    with pytest.raises(
        ValueError, match=r"es\.Ema\(0\.99999999\)`: in float32.*0\.9999"
    ):
        es.Ema(0.99999999).init(NETS[0])
    es.Ema(1 - 2.0**-23).init(NETS[0])  # the nearest to 1 that works
    with jax.enable_x64(True):
        x = jnp.arange(5, dtype=jnp.float64)
        ema = averaged(es.Ema(0.99999999), list(x))
        assert ema.model.dtype == jnp.float64
        assert np.allclose(ema.model, formula(x, [0.99999999] * 5, True), rtol=1e-12)


def test_before_the_first_update_it_is_the_model_itself():
    for debias in (True, False):
        ema = es.Ema(0.9, debias=debias).init(NETS[1])
        assert same(ema.model, NETS[1])
        assert same(es.jit(lambda ema: ema.model)(ema), NETS[1])
        assert (ema.weight, ema.step) == (0.0, 0)


def test_one_model_is_its_own_average():
    for decay in (0.9, 0.999, schedule):
        ema = es.Ema(decay).init(NETS[0]).update(NETS[1])
        assert eqx.tree_equal(ema.model, NETS[1], rtol=1e-6)
    assert same(es.Ema(0.5).init(NETS[0]).update(NETS[1]).model, NETS[1])


def test_until_an_update_has_weight_the_average_is_the_last_model():
    ema = es.Ema(lambda step: jnp.where(step < 2, 1.0, 0.5)).init(NETS[0])
    for net in NETS[1:3]:
        ema = ema.update(net)
        assert same(ema.model, net)
    assert same(ema.update(NETS[3]).model, NETS[3])


def test_all_other_leaves_are_those_of_the_last_model():
    net = NETS[4].eval().freeze().replace(name="last")
    model = es.Ema(0.5).init(NETS[0]).update(NETS[1]).update(net).model
    rest = es.not_(es.Parameter)
    assert same(es.filter(model, rest), es.filter(net, rest))
    assert model.name == "last"
    assert (model.training, model.frozen) == (False, True)
    assert model.dropout.inference
    assert not (model.weight == net.weight).any()
    assert jax.tree.structure(model) == jax.tree.structure(net)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        nets = [
            {"a": jnp.full(2, 0.1 * i), "b": jnp.ones(2, jnp.float32)} for i in (1, 2)
        ]
        ema = es.Ema(0.5).init(nets[0]).update(nets[0]).update(nets[1])
        assert ema.weight.dtype == ema.means["a"].dtype == jnp.float64
        assert ema.means["b"].dtype == ema.model["b"].dtype == jnp.float32
        assert np.allclose(ema.model["a"], (0.1 * 0.25 + 0.2 * 0.5) / 0.75, rtol=1e-15)


def test_on_selects_the_averaged_arrays():
    ema = averaged(es.Ema(0.5, on=es.any_of(es.Parameter, es.BatchStat)), NETS)
    expected = formula([net.mean for net in NETS], [0.5] * 5, True)
    assert np.allclose(ema.model.mean, expected, rtol=1e-6)
    ema = averaged(es.Ema(0.5, on=es.BatchStat), NETS)
    assert (ema.model.weight == NETS[-1].weight).all()
    # Arrays that cannot be averaged are those of the last model: keys, integers.
    ema = averaged(es.Ema(0.5, on=es.TreePart), NETS)
    assert ema.model.key == NETS[-1].key
    assert ema.model.codes.dtype == jnp.int32


def test_frozen_parameters_are_averaged_unless_on_says_otherwise():
    net = es.freeze(NETS[0], lambda net: net.weight)
    assert (averaged(es.Ema(0.9), [net] * 5).model.weight == net.weight).all()
    frozen = es.Ema(0.5, on=es.any_of(es.trainable, es.BatchStat)).init(net)
    message = "`weight` is `f32.*its average is `None`.*freezing changes"
    with pytest.raises(ValueError, match=message):
        frozen.update(NETS[0])
    free = es.Ema(0.5, on=es.any_of(es.trainable, es.BatchStat)).init(NETS[0])
    with pytest.raises(ValueError, match="`weight` is `None`, but its average is `f32"):
        free.update(net)


def test_values_that_are_not_finite():
    infinite = {"a": jnp.array([jnp.inf, -jnp.inf])}
    assert same(averaged(es.Ema(0.5), [infinite] * 3).model, infinite)
    # The model given to `init` has no weight.
    ema = es.Ema(0.5).init({"a": jnp.full(2, jnp.nan)}).update({"a": jnp.ones(2)})
    assert (ema.model["a"] == 1).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_averages_are_accumulated_in_float32(dtype):
    factor = 1 + 2j if dtype == jnp.complex64 else 1.0
    factor = jnp.asarray(factor, dtype)
    nets = [n.replace(weight=n.weight.astype(dtype) * factor) for n in NETS]
    ema = averaged(es.Ema(0.9), nets, es.jit(lambda ema, net: ema.update(net)))
    assert same(es.Ema(0.9).init(nets[1]).model, nets[1])
    wide = jnp.complex64 if dtype == jnp.complex64 else jnp.float32
    assert ema.means.weight.dtype == wide
    values = [np.asarray(net.weight.astype(wide)) for net in nets]
    real, imag = (
        formula(x, [0.9] * 5, True)
        for x in ([v.real for v in values], [v.imag for v in values])
    )
    assert np.allclose(ema.means.weight, real + 1j * imag, rtol=1e-5)
    assert ema.model.weight.dtype == dtype


# --- As a pytree ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_an_average_that_was_converted_to_a_narrower_dtype_is_an_error(dtype):
    model = {"w": jnp.zeros(1)}
    ema = es.Ema(0.9).init(model)
    ema = eqx.tree_at(lambda e: e.means, ema, {"w": jnp.zeros(1, dtype)})
    with pytest.raises(ValueError, match=r"`\['w'\]` is `f32\[1\]`, but its average"):
        ema.update(model)


def test_an_average_is_constant_wherever_it_is_stored():
    ema = averaged(es.Ema(0.5), NETS[:2])
    assert {part.kind for part in es.parts(ema)} == {es.Buffer}
    assert (
        es.parts(es.filter((NETS[0], ema), es.trainable, es.under(lambda t: t[1])))
        == []
    )
    assert es.reseed(ema, 7).rest.key == ema.rest.key

    class Student(es.Module):
        net: Net
        ema: Any

        def __call__(self, x):
            return self.net(x) + self.ema.model.eval().weight

    student = Student(NETS[0], ema)
    _, new = es.mutable(lambda s, x: s.net(x))(student, jnp.ones(3))
    assert same(new.ema, ema)
    assert not same(new.net, student.net)
    grads, _ = es.grad(lambda s: jnp.sum(s.net.weight * s.ema.model.weight))(student)
    assert es.parts(grads.ema) == []
    with pytest.raises(Exception, match="is a `Buffer`"):
        es.mutable(lambda s, x: s.ema.rest(x))(student, jnp.ones(3))


def test_rules_for_an_average_apply_to_its_parameters():
    ema = es.Ema(0.5).init(NETS[0])
    rules = {es.path_matches("*weight"): 1, es.BatchStat: 2, ...: 3}
    for tree in (ema, (NETS[0].replace(weight=jnp.ones(5)), ema)):
        spec = es.spec(tree, rules)
        at = spec if tree is ema else spec[1]
        assert (at.means.weight, at.rest.mean, at.rest.codes) == (1, 2, 3)
    # A path filter sees the name in the model.
    assert es.spec(ema, {es.path_matches("weight"): 1}).means.weight == 1
    assert es.spec(ema, {es.trainable: 1, es.Buffer: 0}).means.weight == 1
    assert es.spec(es.Ema(0.5), {...: 1}).means is None


def test_a_step_with_an_average_is_traced_once():
    @es.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(net, ema, x):
        _, net = es.mutable(net)(x)
        return net, ema.update(net)

    net, ema = NETS[0], es.Ema(schedule).init(NETS[0])
    for _ in range(3):
        net, ema = step(net, ema, jnp.ones(3))
    assert ema.step == 3
    assert (ema.model.mean == net.mean).all()


def test_an_average_does_not_share_buffers_with_the_models():
    nets = [make_net(seed) for seed in (0, 1)]
    ema = es.Ema(0.5).init(nets[0]).update(nets[1])
    leaves = {x.unsafe_buffer_pointer() for x in _jax_arrays(nets)}
    assert leaves.isdisjoint(x.unsafe_buffer_pointer() for x in _jax_arrays(ema))
    for net in nets:
        for x in jax.tree.leaves(es.filter(net)):
            x.delete()
    assert jnp.isfinite(ema.model.weight).all()
    assert ema.model.codes.shape == (3,)


def _jax_arrays(tree):
    arrays = [part.value for part in es.parts(tree)]
    return [x for x in arrays if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def test_it_is_saved_and_loaded(tmp_path):
    ema = averaged(es.Ema(0.9), NETS)
    es.save(tmp_path / "ema", ema)
    new = es.load(tmp_path / "ema", es.Ema(0.9).init(make_net(9)))
    assert same(new, ema)
    assert same(pickle.loads(pickle.dumps(ema)), ema)
    assert "means.weight" in es.state_dict(ema)


def test_an_average_has_the_modes_of_the_last_model():
    ema = averaged(es.Ema(0.9), NETS[:2])
    switched = es.eval(es.freeze(ema, lambda e: e.rest))
    assert not switched.model.training
    assert switched.model.frozen
    assert same(switched.update(NETS[2]), ema.update(NETS[2]))


# --- Bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [1, -0.1, float("nan")])
def test_a_decay_is_less_than_one(decay):
    with pytest.raises(ValueError, match=r"at least 0 and less than\s1"):
        es.Ema(decay)


def test_on_must_be_a_filter_that_selects_an_inexact_array():
    with pytest.raises(TypeError, match="is not a filter"):
        es.Ema(0.9, on="weight")
    match = r"`es.Ema\(on=es.path_matches\('typo'\)\)` selects no inexact"
    with pytest.raises(ValueError, match=match):
        es.Ema(0.9, on=es.path_matches("typo")).init(NETS[0])
    assert es.Ema(0.9, on=es.OptState).init(NETS[0]).update(NETS[1]).model is not None


def test_init_comes_first():
    with pytest.raises(es.NotInitializedError, match="`es.Ema.update` was used before"):
        es.Ema(0.9).update(NETS[0])
    with pytest.raises(es.NotInitializedError, match="`es.Ema.model` was used before"):
        es.Ema(0.9).model  # noqa: B018


def test_a_lazy_model_must_be_initialized_first():
    lazy = NETS[0].replace(weight=es.Initializer(lambda key: jr.normal(key, (3,))))
    with pytest.raises(es.NotInitializedError, match="`weight` is an `es.Initializer`"):
        es.Ema(0.9).init(lazy)


OTHERS = {
    "another class": (lambda net: [net], "at the root"),
    "a hole": (lambda net: net.replace(weight=None), "`weight` is `None`"),
    "another static field": (
        lambda net: eqx.tree_at(lambda n: n.dropout, net, eqx.nn.Identity()),
        "at `dropout`",
    ),
    "another shape": (lambda net: net.replace(weight=jnp.ones(1)), "`weight` is"),
    "another dtype": (
        lambda net: net.replace(weight=jnp.ones((3,), complex)),
        "`weight` is",
    ),
}


@pytest.mark.parametrize(("change", "says"), OTHERS.values(), ids=list(OTHERS))
def test_a_changed_structure_is_an_error_that_names_the_path(change, says):
    ema = es.Ema(0.9).init(NETS[0])
    with pytest.raises(ValueError, match=says):
        ema.update(change(NETS[1]))


def test_gradients_and_parameters_are_not_the_model():
    net = NETS[0]
    ema = es.Ema(0.9).init(net)
    grads = es.filter(net, es.trainable)
    for wrong in (grads, es.eval(grads)):
        with pytest.raises(ValueError, match=r"`mean` is `None`.*ema\.update\(model\)"):
            ema.update(wrong)
    assert es.Ema(0.9).init(grads).update(grads).model.mean is None
    activated = es.Ema(0.9).init([net, jnp.tanh])
    with pytest.raises(ValueError, match=r"`\[1\]` is `None`"):
        activated.update([net, None])


def test_a_stateful_module_that_occurs_twice_is_an_error():
    with pytest.raises(ValueError, match=r"occurs twice, at `\[0\]` and `\[1\]`"):
        es.Ema(0.9).init([NETS[0], NETS[0]])


def test_what_is_private_is_not_printed():
    ema = es.Ema(0.9).init(NETS[0])
    optimizer = es.Optimizer(optax.sgd(0.1)).init(NETS[0])
    assert " _" not in repr((ema, optimizer))


# --- Several averages, and loops


def test_several_averages_are_read_and_updated_one_by_one():
    models = {"w": jnp.arange(4.0).reshape(2, 2)}  # two models, two weights in each
    emas = jax.vmap(es.Ema(0.5).init)(models)
    emas = jax.vmap(es.Ema.update)(emas, models)
    for use in (lambda: emas.model, lambda: emas.update(models)):
        with pytest.raises(ValueError, match=r"several averages, of shape \(2,\)"):
            use()
    assert same(jax.vmap(lambda ema: ema.model)(emas), models)
    assert same(jax.tree.map(lambda x: x[1], emas).model, {"w": models["w"][1]})


@pytest.mark.parametrize("scan", [es.scan, jax.lax.scan], ids=["es", "jax"])
def test_a_loop_may_close_over_a_model_with_a_key(scan):
    models = [{"w": jnp.full(2, float(i)), "key": jr.key(i)} for i in range(2)]
    step = lambda ema, _: (ema.update(models[1]), None)  # noqa: E731
    ema, _ = scan(step, es.Ema(0.5).init(models[0]), None, length=2)
    assert same(ema.model, models[1])


def test_a_target_network_starts_at_the_model():
    target = es.Ema(0.9, debias=False).init(NETS[0])
    for net in NETS[1:]:
        old = target.model.weight
        target = target.update(net)
        assert np.allclose(target.model.weight, 0.9 * old + 0.1 * net.weight, 1e-6)
