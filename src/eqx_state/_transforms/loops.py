"""`es.scan`, `es.while_loop`, `es.fori_loop`: state carried from step to step."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import boundary, manual_axes, while_loop as run_while
from .._errors import show
from .._state.init import created_error
from .._tree.base import keystr
from .._tree.keys import data_of, wrapped_like
from .._tree.walk import is_array
from .carry import Loop
from .creation import create_fields, created_arrays, is_init_running, run_once
from .cut import cut
from .lift import Lifted, Ran


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

    If `f` is a module, or closes over modules, their state and keys are carried, and
    all steps share their parameters. Modules in `xs` are sliced along the first axis:
    to scan over a stack of layers, pass the stack as `xs`. The new state of the layers
    is stacked again. Modules in `init` are part of the carry. The module that you
    passed in does not change, so assign the new one: `self.cell, ys = es.scan(step,
    self.cell, xs)`.

    If `f` also closes over a stack in `xs`, it sees the whole stack in its old state.

    Outside `jit`, a loop traces its function on each call. Put the whole computation in
    [`es.jit`][eqx_state.jit] to trace it once.

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
        module of the carry was written but not returned; a state was written both in
        `xs` and through the closure; an array in `xs` has no axis.
    - `TypeError`: `f` did not return a pair; or the carry changed its structure, a
        shape or dtype, or a leaf that is not an array.

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
    if is_init_running():
        _create_fields(f, init, xs, -1 if reverse else 0)
    loop = Loop((f,), init, xs)
    arrays, others = cut(loop.xs)
    each = arrays, loop.slices
    for (where, *below), x in jtu.tree_leaves_with_path(each):
        if jnp.ndim(x) == 0:
            of_module = where.idx == 1
            name = loop.lifted.name(below[0].key) if of_module else f"xs{keystr(below)}"
            raise ValueError(_NO_AXIS.format(name))
    static: list[Any] = []  # for each trace, the static part of the output

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        sliced, slices = x
        after = (others.join(sliced),)
        carry, ran = loop.step(carry, f, after=after, slices=slices, unpack=_pair_of)
        pair, y = ran.out
        y, rest = cut(y)
        static.append((pair, rest))
        written = {slot: x for slot, x in ran.written.items() if slot in slices}
        return carry, ran._replace(out=y, written=written)

    carry, ran = jax.lax.scan(
        step,
        loop.first_carry(lambda carry: step(carry, jtu.tree_map(_slice_of, each))[0]),
        each,
        length,
        reverse=reverse,
        unroll=unroll,
        _split_transpose=_split_transpose,
    )
    pair, rest = static[-1]
    last = loop.finish(carry, ran)
    return jtu.tree_unflatten(pair, (last, rest.join(ran.out)))


def _slice_of(x: Any, i: int = 0) -> Any:
    if not jnp.shape(x):
        return x  # the loop raises the error
    # A loop with zero steps has no first slice, but zeros have the right shape.
    return x[i] if x.shape[0] else jnp.zeros(x.shape[1:], x.dtype)


def _create_fields(f: Any, init: Any, xs: Any, index: int) -> None:
    """Run one step outside the loop, to create all missing fields."""
    # The modules in `init` are not copied: the step initializes the originals.
    lifted = Lifted((f, init), xs)
    slices = {
        slot: _slice_of(visit.node, index)
        for slot, (visit, root, *_) in enumerate(lifted.leaves)
        if root.is_copy and is_array(visit.node)
    }
    arrays, rest = cut(lifted.arguments)
    arrays = jtu.tree_map(lambda x: _slice_of(x, index), arrays)
    run_once(lifted, slices, f, (init, rest.join(arrays)))
    for module, name, arrays in created_arrays(lifted):
        if arrays and id(module) in lifted.copies.originals:
            raise created_error(module, name, "in one step of `es.scan`")


def _pair_of(out: Any) -> tuple[Any, tuple[Any, Any]]:
    """Split a pair into the carry, and the pair's treedef with its second half.

    As for JAX, any pytree with two children is a pair.
    """
    pair, structure = jtu.tree_flatten(out, is_leaf=lambda x: x is not out)
    if len(pair) != 2:
        # Do not print the elements of a long tuple, which may contain a whole model.
        many = f"{type(out).__name__} of {len(pair)}"
        shown = many if len(pair) > 2 else eqx.tree_pformat(out, short_arrays=True)
        raise TypeError(_NOT_A_PAIR.format(shown))
    return pair[0], (structure, pair[1])


@boundary
def while_loop(
    cond_fun: Callable[[_C], Any],
    body_fun: Callable[[_C], _C],
    init_val: _C,
    *,
    max_steps: int | None = None,
) -> _C:
    """`jax.lax.while_loop` that carries state from step to step.

    As in [`es.scan`][eqx_state.scan], if a function is a module, or closes over
    modules, their state and keys are carried. Modules in `init_val` are part of the
    carry.

    **Arguments:**

    - `cond_fun`: takes the carry; returns whether to continue. It may not write state.
    - `body_fun`: takes the carry; returns the new one.
    - `init_val`: the first carry, any pytree.
    - `max_steps`: how many steps the loop may take, a Python integer. JAX can
        differentiate the loop in reverse mode only with such a limit. The backward pass
        recomputes the steps from stored carries, about `sqrt(2 * max_steps)` of them,
        and so the memory depends on `max_steps`, and the time on the steps that the
        loop takes. A loop with a limit has no derivative in forward mode: for
        `es.jvp`, leave out `max_steps`.

    **Returns:**

    The last carry.

    **Raises:**

    - `ValueError`: `cond_fun` wrote state; `es.capture` was to record a value in a
        step; or `max_steps` is not a positive integer.
    - `eqx.EquinoxRuntimeError`: `cond_fun` is still true after `max_steps` steps.
    - `NotImplementedError`: `max_steps` is given inside `es.shard_map`.
    - All errors of `es.scan` about the carry.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Halving(es.Module):
            steps: es.State = 0

            def __call__(self, x):
                def halve(x):
                    self.steps = self.steps + 1
                    return x / 2

                return es.while_loop(lambda x: x > 1, halve, x)


        y, model = es.mutable(Halving())(20.0)
        assert y == 0.625 and model.steps == 5


        # The square root by Newton's method, and its derivative.
        def sqrt(x):
            def is_far(y):
                return abs(y * y - x) > 1e-4

            return es.while_loop(is_far, lambda y: (y + x / y) / 2, x, max_steps=20)


        (y, _), slope = es.value_and_grad(sqrt)(jnp.array(4.0))
        assert jnp.allclose(y, 2.0) and jnp.allclose(slope, 0.25, atol=1e-3)
        ```
    """
    if max_steps is not None:
        if type(max_steps) is not int or max_steps < 1:
            raise ValueError(_NO_LIMIT.format(show(max_steps)))
        if manual_axes():  # neither Equinox's loop nor `eqx.error_if` works there
            raise NotImplementedError(_ON_DEVICES.format(max_steps))

    create_fields(cond_fun, init_val)
    create_fields(body_fun, init_val)
    loop = Loop((cond_fun, body_fun), init_val)

    def go_on(carry: Any) -> Any:
        given, values = loop.enter(carry)
        ran = loop.lifted.run(values, cond_fun, (given,))
        out, written = ran.without_sown(_SOWN)
        if names := [f"`{loop.lifted.name(slot)}`" for slot in written]:
            raise ValueError(_COND_WROTE.format(", ".join(names)))
        return out

    def body(carry: Any) -> Any:
        arrays, state = _only_carry(*loop.step(carry, body_fun))
        return arrays, loop.varied(state, lambda: go_on(carry))

    final = run_while(go_on, body, loop.first_carry(body), max_steps)
    if max_steps is not None:
        final = _error_if(final, go_on(final), _TOO_MANY_STEPS.format(max_steps))
    return loop.finish(final)


def _error_if(tree: Any, failed: Any, message: str) -> Any:
    """`eqx.error_if`, which does not take typed keys."""
    checked = eqx.error_if(jtu.tree_map(data_of, tree), failed, message)
    return jtu.tree_map(wrapped_like, checked, tree)


def _only_carry(carry: Any, ran: Ran) -> Any:
    """The carry of a step, in a loop that cannot return anything else."""
    ran.without_sown(_SOWN)
    return carry


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

    As in [`es.scan`][eqx_state.scan], if `body_fun` is a module, or closes over
    modules, their state and keys are carried. Modules in `init_val` are part of the
    carry.

    **Arguments:**

    - `lower`, `upper`: the first index, and the index after the last one.
    - `body_fun`: takes the index and the carry; returns the new carry.
    - `init_val`: the first carry, any pytree.
    - `unroll`: as for `jax.lax.fori_loop`.

    **Returns:**

    The last carry.

    **Raises:**

    - The errors of [`es.while_loop`][eqx_state.while_loop] about `body_fun`.

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
    create_fields(body_fun, lower, init_val)
    loop = Loop((body_fun,), init_val)

    def body(i: Any, carry: Any) -> Any:
        return _only_carry(*loop.step(carry, body_fun, before=(i,)))

    carry = loop.first_carry(lambda carry: body(lower, carry))
    final = jax.lax.fori_loop(lower, upper, body, carry, unroll=unroll)
    return loop.finish(final)


_NOT_A_PAIR: Final = """The function of `es.scan` must return a pair, `(carry, y)`, \
but it returned `{}`. Write `return (model, optimizer), loss`, or `return carry, \
None`."""

_NO_AXIS: Final = """`es.scan(f, init, xs)`: `{}` has shape (), and no first axis to \
scan over. In a stack of layers, each array has this axis, also state and keys. To run \
layers in turn: `es.nn.Stacked(layers)(x)`. To create a stack for `xs`: \
`eqx.filter_vmap(make_layer)(jax.random.split(key, n))`."""

_COND_WROTE: Final = """The `cond_fun` of `es.while_loop` wrote {}. It can only return \
a bool, so the write would be lost. Write in `body_fun`, and put what `cond_fun` needs \
into the carry."""

_NO_LIMIT: Final = """`es.while_loop(..., max_steps={})`: the limit must be a Python \
integer, at least 1. It decides how many carries the compiled program stores."""

_ON_DEVICES: Final = """`es.while_loop(..., max_steps={0})` does not work inside \
`es.shard_map`. Run the steps by `es.scan`, and skip those after the last one:

    def step(x, _):
        return es.cond(is_far(x), self.layer, lambda x: x, x), None

    x, _ = es.scan(step, x, length={0})"""

_TOO_MANY_STEPS: Final = """`es.while_loop(..., max_steps={0})`: `cond_fun` is still \
true after {0} steps. Pass a larger `max_steps`; or, if the loop may stop early, count \
the steps in the carry, and let `cond_fun` compare the count."""

_SOWN: Final = """Cannot capture {} in a step of `es.while_loop` or `es.fori_loop`: \
only the last carry leaves such a loop. Use `es.scan`, which stacks the captured \
values of its steps; or sow after the loop; or leave the module out of `outputs`."""
