"""`es.while_loop(..., max_steps=)`: a loop that JAX can differentiate in reverse mode.

Tests compare it with a Python loop inside a scope, which writes state in place.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, rejects, reuses_keys

import eqx_state as es


pytestmark = pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="`eqx.error_if` fails under the leak check, also in `eqx.filter_jit`",
)


class Cell(es.Module):
    w: es.Parameter
    rng: es.Rng
    total: es.State = 0.0
    steps: es.State = 0

    def __call__(self, x):
        self.steps = self.steps + 1
        self.total = self.total + self.w * x
        self.rng, key = jr.split(self.rng)
        return self.w * x + jr.uniform(key) + 0.1 * self.total


def is_small(x):
    return x < 100


def by_hand(cell, x):
    """The loop, and the state after it, which gradients flow through as well."""
    for _ in range(STEPS):
        x = cell(x)
    return x + cell.total


def by_closure(cell, x, max_steps):
    x = es.while_loop(is_small, lambda x: cell(x), x, max_steps=max_steps)
    return x + cell.total


def by_module(cell, x, max_steps):
    return es.while_loop(is_small, cell, x, max_steps=max_steps) + cell.total


def by_carry(cell, x, max_steps):
    def body(carry):
        cell, x = carry
        x = cell(x)
        return cell, x

    first = cell, x
    cell, x = es.while_loop(lambda c: is_small(c[1]), body, first, max_steps=max_steps)
    return x + cell.total


STEPS = 7
LOOPS = [by_closure, by_module, by_carry]


@reuses_keys
@pytest.mark.parametrize(("max_steps", "key"), [(STEPS, jr.key), (100, jr.PRNGKey)])
@pytest.mark.parametrize("loop", LOOPS)
def test_value_state_keys_and_gradients_are_those_of_a_python_loop(
    loop, max_steps, key
):
    cell, x = Cell(1.5, key(1)), jnp.array(2.0)
    run = es.value_and_grad(by_hand, argnums=(0, 1))
    (y, (new, _)), grads = run(cell, x)
    assert new.steps == STEPS

    def bounded(cell, x):
        return loop(cell, x, max_steps)

    for jit in (lambda f: f, es.jit):
        run = jit(es.value_and_grad(bounded, argnums=(0, 1)))
        (y_, (new_, _)), grads_ = run(cell, x)
        close((y_, grads_), (y, grads))
        if loop is not by_carry:  # the carry's module is a new one
            close(new_, new)


@reuses_keys
@pytest.mark.parametrize("jit", [lambda f: f, es.jit, eqx.filter_jit])
def test_a_limit_that_is_reached_too_early_is_an_error(jit):
    run = jit(es.value_and_grad(lambda cell: by_closure(cell, 2.0, STEPS - 1)))
    cell = Cell(1.5, jr.key(1))
    with rejects(cell, eqx.EquinoxRuntimeError, "max_steps=6.*still true after 6 st"):
        run(cell)


def test_lanes_may_take_different_numbers_of_steps():
    def f(w, x, max_steps=9):
        return es.while_loop(is_small, lambda x: w * x, x, max_steps=max_steps)

    xs, steps = jnp.array([1.0, 20.0, 200.0]), jnp.array([7.0, 3.0, 0.0])
    for vmap in (jax.vmap, es.vmap):
        ys = vmap(f, (None, 0))(2.0, xs)
        close(ys, xs * 2**steps)
        grads = vmap(jax.grad(f), (None, 0))(2.0, xs)
        close(grads, steps * xs * 2 ** (steps - 1))
        with pytest.raises(eqx.EquinoxRuntimeError, match="max_steps=5"):
            vmap(lambda x: f(2.0, x, 5))(xs)


def test_the_hessian_but_no_forward_mode():
    def f(x):
        return es.while_loop(is_small, lambda x: x * x, x, max_steps=5)

    x = jnp.array(2.0)  # x⁸
    close(jax.hessian(f)(x), 56 * x**6)
    with pytest.raises(TypeError, match="forward-mode"):
        es.jvp(f, (x,), (1.0,))


@reuses_keys
def test_a_carry_of_keys_alone():
    def body(key):
        return jr.split(key)[0]

    done = lambda key: jr.uniform(jr.clone(key)) < 0.8  # noqa: E731
    key = es.while_loop(done, body, jr.key(0), max_steps=99)
    assert key == es.while_loop(done, body, jr.key(0))


@pytest.mark.parametrize("max_steps", [0, -1, 2.0, True, np.int32(3), jnp.array(3)])
def test_the_limit_is_a_python_integer(max_steps):
    with pytest.raises(ValueError, match=r"max_steps=.*a Python integer, at least 1"):
        es.while_loop(is_small, lambda x: 2 * x, 1.0, max_steps=max_steps)


def test_on_the_devices_of_a_mesh_the_error_shows_a_scan():
    mesh, spec = jax.sharding.Mesh(jax.devices()[:1], "data"), jax.P("data")

    def f(x):
        return es.while_loop(lambda x: x.sum() < 3, jnp.exp, x, max_steps=9)

    with pytest.raises(NotImplementedError, match=r"(?s)max_steps=9.*es\.scan"):
        es.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.ones(1))


def test_values_cannot_be_captured_inside():
    class Loud(es.Module):
        def __call__(self, x):
            self.sow("x", x)
            return 2 * x

    def f(layer, x):
        return es.while_loop(is_small, layer, x, max_steps=9)

    with pytest.raises(ValueError, match="only the last carry leaves"):
        es.capture(f)(Loud(), 1.0)
