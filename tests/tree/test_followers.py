"""Rules inside an optimizer or an average apply to the parameter of each array."""

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
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 2),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
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
@pytest.mark.parametrize(
    "rules",
    [
        {HEAD: "head", es.Parameter: "parameter", ...: "rest"},
        {es.not_(HEAD): "not", ...: "rest"},
        {MATRIX: "matrix", es.trainable: "trainable", ...: "rest"},
        {es.inside(eqx.nn.MLP): "body", es.Parameter: "parameter", ...: "rest"},
        {es.path_matches("head.*"): "head", ...: "rest"},
    ],
    ids=range(5),
)
def test_the_moments_of_an_optimizer_alone_have_the_names_of_the_model(tx, rules):
    model = net()
    by_parameter = values(model, rules)
    got = values(es.Optimizer(tx).init(model), rules)
    moments = 0
    for name, value in got.items():
        is_count = name.endswith((".count", "_step"))
        if (of_parameter := expected(name, by_parameter)) and not is_count:
            assert value == of_parameter, name
            moments += 1
    assert moments >= 2


@pytest.mark.parametrize("order", ["model first", "model last", "module"])
def test_next_to_its_model_the_moments_have_the_names_in_the_tree(order):
    class Train(es.Module):
        optimizer: es.Optimizer
        model: Net

    model, optimizer = net(), es.Optimizer(optax.adam(0.1)).init(net())
    tree, start = {
        "model first": ((model, optimizer), "[0]"),
        "model last": ([optimizer, model], "[1]"),
        "module": (Train(optimizer, model), "model"),
    }[order]
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


@pytest.mark.parametrize(
    "model",
    [
        {"w": jnp.ones(2), "b": jnp.ones(2)},
        [jnp.ones(2), jnp.ones(2)],
        (jnp.ones(2), {"b": jnp.ones(2)}),
        jnp.ones(2),
    ],
    ids=["dict", "list", "tuple", "array"],
)
def test_plain_pytrees(model):
    optimizer = es.Optimizer(optax.chain(optax.trace(0.9), optax.adam(0.1))).init(model)
    got = values(optimizer, {es.Parameter: "p", ...: "rest"})
    assert set(got.values()) <= {"p", "rest"}
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
    assert values(es.Ema(0.9), {...: 0}) == {}


def test_before_init_an_optimizer_has_no_moments():
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


def test_a_stack_of_models_with_a_stack_of_optimizers():
    def make(key):
        model = {"a": jr.normal(key, (2,)), "b": jnp.ones(())}
        return model, es.Optimizer(optax.adam(0.1)).init(model)

    stack = eqx.filter_vmap(make)(jr.split(jr.key(0), 3))
    got = values(stack, {es.path_matches("[[]0]['a']".replace("[[]", "[")): 0, ...: 1})
    assert [got[f"[1].opt_state[0].mu['{x}']"] for x in "ab"] == [0, 1]


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


NAMES = ("mu", "nu", "trace", "means", "count")
NAMESAKES = {
    **{name: Same(1.0, **{name: Head(1.0)}) for name in NAMES},
    "arrays": Same(1.0, *[1.0] * 5),
    "recursive": Same(1.0, Same(1.0, Same(1.0), Same(1.0)), Same(1.0), count=1.0),
    "recursive, without w": Same(0.0, mu=Same(1.0, mu=Same(1.0))),
    "list": [Same(1.0, Head(1.0)), Same(1.0, trace=Same(1.0, trace=Head(1.0)))],
    "dict": {"mu": Same(1.0, Head(1.0)), "w": 1.0, "count": {"mu": 1.0, "w": 1.0}},
    "tuple": (1.0, (1.0, Head(1.0)), Same(1.0, mu=(1.0, 1.0))),
    "named tuple": Pair(Pair(Head(1.0), 1.0), Same(1.0, nu=Pair(1.0, 1.0))),
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


def by_parity(tx, then):
    """Every second parameter goes to one of the transformations."""

    def is_even(part):
        return part.value.shape[-1] % 2 == 0

    def labels(model):
        return lambda _: es.spec(model, {is_even: "a", ...: "b"})

    return lambda model: then(tx, labels(model), is_even, model)


OTHER_TXS = {
    **{k: TXS[k] for k in ("adam", "adafactor", "multi_steps", "injected")},
    "momentum": optax.sgd(0.1, momentum=0.9),
    "twice": optax.chain(optax.trace(0.9), optax.adam(0.1)),
    "lbfgs": optax.lbfgs(memory_size=3),
    "raw tuple": optax.GradientTransformation(
        lambda params: (jnp.zeros((), int), jax.tree.map(jnp.ones_like, params)), None
    ),
    "groups": by_parity(
        optax.adam(0.1), lambda tx, labels, is_even, _: {is_even: tx, ...: TXS["adam"]}
    ),
    "partition": by_parity(
        optax.adam(0.1),
        lambda tx, labels, *_: optax.partition(
            {"a": tx, "b": optax.sgd(1, 0.9)}, labels
        ),
    ),
    "masked": by_parity(
        optax.adam(0.1),
        lambda tx, _, is_even, model: optax.masked(
            tx, lambda _: es.mask(model, lambda part: not is_even(part))
        ),
    ),
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


@pytest.mark.parametrize("kind", NAMESAKES)
@pytest.mark.parametrize("name", [*OTHER_TXS, "ema"])
def test_fields_may_have_the_names_of_moments(kind, name):
    model, rules = by_shape(NAMESAKES[kind])
    if name == "ema":
        follower = es.Ema(0.9).init(model)
    else:
        tx = OTHER_TXS[name]
        is_by_parity = callable(tx) and not hasattr(tx, "init")
        if kind == "array" and (is_by_parity or name == "adafactor"):
            pytest.skip("no two groups, or only moments of other shapes")
        follower = es.Optimizer(tx(model) if is_by_parity else tx).init(model)
    for tree in (follower, (model, follower), [follower, model]):
        chosen = values(tree, {**rules, es.Buffer: "none"}).values()
        assert check_by_shape(tree, rules, chosen) >= 1
