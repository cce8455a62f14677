"""Marks on written state, by which `es.audit` finds what no output depends on.

A mark is an identity in the jaxpr that stands at the new value of a written leaf, and
has the number of the write as its name. It passes through every transform. While no
audit runs, nothing is marked, so compiled programs contain no marks.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._compat import vary, varying_axes
from .._typing import Tree


NEW: Final = "eqx_state.written:"
OLD: Final = "eqx_state.overwritten:"
LEFT_OUT: Final = "eqx_state.left_out"
_INTERNAL: Final = ("jax", "equinox", "eqx_state")


class Mark(NamedTuple):
    """One write.

    - `name`: of what is written, in the model of its scope.
    - `site`: the user's frames, which are the same if a function is traced again.
    """

    name: str
    site: tuple[Any, ...]


class Marks:
    """The marks of one audit. A mark has its position in `found` as its number."""

    def __init__(self) -> None:
        self.found: list[Mark] = []
        # While JAX traces, it forgets equations whose outputs are freed.
        self.kept: list[Any] = []

    def put(self, new: Any, old: Any, name: str) -> Any:
        number = len(self.found)
        self.found.append(Mark(name, _site()))
        old = _named(old, f"{OLD}{number}")
        new = _named(new, f"{NEW}{number}")
        # Make the new value depend on the old one: a statistic that the next call
        # overwrites without a read is not lost.
        new = jtu.tree_map(_tied, new, old)
        self.kept.append(new)
        return new


MARKS: Final[ContextVar[Marks | None]] = ContextVar("marks", default=None)


def marked(new: Tree, old: Any, name: Callable[[], str]) -> Tree:
    """The new value of written state, marked if an audit runs.

    `new` and `old`, the value before: a leaf, or trees of arrays. A tree is lost only
    if no output depends on any of its arrays.
    """
    marks = MARKS.get()
    if marks is None or jtu.tree_structure(new) != jtu.tree_structure(old):
        return new
    is_array = [eqx.is_array(x) for x in jtu.tree_leaves((new, old))]
    return marks.put(new, old, name()) if is_array and all(is_array) else new


def left_out(model: Tree, selected: Any) -> Tree:
    """`model`, with a mark on each array that an optimizer leaves out on purpose.

    `selected`: the tree with holes for these.
    """
    if MARKS.get() is None:
        return model
    leaves, structure = jtu.tree_flatten(model)
    kept = structure.flatten_up_to(selected)
    new = [
        _named(x, LEFT_OUT) if k is None and eqx.is_array(x) else x
        for x, k in zip(leaves, kept, strict=True)
    ]
    return jtu.tree_unflatten(structure, new)


def _tied(new: Any, old: Any) -> Any:
    axes = varying_axes(new)
    if not axes >= varying_axes(old):
        return new
    return jax.lax.optimization_barrier((new, vary(old, axes)))[0]


def _site() -> tuple[Any, ...]:
    frame, found = sys._getframe(3), []
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _INTERNAL:
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _named(x: Any, name: str) -> Any:
    # Not at the top of the file: it would add an attribute to `jax` for all programs.
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(x, name)
