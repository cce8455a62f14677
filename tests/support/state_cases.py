"""Models with submodules, in which each module counts its calls."""

import dataclasses

import jax.numpy as jnp

import eqx_state as es


class Counter(es.Module):
    count: es.State = 0

    def step(self, by=1):
        self.count = self.count + by


class Layer(Counter):
    weight: es.Parameter = dataclasses.field(default_factory=lambda: jnp.ones(2))


class Pair(es.Module):
    a: Counter = dataclasses.field(default_factory=Counter)
    b: Counter = dataclasses.field(default_factory=lambda: Counter(5))
