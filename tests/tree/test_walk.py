"""The walk over a tree visits every node, and does not keep anything alive."""

import collections
import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import pytest

import eqx_state as es
from eqx_state._kinds.kinds import NOTHING
from eqx_state._tree.compare import identical, is_hole
from eqx_state._tree.context import children, map_children, ROOT
from eqx_state._tree.walk import kinds_of, leaves, walk


ONE = jnp.ones(1)


def by_definition(node: Any, path: Any = (), context: Any = ROOT) -> Iterator[Any]:
    """The visits of `walk`, computed node by node, without a cache."""
    if node is None:
        return
    if isinstance(node, (eqx.nn.StateIndex, eqx.nn.State)):
        in_norm = context.owner is eqx.nn.BatchNorm
        kind = es.BatchStat if in_norm else es.State
        context = context._replace(kind=kind, spec=NOTHING, unresolved=False)
        context = context._replace(is_own=False)
    below = children(node)
    if below is None or isinstance(node, eqx.Module):
        yield path, id(node), context, below is None
    for key, child in below or []:
        yield from by_definition(child, (*path, key), context.enter(node, key))


class Pair(NamedTuple):
    first: Any
    second: Any


class Mixed(es.Module):
    layers: list[es.Parameter | None]
    table: dict[str, es.State]
    pair: tuple[es.Rng, es.Parameter]
    frozen_part: es.Buffer[Any]
    rest: Any


def mixed() -> Mixed:
    inner = es.freeze(es.nn.BatchNorm(1))
    pair = Pair(inner, collections.OrderedDict(b=ONE, a=None))
    table = {"b": 0, "a": 1}
    rest = [pair, eqx.nn.make_with_state(eqx.nn.BatchNorm)(1, "batch", mode="batch")]
    linear = eqx.nn.Linear(1, 1, use_bias=False, key=jr.key(0))
    return Mixed([1.0, None], table, (jr.key(0), 1.0), [linear, inner], (rest, {1: 2}))


def without_a_field() -> es.Module:
    module = copy.copy(es.nn.BatchNorm(1))
    del module.__dict__["mean"]
    return module


TREES = {
    "mixed": mixed,
    "twice": lambda: [es.nn.BatchNorm(1)] * 2,
    "partial": lambda: es.filter(mixed(), es.State),
    "modes": lambda: (mixed().eval(), es.freeze(mixed())),
    "wrapped": lambda: eqx.filter_jit(es.nn.BatchNorm(1)),
    "bound": lambda: es.nn.BatchNorm(1).eval,
    "shapes": lambda: eqx.filter_eval_shape(mixed),
    "a field without a value": without_a_field,
    "a generator": lambda: [(x for x in ()), ONE],
}


@pytest.mark.parametrize("name", TREES)
def test_the_walk_equals_its_definition(name):
    tree = TREES[name]()
    found = [(v.path, id(v.node), v.context, v.is_leaf) for v in walk(tree)]
    assert found == list(by_definition(tree))


KINDS_IN = {
    **{name: make for name, make in TREES.items() if name != "a generator"},
    "marks": lambda: es.freeze(mixed(), lambda m: (m.layers[0], m.table)),
}


@pytest.mark.parametrize("name", KINDS_IN)
def test_kinds_of_equals_the_kinds_of_the_visits(name):
    tree = KINDS_IN[name]()
    kinds = [visit.kind for visit in leaves(tree)]
    assert kinds_of(jtu.tree_leaves(tree), tree) == kinds


def test_a_field_without_a_value_is_not_none():
    module = without_a_field()
    found = [visit.node for visit in leaves(module, is_leaf=is_hole)]
    assert identical(found, jtu.tree_leaves(module, is_leaf=is_hole))


def test_a_walk_keeps_nothing_alive():
    model = es.nn.BatchNorm(1)
    alive = weakref.ref(model)
    gc.disable()
    try:
        es.parts(model)
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_a_deep_tree_is_walked():
    tree = ONE
    for _ in range(300):
        tree = eqx.Partial([tree])
    assert len(es.parts(tree)) == 1


STOPS = {
    "holes": lambda x: x is None,
    "modules": lambda x: isinstance(x, (eqx.nn.Linear, es.nn.BatchNorm)),
    "everything": lambda x: True,
}


@pytest.mark.parametrize("name", STOPS)
def test_a_walk_stops_where_flattening_stops(name):
    tree, is_leaf = mixed(), STOPS[name]
    stopped = [visit.node for visit in leaves(tree, is_leaf=is_leaf)]
    # A walk skips `_eqx_state_inference`, which replaces Equinox's flag.
    expected = [
        x
        for path, x in jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
        if "_eqx_state_inference" not in jtu.keystr(path)
    ]
    assert len(stopped) == len(expected)
    assert all(a is b for a, b in zip(stopped, expected, strict=True))


def test_a_leaf_of_the_caller_has_its_path_and_its_context():
    model = eqx.nn.make_with_state(eqx.nn.BatchNorm)(1, "batch", mode="batch")[0]
    nodes = leaves([model], is_leaf=lambda x: isinstance(x, eqx.nn.StateIndex))
    indices = [v for v in nodes if isinstance(v.node, eqx.nn.StateIndex)]
    assert {v.name for v in indices} >= {"[0].batch_counter"}
    assert {v.context.kind for v in indices} == {es.BatchStat}
    assert all(v.is_leaf and v.kind is None for v in indices)


def test_one_level_is_mapped_in_a_new_node():
    tree = mixed()
    same = map_children(lambda key, child: child, tree)
    assert same is not tree
    assert eqx.tree_equal(same, tree)
    assert same.table is tree.table
    keys = map_children(lambda key, child: str(key), {"a": [1], "b": None})
    assert keys == {"a": "['a']", "b": "['b']"}
    assert map_children(lambda key, child: None, ONE) is ONE


def test_a_class_that_is_registered_later_is_walked_from_then_on():
    class Box:
        def __init__(self, value):
            self.value = value

    boxes = [Box(ONE), Box(jnp.arange(1))]
    assert es.parts(boxes) == []
    jtu.register_pytree_node(Box, lambda b: ([b.value], None), lambda _, x: Box(*x))
    assert [part.kind for part in es.parts(boxes)] == [es.Parameter, None]
    params = es.filter(boxes, es.Parameter)
    assert params[1].value is None
    assert es.update(boxes, params)[1].value == 0
