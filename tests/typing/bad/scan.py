from jaxtyping import Array

import eqx_state as es


def step(carry: Array, x: Array) -> Array:
    return carry + x


def run(x: Array) -> None:
    es.scan(step, x, x)  # error
