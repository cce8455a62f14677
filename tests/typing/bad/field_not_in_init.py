from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    mean: Array = es.field(kind=es.BatchStat, init=False)


def construct(x: Array) -> Layer:
    return Layer(mean=x)  # error
