"""Seed 002 (Brachy): program V5 and the rows of PEERS.md which it describes.

A test is named after its row. Where a frozen module needs another spelling than the
seed's, or the seed has a fault, one line says so.
"""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqx_state as es


class Linear(es.Module):
    weight: es.Parameter
    bias: es.Parameter
    count: es.State

    def __init__(self, weight=1.0, bias=0.0):
        self.weight = jnp.array(weight)
        self.bias = jnp.array(bias)
        self.count = jnp.array(0)

    def __call__(self, x):
        self.count += 1
        return x * self.weight + self.bias


class Counter(es.Module):
    count: es.State = 0

    def step(self):
        self.count = self.count + 1


class Dropout(es.Module):
    """As in seed 002, `p` is the probability to keep."""

    rng: es.Rng
    p: es.Buffer

    def __call__(self, x):
        if not self.training:
            return x
        self.rng, subkey = jr.split(self.rng)
        return x * jr.bernoulli(subkey, self.p, x.shape).astype(x.dtype) / self.p


class Stack(es.Module):
    layers: list
    head: Any = None

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


# --- V5: Brachy ---------------------------------------------------------------------


def test_V5_J2_J3_strings_and_lists_are_static():
    traces = []

    @eqx.filter_jit
    def foo(x, y):
        traces.append(x["q"])
        if x["q"] == "go ahead!":
            return {"a": x["a"], "b": y["b"]}
        return {"a": 2 * y["a"], "b": y["b"]}

    x = {"q": "stop", "a": jnp.ones(3)}
    y = {"a": jnp.ones(5), "b": ["hello", "friend"]}
    z = foo(x, y)
    assert eqx.tree_equal(z, {"a": jnp.full(5, 2.0), "b": ["hello", "friend"]})
    assert foo({**x, "a": jnp.zeros(3)}, y)["b"] == ["hello", "friend"]
    assert traces == ["stop"]
    assert eqx.tree_equal(foo({**x, "q": "go ahead!"}, y)["a"], jnp.ones(3))
    assert foo(x, {**y, "b": ["bye", "friend"]})["b"] == ["bye", "friend"]
    assert traces == ["stop", "go ahead!", "stop"]


def linear_apply(S, global_config, x):
    return S, x @ S["params"]["weight"] + S["params"]["bias"]


def dropout_apply(S, global_config, x):
    if not global_config["is_training"]:
        return S, x
    rng, subkey = jr.split(S["buffers"]["rng"])
    p = S["buffers"]["p"]
    y = x * jr.bernoulli(subkey, p, x.shape).astype(x.dtype) / p
    # the seed writes into the caller's dict
    return {**S, "buffers": {**S["buffers"], "rng": rng}}, y


def test_V5_B4_D17_structure_tree_of_slots():
    class Slots(es.Module):
        params: dict[str, es.Parameter]
        buffers: dict[str, es.State]
        aux: tuple = es.field(static=True, default=())  # the seed's dict has no hash
        submodules: dict = dataclasses.field(default_factory=dict)

    params = {"weight": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
    tree = Slots(params, {"rng": jr.key(0)}, submodules={"a": Slots(params, {})})
    assert len(jax.tree.leaves(tree.filter(es.Parameter))) == 4
    assert len(jax.tree.leaves(tree.filter(es.State))) == 1

    def loss(S, x):
        S, y = linear_apply(S, {}, x)
        return jnp.sum(y)

    # class-free: a dict and a function
    grads, same = es.grad(loss)({"params": params}, jnp.ones(3))
    assert jnp.array_equal(grads["params"]["weight"], jnp.ones((3, 2)))
    assert eqx.tree_equal(same, {"params": params})


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit])
@pytest.mark.parametrize("training", [True, False])
def test_V5_H2_dropout_equals_the_pure_apply(jit, training):
    S = {"buffers": {"rng": jr.key(0), "p": jnp.array(0.5)}, "apply": dropout_apply}
    dropout = Dropout(jr.key(0), 0.5).train(training)
    x = jnp.ones(20)
    for _ in range(2):
        S, expected = jit(S["apply"])(S, {"is_training": training}, x)
        y, dropout = jit(es.mutable(dropout))(x)
        assert jnp.array_equal(y, expected)
        assert eqx.tree_equal(dropout.rng, S["buffers"]["rng"])
    assert eqx.tree_equal(dropout.rng, jr.key(0)) == (not training)


