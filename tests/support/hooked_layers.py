"""Layers that `test_runtime_typing` imports under the hook of jaxtyping."""

import equinox as eqx
from jaxtyping import Array, Float, Int

import eqx_state as es


class Cache(es.State):
    pass


class Linear(es.Module):
    weight: es.Parameter[Float[Array, "i o"]]
    bias: es.Parameter[Float[Array, " o"]]

    def __call__(self, x: Float[Array, " i"]) -> Float[Array, " o"]:
        return x @ self.weight + self.bias


class PlainLinear(eqx.Module):
    weight: es.Parameter[Float[Array, "i o"]]
    bias: Float[Array, " o"]

    def __call__(self, x: Float[Array, " i"]) -> Float[Array, " o"]:
        return x @ self.weight + self.bias


class Bare(es.Module):
    a: es.Parameter
    b: Cache


class PlainBare(eqx.Module):
    a: es.Parameter
    b: Cache


class Containers(es.Module):
    a: list[es.Parameter]
    b: dict[str, es.BatchStat]
    c: tuple[es.Parameter, es.State]
    d: tuple[es.Rng, ...]
    e: es.Parameter | None
    f: es.BatchStat[dict[str, Float[Array, ""]]]


class Count(es.Module):
    n: es.State[Int[Array, ""]]

    def __init__(self, start: int):
        self.n = start
