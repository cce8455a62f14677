"""`es.vmap`: `jax.vmap` that carries state, with an axis for each kind.

What is mapped over ends up in one flat list, whatever it was part of: the function and
its closure, the arguments, or an owned module. All else is closed over as it is.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu

from ._axes import (
    argument_axes,
    axis_by_kind,
    check_matched,
    function_axes,
    SPLIT,
)
from ._closures import Opened
from ._compat import is_mapped, spread_like
from ._keys import next_keys, num_key_axes, split_key
from ._lift import is_traced, Leaves, Lifted
from ._scope import is_owned
from ._select import check_kinds, most_derived
from ._transform import Transform, wrap
from ._traverse import flatten_with_path, modules_in, name_of


_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(eq=False)
class _Source:
    """Leaves by name, and the axis of each: an integer, `SPLIT`, or `None`."""

    values: Leaves
    axes: dict[str, Any]
    advanced: Leaves = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(tree: Any, axes: dict[str, Any]) -> "tuple[_Source, Any]":
        """The leaves of a tree in which owned modules count as leaves that stay."""
        entries, treedef = flatten_with_path(tree, is_owned)
        values = {name_of(path): value for path, value in entries}
        own_axes = {n: axes.get(n) for n, v in values.items() if not is_owned(v)}
        return _Source(values, own_axes), treedef

    def sort(self, written: Leaves) -> tuple[Leaves, Leaves]:
        """What a lane has written: what all lanes share, and what each has."""
        # What only `init` has brought into being has no axis, and is shared.
        axes = {name: self.axes.get(name) for name in written}
        shared = {name: x for name, x in written.items() if axes[name] is None}
        own = {name: x for name, x in written.items() if isinstance(axes[name], int)}
        _check_reduced(shared)
        return shared, own

    def outer(self, names: list[str], shared: Leaves, stacked: Leaves) -> Leaves:
        """What the lanes have written, as it is outside."""
        moved = {n: jnp.moveaxis(x, 0, self.axes[n]) for n, x in stacked.items()}
        new = {**self.advanced, **shared, **moved}
        return {name: new[name] for name in names}


class _Vmap(Transform):
    in_axes: Any = eqx.field(static=True)
    out_axes: Any = eqx.field(static=True)
    axis_name: Any = eqx.field(static=True)
    axis_size: int | None = eqx.field(static=True)
    axes: tuple[tuple[Any, Any], ...] = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        by_kind = dict(self.axes)
        arguments = (args, kwargs)
        lifted = Lifted(self.f, arguments)
        by_argument = argument_axes(self.in_axes, args, kwargs)
        opened = Opened(self.f)
        check_matched(by_kind, lifted, opened.tree)
        in_function = function_axes(opened.tree, by_kind)
        held, held_def = _Source.of(opened.tree, in_function)
        given, given_def = _Source.of(arguments, by_argument)
        owned = _owned_sources(lifted, arguments, by_argument, by_kind)
        sources = [held, given, *owned]

        slots = [
            (source, name)
            for source in sources
            for name, axis in source.axes.items()
            if axis is not None
        ]
        size = _size(slots, self.axis_size)
        given_axes = [(s.values[n], s.axes[n]) for s, n in slots]
        spread = ft.partial(spread_like, [x for x in given_axes if x[1] is not SPLIT])
        inputs, input_axes = [], []
        for source, name in slots:
            value, axis = source.values[name], source.axes[name]
            if axis is SPLIT:
                # A clone, since the key stays unused if no lane draws from it.
                source.advanced[name], base = next_keys(jr.clone(value))
                axis = num_key_axes(base)
                value = spread(split_key(base, size), axis)
            inputs.append(value)
            input_axes.append(axis)

        static_out: Any = None
        names: list[list[str]] = []

        def lane(inputs: list[Any], _: Any) -> tuple[Any, Any]:
            nonlocal static_out, names
            values = {id(source): dict(source.values) for source in sources}
            for (source, name), value in zip(slots, inputs, strict=True):
                values[id(source)][name] = value
            in_f, in_arguments, *inside = values.values()
            f, copy = self.f, None
            if any(axis is not None for axis in held.axes.values()):
                copy = opened.copy(jtu.tree_unflatten(held_def, in_f.values()))
                f = copy.f
            args, kwargs = jtu.tree_unflatten(given_def, in_arguments.values())
            out, written, sown = lifted.run(inside, lambda: f(*args, **kwargs))
            if copy is not None:
                out = copy.finish(out)
            names = [list(new) for new in written]
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
        )
        out, (shared, stacked, sown) = mapped(inputs, spread(jnp.arange(size), 0))
        written = zip(owned, names, shared, stacked, strict=True)
        lifted.commit([source.outer(*x) for source, *x in written], sown)
        return eqx.combine(out, static_out)


def _owned_sources(
    lifted: Lifted,
    arguments: Any,
    by_argument: Mapping[str, Any],
    by_kind: Mapping[Any, Any],
) -> list[_Source]:
    """The owned modules: mapped by kind, but what is an argument as the argument."""
    in_function = {id(v.node) for m in lifted.in_function for v in modules_in(m)}
    sources = []
    for i, root in enumerate(lifted.roots):
        visits = lifted.visits(i)
        axes = {visit.name: axis_by_kind(visit, by_kind) for visit in visits}
        fixed = {
            visit.name: axes[visit.name]
            for visit in visits
            if id(root) in in_function and most_derived(visit.kind, by_kind)
        }
        for target, argument in lifted.within(i, arguments):
            axis = by_argument[argument]
            if fixed.setdefault(target, axis) != axis:
                raise ValueError(
                    f"`es.vmap`: `{target}` is reached twice, to be mapped over axis"
                    f" {fixed[target]} and over axis {axis}. Give it one axis, in"
                    " `in_axes` or in `axes`, or pass it once."
                )
            axes[target] = axis
        sources.append(_Source({v.name: v.node for v in visits}, axes))
    return sources


def _size(slots: list[tuple[_Source, str]], axis_size: int | None) -> int:
    """The number of lanes, on which all that is mapped has to agree."""
    sizes: dict[int, str] = {} if axis_size is None else {axis_size: "`axis_size`"}
    for source, path in slots:
        value, axis = source.values[path], source.axes[path]
        if axis is SPLIT:
            continue
        name = f"`{path or 'the model'}`"
        shape = jnp.shape(value)
        if not isinstance(axis, int):
            raise ValueError(
                f"`es.vmap`: the axis of {name} is `{axis}`, and an axis is an integer,"
                " or `None` for what the lanes share. What is no array is passed on as"
                " it is, so that `in_axes=0` stands for `in_axes=eqx.if_array(0)`."
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


def _check_reduced(shared: dict[str, Any]) -> None:
    """What the lanes share must have one value for all of them."""
    names = [f"`{name}`" for name, x in shared.items() if is_mapped(x)]
    if names:
        raise ValueError(
            f"`es.vmap`: each lane wrote its own value to {', '.join(names)}, and the"
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
    axes: Mapping[Any, Any] | None = None,
) -> Callable[_P, _R]:
    """`jax.vmap`, through which the state of every module in reach is carried.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. The modules that it
        holds, and those that it closes over, are mapped by kind.
    - `in_axes`, `out_axes`, `axis_name`, `axis_size`: as for `jax.vmap`. Modules among
        the arguments follow `in_axes`, in which an entry may be a mapping as `axes` is.
        Leaves that are no arrays are passed on as they are.
    - `axes`: from kinds to axes, for the modules in `f` and its closure. The most
        derived kind that matches counts; `...` stands for every other array; then come
        the defaults: `es.Rng` is `es.SPLIT`, and all else is `None`, shared by all
        lanes. With `es.SPLIT` each lane gets its own key, and the model's key advances
        once if a lane has drawn from it. An ensemble is `axes={...: 0}`.

    **Returns:**

    A function of the same arguments, which is a pytree, and can decorate methods.

    **Raises:**

    - `ValueError`: the lanes wrote different values to a state that they share; a kind
        in `axes` that matches nothing; an axis that an array does not have; sizes that
        differ; one module reached twice, with different axes.

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
        axes=pairs,
    )
