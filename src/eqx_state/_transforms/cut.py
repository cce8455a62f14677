"""Cutting a tree into the arrays that JAX traces, and the rest.

The arrays remain a tree, with `None` elsewhere: JAX names its leaves in errors, and
`out_axes` and cotangents are trees like it. The rest is one static value.
"""

from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._errors import show
from .._state.scope import is_owned
from .._tree.compare import difference_of_leaves
from .._tree.dtypes import is_traceable
from .._tree.walk import is_array, map_leaves, Visit


@jtu.register_static
class Rest:
    """The leaves of a tree that are not traced, among them the owned modules.

    It can leave a trace, as a part of the treedef of the output. Two are equal if they
    have the same structure and equal leaves of equal types.
    """

    def __init__(self, tree: Any):
        self.tree = tree

    def join(self, arrays: Any) -> Any:
        """The whole tree."""
        return eqx.combine(arrays, self.tree, is_leaf=is_owned)

    def difference(self, other: "Rest") -> str | None:
        """The name of the first leaf that differs, or `None`."""
        return difference_of_leaves(self.tree, other.tree)

    def __eq__(self, other: object) -> bool:
        if type(other) is not Rest:
            return NotImplemented
        structures = jtu.tree_structure(self.tree), jtu.tree_structure(other.tree)
        return structures[0] == structures[1] and self.difference(other) is None

    def __repr__(self) -> str:
        return show(self.tree)  # in JAX's errors about structures

    def __hash__(self) -> int:
        # Not of the leaves, which need not be hashable.
        return hash(jtu.tree_structure(self.tree).num_leaves)


def cut(tree: Any, which: Any = None) -> tuple[Any, Rest]:
    """The leaves of a tree that JAX traces, and the rest.

    `which`: for each leaf, whether it is one of them; by default `which_traced(tree)`.
    """
    which = which_traced(tree) if which is None else which
    arrays, rest = eqx.partition(tree, which, is_leaf=is_owned)
    return arrays, Rest(rest)


def which_traced(tree: Any) -> Any:
    """For each leaf of an argument or of an output, whether JAX would trace it.

    Owned modules count as leaves that are not traced, because they are lifted.
    """
    if isinstance(tree, jax.Array):
        return True
    return map_leaves(_is_traceable, tree, is_leaf=is_owned)


def _is_traceable(visit: Visit) -> bool:
    """Whether a leaf is an array, or a number outside a module."""
    if is_array(visit.node):
        return is_traceable(visit.node)
    is_number = visit.context.owner is None and eqx.is_array_like(visit.node)
    return is_number and not is_owned(visit.node)
