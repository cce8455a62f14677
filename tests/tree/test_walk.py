"""The walk finds what it should, and remembers nothing."""

import collections
import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import pytest
from zoo import CASES

import eqx_state as es
from eqx_state._kinds._spec import Spec
from eqx_state._tree._aliasing import find_shared
from eqx_state._tree._context import ROOT
from eqx_state._tree._walk import children, walk


ONE = jnp.ones(1)


def by_definition(node: Any, path: Any = (), context: Any = ROOT) -> Iterator[Any]:
    """What `walk` finds, one node after the other, with nothing remembered."""
    if node is None:
        return
    if isinstance(node, (eqx.nn.StateIndex, eqx.nn.State)):
        in_norm = context.owner is eqx.nn.BatchNorm
        context = context.declare(Spec(kind=es.BatchStat if in_norm else es.State))
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
    **{name: case.model for name, case in CASES.items()},
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
def test_the_walk_is_what_it_is_by_definition(name):
    tree = TREES[name]()
    found = [(v.path, id(v.node), v.context, v.is_leaf) for v in walk(tree)]
    assert found == list(by_definition(tree))


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


def test_a_stateless_module_may_be_in_many_places():
    part = es.eval(es.nn.Dropout(0.5, key=jr.key(0)))
    layer = eqx.nn.Linear(1, 1, key=jr.key(0))

    class Plain(es.Module):
        layer: eqx.nn.Linear

    plain = Plain(layer)
    assert find_shared(walk([plain] * 3 + [part])) is None
    assert find_shared(walk([plain, [part], plain, {"a": part}])) == (
        "[1][0]",
        "[3]['a']",
    )


def test_a_constant_copy_hides_no_sharing():
    class Three(es.Module):
        constant: es.Buffer[Any]
        a: es.nn.BatchNorm
        b: es.nn.BatchNorm

    norm = es.nn.BatchNorm(1)
    with pytest.raises(ValueError, match=r"in two places, `a` and `b`"):
        Three(norm, norm, norm)
    assert find_shared(walk(Three(norm, norm, es.nn.BatchNorm(1)))) is None


def test_a_deep_tree_is_walked():
    tree = ONE
    for _ in range(300):
        tree = eqx.Partial([tree])
    assert len(es.parts(tree)) == 1
