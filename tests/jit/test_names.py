"""`es.jit`: JAX's errors name the user's function and arguments."""

import equinox as eqx
import jax.numpy as jnp
import pytest
from jax.errors import TracerBoolConversionError

import eqx_state as es


X = jnp.ones(3)


class Layer(es.Module):
    weight: es.Parameter = 1.0

    def __call__(self, x):
        return 1 if x.sum() > self.weight else 2


def positive(model, x, *more, scale=1.0):
    return 1 if (scale * x * sum(more)).sum() > model.weight else 2


CASES = {
    "arguments": (
        lambda: es.jit(positive)(Layer(), X),
        ["positive at ", "test_names.py", "model.weight and x"],
    ),
    "more": (
        lambda: es.jit(positive)(Layer(), X, X, scale=X),
        ["model.weight, x, args[2], and scale"],
    ),
    "module": (
        lambda: es.jit(Layer())(X),
        ["Layer at ", "test_names.py", "weight and"],
    ),
    "partial": (
        lambda: es.jit(eqx.Partial(positive, Layer()))(X),
        ["positive at ", "args[0].weight"],
    ),
    "scope": (
        lambda: es.mutable(lambda model: es.jit(model.layer)(X))(Holder(Layer())),
        ["layer.weight"],
    ),
}


class Holder(es.Module):
    layer: Layer


@pytest.mark.parametrize("case", CASES)
def test_an_error_of_jax_names_the_function_and_the_arguments(case):
    call, fragments = CASES[case]
    with pytest.raises(TracerBoolConversionError, match="boolean") as info:
        call()
    message = str(info.value)
    assert [x for x in [*fragments, "test_names.py"] if x not in message] == []
    assert "eqx_state" not in message


def test_argument_names_may_clash_and_a_builtin_has_none():
    def f(x, /, **kwargs):
        return x + kwargs["x"]

    assert jnp.array_equal(es.jit(f)(X, x=X), 2 * X)
    with pytest.raises(TracerBoolConversionError, match=r"args\[0\] and args\[1\]"):
        es.jit(max)(X[0], X[1])
