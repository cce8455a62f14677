"""What an `es.Module` remembers about freezing nodes that have no flag of their own.

Plain Equinox layers and arrays cannot carry a flag, so the nearest `es.Module` above
them has *marks*: paths from it, and whether the node there is frozen. They are static
data, and so part of the treedef: equal for the same nodes, in whatever order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu


# One key of a path as it is printed, and how many elements the sequence has that it
# leads into: with another number of them, an index may mean another element.
Step = tuple[str, int]
Steps = tuple[Step, ...]


class Mark(NamedTuple):
    """Whether the node at this path is frozen, whatever is above it."""

    path: Steps
    frozen: bool


Marks = tuple[Mark, ...]


def step_to(node: Any, key: Any) -> Step:
    """The step from `node` to its child under `key`."""
    is_index = isinstance(key, jtu.SequenceKey) and isinstance(node, (list, tuple))
    return str(key), len(node) if is_index else 0


def name_of_steps(path: Sequence[Step]) -> str:
    """The path as it is printed."""
    return "".join(name for name, _ in path)


def names_of(marks: Marks) -> tuple[str, ...]:
    """What the marks say, in words."""
    return tuple(
        f"{'frozen' if frozen else 'not frozen'}: {name_of_steps(path)}"
        for path, frozen in marks
    )


def marks_below(marks: Marks, step: Step) -> tuple[bool | None, Marks]:
    """What the marks say about the child at `step`, and the marks that lead below it.

    `None` where they say nothing about the child itself.
    """
    ended, rest = None, []
    for path, frozen in marks:
        if path[0] == step:
            if len(path) == 1:
                ended = frozen
            else:
                rest.append(Mark(path[1:], frozen))
    return ended, tuple(rest)


def merged(outer: Marks, inner: Marks) -> Marks:
    """The marks from further out together with a module's own, which count first."""
    return _canonical({**dict(outer), **dict(inner)})


def without(marks: Marks, path: Steps) -> Marks:
    """The marks that are neither at this path nor below it."""
    # Lengths of sequences do not matter: marks of another length are out of date.
    names = [name for name, _ in path]
    return tuple(m for m in marks if [name for name, _ in m.path[: len(path)]] != names)


def with_mark(marks: Marks, path: Steps, frozen: bool) -> Marks:
    """`marks` and one more."""
    return _canonical({**dict(marks), path: frozen})


def _canonical(marks: dict[Steps, bool]) -> Marks:
    return tuple(Mark(path, marks[path]) for path in sorted(marks))
