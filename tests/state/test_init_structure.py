"""`init` under transforms: what a call makes and replaces comes out of the trace."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_state as es


def scanned(f):
    return lambda x: es.scan(lambda carry, x: (carry, f(x)), None, x)[1]


THROUGH = {"vmap": es.vmap, "scan": scanned}


def linear(n, m):
    return eqx.nn.Linear(n, m, key=jr.key(n))


@pytest.mark.parametrize("name", THROUGH)
def test_a_list_grows(name):
    class Net(es.Module):
        layers: list

        def block(self, i, x):
            if self.initializing and len(self.layers) <= i:
                self.layers = [*self.layers, linear(x.size, x.size + 1)]
            return self.layers[i](x)

        def __call__(self, x):
            for i in range(3):
                x = THROUGH[name](lambda x, i=i: self.block(i, x))(x)
            return x

    net = Net([]).init(0, jnp.ones((2, 3)))
    assert [x.weight.shape for x in net.layers] == [(4, 3), (5, 4), (6, 5)]
    assert es.mutable(net)(jnp.ones((2, 3)))[0].shape == (2, 6)


@pytest.mark.parametrize("name", THROUGH)
def test_a_module_takes_the_place_of_one_of_its_class(name):
    def mlp(n, activation):
        return eqx.nn.MLP(3, n, 4, 1, activation=activation, key=jr.key(n))

    class Net(es.Module):
        mlp: eqx.nn.MLP | None = None

        def __call__(self, x):
            if self.initializing and self.mlp is None:
                self.mlp = mlp(2, jax.nn.relu)

            def f(x):
                if self.initializing:
                    self.mlp = mlp(x.size, jnp.tanh)
                return self.mlp(x)

            return THROUGH[name](f)(x)

    new = Net().init(0, jnp.ones((1, 3))).mlp
    assert new.out_size == new.layers[-1].out_features == 3
    assert new.layers[-1].weight.shape == (3, 4)
    assert new.activation(-1.0) == jnp.tanh(-1.0)


class Leaf(es.Module):
    n: es.State = 1


class Other(es.Module):
    n: es.State = 1
    m: es.State = 2


REPLACED = {
    "a list that shrinks": ([Leaf(), Leaf()], lambda old: old[:1]),
    "a key that goes": ({"a": Leaf(), "b": Leaf()}, lambda old: {"a": old["a"]}),
    "an array, then a list": (Other(), lambda old: [jnp.ones(2), jnp.ones(3)]),
    "a list, then an array": ([Leaf()], lambda old: jnp.ones(4)),
    "a number, then an array": (2.5, lambda old: jnp.ones(4)),
    "an element, then none": ([Leaf(), Leaf()], lambda old: [old[0], None]),
    "another class": ([Leaf(), Leaf()], lambda old: [Other(), old[1]]),
    "a function": (jnp.sin, lambda old: jnp.cos),
}


@pytest.mark.parametrize("name", THROUGH)
@pytest.mark.parametrize("case", REPLACED)
def test_what_was_made_in_the_call_is_replaced_in_a_transform(case, name):
    first, replace = REPLACED[case]

    class Net(es.Module):
        x: object = None

        def __call__(self, x):
            if self.initializing:
                self.x = first

            def f(x):
                if self.initializing and not done:
                    done.append(1)
                    self.x = replace(self.x)
                return x

            done = []
            THROUGH[name](f)(x)
            after.append(jax.tree.structure(self.x))
            return x

    after = []
    new = Net().init(0, jnp.ones((2, 3)))
    want = jax.tree.structure(replace(first))
    assert jax.tree.structure(new.x) == want
    assert after[0] == want
    if case == "a function":
        assert new.x is jnp.cos


def test_an_object_keeps_its_identity_when_the_structure_around_it_changes():
    class Net(es.Module):
        leaf: Leaf
        more: list

        def __call__(self, x):
            leaf = self.leaf

            def f(x):
                if self.initializing:
                    self.more = [*self.more, jnp.zeros(3)]
                return x

            x = es.vmap(f)(x)
            leaf.n = leaf.n + 1
            assert self.leaf is leaf
            return x

    assert len(Net(Leaf(), []).init(0, jnp.ones((2, 3))).more) == 1


@pytest.mark.parametrize("name", THROUGH)
def test_what_a_transform_has_made_may_be_written_after_it(name):
    class Net(es.Module):
        leaf: Leaf | None = None

        def __call__(self, x):
            def f(x):
                if self.initializing and self.leaf is None:
                    self.leaf = Leaf()
                return x

            x = THROUGH[name](f)(x)
            self.leaf.n = self.leaf.n + 1
            return self.leaf.n

    net = Net().init(0, jnp.ones((2, 3)))
    assert es.mutable(net)(jnp.ones((2, 3)))[0] == net.leaf.n + 1


class Dense(es.Module):
    s: es.State
    w: es.Parameter | None = None

    def __call__(self, x):
        if self.initializing and self.w is None:
            self.w = es.Initializer(lambda key: jr.normal(key, (3, 3)))
        return self.w @ x


STACKED = {
    "axes": lambda m, x: es.vmap(m, in_axes=None, axes={...: 0})(x),
    "argument": lambda m, x: es.vmap(lambda m: m(x))(m),
    "scan": lambda m, x: es.scan(lambda x, m: (m(x), None), x, m)[0],
}


@pytest.mark.parametrize("name", STACKED)
def test_layers_of_a_stack_are_initialized_one_by_one(name):
    run, x = STACKED[name], jnp.ones(3)
    stack = eqx.filter_vmap(Dense)(jnp.zeros(3))
    with pytest.raises(
        ValueError, match=r"Dense\.w` is made by `init` in one (lane|step) of"
    ):
        stack.init(42, x, call=run)
    keys = jr.split(jr.key(0), 3)
    stack = eqx.filter_vmap(lambda key: Dense(jnp.zeros(())).init(key, x))(keys)
    assert stack.w.shape == (3, 3, 3)
    assert es.mutable(run)(stack, x)[0].shape[-1] == 3


def test_a_layer_has_the_axes_of_the_parameters_that_it_has():
    class Two(es.Module):
        v: es.Parameter
        w: es.Parameter | None = None

        def __call__(self, x):
            if self.initializing and self.w is None:
                self.w = jnp.ones(x.shape)
            return self.v * self.w * x

    def run(axis):
        by_kind = {es.Parameter: axis}
        return lambda m, xs: es.vmap(lambda m, x: m(x), in_axes=(by_kind, 0))(m, xs)

    xs = jnp.ones((2, 3))
    assert Two(jnp.ones(())).init(0, xs, call=run(None)).w.shape == (3,)
    with pytest.raises(ValueError, match=r"Two\.w` is made by `init` in one lane"):
        Two(jnp.ones(2)).init(0, xs, call=run(0))


def test_a_state_with_an_axis_is_made_before():
    class Cell(es.Module):
        h: es.State | None = None

        def __call__(self, x):
            if self.initializing and self.h is None:
                self.h = jnp.zeros(x.shape)
            self.h = self.h + x
            return self.h

    def run(cell, xs):
        return es.vmap(cell, axes={es.State: 0})(xs)

    with pytest.raises(ValueError, match=r"Cell\.h` is made by `init` in one lane"):
        Cell().init(0, jnp.ones((2, 3)), call=run)
    cell = eqx.filter_vmap(lambda x: Cell().init(0, x))(jnp.ones((2, 3)))
    assert es.mutable(run)(cell, jnp.ones((2, 3)))[1].h.shape == (2, 3)


def test_a_kind_with_an_axis_and_another_without():
    class Net(es.Module):
        s: es.State
        w: es.Parameter | None = None

        def __call__(self, x):
            if self.initializing and self.w is None:
                self.w = jnp.ones(x.shape)
            self.s = self.s + 1
            return self.w * x

    def run(net, xs):
        return es.vmap(net, axes={es.State: 0})(xs)

    net = Net(jnp.zeros(2)).init(0, jnp.ones((2, 3)), call=run)
    assert net.w.shape == (3,)
    assert es.mutable(run)(net, jnp.ones((2, 3)))[1].s.tolist() == [1.0, 1.0]


def test_the_arrays_of_the_caller_are_not_changed():
    class Net(es.Module):
        n: es.State
        w: es.Parameter
        table: es.Buffer

        def module_init(self, key):
            self.n += 1
            self.w += 1

        def __call__(self, x):
            self.n += 1
            self.w += 1
            with pytest.raises(ValueError, match="read-only"):
                self.table[0] = 7
            return x

    arrays = [np.array([2, 3]), np.array([2.0, 3.0]), np.array([2, 3])]
    net = Net(*arrays).init(0, 0.0)
    assert [x.tolist() for x in arrays] == [[2, 3], [2.0, 3.0], [2, 3]]
    assert net.n.tolist() == [3, 4]
    assert net.table is arrays[2]


def test_constants_of_numpy_are_shapes_in_loops():
    class Net(es.Module):
        shape: np.ndarray

        def __call__(self, x):
            return es.scan(lambda c, x: (c, x.reshape(tuple(self.shape))), 0, x)[1]

    net = Net(np.array([2, 3]))
    new = net.init(0, jnp.ones((4, 6)))
    assert new.shape is net.shape
    assert es.mutable(new)(jnp.ones((4, 6)))[0].shape == (4, 2, 3)


def test_what_is_there_stays_also_if_the_call_puts_something_else_in_its_place():
    class Net(es.Module):
        x: es.State

        def __call__(self, x):
            if self.initializing:
                self.x = [jnp.ones(2), x]
            return x

    net = Net(jnp.zeros(3))
    assert net.init(0, jnp.ones(1)).x is net.x
