"""Branches that may write state, in the active trace.

JAX wants the same outputs from all branches, but they may write different state. So
each branch returns all state that any branch may write, and what no branch wrote is
dropped when the writes are committed.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, Final

import equinox as eqx
import jax

from .._compat import manual_axes, vary, varying_axes
from .._state._scope import is_owned
from ._alike import Alike
from ._arguments import check_given, is_traced
from ._lift import Lifted, Ran
from ._mutable import is_bound_method
from ._root import Slot, Values


def _select(
    select: Callable[[list[Any], Any], Any],
    branches: Sequence[Callable[..., Any]],
    operands: tuple[Any, ...],
    what: str,
) -> Any:
    """Run the branch that `select` chooses, and commit what it has written."""
    branches = tuple(branches)
    lifted = Lifted(branches, operands)
    if lifted.is_initializing:
        for f in branches:  # a later call may choose any of them
            f(*operands)
        lifted = Lifted(branches, operands)
    check_given(*operands)
    arrays, rest = eqx.partition(operands, is_traced(operands), is_leaf=is_owned)
    alike = Alike(
        sown=_SOWN.format("{}", what),
        called=_CALLED.format("{}", what),
        static=_NOT_ARRAYS.format(what, "{}"),
    )

    # In a `shard_map`: along which mesh axes state varies after some branch.
    is_manual = bool(manual_axes())
    varying: dict[Slot, frozenset[Any]] = {}

    def branch(f: Callable[..., Any]) -> Callable[[Any], tuple[Any, Values, Any]]:
        @ft.wraps(f)  # JAX uses the name in its messages
        def run(arrays: Any) -> tuple[Any, Values, Any]:
            operands = eqx.combine(arrays, rest, is_leaf=is_owned)
            ran = lifted.run(lifted.values, lambda: f(*operands))
            out, sown = alike.take(ran, ran.out)
            state = {**lifted.writable, **ran.written}
            for slot, x in state.items() if is_manual else ():
                varying[slot] = varying.get(slot, frozenset()) | varying_axes(x)
                state[slot] = vary(x, varying[slot])
            return out, state, sown

        return run

    # JAX traces a function once, however often it is a branch; that depends on its
    # identity, so equal branches have to stay one function.
    distinct = {_identity(f): branch(f) for f in branches}
    for run in distinct.values() if is_manual else ():
        jax.eval_shape(run, arrays)  # so that all branches know of each other
    out, state, sown = select([distinct[_identity(f)] for f in branches], arrays)
    written = alike.written
    new = {slot: x for slot, x in state.items() if slot in written}
    lifted.commit(Ran(None, new, sown))
    return eqx.combine(out, alike.static)


def _identity(f: Any) -> Any:
    """The identity of a function; a bound method is a new object at each access."""
    return (id(f.__func__), id(f.__self__)) if is_bound_method(f) else id(f)


_SOWN: Final = """`{}` was sown in one branch of `{}`, and not, or not as often, in \
another. Sown values are outputs, whose structure has to be the same in all branches. \
Sow it in all branches, or return it and sow it after them."""

_CALLED: Final = """The output of `{}` was captured in one branch of `{}`, and it was \
not called, or not as often, in another. What is captured is an output of each branch, \
whose structure has to be the same in all. Call it in all branches, or leave it out of \
`outputs`."""

_NOT_ARRAYS: Final = """The branches of `{}` return different values at `{}`, which \
are not arrays. The branch is chosen at run time, so only arrays may differ. Return \
arrays, or the same value from every branch."""


def cond(
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    pred: Any,
    *operands: Any,
) -> Any:
    """[`es.cond`][eqx_state.cond] in the active trace."""
    return _select(
        lambda branches, arrays: jax.lax.cond(pred, *branches, arrays),
        (true_fun, false_fun),
        operands,
        "es.cond",
    )


def switch(branches: Sequence[Callable[..., Any]], index: Any, *operands: Any) -> Any:
    """[`es.switch`][eqx_state.switch] in the active trace."""
    return _select(
        lambda branches, arrays: jax.lax.switch(index, branches, arrays),
        branches,
        operands,
        "es.switch",
    )
