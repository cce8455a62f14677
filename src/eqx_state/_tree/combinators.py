"""The filters of `es` that are not kinds: functions that return a `Combinator`."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .._kinds.kinds import is_kind, Parameter
from .._typing import KeyPath, PyTree
from .compare import is_hole, structure_with_holes
from .filters import (
    bind,
    Combinator,
    conjunction,
    Filter,
    filter_text,
    filters_in,
    Predicate,
)
from .parts import is_inexact, owners_of
from .walk import is_array, leaves
from .where import is_marker, marker, selected_nodes, Where


class _Trainable(Combinator):
    sees_layers = False

    def __repr__(self) -> str:
        return "es.trainable"


def _trainable(tree: PyTree) -> Predicate:
    is_parameter = bind(Parameter, tree)
    return lambda part: is_parameter(part) and is_inexact(part) and not part.frozen


trainable: Filter = _Trainable(_trainable)
"""The filter for trainable arrays: inexact parameters that are not frozen."""


def any_of(*filters: Filter) -> Filter:
    """The filter that selects the arrays that at least one of `filters` selects.

    !!! example

        ```python
        import eqx_state as es

        assert (
            repr(es.any_of(es.Rng, es.BatchStat)) == "es.any_of(es.Rng, es.BatchStat)"
        )
        ```
    """
    return Combinator(_any_of, *filters)


def _any_of(tree: PyTree, *filters: Filter) -> Predicate:
    predicates = [bind(f, tree) for f in filters]
    return lambda part: any(p(part) for p in predicates)


def all_of(*filters: Filter) -> Filter:
    """The filter that selects the arrays that all `filters` select.

    !!! example

        ```python
        import eqx_state as es

        biases = es.all_of(es.Parameter, es.path_matches("*.bias"))
        assert hash(biases) == hash(es.all_of(es.Parameter, es.path_matches("*.bias")))
        ```
    """
    return Combinator(_all_of, *filters)


def _all_of(tree: PyTree, *filters: Filter) -> Predicate:
    return conjunction(filters, tree)


def not_(filter: Filter) -> Filter:
    """The filter that selects the arrays that `filter` does not select.

    !!! example

        ```python
        import eqx_state as es

        norm = es.filter(es.nn.BatchNorm(3), es.not_(es.Parameter))
        assert norm.weight is None and norm.mean is not None
        ```
    """
    return Combinator(_not_, filter)


def _not_(tree: PyTree, filter: Filter) -> Predicate:
    predicate = bind(filter, tree)
    return lambda part: not predicate(part)


def inside(cls: type | tuple[type, ...]) -> Filter:
    """The filter that selects all arrays inside modules of a class, at any depth.

    **Arguments:**

    - `cls`: a class of modules, subclasses included, or a tuple of classes.

    **Raises:**

    - `TypeError`: `cls` is not a class, or is a kind.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        a, b = jr.split(jr.key(0))
        model = eqx.nn.Sequential([eqx.nn.LayerNorm(2), eqx.nn.Linear(2, 3, key=a)])
        decayed = es.mask(model, es.trainable, es.not_(es.inside(eqx.nn.LayerNorm)))
        assert not decayed.layers[0].weight
        assert decayed.layers[1].weight
        ```
    """
    for x in cls if isinstance(cls, tuple) else (cls,):
        if is_kind(x) or not isinstance(x, type):
            raise TypeError(_NOT_A_CLASS.format(filter_text(x)))
    return Combinator(_inside, cls)


def _inside(tree: PyTree, cls: type | tuple[type, ...]) -> Predicate:
    return lambda part: any(issubclass(c, cls) for c in owners_of(part))


def path_matches(glob: str) -> Filter:
    """The filter that selects arrays by name, such as `layers[0].norm.mean`.

    An array of an `es.nn.Stacked` has a name for each layer, as in a list of layers.

    **Arguments:**

    - `glob`: `*` matches any characters, including dots, and `?` matches one. All other
        characters, including brackets, match themselves.

    **Raises:**

    - `ValueError`: the glob contains a `\\`, `^`, `$` or `(`, as a regular expression
        does. For a name with such a character, write `?` in its place.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        mlp = eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0))
        biases = es.filter(mlp, es.path_matches("layers[?].bias"))
        assert biases.layers[0].weight is None
        assert biases.layers[0].bias is mlp.layers[0].bias
        ```
    """
    if found := [c for c in "\\^$(" if c in glob]:
        raise ValueError(_NO_GLOB.format(glob, found[0]))
    return Combinator(_path_matches, glob)


def _path_matches(tree: PyTree, glob: str) -> Predicate:
    pattern = compiled_glob(glob)
    return lambda part: pattern.fullmatch(part.name) is not None


def globs_in(filter: Filter) -> list[str]:
    """The globs of all `es.path_matches` in a filter."""
    found = [x for x in filters_in(filter) if isinstance(x, Combinator)]
    return [glob for x in found if x.predicate is _path_matches for glob in x.args]


def useless_globs(filter: Filter, names: Sequence[str]) -> list[str]:
    """The globs that match none of these names, and so make a part of `filter` useless.

    In `es.any_of`, some globs may match nothing, if others do.
    """
    if not isinstance(filter, Combinator):
        return []
    if filter.predicate is _path_matches:
        matches = compiled_glob(filter.args[0]).fullmatch
        return [] if any(map(matches, names)) else [*filter.args]
    useless = [useless_globs(x, names) for x in filter.args]
    may_fail = filter.predicate is _any_of and not all(useless)
    return [] if may_fail else [*itertools.chain(*useless)]


def compiled_glob(glob: str) -> re.Pattern[str]:
    """A glob of names as a pattern for `fullmatch`, with a group for each `*`."""
    # Each star matches as little as possible: in `layers[*].*` the first star is an
    # index.
    special = {"*": "(.*?)", "?": "."}
    pattern = "".join(special.get(c, re.escape(c)) for c in glob)
    return re.compile(pattern, re.DOTALL)


def under(where: Callable[[Any], Any]) -> Filter:
    """The filter that selects all arrays in a node of the tree.

    **Arguments:**

    - `where`: takes the tree, returns one of its nodes or a tuple of them, as in
        `equinox.tree_at`.

    **Raises:**

    - `ValueError`, when the filter is applied to a tree: `where` did not return a node,
        or the node contains no arrays.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        mlp = eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0))
        head = es.filter(mlp, es.under(lambda m: m.layers[-1]))
        assert head.layers[0].weight is None
        assert head.layers[1].weight is mlp.layers[1].weight
        ```
    """
    return Combinator(_under, where)


def _under(tree: PyTree, where: Where) -> Predicate:
    # Include holes: `tree` may be the result of `es.filter`.
    visits = leaves(tree, is_leaf=is_hole)
    marked = [marker(v) if v.node is None or is_array(v.node) else v for v in visits]
    paths = set[KeyPath]()
    for node in selected_nodes(
        where, jtu.tree_unflatten(structure_with_holes(tree), marked)
    ):
        found = [x for x in jtu.tree_leaves(node) if is_marker(x)]
        if not found:
            raise ValueError(_NOTHING_UNDER.format(filter_text(where)))
        paths.update(path for x in found for path in x.flat)
    return lambda part: part.path in paths


_NO_GLOB: Final = """`es.path_matches("{}")` is a glob of the whole name, and not a \
regular expression, but contains a `{}`. `*` matches any characters, `?` matches one, \
and all others match themselves: write `es.path_matches("*.bias")` for all names that \
end in `.bias`. If a name contains this character, write `?` in its place."""

_NOT_A_CLASS: Final = """`es.inside({})`: pass a class of modules, or a tuple of them. \
A kind is already a filter. To select one module, use `es.under(lambda model: \
model.layer)`."""

_NOTHING_UNDER: Final = """`es.under({})` selects nothing: `where` must return a node \
of the tree that contains arrays, or a tuple of such nodes, as in `eqx.tree_at`."""
