"""All ways to pass a module to a transform, in one scope or in several; methods.

The random programs of `tests/laws` test transforms inside transforms.
"""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from helpers import untouched

import eqx_state as es


def call(cell, x):
    return cell(x)


# --- Ways to pass a module to a transform -------------------------------------------


class Counter(es.Module):
    """Counts its calls; the output reveals which state the call has seen."""

    count: es.State = 0.0

    def __call__(self, x):
        if self.training:
            self.count = self.count + 1
        return x + self.count

    def bump(self, x, by=1.0):
        self.count = self.count + by
        return x + self.count


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
def test_every_form_of_a_module_is_found(transform):
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
    """The state is used by the parent, the child, its method, a default and a list."""

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
def test_outside_a_scope(transform):
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
def test_an_exception_half_way_leaves_state_unchanged(transform):
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
        # `child` is still owned by the scope, and in the right trace.
        child.count = child.count + 1
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
def test_the_object_of_a_decorated_method_is_not_mapped_by_any_nesting(stack):
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
