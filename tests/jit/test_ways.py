"""`es.jit`: the fast path gives bit for bit the results of the slow path."""

import collections
import contextlib
import functools as ft
import operator
import types
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
import pytest
from helpers import reuses_keys, untouched
from zoo import CASES, WITHOUT_GRADS

import eqx_state as es
from eqx_state._jit import programs as _programs
from eqx_state._jit.options import Options
from eqx_state._jit.programs import programs_of


ONE = jnp.ones(())


class Scale(es.Module):
    factor: es.Parameter

    def __call__(self, x):
        return self.factor * x


@contextlib.contextmanager
def fast_path_only():
    """Inside, a call that needs the slow path fails."""

    def refuse(*args, **kwargs):
        raise AssertionError("the slow path")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_programs, "JitCall", refuse)
        yield


@contextlib.contextmanager
def slow_path_only(f):
    programs = programs_of(f, Options())
    plans, programs.plans = programs.plans, ()
    yield
    programs.plans = plans


def same(a, b):
    """Assert equal structures, types and bits, and identical static objects."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        if isinstance(x, jax.Array):
            assert x.aval == y.aval
            assert eqx.tree_equal(x, y)
        else:
            assert x is y
    assert [p.name for p in es.parts(a)] == [p.name for p in es.parts(b)]


# --- Models of the zoo ----------------------------------------------------------------


def program(name, model, x):
    """The call and its gradients, selected parts, and static values."""
    call = CASES[name].call
    if name in WITHOUT_GRADS:  # this JAX cannot compile them
        (_, new), grads = es.mutable(call)(model, x), None
    else:
        loss = lambda model, x: call(model, x).sum()  # noqa: E731
        (_, new), grads = es.value_and_grad(loss)(model, x)
    parts = es.filter(model, es.Parameter), es.mask(model, es.State)
    return {"model": new, "others": (grads, parts, "done", model)}


@reuses_keys
@pytest.mark.parametrize("name", CASES)
def test_both_paths_give_the_same_results(name):
    def f(model, x):
        return program(name, model, x)

    jitted, model = es.jit(f), CASES[name].model()
    for x in CASES[name].inputs(2):
        with untouched(model):
            slow = jitted(model, x)
            with fast_path_only():
                fast = jitted(model, x)
        same(fast, slow)
        # Pass the result of one path to the other path.
        model = fast["model"]
        with slow_path_only(f):
            again = jitted(model, x)
        with fast_path_only():
            same(jitted(slow["model"], x), again)
    assert len(programs_of(f, Options()).plans) == 1


# --- Several signatures, scopes, and functions without weak references ----------------


def test_the_signatures_that_were_used_last_keep_the_fast_path():
    @es.jit
    def f(x, n):
        return x * n

    for n in 2 * tuple(range(12)):
        assert f(ONE, n) == n
    programs = programs_of(f.__wrapped__, Options())
    assert len(programs.plans) == 8
    with fast_path_only():
        assert f(ONE, 4) == 4
    assert f(ONE, 0) == 0  # takes the place of the plan for 5
    with fast_path_only():
        for n in (0, 4, *range(6, 12)):
            assert f(ONE, n) == n
        with pytest.raises(AssertionError, match="the slow path"):
            f(ONE, 5)


def test_a_call_in_a_scope_does_not_disable_the_fast_path():
    f = es.jit(lambda x: 2 * x)
    f(ONE)
    assert es.mutable(lambda scale: f(scale.factor))(Scale(3.0))[0] == 6.0
    with fast_path_only():
        assert f(ONE) == 2.0


def test_callables_without_weak_references_take_the_fast_path():
    tree = {"a": ONE, "b": 2 * ONE}
    first, second = (es.jit(operator.itemgetter(key)) for key in "ab")
    assert (first(tree), second(tree)) == (1, 2)
    with fast_path_only():
        assert (first(tree), second(tree)) == (1, 2)


class Rate(Scale):
    def scale(self, x):
        return self(x)

    vmapped = es.vmap(scale)


class Pair(NamedTuple):
    factor: Any
    scale = Rate.scale
    __call__ = Scale.__call__


RATE, PAIR = Rate(3.0), Pair(3.0)
MAPPED = es.vmap(Rate.scale, in_axes=(None, 0))
CALLABLES = {
    "method": lambda: RATE.scale,
    "__call__": lambda: RATE.__call__,
    "mutable": lambda: es.mutable(RATE.scale),
    "mapped": lambda: es.vmap(RATE.scale),
    "decorated": lambda: RATE.vmapped,
    "Partial": lambda: eqx.Partial(es.vmap(eqx.Partial(RATE.scale))),
    "method of a vmap": lambda: types.MethodType(MAPPED, RATE),
    "method of a tuple": lambda: PAIR.scale,
}


@pytest.mark.parametrize("name", CALLABLES)
def test_every_callable_takes_the_fast_path(name):
    make, x = CALLABLES[name], jnp.ones(2)
    slow = es.jit(make())(x)
    with fast_path_only():
        same(es.jit(make())(x), slow)
    same(slow, make()(x))


# --- Arguments and fields -------------------------------------------------------------


def leaky(slope, x):
    return jnp.where(x > 0, x, slope * x)


class Controller:
    """Not a pytree. Its bound methods are equal, but not identical."""

    def scale(self, x):
        return 2.0 * x


CONTROLLER = Controller()


@jtu.register_pytree_node_class
class Named:
    def __init__(self, arrays, axes):
        self.arrays, self.axes = arrays, axes

    def tree_flatten(self):
        return self.arrays, self.axes

    @classmethod
    def tree_unflatten(cls, axes, arrays):
        return cls(list(arrays), axes)


class Holder(eqx.Module):
    value: Any
    rate: float = eqx.field(static=True, default=0.5)


def with_more(name, value):
    holder = Holder([ONE, Named([ONE], ("i", 3))])
    object.__setattr__(holder, name, value)
    return holder


MLP = eqx.nn.MLP(1, 1, 2, 1, activation=lambda x: leaky(0.1, x), key=jr.key(0))
ADAM = optax.adam(1e-3)
LINEAR = eqx.nn.Linear(1, 1, key=jr.key(0))
ARGUMENTS = {
    "partial": lambda: PARTIAL,
    "WeightNorm": lambda: WEIGHT_NORM,
    "transformation": lambda: ADAM,
    "bound method": lambda: CONTROLLER.scale,
    "default dict": lambda: collections.defaultdict(list, {1: [ONE]}),
    "custom": lambda: Named([ONE, {"a": [ONE]}], ("i", 3)),
    "more in a module": lambda: with_more("cached", ONE),
}
PARTIAL, WEIGHT_NORM = ft.partial(leaky, 0.1), eqx.nn.WeightNorm(LINEAR)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_takes_the_fast_path(name):
    f = es.jit(lambda held, x: (held, 2 * x))
    make = ARGUMENTS[name]
    slow, _ = f(make(), ONE)
    with fast_path_only():
        fast, y = f(make(), ONE)
        again, _ = f(fast, ONE)
    assert y == 2.0
    same(fast, slow)
    same(again, slow)


class SameAsOne:
    """A key that equals 1, but has a different type."""

    def __eq__(self, other):
        return other == 1

    def __hash__(self):
        return hash(1)


OTHERS = {
    "a bool for an integer": ({1: ONE}, {True: ONE}),
    "an object for an integer": ({1: ONE}, {SameAsOne(): ONE}),
    "other static data": (Named([ONE], 1), Named([ONE], True)),
    "the name of what it wraps": (Holder(ONE), with_more("__name__", "f")),
    "a name and a cache": (with_more("cached", 1), with_more("__doc__", "f")),
    "another partial": (PARTIAL, ft.partial(leaky, 0.1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_different_arguments_need_different_programs(name):
    traces = []

    @es.jit
    def f(tree, x):
        traces.append(1)
        return tree, x

    for tree in OTHERS[name]:
        for _ in range(2):
            out, _ = f(tree, ONE)
            assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert len(traces) == 2


def test_a_function_argument_may_later_refer_to_an_owned_module():
    held = [None]

    def scale(x):
        return x if held[0] is None else held[0](x)

    f = es.jit(lambda scale, x: scale(x))
    assert (f(scale, ONE), f(scale, ONE)) == (1.0, 1.0)

    class Counter(es.Module):
        n: es.State = 0

        def __call__(self, x):
            self.n = self.n + 1
            return 5.0 * x

    def inside(counter):
        held[0] = counter
        y = f(scale, ONE)
        held[0] = None
        return y

    y, new = es.mutable(inside)(Counter())
    assert (y, new.n) == (5.0, 1)
