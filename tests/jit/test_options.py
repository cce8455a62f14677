"""The options of `es.jit`: donation, and options that are passed to `jax.jit`."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jit_cases import Counter, X

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


# --- `donate` -------------------------------------------------------------------------


DELETED = {
    "all": (True, True),
    "all-except-first": (False, True),
    "warn": (True, True),
    "warn-except-first": (False, True),
    "none": (False, False),
}


def both(a, b):
    return a["x"] + 1.0, b["x"] + 1.0


@pytest.mark.parametrize("donate", DELETED)
def test_donated_arrays_are_gone(donate):
    a, b = {"x": jnp.ones(3)}, {"x": jnp.ones(3)}
    f = es.jit(both, donate=donate)
    out = f(b=b, a=a)
    assert (a["x"].is_deleted(), b["x"].is_deleted()) == DELETED[donate]
    assert eqx.tree_equal(out, (2 * jnp.ones(3), 2 * jnp.ones(3)))


@pytest.mark.parametrize("donate", DELETED)
def test_only_warn_warns_of_donated_arrays_that_could_not_be_used(donate):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f = es.jit(lambda a, b: (jnp.sum(a), jnp.sum(b)), donate=donate)
        f(X + 1, X + 1)
        f(jnp.ones(4), jnp.ones(4))  # on the fast path
    texts = [str(w.message) for w in caught]
    assert len(texts) == (2 if donate.startswith("warn") else 0)
    assert all("donated buffers were not usable" in text for text in texts)


def test_arrays_that_a_function_closes_over_are_not_donated():
    model, teacher = Counter(jnp.ones(3)), Counter(jnp.ones(3))

    def with_teacher(x, default=teacher):  # JAX could use the buffer of every array
        return x + teacher.weight, x - teacher.weight, x * default.weight

    @es.jit(donate="all")
    def step(model, x):
        return es.mutable(model)(x)[1], *with_teacher(x)

    for _ in range(2):
        model, *_ = step(model, jnp.ones(3))
    es.jit(lambda f, x: f(x), donate="all")(with_teacher, jnp.ones(3))
    assert model.count == 2
    assert not teacher.weight.is_deleted()


@pytest.mark.parametrize("donate", ["al", None])
def test_an_unknown_value_of_donate_is_an_error(donate):
    match = r"`donate` is one of 'all', 'all-except-first', 'warn'"
    with pytest.raises(ValueError, match=match):
        es.jit(both, donate=donate)


def test_an_error_of_the_function_is_not_replaced_by_one_about_donation():
    def fail(x, y):
        raise ValueError("of mine")

    with pytest.raises(ValueError, match="of mine"):
        es.jit(fail, donate="all")(X, X)
