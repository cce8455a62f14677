"""`es.while_loop` and `es.fori_loop`: namesakes of JAX's, with state carried."""

import dataclasses
import functools as ft
import inspect

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, rejects
from loop_cases import by_fori, by_hand, by_traced_bounds, by_while, Cell, LOOPS, Net
from ways import WAYS

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


@pytest.fixture(params=LOOPS)
def loop(request):
    return LOOPS[request.param]


def check(f, model, loop):
    """`f(model, loop)` threads the state that the Python loop threads."""
    ours, expected = es.mutable(f)(model, loop), es.mutable(f)(model, by_hand)
    close(ours, expected)
    with jax.disable_jit():
        close(es.mutable(f)(model, loop), expected)
    return ours


# --- As JAX's -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["while_loop", "fori_loop"])
def test_the_signatures_are_those_of_jax(name):
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (getattr(es, name), getattr(lax, name))
    )
    assert ours == theirs


ARRAYS = {
    "array": lambda m: m.while_loop(lambda x: x < 9, lambda x: 2 * x, jnp.float32(1)),
    "number": lambda m: m.while_loop(lambda x: x < 9.0, lambda x: 2 * x, 1.0),
    "integer": lambda m: m.while_loop(lambda x: x < 9, lambda x: x + 1, 0),
    "bool": lambda m: m.while_loop(lambda x: x, lambda x: ~x, jnp.array(True)),
    "weak type": lambda m: m.while_loop(
        lambda x: x < 9, lambda x: x + jnp.float32(2.0), 1.0
    ),
    "no step": lambda m: m.while_loop(lambda x: x < 0, lambda x: x + 1, 0),
    "numpy": lambda m: m.while_loop(lambda x: x < 9, lambda x: 2 * x, np.float32(1.0)),
    "nested": lambda m: m.while_loop(
        lambda c: c["a"][0] < 5,
        lambda c: {"a": (c["a"][0] + 1, None), "b": [2 * c["b"][0]]},
        {"a": (0, None), "b": [jnp.ones(2)]},
    ),
    "key": lambda m: m.fori_loop(0, 3, lambda i, k: jr.fold_in(k, i), jr.key(0)),
    "fori": lambda m: m.fori_loop(0, 4, lambda i, x: x + i, 0),
    "fori of none": lambda m: m.fori_loop(0, 4, lambda i, x: x, None),
    "fori of traced": lambda m: m.fori_loop(
        jnp.array(1), jnp.array(4), lambda i, x: x + i, jnp.array(0)
    ),
    "fori of weak": lambda m: m.fori_loop(0, 3, lambda i, x: jnp.float32(2.0) * x, 1.0),
    "fori unrolled": lambda m: m.fori_loop(0, 4, lambda i, x: 2 * x, 1.0, unroll=2),
    "fori backwards": lambda m: m.fori_loop(4, 0, lambda i, x: x + i, 0),
    "fori of numpy": lambda m: m.fori_loop(
        np.int32(0), np.int32(3), lambda i, x: x + i, np.int32(0)
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_on_arrays_they_are_the_loops_of_jax(name):
    def look(tree):
        types = [getattr(x, "weak_type", type(x)) for x in jax.tree.leaves(tree)]
        return jax.tree.structure(tree), types

    ours, theirs = ARRAYS[name](es), ARRAYS[name](lax)
    assert eqx.tree_equal(ours, theirs, typematch=True)
    assert look(ours) == look(theirs)
    with jax.disable_jit():
        ours, theirs = ARRAYS[name](es), ARRAYS[name](lax)
    assert eqx.tree_equal(ours, theirs, typematch=True)


def test_derivatives_as_of_the_loops_of_jax():
    def power(m, x):
        return m.fori_loop(0, 3, lambda i, y: y * x, 1.0)

    def doubling(m, x):
        return m.while_loop(lambda y: y < 10, lambda y: 2 * y, x)

    for f, transform in (
        (power, lambda f: jax.grad(f)(1.5)),
        (power, lambda f: jax.jvp(jax.grad(f), (1.5,), (1.0,))),
        (doubling, lambda f: jax.jvp(f, (1.5,), (1.0,))),
        (doubling, lambda f: jax.vmap(f)(jnp.array([1.0, 4.0]))),
    ):
        close(transform(ft.partial(f, es)), transform(ft.partial(f, lax)))


def test_what_is_no_array_passes_through():
    def body(c):
        x, f, text = c
        return f(x), f, text

    carry = es.while_loop(lambda c: c[0] < 5, body, (1.0, lambda x: 2 * x, "text"))
    assert (carry[0], carry[2]) == (8.0, "text")
    x, f = es.fori_loop(0, 2, lambda i, c: (c[1](c[0]), c[1]), (0.5, jnp.sin))
    assert f is jnp.sin
    close(x, jnp.sin(jnp.sin(0.5)))


# --- State of the functions and their closures --------------------------------------


@pytest.mark.parametrize("name", WAYS)
def test_state_is_carried_from_step_to_step(name):
    for loop in (by_while, by_fori):
        ours, expected = (
            es.mutable(lambda m, run=run: run(WAYS[name](m), 3, 0.5))(Cell())
            for run in (loop, by_hand)
        )
        close(ours, expected)


def test_modules_themselves_are_bodies():
    class Counter(es.Module):
        count: es.State = 0

        def __call__(self, i, x):
            self.count = self.count + i
            return 2 * x

        def body(self, x):
            return self(1, x)

        def is_small(self, x):
            return x < 10

    x, new = es.mutable(lambda m: es.fori_loop(0, 4, m, 1.0))(Counter())
    assert (x, new.count) == (16.0, 6)
    x, new = es.mutable(lambda m: es.while_loop(m.is_small, m.body, 1.0))(Counter())
    assert (x, new.count) == (16.0, 4)


def test_state_is_written_before_inside_and_after(loop):
    def f(net, loop):
        net.steps = net.steps + 10
        cell = net.cell

        def body(x):
            net.steps = net.steps + 1
            return net.other(cell(x)) + net.cell.total

        x = loop(body, 3, 0.5)
        seen = (net.steps, net.cell.total, cell.total)
        net.steps = net.steps + 100
        return x, seen, loop(body, 2, x)

    (_, seen, _), new = check(f, Net(), loop)
    assert seen[0] == 13
    assert seen[1] == seen[2]
    assert new.steps == 115


def test_cond_fun_reads_the_state_that_body_fun_writes():
    def f(net):
        def body(x):
            net.steps = net.steps + 1
            return 2.0 * x

        return es.while_loop(lambda x: net.steps < 5, body, 1.0)

    x, new = es.mutable(f)(Net())
    assert (x, new.steps) == (32.0, 5)


def test_loops_in_loops(loop):
    def f(net, loop):
        def body(x):
            net.steps = net.steps + 1
            return loop(net.cell, 2, x)

        return loop(body, 2, 0.5)

    _, new = check(f, Net(), loop)
    assert new.steps == 2


def test_no_steps_write_nothing(loop):
    x, new = es.mutable(lambda m: loop(m, 0, 0.5))(Cell())
    assert x == 0.5
    close(new, Cell())


def test_keys_are_drawn_one_at_a_step():
    def f(stream, loop):
        return loop(lambda _: stream(), 3, stream())

    expected = es.mutable(f)(es.RngStream(0), by_hand)
    for loop in (by_while, by_fori):
        close(es.mutable(f)(es.RngStream(0), loop), expected)


def test_under_jit_the_body_is_traced_once(loop):
    traces = []

    def f(m, x):
        return loop(lambda x: traces.append(1) or m(x), 3, x)

    run, model = eqx.filter_jit(es.mutable(f)), Cell()
    expected = Cell()
    for _ in range(2):
        y, model = run(model, jnp.float32(0.5))
        y_, expected = es.mutable(lambda m: by_hand(m, 3, jnp.float32(0.5)))(expected)
        close((y, model), (y_, expected))
    assert len(traces) == 1


def test_gradients_through_a_loop_of_known_length():
    def loss(net, loop):
        def body(x):
            return net.other(net.cell(x))

        return loop(body, 3, 0.3) ** 2

    run = es.value_and_grad(loss)
    close(run(Net(), by_fori), run(Net(), by_hand))


def test_forward_derivatives_through_a_loop_of_unknown_length():
    def f(loop, weight):
        model = Cell(jnp.float32(1.0)).replace(weight=weight)
        x, new = es.mutable(lambda m: loop(m, 3, 0.3))(model)
        return x * new.total

    for loop in (by_while, by_traced_bounds):
        for transform in (
            lambda f: jax.jvp(f, (jnp.float32(0.5),), (1.0,)),
            lambda f: jax.vmap(f)(jnp.array([0.5, 1.0])),
        ):
            close(transform(ft.partial(f, loop)), transform(ft.partial(f, by_hand)))


def test_custom_kinds_frozen_layers_and_eval_mode():
    class Cache(es.State):
        pass

    class Keeper(es.Module):
        kept: Cache = 0.0
        count: es.State = 0

        def __call__(self, x):
            if self.training and not self.frozen:
                self.kept = self.kept + x
            return x + 1.0

    def f(m):
        return es.fori_loop(0, 3, lambda i, x: m[1](m[0](x)), 0.0)

    models = [Keeper(), Keeper().freeze()]
    x, new = es.mutable(f, kinds=Cache)(models)
    assert (x, new[0].kept, new[1].kept) == (6.0, 6.0, 0.0)
    x, new = es.mutable(f)(es.eval(models))
    assert eqx.tree_equal(new, es.eval(models))
    assert f(es.eval(models)) == 6.0  # no scope needed
    with rejects(models, FROZEN, r"Keeper\.kept"):
        f(models)
    with rejects(models, FROZEN, r"Keeper\.kept"):
        es.mutable(f, kinds=es.BatchStat)(models)


# --- Modules in the carry -----------------------------------------------------------


def test_a_module_in_the_carry_comes_back(loop):
    def f(net, loop):
        def body(carry):
            cell, x = carry
            return cell, cell(x)

        cell, x = loop(body, 3, (net.cell, 0.5))
        if loop is not by_hand:
            assert net.cell.total == 0.0  # what was passed in stays as it was
            net.cell = cell
        return x

    check(f, Net(), loop)
    _, grads = es.value_and_grad(f)(Net(), by_fori)
    close(grads, es.value_and_grad(f)(Net(), by_hand)[1])


def test_cond_fun_is_given_the_module_of_the_carry():
    def f(cell):
        def body(cell):
            cell(1.0)
            return cell

        return es.while_loop(lambda cell: cell.total < 5, body, cell)

    cell, new = es.mutable(f)(Cell())
    assert (cell.total, new.total) == (5.0, 0.0)


def test_parameters_in_the_carry_stay_the_very_arrays_that_they_are(loop):
    class Net(es.Module):
        limit: es.Parameter = 3.0
        n: es.State = 0.0

        def bumped(self):
            self.n = self.n + 1.0
            return self

    class Holder(es.Module):
        net: Net

        def __call__(self):
            # The condition reads a parameter, and so JAX returns that as a new array.
            self.net = es.while_loop(lambda m: m.n < m.limit, Net.bumped, self.net)
            self.net = loop(Net.bumped, 2, self.net)

    holder = Holder(Net())
    _, new = es.mutable(holder)()
    assert new.net.n == 5.0
    assert new.net.limit is holder.net.limit


@pytest.mark.parametrize("is_jitted", [True, False])
def test_a_module_that_only_some_steps_write_comes_back_written(is_jitted):
    class Counter(es.Module):
        n: es.State = 0

    class Net(es.Module):
        counter: Counter

        def __call__(self):
            def body(i, counter):
                def bump(counter):
                    counter.n = counter.n + 5
                    return counter

                return es.cond(i == 0, bump, lambda counter: counter, counter)

            self.counter = es.fori_loop(0, 3, body, self.counter)
            return self.counter.n

    with jax.disable_jit(not is_jitted):
        assert es.mutable(Net(Counter()))()[0] == 5
