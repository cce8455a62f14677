"""Models in branches: two cells with different parameters and state."""

import dataclasses

import jax.random as jr

import eqx_state as es


class Cell(es.Module):
    weight: es.Parameter = 0.5
    total: es.State = 0.0

    def __call__(self, x):
        self.total = self.total + x
        return self.weight * x + self.total


class Net(es.Module):
    a: Cell = dataclasses.field(default_factory=Cell)
    b: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5, 1.0))
    steps: es.State = 0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))
