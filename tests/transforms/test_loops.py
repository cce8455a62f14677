"""`es.scan`, `es.while_loop` and `es.fori_loop`: JAX's loops that carry state.

Tests compare them with a Python loop inside a scope, which writes state in place. The
random programs of `tests/laws` test state and modules in loops of all kinds.
"""

import dataclasses

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


XS = jnp.array([1.0, 2.0, 4.0])


class Cell(es.Module):
    weight: es.Parameter = 0.5
    total: es.State = 0.0

    def __call__(self, x):
        self.total = self.total + x
        return jnp.tanh(self.weight * x + self.total)


class Owner(es.Module):
    cell: Cell = dataclasses.field(default_factory=Cell)
    other: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5, 1.0))


def by_hand(f, n, x):
    """The computation of the loops below, as a Python loop."""
    for _ in range(n):
        x = f(x)
    return x


def by_while(f, n, x):
    def body(carry):
        i, x = carry
        return i + 1, f(x)

    return es.while_loop(lambda carry: carry[0] < n, body, (0, x))[1]


def by_fori(f, n, x):
    return es.fori_loop(0, n, lambda i, x: f(x), x)


def by_traced_bounds(f, n, x):
    return es.fori_loop(jnp.array(3), jnp.array(3 + n), lambda i, x: f(x), x)


def by_scan(f, n, x):
    return es.scan(lambda x, _: (f(x), None), x, None, n)[0]


LOOPS = {
    "while": by_while,
    "fori": by_fori,
    "traced bounds": by_traced_bounds,
    "scan": by_scan,
}
each_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


# --- Like JAX's loops ---------------------------------------------------------------


def add(c, x):
    return c + x, c * x


