"""`es.cond` and `es.switch`: JAX's branches, which may also write state."""

import dataclasses

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import close, reuses_keys
from models import Lazy

import eqx_state as es


class Cell(es.Module):
    weight: es.Parameter = 0.5
    total: es.State = 0.0

    def __call__(self, x):
        self.total = self.total + x
        return self.weight * x + self.total


class Net(es.Module):
    a: Cell = dataclasses.field(default_factory=Cell)
    b: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5, 1.0))
    steps: es.State = 0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def draw(self, x):
        self.rng, key = jr.split(self.rng)
        return x + jr.normal(key)


def by_hand(i, branches, *operands):
    return branches[int(i)](*operands)


def by_cond(i, branches, *operands):
    return es.cond(i == 0, branches[0], branches[1], *operands)


CHOICES = {"cond": by_cond, "switch": es.switch}


@pytest.fixture(params=CHOICES)
def choose(request):
    return CHOICES[request.param]


def check(f, model, choose):
    """Assert that `f(model, i, choose)` updates state like Python's `if`."""
    for i in (0, 1):
        expected = es.mutable(f)(model, i, by_hand)
        close(es.mutable(f)(model, i, choose), expected)
        with jax.disable_jit():
            close(es.mutable(f)(model, i, choose), expected)


# --- Like JAX's branches ------------------------------------------------------------


ARRAYS = {
    "weak type": lambda m, i: m.cond(i == 0, lambda: 1.0, lambda: jnp.float32(2.0)),
    "float": lambda m, i: m.cond(0.5 * i, lambda: 1, lambda: 2),
    "nested": lambda m, i: m.cond(
        i == 0,
        lambda x, y: {"a": (x["a"], None), "b": [y]},
        lambda x, y: {"a": (y, None), "b": [x["a"]]},
        {"a": 1.0},
        2.0,
    ),
    "clamped above": lambda m, i: m.switch(i + 5, [lambda x: x, lambda x: 2 * x], 1.5),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("i", [0, 1])
def test_on_arrays_they_equal_the_branches_of_jax(name, i):
    def look(tree):
        types = [getattr(x, "weak_type", type(x)) for x in jax.tree.leaves(tree)]
        return jax.tree.structure(tree), types

    ours, theirs = ARRAYS[name](es, i), ARRAYS[name](lax, i)
    assert eqx.tree_equal(ours, theirs, typematch=True)
    assert look(ours) == look(theirs)
    with jax.disable_jit():
        ours, theirs = ARRAYS[name](es, i), ARRAYS[name](lax, i)
    assert eqx.tree_equal(ours, theirs, typematch=True)


def test_values_that_are_not_arrays_pass_through():
    f = es.cond(
        True, lambda f, x: (f, "text", x), lambda f, x: (f, "text", 2 * x), jnp.sin, 1.0
    )
    assert f == (jnp.sin, "text", 1.0)


# --- State --------------------------------------------------------------------------


@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_branches_that_write_different_state(choose):
    def f(net, i, choose):
        def first(x):
            net.a(x)
            net.steps = net.steps + 1
            return x

        def second(x):
            _, net.rng = jr.split(net.rng)
            net.a.total = net.a.total + 10.0
            return 2 * net.b(x)

        def neither(x):
            return x + net.a.total

        y = choose(i, [first, second], 2.0)
        seen = net.a.total, net.steps
        return choose(i, [second, neither], y), seen

    check(f, Net(), choose)


def test_only_the_state_that_some_branch_writes_is_new():
    seen = []

    def f(net):
        b, rng = net.b.total, net.rng
        es.cond(True, net.a, lambda x: x, 1.0)
        seen.extend([net.b.total is b, net.rng is rng, net.a.total == 1.0])

    es.mutable(f)(Net())
    assert seen == [True, True, True]


def test_a_branch_returns_a_module_that_may_be_assigned(choose):
    def f(net, i, choose):
        def write(cell):
            cell(2.0)
            return cell

        net.a = choose(i, [write, lambda cell: cell], net.a)
        return net.a.total

    check(f, Net(), choose)


# --- While a model is initialized ---------------------------------------------------


def test_init_draws_the_same_values_inside_a_branch(choose):
    def forward(m, x):
        return choose(0, [m[0], lambda x: choose(1, [m[1], m[2]], x)], x)

    x = jnp.ones(3)
    expected = es.init(
        [Lazy(), Lazy(), Lazy()], 0, x, call=lambda m, x: [f(x) for f in m]
    )
    ours = es.init([Lazy(), Lazy(), Lazy()], 0, x, call=forward)
    assert eqx.tree_equal(ours, expected)


def test_the_branches_of_a_switch_are_one_list():
    with pytest.raises(TypeError, match=r"es\.switch\(i, \[f, g\], x\)     # right"):
        es.switch(0, jnp.sin, jnp.cos, 1.0)
    branches = eqx.nn.Sequential([eqx.nn.Lambda(jnp.sin), eqx.nn.Lambda(jnp.cos)])
    assert es.switch(1, branches, 0.0) == 1  # can be called, and is a sequence


def twice(net, x):
    return es.scan(lambda x, _: (net.draw(x), None), x, length=2)[0]


# Functions of a lane that do not draw, although some trace does.
NOT_TAKEN = {
    "cond": lambda net, x: es.cond(False, net.draw, lambda x: x, x),
    "switch": lambda net, x: es.switch(0, [lambda x: x, net.draw], x),
    "while_loop": lambda net, x: es.while_loop(lambda x: False, net.draw, x),
    "fori_loop": lambda net, x: es.fori_loop(0, 0, lambda i, x: net.draw(x), x),
    "a scan": lambda net, x: es.cond(False, lambda: twice(net, x), lambda: x),
    "a gradient": lambda net, x: es.vjp(
        lambda x: es.cond(False, net.draw, lambda x: x, x), x
    )[0],
}


@pytest.mark.parametrize("name", NOT_TAKEN)
@reuses_keys
def test_the_key_of_a_lane_does_not_depend_on_disable_jit(name):
    def run(net):
        return es.vmap(lambda x: NOT_TAKEN[name](net, x))(jnp.zeros(3))

    net = Net()
    ys, new = es.mutable(run)(net)
    with jax.disable_jit():
        ys_eager, eager = es.mutable(run)(net)
    assert new.rng == eager.rng != net.rng
    assert (ys == ys_eager).all()


def test_with_disable_jit_a_branch_may_need_values():
    def run(net):
        def branch(x):
            return net.draw(x) if float(net.steps) == 0 else x

        return es.vmap(lambda x: es.cond(True, branch, lambda x: x, x))(jnp.zeros(3))

    with jax.disable_jit():
        ys, _ = es.mutable(run)(Net())
    assert len(set(ys.tolist())) == 3
