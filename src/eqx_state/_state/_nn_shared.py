"""`equinox.nn.Shared` inside a scope: its call returns the scope's own modules.

`eqx.nn.Shared` stores a tied node once, leaves placeholders ("holes" here) in its other
places, and on each call builds the full tree with `eqx.tree_at`. That copies every
module in it, and a copy does not belong to the scope, so it could not be written.

So the instances in a private copy change their class to `OpenShared`. Its call rebuilds
only the containers and modules that lead to a hole, and uses everything else as it is:
a tied module is one object in all its places, and can be written through any of them.
When the scope is left, `closed_copy` changes the class back, so that no one outside
ever sees the subclass, and the treedef is the old one.
"""

import functools as ft
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._tree._walk import copy_tree, modules_in, walk


@ft.cache
def _hole_type() -> Any:
    """The class of the placeholder for a tied node, which Equinox does not export."""
    return type(eqx.nn.Shared("tied", lambda x: x, lambda x: x).pytree)


def _is_hole(x: Any) -> bool:
    return isinstance(x, _hole_type())


def _is_whole(x: Any) -> bool:
    return not any(map(_is_hole, jtu.tree_leaves(x, is_leaf=_is_hole)))


class OpenShared(eqx.nn.Shared):
    """An `eqx.nn.Shared` in a scope."""

    def __call__(self) -> Any:
        """The tree, with the tied nodes in all their places."""
        # This is surprisingly subtle: `where` returns nodes, and does not say where in
        # the tree it found them. So first each place gets a new hole, whose `id` then
        # identifies the place. In both `tree_map`s the nodes without a hole below are
        # leaves, and so are not copied.
        tree = jtu.tree_map(
            lambda x: _hole_type()() if _is_hole(x) else x,
            self.pytree,
            is_leaf=_is_whole,
        )
        holes, nodes = self.where(tree), self.get(self.pytree)
        if _is_hole(holes):
            holes, nodes = [holes], [nodes]
        at = {id(hole): node for hole, node in zip(holes, nodes, strict=True)}
        return jtu.tree_map(lambda x: at.get(id(x), x), tree, is_leaf=_is_whole)


def open_shared(node: Any) -> None:
    """Make `node` an `OpenShared` if it is an `eqx.nn.Shared` with `es.Module`s."""
    if type(node) is eqx.nn.Shared and any(modules_in(node)):
        object.__setattr__(node, "__class__", OpenShared)


def closed_copy(tree: Any) -> Any:
    """A copy that no scope owns, with Equinox's class in place of `OpenShared`."""
    tree = copy_tree(tree)
    for visit in walk(tree):
        if isinstance(visit.node, OpenShared):
            object.__setattr__(visit.node, "__class__", eqx.nn.Shared)
    return tree
