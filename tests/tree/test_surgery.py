"""Modules by name: listing, mapping, `es.configure` and `replace`; `es.reseed`."""

import contextlib
import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import rejects, same
from jaxtyping import Array

import eqx_state as es


class Norm(es.Module):
    scale: es.Parameter
    mean: es.BatchStat
    dropout: es.nn.Dropout
    momentum: float = eqx.field(static=True, default=0.5)


class Net(es.Module):
    layers: list[Any]
    heads: dict[str, Any]
    table: es.Buffer[Any]


def norm(seed=0):
    return Norm(jnp.ones(2), jnp.zeros(2), es.nn.Dropout(0.5, key=seed))


def net():
    return Net(
        [eqx.nn.Linear(2, 2, key=jr.key(0)), norm(), eqx.nn.Sequential([norm(1)])],
        {"a": eqx.nn.MLP(2, 1, 2, 1, key=jr.key(1)), "b": None},
        {"shift": np.ones(1, np.float32), "key": jr.key(7)},
    )


TREES = {
    "a model": lambda: net().freeze(lambda m: m.layers[1]),
    "a filtered model": lambda: net().filter(es.Rng),
    "before init": lambda: eqx.tree_at(
        lambda m: m.layers[0], net(), es.lazy(eqx.nn.Linear, 2, 2)
    ),
    "containers": lambda: ({"x": [norm(), (eqx.nn.Dropout(0.1), 3)]}, jnp.ones(2)),
    "tied": lambda: eqx.nn.Shared((norm(), norm()), lambda t: t[1], lambda t: t[0]),
    "no module": lambda: {"w": jnp.ones(2), "n": 3, "none": None},
}
every_tree = pytest.mark.parametrize("make", TREES.values(), ids=list(TREES))


# --- Every tree ---------------------------------------------------------------------


