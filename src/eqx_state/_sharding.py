"""`es.sharding`: where each array goes, by the names of its axes."""

import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, TypeVar

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._kinds.kinds import is_kind, OptState
from ._state.init import check_initialized
from ._tree.axis_names import followed_leaves, named_leaves, NamedLeaf, Names
from ._tree.filters import written
from ._tree.rules import choose
from ._tree.walk import Visit


_Tree = TypeVar("_Tree")
# What an axis of an array is split over: a mesh axis, several, or none.
_Entry: TypeAlias = str | tuple[str, ...] | None


def sharding(tree: _Tree, mesh: Mesh | AbstractMesh, rules: Mapping[Any, Any]) -> _Tree:
    """A `jax.sharding.NamedSharding` for each array, by the names of its axes.

    For each array the first filter in `rules` that is not a kind and matches counts;
    else the most derived kind; else the names of its axes, if a rule has one of them;
    else `...`. An array that no rule reaches is replicated. Moments in an
    `es.Optimizer` and the averages of an `es.Ema` go where their parameters go.

    **Arguments:**

    - `tree`: any pytree: a model, or model and optimizer. With `jax.ShapeDtypeStruct`s
        in place of arrays, as `jax.eval_shape` returns them, the result is what
        `jax.jit(make, out_shardings=...)` takes to make a model in its shards.
    - `mesh`: a `jax.sharding.Mesh`, or an `AbstractMesh`, which has no devices. If its
        axes are `AxisType.Explicit`, as `jax.make_mesh` makes them, the model itself
        must say how the result of an operation is sharded where that is ambiguous, and
        `eqx.filter_shard` does not take these shardings. With `AxisType.Auto` the
        compiler decides.
    - `rules`: from names of axes, as `es.axis_names` returns them, to a mesh axis, a
        tuple of them, or `None`; from filters, kinds and `...` to a
        `jax.sharding.PartitionSpec`, which is for the array as it is: in an
        `es.nn.Stacked` its first entry is for the axis of the layers.

    **Returns:**

    A tree of the same type with a sharding in place of each array, and `None` in place
    of what is not an array. `jax.device_put` and `eqx.filter_shard` take it.

    **Raises:**

    - `TypeError`: an argument is of another type.
    - `ValueError`: no array has an axis of that name, or a filter matches no array; the
        mesh does not have that axis; the number of devices along it does not divide
        the size of the array's axis; one mesh axis is used twice in an array; or a
        spec has more entries than the array has axes. Also what `es.axis_names` raises.
    - `es.NotInitializedError`: the tree still holds an `es.Initializer`, which has no
        axes yet: `jax.eval_shape(model.init, key)` has them.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp
        from jaxtyping import Array, Float


        class MLP(es.Module):
            up: es.Parameter[Float[Array, "mlp embed"]]
            down: es.Parameter[Float[Array, "embed mlp"]]


        mlp = MLP(jnp.ones((8, 2)), jnp.ones((2, 8)))
        mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
        places = es.sharding(mlp, mesh, {"mlp": "model", "embed": None})
        assert places.up.spec == jax.P("model", None)
        assert places.down.shard_shape(mlp.down.shape) == (2, 4)
        ```
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(_NOT_A_MESH.format(type(mesh).__qualname__))
    by_name: dict[str, _Entry] = {}
    by_filter: Any = rules  # of another type it is what `choose` complains about
    if isinstance(rules, Mapping):
        by_name = {key: x for key, x in rules.items() if isinstance(key, str)}
        whole = {key: x for key, x in rules.items() if not isinstance(key, str)}
        by_filter = {key: x for key, x in whole.items() if key is not ...}
    check_initialized(tree)
    keys = choose(by_filter, tree, "`es.sharding`")
    _check_values(rules)
    leaves = named_leaves(tree)
    _check_names(by_name, leaves, tree)
    rest = rules.get(..., PartitionSpec())
    # By spec and shape: models repeat themselves, and so few specs have to be checked.
    made: dict[tuple[PartitionSpec, tuple[int, ...]], NamedSharding] = {}
    found: list[NamedSharding | None] = []
    for key, (visit, names, others) in zip(keys, leaves, strict=True):
        if names is None:
            found.append(None)
            continue
        if others is not None and not (is_kind(key) and issubclass(key, OptState)):
            key = None  # it was chosen for another shape
        spec = rest if key is None else by_filter[key]
        if key is None and not by_name.keys().isdisjoint(names):
            spec = PartitionSpec(*(by_name.get(n) if n else None for n in names))
        where = spec, visit.node.shape
        if where not in made:
            _check_spec(spec, visit, names, mesh)
            made[where] = NamedSharding(mesh, spec)
        found.append(made[where])
    for key, value in rules.items():  # also of rules that reach no array
        for axis in _axes_in(value):
            if axis not in mesh.shape and axis is not PartitionSpec.UNCONSTRAINED:
                raise ValueError(_no_mesh_axis(f"`{_shown(key)}`", axis, mesh))
    return jtu.tree_unflatten(jtu.tree_structure(tree), found)


def _entries(value: Any) -> list[tuple[Any, ...]]:
    """For each axis of an array, the mesh axes that a rule splits it over."""
    each = value if isinstance(value, PartitionSpec) else (value,)
    return [x if isinstance(x, tuple) else () if x is None else (x,) for x in each]


def _axes_in(value: Any) -> list[Any]:
    return [axis for entry in _entries(value) for axis in entry]


def _check_values(rules: Mapping[Any, Any]) -> None:
    """Raise `TypeError` for a rule whose value does not suit its key."""
    for key, value in rules.items():
        if isinstance(key, str):
            is_right = not isinstance(value, PartitionSpec) and all(
                isinstance(axis, str) for axis in _axes_in(value)
            )
            message = _NOT_A_MESH_AXIS
        else:
            is_right, message = isinstance(value, PartitionSpec), _NOT_A_SPEC
        if not is_right:
            raise TypeError(message.format(_shown(key), value))


def _shown(key: Any) -> str:
    """The key of a rule as users write it."""
    if isinstance(key, str):
        return repr(key)
    return "..." if key is ... else written(key)


def _check_names(
    by_name: Mapping[str, _Entry], leaves: list[NamedLeaf], tree: Any
) -> None:
    """Raise `ValueError` for a rule whose name is that of no axis, which is a typo."""
    first = _first_with_each_name(leaves)
    if not by_name.keys() <= first.keys():
        # An optimizer without moments, given alone, has no array with a name. The table
        # is that of its model.
        first = _first_with_each_name([*leaves, *followed_leaves(tree)])
    for name in by_name:
        if name not in first:
            have = ", ".join(f"`{axis}` (`{v.name}`)" for axis, v in first.items())
            raise ValueError(_NO_NAME.format(name, have or "none"))


def _first_with_each_name(leaves: list[NamedLeaf]) -> dict[str, Visit]:
    first: dict[str, Visit] = {}
    for visit, names, others in leaves:
        for name in filter(None, others or names or ()):
            first.setdefault(name, visit)
    return first


def _check_spec(
    spec: PartitionSpec, visit: Visit, names: Names, mesh: Mesh | AbstractMesh
) -> None:
    """Raise `ValueError` if an array cannot be split like this."""
    shape = visit.node.shape
    array = f"`{visit.name}`" if visit.path else "the array"
    entries = _entries(spec)
    if len(entries) > len(shape):
        raise ValueError(_TOO_LONG.format(array, spec, len(entries), shape))
    taken: dict[str, str] = {}
    for i, (axes, size, name) in enumerate(zip(entries, shape, names, strict=False)):
        what = f"axis {i} (`{name}`)" if name else f"axis {i}"
        where = f"{what} of {array}"
        for axis in axes:
            if axis is PartitionSpec.UNCONSTRAINED:
                if AxisType.Explicit in mesh.axis_types:
                    raise ValueError(_UNCONSTRAINED.format(where))
                continue
            if axis not in mesh.shape:
                raise ValueError(_no_mesh_axis(where, axis, mesh))
            if axis in taken:
                raise ValueError(_TWICE.format(array, axis, taken[axis], what))
            taken[axis] = what
        number = math.prod(mesh.shape.get(axis, 1) for axis in axes)
        if size % number:
            over = " and ".join(f"`{axis}`" for axis in axes)
            raise ValueError(_INDIVISIBLE.format(where, size, over, number))


def _no_mesh_axis(what: str, axis: str, mesh: Mesh | AbstractMesh) -> str:
    axes = ", ".join(f"`{name}` ({size})" for name, size in mesh.shape.items())
    return _NO_MESH_AXIS.format(what, axis, axes)


_NOT_A_MESH: Final = """`es.sharding(tree, mesh, rules)`: the mesh is a `{}`. Give a \
`jax.sharding.Mesh`, as `jax.make_mesh` returns, or a `jax.sharding.AbstractMesh`."""

_NOT_A_MESH_AXIS: Final = """`es.sharding`: the rule `{}: {!r}` is for axes of that \
name, and leads to a mesh axis, a tuple of mesh axes or `None`: `"mlp": "model"`. A \
`jax.sharding.PartitionSpec` is for whole arrays, which a filter or a kind selects: \
`es.BatchStat: P()`."""

_NOT_A_SPEC: Final = """`es.sharding`: the rule `{}: {!r}` is for whole arrays, and \
leads to a `jax.sharding.PartitionSpec`: `es.Parameter: P("model")`. The name of an \
axis is a string: `"mlp": "model"`."""

_NO_NAME: Final = """`es.sharding`: no array has an axis `{}`. The names are: {}. They \
come from annotations, `Float[Array, "mlp embed"]`, or from `es.Axes` beside the field \
that holds a layer; `es.axis_names(tree)` shows them."""

_TOO_LONG: Final = """`es.sharding`: {} gets `{}`, which has {} entries, and its shape \
is {}. A spec has at most one entry for each axis; `P()` replicates. To select only \
arrays that have these axes, use a filter: `lambda part: part.value.ndim == 2`."""

_NO_MESH_AXIS: Final = """`es.sharding`: {} is to be split over `{}`, which the mesh \
does not have. Its axes are: {}."""

_TWICE: Final = """`es.sharding`: {} would use the mesh axis `{}` twice, for {} and \
for {}, and a device has one place along it. Let one of them lead to another mesh axis \
or to `None`. Two axes of one name need a rule for the whole array, \
`es.path_matches("*.square"): P("model", None)`, or names of their own."""

_INDIVISIBLE: Final = """`es.sharding`: {} has size {}, and is to be split over {}, \
which is {} devices. JAX splits arrays into equal parts only. Choose a size that is a \
multiple, or replicate this array by a rule of its own, \
`es.path_matches("..."): P()`."""

_UNCONSTRAINED: Final = """`es.sharding`: {} is `UNCONSTRAINED`, and the mesh has axes \
of type `Explicit`, where JAX must know how each axis is split. Write `None`, which \
replicates, or make the mesh with `axis_types=(jax.sharding.AxisType.Auto, ...)`."""
