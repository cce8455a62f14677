"""`es.scan`, `es.while_loop`, `es.fori_loop`: state carried from step to step.

A loop carries what it is given to carry, and beside it the state of the modules that
the functions reach. A module in the carry itself has a stand-in in the body: the object
that was passed in stays as it was, and the new one comes back in the carry.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ._base import get_place
from ._lift import is_traced, Leaves, Lifted
from ._scope import is_owned, own
from ._shared import closed_copy
from ._traverse import (
    check_not_shared,
    difference_of_leaves,
    is_array,
    KeyPath,
    leaves,
    modules_in,
)


_C = TypeVar("_C")
_X = TypeVar("_X")
_Y = TypeVar("_Y")


class _Loop:
    """What a loop threads: the carry, the state beside it, the slices of modules."""

    def __init__(self, functions: Any, init: Any, xs: Any = None):
        check_not_shared(init)
        stand_ins: dict[int, Any] = {}

        def stand_in(x: Any) -> Any:
            if not is_owned(x):
                return x
            place, copy = get_place(x), closed_copy(x)
            own(copy, place.scope, place.path, place.context)
            stand_ins[id(x)] = copy
            return copy

        self.init = jtu.tree_map(stand_in, init, is_leaf=is_owned)
        self.arrays, self.static = eqx.partition(self.init, is_traced(self.init))
        self.lifted = Lifted(functions, self.init, xs)
        self.index = {id(root): i for i, root in enumerate(self.lifted.roots)}
        self.originals = {x: self.index[id(copy)] for x, copy in stand_ins.items()}
        self.kept: set[KeyPath] = set()
        values, writable = self.lifted.values(), self.lifted.writable()
        for x in jtu.tree_leaves(self.init, is_leaf=is_owned):
            if is_owned(x):  # the carry holds its values
                writable[self.index[id(x)]] = {}
        self.state: list[Leaves] = []
        self.slices: list[Leaves] = []
        for i, (old, new) in enumerate(zip(values, writable, strict=True)):
            in_xs = {name for name, _ in self.lifted.within(i, xs)}
            self.state.append({n: x for n, x in new.items() if n not in in_xs})
            sliced = {n: x for n, x in old.items() if n in in_xs and is_array(x)}
            _check_sliceable(sliced)
            self.slices.append(sliced)
        self.written: list[set[str]] = [set() for _ in values]

    def enter(
        self, arrays: Any, state: list[Leaves], slices: list[Leaves] | None = None
    ) -> tuple[Any, list[Leaves]]:
        """The carry as the functions take it, and what is in the modules meanwhile."""
        slices = [{} for _ in state] if slices is None else slices
        parts = zip(self.lifted.values(), state, slices, strict=True)
        values = [{**old, **new, **x} for old, new, x in parts]

        def put(x: Any, new: Any) -> Any:
            if not is_owned(x):
                return new
            i = self.index[id(x)]
            values[i] = dict(zip(values[i], jtu.tree_leaves(new), strict=True))
            return x

        carry = eqx.combine(arrays, self.static)
        return jtu.tree_map(put, self.init, carry, is_leaf=is_owned), values

    def run(
        self,
        values: list[Leaves],
        call: Callable[[], Any],
        carry_of: Callable[[Any], Any] = lambda out: out,
    ) -> tuple[Any, list[Leaves]]:
        """`Lifted.run`; the output must not hold what a stand-in stands for."""
        outside: list[int] = []

        def watched() -> Any:
            out = call()
            ids = [id(visit.node) for visit in modules_in(carry_of(out))]
            outside.extend(self.originals[x] for x in ids if x in self.originals)
            return out

        out, written = self.lifted.run(values, watched)
        for name in (name for i in outside for name in written[i]):
            raise _not_returned(name)
        return out, written

    def leave(
        self, values: list[Leaves], carry: Any, written: list[Leaves]
    ) -> tuple[Any, list[Leaves]]:
        """The carry and the state after a step."""
        self._check_returned(values, carry, written)
        arrays, static = eqx.partition(carry, is_traced(carry))
        self._check_static(static)
        for names, new in zip(self.written, written, strict=True):
            names.update(new)
        after = [{**v, **new} for v, new in zip(values, written, strict=True)]
        return arrays, [
            {name: new[name] for name in old}
            for old, new in zip(self.state, after, strict=True)
        ]

    def _check_returned(
        self, values: list[Leaves], carry: Any, written: list[Leaves]
    ) -> None:
        """What was written in a module of the carry must be in the new carry."""
        returned = {v.path: v.node for v in leaves(carry)}
        entries, _ = jtu.tree_flatten_with_path(self.init, is_leaf=is_owned)
        self.kept = set()
        for path, x in entries:
            if not is_owned(x):
                continue
            i = self.index[id(x)]
            for visit, (name, old) in zip(leaves(x), values[i].items(), strict=True):
                place = (*path, *visit.path)
                if returned.get(place) is old:
                    if name in written[i]:
                        raise _not_returned(name)
                    self.kept.add(place)

    def _check_static(self, static: Any) -> None:
        if (name := difference_of_leaves(self.static, static)) is not None:
            raise TypeError(
                "The body of a loop returned another value at"
                f" `{name or 'the carry'}`, which is no array. From step to step only"
                " arrays can change: make it one, or return it as it was."
            )

    def step(
        self, arrays: Any, state: list[Leaves], f: Callable[[Any], Any]
    ) -> tuple[Any, list[Leaves]]:
        """A step of which only the carry comes out."""
        carry, values = self.enter(arrays, state)
        carry, written = self.run(values, lambda: f(carry))
        return self.leave(values, carry, written)

    def test(self, arrays: Any, state: list[Leaves], f: Callable[[Any], Any]) -> Any:
        """Whether to go on, of which nothing but the answer can come out."""
        carry, values = self.enter(arrays, state)
        go_on, written = self.lifted.run(values, lambda: f(carry))
        if names := [f"`{name}`" for new in written for name in new]:
            raise ValueError(
                f"The `cond_fun` of `es.while_loop` wrote {', '.join(names)}. It only"
                " answers whether to go on, and JAX takes nothing else out of it. Write"
                " in `body_fun`, and carry what `cond_fun` has to know."
            )
        return go_on

    def finish(
        self, arrays: Any, state: list[Leaves], slices: list[Leaves] | None = None
    ) -> Any:
        """The carry after the loop; writes what was written to the owned modules."""
        slices = [{} for _ in state] if slices is None else slices
        changed = [
            {name: x for name, x in new.items() if name in names}
            for names, new in zip(self.written, state, strict=True)
        ]
        self.lifted.commit(
            [{**new, **x} for new, x in zip(changed, slices, strict=True)]
        )
        # A module comes back with its own parameters, and may be assigned.
        arrays = jtu.tree_map_with_path(
            lambda path, new, old: old if path in self.kept else new,
            arrays,
            self.arrays,
        )
        return eqx.combine(arrays, self.static)


def _not_returned(name: str) -> ValueError:
    return ValueError(
        f"`{name}` was written in a module of the carry, and the body returned a carry"
        " without it, so that what was written would be lost. Return the module that"
        " the body was given:\n\n"
        "    def body(cell, x):\n"
        "        y = cell(x)\n"
        "        return cell, y"
    )


def _check_sliceable(slices: Leaves) -> None:
    for name, x in slices.items():
        if jnp.ndim(x) == 0:
            raise ValueError(
                f"`es.scan`: `{name}` has shape (), and no first axis to scan over. A"
                " stack of layers has one in each of its arrays, also in its state and"
                " keys: make it by `eqx.filter_vmap(make_layer)(jax.random.split(key,"
                " n))`."
            )


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
    in stays as it was.

    **Arguments:**

    - `f`: takes the carry and a slice of `xs`; returns the new carry and an output.
    - `init`: the first carry, any pytree. What is no array must stay as it is.
    - `xs`: what is scanned over along the first axis of each array, or `None`.
    - `length`, `reverse`, `unroll`, `_split_transpose`: as for `jax.lax.scan`.

    **Returns:**

    The last carry, and the outputs stacked along a new first axis.

    **Raises:**

    - `ValueError`: a state changed its shape or dtype; what was written in a module of
        the carry was not returned.
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
    arrays, rest = eqx.partition(xs, is_traced(xs, is_owned), is_leaf=is_owned)
    loop = _Loop(f, init, xs)
    if loop.lifted.is_initialising:
        _initialise(f, init, xs, (arrays, rest), -1 if reverse else 0)
        loop = _Loop(f, init, xs)
    static_y: Any = None

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        nonlocal static_y
        x, slices = x
        x = eqx.combine(x, rest, is_leaf=is_owned)
        entered, values = loop.enter(*carry, slices)
        out, written = loop.run(values, lambda: f(entered, x), lambda out: _two(out)[0])
        new_carry, y = out
        y, static_y = eqx.partition(y, is_traced(y))
        written_slices = [
            {name: new[name] for name in old if name in new}
            for old, new in zip(slices, written, strict=True)
        ]
        return loop.leave(values, new_carry, written), (y, written_slices)

    carry, (ys, slices) = jax.lax.scan(
        step,
        (loop.arrays, loop.state),
        (arrays, loop.slices),
        length,
        reverse=reverse,
        unroll=unroll,
        _split_transpose=_split_transpose,
    )
    return loop.finish(*carry, slices), eqx.combine(ys, static_y)


def _initialise(f: Any, init: Any, xs: Any, parts: Any, first: int) -> None:
    """One step, in which what is missing is made: all steps have one structure then."""
    lifted = Lifted(f, init, xs)
    arrays, rest = parts
    sliced = [
        {name for name, _ in lifted.within(i, xs)} for i in range(len(lifted.roots))
    ]

    def slice_of(x: Any) -> Any:
        # Without a step there are no values, but there are shapes.
        return x[first] if x.shape[0] else jnp.zeros(x.shape[1:], x.dtype)

    values = [
        {n: slice_of(x) if n in names and is_array(x) else x for n, x in old.items()}
        for names, old in zip(sliced, lifted.values(), strict=True)
    ]
    x = eqx.combine(jtu.tree_map(slice_of, arrays), rest, is_leaf=is_owned)
    _, written = lifted.run(values, lambda: f(init, x))
    # A slice is not written back into its stack: the loop itself does that.
    lifted.commit(
        [
            {name: x for name, x in new.items() if name not in names}
            for names, new in zip(sliced, written, strict=True)
        ]
    )


def _two(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(
            "The function of `es.scan` returns a pair, `(carry, y)`, and this one"
            f" returned `{eqx.tree_pformat(out, short_arrays=True)}`. Where there is"
            " nothing to stack: `return carry, None`."
        )
    return out


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
    loop = _Loop((cond_fun, body_fun), init_val)
    if loop.lifted.is_initialising:
        body_fun(init_val)
        loop = _Loop((cond_fun, body_fun), init_val)
    final = jax.lax.while_loop(
        lambda carry: loop.test(*carry, cond_fun),
        lambda carry: loop.step(*carry, body_fun),
        (loop.arrays, loop.state),
    )
    return loop.finish(*final)


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
    loop = _Loop(body_fun, init_val)
    if loop.lifted.is_initialising:
        body_fun(lower, init_val)
        loop = _Loop(body_fun, init_val)
    final = jax.lax.fori_loop(
        lower,
        upper,
        lambda i, carry: loop.step(*carry, lambda carry: body_fun(i, carry)),
        (loop.arrays, loop.state),
        unroll=unroll,
    )
    return loop.finish(*final)
