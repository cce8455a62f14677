"""`es.mutable`: which model is made writable, and what is returned."""

import functools as ft
import gc
import inspect
import types
import weakref
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import untouched
from models import Counter, counts

import eqx_state as es


# --- The result ---------------------------------------------------------------------


NAMES = ["f", "self", "args", "model"]


@pytest.mark.parametrize("name", NAMES)
def test_a_keyword_argument_may_have_any_name(name):
    class Scaled(es.Module):
        weight: es.Parameter = 2.0

        def __call__(self, x, /, **kwargs):
            return self.weight * x * kwargs[name]

        method = __call__

    def function(model, /, x, **kwargs):
        return model(x, **kwargs)

    model = Scaled()
    for f, args in [(model, ()), (model.method, ()), (function, (model,))]:
        assert es.mutable(f)(*args, 3.0, **{name: 5.0})[0] == 30.0
        assert es.grad(f)(*args, 3.0, **{name: 5.0})[0].weight == 15.0


# --- Which model is made writable ---------------------------------------------------


def call(model, x=1.0, *, scale=1.0):
    """Call it."""
    return model(x) * scale


class Trainer:
    """An object that is not a module: its methods take the model as an argument."""

    @es.jit
    def step(self, model, x):
        return model(x)


class Methods(es.Module):
    """Methods that are decorated: the model is `self`."""

    inner: Counter

    @es.jit
    def jitted(self, x):
        return self.inner(x)

    @es.vmap
    def mapped(self, x):
        return self.inner(x)

    @eqx.filter_jit
    def filter_jitted(self, x):
        return es.mutable(self.inner)(x)


class Holder(eqx.Module):
    """A plain Equinox module that contains an `es.Module`."""

    inner: Counter
    name: str = "holder"

    def __call__(self, x):
        return self.inner(x)


