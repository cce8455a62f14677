"""What a loop threads: the carry, and the state of modules beside it.

A loop carries what it is given to carry, and beside it the state of the modules that
its functions reach. A module in the carry itself has a stand-in in the body: the object
that was passed in stays as it was, and a new one, which may be assigned, or written and
assigned, comes back in the carry.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._state._nn_shared import closed_copy
from .._state._scope import is_owned
from .._tree._aliasing import check_not_shared
from .._tree._compare import difference_of_leaves
from .._tree._walk import is_array
from ._lift import is_traced, Leaves, Lifted, Sown
from ._stand_ins import owned_copy, stand_in


class Loop:
    """What a loop threads: the carry, the state beside it, the slices of modules."""

    def __init__(self, functions: Any, init: Any, xs: Any = None):
        check_not_shared(init)
        originals: list[tuple[Any, Any]] = []

        def carried(x: Any) -> Any:
            if not is_owned(x):
                return x
            originals.append((owned_copy(x), x))
            return originals[-1][0]

        self.init = jtu.tree_map(carried, init, is_leaf=is_owned)
        outside = closed_copy(self.init)
        self.before, self.treedef = jtu.tree_flatten(outside)
        self.arrays, self.static = eqx.partition(outside, is_traced(outside))
        self.xs, self.stand_ins = stand_in(xs, [None for _ in jtu.tree_leaves(xs)])
        self.lifted = Lifted(functions, self.init, self.xs, stand_ins=self.stand_ins)
        self.lifted.check_apart(xs)
        self.index = {id(root): i for i, root in enumerate(self.lifted.roots)}
        self.originals = {self.index[id(copy)]: x for copy, x in originals}
        self.outside: dict[int, list[Any]] = {}
        self.kept: set[int] = set()
        self.state: list[Leaves] = []
        self.slices: list[Leaves] = []
        parts = zip(self.lifted.values(), self.lifted.writable(), strict=True)
        for i, (old, new) in enumerate(parts):
            is_slice = self.lifted.is_stand_in(i)
            is_beside = not is_slice and i not in self.originals
            self.state.append(self.lifted.threaded(i, new) if is_beside else {})
            self.slices.append(
                {k: x for k, x in old.items() if is_slice and is_array(x)}
            )
        self._check_sliceable()
        self.written: list[set[int]] = [set() for _ in self.lifted.roots]

    def split_xs(self) -> tuple[Any, Any]:
        """The arrays to slice, and what each step has as it is; modules are in that."""
        return eqx.partition(self.xs, is_traced(self.xs), is_leaf=is_owned)

    def enter(
        self, arrays: Any, state: list[Leaves], slices: list[Leaves]
    ) -> tuple[Any, list[Leaves]]:
        """The carry as the functions take it, and what is in the modules meanwhile."""
        parts = zip(self.lifted.values(), state, slices, strict=True)
        values = [{**old, **new, **x} for old, new, x in parts]

        new = iter(jtu.tree_leaves(eqx.combine(arrays, self.static)))

        def put(x: Any) -> Any:
            if not is_owned(x):
                return next(new)
            i = self.index[id(x)]
            values[i] = {k: next(new) for k in values[i]}
            return x

        return jtu.tree_map(put, self.init, is_leaf=is_owned), values

    def run(
        self, values: list[Leaves], call: Callable[[], Any]
    ) -> tuple[Any, list[Leaves], Sown]:
        """`Lifted.run`, which also notes what the originals hold in the body."""

        def watched() -> Any:
            out = call()
            self.outside = {i: jtu.tree_leaves(x) for i, x in self.originals.items()}
            return out

        return self.lifted.run(values, watched)

    def leave(
        self, values: list[Leaves], carry: Any, written: list[Leaves]
    ) -> tuple[Any, list[Leaves]]:
        """The carry and the state after a step."""
        self._check_returned(values, carry, written)
        arrays, static = eqx.partition(carry, is_traced(carry))
        self._check_static(static)
        for positions, new in zip(self.written, written, strict=True):
            positions.update(new)
        after = [{**v, **new} for v, new in zip(values, written, strict=True)]
        return arrays, [
            {k: new[k] for k in old} for old, new in zip(self.state, after, strict=True)
        ]

    def _check_returned(
        self, values: list[Leaves], carry: Any, written: list[Leaves]
    ) -> None:
        """What was written in a module of the carry must be in the new carry."""
        outside, self.outside, self.kept = self.outside, {}, set()
        returned, treedef = jtu.tree_flatten(carry)
        if treedef != self.treedef:
            return  # JAX says so
        start = 0
        for x in jtu.tree_leaves(self.init, is_leaf=is_owned):
            if not is_owned(x):
                start += 1
                continue
            i = self.index[id(x)]
            for k, before in values[i].items():
                new, original = returned[start + k], outside[i][k]
                if k in written[i] and (new is before or new is original):
                    raise _not_returned(self.lifted.name(i, k))
                if new is before:
                    self.kept.add(start + k)
            start += len(values[i])

    def _check_static(self, static: Any) -> None:
        if (name := difference_of_leaves(self.static, static)) is not None:
            raise TypeError(
                "The body of a loop returned another value at"
                f" `{name or 'the carry'}`, which is not an array. From step to step"
                " only arrays can change: make it one, or return it as it was."
            )

    def step(
        self, arrays: Any, state: list[Leaves], f: Callable[[Any], Any]
    ) -> tuple[Any, list[Leaves]]:
        """A step of which only the carry comes out."""
        carry, values = self.enter(arrays, state, self.slices)
        carry, written, sown = self.run(values, lambda: f(carry))
        _check_not_sown(sown)
        return self.leave(values, carry, written)

    def test(self, arrays: Any, state: list[Leaves], f: Callable[[Any], Any]) -> Any:
        """Whether to go on, of which nothing but the answer can come out."""
        carry, values = self.enter(arrays, state, self.slices)
        go_on, written, sown = self.lifted.run(values, lambda: f(carry))
        _check_not_sown(sown)
        name = self.lifted.name
        if names := [f"`{name(i, k)}`" for i, new in enumerate(written) for k in new]:
            raise ValueError(
                f"The `cond_fun` of `es.while_loop` wrote {', '.join(names)}. It only"
                " answers whether to go on, and JAX takes nothing else out of it. Write"
                " in `body_fun`, and carry what `cond_fun` has to know."
            )
        return go_on

    def finish(
        self,
        arrays: Any,
        state: list[Leaves],
        slices: list[Leaves] | None = None,
        sown: Sown | None = None,
    ) -> Any:
        """The carry after the loop; writes what was written to the owned modules."""
        changed = [
            {k: x for k, x in new.items() if k in positions}
            for positions, new in zip(self.written, state, strict=True)
        ]
        written = zip(changed, slices or self.slices, strict=True)
        self.lifted.commit(
            [{**new, **x} for new, x in written],
            sown or [OrderedDict() for _ in self.lifted.scopes],
        )
        # A module comes back with its own parameters, and may be assigned.
        after = jtu.tree_leaves(eqx.combine(arrays, self.static))
        new = (self.before[k] if k in self.kept else x for k, x in enumerate(after))

        def put(x: Any) -> Any:
            return owned_copy(x, new) if is_owned(x) else next(new)

        return jtu.tree_map(put, self.init, is_leaf=is_owned)

    def _check_sliceable(self) -> None:
        for i, slices in enumerate(self.slices):
            for k, x in slices.items():
                if jnp.ndim(x) == 0:
                    raise ValueError(
                        f"`es.scan`: `{self.lifted.name(i, k)}` has shape (), and no"
                        " first axis to scan over. A stack of layers has one in each of"
                        " its arrays, also in its state and keys: make it by"
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


def _check_not_sown(sown: Sown) -> None:
    for name in itertools.chain(*sown):
        raise ValueError(
            f"`{name}` was sown in a step of `es.while_loop` or `es.fori_loop`, of"
            " which only the last carry comes out. `es.scan` stacks what its steps sow;"
            " or put the value into the carry, and sow it after the loop."
        )
