"""Errors for a module that is used in two ways at once: an argument, and closed over.

The argument is a copy with its own values, and the closure refers to the object.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from .._state.copy import COVERED
from .roots import Leaf, Root


def check_written_once(leaves: Sequence[Leaf], written: Iterable[int]) -> None:
    """Raise `ValueError` if one state has two new values.

    For example, the function wrote it through an argument and through the closure.
    `written`: the slots that were written.
    """
    # Compare modules and not paths: after `layers[0], layers[1] = layers[1],
    # layers[0]`, the recorded paths are old.
    writers: dict[Any, Root] = {}
    for slot in written:
        visit, root, field, number = leaves[slot]
        place = id(field.outside), field.name, number
        if writers.setdefault(place, root) is not root:
            name = visit.name
            raise ValueError(_WRITTEN_TWICE.format(name, name.rpartition(".")[2]))


def check_not_covered(
    leaves: Sequence[Leaf], written: Iterable[int], originals: Iterable[Any]
) -> None:
    """Raise `ValueError` if a module was written, and a copy of it is returned.

    The caller would assign the copy, which does not have the write. `originals`: the
    modules of which copies are returned.
    """
    there = set(map(id, originals))
    for slot in written:
        visit, root, field, _ = leaves[slot]
        if not root.is_copy and id(field.outside) in there:
            raise ValueError(COVERED.format(visit.name))


def check_not_replaced(
    leaves: Sequence[Leaf], written: Iterable[int], is_new: Mapping[int, bool]
) -> None:
    """Raise `ValueError` if a module was written of which the call returns a new one.

    `is_new`: for each leaf that has a successor in a new module, by its slot, whether
    the call wrote the successor.
    """
    for slot in written:
        if slot in is_new:
            name = leaves[slot].visit.name
            text = _WRITTEN_TWICE if is_new[slot] else COVERED
            raise ValueError(text.format(name, name.rpartition(".")[2]))


_WRITTEN_TWICE: Final = """`{0}` is reached twice, and written in both ways: through \
an argument of the transform, and through the closure or a second argument. An \
argument is a copy with its own values (a slice, a lane, the differentiated values), \
so one of the two writes would be lost. Write it in one way:

    lambda layer, x: self.layer(x) + layer(x)    # wrong: both write `{1}`
    lambda layer, x: layer(x)                    # right"""
