"""`es.while_loop` and `es.fori_loop`: JAX's loops, with state carried through."""

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
from loop_cases import by_fori, by_hand, Cell, LOOPS, Net
from models import Lazy

import eqx_state as es


@pytest.fixture(params=LOOPS)
def loop(request):
    return LOOPS[request.param]


def check(f, model, loop):
    """Assert that `f(model, loop)` updates state like the Python loop `by_hand`."""
    ours, expected = es.mutable(f)(model, loop), es.mutable(f)(model, by_hand)
    close(ours, expected)
    with jax.disable_jit():
        close(es.mutable(f)(model, loop), expected)
    return ours


# --- Like JAX's loops ---------------------------------------------------------------


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
    "weak type": lambda m: m.while_loop(
        lambda x: x < 9, lambda x: x + jnp.float32(2.0), 1.0
    ),
    "no step": lambda m: m.while_loop(lambda x: x < 0, lambda x: x + 1, 0),
    "nested": lambda m: m.while_loop(
        lambda c: c["a"][0] < 5,
        lambda c: {"a": (c["a"][0] + 1, None), "b": [2 * c["b"][0]]},
        {"a": (0, None), "b": [jnp.ones(2)]},
    ),
    "key": lambda m: m.fori_loop(0, 3, lambda i, k: jr.fold_in(k, i), jr.key(0)),
    "fori": lambda m: m.fori_loop(0, 4, lambda i, x: x + i, 0),
    "fori of traced": lambda m: m.fori_loop(
        jnp.array(1), jnp.array(4), lambda i, x: x + i, jnp.array(0)
    ),
    "fori of weak": lambda m: m.fori_loop(0, 3, lambda i, x: jnp.float32(2.0) * x, 1.0),
    "fori unrolled": lambda m: m.fori_loop(0, 4, lambda i, x: 2 * x, 1.0, unroll=2),
    "fori of numpy": lambda m: m.fori_loop(
        np.int32(0), np.int32(3), lambda i, x: x + i, np.int32(0)
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_on_arrays_they_equal_the_loops_of_jax(name):
    def look(tree):
        types = [getattr(x, "weak_type", type(x)) for x in jax.tree.leaves(tree)]
        return jax.tree.structure(tree), types

    ours, theirs = ARRAYS[name](es), ARRAYS[name](lax)
    assert eqx.tree_equal(ours, theirs, typematch=True)
    assert look(ours) == look(theirs)
    with jax.disable_jit():
        ours, theirs = ARRAYS[name](es), ARRAYS[name](lax)
    assert eqx.tree_equal(ours, theirs, typematch=True)


def test_values_that_are_not_arrays_pass_through():
    def body(c):
        x, f, text = c
        return f(x), f, text

    carry = es.while_loop(lambda c: c[0] < 5, body, (1.0, lambda x: 2 * x, "text"))
    assert (carry[0], carry[2]) == (8.0, "text")
    x, f = es.fori_loop(0, 2, lambda i, c: (c[1](c[0]), c[1]), (0.5, jnp.sin))
    assert f is jnp.sin
    close(x, jnp.sin(jnp.sin(0.5)))


# --- State of the functions and their closures --------------------------------------


def test_cond_fun_reads_the_state_that_body_fun_writes():
    def f(net):
        def body(x):
            net.steps = net.steps + 1
            return 2.0 * x

        return es.while_loop(lambda x: net.steps < 5, body, 1.0)

    x, new = es.mutable(f)(Net())
    assert (x, new.steps) == (32.0, 5)


def test_a_loop_without_steps_writes_nothing(loop):
    x, new = es.mutable(lambda m: loop(m, 0, 0.5))(Cell())
    assert x == 0.5
    close(new, Cell())


# --- Modules in the carry -----------------------------------------------------------


def test_a_module_in_the_carry_is_returned(loop):
    def f(net, loop):
        def body(carry):
            cell, x = carry
            return cell, cell(x)

        cell, x = loop(body, 3, (net.cell, 0.5))
        if loop is not by_hand:
            # The module that was passed in does not change.
            assert net.cell.total == 0.0
            net.cell = cell
        return x

    check(f, Net(), loop)
    _, grads = es.value_and_grad(f)(Net(), by_fori)
    close(grads, es.value_and_grad(f)(Net(), by_hand)[1])


class Weight(es.Module):
    w: es.Parameter = 1.0


class Around(es.Module):
    inner: Weight = dataclasses.field(default_factory=Weight)
    n: es.State = 0.0


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_module_without_state_may_be_at_two_places_of_the_carry(loop, is_whole):
    def f(model, loop):
        def body(carry):
            (fast, slow), x = carry
            slow_w = slow.inner.w if is_whole else slow.w
            return (fast.replace(w=fast.w + slow_w), slow), x + fast.w

        pair = model.inner, model if is_whole else model.inner
        (fast, slow), x = loop(body, 3, (pair, 0.0))
        return fast.w, slow.inner.w if is_whole else slow.w, x

    assert check(f, Around(), loop)[0] == (4.0, 1.0, 6.0)


def test_cond_fun_receives_the_module_of_the_carry():
    def f(cell):
        def body(cell):
            cell(1.0)
            return cell

        return es.while_loop(lambda cell: cell.total < 5, body, cell)

    cell, new = es.mutable(f)(Cell())
    assert (cell.total, new.total) == (5.0, 0.0)


def test_unchanged_parameters_in_the_carry_are_the_same_objects(loop):
    class Net(es.Module):
        limit: es.Parameter = 3.0
        n: es.State = 0.0

        def bumped(self):
            self.n = self.n + 1.0
            return self

    class Holder(es.Module):
        net: Net

        def __call__(self):
            # The condition reads a parameter, so JAX returns it as a new array.
            self.net = es.while_loop(lambda m: m.n < m.limit, Net.bumped, self.net)
            self.net = loop(Net.bumped, 2, self.net)

    holder = Holder(Net())
    _, new = es.mutable(holder)()
    assert new.net.n == 5.0
    assert new.net.limit is holder.net.limit


def test_the_object_in_the_closure_is_not_the_module_of_the_carry():
    def f(net, writes_both):
        def step(cell, x):
            if writes_both:
                net.cell(x)
            cell(x)
            return net.cell, None

        return es.scan(step, net.cell, jnp.ones(2))

    for writes_both, said in [
        (False, "was written in a module of the carry"),
        (True, "`cell.total` was written through the closure"),
    ]:
        with rejects(Net(), ValueError, said):
            es.mutable(f)(Net(), writes_both)


def test_a_numpy_array_that_was_put_into_a_container_cannot_be_written_in_a_loop():
    class Stats(es.Module):
        stats: es.State

        def add(self):
            self.stats = {"a": self.stats["a"] + 1.0}

    for f in (
        lambda m: es.fori_loop(0, 3, lambda i, c: (m.add(), c)[1], 0),
        lambda m: es.scan(lambda c, x: (m.add(), (c, x))[1], 0, jnp.ones(2)),
        lambda m: es.cond(True, m.add, lambda: None),
    ):

        def run(model, f=f):
            model.stats["a"] = np.ones((), np.float32)
            f(model)

        said = r"`stats\['a'\]` was changed", "numpy", "Only arrays"
        with rejects(model := Stats({"a": 0.0}), ValueError, *said):
            es.mutable(run)(model)


@pytest.mark.parametrize("is_jitted", [True, False])
def test_a_module_that_only_some_steps_write_is_returned_with_the_write(is_jitted):
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


# --- While a model is initialized ---------------------------------------------------


class Model(es.Module):
    a: Lazy = dataclasses.field(default_factory=Lazy)
    b: Lazy = dataclasses.field(default_factory=Lazy)


def carried(m, x, loop):
    def body(carry):
        a, x = carry
        return a, m.b(a(x))

    return loop(body, 2, (m.a, x))


@pytest.mark.parametrize(
    "forward",
    [lambda m, x, loop: loop(lambda x: m.b(m.a(x)), 2, x), carried],
    ids=["closure", "carried"],
)
def test_init_draws_the_same_values_inside_a_loop(forward, loop):
    ours, expected = (
        Model().init(0, jnp.ones(3), call=ft.partial(forward, loop=run))
        for run in (loop, by_hand)
    )
    assert eqx.tree_equal(ours, expected)


# --- Bad input ----------------------------------------------------------------------


def test_cond_fun_must_not_draw_from_a_module_of_the_carry():
    drop = es.nn.Dropout(0.5, key=jr.key(0))
    with rejects(drop, ValueError, "`cond_fun`", "`rng`"):
        es.mutable(
            lambda m: es.while_loop(lambda m: m(jnp.ones(())) < 0, lambda m: m, m)
        )(drop)
