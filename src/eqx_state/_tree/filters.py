"""Filters: how to check them, and how to bind them to a tree."""

import itertools
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

import equinox as eqx
import jax.tree_util as jtu

from .._errors import an
from .._kinds.kinds import is_kind, Kind, kind_name, TreePart
from .._typing import PyTree
from .parts import layers_of, Part
from .walk import is_array, kinds_of, leaves, Visit


Filter: TypeAlias = Kind | Callable[[Part], Any]
Predicate: TypeAlias = Callable[[Part], bool]
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
    return conjunction(filters or (TreePart,), tree)


def conjunction(filters: Iterable[Filter], tree: PyTree) -> Predicate:
    """Whether a part satisfies all filters; true if there are none."""
    predicates = [bind(f, tree) for f in filters]
    return lambda part: all(p(part) for p in predicates)


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


def filters_in(filter: Filter) -> list[Any]:
    """The filters of which `filter` is built, at any depth, and `filter` itself."""
    args = filter.args if isinstance(filter, Combinator) else ()
    return [filter, *(x for arg in args for x in filters_in(arg))]


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
