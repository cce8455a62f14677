"""One stateful module in two places of a tree, where a transform would make it two."""

import functools as ft
import sys
from typing import Any, TypeVar

import jax.tree_util as jtu

from .._kinds._kinds import State
from .._typing import KeyPath, PyTree
from ._base import is_module
from ._walk import Visit, walk


_Tree = TypeVar("_Tree")


def find_shared(visits: list[Visit]) -> tuple[str, str] | None:
    """The names of two places that hold the same stateful `es.Module`."""
    modules = [v for v in visits if is_module(v.node)]
    if len({id(v.node) for v in modules}) == len(modules):
        return None
    # Below a covering `Buffer` it is not state, and may be shared.
    state = [v.path for v in visits if v.is_leaf and v.is_a(State)]
    stateful = {path[:n] for path in state for n in range(len(path))}
    first: dict[int, Visit] = {}
    for visit in modules:
        if visit.path in stateful:
            other = first.setdefault(id(visit.node), visit)
            if other is not visit:
                return other.name, visit.name
    return None


def check_not_shared(tree: PyTree, path: KeyPath = ()) -> None:
    """Raise `ValueError` if one stateful module would have to be two."""
    # The two models of `optax.lookahead` begin as one, and are meant to drift apart.
    # Who has not imported optax has none.
    optax = sys.modules.get("optax")
    is_pair = isinstance(tree, getattr(optax, "LookaheadParams", ()))
    for each in tree if is_pair else [tree]:
        check_apart(walk(each, path))


def flatten_apart(tree: PyTree) -> tuple[list[Any], Any]:
    """The leaves and the structure, after `check_not_shared`, in one pass."""
    modules: list[Any] = []
    leaves, structure = jtu.tree_flatten(tree, is_leaf=ft.partial(_note, modules))
    if len(set(map(id, modules))) < len(modules):
        check_not_shared(tree)
    return leaves, structure


def modules_below(tree: PyTree) -> list[Any]:
    """Every `es.Module` in a tree, but not where it is; cheaper than a walk."""
    modules: list[Any] = []
    jtu.tree_leaves(tree, is_leaf=ft.partial(_note, modules))
    return modules


def _note(modules: list[Any], node: Any) -> bool:
    if is_module(node):
        modules.append(node)
    return False


def copy_apart(tree: _Tree) -> _Tree:
    """`copy_tree`, after `check_not_shared`."""
    leaves, structure = flatten_apart(tree)
    return jtu.tree_unflatten(structure, leaves)


def check_apart(visits: list[Visit]) -> None:
    """`check_not_shared` for visits, which may be those of several trees."""
    if (names := find_shared(visits)) is not None:
        a, b = (f"`{name}`" if name else "the model itself" for name in names)
        raise ValueError(
            f"The same stateful module is in two places, {a} and {b}. A model is a"
            " tree: at the first transform the one module becomes two, and their"
            " states drift apart. Make two of them, or hold it once and call it from"
            " both places, or tie the places with `eqx.nn.Shared`."
        )
