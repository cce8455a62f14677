"""Models that are made of wrong arguments."""

from typing import Generic, TypeVar

import equinox as eqx
from jaxtyping import Array

import eqx_state as es


_T = TypeVar("_T")


class Cache(es.State): ...


class Base(es.Module):
    weight: es.Parameter


class Child(Base):
    bias: es.Parameter


class Field(es.Module):
    weight: Array = es.field(kind=es.Parameter)


class NotInInit(es.Module):
    mean: Array = es.field(kind=es.BatchStat, init=False)


class Box(es.Module, Generic[_T]):
    content: es.State[_T]


class Net(es.Module):
    net: es.Buffer[eqx.nn.MLP]


class Caching(es.Module):
    cache: Cache


def construct(x: Array) -> None:
    Base("hello")  # error
    Base()  # error
    Base(None)  # error
    Base(x, training=False)  # error
    Child(x)  # error
    Field()  # error
    NotInInit(mean=x)  # error
    Box[int]("hello")  # error
    Net(net=x)  # error
    Caching(cache="hello")  # error
    es.Initializer(0.1)  # error
    Base(es.Initializer(lambda key: "hello"))  # error
