from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter

    def __call__(self, x: Array) -> Array:
        return self.weight @ x


def run(layer: Layer) -> None:
    es.capture(layer)("hello")  # error
