from jaxtyping import Array

import eqx_state as es


@es.jit(donate="all")
def step(x: Array) -> tuple[Array, int]:
    return x, 1


def run(x: Array) -> Array:
    return step(x)[1]  # error
