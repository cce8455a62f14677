"""Models for loops, and loops that compute the same in several forms."""

import dataclasses

import jax.numpy as jnp

import eqx_state as es


class Cell(es.Module):
    weight: es.Parameter = 0.5
    total: es.State = 0.0

    def __call__(self, x):
        self.total = self.total + x
        return jnp.tanh(self.weight * x + self.total)


class Net(es.Module):
    cell: Cell = dataclasses.field(default_factory=Cell)
    other: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5, 1.0))
    steps: es.State = 0


def by_hand(f, n, x):
    """The computation of the loops below, as a Python loop."""
    for _ in range(n):
        x = f(x)
    return x


def by_while(f, n, x):
    def body(carry):
        i, x = carry
        return i + 1, f(x)

    return es.while_loop(lambda carry: carry[0] < n, body, (0, x))[1]


def by_fori(f, n, x):
    return es.fori_loop(0, n, lambda i, x: f(x), x)


def by_traced_bounds(f, n, x):
    return es.fori_loop(jnp.array(3), jnp.array(3 + n), lambda i, x: f(x), x)


LOOPS = {"while": by_while, "fori": by_fori, "traced bounds": by_traced_bounds}
