"""Outputs of several traces of one call, of which one runs: they have to be alike.

JAX traces both branches of a `cond`, and of a custom derivative the function and its
forward rule, and wants the same treedef from all. So what has no place in a treedef
that is compared leaves the trace as a note.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import equinox as eqx

from .._state._scope import Sown
from .._state._sow import in_words
from .._tree._compare import difference_of_leaves
from ._arguments import is_traced
from ._lift import Ran
from ._root import Slot


class Note(NamedTuple):
    """The facts about one trace that are needed outside of it."""

    static: Any  # the part of the output that is not arrays
    written: frozenset[Slot]
    sown: list[dict[Any, int]]  # for each scope and key, how many values were kept


class Alike:
    """The traces of one call.

    `sown`, `called` and `static` are the messages if they differ: in a name that was
    sown, in a module whose output is captured, in a leaf of the output.
    """

    def __init__(self, *, sown: str, called: str, static: str):
        self.messages = sown, called, static
        self.notes: list[Note] = []

    def take(self, ran: Ran, out: Any) -> tuple[Any, list[Sown]]:
        """The arrays of an output, and what was sown, as in the first trace."""
        out, static = eqx.partition(out, is_traced(out))
        counts = [{key: len(x) for key, x in s.items()} for s in ran.sown]
        self.notes.append(Note(static, frozenset(ran.written), counts))
        first = self.notes[0].sown
        self._check_sown(first, counts)
        name = difference_of_leaves(self.notes[0].static, static)
        if name is not None:
            raise TypeError(self.messages[2].format(name or "the output"))
        # In one order, which is part of the structure of an output.
        sown = zip(first, ran.sown, strict=True)
        return out, [OrderedDict((key, s[key]) for key in keys) for keys, s in sown]

    def _check_sown(
        self, sown: list[dict[Any, int]], other: list[dict[Any, int]]
    ) -> None:
        for first, last in zip(sown, other, strict=True):
            if first.items() != last.items():
                key, _ = min(first.items() ^ last.items(), key=str)
                raise ValueError(in_words(key, *self.messages[:2]))

    @property
    def written(self) -> frozenset[Slot]:
        """All that was written in some trace."""
        return frozenset().union(*(note.written for note in self.notes))

    @property
    def static(self) -> Any:
        return self.notes[0].static
