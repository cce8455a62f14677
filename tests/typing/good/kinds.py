# pyright: strict
"""A field reads, takes and is constructed from what its kind contains."""

from typing import Annotated, assert_type

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray
from typing_extensions import TypeVar

import eqx_state as es


_T = TypeVar("_T", default=Array)


class Cache(es.State): ...


class Ema(es.TreePart, covering=True): ...


class Memory(Cache): ...


# Type checkers allow `Table[...]` only if the kind is generic, like the built-in ones.
class Table(es.State[_T]): ...


class Layer(es.Module):
    bare: es.Parameter
    shaped: es.Parameter[Float[Array, "i o"]]
    frozen_net: es.Buffer[eqx.nn.MLP]
    stats: es.BatchStat[dict[str, Array]]
    key: es.Rng[PRNGKeyArray]
    count: es.State[int]
    moments: es.OptState
    cache: Cache
    ema: Ema
    memory: Memory
    table: Table
    tables: Table[list[Array]]
    annotated: Annotated[Float[Array, "i o"], es.Parameter]
    plain: Array

    def __call__(self, x: Array) -> Array:
        assert_type(self.bare, Array)
        assert_type(self.shaped, Array)
        assert_type(self.frozen_net, eqx.nn.MLP)
        assert_type(self.stats, dict[str, Array])
        assert_type(self.key, PRNGKeyArray)
        assert_type(self.count, int)
        assert_type(self.moments, Array)
        assert_type(self.cache, Array)
        assert_type(self.ema, Array)
        assert_type(self.memory, Array)
        assert_type(self.table, Array)
        assert_type(self.tables, list[Array])
        assert_type(self.annotated, Array)
        return self.bare @ x

    def write(self, x: Array, net: eqx.nn.MLP) -> None:
        self.bare = 0.9 * self.bare + 0.1 * x
        self.bare += x
        self.shaped = x
        self.frozen_net = net
        self.stats = {**self.stats, "mean": x}
        self.count = self.count + 1
        self.cache = self.cache.at[0].set(1.0)
        self.ema = x
        self.memory = x
        self.table = x
        self.tables = [x, x]
        self.annotated = x
        assert_type(self.bare, Array)
        assert_type(self.cache, Array)


def construct(x: Array, net: eqx.nn.MLP, key: PRNGKeyArray) -> Layer:
    positional = Layer(x, x, net, {"a": x}, key, 1, x, x, x, x, x, [x], x, x)
    assert_type(positional, Layer)
    assert_type(positional.bare, Array)
    return Layer(
        bare=x,
        shaped=x,
        frozen_net=net,
        stats={"a": x},
        key=key,
        count=1,
        moments=x,
        cache=x,
        ema=x,
        memory=x,
        table=x,
        tables=[x],
        annotated=x,
        plain=x,
    )
