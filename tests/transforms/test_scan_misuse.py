"""What `es.scan` refuses, and that nothing is lost or half-written then."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import rejects

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError
XS = jnp.array([1.0, 2.0, 4.0])
WEIGHTS, MEANS = jnp.array([0.5, 1.0, -2.0]), jnp.array([0.0, 1.0, 2.0])


class Layer(es.Module):
    weight: es.Parameter
    mean: es.BatchStat = 0.0

    def __call__(self, x):
        self.mean = self.mean + x
        return jnp.tanh(self.weight * x + self.mean)


class Owner(es.Module):
    cell: Layer = dataclasses.field(default_factory=lambda: Layer(0.5, 1.0))
    steps: es.State = 0


class Pair(NamedTuple):
    carry: Any
    y: Any


def test_a_body_that_changes_shape_or_dtype_of_state():
    owner = Owner()

    def run(value):
        def f(owner):
            def step(c, x):
                owner.cell.mean = value
                return c, x

            return es.scan(step, 0.0, XS)

        return es.mutable(f)

    for value, text in (
        (jnp.zeros(3), r"`f32\[\]` and is now `f32\[3\]`"),
        (jnp.zeros((), jnp.int32), r"`f32\[\]` and is now `i32\[\]`"),
    ):
        with rejects(owner, ValueError, r"`cell\.mean`", text):
            run(value)(owner)
    with rejects(owner, ValueError, r"`cell\.mean`", "complex"):
        run(1.0j)(owner)


RETURNS = {
    "an older copy": lambda owner, cell, old: old,
    "the one of the closure": lambda owner, cell, old: owner.cell,
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_body_that_writes_to_the_carry_and_returns_another(name):
    def f(owner):
        def step(cell, x):
            old = cell.replace()
            cell(x)
            return RETURNS[name](owner, cell, old), x

        return es.scan(step, owner.cell, XS)

    owner = Owner()
    with rejects(owner, ValueError, r"`cell\.mean`", "Return the module"):
        es.mutable(f)(owner)


def test_a_carry_that_changes():
    def f(change):
        return lambda owner: es.scan(lambda c, x: (change(c), x), (owner, 0.0), XS)

    owner = Owner()
    for change, text in (
        (lambda c: (c[0], c[1], 0.0), "pytree structure"),
        (lambda c: (c[0], jnp.ones(2)), r"\[1\] has type float32\[\]"),
        (lambda c: (c[0].eval(), c[1]), "pytree structure"),
        (lambda c: (c[0].replace(steps=jnp.zeros(2)), c[1]), r"\.steps has type int"),
    ):
        with rejects(owner, TypeError, text):
            es.mutable(f(change))(owner)


@pytest.mark.parametrize(
    ("old", "new"),
    [(jnp.sin, jnp.cos), ("a", "b"), (jnp.sin, None), (None, jnp.sin)],
    ids=["function", "string", "to none", "from none"],
)
def test_a_static_value_of_the_carry_that_changes(old, new):
    with pytest.raises(TypeError, match="not an array|pytree structure"):
        es.scan(lambda c, x: ((c[0] + x, new), None), (0.0, old), XS)


@pytest.mark.parametrize("pair", [list, Pair._make, lambda x: {"a": x[0], "b": x[1]}])
def test_a_body_that_returns_another_pair(pair):
    # `lax.scan` takes such a pair, too, but since JAX 0.12 not any more.
    ours = es.scan(lambda c, x: pair((c + x, c)), 0.0, XS)
    expected = lax.scan(lambda c, x: (c + x, c), 0.0, XS)
    assert eqx.tree_equal(ours, pair(expected))


@pytest.mark.parametrize(
    ("out", "shown"),
    [(0.0, "0.0"), ((1.0, XS, 3.0), r"\(1.0, f32\[3\], 3.0\)"), (None, "None")],
    ids=["number", "three", "none"],
)
def test_a_body_that_returns_no_pair(out, shown):
    match = f"returns a pair.*this one returned `{shown}`.*return carry, None"
    with pytest.raises(TypeError, match=match):
        es.scan(lambda c, x: out, 0.0, XS)


def test_what_has_no_axis_to_scan_over():
    f = es.mutable(lambda m: es.scan(lambda c, layer: (layer(c), None), 0.5, m))
    with rejects(model := Layer(WEIGHTS), ValueError, "`mean` has shape"):
        f(model)
    with rejects(
        model := Layer(WEIGHTS, MEANS[:2]),
        ValueError,
        "leading axis sizes: (3, 2|2, 3)",
    ):
        f(model)
    with pytest.raises(ValueError, match="no leading axis to scan over: 1.0"):
        es.scan(lambda c, x: (c, x), 0.0, 1.0, length=3)


def test_one_module_twice_in_the_carry():
    with rejects(model := Layer(1.0), ValueError, r"`\[0\]` and `\[1\]`"):
        es.mutable(lambda m: es.scan(lambda c, _: (c, None), (m, m), XS))(model)


def test_an_exception_in_the_body_leaves_nothing_half_written():
    def f(owner):
        def step(c, x):
            owner.cell(x)
            raise KeyError("half-way")

        with pytest.raises(KeyError, match="half-way"):
            es.scan(step, 0.0, XS)
        assert owner.cell.mean == 1.0
        return es.scan(lambda c, x: (c, owner.cell(x)), 0.0, XS)

    _, new = es.mutable(f)(Owner())
    assert new.cell.mean == 8.0


def test_objects_kept_from_the_body_are_closed():
    kept = []

    def f(owner, layers):
        def step(cell, layer):
            kept.extend([cell, layer])
            return cell, owner.cell(1.0)

        return es.scan(step, owner.cell, layers)

    es.mutable(lambda models: f(*models))((Owner(), Layer(WEIGHTS, MEANS)))
    for module in kept:
        with pytest.raises(FROZEN, match="closed"):
            module.mean = 0.0


def test_a_write_to_the_carry_after_the_loop_is_not_lost_silently():
    kept = []

    def f(owner):
        es.scan(lambda c, x: (kept.append(c) or c, x), owner.cell, XS)
        kept[0].mean = 3.0

    owner = Owner()
    with rejects(owner, (ValueError, FROZEN), r"cell\.mean|Layer\.mean"):
        es.mutable(f)(owner)


def test_a_model_that_is_not_initialized():
    class Lazy(es.Module):
        weight: es.Parameter

        def __init__(self):
            self.weight = es.Initializer(jr.normal)

        def __call__(self, x):
            return self.weight * x

    def f(lazy):
        return es.scan(lambda c, x: (c, lazy(x)), 0.0, XS)

    for use in (
        lambda lazy: es.scan(lambda c, x: (c, x), lazy, XS),
        lambda lazy: es.scan(lambda c, x: (c, x), 0.0, lazy),
        es.mutable(f),
    ):
        with pytest.raises(es.NotInitializedError, match=r"weight"):
            use(Lazy())


def test_the_place_of_what_is_no_array_in_the_carry_is_named():
    match = r"body of a loop.*at `\[1\]`.*not an array.*or return it unchanged"
    with pytest.raises(TypeError, match=match):
        es.scan(lambda c, x: ((c[0] + x, "b"), x), (0.0, "a"), XS)


def test_a_stack_with_a_scalar_in_it_is_named():
    class Cell(es.Module):
        weight: es.Parameter = 2.0

        def __call__(self, x):
            return self.weight * x

    class Stack(es.Module):
        layers: Cell

        def __call__(self, x):
            return es.scan(lambda x, cell: (cell(x), None), x, self.layers)

    stack = Stack(Cell())
    with rejects(stack, ValueError, r"`layers\.\w+` has shape \(\)", "eqx.filter_vmap"):
        es.mutable(stack)(1.0)
