"""`es.shard_map`: `jax.shard_map` that carries state.

As `es.vmap` it gathers everything that it reaches in one flat mapping, runs a device's
part, and commits what came out. JAX knows in the types which values differ between the
devices (`check_vma`), and so whether a written state is still one state.
"""

import functools as ft
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, Final, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.lax as lax
import jax.random as jr
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._compat import Infer, is_collective_over_lanes, vary, varying_axes
from .._tree.keys import next_keys, num_key_axes, split_key
from .._tree.rules import check_rules
from .axes import ARGUMENTS, Manner, Reached, SPLIT
from .lift import is_traced, Ran, Slot, Static, Values
from .transform import Transform, wrap


_P = ParamSpec("_P")
_R = TypeVar("_R")


# Stands for `P()` where nobody has said it of this array in particular.
_UNSAID: Final = object()


def _read(entry: Any, x: Any) -> Any:
    """The spec that an entry of `in_specs` says for an array."""
    if entry is Infer:
        return jax.typeof(x).sharding.spec
    return _UNSAID if entry == PartitionSpec() else entry


_MANNER: Final = Manner("es.shard_map", "in_specs", _UNSAID, 'P("data")', _read)


class _Shards(Reached):
    """All leaves that a call of `es.shard_map` reaches.

    An axis is a `PartitionSpec`, `SPLIT`, or `None` for a leaf that is static.

    - `inputs`, `specs`: the arrays that go in, and their specs.
    - `split`: for a key that is split, along which axis of its array.
    - `groups`: all specs of state, in some order.
    """

    def __init__(self, shard_map: "_ShardMap", args: tuple[Any, ...]):
        self.mesh = mesh = shard_map.used_mesh()
        self.names = shard_map.axis_names or frozenset(mesh.axis_names)
        # In the mesh's order, which is that of the devices in a stack.
        self.devices = tuple(n for n in mesh.axis_names if n in self.names)
        self.check_vma = shard_map.check_vma
        self.is_explicit = _is_explicit(mesh)
        axes = dict(shard_map.axes)
        super().__init__(shard_map.f, axes, shard_map.in_specs, args, {}, _MANNER)
        self.inputs: Values = {}
        self.specs: dict[Slot, Any] = {}
        self.split: dict[Slot, int] = {}
        self.advanced: Values = {}
        for slot, axis in self.axes.items():
            if axis is not None:
                self._feed(slot, axis)
        of_state = [self.specs[slot] for slot in self.lifted.writable]
        self.groups = list(dict.fromkeys(of_state))

    def _feed(self, slot: Slot, spec: Any) -> None:
        """Prepare the input of `jax.shard_map` for an array."""
        value = self.values[slot]
        if spec is SPLIT:
            # A clone, as in `es.vmap`: maybe no device draws from it.
            self.advanced[slot], base = next_keys(jr.clone(value))
            self.split[slot] = axis = num_key_axes(base)
            num = math.prod(self.mesh.shape[name] for name in self.devices)
            value = split_key(base, num)
            spec = PartitionSpec(*[None] * axis, self.devices)
            if self.is_explicit:  # where types have shardings, JAX wants this one
                value = jax.sharding.reshard(value, NamedSharding(self.mesh, spec))
        elif spec is _UNSAID:
            spec = PartitionSpec()
        self._check(slot, value, spec)
        self.inputs[slot], self.specs[slot] = value, spec

    def _check(self, slot: Slot, x: Any, spec: Any) -> None:
        """Raise an error that names the array if a spec does not fit."""
        name = self.name(slot) or "the model"
        if not isinstance(spec, PartitionSpec):
            raise TypeError(_NOT_A_SPEC.format(name, spec))
        if len(spec) > x.ndim:
            raise ValueError(_TOO_LONG.format(name, spec, x.shape))
        for size, entry in zip(x.shape, spec, strict=False):
            num = 1
            for axis in _axes_in(entry):
                if axis not in self.names:
                    known = ", ".join(f"`{x}`" for x in self.devices)
                    raise ValueError(_NO_MESH_AXIS.format(name, spec, axis, known))
                num *= self.mesh.shape[axis]
            if size % num:
                raise ValueError(_NOT_DIVISIBLE.format(name, x.shape, spec, num, size))
        own = jax.typeof(x).sharding.spec
        if self.is_explicit and _padded(own, x) != _padded(spec, x):
            text = _OF_ARGUMENT if slot[0] == ARGUMENTS else _OF_FUNCTION
            how = text.format(own, name.rpartition(".")[2])
            raise ValueError(_OTHER_SHARDING.format(name, own, spec, how))

    def run(self, inputs: Values) -> tuple[Any, ...]:
        """Run one device's part."""
        for slot, axis in self.split.items():
            inputs = {**inputs, slot: lax.squeeze(inputs[slot], (axis,))}
        ran = self.call(inputs)
        written, drawn = self._sort(ran)
        out, static = eqx.partition(ran.out, is_traced(ran.out))
        sown = jtu.tree_map(lambda x: self._stacked(x, 0), ran.sown)
        return out, written, sown, Static((static, drawn))

    def _sort(self, ran: Ran) -> tuple[list[Values], list[Slot]]:
        """The writes by group, and the keys that were drawn from."""
        groups: list[Values] = [{} for _ in self.groups]
        drawn: list[Slot] = []
        named: list[tuple[str, Any, Any]] = []
        for slot, x in ran.written.items():
            spec = self.specs[slot]
            if slot in self.split:
                if self._varying(x) or not self.check_vma:
                    drawn.append(slot)
                    continue
                x = self._stacked(x, self.split[slot])  # all devices assign one key
            elif self.axes[slot] is _UNSAID and not self.check_vma:
                name = self.lifted.name(slot)
                raise ValueError(_UNCHECKED.format(name, name.rpartition(".")[2]))
            named.append((self.name(slot), x, spec))
            groups[self.groups.index(spec)][slot] = x
        names = [
            f"`{name}`"
            for name, x, spec in named
            if self._varying(x) - {a for entry in spec for a in _axes_in(entry)}
        ]
        if names:
            raise ValueError(_NOT_REDUCED.format(", ".join(names), self.devices[0]))
        return groups, drawn

    def _varying(self, x: Any) -> frozenset[Any]:
        return varying_axes(x) & self.names

    def _stacked(self, x: Any, axis: int) -> Any:
        """A device's value as its part of a stack of those of all devices."""
        x = lax.expand_dims(x, (axis,))
        return vary(x, self.names) if self.check_vma else x


