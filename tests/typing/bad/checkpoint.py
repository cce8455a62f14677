from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter

    @es.checkpoint
    def forward(self, x: Array, *, scale: float) -> Array:
        return scale * (self.weight @ x)


def run(layer: Layer, x: Array) -> None:
    layer.forward(x)  # error
