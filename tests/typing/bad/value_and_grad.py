from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter


def loss(layer: Layer, x: Array) -> Array:
    return layer.weight @ x


def run(x: Array) -> None:
    es.value_and_grad(loss)(x, x)  # error
