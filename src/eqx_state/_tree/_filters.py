"""Filters: a kind, a callable `Part -> bool`, or one of the combinators below.

A filter is bound to a tree before it is asked (`bind`), since `under` has to look at
the whole tree once.
"""

import re
import typing
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._kinds._kinds import is_kind, Kind, kind_name, Parameter, TreePart
from .._typing import KeyPath, PyTree
from ._compare import is_hole, structure_with_holes
from ._parts import owners_of, Part
from ._walk import is_array, leaves, Visit


Filter: TypeAlias = Kind | Callable[[Part], Any]
Predicate: TypeAlias = Callable[[Part], bool]
Where: TypeAlias = Callable[[Any], Any]  # selects one node or several, as in `tree_at`


def bind(filter: Filter, tree: PyTree) -> Predicate:
    """The predicate that `filter` means for the parts of `tree`."""
    if is_kind(filter):
        return lambda part: (k := part.kind) is not None and issubclass(k, filter)
    if isinstance(filter, _Combinator):
        return filter.predicate(tree, *filter.args)
    is_annotation = typing.get_origin(filter) is not None  # `es.State[Array]`
    if is_annotation or isinstance(filter, type) or not callable(filter):
        raise TypeError(
            f"`{filter!r}` is not a filter. A filter is a kind (`es.Parameter`, your"
            " own `class Cache(es.State)`), a function `es.Part -> bool`, or made of"
            " filters by `es.any_of`, `es.all_of`, `es.not_`, `es.under`,"
            " `es.inside`, `es.path_matches`."
        )
    if any(filter is predicate for predicate in _OF_ARRAYS):
        name = f"eqx.{filter.__name__}"
        raise TypeError(
            f"`{name}` is not a filter of `es`: a filter is called with an `es.Part`,"
            f" the array together with its path and its kind, for which `{name}` is"
            " always false. Give it the array:\n\n"
            f"    es.filter(model, {name})                            # wrong\n"
            f"    es.filter(model, lambda part: {name}(part.value))   # right\n\n"
            "`es.trainable` selects the inexact parameters that are not frozen."
        )
    return lambda part: bool(filter(part))


# What users of Equinox reach for. As filters they would silently select nothing.
_OF_ARRAYS: Final = (
    eqx.is_array,
    eqx.is_array_like,
    eqx.is_inexact_array,
    eqx.is_inexact_array_like,
)


def bind_all(filters: tuple[Filter, ...], tree: PyTree) -> Predicate:
    """The predicate of `es.filter`: all of them; without any, whatever has a kind."""
    first, *rest = filters or (TreePart,)
    return bind(all_of(first, *rest) if rest else first, tree)


def bind_to_visits(
    filters: tuple[Filter, ...], tree: PyTree
) -> Callable[[Visit], bool]:
    """`bind_all`, for the leaves of a walk, of which some are not arrays."""
    predicate = bind_all(filters, tree)
    return lambda visit: is_array(visit.node) and predicate(Part(visit))


class _Combinator:
    """A filter made of others or of data: a hashable value, printed as it is written.

    `predicate` takes a tree and `args`; it has the public name after an underscore.
    """

    def __init__(self, predicate: Callable[..., Predicate], *args: Any):
        self.predicate, self.args = predicate, args

    def __call__(self, part: Part) -> bool:
        return self.predicate(None, *self.args)(part)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Combinator):
            return False
        return self.predicate is other.predicate and self.args == other.args

    def __hash__(self) -> int:
        return hash((self.predicate, self.args))

    def __repr__(self) -> str:
        args = "" if self.predicate is _trainable else _written(self.args)
        return f"es.{self.predicate.__name__[1:]}{args}"


def _written(arg: Any) -> str:
    """An argument of a combinator as users write it."""
    if isinstance(arg, tuple):
        return f"({', '.join(map(_written, arg))})"
    return kind_name(arg) if is_kind(arg) else getattr(arg, "__qualname__", repr(arg))


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
    special = {"*": ".*", "?": "."}
    pattern = "".join(special.get(c, re.escape(c)) for c in glob)
    compiled = re.compile(pattern, re.DOTALL)
    return lambda part: compiled.fullmatch(part.name) is not None


