"""Codecs: values that are represented differently inside a scope and outside.

A scope runs a function on a private copy of a model. Some values are replaced there: a
NumPy array by a JAX array, an `eqx.nn.Shared` by a class whose modules can be written,
a float32 parameter by its bfloat16 cast. Each such rule is a `Codec`. The code that
copies, writes and collects calls the codecs of its scope, and knows none of them.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .._compat import shared_node
from .._tree.base import OnlyInScope
from .._tree.dtypes import as_jax, fits_jax, is_numeric
from .._tree.walk import (
    all_modules,
    copy_tree,
    is_array,
    is_numpy,
    modules_in,
    name_of,
    Visit,
)
from .._typing import KeyPath, PyTree, Tree
from .observe import Observer, tag, untagged


class Codec:
    """One rule. Each method is the identity unless a subclass overrides it.

    The codecs of a scope also serve the scopes of the transforms inside it.
    """

    # What distinguishes two calls whose arguments are equal outside the scope.
    cache_key: Hashable = None

    def enter(self, model: PyTree, values: list[Any]) -> list[Any]:
        """The leaves of the private copy, given those of the model."""
        return values

    def adopt(self, visits: Sequence[Visit]) -> bool:
        """Change modules of the private copy in place; whether a treedef changed."""
        return False

    def write(self, old: Any, new: Any, path: KeyPath) -> Any:
        """The value to store when `new` replaces the leaf `old` (`None`: no leaf)."""
        return new

    def restore(self, new: Any, given: Any) -> Any:
        """The value outside of a written leaf that replaces `given` of the caller."""
        return new

    def close(self, tree: Tree) -> Tree:
        """The new model and the output of the call, as they leave the scope."""
        return tree


class Numpy(Codec):
    """A NumPy array or scalar is a JAX array inside.

    `self.n += 1` would change a NumPy array in place, and transforms would treat it as
    a constant. Arrays of strings, and integers that JAX's dtype cannot hold, remain
    NumPy arrays. They are read-only, because the caller has the same array.
    """

    def enter(self, model: PyTree, values: list[Any]) -> list[Any]:
        return [_as_inside(x) if is_numpy(x) else x for x in values]

    def write(self, old: Any, new: Any, path: KeyPath) -> Any:
        if not is_numpy(new) or not is_numeric(new.dtype):
            return new
        if is_array(old) and not fits_jax(new):
            return new  # the next check names `old`, which cannot hold it
        return as_jax(new, name_of(path))


def _as_inside(x: Any) -> Any:
    if fits_jax(x):
        return as_jax(x, "")
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x


class Tags(Codec):
    """Modules that an observer has selected are instances of an observed class."""

    def __init__(self, observer: Observer):
        self.observer = observer

    def adopt(self, visits: Sequence[Visit]) -> bool:
        for visit in visits:
            if not visit.is_leaf:
                tag(visit.node, visit.name, self.observer)
        return True

    def close(self, tree: Tree) -> Tree:
        return untagged(tree, self.observer.key)


class ScopedShared(eqx.nn.Shared, OnlyInScope):
    """An `eqx.nn.Shared` in a scope, whose call returns the scope's own modules.

    `eqx.nn.Shared` stores a tied node once, leaves placeholders ("holes" here) at its
    other positions, and on each call builds the full tree with `eqx.tree_at`. That
    copies every module in it. A scope does not own the copies, so they could not be
    written. This call rebuilds only the containers and modules that lead to a hole. A
    tied module is one object at all its positions, and can be written through each of
    them.
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


class Shared(Codec):
    """An `eqx.nn.Shared` is a `ScopedShared` inside."""

    def __init__(self) -> None:
        self.is_used = False

    def adopt(self, visits: Sequence[Visit]) -> bool:
        nodes = [visit.node for visit in visits if not visit.is_leaf]
        shared = [x for x in nodes if type(x) is eqx.nn.Shared and any(modules_in(x))]
        for node in shared:
            object.__setattr__(node, "__class__", ScopedShared)
        # In a nested scope, the outer scope has changed the class.
        self.is_used |= any(type(x) is ScopedShared for x in nodes)
        return bool(shared)

    def close(self, tree: Tree) -> Tree:
        return snapshot(tree) if self.is_used else tree


def snapshot(tree: Tree) -> Tree:
    """A copy that no scope owns, with the classes that modules have outside."""
    tree = copy_tree(tree)
    for module in all_modules(tree):
        if isinstance(module, ScopedShared):
            module._eqx_state_leave()
    return tree
