"""Rules inside an optimizer or an average apply to the parameter of each array."""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest

import eqx_state as es


class Net(es.Module):
    body: eqx.nn.MLP
    head: eqx.nn.Linear
    count: es.Parameter = 1.0
    calls: es.State = 0


def net(seed=0):
    a, b = jr.split(jr.key(seed))
    return Net(eqx.nn.MLP(2, 2, 3, 1, key=a), eqx.nn.Linear(2, 1, key=b))


HEAD = es.under(lambda m: m.head)
MATRIX = es.all_of(es.Parameter, lambda part: part.value.ndim == 2)
TXS = {
    "adam": optax.adam(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 2),
    "groups": {es.path_matches("*.bias"): optax.adam(0.1), ...: optax.adam(0.2)},
    "a group left out": {HEAD: optax.adam(0.1), ...: None},
}


def values(tree, rules):
    """The value of each array, by name."""
    found = jax.tree.leaves(es.spec(tree, rules, "none"))
    arrays = [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    assert len(found) == len(jax.tree.leaves(tree))
    pairs = zip(jax.tree.leaves(tree), found, strict=True)
    chosen = [value for leaf, value in pairs if eqx.is_array(leaf)]
    assert len(arrays) == len(chosen)
    return dict(zip([p.name for p in es.parts(tree)], chosen, strict=True))


def expected(name, by_parameter):
    """The value for the parameter whose name is the end of the moment's name."""
    names = [x for x in by_parameter if name.endswith(f".{x}")]
    return by_parameter[max(names, key=len)] if names else None


@pytest.mark.parametrize("tx", TXS.values(), ids=TXS)
def test_the_moments_of_an_optimizer_alone_have_the_names_of_the_model(tx):
    model = net()
    rules = {
        es.path_matches("head.bias"): "by name",
        HEAD: "head",
        es.all_of(es.inside(eqx.nn.MLP), MATRIX): "matrix of the body",
        es.Parameter: "parameter",
        ...: "rest",
    }
    by_parameter = values(model, rules)
    got = values(es.Optimizer(tx).init(model), rules)
    moments = 0
    for name, value in got.items():
        is_count = name.endswith((".count", "_step"))
        if (of_parameter := expected(name, by_parameter)) and not is_count:
            assert value == of_parameter, name
            moments += 1
    assert moments >= 2


def test_next_to_its_model_the_moments_have_the_names_in_the_tree():
    class Train(es.Module):
        optimizer: es.Optimizer
        model: Net

    model, optimizer = net(), es.Optimizer(optax.adam(0.1)).init(net())
    trees = {"[0]": (model, optimizer), "model": Train(optimizer, model)}
    for start, tree in trees.items():
        rules = {es.path_matches(f"{start}.head.*"): "head", es.Parameter: "parameter"}
        got = values(tree, rules)
        moments = {name: x for name, x in got.items() if ".mu" in name or ".nu" in name}
        assert len(moments) == 2 * 7
        for name, value in moments.items():
            assert value == ("head" if ".head." in name else "parameter")
        counts = [x for name, x in got.items() if name.endswith("state[0].count")]
        assert counts == ["none"]


def test_of_two_models_the_nearest_one_gives_the_names():
    txs = es.Optimizer(optax.adam(0.1))
    tree = {"a": (net(0), txs.init(net(0))), "b": (net(1), txs.init(net(1)))}
    got = values(tree, {es.under(lambda t: t["a"][0].head): "a's head", ...: "rest"})
    assert got["['a'][1].opt_state[0].mu.head.weight"] == "a's head"
    assert got["['b'][1].opt_state[0].mu.head.weight"] == "rest"


def test_if_the_model_is_ambiguous_names_start_at_the_model():
    tree = [net(0), net(1), es.Optimizer(optax.adam(0.1)).init(net(0))]
    rules = {es.path_matches("[0].head.*"): 0, es.path_matches("head.*"): 1, ...: 2}
    got = values(tree, rules)
    assert got["[0].head.weight"] == 0
    assert got["[1].head.weight"] == 2
    assert got["[2].opt_state[0].mu.head.weight"] == 1


def test_a_kind_selects_the_parameter_but_opt_state_selects_the_moments():
    tree = (net(), es.Optimizer(optax.adam(0.1)).init(net()))
    moment = "[1].opt_state[0].mu.count"
    for rules, value in [
        ({es.Parameter: "p", ...: "rest"}, "p"),
        ({es.Parameter: "p", es.State: "s"}, "p"),
        ({es.Parameter: "p", es.OptState: "o"}, "o"),
        ({es.State: "s", ...: "rest"}, "s"),
        ({...: "rest"}, "rest"),
        ({es.Buffer: "b"}, "none"),
    ]:
        assert values(tree, rules)[moment] == value


def test_the_model_may_be_a_plain_pytree():
    for model in ({"w": jnp.ones(2), "b": (jnp.ones(2),)}, jnp.ones(2)):
        tx = optax.chain(optax.trace(0.9), optax.adam(0.1))
        got = values(es.Optimizer(tx).init(model), {es.Parameter: "p", ...: "rest"})
        assert [x for name, x in got.items() if name.endswith(".count")] == ["rest"]
        assert len([x for x in got.values() if x == "p"]) == len(got) - 1


def test_the_learning_rate_of_a_model_that_is_one_array():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    got = values(es.Optimizer(tx).init(jnp.ones(2)), {es.Parameter: "p", ...: "rest"})
    assert got["opt_state.hyperparams['learning_rate']"] == "rest"


def test_an_average_has_the_names_of_the_model():
    tree = net(), es.Ema(0.9).init(net())
    got = values(tree, {es.under(lambda t: t[0].head): "head", es.Parameter: "p"})
    assert got["[1].means.head.weight"] == "head"
    assert got["[1].means.body.layers[0].weight"] == "p"
    assert got["[1].rest.calls"] == got["[1].step"] == "none"
    alone = values(tree[1], {HEAD: "head", es.Parameter: "p", ...: "rest"})
    assert alone["means.head.weight"] == "head"
    assert alone["means.count"] == "p"
    assert alone["rest.calls"] == alone["weight"] == "rest"
    # Before `init`, neither has recorded a model.
    assert values(es.Ema(0.9), {...: 0}) == {}
    assert values((net(), es.Optimizer(optax.adam(0.1))), {...: 0})["[0].count"] == 0


def test_a_part_of_a_model_or_a_different_class_is_not_the_model():
    class Other(es.Module):
        body: eqx.nn.MLP
        head: eqx.nn.Linear

    model = net()
    for near in (es.filter(model, HEAD), Other(model.body, model.head)):
        tree = {"a": (near, es.Optimizer(optax.adam(0.1)).init(model)), "b": model}
        got = values(tree, {es.under(lambda t: t["b"].head): "head", ...: "rest"})
        assert got["['a'][1].opt_state[0].mu.head.weight"] == "head"
        assert got["['a'][1].opt_state[0].mu.body.layers[0].weight"] == "rest"


# --- Fields with the names that optax and `es.Ema` use for moments and averages -------


class Head(es.Module):
    w: es.Parameter


class Same(es.Module):
    w: es.Parameter = 0.0
    mu: Any = None
    nu: Any = None
    trace: Any = None
    means: Any = None
    count: Any = None


class Pair(NamedTuple):
    mu: Any
    w: Any


NAMESAKES = {
    "modules": Same(1.0, *[Head(1.0)] * 5),
    "recursive": Same(1.0, Same(1.0, Same(1.0), Same(1.0)), Same(1.0), count=1.0),
    "dict": {"mu": Same(1.0, Head(1.0)), "w": 1.0, "count": {"mu": 1.0, "w": 1.0}},
    "tuple": (1.0, (1.0, Head(1.0)), Same(1.0, mu=(1.0, 1.0))),
    "named tuple": Pair(Pair(Head(1.0), 1.0), [Same(1.0, nu=Pair(1.0, 1.0))]),
    "array": 1.0,
}


def by_shape(model):
    """The model with arrays whose sizes are all different; and rules for each array.

    The value of an array of shape `(n, 50 + n)` is `n`.
    """
    leaves, treedef = jax.tree.flatten(model)
    numbers = range(10, 10 + len(leaves))
    rules = {lambda part, n=n: n in part.value.shape: n for n in numbers}
    return treedef.unflatten(jnp.ones((n, 50 + n)) for n in numbers), rules


def masked(model):
    """A transformation of every second parameter."""
    is_even = es.mask(model, lambda part: part.value.shape[-1] % 2 == 0)
    return optax.masked(optax.adam(0.1), lambda _: is_even)


OTHER_TXS = {
    **{k: TXS[k] for k in ("adam", "adafactor", "multi_steps")},
    "lbfgs": optax.lbfgs(memory_size=3),
    "raw tuple": optax.GradientTransformation(
        lambda params: (jnp.zeros((), int), jax.tree.map(jnp.ones_like, params)), None
    ),
    "masked": None,
}


def check_by_shape(tree, rules, chosen):
    """Every array has the value of the parameter that shares an axis with it."""
    found = 0
    for part, value in zip(es.parts(tree), chosen, strict=True):
        of = [n for n in rules.values() if {n, 50 + n} & {*part.value.shape}]
        if part.value.shape != (1,):  # in adafactor, for what is not used
            assert [value] == (of or ["none"]), part.name
            found += len(of)
    return found


FOLLOWED = {*itertools.product(NAMESAKES, [*OTHER_TXS, "ema"])}
FOLLOWED -= {("array", "adafactor")}  # its moments have other shapes


@pytest.mark.parametrize(("kind", "name"), sorted(FOLLOWED))
def test_fields_may_have_the_names_of_moments(kind, name):
    model, rules = by_shape(NAMESAKES[kind])
    if name == "ema":
        follower = es.Ema(0.9).init(model)
    else:
        follower = es.Optimizer(OTHER_TXS[name] or masked(model)).init(model)
    for tree in (follower, (model, follower), [follower, model]):
        chosen = values(tree, {**rules, es.Buffer: "none"}).values()
        assert check_by_shape(tree, rules, chosen) >= 1
