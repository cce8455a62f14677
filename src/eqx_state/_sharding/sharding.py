"""`es.sharding`: how to shard each array, by the names of its axes."""

from collections.abc import Mapping
from typing import Any, Final

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._kinds.kinds import is_kind, OptState
from .._state.lazy import check_initialized
from .._tree.filters import filter_text
from .._tree.rules import choose
from .._tree.walk import Visit
from .._typing import Tree
from .axis_names import dims_text, named_leaves, NamedLeaf, Names, recorded_leaves


def sharding(tree: Tree, mesh: Mesh | AbstractMesh, rules: Mapping[Any, Any]) -> Tree:
    """A `jax.sharding.NamedSharding` for each array, by the names of its axes.

    For each array, the first filter in `rules` that is not a kind and matches applies;
    else the most derived kind; else the names of its axes, if there is a rule for one
    of them; else `...`. An array without a rule is replicated. Moments in an
    `es.Optimizer` and averages in an `es.Ema` are sharded like their parameters.

    **Arguments:**

    - `tree`: any pytree: a model, or model and optimizer. Shapes are enough: to
        create a model directly in shards, compute the shardings for the result of
        `jax.eval_shape(make)`, and pass them to `jax.jit(make, out_shardings=...)`.
    - `mesh`: a `jax.sharding.Mesh`, or an `AbstractMesh`, which has no devices. If its
        axes are `AxisType.Explicit`, the default of `jax.make_mesh`, the model itself
        must specify the shardings that JAX reports as ambiguous, and `eqx.filter_shard`
        does not accept shardings of such a mesh. With `AxisType.Auto`, the compiler
        decides.
    - `rules`: a mapping. Names of axes, as `es.axis_names` returns them, map to a mesh
        axis, a tuple of mesh axes, or `None`. Filters, kinds and `...` map to a
        `jax.sharding.PartitionSpec` for the whole array; in an `es.nn.Stacked`, its
        first entry is for the axis of the layers.

    **Returns:**

    A tree of the same type, with a sharding for each array and `None` for all other
    leaves. `jax.device_put` and `eqx.filter_shard` take it.

    **Raises:**

    - `TypeError`: an argument has the wrong type.
    - `ValueError`: no array has an axis with the name of a rule; a filter matches no
        array; the mesh does not have an axis that a rule names; the number of devices
        along it does not divide the size of the array's axis; an array uses one mesh
        axis twice; or a spec has more entries than the array has axes. Also the errors
        of `es.axis_names`.
    - `es.NotInitializedError`: the tree still contains an `es.Initializer`, whose axes
        are unknown. Use `jax.eval_shape(model.init, key)`.

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
    by_filter: Any = rules  # `choose` rejects anything but a mapping
    if isinstance(rules, Mapping):
        by_name = {key: x for key, x in rules.items() if isinstance(key, str)}
        whole = {key: x for key, x in rules.items() if not isinstance(key, str)}
        by_filter = {key: x for key, x in whole.items() if key is not ...}
    check_initialized(tree)
    keys = choose(by_filter, tree, "`es.sharding`")
    for key, value in rules.items():
        if isinstance(value, PartitionSpec) is isinstance(key, str):
            raise TypeError(_NOT_A_SPEC.format(filter_text(key), value))
    leaves = named_leaves(tree)
    _check_names(by_name, leaves, tree)
    found: list[NamedSharding | None] = []
    for key, (visit, names, others) in zip(keys, leaves, strict=True):
        if names is None:
            found.append(None)
            continue
        if others is not None and not (is_kind(key) and issubclass(key, OptState)):
            key = None  # chosen for the parameter, whose shape differs
        spec = rules.get(..., PartitionSpec()) if key is None else by_filter[key]
        if key is None and not by_name.keys().isdisjoint(names):
            spec = PartitionSpec(*(by_name.get(n) if n else None for n in names))
        found.append(_of_array(mesh, spec, visit, names))
    for key, value in rules.items():  # let JAX check unused rules, too
        NamedSharding(mesh, PartitionSpec(value) if isinstance(key, str) else value)
    return jtu.tree_unflatten(jtu.tree_structure(tree), found)


def _of_array(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, visit: Visit, names: Names
) -> NamedSharding:
    """The sharding; `ValueError` if JAX does not accept it for this array."""
    shape = visit.node.shape
    try:
        found = NamedSharding(mesh, spec)
        if len(spec) > len(shape):  # JAX would raise later, without a name
            raise ValueError(f"The spec has {len(spec)} entries.")
        found.shard_shape(shape)
    except Exception as error:  # JAX's `DuplicateSpecError` is not a `ValueError`
        name = f"`{visit.name}`" if visit.path else "the array"
        axes = dims_text(names)
        raise ValueError(_REFUSED.format(name, shape, axes, spec, error)) from error
    return found


def _check_names(
    by_name: Mapping[str, Any], leaves: list[NamedLeaf], tree: Any
) -> None:
    """Raise `ValueError` for a rule that names no axis, which is a typo."""
    # Include the names of the models that optimizers have recorded: an optimizer
    # without moments, such as `optax.sgd`, contains no named arrays itself.
    first: dict[str, Visit] = {}
    for visit, names, others in [*leaves, *recorded_leaves(tree)]:
        for name in filter(None, others or names or ()):
            first.setdefault(name, visit)
    for name in by_name:
        if name not in first:
            have = ", ".join(f"`{axis}` (`{v.name}`)" for axis, v in first.items())
            raise ValueError(_NO_NAME.format(name, have or "none"))


_NOT_A_SPEC: Final = """`es.sharding`: the rule `{}: {!r}` is not valid. The name of \
an axis maps to a mesh axis, a tuple of mesh axes or `None`; a filter or a kind maps \
to a `jax.sharding.PartitionSpec`: `{{"mlp": "model", es.BatchStat: P()}}`."""

_NO_NAME: Final = """`es.sharding`: no array has an axis `{}`. The names are: {}. They \
come from annotations, `Float[Array, "mlp embed"]`, or from `es.Axes` in the \
annotation of a field with a layer; `es.axis_names(tree)` lists them."""

_REFUSED: Final = """`es.sharding`: {}, of shape {} and with axes `{}`, cannot be \
split by `{}`. {} To treat one array differently, add a rule for it: \
`es.path_matches("..."): P()`."""
