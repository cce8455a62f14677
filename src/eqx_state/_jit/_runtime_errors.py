"""Programs that can raise: waiting for them, and what they raise.

JAX returns before a program has run, and an error in it comes up where its results are
used. So a program in which a callback can raise, as that of `eqx.error_if` does, is
waited for. Others are not.
"""

from typing import Any, Final

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu

from .._compat import (
    CALLBACK_LOGGER,
    failed_check,
    is_check,
    Jaxpr,
    params_of,
    PROGRAM_ERRORS,
)


# `debug_callback` is not among them: JAX may leave it out.
_CAN_RAISE: Final = frozenset({"pure_callback", "io_callback"})


def callbacks_in(jaxpr: Any) -> frozenset[str]:
    """The callbacks that can raise, in a program and all programs inside it.

    `None` is a program that cannot be seen; all of them may be in it.
    """
    if jaxpr is None:
        return _CAN_RAISE
    found, todo, seen = set(), [jaxpr], set()
    while todo:
        x = todo.pop()
        if isinstance(x, (tuple, list)):
            todo.extend(x)
        elif isinstance(x, Jaxpr):
            if id(x) not in seen:
                seen.add(id(x))
                found.update(equation.primitive.name for equation in x.eqns)
                todo.extend(map(params_of, x.eqns))
        elif hasattr(x, "jaxpr"):  # one that is closed
            todo.append(x.jaxpr)
    return _CAN_RAISE & found


def wait(callbacks: frozenset[str] | None, arguments: Any, result: Any) -> None:
    """Return when a program with these callbacks has run."""
    if not callbacks:
        return
    arrays = jtu.tree_leaves((arguments, result))
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return
    jax.block_until_ready(result)
    if "io_callback" in callbacks:  # no result need depend on it
        jax.effects_barrier()


class Reporting:
    """Inside, a failed `eqx.error_if` is an `eqx.EquinoxRuntimeError`, not logged."""

    def __enter__(self) -> None:
        CALLBACK_LOGGER.addFilter(self)

    def filter(self, record: Any) -> bool:
        return not (record.exc_info and is_check(record.exc_info[1]))

    def __exit__(self, cls: Any, error: BaseException | None, traceback: Any) -> None:
        CALLBACK_LOGGER.removeFilter(self)
        report(error)


def report(error: BaseException | None) -> None:
    """Raise a program's error as a failed `eqx.error_if`, if it is one."""
    if isinstance(error, PROGRAM_ERRORS) and (check := failed_check(error)):
        # JAX's own error is long, and tells nothing more.
        raise eqx.EquinoxRuntimeError(_REPORT.format(*check)) from None


_REPORT: Final = """{}

This check of `eqx.error_if` failed while a program of `es.jit` ran. The frames above
are outside of the program. Inside it (most recent call last):
{}
To stop there and look at the values, run with `EQX_ON_ERROR=breakpoint` in the
environment; or with `JAX_DISABLE_JIT=1`, which runs it as ordinary Python.
"""
