"""What a filter is, and what it means for one tree.

A filter is bound to a tree before it is asked (`bind`), since `es.under` has to look at
the whole tree once.
"""

import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import equinox as eqx

from .._kinds._kinds import is_kind, Kind, kind_name, TreePart
from .._typing import PyTree
from ._parts import Part
from ._stacks import layers_of
from ._walk import is_array, kinds_of, leaves, Visit


Filter: TypeAlias = Kind | Callable[[Part], Any]
Predicate: TypeAlias = Callable[[Part], bool]


def bind(filter: Filter, tree: PyTree) -> Predicate:
    """The predicate that `filter` means for the parts of `tree`."""
    check_filter(filter)
    if is_kind(filter):
        return lambda part: (k := part.kind) is not None and issubclass(k, filter)
    if isinstance(filter, Combinator):
        predicate = filter.predicate(tree, *filter.args)
        return _of_layers(predicate, filter) if filter.sees_layers else predicate
    return _of_layers(lambda part: bool(filter(part)), filter)


def check_filter(filter: Any) -> None:
    """Raise `TypeError` for what is not a filter."""
    if is_kind(filter) or isinstance(filter, Combinator):
        return
    is_annotation = typing.get_origin(filter) is not None  # `es.State[Array]`
    if is_annotation or isinstance(filter, type) or not callable(filter):
        hint = ""
        if isinstance(filter, str):
            hint = (
                f" The array of this name is `es.path_matches({filter!r})`, and a"
                f" module's arrays are `es.path_matches({filter + '.*'!r})`."
            )
        elif isinstance(filter, type) and issubclass(filter, eqx.Module):
            hint = f" What lies in such modules is `es.inside({filter.__name__})`."
        raise TypeError(
            f"`{filter!r}` is not a filter. A filter is a kind (`es.Parameter`, your"
            " own `class Cache(es.State)`), a function `es.Part -> bool`, or made of"
            " filters by `es.any_of`, `es.all_of`, `es.not_`, `es.under`,"
            " `es.inside`, `es.path_matches`." + hint
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


def _of_layers(predicate: Predicate, filter: Filter) -> Predicate:
    """A predicate that is asked of an array of a stack once for each layer."""

    def ask(part: Part) -> bool:
        if not (layers := layers_of(part, alike=True)):
            return predicate(part)
        answers = [predicate(layer) for layer in layers]
        if len(set(answers)) > 1:
            yes, no = (layers[answers.index(answer)].name for answer in (True, False))
            raise ValueError(_DISAGREE.format(part.name, written(filter), yes, no))
        return answers[0]

    return ask


_DISAGREE: Final = """`{0}` is one array for all layers of an `es.nn.Stacked`, and the \
filter `{1}` selects `{2}` but not `{3}`. One array is selected as a whole or not at \
all. Select it in all layers, as by `*` in place of the number:

    es.path_matches("blocks[3].w")    # wrong
    es.path_matches("blocks[*].w")    # right

Layers that are treated differently belong in a list, or in stacks of their own: \
`(stacked[:k], stacked[k:])`."""


# What users of Equinox reach for. As filters they would silently select nothing.
_OF_ARRAYS: Final = (
    eqx.is_array,
    eqx.is_array_like,
    eqx.is_inexact_array,
    eqx.is_inexact_array_like,
)


def bind_all(filters: tuple[Filter, ...], tree: PyTree) -> Predicate:
    """The predicate of `es.filter`: all of them; without any, whatever has a kind."""
    predicates = [bind(f, tree) for f in filters or (TreePart,)]
    if len(predicates) == 1:
        return predicates[0]
    return lambda part: all(p(part) for p in predicates)


def bind_to_visits(
    filters: tuple[Filter, ...], tree: PyTree
) -> Callable[[Visit], bool]:
    """`bind_all`, for the leaves of a walk, of which some are not arrays."""
    if len(filters) == 1 and is_kind(filters[0]):
        (kind,) = filters
        return lambda visit: visit.is_a(kind)
    predicate = bind_all(filters, tree)
    return lambda visit: is_array(visit.node) and predicate(Part(visit))


def first_matches(
    alternatives: Sequence[tuple[Filter, ...]], given: list[Any], tree: PyTree
) -> list[int]:
    """For each leaf, the number of the first alternative that selects it, or -1.

    - `alternatives`: each selects what satisfies all of its filters, as in `es.filter`.
    - `given`: the leaves of `tree`, as `jax.tree.leaves` gives them.
    """
    if all(map(is_kind, itertools.chain(*alternatives))):  # as most often
        kinds = kinds_of(given, tree)
        numbers = {kind: _first_kind(kind, alternatives) for kind in {*kinds}}
        return [numbers[kind] for kind in kinds]
    predicates = [*enumerate(bind_to_visits(fs, tree) for fs in alternatives)]
    found: list[int] = []
    for visit in leaves(tree):
        for i, is_selected in predicates:
            if is_selected(visit):
                found.append(i)
                break
        else:
            found.append(-1)
    return found


def _first_kind(kind: Kind | None, alternatives: Sequence[tuple[Any, ...]]) -> int:
    for i, filters in enumerate(alternatives):
        if kind and all(issubclass(kind, f) for f in filters or (TreePart,)):
            return i
    return -1


class Combinator:
    """A filter made of others or of data: a hashable value, printed as it is written.

    `predicate` takes a tree and `args`; it has the public name after an underscore.
    """

    # Whether it may tell the layers of a stack apart.
    sees_layers: ClassVar[bool] = True

    def __init__(self, predicate: Callable[..., Predicate], *args: Any):
        self.predicate, self.args = self._key = predicate, args

    def __call__(self, part: Part) -> bool:
        return self.predicate(None, *self.args)(part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Combinator) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"es.{self.predicate.__name__[1:]}{written(self.args)}"


def written(arg: Any) -> str:
    """An argument of a combinator as users write it."""
    if isinstance(arg, tuple):
        return f"({', '.join(map(written, arg))})"
    return kind_name(arg) if is_kind(arg) else getattr(arg, "__qualname__", repr(arg))
