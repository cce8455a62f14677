"""`es.vmap`: `jax.vmap` that carries state, with axes chosen by rules.

A call gathers everything that it reaches in one flat mapping, runs a lane under
`jax.vmap`, and commits what came out. Only the leaves with an axis are inputs of
`jax.vmap`; everything else is closed over.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu

from .._compat import is_mapped, spread_like
from .._state._scope import is_owned
from .._tree._keys import next_keys, num_key_axes, split_key
from .._tree._rules import check_rules
from .._tree._walk import leaves, Visit
from ._axes import argument_axes, FunctionAxes, SPLIT
from ._closures import owned_in
from ._copies import Opened
from ._lift import check_given, is_traced, Lifted, Ran, Static
from ._rebuilt import MADE_ONCE
from ._root import Slot, Values
from ._stand_ins import by_entry, stand_in
from ._transform import Transform, wrap


_P = ParamSpec("_P")
_R = TypeVar("_R")


# These take the place of a root's index in the slots of the function and of the
# arguments. Roots are counted from 0, so the numbers do not clash.
_FUNCTION: Final = -2
_ARGUMENTS: Final = -1


class _Lanes:
    """All leaves that a call of `es.vmap` reaches, and the axis of each.

    An axis is an integer, `SPLIT`, or `None` for a leaf that all lanes share.

    Why one flat mapping? Leaves come from three places: the function, the arguments,
    and the owned modules that either of them reaches. Their axes have different
    sources, and a lane puts them back in different ways, but nothing else differs. By
    slot, sizes are checked, keys are split and axes are handed to `jax.vmap` in one way
    for all.
    """

    def __init__(self, vmap: "_Vmap", args: tuple[Any, ...], kwargs: dict[str, Any]):
        by_argument, entries, asked = argument_axes(vmap.in_axes, args, kwargs)
        self.opened = Opened(vmap.f)
        self.by_rules = by_rules = FunctionAxes(
            dict(vmap.axes), self.opened.tree, owned_in(vmap.f)
        )
        given, stand_ins = stand_in((args, kwargs), by_argument, by_rules.of_module)
        self.lifted = Lifted(vmap.f, given, stand_ins=stand_ins)
        check_given(*self.opened.values, *args, *kwargs.values())
        # `init` may have yet to make what a filter is meant for.
        if not self.lifted.is_initializing:
            by_rules.check_matched()
            for each in asked:
                each.check_matched()
        self.values: Values = dict(self.lifted.values)
        self.axes: dict[Slot, Any] = {}
        meanings = {id(x.module): x.meaning for x in stand_ins}
        # For a stand-in, what `in_axes` says of its first leaf.
        self.entries = {id(x): own[0] for x, own in by_entry(given, entries) if own}
        for i, root in enumerate(self.lifted.roots):
            axes = meanings.get(id(root.module))
            if axes is None:
                axes = by_rules.of_module(root.module, root.leaves)
            self.axes.update(((i, k), axis) for k, axis in enumerate(axes))
        # Owned modules are leaves in these trees, and have no axis there. Their own
        # leaves are in the mapping already, as those of the roots.
        self.trees = {_FUNCTION: self.opened.tree, _ARGUMENTS: given}
        self._add(_FUNCTION, by_rules.of_function())
        self._add(_ARGUMENTS, by_argument)
        self.mapped = [slot for slot, axis in self.axes.items() if axis is not None]
        self.size = self._size(vmap.axis_size)
        self.advanced: Values = {}
        self.inputs: Values = {}
        self.input_axes: dict[Slot, int] = {}
        for slot in self.mapped:
            self._feed(slot)

    def _add(self, where: int, axes: Sequence[Any]) -> None:
        for k, (x, own) in enumerate(by_entry(self.trees[where], axes)):
            self.values[where, k] = x
            self.axes[where, k] = None if is_owned(x) else own[0]

    def _feed(self, slot: Slot) -> None:
        """Prepare the input of `jax.vmap` for a leaf that is mapped."""
        value, axis = self.values[slot], self.axes[slot]
        if axis is SPLIT:
            # Why a clone? Splitting uses a key up. If no lane draws from it, the new
            # key is not committed: the model keeps this one, and may draw from it
            # later, which `jax_debug_key_reuse` would take for reuse.
            self.advanced[slot], base = next_keys(jr.clone(value))
            axis = num_key_axes(base)
            value = self.spread(split_key(base, self.size), axis)
        self.inputs[slot], self.input_axes[slot] = value, axis

    def spread(self, x: Any, axis: int) -> Any:
        """An array with a value for each lane, sharded as the other inputs are.

        On a mesh with explicit axes the shardings of all mapped axes have to agree.
        That also holds for inputs that are made here, such as split keys; the user does
        not know of these, and could not shard them.
        """
        given = [(self.values[slot], self.axes[slot]) for slot in self.mapped]
        return spread_like([x for x in given if x[1] is not SPLIT], x, axis)

    def name(self, slot: Slot) -> str:
        where, k = slot
        if where not in self.trees:
            return self.lifted.name(slot)
        return leaves(self.trees[where], is_leaf=is_owned)[k].name

    def _size(self, axis_size: int | None) -> int:
        """The number of lanes; `ValueError` if the mapped axes do not agree on it."""
        sizes: dict[int, str] = {} if axis_size is None else {axis_size: "`axis_size`"}
        for slot in self.mapped:
            if (axis := self.axes[slot]) is SPLIT:
                continue
            shape = jnp.shape(self.values[slot])
            is_axis = isinstance(axis, int)
            if is_axis and -len(shape) <= axis < len(shape) and shape[axis] in sizes:
                continue
            name = f"`{self.name(slot) or 'the model'}`"
            if not is_axis:
                raise ValueError(_NOT_AN_AXIS.format(name, axis))
            if not -len(shape) <= axis < len(shape):
                raise ValueError(_NO_AXIS.format(name, shape, axis))
            sizes[shape[axis]] = name
        if len(sizes) > 1:
            listed = ", ".join(f"{name} has {size}" for size, name in sizes.items())
            raise ValueError(_SIZES.format(listed))
        if not sizes:
            raise ValueError(_NOTHING_MAPPED)
        return next(iter(sizes))

    def run(self, inputs: Values, _: Any) -> tuple[Any, ...]:
        """Run one lane. Returns its output, and the shared and its own new values."""
        values, copy, f = {**self.values, **inputs}, None, self.opened.f
        if any(where == _FUNCTION for where, _ in self.mapped):
            copy = self.opened.copy(self._tree(_FUNCTION, values))
            f = copy.f
        args, kwargs = self._tree(_ARGUMENTS, values)
        ran = self.lifted.run(values, lambda: f(*args, **kwargs))
        out = ran.out if copy is None else copy.finish(ran.out)
        shared, own = self._sort(ran)
        out, static = eqx.partition(out, is_traced(out))
        kept = Static((static, list(ran.written)))
        return out, (shared, ran.made), (own, ran.sown), kept

    def _sort(self, ran: Ran) -> tuple[Values, Values]:
        """Split the writes of a lane into shared values, and values of its own."""
        shared: Values = {}
        own: Values = {}
        for slot, x in ran.written.items():
            axis = self.axes[slot]
            if isinstance(axis, int):
                own[slot] = x
            elif axis is None or not is_mapped(x):
                # Also a key that was assigned. If it was drawn from, its new value
                # differs in each lane, and `self.advanced` replaces it.
                shared[slot] = x
        named = [(self.name(slot), x) for slot, x in shared.items()]
        for slot, new in ran.news().items():
            if self._has_axis(slot[0], new):
                raise ValueError(MADE_ONCE.format(new.name, "lane of `es.vmap`"))
            named.append((new.name, ran.made.arrays[slot]))
        if names := [f"`{name}`" for name, x in named if is_mapped(x)]:
            raise ValueError(_NOT_REDUCED.format(", ".join(names)))
        return shared, own

    def _has_axis(self, i: int, new: Visit) -> bool:
        """Whether each lane has its own array of this kind, at this place in a root."""
        root = self.lifted.roots[i]
        by = self.entries[id(root.module)] if root.is_stand_in else self.by_rules
        return isinstance(by.of_new(root, new), int)

    def _tree(self, where: int, values: Values) -> Any:
        treedef = jtu.tree_structure(self.trees[where], is_leaf=is_owned)
        leaves = [values[where, k] for k in range(treedef.num_leaves)]
        return jtu.tree_unflatten(treedef, leaves)


class _Vmap(Transform):
    in_axes: Any = eqx.field(static=True)
    out_axes: Any = eqx.field(static=True)
    axis_name: Any = eqx.field(static=True)
    axis_size: int | None = eqx.field(static=True)
    spmd_axis_name: Any = eqx.field(static=True)
    axes: tuple[tuple[Any, Any], ...] = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        lanes = _Lanes(self, args, kwargs)
        mapped = jax.vmap(
            lanes.run,
            in_axes=(lanes.input_axes, 0),
            out_axes=(self.out_axes, None, 0, None),
            axis_name=self.axis_name,
            axis_size=self.axis_size,
            spmd_axis_name=self.spmd_axis_name,
        )
        # `jax.vmap` wants at least one mapped input, and there may be none.
        indices = lanes.spread(jnp.arange(lanes.size), 0)
        out, (shared, made), (own, sown), kept = mapped(lanes.inputs, indices)
        static, written = kept.value
        moved = {slot: jnp.moveaxis(x, 0, lanes.axes[slot]) for slot, x in own.items()}
        new = {**lanes.advanced, **shared, **moved}
        state = {slot: new[slot] for slot in written}
        lanes.lifted.commit(Ran(None, state, sown, made))
        return eqx.combine(out, static)


_NOT_AN_AXIS: Final = """`es.vmap`: the axis of {} is `{}`, and an axis is an integer, \
or `None` for what the lanes share. Leaves that are not arrays are passed on as they \
are, so `in_axes=0` stands for `in_axes=eqx.if_array(0)`."""

_NO_AXIS: Final = """`es.vmap`: {} has shape {}, which has no axis {}. Map it over an \
axis that it has, or share it with `None`: `in_axes=(0, None)`."""

_SIZES: Final = """`es.vmap`: the mapped axes differ in size: {}."""

_NOTHING_MAPPED: Final = """`es.vmap`: nothing is mapped, so the number of lanes is \
not known. Map an argument, `in_axes=0`, or give `axis_size`."""

_NOT_REDUCED: Final = """`es.vmap`: each lane wrote its own value to {}, and the lanes \
share it, so only one could be kept. Reduce it over the lanes,

    es.vmap(f, axis_name="batch")
    self.mean = jax.lax.pmean(mean, "batch")