ARRAYS = {
    "weak type": lambda m: m.while_loop(
        lambda x: x < 9, lambda x: x + jnp.float32(2.0), 1.0
    ),
    "no step": lambda m: m.while_loop(lambda x: x < 0, lambda x: x + 1, 0),
    "nested": lambda m: m.while_loop(
        lambda c: c["a"][0] < 5,
        lambda c: {"a": (c["a"][0] + 1, None), "b": [2 * c["b"][0]]},
        {"a": (0, None), "b": [jnp.ones(2)]},
    ),
    "fori of a key": lambda m: m.fori_loop(
        0, 3, lambda i, k: jr.fold_in(k, i), jr.key(0)
    ),
    "fori of traced": lambda m: m.fori_loop(
        jnp.array(1), jnp.array(4), lambda i, x: x + i, jnp.array(0)
    ),
    "fori of numpy": lambda m: m.fori_loop(
        np.int32(0), np.int32(3), lambda i, x: x + i, np.int32(0)
    ),
    "scan of no xs": lambda m: m.scan(lambda c, _: (c + 1, c), 0, None, length=3),
    "scan of trees": lambda m: m.scan(
        lambda c, x: ({"a": (c["a"][0] + x[0], None)}, [x, c]),
        {"a": (0.0, None)},
        (XS, {"b": jnp.ones((3, 2)), "c": None}),
    ),
    "scan reversed": lambda m: m.scan(add, 0.0, XS, reverse=True),
    "scan of keys": lambda m: m.scan(
        lambda c, k: (c, jr.normal(k)), np.float32(0.0), jr.split(jr.key(0), 3)
    ),
    # Without `jit`, JAX rejects a loop without steps.
    "zero length, only with jit": lambda m: m.scan(add, 0.0, jnp.zeros((0,))),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_on_arrays_they_equal_the_loops_of_jax(name):
    def look(tree):
        types = [getattr(x, "weak_type", type(x)) for x in jax.tree.leaves(tree)]
        return jax.tree.structure(tree), types

    ours, theirs = ARRAYS[name](es), ARRAYS[name](lax)
    assert eqx.tree_equal(ours, theirs, typematch=True)
    assert look(ours) == look(theirs)
    if "only with jit" not in name:
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

    def step(c, x):
        h, f = c
        return (f(h) + x[0], f), (h, x[1], "text")

    (h, f), (hs, g, text) = es.scan(step, (0.0, jnp.sin), (XS, jnp.cos))
    assert (f, g, text) == (jnp.sin, jnp.cos, "text")
    close((h, hs), lax.scan(lambda h, x: (jnp.sin(h) + x, h), 0.0, XS))


@pytest.mark.parametrize("pair", [list, lambda x: {"a": x[0], "b": x[1]}])
def test_a_body_may_return_a_different_pair_than_a_tuple(pair):
    # `lax.scan` accepts such a pair as well, but not since JAX 0.12.
    ours = es.scan(lambda c, x: pair((c + x, c)), 0.0, XS)
    assert eqx.tree_equal(ours, pair(lax.scan(lambda c, x: (c + x, c), 0.0, XS)))


# --- State of the functions and their closures --------------------------------------


def test_cond_fun_reads_the_state_that_body_fun_writes():
    def f(cell):
        def body(x):
            cell.total = cell.total + 1
            return 2.0 * x

        return es.while_loop(lambda x: cell.total < 5, body, 1.0)

    x, new = es.mutable(f)(Cell())
    assert (x, new.total) == (32.0, 5)


@each_loop
def test_a_loop_without_steps_writes_nothing(loop):
    x, new = es.mutable(lambda m: loop(m, 0, 0.5))(Cell())
    assert x == 0.5
    close(new, Cell())


# --- Modules in the carry -----------------------------------------------------------


class Weight(es.Module):
    w: es.Parameter = 1.0


class Around(es.Module):
    inner: Weight = dataclasses.field(default_factory=Weight)
    n: es.State = 0.0


@pytest.mark.parametrize("is_jitted", [True, False])
@each_loop
def test_state_of_the_carry_and_of_the_closure_equals_that_of_a_python_loop(
    loop, is_jitted
):
    def f(owner, loop):
        def body(carry):
            cell, x = carry
            return cell, owner.other(cell(x))

        cell, x = loop(body, 3, (owner.cell, 0.5))
        if loop is not by_hand:
            assert owner.cell.total == 0.0  # the carry is a copy
            owner.cell = cell
        return x

    with jax.disable_jit(not is_jitted):
        close(es.mutable(f)(Owner(), loop), es.mutable(f)(Owner(), by_hand))


@each_loop
def test_a_module_without_state_may_be_at_two_places_of_the_carry(loop):
    def f(model):
        def body(carry):
            (fast, slow), x = carry
            return (fast.replace(w=fast.w + slow.inner.w), slow), x + fast.w

        (fast, slow), x = loop(body, 3, ((model.inner, model), 0.0))
        return fast.w, slow.inner.w, x

    assert es.mutable(f)(Around())[0] == (4.0, 1.0, 6.0)


def test_one_module_with_state_at_two_places_of_the_carry_is_an_error():
    with rejects(model := Cell(), ValueError, r"`\[0\]` and `\[1\]`"):
        es.mutable(lambda m: es.scan(lambda c, _: (c, None), (m, m), XS))(model)


def test_cond_fun_receives_the_module_of_the_carry():
    def f(cell):
        def body(cell):
            cell(1.0)
            return cell

        return es.while_loop(lambda cell: cell.total < 5, body, cell)

    cell, new = es.mutable(f)(Cell())
    assert (cell.total, new.total) == (5.0, 0.0)


@each_loop
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


def test_a_module_after_other_leaves_in_a_carry_is_identified():
    def body(carry, x):
        total, text, module, rest = carry
        return (total + module(x), text, module, rest), None

    def f(model, xs):
        carry, _ = es.scan(body, (xs[0], "text", model["b"], [xs[1]]), xs)
        weight = model["b"].weight
        model["b"] = carry[2]
        return carry[2].weight is weight

    is_same, new = es.mutable(f)({"a": jnp.ones(2), "b": Cell()}, XS)
    assert is_same  # an unchanged array is returned as the same object
    assert new["b"].total == 7.0


def test_the_closure_sees_the_original_module_and_the_body_a_copy():
    def f(owner):
        def step(cell, x):
            cell.total = cell.total + x
            return cell, owner.cell.total

        return es.scan(step, owner.cell, XS)

    (cell, seen), new = es.mutable(f)(Owner())
    assert cell.total == 7.0
    assert seen.tolist() == [0.0, 0.0, 0.0]
    assert new.cell.total == 0.0


def test_the_object_in_the_closure_is_not_the_module_of_the_carry():
    def f(owner):
        def step(cell, x):
            cell(x)
            return owner.cell, None

        return es.scan(step, owner.cell, jnp.ones(2))

    with rejects(Owner(), ValueError, "was written in a module of the carry"):
        es.mutable(f)(Owner())


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
    layers: Weight = dataclasses.field(default_factory=lambda: Weight(jnp.ones(2)))

    def step(self, x, _=None):
        return self.b(self.a(x)), None


def carried(loop):
    def call(m, x):
        def body(carry):
            a, x = carry
            return a, m.b(a(x))

        return loop(body, 2, (m.a, x))

    return call


def static_xs(m, x):
    def step(x, xs):
        scale, f = xs
        return f(m.step(scale * x)[0]), None

    return es.scan(step, x, (jnp.ones((2, 3)), jnp.tanh))


FORWARD = {
    "while": lambda m, x: by_while(lambda x: m.step(x)[0], 2, x),
    "fori": lambda m, x: by_fori(lambda x: m.step(x)[0], 2, x),
    "while, carried": carried(by_while),
    "fori, carried": carried(by_fori),
    "scan, carried": carried(by_scan),
    "static xs": static_xs,
    "no steps, of rows": lambda m, x: es.scan(
        lambda x, row: m.step(row), x, jnp.zeros((0, 3))
    ),
    "a stack": lambda m, x: es.scan(lambda x, f: m.step(f.w * x), x, m.layers),
    "vmap": lambda m, x: es.scan(
        lambda x, _: (es.vmap(m.step)(x)[0], None), x[None], jnp.ones(2)
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_init_draws_the_same_values_inside_a_loop(name):
    expected = Model().init(0, jnp.ones(3), call=lambda m, x: m.step(x))
    assert eqx.tree_equal(Model().init(0, jnp.ones(3), call=FORWARD[name]), expected)


# --- Bad input ----------------------------------------------------------------------


def test_cond_fun_must_not_draw_from_a_module_of_the_carry():
    drop = es.nn.Dropout(0.5, key=jr.key(0))
    with rejects(drop, ValueError, "`cond_fun`", "`rng`"):
        es.mutable(
            lambda m: es.while_loop(lambda m: m(jnp.ones(())) < 0, lambda m: m, m)
        )(drop)


def test_the_error_for_a_carry_that_is_not_an_array_names_its_path():
    match = r"body of a loop.*at `\[1\]`.*not an array.*or return it unchanged"
    with pytest.raises(TypeError, match=match):
        es.scan(lambda c, x: ((c[0] + x, "b"), x), (0.0, "a"), XS)


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
