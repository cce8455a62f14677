"""Filters: how to check them and bind them to a tree, and the built-in filters."""

import itertools
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .._errors import an, public_name
from .._kinds.kinds import is_kind, Kind, kind_name, Parameter, TreePart
from .._typing import KeyPath, PyTree
from .base import is_eqx_module
from .compare import is_hole, structure_with_holes
from .parts import is_inexact, layers_of, owners_of, Part, paths_of
from .walk import is_array, kinds_of, leaves, Visit


Filter: TypeAlias = Kind | Callable[[Part], Any]
Predicate: TypeAlias = Callable[[Part], bool]
Where: TypeAlias = Callable[[Any], Any]  # selects one node or several, as in `tree_at`


TO_TRAIN: Final = """To train a part of the model: `wrt=es.all_of(es.trainable, \
es.under(lambda model: model.head))`."""


def check_filter(filter: Any, advice: str | None = None) -> None:
    """Raise `TypeError` if `filter` is not a filter. `advice` ends the message."""
    # Reject `eqx.is_array` and the like, which would silently select nothing: a part is
    # not an array.
    if getattr(filter, "__module__", None) == eqx.is_array.__module__:
        raise TypeError(_OF_AN_ARRAY.format(f"eqx.{filter.__name__}"))
    # Reject `eqx.nn.Linear` and `es.State[Array]`, although they are callable.
    is_type = isinstance(filter, type) or typing.get_origin(filter) is not None
    values = [] if is_type else jtu.tree_leaves(filter)
    # Also reject a mask or a model, which may be callable.
    is_mask = {*map(type, values)} == {bool} != {type(filter)}
    is_tree = is_mask or any(map(is_array, values))
    if not is_kind(filter) and (is_type or is_tree or not callable(filter)):
        given = type(filter).__qualname__ if is_tree else repr(filter)
        cure = advice or (_TREE_FIRST if is_tree else _COMBINE)
        raise TypeError(_NOT_A_FILTER.format(given, cure))


def bind(filter: Filter, tree: PyTree) -> Predicate:
    """`filter` as a predicate on the parts of `tree`."""
    # This takes the tree, because `es.under` must look at the whole tree once.
    check_filter(filter)
    if is_kind(filter):
        return lambda part: (k := part.kind) is not None and issubclass(k, filter)
    if isinstance(filter, Combinator):
        predicate = filter.predicate(tree, *filter.args)
        return _of_layers(predicate, filter) if filter.sees_layers else predicate
    return _of_layers(lambda part: bool(filter(part)), filter)


def _of_layers(predicate: Predicate, filter: Filter) -> Predicate:
    """A predicate that evaluates `predicate` once for each layer of a stacked array."""

    def ask(part: Part) -> bool:
        if not (layers := layers_of(part, alike=True)):
            return predicate(part)
        answers = [predicate(layer) for layer in layers]
        if len(set(answers)) > 1:
            yes, no = (layers[answers.index(answer)].name for answer in (True, False))
            raise ValueError(_DISAGREE.format(part.name, filter_text(filter), yes, no))
        return answers[0]

    return ask


def bind_all(filters: tuple[Filter, ...], tree: PyTree) -> Predicate:
    """The predicate of `es.filter`. Without filters: whether the array has a kind."""
    return _all_of(tree, *(filters or (TreePart,)))


def bind_to_visits(
    filters: tuple[Filter, ...], tree: PyTree
) -> Callable[[Visit], bool]:
    """`bind_all` for the leaves of a walk, which need not be arrays."""
    predicate = bind_all(filters, tree)
    return lambda visit: is_array(visit.node) and predicate(Part(visit))


def first_matches(
    alternatives: Sequence[tuple[Filter, ...]], given: list[Any], tree: PyTree
) -> list[int]:
    """For each leaf, the index of the first alternative that selects it, or -1.

    - `alternatives`: each one selects the arrays that satisfy all of its filters.
    - `given`: the leaves of `tree`, from `jax.tree.leaves`.
    """
    if all(map(is_kind, itertools.chain(*alternatives))):  # no `Part`s are needed
        kinds = kinds_of(given, tree)
        numbers = {kind: _first_kind(kind, alternatives) for kind in {*kinds}}
        return [numbers[kind] for kind in kinds]
    predicates = [bind_to_visits(filters, tree) for filters in alternatives]
    return [_first(matches(visit) for matches in predicates) for visit in leaves(tree)]


def _first_kind(kind: Kind | None, alternatives: Sequence[tuple[Any, ...]]) -> int:
    return _first(
        kind is not None and all(issubclass(kind, f) for f in filters or (TreePart,))
        for filters in alternatives
    )


def _first(answers: Iterable[bool]) -> int:
    """The index of the first answer that is true, or -1."""
    return next((i for i, answer in enumerate(answers) if answer), -1)


class Combinator:
    """A filter built from other filters or from data. Hashable; prints as source code.

    `predicate` takes a tree and `args`. Its name is an underscore and the public name,
    which `repr` shows.
    """

    # Whether the predicate may differ between the layers of a stack.
    sees_layers: ClassVar[bool] = True

    def __init__(self, predicate: Callable[..., Predicate], *args: Any):
        self.predicate, self.args = self._key = predicate, args

    def __call__(self, part: Part) -> bool:
        if not isinstance(part, Part):
            raise TypeError(_ON_AN_ARRAY.format(self, an(type(part).__name__)))
        return self.predicate(None, *self.args)(part)

    def _reject(self, other: object = None) -> NoReturn:
        raise TypeError(_NO_OPERATORS)

    __or__ = __ror__ = __and__ = __rand__ = __invert__ = _reject

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Combinator) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"es.{self.predicate.__name__[1:]}{filter_text(self.args)}"


