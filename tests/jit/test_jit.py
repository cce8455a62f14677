"""`es.jit` in place of `eqx.filter_jit`: callables, arguments and results."""

import functools as ft
import inspect
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import rejects, untouched
from jax.errors import TracerBoolConversionError
from jit_cases import Counter

import eqx_state as es


X = jnp.array([1.0, 2.0, 3.0])
XX = jnp.arange(9.0).reshape(3, 3)


# --- Callables ------------------------------------------------------------------------


def counts_keywords(f):
    @ft.wraps(f)
    def run(*args, **kwargs):
        return f(*args, **kwargs) + len(kwargs)

    return run


def scales(f):
    @ft.wraps(f)
    def run(x, *, scale):
        return f(x, x) * scale

    return run


class Decorated(es.Module):
    @counts_keywords
    def __call__(self, x, y):
        return x + y

    @counts_keywords
    def method(self, x, y):
        return x + y


def plus(x, y):
    return x + y


class Times(es.Module):
    def __call__(self, x, y):
        return x @ y


class CountsKeywords(eqx.Module):
    f: object

    @property
    def __wrapped__(self):
        return self.f

    def __call__(self, *args, **kwargs):
        return self.f(*args, **kwargs) + len(kwargs)


def with_signature(f):
    run = counts_keywords(f)
    run.__signature__ = inspect.signature(f)
    return run


