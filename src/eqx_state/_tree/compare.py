"""Comparing trees: equal structures, the first difference, repeated modules."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._kinds.kinds import State
from .._typing import KeyPath, PyTree, Tree
from .base import (
    FLAGS,
    has_inference,
    INFERENCE,
    is_eqx_module,
    is_module,
    OnlyInScope,
)
from .context import children
from .walk import (
    all_modules,
    copy_tree,
    is_array,
    leaves,
    name_of,
    occurs_twice,
    Visit,
    walk,
)


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal. Arrays are compared by identity."""
    if a is b or type(a) is not type(b) or is_array(a):
        return a is b
    try:
        return bool(a == b)
    except Exception:
        return False


def identical(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists contain the same objects."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def is_hole(x: Any) -> bool:
    """Whether `x` is `None`, with which `filter` and `eqx.partition` replace leaves."""
    return x is None


def structure_with_holes(tree: PyTree) -> Any:
    """The treedef with holes as leaves: equal for a tree and its filtered parts."""
    return jtu.tree_structure(tree, is_leaf=is_hole)


def same_modes(tree: Tree) -> Tree:
    """A copy in one fixed mode, as it is outside of scopes, to compare structures."""
    tree = copy_tree(tree)
    for module in all_modules(tree):
        if isinstance(module, OnlyInScope):
            module._eqx_state_leave()
        if is_module(module):
            for name, value in FLAGS.items():
                object.__setattr__(module, name, value)
        elif has_inference(module):
            object.__setattr__(module, "inference", None)
    return tree


def leaves_like(tree: PyTree, other: PyTree, what: str) -> list[Any]:
    """The leaves of `other`, holes included; it must have the structure of `tree`.

    Equinox's flags `inference`, which are leaves, are returned as holes.
    """
    leaves, treedef = jtu.tree_flatten(other, is_leaf=is_hole)
    if treedef == structure_with_holes(tree) and bool not in map(type, leaves):
        return leaves
    tree, other = same_modes(tree), same_modes(other)
    if structure_with_holes(tree) != structure_with_holes(other):
        first = difference(tree, other, structure_with_holes)
        raise ValueError(_OTHER_STRUCTURE.format(what, first))
    return jtu.tree_leaves(other, is_leaf=is_hole)


def first_difference(
    a: PyTree, b: PyTree, structure: Callable[[PyTree], Any], path: KeyPath = ()
) -> tuple[KeyPath, Any, Any]:
    """The path at which two structures first differ, and the node of each there."""
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


def difference(
    old: PyTree,
    new: PyTree,
    structure: Callable[[PyTree], Any] = jtu.tree_structure,
    path: KeyPath = (),
) -> str:
    """A description of the first difference between two structures.

    `path` is the path of both in the tree that the user knows.
    """
    below, a, b = first_difference(old, new, structure)
    place = f"at `{name_of((*path, *below))}`" if path or below else "at the root"
    expected, got = _on_one_line(a), _on_one_line(b)
    if expected == got:
        return _ALIKE.format(place, got)
    return f"first {place}: expected `{expected}`, got `{got}`"


_ALIKE: Final = """first {}: two different `{}`, which look alike. An object that is \
compared by identity, as optax's transformations are, must be the same in both: create \
it once, `TX = optax.adam(1e-3)`"""


def _on_one_line(x: Any) -> str:
    """The text of a structure if that fits on one line, else its class and its keys."""
    text = eqx.tree_pformat(x, short_arrays=True, struct_as_array=True, width=60)
    if "\n" not in text:
        return text
    keys = [name_of((key,)) for key, _ in children(x) or []]
    return f"{type(x).__name__} of {', '.join(key for key in keys if key != INFERENCE)}"


def difference_of_leaves(a: PyTree, b: PyTree) -> str | None:
    """The name of the first leaf that differs or is in one tree only, or `None`."""
    left, right = ({v.path: v.node for v in leaves(tree)} for tree in (a, b))
    for path in [*left, *right]:
        if not (path in left and path in right and same(left[path], right[path])):
            return name_of(path)
    return None


# --- Repeated modules. If a module occurs twice in a tree, JAX also flattens it twice.
# After the first transform there are two modules, and their states would drift apart.


def check_not_repeated(tree: PyTree) -> None:
    """Raise `ValueError` if one stateful module occurs twice in a tree."""
    if occurs_twice(all_modules(tree)):
        check_apart(walk(tree))


def check_apart(visits: list[Visit], kinds: tuple[type, ...] = (State,)) -> None:
    """`check_not_repeated` for the visits of one or more trees.

    `kinds`: those of the arrays that may change, which make a module stateful.
    """
    # A module below a covering `Buffer` has no state, and may be repeated.
    state = [v.path for v in visits if v.is_leaf and issubclass(v.kind or int, kinds)]
    stateful = {path[:n] for path in state for n in range(len(path))}
    first: dict[int, Visit] = {}
    for visit in (v for v in visits if is_module(v.node) and v.path in stateful):
        other = first.setdefault(id(visit.node), visit)
        if other is not visit:
            a, b = (f"`{v.name}`" if v.path else "the model" for v in (other, visit))
            raise ValueError(_REPEATED.format(a, b))


_OTHER_STRUCTURE: Final = """{} differs in structure from the tree, {}. Only modes \
(train, eval, frozen) may differ."""

_REPEATED: Final = """The same stateful module occurs twice, at {} and {}. Flattening \
a pytree duplicates it, so after the first transform there are two modules, whose \
states drift apart. Create two modules; or store one and call it twice; or tie the two \
fields with `eqx.nn.Shared`."""
