"""`es.scan`, `es.while_loop`, `es.fori_loop`: state carried from step to step.

State that the functions reach becomes a part of JAX's carry, beside the user's own.
Which of it was written is known after the trace of a step, and only that is committed.
"""

import functools as ft
import itertools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import boundary
from .._state._scope import is_owned, Sown
from .._state._sow import in_words
from .._tree._walk import is_array
from ._arguments import is_traced
from ._carry import Loop, Note, Step
from ._lift import Lifted, Ran
from ._rebuilt import MADE_ONCE


_C = TypeVar("_C")
_X = TypeVar("_X")
_Y = TypeVar("_Y")


@boundary
def scan(
    f: Callable[[_C, _X], tuple[_C, _Y]],
    init: _C,
    xs: _X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
) -> tuple[_C, _Y]:
    """`jax.lax.scan` that carries state from step to step.

    State and keys of the modules that `f` holds or closes over are carried; parameters
    are shared by all steps. Modules in `xs` are sliced along their first axis: to scan
    over a stack of layers, pass it as `xs`. Its state is written back stacked. Modules
    in `init` are carried and come back in the carry. The object that was passed in does
    not change until the new one is assigned: `self.cell, ys = es.scan(step, self.cell,
    xs)`.

    If `f` also reaches a stack in `xs` through its closure, it sees the whole stack
    there.

    **Arguments:**

    - `f`: takes the carry and a slice of `xs`; returns the new carry and an output, as
        a tuple, a list, or any pytree with two children.
    - `init`: the first carry, any pytree. Leaves that are not arrays must not change.
    - `xs`: a pytree to scan over, along the first axis of each array; or `None`.
    - `length`, `reverse`, `unroll`, `_split_transpose`: as for `jax.lax.scan`.

    **Returns:**

    The last carry, and the outputs stacked along a new first axis.

    **Raises:**

    - `ValueError`: a written state changed its shape or dtype, or is not an array; a
        module of the carry was written and not returned; the state of a module in `xs`
        was written, and was also read or written through the closure.
    - `TypeError`: the carry changed its structure, shape or dtype.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Sum(es.Module):
            total: es.State

            def __call__(self, xs):
                def step(carry, x):
                    self.total = self.total + x
                    return carry + 1, self.total

                return es.scan(step, 0, xs)


        (n, totals), new = es.mutable(Sum(0.0))(jnp.array([1.0, 2.0, 3.0]))
        assert n == 3 and new.total == 6.0 and totals.tolist() == [1.0, 3.0, 6.0]
        ```
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
        unroll=unroll,
        _split_transpose=_split_transpose,
    )
    pair, static = notes[-1].static
    last = loop.finish(carry, notes, Ran(None, written, sown))
    return jtu.tree_unflatten(pair, (last, eqx.combine(ys, static)))


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


@boundary
def while_loop(
    cond_fun: Callable[[_C], Any], body_fun: Callable[[_C], _C], init_val: _C
) -> _C:
    """`jax.lax.while_loop` that carries state from step to step.

    As in [`es.scan`][eqx_state.scan], state and keys of the modules that the functions
    reach are carried, and modules in `init_val` come back in the result.

    **Arguments:**

    - `cond_fun`: takes the carry; returns whether to continue. It may not write state.
    - `body_fun`: takes the carry; returns the new one.
    - `init_val`: the first carry, any pytree.

    **Returns:**

    The last carry.

    **Raises:**

    - `ValueError`: `cond_fun` wrote state.
    - All errors of `es.scan`.

    !!! example

        ```python
        import eqx_state as es


        class Halving(es.Module):
            steps: es.State = 0

            def __call__(self, x):
                def halve(x):
                    self.steps = self.steps + 1
                    return x / 2

                return es.while_loop(lambda x: x > 1, halve, x)


        y, model = es.mutable(Halving())(20.0)
        assert y == 0.625 and model.steps == 5
        ```
    """
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
    return loop.finish(final, notes)


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


@boundary
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, _C], _C],
    init_val: _C,
    *,
    unroll: int | bool | None = None,
) -> _C:
    """`jax.lax.fori_loop` that carries state from step to step.

    As in [`es.scan`][eqx_state.scan], state and keys of the modules that `body_fun`
    reaches are carried, and modules in `init_val` come back in the result.

    **Arguments:**

    - `lower`, `upper`: the first index, and the index after the last one.
    - `body_fun`: takes the index and the carry; returns the new carry.
    - `init_val`: the first carry, any pytree.
    - `unroll`: as for `jax.lax.fori_loop`.

    **Returns:**

    The last carry.

    !!! example

        ```python
        import eqx_state as es

        stream = es.RngStream(0)


        def draw_twice(stream):
            def draw(i, last):
                return stream()

            return es.fori_loop(0, 2, draw, stream())


        key, new = es.mutable(draw_twice)(stream)
        assert key != new.key and new.key != stream.key
        ```
    """
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
    return loop.finish(final, notes)
