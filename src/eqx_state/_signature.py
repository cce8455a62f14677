"""The signature of a call: all that is static in it, with the types of values.

To Python `1 == True == 1.0` and `0.0 == -0.0`, and a program that was traced for one of
them is wrong for another.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu
import numpy as np

from ._lift import Lifted
from ._scope import is_owned
from ._traverse import is_array, KeyPath, modules_in, name_of, same


class _Word:
    """Stands in a signature for what is not part of it."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


_ARRAY: Final = _Word("array")
_LEAF: Final = _Word("leaf")
_ORIGIN: Final = _Word("origin")


class Signature(NamedTuple):
    """Hashable; equal for calls that one program serves, up to shapes and dtypes."""

    structure: Any
    leaves: tuple[Any, ...]
    roots: tuple[Any, ...]


def signature_of(
    entries: list[tuple[KeyPath, Any]], treedef: Any, lifted: Lifted, origin: Any
) -> Signature:
    """The signature of a call with these leaves, owned modules among them.

    The leaves are those of `((first,), (function, rest, keywords))`. The function
    `origin`, whose programs they all are, does not occur in it, and is not kept alive.
    """
    inside = {
        id(visit.node): (i, name_of(visit.path))
        for i, root in enumerate(lifted.roots)
        for visit in modules_in(root)
    }

    def typed(x: Any) -> Any:
        return _ORIGIN if x is origin else _typed(x)

    def leaf(x: Any, where: Callable[[], str]) -> Any:
        if is_owned(x):
            return inside[id(x)]
        if is_array(x):
            return _ARRAY
        if not _is_hashable(x):
            raise TypeError(
                f"`es.jit`: {where()} is a `{type(x).__name__}`, which cannot be"
                " hashed. What is no array is static: there is one compiled program for"
                " each value, and it is looked up by hash. Pass a hashable value, such"
                " as a frozenset for a set; or an array, which is traced."
            )
        return typed(x)

    def structure(treedef: Any) -> Any:
        if (data := treedef.node_data()) is None:
            return _LEAF
        cls, aux = data
        # Of a dict it is the list of keys, of an Equinox module a tuple of values.
        if type(aux) in (list, tuple):
            aux = type(aux), tuple(map(typed, aux))
        else:
            aux = typed(aux)
        return cls, aux, tuple(map(structure, treedef.children()))

    roots = []
    for i, (root, place) in enumerate(zip(lifted.roots, lifted.places, strict=True)):
        statics = tuple(
            leaf(visit.node, lambda visit=visit: f"`{visit.name}`")
            for visit in lifted.visits(i)
        )
        place = (place.path, place.context, place.scope.kinds)
        roots.append((structure(jtu.tree_structure(root)), statics, place))
    leaves = tuple(leaf(x, lambda path=path: _where(path)) for path, x in entries)
    return Signature(structure(treedef), leaves, tuple(roots))


def _typed(x: Any) -> Any:
    """A hashable form of `x` in which equal values are of one type.

    `nan` is equal to itself in it.
    """
    compare = type(x).__eq__  # a subclass may have one of its own
    if compare in (tuple.__eq__, list.__eq__):
        return type(x), tuple(map(_typed, x))
    if compare in (frozenset.__eq__, set.__eq__):
        return type(x), frozenset(map(_typed, x))
    if compare in (dict.__eq__, collections.OrderedDict.__eq__):
        return type(x), tuple((_typed(k), _typed(v)) for k, v in x.items())
    if compare is complex.__eq__:
        return type(x), _typed(x.real), _typed(x.imag)
    if isinstance(x, np.generic):
        return type(x), x.tobytes()
    if compare is float.__eq__:
        return type(x), x.hex()
    if _is_record(x):
        values = (getattr(x, f.name, None) for f in dataclasses.fields(x))
        return type(x), tuple(map(_typed, values))
    return type(x), x if _is_hashable(x) else _ByEquality(x)


def _is_record(x: Any) -> bool:
    """Whether `x` is a dataclass that is compared by its fields."""
    parameters = getattr(type(x), "__dataclass_params__", None)
    return parameters is not None and parameters.eq and "__eq__" in vars(type(x))


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


class _ByEquality:
    """A static field without a hash, such as JAX allows: it is only compared."""

    def __init__(self, x: Any):
        self.x = x

    def __hash__(self) -> int:
        return hash(type(self.x))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _ByEquality) and same(self.x, other.x)


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