def _is_explicit(mesh: Any) -> bool:
    """Whether the types of arrays have their shardings on this mesh."""
    return all(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)


def _padded(spec: Any, x: Any) -> tuple[Any, ...]:
    """A spec with an entry for each axis of an array."""
    entries = [_axes_in(entry) for entry in spec]
    return tuple(entries) + ((),) * (x.ndim - len(entries))


def _axes_in(entry: Any) -> tuple[Any, ...]:
    """The mesh axes in an entry of a spec."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


class _ShardMap(Transform):
    mesh: Any = eqx.field(static=True)
    in_specs: Any = eqx.field(static=True)
    out_specs: Any = eqx.field(static=True)
    axes: tuple[tuple[Any, Any], ...] = eqx.field(static=True)
    axis_names: frozenset[Any] = eqx.field(static=True)
    check_vma: bool = eqx.field(static=True)

    def __call__(self, /, *args: Any) -> Any:
        __tracebackhide__ = True
        shards = _Shards(self, args)
        stacked = PartitionSpec(shards.devices)
        mapped = jax.shard_map(
            shards.run,
            mesh=self.mesh,
            in_specs=(shards.specs,),
            out_specs=(
                self.out_specs,
                shards.groups,
                stacked,
                PartitionSpec(),
            ),
            axis_names=self.axis_names,
            check_vma=self.check_vma,
        )
        try:
            out, groups, sown, kept = mapped(shards.inputs)
        except (AssertionError, KeyError, ValueError) as error:
            if self.check_vma and is_collective_over_lanes(error):
                raise ValueError(_OVER_LANES) from error
            raise
        static, drawn = kept.value
        written = {slot: x for group in groups for slot, x in group.items()}
        for slot, axis in shards.split.items():
            if slot in written:
                x = lax.index_in_dim(written[slot], 0, axis, keepdims=False)
                written[slot] = x
        written |= {slot: shards.advanced[slot] for slot in drawn}
        shards.lifted.commit(Ran(None, written, sown))
        return eqx.combine(out, static)

    def used_mesh(self) -> Any:
        """The mesh, or that of the context; an error if `in_specs` need another."""
        mesh = self.mesh
        if mesh is None:
            mesh = jax.sharding.get_abstract_mesh()
            if mesh.empty:
                raise ValueError(_NO_MESH)
        if not isinstance(mesh, (Mesh, AbstractMesh)):
            raise TypeError(_NOT_A_MESH.format(type(mesh).__name__))
        if unknown := [n for n in self.axis_names if n not in mesh.axis_names]:
            raise ValueError(_NO_SUCH_AXIS.format(unknown[0], mesh.axis_names))
        if self.in_specs is Infer and not _is_explicit(mesh):
            raise TypeError(_NOT_EXPLICIT.format(mesh.axis_names))
        return mesh


_NOT_A_SPEC: Final = """`es.shard_map`: the spec of `{}` is `{!r}`, and a spec is a \
`jax.sharding.PartitionSpec`, or `None` for what is static. Leaves that are not arrays \
are static anyhow."""

_TOO_LONG: Final = """`es.shard_map`: the spec of `{}` is `{}`, which is longer than \
its shape {}. One entry stands for one axis of the array."""

_NO_MESH_AXIS: Final = """`es.shard_map`: the spec of `{}` is `{}`, and `{}` is not an \
axis of the mesh over which this maps: {}."""

_NOT_DIVISIBLE: Final = """`es.shard_map`: `{}` has shape {}, and its spec `{}` \
divides an axis among {} devices, which does not come out even for {}."""

_OTHER_SHARDING: Final = """`es.shard_map`: `{0}` is sharded by its type, as `{1}`, \
and its spec is `{2}`. On a mesh with `Explicit` axes both have to agree: give the \
spec of the type, {3}, or call `jax.sharding.reshard` before."""

_OF_ARGUMENT: Final = "`{0}`, in `in_specs`"
_OF_FUNCTION: Final = '`axes={{es.path_matches("*{1}"): {0}}}` if a module has it'

_NOT_REDUCED: Final = """`es.shard_map`: the devices wrote different values to {0}, \
and they share it, so only one could be kept. Reduce it over the mesh axis,

    self.mean = jax.lax.pmean(mean, "{1}")

