"""Transforms in transforms, and all the ways in which a module gets into one."""

import contextlib
import dataclasses
import functools as ft

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import IS_FUZZ, keys_may_be_reused, untouched

import eqx_state as es


class Cell(es.Module):
    weight: es.Parameter
    count: es.State
    mean: es.BatchStat
    dropout: es.nn.Dropout

    def __init__(self):
        self.weight = jnp.array([0.7, -0.4])
        self.count = jnp.array(0)
        self.mean = jnp.array([0.1, 0.2])
        self.dropout = es.nn.Dropout(0.5, key=jr.key(5))

    def __call__(self, x):
        self.count = self.count + 1
        self.mean = 0.5 * self.mean + 0.5 * x
        return self.dropout(jnp.sin(self.weight * x)) - 0.1 * self.mean

    def by_hand(self, x):
        mean = 0.5 * self.mean + 0.5 * x
        rng, key = jr.split(self.dropout.rng)
        y = jnp.sin(self.weight * x)
        y = jnp.where(jr.bernoulli(key, 0.5, y.shape), 2 * y, jnp.zeros_like(y))
        dropout = self.dropout.replace(rng=rng)
        new = self.replace(count=self.count + 1, mean=mean, dropout=dropout)
        return y - 0.1 * mean, new


def call(cell, x):
    return cell(x)


def first(x):
    """An element, as outside of a `vmap` each lane has its own."""
    return jnp.ravel(x)[0]


def write(cell, new):
    cell.count, cell.mean = new.count, new.mean
    cell.dropout.rng = new.dropout.rng


# --- Any nesting --------------------------------------------------------------------
#
# Each transform makes of a function `f(cell, x) -> y`, in a scope, another one. Its
# twin makes of `g(cell, x) -> (y, cell)` another such one, with Python's loops.


def repeated(g, num=2):
    def loop(cell, x):
        for _ in range(num):
            x, cell = g(cell, x)
        return x, cell

    return loop


def scan(f):
    def step(cell, x, scale):
        y = f(cell, x * scale)
        return y, y

    def run(cell, x):
        scales = jnp.array([1.0, 0.5])
        y, ys = es.scan(ft.partial(step, cell), x, scales)
        return y + jnp.sum(ys, 0)

    return run


def scan_by_hand(g):
    def run(cell, x):
        y0, cell = g(cell, x * 1.0)
        y1, cell = g(cell, y0 * 0.5)
        return y1 + (y0 + y1), cell

    return run


def scan_of_carry(f):
    def run(cell, x):
        def step(carry, _):
            cell, x = carry
            return (cell, f(cell, x)), None

        (new, y), _ = es.scan(step, (cell, x), None, length=2)
        write(cell, new)
        return y

    return run


def while_loop(f):
    def run(cell, x):
        stop = first(cell.count) + 2

        def body(carry):
            i, x = carry
            return i + 1, f(cell, x)

        start = (first(cell.count), x)
        return es.while_loop(lambda carry: carry[0] < stop, body, start)[1]

    return run


def cond(f):
    def run(cell, x):
        def other(x):
            cell.mean = -cell.mean
            return -x

        return es.cond(first(cell.count) % 2 == 0, lambda x: f(cell, x), other, x)

    return run


def cond_by_hand(g):
    def run(cell, x):
        if first(cell.count) % 2 == 0:
            return g(cell, x)
        return -x, cell.replace(mean=-cell.mean)

    return run


def switch(f):
    def other(cell, x):
        cell.count = cell.count + 3
        return 2 * x

    return lambda cell, x: es.switch(first(cell.count) % 3, [f, other, f], cell, x)


def switch_by_hand(g):
    def run(cell, x):
        if first(cell.count) % 3 == 1:
            return 2 * x, cell.replace(count=cell.count + 3)
        return g(cell, x)

    return run


AXES = {es.State: 0, es.Rng: es.SPLIT}


def vmap(f):
    def run(cell, x):
        ys = es.vmap(lambda x: f(cell, x), axes=AXES)(jnp.stack([x, 0.5 * x]))
        return jnp.sum(ys, 0)

    return run


