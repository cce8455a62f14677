"""`es.shard_map`: `jax.shard_map` that carries state.

It takes the steps of `es.vmap`, with devices instead of lanes. With `check_vma`, JAX
records in each type along which mesh axes a value varies, which shows whether a written
state is still equal on all devices.
"""

import functools as ft
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

import equinox as eqx
import jax
import jax.lax as lax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._compat import Infer, varying_axes
from .._tree.keys import num_key_axes
from .._tree.rules import check_rules
from .._typing import P, R
from .advice import Cause
from .axes import AbstractMap
from .lift import Ran
from .mapped import Inputs, Mapped
from .roots import Values
from .transform import wrap


# A sentinel for the default, replicated. A `P()` in the user's rules confirms that all
# devices write the same value, and so allows writes under `check_vma=False`.
_BY_DEFAULT: Final = object()


class _ShardMap(AbstractMap):
    caller = "es.shard_map"
    entries, outputs, nothing = "in_specs", "out_specs", "P()"
    shared = _BY_DEFAULT
    mesh: Any = eqx.field(static=True)
    axis_names: frozenset[Any] = eqx.field(static=True)
    check_vma: bool = eqx.field(static=True)

    def axis_by_entry(self, entry: Any, x: Any) -> Any:
        if entry is Infer:
            entry = jax.typeof(x).sharding.spec
        return _BY_DEFAULT if entry in (None, PartitionSpec()) else entry

    def __call__(self, /, *args: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        # Use the order of the mesh, in which the values of the devices are stacked.
        names = tuple(n for n in mesh.axis_names if n in (self.axis_names or {n}))
        is_explicit = {*mesh.axis_types} == {jax.sharding.AxisType.Explicit}
        call = Mapped(self, args, {})

        def place(keys: Any, axis: int) -> tuple[Any, Any]:
            spec = PartitionSpec(*[None] * axis, names)
            if is_explicit:  # JAX compares this sharding with the spec
                keys = jax.sharding.reshard(keys, NamedSharding(mesh, spec))
            return keys, spec

        call.split_keys(math.prod(mesh.shape[name] for name in names), place)

        def unmapped(x: Any, spec: Any) -> frozenset[Any]:
            mapped = {n for n in names if n in jtu.tree_leaves(tuple(_spec(spec)))}
            return varying_axes(x) & set(names) - mapped

        def differs(x: Any, spec: Any) -> bool:
            if not self.check_vma:  # the types do not show which values vary
                return spec is _BY_DEFAULT
            return bool(unmapped(x, spec))

        def not_reduced(states: Values, cause: Cause) -> str:
            listed = "`, `".join(map(call.lifted.name, states))
            if not self.check_vma:
                return _UNCHECKED.format(listed)
            pairs = ((x, call.group_of(slot)) for slot, x in states.items())
            over = frozenset().union(*(unmapped(*pair) for pair in pairs))
            missing = tuple(n for n in names if n in over)
            shown = ", ".join(f'"{n}"' for n in missing)
            axes = shown if len(missing) == 1 else f"({shown})"
            default = _DRAWN if cause.is_drawn else _REDUCE
            default = default.format(cause.reduction(axes)) + _OWN_VALUES.format(axes)
            advice = call.advice(states, missing) or default
            return _NOT_REDUCED.format(listed, axes) + advice

        def device(args: Any, kwargs: Any, f: Any, modules: Any) -> tuple[Any, ...]:
            values = jtu.tree_leaves(Inputs(args, kwargs, f, modules))
            inputs = call.tree(map(_own_key, values, call.is_split))
            ran, rest = call.run(inputs, differs, not_reduced)
            sown = jtu.tree_map(lambda x: x[None], ran.sown)
            return ran._replace(sown=sown), rest

        specs = call.tree(_spec(row.axis) for row in call.rows)
        groups = [*map(_spec, call.groups)]
        specs_of_ran = Ran(self.out_axes, groups, PartitionSpec(names))
        mapped = jax.shard_map(
            device,
            mesh=self.mesh,
            # Without explicit axes, there are no shardings to infer specs from. Pass
            # `Infer` on, so that JAX raises its error.
            in_specs=Infer if self.in_axes is Infer and not is_explicit else (*specs,),
            out_specs=(specs_of_ran, PartitionSpec()),
            axis_names=self.axis_names,
            check_vma=self.check_vma,
        )
        return call.finish(*mapped(*call.tree(row.value for row in call.rows)))


def _spec(axis: Any) -> Any:
    return PartitionSpec() if axis is _BY_DEFAULT else axis


def _own_key(x: Any, is_split: bool) -> Any:
    """The key of a device: remove the axis of size 1 from its shard of the keys."""
    return lax.squeeze(x, (num_key_axes(x) - 1,)) if is_split else x


_NOT_REDUCED: Final = """`es.shard_map`: the devices wrote different values to `{0}`, \
but all devices share one value, so only one could be stored. It differs along {1}. """

_REDUCE: Final = """Reduce it over this part of the mesh: {}; or give every device \
its own part, """

_DRAWN: Final = """It comes from a key, and each device has its own. Let all devices \
draw the same, `axes={{es.Rng: P()}}`; or give every device its own part, """

_OWN_VALUES: Final = """with a spec for the kind: `axes={{es.State: P({})}}`, with \
`es.Rng: es.SPLIT` if the model has keys. For a module among the arguments, this \
mapping is its entry of `in_specs`."""

_UNCHECKED: Final = """`es.shard_map(check_vma=False)`: the function wrote `{0}`, \
which is replicated. With the check off, JAX cannot verify that all devices wrote the \
same value. Leave `check_vma` on; or, if they do, confirm it for their kind: \
`axes={{es.BatchStat: P()}}`. Keep `es.Rng: es.SPLIT` if you name `es.State`. For a \
module among the arguments, this mapping is its entry of `in_specs`."""


def shard_map(
    f: Callable[P, R] | None = None,
    /,
    *,
    out_specs: Any,
    in_specs: Any = Infer,
    mesh: Any = None,
    axis_names: Set[Any] = frozenset(),
    check_vma: bool = True,
    axes: Mapping[Any, Any] | None = None,
) -> Any:
    """`jax.shard_map` for functions that may write the state of modules.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. Modules that are `f`
        itself, or that `f` closes over, are mapped by the rules in `axes`. Without `f`,
        the result is a decorator.
    - `out_specs`, `in_specs`, `mesh`, `axis_names`, `check_vma`: as for
        `jax.shard_map`. Modules among the arguments are mapped by `in_specs`, in which
        an entry may be a mapping like `axes`. For a module, `P()` means the defaults of
        `axes`, so each device draws from its own keys; `{es.Rng: P()}` shares them. A
        key outside of modules is shared by `P()`. The `self` of a decorated method has
        no entry. Leaves that are not arrays are passed on unchanged. With
        `check_vma=False`, the function may only write state that `axes` names. A key
        that is assigned is then kept only with `axes={es.Rng: P()}`.
    - `axes`: rules from filters to `jax.sharding.PartitionSpec`s, as in
        [`es.vmap`][eqx_state.vmap]. By default `es.Rng` is `es.SPLIT`, and everything
        else is replicated, `P()`. With `es.SPLIT` each device gets its own key, over
        all mapped mesh axes, and the model's key advances once if a device draws from
        it.

    **Returns:**

    A function of the same arguments. It is a pytree, and can decorate methods. Sown
    values are stacked, one entry for each device.

    **Raises:**

    - `ValueError`: the devices wrote different values to a state that they share; a
        spec does not fit an array; a filter in `axes` matches nothing; `axes` would map
        an array of a module that the function only closes over, outside `es.mutable`;
        the devices return a module with `out_specs=P()`, but each with its own key.
    - `TypeError`: a spec is not a `PartitionSpec`.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P


        class Center(es.Module):
            mean: es.BatchStat

            def __call__(self, x):
                self.mean = jax.lax.pmean(jnp.mean(x), "data")
                return x - self.mean


        mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
        f = es.shard_map(
            Center(0.0), mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
        y, center = es.mutable(f)(jnp.array([1.0, 3.0]))
        assert y.tolist() == [-1.0, 1.0] and center.mean == 2.0
        ```
    """
    options: dict[str, Any] = dict(
        mesh=mesh,
        axis_names=frozenset(axis_names),
        check_vma=check_vma,
    )
    if f is None:
        return ft.partial(
            shard_map, in_specs=in_specs, out_specs=out_specs, axes=axes, **options
        )
    check_rules(axes or {}, "`es.shard_map(axes=...)`")
    # Not `_BY_DEFAULT` for `None`: these are the user's own specs.
    specs = {k: PartitionSpec() if x is None else x for k, x in (axes or {}).items()}
    return wrap(
        _ShardMap,
        f,
        in_axes=in_specs,
        out_axes=out_specs,
        axes=tuple(specs.items()),
        **options,
    )
