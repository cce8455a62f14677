"""`es.vmap`: axes by kind, keys, ensembles."""

import functools as ft
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from models import Noisy

import eqx_state as es


class Cache(es.State):
    pass


class Tally(es.Module):
    weight: es.Parameter
    total: es.BatchStat
    cache: Cache
    table: es.Buffer
    index: jax.Array

    def __call__(self, x):
        self.total = self.total + x
        self.cache = self.cache * 2.0
        return self.weight * x, self.table, self.index


XS = jnp.arange(3.0)


def tally(**stacked):
    """A `Tally`, each of whose fields is either a scalar or a stack of three."""
    values = dict.fromkeys(("weight", "total", "cache", "table"), 1.0) | {"index": 1}
    return Tally(
        **{
            name: jnp.full(3 if name in stacked else (), value)
            for name, value in values.items()
        }
    )


# --- Keys ---------------------------------------------------------------------------


def lanes_of(model, n=4, **options):
    return es.mutable(es.vmap(model, axis_size=n, **options))(jnp.zeros(n))


@pytest.mark.parametrize("make", [jr.key, jr.PRNGKey], ids=["typed", "legacy"])
@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_each_lane_has_its_own_key_and_the_models_advances_once(make):
    model = Noisy(make(0))
    y, new = lanes_of(model)
    assert len(set(y.tolist())) == 4
    assert new.rng.shape == model.rng.shape
    assert new.rng.dtype == model.rng.dtype
    assert (new.rng != model.rng).any()
    again, newer = lanes_of(new)
    assert not set(y.tolist()) & set(again.tolist())
    assert (newer.rng != new.rng).any()
    # As often as the lanes draw, it advances once.
    _, twice = es.mutable(lambda m: es.vmap(lambda x: m(m(x)))(jnp.zeros(4)))(model)
    assert (twice.rng == new.rng).all()


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_a_model_among_the_arguments_follows_in_axes_keys_and_all():
    model = Noisy(jr.key(0))
    y, new = es.mutable(es.vmap(lambda m, x: m(x), (None, 0)))(model, jnp.zeros(4))
    assert len(set(y.tolist())) == 1
    by_kind = {es.Rng: es.SPLIT}
    y, new = es.mutable(es.vmap(lambda m, x: m(x), (by_kind, 0)))(model, jnp.zeros(4))
    assert len(set(y.tolist())) == 4
    assert new.rng == lanes_of(model)[1].rng


def test_a_key_that_is_not_drawn_from_does_not_advance():
    model = Noisy(jr.key(0)).eval()
    y, new = lanes_of(model)
    assert (y == 0).all()
    assert new.rng == model.rng
    _, new = es.mutable(lambda m: es.vmap(lambda x: x)(XS))(model.train())
    assert new.rng == model.rng


def test_only_the_key_that_is_drawn_from_advances():
    model = [Noisy(jr.key(0)), Noisy(jr.key(1))]
    _, new = es.mutable(lambda ms: es.vmap(lambda x: ms[0](x))(XS))(model)
    assert new[0].rng != model[0].rng
    assert new[1].rng == model[1].rng


def test_the_keys_of_the_lanes_are_not_the_models():
    class Show(es.Module):
        rng: es.Rng

        def __call__(self, x):
            seen, self.rng = self.rng, jr.split(self.rng)[0]
            return seen

    model = Show(jr.key(0))
    seen, new = es.mutable(es.vmap(model))(XS)
    keys = [model.rng, new.rng, *seen]
    assert len({tuple(jr.key_data(k).tolist()) for k in keys}) == 5


def test_a_stack_of_keys_is_split_each():
    model = Noisy(jr.split(jr.key(0), 2))

    def f(m, x):
        keys, m.rng = jnp.moveaxis(jax.vmap(jr.split)(m.rng), 1, 0)
        return jax.vmap(jr.normal)(keys) + x

    y, new = es.mutable(es.vmap(f, in_axes=(None, 0)))(model, XS)
    assert len(set(y.ravel().tolist())) == 6
    assert new.rng.shape == (2,)


