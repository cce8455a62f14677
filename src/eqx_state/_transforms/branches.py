"""Branches that may write state.

JAX requires the same output structure from all branches, but they may write different
state. Each branch therefore returns all writable state, and only leaves that some
branch has written are committed.
"""

import functools as ft
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import jax
import jax.tree_util as jtu

from .._compat import boundary, manual_axes, vary, varying_axes
from .._errors import show
from .._state.scope import Sown
from .._tree.compare import difference, is_hole, structure_with_holes
from .._typing import R
from .creation import create_fields
from .cut import cut
from .lift import Lifted, Ran
from .reach import check_given


def _select(
    select: Callable[[list[Any], Any], Any],
    which: Any,
    branches: tuple[Callable[..., Any], ...],
    operands: tuple[Any, ...],
    caller: str,
) -> Any:
    """Run the branch that `select` chooses by `which`, and commit its writes."""
    for f in branches:
        if not callable(f):
            raise TypeError(_CALLED.format(caller, show(f)))
    check_given(*branches, *operands)
    for f in branches:  # a later call may choose any of them
        create_fields(f, *operands)
    lifted = Lifted(branches, operands)
    arrays, rest = cut(lifted.arguments)
    traces = _Traces(caller)
    # In a `shard_map`: the mesh axes along which a state varies after some branch, and
    # those along which the devices may take different branches. JAX leaves them out of
    # the types of the outputs.
    is_manual = bool(manual_axes())
    varying: dict[int, frozenset[Any]] = {}
    choice = varying_axes(which) if is_manual else frozenset()

    def branch(f: Callable[..., Any]) -> Callable[[Any], Ran]:
        @ft.wraps(f)  # JAX uses the name in its messages
        def run(arrays: Any) -> Ran:
            operands = rest.join(arrays)
            ran = traces.add(lifted.run(lifted.values, f, operands))
            state = {**lifted.writable, **ran.written}
            for slot, x in state.items() if is_manual else ():
                own = varying_axes(x) | (choice if slot in traces.written else set())
                varying[slot] = varying.get(slot, frozenset()) | own
                state[slot] = vary(x, varying[slot])
            return ran._replace(written=state)

        return run

    runs = [*map(branch, branches)]
    for run in runs:
        if is_manual:
            jax.eval_shape(run, arrays)  # fills `varying` for all branches
        else:
            lifted.probe(run, arrays)
    ran: Ran = select(runs, arrays)
    written = {slot: x for slot, x in ran.written.items() if slot in traces.written}
    lifted.commit(ran._replace(written=written))
    return traces.static.join(ran.out)


class _Traces:
    """Results of the branches that cannot be their outputs.

    JAX requires equal treedefs from all branches.

    - `static`: the leaves of the output that are not arrays.
    - `written`: the leaves that some branch has written.
    - `counts`: for each scope and key, the number of sown values.
    """

    def __init__(self, caller: str):
        self.caller = caller
        self.written: set[int] = set()
        self.static: Any = None
        self.counts: list[dict[Any, int]] | None = None

    def add(self, ran: Ran) -> Ran:
        """`ran` with the arrays of its output, and the sown values in a fixed order."""
        out, static = cut(ran.out)
        counts = [{key: len(x) for key, x in sown.items()} for sown in ran.sown]
        self.written |= ran.written.keys()
        if self.counts is None:
            self.static, self.counts = static, counts
        old, new = self.static.tree, static.tree
        if structure_with_holes(old) != structure_with_holes(new):
            different = difference(_marked(old), _marked(new))
            raise TypeError(_STRUCTURES.format(self.caller, different))
        if (name := self.static.difference(static)) is not None:
            raise TypeError(_NOT_ARRAYS.format(self.caller, name or "the output"))
        for first, last in zip(self.counts, counts, strict=True):
            if first != last:
                key, _ = min(first.items() ^ last.items(), key=str)
                raise ValueError(_SOWN.format(key, self.caller))
        # Use the order of the first branch: it is a part of the output's treedef.
        pairs = zip(self.counts, ran.sown, strict=True)
        sown = [Sown((key, values[key]) for key in first) for first, values in pairs]
        return ran._replace(out=out, sown=sown)


def _marked(rest: Any) -> Any:
    return jtu.tree_map(lambda x: "array" if x is None else x, rest, is_leaf=is_hole)


@boundary
def cond(
    pred: Any, true_fun: Callable[..., R], false_fun: Callable[..., R], *operands: Any
) -> R:
    """`jax.lax.cond` in which both branches may write state.

    **Arguments:**

    - `pred`: a scalar bool.
    - `true_fun`, `false_fun`: functions of the operands. They may write different
        state: state that a branch does not write keeps its value.
    - `operands`: arrays, pytrees, modules.

    **Returns:**

    The output of the chosen branch. Both branches must return the same structure,
    shapes and dtypes, and equal values for leaves that are not arrays.

    **Raises:**

    - `TypeError`: a branch is not a function; the branches return different structures,
        shapes or dtypes, or different values for a leaf that is not an array.
    - `ValueError`: inside `es.capture`, the branches do not produce a captured value
        equally often; a written state is not an array.

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
        pred,
        (true_fun, false_fun),
        operands,
        "es.cond",
    )


@boundary
def switch(index: Any, branches: Sequence[Callable[..., R]], *operands: Any) -> R:
    """`jax.lax.switch` in which any branch may write state.

    **Arguments:**

    - `index`: a scalar integer. A smaller or larger index selects the first or the last
        branch.
    - `branches`: functions of the operands.
    - `operands`: arrays, pytrees, modules.

    **Returns:**

    The output of the chosen branch. Requirements and errors are those of
    [`es.cond`][eqx_state.cond].

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
    if not isinstance(branches, Iterable):
        raise TypeError(_NO_LIST.format(show(branches)))
    return _select(
        lambda branches, arrays: jax.lax.switch(index, branches, arrays),
        index,
        branches,
        operands,
        "es.switch",
    )


_CALLED: Final = """`{}` takes functions, and calls one of them, but was given `{}`. \
Pass the arguments apart: `es.cond(p, f, g, x)`, not `es.cond(p, f(x), g(x))`."""

_NO_LIST: Final = """`es.switch`: `branches` must be a list of functions, but is `{}`:

    es.switch(i, f, g, x)       # wrong
    es.switch(i, [f, g], x)     # right"""

_STRUCTURES: Final = """The branches of `{}` must have the same pytree structure, but \
differ, {}. Return the same structure from each, and switch modes outside."""

_SOWN: Final = """Cannot capture {}: the branches of `{}` do not produce it equally \
often. Captured values are outputs of the branches, and JAX requires the same output \
structure from all. Sow the value, or call the module, in all branches or after them; \
or leave it out of `outputs`."""

_NOT_ARRAYS: Final = """The branches of `{}` return different values at `{}`, which \
are not arrays. The branch is chosen at run time, so only arrays may differ. Return \
arrays, or the same value from every branch."""