or give every device its own part, with a spec for the kind: `es.shard_map(f, ..., \
axes={{es.State: P("{1}")}})`."""

_UNCHECKED: Final = """`es.shard_map(check_vma=False)`: `{0}` was written, and is \
replicated. Without the check nobody knows whether all devices wrote the same value. \
If they did, say so: `axes={{es.path_matches("*{1}"): P()}}` (for a module among the \
arguments, in its entry of `in_specs`); or leave `check_vma` on."""

_OVER_LANES: Final = """`es.shard_map`: JAX cannot reduce over the lanes of a `vmap` \
inside of a `shard_map` whose types it checks (a `pmean` per example, say). Reduce \
over the device's part of the batch first, as an array, and then over the mesh:

    es.vmap(lambda x: x - jax.lax.pmean(x, "batch"), axis_name="batch")(xs)    # wrong
    xs - jax.lax.pmean(jnp.mean(xs, 0), "data")                                # right

or switch the check off, `check_vma=False`."""

_NO_MESH: Final = """`es.shard_map`: there is no `mesh=`, and none in the context. \
Pass one, or enter it: `with jax.set_mesh(mesh):`."""

_NOT_A_MESH: Final = """`es.shard_map`: `mesh` is a `jax.sharding.Mesh` or an \
`AbstractMesh`, and not a `{}`."""

_NO_SUCH_AXIS: Final = """`es.shard_map`: `axis_names` has `{}`, and the axes of the \
mesh are {}."""

_NOT_EXPLICIT: Final = """`es.shard_map`: without `in_specs` the specs are read from \
the types of the arguments, for which all axes of the mesh have to be `Explicit`, and \
those of {} are not. Give `in_specs`, one for each argument."""


def shard_map(
    f: Callable[_P, _R] | None = None,
    /,
    *,
    out_specs: Any,
    in_specs: Any = Infer,
    mesh: Any = None,
    axis_names: Set[Any] = frozenset(),
    check_vma: bool = True,
    axes: Mapping[Any, Any] | None = None,
) -> Any:
    """`jax.shard_map` that carries the state of every module in reach.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. The modules that it
        holds, and those that it closes over, are mapped by rules. Without it, a
        decorator comes back.
    - `out_specs`, `in_specs`, `mesh`, `axis_names`, `check_vma`: as for
        `jax.shard_map`. Modules among the arguments follow `in_specs`, in which an
        entry may be a mapping like `axes`. `self` of a decorated method does not count.
        Leaves that are not arrays are passed on as they are. With `check_vma=False`
        state that `axes` does not name may not be written.
    - `axes`: rules for the modules in `f` and its closure, from filters to
        `jax.sharding.PartitionSpec`s, as in [`es.vmap`][eqx_state.vmap]. By default
        `es.Rng` is `es.SPLIT`, and everything else is replicated, `P()`. With
        `es.SPLIT` each device gets its own key, over all mesh axes that are mapped, and
        the model's key advances once if a device has drawn from it.

    **Returns:**

    A function of the same arguments. It is a pytree, and can decorate methods. What
    layers sow is stacked, one entry for each device.

    **Raises:**

    - `ValueError`: the devices wrote different values to a state that they share; a
        spec does not fit an array; a filter in `axes` matches nothing; a collective
        over the lanes of a `vmap` inside, which JAX cannot do with `check_vma`.
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
        out_specs=out_specs, in_specs=in_specs, mesh=mesh, check_vma=check_vma
    )
    if f is None:
        return ft.partial(shard_map, **options, axis_names=axis_names, axes=axes)
    check_rules(axes or {}, "`es.shard_map(axes=...)`")
    # What a user has written is not the default, see `_UNSAID`.
    specs = {k: PartitionSpec() if x is None else x for k, x in (axes or {}).items()}
    pairs, names = tuple(specs.items()), frozenset(axis_names)
    return wrap(_ShardMap, f, **options, axis_names=names, axes=pairs)
