"""`equinox.nn.Shared` inside a scope: its call returns the scope's own modules.

`eqx.nn.Shared` stores a tied node once, leaves placeholders ("holes" here) at its other
positions, and on each call builds the full tree with `eqx.tree_at`. That copies every
module in it. A scope does not own the copies, so they could not be written. Instances
in a private copy therefore change their class to `ScopedShared`, which reuses the
modules, and change it back wherever a tree leaves the private copy.
"""

from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._compat import shared_node
from .._tree.base import OnlyInScope
from .._tree.walk import all_modules, copy_tree
from .._typing import Tree


class ScopedShared(eqx.nn.Shared, OnlyInScope):
    """An `eqx.nn.Shared` in a scope.

    Its call rebuilds only the containers and modules that lead to a hole. A tied module
    is one object at all its positions, and can be written through each of them.
    """

    def __call__(self) -> Any:
        """The tree, with the tied nodes at all their positions."""
        # `where` returns nodes, but not their positions. First put a new hole at each
        # position, whose `id` identifies it. In both `tree_map`s a node without a hole
        # below is a leaf, so it is not copied.
        tree = jtu.tree_map(
            lambda x: shared_node()() if _is_hole(x) else x,
            self.pytree,
            is_leaf=_is_whole,
        )
        holes, nodes = self.where(tree), self.get(self.pytree)
        if _is_hole(holes):
            holes, nodes = [holes], [nodes]
        node_of = {id(hole): node for hole, node in zip(holes, nodes, strict=True)}
        return jtu.tree_map(lambda x: node_of.get(id(x), x), tree, is_leaf=_is_whole)

    def _eqx_state_leave(self) -> None:
        object.__setattr__(self, "__class__", eqx.nn.Shared)


def _is_hole(x: Any) -> bool:
    return isinstance(x, shared_node())


def _is_whole(x: Any) -> bool:
    return not any(map(_is_hole, jtu.tree_leaves(x, is_leaf=_is_hole)))


def unscoped(tree: Tree) -> Tree:
    """`tree` with `eqx.nn.Shared` for each `ScopedShared`; a copy, if there is one."""
    if not any(map(_is_scoped, all_modules(tree))):
        return tree
    tree = copy_tree(tree)
    for node in filter(_is_scoped, all_modules(tree)):
        node._eqx_state_leave()
    return tree


def _is_scoped(node: Any) -> bool:
    return type(node) is ScopedShared
