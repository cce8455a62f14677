"""What loops refuse, and loops while a model is initialized."""

import dataclasses
import functools as ft

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import rejects
from loop_cases import by_hand, Cell, LOOPS, Net
from models import Lazy

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


@pytest.fixture(params=LOOPS)
def loop(request):
    return LOOPS[request.param]


# --- Bad input ----------------------------------------------------------------------


def test_cond_fun_may_not_write():
    drop = es.nn.Dropout(0.5, key=jr.key(0))
    for model, name in ((Cell(), "total"), (drop, "rng")):

        def f(m, x):
            return es.while_loop(lambda x: m(x).sum() < 0, lambda x: x, x)

        with rejects(model, ValueError, "`cond_fun`", rf"`{name}`", "`body_fun`"):
            es.mutable(f)(model, jnp.ones(3) if name == "rng" else 1.0)
    assert eqx.tree_equal(es.mutable(f)(drop.eval(), jnp.ones(3))[1], drop.eval())
    with rejects(drop, ValueError, "`cond_fun`", "`rng`"):  # in the carry as well
        es.mutable(
            lambda m: es.while_loop(lambda m: m(jnp.ones(())) < 0, lambda m: m, m)
        )(drop)


BODIES = {
    "shape": (lambda n: setattr(n, "steps", jnp.zeros(2)), ValueError, "`steps`"),
    "dtype": (lambda n: setattr(n, "steps", 0.5), ValueError, "`steps`"),
    "parameter": (lambda n: setattr(n.cell, "weight", 1.0), FROZEN, r"Cell\.weight"),
    "raises": (lambda n: n.cell(1.0) / "x", TypeError, "unsupported|type"),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_a_body_may_not_do(name, loop):
    write, error, fragment = BODIES[name]

    def f(net):
        with pytest.raises(error, match=fragment):
            loop(lambda x: write(net) or x, 2, 0.5)
        assert eqx.tree_equal(
            (net.steps, net.cell.total), (jnp.array(0), jnp.zeros(()))
        )
        return loop(net.cell, 1, 0.5)

    _, new = es.mutable(f)(Net())
    assert new.cell.total == 0.5


def test_a_body_that_writes_to_the_carry_and_returns_another(loop):
    def run(choose):
        def f(net):
            def body(cell):
                old = cell.replace()
                cell(1.0)
                return choose(net, old)

            return loop(body, 2, net.cell)

        return es.mutable(f)

    net = Net()
    with rejects(net, ValueError, r"`cell\.total`", "Return the module"):
        run(lambda net, old: old)(net)
    with rejects(net, ValueError, r"`cell\.total`", "Return the module"):
        run(lambda net, old: net.cell)(net)


CARRIES = {
    "structure": (lambda c: (c, c), "not an array|structure"),
    "shape": (lambda c: (c[0], jnp.ones(2)), "shape"),
    "mode": (lambda c: (c[0].eval(), c[1]), "structure"),
    "static": (
        lambda c: (c[0].replace(activation=jnp.cos), c[1]),
        "not an array|structure",
    ),
}


@pytest.mark.parametrize("name", CARRIES)
def test_a_carry_that_changes(name, loop):
    class Plain(es.Module):
        weight: es.Parameter = 1.0
        activation: object = jnp.sin

    change, text = CARRIES[name]
    with pytest.raises(TypeError, match=text):
        loop(change, 2, (Plain(), 0.0))


def test_objects_kept_from_the_body_are_closed(loop):
    kept = []
    es.mutable(lambda m: loop(lambda c: kept.append(c) or c, 1, m))(Cell())
    with pytest.raises(FROZEN, match="closed"):
        kept[0].total = 1.0


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
def test_what_init_draws_does_not_depend_on_the_loop(forward, loop):
    ours, expected = (
        Model().init(0, jnp.ones(3), call=ft.partial(forward, loop=run))
        for run in (loop, by_hand)
    )
    assert eqx.tree_equal(ours, expected)


def test_a_model_that_is_not_initialized(loop):
    class Scale(es.Module):
        weight: es.Parameter = es.Initializer(jr.normal)

        def __call__(self, x):
            return self.weight * x

    for use in (
        lambda m: loop(lambda m: m, 2, m),
        es.mutable(lambda m: loop(m, 2, 0.5)),
    ):
        with pytest.raises(es.NotInitializedError, match="weight"):
            use(Scale())
