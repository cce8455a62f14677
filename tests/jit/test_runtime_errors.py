"""`es.jit` of programs that can raise while they run: `eqx.error_if`, callbacks."""

import sys
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import eqx_state as es


pytestmark = pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="`eqx.error_if` fails under the leak check, also in `eqx.filter_jit`",
)

has_off = pytest.mark.skipif(
    tuple(map(int, eqx.__version__.split("."))) < (0, 13, 3),
    reason="Equinox < 0.13.3 has no `off`",
)
GOOD, BAD = jnp.array([1.0, 2.0]), jnp.array([1.0, -2.0])
MESSAGE = "must not be negative"
raises_check = pytest.raises(eqx.EquinoxRuntimeError, match=rf"^{MESSAGE}")
# The error of JAX depends on whether the program has finished within the call.
raises_raw = pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=MESSAGE)


class Traces:
    count = 0

    def __len__(self):
        return self.count


def counted(f):
    """`f`, and the number of its traces. A list would rule out the fast path."""
    traces = Traces()

    def g(*args):
        traces.count += 1
        return f(*args)

    return g, traces


def needs_off(case):
    return pytest.param(case, marks=has_off) if "off" in case else case


def checked(x):
    return eqx.error_if(x, x < 0, MESSAGE)


def refuse(x):
    if np.any(x < 0):
        raise OverflowError(MESSAGE)
    return x


def called(x):
    return jax.pure_callback(refuse, x, x, vmap_method="sequential")


def told(x):
    io_callback(refuse, x, x)
    return x


@pytest.fixture
def waits(monkeypatch):
    """A list that gets an entry for each wait for a result."""
    found = []
    for name in ("block_until_ready", "effects_barrier"):
        real = getattr(jax, name)
        monkeypatch.setattr(jax, name, lambda *x, f=real: (found.append(1), f(*x))[1])
    return found


# --- The error ------------------------------------------------------------------------


def test_a_failed_check_is_raised_by_the_call():
    f, traces = counted(checked)
    jitted = es.jit(f)
    for _ in range(2):  # the first call takes the slow path, the second the fast path
        with raises_check as info:
            jitted(BAD)
        assert info.type is eqx.EquinoxRuntimeError
        assert info.value.__suppress_context__
        for _ in range(2):
            assert jnp.array_equal(jitted(GOOD), GOOD)
    assert len(traces) == 1


def inner(x):
    # Equinox stores the frames of the first trace with the same text.
    return eqx.error_if(x, x < 0, f"{MESSAGE}, says inner") + 1.0


@es.jit
def middle(x):
    return inner(x)


def outer(x):
    return middle(x)


def test_the_message_has_the_frames_inside_the_program_and_no_others():
    def call(x):
        return es.jit(outer)(x)

    for _ in range(3):
        with raises_check as info:
            call(BAD)
        text = str(info.value)
        names = ["in outer", "in middle", "in inner"]
        places = [text.index(name) for name in names]
        assert places == sorted(places)
        assert "says inner" in text.splitlines()[0]
        assert text.count('  File "') == 3
        assert "EQX_ON_ERROR=breakpoint" in text
        outside = traceback.extract_tb(info.value.__traceback__)
        assert outside[1].name == "call"
        with raises_check as info:
            middle(BAD)
        assert "in inner" in str(info.value)


def test_without_details_from_equinox_the_message_is_raised(monkeypatch):
    es.jit(checked)(GOOD)
    monkeypatch.setattr("equinox._errors._jit", type(sys)("elsewhere"))
    monkeypatch.setattr("equinox._jit.last_error_info", ("another", ["stack"]))
    with raises_check as info:
        es.jit(checked)(BAD)
    assert "stack" not in str(info.value)


def test_only_errors_that_the_call_does_not_raise_are_logged(caplog):
    with raises_check:
        es.jit(checked)(BAD)
    jitted = es.jit(only_for_two)
    first_with_three(jitted)
    raises_check_in(jitted)
    assert not caplog.records
    with raises_raw:
        jax.block_until_ready(jax.jit(checked)(BAD))
    assert MESSAGE in caplog.text
    with raises_raw:
        es.jit(called)(BAD)
    assert "pure_callback failed" in caplog.text


@pytest.mark.parametrize("f", [called, told])
def test_errors_of_other_callbacks_are_raised_like_in_jax(f):
    jitted = es.jit(f)
    for _ in range(2):
        with raises_raw as info:
            jitted(BAD)
        assert "OverflowError" in str(info.value)
        assert info.type is not eqx.EquinoxRuntimeError
        assert jnp.array_equal(jitted(GOOD), GOOD)
    with raises_raw:
        jitted.lower(GOOD).compile()(BAD)


# --- Where a check can be -------------------------------------------------------------


@jax.custom_vjp
def with_rule(x):
    return checked(x)


with_rule.defvjp(lambda x: (checked(x), None), lambda _, g: (g,))


