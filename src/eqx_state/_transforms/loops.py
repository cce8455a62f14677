"""`es.scan`, `es.while_loop`, `es.fori_loop`: state carried from step to step.

The state that the functions reach becomes a part of JAX's carry, beside the user's
carry. The trace of a step shows which state the step writes, and only that state is
committed.

The user's carry may contain modules. A carry is a value: the body gets a new one at
each step, and the first one does not change. The body therefore gets a copy of the
module, and the loop returns a new module for the caller to assign: `self.cell, ys =
es.scan(step, self.cell, xs)`.
"""

import functools as ft
import itertools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import boundary, manual_axes, vary, varying_axes
from .._state.scope import is_owned, Sown
from .._tree.compare import check_not_repeated, identical
from .._tree.walk import copy_tree, is_array
from .cut import cut
from .lift import create_fields, lift, Lifted, Ran
from .reach import check_given
from .roots import by_entry, owned_copy, Values


_C = TypeVar("_C")
_X = TypeVar("_X")
_Y = TypeVar("_Y")


class Step(NamedTuple):
    """The result of tracing one step.

    `carry` contains the arrays of the new carry, and the new state. `rest` is the
    output of the step besides the carry.
    """

    carry: tuple[Any, Values]
    rest: Any
    written: Values
    sown: list[Sown]


