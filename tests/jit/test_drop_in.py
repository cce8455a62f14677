"""`es.jit` in place of `eqx.filter_jit`: behavior that users rely on."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jit_cases import X

import eqx_state as es


@pytest.fixture(params=[es.jit, eqx.filter_jit], ids=["es", "eqx"])
def jit(request):
    return request.param


# --- Traces ---------------------------------------------------------------------------


def test_a_closure_is_a_constant_and_a_function_among_the_arguments_is_static(jit):
    layer, traces = eqx.nn.Linear(3, 3, key=jr.key(0)), []

    def apply(x):
        return layer(x)

    @jit
    def f(apply, x):
        traces.append(1)
        return apply(x) + layer(x), apply

    expected = 2 * layer(X)
    for _ in range(3):
        y, same = f(apply, X)
        assert jnp.allclose(y, expected)
        assert same is apply
        layer = eqx.nn.Linear(3, 3, key=jr.key(1))
    assert len(traces) == 1


def test_methods_are_traced_for_their_object(jit):
    traces = []

    class Adder(eqx.Module):
        increment: Any

        def __call__(self, x):
            traces.append(1)
            return x + self.increment

    for increment, total in [
        (1, 1),
        (1.5, 2),
        (jnp.array(2.0), 3),
        (jnp.array(3.0), 3),
    ]:
        for _ in range(2):
            assert jit(Adder(increment))(jnp.array(1.0)) == 1.0 + increment
        assert len(traces) == total


# --- Stages ---------------------------------------------------------------------------


@pytest.mark.parametrize("donate", ["all", "all-except-first", "none"])
def test_a_program_is_compiled_ahead_for_static_values(jit, donate):
    lowered = jit(lambda x, y: 2 * x + y, donate=donate).lower(jnp.array(3), 4)
    assert "multiply" in lowered.as_text()
    assert lowered.compile()(jnp.array(3), 4) == 10


class Cell(eqx.Module):
    weight: Any
    tail: Any


def chain(depth):
    cell = None
    for i in range(depth):
        cell = Cell(jnp.full((), float(i)), cell)
    return cell


def nested(make, depth):
    x = X
    for _ in range(depth):
        x = make(x)
    return x


DEEP = {
    "lists": nested(lambda x: [x], 210),
    "modules": chain(250),
}


@pytest.mark.parametrize("name", DEEP)
def test_trees_may_be_deep(jit, name):
    traces = []

    @jit
    def f(tree, x):
        traces.append(1)
        return jax.tree.map(lambda leaf: leaf + x, tree), tree

    for x in (jnp.array(1.0), jnp.array(2.0)):
        moved, same = f(DEEP[name], x)
        assert eqx.tree_equal(same, DEEP[name])
        expected = jax.tree.map(lambda leaf, x=x: leaf + x, DEEP[name])
        assert eqx.tree_equal(moved, expected, typematch=True)
    assert len(traces) == 1


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_static_values_that_compare_equal_have_different_programs():
    class Holder(es.Module):
        value: Any = eqx.field(static=True)

    f = es.jit(lambda holder: str(holder.value))
    for a, b in (
        (np.datetime64(1, "D"), np.datetime64(1, "s")),
        (slice(1), slice(True)),
    ):
        assert (f(Holder(a)), f(Holder(b))) == (str(a), str(b))
