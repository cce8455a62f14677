"""`equinox.nn.Shared` inside a scope: what it expands to is the scope's own modules.

Its call copies the tree that it holds, and a copy cannot be written. In a private copy
it is of a subclass, whose call copies only the way down to the tied nodes. All else is
the modules themselves; a tied module is one object in all its places.
"""

import functools as ft
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._tree._walk import copy_tree, modules_in, walk


@ft.cache
def _hole_type() -> Any:
    """What Equinox leaves in the place of a tied node; it has no public name."""
    return type(eqx.nn.Shared([0, 0], lambda x: x[1], lambda x: x[0]).pytree[1])


def _is_hole(x: Any) -> bool:
    return isinstance(x, _hole_type())


def _is_whole(x: Any) -> bool:
    return not any(map(_is_hole, jtu.tree_leaves(x, is_leaf=_is_hole)))


class OpenShared(eqx.nn.Shared):
    """An `eqx.nn.Shared` in a scope."""

    def __call__(self) -> Any:
        """The tree, with the tied nodes in all their places."""
        # A hole of its own for each place, so that `where` says which is which.
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
    """Open `node` if it is an `eqx.nn.Shared` with `es.Module`s in it."""
    if type(node) is eqx.nn.Shared and any(modules_in(node)):
        object.__setattr__(node, "__class__", OpenShared)


def closed_copy(tree: Any) -> Any:
    """The same leaves in new modules, which belong to no scope, as Equinox has them."""
    tree = copy_tree(tree)
    for visit in walk(tree):
        if isinstance(visit.node, OpenShared):
            object.__setattr__(visit.node, "__class__", eqx.nn.Shared)
    return tree
