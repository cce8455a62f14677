"""Calls of transforms with wrong arguments, and results taken for something else."""

from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter

    def __call__(self, x: Array) -> Array:
        return self.weight @ x

    @es.jit
    def jitted(self, x: Array) -> Array:
        return self.weight @ x

    @es.checkpoint
    def remat(self, x: Array, *, scale: float) -> Array:
        return scale * (self.weight @ x)


class Other(Layer): ...


def loss(layer: Layer, x: Array) -> Array:
    return layer(x)


def same(layer: Layer) -> Layer:
    return layer


def one() -> int:
    return 1


def call(layer: Layer, x: Array) -> None:
    es.mutable(layer)("hello")  # error
    es.capture(layer)("hello")  # error
    layer.jitted("hello")  # error
    layer.remat(x)  # error
    es.value_and_grad(loss)(x, x)  # error
    es.scan(loss, x, x)  # error
    es.jit(loss, donate="everything")  # error


def methods(layer: Layer) -> Other:
    return layer.init(42).train().eval()  # error


def jit_result(x: Array) -> Array:
    return es.jit(donate="all")(one)()  # error


def branch(flag: bool) -> str:
    return es.cond(flag, one, one)  # error


def loop(layer: Layer) -> Array:
    return es.while_loop(lambda layer: True, same, layer)  # error
