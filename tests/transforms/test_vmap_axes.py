"""`es.vmap`: the rules of `axes` and `in_axes`, by kind and by other filters.

`test_vmap.py` tests everything else.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import rejects, reuses_keys
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


# --- Axes by kind -------------------------------------------------------------------


KINDS = [
    ({es.State: 0, Cache: None}, ["total"]),
    # The most derived kind applies, in any order.
    ({Cache: None, es.State: 0}, ["total"]),
    ({...: 0, Cache: None}, ["weight", "total", "table", "index"]),
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


@pytest.mark.parametrize("axis", [1, -2])
@jax.numpy_rank_promotion("allow")
def test_any_axis(axis):
    class Wide(es.Module):
        mean: es.BatchStat

        def __call__(self, x):
            self.mean = self.mean + x
            return self.mean

    model = Wide(jnp.arange(6.0).reshape((3, 2) if axis == -2 else (2, 3)))
    y, new = es.mutable(es.vmap(model, axes={es.State: axis}))(XS)
    assert (new.mean == model.mean + jnp.expand_dims(XS, 1 - axis % 2)).all()
    assert (jnp.moveaxis(y, 0, axis) == new.mean).all()


def test_the_keys_are_filters():
    with pytest.raises(TypeError, match=r"`es.vmap.* rules are a"):
        es.vmap(lambda x: x, axes=0)
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
    ({es.BatchStat: "batch"}, r"`total` .*no axis 'batch'.*an `int`"),
]


@pytest.mark.parametrize(("axes", "match"), OUT_OF_RANGE)
def test_an_axis_that_an_array_does_not_have(axes, match):
    model = tally("total", "cache")
    for call in (
        lambda m: es.vmap(m, axes=axes)(XS),
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
    with rejects(two(), ValueError, r"es\.path_matches\('a'\)"):
        es.mutable(f)(two(), A)


def test_a_module_in_a_partial_is_named_from_itself_only():
    def f(m, axes):
        return vmap(eqx.Partial(lambda n, x: n(x) + m.right.b, m.left), axes)(XS)

    assert jnp.allclose(es.mutable(f)(two(), A)[0], XS * XS + 4)
    match = r"`es\.path_matches\('left\.a'\)` matches no array"
    with rejects(two(), ValueError, match):
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


def test_a_filter_that_matches_nothing():
    for key in (es.path_matches("aa"), es.under(lambda m: m.left)):
        with rejects(Pair(), ValueError, r"es\.vmap.*matches no array"):
            es.mutable(es.vmap(Pair(), axes={key: 0}))(XS)
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
    for f in (
        lambda model: es.vmap(model, axes=rules)(XS),
        lambda model: es.vmap(lambda m, x: m(x), in_axes=(rules, 0))(model, XS),
    ):
        _, new = es.mutable(f)(Drawing(jnp.zeros(3), jr.key(0)))
        assert new.total.tolist() == [0, 1, 2]


# --- Modules outside a scope --------------------------------------------------------


@reuses_keys
def test_a_module_outside_a_scope_is_mapped_as_an_argument_and_constant_in_a_closure():
    class Reads(es.Module):
        rng: es.Rng
        w: es.Parameter

        def __call__(self, x=0.0):
            return jr.normal(self.rng) + 0 * x, self.w

    model = Reads(jr.key(0), XS)
    for f in (model, es.checkpoint(model.__call__), eqx.Partial(Reads.__call__, model)):
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
def test_axes_for_a_constant_are_an_error(where):
    model = Noisy(jr.split(jr.key(0), 3), XS)
    with rejects(
        model,
        ValueError,
        r"`es\.vmap`: `axes` would map `rng` of the `Noisy`",
        "constant in a closure",
        r"es\.vmap\(lambda model, x: model\(x\), in_axes=",
    ):
        es.vmap(HIDDEN[where](model), axes={es.Rng: es.SPLIT, ...: None})(XS)
    shared = es.vmap(HIDDEN[where](model.eval()), axes={...: None})
    assert shared(XS).shape == (3,)


def test_axes_for_a_constant_beside_an_owned_module_are_an_error():
    def f(model):
        net = eqx.nn.Sequential([model, eqx.nn.Linear(3, 3, key=jr.key(0))])
        es.vmap(lambda x: net(x), axes={es.Parameter: 0, ...: None})(jnp.ones((3, 3)))

    with pytest.raises(ValueError, match=r"map `layers\[1\]\.weight` of the `Sequ"):
        es.mutable(f)(Noisy(jr.key(0)))
    pair, xs = Pair(a=XS), jnp.ones((3, 3))

    def g(model):  # `model` comes before `pair`
        return es.vmap(lambda x: model.b * pair.a, axes={es.Parameter: 0})(xs)

    with pytest.raises(ValueError, match="map `a` of the `Pair`"):
        es.mutable(g)(Pair(a=XS))


@reuses_keys
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
