"""`es.vmap`: nested, as a decorator, and under other transforms."""

import copy
import dataclasses
import functools as ft
import inspect
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from models import Noisy

import eqx_state as es


class Tally(es.Module):
    weight: es.Parameter
    total: es.BatchStat

    def __call__(self, x):
        self.total = self.total + x
        return self.weight * x


XS = jnp.arange(3.0)


# --- Nesting, decorating ------------------------------------------------------------


@pytest.mark.parametrize("how", ["vmap(vmap)", "closure", "two names"])
def test_nested_vmap(how):
    class Mean(es.Module):
        mean: es.BatchStat
        rng: es.Rng

        def __call__(self, x):
            axes = ("i", "j") if how == "two names" else ("j",)
            mean = lax.pmean(x, axes)
            self.mean = mean if how == "two names" else lax.pmean(mean, "i")
            key, self.rng = jr.split(self.rng)
            return jr.normal(key)

    xs = jnp.arange(6.0).reshape(2, 3)
    model = Mean(0.0, jr.key(0))
    if how == "closure":

        def f(m, xs):
            row = lambda x: es.vmap(lambda y: m(y), axis_name="j")(x)  # noqa: E731
            return es.vmap(row, axis_name="i")(xs)

        y, new = es.mutable(f)(model, xs)
    else:
        f = es.vmap(es.vmap(model, axis_name="j"), axis_name="i")
        y, new = es.mutable(f)(xs)
    assert new.mean == xs.mean()
    assert len(set(y.ravel().tolist())) == 6
    assert new.rng.shape == ()
    assert new.rng != model.rng


@pytest.mark.parametrize("base", [eqx.Module, es.Module], ids=["eqx", "es"])
@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_a_decorated_method(base):
    class Net(base):
        noise: Noisy
        total: Tally

        @es.vmap
        def __call__(self, x):
            return self.noise(x)

        @ft.partial(es.vmap, in_axes=(0, None), axes={es.BatchStat: 0})
        def add(self, x, y, *, z=0.0):
            """Doc."""
            self.total(x + y)
            return x + y

    model = Net(Noisy(jr.key(0)), Tally(1.0, jnp.ones(3)))
    y, new = es.mutable(model)(XS)
    assert len(set((y - XS).tolist())) == 3
    assert new.noise.rng != model.noise.rng
    called = es.mutable(model.add)(XS, 1.0)
    threaded = es.mutable(lambda m, *args: m.add(*args))(model, XS, 1.0)
    for y, new in (called, threaded):
        assert (y == XS + 1).all()
        assert (new.total.total == XS + 2).all()
    assert Net.add.__doc__ == "Doc."
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Tally\.total"):
        model.add(XS, 1.0)


def test_a_decorated_method_of_a_parent():
    class Base(es.Module):
        noise: Noisy

        @es.vmap
        def __call__(self, x):
            return self.noise(x)

    class Child(Base):
        def __call__(self, x):
            return super().__call__(x) + 1.0

    y, new = es.mutable(Child(Noisy(jr.key(0))))(XS)
    expected, expected_model = es.mutable(Base(Noisy(jr.key(0))))(XS)
    assert (y == expected + 1.0).all()
    assert new.noise.rng == expected_model.noise.rng


def test_the_wrapper():
    def f(x, y=1):
        """Doc."""

    wrapped = es.vmap(f, in_axes=(0, None), axes={es.State: 0})
    assert wrapped.__wrapped__ is f
    assert wrapped.__doc__ == "Doc."
    assert wrapped.__name__ == "f"
    assert inspect.signature(wrapped) == inspect.signature(f)
    assert hash(wrapped) == hash(es.vmap(f, in_axes=(0, None), axes={es.State: 0}))
    a, b = es.vmap(Noisy(jr.key(0))), es.vmap(Noisy(jr.key(1)))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.leaves(a)[0] == jr.key(0)
    assert jax.tree.structure(a) != jax.tree.structure(es.vmap(a.__wrapped__, None))


