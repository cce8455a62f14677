"""Outside `jit`, loops and branches trace their functions on each call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_state as es


XS = jnp.arange(1.0, 4.0)


class Cell(es.Module):
    weight: es.Parameter
    total: es.State

    def __call__(self, x):
        self.total = self.total + self.weight
        return x + self.weight


# Each calls one transform, which runs the function or may run it.
WAYS = {
    "scan": lambda f: es.scan(lambda c, x: (f(c), None), 0.0, XS[:1])[0],
    "while_loop": lambda f: es.while_loop(lambda c: c < 0.5, f, 0.0),
    "fori_loop": lambda f: es.fori_loop(0, 1, lambda i, c: f(c), 0.0),
    "cond": lambda f: es.cond(True, f, lambda x: x, 0.0),
    "switch": lambda f: es.switch(0, [f, lambda x: x], 0.0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_scope", [False, True])
def test_a_function_is_traced_at_each_call(way, in_scope):
    traces = []
    scale = 1.0

    def f(x):
        traces.append(isinstance(x, jax.core.Tracer))
        return scale * (cell(x) if in_scope else x + cell.weight)

    def run(given):
        nonlocal cell
        cell = given
        return WAYS[way](f)

    for scale, weight in ((1.0, 1.0), (2.0, 1.0), (1.0, 3.0)):
        cell = Cell(weight, 0.0)
        traces.clear()
        out, new = es.mutable(run)(cell)
        assert out == scale * weight
        assert new.total == in_scope * weight
        assert traces
        assert all(traces)


def test_a_comparison_of_parameters_is_traced():
    cell = Cell(1.0, 0.0)

    def step(c, x):
        return (c + x if cell.weight > 0 else c), None

    for scan in (es.scan, lax.scan):
        with pytest.raises(jax.errors.TracerBoolConversionError, match="boolean"):
            scan(step, 0.0, XS)


@pytest.mark.parametrize("bound", [int, np.int32, jnp.array])
def test_a_loop_between_known_bounds_can_be_differentiated(bound):
    def f(x):
        return es.fori_loop(bound(1), bound(4), lambda i, c: c * i, x)

    assert jax.grad(f)(2.0) == 6.0
