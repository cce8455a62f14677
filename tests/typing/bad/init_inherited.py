from jaxtyping import Array

import eqx_state as es


class Base(es.Module):
    weight: es.Parameter


class Layer(Base):
    bias: es.Parameter


def construct(x: Array) -> Layer:
    return Layer(x)  # error
