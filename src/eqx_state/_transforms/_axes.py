"""The axes of `es.vmap`: which axis each array is mapped over.

An array of a module in the function is mapped by its kind (`axes`), an array among the
arguments by its position (`in_axes`). Here both become a flat list with one axis for
each leaf, so that the rest of `es.vmap` does not know where an axis came from.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._kinds._kinds import is_kind, Rng
from .._tree._base import BaseModule, get_place
from .._tree._keys import is_key
from .._tree._rules import check_kinds, most_derived
from .._tree._walk import is_array, leaves, Visit
from ._lift import Lifted
from ._transform import Transform


class _Split:
    def __repr__(self) -> str:
        return "es.SPLIT"

    def __reduce__(self) -> str:
        return "SPLIT"  # so that copies and pickles are this very object


SPLIT: Final = _Split()
"""The axis of a PRNG key that is split, so that each lane gets its own key."""


class _Axis(NamedTuple):
    """An axis as a leaf of a tree, in which a bare `None` would not be a leaf."""

    value: Any
    entry: Any  # of `in_axes`: an axis, or a mapping of kinds


def axis_by_kind(visit: Visit, by_kind: Mapping[Any, Any]) -> Any:
    """The axis of an array by the user's mapping. By default only keys are mapped."""
    if not is_array(visit.node):
        return None
    kind = visit.kind
    if (key := most_derived(kind, by_kind)) is not None:
        axis = by_kind[key]
        if axis is SPLIT and not is_key(visit.node):
            raise ValueError(_NOT_A_KEY.format(visit.name))
        return axis
    split = kind is not None and issubclass(kind, Rng) and is_key(visit.node)
    return SPLIT if split else None


# Modules that only wrap values, and are not models of the user.
_CARRIERS: Final = (Transform, eqx.Partial)


def _in_module(visit: Visit) -> bool:
    owner = visit.context.owner
    return owner is not None and not issubclass(owner, _CARRIERS)


def function_axes(function: Any, by_kind: Mapping[Any, Any]) -> list[Any]:
    """The axis of each leaf of a function: arrays outside of a module are shared."""
    return [
        axis_by_kind(v, by_kind) if _in_module(v) else None for v in leaves(function)
    ]


def module_axes(module: BaseModule, by_kind: Mapping[Any, Any]) -> list[Any]:
    """The axis of each leaf of an owned module that the function reaches."""
    place = get_place(module)
    visits = leaves(module, place.path, place.context)
    return [axis_by_kind(visit, by_kind) for visit in visits]


def argument_axes(
    in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """For each leaf of `(args, kwargs)` its axis, and the entry of `in_axes` for it.

    Keyword arguments have axis 0.
    """
    if isinstance(in_axes, (tuple, list)):
        if len(in_axes) != len(args):
            raise ValueError(_ENTRIES.format(len(in_axes), len(args)))
        entries = tuple(in_axes)
    else:
        entries = (in_axes,) * len(args)
    axes = jtu.tree_map(
        _axes_of_argument,
        (entries, dict.fromkeys(kwargs, 0)),
        (args, kwargs),
        is_leaf=lambda x: x is None or _is_mapping_of_kinds(x),
    )
    axis_leaves = jtu.tree_leaves(axes, is_leaf=lambda x: isinstance(x, _Axis))
    return [x.value for x in axis_leaves], [x.entry for x in axis_leaves]


def _axes_of_argument(entry: Any, argument: Any) -> Any:
    visits = leaves(argument)
    if isinstance(entry, Mapping):
        check_kinds(entry, "`es.vmap(in_axes=...)`")
        axes = [_Axis(axis_by_kind(visit, entry), entry) for visit in visits]
    else:
        values = (entry if is_array(visit.node) else None for visit in visits)
        axes = [_Axis(value, entry) for value in values]
    return jtu.tree_unflatten(jtu.tree_structure(argument), axes)


def _is_mapping_of_kinds(x: Any) -> bool:
    # Unlike any other dict of axes, it is one entry of `in_axes`, and not a prefix.
    return isinstance(x, Mapping) and any(is_kind(k) or k is ... for k in x)


def check_matched(by_kind: Mapping[Any, Any], lifted: Lifted, function: Any) -> None:
    """Raise `ValueError` if no module in the function has a kind that `axes` names."""
    named = [key for key in by_kind if key is not ...]
    # `init` may have yet to make what is of that kind.
    if not named or lifted.is_initializing:
        return
    kinds = {visit.kind for visit in leaves(function) if _in_module(visit)}
    in_function = {id(module) for module in lifted.in_function}
    for root in lifted.roots:
        # A declaration further up in the model may decide the kinds in this root, which
        # the walk of the function above does not see.
        if id(root.module) in in_function:
            kinds |= {visit.kind for visit in root.leaves}
    for key in named:
        if not any(k and issubclass(k, key) for k in kinds):
            raise ValueError(_NO_SUCH_KIND.format(key.__name__))


_NOT_A_KEY: Final = """`es.vmap`: `axes` says `es.SPLIT` for `{}`, which is not a PRNG \
key. Only keys can be split; map an array over an axis, or share it: \
`axes={{es.State: 0}}`, `axes={{es.State: None}}`."""

_ENTRIES: Final = """`es.vmap`: `in_axes` has {} entries for {} positional arguments. \
Give one for each, or one integer for all."""

_NO_SUCH_KIND: Final = """`es.vmap`: `axes` names `{}`, and no array in the modules of \
the function or of its closure is of that kind. Modules among the arguments follow \
`in_axes`: `in_axes=({{es.Parameter: 0, ...: None}}, 0)`."""
