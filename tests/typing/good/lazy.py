# pyright: strict
"""A placeholder has the type of what it stands for, so it fits wherever that does."""

from typing import assert_type

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

import eqx_state as es


def normal(key: PRNGKeyArray) -> Array:
    return jr.normal(key, (3,))


def scalar(scale: float, *, key: PRNGKeyArray) -> Array:
    return scale * jr.normal(key, ())


class Norm(es.Module):
    weight: es.Parameter


class Model(es.Module):
    weight: es.Parameter
    shaped: es.Parameter[Float[Array, "i o"]]
    weights: es.Parameter[list[Array]]
    bias: es.Parameter[Array | None]
    linear: eqx.nn.Linear
    frozen_linear: es.Buffer[eqx.nn.Linear]

    def __init__(self) -> None:
        self.weight = es.Initializer(lambda key: jr.normal(key, (3,)))
        self.shaped = es.Initializer(normal)
        self.weights = [es.Initializer(normal) for _ in range(2)]
        self.bias = es.Initializer(normal)
        self.linear = es.lazy(eqx.nn.Linear, 3, 4, use_bias=False)
        self.frozen_linear = es.lazy(eqx.nn.Linear, 3, 4)


def check() -> None:
    Norm(es.Initializer(normal))
    Norm(weight=es.Initializer(lambda key: jr.normal(key, (3,))))
    assert_type(es.Initializer(normal), Array)
    assert_type(es.lazy(eqx.nn.Linear, 3, 4), eqx.nn.Linear)
    assert_type(es.lazy(Norm, 3), Norm)
    assert_type(es.lazy(scalar, 0.1), Array)
