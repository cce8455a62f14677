from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter


def body(layer: Layer) -> Layer:
    return layer


def run(layer: Layer) -> Array:
    return es.while_loop(lambda layer: True, body, layer)  # error
