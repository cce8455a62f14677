"""The state of an optimizer for a model that has changed: `Optimizer.refit`.

Names decide what belongs together, as in files. The name of a moment is its place in
the state without the group, and the name of its parameter, layer by layer in a stack.
The state of `es.per_layer` has parts, one for each stack and one for all other arrays.
The name of a moment does not contain the part, so a list and a stack have equal names.

Anything else in the state, such as a count, is named by its path, its part, and the
number of its layer. If the part is new, another one lends it the value. A layer that is
appended starts with a count of 0, and only hyperparameters are lent to it.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu

from .._tree.context import Stacks
from .._tree.followers import AbstractPerParameter, parameters_of
from .._tree.keys import is_key
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
    part: KeyPath = ()  # of the state of `es.per_layer` that contains it
    path: KeyPath = ()  # without the part; empty for a moment

    @property
    def value(self) -> Any:
        return slice_at(self.whole, self.layer) if self.layer else self.whole

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for two entries if one may have the value of the other."""
        shape = self.whole.shape[len(self.layer) :]
        return self.shape, shape, jnp.iscomplexobj(self.whole)


def kept(
    old: AbstractPerParameter, new: AbstractPerParameter, group: int | None
) -> list[Any]:
    """The leaves of the optimizer `new`, with those of `old` that have the same names.

    `group`: where the paths of moments contain the group; `None` without groups.
    """
    known: dict[Hashable, _Entry] = {}
    lenders: dict[KeyPath, list[_Entry]] = defaultdict(list)
    for entries in _entries(old, group):
        known |= {x.key: x for x in entries}
        if (first := entries[0]).path:
            lenders[first.path].append(first)
    found = []
    for entries in _entries(new, group):
        first = entries[0]
        if first.path and any(x.key not in known for x in entries):
            whole = _lent(lenders[first.path], first)
            entries = [x._replace(whole=whole) for x in entries]
        found.append(_joined(known, entries))
    return found


def _lent(lenders: list[_Entry], new: _Entry) -> Any:
    """The array of `new`, with the value of the same array in another part.

    Values that differ from layer to layer are neither lent nor replaced, such as the
    learning rates of a function of the layer.
    """
    is_hyperparameter = jtu.GetAttrKey("hyperparams") in new.path
    lenders = [x for x in lenders if x.form == new.form]
    if any(x.part == new.part for x in lenders):  # layers were appended
        lenders = [x for x in lenders if x.part == new.part and is_hyperparameter]
    # A larger array may belong to parameters. The layers must not share a key.
    if is_key(new.whole) or not (is_hyperparameter or new.value.shape == ()):
        return new.whole
    value = new.value
    for x in reversed(lenders):
        value = jnp.where(_is_uniform(x), _like(x.value, value), value)
    return jnp.where(_is_uniform(new), value, new.whole)


def _is_uniform(x: _Entry) -> Any:
    """Whether all layers have the same value; traced under `jax.jit`."""
    return (x.whole == x.value).all()


def _joined(known: dict[Hashable, _Entry], entries: list[_Entry]) -> Any:
    """A leaf made of known values, and of its own where there is none."""
    whole, olds = entries[0].whole, [_found(known, x) for x in entries]
    sources = {id(x.whole) for x in olds}
    is_same = [x.layer for x in olds] == [x.layer for x in entries]
    if len(sources) == 1 and is_same and olds[0].whole.shape == whole.shape:
        return _like(olds[0].whole, whole)  # no stack gained or lost a layer
    values = [_like(x.value, whole) for x in olds]
    return jnp.stack(values).reshape(whole.shape)


def _parts_of_states(
    optimizer: AbstractPerParameter,
) -> dict[KeyPath, tuple[KeyPath, Stacks]]:
    """Map the path of each part of each state of `es.per_layer`.

    To the path of the state, and the stacks whose axes the part has.
    """
    stacks = {}
    for visit in leaves(optimizer._recorded_model()):
        if above := visit.context.stacks:
            stacks[name_of(visit.path[: above[-1][0]])] = above
    is_state = lambda x: isinstance(x, PerLayerState)  # noqa: E731
    found: dict[KeyPath, tuple[KeyPath, Stacks]] = {}
    for path, state in jtu.tree_leaves_with_path(optimizer, is_leaf=is_state):
        if is_state(state):
            found[*path, jtu.GetAttrKey("others")] = path, ()
            for name in state.stacks:
                part = *path, jtu.GetAttrKey("stacks"), jtu.DictKey(name)
                found[part] = path, stacks[name]
    return found


def _found(known: dict[Hashable, _Entry], new: _Entry) -> _Entry:
    """The known entry of the same name and shapes, or `new` itself."""
    old = known.get(new.key, new)
    return old if old.form == new.form else new


def _like(x: Any, new: Any) -> Any:
    return x if x.dtype == new.dtype else x.astype(new.dtype)


def _entries(optimizer: AbstractPerParameter, group: int | None) -> list[list[_Entry]]:
    """The entries of each leaf, in the order of flattening."""
    parameters, parts = parameters_of(optimizer), _parts_of_states(optimizer)
    found: list[list[_Entry]] = []
    for visit in leaves(optimizer):
        prefixes = (visit.path[:n] for n in range(len(visit.path)))
        part = next((x for x in prefixes if x in parts), ())
        state, stacks = parts.get(part, ((), ()))
        path, node = (*state, *visit.path[len(part) :]), visit.node
        if visit.path not in parameters:
            each = indices(stacks)
            found.append(
                [_Entry((part, path, i), (), node, i, part, path) for i in each]
            )
            continue
        parameter = parameters[visit.path].parameter
        where = path[: len(path) - len(parameter.path)]
        if group is not None:
            where = where[:group] + where[group + 1 :]
        stacks = parameter.context.stacks if is_split(Part(visit)) else ()
        shape, entries = parameter.node.shape, []
        for i in indices(stacks):
            name = name_of(layer_path(parameter.path, stacks, i))
            entries.append(_Entry((where, name), shape[len(i) :], node, i))
        found.append(entries)
    return found
