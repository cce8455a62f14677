"""`es.vmap`: `jax.vmap` that carries state, with axes chosen by rules.

A call of `es.vmap` takes these steps:

1. `Reached` finds all that the call leads to (the function, the arguments, the modules
   that a scope owns), and an axis for each array.
2. A key whose axis is `es.SPLIT` becomes a key for each lane.
3. `jax.vmap` maps over what has an axis. All else is closed over, and shared.
4. In a lane, the modules have the lane's values while the function runs. What it wrote
   leaves the lane in groups, by axis. What the lanes share must be the same in all.
5. After the trace, what was written is committed to the modules outside.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import is_mapped, spread_like
from .._tree.rules import check_rules
from .axes import AbstractMap, Inputs, Reached, SPLIT
from .lift import StaticOutput
from .reach import is_traced
from .transform import wrap


_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Vmap(AbstractMap):
    what = "es.vmap"
    entries = "in_axes"
    out_axes: Any = eqx.field(static=True)
    axis_name: Any = eqx.field(static=True)
    axis_size: int | None = eqx.field(static=True)
    spmd_axis_name: Any = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        reached = Reached(self, args, kwargs)
        size = _size(reached, self.axis_size)
        # On a mesh with explicit axes, the shardings of all mapped axes have to agree.
        # The user has no way to shard the new keys.
        pairs = zip(reached.values, reached.axes, strict=True)
        arrays = [(x, axis) for x, axis in pairs if axis is not SPLIT]
        reached.split_keys(
            size, lambda keys, axis: (spread_like(arrays, keys, axis), axis)
        )

        def lane(args: Any, kwargs: Any, f: Any, modules: Any) -> tuple[Any, ...]:
            ran = reached.run(Inputs(args, kwargs, f, modules))
            groups, used, unreduced = reached.collect(ran.written, _differs)
            if unreduced:
                raise ValueError(_NOT_REDUCED.format(", ".join(unreduced)))
            out, static = eqx.partition(ran.out, is_traced(ran.out))
            return out, groups, ran.sown, StaticOutput((static, used))

        mapped = jax.vmap(
            lane,
            in_axes=tuple(reached.tree(reached.axes)),
            out_axes=(self.out_axes, reached.groups, 0, None),
            axis_name=self.axis_name,
            axis_size=self.axis_size,
            spmd_axis_name=self.spmd_axis_name,
        )
        out, groups, sown, kept = mapped(*reached.tree(reached.values))
        static, used = kept.value
        reached.commit(groups, used, sown)
        return eqx.combine(out, static)


def _size(reached: Reached, axis_size: int | None) -> int:
    """The number of lanes; `ValueError` if an array does not have its axis."""
    sizes = [] if axis_size is None else [axis_size]
    for k, (x, axis) in enumerate(zip(reached.values, reached.axes, strict=True)):
        if axis is not SPLIT:
            if not isinstance(axis, int) or not -jnp.ndim(x) <= axis < jnp.ndim(x):
                what = reached.names()[k], jnp.shape(x), axis
                raise ValueError(_NO_AXIS.format(*what))
            sizes.append(jnp.shape(x)[axis])
    if not sizes:
        raise ValueError(_NOTHING_MAPPED)
    return sizes[0]  # if others differ, JAX says which


def _differs(x: Any, axis: int | None) -> bool:
    return axis is None and is_mapped(x)


_NO_AXIS: Final = """`es.vmap`: `{}` has shape {}, which has no axis {}. Map it over \
an axis that it has, an integer, or share it with `None`: `in_axes=(0, None)`. Leaves \
that are not arrays are passed on, so `0` stands for `eqx.if_array(0)`."""

_NOTHING_MAPPED: Final = """`es.vmap`: nothing is mapped, so the number of lanes is \
not known. Map an argument, `in_axes=0`, or give `axis_size`."""

_OUT_AXES: Final = """`es.vmap`: `out_axes` is an integer, `None`, or a tree of them, \
and not `{}`. Leaves that are not arrays are passed on, so `0` stands for \
`eqx.if_array(0)`."""

_NOT_REDUCED: Final = """`es.vmap`: each lane wrote its own value to {}, and the lanes \
share it, so only one could be kept. With `axis_name="batch"`, reduce it over the \
lanes: `self.mean = jax.lax.pmean(mean, "batch")`; or give every lane its own, with an \
axis for the kind: `es.vmap(f, axes={{es.State: 0}})`."""


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

    - `TypeError`: a key in `axes` is not a filter; `out_axes` has a leaf that is not an
        integer.
    - `ValueError`: the lanes wrote different values to a state that they share; a
        filter in `axes` that is not a kind matches nothing; `axes` would map an array
        of a module that is outside `es.mutable` and that the function only closes over;
        an array does not have the axis; the sizes differ; a state is written both as an
        argument and through the closure; a written state is not an array.

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
    for axis in jtu.tree_leaves(out_axes):
        if not isinstance(axis, int):
            raise TypeError(_OUT_AXES.format(axis))
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
