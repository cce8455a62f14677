"""One level of a pytree: the children of a node, each with a key of its own."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.tree_util as jtu

from .._typing import PyTree
from ._base import is_eqx_module


_Tree = TypeVar("_Tree")


@dataclasses.dataclass(frozen=True)
class AlikeKey:
    """The key of a child whose own key equals an earlier sibling's, or prints alike.

    Arrays are told apart by name and by key path, so no two may share one.
    """

    key: Any
    position: int

    def __str__(self) -> str:
        return f"{self.key}~{self.position}"


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """`(key, child)` one level down, holes included; `None` for a leaf.

    The keys are those of JAX, with two exceptions: no two are alike, and a dataclass
    that is registered without key paths has the names of its fields.
    """
    if is_leaf(node):
        return None
    entries, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    keys = [path[0] for path, _ in entries]
    if dataclasses.is_dataclass(node) and jtu.FlattenedIndexKey in map(type, keys):
        keys = _field_keys(keys, treedef)
    if not (isinstance(node, dict) and all(type(key) is str for key in node)):
        keys = _apart(keys)
    return list(zip(keys, (child for _, child in entries), strict=True))


def map_children(f: Callable[[Any, Any], Any], node: _Tree) -> _Tree:
    """A new node with `f(key, child)` in place of each child; a leaf is returned."""
    if (below := children(node)) is None:
        return node
    return with_children(node, [f(key, child) for key, child in below])


def with_children(node: _Tree, new: list[Any]) -> _Tree:
    """A new node with these children in place of its own, in their order."""
    return jtu.tree_unflatten(one_level(node), new)


def one_level(node: PyTree) -> Any:
    """The treedef of a node whose children all count as leaves."""
    return jtu.tree_structure(node, is_leaf=lambda x: x is not node)


def _apart(keys: list[Any]) -> list[Any]:
    seen: set[Any] = set()
    found = []
    for i, key in enumerate(keys):
        same = {key, str(key)}
        found.append(key if seen.isdisjoint(same) else AlikeKey(key, i))
        seen |= same
    return found


def _field_keys(keys: list[Any], treedef: Any) -> list[Any]:
    """For each child the name of the field that holds it, else the key that it has."""
    # One array may be in two fields, so the fields are found with unique marks in place
    # of the children.
    marks = [object() for _ in keys]
    try:
        marked = jtu.tree_unflatten(treedef, marks)
        names = [f.name for f in dataclasses.fields(marked)]
        fields = {id(getattr(marked, name)): jtu.GetAttrKey(name) for name in names}
    except Exception:  # it accepts nothing but arrays
        return keys
    return [fields.get(id(mark), key) for mark, key in zip(marks, keys, strict=True)]


def is_leaf(x: Any) -> bool:
    """Whether JAX takes `x` for a leaf."""
    if is_eqx_module(x):
        return False
    # JAX would answer for an iterator, too, but with a warning.
    return isinstance(x, Iterator) or jtu.all_leaves((x,))
