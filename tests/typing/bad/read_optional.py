from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    bias: es.Parameter[Array | None]

    def __call__(self, x: Array) -> Array:
        return x + self.bias  # error
