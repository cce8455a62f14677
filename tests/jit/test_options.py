"""`es.jit(f, **jit_kwargs)`: options that are passed to `jax.jit`."""

import jax
import pytest
from jit_cases import X

import eqx_state as es


FAST = {"xla_cpu_enable_fast_math": True}


def test_inline_removes_the_call_from_an_outer_program():
    def calls(**kwargs):
        inner = es.jit(lambda x: x * 2, **kwargs)
        # Newer versions of JAX inline when they lower, not when they trace.
        return jax.jit(lambda x: inner(x)).lower(X).as_text().count(" call @")

    assert calls() == 1
    assert calls(inline=True) == 0


def test_compiler_options_are_passed_to_the_compiler():
    run = es.jit(lambda x: x * 2, compiler_options={"no_such_option": True})
    with pytest.raises(Exception, match="no_such_option"):
        run(X)
    run = es.jit(lambda x: x * 2, compiler_options=FAST)
    assert (run(X) == 2 * X).all()
    assert (run.lower(X).compile()(X) == 2 * X).all()


def test_different_options_need_different_programs():
    traces = 0

    def f(x):
        nonlocal traces
        traces += 1
        return x * 2

    a, b, c = es.jit(f), es.jit(f, inline=True), es.jit(f, compiler_options=FAST)
    d, e = es.jit(f, inline=True), es.jit(f, compiler_options=dict(FAST))
    for run in (a, b, c, d, e, a, b, c):
        run(X)
    assert traces == 3


@pytest.mark.parametrize("name", ["static_argnums", "in_shardings", "donat"])
def test_other_options_of_jax_are_rejected(name):
    match = rf"(?s)argument '{name}'.*compiler_options, inline.*static already"
    with pytest.raises(TypeError, match=match):
        es.jit(**{name: 0})
