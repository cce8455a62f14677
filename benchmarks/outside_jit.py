"""What does a loop or a branch cost outside of `jit`, when it is called again?

Against that of `jax.lax` on the same arrays by hand: functions of arrays; a method of a
model in a scope, which carries its state; and one of a model that the function closes
over. Each call is one of those after the first, whose body is traced. All take turns of
some calls each, in another order each round. Measured is the CPU time of the thread
until a call returns, in microseconds.
"""

import functools as ft
import statistics
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from _common import (
    arguments,
    CALLS,
    Claim,
    garbage_set_aside,
    in_a_loop,
    ratio,
    Report,
    take_turns,
    Timer,
)
from jaxtyping import Array

import eqx_state as es


class Cell(es.Module):
    linear: eqx.nn.Linear
    mean: es.State

    def step(self, h: Array, x: Array) -> tuple[Array, None]:
        self.mean = 0.9 * self.mean + 0.1 * x
        return jnp.tanh(self.linear(h) + x), None

    def after(self, h: Array) -> Array:
        return self.step(h, h)[0]

    def indexed(self, i: Array, h: Array) -> Array:
        return self.step(h, h)[0]


def by_hand(linear: eqx.nn.Linear) -> Callable[[Any, Array], Any]:
    weight, bias = linear.weight, linear.bias

    def step(carry: Any, x: Array) -> Any:
        h, mean = carry
        return (jnp.tanh(weight @ h + bias + x), 0.9 * mean + 0.1 * x), None

    return step


def pairs(cell: Cell) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each case, a call of ours and of JAX's; in a scope, if that is open."""
    x, xs = jnp.ones(4), jnp.ones((10, 4))
    step = by_hand(cell.linear)
    carry = x, cell.mean

    def free(h: Array, x: Array) -> tuple[Array, None]:
        return jnp.tanh(cell.linear(h) + x), None

    def after(carry: Any) -> Any:
        return step(carry, carry[0])[0]

    def indexed(i: Array, carry: Any) -> Any:
        return after(carry)

    def go_on(h: Array) -> Array:
        return jnp.sum(h) < -100

    def first(carry: Any) -> Array:
        return go_on(carry[0])

    lax = jax.lax
    return {
        "scan, closed over": (
            lambda: es.scan(free, x, xs),
            lambda: lax.scan(step, carry, xs),
        ),
        "scan": (
            lambda: es.scan(cell.step, x, xs),
            lambda: lax.scan(step, carry, xs),
        ),
        "while_loop": (
            lambda: es.while_loop(go_on, cell.after, x),
            lambda: lax.while_loop(first, after, carry),
        ),
        "fori_loop": (
            lambda: es.fori_loop(0, 10, cell.indexed, x),
            lambda: lax.fori_loop(0, 10, indexed, carry),
        ),
        "cond": (
            lambda: es.cond(True, cell.after, cell.after, x),
            lambda: lax.cond(True, after, after, carry),
        ),
    }


def main() -> None:
    args = arguments(__doc__, rounds=50)
    key = jr.key(0)
    cell = Cell(eqx.nn.Linear(4, 4, key=key), jnp.zeros(4))
    timers: dict[str, tuple[Timer, Timer]] = {}

    def measure(cell: Cell) -> None:
        with garbage_set_aside():
            for name, calls in pairs(cell).items():
                timers[name] = tuple(
                    Timer(ft.partial(in_a_loop, call)) for call in calls
                )
                take_turns([*timers[name]], args.rounds)

    es.mutable(measure)(cell)
    rows, claims, unit = [], [], CALLS * 1e-6
    for name, (ours, theirs) in timers.items():
        relative = ratio(ours.seconds, theirs.seconds)
        rows.append(
            {
                "call": name,
                "eqx_state, µs": round(statistics.median(ours.seconds) / unit, 1),
                "jax.lax, µs": round(statistics.median(theirs.seconds) / unit, 1),
                "ratio": relative,
            }
        )
        claims.append(
            Claim(f"outside jit: {name}, to jax.lax", relative, 1.5, of_time=True)
        )
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
