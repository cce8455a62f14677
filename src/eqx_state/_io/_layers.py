"""Stacks in files and state dicts, where each layer has arrays and names of its own."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax

from .._tree._parts import Part
from .._tree._stacks import Index, is_split, LayerPart, layers_of, stacks_of
from .._typing import KeyPath
from ._stored import as_one


Named: TypeAlias = dict[str, tuple[int, Part]]


def in_order(parts: Iterable[Part | None]) -> list[tuple[int, Part]]:
    """Every array with its index among the leaves, in the order of a list of layers.

    An array of a stack is there once for each layer, unless it lacks the stack's axis:
    then it belongs to all layers together, and has the name that it has in the tree.
    """
    found: list[tuple[tuple[int, ...], int, Part]] = []
    first: dict[KeyPath, int] = {}  # the index of the first leaf of each stack
    for i, part in enumerate(parts):
        if part is None:
            continue
        stacks, layers = stacks_of(part), layers_of(part) if is_split(part) else []
        for layer in layers:
            pairs = [
                (first.setdefault(part.path[: at + 1], i), k)
                for (at, _), k in zip(stacks, layer.index, strict=True)
            ]
            found.append(((*(n for pair in pairs for n in pair), i), i, layer))
        if not layers:
            found.append(((i,), i, part))
    return [(i, part) for _, i, part in sorted(found, key=lambda x: x[0])]


def whole_of(part: Part) -> Part:
    """The array of a stack that an array of a layer belongs to; else the array."""
    return part.whole if isinstance(part, LayerPart) else part


def shape_of(part: Part) -> tuple[int, ...]:
    """The shape of an array, which need not be sliced for it."""
    skipped = len(part.index) if isinstance(part, LayerPart) else 0
    return whole_of(part).value.shape[skipped:]


def by_leaf(places: Named, values: Mapping[str, Any]) -> dict[int, Any]:
    """One value for each leaf, of those in the places.

    A stack keeps the arrays of the layers that are not among them.
    """
    found: dict[int, Any] = {}
    for i, (whole, given) in _stacks(places).items():
        each = [
            values[given[layer.index]] if layer.index in given else layer.value
            for layer in layers_of(whole)
        ]
        found[i] = as_one(each, tuple(n for _, n in stacks_of(whole)))
    alone = {name: i for name, (i, _) in places.items() if i not in found}
    return found | {i: values[name] for name, i in alone.items()}


def lacking(places: Named) -> list[str]:
    """The layers without a place of abstract stacks, where other layers have one."""
    return [
        layer.name
        for whole, given in _stacks(places).values()
        if isinstance(whole.value, jax.ShapeDtypeStruct)
        for layer in layers_of(whole)
        if layer.index not in given
    ]


def _stacks(places: Named) -> dict[int, tuple[Part, dict[Index, str]]]:
    """By leaf, each array of a stack, and the name of each layer that has a place."""
    found: dict[int, tuple[Part, dict[Index, str]]] = {}
    for name, (i, part) in places.items():
        if isinstance(part, LayerPart):
            found.setdefault(i, (part.whole, {}))[1][part.index] = name
    return found
