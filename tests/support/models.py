"""Models that several test files share. Models of one test are defined in the test."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter = 2.0
    count: es.State = 0

    def __call__(self, x, *, key=None):
        if self.training:
            self.count = self.count + 1
        return self.weight * x

    def apply(self, x):
        return self(x)


class Counter(Layer):
    def step(self, by=1):
        self.count = self.count + by
        return self.count


class Pair(es.Module):
    a: Counter
    b: Counter

    def __call__(self, x):
        return self.b(self.a(x))


class Net(es.Module):
    """Calls its layers one after another."""

    layers: list[Any]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Noisy(es.Module):
    """Draws in train mode, and counts in either mode."""

    rng: es.Rng
    scale: es.Parameter = 1.0

    def __call__(self, x):
        if not self.training:
            return x
        key, self.rng = jr.split(self.rng)
        return x + self.scale * jr.normal(key, jnp.shape(x))


class Lazy(es.Module):
    """Takes the shape of its weight from the first input."""

    weight: es.Parameter | None = None
    calls: es.State = 0

    def __call__(self, x):
        if self.initializing and self.weight is None:
            self.weight = es.Initializer(lambda key: jr.normal(key, (x.size, x.size)))
        self.calls = self.calls + 1
        return jnp.tanh(self.weight @ x)


def counts(tree):
    return [int(x) for x in jax.tree.leaves(es.filter(tree, es.State))]
