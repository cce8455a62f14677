"""`es.axis_names`: the names that annotations give to the axes of arrays."""

from typing import Any, Final, NamedTuple, TypeAlias

import jax.tree_util as jtu
import optax

from .._compat import Dims
from .._kinds.kinds import OptState
from .._tree.base import Placeholder
from .._tree.compare import is_hole
from .._tree.context import AxesAbove
from .._tree.followers import parameters_of, recorded_models
from .._tree.walk import is_array, name_of, Visit, walk
from .._typing import KeyPath, PyTree, Tree


Names: TypeAlias = tuple[str | None, ...]


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
    names = [leaf.names for leaf in named_leaves(tree)]
    return jtu.tree_unflatten(jtu.tree_structure(tree), names)


class NamedLeaf(NamedTuple):
    """A leaf, and the names of its axes."""

    visit: Visit
    names: Names | None  # `None` if it is not an array
    # The names of its parameter, if their shapes differ, as in `optax.adafactor`.
    others: Names | None


def named_leaves(tree: PyTree) -> list[NamedLeaf]:
    """Each leaf, and the names of its axes."""
    visits, parameters = walk(tree, is_leaf=_is_taken_out), parameters_of(tree)
    _check_axes(visits)
    found: list[NamedLeaf] = []
    for visit in visits:
        if not visit.is_leaf or _is_taken_out(visit.node):
            continue
        if not is_array(visit.node):
            found.append(NamedLeaf(visit, None, None))
            continue
        moment_of = parameters.get(visit.path)
        source = visit if moment_of is None else moment_of.parameter
        names = _names_of(source, strict=not _is_opt_state(visit))
        is_alike = source.node.shape == visit.node.shape
        unnamed = (None,) * len(visit.node.shape)
        own, others = (names, None) if is_alike else (None, names or ())
        found.append(NamedLeaf(visit, own or unnamed, others))
    return found


def recorded_leaves(tree: PyTree) -> list[NamedLeaf]:
    """`named_leaves` of the models that optimizers and averages have recorded."""
    return [leaf for model in recorded_models(tree) for leaf in named_leaves(model)]


def _names_of(visit: Visit, strict: bool) -> Names | None:
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
        dims = " or ".join(f"`{dims_text(d)}`" for d in declared)
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


def _fitted(dims: Dims, ndim: int) -> Names | None:
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


def dims_text(dims: Dims) -> str:
    """Axes as jaxtyping writes them."""
    return " ".join("..." if d is ... else d or "_" for d in dims)


_FEWER: Final = """`{}` is annotated with more axes than it has: {} at `{}`, but the \
array has shape {}. An array may have more axes in front, as in a stack of layers, but \
not fewer. Correct the annotation, or write `...` for axes that are optional."""

_NOT_THERE: Final = """`{0}` declares `{2}`, but `{1}` does not contain `{3}`. It \
contains {4}. Write the path from the field to an array, such as `layers[0].weight`."""
