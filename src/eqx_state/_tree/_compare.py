"""Two trees: whether they are of one structure, and where they first differ."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._typing import KeyPath
from ._base import is_eqx_module
from ._walk import children, is_array, leaves, name_of


def first_difference(
    a: Any, b: Any, structure: Callable[[Any], Any], path: KeyPath = ()
) -> tuple[KeyPath, Any, Any]:
    """Where two trees, for which `structure` differs, first do, and what each has."""
    if type(a) is not type(b):
        return path, a, b
    below_a, below_b = children(a) or [], children(b) or []
    if [k for k, _ in below_a] != [k for k, _ in below_b]:
        return path, a, b
    if is_eqx_module(a):
        for f in dataclasses.fields(a):
            if f.metadata.get("static", False):
                left, right = (getattr(x, f.name, None) for x in (a, b))
                if not same(left, right):
                    return (*path, jtu.GetAttrKey(f.name)), left, right
    for (key, x), (_, y) in zip(below_a, below_b, strict=True):
        if structure(x) != structure(y):
            return first_difference(x, y, structure, (*path, key))
    return path, a, b


def identical(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are one and the same. Arrays are compared by identity."""
    if a is b or type(a) is not type(b) or is_array(a):
        return a is b
    try:
        return bool(a == b)
    except Exception:
        return False


def difference_of_leaves(a: Any, b: Any) -> str | None:
    """The name of the first leaf that two trees do not have in common, if there is."""
    left, right = leaves(a), leaves(b)
    paths = [collections.Counter(v.path for v in visits) for visits in (left, right)]
    for path in [*(paths[0] - paths[1]), *(paths[1] - paths[0])]:
        return name_of(path)
    # By position: the paths of two leaves may be equal.
    for x, y in zip(left, right, strict=True):
        if not same(x.node, y.node):
            return x.name
    return None


def structure(tree: Any) -> Any:
    """The treedef in which a hole is a leaf: a tree's and a part of it's are equal."""
    return jtu.tree_structure(tree, is_leaf=is_hole)


def is_hole(x: Any) -> bool:
    """What `filter` and `eqx.partition` leave in the place of a leaf."""
    return x is None
