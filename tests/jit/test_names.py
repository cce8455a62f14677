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


def of_a_closure():
    layer = Layer()
    return lambda x: 1 if x.sum() > layer.weight else 2


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
    "closure": (lambda: es.jit(of_a_closure())(X), ["layer.weight"]),
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


def sign(carry, x, *more, scale=1.0):
    y = scale * x * sum(more, 1.0)
    positive = 1 if (y.sum() > sum(carry["small"])) and carry["big"].sum() > 0 else 2
    return carry, positive


def closure(offset):
    layer = Layer()
    return lambda carry, x: (carry, 1 if carry + layer.weight + offset > 0 else 2)


class Step(es.Module):
    weight: es.Parameter = 1.0

    def __call__(self, carry, x):
        return carry, 1 if carry + self.weight + x > 0 else 2


@pytest.mark.parametrize("donate", [False, True])
def test_in_a_held_step_as_well(donate):
    def rejected(f, carry, *args, **kwargs):
        with pytest.raises(TracerBoolConversionError, match="boolean") as info:
            es.hold(f, carry, donate=donate)(*args, **kwargs)
        message = str(info.value).split("See https")[0]
        assert "test_names.py" in message
        assert "eqx_state" not in message
        return message.rpartition("argument")[2].rpartition(".")[0]

    def carry(n):
        return {"small": [jnp.ones(())] * n, "big": jnp.ones((2, 4096))}

    few = "s x, args[2], scale, and carry['small'][0] or carry['small'][1]"
    assert rejected(sign, carry(2), X, X, scale=X) == few
    four = " or ".join(f"carry['small'][{i}]" for i in range(4))
    assert rejected(sign, carry(4), X) == f"s x and {four}"
    many = " or ".join([*(f"carry['small'][{i}]" for i in range(3)), "..."])
    assert rejected(sign, carry(9), X) == f"s x and {many}"
    assert rejected(closure(0.0), jnp.ones(()), X) == "s layer.weight and carry"
    assert rejected(Step(), jnp.ones(()), X[0]) == "s weight, x, and carry"
    assert rejected(lambda carry, x: (carry, x > 0 and 1), None, X[0]) == " x"
    inside = lambda carry, x: (carry, x["a"][0] > 0 and 1)  # noqa: E731
    assert rejected(inside, None, {"a": [X[0]]}) == " x['a'][0]"


def test_a_compiled_program_has_the_name_of_the_function():
    assert "module @jit_negative" in es.jit(negative).lower(X).as_text()


def negative(x):
    return -x


def test_names_may_be_equal_and_a_function_may_have_none():
    def f(x, /, **kwargs):
        return x + kwargs["x"]

    assert jnp.array_equal(es.jit(f)(X, x=X), 2 * X)
    with pytest.raises(TracerBoolConversionError, match=r"args\[0\] and args\[1\]"):
        es.jit(max)(X[0], X[1])
