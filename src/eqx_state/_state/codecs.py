"""Codecs: values that are represented differently inside a scope and outside.

A scope runs a function on a private copy of a model. Some values are replaced there: a
NumPy array by a JAX array, an `eqx.nn.Shared` by a class whose modules can be written,
a float32 parameter by its bfloat16 cast. Each such rule is a `Codec`. The code that
copies, writes and collects calls the codecs of its scope, and knows none of them.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat import shared_node
from .._tree.dtypes import as_jax, holds, is_numeric
from .._tree.observe import Observer, tag, untagged
from .._tree.walk import copy_tree, is_array, is_numpy, modules_in, name_of, Visit, walk
from .._typing import KeyPath, PyTree, Tree


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
        if is_array(old) and not _fits(new):
            return new  # the next check names `old`, which cannot hold it
        return as_jax(new, name_of(path))


def _fits(x: Any) -> bool:
    return is_numeric(x.dtype) and holds(jnp.result_type(x), x)


def _as_inside(x: Any) -> Any:
    if _fits(x):
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


class Shared(Codec):
    """An `eqx.nn.Shared` returns modules that the scope owns.

    `eqx.nn.Shared` stores a tied node once, leaves placeholders ("holes" here) at its
    other positions, and on each call builds the full tree with `eqx.tree_at`. That
    copies every module in it. The scope does not own the copies, so they could not be
    written. A `ScopedShared` reuses the modules.

    In a nested scope the class belongs to the outer scope, and does not change back.
    """

    def __init__(self) -> None:
        self.has_adopted = False

    def adopt(self, visits: Sequence[Visit]) -> bool:
        found = [v.node for v in visits if type(v.node) is eqx.nn.Shared]
        found = [node for node in found if any(modules_in(node))]
        for node in found:
            object.__setattr__(node, "__class__", ScopedShared)
        self.has_adopted |= bool(found)
        return bool(found)

    def close(self, tree: Tree) -> Tree:
        if not self.has_adopted:
            return tree
        tree = copy_tree(tree)
        for visit in walk(tree):
            if isinstance(visit.node, ScopedShared):
                object.__setattr__(visit.node, "__class__", eqx.nn.Shared)
        return tree


class ScopedShared(eqx.nn.Shared):
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
        at = {id(hole): node for hole, node in zip(holes, nodes, strict=True)}
        return jtu.tree_map(lambda x: at.get(id(x), x), tree, is_leaf=_is_whole)


def _is_hole(x: Any) -> bool:
    return isinstance(x, shared_node())


def _is_whole(x: Any) -> bool:
    return not any(map(_is_hole, jtu.tree_leaves(x, is_leaf=_is_hole)))
