"""`es.axis_names` and `es.sharding`: names of axes, and how to shard by these names."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import jax.tree_util as jtu
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ._compat import Dims
from ._kinds.kinds import is_kind, OptState
from ._state.lazy import check_initialized
from ._tree.base import Placeholder
from ._tree.compare import is_hole
from ._tree.context import AxesAbove
from ._tree.filters import filter_text
from ._tree.followers import parameters_of, recorded_models
from ._tree.rules import choose
from ._tree.walk import is_array, name_of, Visit, walk
from ._typing import KeyPath, PyTree, Tree


_Names: TypeAlias = tuple[str | None, ...]


def axis_names(tree: Tree) -> Tree:
    """The names that annotations give to the axes of each array.

    `up: es.Parameter[Float[Array, "mlp embed"]]` has the axes `mlp` and `embed`. Sizes
    and expressions (`3`, `_`, `n+1`) are not names, and `...` or `*batch` represents
    any number of unnamed axes. An array with more axes than its annotation is a stack,
    of layers or of an ensemble: the axes in front have no names. If the class of a
    layer has no such annotations, write `es.Axes` in the annotation of its field.

    Moments in an `es.Optimizer` have the names of their parameters if they have the
    same shape. Otherwise their axes have no names.

    **Arguments:**

    - `tree`: any pytree. `jax.ShapeDtypeStruct`s are arrays, too.

    **Returns:**

    A tree of the same type with each array replaced by a tuple, which has a name or
    `None` for each axis. Every other leaf is replaced by `None`.

    **Raises:**

    - `ValueError`: an array has fewer axes than its annotation, or a path in an
        `es.Axes` does not lead to an array. The message names the field.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.numpy as jnp
        from jaxtyping import Array, Float


        class MLP(es.Module):
            up: es.Parameter[Float[Array, "mlp embed"]]
            down: es.Parameter[Float[Array, "embed mlp"]]
            scale: Float[Array, "#embed 3 _"] | None = None


        names = es.axis_names(MLP(jnp.ones((8, 2)), jnp.ones((2, 8))))
        assert names.up == ("mlp", "embed")
        stack = es.axis_names(MLP(jnp.ones((4, 8, 2)), jnp.ones((4, 2, 8))))
        assert stack.up == (None, "mlp", "embed")
        ```
    """
    names = [leaf.names for leaf in _named(tree)]
    return jtu.tree_unflatten(jtu.tree_structure(tree), names)


class _NamedLeaf(NamedTuple):
    """A leaf, and the names of its axes."""

    visit: Visit
    names: _Names | None  # `None` if it is not an array
    # The names of its parameter, if their shapes differ, as in `optax.adafactor`.
    others: _Names | None


def _named(tree: PyTree) -> list[_NamedLeaf]:
    """Each leaf, and the names of its axes."""
    visits, parameters = walk(tree, is_leaf=_is_taken_out), parameters_of(tree)
    _check_axes(visits)
    found: list[_NamedLeaf] = []
    for visit in visits:
        if not visit.is_leaf or _is_taken_out(visit.node):
            continue
        if not is_array(visit.node):
            found.append(_NamedLeaf(visit, None, None))
            continue
        moment_of = parameters.get(visit.path)
        source = visit if moment_of is None else moment_of.parameter
        names = _names_of(source, strict=not _is_opt_state(visit))
        is_alike = source.node.shape == visit.node.shape
        unnamed = (None,) * len(visit.node.shape)
        own, others = (names, None) if is_alike else (None, names or ())
        found.append(_NamedLeaf(visit, own or unnamed, others))
    return found


def _names_of(visit: Visit, strict: bool) -> _Names | None:
    """The names of an array's axes; `None` if none are declared.

    If the array has fewer axes than names: `ValueError` with `strict`, else `None`.
    """
    shape = visit.node.shape
    declared, field = _declared(visit)
    candidates = [_fitted(dims, len(shape)) for dims in declared]
    fitting = [names for names in candidates if names is not None]
    if fitting:  # the member of a union with the most names
        return min(fitting, key=lambda names: names.count(None))
    if declared and strict:
        dims = " or ".join(f"`{_text(d)}`" for d in declared)
        raise ValueError(_FEWER.format(field, dims, visit.name, shape))
    return None


def _declared(visit: Visit) -> tuple[tuple[Dims, ...], str]:
    """The declared axes of an array, several in a union; and the declaring field.

    The outermost `es.Axes` that has a key for the array applies.
    """
    for above in visit.context.axes:
        below = name_of(visit.path[len(visit.path) - above.depth :])
        if dims := [axes.dims[below] for axes in above.axes if below in axes.dims]:
            return tuple(dims), above.field
    owner = visit.context.owner
    field = f"{owner.__qualname__}.{visit.context.field}" if owner else visit.name
    return visit.context.spec.dims, field


def _fitted(dims: Dims, ndim: int) -> _Names | None:
    """The names for an array with `ndim` axes; `None` if there are too many names."""
    # A stack has more axes in front, as if `dims` began with `...`.
    i = dims.index(...) if ... in dims else 0
    names = tuple(name for name in dims if name is not ...)
    missing = ndim - len(names)
    return None if missing < 0 else (*names[:i], *[None] * missing, *names[i:])


def _is_opt_state(visit: Visit) -> bool:
    covering = visit.context.covering
    return covering is not None and issubclass(covering, OptState)


def _is_taken_out(node: Any) -> bool:
    """Whether a filter or `optax.masked` has removed an array here."""
    return is_hole(node) or isinstance(node, optax.MaskedNode)


def _check_axes(visits: list[Visit]) -> None:
    """Raise `ValueError` for a path in an `es.Axes` that does not lead to a leaf."""
    sites: dict[tuple[KeyPath, AxesAbove], list[Visit]] = {}
    for visit in visits:
        for above in visit.context.axes:
            if not _is_opt_state(visit):  # its leaves may differ from the model's
                site = visit.path[: len(visit.path) - above.depth]
                sites.setdefault((site, above._replace(depth=0)), []).append(visit)
    for (site, above), below in sites.items():
        names = {name_of(v.path[len(site) :]): v.node for v in below if v.is_leaf}
        # A filter has removed an array here, or `init` will create one.
        gaps = [
            name
            for name, node in names.items()
            if _is_taken_out(node) or isinstance(node, Placeholder)
        ]
        missing = [
            [p for p in axes.dims if p not in names and not p.startswith(tuple(gaps))]
            for axes in above.axes
        ]
        if all(missing):
            there = [f"`{name}`" for name in names if name not in gaps]
            raise ValueError(
                _NOT_THERE.format(
                    above.field,
                    name_of(site),
                    above.axes[0],
                    missing[0][0],
                    ", ".join(there) or "no arrays",
                )
            )


def _text(dims: Dims) -> str:
    """Axes as jaxtyping writes them."""
    return " ".join("..." if d is ... else d or "_" for d in dims)


_FEWER: Final = """`{}` is annotated with more axes than it has: {} at `{}`, but the \
array has shape {}. An array may have more axes in front, as in a stack of layers, but \
not fewer. Correct the annotation, or write `...` for axes that are optional."""

_NOT_THERE: Final = """`{0}` declares `{2}`, but `{1}` does not contain `{3}`. It \
contains {4}. Write the path from the field to an array, such as `layers[0].weight`."""


# --- Shardings ------------------------------------------------------------------------


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
    leaves = _named(tree)
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
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, visit: Visit, names: _Names
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
        axes = _text(names)
        raise ValueError(_REFUSED.format(name, shape, axes, spec, error)) from error
    return found


def _check_names(
    by_name: Mapping[str, Any], leaves: list[_NamedLeaf], tree: Any
) -> None:
    """Raise `ValueError` for a rule that names no axis, which is a typo."""
    # Include the names of the models that optimizers have recorded: an optimizer
    # without moments, such as `optax.sgd`, contains no named arrays itself.
    recorded = [leaf for model in recorded_models(tree) for leaf in _named(model)]
    first: dict[str, Visit] = {}
    for visit, names, others in [*leaves, *recorded]:
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
