"""`es.vmap`: axes by rules, which are asked in each module in reach."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import rejects

import eqx_state as es


XS = jnp.arange(3.0)
MEAN = 1.0


class Pair(es.Module):
    """Two parameters, which only their names tell apart."""

    a: es.Parameter = 1.0
    b: es.Parameter = 2.0
    total: es.State = 0.0

    def __call__(self, x, key=None):
        self.total = self.total + jax.lax.pmean(x, "batch")
        return self.a * x + self.b


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


def test_a_filter_comes_before_the_kinds():
    y, new = es.mutable(vmap(two(), {es.Parameter: None, **LEFT_A}))(XS)
    assert jnp.allclose(y, XS * XS + 2 + 2)
    assert jnp.allclose(new.left.total, MEAN)
    assert eqx.tree_equal(es.update(two(), new.filter(es.Parameter)), two())


def test_the_first_filter_wins_and_a_shadowed_one_has_matched():
    axes = {**LEFT_A, es.path_matches("*.a"): None, es.under(lambda m: m.left.a): 7}
    assert es.mutable(vmap(two(), axes))(XS)[0].shape == (3,)


CALLS = {
    "a module": lambda m: vmap(m, A)(XS),
    "a bound method": lambda m: vmap(m.__call__, A)(XS),
    "a closure": lambda m: vmap(lambda x: m(x), A)(XS),
    "a partial": lambda m: vmap(eqx.Partial(lambda m, x: m(x), m), A)(XS),
    "under": lambda m: vmap(m, {es.under(lambda m: m.a): 0})(XS),
    "in_axes": lambda m: vmap(lambda m, x: m(x), None, ({**A, ...: None}, 0))(m, XS),
    "twice": lambda m: vmap(lambda x, n: n(x) + 0 * m.b, A, (0, A))(XS, m),
}


@pytest.mark.parametrize("call", CALLS)
def test_names_begin_at_the_module_that_is_reached(call):
    pair, f = Pair(a=XS), CALLS[call]
    expected = XS * XS + 2
    y, new = es.mutable(f)(pair)
    assert jnp.allclose(y, expected)
    assert jnp.allclose(new.total, MEAN)
    # In a model, where it has another name.
    y, new = es.mutable(lambda m: f(m.left))(two())
    assert jnp.allclose(y, expected)
    assert jnp.allclose(new.left.total, MEAN)


def test_names_in_a_model_that_is_not_an_es_module_are_the_same_in_a_scope():
    model = eqx.nn.Sequential([eqx.nn.Lambda(jnp.sin), Pair(a=XS)])
    axes = {es.path_matches("layers[1].a"): 0}

    def f(model):
        return vmap(model, axes)(XS)

    y, new = es.mutable(f)(model)
    assert jnp.allclose(y, XS * jnp.sin(XS) + 2)
    assert jnp.allclose(es.mutable(vmap(model, axes))(XS)[0], y)
    assert jnp.allclose(new[1].total, jnp.sin(XS).mean())


def test_the_layers_of_a_stack_are_one_module_from_there():
    class Deep(es.Module):
        blocks: es.nn.Stacked

        def __call__(self, xs):
            rows = {lambda part: part.value.ndim == 1: 0, es.path_matches("b"): 7}
            return es.vmap(self.blocks.layers, axes={**A, **rows}, axis_name="batch")(
                xs
            )

    model = Deep(es.nn.Stacked([Pair(a=x) for x in XS]))
    y, new = es.mutable(model)(XS)
    assert jnp.allclose(y, XS * XS + 2)
    assert jnp.allclose(new.blocks.layers.total, MEAN)
    plain = {"blocks": model.blocks}
    y, _ = es.mutable(lambda d: vmap(d["blocks"].layers, {**A, ...: 0})(XS))(plain)
    assert jnp.allclose(y, XS * XS + 2)


def test_plain_equinox_layers():
    keys = jr.split(jr.key(0), 3)
    head = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 1, key=key))(keys)
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jr.key(1)), head])
    xs = jnp.ones((3, 2))
    y = es.vmap(model, axes={es.under(lambda m: m.layers[1]): 0})(xs)
    axes = es.spec(model, {es.under(lambda m: m.layers[1]): 0})
    expected = eqx.filter_vmap(lambda m, x: m(x), in_axes=(axes, 0))(model, xs)
    assert jnp.allclose(y, expected)


def test_a_filter_needs_to_match_in_one_of_the_modules_only():
    other = Pair(b=XS)

    def f(m):
        axes = {
            es.under(lambda m: m.left.a): 0,  # `other` has no `left`
            es.path_matches("b"): 0,
            es.path_matches("right.b"): None,
        }
        return vmap(lambda x: m(x) + other.b, axes)(XS)

    y, _ = es.mutable(f)(two())
    assert jnp.allclose(y, XS * XS + 4 + XS)


def test_the_outermost_module_counts_if_one_is_in_another():
    def f(m):
        return vmap(lambda x: (m.left(x), m(x)), LEFT_A)(XS)[1]

    assert jnp.allclose(es.mutable(f)(two())[0], XS * XS + 4)

    def g(m):
        left = m.left
        return vmap(lambda x: (left(x), m(x)), A)(XS)

    with rejects(two(), ValueError, r"es\.path_matches\('a'\)"):
        es.mutable(g)(two())


def test_rules_in_nested_transforms():
    model = Two(Pair(a=XS), Pair(b=jnp.ones((3, 2))))
    inner = {es.path_matches("right.b"): 0}
    outer = {es.path_matches("left.a"): 0, **inner}

    def f(m, xs):
        lanes = es.vmap(m, axes=inner, axis_name="batch")
        return es.vmap(lanes, axes=outer, axis_name="rows")(xs)

    class Free(es.Module):
        left: Pair
        right: Pair

        def __call__(self, x):
            return self.right.a * (self.left.a * x + self.left.b) + self.right.b

    xs = jnp.ones((3, 2))
    free = Free(model.left, model.right)
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
    with pytest.raises(ValueError, match=r"es\.SPLIT` for `a`"):
        es.vmap(Pair(), axes={es.path_matches("a"): es.SPLIT})(XS)


def test_arrays_outside_of_modules_are_shared():
    table = {"a": XS}
    f = eqx.Partial(lambda t, m, x: m.a * x + t["a"].sum(), table, Pair(a=XS))
    assert jnp.allclose(es.vmap(f, axes=A)(XS), XS * XS + 3)


@pytest.mark.parametrize("axes", ["axes", "in_axes"])
@pytest.mark.parametrize(
    ("key", "match"),
    [
        (es.path_matches("aa"), r"the filter `es\.path_matches\('aa'\)` matches no"),
        (es.under(lambda m: m.left), "left"),
    ],
)
def test_a_filter_that_matches_nothing(axes, key, match):
    def call(m):
        if axes == "axes":
            return es.vmap(m, axes={key: 0})(XS)
        return es.vmap(lambda m, x: m(x), ({key: 0}, 0))(m, XS)

    with rejects(Pair(), (ValueError, AttributeError), match):
        es.mutable(call)(Pair())


def test_a_filter_for_an_argument_says_where_to_write_it():
    f = es.vmap(lambda m, x: m.a * x, (None, 0), axes=A)
    with rejects(Pair(), ValueError, r"`a`|path_matches\('a'\)", r"follow `in_axes`"):
        es.mutable(lambda m: f(m, XS))(Pair())


class Lazy(es.Module):
    a: es.Parameter = es.Initializer(jr.normal)
    b: es.Parameter = es.Initializer(jr.normal)

    def __call__(self, x):
        return self.a * x + self.b


class Made(es.Module):
    """Is made in the call, when the input is known."""

    layer: Lazy | None = None
    pair: Pair = Pair(a=XS)

    def __call__(self, x):
        if self.initializing and self.layer is None:
            self.layer = Lazy(x, x)
        return self.layer.a


class Holds(es.Module):
    made: Made

    def __call__(self, call):
        return call(self)


WAYS = {
    "axes": lambda axes: lambda m: es.vmap(m.made, axes=axes)(XS),
    "in_axes": lambda axes: lambda m: es.vmap(lambda m, x: m(x), (axes, 0))(m.made, XS),
    "in_axes, deeper": lambda axes: (
        lambda m: es.vmap(lambda m, x: m["made"](x), (axes, 0))({"made": m.made}, XS)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_init_makes_for_each_lane(way):
    start = "['made']." if way == "in_axes, deeper" else ""
    pair_a = es.path_matches(f"{start}pair.a")
    axes = {es.path_matches(f"{start}layer.a"): 0, pair_a: 0, ...: None}
    with rejects(Holds(Made()), ValueError, "`made.layer.a` is made by `init` in one"):
        Holds(Made()).init(0, WAYS[way](axes))


class Empty(es.Module):
    w: es.Parameter | None = None

    def __call__(self, x):
        if self.initializing and self.w is None:
            self.w = jnp.ones(2)
        return x


@pytest.mark.parametrize("way", ["in_axes", "in_axes, deeper"])
def test_what_init_makes_in_an_argument_without_arrays(way):
    w = es.path_matches("['made'].w" if way == "in_axes, deeper" else "w")
    for axes in (0, {w: 0, ...: None}):
        with rejects(Holds(Empty()), ValueError, r"`made\.w` is made by `init` in one"):
            Holds(Empty()).init(0, WAYS[way](axes))
    for axes in (None, {w: None, ...: 0}):
        assert Holds(Empty()).init(0, WAYS[way](axes)).made.w.shape == (2,)


class Grows(es.Module):
    w: es.Parameter | None = None
    v: es.Parameter = 1.0

    def grow(self, x):
        if self.initializing and self.w is None:
            self.w = jnp.ones(2)
        return x


class Stack(es.Module):
    blocks: es.nn.Stacked

    def __call__(self, x):
        return self.blocks.layers.grow(x)


def with_the_stack(m, axes):
    blocks = m.made.blocks
    return es.vmap(lambda x: blocks.layers.grow(x), axes=axes)(XS)


IN_A_STACK = {
    **{
        name: (lambda m, axes, w=w: w(axes)(m), "blocks[*].w")
        for name, w in WAYS.items()
    },
    "the stack": (with_the_stack, "[*].w"),
}


@pytest.mark.parametrize("name", IN_A_STACK)
def test_what_init_makes_in_a_stack_has_the_names_of_its_layers(name):
    way, w = IN_A_STACK[name]
    w = es.path_matches(("['made']." if name == "in_axes, deeper" else "") + w)
    model = Holds(Stack(es.nn.Stacked([Grows(), Grows()])))

    def init(axis):
        return model.init(0, lambda m: way(m, {w: axis, ...: None}))

    with rejects(model, ValueError, r"`made\.blocks\.layers\.w` is made by `init` in"):
        init(0)
    assert init(None).made.blocks.layers.w.shape == (2,)
