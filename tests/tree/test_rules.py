"""Rules: which value applies to which array, by filters, kinds and `...`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from hypothesis import given, settings, strategies as st

import eqx_state as es


class Cache(es.State):
    pass


class Layer(es.Module):
    weight: es.Parameter
    bias: es.Parameter
    mean: es.BatchStat
    cache: Cache
    steps: jax.Array
    name: str = "layer"


class Model(es.Module):
    layers: list[Layer]
    head: eqx.nn.Linear


def layer() -> Layer:
    return Layer(jnp.ones((2, 2)), jnp.ones(2), jnp.ones(2), jnp.ones(2), jnp.array(0))


def make_model() -> Model:
    return Model([layer(), layer()], eqx.nn.Linear(2, 2, key=jr.key(0)))


def spec(tree, rules, default=None):
    """The values for the arrays, by name."""
    values = jax.tree.leaves(es.spec(tree, rules, default), is_leaf=lambda x: x is None)
    leaves = jax.tree.leaves(tree)
    found = [x for x, leaf in zip(values, leaves, strict=True) if eqx.is_array(leaf)]
    return dict(zip([part.name for part in es.parts(tree)], found, strict=True))


# --- Which rule applies ---------------------------------------------------------------


def test_the_first_filter_that_matches_comes_before_all_kinds():
    rules = {
        es.Parameter: "parameter",
        ...: "other",
        es.path_matches("*.bias"): "bias",
        es.under(lambda m: m.head): "head",
        es.State: "state",
        Cache: "cache",
        es.any_of(es.BatchStat): "a combinator is a filter",
    }
    got = spec(make_model(), rules)
    assert got["layers[0].weight"] == "parameter"
    assert got["layers[1].bias"] == got["head.bias"] == "bias"
    assert got["head.weight"] == "head"
    assert got["layers[0].mean"] == "a combinator is a filter"
    assert got["layers[0].cache"] == "cache"
    assert got["layers[0].steps"] == "other"


FILTERS = [
    es.path_matches("*.bias"),
    es.under(lambda m: m.head),
    es.inside(Layer),
    es.trainable,
    es.not_(es.Parameter),
]
KINDS = [es.TreePart, es.Parameter, es.State, es.BatchStat, Cache]


@settings(max_examples=20, deadline=None)
@given(st.permutations([*FILTERS, *KINDS, ...]), st.integers(0, 11))
def test_the_order_of_rules(keys, n):
    """Filters in their order, then kinds along the class hierarchy, then `...`."""
    model, keys = make_model(), keys[:n]
    got = es.spec(model, dict(zip(keys, range(n), strict=True)), "default")
    for part, value in zip(es.parts(model), _arrays(model, got), strict=True):
        matching = [
            i
            for i, key in enumerate(keys)
            if key in FILTERS
            and any(p.name == part.name for p in es.parts(es.filter(model, key)))
        ]
        kinds = [k for k in (part.kind.__mro__ if part.kind else ()) if k in keys]
        expected = [*matching, *map(keys.index, kinds)]
        expected += [keys.index(...)] if ... in keys else []
        assert value == [*expected, "default"][0]


def _arrays(model, values):
    pairs = zip(jax.tree.leaves(model), jax.tree.leaves(values), strict=True)
    return [value for leaf, value in pairs if eqx.is_array(leaf)]


# --- Errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["es.State", 0, es.State[int]])
def test_a_key_that_is_not_a_filter(key):
    with pytest.raises(TypeError, match=r"is not a filter.*es\.path_matches"):
        es.spec(make_model(), {es.Parameter: 0, key: 1})


def test_rules_are_a_mapping():
    with pytest.raises(TypeError, match=r"es\.spec`: rules are a mapping.*this is a"):
        es.spec(make_model(), [es.Parameter])  # pyright: ignore[reportArgumentType]


NO_MATCH = {
    "a glob": (es.path_matches("*.biass"), r"es\.path_matches\('\*\.biass'\)"),
    "a kind in a combinator": (es.all_of(es.Buffer), r"es\.all_of\(es\.Buffer\)"),
    "a class": (es.inside(eqx.nn.MLP), r"es\.inside\(MLP\)"),
    "a function": (lambda part: False, "<lambda>"),
}


@pytest.mark.parametrize("case", NO_MATCH)
def test_a_filter_that_matches_no_array_is_an_error(case):
    key, name = NO_MATCH[case]
    with pytest.raises(ValueError, match=rf"es\.spec`: the filter `.*{name}.*no array"):
        es.spec(make_model(), {es.trainable: 0, key: 1})


def test_the_error_suggests_names_as_filters_see_them():
    stack = es.nn.Stacked([layer(), layer()])
    glob = es.all_of(es.Parameter, es.path_matches("[1].maen"))
    with pytest.raises(ValueError, match=r"matches no array\. `es\.parts"):
        es.spec(jnp.ones(2), {es.path_matches("*w"): 0, ...: 1})
    with pytest.raises(ValueError, match=r"nearest names: `\[1\].mean`"):
        es.spec(stack, {glob: 0})


TYPO = es.path_matches("wieght")
USES = {
    "es.spec": lambda model, key: es.spec(model, {key: 0, ...: 1}),
    "es.grad": lambda model, wrt: es.grad(lambda m: m.weight[0], wrt=wrt)(model),
    "es.Optimizer": lambda model, wrt: es.Optimizer(optax.sgd(1), wrt).init(model),
    "es.Ema": lambda model, on: es.Ema(0.9, on=on).init(model),
}


@pytest.mark.parametrize("name", USES)
def test_a_misspelled_name_inside_a_filter_is_an_error(name):
    model, use = es.nn.BatchNorm(3), USES[name]
    for wrong in (es.not_(TYPO), es.not_(es.any_of(TYPO, es.not_(TYPO)))):
        with pytest.raises(ValueError, match=rf"`{name}.*wieght.*names: `weight`"):
            use(model, es.all_of(es.trainable, es.Parameter, wrong))
    # Some of several names may be those of other models.
    use(model, es.all_of(es.trainable, es.any_of(TYPO, es.path_matches("weight"))))
    use(model, es.all_of(es.trainable, es.not_(es.path_matches("bias"))))


def test_a_filter_that_raises_matches_no_array():
    with pytest.raises(ValueError, match="matches no array") as info:
        es.spec(make_model(), {es.under(lambda m: m.layers[0].name): 0})
    assert "selects nothing" in str(info.value.__cause__)
    with pytest.raises(ValueError, match="matches no array") as info:
        es.spec(make_model(), {es.under(lambda m: m.tail): 0})
    assert isinstance(info.value.__cause__, AttributeError)


def test_kinds_and_dots_may_match_nothing():
    assert jax.tree.leaves(es.spec({"a": 1}, {es.Buffer: 0, Cache: 0, ...: 0})) == []
    assert jax.tree.leaves(es.spec(None, {...: 0})) == []
    with pytest.raises(ValueError, match="no array"):
        es.spec(None, {es.trainable: 0})


def test_a_filter_is_not_called_for_an_array_that_an_earlier_filter_matches():
    rules = {
        lambda part: part.value.ndim < 2: "small",
        lambda part: part.value.shape[1] == 2: "two columns",
    }
    got = spec(make_model(), rules)
    assert (got["head.bias"], got["head.weight"]) == ("small", "two columns")
    with pytest.raises(ValueError, match="no array"):
        es.spec({"a": jnp.ones(2)}, rules)


def test_frozen_and_shadowed_arrays_count_as_matches():
    model = make_model().freeze()
    head, weight = es.under(lambda m: m.head), es.path_matches("head.weight")
    frozen = lambda part: part.frozen  # noqa: E731
    got = spec(model, {head: 0, weight: 1, frozen: 2})
    assert (got["head.weight"], got["layers[0].weight"]) == (0, 2)
    with pytest.raises(ValueError, match=r"es\.trainable"):
        es.spec(model, {es.trainable: 0})