def _under(tree: PyTree, where: Where) -> Predicate:
    paths = paths_under(where, tree, repr(under(where)))
    return lambda part: part.path in paths


def _inside(tree: PyTree, cls: type | tuple[type, ...]) -> Predicate:
    return lambda part: any(issubclass(c, cls) for c in owners_of(part))


def _trainable(tree: PyTree) -> Predicate:
    is_parameter = bind(Parameter, tree)
    return lambda part: (
        not part.frozen
        and is_parameter(part)
        and jnp.issubdtype(part.value.dtype, jnp.inexact)
    )


trainable: Filter = _Combinator(_trainable)
"""The filter that selects what is trained: inexact parameters that are not frozen."""


class _Marker:
    """Stands for one leaf while `where` selects, so that equal leaves stay apart."""

    def __init__(self, path: KeyPath, counts: bool):
        self.path = path
        self.counts = counts


def paths_under(where: Where, tree: PyTree, what: str) -> frozenset[KeyPath]:
    """The key paths of the leaves in the node (or tuple of nodes) that `where` selects.

    Raises `ValueError`, which calls the selection `what`, if one of the nodes has no
    leaf of the tree.
    """
    # Holes count, too: `tree` may be what another filter has left of a model.
    visits = leaves(tree, is_leaf=is_hole)
    markers = [_Marker(v.path, v.node is None or is_array(v.node)) for v in visits]
    treedef, paths = structure_with_holes(tree), set[KeyPath]()
    for node in selected_nodes(where, jtu.tree_unflatten(treedef, markers)):
        found = [m for m in jtu.tree_leaves(node) if isinstance(m, _Marker)]
        if not any(marker.counts for marker in found):
            raise ValueError(
                f"`{what}` selects nothing: `where` must return a node of the tree (or"
                " a tuple of nodes) that holds arrays, as in `eqx.tree_at`: `lambda"
                " model: model.layers[0]`."
            )
        paths.update(marker.path for marker in found)
    return frozenset(paths)


def selected_nodes(where: Where, tree: PyTree) -> list[Any]:
    """What `where` selects: one node, or several in a tuple or a list."""
    selected = where(tree)
    if type(selected) not in (tuple, list) or not selected:
        return [selected]
    # A list may itself be a node of the tree. `is_leaf` is called with every node.
    in_tree: set[int] = set()
    jtu.tree_leaves(tree, is_leaf=lambda x: in_tree.add(id(x)))
    return [selected] if id(selected) in in_tree else list(selected)


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
    return _Combinator(_any_of, *filters)


def all_of(*filters: Filter) -> Filter:
    """The filter that selects what every one of `filters` selects.

    !!! example

        ```python
        import eqx_state as es

        biases = es.all_of(es.Parameter, es.path_matches("*.bias"))
        assert hash(biases) == hash(es.all_of(es.Parameter, es.path_matches("*.bias")))
        ```
    """
    return _Combinator(_all_of, *filters)


def not_(filter: Filter) -> Filter:
    """The filter that selects the arrays that `filter` does not select.

    !!! example

        ```python
        import eqx_state as es

        norm = es.filter(es.nn.BatchNorm(3), es.not_(es.Parameter))
        assert norm.weight is None and norm.mean is not None
        ```
    """
    return _Combinator(_not_, filter)


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
    return _Combinator(_under, where)


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
                f"`es.inside({_written(x)})`: a kind is a filter itself, without"
                " `es.inside`. Give a class of modules: `es.inside(eqx.nn.LayerNorm)`."
            )
        if typing.get_origin(x) is not None or not isinstance(x, type):
            raise TypeError(
                f"`es.inside({x!r})`: give a class of modules, or a tuple of them:"
                " `es.inside((eqx.nn.LayerNorm, es.nn.BatchNorm))`. What lies in one"
                " module of a model is `es.under(lambda model: model.layer)`."
            )
    return _Combinator(_inside, cls)


def path_matches(glob: str) -> Filter:
    """The filter that selects by name, such as `layers[0].norm.mean`.

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
    return _Combinator(_path_matches, glob)
