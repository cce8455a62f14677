"""`es.scan`: `jax.lax.scan`, with state carried from step to step.

Tests compare it with a Python loop inside a scope, which writes state in place.
"""

import dataclasses
import inspect

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, rejects
from models import Lazy

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError
XS = jnp.array([1.0, 2.0, 4.0])


class Cell(es.Module):
    weight: es.Parameter = 0.5
    total: es.State = 0.0

    def __call__(self, h, x):
        self.total = self.total + x
        h = jnp.tanh(self.weight * h + x * self.total)
        return h, h * self.weight


# --- Like `jax.lax.scan` ------------------------------------------------------------


def test_the_signature_is_that_of_jax():
    ours, theirs = (inspect.signature(f).parameters for f in (es.scan, lax.scan))
    assert list(ours) == list(theirs)
    for name in ours:
        assert (ours[name].kind, ours[name].default) == (
            (theirs[name].kind, theirs[name].default)
        )


def add(c, x):
    return c + x, c * x


ARRAYS = {
    "array": lambda scan: scan(add, jnp.float32(1.0), XS),
    "number": lambda scan: scan(add, 0.0, XS),
    "integer": lambda scan: scan(lambda c, _: (c + 1, c), 0, None, length=3),
    "weak type": lambda scan: scan(lambda c, x: (jnp.float32(2.0) * x, c), 0.0, XS),
    "nested": lambda scan: scan(
        lambda c, x: ({"a": (c["a"][0] + x[0], None)}, [x, c]),
        {"a": (0.0, None)},
        (XS, {"b": jnp.ones((3, 2)), "c": None}),
    ),
    "reverse": lambda scan: scan(add, 0.0, XS, reverse=True),
    "unroll": lambda scan: scan(add, 0.0, XS, unroll=2),
    "numpy": lambda scan: scan(add, np.float32(1.0), np.arange(3, dtype=np.float32)),
    "zero length": lambda scan: scan(add, 0.0, jnp.zeros((0,))),
    "keys": lambda scan: scan(
        lambda c, k: (c, jr.normal(k)), 0.0, jr.split(jr.key(0), 3)
    ),
}
# Without `jit`, JAX rejects a loop without steps.
JITTED_ONLY = {"zero length"}


@pytest.mark.parametrize("name", ARRAYS)
def test_on_arrays_it_equals_the_scan_of_jax(name):
    run = ARRAYS[name]

    def look(tree):
        types = [getattr(x, "weak_type", type(x)) for x in jax.tree.leaves(tree)]
        return jax.tree.structure(tree), types

    def check(ours, theirs):
        assert eqx.tree_equal(ours, theirs, typematch=True)
        assert look(ours) == look(theirs)

    check(run(es.scan), run(lax.scan))
    if name not in JITTED_ONLY:
        with jax.disable_jit():
            check(run(es.scan), run(lax.scan))


def test_values_that_are_not_arrays_pass_through():
    def step(c, x):
        h, f = c
        return (f(h) + x[0], f), (h, x[1], "text")

    (h, f), (hs, g, text) = es.scan(step, (0.0, jnp.sin), (XS, jnp.cos))
    expected, expected_ys = lax.scan(lambda h, x: (jnp.sin(h) + x, h), 0.0, XS)
    assert (f, g, text) == (jnp.sin, jnp.cos, "text")
    close((h, hs), (expected, expected_ys))


# --- State of the function and its closure ------------------------------------------


@pytest.mark.parametrize("options", [{"reverse": True}, {"unroll": 2}], ids=str)
def test_options_with_state(options):
    ours = es.mutable(lambda m: es.scan(m, 0.0, XS, **options))(Cell())
    with jax.disable_jit():
        close(ours, es.mutable(lambda m: es.scan(m, 0.0, XS, **options))(Cell()))
    assert ours[1].total == 7.0


def test_a_loop_without_steps_does_not_change_state():
    _, new = es.mutable(lambda m: es.scan(m, 0.0, jnp.zeros((0,))))(Cell())
    close(new, Cell())


# --- Modules in `xs` ----------------------------------------------------------------


def tanh(x):
    return jnp.tanh(x)


class Layer(es.Module):
    weight: es.Parameter
    mean: es.BatchStat = 0.0
    activation: object = tanh

    def __call__(self, x):
        self.mean = self.mean + x
        return self.activation(self.weight * x + self.mean)