# --- rows of seed 002 ---------------------------------------------------------------


@jax.debug_key_reuse(False)  # one model is called twice, on purpose
def test_B17_gradient_of_a_hyper_parameter():
    dropout = Dropout(jr.key(0), 0.5)
    x = jnp.ones(100)
    grads, _ = es.grad(lambda m, x: jnp.sum(m(x)), wrt=es.Buffer)(dropout, x)
    y, _ = es.mutable(dropout)(x)
    assert jnp.allclose(grads.p, -jnp.sum(y) / 0.5)
    assert grads.rng is None


def test_B18_a_module_of_arrays_is_a_jax_type():
    identity = jax.jit(lambda x: jax.tree.map(lambda a: a, x))
    dropout = Dropout(jr.key(0), 0.5)
    assert eqx.tree_equal(identity(dropout), dropout)


def test_C9_M4_paths_of_nodes():
    tree = Stack([Linear(), Stack([Counter()])], head=Counter())
    nodes = dict(es.modules(tree))
    assert set(nodes) == {"", "layers[0]", "layers[1]", "layers[1].layers[0]", "head"}
    assert nodes["layers[1].layers[0]"] is tree.layers[1].layers[0]
    leaves = {name for name, node in nodes.items() if len(es.modules(node)) == 1}
    assert leaves == {"layers[0]", "layers[1].layers[0]", "head"}


def test_M4_structure_tree_map():
    tree = Stack([Linear(), Stack([Counter()])])
    seen = []

    def double(module, name):
        seen.append(name)
        if isinstance(module, Stack):
            return module
        return module.replace(count=module.count + 2)

    new = es.map_modules(double, tree)
    assert sorted(seen) == sorted(name for name, _ in es.modules(tree))
    assert seen[-1] == ""  # children first
    assert jax.tree.leaves(new.filter(es.State)) == [2, 2]
    # the seed maps over the union of the paths of several trees
    other = dict(es.modules(Stack([Linear(), Linear()], head=Counter())))
    union = {name: other.get(name) for name in {*seen, *other}}
    assert union["head"].count == 0
    assert union["layers[1].layers[0]"] is None
    # and may return a tuple of trees
    params, rest = es.partition(tree, es.Parameter)
    assert jax.tree.leaves(params) == [1.0, 0.0]
    assert eqx.tree_equal(eqx.combine(params, rest), tree)


class Nested(es.Module):
    w: es.Parameter
    stream: es.RngStream
    children: list

    def __init__(self, depth):
        self.w = es.Initializer(lambda key: jr.normal(key, (3,)))
        self.stream = es.lazy(es.RngStream)
        self.children = [Nested(depth - 1) for _ in range(2 if depth else 0)]

    def draw(self):
        keys = [self.stream(), self.stream()]
        return sum((child.draw() for child in self.children), keys)


def distinct(keys):
    return len({tuple(jr.key_data(key).tolist()) for key in keys}) == len(keys)


def test_D7_one_key_reaches_every_submodule():
    model = Nested(2).init(0)
    weights = jax.tree.leaves(model.filter(es.Parameter))
    assert len(weights) == 7
    assert len({tuple(w.tolist()) for w in weights}) == 7
    assert distinct(jax.tree.leaves(model.filter(es.Rng)))


def test_H5_fresh_keys_without_passing_them():
    keys, model = es.mutable(Nested.draw)(Nested(2).init(0))
    more, _ = es.mutable(model.draw)()
    assert len(keys) == 14
    assert distinct(keys + more)


def test_D16_I3_a_module_builds_and_configures_itself():
    class Model(es.Module):
        first: Dropout
        second: Dropout

        def __init__(self, key):
            key1, key2 = jr.split(key)
            self.first = Dropout(key1, 0.5)
            self.second = Dropout(key2, 0.9)

    model = Model(jr.key(0))
    # a global config is a call: `train(mode)` for the flag, `configure` for the rest
    config = json.loads('{"training_mode": false}')
    evaluating = es.train(model, config["training_mode"])
    assert not evaluating.second.training
    assert eqx.tree_equal(es.eval(model), evaluating)
    p = jnp.float32(0.1)
    configured = es.configure(model, p=p)
    assert (configured.first.p, configured.second.p) == (p, p)
    assert model.first.p == 0.5
    with pytest.raises(ValueError, match="momentum"):
        es.configure(model, momentum=0.9)