@pytest.mark.parametrize("write", ["key", "stream"])
@jax.debug_key_reuse(False)  # on purpose: the same key again
def test_a_key_that_is_assigned_is_kept_if_it_is_the_same_for_all_lanes(write):
    class Noise(es.Module):
        rng: es.Rng
        stream: es.RngStream

        def restart(self, x, key):
            if write == "key":
                self.rng = key
            else:
                self.stream = es.RngStream(key)
            return x

    model, key = Noise(jr.key(0), es.RngStream(1)), jr.key(7)
    _, plain = es.mutable(model.restart)(XS, key)
    for f in (model.restart, es.jit(model.restart), es.checkpoint(model.restart)):
        _, new = es.mutable(es.vmap(f, in_axes=(0, None)))(XS, key)
        assert eqx.tree_equal(new, plain)
    # One for each lane is the lane's own; the model's key advances by its rule.
    _, new = es.mutable(es.vmap(model.restart))(XS, jr.split(key, 3))
    changed, same = (new.rng, new.stream.key)[:: 1 if write == "key" else -1]
    assert changed not in (jr.key(0), jr.key(1), key)
    assert same in (jr.key(0), jr.key(1))


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_a_shared_key():
    model = Noisy(jr.key(0))
    y, new = lanes_of(model, axes={es.Rng: None})
    assert len(set(y.tolist())) == 1
    assert new.rng != model.rng
    eager, expected = es.mutable(model)(0.0)
    assert y[0] == eager
    assert new.rng == expected.rng


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_keys_mapped_over_an_axis():
    model = Noisy(jr.split(jr.key(0), 3))
    y, new = es.mutable(es.vmap(model, axes={es.Rng: 0}))(XS)
    for i in range(3):
        y_i, new_i = es.mutable(Noisy(model.rng[i]))(XS[i])
        assert y[i] == y_i
        assert new.rng[i] == new_i.rng


def test_splitting_what_is_no_key():
    with pytest.raises(ValueError, match=r"es\.SPLIT.*`total`"):
        es.mutable(es.vmap(tally(), axes={es.BatchStat: es.SPLIT}))(XS)
    assert repr(es.SPLIT) == "es.SPLIT"


def test_a_bare_key_in_a_closure_is_shared():
    key = jr.key(0)
    assert len(set(es.vmap(lambda x: jr.normal(key))(XS).tolist())) == 1


def test_outside_a_scope_each_lane_reads_its_own_key():
    class Reads(es.Module):
        rng: es.Rng

        def __call__(self, x):
            return jr.normal(self.rng)

    y = es.vmap(Reads(jr.key(0)))(XS)
    assert len(set(y.tolist())) == 3


# --- Axes by kind -------------------------------------------------------------------


def test_parameters_statistics_and_the_rest_are_shared_by_default():
    model = tally()

    def f(m, x):
        assert all(leaf.shape == () for leaf in jax.tree.leaves(m))
        return m.weight * x

    y, new = es.mutable(es.vmap(f, in_axes=(None, 0)))(model, XS)
    assert (y == XS).all()
    assert eqx.tree_equal(new, model)


def test_one_kind_over_an_axis():
    (y, *_), new = es.mutable(es.vmap(tally(total=1), axes={es.BatchStat: 0}))(XS)
    assert (y == XS).all()
    assert (new.total == 1 + XS).all()
    assert new.cache == 2.0


def test_a_kind_means_its_subclasses_and_the_most_derived_wins():
    model = tally(total=1)
    for axes in ({es.State: 0, Cache: None}, {Cache: None, es.State: 0}):
        _, new = es.mutable(es.vmap(model, axes=axes))(XS)
        assert (new.total == 1 + XS).all()
        assert new.cache == 2.0
    _, new = es.mutable(es.vmap(tally(total=1, cache=1), axes={es.State: 0}))(XS)
    assert new.cache.tolist() == [2.0] * 3


