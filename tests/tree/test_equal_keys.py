"""Leaves whose key paths are equal, or print the same, differ by their position."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import pytest

import eqx_state as es


X = jnp.arange(3.0)


@ft.total_ordering
class K:
    """A dict key that prints like every other `K`."""

    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return "K"

    def __lt__(self, other):
        return self.n < other.n

    def __eq__(self, other):
        return isinstance(other, K) and self.n == other.n

    def __hash__(self):
        return hash(self.n)


@jtu.register_pytree_with_keys_class
class Twins:
    """Both children have the same key."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten_with_keys(self):
        key = jtu.GetAttrKey("twin")
        return ((key, self.a), (key, self.b)), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def alike(a, b):
    return {K(1): a, K(2): b}


def first(node):
    return node[K(1)] if isinstance(node, dict) else node.a


def second(node):
    return node[K(2)] if isinstance(node, dict) else node.b


pairs = pytest.mark.parametrize("pair", [alike, Twins])


def names(tree):
    return [part.name for part in es.parts(tree)]


def test_names():
    assert names(alike(X, X)) == ["[K]", "[K]~1"]
    assert names(Twins(X, X)) == ["twin", "twin~1"]
    assert names(alike({"a": X}, {"b": X})) == ["[K]['a']", "[K]~1['b']"]
    assert names([{1: X, 2: X}, {"1": X}]) == ["[0][1]", "[0][2]", "[1]['1']"]


@pairs
def test_no_two_leaves_are_confused(pair):
    tree = [pair({"x": X}, {"x": X + 1}), pair(X + 2, X + 3)]
    parts = es.parts(tree)
    leaves = jax.tree.leaves(tree)
    assert all(part.value is leaf for part, leaf in zip(parts, leaves, strict=True))
    assert len(set(names(tree))) == 4
    assert len({part.path for part in parts}) == 4
    for pick in (first, second):
        selected = es.filter(tree, es.under(lambda t, pick=pick: pick(t[1])))
        assert len(jax.tree.leaves(selected)) == 1
        assert pick(selected[1]) is pick(tree[1])
    for part in parts:
        selected = es.filter(tree, es.path_matches(part.name))
        assert jax.tree.leaves(selected) == [part.value]
    keys = es.reseed(pair([jr.key(0)], [jr.key(0)]), 3)
    assert first(keys)[0] != second(keys)[0]


def test_a_key_that_is_unique_is_seeded_by_its_path_alone():
    (key,) = jax.tree.leaves(es.reseed({K(1): jr.key(0)}, 3))
    assert es.reseed(alike(jr.key(0), jr.key(0)), 3)[K(1)] == key


class Model(es.Module):
    s: Any = es.field(kind=es.State)

    def __call__(self, x):
        leaves, treedef = jax.tree.flatten(self.s)
        self.s = treedef.unflatten([s + 1.0 + i for i, s in enumerate(leaves)])
        return x


RUNS = {
    "jit": lambda m, x: es.jit(m)(x),
    "carried": lambda m, x: setattr(
        m, "s", es.fori_loop(0, 1, lambda i, n: (n(x), n)[1], m).s
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_transform_writes_each_leaf_at_its_position(run):
    zero = jnp.zeros(())  # one array at three positions
    model = Model(alike(zero, Twins(zero, zero)))
    _, new = es.mutable(lambda m, x: RUNS[run](m, x))(model, X)
    assert jax.tree.leaves(new) == [1.0, 2.0, 3.0]
    assert jax.tree.structure(new) == jax.tree.structure(model)
