"""Laws of the functions on whole trees, for every tree and every model."""

import contextlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

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
    "map_modules": lambda t: es.map_modules(lambda m, name: None, t),
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
    for switch in (es.train, es.eval, es.freeze, es.unfreeze):
        assert eqx.tree_equal(
            es.configure(switch(tree), momentum=0.9), switch(new), typematch=True
        )


# --- Keys ---------------------------------------------------------------------------


def keys(tree):
    parts = es.parts(es.filter(tree, es.Rng))
    return {part.name: tuple(jr.key_data(part.value).tolist()) for part in parts}


@every_tree
def test_reseed_depends_only_on_paths(make):
    tree = make()
    new = keys(es.reseed(tree, 3))
    assert new.keys() == keys(tree).keys()
    assert len(set(new.values())) == len(new)
    for change in (es.eval, es.train, lambda t: es.filter(t, es.Rng)):
        assert keys(es.reseed(change(tree), 3)) == new
        assert keys(change(es.reseed(tree, 3))) == new
    assert keys(es.reseed(es.reseed(tree, 9), 3)) == new
    assert not set(keys(es.reseed(tree, 4)).values()) & set(new.values())


def test_reseed_does_not_change_a_key_in_a_buffer():
    model = net()
    assert es.reseed(model, 0).table["key"] is model.table["key"]