def test_dots_are_every_other_array():
    model = tally(total=1, weight=1, table=1, index=1)
    (y, t, i), new = es.mutable(es.vmap(model, axes={...: 0, Cache: None}))(XS)
    assert (y == XS).all()
    assert t.shape == i.shape == (3,)
    assert (new.total == 1 + XS).all()
    assert new.cache == 2.0
    everything = tally(total=1, weight=1, table=1, index=1, cache=1)
    _, new = es.mutable(es.vmap(everything, axes={...: 0}))(XS)
    assert new.cache.shape == (3,)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_any_axis(axis):
    class Wide(es.Module):
        mean: es.BatchStat

        def __call__(self, x):
            self.mean = self.mean + x
            return self.mean

    shape = (3, 2) if axis in (0, -2) else (2, 3)
    model = Wide(jnp.arange(6.0).reshape(shape))
    step = jnp.expand_dims(XS, 1 - axis % 2)
    with jax.numpy_rank_promotion("allow"):
        y, new = es.mutable(es.vmap(model, axes={es.State: axis}))(XS)
        assert (new.mean == model.mean + step).all()
        assert (jnp.moveaxis(y, 0, axis) == new.mean).all()


def test_a_kind_may_match_nothing():
    axes = {Cache: 0, es.Buffer: 0, ...: None, es.Rng: es.SPLIT}
    assert es.vmap(Noisy(jr.key(0)).eval(), axes=axes)(XS).shape == (3,)


def test_the_keys_are_filters():
    for wrong in ({"mean": 0}, {Noisy: 0}, 0, [es.State]):
        with pytest.raises(TypeError, match="axes"):
            es.vmap(lambda x: x, axes=wrong)
    with pytest.raises(TypeError, match=r"es\.vmap\(in_axes=.*`'mean'` is not a kind"):
        es.vmap(lambda x: x, in_axes=({es.State: 0, "mean": 0},))(XS)


def test_modules_among_the_arguments_follow_in_axes():
    model = tally(total=1, weight=1, table=1, index=1, cache=1)

    def f(m, x):
        return m(x)

    _, new = es.mutable(es.vmap(f))(model, XS)
    assert (new.total == 1 + XS).all()
    model = tally(total=1)
    by_kind = {es.BatchStat: 0}
    (y, *_), new = es.mutable(es.vmap(f, in_axes=(by_kind, 0)))(model, XS)
    assert (y == XS).all()
    assert (new.total == 1 + XS).all()
    deeper = es.vmap(lambda ms, x: ms["m"](x), in_axes=({"m": by_kind}, 0))
    _, new = es.mutable(deeper)({"m": model}, XS)
    assert (new["m"].total == 1 + XS).all()


def test_axes_are_not_for_the_arguments():
    # `axes` is for `f` and its closure; modules in the arguments follow `in_axes`.
    model = [tally(total=1), tally()]

    def f(ms):
        held, given = ms
        axes = {es.BatchStat: 0}
        return es.vmap(lambda m: (m(1.0), held(1.0)), (None,), axes=axes)(given)

    _, new = es.mutable(f)(model)
    assert new[0].total.tolist() == [2.0] * 3
    assert new[1].total == 2.0


def test_one_module_as_two_arguments_with_axes_of_their_own():
    class Only(es.Module):
        w: es.Parameter

    def f(m):
        return es.vmap(lambda a, b, x: (a.w, b.w), (0, None, 0))(m, m, XS)

    model = Only(XS)
    outside = f(model)
    assert [x.shape for x in outside] == [(3,), (3, 3)]
    assert eqx.tree_equal(es.mutable(f)(model), (outside, model))


def test_an_argument_with_functions_in_it():
    keys = jr.split(jr.key(0), 3)
    mlps = eqx.filter_vmap(lambda k: eqx.nn.MLP(2, 2, 4, 1, key=k))(keys)
    xs = jnp.ones((3, 2))
    expected = eqx.filter_vmap(lambda m, x: m(x))(mlps, xs)
    assert (es.vmap(lambda m, x: m(x))(mlps, xs) == expected).all()
    assert (es.vmap(mlps, axes={...: 0})(xs) == expected).all()


# --- Ensembles ----------------------------------------------------------------------


