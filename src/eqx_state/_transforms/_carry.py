"""What a loop threads: the carry, and the state of modules beside it.

A loop carries what it is given to carry, and beside it the state of the modules that
its functions reach. A module in the carry itself has a stand-in in the body: the object
that was passed in stays as it was, and a new one, which may be assigned, or written and
assigned, comes back in the carry.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._state._nn_shared import closed_copy
from .._state._scope import is_owned, Sown
from .._tree._aliasing import check_not_shared
from .._tree._compare import difference_of_leaves
from .._tree._walk import is_array
from ._lift import is_traced, Lifted, Ran
from ._root import Slot, Values
from ._stand_ins import owned_copy, stand_in


class Note(NamedTuple):
    """What is to be known outside of how a step was traced."""

    written: frozenset[Slot]
    kept: frozenset[int]  # the leaves of modules in the carry that came back unchanged
    static: Any = None  # what else it returned, as far as it is not arrays


class Step(NamedTuple):
    """A step in the trace: the new carry, with the state beside it, and the rest."""

    carry: tuple[Any, Values]
    rest: Any
    written: Values
    sown: list[Sown]
    note: Note


class Loop:
    """What a loop threads: the carry, the state beside it, the slices of modules."""

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
        self.lifted.check_apart(xs)
        roots = self.lifted.roots
        self.index = {id(root.module): i for i, root in enumerate(roots)}
        self.originals = {self.index[key]: x for key, x in originals.items()}
        self.slices: Values = {
            (i, k): x
            for (i, k), x in self.lifted.values.items()
            if roots[i].is_stand_in and is_array(x)
        }
        self.state: Values = {
            (i, k): x
            for (i, k), x in self.lifted.writable.items()
            if not roots[i].is_stand_in and i not in self.originals
            if (i, k) not in self.lifted.twice.others
        }
        self._check_sliceable()

    def split_xs(self) -> tuple[Any, Any]:
        """The arrays to slice, and what each step has as it is; modules are in that."""
        return eqx.partition(self.xs, is_traced(self.xs), is_leaf=is_owned)

    def enter(
        self, carry: tuple[Any, Values], slices: Values | None = None
    ) -> tuple[Any, Values]:
        """The carry as the functions take it, and what is in the modules meanwhile."""
        arrays, state = carry
        values = {**self.lifted.values, **state, **(slices or {})}
        new = iter(jtu.tree_leaves(eqx.combine(arrays, self.static)))

        def put(x: Any) -> Any:
            if not is_owned(x):
                return next(new)
            values.update((slot, next(new)) for slot in self._slots(x))
            return x

        return jtu.tree_map(put, self.init, is_leaf=is_owned), values

    def _slots(self, module: Any) -> list[Slot]:
        """Those of a module in the carry."""
        i = self.index[id(module)]
        return [(i, k) for k in range(len(self.lifted.roots[i].leaves))]

    def step(
        self,
        carry: tuple[Any, Values],
        f: Callable[[Any], Any],
        slices: Values | None = None,
        unpack: Callable[[Any], tuple[Any, Any]] = lambda out: (out, None),
    ) -> Step:
        """A step on this carry; `unpack` finds the new carry in the output of `f`."""
        given, values = self.enter(carry, slices)

        def call() -> tuple[Any, list[Any]]:
            # What an original holds in the body, and a stand-in may be assigned.
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
        """What was written in a module of the carry must be in the new carry.

        Returns which leaves of modules came back as they went in.
        """
        returned, treedef = jtu.tree_flatten(carry)
        if treedef != self.treedef:
            return frozenset()  # JAX says so
        kept = set()
        position = 0
        for x in jtu.tree_leaves(self.init, is_leaf=is_owned):
            if not is_owned(x):
                position += 1
                continue
            for i, k in self._slots(x):
                new, before, original = returned[position], values[i, k], outside[i][k]
                if (i, k) in written and (new is before or new is original):
                    raise _not_returned(self.lifted.name((i, k)))
                if new is before:
                    kept.add(position)
                position += 1
        return frozenset(kept)

    def _check_static(self, static: Any) -> None:
        if (name := difference_of_leaves(self.static, static)) is not None:
            raise TypeError(
                "The body of a loop returned another value at"
                f" `{name or 'the carry'}`, which is not an array. From step to step"
                " only arrays can change: make it one, or return it as it was."
            )

    def finish(
        self, carry: tuple[Any, Values], notes: Sequence[Note], ran: Ran | None = None
    ) -> Any:
        """The carry after the loop; writes what was written to the owned modules.

        `notes`: of each time that the step was traced. `ran`: what came out besides.
        """
        arrays, state = carry
        positions = frozenset().union(*(note.written for note in notes))
        written = {slot: x for slot, x in state.items() if slot in positions}
        slices, sown = ({}, [{} for _ in self.lifted.scopes])
        if ran is not None:
            slices, sown = ran.written, ran.sown
        self.lifted.commit(Ran(None, {**written, **slices}, sown))
        # A module comes back with its own parameters, and may be assigned.
        kept = notes[-1].kept if notes else ()
        after = jtu.tree_leaves(eqx.combine(arrays, self.static))
        new = (self.before[k] if k in kept else x for k, x in enumerate(after))

        def put(x: Any) -> Any:
            return owned_copy(x, new) if is_owned(x) else next(new)

        return jtu.tree_map(put, self.init, is_leaf=is_owned)

    def _check_sliceable(self) -> None:
        for slot, x in self.slices.items():
            if jnp.ndim(x) == 0:
                raise ValueError(
                    f"`es.scan`: `{self.lifted.name(slot)}` has shape (), and no first"
                    " axis to scan over. A stack of layers has one in each of its"
                    " arrays, also in its state and keys: make it by"
                    " `eqx.filter_vmap(make_layer)(jax.random.split(key, n))`."
                )


def _not_returned(name: str) -> ValueError:
    return ValueError(
        f"`{name}` was written in a module of the carry, and the body returned a carry"
        " without it, so that what was written would be lost. Return the module that"
        " the body was given:\n\n"
        "    def body(cell, x):\n"
        "        y = cell(x)\n"
        "        return cell, y"
    )
