"""`es.scan`, `es.while_loop`, `es.fori_loop`: state carried from step to step."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import boundary
from .._state._scope import is_owned
from .._tree._walk import is_array
from ._carry import Loop
from ._lift import is_traced, Lifted


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
    """`jax.lax.scan`, through which state is carried from step to step.

    State and keys of the modules that `f` holds or closes over are carried, parameters
    are shared by all steps. Modules in `xs` are sliced along their first axis: a stack
    of layers is scanned by passing it as `xs`, and its state is written back stacked.
    Modules in `init` are carried and come back in the carry; the object that was passed
    in stays as it was, until the new one is assigned: `self.cell, ys = es.scan(step,
    self.cell, xs)`.

    A stack in `xs` that `f` also reaches through its closure is whole there.

    **Arguments:**

    - `f`: takes the carry and a slice of `xs`; returns the new carry and an output, as
        a tuple, a list, or any pytree with two children.
    - `init`: the first carry, any pytree. What is not an array must stay as it is.
    - `xs`: what is scanned over along the first axis of each array, or `None`.
    - `length`, `reverse`, `unroll`, `_split_transpose`: as for `jax.lax.scan`.

    **Returns:**

    The last carry, and the outputs stacked along a new first axis.

    **Raises:**

    - `ValueError`: a state changed its shape or dtype, or is not an array; what was
        written in a module of the carry was not returned; the state of a module in `xs`
        was written, and read or written through the closure.
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
    if loop.lifted.is_initialising:
        _initialise(loop, f, init, -1 if reverse else 0)
        loop = Loop(f, init, xs)
    arrays, rest = loop.split_xs()
    static_y: Any = None
    pair: Any = None

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        nonlocal static_y, pair
        x, slices = x
        x = eqx.combine(x, rest, is_leaf=is_owned)
        entered, values = loop.enter(*carry, slices)
        out, written, sown = loop.run(values, lambda: f(entered, x))
        pair, (new_carry, y) = _two(out)
        y, static_y = eqx.partition(y, is_traced(y))
        written_slices = [
            {k: new[k] for k in old if k in new}
            for old, new in zip(slices, written, strict=True)
        ]
        return loop.leave(values, new_carry, written), (y, written_slices, sown)

    carry, (ys, slices, sown) = jax.lax.scan(
        step,
        (loop.arrays, loop.state),
        (arrays, loop.slices),
        length,
        reverse=reverse,
        unroll=unroll,
        _split_transpose=_split_transpose,
    )
    result = loop.finish(*carry, slices, sown), eqx.combine(ys, static_y)
    return jtu.tree_unflatten(pair, result)


def _initialise(loop: Loop, f: Any, init: Any, first: int) -> None:
    """One step, in which what is missing is made: all steps have one structure then."""

    # Of the modules in `init` themselves: a copy of them would be initialised in vain.
    lifted = Lifted(f, init, loop.xs, stand_ins=loop.stand_ins)
    sliced = [
        old if lifted.is_stand_in(i) else {} for i, old in enumerate(lifted.values())
    ]

    def slice_of(x: Any) -> Any:
        # Without a step there are no values, but there are shapes.
        return x[first] if x.shape[0] else jnp.zeros(x.shape[1:], x.dtype)

    values = [
        {k: slice_of(x) if k in stacked and is_array(x) else x for k, x in old.items()}
        for stacked, old in zip(sliced, lifted.values(), strict=True)
    ]
    arrays, rest = loop.split_xs()
    x = eqx.combine(jtu.tree_map(slice_of, arrays), rest, is_leaf=is_owned)
    _, written, sown = lifted.run(values, lambda: f(init, x))
    # A slice is not written back into its stack: the loop itself does that.
    lifted.commit(
        [
            {k: x for k, x in new.items() if k not in stacked}
            for stacked, new in zip(sliced, written, strict=True)
        ],
        sown,
    )


def _two(out: Any) -> tuple[Any, list[Any]]:
    """A pair, which for JAX is what has two children: its structure, and the two."""
    pair, structure = jtu.tree_flatten(out, is_leaf=lambda x: x is not out)
    if len(pair) != 2:
        raise TypeError(
            "The function of `es.scan` returns a pair, `(carry, y)`, and this one"
            f" returned `{eqx.tree_pformat(out, short_arrays=True)}`. Where there is"
            " nothing to stack: `return carry, None`."
        )
    return structure, pair


@boundary
def while_loop(
    cond_fun: Callable[[_C], Any], body_fun: Callable[[_C], _C], init_val: _C
) -> _C:
    """`jax.lax.while_loop`, through which state is carried from step to step.

    As [`es.scan`][eqx_state.scan]: state and keys of the modules that the functions
    reach are carried, and modules in `init_val` come back in the result.

    **Arguments:**

    - `cond_fun`: takes the carry; returns whether to go on. It may not write state.
    - `body_fun`: takes the carry; returns the new one.
    - `init_val`: the first carry, any pytree.

    **Returns:**

    The last carry.

    **Raises:**

    - `ValueError`: `cond_fun` wrote state. Else as `es.scan`.

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
    if loop.lifted.is_initialising:
        body_fun(init_val)
        loop = Loop((cond_fun, body_fun), init_val)
    final = jax.lax.while_loop(
        lambda carry: loop.test(*carry, cond_fun),
        lambda carry: loop.step(*carry, body_fun),
        (loop.arrays, loop.state),
    )
    return loop.finish(*final)


@boundary
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, _C], _C],
    init_val: _C,
    *,
    unroll: int | bool | None = None,
) -> _C:
    """`jax.lax.fori_loop`, through which state is carried from step to step.

    As [`es.scan`][eqx_state.scan]: state and keys of the modules that `body_fun`
    reaches are carried, and modules in `init_val` come back in the result.

    **Arguments:**

    - `lower`, `upper`: the first index, and the one after the last.
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
    if loop.lifted.is_initialising:
        body_fun(lower, init_val)
        loop = Loop(body_fun, init_val)
    final = jax.lax.fori_loop(
        lower,
        upper,
        lambda i, carry: loop.step(*carry, lambda carry: body_fun(i, carry)),
        (loop.arrays, loop.state),
        unroll=unroll,
    )
    return loop.finish(*final)