PLACES = {
    "function": checked,
    "cond": lambda x: jax.lax.cond(x.sum() < 99.0, checked, lambda x: x, x),
    "scan": lambda x: jax.lax.scan(lambda c, x: (c, checked(x)), 0, x)[1],
    "while": lambda x: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, checked(c[1])), (0, x)
    )[1],
    "jax.jit": lambda x: jax.jit(checked)(x),
    "rule": lambda x: with_rule(x),
    "deep": lambda x: jax.jit(jax.checkpoint(jax.vmap(jax.jit(checked))))(x),
    "custom root": lambda x: jax.lax.custom_root(
        lambda y: checked(x) - y, x, lambda f, y: f(y) + y, lambda g, y: y
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_check_is_found_at_every_place(case, waits):
    f, traces = counted(PLACES[case])
    jitted = es.jit(f)
    jitted(GOOD)
    assert len(waits) == 1
    with raises_check:
        jitted(BAD)
    jitted(GOOD)
    assert len(waits) in (2, 3)  # a small program may fail before the call waits for it
    assert len(traces) == 1


# --- Which programs a call waits for --------------------------------------------------


def shown(x):
    jax.debug.callback(lambda x: None, x)
    jax.debug.print("{}", x)
    return x


SILENT = {
    "plain": lambda x: 2.0 * x,
    "debug": shown,
    "a check that is off": lambda x: eqx.error_if(x, x < 0, "", on_error="off"),
    "nan": lambda x: eqx.error_if(x, x < 0, "", on_error="nan"),
    "checked at the trace": lambda x: eqx.error_if(x, x.shape[0] > 9, ""),
}


@pytest.mark.parametrize("case", [*map(needs_off, SILENT)])
def test_a_call_does_not_wait_for_a_program_that_cannot_raise(case, waits):
    jitted = es.jit(SILENT[case])
    for x in (GOOD, BAD, GOOD):
        jitted(x)
    jitted.lower(GOOD).compile()(BAD)
    assert not waits


def test_a_call_waits_for_effects_without_a_result(waits):
    @es.jit
    def f(x):
        io_callback(refuse, x, x)

    f(GOOD)
    assert len(waits) == 2
    with raises_raw:
        f(BAD)


def only_for_two(x):
    return checked(x) if x.shape == (2,) else x


def first_with_three(jitted):
    for _ in range(2):
        jitted(jnp.ones(3))


BEFORE = {
    "nothing": lambda jitted: None,
    "lowered": lambda jitted: (first_with_three(jitted), jitted.lower(GOOD)),
    "failed": lambda jitted: (first_with_three(jitted), raises_check_in(jitted)),
}


def raises_check_in(jitted):
    with pytest.raises(eqx.EquinoxRuntimeError, match=MESSAGE):
        jitted(BAD)


@pytest.mark.parametrize("case", BEFORE)
def test_a_call_waits_only_for_those_programs_of_a_function_that_can_raise(case, waits):
    f, traces = counted(only_for_two)
    jitted = es.jit(f)
    BEFORE[case](jitted)
    for _ in range(3):
        waits.clear()
        jitted(jnp.ones(3))
        assert not waits
        jitted(GOOD)
        assert len(waits) == 1
        raises_check_in(jitted)
    assert len(traces) == 2


# --- Donation, stages, outer traces -------------------------------------------------


def test_checks_work_with_donation():
    f, traces = counted(lambda a, b: (checked(a), checked(b)))
    jitted = es.jit(f, donate="all")
    for _ in range(2):
        a, b = jitted(GOOD + 0.0, GOOD + 0.0)
        assert jnp.array_equal(a, b)
        with raises_check:
            jitted(GOOD + 0.0, BAD + 0.0)
    assert len(traces) == 1


def test_a_compiled_program_raises_in_its_call(waits):
    compiled = es.jit(checked).lower(GOOD).compile()
    assert jnp.array_equal(compiled(GOOD), GOOD)
    assert len(waits) == 1
    with raises_check as info:
        compiled(BAD)
    assert "in checked" in str(info.value)


def test_inside_an_outer_trace_a_call_does_not_wait(waits):
    jitted = es.jit(told)
    jitted(GOOD)
    waits.clear()
    jax.jit(lambda x: jitted(x))(GOOD)
    jax.eval_shape(jitted, GOOD)
    jax.grad(lambda x: es.jit(checked)(x).sum())(GOOD)
    jax.vmap(es.jit(checked))(GOOD)
    assert not waits


# --- Settings of JAX and Equinox ------------------------------------------------------


def test_without_jit_errors_are_those_of_filter_jit():
    f, traces = counted(checked)
    with jax.disable_jit():
        assert jnp.array_equal(es.jit(f)(GOOD), GOOD)
        with pytest.raises(RuntimeError, match=MESSAGE) as info:
            es.jit(f)(BAD)
    assert info.type.__name__ == "EquinoxTracetimeError"
    assert len(traces) == 2
