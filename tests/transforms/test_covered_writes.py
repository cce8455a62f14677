"""A write through a closure that a returned copy of the module would undo."""

import jax.numpy as jnp
import pytest
from helpers import rejects

import eqx_state as es


class Cell(es.Module):
    w: es.Parameter = 2.0
    n: es.State = 0

    def __call__(self, x):
        self.n = self.n + 1
        return self.w * x


class Inner(es.Module):
    cell: Cell

    def __call__(self, x):
        return self.cell(x)


class Net(es.Module):
    inner: Inner
    other: Cell

    def __init__(self):
        self.inner = Inner(Cell())
        self.other = Cell()


XS = jnp.ones(3)


def scanned(f, module):
    return es.scan(lambda c, x: f(c, x), module, XS)


def looped(f, module):
    return es.fori_loop(0, 3, lambda i, c: f(c, 1.0)[0], module)


def in_while(f, module):
    def body(c):
        return c[0] + 1, f(c[1], 1.0)[0]

    return es.while_loop(lambda c: c[0] < 3, body, (0, module))


TRANSFORMS = {
    "scan": scanned,
    "fori_loop": looped,
    "while_loop": in_while,
    "cond": lambda f, m: es.cond(True, lambda m: f(m, 1.0), lambda m: (m, 2.0), m),
    "switch": lambda f, m: es.switch(0, [lambda m: f(m, 1.0)], m),
    "jit": lambda f, m: es.jit(f)(m, 1.0),
    "vjp": lambda f, m: es.vjp(f, m, 1.0)[0],
    "jvp": lambda f, m: es.jvp(f, (m, 1.0), (None, 1.0))[0],
    "checkpoint": lambda f, m: es.checkpoint(f)(m, 1.0),
    "vmap": lambda f, m: es.vmap(f, (None, None), axis_size=2)(m, 1.0),
    "mutable": lambda f, m: es.mutable(lambda m: f(m, 1.0)[1])(m),
    "capture": lambda f, m: es.capture(lambda m: f(m, 1.0)[1])(m),
}
LOOPS = ("scan", "fori_loop", "while_loop")
# The module that is passed, and the one that the function writes through its closure.
PLACES = {
    "itself": (lambda net: net.inner, lambda net: net.inner),
    "a part": (lambda net: net.inner, lambda net: net.inner.cell),
    "in a list": (lambda net: [XS, net.inner.cell], lambda net: net.inner),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("place", PLACES)
def test_a_write_that_the_returned_copy_would_undo_is_an_error(transform, place):
    passed, written = PLACES[place]

    def run(net):
        return TRANSFORMS[transform](
            lambda module, x: (module, written(net)(x)), passed(net)
        )

    fragments = r"`inner\.cell\.n` was written through the closure", "# right"
    with rejects(net := Net(), ValueError, *fragments):
        es.mutable(run)(net)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_write_to_a_different_module_is_kept(transform):
    def run(net):
        call = lambda module, x: (module, net.other(x))  # noqa: E731
        TRANSFORMS[transform](call, net.inner)

    _, new = es.mutable(run)(Net())
    steps = 3 if transform in LOOPS else 1
    assert (new.other.n, new.inner.cell.n) == (steps, 0)


def test_a_write_of_both_is_an_error():
    def run(net):
        return es.scan(lambda c, x: (c, c(x) + net.inner(x)), net.inner, XS)

    with rejects(net := Net(), ValueError, r"`inner\.cell\.n` was written"):
        es.mutable(run)(net)


def test_the_object_instead_of_the_copy_in_the_carry_is_an_error_that_names_it():
    def run(net):
        def step(cell, x):
            y = net.inner(x)
            return net.inner, y

        net.inner, ys = es.scan(step, net.inner, XS)

    with rejects(net := Net(), ValueError, r"`inner\.cell\.n` was written"):
        es.mutable(run)(net)


def test_reading_the_object_beside_its_copy_is_no_error():
    def run(net):
        def step(cell, x):
            return cell, cell(x) + net.inner.cell.w

        net.inner, ys = es.scan(step, net.inner, XS)
        return ys

    ys, new = es.mutable(run)(Net())
    assert ys.tolist() == [4.0, 4.0, 4.0]
    assert new.inner.cell.n == 3
