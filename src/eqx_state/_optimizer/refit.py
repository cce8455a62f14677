"""The state of an optimizer for a model that has changed: `Optimizer.refit`.

Names decide what belongs together, as in files. The name of a moment is its place in
the state without the group, and the name of its parameter, layer by layer in a stack.
Anything else in the state, such as a count, is named by its path, and in the state of
`es.per_layer` by the number of its layer, too: a layer that is appended starts at 0.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu

from .._tree.context import Stacks
from .._tree.followers import AbstractPerParameter, parameters_of
from .._tree.parts import Index, indices, is_split, layer_path, Part, slice_at
from .._tree.walk import leaves, name_of
from .._typing import KeyPath
from .layers import PerLayerState


class _Entry(NamedTuple):
    """An array in the state of an optimizer; in a stack, that of one layer."""

    key: Hashable
    shape: tuple[int, ...]  # of the parameter that it belongs to
    whole: Any  # the array, or the stacked array
    layer: Index  # its index; empty outside of a stack

    @property
    def value(self) -> Any:
        return slice_at(self.whole, self.layer) if self.layer else self.whole


def kept(
    old: AbstractPerParameter, new: AbstractPerParameter, group: int | None
) -> list[Any]:
    """The leaves of the optimizer `new`, with those of `old` that have the same names.

    `group`: where the paths of moments contain the group; `None` without groups.
    """
    known = {x.key: x for entries in _entries(old, group) for x in entries}
    return [_joined(known, entries) for entries in _entries(new, group)]


def _joined(known: dict[Hashable, _Entry], entries: list[_Entry]) -> Any:
    """A leaf made of known values, and of its own where there is none."""
    whole, olds = entries[0].whole, [_found(known, x) for x in entries]
    sources = {id(x.whole) for x in olds}
    is_same = [x.layer for x in olds] == [x.layer for x in entries]
    if len(sources) == 1 and is_same and olds[0].whole.shape == whole.shape:
        return _like(olds[0].whole, whole)  # no stack gained or lost a layer
    values = [_like(x.value, whole) for x in olds]
    return jnp.stack(values).reshape(whole.shape)


def _stacks_of_states(optimizer: AbstractPerParameter) -> dict[KeyPath, Stacks]:
    """For the path of each state of `es.per_layer`, the stacks whose axes it has."""
    stacks = {}
    for visit in leaves(optimizer._recorded_model()):
        if above := visit.context.stacks:
            stacks[name_of(visit.path[: above[-1][0]])] = above
    is_state = lambda x: isinstance(x, PerLayerState)  # noqa: E731
    nodes = jtu.tree_leaves_with_path(optimizer, is_leaf=is_state)
    return {
        (*path, jtu.GetAttrKey("stacks"), jtu.DictKey(name)): stacks[name]
        for path, state in nodes
        if is_state(state)
        for name in state.stacks
    }


def _found(known: dict[Hashable, _Entry], new: _Entry) -> _Entry:
    """The known entry of the same name and shapes, or `new` itself."""
    old = known.get(new.key, new)
    shapes = [x.whole.shape[len(x.layer) :] for x in (old, new)]
    is_same = old.shape == new.shape and shapes[0] == shapes[1]
    is_complex = [jnp.iscomplexobj(x.whole) for x in (old, new)]
    return old if is_same and is_complex[0] == is_complex[1] else new


def _like(x: Any, new: Any) -> Any:
    return x if x.dtype == new.dtype else x.astype(new.dtype)


def _entries(optimizer: AbstractPerParameter, group: int | None) -> list[list[_Entry]]:
    """The entries of each leaf, in the order of flattening."""
    parameters = parameters_of(optimizer)
    per_layer = _stacks_of_states(optimizer)
    found: list[list[_Entry]] = []
    for visit in leaves(optimizer):
        if visit.path not in parameters:
            prefixes = (visit.path[:n] for n in range(len(visit.path)))
            stacks = next((per_layer[x] for x in prefixes if x in per_layer), ())
            each = indices(stacks) or [()]
            found.append([_Entry((visit.path, i), (), visit.node, i) for i in each])
            continue
        parameter = parameters[visit.path].parameter
        where = visit.path[: len(visit.path) - len(parameter.path)]
        if group is not None:
            where = where[:group] + where[group + 1 :]
        part, shape = Part(visit), parameter.node.shape
        stacks = parameter.context.stacks if is_split(part) else ()
        entries = []
        for i in indices(stacks) or [()]:
            name = name_of(layer_path(parameter.path, stacks, i))
            entries.append(_Entry((where, name), shape[len(i) :], visit.node, i))
        found.append(entries)
    return found
