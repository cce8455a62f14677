"""The signature of a call: all that is static in it, with the types of values.

To Python `1 == True == 1.0` and `0.0 == -0.0`, and a program that was traced for one of
them is wrong for another.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu

from ._lift import Lifted
from ._scope import is_owned
from ._traverse import is_array, KeyPath, modules_in, name_of, walk


class _Array:
    def __repr__(self) -> str:
        return "array"


_ARRAY: Final = _Array()


class Signature(NamedTuple):
    """Hashable; equal for calls that one program serves, up to shapes and dtypes."""

    treedef: Any
    leaves: tuple[Any, ...]
    fields: tuple[Any, ...]  # a treedef holds their values, but not their types
    roots: tuple[Any, ...]


def signature_of(
    entries: list[tuple[KeyPath, Any]], treedef: Any, lifted: Lifted
) -> Signature:
    """The signature of a call with these leaves, owned modules among them.

    The leaves are those of `((first,), (function, rest, keywords))`.
    """
    inside = {
        id(visit.node): (i, name_of(visit.path))
        for i, root in enumerate(lifted.roots)
        for visit in modules_in(root)
    }

    def leaf(x: Any) -> Any:
        if is_owned(x):
            return inside[id(x)]
        return _ARRAY if is_array(x) else _typed(x)

    tree = jtu.tree_unflatten(treedef, [None if is_owned(x) else x for _, x in entries])
    roots = []
    for root, place in zip(lifted.roots, lifted.places, strict=True):
        statics = tuple(leaf(x) for x in jtu.tree_leaves(root))
        structure = jtu.tree_structure(root)
        place = (place.path, place.context, place.scope.kinds)
        roots.append((structure, statics, _fields(root), place))
    leaves = tuple(leaf(x) for _, x in entries)
    signature = Signature(treedef, leaves, _fields(tree), tuple(roots))
    try:
        hash(signature)
    except TypeError as e:
        raise _unhashable(entries, tree, lifted) or e from None
    return signature


def _fields(tree: Any) -> tuple[Any, ...]:
    return tuple(_typed(value) for _, value in _static_fields_in(tree))


def _static_fields_in(tree: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    return [
        ((*visit.path, jtu.GetAttrKey(f.name)), getattr(visit.node, f.name, None))
        for visit in walk(tree, path)
        if not visit.is_leaf
        for f in dataclasses.fields(visit.node)
        if f.metadata.get("static", False)
    ]


def _typed(x: Any) -> Any:
    """`x` in a form in which equal values are of one type."""
    if isinstance(x, tuple):
        return type(x), tuple(map(_typed, x))
    if isinstance(x, frozenset):
        return type(x), frozenset(map(_typed, x))
    if isinstance(x, complex):
        return type(x), _typed(x.real), _typed(x.imag)
    return type(x), x.hex() if isinstance(x, float) else x


def _unhashable(
    entries: list[tuple[KeyPath, Any]], tree: Any, lifted: Lifted
) -> TypeError | None:
    """What to say of the first leaf or static field that has no hash."""
    candidates = [(_where(path), x) for path, x in entries if not is_array(x)]
    candidates += [(_where(path), x) for path, x in _static_fields_in(tree)]
    for i, root in enumerate(lifted.roots):
        candidates += [(f"`{visit.name}`", visit.node) for visit in lifted.visits(i)]
        fields = _static_fields_in(root, lifted.places[i].path)
        candidates += [(f"`{name_of(path)}`", x) for path, x in fields]
    for where, x in candidates:
        try:
            hash(x)
        except TypeError:
            return TypeError(
                f"`es.jit`: {where} is a `{type(x).__name__}`, which cannot be hashed."
                " What is no array is static: there is one compiled program for each"
                " value, and it is looked up by hash. Pass a hashable value, such as a"
                " tuple for a list; or an array, which is traced."
            )
    return None


def _where(path: KeyPath) -> str:
    """A place in `((first,), (function, rest, keywords))`, as the caller knows it."""
    if path[0].idx == 0:
        which, path = "argument 0", path[2:]
    elif path[1].idx == 0:
        which, path = "the function", path[2:]
    elif path[1].idx == 1:
        which, path = f"argument {path[2].idx + 1}", path[3:]
    else:
        which, path = f"argument `{path[2].key}`", path[3:]
    return f"{which}, at `{name_of(path)}`," if path else which