or give every lane its own, with an axis for the kind: `es.vmap(f, axes={{es.State: \
0}})`."""


def vmap(
    f: Callable[_P, _R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    axes: Mapping[Any, Any] | None = None,
) -> Callable[_P, _R]:
    """`jax.vmap` that carries the state of every module in reach.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. The modules that it
        holds, and those that it closes over, are mapped by the rules of `axes`.
    - `in_axes`, `out_axes`, `axis_name`, `axis_size`, `spmd_axis_name`: as for
        `jax.vmap`. Modules among the arguments follow `in_axes`, in which an entry may
        be a mapping like `axes`. Leaves that are not arrays are passed on as they are.
    - `axes`: rules as for `es.spec`, a mapping from filters to axes, for the modules in
        `f` and its closure: the first filter that is not a kind and matches counts,
        else the most derived kind, else `...`. Names and `es.under` begin at each of
        these modules. By default `es.Rng` is `es.SPLIT`, and everything else is `None`,
        shared by all lanes. With `es.SPLIT` each lane gets its own key, and the model's
        key advances once if a lane has drawn from it, or if a branch of `es.cond` or
        `es.switch` that was not taken would have. If all lanes assign the same key,
        that key is kept. An ensemble is `axes={...: 0}`.

    **Returns:**

    A function of the same arguments. It is a pytree, and can decorate methods.

    **Raises:**

    - `TypeError`: a key in `axes` is not a filter.
    - `ValueError`: the lanes wrote different values to a state that they share; a
        filter in `axes` that is not a kind matches nothing; an array does not have the
        axis; the sizes differ; a state was reached twice, with different axes, and
        written; a written state is not an array.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp


        class Mean(es.Module):
            mean: es.BatchStat

            def __call__(self, x):
                self.mean = jax.lax.pmean(x, "batch")
                return x - self.mean


        xs = jnp.array([1.0, 3.0])
        y, model = es.mutable(es.vmap(Mean(0.0), axis_name="batch"))(xs)
        assert model.mean == 2.0
        assert y.tolist() == [-1.0, 1.0]
        ```
    """
    axes = {} if axes is None else axes
    check_rules(axes, "`es.vmap(axes=...)`")
    return wrap(
        _Vmap,
        f,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis_name,
        axis_size=axis_size,
        spmd_axis_name=spmd_axis_name,
        axes=tuple(axes.items()),
    )
