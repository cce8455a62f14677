"""Nodes whose children have keys that are equal or print alike, or have no keys."""

import dataclasses
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
    """A key of dicts that prints as every other."""

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
    """Both children go by one key."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten_with_keys(self):
        key = jtu.GetAttrKey("twin")
        return ((key, self.a), (key, self.b)), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@jtu.register_pytree_node_class
@dataclasses.dataclass
class Named:
    """A dataclass that is registered without keys, its children in another order."""

    a: Any
    name: str
    b: Any

    def tree_flatten(self):
        return (self.b, self.a), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(a=children[1], name=name, b=children[0])


@jtu.register_pytree_node_class
@dataclasses.dataclass
class Wary(Named):
    """One that accepts nothing but arrays and what JAX puts in their place."""

    def __post_init__(self):
        if type(self.a) is object:
            raise TypeError("not an array")


def alike(a, b):
    return {K(1): a, K(2): b}


def named(a, b):
    return Named(a, "name", b)


def wary(a, b):
    return Wary(a, "name", b)


def first(node):
    return node[K(1)] if isinstance(node, dict) else node.a


def second(node):
    return node[K(2)] if isinstance(node, dict) else node.b


PAIRS = [alike, Twins, named, wary]
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)


def names(tree):
    return [part.name for part in es.parts(tree)]


def test_names_and_paths():
    assert names(alike(X, X)) == ["[K]", "[K]~1"]
    assert names(Twins(X, X)) == ["twin", "twin~1"]
    assert names(alike({"a": X}, {"b": X})) == ["[K]['a']", "[K]~1['b']"]
    assert names(named(X, X)) == ["b", "a"]
    assert names(wary(X, X)) == ["[<flat index 0>]", "[<flat index 1>]"]
    assert names([{1: X, 2: X}, {"1": X}]) == ["[0][1]", "[0][2]", "[1]['1']"]


@pairs
def test_no_two_are_confused(pair):
    tree = [pair({"x": X}, {"x": X + 1}), pair(X + 2, X + 3)]
    parts = es.parts(tree)
    leaves = jax.tree.leaves(tree)
    assert all(part.value is leaf for part, leaf in zip(parts, leaves, strict=True))
    assert len(set(names(tree))) == 4
    assert len({part.path for part in parts}) == 4
    assert len({jtu.keystr(part.path) for part in parts}) == 4
    for pick in (first, second):
        selected = es.filter(tree, es.under(lambda t, pick=pick: pick(t[1])))
        assert len(jax.tree.leaves(selected)) == 1
        assert pick(selected[1]) is pick(tree[1])
    for part in parts:
        selected = es.filter(tree, es.path_matches(part.name))
        assert jax.tree.leaves(selected) == [part.value]
    keys = es.reseed(pair([jr.key(0)], [jr.key(0)]), 3)
    assert first(keys)[0] != second(keys)[0]


def test_keys_that_are_not_alike_are_seeded_as_ever():
    (key,) = jax.tree.leaves(es.reseed({K(1): jr.key(0)}, 3))
    assert es.reseed(alike(jr.key(0), jr.key(0)), 3)[K(1)] == key


class Model(es.Module):
    s: Any = es.field(kind=es.State)

    def __call__(self, x):
        self.s = jax.tree.map(lambda s, d: s + d, self.s, self.step())
        return x

    def step(self):
        leaves, treedef = jax.tree.flatten(self.s)
        return treedef.unflatten([jnp.full((), i + 1.0) for i, _ in enumerate(leaves)])


RUNS = {
    "called": lambda m, x: m(x),
    "jit": lambda m, x: es.jit(m)(x),
    "checkpoint": lambda m, x: es.checkpoint(m)(x),
    "cond": lambda m, x: es.cond(jnp.array(True), m, m, x),
    "switch": lambda m, x: es.switch(jnp.array(0), [m, m], x),
    "scan": lambda m, x: es.scan(lambda c, x: (c, m(x)), None, x[:1]),
    "carried": lambda m, x: setattr(
        m, "s", es.fori_loop(0, 1, lambda i, n: (n(x), n)[1], m).s
    ),
    "fori_loop": lambda m, x: es.fori_loop(0, 1, lambda i, x: m(x), x),
    "while_loop": lambda m, x: es.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, m(c[1])), (0, x)
    ),
    "vmap": lambda m, x: es.vmap(m)(x),
    "value": lambda m, x: es.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
}


@pytest.mark.parametrize("run", RUNS)
@pairs
def test_every_transform_carries_each_to_its_place(run, pair):
    model = Model(pair(jnp.zeros(()), [jnp.zeros(()), jnp.zeros(())]))
    order = jax.tree.leaves(jax.tree.unflatten(jax.tree.structure(model), range(3)))
    assert order == [0, 1, 2]
    for outside in (lambda f: f, es.jit):
        _, new = outside(es.mutable(lambda m, x: RUNS[run](m, x)))(model, X)
        assert jax.tree.leaves(new) == [1.0, 2.0, 3.0]
        assert jax.tree.structure(new) == jax.tree.structure(model)


@pairs
def test_one_array_in_two_fields(pair):
    zero = jnp.zeros(())
    for run in RUNS.values():
        _, new = es.mutable(lambda m, x, run=run: run(m, x))(Model(pair(zero, zero)), X)
        assert jax.tree.leaves(new) == [1.0, 2.0]


@pairs
def test_arguments_and_results(pair):
    tree = pair(X, 2 * X)
    total = lambda t: first(t) + 10 * second(t)  # noqa: E731
    assert (es.vmap(total)(tree) == 21 * X).all()
    out = es.vmap(lambda x: pair(x, 2 * x))(X)
    assert (total(out) == 21 * X).all()
    axes = pair(0, None)
    assert es.vmap(total, in_axes=(axes,))(tree).shape == (3, 3)
    _, ys = es.scan(lambda c, t: (c, total(t)), None, tree)
    assert (ys == 21 * X).all()
    carry, _ = es.scan(lambda c, _: (pair(first(c), total(c)), None), tree, length=1)
    assert (second(carry) == 21 * X).all()
    swapped = es.cond(True, lambda t: pair(second(t), first(t)), lambda t: t, tree)
    assert (first(swapped) == 2 * X).all()


@pairs
def test_each_is_drawn_from_a_key_of_its_own(pair):
    class Lazy(es.Module):
        x: Any

    lazy = Lazy(pair(es.Initializer(jr.normal), es.Initializer(jr.normal)))
    drawn = lazy.init(0).x
    assert first(drawn) != second(drawn)


@pairs
def test_what_is_missing_is_filled_in_its_place(pair):
    class Late(es.Module):
        x: Any

        def __call__(self, x):
            self.x = pair(jnp.ones(()), jnp.full((), 2.0))

    model = Late(pair(None, jnp.zeros(()))).init(0, X)
    assert (first(model.x), second(model.x)) == (1.0, 0.0)
    model = Late(pair(jnp.zeros(()), None)).init(0, X)
    assert (first(model.x), second(model.x)) == (0.0, 2.0)


@pairs
def test_modules_in_alike_places(pair):
    class Cell(es.Module):
        n: es.State = 0.0

        def __call__(self):
            self.n = self.n + 1.0
            self.sow("n", self.n)

    class Both(es.Module):
        cells: Any

        def __call__(self):
            first(self.cells)()
            second(self.cells)()
            second(self.cells)()

    both = Both(pair(Cell(), Cell()))
    assert len(dict(es.modules(both))) == 3
    run = lambda b: es.scan(lambda c, _: (c, b()), None, length=2)  # noqa: E731
    (_, new), sown = es.capture(run)(both)
    assert (first(new.cells).n, second(new.cells).n) == (2.0, 4.0)
    assert len(sown) == 2
    assert es.tabulate(both).count("Cell") == 2
    frozen = es.freeze(both, lambda b: second(b.cells))
    assert (first(frozen.cells).frozen, second(frozen.cells).frozen) == (False, True)
