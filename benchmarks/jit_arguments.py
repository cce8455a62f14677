"""What does a call of `es.jit` cost if its arguments are not simple containers?

Compares `es.jit` with `eqx.filter_jit` of the same function, for arguments that contain
partials, closures, optimizers, and nodes that only JAX can flatten. The function is
already compiled. The programs take turns of some calls in a row, as in a loop, in a
different order each round. The figures are CPU microseconds of the thread until a call
returns.
"""

import functools as ft
import statistics
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
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


@jtu.register_pytree_node_class
class Named:
    """An array with names for its axes: a node that only JAX can flatten."""

    def __init__(self, array: Array, axes: tuple[str, ...]):
        self.array, self.axes = array, axes

    def tree_flatten(self) -> tuple[tuple[Array], tuple[str, ...]]:
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes: tuple[str, ...], arrays: Any) -> "Named":
        return cls(*arrays, axes)


class NamedLinear(eqx.Module):
    weight: Named
    bias: Named


class Controller(eqx.Module):
    """Settings that are Python numbers, as in diffrax."""

    rtol: float = 1e-3
    atol: float = 1e-6
    safety: float = 0.9
    limits: tuple[float, float] = (0.2, 10.0)
    norm: Callable[[Array], Array] = jnp.max


def leaky(slope: float, x: Array) -> Array:
    return jnp.where(x > 0, x, slope * x)


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]]:
    """For each case a function, its arguments, and the largest ratio allowed."""
    x, key, slope = jnp.ones(4), jr.key(0), 0.1
    closure = eqx.nn.MLP(4, 4, 8, 2, activation=lambda x: leaky(slope, x), key=key)
    linear = eqx.nn.Linear(4, 4, key=key)
    adam = optax.adam(1e-3)
    params = eqx.filter(closure, eqx.is_array)
    state = adam.init(params)
    named = [
        NamedLinear(Named(jnp.ones((4, 4)), ("in", "out")), Named(x, ("out",)))
        for _ in range(20)
    ]
    cached = [eqx.nn.LayerNorm(4) for _ in range(10)]
    for layer in cached:
        object.__setattr__(layer, "cached", x)

    def call(f: Any, x: Array) -> Array:
        return f(x)

    def scaled(tree: Any, x: Array) -> Any:
        return jax.tree.map(lambda leaf: 2 * leaf, tree)

    return {
        "partial": (call, (ft.partial(leaky, slope), x), 0.6),
        "closure in a field": (call, (closure, x), 0.6),
        "WeightNorm": (call, (eqx.nn.WeightNorm(linear), x), 0.6),
        "transformation": (
            lambda tx, g, s: tx.update(g, s),
            (adam, params, state),
            0.6,
        ),
        "its `update`": (
            lambda update, g, s: update(g, s),
            (adam.update, params, state),
            0.6,
        ),
        "Python numbers": (lambda c, x: c.rtol * c.norm(x), (Controller(), x), 0.6),
        "named arrays, 20 layers": (scaled, (named, x), 1.0),
        "integer keys": (
            scaled,
            ({i: {j: x for j in range(5)} for i in range(10)}, x),
            1.0,
        ),
        "more in `__dict__`": (scaled, (cached, x), 1.0),
    }


def main() -> None:
    args = arguments(__doc__, rounds=100)
    made = cases()
    timers: dict[str, tuple[Timer, Timer]] = {}
    different = 0
    for name, (f, given, _) in made.items():
        ours, theirs = (ft.partial(jit(f), *given) for jit in (es.jit, eqx.filter_jit))
        different += not eqx.tree_equal(ours(), theirs())
        timers[name] = (
            Timer(ft.partial(in_a_loop, ours)),
            Timer(ft.partial(in_a_loop, theirs)),
        )
    with garbage_set_aside():
        take_turns([timer for pair in timers.values() for timer in pair], args.rounds)
    rows, claims, unit = [], [], CALLS * 1e-6
    for name, (ours, theirs) in timers.items():
        relative = ratio(ours.seconds, theirs.seconds)
        rows.append(
            {
                "argument": name,
                "es.jit, µs": round(statistics.median(ours.seconds) / unit, 1),
                "eqx.filter_jit, µs": round(
                    statistics.median(theirs.seconds) / unit, 1
                ),
                "ratio": relative,
            }
        )
        text = f"es.jit, to eqx.filter_jit: {name}"
        claims.append(Claim(text, relative, made[name][2], of_time=True))
    text = "arguments: results that differ from eqx.filter_jit's"
    Report(vars(args), rows, [*claims, Claim(text, different, 0)]).show()


if __name__ == "__main__":
    main()
