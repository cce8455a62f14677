"""Filters: which arrays they select, and how filters are compared and printed."""

import copy
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jaxtyping import Array

import eqx_state as es


class Cache(es.State):
    pass


class Norm(es.Module):
    scale: es.Parameter
    mean: es.BatchStat


class Model(es.Module):
    layers: list[Any]
    table: es.Buffer
    cache: Cache
    rng: es.Rng
    steps: Array
    index: es.Parameter
    name: str = "model"
    act: Callable[..., Any] = jnp.tanh


def make_norm() -> Norm:
    return Norm(jnp.ones(2), jnp.zeros(2))


def make_model() -> Model:
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    layers = [make_norm(), linear, eqx.nn.Identity(), es.freeze(make_norm())]
    one, index = jnp.ones(2), jnp.arange(3)
    return Model(layers, one, one, jr.key(0), jnp.array(0), index)


MODEL = make_model()


def selected(*filters: Any, tree: Any = MODEL) -> set[str]:
    return {part.name for part in es.parts(es.filter(tree, *filters))}


PARAMETERS = {
    "layers[0].scale",
    "layers[1].weight",
    "layers[1].bias",
    "layers[3].scale",
    "index",
}
MEANS = {"layers[0].mean", "layers[3].mean"}
EVERY = PARAMETERS | MEANS | {"table", "cache", "rng", "steps"}

CASES = [
    ((), EVERY - {"steps"}),
    ((es.Parameter,), PARAMETERS),
    ((es.State,), MEANS | {"cache", "rng"}),
    ((Cache,), {"cache"}),
    ((es.OptState,), set()),
    ((es.any_of(es.Buffer, es.Rng),), {"table", "rng"}),
    ((es.any_of(),), set()),
    ((es.all_of(),), EVERY),
    ((es.not_(es.TreePart),), {"steps"}),
    ((es.trainable,), PARAMETERS - {"index", "layers[3].scale"}),
    ((lambda part: part.kind is None,), {"steps"}),
    ((lambda part: part.frozen,), {"layers[3].scale", "layers[3].mean"}),
    ((lambda part: len(part.path) == 1, es.State), {"cache", "rng"}),
    ((lambda part: [],), set()),
    ((ft.partial(lambda n, part: part.name == n, "rng"),), {"rng"}),
    ((es.path_matches("table"),), {"table"}),
    ((es.path_matches("layers[*].mean"),), MEANS),
    ((es.path_matches("*mean"),), MEANS),
    ((es.path_matches("layers[01].mean"),), set()),
    ((es.path_matches("Table"),), set()),
    ((es.path_matches("layers[0]xmean"),), set()),
    ((es.under(lambda m: m),), EVERY),
    ((es.under(lambda m: m.layers[0]),), {"layers[0].scale", "layers[0].mean"}),
    ((es.under(lambda m: (m.rng, m.cache)),), {"rng", "cache"}),
    (
        (es.under(lambda m: (m.layers[0], m.layers[0].mean)), es.State),
        {"layers[0].mean"},
    ),
    ((es.inside(Norm),), MEANS | {"layers[0].scale", "layers[3].scale"}),
    ((es.inside((Norm, eqx.nn.Linear)), es.Parameter), PARAMETERS - {"index"}),
    ((es.inside(Model),), EVERY),
]


@pytest.mark.parametrize(
    ("filters", "names"), CASES, ids=[str(i) for i in range(len(CASES))]
)
def test_which_arrays_filters_select(filters, names):
    assert selected(*filters) == names


class Wrapped(eqx.Module):
    inner: Any


class Child(Wrapped):
    pass


def test_inside_selects_at_any_depth_and_in_subclasses():
    norm = make_norm()
    tree = {"a": Wrapped([Child({"x": norm})]), "b": norm, "c": Child(jnp.ones(1))}
    inner = {"['a'].inner[0].inner['x'].scale", "['a'].inner[0].inner['x'].mean"}
    assert selected(es.inside(Wrapped), tree=tree) == inner | {"['c'].inner"}
    assert selected(es.inside(Child), tree=tree) == inner | {"['c'].inner"}
    assert selected(es.inside(Child), es.inside(Norm), tree=tree) == inner
    part = es.parts(tree)[0]
    assert es.inside(Child)(part)
    assert not es.inside(Model)(part)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (es.Parameter, r"`es\.inside\(es\.Parameter\)`.*A kind is already a filter"),
        ((Norm, es.State), r"`es\.inside\(es\.State\)`.*A kind is already a filter"),
        (make_norm(), r"pass a class of modules"),
        ([Norm], r"or a tuple of them"),
    ],
    ids=["kind", "kind in a tuple", "module", "list"],
)
def test_inside_takes_classes(wrong, shown):
    with pytest.raises(TypeError, match=shown):
        es.inside(wrong)


