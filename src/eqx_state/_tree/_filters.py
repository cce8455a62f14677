"""Filters: a kind, a callable `Part -> bool`, or one of the combinators below.

A filter is bound to a tree before it is asked (`bind`), since `under` has to look at
the whole tree once. All combinators are hashable values that print as they are written.
"""

import abc
import re
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._kinds._kinds import is_kind, kind_name, Parameter, TreePart
from .._typing import KeyPath
from ._compare import is_hole
from ._parts import owners_of, Part
from ._walk import flatten_with_path, is_array


Filter: TypeAlias = type[TreePart[Any]] | Callable[[Part], Any]
Predicate: TypeAlias = Callable[[Part], bool]


def bind(filter: Filter, tree: Any) -> Predicate:
    """The predicate that `filter` means for the parts of `tree`."""
    if is_kind(filter):
        return lambda part: (k := part.kind) is not None and issubclass(k, filter)
    if isinstance(filter, _Combinator):
        return filter.bind(tree)
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


# What users of Equinox reach for, and what would select nothing.
_OF_ARRAYS: Final = (
    eqx.is_array,
    eqx.is_array_like,
    eqx.is_inexact_array,
    eqx.is_inexact_array_like,
)


def bind_all(filters: tuple[Filter, ...], tree: Any) -> Predicate:
    """The predicate of `es.filter`: all of them; without any, whatever has a kind."""
    first, *rest = filters or (TreePart,)
    return bind(_AllOf(first, *rest) if rest else first, tree)


def _show(arg: Any) -> str:
    if is_kind(arg):
        return kind_name(arg)
    return getattr(arg, "__qualname__", repr(arg))


class _Combinator(abc.ABC):
    """A filter that is made of others or of data: a hashable value."""

    name: ClassVar[str]

    def __init__(self, *args: Any):
        self.args = args

    @abc.abstractmethod
    def bind(self, tree: Any) -> Predicate:
        """The predicate that this means for the parts of `tree`."""

    def __call__(self, part: Part) -> bool:
        return self.bind(None)(part)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.args == other.args

    def __hash__(self) -> int:
        return hash((type(self), self.args))

    def __repr__(self) -> str:
        return f"es.{self.name}({', '.join(map(_show, self.args))})"


class _AnyOf(_Combinator):
    name = "any_of"

    def bind(self, tree: Any) -> Predicate:
        predicates = [bind(f, tree) for f in self.args]
        return lambda part: any(p(part) for p in predicates)


class _AllOf(_Combinator):
    name = "all_of"

    def bind(self, tree: Any) -> Predicate:
        predicates = [bind(f, tree) for f in self.args]
        return lambda part: all(p(part) for p in predicates)


class _Not(_Combinator):
    name = "not_"

    def bind(self, tree: Any) -> Predicate:
        predicate = bind(self.args[0], tree)
        return lambda part: not predicate(part)


class _PathMatches(_Combinator):
    name = "path_matches"

    def bind(self, tree: Any) -> Predicate:
        special = {"*": ".*", "?": "."}
        pattern = "".join(special.get(c, re.escape(c)) for c in self.args[0])
        compiled = re.compile(pattern, re.DOTALL)
        return lambda part: compiled.fullmatch(part.name) is not None


class _Under(_Combinator):
    name = "under"

    def bind(self, tree: Any) -> Predicate:
        paths = paths_under(self.args[0], tree, repr(self))
        return lambda part: part.path in paths


class _Inside(_Combinator):
    name = "inside"

    def bind(self, tree: Any) -> Predicate:
        return lambda part: any(issubclass(c, self.args[0]) for c in owners_of(part))

    def __repr__(self) -> str:
        if isinstance(self.args[0], tuple):
            return f"es.inside(({', '.join(map(_show, self.args[0]))}))"
        return super().__repr__()


class _Trainable(_Combinator):
    def bind(self, tree: Any) -> Predicate:
        is_parameter = bind(Parameter, tree)
        return lambda part: (
            not part.frozen
            and is_parameter(part)
            and jnp.issubdtype(part.value.dtype, jnp.inexact)
        )

    def __repr__(self) -> str:
        return "es.trainable"


trainable: Filter = _Trainable()
"""The filter that selects what is trained: inexact parameters that are not frozen."""


class _Marker:
    """Stands for one leaf while `where` selects, so that equal leaves stay apart."""

    def __init__(self, path: KeyPath, counts: bool):
        self.path = path
        self.counts = counts


def paths_under(
    where: Callable[[Any], Any], tree: Any, what: str
) -> frozenset[KeyPath]:
    """The key paths of the leaves in the node (or tuple of nodes) that `where` selects.

    Raises `ValueError`, which calls the selection `what`, if one of the nodes has no
    leaf of the tree.
    """
    # Holes count, too: `tree` may be what another filter has left of a model.
    entries, treedef = flatten_with_path(tree, is_hole)
    markers = [_Marker(path, x is None or is_array(x)) for path, x in entries]
    paths: set[KeyPath] = set()
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


def selected_nodes(where: Callable[[Any], Any], tree: Any) -> list[Any]:
    """What `where` selects: one node, or several in a tuple or a list."""
    selected = where(tree)
    if type(selected) not in (tuple, list) or not selected:
        return [selected]
    # A list may itself be a node of the tree.
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
    return _AnyOf(*filters)


def all_of(*filters: Filter) -> Filter:
    """The filter that selects what every one of `filters` selects.

    !!! example

        ```python
        import eqx_state as es

        biases = es.all_of(es.Parameter, es.path_matches("*.bias"))
        assert hash(biases) == hash(es.all_of(es.Parameter, es.path_matches("*.bias")))
        ```
    """
    return _AllOf(*filters)


def not_(filter: Filter) -> Filter:
    """The filter that selects the arrays that `filter` does not select.

    !!! example

        ```python
        import eqx_state as es

        norm = es.filter(es.nn.BatchNorm(3), es.not_(es.Parameter))
        assert norm.weight is None and norm.mean is not None
        ```
    """
    return _Not(filter)


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
    return _Under(where)


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
                f"`es.inside({_show(x)})`: a kind is a filter itself, without"
                " `es.inside`. Give a class of modules: `es.inside(eqx.nn.LayerNorm)`."
            )
        if typing.get_origin(x) is not None or not isinstance(x, type):
            raise TypeError(
                f"`es.inside({x!r})`: give a class of modules, or a tuple of them:"
                " `es.inside((eqx.nn.LayerNorm, es.nn.BatchNorm))`. What lies in one"
                " module of a model is `es.under(lambda model: model.layer)`."
            )
    return _Inside(cls)


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
    return _PathMatches(glob)
