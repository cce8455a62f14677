"""Branches that may write state, in the active trace.

JAX wants the same outputs from all branches, but they may write different state. So
each branch returns all state that any branch may write, and what no branch wrote is
dropped when the writes are committed.
"""

import functools as ft
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import equinox as eqx
import jax

from .._compat import boundary, manual_axes, vary, varying_axes
from .._state.scope import is_owned, Sown
from .._state.sow import in_words
from .._tree.compare import difference_of_leaves
from .lift import check_given, is_traced, Lifted, Ran, Slot, Values
from .mutable import is_bound_method


_R = TypeVar("_R")


# --- Outputs of several traces of one call, of which one runs: they have to be alike.
#
# JAX traces both branches of a `cond`, and of a custom derivative the function and its
# forward rule, and wants the same treedef from all. So what has no place in a treedef
# that is compared leaves the trace as a note.


class Note(NamedTuple):
    """The facts about one trace that are needed outside of it."""

    static: Any  # the part of the output that is not arrays
    written: frozenset[Slot]
    sown: list[dict[Any, int]]  # for each scope and key, how many values were kept


class Alike:
    """The traces of one call.

    `sown`, `called` and `static` are the messages if they differ: in a name that was
    sown, in a module whose output is captured, in a leaf of the output.
    """

    def __init__(self, *, sown: str, called: str, static: str):
        self.messages = sown, called, static
        self.notes: list[Note] = []

    def take(self, ran: Ran, out: Any) -> tuple[Any, list[Sown]]:
        """The arrays of an output, and what was sown, as in the first trace."""
        out, static = eqx.partition(out, is_traced(out))
        counts = [{key: len(x) for key, x in s.items()} for s in ran.sown]
        self.notes.append(Note(static, frozenset(ran.written), counts))
        first = self.notes[0].sown
        self._check_sown(first, counts)
        name = difference_of_leaves(self.notes[0].static, static)
        if name is not None:
            raise TypeError(self.messages[2].format(name or "the output"))
        # In one order, which is part of the structure of an output.
        sown = zip(first, ran.sown, strict=True)
        return out, [OrderedDict((key, s[key]) for key in keys) for keys, s in sown]

    def _check_sown(
        self, sown: list[dict[Any, int]], other: list[dict[Any, int]]
    ) -> None:
        for first, last in zip(sown, other, strict=True):
            if first.items() != last.items():
                key, _ = min(first.items() ^ last.items(), key=str)
                raise ValueError(in_words(key, *self.messages[:2]))

    @property
    def written(self) -> frozenset[Slot]:
        """All that was written in some trace."""
        return frozenset().union(*(note.written for note in self.notes))

    @property
    def static(self) -> Any:
        return self.notes[0].static


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


@boundary
def cond(
    pred: Any,
    true_fun: Callable[..., _R],
    false_fun: Callable[..., _R],
    *operands: Any,
) -> _R:
    """`jax.lax.cond` in which both branches may write state.

    **Arguments:**

    - `pred`: a scalar bool.
    - `true_fun`, `false_fun`: functions of the operands. They may write different
        state: state that a branch does not write keeps its value.
    - `operands`: arrays, pytrees, modules.

    **Returns:**

    The output of the chosen branch. Both must return the same structure, shapes and
    dtypes, and equal values where these are not arrays.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Counter(es.Module):
            even: es.State = 0
            odd: es.State = 0

            def __call__(self, x):
                def on_even():
                    self.even = self.even + 1
                    return x

                def on_odd():
                    self.odd = self.odd + 1
                    return 3 * x

                return es.cond(x % 2 == 0, on_even, on_odd)


        y, counter = es.mutable(Counter())(jnp.array(5))
        assert (y, counter.even, counter.odd) == (15, 0, 1)
        ```
    """
    return _select(
        lambda branches, arrays: jax.lax.cond(pred, *branches, arrays),
        (true_fun, false_fun),
        operands,
        "es.cond",
    )


@boundary
def switch(index: Any, branches: Sequence[Callable[..., _R]], *operands: Any) -> _R:
    """`jax.lax.switch` in which any branch may write state.

    **Arguments:**

    - `index`: a scalar integer; clamped to the number of branches.
    - `branches`: functions of the operands.
    - `operands`: arrays, pytrees, modules.

    **Returns:**

    The output of the chosen branch, as for [`es.cond`][eqx_state.cond].

    !!! example

        ```python
        import eqx_state as es


        class Experts(es.Module):
            uses: list[es.State]

            def __call__(self, i, x):
                def expert(n):
                    def run(x):
                        uses = list(self.uses)
                        uses[n] = uses[n] + 1
                        self.uses = uses
                        return (n + 1.0) * x

                    return run

                return es.switch(i, [expert(0), expert(1)], x)


        y, experts = es.mutable(Experts([0, 0]))(1, 2.0)
        assert y == 4.0 and [int(n) for n in experts.uses] == [0, 1]
        ```
    """
    return _select(
        lambda branches, arrays: jax.lax.switch(index, branches, arrays),
        branches,
        operands,
        "es.switch",
    )