# Each with keyword arguments for a call with one argument `x`.
WRAPPED = {
    "by a decorator": (counts_keywords(plus), {"y": X}),
    "with the signature of the function": (with_signature(plus), {"y": X}),
    "with keywords of its own": (scales(plus), {"scale": X}),
    "a module": (Decorated(), {"y": X}),
    "a method": (Decorated().method, {"y": X}),
    "in a partial": (ft.partial(counts_keywords(plus), X), {"y": X}),
    "in Equinox's wrapper": (
        eqx.debug.assert_max_traces(counts_keywords(plus), max_traces=9),
        {"y": X},
    ),
    "by a module": (CountsKeywords(plus), {"y": X}),
    "in a transform": (es.checkpoint(counts_keywords(plus)), {"y": X}),
    # JAX maps keywords over their first axis.
    "in es.vmap": (es.vmap(lambda x, y: x @ y, in_axes=1), {"y": XX}),
    "a module in es.vmap": (es.vmap(Times(), in_axes=1), {"y": XX}),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_keywords_are_bound_as_the_function_binds_them(case):
    f, keywords = WRAPPED[case]
    args = () if case == "in a partial" else (XX if "es.vmap" in case else X,)
    assert eqx.tree_equal(es.jit(f)(*args, **keywords), f(*args, **keywords))


def double(x, by=2.0):
    return by * x


class Plain:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return self.by * x

    def method(self, x):
        return self.by * x


CALLABLES = {
    "function": lambda: double,
    "jax function": lambda: jnp.negative,
    "jitted twice": lambda: es.jit(es.jit(double)),
    "functools.partial": lambda: ft.partial(double, by=3.0),
    "eqx.Partial": lambda: eqx.Partial(double, by=jnp.array(3.0)),
    "method of a module": lambda: eqx.nn.Linear(3, 2, key=jr.key(0)).__call__,
    "method": lambda: Plain(3.0).method,
    "class method": lambda: dict.fromkeys,
}


@pytest.mark.parametrize("case", CALLABLES)
def test_every_callable_can_be_jitted(case):
    f = CALLABLES[case]()
    x = X if case != "class method" else ("a", "b")
    assert eqx.tree_equal(es.jit(f)(x), f(x), rtol=1e-6)


def test_jit_may_be_combined_with_other_decorators_of_methods():
    class Model(eqx.Module):
        w: jax.Array

        @es.jit
        def method(self, x):
            return self.w * x

        @staticmethod
        @es.jit
        def static(x):
            return 2.0 * x

        @classmethod
        @es.jit
        def make(cls, w):
            return cls(w + 1.0)

        @property
        @es.jit
        def norm(self):
            return jnp.sum(self.w)

    model = Model(X)
    assert jnp.array_equal(model.method(X), X * X)
    assert jnp.array_equal(Model.method(model, X), X * X)
    assert jnp.array_equal(model.static(X), 2 * X)
    assert eqx.tree_equal(Model.make(X), Model(X + 1.0))
    assert model.norm == 6.0


def test_jit_keeps_name_docstring_and_signature():
    def step(x: int) -> int:
        """One step."""
        return x

    for jitted in (es.jit(step), es.jit(es.jit(step)), es.jit(donate="all")(step)):
        assert jitted.__name__ == "step"
        assert jitted.__doc__ == "One step."
    assert es.jit(step).__wrapped__ is step
    assert "jit_step" in es.jit(step).lower(X).as_text()


@pytest.mark.parametrize("donate", ["all", "all-except-first", "none"])
def test_a_program_is_compiled_ahead_for_static_values(donate):
    lowered = es.jit(lambda x, y: 2 * x + y, donate=donate).lower(jnp.array(3), 4)
    assert "multiply" in lowered.as_text()
    assert lowered.compile()(jnp.array(3), 4) == 10


# --- Arguments and results ------------------------------------------------------------


def test_errors_of_the_function_are_raised_unchanged():
    class Mine(Exception):
        pass

    error = Mine("mine")

    @es.jit
    def outer(model, x):
        return es.mutable(es.jit(fails))(model, x)

    def fails(model, x):
        model.count = model.count + 1
        raise error  # the line

    model = Counter(1.0)
    with untouched(model), pytest.raises(Mine, match=r"^mine") as info:
        outer(model, X)
    assert info.value is error
    assert info.value.__cause__ is None
    lines = [frame.line for frame in traceback.extract_tb(info.value.__traceback__)]
    assert lines[-1] == "raise error  # the line"
    with pytest.raises(TypeError, match=r"unsupported operand type"):
        es.jit(lambda x: x + "a" + 1)(1)


def test_a_failed_trace_is_not_remembered():
    fails = [True]

    @es.jit
    def f(x):
        if fails.pop():
            raise RuntimeError("once")
        return x

    with pytest.raises(RuntimeError, match="once"):
        f(X)
    fails.append(False)
    assert jnp.array_equal(f(X), X)


def test_a_stateful_module_that_occurs_twice_is_an_error():
    norm, x = es.nn.BatchNorm(3), jnp.ones((4, 3))
    model = eqx.nn.Sequential([norm, eqx.nn.Lambda(jax.nn.relu), norm])
    jitted = es.jit(lambda m, x: es.mutable(m)(x)[1])
    places = r"layers\[0\]`", r"layers\[2\]`", "occurs twice"
    for call in (
        lambda: jitted(m=model, x=x),
        lambda: es.jit(lambda x: es.mutable(model)(x)[1])(x),
        lambda: jitted.lower(model, x),
    ):
        for _ in range(2):
            with rejects(model, ValueError, *places):
                call()


# --- Errors of JAX --------------------------------------------------------------------


class Layer(es.Module):
    weight: es.Parameter = 1.0

    def __call__(self, x):
        return 1 if x.sum() > self.weight else 2


def positive(model, x):
    return model(x)


class Owner:
    def positive(self, model, x):
        return model(x)


NAMES = {
    "positive": [
        lambda: es.jit(positive)(Layer(), X),
        lambda: es.jit(eqx.Partial(positive, Layer()))(X),
        lambda: es.jit(Owner().positive)(Layer(), X),
    ],
    "Layer": [lambda: es.jit(Layer())(X)],
    "__call__": [lambda: es.jit(Layer().__call__)(X)],
}


@pytest.mark.parametrize("name", NAMES)
def test_an_error_of_jax_names_the_function_and_its_file(name):
    for call in NAMES[name]:
        with pytest.raises(TracerBoolConversionError, match="boolean") as info:
            call()
        assert f"function {name} at {__file__}" in str(info.value)
        assert "eqx_state" not in str(info.value).replace(__file__, "")


def test_argument_names_may_clash():
    def f(x, /, **kwargs):
        return x + kwargs["x"]

    assert jnp.array_equal(es.jit(f)(X, x=X), 2 * X)
    with pytest.raises(TracerBoolConversionError, match="function builtin"):
        es.jit(max)(X[0], X[1])