def vmap_by_hand(g):
    def run(cell, x):
        ys, cells = [], []
        rng, base = jr.split(cell.dropout.rng)
        for i, key in enumerate(jr.split(base)):
            dropout = cell.dropout.replace(rng=key)
            lane = cell.replace(count=cell.count[i], mean=cell.mean[i], dropout=dropout)
            y, lane = g(lane, [x, 0.5 * x][i])
            ys.append(y)
            cells.append(lane)
        count = jnp.stack([c.count for c in cells])
        mean = jnp.stack([c.mean for c in cells])
        dropout = cell.dropout.replace(rng=rng)
        return ys[0] + ys[1], cell.replace(count=count, mean=mean, dropout=dropout)

    return run


def grad(f):
    def run(cell, x):
        loss = es.value_and_grad(lambda cell, x: jnp.sum(f(cell, x)))
        (y, new), grads = loss(cell, x)
        write(cell, new)
        return jnp.sin(y) * x + grads.weight

    return run


def grad_by_hand(g):
    def run(cell, x):
        def loss(weight):
            y, new = g(cell.replace(weight=weight), x)
            return jnp.sum(y), new

        (y, new), grads = jax.value_and_grad(loss, has_aux=True)(cell.weight)
        return jnp.sin(y) * x + grads, new.replace(weight=cell.weight)

    return run


def mutable(f):
    def run(cell, x):
        y, new = es.mutable(f)(cell, x)
        write(cell, new)
        return y

    return run


TRANSFORMS = {
    "jit": (es.jit, lambda g: g),
    "checkpoint": (es.checkpoint, lambda g: g),
    "scan": (scan, scan_by_hand),
    "scan of carry": (scan_of_carry, repeated),
    "while": (while_loop, repeated),
    "fori": (
        lambda f: lambda m, x: es.fori_loop(0, 2, lambda _, x: f(m, x), x),
        repeated,
    ),
    "cond": (cond, cond_by_hand),
    "switch": (switch, switch_by_hand),
    "vmap": (vmap, vmap_by_hand),
    "grad": (grad, grad_by_hand),
    "mutable": (mutable, lambda g: g),
}


def is_possible(stack):
    """JAX has no reverse mode for `while_loop`."""
    return not ("grad" in stack and "while" in stack[stack.index("grad") :])


def check_nesting(stack):
    """The transforms of a stack, outermost first, around one cell."""
    f, g, num_lanes = call, Cell.by_hand, stack.count("vmap")
    for name in reversed(stack):
        f, g = TRANSFORMS[name][0](f), TRANSFORMS[name][1](g)

    def new_cell():
        cell = Cell()
        lanes = (2,) * num_lanes
        count = jnp.arange(2**num_lanes).reshape(lanes)
        mean = jnp.broadcast_to(cell.mean, (*lanes, 2))
        return cell.replace(count=count, mean=mean)

    x = jnp.array([0.3, -0.8])
    # JAX's check takes the keys of a branch that `vmap` runs for nothing for used.
    misjudged = "vmap" in stack and not {"cond", "switch"}.isdisjoint(stack)
    with keys_may_be_reused() if misjudged else contextlib.nullcontext():
        check_equal(es.jit(es.mutable(f))(new_cell(), x), g(new_cell(), x))


def check_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
        else:
            assert (x == y).all()


@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_one_transform_in_another(outer, inner):
    if is_possible([outer, inner]):
        check_nesting([outer, inner])


STACKS = st.lists(st.sampled_from(list(TRANSFORMS)), min_size=3, max_size=4)


@hypothesis.settings(max_examples=200 if IS_FUZZ else 12)
@hypothesis.given(STACKS.filter(is_possible).filter(lambda s: s.count("vmap") < 3))
@hypothesis.example(["grad", "jit", "scan", "vmap"])
@hypothesis.example(["jit", "scan", "vmap", "checkpoint"])
def test_three_or_four_transforms(stack):
    check_nesting(stack)


# --- How a module gets into a transform ---------------------------------------------


class Counter(es.Module):
    """Small enough to be counted by: what it returns tells the state it has seen."""

    count: es.State = 0.0

    def __call__(self, x):
        if self.training:
            self.count = self.count + 1
        return x + self.count

    def bump(self, x, by=1.0):
        self.count = self.count + by
        return x + self.count


