"""`functools.cached_property` on modules: always current, and not in the pytree."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_state as es


X = jnp.arange(3.0)


class Net(es.Module):
    w: es.Parameter
    n: es.State = 0.0

    @ft.cached_property
    def square(self):
        """The square of all that is here."""
        return self.w**2 + self.n

    def __call__(self, x):
        before = self.square
        self.n = self.n + 1.0
        return (self.square - before) * x


def test_it_is_not_in_the_tree():
    net, other = Net(3.0), Net(3.0)
    assert net.square == 9.0
    assert jax.tree.structure(net) == jax.tree.structure(other)
    assert eqx.tree_equal(net, other)
    assert repr(net) == repr(other)
    assert len(es.parts(net)) == 2
    assert Net.square.__doc__ == "The square of all that is here."
    assert "square" not in net.__dict__


RUNS = {
    "called": lambda m, x: m(x),
    "jit": lambda m, x: es.jit(m)(x),
    "scan": lambda m, x: es.scan(lambda c, x: (c, m(x)), None, x[None])[1][0],
}


@pytest.mark.parametrize("run", RUNS)
def test_in_a_scope_a_cached_property_is_current_after_every_write(run):
    net = Net(3.0)
    call = lambda m, x: (m.square, RUNS[run](m, x), m.square)  # noqa: E731
    for f in (es.mutable(call), es.jit(es.mutable(call))):
        before = net.square
        (old, y, after), net = f(net, X)
        assert (y == X).all()  # the value that the write adds to the square
        assert (old, after) == (before, before + 1.0)
        assert net.square == after


def test_cached_properties_of_mixins_are_current():
    class First:
        @ft.cached_property
        def first(self):
            return self.n + 1

    class Second:
        @ft.cached_property
        def second(self):
            return self.n + 2

    class Mixed(First, Second, es.Module):
        n: es.State = 0

    def run(model):
        before = model.first, model.second
        model.n = model.n + 10
        return before, (model.first, model.second)

    assert es.mutable(run)(Mixed())[0] == ((1, 2), (11, 12))


def test_in_init_a_cached_property_is_current_after_every_assignment():
    class Late(es.Module):
        w: es.Parameter
        layers: list

        def __init__(self):
            self.w = jnp.ones(())
            self.layers = []
            assert (self.double, self.length) == (2.0, 0)
            self.w = jnp.full((), 2.0)
            self.layers.append(self.w)

        @ft.cached_property
        def double(self):
            return 2 * self.w

        @ft.cached_property
        def length(self):
            return len(self.layers)

    late = Late()
    assert (late.double, late.length) == (4.0, 1)


# --- Names and attributes of the user -----------------------------------------------


@pytest.mark.parametrize("name", ["_place", "cached"])
def test_a_field_of_any_name(name):
    def call(self, x):
        setattr(self, name, getattr(self, name) + 1)
        return x

    body = {"__annotations__": {name: es.State}, "__call__": call}
    cls = type(es.Module)("Model", (es.Module,), body)
    model = cls(0)
    for _ in range(2):
        _, model = es.jit(es.mutable(model))(X)
    assert getattr(model, name) == 2
    assert [part.name for part in es.parts(model)] == [name]
    assert getattr(model.replace(**{name: 5}), name) == 5


class Plain(eqx.Module):
    w: jax.Array

    @ft.cached_property
    def double(self):
        return 2 * self.w

    def __call__(self, x):
        return self.double * x


def test_in_a_captured_copy_nothing_is_left_of_a_cached_property():
    plain = Plain(jnp.ones(()))
    fresh = jax.tree.map(lambda x: x, plain)
    assert plain.double == 2.0
    copy = jax.tree.map(lambda x: x, plain)  # Equinox marks what it has not copied
    (_, new), found = es.capture(lambda m: m(X), outputs=Plain)(copy)
    assert [x.tolist() for x in found.values()] == [[0, 2, 4]]
    assert jax.tree.structure(new) == jax.tree.structure(fresh)