def test_E14_state_part_of_a_tree():
    tree = {"params": Linear(), "aux": 3, "apply": linear_apply}
    part = es.filter(tree)
    assert part["aux"] is None
    assert part["apply"] is None
    assert eqx.tree_equal(part["params"], tree["params"])


@jax.debug_key_reuse(False)  # one model is called twice, on purpose
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_G3_M5_bind_apply_unbind(jit):
    model = Stack([Linear(), Dropout(jr.key(0), 0.5)])
    x = jnp.ones(8)
    apply, params, state = es.functional(model)
    y, state = jit(apply)(params, state, x)
    expected, new = es.mutable(model)(x)
    assert jnp.array_equal(y, expected)
    assert eqx.tree_equal(es.load_state_dict(model, {**params, **state}), new)
    # `bind_global_config`: the flags are in the model which is bound
    apply, params, state = es.functional(new.eval())
    y, _ = jit(apply)(params, state, x)
    assert jnp.array_equal(y, x)


def test_G13_only_a_static_change_retraces():
    f = eqx.filter_jit(eqx.debug.assert_max_traces(lambda m, x: m(x), max_traces=2))
    stack = Stack([eqx.nn.Lambda(jnp.tanh), eqx.nn.Linear(2, 2, key=jr.key(0))])
    scaled = es.map(lambda x: 2 * x, stack)
    f(stack, jnp.ones(2))
    f(scaled, jnp.zeros(2))
    surgery = eqx.tree_at(lambda m: m.layers[0], stack, eqx.nn.Lambda(jnp.sin))
    assert not jnp.allclose(f(surgery, jnp.ones(2)), f(stack, jnp.ones(2)))


def test_J4_the_same_split_for_other_transforms():
    tree = {"q": "stop", "w": jnp.arange(6.0).reshape(2, 3), "flag": True}
    arrays, static = es.partition(tree, lambda part: True)

    def total(arrays):
        tree = eqx.combine(arrays, static)
        return jnp.sum(tree["w"]) if tree["q"] == "stop" else None

    assert jax.vmap(total)(arrays).tolist() == [3.0, 12.0]
    assert jnp.array_equal(jax.grad(total)(arrays)["w"], jnp.ones((2, 3)))


def test_J19_gradient_through_an_update_step():
    def loss(model):
        return 0.5 * (model.weight**2 + model.bias**2)

    def after(rate):
        model = Linear(3.0, 4.0)
        grads, model = es.grad(loss)(model)
        return loss(es.map(lambda p, g: p - rate * g, model, grads, on=es.trainable))

    assert jnp.allclose(jax.grad(after)(0.1), -25 * (1 - 0.1))


def test_M6_output_of_an_intermediate_layer():
    class Intermediate(es.State):
        pass

    class Tap(es.Module):
        layer: Linear
        out: Intermediate

        def __call__(self, x):
            self.out = self.layer(x)
            return self.out

    model = Stack([Linear(2.0), Stack([Linear(3.0)])])
    tapped = eqx.tree_at(lambda m: m.layers[0], model, Tap(model.layers[0], 0.0))
    y, tapped = es.mutable(tapped)(jnp.float32(1.0))
    assert y == 6.0
    assert jax.tree.leaves(tapped.filter(Intermediate)) == [2.0]
    # or without surgery, by calling a part
    assert es.mutable(Stack(model.layers[:1]))(jnp.float32(1.0))[0] == 2.0


def test_M6_a_new_layer_somewhere():
    model = Stack([Linear(2.0), Linear(3.0)])
    first, last = model.layers
    new = model.replace(layers=[first, Linear(10.0), last])
    y, new = es.mutable(new)(jnp.array(1.0))
    assert y == 60.0
    assert jax.tree.leaves(new.filter(es.State)) == [1, 1, 1]
    other = eqx.tree_at(lambda m: m.layers[0], model, es.nn.Dropout(0.5, key=jr.key(0)))
    assert len(jax.tree.leaves(other.filter(es.Parameter))) == 2
