"""Selecting by filter and putting back: functions on any pytree.

They are based on masks, `None` leaves and `treedef.unflatten`, like those of Equinox.
"""

import builtins
from collections.abc import Callable
from typing import Any, Final

import jax.tree_util as jtu

from .._errors import an, show
from .._typing import PyTree, Tree
from .compare import is_hole, leaves_like, same_modes, structure_with_holes
from .filters import bind_to_visits, Filter, first_matches
from .walk import is_array, leaves


def mask(tree: Tree, *filters: Filter) -> Tree:
    """A tree of bools, `True` where a leaf satisfies all filters.

    `eqx.partition`, `optax.masked` and others take such trees. The arguments are those
    of `es.filter`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        linear = eqx.nn.Linear(2, 3, key=jr.key(0))
        mask = es.mask(linear, es.path_matches("weight"))
        assert (mask.weight, mask.bias) == (True, False)
        ```
    """
    given, treedef = jtu.tree_flatten(tree)
    selected = [not i for i in first_matches([filters], given, tree)]
    return jtu.tree_unflatten(treedef, selected)


def filter(tree: Tree, *filters: Filter) -> Tree:
    """`tree` with every leaf that is not selected replaced by `None`.

    **Arguments:**

    - `tree`: any pytree.
    - `*filters`: a leaf is selected if it satisfies all of them. A filter is a kind, a
        function `es.Part -> bool`, or a combinator. Default: every array that has a
        kind.

    **Returns:**

    A tree of the same type, for `es.update`, `eqx.combine`, `jax.tree.map` and optax.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp


        class Counter(es.Module):
            weight: es.Parameter
            count: es.State


        counter = Counter(jnp.ones(2), 0)
        params = es.filter(counter, es.Parameter)
        assert params.count is None
        assert len(jax.tree.leaves(params)) == 1
        ```
    """
    given, treedef = jtu.tree_flatten(tree)
    pairs = zip(given, first_matches([filters], given, tree), strict=True)
    return jtu.tree_unflatten(treedef, [x if i == 0 else None for x, i in pairs])


def partition(tree: Tree, *filters: Filter) -> tuple[Tree, ...]:
    """One tree for each filter, and one for all other leaves.

    Each leaf is in the tree of the first filter that selects it. `eqx.combine(*parts)`
    restores `tree`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        model = es.nn.Dropout(0.5, key=jr.key(0))
        params, keys, rest = es.partition(model, es.Parameter, es.Rng)
        assert params.rng is None and rest.rng is None
        assert eqx.tree_equal(eqx.combine(params, keys, rest), model)
        ```
    """
    given, treedef = jtu.tree_flatten(tree)
    columns: list[list[Any]] = [[None] * len(given) for _ in (*filters, None)]
    numbers = first_matches([(f,) for f in filters], given, tree)
    for i, number in enumerate(numbers):
        columns[number][i] = given[i]
    return tuple(jtu.tree_unflatten(treedef, column) for column in columns)


def update(tree: Tree, *partials: Any) -> Tree:
    """`tree` with leaves replaced by those of the partials; the inverse of `es.filter`.

    **Arguments:**

    - `tree`: any pytree.
    - `*partials`: trees of the same structure. Their leaves that are not `None` replace
        those of `tree`; later partials take precedence. Shapes and dtypes may differ.
        To join parts of a tree, `eqx.combine(params, rest)`.

    **Returns:**

    A tree in the mode of `tree`: `training`, `frozen` and Equinox's `inference` are
    never taken from a partial.

    **Raises:**

    - `ValueError`: a partial has a different structure, or an array where `tree` has
        `None`, as if the arguments were swapped. The message names the first path.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp


        class Scale(es.Module):
            factor: es.Parameter
            calls: es.State


        scale = Scale(jnp.ones(2), 0)
        doubled = jax.tree.map(lambda p: 2 * p, es.filter(scale, es.Parameter))
        assert es.update(scale.eval(), doubled).factor[0] == 2
        assert es.update(scale.eval(), doubled).training is False
        ```
    """
    new, treedef = jtu.tree_flatten(tree)
    for partial in partials:
        if (given := _without_difference(treedef, partial)) is None:
            return _put_back(tree, partials)
        new = [old if x is None else x for old, x in zip(new, given, strict=True)]
    return jtu.tree_unflatten(treedef, new)


def _without_difference(treedef: Any, partial: PyTree) -> list[Any] | None:
    """The partial's value for each leaf, or `None` if the structures may differ."""
    try:
        given = treedef.flatten_up_to(partial)
    except (ValueError, TypeError, KeyError):
        return None
    there = [x for x in given if x is not None]
    # A bool may be an `inference` flag of Equinox, which `update` must not replace.
    is_plain = jtu.all_leaves(there) and bool not in builtins.map(type, there)
    return given if is_plain else None


