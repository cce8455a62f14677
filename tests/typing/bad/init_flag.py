from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter


def construct(x: Array) -> Layer:
    return Layer(x, training=False)  # error
