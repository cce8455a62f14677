"""Freezing: modules, plain layers and single arrays, by their paths."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import pytest
from hypothesis import given, settings, strategies as st

import eqx_state as es


def tanh(x):  # `jax.numpy.tanh` cannot be pickled
    return jnp.tanh(x)


class Block(es.Module):
    scale: es.Parameter
    count: es.State
    linear: eqx.nn.Linear

    def __call__(self, x):
        self.count = self.count + 1
        return self.scale * self.linear(x)


class Net(es.Module):
    mlp: eqx.nn.MLP
    blocks: list[Block]
    plain: dict[str, Any]
    bias: es.Parameter

    def __call__(self, x):
        x = self.mlp(x) + self.plain["a"] + self.plain["b"][1]
        for block in self.blocks:
            x = block(x)
        return x + self.bias


def linear(seed: int = 0):
    return eqx.nn.Linear(2, 2, key=jr.key(seed))


def make_net() -> Net:
    mlp = eqx.nn.MLP(2, 2, 3, 1, activation=tanh, final_activation=tanh, key=jr.key(0))
    blocks = [Block(2.0, 0, linear(1)), Block(3.0, 0, linear(2))]
    plain = {"a": jnp.ones(2), "b": (jnp.zeros(2), jnp.ones(2))}
    return Net(mlp, blocks, plain, jnp.zeros(2))


NET = make_net()
NAMES = {part.name for part in es.parts(NET)}
X = jnp.array([1.0, -1.0])


class Wrapper(es.Module):
    inner: Any
    gate: es.Parameter = 1.0


def frozen(tree: Any) -> set[str]:
    return {part.name for part in es.parts(tree) if part.frozen}


def trained(tree: Any) -> set[str]:
    return {part.name for part in es.parts(tree) if es.trainable(part)}


def under(*prefixes: str) -> set[str]:
    return {name for name in NAMES if name.startswith(prefixes)}


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


WHERE = {
    "a layer in a plain layer": (lambda m: m.mlp.layers[0], under("mlp.layers[0]")),
    "an array": (lambda m: m.bias, {"bias"}),
    "an array of a plain layer": (
        lambda m: m.mlp.layers[1].bias,
        {"mlp.layers[1].bias"},
    ),
    "an array of a dict": (lambda m: m.plain["a"], {"plain['a']"}),
    "a tuple of the tree": (lambda m: m.plain["b"], under("plain['b']")),
    "a plain layer of a module inside": (
        lambda m: m.blocks[1].linear,
        under("blocks[1].linear"),
    ),
    "a list of modules": (lambda m: m.blocks, under("blocks")),
    "state": (lambda m: m.blocks[0].count, {"blocks[0].count"}),
    "several": (
        lambda m: (m.blocks[0], m.mlp.layers[0].weight, m.bias),
        under("blocks[0]", "mlp.layers[0].weight", "bias"),
    ),
    "one in another": (lambda m: (m.mlp.layers[0], m.mlp), under("mlp")),
    "everything": (lambda m: m, NAMES),
}


@pytest.mark.parametrize(("where", "names"), WHERE.values(), ids=list(WHERE))
def test_freeze_and_unfreeze_where(where, names):
    new = es.freeze(NET, where)
    assert frozen(new) == names
    assert trained(new) == trained(NET) - names
    assert frozen(NET) == set()
    # `unfreeze` restores the structure, and freezing twice changes nothing more.
    assert structure(es.unfreeze(new, where)) == structure(NET)
    assert structure(es.unfreeze(new)) == structure(NET)
    assert structure(es.freeze(new, where)) == structure(new)
    pairs = zip(jax.tree.leaves(NET), jax.tree.leaves(new), strict=True)
    assert all(a is b for a, b in pairs)
    # The same part of a frozen model is unfrozen.
    new = es.unfreeze(NET.freeze(), where)
    assert frozen(new) == NAMES - names
    assert structure(es.freeze(new, where)) == structure(NET.freeze())


SWITCHES = st.lists(
    st.tuples(st.sampled_from([es.freeze, es.unfreeze]), st.sampled_from([*WHERE])),
    max_size=6,
)


@settings(max_examples=20)
@given(SWITCHES)
def test_the_last_freeze_or_unfreeze_of_an_array_counts(switches):
    new, expected = NET, set()
    for switch, where in switches:
        select, names = WHERE[where]
        new = switch(new, select)
        expected = expected | names if switch is es.freeze else expected - names
        assert frozen(new) == expected
    assert structure(es.unfreeze(new)) == structure(NET)


def test_containers_around_modules_of_plain_layers():
    tree = {"net": NET, "head": linear()}
    new = es.freeze(tree, lambda t: t["net"].mlp)
    assert frozen(new) == {f"['net'].{name}" for name in under("mlp")}
    assert frozen((new["net"], new["net"])) == {
        f"[{i}].{name}" for name in under("mlp") for i in (0, 1)
    }
    with pytest.raises(ValueError, match="There is no `es.Module` to freeze here"):
        es.freeze(tree, lambda t: t["head"])


# --- Frozen paths in copies -----------------------------------------------------------


PARTLY = es.freeze(NET, lambda m: (m.mlp.layers[0], m.blocks[1].linear.bias))


COPIES = {
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "eval": es.eval,
    "replace": lambda m: m.replace(bias=jnp.ones(2)),
    "tree.map": lambda m: jax.tree.map(lambda x: x, m),
    "mutable": lambda m: es.mutable(m)(X)[1],
    "update": lambda m: es.update(m, NET),
    "map": lambda m: es.map(lambda x, y: y, m, NET, on=es.Parameter),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=list(COPIES))
def test_copies_have_the_same_frozen_arrays(copied):
    assert frozen(copied(PARTLY)) == frozen(PARTLY)


def test_setting_the_flag_frozen_applies_to_the_whole_module():
    assert frozen(es.configure(PARTLY, frozen=False)) == set()
    assert frozen(PARTLY.replace(frozen=True)) == NAMES


def test_plain_layers_are_frozen_by_their_nearest_es_module():
    # There is no `es.Module` above the linear layer, so no flag applies to it.
    alone = es.freeze(eqx.nn.Sequential([linear(), es.nn.BatchNorm(2)]))
    assert trained(alone) == {"layers[0].weight", "layers[0].bias"}
    assert trained(Wrapper(alone).freeze()) == set()


def test_where_may_return_lists_in_a_tuple():
    net = Wrapper([jnp.ones(2), jnp.ones(3)])
    for where in (
        lambda net: (net.gate, [x for x in net.inner]),
        lambda net: (net.gate, net.inner),
    ):
        assert frozen(es.freeze(net, where)) == {"gate", "inner[0]", "inner[1]"}
    one = es.freeze(net, lambda net: (net.gate, net.inner[1:]))
    assert frozen(one) == {"gate", "inner[1]"}


def test_a_lazy_layer_can_be_frozen_before_init():
    class Lazy(es.Module):
        layer: eqx.nn.Linear
        head: eqx.nn.Linear

        def __init__(self):
            self.layer = es.lazy(eqx.nn.Linear, 2, 2)
            self.head = linear()

    new = es.init(es.freeze(Lazy(), lambda m: m.layer), 0)
    assert frozen(new) == {"layer.weight", "layer.bias"}


# --- Training -------------------------------------------------------------------------


def test_frozen_arrays_have_no_gradient():
    (_, new), grads = es.value_and_grad(lambda m, x: jnp.sum(m(x) ** 2))(PARTLY, X)
    assert {part.name for part in es.parts(grads)} == trained(PARTLY)
    assert new.blocks[1].count == 1


def test_freezing_retraces_and_equal_freezing_does_not():
    @es.jit
    @eqx.debug.assert_max_traces(max_traces=2)
    def names(model, x):
        out = sorted(trained(model))
        return model, [n in out for n in sorted(NAMES)]

    a = lambda m: (m.bias, m.mlp)  # noqa: E731
    b = lambda m: (m.mlp, m.bias)  # noqa: E731
    for net in (NET, es.freeze(NET, a), es.freeze(NET, b), es.freeze(NET, a), NET):
        new, flags = names(net, X)
        assert flags == [n in trained(net) for n in sorted(NAMES)]
        assert structure(new) == structure(net)


def test_a_call_must_not_change_what_is_frozen():
    def run(m):
        m.blocks = [es.freeze(m.blocks[0], lambda b: b.linear.bias), m.blocks[1]]

    match = r"first at `blocks\[0\]\.\S*frozen_paths`: .*'.linear'.*'.bias'"
    with pytest.raises(ValueError, match=match):
        es.mutable(run)(NET)


# --- Surgery --------------------------------------------------------------------------


def wrap_linear(module, name):
    return Wrapper(module) if isinstance(module, eqx.nn.Linear) else module


REPLACED = {
    "tree_at": lambda m: eqx.tree_at(lambda m: m.inner, m, Wrapper(m.inner)),
    "map_modules": lambda m: es.map_modules(wrap_linear, m),
    "another layer": lambda m: m.replace(inner=linear(1)),
}


@pytest.mark.parametrize("replaced", REPLACED.values(), ids=list(REPLACED))
@pytest.mark.parametrize("where", [None, lambda m: m.inner], ids=["all", "inner"])
def test_a_layer_that_replaces_a_frozen_layer_is_frozen(where, replaced):
    start = Wrapper(linear())
    new = replaced(start.freeze(where))
    assert trained(new) == (set() if where is None else {"gate"})
    # A part of the new layer can be unfrozen by its path.
    if isinstance(new.inner, Wrapper):
        tuned = new.unfreeze(lambda m: m.inner.gate)
        assert trained(tuned) - trained(new) == {"inner.gate"}
    assert structure(new.unfreeze()) == structure(replaced(start))


def test_a_new_module_at_a_frozen_path_is_frozen():
    net = es.freeze(NET, lambda m: m.blocks[0])
    new = eqx.tree_at(lambda m: m.blocks[0], net, Block(1.0, 0, linear()))
    assert frozen(new) == under("blocks[0]")
    # The path belongs to the model. Outside it, the new block has only its own flag.
    assert frozen(new.blocks[0]) == set()
    assert frozen(net.blocks[0]) == {"scale", "count", "linear.weight", "linear.bias"}


def test_a_frozen_path_may_lead_through_a_new_module():
    net = es.freeze(NET, lambda m: m.plain["b"])
    new = net.replace(plain={"a": X, "b": Wrapper((X, X))})
    names = {"plain['b'].gate", "plain['b'].inner[0]", "plain['b'].inner[1]"}
    assert frozen(new) == names


def without_first(m):
    return m.replace(mlp=eqx.tree_at(lambda mlp: mlp.layers, m.mlp, m.mlp.layers[1:]))


LOST = {
    "a list that is shorter": (
        lambda m: m.mlp.layers[1],
        without_first,
        r"mlp.layers\[1\]",
        "m.mlp.layers",
        "mlp.layers",
    ),
    "a dict without the key": (
        lambda m: m.plain["a"],
        lambda m: m.replace(plain={"b": m.plain["b"], "c": m.plain["a"]}),
        r"plain\['a'\]",
        "m.plain",
        "plain",
    ),
    "an array in the place of a tuple": (
        lambda m: m.plain["b"][0],
        lambda m: m.replace(plain={"a": X, "b": X}),
        r"plain\['b'\]\[0\]",
        r"m.plain\['b'\]",
        "plain['b']",
    ),
}


@pytest.mark.parametrize(
    ("where", "change", "lost", "around", "place"), LOST.values(), ids=list(LOST)
)
def test_a_frozen_path_that_no_longer_fits_is_an_error(
    where, change, lost, around, place
):
    new = change(es.freeze(NET, where))
    match = rf"(?s)^`{lost}` was frozen.*unfreeze\(model, lambda m: {around}\)"
    with pytest.raises(ValueError, match=match):
        es.filter(new, es.trainable)
    with pytest.raises(ValueError, match=match):
        es.grad(lambda m: jnp.sum(m.bias))(new)
    # All other functions work, and arrays elsewhere in the model are not frozen.
    es.filter(new, es.Parameter), es.state_dict(new), es.eval(new)
    flags = {p.name: p for p in es.parts(new) if not p.name.startswith(place)}
    assert not any(part.frozen for part in flags.values())
    # Test the remedy that the message gives, and freezing the whole model.
    again = es.unfreeze(new, lambda m: eval(f"m.{place}"))
    assert structure(again) == structure(change(NET))
    assert trained(es.freeze(new)) == set()
    assert structure(es.unfreeze(new)) == structure(change(NET))


def test_none_at_a_frozen_path_is_not_an_error():
    net = es.freeze(NET, lambda m: (m.mlp.layers[0].weight, m.plain["b"][0]))
    plain = under("plain")
    assert trained(net.replace(plain=None)) == trained(net) - plain


def test_nodes_of_equinox_state_are_frozen_by_their_paths():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "b", mode="ema")
    model = Wrapper((norm, state))
    for i in range(2):
        new = es.freeze(model, lambda m, i=i: m.inner[i])
        names = {part.name for part in es.parts(model)}
        assert frozen(new) == {x for x in names if x.startswith(f"inner[{i}]")}
    stateful = es.nn.Stateful(eqx.nn.BatchNorm(2, "b", mode="ema"))
    new = es.freeze(stateful, lambda m: m.layer.weight)
    assert frozen(new) == {"layer.weight"}


class Both:
    """A third-party node with numbered children and no length."""

    def __init__(self, first, second):
        self.first, self.second = first, second


jtu.register_pytree_with_keys(
    Both,
    lambda x: (
        ((jtu.SequenceKey(0), x.first), (jtu.SequenceKey(1), x.second)),
        None,
    ),
    lambda _, children: Both(*children),
)


def test_freezing_below_a_node_with_numbered_children_and_no_length():
    both = Both(jnp.ones(2), jnp.ones(2))
    model = Wrapper(both).freeze(lambda m: m.inner.second)
    for again in (model, jax.tree.map(lambda x: x, model)):
        assert [part.frozen for part in es.parts(again)] == [False, True, False]