one_lane = ft.partial(es.vmap, in_axes=None, out_axes=None, axis_size=1)
# Each calls a function of `x` twice, in itself or around itself, and returns the sum.
TWICE = {
    "jit": lambda f: lambda x: es.jit(f)(x) + es.jit(f)(x),
    "checkpoint": lambda f: lambda x: es.checkpoint(f)(x) + es.checkpoint(f)(x),
    "vmap": lambda f: lambda x: one_lane(f)(x) + one_lane(f)(x),
    "scan": lambda f: lambda x: es.scan(lambda c, _: (c + f(x), None), 0.0, None, 2)[0],
    "while_loop": lambda f: (
        lambda x: es.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(x)), (0, 0.0)
        )[1]
    ),
    "fori_loop": lambda f: lambda x: es.fori_loop(0, 2, lambda _, c: c + f(x), 0.0),
    "cond": lambda f: lambda x: es.cond(True, f, f, x) + es.cond(False, f, f, x),
    "switch": lambda f: lambda x: es.switch(0, [f], x) + es.switch(1, [f, f], x),
}
FORMS = {
    "module": lambda m: m,
    "bound method": lambda m: m.bump,
    "partial": lambda m: ft.partial(call, m),
    "partial keyword": lambda m: ft.partial(lambda x, m: m(x), m=m),
    "eqx.Partial": lambda m: eqx.Partial(call, m),
    "jax Partial": lambda m: jtu.Partial(call, m),
    "partial of a method": lambda m: ft.partial(m.bump, by=1.0),
    "closure": lambda m: lambda x: m(x),
    "nested closure": lambda m: (lambda f: lambda x: f(x))(lambda x: m(x)),
    "list in a closure": lambda m: (lambda ms: lambda x: ms["a"][0](x))({"a": [m]}),
    "default": lambda m: lambda x, m=m: m(x),
    "keyword default": lambda m: lambda x, *, m=m: m(x),
    "transform": lambda m: es.checkpoint(es.jit(m)),
    "partial of a transform": lambda m: ft.partial(es.checkpoint(call), m),
}


@pytest.mark.parametrize("transform", TWICE)
def test_every_form_of_a_module_is_reached(transform):
    for form in FORMS.values():
        f = es.mutable(lambda m, x, form=form: TWICE[transform](form(m))(x))
        y, new = f(Counter(), 0.0)
        assert (y, new.count) == (3.0, 2.0)


@pytest.mark.parametrize("transform", [es.jit, es.checkpoint, one_lane])
def test_a_module_among_the_arguments(transform):
    def f(model, x):
        a, b = model
        transform(call)(a, x)
        transform(lambda x, pair: pair["b"](pair["a"](x)))(x, {"a": a, "b": b})
        es.checkpoint(lambda x, *, b: b(x))(x, b=b)

    _, (a, b) = es.mutable(f)((Counter(), Counter()), 0.0)
    assert (a.count, b.count) == (2.0, 2.0)


class Parent(es.Module):
    child: Counter
    calls: es.State = 0.0

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.child(x)


@pytest.mark.parametrize("transform", TWICE)
def test_aliases_see_one_state(transform):
    """By the parent, its child, the child's method, a default and a list."""

    def f(parent, x):
        alias, kept = parent.child, [parent.child]

        def inner(x, child=alias):
            seen = parent(x), alias(x), child.bump(x), kept[0](x)
            assert alias is parent.child
            return sum(seen)

        y = TWICE[transform](inner)(x)
        assert alias is parent.child is kept[0]
        return y, alias.count

    (y, count), new = es.mutable(f)(Parent(Counter()), 0.0)
    assert y == sum(range(1, 9))
    assert count == new.child.count == 8.0
    assert new.calls == 2.0


# --- Scopes -------------------------------------------------------------------------