class Loop:
    """The arrays of a loop: its carry, state, and slices of modules.

    - `init`, `xs`: the first carry and the inputs, with copies of their modules.
    - `before`, `treedef`: the leaves of the first carry, and its structure; `arrays`,
        `rest`: the same leaves, cut.
    - `carried`: the slots of the modules in the carry.
    - `state`: the state of all other modules, which JAX carries beside the user's
        carry.
    - `slices`: the leaves of the modules in `xs`; each step gets a slice.
    - `written`: the slots that some trace of a step has written; `unchanged`: the
        positions of leaves of modules in the carry that every trace returned unchanged.

    The sets `written` and `unchanged` cannot be outputs of a step, because JAX fixes
    the treedef of the outputs.
    """

    def __init__(
        self,
        functions: tuple[Any, ...],
        init: Any,
        xs: Any = None,
        *,
        once: Callable[[], None],
    ):
        """`once` runs one step without a trace: the `first` of `lift`."""
        check_not_repeated(init)
        check_given(*functions, init, xs)
        # A carry is a value: a module at two places is two modules in the next step.
        places = [*range(jtu.tree_structure(init).num_leaves)]
        treatments = [*places, *(None for _ in jtu.tree_leaves(xs))]
        self.lifted = lift(functions, (init, xs), treatments, first=once)
        self.init, self.xs = self.lifted.arguments
        outside = copy_tree(self.init)  # no scope owns it, so its leaves are visible
        self.before, self.treedef = jtu.tree_flatten(outside)
        self.arrays, self.rest = cut(outside)
        self.carried: set[int] = set()
        self.unchanged: set[int] = set()
        for x, own in by_entry(self.init, places):
            if is_owned(x):
                self.carried.update(self.lifted.slots(x))
                self.unchanged.update(own)
        self.slices, self.state = {}, {}
        for k, (visit, root, _) in enumerate(self.lifted.leaves):
            if k in self.carried or not isinstance(visit.node, jax.Array):
                continue
            if root.is_copy:
                self.slices[k] = visit.node
            elif k in self.lifted.writable:
                self.state[k] = visit.node
        self.written: set[int] = set()
        for slot, x in self.slices.items():
            if jnp.ndim(x) == 0:
                raise ValueError(_NO_AXIS.format(self.lifted.name(slot)))

    def enter(
        self, carry: tuple[Any, Values], slices: Values | None = None
    ) -> tuple[Any, Values]:
        """The carry for the functions, and the values of the modules."""
        arrays, state = carry
        values = {**self.lifted.values, **state, **(slices or {})}
        new = jtu.tree_leaves(self.rest.join(arrays))
        given, own = self.lifted.fill(self.init, new)
        return given, {**values, **own}

    def first(self, step: Callable[[Any], Any]) -> tuple[Any, Values]:
        """The first carry; in a `shard_map` with the types that `step` gives it.

        A value that is replicated at first may vary between the devices after a step,
        but JAX requires one type for all steps. Casting it may make more values vary in
        the next step, so repeat this until nothing changes.
        """
        carry = self.arrays, self.state
        found: list[frozenset[Any]] = []

        def probe(carry: Any) -> None:
            found[:] = map(varying_axes, jtu.tree_leaves(step(carry)))

        while manual_axes():
            jax.eval_shape(probe, carry)
            old, treedef = jtu.tree_flatten(carry)
            if len(old) != len(found):
                break  # JAX raises the error
            new = [vary(x, axes) for x, axes in zip(old, found, strict=True)]
            if identical(old, new):
                break
            carry = jtu.tree_unflatten(treedef, new)
        return carry

    def step(
        self,
        carry: tuple[Any, Values],
        f: Callable[[Any], Any],
        slices: Values | None = None,
        unpack: Callable[[Any], tuple[Any, Any]] = lambda out: (out, None),
    ) -> Step:
        """Run one step. `unpack` splits the output of `f` into the carry and a rest."""
        given, values = self.enter(carry, slices)
        ran = self.lifted.run(values, lambda: f(given), returned=self.carried)
        new, rest = unpack(ran.out)
        self._check_returned(values, new, ran.written)
        arrays, rest_of_carry = cut(new)
        if (name := self.rest.difference(rest_of_carry)) is not None:
            raise TypeError(_STATIC.format(name or "the carry"))
        state = {slot: ran.written.get(slot, values[slot]) for slot in self.state}
        self.written.update(ran.written)
        return Step((arrays, state), rest, ran.written, ran.sown)

    def _check_returned(self, values: Values, carry: Any, written: Values) -> None:
        """Check that the new carry contains the writes to modules in the carry."""
        returned, treedef = jtu.tree_flatten(carry)
        if treedef != self.treedef:
            return  # JAX raises the error
        position, after = 0, {**values, **written}
        for x in jtu.tree_leaves(self.init, is_leaf=is_owned):
            if not is_owned(x):
                position += 1
                continue
            for slot in self.lifted.slots(x):
                new, before = returned[position], values[slot]
                if slot in written and new is not written[slot]:
                    outside = self._outside(x, after)
                    if new is before or any(new is y for y in outside):
                        raise ValueError(_NOT_RETURNED.format(self.lifted.name(slot)))
                if new is not before:
                    self.unchanged.discard(position)
                position += 1

    def _outside(self, copy: Any, values: Values) -> list[Any]:
        """The leaves of the original of a copy in the carry.

        A body may return the original instead of the copy: `return self.cell, y`.
        """
        original = self.lifted.copies.original(copy)
        if self.lifted.has(original):  # in the closure, with the values of the trace
            return [values[slot] for slot in self.lifted.slots(original)]
        return jtu.tree_leaves(original)

    def finish(
        self,
        carry: tuple[Any, Values],
        sown: list[Sown] | None = None,
        slices: Values | None = None,
    ) -> Any:
        """Commit what the loop has written, and return the last carry.

        `sown`: the sown values; `slices`: the new leaves of modules in `xs`.
        """
        if sown is None:  # the loop only returns the carry
            sown = [Sown() for _ in self.lifted.scopes]
        arrays, state = carry
        written = {slot: x for slot, x in state.items() if slot in self.written}
        self.lifted.commit(Ran(None, {**written, **(slices or {})}, sown))
        # JAX returns new arrays for the whole carry, even for the parameters of a
        # module, which no step changes. A scope detects writes by identity, so
        # `self.cell = cell` would count as a write to the parameters. Return the
        # caller's own arrays for leaves that each trace left unchanged.
        after = jtu.tree_leaves(self.rest.join(arrays))
        kept = self.unchanged
        new = (self.before[k] if k in kept else x for k, x in enumerate(after))

        def put(x: Any) -> Any:
            return owned_copy(x, new) if is_owned(x) else next(new)

        return jtu.tree_map(put, self.init, is_leaf=is_owned)


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
        `xs` and through the closure.
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
    once = ft.partial(_initialize, f, init, xs, -1 if reverse else 0)
    loop = Loop((f,), init, xs, once=once)
    arrays, others = cut(loop.xs)
    static: list[Any] = []  # for each trace, the static part of the output

    def run(carry: Any, x: Any) -> Step:
        x, slices = x
        x = others.join(x)
        return loop.step(carry, lambda carry: f(carry, x), slices, _pair_of)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        after, slices = run(carry, x), x[1]
        pair, y = after.rest
        y, rest = cut(y)
        static.append((pair, rest))
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
    pair, rest = static[-1]
    last = loop.finish(carry, sown, written)
    return jtu.tree_unflatten(pair, (last, rest.join(ys)))


def _slice_of(x: Any, i: int = 0) -> Any:
    # A loop with zero steps has no first slice, but zeros have the right shape.
    return x[i] if x.shape[0] else jnp.zeros(x.shape[1:], x.dtype)


