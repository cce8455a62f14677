"""Loops and branches: `jax.lax`'s, which carry state and may write it.

Inside `jit` they are traced as a part of it, and outside once for each function.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np

from ._compat import boundary
from ._jit._kept import kept
from ._transforms import branches as _branches, loops


_C = TypeVar("_C")
_R = TypeVar("_R")
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

    Outside `jit`, the loop is compiled and kept for as long as `f` is: a call with the
    same function does not trace it again, whatever arrays its modules have by then. A
    bare array that `f` closes over is read when `f` is traced, as by `jax.lax.scan`,
    and so is what a list or a dict holds. Anything else under a global name, in a
    closure or in a class is compared at each call, by identity. Traced each time are a
    function made anew for each call, such as a `lambda`; a method of an object that is
    not a module; and a function that asks for the value of a parameter.

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
    last, (pair, ys) = kept(
        loops.scan,
        (f,),
        (init, xs),
        carries=True,
        length=length,
        reverse=reverse,
        unroll=unroll,
        _split_transpose=_split_transpose,
    )
    return jtu.tree_unflatten(pair, (last, ys))


@boundary
def while_loop(
    cond_fun: Callable[[_C], Any], body_fun: Callable[[_C], _C], init_val: _C
) -> _C:
    """`jax.lax.while_loop` that carries state from step to step.

    As in [`es.scan`][eqx_state.scan], state and keys of the modules that the functions
    reach are carried, modules in `init_val` come back in the result, and outside `jit`
    the same two functions are traced once.

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
    last, _ = kept(loops.while_loop, (cond_fun, body_fun), (init_val,), carries=True)
    return last


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
    reaches are carried, modules in `init_val` come back in the result, and outside
    `jit` the same function is traced once.

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
    operands: tuple[Any, ...] = (init_val, lower, upper)
    settings: dict[str, Any] = {"unroll": unroll}
    if not any(isinstance(x, jax.core.Tracer) for x in (lower, upper)):
        # Of a known number of steps JAX makes a `scan`, which can be differentiated.
        operands = (init_val,)
        settings |= {"lower": _number(lower), "upper": _number(upper)}
    last, _ = kept(loops.fori_loop, (body_fun,), operands, carries=True, **settings)
    return last


@boundary
def cond(
    pred: Any,
    true_fun: Callable[..., _R],
    false_fun: Callable[..., _R],
    *operands: Any,
) -> _R:
    """`jax.lax.cond` in which both branches may write state.

    Outside `jit` the same two functions are traced once, as in
    [`es.scan`][eqx_state.scan].

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
    return kept(_branches.cond, (true_fun, false_fun), (pred, *operands))


@boundary
def switch(index: Any, branches: Sequence[Callable[..., _R]], *operands: Any) -> _R:
    """`jax.lax.switch` in which any branch may write state.

    Outside `jit` the same functions are traced once, as in
    [`es.scan`][eqx_state.scan].

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
    functions = tuple(branches)
    if len(functions) < 2:  # JAX calls a single one without a trace
        return _branches.switch(functions, index, *operands)
    return kept(_branches.switch, (functions,), (index, *operands))


def _number(x: Any) -> Any:
    """A bound of a loop as a static value, if it is a scalar."""
    is_scalar = isinstance(x, (jax.Array, np.ndarray)) and x.ndim == 0
    return np.asarray(x)[()] if is_scalar else x
