"""Watches the backward pass: which calls turn finite cotangents into a NaN.

Cotangents enter a call at its outputs, and leave it at its inputs. Both ends pass
through an identity whose transpose sees the cotangents. A token connects the two ends:
at the outputs its cotangent becomes 1 if everything is finite there, and also was in
the forward pass; at the inputs the call is then to blame for a cotangent that is not.
All this is a part of the user's computation, so each lane, step and branch is judged
by itself, and a callback reports the result.
"""

import functools as ft
import itertools
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._compat import manual_axes, vary, varying_axes
from .._transforms.lift import Lifted


class _Event(NamedTuple):
    """A call that made a NaN in the backward pass.

    - `order`: its number in the backward pass, as JAX traces it.
    - `chain`: the names of the calls around it, and its own.
    """

    order: int
    chain: tuple[str, ...]


# Not in the observer, because compiled programs keep their callbacks. A lock, because a
# callback runs in a thread of JAX, and cannot tell two searches apart.
_EVENTS: Final[list[_Event]] = []
_ORDER: Final = itertools.count()
_SEARCH: Final = threading.RLock()


def blamed(run: Callable[[], Any]) -> list[str]:
    """The names of the innermost watched calls whose backward pass makes a NaN.

    They are in the order of the backward pass.
    """
    with _SEARCH:
        start = len(_EVENTS)  # if not 0, this search is inside another
        try:
            run()
        finally:
            jax.effects_barrier()  # wait for the callbacks
            events = sorted({*_EVENTS[start:]})
            del _EVENTS[start:]
    outer = {x.chain[:n] for x in events for n in range(len(x.chain))}
    return [*dict.fromkeys(x.chain[-1] for x in events if x.chain not in outer)]


def watched(chain: tuple[str, ...], call: Any, args: Any, kwargs: Any) -> Any:
    """`call(*args, **kwargs)`. Reports if its backward pass makes a NaN.

    The parameters of a module count as inputs, so the module is among the arguments.
    """
    leaves = jtu.tree_leaves((args, kwargs))
    given = [x for x in leaves if _has_cotangent(x)]
    if not given:
        return call(*args, **kwargs)
    # The objects themselves, not copies: a closure among the arguments refers to them.
    lifted = Lifted((args, kwargs))
    token = vary(jnp.zeros(()), manual_axes())
    *new, token = _watch.bind(*given, token, True, back=ft.partial(_at_inputs, chain))
    (args, kwargs), values = lifted.fill((args, kwargs), _replaced(leaves, new))
    values = {**lifted.values, **values}
    ran = lifted.run(values, call, args, kwargs)
    # A cotangent also comes in through written state.
    leaves, structure = jtu.tree_flatten((ran.out, ran.written))
    outputs = [x for x in leaves if _has_cotangent(x)]
    was_finite = is_finite((given, outputs))
    *new, _ = _watch.bind(*outputs, token, was_finite, back=_at_outputs)
    out, written = structure.unflatten(_replaced(leaves, new))
    lifted.commit(ran._replace(written=written))
    return out


def _replaced(leaves: list[Any], new: list[Any]) -> list[Any]:
    rest = iter(new)
    return [next(rest) if _has_cotangent(x) else x for x in leaves]


def _has_cotangent(x: Any) -> bool:
    """Whether `x` may have a cotangent. An array that is not traced has none."""
    is_traced = isinstance(x, jax.core.Tracer)
    return is_traced and jnp.issubdtype(x.dtype, jnp.inexact)


def is_finite(tree: Any) -> jax.Array:
    """Whether no number in a tree is NaN or infinite."""
    numbers = [x for x in jtu.tree_leaves(tree) if _is_inexact(x)]
    return jnp.array([jnp.isfinite(x).all() for x in numbers], bool).all()


def _is_inexact(x: Any) -> bool:
    return eqx.is_array_like(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _at_outputs(cotangents: list[Any], was_finite: Any) -> list[Any]:
    *cotangents, token = cotangents
    token = (was_finite & is_finite(cotangents)).astype(token.dtype)
    return [*cotangents, vary(token, manual_axes())]


def _at_inputs(chain: tuple[str, ...], cotangents: list[Any], _: Any) -> list[Any]:
    *others, token = cotangents
    # Inside `jax.shard_map`, JAX has summed the cotangent of a replicated parameter
    # over the devices, and one of the others may have contributed a NaN.
    axes = varying_axes(token)
    replicated = [a for a in axes if any(a not in varying_axes(x) for x in others)]
    ok = jax.lax.pmin(token, tuple(replicated)) if replicated else token
    made = _in_any_lane((ok > 0) & ~is_finite(others))
    jax.debug.callback(ft.partial(_record, _Event(next(_ORDER), chain)), made)
    return cotangents


# Under `jax.vmap`, a callback would become one for each lane.
@jax.custom_batching.custom_vmap
def _in_any_lane(made: Any) -> Any:
    return made


@_in_any_lane.def_vmap
def _(size: int, is_batched: Any, made: Any) -> tuple[Any, bool]:
    return _in_any_lane(made.any(axis=0)), False


def _record(event: _Event, made: Any) -> None:
    if made:
        _EVENTS.append(event)


# --- The identity, with a transpose of our own ----------------------------------------

# The operands but for the last, which the backward pass gets as a value:
# `back(cotangents, last)`. A `jax.custom_vjp` has no forward mode, and a
# `jax.custom_derivatives.linear_call` cannot be mapped.
_watch: Final = Primitive("watch")
_watch.multiple_results = True


def _identity(*operands: Any, back: Any) -> list[Any]:
    return [*operands[:-1]]


def _jvp(primals: Any, tangents: Any, back: Any) -> Any:
    tangents = map(ad.instantiate_zeros, tangents[:-1])
    bind = ft.partial(_watch.bind, back=back)
    return bind(*primals), bind(*tangents, primals[-1])


def _transpose(cotangents: Any, *operands: Any, back: Any) -> list[Any]:
    return [*back([*map(ad.instantiate_zeros, cotangents)], operands[-1]), None]


def _batch(operands: Any, axes: Any, back: Any) -> Any:
    pairs = [*zip(operands, axes, strict=True)]
    n = next(x.shape[axis] for x, axis in pairs if axis is not None)
    lanes = [
        jnp.broadcast_to(x, (n, *jnp.shape(x)))
        if axis is None
        else jnp.moveaxis(x, axis, 0)
        for x, axis in pairs
    ]
    out = _watch.bind(*lanes, back=jax.vmap(back))
    return out, [0] * len(out)


_watch.def_impl(_identity)
_watch.def_abstract_eval(_identity)
mlir.register_lowering(_watch, mlir.lower_fun(_identity, multiple_results=True))
ad.primitive_jvps[_watch] = _jvp
ad.primitive_transposes[_watch] = _transpose
batching.primitive_batchers[_watch] = _batch
