"""`es.jit` inside scopes and inside other transforms."""

import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from helpers import rejects

import eqx_state as es


X = jnp.array([1.0, 2.0, 3.0])


class Layer(es.Module):
    """Its output and its state depend on all its fields."""

    weight: es.Parameter
    total: es.State
    log: Any = es.field(static=True, default=None)

    def __call__(self, x):
        if self.log is not None:
            self.log.count += 1
        self.total = self.total + self.weight * x
        return x * self.total


class Model(es.Module):
    a: Layer
    b: Layer
    frozen_copy: es.Buffer[Layer]


class Log:
    """Counts traces."""

    def __init__(self):
        self.count = 0


def layer(seed=0, log=None):
    return Layer(1.0 + seed, 0.5 * seed * X, log)


def model(seed=0, log=None):
    return Model(layer(seed, log), layer(seed + 1, log), layer(seed + 2, log))


def assert_same(got, expected):
    assert eqx.tree_equal(got, expected, rtol=1e-6, atol=1e-6)


# --- State is returned ----------------------------------------------------------------


def test_a_returned_module_is_a_snapshot():
    def f(m, x):
        out = es.jit(lambda: (m.a, m.a(x)))()
        m.a(x)
        return out

    (snapshot, _), new = es.mutable(f)(model(), X)
    assert_same((snapshot.total, new.a.total), (X, 2 * X))

    def writes(m, x):
        es.jit(lambda: m.a)().total = x

    match = r"Cannot write `Layer\.total`"
    with rejects(model(), dataclasses.FrozenInstanceError, match):
        es.mutable(writes)(model(), X)


def test_the_kinds_of_the_scope_apply_inside():
    @es.jit
    def double(m):
        m.a.weight = 2 * m.a.weight

    for _ in range(2):
        match = r"`a\.weight` is a `Parameter`, but this call can write only `State`"
        with rejects(model(), dataclasses.FrozenInstanceError, match):
            es.mutable(double)(model())
        _, new = es.mutable(double, kinds=es.TreePart)(model())
        assert new.a.weight == 2.0


# --- A cached program uses the objects of the current call ----------------------------


@es.jit
def shared_step(layer, x):
    return layer(x)


def test_one_program_is_used_for_several_models_scopes_and_updates():
    log = Log()
    first, second = model(0, log), model(5, log)
    expected = first

    def step(m, x):
        return shared_step(m.a, x)

    for _ in range(2):
        y, first = es.mutable(step)(first, X)
        _, second = es.mutable(step)(second, X)
        expected_y, expected = es.mutable(lambda m: m.a(X))(expected)
    assert log.count == 3  # one of them is that of `step`
    assert_same((y, first), (expected_y, expected))


def test_different_paths_and_kinds_need_different_programs():
    log = Log()

    def f(m, x):
        return shared_step(m.a, x), shared_step(m.b, x)

    for _ in range(2):
        es.mutable(f)(model(0, log), X)
    assert log.count == 2  # `a` and `b`
    es.mutable(f, kinds=es.TreePart)(model(0, log), X)
    assert log.count == 4
    match = r"`frozen_copy\.total` is a `Buffer`"
    for kind in (es.State, es.Rng):  # must not use the program of `a`
        with rejects(model(0, log), dataclasses.FrozenInstanceError, match):
            es.mutable(lambda m: shared_step(m.frozen_copy, X), kinds=kind)(model())


# --- Inside other transforms ----------------------------------------------------------


def test_a_plain_transform_around_a_jitted_write_is_an_error():
    for transform in (jax.vmap, lambda f: jax.grad(lambda x: jnp.sum(f(x)))):
        with rejects(
            model(), es.TraceError, r"(?s)Cannot write `a\.\w+` here.*es\.vmap"
        ):
            es.mutable(lambda m, x, t=transform: t(es.jit(m.a))(x))(model(), X)


# --- Scopes in scopes ---------------------------------------------------------------


class Counted(es.Module):
    n: es.State = 0

    def __call__(self, x):
        self.n = self.n + 1
        self.sow("v", x)
        return x


class Three(es.Module):
    a: Counted = eqx.field(default_factory=Counted)
    b: Counted = eqx.field(default_factory=Counted)
    c: Counted = eqx.field(default_factory=Counted)


def test_sown_values_are_returned_by_their_own_scope():
    three = es.jit(lambda a, b, c, x: a(x) + b(x) + c(x))

    def f(net, x):
        only, both = {"c": net.c}, {"b": net.b, "c": net.c}
        _, one = es.capture(lambda m, x: three(net.a, net.b, m["c"], x))(only, x)
        _, two = es.capture(lambda m, x: three(net.a, m["b"], m["c"], x))(both, x)
        return list(one), list(two)

    ((one, two), _), outer = es.capture(f)(Three(), jnp.ones(()))
    assert (one, two) == (["['c'].v"], ["['b'].v", "['c'].v"])
    assert (len(outer["a.v"]), outer["b.v"]) == (2, 1.0)


def test_a_function_with_an_owned_module_may_be_passed_and_returned():
    same = es.jit(lambda f, x: ([f], x))

    def f(net):
        held = [lambda: net.a, ft.partial(max, net.b)]
        return [same(h, X)[0][0] is h for h in 2 * held]

    assert es.mutable(f)(Three())[0] == 4 * [True]
