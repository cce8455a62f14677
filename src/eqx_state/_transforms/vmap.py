"""`es.vmap`: `jax.vmap` that carries state, with axes chosen by rules.

A call gathers everything that it reaches in one flat mapping, runs a lane under
`jax.vmap`, and commits what came out. Only the leaves with an axis are inputs of
`jax.vmap`; everything else is closed over.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from .._compat import is_mapped, spread_like
from .._tree.keys import next_keys, num_key_axes, split_key
from .._tree.rules import check_rules
from .axes import Manner, Reached, SPLIT
from .lift import is_traced, Ran, Slot, Static, Values
from .transform import Transform, wrap


_P = ParamSpec("_P")
_R = TypeVar("_R")


_MANNER: Final = Manner("es.vmap", "in_axes", None, "0")


class _Lanes(Reached):
    """All leaves that a call of `es.vmap` reaches.

    An axis is an integer, `SPLIT`, or `None` for a leaf that all lanes share.
    """

    def __init__(self, vmap: "_Vmap", args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__(vmap.f, dict(vmap.axes), vmap.in_axes, args, kwargs, _MANNER)
        self.mapped = [slot for slot, axis in self.axes.items() if axis is not None]
        self.size = self._size(vmap.axis_size)
        self.advanced: Values = {}
        self.inputs: Values = {}
        self.input_axes: dict[Slot, int] = {}
        for slot in self.mapped:
            self._feed(slot)

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

    def check_spread(self) -> None:
        """Raise `ValueError` if mapped axes are spread over devices in two ways.

        On a mesh with explicit axes JAX refuses that, and does not say which they are.
        """
        found: dict[Any, str] = {}
        for slot, axis in self.input_axes.items():
            spec = jax.typeof(self.inputs[slot]).sharding.spec
            found.setdefault(spec[axis], self._shown(slot))
        if len(found) > 1:
            listed = [f"{name} by `{by!r}`" for by, name in found.items()]
            raise ValueError(_SPREAD.format(", ".join(listed)))

    def _size(self, axis_size: int | None) -> int:
        """The number of lanes; `ValueError` if the mapped axes do not agree on it."""
        # By size, one of the slots that have it; `None` stands for `axis_size`.
        sizes: dict[int, Slot | None] = {} if axis_size is None else {axis_size: None}
        for slot in self.mapped:
            if (axis := self.axes[slot]) is SPLIT:
                continue
            shape = jnp.shape(self.values[slot])
            is_axis = isinstance(axis, int)
            if is_axis and -len(shape) <= axis < len(shape) and shape[axis] in sizes:
                continue
            if not is_axis:
                raise ValueError(_NOT_AN_AXIS.format(self._shown(slot), axis))
            if not -len(shape) <= axis < len(shape):
                raise ValueError(_NO_AXIS.format(self._shown(slot), shape, axis))
            sizes[shape[axis]] = slot
        if len(sizes) > 1:
            listed = [f"{self._shown(slot)} has {n}" for n, slot in sizes.items()]
            raise ValueError(_SIZES.format(", ".join(listed)))
        if not sizes:
            raise ValueError(_NOTHING_MAPPED)
        return next(iter(sizes))

    def _shown(self, slot: Slot | None) -> str:
        return "`axis_size`" if slot is None else f"`{self.name(slot) or 'the model'}`"

    def run(self, inputs: Values) -> tuple[Any, ...]:
        """Run one lane. Returns its output, and the shared and its own new values."""
        ran = self.call(inputs)
        shared, own = self._sort(ran)
        out, static = eqx.partition(ran.out, is_traced(ran.out))
        kept = Static((static, list(ran.written)))
        return out, shared, (own, ran.sown), kept

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
        if names := [f"`{name}`" for name, x in named if is_mapped(x)]:
            raise ValueError(_NOT_REDUCED.format(", ".join(names)))
        return shared, own


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
            in_axes=(lanes.input_axes,),
            out_axes=(self.out_axes, None, 0, None),
            axis_name=self.axis_name,
            axis_size=self.axis_size,
            spmd_axis_name=self.spmd_axis_name,
        )
        try:
            out, shared, (own, sown), kept = mapped(lanes.inputs)
        except ValueError:
            lanes.check_spread()
            raise
        static, written = kept.value
        moved = {slot: jnp.moveaxis(x, 0, lanes.axes[slot]) for slot, x in own.items()}
        new = {**lanes.advanced, **shared, **moved}
        state = {slot: new[slot] for slot in written}
        lanes.lifted.commit(Ran(None, state, sown))
        return eqx.combine(out, static)


_NOT_AN_AXIS: Final = """`es.vmap`: the axis of {} is `{}`, and an axis is an integer, \
or `None` for what the lanes share. Leaves that are not arrays are passed on as they \
are, so `in_axes=0` stands for `in_axes=eqx.if_array(0)`."""

_NO_AXIS: Final = """`es.vmap`: {} has shape {}, which has no axis {}. Map it over an \
axis that it has, or share it with `None`: `in_axes=(0, None)`."""

_SIZES: Final = """`es.vmap`: the mapped axes differ in size: {}."""

_SPREAD: Final = """`es.vmap`: the mapped axes are spread over the devices in \
different ways: {}. On a mesh with `Explicit` axes all of them have to agree: call \
`jax.sharding.reshard` before."""

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