class Dense(es.Module):
    linear: eqx.nn.Linear
    noise: Noisy
    calls: es.State = 0

    def __init__(self, key):
        a, b = jr.split(key)
        self.linear, self.noise = eqx.nn.Linear(2, 2, key=a), Noisy(b)

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.noise(self.linear(x))


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_an_ensemble_is_its_members():
    keys = jr.split(jr.key(0), 3)
    members = [Dense(key) for key in keys]
    ensemble = jax.vmap(Dense)(keys)
    xs = jr.normal(jr.key(1), (3, 2))
    y, new = es.mutable(es.vmap(ensemble, axes={...: 0}))(xs)
    shared, _ = es.mutable(es.vmap(ensemble, None, axes={...: 0}))(xs[0])
    assert shared.shape == (3, 2)
    for i, member in enumerate(members):
        y_i, new_i = es.mutable(member)(xs[i])
        np.testing.assert_allclose(y[i], y_i, rtol=1e-5)
        assert new.noise.rng[i] == new_i.noise.rng
        assert new.calls[i] == 1


def test_an_ensemble_under_a_batch():
    # lanes of the batch share each member's parameters, and have their own keys
    ensemble = jax.vmap(Dense)(jr.split(jr.key(0), 3))
    xs = jnp.ones((5, 2))

    def f(ensemble, xs):
        def member(m):
            return es.vmap(m.linear)(xs) + es.vmap(m.noise)(jnp.zeros((5, 2)))

        return es.vmap(member)(ensemble)

    y, new = es.mutable(f)(ensemble, xs)
    assert y.shape == (3, 5, 2)
    assert len(set(y.ravel().tolist())) == 30
    assert (new.noise.rng != ensemble.noise.rng).all()


# --- An argument that the function reaches as well ---------------------------------


class Scale(es.Module):
    w: es.Parameter


class Around(es.Module):
    inner: Scale

    def by_closure(self, xs):
        f = lambda b, x: jnp.sum(b.w) * x + 0 * self.inner.w.sum()  # noqa: E731
        return es.vmap(f, in_axes=(0, 0))(self.inner, xs)

    @ft.partial(es.vmap, in_axes=(0, 0))
    def each(self, b, x):
        return b.w * x

    def by_method(self, xs):
        return self.each(self.inner, xs)


@pytest.mark.parametrize("name", ["by_closure", "by_method"])
def test_an_argument_follows_in_axes_though_the_function_reaches_it(name):
    model = Around(Scale(jnp.arange(3.0)))
    y, _ = es.mutable(getattr(model, name))(jnp.ones(3))
    assert y.tolist() == [0.0, 1.0, 2.0]


def test_a_closure_that_is_rebuilt_keeps_what_holds_no_module():
    # Outside a scope the module's key is split, and what holds it is made anew.
    model = es.nn.Dropout(0.5, key=jr.key(0)).eval()
    inner = types.MethodType(lambda self, x: self(x), model)

    def f(x, g=ft.partial(inner), *, h=lambda x: model(x)):  # noqa: B008
        return g(x) + h(x) + late(x)

    run = es.vmap(f)
    late = lambda x: 0 * x  # noqa: E731
    assert run(jnp.ones(2)).tolist() == [2.0, 2.0]


def test_an_ensemble_needs_no_arguments():
    class Constant(es.Module):
        weight: es.Parameter

        def __call__(self):
            return 2 * self.weight

    model = Constant(XS)
    assert es.vmap(model, axes={...: 0})().tolist() == [0.0, 2.0, 4.0]
    assert es.vmap(lambda: model() + 1, axes={...: 0})().tolist() == [1.0, 3.0, 5.0]


def test_a_key_that_is_a_constant_is_the_same_in_all_lanes():
    class Seeded(es.Module):
        seed: es.Buffer

        def __call__(self, x):
            return x + jr.uniform(self.seed)

    model = Seeded(jr.key(0))
    y, new = es.mutable(es.vmap(model))(jnp.zeros(3))
    assert (y == y[0]).all()
    assert new.seed is model.seed
