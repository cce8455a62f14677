import equinox as eqx
from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    net: es.Buffer[eqx.nn.MLP]

    def __init__(self, x: Array) -> None:
        self.net = x  # error