class Net(es.Module):
    layers: Layer
    steps: es.State = 0
    scale: es.Parameter = 0.5

    def step(self, x, layer):
        self.steps = self.steps + 1
        y = layer(self.scale * x)
        return y, y * self.scale

    def __call__(self, x):
        return es.scan(self.step, x, self.layers)


WEIGHTS, MEANS = jnp.array([0.5, 1.0, -2.0]), jnp.array([0.0, 1.0, 2.0])


def stack():
    return Layer(WEIGHTS, MEANS)


def by_hand(weights, means, scale, x):
    ys, new = [], []
    for weight, mean in zip(weights, means, strict=True):
        new.append(mean + scale * x)
        x = jnp.tanh(weight * scale * x + new[-1])
        ys.append(x * scale)
    return x, jnp.stack(ys), jnp.stack(new)


def test_a_stack_of_layers_is_scanned_and_written_back_stacked():
    # The stack is a field of `self`, and the body is a bound method of `self`.
    (x, ys), new = es.mutable(Net(stack()))(0.5)
    expected = by_hand(WEIGHTS, MEANS, 0.5, 0.5)
    close(x, expected[0])
    close(ys, expected[1])
    close(new.layers.mean, expected[2])
    assert new.steps == 3
    assert new.layers.activation is tanh
    assert eqx.tree_equal(new.layers.weight, WEIGHTS)


def test_a_stack_in_a_container():
    def f(layer, xs):
        def step(c, tree):
            return tree["b"][0](c + tree["a"]), tree["a"]

        return es.scan(step, 0.5, {"a": xs, "b": (layer, None, jnp.tanh)})

    (x, xs), new = es.mutable(f)(stack(), XS)
    expected, means = 0.5, []
    for weight, mean, x_ in zip(WEIGHTS, MEANS, XS, strict=True):
        means.append(mean + expected + x_)
        expected = jnp.tanh(weight * (expected + x_) + means[-1])
    close((x, new.mean), (expected, jnp.stack(means)))
    assert eqx.tree_equal(xs, XS)


def test_a_stack_outside_a_scope():
    class Plain(es.Module):
        weight: es.Parameter
        activation: object

        def __call__(self, x):
            return self.activation(self.weight * x)

    x, _ = es.scan(lambda x, f: (f(x), None), 0.5, Plain(WEIGHTS, jnp.sin))
    expected = 0.5
    for weight in WEIGHTS:
        expected = jnp.sin(weight * expected)
    close(x, expected)
    layers = stack()
    with rejects(layers, FROZEN, r"Layer\.mean"):
        es.scan(lambda x, layer: (layer(x), None), 0.5, layers)


# --- Modules in `init` --------------------------------------------------------------


class Owner(es.Module):
    cell: Layer = dataclasses.field(default_factory=lambda: Layer(0.5, 1.0))
    steps: es.State = 0


def step(cell, x):
    return cell, cell(x)


def body(carry, x):
    cell, n = carry["cell"], carry["n"]
    return {"cell": cell, "n": n + 1}, cell(x)


def by_steps(cell, xs):
    ys = []
    for x in xs:
        y, cell = es.mutable(cell)(x)
        ys.append(y)
    return cell, jnp.stack(ys)


def test_a_module_in_init_is_returned_in_the_carry():
    def f(owner, xs):
        carry, ys = es.scan(body, {"cell": owner.cell, "n": 0}, xs)
        assert owner.cell.mean == 1.0
        return carry, ys

    (carry, ys), new = es.mutable(f)(Owner(), XS)
    cell, expected = by_steps(Owner().cell, XS)
    close(ys, expected)
    close(carry["cell"].mean, cell.mean)
    assert carry["n"] == 3
    assert eqx.tree_equal(new, Owner())


def test_the_returned_module_may_be_carried_and_written_again():
    def f(owner, xs, assign):
        cell, _ = es.scan(step, owner.cell, xs)
        cell, ys = es.scan(step, cell, xs)
        y = cell(1.0)
        if assign:
            owner.cell = cell
        return ys, y

    (ys, y), new = es.mutable(f)(Owner(), XS, assign=True)
    cell, _ = by_steps(Owner().cell, XS)
    cell, expected = by_steps(cell, XS)
    close(ys, expected)
    expected, cell = es.mutable(cell)(1.0)
    close(y, expected)
    close(new.cell.mean, cell.mean)
    with rejects(Owner(), ValueError, r"`cell\.mean` was written"):
        es.mutable(f)(Owner(), XS, assign=False)


