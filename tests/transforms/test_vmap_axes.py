"""`es.vmap`: axes by kind and by other rules; keys; ensembles."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import rejects
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
FIELDS = ("weight", "total", "cache", "table", "index")


def tally(*stacked):
    """A `Tally` with stacks of three in the named fields, and scalars in the others."""
    return Tally(
        *(
            jnp.full(3 if x in stacked else (), 1 if x == "index" else 1.0)
            for x in FIELDS
        )
    )


# --- Keys ---------------------------------------------------------------------------


def lanes_of(model, n=4, **options):
    return es.mutable(es.vmap(model, axis_size=n, **options))(jnp.zeros(n))


@pytest.mark.parametrize("make", [jr.key, jr.PRNGKey], ids=["typed", "legacy"])
@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_each_lane_has_its_own_key_and_the_key_of_the_model_advances_once(make):
    model = Noisy(make(0))
    y, new = lanes_of(model)
    assert len(set(y.tolist())) == 4
    assert new.rng.shape == model.rng.shape
    assert new.rng.dtype == model.rng.dtype
    assert (new.rng != model.rng).any()
    again, newer = lanes_of(new)
    assert not set(y.tolist()) & set(again.tolist())
    assert (newer.rng != new.rng).any()
    # It advances once, however often the lanes draw.
    _, twice = es.mutable(lambda m: es.vmap(lambda x: m(m(x)))(jnp.zeros(4)))(model)
    assert (twice.rng == new.rng).all()


@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_the_keys_of_an_argument_are_mapped_by_in_axes():
    model = Noisy(jr.key(0))
    shared = es.vmap(lambda m, x: m(x), ({es.Rng: None}, 0))
    y, new = es.mutable(shared)(model, jnp.zeros(4))
    assert len(set(y.tolist())) == 1
    by_kind = {es.Rng: es.SPLIT}
    split = es.vmap(lambda m, x: m(x), (by_kind, 0))
    y, new = es.mutable(split)(model, jnp.zeros(4))
    assert len(set(y.tolist())) == 4
    assert new.rng == lanes_of(model)[1].rng
    # This also works outside a scope if nothing is written.
    draw = lambda m, x: jr.normal(m.rng) + x  # noqa: E731
    assert len(set(es.vmap(draw, (by_kind, 0))(model, XS).tolist())) == 3


class Keyed(es.Module):
    rng: es.State  # a slip: `es.Rng`

    def __call__(self, x):
        self.rng, key = jr.split(self.rng)
        return x + jr.normal(key)


PUTS = {
    "itself": (lambda m: m, lambda m: m),
    "in a list": (lambda m: [0, m], lambda ms: ms[1]),
    "in a module of Equinox": (
        lambda m: eqx.nn.Sequential([m]),
        lambda ms: ms.layers[0],
    ),
}


@pytest.mark.parametrize("cls", [Noisy, Keyed])
@pytest.mark.parametrize("put", PUTS)
def test_an_owned_module_with_none_draws_as_if_closed_over(cls, put):
    put, take = PUTS[put]
    model, xs = put(cls(jr.key(0))), jnp.zeros(4)

    def closure(m, xs):
        return es.vmap(lambda x: take(m)(x))(xs)

    expected, after = es.mutable(closure)(model, xs)
    assert len(set(expected.tolist())) == 4
    for in_axes in ((None, 0), [None, 0]):
        mapped = es.vmap(lambda m, x: take(m)(x), in_axes)
        y, new = es.mutable(mapped)(model, xs)
        assert (y == expected).all()
        assert eqx.tree_equal(new, after)
    # Outside of a scope, a module is data, and `None` shares its key.
    key_of = lambda m, x: jr.normal(take(m).rng) + x  # noqa: E731
    assert len(set(es.vmap(key_of, (None, 0))(model, xs).tolist())) == 1


def test_only_a_key_that_is_drawn_from_advances():
    model = [Noisy(jr.key(0)), Noisy(jr.key(1))]
    _, new = es.mutable(lambda ms: es.vmap(lambda x: ms[0](x))(XS))(model)
    assert new[0].rng != model[0].rng
    assert new[1].rng == model[1].rng
    y, new = lanes_of(model[0].eval())
    assert (y == 0).all()
    assert new.rng == model[0].rng


def test_the_keys_of_the_lanes_differ_from_those_of_the_model():
    class Show(es.Module):
        rng: es.Rng

        def __call__(self, x):
            seen, self.rng = self.rng, jr.split(self.rng)[0]
            return seen

    model = Show(jr.key(0))
    seen, new = es.mutable(es.vmap(model))(XS)
    keys = [model.rng, new.rng, *seen]
    assert len({tuple(jr.key_data(k).tolist()) for k in keys}) == 5


@pytest.mark.parametrize("typed", [True, False])
def test_keys_of_a_stack_are_split_and_do_not_count_as_reused(typed):
    class Stack(es.Module):
        dropouts: es.nn.Dropout

        def __call__(self, x):
            return es.scan(lambda x, drop: (drop(x), None), x, self.dropouts)[0]

    keys = jr.split(jr.key(0) if typed else jr.PRNGKey(0), 3)
    stack = Stack(eqx.filter_vmap(lambda key: es.nn.Dropout(0.5, key=key))(keys))
    by_hand = [jr.clone(key) if typed else key for key in stack.dropouts.rng]
    step = es.jit(lambda stack, x: es.mutable(es.vmap(stack))(x))
    with jax.debug_key_reuse(True):
        for _ in range(2):
            ys, stack = step(stack, jnp.ones((4, 64)))
            assert len(np.unique(ys == 0, axis=0)) == 4  # each lane has its own mask
    for key, now in zip(by_hand, stack.dropouts.rng, strict=True):
        assert jnp.all(jr.split(jr.split(key)[0])[0] == now)


@pytest.mark.parametrize("write", ["key", "stream"])
@jax.debug_key_reuse(False)  # on purpose: one key is used again
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
    # If each lane has its own key, none is stored, and the model's key advances as
    # usual.
    _, new = es.mutable(es.vmap(model.restart))(XS, jr.split(key, 3))
    changed, same = (new.rng, new.stream.key)[:: 1 if write == "key" else -1]
    assert changed not in (jr.key(0), jr.key(1), key)
    assert same in (jr.key(0), jr.key(1))


@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_keys_that_are_shared_or_mapped():
    model = Noisy(jr.key(0))
    y, new = lanes_of(model, axes={es.Rng: None})
    eager, expected = es.mutable(model)(0.0)
    assert y.tolist() == [eager] * 4
    assert new.rng == expected.rng
    model = Noisy(jr.split(jr.key(0), 3))
    y, new = es.mutable(es.vmap(model, axes={es.Rng: 0}))(XS)
    for i in range(3):
        y_i, new_i = es.mutable(Noisy(model.rng[i]))(XS[i])
        assert y[i] == y_i
        assert new.rng[i] == new_i.rng


def test_a_key_that_is_a_constant_is_the_same_in_all_lanes():
    class Seeded(es.Module):
        seed: es.Buffer

        def __call__(self, x):
            return x + jr.uniform(self.seed)

    model = Seeded(jr.key(0))
    y, new = es.mutable(es.vmap(model))(jnp.zeros(3))
    assert (y == y[0]).all()
    assert new.seed is model.seed


def test_the_dropout_of_a_teacher_in_a_buffer_draws_in_each_lane():
    class Distilled(es.Module):
        teacher: es.Buffer[es.nn.Dropout]
        noise: es.Buffer  # a key that is a constant

        def __call__(self, x):
            return self.teacher(x) + 0 * jr.normal(self.noise), jr.normal(self.noise)

    model = Distilled(es.nn.Dropout(0.5, key=jr.key(0)), jr.key(1))
    run = es.mutable(es.vmap(model), kinds=(es.State, es.Buffer))
    (ys, noise), new = run(jnp.ones((4, 32)))
    assert len({tuple(y.tolist()) for y in ys}) == 4
    assert jnp.all(noise == noise[0])
    assert new.teacher.rng != model.teacher.rng
    assert new.noise == model.noise


def test_only_keys_can_be_split():
    with pytest.raises(ValueError, match=r"es\.SPLIT.*`total`"):
        es.mutable(es.vmap(tally(), axes={es.BatchStat: es.SPLIT}))(XS)
    assert repr(es.SPLIT) == "es.SPLIT"
    assert copy.deepcopy(es.SPLIT) is es.SPLIT


# --- Axes by kind -------------------------------------------------------------------


def test_parameters_statistics_and_the_rest_are_shared_by_default():
    model = tally()

    def lane(x):
        assert all(leaf.shape == () for leaf in jax.tree.leaves(model))
        return model.weight * x

    assert (es.vmap(lane)(XS) == XS).all()


KINDS = [
    ({es.BatchStat: 0}, ["total"]),
    ({es.State: 0, Cache: None}, ["total"]),
    # The most derived kind applies, in any order.
    ({Cache: None, es.State: 0}, ["total"]),
    ({es.State: 0}, ["total", "cache"]),
    ({...: 0, Cache: None}, ["weight", "total", "table", "index"]),
    ({...: 0}, FIELDS),
    # No array has the kind `OptState`.
    ({...: None, es.BatchStat: 0, es.OptState: 0}, ["total"]),
]


@pytest.mark.parametrize(("axes", "mapped"), KINDS)
def test_kinds_mean_their_subclasses_and_dots_every_other_array(axes, mapped):
    model = tally(*mapped)
    by_entry = es.vmap(lambda m, x: m["m"](x), in_axes=({"m": axes}, 0))
    for y, new in (
        es.mutable(es.vmap(model, axes=axes))(XS),
        es.mutable(lambda m: es.vmap(lambda x: m(x), axes=axes)(XS))(model),
        es.mutable(lambda m: by_entry({"m": m}, XS))(model),
    ):
        assert y[0].tolist() == [0.0, 1.0, 2.0]
        assert y[1].shape == y[2].shape == (3,)
        assert (new.total == 1 + XS).all()
        assert new.cache.shape == model.cache.shape
        assert (new.cache == 2.0).all()


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


def test_the_keys_are_filters():
    for wrong in ({"mean": 0}, {Noisy: 0}, 0, [es.State]):
        with pytest.raises(TypeError, match="is not a filter|`es.vmap.* rules are a"):
            es.vmap(lambda x: x, axes=wrong)
    with pytest.raises(TypeError, match="`'mean'` is not a filter"):
        es.vmap(lambda x: x, in_axes=({es.State: 0, "mean": 0},))(XS)


@pytest.mark.parametrize(("wrong", "shown"), [(XS, r"f32\["), ("batch", "'batch'")])
def test_arguments_and_the_name_of_the_axis_are_not_in_axes(wrong, shown):
    cure = r"`es\.vmap\(f\)\(xs\)`.*`es\.vmap\(f, axis_name=\"batch\"\)\(xs\)`"
    with pytest.raises(TypeError, match=f"`in_axes` must be axes.*{shown}.*{cure}"):
        es.vmap(tally("total", "cache"), wrong)


OUT_OF_RANGE = [
    ({es.BatchStat: 1}, r"`total` has shape \(3,\).*no axis 1"),
    ({es.State: -2}, r"`total`.*no axis -2"),
    ({es.Parameter: 0}, r"`weight` has shape \(\).*no axis 0"),
    ({es.BatchStat: "batch"}, r"`total` .*no axis 'batch'.*an `int`"),
]


@pytest.mark.parametrize(("axes", "match"), OUT_OF_RANGE)
def test_an_axis_that_an_array_does_not_have(axes, match):
    model = tally("total", "cache")
    for call in (
        lambda m: es.vmap(m, axes=axes)(XS),
        lambda m: es.vmap(lambda x: m(x), axes=axes)(XS),
        lambda m: es.vmap(lambda x, m: m(x), (0, axes))(XS, m),
    ):
        with rejects(model, ValueError, rf"es\.vmap.*{match}.*share it with `None`"):
            es.mutable(call)(model)


def test_axes_are_not_for_the_arguments():
    def f(ms):
        held, given = ms
        axes = {es.BatchStat: 0}
        return es.vmap(lambda m: (m(1.0), held(1.0)), (None,), axes=axes)(given)

    _, new = es.mutable(f)([tally("total"), tally()])
    assert new[0].total.tolist() == [2.0] * 3
    assert new[1].total == 2.0


def test_one_module_as_two_arguments_with_different_axes():
    class Only(es.Module):
        w: es.Parameter

    def f(m):
        return es.vmap(lambda a, b, x: (a.w + 0 * m.w[0], b.w), (0, None, 0))(m, m, XS)

    model = Only(XS)
    outside = f(model)
    assert [x.shape for x in outside] == [(3,), (3, 3)]
    assert eqx.tree_equal(es.mutable(f)(model), (outside, model))


# --- Rules with filters -------------------------------------------------------------


class Pair(es.Module):
    """Two parameters, which differ only in their names."""

    a: es.Parameter = 1.0
    b: es.Parameter = 2.0
    total: es.State = 0.0

    def __call__(self, x, key=None):
        self.total = self.total + jax.lax.pmean(x, "batch")
        return self.a * x + self.b

    def apply(self, x):
        return self(x)


class Two(es.Module):
    left: Pair
    right: Pair

    def __call__(self, x):
        return self.right(self.left(x))


def two():
    """A model in which only `left.a` has a value for each lane."""
    return Two(Pair(a=XS), Pair())


def vmap(f, axes, in_axes=0):
    return es.vmap(f, in_axes, axes=axes, axis_name="batch")


LEFT_A = {es.path_matches("left.a"): 0}
A = {es.path_matches("a"): 0}


def test_the_first_filter_wins_over_kinds_and_a_shadowed_filter_still_matches():
    rest = {es.path_matches("*.a"): None, es.under(lambda m: m.left.a): 7}
    for axes in ({es.Parameter: None, **LEFT_A}, {**LEFT_A, **rest}):
        y, new = es.mutable(vmap(two(), axes))(XS)
        assert jnp.allclose(y, XS * XS + 2 + 2)
        assert jnp.allclose(new.left.total, 1.0)


CALLS = {
    "a module": lambda m: vmap(m, A)(XS),
    "a bound dunder": lambda m: vmap(m.__call__, A)(XS),
    "a bound method": lambda m: vmap(es.checkpoint(m.apply), A)(XS),
    "a closure": lambda m: vmap(lambda x: m(x), A)(XS),
    "a partial": lambda m: vmap(eqx.Partial(lambda m, x: m(x), m), A)(XS),
    "under": lambda m: vmap(m, {es.under(lambda m: m.a): 0})(XS),
    "in_axes": lambda m: vmap(lambda m, x: m(x), None, ({**A, ...: None}, 0))(m, XS),
    "both": lambda m: vmap(lambda x, n: n(x) + 0 * m.b, A, (0, A))(XS, m),
}


@pytest.mark.parametrize("call", CALLS)
def test_names_start_at_the_outermost_module(call):
    f = CALLS[call]
    for model, in_scope in ((Pair(a=XS), f), (two(), lambda m: f(m.left))):
        y, new = es.mutable(in_scope)(model)
        assert jnp.allclose(y, XS * XS + 2)
        assert jnp.allclose(getattr(new, "left", new).total, 1.0)


def test_names_start_at_a_plain_equinox_module_around_it():
    model = eqx.nn.Sequential([eqx.nn.Lambda(jnp.sin), Pair(a=XS)])
    axes = {es.path_matches("layers[1].a"): 0}
    inside, new = es.mutable(lambda model: vmap(model, axes)(XS))(model)
    assert jnp.allclose(inside, XS * jnp.sin(XS) + 2)
    assert jnp.allclose(es.mutable(vmap(model, axes))(XS)[0], inside)
    assert jnp.allclose(new[1].total, jnp.sin(XS).mean())


def test_the_layers_of_a_stack_count_as_one_module():
    class Deep(es.Module):
        blocks: es.nn.Stacked

        def __call__(self, xs):
            rows = {lambda part: part.value.ndim == 1: 0, es.path_matches("b"): 7}
            return vmap(self.blocks.layers, {**A, **rows})(xs)

    model = Deep(es.nn.Stacked([Pair(a=x) for x in XS]))
    y, new = es.mutable(model)(XS)
    assert jnp.allclose(y, XS * XS + 2)
    assert jnp.allclose(new.blocks.layers.total, 1.0)
    y, _ = es.mutable(lambda d: vmap(d["blocks"].layers, {**A, ...: 0})(XS))(
        {"blocks": model.blocks}
    )
    assert jnp.allclose(y, XS * XS + 2)


def test_a_filter_needs_to_match_in_one_of_the_modules_only():
    def f(m, other):
        axes = {
            es.under(lambda m: m.left.a): 0,  # `other` does not have a field `left`
            es.path_matches("b"): 0,
            es.path_matches("right.b"): None,
        }
        return vmap(lambda x: m(x) + other.b, axes)(XS)

    y, _ = es.mutable(f, argnums=(0, 1))(two(), Pair(b=XS))
    assert jnp.allclose(y, XS * XS + 4 + XS)


def test_a_module_inside_a_second_one_is_named_from_the_outer_one():
    def f(m, axes):
        left = m.left
        return vmap(lambda x: (left(x), m(x)), axes)(XS)[1]

    assert jnp.allclose(es.mutable(f)(two(), LEFT_A)[0], XS * XS + 4)
    part = es.mutable(
        lambda m: vmap(eqx.Partial(lambda n, x: n(x) + m.right.b, m.left), A)(XS)
    )
    assert jnp.allclose(part(two())[0], XS * XS + 4)
    with rejects(two(), ValueError, r"es\.path_matches\('a'\)"):
        es.mutable(f)(two(), A)


def test_a_module_in_a_partial_is_named_from_itself_only():
    def f(m, axes):
        return vmap(eqx.Partial(lambda n, x: n(x) + m.right.b, m.left), axes)(XS)

    with rejects(
        two(), ValueError, r"`es\.path_matches\('left\.a'\)` matches no array"
    ):
        es.mutable(f)(two(), LEFT_A)


def test_one_mapping_for_all_arguments_has_to_match_in_one_of_them():
    def run(m, xs, name):
        rules = {es.path_matches(name): 0, ...: 0}
        return es.vmap(lambda m, x: m.a * x, rules)(m, xs)

    pair = Pair(XS, jnp.zeros(3), jnp.zeros(3))
    assert jnp.allclose(run(pair, XS, "a"), XS * XS)
    assert jnp.allclose(es.mutable(run)(pair, XS, "a")[0], XS * XS)
    with rejects(pair, ValueError, r"`es\.path_matches\('c'\)` matches no array"):
        run(pair, XS, "c")


def test_rules_in_nested_transforms():
    class Free(es.Module):
        left: Pair
        right: Pair

        def __call__(self, x):
            return self.right.a * (self.left.a * x + self.left.b) + self.right.b

    inner = {es.path_matches("right.b"): 0}
    outer = {es.path_matches("left.a"): 0, **inner}

    def f(m, xs):
        return es.vmap(es.vmap(m, axes=inner), axes=outer)(xs)

    xs = jnp.ones((3, 2))
    free = Free(Pair(a=XS), Pair(b=xs))
    expected = jnp.broadcast_to(XS[:, None] + 3, (3, 2))
    assert jnp.allclose(f(free, xs), expected)
    assert jnp.allclose(es.mutable(f)(free, xs)[0], expected)


def test_a_key_by_its_name():
    class Draws(es.Module):
        first: es.Rng
        second: es.Rng

        def __call__(self, x):
            return jr.normal(self.first), jr.normal(self.second)

    model = Draws(jr.key(0), jr.key(1))
    first, second = es.vmap(model, axes={es.path_matches("second"): None})(XS)
    assert len(set(first.tolist())) == 3
    assert len(set(second.tolist())) == 1


def test_a_filter_that_matches_nothing():
    for key in (es.path_matches("aa"), es.under(lambda m: m.left)):
        for call in (
            lambda m, key=key: es.vmap(m, axes={key: 0})(XS),
            lambda m, key=key: es.vmap(lambda m, x: m(x), ({key: 0}, 0))(m, XS),
        ):
            with rejects(
                Pair(),
                (ValueError, AttributeError),
                r"es\.vmap.*matches no array|'left'",
            ):
                es.mutable(call)(Pair())
    f = es.vmap(lambda m, x: m.a * x, (None, 0), axes=A)
    with rejects(Pair(), ValueError, r"path_matches\('a'\)", r"mapped by `in_axes`"):
        es.mutable(lambda m: f(m, XS))(Pair())


def test_a_filter_may_match_an_array_that_init_creates():
    class Lazy(es.Module):
        a: es.Parameter | None = None
        b: es.Parameter = 1.0

        def __call__(self, x):
            if self.a is None:
                self.a = jnp.zeros(x.shape)
            return self.a + x

    for call in (
        lambda m, xs: es.vmap(m, axes={es.path_matches("a"): None})(xs),
        lambda m, xs: es.vmap(
            lambda m, x: m(x), ({es.path_matches("a"): None, ...: None}, 0)
        )(m, xs),
    ):
        assert es.init(Lazy(), 0, jnp.ones((3, 2)), call=call).a.shape == (2,)
    by_keyword = lambda m, xs: es.vmap(lambda x, *, m: m(x))(xs, m=m)  # noqa: E731
    with rejects(stack := Lazy(b=XS), ValueError, r"Lazy\.a.*`es\.vmap`"):
        es.init(stack, 0, jnp.ones((3, 2)), call=by_keyword)


# --- Modules outside a scope --------------------------------------------------------


@jax.debug_key_reuse(False)  # on purpose: one model is called several times
def test_a_module_outside_a_scope_is_mapped_as_an_argument_and_constant_in_a_closure():
    class Reads(es.Module):
        rng: es.Rng
        w: es.Parameter

        def __call__(self, x=0.0):
            return jr.normal(self.rng) + 0 * x, self.w

        def apply(self, x):
            return self(x)

    model = Reads(jr.key(0), XS)
    methods = model.__call__, model.apply, es.checkpoint(model.__call__)
    for f in (model, *methods, eqx.Partial(Reads.__call__, model)):
        y, w = es.vmap(f, axes={es.Parameter: 0})(XS)
        assert len(set(y.tolist())) == 3
        assert (w == XS).all()
    assert es.vmap(model, axes={...: 0, es.Rng: None})()[1].shape == (3,)
    y, w = es.vmap(lambda x: model(x))(XS)
    assert len(set(y.tolist())) == 1
    assert (w[0] == XS).all()
    # The table next to the module is an array of the function, and is shared.
    f = eqx.Partial(lambda t, m, x: m.w * x + t["a"].sum(), {"a": XS}, model)
    assert jnp.allclose(es.vmap(f, axes={es.Parameter: 0})(XS), XS * XS + 3)


HIDDEN = {
    "a closure": lambda m: lambda x: m(x),
    "a default": lambda m: lambda x, m=m: m(x),
    "beside an argument": lambda m: eqx.Partial(lambda n, x: m(x) + n.b, Pair(a=XS)),
    "in a field": lambda m: eqx.nn.Lambda(lambda x: m(x)),
    "also in a partial": lambda m: eqx.Partial(lambda n, x: m(x) + n(x), m),
}


@pytest.mark.parametrize("where", HIDDEN)
@pytest.mark.parametrize("axis", [0, es.SPLIT])
def test_axes_for_a_constant_are_an_error(where, axis):
    model = Noisy(jr.split(jr.key(0), 3), XS)
    axes = {es.Rng: axis, ...: None}
    with rejects(
        model,
        ValueError,
        r"`es\.vmap`: `axes` would map `rng` of the `Noisy`",
        "constant in a closure",
        r"es\.vmap\(lambda model, x: model\(x\), in_axes=",
    ):
        es.vmap(HIDDEN[where](model), axes=axes)(XS)
    shared = es.vmap(HIDDEN[where](model.eval()), axes={...: None})
    assert shared(XS).shape == (3,)


def test_axes_for_a_constant_beside_an_owned_module_are_an_error():
    def f(model):
        net = eqx.nn.Sequential([model, eqx.nn.Linear(3, 3, key=jr.key(0))])
        es.vmap(lambda x: net(x), axes={es.Parameter: 0, ...: None})(jnp.ones((3, 3)))

    with pytest.raises(ValueError, match=r"map `layers\[1\]\.weight` of the `Sequ"):
        es.mutable(f)(Noisy(jr.key(0)))


class Add(es.Module):
    b: es.Parameter

    def __call__(self, x, *, key=None):
        return x + self.b[0]


class Stack(es.Module):
    inner: dict[str, es.nn.Stacked]

    def __call__(self, x, name, wrap):
        f = wrap(self.inner["stack"])
        return es.vmap(f, axes={es.path_matches(name): None, ...: 0})(x)


STACKS = {
    "[*].b[0]": lambda stack: lambda x: stack(x),
    "layers[0][*].b[0]": lambda stack: eqx.nn.Sequential([stack]),
}


@pytest.mark.parametrize("name", STACKS)
def test_rules_see_the_layers_of_a_stack_under_the_names_of_a_list(name):
    model = Stack({"stack": es.nn.Stacked([Add([jnp.ones(())])] * 2)})
    y, _ = es.mutable(model)(XS, name, STACKS[name])
    assert (y == XS + 2).all()
    first = name.replace("*", "0")
    with pytest.raises(ValueError, match=r"selects `.*\[0\]\.b.*but not `.*\[1\]\.b"):
        es.mutable(model)(XS, first, STACKS[name])


class Sum(es.Module):
    total: jax.Array

    def __call__(self, x):
        self.total = self.total + x
        return self.total


class Covering(es.Module):
    inner: es.State[Sum]


def test_an_argument_has_the_kinds_of_the_whole_model():
    def captured(model):
        es.vmap(lambda x: model.inner(x), axes={es.State: 0})(XS)

    def passed(model):
        entries = {es.State: 0}, 0
        es.vmap(lambda inner, x: inner(x), in_axes=entries)(model.inner, XS)

    def named(model):
        entries = {es.path_matches("[0].total"): 0}, 0
        es.vmap(lambda inner, x: inner[0](x), in_axes=entries)([model.inner], XS)

    for f in (captured, passed, named):
        _, new = es.mutable(f)(Covering(Sum(jnp.zeros(3))))
        assert new.inner.total.tolist() == [0, 1, 2]


class Drawing(es.Module):
    total: es.State
    rng: es.Rng

    def __call__(self, x):
        self.rng, _ = jr.split(self.rng)
        self.total = self.total + x


def test_the_advice_for_state_that_differs_is_right_for_keys_and_arguments():
    with pytest.raises(ValueError, match=r"`es\.Rng: es\.SPLIT` if .* of `in_axes`"):
        es.mutable(es.vmap(Drawing(jnp.zeros(()), jr.key(0))))(XS)
    rules = {es.State: 0, es.Rng: es.SPLIT}
    in_argument = es.vmap(lambda model, x: model(x), in_axes=(rules, 0))
    for f in (
        lambda model: es.vmap(model, axes=rules)(XS),
        lambda model: in_argument(model, XS),
    ):
        _, new = es.mutable(f)(Drawing(jnp.zeros(3), jr.key(0)))
        assert new.total.tolist() == [0, 1, 2]


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


@jax.debug_key_reuse(False)  # on purpose: keys of the ensemble are used again
def test_an_ensemble_of_layers_of_equinox():
    # The activation is a leaf that is not an array.
    keys = jr.split(jr.key(0), 3)
    mlps = eqx.filter_vmap(lambda k: eqx.nn.MLP(2, 2, 4, 1, key=k))(keys)
    xs = jnp.ones((3, 2))
    expected = eqx.filter_vmap(lambda m, x: m(x))(mlps, xs)
    assert (es.vmap(lambda m, x: m(x))(mlps, xs) == expected).all()
    assert (es.vmap(mlps, axes={...: 0})(xs) == expected).all()
    head = {es.under(lambda m: m.layers[1]): 0}
    model = eqx.tree_at(lambda m: m.layers[0], mlps, eqx.nn.Linear(2, 4, key=keys[0]))
    by_spec = eqx.filter_vmap(lambda m, x: m(x), in_axes=(es.spec(model, head), 0))
    assert jnp.allclose(es.vmap(model, axes=head)(xs), by_spec(model, xs))


def test_a_batch_for_each_member():
    # The lanes of the batch share the parameters of a member, and have their own keys.
    ensemble = jax.vmap(Dense)(jr.split(jr.key(0), 3))
    xs = jnp.ones((5, 2))

    def f(ensemble, xs):
        def member(m):
            return es.vmap(m.linear)(xs) + es.vmap(m.noise)(jnp.zeros((5, 2)))

        return es.vmap(member)(ensemble)

    y, new = es.mutable(f)(ensemble, xs)
    assert len(set(y.ravel().tolist())) == 3 * 5 * 2
    assert (new.noise.rng != ensemble.noise.rng).all()


@pytest.mark.parametrize("way", ["axes", "in_axes"])
def test_the_lanes_around_an_ensemble_share_its_members(way):
    class Total(es.Module):
        total: es.State

        def __call__(self, x):
            self.total = self.total + x

    ensemble = Total(jnp.zeros(3))

    def members(model, x):
        if way == "axes":
            return es.vmap(lambda: model(x), axis_size=3, axes={...: 0})()
        return es.vmap(lambda m: m(x))(model)

    def f(model, reduce):
        es.vmap(lambda x: members(model, reduce(x)), axis_name="batch")(XS)

    match = r"each lane wrote its own value to `total`"
    with rejects(ensemble, ValueError, match):
        es.mutable(f)(ensemble, lambda x: x)
    _, new = es.mutable(f)(ensemble, lambda x: jax.lax.pmean(x, "batch"))
    assert new.total.tolist() == [1, 1, 1]
