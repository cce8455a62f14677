# pyright: strict
"""Methods keep the class; `__init__` and inheritance are those of a dataclass."""

from abc import abstractmethod
from typing import assert_type, Generic, TypeVar

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray

import eqx_state as es


_T = TypeVar("_T")


class Base(es.Module):
    weight: es.Parameter

    def __call__(self, x: Array) -> Array:
        return self.weight @ x


class Derived(Base):
    bias: es.Parameter
    child: Base


class ByHand(es.Module):
    weight: es.Parameter
    mean: es.BatchStat
    layers: es.Parameter[list[Array]]

    def __init__(self, x: Array, *, key: PRNGKeyArray) -> None:
        self.weight = x
        self.mean = 0 * x
        self.layers = [x]


class Box(es.Module, Generic[_T]):
    content: es.State[_T]
    weight: es.Parameter


class ArrayBox(Box[Array]):
    bias: es.Parameter


class Abstract(es.Module):
    weight: eqx.AbstractVar[es.Parameter]

    def double(self) -> Array:
        assert_type(self.weight, Array)
        return 2 * self.weight

    @abstractmethod
    def __call__(self, x: Array) -> Array: ...


class Concrete(Abstract):
    weight: es.Parameter

    def __call__(self, x: Array) -> Array:
        return self.double() + x


def construct(x: Array, key: PRNGKeyArray) -> None:
    assert_type(Derived(x, x, Base(x)).weight, Array)
    assert_type(Derived(x, x, Base(x)).child.weight, Array)
    assert_type(ByHand(x, key=key).layers, list[Array])
    assert_type(Box[int](1, x).content, int)
    assert_type(ArrayBox(x, x, x).content, Array)
    assert_type(Concrete(x).double(), Array)


def methods(model: Derived, x: Array) -> None:
    assert_type(model.init(42), Derived)
    assert_type(model.init(42, x), Derived)
    assert_type(model.train(), Derived)
    assert_type(model.train(False), Derived)
    assert_type(model.eval(), Derived)
    assert_type(model.freeze(), Derived)
    assert_type(model.freeze(lambda m: m.child), Derived)
    assert_type(model.unfreeze(), Derived)
    assert_type(model.replace(bias=x), Derived)
    assert_type(model.update(model.filter(es.Parameter)), Derived)
    assert_type(model.training, bool)
    assert_type(model.frozen, bool)


def functions(model: Derived) -> None:
    assert_type(es.train(model), Derived)
    assert_type(es.eval(model), Derived)
    assert_type(es.freeze(model), Derived)
    assert_type(es.unfreeze(model), Derived)
    assert_type(es.update(model, es.filter(model, es.Parameter)), Derived)