def _put_back(tree: Tree, partials: tuple[Any, ...]) -> Tree:
    """`update` if `tree` has holes, or if modes differ."""
    new, treedef = jtu.tree_flatten(tree, is_leaf=is_hole)
    visits = leaves(tree, is_leaf=is_hole)
    for i, partial in enumerate(partials):
        which = "The partial" if len(partials) == 1 else f"Partial number {i}"
        given = leaves_like(tree, partial, f"`es.update`: {which}")
        raw = jtu.tree_leaves(partial, is_leaf=is_hole)
        for visit, x in zip(visits, raw, strict=True):
            if visit.node is None and is_array(x):
                raise ValueError(_SWAPPED.format(which, visit.name or "the root"))
        # A flag of a partial never replaces one of `tree`, but may fill a hole.
        new = [
            r if old is None else old if x is None else x
            for old, x, r in zip(new, given, raw, strict=True)
        ]
    return jtu.tree_unflatten(treedef, new)


def map(
    f: Callable[..., Any], tree: Tree, *rest: Any, on: Filter | None = None
) -> Tree:
    """`jax.tree.map` over the leaves that match a filter; other leaves do not change.

    **Arguments:**

    - `f`: called with a leaf of `tree` and the leaves of `rest` at the same path.
    - `tree`, `*rest`: trees of the same structure. Their modes may differ.
    - `on`: the filter, which you must pass: `es.TreePart` selects every array that has
        a kind.

    **Raises:**

    - `TypeError`: `on` is missing, or the tree was passed before the function.
    - `ValueError`: a tree of `rest` has a different structure, or `None` at a leaf that
        `on` selects.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        model = eqx.nn.Linear(2, 3, key=jr.key(0))
        ema = es.map(lambda e, p: 0.9 * e + 0.1 * p, model, model, on=es.Parameter)
        assert ema.weight.shape == (3, 2)
        ```
    """
    check_function_first("es.map(f, tree, on=es.Parameter)", f, tree)
    if on is None:
        raise TypeError(_NO_FILTER)
    is_selected = bind_to_visits((on,), tree)
    others = [_flatten_up_to(tree, other, i) for i, other in enumerate(rest, start=1)]
    out = []
    for visit, *given in zip(leaves(tree, is_leaf=is_hole), *others, strict=True):
        if not is_selected(visit):
            out.append(visit.node)
        elif any(x is None for x in given):
            raise ValueError(_HOLE.format(visit.name))
        else:
            try:
                out.append(f(visit.node, *given))
            except Exception as error:
                error.add_note(_AT.format(visit.name or "the root", show(visit.node)))
                raise
    return jtu.tree_unflatten(structure_with_holes(tree), out)


def check_function_first(call: str, f: Any, tree: Any) -> None:
    """Raise `TypeError` if `f` is a tree, and `tree` a function, which is a leaf."""
    if callable(tree) and jtu.all_leaves([tree]) and not jtu.all_leaves([f]):
        raise TypeError(_FUNCTION_FIRST.format(call, an(type(f).__name__)))


def _flatten_up_to(tree: PyTree, other: PyTree, i: int) -> list[Any]:
    """The node of `other`, perhaps a subtree, at each leaf and hole of `tree`."""
    tree, other = same_modes(tree), same_modes(other)
    try:
        return structure_with_holes(tree).flatten_up_to(other)
    except (ValueError, TypeError, KeyError):
        return leaves_like(tree, other, f"`es.map`: tree number {i}")


_AT: Final = "`es.map` called the function with `{}`, which is `{}`."

_SWAPPED: Final = """`es.update`: {} has an array at `{}`, where the tree has `None`. \
The tree is the first argument, and the partials follow: `es.update(model, params)`. \
To join parts of a tree, write `eqx.combine(params, rest)`."""

_FUNCTION_FIRST: Final = """`{}` takes the function first, but was given \
{} first, and the function after it."""

_NO_FILTER: Final = """`es.map` needs `on=`, the filter for the leaves to map: \
`es.map(f, tree, on=es.Parameter)`. An average of all arrays, for example, would \
include counters and random keys. To map every array that has a kind, write \
`on=es.TreePart`."""

_HOLE: Final = """`es.map`: a tree of `rest` has `None` at `{}`, which `on` selects. \
Pass a tree that has this leaf, or a narrower filter `on=`."""
