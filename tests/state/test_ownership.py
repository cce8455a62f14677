"""Ownership in scopes of `es.mutable`: snapshots, nested scopes, contexts of JAX."""

import contextlib
import copy
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import untouched
from models import Counter, counts, Pair

import eqx_state as es
from eqx_state._state.scope import is_any_open


# --- Snapshots and copies -----------------------------------------------------------


@pytest.mark.parametrize(
    "pick",
    [lambda m: [m.a, {"x": m}], lambda m: m.a.step, lambda m: es.mutable(m.a)],
    ids=["containers", "method", "wrapper"],
)
def test_modules_in_the_output_are_frozen_snapshots(pick):
    def f(model):
        model.a.count = 7
        out = pick(model)
        model.a.count = 8
        return out

    out, new = es.mutable(f)(Pair(Counter(), Counter()))
    assert new.a.count == 8
    modules = [m for _, m in es.modules(out) if isinstance(m, Counter)]
    assert modules
    for module in modules:
        with pytest.raises(dataclasses.FrozenInstanceError, match="count`: modules"):
            module.step()
    assert new.a.count == 8


# --- Ownership ----------------------------------------------------------------------


def test_nested_scopes():
    def outer(model, x):
        def inner(layer, x):
            model.b.step()  # the outer scope is still open
            return layer(x)

        y, new = es.mutable(inner)(model.a, x)
        assert model.a.count == 0
        assert new.count == 1
        with pytest.raises(dataclasses.FrozenInstanceError, match="Counter.count"):
            new.step()
        model.a = new
        model.a.step()
        return y

    model = Pair(Counter(), Counter())
    with untouched(model):
        y, new = es.mutable(outer)(model, 1.0)
    assert y == 2.0
    assert counts(new) == [2, 1]


# --- Contexts and transforms of JAX -------------------------------------------------


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.named_scope("scope"),
        jax.disable_jit,
        jax.ensure_compile_time_eval,
        jax.checking_leaks,
    ],
    ids=["named_scope", "disable_jit", "eval", "checking_leaks"],
)
def test_contexts_of_jax_do_not_count_as_transforms(context):
    def f(model):
        with context():
            model.step()

    assert es.mutable(f)(Counter())[1].count == 1


@pytest.mark.parametrize(
    "start",
    [0, True, np.array(0, np.int16), np.zeros(2)],
    ids=repr,
)
def test_a_jitted_loop_compiles_once(start):
    class Net(es.Module):
        state: es.State = start
        numbers: es.State[dict] = dataclasses.field(default_factory=lambda: {"n": 0})

        def __call__(self, x):
            self.state = jnp.logical_not(self.state) if start is True else -self.state
            self.numbers = {"n": 1}
            return x

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model, x):
        return es.mutable(model)(x)

    model = Net()
    structure = jax.tree.structure(model)
    for _ in range(3):
        _, model = step(model, jnp.array(1.0))
        assert jax.tree.structure(model) == structure
        assert not any(x.weak_type for x in jax.tree.leaves(model))
    assert model.numbers["n"] == 1


def test_after_a_call_that_fails_no_scope_is_open():
    def f(model, xs):
        @es.vmap
        def one(x):
            assert is_any_open()
            raise ZeroDivisionError

        one(xs)

    with contextlib.suppress(ZeroDivisionError):
        es.mutable(f)(Counter(), jnp.ones(2))
    assert not is_any_open()


def test_a_copy_of_the_fields_of_an_owned_module_is_an_ordinary_dict():
    fields = es.mutable(lambda model: [copy.copy(model.__dict__)])(Counter())[0][0]
    assert type(fields) is dict
    assert fields.keys() == Counter().__dict__.keys()
