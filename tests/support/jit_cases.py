"""A model for the tests of `es.jit`, and a count of traces."""

import functools as ft
from typing import Any

import jax.numpy as jnp

import eqx_state as es


X = jnp.array([1.0, 2.0, 3.0])


class Layer(es.Module):
    weight: es.Parameter
    tag: Any = es.field(static=True, default="tag")
    count: es.State = 0

    def __call__(self, x):
        self.count = self.count + 1
        return self.weight * x

    def again(self, x):
        return self.weight * x


class Counter(es.Module):
    weight: es.Parameter
    count: es.State = 0
    name: str = es.field(static=True, default="counter")

    def __call__(self, x):
        self.count = self.count + 1
        return self.weight * x


class Model(es.Module):
    layer: Layer
    other: Any = None


def counted(f):
    """`f`, and a list that gets an entry for each trace of it."""
    traces = []

    @ft.wraps(f)
    def g(*args, **kwargs):
        traces.append(1)
        return f(*args, **kwargs)

    return g, traces
