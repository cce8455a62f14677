"""A module that is both an argument of a transform and closed over.

The argument is a copy with its own values, and the closure refers to the object.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import close, rejects

import eqx_state as es


XS = jnp.array([1.0, 2.0, 4.0])


class Layer(es.Module):
    w: es.Parameter = dataclasses.field(default_factory=lambda: XS)
    n: es.State = dataclasses.field(default_factory=lambda: jnp.zeros(3))

    def __call__(self, x):
        self.n = self.n + 1
        return self.w * x


class Net(es.Module):
    scale: es.Parameter = 0.5
    layers: Layer = dataclasses.field(default_factory=Layer)


def scan(f, layers):
    """`f(layer)` for each layer, stacked."""
    return es.scan(lambda carry, layer: (carry, f(layer)), None, layers)[1]


def vmap(f, layers):
    return es.vmap(f)(layers)


each = pytest.mark.parametrize("each", [scan, vmap])


# --- Reading ------------------------------------------------------------------------


@each
def test_the_closure_sees_the_whole_stack_and_the_argument_is_a_slice(each):
    def f(net):
        def one(layer):
            assert layer.w.shape == layer.n.shape == ()
            assert net.layers.w.shape == net.layers.n.shape == (3,)
            return layer.w * net.layers.w.sum()

        out = each(one, net.layers)
        assert net.layers.w.shape == (3,)
        return out.sum()

    (loss, new), grads = es.value_and_grad(f)(Net())
    close((loss, grads.layers.w), (XS.sum() ** 2, jnp.full(3, 2 * XS.sum())))
    assert eqx.tree_equal(new, Net())


@pytest.mark.parametrize("axes", [(0, None), (0, 1)])
def test_one_module_as_two_arguments_with_different_axes(axes):
    class Only(es.Module):
        w: es.Parameter

    class Both(es.Module):
        a: Only

        def run(self, vmap):
            return vmap(lambda a, b, x: (a.w, b.w), (*axes, 0))(self.a, self.a, XS)

    model = Both(Only(jnp.arange(9.0).reshape(3, 3)))
    out, new = es.mutable(model.run)(es.vmap)
    assert eqx.tree_equal(out, model.run(jax.vmap))
    assert eqx.tree_equal(new, model)


# --- Writing ------------------------------------------------------------------------


def test_one_module_twice_with_equal_axes_is_updated_once():
    def f(net):
        def lane(layer, net):
            assert net.layers is layer
            return layer(net.scale) + net.layers(1.0)

        return es.vmap(lane)(net.layers, net)

    _, new = es.mutable(f)(Net(scale=XS))
    assert new.layers.n.tolist() == [2.0, 2.0, 2.0]


def test_one_module_twice_and_another_one():
    def f(net):
        def call(a, b, other):
            assert a is b
            return a(1.0), other(1.0)

        return es.checkpoint(call)(net[0], net[0], net[1])

    _, new = es.mutable(f)([Layer(), Layer()])
    assert [layer.n.tolist() for layer in new] == [[1.0] * 3, [1.0] * 3]


@each
def test_the_closure_sees_the_state_from_before_the_transform(each):
    def f(net):
        return each(lambda layer: layer(1.0) + net.layers.n.sum(), net.layers)

    y, new = es.mutable(f)(Net())
    close((y, new.layers.n), (XS, jnp.ones(3)))


@each
def test_state_that_is_written_both_ways_is_an_error(each):
    def both(net, layer):
        net.layers.n = net.layers.n + 1
        return layer(1.0)

    def f(net):
        return each(lambda layer: both(net, layer), net.layers)

    with rejects(Net(), ValueError, r"`layers\.n` is reached twice"):
        es.mutable(f)(Net())


def add(layer, x):
    layer.n = layer.n + x


BOTH_WAYS = {
    # Lanes with different states would be an error, too, but this is the reason.
    "lanes": lambda m: es.vmap(
        lambda layer, x: (add(layer, x), add(m.layers, x)), (None, 0)
    )(m.layers, XS),
    # Each branch alone writes it once.
    "branches": lambda m: es.cond(
        True, lambda layer: layer(1.0), lambda layer: m.layers(1.0), m.layers
    ),
}  # fmt: skip


@pytest.mark.parametrize("f", BOTH_WAYS.values(), ids=BOTH_WAYS)
def test_lanes_and_branches_that_write_a_state_both_ways_are_an_error(f):
    with rejects(Net(), ValueError, r"`layers\.n` is reached twice"):
        es.mutable(f)(Net())


@each
def test_a_write_through_the_closure_is_allowed_if_the_argument_is_only_read(each):
    def body(net, layer):
        net.layers.n = net.layers.n + 1
        return layer.w

    def f(net):
        return each(lambda layer: body(net, layer), net.layers)

    y, new = es.mutable(f)(Net())
    close(y, XS)
    assert len(set(new.layers.n.tolist())) == 1
    assert new.layers.n[0] >= 1


@pytest.mark.parametrize("is_part_first", [True, False])
def test_a_part_may_have_all_arrays_of_the_argument_that_contains_it(is_part_first):
    class Around(es.Module):
        layer: Layer

    def one(part, around):
        assert around.layer is part
        part.n = part.n + 1
        return around.layer.n

    def f(around):
        if is_part_first:
            return es.vmap(one)(around.layer, around)
        return es.vmap(lambda around, part: one(part, around))(around, around.layer)

    y, new = es.mutable(f)(Around(Layer()))
    assert y.tolist() == new.layer.n.tolist() == [1.0, 1.0, 1.0]


def test_init_may_read_a_whole_stack_inside_a_step():
    class Lazy(es.Module):
        layers: Layer = dataclasses.field(default_factory=Layer)
        bias: es.Parameter | None = None

        def __call__(self, x):
            def step(x, layer):
                if self.initializing and self.bias is None:
                    # After `init`, no step may read this state of the whole stack.
                    self.bias = self.layers.w.sum() + self.layers.n.sum()
                return layer(x) + self.bias, None

            return es.scan(step, x, self.layers)[0]

    model = Lazy().init(0, 1.0)
    assert model.bias == 7.0
    assert model.layers.n.tolist() == [0.0, 0.0, 0.0]
    y, new = es.mutable(model)(1.0)
    assert y == ((1 * 1 + 7) * 2 + 7) * 4 + 7
    assert new.layers.n.tolist() == [1.0, 1.0, 1.0]


# --- A write through the closure that a returned copy would undo ----------------------


# `tests/support/program_faults.py` lists the other transforms.
RETURNING = {
    "scan": lambda f, m: es.scan(lambda m, x: (m, f(m)), m, XS),
    "jit": lambda f, m: es.jit(lambda m: (f(m), [m]))(m),
    "jvp": lambda f, m: es.jvp(lambda m: (m, f(m)), (m,), (None,))[0],
    "mutable": lambda f, m: es.mutable(f)(m),
}
# The module that is passed, and the one that the function writes through its closure.
PLACES = {
    "itself": (lambda net: net, lambda net: net.layers),
    "in a list": (lambda net: [XS, net.layers], lambda net: net.layers),
}


@pytest.mark.parametrize("transform", RETURNING)
@pytest.mark.parametrize("place", PLACES)
def test_a_write_that_the_returned_copy_would_undo_is_an_error(transform, place):
    passed, written = PLACES[place]

    def run(net):
        return RETURNING[transform](lambda _: written(net)(XS), passed(net))

    fragments = r"`layers\.n` was written through the closure", "# right"
    with rejects(net := Net(), ValueError, *fragments):
        es.mutable(run)(net)
