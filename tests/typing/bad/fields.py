"""Fields that are declared, read and assigned wrongly."""

import equinox as eqx
from jaxtyping import Array

import eqx_state as es


class Cache(es.State): ...


class Ema(es.TreePart, covering="yes"): ...  # error


class Layer(es.Module):
    weight: es.Parameter
    bias: es.Parameter[Array | None]
    stats: es.BatchStat[dict[str, Array]]
    net: es.Buffer[eqx.nn.MLP]
    cache: Cache
    scale: Array = es.field(kind=es.Parameter)
    wrong: Array = es.field(kind=int)  # error
    size: int = es.field(static="yes")  # error

    def read(self) -> str:
        return self.weight  # error

    def read_optional(self, x: Array) -> Array:
        return x + self.bias  # error

    def read_unknown(self) -> None:
        print(self.weigth)  # error

    def assign(self, x: Array) -> None:
        self.weight = "hello"  # error
        self.stats = {"mean": "hello"}  # error
        self.scale = "hello"  # error
        self.cache = "hello"  # error
        self.net = x  # error
        self.net = es.lazy(eqx.nn.Linear, 3, 4)  # error
        self.training = "hello"  # error