# --- Filters are values ---------------------------------------------------------------


def by_name(part):
    return part.name == "rng"


def head(model):
    return model.layers[1]


BUILT_IN = {
    "es.trainable": lambda: es.trainable,
    "es.any_of(es.Rng, es.BatchStat)": lambda: es.any_of(es.Rng, es.BatchStat),
    "es.any_of()": lambda: es.any_of(),
    "es.not_(by_name)": lambda: es.not_(by_name),
    "es.inside(Norm)": lambda: es.inside(Norm),
    "es.inside((Norm, Linear))": lambda: es.inside((Norm, eqx.nn.Linear)),
    "es.path_matches('layers[0].*')": lambda: es.path_matches("layers[0].*"),
    "es.all_of(es.trainable, es.not_(es.under(head)))": lambda: es.all_of(
        es.trainable, es.not_(es.under(head))
    ),
}


@pytest.mark.parametrize(("text", "make"), BUILT_IN.items(), ids=list(BUILT_IN))
def test_built_in_filters_are_hashable_and_print_readably(text, make):
    assert repr(make()) == text
    assert make() == make()
    assert hash(make()) == hash(make())
    assert copy.deepcopy(make()) == make()
    assert {make(): 1}[make()] == 1


def test_different_filters_are_unequal():
    assert len({make() for make in BUILT_IN.values()}) == len(BUILT_IN)
    assert es.any_of(es.Rng) != es.all_of(es.Rng)
    assert es.path_matches("a") != es.path_matches("b")


@pytest.mark.parametrize("c", ["\\", "^", "$", "("])
def test_a_regular_expression_is_not_a_glob(c):
    glob = f"{c}a"
    with pytest.raises(ValueError, match="not a regular expression") as info:
        es.path_matches(glob)
    assert f'`es.path_matches("{glob}")`' in str(info.value)
    assert f"contains a `{c}`" in str(info.value)
    assert 'write `es.path_matches("*.bias")`' in str(info.value)
    tree = {f"a{c}b": jnp.ones(2), "ab": jnp.ones(2)}
    [name] = [part.name for part in es.parts(tree) if c in part.name]
    [part] = es.parts(es.filter(tree, es.path_matches(name.replace(c, "?"))))
    assert part.name == name


def test_a_function_may_call_a_combinator():
    def mine(part):
        return es.trainable(part) and not es.path_matches("*.bias")(part)

    assert selected(mine) == {"layers[0].scale", "layers[1].weight"}


# --- Errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    ["es.Parameter", None, (es.Parameter,), jnp.ones(2), eqx.nn.Linear, es.State[int]],
    ids=str,
)
def test_a_value_that_is_not_a_filter_is_an_error(wrong):
    match = r"is not a filter.*`es.Parameter`.*es.path_matches.*es.inside"
    with pytest.raises(TypeError, match=match):
        es.filter(MODEL, wrong)
    for combine in (es.any_of, es.all_of, es.not_):
        with pytest.raises(TypeError, match=match):
            es.filter(MODEL, combine(wrong))


NOTHING = {
    "None": lambda m: None,
    "no nodes": lambda m: (),
    "a number": lambda m: 3,
    "another model": lambda m: make_norm(),
    "one of two without leaves": lambda m: (m.layers[0], m.layers[2]),
    "one of two None": lambda m: (m.layers[0], None),
    "no array": lambda m: m.act,
}


@pytest.mark.parametrize("where", NOTHING.values(), ids=list(NOTHING))
def test_under_must_select_something(where):
    with pytest.raises(ValueError, match=r"`es.under\(.*selects nothing"):
        es.filter(MODEL, es.under(where))


# --- Leaves that are hard to tell apart -----------------------------------------------