def filter_text(arg: Any) -> str:
    """The source code of an argument of a combinator, or of a key of rules."""
    if arg is ...:
        return "..."
    if isinstance(arg, tuple):
        return f"({', '.join(map(filter_text, arg))})"
    return kind_name(arg) if is_kind(arg) else getattr(arg, "__qualname__", repr(arg))


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
    predicates = [bind(f, tree) for f in filters]
    return lambda part: all(p(part) for p in predicates)


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


def filters_in(filter: Filter) -> list[Any]:
    """The filters of which `filter` is built, at any depth, and `filter` itself."""
    args = filter.args if isinstance(filter, Combinator) else ()
    return [filter, *(x for arg in args for x in filters_in(arg))]


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


def marker(visit: Visit) -> Any:
    """A unique sentinel that replaces an array while a `where` selects nodes.

    A NumPy array of paths: that of the array, or in a stack one for each layer. It can
    be sliced, because `where` may select layers: `lambda m: m.blocks[0]`.
    """
    sizes = [n for _, n in visit.context.stacks]
    return np.fromiter(paths_of(visit), dtype=object).reshape(sizes)


def is_marker(x: Any) -> bool:
    """Whether `x` is a sentinel of `marker`."""
    return isinstance(x, np.ndarray) and x.dtype == object


def selected_nodes(where: Where, tree: PyTree) -> list[Any]:
    """The nodes that `where` selects: one, or several in tuples and lists."""
    # Reject a layer, which may be callable, but accept a module that wraps a function.
    is_layer = is_eqx_module(where) and not hasattr(where, "__wrapped__")
    given = type(where) if is_layer or not callable(where) else where
    if isinstance(where, type) and not is_kind(where):
        raise TypeError(_CLASS_AS_WHERE.format(public_name(where)))
    if given is not where or is_kind(where) or isinstance(where, Combinator):
        raise TypeError(_NOT_WHERE.format(filter_text(given)))
    try:
        selected = where(tree)
    except AttributeError as error:
        error.add_note(_IN_WHERE.format(type(tree).__name__))
        raise
    # A list may itself be a node of the tree. `is_leaf` is called with every node.
    in_tree: set[int] = set()
    jtu.tree_leaves(tree, is_leaf=lambda x: in_tree.add(id(x)))

    def is_node(x: Any) -> bool:
        return type(x) not in (tuple, list) or not x or id(x) in in_tree

    return jtu.tree_leaves(selected, is_leaf=is_node)


_NO_GLOB: Final = """`es.path_matches("{}")` is a glob of the whole name, and not a \
regular expression, but contains a `{}`. `*` matches any characters, `?` matches one, \
and all others match themselves: write `es.path_matches("*.bias")` for all names that \
end in `.bias`. If a name contains this character, write `?` in its place."""

_NOT_A_FILTER: Final = """`{}` is not a filter. A filter is a kind (`es.Parameter`), \
a function `es.Part -> bool`, or the result of `es.path_matches(name)`, \
`es.inside(module_class)` or a similar function of `es`. {}"""

_TREE_FIRST: Final = """The tree comes first: `es.filter(model, es.Parameter)`."""

_COMBINE: Final = """To combine filters, write `es.any_of(a, b)` instead of `a | b`, \
`es.all_of(a, b)` instead of `a & b`, and `es.not_(a)` instead of `not a`."""

_NO_OPERATORS: Final = f"Filters have no operators. {_COMBINE}"

_ON_AN_ARRAY: Final = """The filter `{0}` takes an `es.Part`, but was called with \
{1}. JAX and Equinox call a filter with the array alone, which has no path and no \
kind. Write `es.filter(model, {0})`, or pass Equinox a mask: `eqx.partition(model, \
es.mask(model, {0}))`."""

_OF_AN_ARRAY: Final = """`{0}` is not a filter of `es`: a filter takes an `es.Part`, \
not its array. Write `lambda part: {0}(part.value)`, or `es.trainable` for \
everything that is trained."""

_DISAGREE: Final = """`{0}` is one array for all layers of an `es.nn.Stacked`, and the \
filter `{1}` selects `{2}` but not `{3}`. Select it in all layers, \
`es.path_matches("blocks[*].w")`, or store layers that need different treatment in a \
list or in separate stacks: `(stacked[:k], stacked[k:])`."""

_NOT_A_CLASS: Final = """`es.inside({})`: pass a class of modules, or a tuple of them. \
A kind is already a filter. To select one module, use `es.under(lambda model: \
model.layer)`."""

_NOTHING_UNDER: Final = """`es.under({})` selects nothing: `where` must return a node \
of the tree that contains arrays, or a tuple of such nodes, as in `eqx.tree_at`."""

_NOT_WHERE: Final = """`where` must be a function from the tree to one of its nodes, \
or to a tuple of them, as in `eqx.tree_at`, but `{}` was given. Write `lambda model: \
model.layers[0]`. To exclude the selection of a filter from training, do so where you \
use the parameters: `wrt=es.all_of(es.trainable, es.not_(filter))`."""

_CLASS_AS_WHERE: Final = """`where` must be a function from the tree to its nodes, but \
the class `{0}` was given. The filter for all modules of a class is `es.inside({0})`. \
To freeze them: `model.freeze(lambda model: [x for _, x in es.modules(model) if \
isinstance(x, {0})])`."""

_IN_WHERE: Final = """The error is in `where`. It is called with the whole tree, here \
`{}`, and must return one of its nodes or a tuple of them."""
