"""Values that functions close over: owned modules are found, all else is constant."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter = 2.0
    n: es.State = 0.0

    def __call__(self, x):
        self.n = self.n + 1
        return self.weight * x


class Holder(es.Module):
    layer: Layer


def through(name, f, x):
    if name == "scan":
        return es.scan(lambda carry, x: (carry, f(x)), None, x[None])[1][0]
    return es.jit(f)(x)


TRANSFORMS = ["scan", "jit"]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_closure_cell_that_is_not_a_pytree_does_not_change(name):
    by_kind = {es.Parameter: 1.0, es.State: 2.0}  # these keys cannot be sorted

    def f(holder, x):
        return through(name, lambda x: by_kind[es.State] * holder.layer(x), x)

    y, new = es.mutable(f)(Holder(Layer()), jnp.array(1.0))
    assert (y, new.layer.n) == (4.0, 1.0)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_modules_are_found_in_jaxs_partial_inside_a_plain_module(name):
    def f(holder, x):
        called = jtu.Partial(lambda x: holder.layer(x))
        lambdas = eqx.nn.Sequential([eqx.nn.Lambda(called), eqx.nn.Identity()])
        return through(name, lambdas, x)

    y, new = es.mutable(f)(Holder(Layer()), jnp.array(1.0))
    assert (y, new.layer.n) == (2.0, 1.0)


# Recursive functions: `power(x, n)` multiplies `x` by `get().weight`, `n` times.


def decorated(get, jit):
    @jit
    def power(x, n):
        return x if n == 0 else power(get().weight * x, n - 1)

    return power


def by_default(get, jit):
    def power(x, n, then=None):
        return x if n == 0 else then(get().weight * x, n - 1, then)

    power.__defaults__ = (power,)
    return jit(power)


RECURSIVE = [decorated, by_default]


@pytest.mark.parametrize("make", RECURSIVE)
def test_functions_that_call_each_other_write_to_one_model(make):
    def f(holder, x):
        def get():
            holder.layer(x)
            return holder.layer

        return make(get, es.jit)(x, 3)

    y, new = es.mutable(f)(Holder(Layer()), jnp.array(1.0))
    assert (y, new.layer.n) == (8.0, 3.0)


def test_an_object_that_cannot_be_flattened_does_not_change():
    class Broken:
        pass

    def fail(x):
        raise ValueError("not now")

    jtu.register_pytree_node(Broken, fail, lambda aux, children: Broken())

    def f(layer, broken, x):
        return es.jit(lambda x: x if broken is None else layer(x))(x)

    y, new = es.mutable(f)(Layer(), Broken(), jnp.array(1.0))
    assert (y, new.n) == (2.0, 1.0)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_module_in_a_pytree_and_a_cell_that_is_filled_later():
    def f(layer, x):
        def run(x):
            return later.second(x)

        jitted = es.jit(run)
        first = es.jit(lambda x: (x, lambda: unset)[0])(x)
        later = Pair(None, layer)
        y = jitted(first)
        unset = None
        return y

    y, new = es.mutable(f)(Layer(), jnp.array(1.0))
    assert (y, new.n) == (2.0, 1.0)


def test_a_long_chain_may_be_closed_over():
    chain = None
    for i in range(1500):
        chain = [i, chain]
    assert es.jit(lambda x: x + chain[0])(jnp.array(1.0)) == 1500.0


@pytest.mark.parametrize("transform", [es.jit, es.vmap], ids=["jit", "vmap"])
def test_a_closed_over_model_outside_a_scope_is_a_constant(transform):
    # As in `eqx.filter_jit` and in JAX itself.
    model, seen = Layer(), []

    def f(x):
        seen.append(isinstance(model.weight, jax.core.Tracer))
        return model.weight * x

    assert transform(f)(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert seen == [False]


BINDS = {
    "itself": lambda m: m,
    "method": lambda m: m.run,
    "partial": lambda m: eqx.Partial(run, m),
}


@pytest.mark.parametrize("bind", BINDS.values(), ids=BINDS)
def test_a_model_that_is_called_is_traced(bind):
    seen = []

    class Spy(es.Module):
        weight: es.Parameter = 2.0

        def run(self, x):
            seen.append(isinstance(self.weight, jax.core.Tracer))
            return self.weight * x

        __call__ = run

    assert es.jit(bind(Spy()))(jnp.array(1.0)) == 2.0
    assert seen == [True]


def run(model, x):
    return model(x)


def test_a_module_beside_an_array_in_a_field_may_have_its_own_equality():
    class Sub(es.Module):
        a: es.State

        def __eq__(self, other):
            return bool(jnp.all(self.a == other.a))

        __hash__ = object.__hash__

    class Pair(es.Module):
        pair: tuple[Sub, es.State]

        def __call__(self, x):
            sub, b = self.pair
            self.pair = sub, b + 1
            return x

    model = Pair((Sub(jnp.ones(())), jnp.ones(())))
    for run in (
        lambda m, x: es.checkpoint(m)(x),
        lambda m, x: es.vmap(lambda m: m(x), None, axis_size=2)(m),
    ):
        _, new = es.mutable(run)(model, jnp.ones(()))
        assert new.pair[1] == 2
