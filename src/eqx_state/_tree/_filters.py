"""The built-in filters: combinators, and `es.trainable`."""

import re
import typing
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._kinds._kinds import is_kind, Parameter
from .._typing import KeyPath, PyTree
from ._bind import bind, Combinator, Filter, Predicate, written
from ._compare import is_hole, structure_with_holes
from ._parts import dtype_of, owners_of
from ._stacks import layer_path, StandIn
from ._walk import is_array, leaves, Visit


Where: TypeAlias = Callable[[Any], Any]  # selects one node or several, as in `tree_at`


def _any_of(tree: PyTree, *filters: Filter) -> Predicate:
    predicates = [bind(f, tree) for f in filters]
    return lambda part: any(p(part) for p in predicates)


def _all_of(tree: PyTree, *filters: Filter) -> Predicate:
    predicates = [bind(f, tree) for f in filters]
    return lambda part: all(p(part) for p in predicates)


def _not_(tree: PyTree, filter: Filter) -> Predicate:
    predicate = bind(filter, tree)
    return lambda part: not predicate(part)


def _path_matches(tree: PyTree, glob: str) -> Predicate:
    pattern = compiled_glob(glob)
    return lambda part: pattern.fullmatch(part.name) is not None


def compiled_glob(glob: str) -> re.Pattern[str]:
    """A glob of names as a pattern for `fullmatch`, with a group for each `*`."""
    # Each star takes as little as it can: in `layers[*].*` the first one is an index.
    special = {"*": "(.*?)", "?": "."}
    pattern = "".join(special.get(c, re.escape(c)) for c in glob)
    return re.compile(pattern, re.DOTALL)


def _under(tree: PyTree, where: Where) -> Predicate:
    paths = _paths_under(where, tree, repr(under(where)))
    return lambda part: part.path in paths


def _inside(tree: PyTree, cls: type | tuple[type, ...]) -> Predicate:
    return lambda part: any(issubclass(c, cls) for c in owners_of(part))


def _trainable(tree: PyTree) -> Predicate:
    is_parameter = bind(Parameter, tree)
    return lambda part: (
        is_parameter(part)
        and jnp.issubdtype(dtype_of(part), jnp.inexact)
        and not part.frozen
    )


class _Trainable(Combinator):
    sees_layers = False

    def __repr__(self) -> str:
        return "es.trainable"


trainable: Filter = _Trainable(_trainable)
"""The filter that selects what is trained: inexact parameters that are not frozen."""


class _Marker(StandIn):
    """Stands for one leaf while `where` selects, so that equal leaves stay apart.

    `paths` are its key paths: for an array of a stack there is one for each layer, of
    which an index chooses some.
    """

    def __init__(self, counts: bool, paths: Any):
        self.counts = counts
        self.paths = paths

    def __getitem__(self, index: Any) -> "_Marker":
        # Without the dots a single path would come out as a tuple of keys.
        return _Marker(self.counts, self.paths[index, ...])


def _marker(visit: Visit) -> _Marker:
    paths = np.empty([n for _, n in visit.context.stacks], dtype=object)
    for index in np.ndindex(paths.shape):
        paths[index] = layer_path(visit.path, visit.context.stacks, index)
    return _Marker(visit.node is None or is_array(visit.node), paths)


def _paths_under(where: Where, tree: PyTree, what: str) -> frozenset[KeyPath]:
    """The key paths of the leaves in the node (or tuple of nodes) that `where` selects.

    For an array of a stack these are the paths of its layers. Raises `ValueError`,
    which calls the selection `what`, if one of the nodes has no leaf of the tree.
    """
    # Holes count, too: `tree` may be what another filter has left of a model.
    markers = [_marker(visit) for visit in leaves(tree, is_leaf=is_hole)]
    treedef, paths = structure_with_holes(tree), set[KeyPath]()
    for node in selected_nodes(where, jtu.tree_unflatten(treedef, markers)):
        found = [m for m in jtu.tree_leaves(node) if isinstance(m, _Marker)]
        if not any(marker.counts for marker in found):
            raise ValueError(
                f"`{what}` selects nothing: `where` must return a node of the tree (or"
                " a tuple of nodes) that holds arrays, as in `eqx.tree_at`: `lambda"
                " model: model.layers[0]`."
            )
        for marker in found:
            paths.update(marker.paths.flat)
    return frozenset(paths)


def selected_nodes(where: Where, tree: PyTree) -> list[Any]:
    """What `where` selects: one node, or several in a tuple or a list."""
    if not callable(where) or is_kind(where) or isinstance(where, Combinator):
        raise TypeError(_NOT_WHERE.format(written(where)))
    selected = where(tree)
    if type(selected) not in (tuple, list) or not selected:
        return [selected]
    # A list may itself be a node of the tree. `is_leaf` is called with every node.
    in_tree: set[int] = set()
    jtu.tree_leaves(tree, is_leaf=lambda x: in_tree.add(id(x)))
    return [selected] if id(selected) in in_tree else list(selected)


_NOT_WHERE: Final = """`where` is a function from the tree to one of its nodes, or to \
a tuple of them, as in `eqx.tree_at`, and `{0}` was given:

    es.freeze(model, es.path_matches("layers[0].*"))    # wrong: a filter
    es.freeze(model, lambda model: model.layers[0])     # right

To train without what a filter selects, leave it out where the parameters are used: \
`wrt=es.all_of(es.trainable, es.not_(filter))`."""


def any_of(*filters: Filter) -> Filter:
    """The filter that selects what at least one of `filters` selects.

    !!! example

        ```python
        import eqx_state as es

        assert (
            repr(es.any_of(es.Rng, es.BatchStat)) == "es.any_of(es.Rng, es.BatchStat)"
        )
        ```
    """
    return Combinator(_any_of, *filters)


def all_of(*filters: Filter) -> Filter:
    """The filter that selects what every one of `filters` selects.

    !!! example

        ```python
        import eqx_state as es

        biases = es.all_of(es.Parameter, es.path_matches("*.bias"))
        assert hash(biases) == hash(es.all_of(es.Parameter, es.path_matches("*.bias")))
        ```
    """
    return Combinator(_all_of, *filters)


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


def under(where: Callable[[Any], Any]) -> Filter:
    """The filter that selects what lies in a node of the tree.

    **Arguments:**

    - `where`: takes the tree, returns one of its nodes or a tuple of them, as in
        `equinox.tree_at`.

    **Raises:**

    - `ValueError`, when used on a tree: `where` returned no node, or one without
        arrays.

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


def inside(cls: type | tuple[type, ...]) -> Filter:
    """The filter that selects what lies in a module of a class, however deep.

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
        if is_kind(x):
            raise TypeError(
                f"`es.inside({written(x)})`: a kind is a filter itself, without"
                " `es.inside`. Give a class of modules: `es.inside(eqx.nn.LayerNorm)`."
            )
        if typing.get_origin(x) is not None or not isinstance(x, type):
            raise TypeError(
                f"`es.inside({x!r})`: give a class of modules, or a tuple of them:"
                " `es.inside((eqx.nn.LayerNorm, es.nn.BatchNorm))`. What lies in one"
                " module of a model is `es.under(lambda model: model.layer)`."
            )
    return Combinator(_inside, cls)


def path_matches(glob: str) -> Filter:
    """The filter that selects by name, such as `layers[0].norm.mean`.

    An array of an `es.nn.Stacked` has a name for each layer, as in a list of layers.

    **Arguments:**

    - `glob`: `*` stands for any characters, dots included, and `?` for one; all others,
        brackets too, stand for themselves.

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
    return Combinator(_path_matches, glob)
