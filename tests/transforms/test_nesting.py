"""Which modules a transform finds, in functions and closures; decorated methods.

The random programs of `tests/laws` test transforms inside transforms, in one scope or
in several.
"""

import dataclasses
import functools as ft
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import untouched

import eqx_state as es


class Counter(es.Module):
    """Counts its calls; the output reveals which state the call has seen."""

    count: es.State = 0.0
    weight: es.Parameter = 2.0

    def __call__(self, x):
        if self.training:
            self.count = self.count + 1
        return x + self.count

    def bump(self, x, by=1.0):
        self.count = self.count + by
        return x + self.count


def call(counter, x):
    return counter(x)


# --- Ways to pass a module to a transform -------------------------------------------


one_lane = ft.partial(es.vmap, in_axes=None, out_axes=None, axis_size=1)
# Each runs a function of `x` twice, inside or around the transform, and sums the
# results.
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
each_transform = pytest.mark.parametrize("twice", TWICE.values(), ids=TWICE)
FORMS = {
    "module": lambda m: m,
    "bound method": lambda m: m.bump,
    "partial keyword": lambda m: ft.partial(lambda x, m: m(x), m=m),
    "eqx.Partial": lambda m: eqx.Partial(call, m),
    "jax Partial in a plain module": lambda m: eqx.nn.Lambda(jtu.Partial(call, m)),
    "partial of a method": lambda m: ft.partial(m.bump, by=1.0),
    "nested closure": lambda m: (lambda f: lambda x: f(x))(lambda x: m(x)),
    "list in a closure": lambda m: (lambda ms: lambda x: ms["a"][0](x))({"a": [m]}),
    "dict that cannot be sorted": lambda m: (lambda ms: lambda x: ms[1](x))(
        {"a": 0, 1: m}
    ),
    "default": lambda m: lambda x, m=m: m(x),
    "keyword default": lambda m: lambda x, *, m=m: m(x),
    "partial of a transform": lambda m: ft.partial(es.checkpoint(call), m),
}


@each_transform
def test_every_form_of_a_module_is_found(twice):
    for form in FORMS.values():
        f = es.mutable(lambda m, x, form=form: twice(form(m))(x))
        y, new = f(Counter(), 0.0)
        assert (y, new.count) == (3.0, 2.0)


@each_transform
def test_outside_a_scope(twice):
    assert twice(Counter(5.0).eval())(1.0) == 12.0
    model = Counter(5.0)
    with (
        untouched(model),
        pytest.raises(dataclasses.FrozenInstanceError, match=r"Counter\.count"),
    ):
        twice(lambda x: model(x))(1.0)
    assert not isinstance(model.count, jax.core.Tracer)


class Parent(es.Module):
    child: Counter
    calls: es.State = 0.0

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.child(x)


@each_transform
def test_an_exception_half_way_leaves_state_unchanged(twice):
    def f(parent, x):
        child = parent.child

        def inner(x):
            parent(x)
            parent.child = parent.child.replace(count=7.0)
            raise KeyError("half-way")

        parent(x)
        with untouched(parent), pytest.raises(KeyError, match="half-way"):
            twice(inner)(x)
        assert parent.child is child
        assert child.count == 1.0
        # `child` is still owned by the scope, and in the right trace.
        child.count = child.count + 1
        return twice(parent)(x)

    y, new = es.mutable(f)(Parent(Counter()), 0.0)
    assert (y, new.child.count, new.calls) == (7.0, 4.0, 3.0)


# --- Closures -----------------------------------------------------------------------


def test_a_recursive_function_writes_to_one_model():
    def f(counter, x):
        @es.jit
        def add(x, n):
            return x if n == 0 else add(counter(x), n - 1)

        return add(x, 3)

    y, new = es.mutable(f)(Counter(), 0.0)
    assert (y, new.count) == (6.0, 3.0)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_module_in_a_pytree_and_a_cell_that_is_filled_later():
    def f(counter, x):
        def run(x):
            return later.second(x)

        jitted = es.jit(run)
        first = es.jit(lambda x: (x, lambda: unset)[0])(x)
        later = Pair(None, counter)
        y = jitted(first)
        unset = None
        return y

    y, new = es.mutable(f)(Counter(), jnp.array(1.0))
    assert (y, new.count) == (2.0, 1.0)


def test_an_object_that_cannot_be_flattened_does_not_change():
    class Broken:
        pass

    def fail(x):
        raise ValueError("not now")

    jtu.register_pytree_node(Broken, fail, lambda aux, children: Broken())

    def f(counter, broken, x):
        return es.jit(lambda x: x if broken is None else counter(x))(x)

    assert es.mutable(f)(Counter(), Broken(), 1.0)[1].count == 1.0


def test_a_long_chain_may_be_closed_over():
    chain = None
    for i in range(1500):
        chain = [i, chain]
    assert es.jit(lambda x: x + chain[0])(jnp.array(1.0)) == 1500.0