C = Counter()
TARGETS = {
    "module": (C, (1.0,)),
    "bound method": (C.step, ()),
    "partial of a module": (ft.partial(C, 1.0), ()),
    "plain module": (Holder(C), (1.0,)),
    "function": (call, (C, 1.0)),
    "partial of a function": (ft.partial(call, x=1.0), (C,)),
    "eqx.Partial of a function": (eqx.Partial(call, x=1.0), (C,)),
    "decorated method of a plain object": (Trainer().step, (C, 1.0)),
    "decorated method of a module": (Methods(C).jitted, (1.0,)),
    "decorated method under es.vmap": (Methods(C).mapped, (jnp.ones(2),)),
    "es.vmap of a method": (es.vmap(C.step, axis_size=2), ()),
    "es.vmap of a function": (es.vmap(call, in_axes=(None, 0)), (C, jnp.ones(2))),
    "partial of es.vmap of a function": (
        ft.partial(es.vmap(call, in_axes=None), x=jnp.ones(2)),
        (C,),
    ),
    "nested": (lambda ms, x: ms["m"][0][1](x), ({"m": [(0, C)]}, 1.0)),
    "sequential": (eqx.nn.Sequential([eqx.nn.Identity(), C]), (1.0,)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_mutable_finds_the_model_of_every_callable(name):
    f, args = TARGETS[name]
    with untouched((C, args)):
        _, new = es.mutable(f)(*args)
    assert counts(new) == [1]


def test_a_method_that_equinox_has_decorated_is_bound_to_its_object():
    model = Methods(C)
    _, new = es.mutable(model.filter_jitted)(1.0)
    assert eqx.tree_equal(new, model)


def test_a_model_with_an_attribute_wrapped_is_a_model():
    class Log(es.Module):
        f: Callable
        calls: es.State = 0

        @property
        def __wrapped__(self):
            return self.f

        def __call__(self, x):
            self.calls = self.calls + 1
            return self.f(x)

    _, new = es.mutable(Log(jnp.sin))(1.0)
    assert new.calls == 1


BOUND = {
    "keyword": ft.partial(call, model=C),
    "eqx.Partial": eqx.Partial(call, C),
    "partial of es.vmap": ft.partial(es.vmap(call, in_axes=(None, 0)), C),
    "eqx.Partial of a wrapper": eqx.Partial(eqx.filter_jit(call), C),
}


@pytest.mark.parametrize("name", BOUND)
def test_a_model_that_only_a_partial_binds_is_an_error(name):
    for run in (es.mutable, es.grad):
        with pytest.raises(TypeError, match=f"es.{run.__name__}") as info:
            run(BOUND[name])(jnp.ones(2))
        for fragment in ("partial that binds the `Counter`", "argnums=0"):
            assert fragment in str(info.value)
    # An argument that is named is the model, whatever a partial binds.
    y, new = es.mutable(ft.partial(lambda m, x: m.weight * x, C), argnums=0)(2.0)
    assert (y, new) == (4.0, 2.0)


# --- A wrapper is a pytree ----------------------------------------------------------


def test_a_model_may_be_the_function_of_a_bound_method():
    class Cell(es.Module):
        calls: es.State = 0

        def __call__(self, *args):
            self.calls = self.calls + 1
            return args

    for f, expected in (
        (types.MethodType(Cell(), 3.0), (3.0, 5.0)),
        (types.MethodType(ft.partial(Cell(), 2.0), 3.0), (2.0, 3.0, 5.0)),
        (types.MethodType(es.jit(Cell()), 3.0), (3.0, 5.0)),
    ):
        out, new = es.mutable(f)(5.0)
        assert out == expected
        assert new.calls == 1


def test_wrapper_is_a_pytree_of_the_model():
    a, b = Counter(), Counter(weight=3.0, count=4)
    assert jax.tree.structure(es.mutable(a)) == jax.tree.structure(es.mutable(b))
    assert jax.tree.leaves(es.mutable(a)) == jax.tree.leaves(a)
    assert eqx.tree_equal(es.mutable(a), es.mutable(a))
    doubled = jax.tree.map(lambda x: 2 * x, es.mutable(a))
    assert doubled(1.0)[0] == 4.0
    other = es.mutable(a, kinds=es.TreePart)
    assert jax.tree.structure(other) != jax.tree.structure(es.mutable(a))


def test_wrapper_of_a_function():
    wrapped = es.mutable(call)
    assert wrapped.__wrapped__ is call
    assert (wrapped.__name__, wrapped.__doc__) == ("call", "Call it.")
    assert inspect.signature(wrapped) == inspect.signature(call)
    assert hash(wrapped) == hash(es.mutable(call))
    assert jax.tree.structure(wrapped) == jax.tree.structure(es.mutable(call))
    assert "call" in repr(wrapped)
    assert "Counter" in repr(es.mutable(Counter()))
    assert es.mutable(C).__wrapped__ is C


@pytest.mark.parametrize("base", [eqx.Module, es.Module], ids=["eqx", "es"])
def test_decorator_of_a_method(base):
    class Net(base):
        inner: Counter

        @es.mutable
        def step(self, x, *, scale=1.0):
            return self.inner(x) * scale

        @ft.partial(es.mutable, kinds=es.TreePart)
        def grow(self):
            self.inner.weight = self.inner.weight + 1.0

    model = Net(Counter())
    with untouched(model):
        y, new = model.step(2.0, scale=3.0)
        y2, new2 = Net.step(model, 2.0, scale=3.0)
    assert y == y2 == 12.0
    assert new.inner.count == new2.inner.count == 1
    assert type(new) is Net
    _, grown = model.grow()
    assert grown.inner.weight == 3.0


# --- Errors of other libraries --------------------------------------------------------


def test_a_stateful_equinox_layer_without_its_state_is_an_error():
    class Alone(eqx.nn.StatefulLayer):
        index: eqx.nn.StateIndex

        def __call__(self, x, state=object()):  # noqa: B008
            return state.get(self.index) + x

    with pytest.raises(TypeError, match="`the model` is an `Alone`.*called without"):
        es.mutable(Alone(eqx.nn.StateIndex(jnp.zeros(2))))(1.0)
    with pytest.raises(TypeError, match=r"`\[0\]` is a `layer`"):
        es.mutable(lambda m: object().get)([[eqx.nn.StateIndex(jnp.zeros(2))]])


def test_other_attribute_errors_are_raised_unchanged():
    index = eqx.nn.StateIndex(jnp.zeros(2))
    for model, f in (
        (index, lambda m: m.get),
        ([], lambda m: object().get),
        (index, lambda m: (_ for _ in ()).throw(AttributeError("mine"))),
    ):
        with pytest.raises(AttributeError, match="get|mine"):
            es.mutable(f)(model)


def test_a_scope_leaves_no_reference_cycle():
    model, old = Counter(jnp.ones(1000)), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            old.append(weakref.ref(model.weight))
            _, model = es.mutable(model)(1.0)
            model = model.replace(weight=0.9 * model.weight)
        assert [x() for x in old[:2]] == [None, None]
    finally:
        gc.enable()