def _initialize(f: Any, init: Any, xs: Any, first: int) -> None:
    """Run one step outside the loop, to create all missing fields."""
    # The modules in `init` are not copied: the step initializes the originals.
    lifted = Lifted((f, init), xs)
    slices = {
        slot: _slice_of(visit.node, first)
        for slot, (visit, root, _) in enumerate(lifted.leaves)
        if root.is_copy and is_array(visit.node)
    }
    arrays, rest = cut(lifted.arguments)
    arrays = jtu.tree_map(lambda x: _slice_of(x, first), arrays)
    x = rest.join(arrays)
    lifted.create(slices, lambda: f(init, x))
    lifted.check_not_created(lambda root, _: root.is_copy, "step of `es.scan`")


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
    cond_fun: Callable[[_C], Any], body_fun: Callable[[_C], _C], init_val: _C
) -> _C:
    """`jax.lax.while_loop` that carries state from step to step.

    As in [`es.scan`][eqx_state.scan], if a function is a module, or closes over
    modules, their state and keys are carried. Modules in `init_val` are part of the
    carry.

    **Arguments:**

    - `cond_fun`: takes the carry; returns whether to continue. It may not write state.
    - `body_fun`: takes the carry; returns the new one.
    - `init_val`: the first carry, any pytree.

    **Returns:**

    The last carry.

    **Raises:**

    - `ValueError`: `cond_fun` wrote state; or `es.capture` was to record a value in a
        step.
    - All errors of `es.scan` about the carry.

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
    call = ft.partial(body_fun, init_val)
    once = ft.partial(create_fields, body_fun, init_val, call)
    loop = Loop((cond_fun, body_fun), init_val, once=once)

    def body(carry: Any) -> Any:
        return _only_carry(loop.step(carry, body_fun))

    final = jax.lax.while_loop(
        lambda carry: _go_on(loop, carry, cond_fun), body, loop.first(body)
    )
    return loop.finish(final)


def _go_on(loop: Loop, carry: Any, cond_fun: Callable[[Any], Any]) -> Any:
    """Call `cond_fun`, which can return only a bool."""
    given, values = loop.enter(carry)
    ran = loop.lifted.run(values, lambda: cond_fun(given))
    _check_not_sown(ran.sown)
    if names := [f"`{loop.lifted.name(slot)}`" for slot in ran.written]:
        raise ValueError(_COND_WROTE.format(", ".join(names)))
    return ran.out


def _only_carry(step: Step) -> Any:
    """The carry of a step, in a loop that cannot return anything else."""
    _check_not_sown(step.sown)
    return step.carry


def _check_not_sown(sown: list[Sown]) -> None:
    for key in itertools.chain(*sown):
        raise ValueError(_SOWN.format(key))


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
    call = ft.partial(body_fun, lower, init_val)
    once = ft.partial(create_fields, body_fun, init_val, call)
    loop = Loop((body_fun,), init_val, once=once)

    def body(i: Any, carry: Any) -> Any:
        return _only_carry(loop.step(carry, lambda carry: body_fun(i, carry)))

    carry = loop.first(lambda carry: body(lower, carry))
    final = jax.lax.fori_loop(lower, upper, body, carry, unroll=unroll)
    return loop.finish(final)


_STATIC: Final = """The body of a loop returned a different value at `{}`, which is \
not an array. Only arrays can change from step to step. Make it an array, or return it \
unchanged."""

_NOT_RETURNED: Final = """`{}` was written in a module of the carry, and the function \
returned a carry without it, so the write would be lost. Return the module that the \
function receives: `y = cell(x)`, and then `return cell, y`."""

_NO_AXIS: Final = """`es.scan`: `{}` has shape (), and no first axis to scan over. In \
a stack of layers, each array has this axis, also state and keys. To run layers in \
turn: `es.nn.Stacked(layers)(x)`. To create a stack for `xs`: \
`eqx.filter_vmap(make_layer)(jax.random.split(key, n))`."""

_NOT_A_PAIR: Final = """The function of `es.scan` must return a pair, `(carry, y)`, \
but it returned `{}`. Write `return (model, optimizer), loss`, or `return carry, \
None`."""

_COND_WROTE: Final = """The `cond_fun` of `es.while_loop` wrote {}. It can only return \
a bool, so the write would be lost. Write in `body_fun`, and put what `cond_fun` needs \
into the carry."""

_SOWN: Final = """Cannot capture {} in a step of `es.while_loop` or `es.fori_loop`: \
only the last carry leaves such a loop. Use `es.scan`, which stacks the captured \
values of its steps; or sow after the loop; or leave the module out of `outputs`."""
