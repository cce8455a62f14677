# pyright: strict
"""Kinds on a module that is Equinox's own.

Not here: `es.field`, which checkers take for a field specifier in an `es.Module` only.
"""

from typing import Annotated, assert_type

import equinox as eqx
from jaxtyping import Array

import eqx_state as es


class Cache(es.State): ...


class Layer(eqx.Module):
    weight: es.Parameter
    stats: es.BatchStat[dict[str, Array]]
    cache: Cache
    annotated: Annotated[Array, es.Parameter]
    late: es.Parameter = eqx.field(init=False)

    def __post_init__(self) -> None:
        self.late = 2 * self.weight


def construct(x: Array) -> None:
    layer = Layer(x, {"a": x}, x, annotated=x)
    assert_type(layer.weight, Array)
    assert_type(layer.stats, dict[str, Array])
    assert_type(layer.cache, Array)
    assert_type(layer.annotated, Array)
    assert_type(layer.late, Array)
