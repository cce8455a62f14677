"""`es.sharding`: where each array goes, by the names of its axes."""

from collections.abc import Mapping
from typing import Any, Final

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ._kinds.kinds import is_kind, OptState
from ._state.init import check_initialized
from ._tree.axis_names import (
    dims_text,
    followed_leaves,
    named_leaves,
    NamedLeaf,
    Names,
)
from ._tree.filters import written
from ._tree.rules import choose
from ._tree.walk import Visit
from ._typing import Tree


def sharding(tree: Tree, mesh: Mesh | AbstractMesh, rules: Mapping[Any, Any]) -> Tree:
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
    by_name: dict[str, Any] = {}
    by_filter: Any = rules  # of another type it is what `choose` complains about
    if isinstance(rules, Mapping):
        by_name = {key: x for key, x in rules.items() if isinstance(key, str)}
        whole = {key: x for key, x in rules.items() if not isinstance(key, str)}
        by_filter = {key: x for key, x in whole.items() if key is not ...}
    check_initialized(tree)
    keys = choose(by_filter, tree, "`es.sharding`")
    for key, value in rules.items():
        if isinstance(value, PartitionSpec) is isinstance(key, str):
            raise TypeError(_NOT_A_SPEC.format(written(key), value))
    leaves = named_leaves(tree)
    _check_names(by_name, leaves, tree)
    found: list[NamedSharding | None] = []
    for key, (visit, names, others) in zip(keys, leaves, strict=True):
        if names is None:
            found.append(None)
            continue
        if others is not None and not (is_kind(key) and issubclass(key, OptState)):
            key = None  # it was chosen for another shape
        spec = rules.get(..., PartitionSpec()) if key is None else by_filter[key]
        if key is None and not by_name.keys().isdisjoint(names):
            spec = PartitionSpec(*(by_name.get(n) if n else None for n in names))
        found.append(_of_array(mesh, spec, visit, names))
    for key, value in rules.items():  # JAX checks those that reach no array, too
        NamedSharding(mesh, PartitionSpec(value) if isinstance(key, str) else value)
    return jtu.tree_unflatten(jtu.tree_structure(tree), found)


def _of_array(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, visit: Visit, names: Names
) -> NamedSharding:
    """The sharding; `ValueError` if JAX does not accept it for this array."""
    shape = visit.node.shape
    try:
        found = NamedSharding(mesh, spec)
        if len(spec) > len(shape):  # JAX says that later, and not of which array
            raise ValueError(f"The spec has {len(spec)} entries.")
        found.shard_shape(shape)
    except Exception as error:  # JAX's `DuplicateSpecError` is no `ValueError`
        name = f"`{visit.name}`" if visit.path else "the array"
        axes = dims_text(names)
        raise ValueError(_REFUSED.format(name, shape, axes, spec, error)) from error
    return found


def _check_names(
    by_name: Mapping[str, Any], leaves: list[NamedLeaf], tree: Any
) -> None:
    """Raise `ValueError` for a rule whose name is that of no axis, which is a typo."""
    # An optimizer without moments, given alone, has no array with a name. The names are
    # those of its model.
    first: dict[str, Visit] = {}
    for visit, names, others in [*leaves, *followed_leaves(tree)]:
        for name in filter(None, others or names or ()):
            first.setdefault(name, visit)
    for name in by_name:
        if name not in first:
            have = ", ".join(f"`{axis}` (`{v.name}`)" for axis, v in first.items())
            raise ValueError(_NO_NAME.format(name, have or "none"))


_NOT_A_SPEC: Final = """`es.sharding`: the rule `{}: {!r}`. The name of an axis leads \
to a mesh axis, a tuple of mesh axes or `None`, and a filter or a kind to a \
`jax.sharding.PartitionSpec` for arrays: `{{"mlp": "model", es.BatchStat: P()}}`."""

_NO_NAME: Final = """`es.sharding`: no array has an axis `{}`. The names are: {}. They \
come from annotations, `Float[Array, "mlp embed"]`, or from `es.Axes` beside the field \
that holds a layer; `es.axis_names(tree)` shows them."""

_REFUSED: Final = """`es.sharding`: {}, of shape {} and with axes `{}`, cannot be \
split by `{}`. {} To treat one array differently, give it a rule of its own: \
`es.path_matches("..."): P()`."""
