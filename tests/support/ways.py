"""How a module with `__call__(x)` and `shifted(shift, x)` may reach a transform."""

import functools as ft

import equinox as eqx
import jax.tree_util as jtu

import eqx_state as es


WAYS = {
    "module": lambda m: m,
    "bound method": lambda m: ft.partial(m.shifted, 1.0),
    "bound dunder": lambda m: m.__call__,
    "closure": lambda m: lambda x: m(x),
    "closure over a list": lambda m: (lambda ms: lambda x: ms[0](x))([m]),
    "default": lambda m: lambda x, m=m: m(x),
    "jax partial": lambda m: jtu.Partial(lambda m, x: m(x), m),
    "eqx partial": lambda m: eqx.Partial(m.shifted, 1.0),
    "checkpoint": lambda m: es.checkpoint(m),
    "jit": lambda m: es.jit(m.__call__),
}
