"""`es.jit`: threads do not meet in it, and nothing of a call is kept alive."""

import gc
import threading
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_state as es


X = jnp.array([1.0, 2.0, 3.0])


class Layer(es.Module):
    weight: es.Parameter
    total: es.State

    def __call__(self, x):
        self.total = self.total + self.weight * x
        return x * self.total


class Model(es.Module):
    a: Layer
    b: Layer


def model(seed=0):
    return Model(*(Layer(1.0 + i, 0.5 * i * X) for i in (seed, seed + 1)))


@es.jit
def shared_step(layer, x):
    return layer(x)


def pure(m, x):
    y, m = es.jit(es.mutable(m.a))(x)
    return jnp.sum(y + m.total)


@pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="the leak check fails with threads, also around `eqx.filter_jit`",
)
def test_threads_get_the_results_of_their_own_models():
    jitted = es.jit(
        lambda m, x: es.mutable(lambda m, x: (shared_step(m.a, x), m.b(x)))(m, x)
    )
    results: dict[int, Any] = {}
    start = threading.Barrier(8)

    def work(i):
        start.wait()
        m, outs = model(i), []
        for _ in range(5):
            out, m = jitted(m, X)
            y, m = es.mutable(lambda m, x: shared_step(m.a, x))(m, X)
            outs.append((out, y))
        results[i] = outs, m

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    start = threading.Barrier(1)
    parallel, results = results, {}
    for i in range(8):
        work(i)
        assert eqx.tree_equal(parallel[i], results[i])


def freed(make):
    """Whether a model is freed after what `make` makes of it was called and dropped."""
    m = model(3)
    parts = [weakref.ref(x) for x in (m, m.a, m.a.total)]
    call = make(m)
    del m
    call(X)
    del call
    gc.collect()
    return [ref() is None for ref in parts] == [True, True, True]


def in_scope(m, x):
    return es.jit(m.a)(x), shared_step(m.b, x)


def closure_in_scope(m, x):
    return es.jit(lambda x: m.a(x))(x)


def fails(m, x):
    return m.a(x) + "text"


def swallow(m, x):
    try:
        es.jit(fails)(m, x)
    except Exception:
        return


KEEPERS = {
    "argument": lambda m: lambda x: es.jit(pure)(m, x),
    "function": lambda m: lambda x: es.jit(es.mutable(m.a))(x),
    "held by the wrapper": lambda m: es.jit(es.mutable(m.a)),
    "partial": lambda m: es.jit(eqx.Partial(pure, m)),
    "method": lambda m: lambda x: es.mutable(es.jit(m.a.__call__))(x),
    "scope": lambda m: lambda x: es.mutable(in_scope)(m, x),
    "closure": lambda m: es.jit(lambda x: pure(m, x)),
    "closure in a transform": lambda m: es.jit(es.checkpoint(lambda x: pure(m, x))),
    "closure in a scope": lambda m: lambda x: es.mutable(closure_in_scope)(m, x),
    "after an error": lambda m: lambda x: swallow(m, x),
    "lowered": lambda m: lambda x: es.jit(pure).lower(m, x).compile()(m, x),
}


@pytest.mark.parametrize("case", KEEPERS)
def test_nothing_of_a_call_is_kept_alive(case):
    assert freed(KEEPERS[case])


def test_nothing_of_a_private_copy_is_kept_alive():
    refs = []

    def f(m, x):
        refs.append(weakref.ref(m.a))
        return es.jit(m.a)(x), es.jit(lambda x: m.a(x))(x), shared_step(m.a, x)

    es.mutable(f)(model(), X)
    gc.collect()
    assert refs[0]() is None


def test_no_tracer_leaks():
    def loss(m, x):
        y = es.jit(m.a)(x) + es.jit(lambda x: m.b(x))(x)
        return jnp.sum(y + es.jit(lambda x: es.jit(m.a)(x) + shared_step(m.b, x))(x))

    with jax.checking_leaks():
        for _ in range(2):
            es.mutable(loss)(model(), X)
            es.jit(es.value_and_grad(loss))(model(), X)
        with pytest.raises(Exception, match="Leaked"):
            es.jit([].append)(X)