@pytest.mark.parametrize("transform", [es.jit, es.vmap], ids=["jit", "vmap"])
def test_outside_a_scope_a_model_that_is_called_is_traced_and_a_closure_is_not(
    transform,
):
    # As in `eqx.filter_jit` and in JAX itself.
    seen = []

    class Spy(es.Module):
        weight: es.Parameter

        def __call__(self, x):
            seen.append(isinstance(self.weight, jax.core.Tracer))
            return self.weight * x

    spy = Spy(2.0)
    for f in (spy, lambda x: spy(x)):
        assert transform(f)(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert seen == [transform is es.jit, False]


def test_a_module_beside_an_array_in_a_field_may_have_its_own_equality():
    class Sub(es.Module):
        a: es.State

        def __eq__(self, other):
            return bool(jnp.all(self.a == other.a))

        __hash__ = object.__hash__

    class Pair(es.Module):
        pair: tuple[Sub, es.State]

        def __call__(self, x):
            sub, b = self.pair
            self.pair = sub, b + 1
            return x

    model = Pair((Sub(jnp.ones(())), jnp.ones(())))
    for run in (
        lambda m, x: es.checkpoint(m)(x),
        lambda m, x: es.vmap(lambda m: m(x), None, axis_size=2)(m),
    ):
        _, new = es.mutable(run)(model, jnp.ones(()))
        assert new.pair[1] == 2


# --- Outside `jit` ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scan", "while_loop", "fori_loop", "cond", "switch"])
def test_outside_jit_a_function_is_traced_at_each_call(name):
    traces, scale = [], 1.0

    def f(x):
        traces.append(1)  # not the tracer, which would leak
        return scale * counter.weight + 0 * x

    for scale, weight in ((1.0, 1.0), (2.0, 1.0), (1.0, 3.0)):
        counter = Counter(weight=weight)
        traces.clear()
        assert TWICE[name](f)(0.0) == 2 * scale * weight
        assert traces


@pytest.mark.parametrize("bound", [int, np.int32, jnp.array])
def test_a_loop_between_known_bounds_can_be_differentiated(bound):
    def f(x):
        return es.fori_loop(bound(1), bound(4), lambda i, c: c * i, x)

    assert jax.grad(f)(2.0) == 6.0


# --- Methods ------------------------------------------------------------------------


lanes = ft.partial(es.vmap, in_axes=None, out_axes=None, axis_size=2)


@pytest.mark.parametrize("base", [es.Module, eqx.Module], ids=["es", "eqx"])
@pytest.mark.parametrize("transform", [es.jit, lanes])
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
def test_the_object_of_a_decorated_method_is_not_mapped_by_any_nesting(stack):
    class Sum(es.Module):
        weight: es.Parameter
        calls: es.State = 0

        @stack
        def run(self, x):
            self.calls = self.calls + 1
            return self.weight.sum() * x

    model = Sum(jnp.arange(3.0))
    step = lambda model, xs: es.mutable(model.run)(xs)  # noqa: E731
    f = es.jit(eqx.debug.assert_max_traces(step, max_traces=1))
    for _ in range(2):
        ys, model = f(model, jnp.ones(3))
        assert ys.tolist() == [3.0, 3.0, 3.0]
    assert model.calls == 2


# Each returns the module that it is given, or a copy; some call it, which writes state.
RETURNED = {
    "cond": lambda m, x: es.cond(x > 0, lambda m: m, lambda m: m, m),
    "cond, written": lambda m, x: es.cond(True, lambda m: m, called, m),
    "cond, closed over": lambda m, x: es.cond(x > 0, lambda: m, lambda: m),
    "switch": lambda m, x: es.switch(1, [called, lambda m: m, lambda m: m], m),
    "checkpoint": lambda m, x: es.checkpoint(called)(m),
    "jit": lambda m, x: es.jit(called)(m),
    "scan": lambda m, x: es.scan(lambda m, _: (called(m), None), m, length=2)[0],
    "while_loop": lambda m, x: es.while_loop(lambda m: m.count < 2, called, m),
    "vmap": lambda m, x: one_lane(called)(m),
    "vjp": lambda m, x: es.vjp(called, m)[0],
    "value_and_grad": lambda m, x: es.value_and_grad(lambda m: m(1.0))(m)[0][1],
}
AROUND = {
    "eager": lambda f: f,
    "jit": es.jit,
    "vmap": lambda f: es.vmap(f, in_axes=(None, 0), axis_size=1),
    "grad": lambda f: es.grad(f, argnums=0),
}


def called(counter):
    counter(1.0)
    return counter


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("returned", RETURNED)
def test_a_module_that_a_transform_returns_is_no_write_to_its_parameters(
    returned, around
):
    class Holder(es.Module):
        counter: Counter

    def f(holder, x):
        holder.counter = RETURNED[returned](holder.counter, x)
        return jnp.sum(x) * holder.counter.weight

    holder = Holder(Counter())
    f = AROUND[around](f)
    f = f if around == "grad" else es.mutable(f)
    _, new = f(holder, jnp.ones((1,) if around == "vmap" else ()))
    assert new.counter.weight == holder.counter.weight