@pytest.mark.parametrize("transform", TWICE)
def test_parameters_are_written_where_the_scope_allows_it(transform):
    class Weights(es.Module):
        weight: es.Parameter = 1.0

        def __call__(self, x):
            self.weight = 2 * self.weight
            return self.weight * x

    f = es.mutable(lambda m, x: TWICE[transform](m)(x), kinds=es.TreePart)
    y, new = f(Weights(), 1.0)
    assert (y, new.weight) == (6.0, 4.0)


@pytest.mark.parametrize("transform", TWICE)
def test_outside_of_a_scope(transform):
    model = Counter(5.0).eval()
    assert TWICE[transform](model)(1.0) == 12.0
    model = Counter(5.0)
    with (
        untouched(model),
        pytest.raises(dataclasses.FrozenInstanceError, match=r"Counter\.count"),
    ):
        TWICE[transform](lambda x: model(x))(1.0)
    assert not isinstance(model.count, jax.core.Tracer)


@pytest.mark.parametrize("transform", TWICE)
def test_an_exception_half_way_leaves_all_as_it_was(transform):
    def f(parent, x):
        child = parent.child

        def inner(x):
            parent(x)
            parent.child = Counter(7.0)
            raise KeyError("half-way")

        parent(x)
        with untouched(parent), pytest.raises(KeyError, match="half-way"):
            TWICE[transform](inner)(x)
        assert parent.child is child
        assert child.count == 1.0
        child.count = child.count + 1  # still owned, and in the right trace
        return TWICE[transform](parent)(x)

    y, new = es.mutable(f)(Parent(Counter()), 0.0)
    assert (y, new.child.count, new.calls) == (7.0, 4.0, 3.0)


@pytest.mark.parametrize("transform", TWICE)
def test_a_new_scope_in_a_transform(transform):
    def f(counter, x):
        def inner(x):
            y, new = es.mutable(counter)(x)
            counter.count = new.count + 1
            return y

        return TWICE[transform](inner)(x)

    y, new = es.mutable(f)(Counter(), 0.0)
    assert (y, new.count) == (4.0, 4.0)


# --- Methods ------------------------------------------------------------------------


lanes = ft.partial(es.vmap, in_axes=None, out_axes=None, axis_size=2)


@pytest.mark.parametrize("base", [es.Module, eqx.Module], ids=["es", "eqx"])
@pytest.mark.parametrize("transform", [es.jit, es.checkpoint, lanes])
def test_decorated_methods_of_a_module_its_child_and_its_parent(transform, base):
    class Child(base):
        counter: Counter

        @transform
        def __call__(self, x):
            return self.counter(x)

    class Base(base):
        child: Child
        counter: Counter

        @transform
        def step(self, x, by=1.0):
            self.counter.bump(x, by)
            return self.child(x)

    class Net(Base):
        def step(self, x, by=1.0):
            return super().step(x, 2.0) + self.child(x)

        @transform
        def __call__(self, x):
            return self.step(x) + self.child(x)

    y, new = es.mutable(Net(Child(Counter()), Counter()))(0.0)
    assert (y, new.child.counter.count, new.counter.count) == (6.0, 3.0, 2.0)
    y, new = es.mutable(new.step)(1.0)
    assert (y, new.child.counter.count, new.counter.count) == (11.0, 5.0, 4.0)


STACKED = {
    "vmap": lambda f: es.vmap(f),
    "jit, checkpoint, vmap": lambda f: es.jit(es.checkpoint(es.vmap(f))),
}


@pytest.mark.parametrize("stack", STACKED.values(), ids=STACKED)
def test_the_object_of_a_decorated_method_is_not_mapped_whatever_is_around(stack):
    traces = 0

    class Sum(es.Module):
        weight: es.Parameter
        calls: es.State = 0

        @stack
        def run(self, x):
            nonlocal traces
            traces += 1
            self.calls = self.calls + 1
            return self.weight.sum() * x

    model = Sum(jnp.arange(3.0))
    f = es.jit(lambda model, xs: es.mutable(model.run)(xs))
    for _ in range(2):
        ys, model = f(model, jnp.ones(3))
        assert ys.tolist() == [3.0, 3.0, 3.0]
    ys, model = es.mutable(model.run)(jnp.ones(3))
    assert ys.tolist() == [3.0, 3.0, 3.0]
    assert model.calls == 3
    assert traces <= 2
