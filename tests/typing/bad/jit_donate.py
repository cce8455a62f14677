from jaxtyping import Array

import eqx_state as es


def double(x: Array) -> Array:
    return 2 * x


es.jit(double, donate="everything")  # error
