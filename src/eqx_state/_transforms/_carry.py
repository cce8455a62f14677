"""The carry of a loop: the user's own, and the state that its functions reach.

A module may be in the carry itself. JAX's carry is a value: the body gets a new one at
each step, and whatever was passed in as the first one is unchanged after the loop. For
a module, which is an object, that takes a copy in the body. (Otherwise `self.cell`
would change during the loop, and `scan(step, self.cell, xs)` would write to it even if
its result is thrown away.) So a module in the carry has a stand-in; a new module comes
back in the carry, and becomes state when the caller assigns it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import manual_axes, vary, varying_axes
from .._state._nn_shared import closed_copy
from .._state._scope import is_owned, Sown
from .._tree._aliasing import check_not_shared
from .._tree._compare import difference_of_leaves, identical
from .._tree._walk import is_array
from ._arguments import check_given, is_traced
from ._lift import Lifted, Ran
from ._root import Slot, Values
from ._stand_ins import owned_copy, stand_in


class Note(NamedTuple):
    """The facts about one trace of a step that are needed outside of it.

    They cannot be outputs of the step, since JAX fixes the treedef of those.
    """

    written: frozenset[Slot] = frozenset()
    kept: frozenset[int] = frozenset()  # leaves of modules that came back unchanged
    static: Any = None  # the rest of the output that is not arrays


class Step(NamedTuple):
    """The result of a step in the trace: the new carry and state, and the rest."""

    carry: tuple[Any, Values]
    rest: Any
    written: Values
    sown: list[Sown]
    note: Note


class Loop:
    """The arrays that a loop threads: its carry, state, and slices of modules.

    - `init`: the first carry, with stand-ins for its modules; `originals` has what they
        stand for.
    - `arrays`, `static`: its leaves, split; `before`, `treedef`: its leaves in order.
    - `state`: the state of all other modules, which is carried beside it.
    - `slices`: the leaves of the modules in `xs`, of which each step has a slice.
    """

    def __init__(self, functions: Any, init: Any, xs: Any = None):
        check_not_shared(init)
        originals: dict[int, Any] = {}

        def carried(x: Any) -> Any:
            if not is_owned(x):
                return x
            copy = owned_copy(x)
            originals[id(copy)] = x
            return copy

        self.init = jtu.tree_map(carried, init, is_leaf=is_owned)
        outside = closed_copy(self.init)
        self.before, self.treedef = jtu.tree_flatten(outside)
        self.arrays, self.static = eqx.partition(outside, is_traced(outside))
        self.xs, self.stand_ins = stand_in(xs, [None for _ in jtu.tree_leaves(xs)])
        self.lifted = Lifted(functions, self.init, self.xs, stand_ins=self.stand_ins)
        check_given(xs)
        roots = self.lifted.roots
        index = {id(root.module): i for i, root in enumerate(roots)}
        self.originals = {index[key]: x for key, x in originals.items()}
        self.slices: Values = {
            (i, k): x
            for (i, k), x in self.lifted.values.items()
            if roots[i].is_stand_in and is_array(x)
        }
        # The state of a module in `xs` is in `slices`, that of a module in the carry is
        # in the carry, and state that is reached twice is that of a stand-in.
        self.state: Values = {
            (i, k): x
            for (i, k), x in self.lifted.writable.items()
            if not roots[i].is_stand_in and i not in self.originals
            if (i, k) not in self.lifted.twice.others
        }
        self._check_sliceable()

    def split_xs(self) -> tuple[Any, Any]:
        """The arrays of `xs` to slice, and the rest, which includes owned modules."""
        return eqx.partition(self.xs, is_traced(self.xs), is_leaf=is_owned)

    def enter(
        self, carry: tuple[Any, Values], slices: Values | None = None
    ) -> tuple[Any, Values]:
        """The carry that the functions take, and the values of the modules."""
        arrays, state = carry
        values = {**self.lifted.values, **state, **(slices or {})}
        new = jtu.tree_leaves(eqx.combine(arrays, self.static))
        given, own = self.lifted.fill(self.init, new)
        return given, {**values, **own}

    def first(self, step: Callable[[Any], Any]) -> tuple[Any, Values]:
        """The first carry; in a `shard_map` with the types that `step` gives it.

        What begins as one value for all devices may differ between them after a step,
        and JAX wants one type for all steps. A cast may make other values vary in the
        next step, so this goes on until nothing changes.
        """
        carry = self.arrays, self.state
        found: list[frozenset[Any]] = []

        def probe(carry: Any) -> None:
            found[:] = map(varying_axes, jtu.tree_leaves(step(carry)))

        while manual_axes():
            jax.eval_shape(probe, carry)
            old, treedef = jtu.tree_flatten(carry)
            if len(old) != len(found):
                break  # JAX raises an error for that
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
        """Run a step on this carry; `unpack` finds the new one in the output of `f`."""
        given, values = self.enter(carry, slices)

        def call() -> tuple[Any, list[Any]]:
            # The originals are read inside of `run`, while they hold values of the
            # trace: a body may return one of them in place of the stand-in that it
            # wrote.
            return f(given), [jtu.tree_leaves(x) for x in self.originals.values()]

        ran = self.lifted.run(values, call)
        out, outside = ran.out
        new, rest = unpack(out)
        originals = dict(zip(self.originals, outside, strict=True))
        kept = self._check_returned(values, originals, new, ran.written)
        arrays, static = eqx.partition(new, is_traced(new))
        self._check_static(static)
        state = {slot: ran.written.get(slot, values[slot]) for slot in self.state}
        note = Note(frozenset(ran.written), kept)
        return Step((arrays, state), rest, ran.written, ran.sown, note)

    def _check_returned(
        self, values: Values, outside: dict[int, list[Any]], carry: Any, written: Values
    ) -> frozenset[int]:
        """Check that what was written in a module of the carry is in the new carry.

        Returns the positions of the leaves of modules that came back unchanged.
        """
        returned, treedef = jtu.tree_flatten(carry)
        if treedef != self.treedef:
            return frozenset()  # JAX raises an error for that
        kept = set()
        position = 0
        for x in jtu.tree_leaves(self.init, is_leaf=is_owned):
            if not is_owned(x):
                position += 1
                continue
            for i, k in self.lifted.slots(x):
                new, before, original = returned[position], values[i, k], outside[i][k]
                if (i, k) in written and (new is before or new is original):
                    raise ValueError(_NOT_RETURNED.format(self.lifted.name((i, k))))
                if new is before:
                    kept.add(position)
                position += 1
        return frozenset(kept)

    def _check_static(self, static: Any) -> None:
        if (name := difference_of_leaves(self.static, static)) is not None:
            raise TypeError(_STATIC.format(name or "the carry"))

    def finish(
        self, carry: tuple[Any, Values], notes: Sequence[Note], ran: Ran | None = None
    ) -> Any:
        """Commit what the loop has written, and return the last carry.

        - `notes`: one for each time that the step was traced.
        - `ran`: the other outputs of the loop.
        """
        arrays, state = carry
        positions = frozenset().union(*(note.written for note in notes))
        written = {slot: x for slot, x in state.items() if slot in positions}
        slices, sown = ({}, [{} for _ in self.lifted.scopes])
        if ran is not None:
            slices, sown = ran.written, ran.sown
        self.lifted.commit(Ran(None, {**written, **slices}, sown))
        # Why `kept`? JAX returns new arrays for the whole carry, also for the
        # parameters of a module, which no step changes. Assigning that module,
        # `self.cell = cell`, would count as a write to its parameters, which a scope
        # for state refuses: writes are compared by identity. So leaves that were
        # unchanged in the trace are the caller's own arrays again. (The last trace
        # counts. JAX may trace a step several times until the types of the carry
        # settle.)
        # Several notes if the step was traced anew, or runs without a trace.
        kept = frozenset.intersection(*(note.kept for note in notes or [Note()]))
        after = jtu.tree_leaves(eqx.combine(arrays, self.static))
        new = (self.before[k] if k in kept else x for k, x in enumerate(after))

        def put(x: Any) -> Any:
            return owned_copy(x, new) if is_owned(x) else next(new)

        return jtu.tree_map(put, self.init, is_leaf=is_owned)

    def _check_sliceable(self) -> None:
        for slot, x in self.slices.items():
            if jnp.ndim(x) == 0:
                raise ValueError(_NO_AXIS.format(self.lifted.name(slot)))


_STATIC: Final = """The body of a loop returned another value at `{}`, which is not an \
array. From step to step only arrays can change: make it one, or return it as it was."""

_NOT_RETURNED: Final = """`{}` was written in a module of the carry, and the body \
returned a carry without it, so the write would be lost. Return the module \
that the body was given:

    def body(cell, x):
        y = cell(x)
        return cell, y"""

_NO_AXIS: Final = """`es.scan`: `{}` has shape (), and no first axis to scan over. A \
stack of layers has one in each of its arrays, also in its state and keys. To run \
layers in turn: `es.nn.Stacked(layers)(x)`. To make a stack for `xs`: \
`eqx.filter_vmap(make_layer)(jax.random.split(key, n))`."""
