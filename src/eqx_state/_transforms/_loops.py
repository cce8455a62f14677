"""Loops in the active trace: state carried from step to step.

State that the functions reach becomes a part of JAX's carry, beside the user's own.
Which of it was written is known after the trace of a step, and only that is committed.
"""

import functools as ft
import itertools
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._state._scope import is_owned, Sown
from .._state._sow import in_words
from .._tree._walk import is_array
from ._arguments import is_traced
from ._carry import Loop, Note, Step
from ._lift import Lifted, Ran
from ._rebuilt import MADE_ONCE


def scan(
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    **for_jax: Any,
) -> tuple[Any, Any]:
    """[`es.scan`][eqx_state.scan]: the last carry, and the pair to put it into.

    The pair is its treedef with the stacked outputs.
    """
    loop = Loop(f, init, xs)
    if loop.lifted.is_initializing:
        _initialize(loop, f, init, -1 if reverse else 0)
        loop = Loop(f, init, xs)
    arrays, rest = loop.split_xs()
    notes: list[Note] = []

    def run(carry: Any, x: Any) -> Step:
        x, slices = x
        x = eqx.combine(x, rest, is_leaf=is_owned)
        return loop.step(carry, lambda carry: f(carry, x), slices, pair_of)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        after, slices = run(carry, x), x[1]
        pair, y = after.rest
        y, static = eqx.partition(y, is_traced(y))
        notes.append(after.note._replace(static=(pair, static)))
        written = {slot: x for slot, x in after.written.items() if slot in slices}
        return after.carry, (y, written, after.sown)

    each = arrays, loop.slices
    carry, (ys, written, sown) = jax.lax.scan(
        step,
        loop.first(lambda carry: run(carry, jtu.tree_map(_slice_of, each)).carry),
        each,
        length,
        reverse=reverse,
        **for_jax,
    )
    pair, static = notes[-1].static
    last = loop.finish(carry, notes, Ran(None, written, sown))
    return last, (pair, eqx.combine(ys, static))


def _slice_of(x: Any, i: int = 0) -> Any:
    # A loop without steps has no first slice, but zeros have the right shape.
    return x[i] if x.shape[0] else jnp.zeros(x.shape[1:], x.dtype)


def _initialize(loop: Loop, f: Any, init: Any, first: int) -> None:
    """Run one step outside of the loop, which makes everything that is missing."""
    # The modules in `init` have no stand-ins here: the first step has to initialize
    # them, and not copies.
    lifted = Lifted(f, init, loop.xs, stand_ins=loop.stand_ins)
    stacked = {i for i, root in enumerate(lifted.roots) if root.is_stand_in}

    slice_of = ft.partial(_slice_of, i=first)
    values = {
        (i, k): slice_of(x) if i in stacked and is_array(x) else x
        for (i, k), x in lifted.values.items()
    }
    arrays, rest = loop.split_xs()
    x = eqx.combine(jtu.tree_map(slice_of, arrays), rest, is_leaf=is_owned)
    ran = lifted.run(values, lambda: f(init, x))
    for (i, _), new in ran.news().items():
        if i in stacked:
            raise ValueError(MADE_ONCE.format(new.name, "step of `es.scan`"))
    # The writes to a slice are dropped. The loop runs this step again, and writes the
    # whole stack.
    written = {slot: x for slot, x in ran.written.items() if slot[0] not in stacked}
    lifted.commit(ran._replace(written=written))


def pair_of(out: Any, what: str = "es.scan") -> tuple[Any, tuple[Any, Any]]:
    """Split a pair into the carry, and the pair's treedef with its second half.

    As for JAX, any pytree with two children is a pair.
    """
    pair, structure = jtu.tree_flatten(out, is_leaf=lambda x: x is not out)
    if len(pair) != 2:
        shown = eqx.tree_pformat(out, short_arrays=True)
        raise TypeError(_NOT_A_PAIR.format(what, shown))
    return pair[0], (structure, pair[1])


def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> tuple[Any, None]:
    """[`es.while_loop`][eqx_state.while_loop]: the last carry, and `None`."""
    loop = Loop((cond_fun, body_fun), init_val)
    if loop.lifted.is_initializing:
        body_fun(init_val)
        loop = Loop((cond_fun, body_fun), init_val)
    notes: list[Note] = []
    final = jax.lax.while_loop(
        lambda carry: _go_on(loop, carry, cond_fun),
        lambda carry: _only_carry(loop.step(carry, body_fun), notes),
        loop.first(lambda carry: loop.step(carry, body_fun).carry),
    )
    return loop.finish(final, notes), None


def _go_on(loop: Loop, carry: Any, cond_fun: Callable[[Any], Any]) -> Any:
    """Call `cond_fun`, out of which JAX takes only the answer."""
    given, values = loop.enter(carry)
    ran = loop.lifted.run(values, lambda: cond_fun(given))
    _check_not_sown(ran.sown)
    if any(i in loop.lifted.records for i, _ in ran.written):
        raise ValueError(_OBSERVED)
    if names := [f"`{loop.lifted.name(slot)}`" for slot in ran.written]:
        raise ValueError(_COND_WROTE.format(", ".join(names)))
    return ran.out


def _only_carry(step: Step, notes: list[Note]) -> Any:
    """The carry of a step, out of which JAX takes nothing else."""
    _check_not_sown(step.sown)
    notes.append(step.note)
    return step.carry


def _check_not_sown(sown: list[Sown]) -> None:
    for key in itertools.chain(*sown):
        raise ValueError(in_words(key, _SOWN, _CALLED))


_NOT_A_PAIR: Final = """The function of `{}` returns a pair, `(carry, y)`, and this \
one returned `{}`. Where there is nothing to return besides: `return carry, None`."""

_COND_WROTE: Final = """The `cond_fun` of `es.while_loop` wrote {}. It only answers \
whether to go on, and JAX takes nothing else out of it. Write in `body_fun`, and carry \
what `cond_fun` has to know."""

_OBSERVED: Final = """A module was called in the `cond_fun` of `es.while_loop`, out of \
which JAX takes only the answer: whether its output was finite is not known outside. \
Call it in `body_fun`, and carry what `cond_fun` has to know."""

_SOWN: Final = """`{}` was sown in a step of `es.while_loop` or `es.fori_loop`, of \
which only the last carry comes out. `es.scan` stacks what its steps sow; or put the \
value into the carry, and sow it after the loop."""

_CALLED: Final = """The output of `{}` was captured in a step of `es.while_loop` or \
`es.fori_loop`, of which only the last carry comes out. `es.scan` stacks the outputs \
of its steps; or leave the module out of `outputs`."""


def fori_loop(
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    lower: Any,
    upper: Any,
    unroll: int | bool | None,
) -> tuple[Any, None]:
    """[`es.fori_loop`][eqx_state.fori_loop]: the last carry, and `None`."""
    loop = Loop(body_fun, init_val)
    if loop.lifted.is_initializing:
        body_fun(lower, init_val)
        loop = Loop(body_fun, init_val)
    notes: list[Note] = []

    def run(i: Any, carry: Any) -> Step:
        return loop.step(carry, lambda carry: body_fun(i, carry))

    def body(i: Any, carry: Any) -> Any:
        return _only_carry(run(i, carry), notes)

    carry = loop.first(lambda carry: run(lower, carry).carry)
    final = jax.lax.fori_loop(lower, upper, body, carry, unroll=unroll)
    return loop.finish(final, notes), None
