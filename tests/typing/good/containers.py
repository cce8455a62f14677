# pyright: strict
"""Many arrays, or perhaps none.

Exact, and the way to write it: the kind around the container (`Parameter[list[Array]]`,
`Parameter[Array | None]`), or `Annotated` inside it. With a bare kind *inside*
(`list[Parameter]`, `Parameter | None`) no checker applies the descriptor when one
assigns: what is read can be used as an array, but what is assigned is rejected.
"""

from typing import Annotated, assert_type

from jaxtyping import Array, Float

import eqx_state as es


Weight = Annotated[Array, es.Parameter]


class Around(es.Module):
    weights: es.Parameter[list[Float[Array, "i o"]]]
    stats: es.BatchStat[dict[str, Array]]
    pair: es.State[tuple[Array, int]]
    bias: es.Parameter[Array | None]

    def __call__(self, x: Array) -> Array:
        for weight in self.weights:
            assert_type(weight, Array)
            x = weight @ x
        assert_type(self.stats["mean"], Array)
        assert_type(self.pair[1], int)
        assert_type(self.bias, Array | None)
        self.weights = [x, *self.weights]
        self.stats = {**self.stats, "mean": x}
        self.pair = (x, 1)
        x = x if self.bias is None else x + self.bias
        self.bias = None
        self.bias = x
        return x


class Inside(es.Module):
    weights: list[Weight]
    stats: dict[str, Annotated[Array, es.BatchStat]]
    pair: tuple[Weight, Annotated[int, es.State]]
    bias: Weight | None

    def __call__(self, x: Array) -> Array:
        assert_type(self.weights, list[Array])
        assert_type(self.stats["mean"], Array)
        assert_type(self.pair[1], int)
        assert_type(self.bias, Array | None)
        self.weights = [x, *self.weights]
        self.stats = {**self.stats, "mean": x}
        self.pair = (x, 1)
        self.bias = None
        self.bias = x
        return x


class Bare(es.Module):
    weights: list[es.Parameter]
    stats: dict[str, es.BatchStat]
    pair: tuple[es.Parameter, es.State]
    bias: es.Parameter | None

    def __call__(self, x: Array) -> Array:
        for weight in self.weights:
            x = weight @ x
        first: Array = self.weights[0]
        mean: Array = self.stats["mean"]
        x = x * first + mean + self.pair[0] + self.pair[1].sum()
        assert_type(self.bias, Array | None)
        return x if self.bias is None else x + self.bias


def construct(x: Array) -> None:
    Around([x, x], {"mean": x}, (x, 1), None)
    Around([x, x], {"mean": x}, (x, 1), x)
    Inside([x, x], {"mean": x}, (x, 1), None)
    Inside([x, x], {"mean": x}, (x, 1), x)
