"""`es.vmap`: `jax.vmap` that carries state, with an axis for each kind.

What is mapped over ends up in one flat list, whatever it was part of: the function and
its closure, the arguments, or an owned module. All else is closed over as it is.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu

from .._compat import is_mapped, spread_like
from .._state._scope import is_owned
from .._tree._keys import next_keys, num_key_axes, split_key
from .._tree._rules import check_kinds
from .._tree._walk import flatten_with_path, name_of
from ._axes import (
    argument_axes,
    check_matched,
    function_axes,
    module_axes,
    SPLIT,
)
from ._copies import Opened
from ._lift import is_traced, Leaves, Lifted
from ._stand_ins import by_entry, stand_in
from ._transform import Transform, wrap


_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(eq=False)
class _Source:
    """Leaves by position, and the axis of each: an integer, `SPLIT`, or `None`."""

    values: Leaves
    axes: list[Any]
    name: Callable[[int], str]
    advanced: Leaves = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(tree: Any, axes: Sequence[Any]) -> "tuple[_Source, Any]":
        """The leaves of a tree in which owned modules count as leaves that stay."""
        entries, treedef = flatten_with_path(tree, is_owned)
        own_axes = [
            None if is_owned(x) else axis[0] for x, axis in by_entry(tree, axes)
        ]
        values = {k: value for k, (_, value) in enumerate(entries)}
        return _Source(values, own_axes, lambda k: name_of(entries[k][0])), treedef

    def sort(self, written: Leaves) -> tuple[Leaves, Leaves]:
        """What a lane has written: what all lanes share, and what each has."""
        shared, own = {}, {}
        for k, x in written.items():
            # What only `init` has brought into being has no axis, and is shared.
            axis = self.axes[k] if k < len(self.axes) else None
            if isinstance(axis, int):
                own[k] = x
            elif axis is None or not is_mapped(x):
                shared[k] = x  # also a key that is assigned, and not drawn from
        _check_reduced([self.name(k) for k, x in shared.items() if is_mapped(x)])
        return shared, own

    def outer(self, positions: list[int], shared: Leaves, stacked: Leaves) -> Leaves:
        """What the lanes have written, as it is outside."""
        moved = {k: jnp.moveaxis(x, 0, self.axes[k]) for k, x in stacked.items()}
        new = {**self.advanced, **shared, **moved}
        return {k: new[k] for k in positions}


class _Vmap(Transform):
    in_axes: Any = eqx.field(static=True)
    out_axes: Any = eqx.field(static=True)
    axis_name: Any = eqx.field(static=True)
    axis_size: int | None = eqx.field(static=True)
    spmd_axis_name: Any = eqx.field(static=True)
    axes: tuple[tuple[Any, Any], ...] = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        by_kind = dict(self.axes)
        by_argument = argument_axes(self.in_axes, args, kwargs)
        arguments, stand_ins = stand_in(
            (args, kwargs), by_argument, lambda module: module_axes(module, by_kind)
        )
        lifted = Lifted(self.f, arguments, stand_ins=stand_ins)
        opened = Opened(self.f)
        lifted.check_apart(*opened.values, *args, *kwargs.values())
        check_matched(by_kind, lifted, opened.tree)
        in_function = function_axes(opened.tree, by_kind)
        held, held_def = _Source.of(opened.tree, in_function)
        given, given_def = _Source.of(arguments, by_argument)
        by_stand_in = {id(x.module): x.meaning for x in stand_ins}
        owned = [
            _Source(
                values,
                list(by_stand_in.get(id(root)) or module_axes(root, by_kind)),
                ft.partial(lifted.name, i),
            )
            for i, (root, values) in enumerate(
                zip(lifted.roots, lifted.values(), strict=True)
            )
        ]
        sources = [held, given, *owned]

        slots = [
            (source, k)
            for source in sources
            for k, axis in enumerate(source.axes)
            if axis is not None
        ]
        size = _size(slots, self.axis_size)
        given_axes = [(s.values[k], s.axes[k]) for s, k in slots]
        spread = ft.partial(spread_like, [x for x in given_axes if x[1] is not SPLIT])
        inputs, input_axes = [], []
        for source, k in slots:
            value, axis = source.values[k], source.axes[k]
            if axis is SPLIT:
                # A clone, since the key stays unused if no lane draws from it.
                source.advanced[k], base = next_keys(jr.clone(value))
                axis = num_key_axes(base)
                value = spread(split_key(base, size), axis)
            inputs.append(value)
            input_axes.append(axis)

        static_out: Any = None
        positions: list[list[int]] = []

        def lane(inputs: list[Any], _: Any) -> tuple[Any, Any]:
            nonlocal static_out, positions
            values = {id(source): dict(source.values) for source in sources}
            for (source, k), value in zip(slots, inputs, strict=True):
                values[id(source)][k] = value
            in_f, in_arguments, *inside = values.values()
            f, copy = self.f, None
            if any(axis is not None for axis in held.axes):
                copy = opened.copy(jtu.tree_unflatten(held_def, in_f.values()))
                f = copy.f
            args, kwargs = jtu.tree_unflatten(given_def, in_arguments.values())
            out, written, sown = lifted.run(inside, lambda: f(*args, **kwargs))
            if copy is not None:
                out = copy.finish(out)
            positions = [list(new) for new in written]
            sorted_ = [
                source.sort(new) for source, new in zip(owned, written, strict=True)
            ]
            out, static_out = eqx.partition(out, is_traced(out))
            return out, ([s for s, _ in sorted_], [o for _, o in sorted_], sown)

        mapped = jax.vmap(
            lane,
            in_axes=(input_axes, 0),
            out_axes=(self.out_axes, (None, 0, 0)),
            axis_name=self.axis_name,
            axis_size=self.axis_size,
            spmd_axis_name=self.spmd_axis_name,
        )
        out, (shared, stacked, sown) = mapped(inputs, spread(jnp.arange(size), 0))
        written = zip(owned, positions, shared, stacked, strict=True)
        lifted.commit([source.outer(*x) for source, *x in written], sown)
        return eqx.combine(out, static_out)


def _size(slots: list[tuple[_Source, int]], axis_size: int | None) -> int:
    """The number of lanes, on which all that is mapped has to agree."""
    sizes: dict[int, str] = {} if axis_size is None else {axis_size: "`axis_size`"}
    for source, k in slots:
        value, axis = source.values[k], source.axes[k]
        if axis is SPLIT:
            continue
        name = f"`{source.name(k) or 'the model'}`"
        shape = jnp.shape(value)
        if not isinstance(axis, int):
            raise ValueError(
                f"`es.vmap`: the axis of {name} is `{axis}`, and an axis is an integer,"
                " or `None` for what the lanes share. What is not an array is passed on"
                " as it is, so that `in_axes=0` stands for `in_axes=eqx.if_array(0)`."
            )
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"`es.vmap`: {name} has shape {shape}, which has no axis {axis}. Map it"
                " over an axis that it has, or share it with `None`: `in_axes=(0,"
                " None)`."
            )
        sizes.setdefault(shape[axis], name)
    if len(sizes) > 1:
        listed = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ValueError(f"`es.vmap`: the mapped axes differ in size: {listed}.")
    if not sizes:
        raise ValueError(
            "`es.vmap`: nothing is mapped, so that the number of lanes is not known."
            " Map an argument, `in_axes=0`, or give `axis_size`."
        )
    return next(iter(sizes))


def _check_reduced(names: list[str]) -> None:
    """What the lanes share must have one value for all of them."""
    if names:
        listed = ", ".join(f"`{name}`" for name in names)
        raise ValueError(
            f"`es.vmap`: each lane wrote its own value to {listed}, and the"
            " lanes share it, so that only one could be kept. Reduce it over the"
            " lanes,\n\n"
            '    es.vmap(f, axis_name="batch")\n'
            '    self.mean = jax.lax.pmean(mean, "batch")\n\n'
            "or give every lane its own, with an axis for the kind:"
            " `es.vmap(f, axes={es.State: 0})`."
        )


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
    """`jax.vmap`, through which the state of every module in reach is carried.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. The modules that it
        holds, and those that it closes over, are mapped by kind.
    - `in_axes`, `out_axes`, `axis_name`, `axis_size`, `spmd_axis_name`: as for
        `jax.vmap`. Modules among the arguments follow `in_axes`, in which an entry may
        be a mapping as `axes` is. What is not an array is passed on as it is.
    - `axes`: from kinds to axes, for the modules in `f` and its closure. The most
        derived kind that matches counts; `...` stands for every other array; then come
        the defaults: `es.Rng` is `es.SPLIT`, and all else is `None`, shared by all
        lanes. With `es.SPLIT` each lane gets its own key, and the model's key advances
        once if a lane has drawn from it, or a branch of `es.cond` or `es.switch` that
        was not taken would have. A key that is assigned, the same in all lanes, is
        kept. An ensemble is `axes={...: 0}`.

    **Returns:**

    A function of the same arguments, which is a pytree, and can decorate methods.

    **Raises:**

    - `ValueError`: the lanes wrote different values to a state that they share; a kind
        in `axes` that matches nothing; an axis that an array does not have; sizes that
        differ; state reached twice, with different axes, and written; a written state
        that is not an array.

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
    check_kinds(axes or {}, "`es.vmap(axes=...)`")
    pairs = tuple((axes or {}).items())
    return wrap(
        _Vmap,
        f,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis_name,
        axis_size=axis_size,
        spmd_axis_name=spmd_axis_name,
        axes=pairs,
    )