def test_the_closure_sees_the_original_module_and_the_body_a_copy():
    def f(owner, xs):
        def step(cell, x):
            cell.mean = cell.mean + x
            return cell, owner.cell.mean

        return es.scan(step, owner.cell, xs)

    (cell, seen), new = es.mutable(f)(Owner(), XS)
    assert cell.mean == 8.0
    assert seen.tolist() == [1.0, 1.0, 1.0]
    assert new.cell.mean == 1.0


# --- While a model is initialized ---------------------------------------------------


class Model(es.Module):
    a: Lazy = dataclasses.field(default_factory=Lazy)
    b: Lazy = dataclasses.field(default_factory=Lazy)
    layers: Layer = dataclasses.field(
        default_factory=lambda: Layer(jnp.ones(2), jnp.zeros((2, 3)))
    )

    def step(self, x, _=None):
        return self.b(self.a(x)), None


def carried(m, x):
    def step(carry, _):
        a, x = carry
        return (a, m.b(a(x))), None

    return es.scan(step, (m.a, x), None, length=2)


def static_xs(m, x):
    def step(x, xs):
        scale, f = xs
        return f(m.step(scale * x)[0]), None

    return es.scan(step, x, (jnp.ones((2, 3)), tanh))


FORWARD = {
    "closure": lambda m, x: es.scan(lambda x, _: m.step(x), x, jnp.ones((2, 3))),
    "carried": carried,
    "static xs": static_xs,
    "no steps, of rows": lambda m, x: es.scan(
        lambda x, row: m.step(row), x, jnp.zeros((0, 3))
    ),
    "a stack": lambda m, x: es.scan(lambda x, f: m.step(f(x)), x, m.layers),
    "vmap": lambda m, x: es.scan(
        lambda x, _: (es.vmap(m.step)(x)[0], None), x[None], jnp.ones(2)
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_init_draws_the_same_values_inside_a_loop(name):
    expected = Model().init(0, jnp.ones(3), call=lambda m, x: m.step(x))
    forward = FORWARD[name]
    assert eqx.tree_equal(Model().init(0, jnp.ones(3), call=forward), expected)


def test_a_module_after_other_leaves_in_a_carry_is_identified():
    class Two(es.Module):
        weight: es.Parameter = 2.0
        count: es.State = 0
        seen: es.State = 0.0

        def __call__(self, x):
            self.count = self.count + 1
            self.seen = self.seen + x
            return self.weight * x

    def body(carry, x):
        total, text, module, rest = carry
        return (total + module(x), text, module, rest), None

    def f(model, xs):
        carry, _ = es.scan(body, (xs[0], "text", model["b"], [xs[1]]), xs)
        weight = model["b"].weight
        model["b"] = carry[2]
        return carry[0], carry[2].weight is weight

    (total, is_same), new = es.mutable(f)({"a": jnp.ones(2), "b": Two()}, XS)
    assert total == 15.0
    assert is_same  # an unchanged array is returned as the same object
    assert (new["b"].count, new["b"].seen) == (3, 7.0)


# --- Bad input ----------------------------------------------------------------------


@pytest.mark.parametrize("pair", [list, lambda x: {"a": x[0], "b": x[1]}])
def test_a_body_may_return_a_different_pair_than_a_tuple(pair):
    # `lax.scan` accepts such a pair as well, but not since JAX 0.12.
    ours = es.scan(lambda c, x: pair((c + x, c)), 0.0, XS)
    assert eqx.tree_equal(ours, pair(lax.scan(lambda c, x: (c + x, c), 0.0, XS)))


def test_one_module_twice_in_the_carry():
    with rejects(model := Layer(1.0), ValueError, r"`\[0\]` and `\[1\]`"):
        es.mutable(lambda m: es.scan(lambda c, _: (c, None), (m, m), XS))(model)


def test_the_error_for_a_carry_that_is_not_an_array_names_its_path():
    match = r"body of a loop.*at `\[1\]`.*not an array.*or return it unchanged"
    with pytest.raises(TypeError, match=match):
        es.scan(lambda c, x: ((c[0] + x, "b"), x), (0.0, "a"), XS)
