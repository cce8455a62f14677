from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    weight: Array = es.field(kind=es.Parameter)

    def __call__(self) -> None:
        self.weight = "hello"  # error
