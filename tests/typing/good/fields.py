# pyright: strict
"""`es.field` is a field specifier: defaults, `init=False` and the rest count."""

from typing import assert_type

import equinox as eqx
from jaxtyping import Array

import eqx_state as es


def make() -> Array:
    raise NotImplementedError


def clip(x: Array) -> Array:
    return x.clip(0, 1)


class Layer(es.Module):
    required: Array = es.field(kind=es.Parameter)
    also_required: es.Parameter = es.field()
    not_in_init: Array = es.field(kind=es.BatchStat, init=False)
    equinox_specifier: es.Parameter = eqx.field(init=False)
    converted: Array = es.field(kind=es.Parameter, converter=clip)
    size: int = es.field(static=True, default=3)
    default: Array = es.field(kind=es.Parameter, default=0.0)
    factory: es.Parameter = es.field(default_factory=make, metadata={"unit": "m"})
    keyword: Array = es.field(kind=es.Parameter, kw_only=True)

    def __call__(self, x: Array) -> Array:
        assert_type(self.required, Array)
        assert_type(self.also_required, Array)
        assert_type(self.not_in_init, Array)
        assert_type(self.equinox_specifier, Array)
        assert_type(self.factory, Array)
        self.required = x
        self.not_in_init = x
        self.equinox_specifier = x
        return x


def construct(x: Array) -> None:
    assert_type(Layer(x, x, x, keyword=x).size, int)
    Layer(x, x, x, 3, x, x, keyword=x)
    Layer(required=x, also_required=x, converted=x, factory=x, keyword=x)
