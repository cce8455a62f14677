"""`es.vmap`: `jax.vmap` that carries state, with axes chosen by rules.

A call of `es.vmap` takes these steps:

1. `Mapped` finds all leaves (of the function, the arguments, and the modules that a
   scope owns), and an axis for each array.
2. A key whose axis is `es.SPLIT` is split into a key for each lane.
3. `jax.vmap` maps over arrays with an axis. All others are closed over, and shared.
4. In a lane, the modules have the lane's values while the function runs. Its writes
   leave the lane in groups, by axis. A state that the lanes share must not vary.
5. After the trace, the writes are committed to the modules outside.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import is_mapped, spread_like
from .._errors import show
from .._tree.keys import is_key
from .._tree.rules import check_rules
from .._tree.walk import is_array
from .._typing import P, R
from .advice import Cause
from .axes import AbstractMap, SPLIT
from .lift import Ran
from .mapped import Inputs, Mapped
from .mutable import Mutable, note_axis
from .roots import Values
from .transform import receiver, wrap


class _Vmap(AbstractMap):
    caller = "es.vmap"
    entries, outputs, nothing = "in_axes", "out_axes", "None"
    axis_name: Any = eqx.field(static=True)
    axis_size: int | None = eqx.field(static=True)
    spmd_axis_name: Any = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = Mapped(self, args, kwargs)
        size = _size(call, self.axis_size)
        # On a mesh with explicit axes, the shardings of all mapped axes must be equal.
        # The user cannot shard the new keys, so we do.
        arrays = [(x.value, x.axis) for x in call.rows if x.axis is not SPLIT]
        call.split_keys(
            size, lambda keys, axis: (spread_like(arrays, keys, axis), axis)
        )

        def not_reduced(states: Values, cause: Cause) -> str:
            default = _DRAWN if cause.is_drawn else _REDUCE
            default = default.format(cause.reduction('"batch"')) + _OWN_VALUES
            advice = call.advice(states, self.axis_name) or default
            names = map(call.lifted.name, states)
            return _NOT_REDUCED.format("`, `".join(names)) + advice

        def lane(args: Any, kwargs: Any, f: Any, modules: Any) -> tuple[Any, ...]:
            inputs = Inputs(args, kwargs, f, modules)
            return call.run(inputs, _differs, not_reduced)

        mapped = jax.vmap(
            lane,
            # A tuple, of the same type as `*args`.
            in_axes=tuple(call.tree(row.axis for row in call.rows)),
            out_axes=(Ran(self.out_axes, call.groups, 0), None),
            axis_name=self.axis_name,
            axis_size=self.axis_size,
            spmd_axis_name=self.spmd_axis_name,
        )
        try:
            results = mapped(*call.tree(row.value for row in call.rows))
        except NameError as error:
            note_axis(error)
            raise
        return call.finish(*results)


def _size(call: Mapped, axis_size: int | None) -> int:
    """The number of lanes; `ValueError` if an array does not have its axis."""
    sizes = [] if axis_size is None else [axis_size]
    for row in call.rows:
        x, axis = row.value, row.axis
        if axis is not SPLIT:
            if not isinstance(axis, int) or not -jnp.ndim(x) <= axis < jnp.ndim(x):
                message = _NO_AXIS.format(call.name(row), jnp.shape(x), axis)
                raise ValueError(message + (_ONE_KEY if is_key(x) else ""))
            sizes.append(jnp.shape(x)[axis])
    if not sizes:
        raise ValueError(_NOTHING_MAPPED)
    return sizes[0]  # if the sizes differ, JAX raises the error


def _differs(x: Any, axis: int | None) -> bool:
    return axis is None and is_mapped(x)


_NO_AXIS: Final = """`es.vmap`: `{}` has shape {}, which has no axis {!r}. Map it \
over an existing axis, an `int`, or share it with `None`: `in_axes=(0, None)`; with \
rules for the arrays of a module, `in_axes=({{es.Rng: es.SPLIT, ...: 0}}, 0)`. Leaves \
that are not arrays are never mapped, so `0` means the same as `eqx.if_array(0)`."""

_ONE_KEY: Final = " One key for each lane: `jax.random.split(key, n)`."

_NOTHING_MAPPED: Final = """`es.vmap`: nothing is mapped, so the number of lanes is \
unknown. Map an argument, `in_axes=0`, or pass `axis_size`."""

_MUTABLE: Final = """`es.vmap(es.mutable(model))` would return a copy of the model for \
each lane. For one model: `ys, model = es.mutable(es.vmap(model))(xs)`. For an \
ensemble: `es.vmap(es.mutable(model), axes={...: 0})`."""

_IN_AXES: Final = """`es.vmap`: `in_axes` must be axes, but is `{}`. Pass arguments to \
the function that `es.vmap` returns, `es.vmap(f)(xs)`, and the name of the axis by \
keyword, `es.vmap(f, axis_name="batch")(xs)`."""

_OUT_AXES: Final = """`es.vmap`: `out_axes` must be an integer, `None`, or a tree of \
them, but contains `{}`. Leaves that are not arrays are never mapped, so `0` means the \
same as `eqx.if_array(0)`."""

_NOT_REDUCED: Final = """`es.vmap`: each lane wrote its own value to `{}`, but all \
lanes share one value, so only one could be stored. """

_REDUCE: Final = """With `axis_name="batch"`, reduce it over the lanes: {}; or give \
every lane its own value, """

_DRAWN: Final = """It comes from a key, and each lane has its own. Let all lanes draw \
the same, `es.vmap(f, axes={{es.Rng: None}})`; or give every lane its own value, """

_OWN_VALUES: Final = """`es.vmap(f, axes={es.State: 0})`, with `es.Rng: es.SPLIT` if \
the model has keys. For a module among the arguments, this mapping is its entry of \
`in_axes`."""


def vmap(
    f: Callable[P, R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    axes: Mapping[Any, Any] | None = None,
) -> Callable[P, R]:
    """`jax.vmap` for functions that may write the state of modules.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. Modules that are `f`
        itself, or that `f` closes over, are mapped by the rules in `axes`.
    - `in_axes`, `out_axes`, `axis_name`, `axis_size`, `spmd_axis_name`: as for
        `jax.vmap`. Modules among the arguments are mapped by `in_axes`, in which an
        entry may be a mapping like `axes`. For a module, `None` means the defaults of
        `axes`, so each lane draws from its own keys; `{es.Rng: None}` shares them. A
        key outside of modules is shared by `None`, and so is a key whose own entry in a
        tree of axes is `None`. Leaves that are not arrays are passed on unchanged.
    - `axes`: rules from filters to axes, as in [`es.spec`][eqx_state.spec]. Names begin
        at the function itself, if it is a module, and at each module that it closes
        over. By default `es.Rng` is `es.SPLIT`, as are typed keys in other state, and
        everything else is `None`, shared by all lanes. With `es.SPLIT` each lane gets
        its own key, and the model's key advances once if a lane draws from it, or if
        some branch of an `es.cond` or `es.switch` does. If all lanes assign the same
        key, that key is stored.
        `axes={...: 0}` runs an ensemble.

    **Returns:**

    A function of the same arguments. It is a pytree, and can decorate methods.

    **Raises:**

    - `TypeError`: a key in `axes` is not a filter; `in_axes` is an array or a name;
        `out_axes` has a leaf that is not an integer; `f` is `es.mutable(model)`,
        without `axes`.
    - `ValueError`: the lanes wrote different values to a state that they share; a
        filter in `axes` that is not a kind matches nothing; `axes` would map an array
        of a module that the function only closes over, outside `es.mutable`; the lanes
        return a module with `out_axes=None`, but each with its own key; an array does
        not have the axis; the sizes differ; a state is written both as an argument and
        through the closure; a written state is not an array.

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
    if isinstance(in_axes, str) or (is_array(in_axes) and in_axes.ndim):
        raise TypeError(_IN_AXES.format(show(in_axes)))
    for axis in jtu.tree_leaves(out_axes):
        if not isinstance(axis, int):
            raise TypeError(_OUT_AXES.format(axis))
    if axes is None and isinstance(f, Mutable) and receiver(f) is not None:
        raise TypeError(_MUTABLE)
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