@contextlib.contextmanager
def same_leaves(tree):
    """Assert that the leaves are identical afterwards, and arrays have the same values.

    Unlike `helpers.untouched`, it works for trees with leaves that do not equal a copy
    of themselves.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [x.copy() if eqx.is_array(x) else None for x in leaves]
    yield
    after, after_def = jax.tree.flatten(tree)
    assert after_def == treedef
    for old, value, new in zip(leaves, arrays, after, strict=True):
        assert new is old
        assert value is None or (value == new).all()


FUNCTIONS = {
    "parts": es.parts,
    "partition": lambda t: es.partition(t, es.Parameter, es.State),
    "update": lambda t: es.update(t, es.filter(t, es.Parameter)),
    "spec": lambda t: es.spec(t, {es.State: 0, ...: 1}),
    "map": lambda t: es.map(lambda x: x * 0, t, on=es.Parameter),
    "map_modules": lambda t: es.map_modules(lambda m, name: name or m, t),
    "reseed": lambda t: es.reseed(t, 0),
    "eval": es.eval,
    "freeze": lambda t: es.freeze({"t": t, "n": norm()}),
    "configure": lambda t: es.configure([t, norm()], momentum=0.1, mean=1.0),
    "init": lambda t: es.init(t, 0),
}


@every_tree
def test_no_function_modifies_its_input(make):
    tree = make()
    with same_leaves(tree):
        for function in FUNCTIONS.values():
            function(tree)


@every_tree
def test_the_name_of_a_module_is_the_expression_that_reads_it(make):
    tree = make()
    found = es.modules(tree)
    assert len({id(module) for _, module in found}) == len(found)
    for name, module in found:
        dot = "" if name.startswith("[") or not name else "."
        assert eval(f"tree{dot}{name}") is module


@every_tree
def test_map_modules_sees_what_modules_lists(make):
    tree, seen = make(), {}
    es.map_modules(lambda m, name: seen.setdefault(name, type(m)) and m, tree)
    assert seen == {name: type(module) for name, module in es.modules(tree)}
    # `modules` lists parents first, `map_modules` maps children first.
    assert sorted(seen) == sorted(name for name, _ in es.modules(tree))


@pytest.mark.parametrize("name", [n for n in TREES if n != "no module"])
def test_configure_equals_map_modules_with_replace(name):
    def replace(module, name):
        is_norm = isinstance(module, Norm)
        return module.replace(momentum=0.9) if is_norm else module

    tree = TREES[name]()
    new = es.configure(tree, momentum=0.9)
    assert eqx.tree_equal(new, es.map_modules(replace, tree))


# --- modules, map_modules -------------------------------------------------------------


def test_a_module_that_occurs_twice_is_listed_and_mapped_once():
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    seen = []

    def f(module, name):
        seen.append(name)
        return eqx.tree_at(lambda m: m.bias, module, None)

    tree = es.map_modules(f, [linear, {"again": linear}])
    assert [name for name, _ in es.modules([linear, linear])] == ["[0]"]
    assert seen == ["[0]"]
    assert tree[0].bias is None
    assert tree[1]["again"] is tree[0]


def test_modules_that_a_node_creates_when_it_is_flattened():
    class Box(eqx.Module):
        n: float

    @jtu.register_pytree_node_class
    class Making:
        def __init__(self, n):
            self.n = n

        def tree_flatten(self):
            return (Box(self.n),), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(children[0].n)

    new = es.map_modules(lambda module, name: module, [Making(n) for n in range(50)])
    assert [node.n for node in new] == list(range(50))


def test_a_module_may_be_an_iterator():
    class Steps(es.Module):
        n: es.State | None = None
        inner: eqx.nn.Dropout = dataclasses.field(default_factory=eqx.nn.Dropout)

        def __iter__(self):
            return self

        def __next__(self):
            raise StopIteration

        def __call__(self, x):
            if self.n is None:
                self.n = x

    model = {"steps": Steps()}
    seen = []
    es.map_modules(lambda module, name: seen.append(name) or module, model)
    assert seen == ["['steps'].inner", "['steps']"]
    new = es.init(model, 0, jnp.ones(2), call=lambda m, x: m["steps"](x))
    assert [(p.name, p.kind) for p in es.parts(new)] == [("['steps'].n", es.State)]


def test_map_modules_maps_children_first():
    model = es.freeze(net()).eval()

    def f(module, name):
        if isinstance(module, eqx.nn.Sequential):
            assert module.layers == ("a norm",)
            return "layers"
        return "a norm" if isinstance(module, Norm) else module

    new = es.map_modules(f, model)
    assert new.layers[1:] == ["a norm", "layers"]
    assert (new.training, new.frozen) == (False, True)
    assert new.layers[0].weight is model.layers[0].weight
    assert isinstance(model.layers[1], Norm)


def test_map_modules_takes_the_function_first():
    with pytest.raises(
        TypeError, match=r"`es\.map_modules\(f, tree\)`.*a `Norm` first"
    ):
        es.map_modules(norm(), lambda module, name: module)


def test_a_function_that_returns_nothing_does_not_map_a_module():
    with pytest.raises(
        TypeError, match=r"returned `None` for the `Net`.*return module"
    ):
        es.map_modules(lambda module, name: None, net())
    without = es.map_modules(lambda module, name: None if name else module, net())
    assert without.heads == {"a": None, "b": None}
    assert es.map_modules(lambda module, name: None, None) is None


# --- configure, replace ---------------------------------------------------------------


def test_an_attribute_that_no_module_has_is_an_error():
    for attributes, missing in (
        ({"momentum": 0.5, "rate": 0.9}, "`rate`"),
        ({"filter": 3}, "`filter`"),
        ({"b": 1, "a": 2}, "`a`, `b`"),
    ):
        with rejects(net(), ValueError, rf"es\.configure.*{missing}"):
            es.configure(net(), **attributes)


def test_replace():
    model = es.freeze(norm().eval())
    two = jnp.full(2, 2.0, dtype=jnp.float32)
    new = model.replace(scale=two, momentum=0.9)
    assert (new.scale, new.mean, new.momentum) == (two, model.mean, 0.9)
    assert (new.training, new.frozen) == (False, True)
    assert model.momentum == 0.5
    assert same(model.replace(), model)
    assert model.replace() is not model


@pytest.mark.parametrize("name", ["scael", "filter", "head.bias"])
def test_replace_rejects_names_that_are_not_fields(name):
    with pytest.raises(TypeError, match=rf"Norm\.replace.*`{name}`"):
        norm().replace(**{"scale": 3.0, name: 1})


# --- Code of the class does not run ---------------------------------------------------


def test_no_init_converter_or_check_runs():
    forbidden = []

    class Strict(es.Module):
        w: Array = es.field(
            kind=es.Parameter, converter=lambda x: count("converter", x)
        )
        n: es.State = es.field(default_factory=lambda: count("factory", 0))
        rate: float = eqx.field(static=True, default=0.5)

        def __init__(self, w):
            count("init", None)
            self.w = w
            self.n = 0

        def __check_init__(self):
            count("check", None)

    class Plain(eqx.Module):
        w: Array = eqx.field(converter=lambda x: count("converter", x))

        def __check_init__(self):
            count("check", None)

    def count(what, value):
        forbidden.append(what)
        return value

    tree = [Strict(jnp.ones(2)), Plain(jnp.ones(2))]
    forbidden.clear()
    es.parts(tree)
    es.filter(tree, es.under(lambda t: t[0]), es.not_(es.trainable))
    es.update(es.eval(tree), *es.partition(tree, es.State, lambda part: True))
    es.map(lambda x, y: x, tree, es.mask(tree), on=es.Parameter)
    es.spec(tree, {es.State: 0})
    es.map_modules(lambda module, name: module, tree)
    es.modules(tree)
    es.configure(tree, rate=0.1, w=jnp.zeros(2))
    es.freeze(tree, lambda t: t[0])
    es.unfreeze(tree)
    tree[0].replace(w=jnp.zeros(2))
    with pytest.raises(ValueError, match="structure"):
        es.update(tree, tree[:1])
    assert forbidden == []


# --- reseed ---------------------------------------------------------------------------


def keys(tree):
    parts = es.parts(es.filter(tree, es.Rng))
    return {part.name: tuple(jr.key_data(part.value).tolist()) for part in parts}


@every_tree
def test_reseed_depends_only_on_paths(make):
    tree = make()
    new = keys(es.reseed(tree, 3))
    assert new.keys() == keys(tree).keys()
    assert len(set(new.values())) == len(new)
    assert keys(es.reseed(es.filter(es.eval(tree), es.Rng), 3)) == new
    assert keys(es.reseed(es.reseed(tree, 9), 3)) == new
    assert not set(keys(es.reseed(tree, 4)).values()) & set(new.values())


def test_reseed_does_not_change_a_key_in_a_buffer():
    model = net()
    assert es.reseed(model, 0).table["key"] is model.table["key"]


def test_the_seed_of_reseed_comes_after_the_model():
    with pytest.raises(TypeError, match="^`BatchNorm` is neither a PRNG key"):
        es.reseed(0, es.nn.BatchNorm(2))