@pytest.mark.parametrize(
    "twin",
    [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_of_the_wrapper(twin):
    f = es.vmap(Noisy(jr.PRNGKey(0)), axes={es.Rng: es.SPLIT})
    y, new = es.mutable(twin(f))(XS)
    expected, expected_model = es.mutable(f)(XS)
    assert (y == expected).all()
    assert (new.rng == expected_model.rng).all()


def test_a_wrapper_as_a_field():
    class Net(es.Module):
        lanes: Any

        def __call__(self, xs):
            return self.lanes(xs)

    model = Net(es.vmap(Noisy(jr.PRNGKey(0))))
    y, new = es.mutable(model)(XS)
    expected, expected_model = es.mutable(model.lanes)(XS)
    assert (y == expected).all()
    assert (new.lanes.f.rng == expected_model.rng).all()
    assert jax.tree.structure(new) == jax.tree.structure(model)


# --- Under other transforms ---------------------------------------------------------


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_under_filter_jit_it_traces_once():
    traces = []

    class Net(Noisy):
        def __call__(self, x):
            traces.append(1)
            return super().__call__(x)

    model = Net(jr.key(0))
    eager, eager_model = es.mutable(es.vmap(model))(XS)
    del traces[:]
    for i in range(3):
        y, model = eqx.filter_jit(es.mutable(es.vmap(model)))(XS)
        if i == 0:
            np.testing.assert_allclose(y, eager, rtol=1e-6)
            assert model.rng == eager_model.rng
    assert len(traces) == 1


def test_vmap_in_grad_in_jit_equals_the_handwritten_version():
    def by_hand(weight, mean, xs):
        def loss(weight):
            new = 0.5 * mean + 0.5 * jnp.mean(xs)
            return jnp.mean((weight * (xs - new)) ** 2), new

        return jax.value_and_grad(loss, has_aux=True)(weight)

    class Norm(es.Module):
        weight: es.Parameter
        mean: es.BatchStat

        def __call__(self, x):
            self.mean = 0.5 * self.mean + 0.5 * lax.pmean(x, "batch")
            return self.weight * (x - self.mean)

    traces = []

    @eqx.filter_jit
    def step(model, xs):
        traces.append(1)

        def loss_fn(model, xs):
            return jnp.mean(es.vmap(model, axis_name="batch")(xs) ** 2)

        return es.value_and_grad(loss_fn)(model, xs)

    model = Norm(2.0, 0.0)
    for _ in range(3):
        (loss_h, mean_h), grad_h = by_hand(model.weight, model.mean, XS)
        (loss, model), grads = step(model, XS)
        np.testing.assert_allclose(loss, loss_h, rtol=1e-6)
        np.testing.assert_allclose(model.mean, mean_h, rtol=1e-6)
        np.testing.assert_allclose(grads.weight, grad_h, rtol=1e-6)
        assert grads.mean is None
    assert len(traces) == 1


def test_gradients_flow_through_a_written_state_in_one_call():
    class Net(es.Module):
        weight: es.Parameter
        last: es.State

        def __call__(self, x):
            self.last = self.weight * lax.pmean(x, "batch")
            return self.last + x

    def loss_fn(model, xs):
        return jnp.sum(es.vmap(model, axis_name="batch")(xs)) + model.last

    (_, new), grads = es.value_and_grad(loss_fn)(Net(2.0, 0.0), XS)
    assert new.last == 2.0
    assert grads.weight == 4 * XS.mean()


def test_gradients_of_each_example():
    class Net(es.Module):
        w: es.Parameter = 2.0
        calls: es.State = 0

        def __call__(self, x):
            self.calls = self.calls + 1
            return self.w * x

    def f(model, xs):
        return es.vmap(es.grad(lambda m, x: m(x) ** 2), (None, 0))(model, xs)

    grads, models = f(Net(), XS)
    assert (grads.w == 4 * XS**2).all()
    assert models.calls.tolist() == [1, 1, 1]
    ((grads, models), new) = es.mutable(f)(Net(), XS)
    assert (grads.w == 4 * XS**2).all()
    assert models.calls.tolist() == [1, 1, 1]
    assert new.calls == 0


def test_a_module_that_a_lane_returns_is_a_snapshot():
    def f(model):
        return es.vmap(lambda x: (model, "text", 1.0), axis_size=3)(XS)

    (out, text, ones), new = es.mutable(f)(Tally(1.0, 2.0))
    assert out.total.tolist() == [2.0] * 3
    assert (text, ones.tolist()) == ("text", [1.0] * 3)
    assert new.total == 2.0
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Tally\.total"):
        out(1.0)


def test_holes_and_empty_containers():
    class Maybe(es.Module):
        a: Noisy | None
        b: es.State[dict] = dataclasses.field(default_factory=dict)

        def __call__(self, x):
            return x if self.a is None else self.a(x)

    y, new = es.mutable(es.vmap(Maybe(None)))(XS)
    assert (y == XS).all()
    assert new.b == {}
