from jaxtyping import Array

import eqx_state as es


def step(carry: Array, x: Array) -> tuple[Array, Array]:
    return carry + x, x


def train(x: Array) -> None:
    es.hold(step, x)("hello")  # error
