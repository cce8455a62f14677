"""The arrays of a loop: the user's carry, the state beside it, slices of stacks.

The state that the functions reach becomes a part of JAX's carry, beside the user's
carry. The trace of a step shows which state the step writes, and only that state is
committed.

The user's carry may contain modules. A carry is a value: the body gets a new one at
each step, and the first one does not change. The body therefore gets a copy of the
module, and the loop returns a new module for the caller to assign.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.tree_util as jtu

from .._compat import manual_axes, vary, varying_axes
from .._state.codecs import snapshot
from .._state.marks import marked
from .._state.scope import is_owned
from .._tree.compare import check_not_repeated, difference, identical
from .cut import cut
from .lift import Lifted, Ran
from .reach import check_given
from .roots import by_entry, owned_copy, Values


class Loop:
    """The arrays of a loop: its carry, state, and slices of modules.

    - `init`, `xs`: the first carry and the inputs, with copies of their modules.
    - `first`: the first carry as no scope owns it; `before`: its leaves; `arrays`,
        `rest`: the same leaves, cut.
    - `carried`: the slots of the modules in the carry, with their positions in it.
    - `state`: the state of all other modules, which JAX carries beside the user's
        carry.
    - `slices`: the leaves of the modules in `xs`; each step gets a slice.

    The traces of a step fill two sets. They cannot be outputs of a step, because the
    new carry has to have the treedef of the first one. JAX may trace a step several
    times, so the sets only grow.

    - `written`: the slots that some trace has written.
    - `changed`: the positions of leaves of the carry that some trace has changed. Those
        outside of owned modules count as changed from the start.
    """

    def __init__(self, functions: tuple[Any, ...], init: Any, xs: Any = None):
        check_not_repeated(init)
        check_given(*functions, init, xs)
        # A carry is a value: a module at two places is two modules in the next step.
        places = [*range(jtu.tree_structure(init).num_leaves)]
        treatments = [*places, *(None for _ in jtu.tree_leaves(xs))]
        self.lifted = Lifted(functions, (init, xs), treatments)
        self.init, self.xs = self.lifted.arguments
        self.first = snapshot(self.init)  # no scope owns it, so its leaves are visible
        self.before = jtu.tree_leaves(self.first)
        self.arrays, self.rest = cut(self.first)
        self.carried: dict[int, int] = self.lifted.by_slot(self.init, places)
        self.written: set[int] = set()
        self.changed = {*places} - {*self.carried.values()}
        self.slices, self.state = {}, {}
        for k, (visit, root, *_) in enumerate(self.lifted.leaves):
            if k in self.carried or not isinstance(visit.node, jax.Array):
                continue
            if root.is_copy:
                self.slices[k] = visit.node
            elif k in self.lifted.writable:
                self.state[k] = visit.node

    def enter(
        self, carry: tuple[Any, Values], slices: Values | None = None
    ) -> tuple[Any, Values]:
        """The carry for the functions, and the values of the modules."""
        arrays, state = carry
        values = {**self.lifted.values, **state, **(slices or {})}
        new = jtu.tree_leaves(self.rest.join(arrays))
        given, own = self.lifted.fill(self.init, new)
        return given, {**values, **own}

    def first_carry(self, step: Callable[[Any], Any]) -> tuple[Any, Values]:
        """The first carry; in a `shard_map` with the types that `step` gives it.

        A value that is replicated at first may vary between the devices after a step,
        but JAX requires one type for all steps. Casting it may make more values vary in
        the next step, so repeat this until nothing changes.
        """
        carry = self.arrays, self.state
        axes_of: list[frozenset[Any]] = []

        def record_axes(carry: Any) -> None:
            axes_of[:] = map(varying_axes, jtu.tree_leaves(step(carry)))

        self.lifted.probe(step, carry)
        while manual_axes():
            jax.eval_shape(record_axes, carry)
            old, treedef = jtu.tree_flatten(carry)
            new = [vary(x, axes) for x, axes in zip(old, axes_of, strict=True)]
            if identical(old, new):
                break
            carry = jtu.tree_unflatten(treedef, new)
        return carry

    def varied(self, state: Values, condition: Callable[[], Any]) -> Values:
        """The new state of a step that depends on a condition.

        If the devices of a `shard_map` may stop at different steps, what they write
        varies. JAX leaves this out of the types of the carry.
        """
        if not manual_axes():
            return state
        axes = varying_axes(condition())
        return {
            slot: vary(x, axes) if slot in self.written else x
            for slot, x in state.items()
        }

    def step(
        self,
        carry: tuple[Any, Values],
        f: Callable[..., Any],
        *,
        before: tuple[Any, ...] = (),
        after: tuple[Any, ...] = (),
        slices: Values | None = None,
        unpack: Callable[[Any], tuple[Any, Any]] = lambda out: (out, None),
    ) -> tuple[tuple[Any, Values], Ran]:
        """Run one step: `f`, with the carry between the arguments `before` and `after`.

        `unpack` splits the output of `f` into the carry and a rest. Returns the arrays
        of the new carry with the new state, and what else leaves the step.
        """
        given, values = self.enter(carry, slices)
        args = *before, given, *after
        ran = self.lifted.run(values, f, args, returned=self.carried)
        new, rest = unpack(ran.out)
        self._check_returned(values, new, ran.written)
        arrays, rest_of_carry = cut(new)
        if (name := self.rest.difference(rest_of_carry)) is not None:
            raise TypeError(_STATIC.format(name or "the carry"))
        state = {slot: ran.written.get(slot, values[slot]) for slot in self.state}
        self.written.update(ran.written)
        return (arrays, state), ran._replace(out=rest)

    def _check_returned(self, values: Values, carry: Any, written: Values) -> None:
        """Check that the new carry contains the writes to modules in the carry."""
        if _form(carry) != _form(self.first):
            first = difference(self.first, snapshot(carry), _form)
            raise TypeError(_CARRY.format(first))
        after = {**values, **written}
        for x, returned in by_entry(self.init, jtu.tree_leaves(carry)):
            if not is_owned(x):
                continue
            for slot, new in zip(self.lifted.slots(x), returned, strict=True):
                before = values[slot]
                if slot in written and new is not written[slot]:
                    outside = self._outside(x, after)
                    if new is before or any(new is y for y in outside):
                        raise ValueError(_NOT_RETURNED.format(self.lifted.name(slot)))
                if new is not before:
                    self.changed.add(self.carried[slot])

    def _outside(self, copy: Any, values: Values) -> list[Any]:
        """The leaves of the original of a copy in the carry.

        A body may return the original instead of the copy: `return self.cell, y`.
        """
        original = self.lifted.copies.original(copy)
        if self.lifted.has(original):  # in the closure, with the values of the trace
            return [values[slot] for slot in self.lifted.slots(original)]
        return jtu.tree_leaves(original)

    def finish(self, carry: tuple[Any, Values], ran: Ran | None = None) -> Any:
        """Commit what the loop has written, and return the last carry.

        `ran`: what leaves the steps besides the carry, with the new leaves of modules
        in `xs`; `None` in a loop that only returns the carry.
        """
        arrays, state = carry
        written = {slot: x for slot, x in state.items() if slot in self.written}
        if ran is None:
            self.lifted.commit_written(written)
        else:
            self.lifted.commit(ran._replace(written={**written, **ran.written}))
        # JAX returns new arrays for the whole carry, even for the parameters of a
        # module, which no step changes. A scope detects writes by identity, so
        # `self.cell = cell` would count as a write to the parameters. Return the
        # caller's own arrays for leaves that each trace left unchanged.
        after = jtu.tree_leaves(self.rest.join(arrays))
        for slot, k in self.carried.items():
            if k in self.changed:
                name = ft.partial(self.lifted.name, slot)
                after[k] = marked(after[k], self.before[k], name)
        pairs = enumerate(zip(self.before, after, strict=True))
        new = (x if k in self.changed else old for k, (old, x) in pairs)

        def put(x: Any) -> Any:
            return owned_copy(x, new) if is_owned(x) else next(new)

        return jtu.tree_map(put, self.init, is_leaf=is_owned)


def _form(tree: Any) -> tuple[Any, list[Any]]:
    values, treedef = jtu.tree_flatten(tree)
    return treedef, [getattr(x, "shape", ()) for x in values]


_CARRY: Final = """The body of a loop returned a carry of a different structure or \
shape, {}. In `es.scan(f, init, xs)`, `f(carry, x)` returns `(carry, y)`. Switch modes \
outside the loop."""

_STATIC: Final = """The body of a loop returned a different value at `{}`, which is \
not an array. Only arrays can change from step to step. Make it an array, or return it \
unchanged."""

_NOT_RETURNED: Final = """`{}` was written in a module of the carry, and the function \
returned a carry without it, so the write would be lost. Return the module that the \
function receives: `y = cell(x)`, and then `return cell, y`."""