def test_under_distinguishes_equal_leaves():
    one = jnp.ones(2)
    tree = [one, one, (), {"a": one}]
    assert selected(es.under(lambda t: t[1]), tree=tree) == {"[1]"}


def test_under_takes_a_container_of_the_tree_as_one_node():
    linear = eqx.nn.Linear(1, 1, use_bias=False, key=jr.key(0))
    layers = [linear, eqx.nn.Identity(), eqx.nn.Lambda(jnp.tanh)]
    tree = eqx.nn.Sequential(layers)
    assert isinstance(tree.layers, tuple)
    assert selected(es.under(lambda m: m.layers), tree=tree) == {"layers[0].weight"}
    assert selected(es.under(lambda t: t[0]), tree=[layers]) == {"[0][0].weight"}


def test_under_ignores_none_below_the_node():
    params = es.filter(MODEL, es.Parameter)
    assert selected(es.under(lambda m: m.layers[0]), tree=params) == {"layers[0].scale"}


def test_operators_are_not_combinators():
    cure = (
        r"`es\.any_of\(a, b\)` instead of `a \| b`.*`es\.not_\(a\)` instead of `not a`"
    )
    for wrong in (es.Parameter | es.State, not es.Parameter, [es.Parameter, es.State]):
        with pytest.raises(TypeError, match=rf"is not a filter.*{cure}") as info:
            es.filter(MODEL, wrong)
        assert "wrt" not in str(info.value)
    for call in (
        lambda: es.trainable | es.State,
        lambda: es.State | es.trainable,
        lambda: es.trainable & es.State,
        lambda: es.State & es.trainable,
        lambda: ~es.trainable,
    ):
        with pytest.raises(TypeError, match=cure):
            call()


@pytest.mark.parametrize("select", [es.filter, es.partition, es.mask])
def test_the_tree_comes_before_the_filters(select):
    match = r"^`Model` is not a filter.*tree comes first: `es\.filter\(model,"
    with pytest.raises(TypeError, match=match):
        select(es.Parameter, MODEL)


def test_a_filter_takes_parts_and_not_arrays():
    biases = es.path_matches("*.bias")
    for wrong, shown in ((jnp.ones(2), "an `ArrayImpl`"), (MODEL, "a `Model`")):
        match = rf"{shown}.*eqx\.partition\(model, es\.mask\(model, es\.trainable\)\)"
        with pytest.raises(TypeError, match=match):
            es.trainable(wrong)
    with pytest.raises(TypeError, match=r"`es\.path_matches\('\*\.bias'\)` takes"):
        eqx.filter(MODEL, biases)
    assert [biases(part) for part in es.parts(eqx.nn.Linear(1, 1, key=jr.key(0)))] == [
        *(False, False)  # `weight`, and `bias` without a dot
    ]


def test_a_model_or_a_mask_is_not_a_filter_although_it_can_be_called():
    match = r"^`Linear` is not a filter.*wrt=es\.all_of\(es.trainable, es.under\("
    layer = eqx.nn.Linear(2, 1, key=jr.key(0))
    for wrong in (layer, jax.tree.map(lambda _: True, layer)):
        with pytest.raises(TypeError, match=match):
            es.grad(lambda m: m(jnp.ones(2)).sum(), wrt=wrong)(layer)


@pytest.mark.parametrize("predicate", [eqx.is_array, eqx.is_inexact_array_like])
def test_predicates_of_arrays_would_select_nothing(predicate):
    model = {"w": jnp.ones(2)}
    name = predicate.__name__
    match = rf"(?s)`eqx.{name}` is not a filter.*lambda part: .*\(part.value\)"
    with pytest.raises(TypeError, match=match):
        es.mask(model, es.not_(predicate))
    right = es.filter(model, lambda part: predicate(part.value))
    assert right["w"] is model["w"]


def test_a_filter_that_expects_an_array_is_told_of_its_value():
    with pytest.raises(AttributeError, match=r"`lambda part: part\.value\.ndim`"):
        es.filter({"w": jnp.ones(2)}, lambda p: p.ndim > 1)


def test_a_filter_that_expects_the_model_is_told_of_under():
    model = {"head": eqx.nn.Linear(2, 2, key=jr.key(0))}
    with pytest.raises(AttributeError, match=r"es\.under\(lambda model: model\.head\)"):
        es.filter(model, lambda model: model.head)
