"""Programs that can raise, and their errors.

JAX returns before a program has run, and raises an error of the program where its
results are used. `es.jit` waits for a program that contains a callback, such as that of
`eqx.error_if`, so that the call itself raises the error.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Final

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu

from .._compat import CALLBACK_LOGGER, failed_check, is_check, jaxprs_in


# `debug_callback` is not among them: JAX may remove it.
_CAN_RAISE: Final = frozenset({"pure_callback", "io_callback"})


def callbacks_in(jaxpr: Any) -> frozenset[str]:
    """The callbacks that can raise, in a jaxpr and all jaxprs inside it.

    If the jaxpr is not available (`None`), assume all of them.
    """
    if jaxpr is None:
        return _CAN_RAISE
    found, todo, seen = set(), [jaxpr], set()
    while todo:
        x = todo.pop()
        if id(x) not in seen:
            seen.add(id(x))
            found.update(equation.primitive.name for equation in x.eqns)
            todo.extend(itertools.chain.from_iterable(map(jaxprs_in, x.eqns)))
    return _CAN_RAISE & found


def wait(callbacks: frozenset[str], arguments: Any, result: Any) -> None:
    """Wait for a program with these callbacks."""
    arrays = jtu.tree_leaves((arguments, result))
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return
    jax.block_until_ready(result)
    if "io_callback" in callbacks:  # may run after the results are ready
        jax.effects_barrier()


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep JAX from logging a failed `eqx.error_if`, which it also raises."""

    def is_logged(record: Any) -> bool:
        return not (record.exc_info and is_check(record.exc_info[1]))

    CALLBACK_LOGGER.addFilter(is_logged)
    try:
        yield
    finally:
        CALLBACK_LOGGER.removeFilter(is_logged)


def raise_failed_check(error: BaseException) -> None:
    """Raise an `eqx.EquinoxRuntimeError` if this is the error of an `eqx.error_if`."""
    if (check := failed_check(error)) is not None:
        # JAX's own error is longer, but has no more information.
        raise eqx.EquinoxRuntimeError(_FAILED_CHECK.format(*check)) from None


_FAILED_CHECK: Final = """{}

This check of `eqx.error_if` failed in a program of `es.jit` (most recent call last):
{}
To look at the values there, run with `EQX_ON_ERROR=breakpoint` or `JAX_DISABLE_JIT=1`.
"""
