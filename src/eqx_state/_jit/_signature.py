"""The signature of a call: all that is static in it."""

import types
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from .._state._scope import is_owned
from .._transforms._closures import DICTS, PARTIALS
from .._transforms._copies import Opened
from .._tree._children import is_leaf, one_level
from ._call import Call, origins_of
from ._names import where
from ._static import is_hashable, structure, typed


# Stand in a signature for what is not part of it; all that is, is in tuples.
_ARRAY: Final = "array"
_ORIGIN: Final = "origin"


class Signature(NamedTuple):
    """Hashable; equal for calls that one program serves, up to shapes and dtypes."""

    structure: Any
    leaves: tuple[Any, ...]
    function: Any
    roots: tuple[Any, ...]
    reached: tuple[Any, ...]
    scopes: tuple[Any, ...]


def signature_of(call: Call) -> Signature:
    """The signature of a call, owned modules among its leaves.

    The function whose programs they are does not occur in it, and is not kept alive.
    """
    lifted, origins = call.lifted, _numbered(call.origins)
    inside = {
        id(visit.node): (i, k)
        for i, root in enumerate(lifted.roots)
        for k, visit in enumerate(root.modules)
    }

    def static(x: Any) -> Any:
        return origins.get(id(x)) or typed(x)

    def leaf(x: Any, place: Callable[[], str]) -> Any:
        if is_owned(x):
            return inside[id(x)]
        if call.is_array(x):
            return _ARRAY
        if not is_hashable(x):
            raise TypeError(
                f"`es.jit`: {place()} is a `{type(x).__name__}`, which cannot be"
                " hashed. What is not an array is static: there is one compiled program"
                " for each value, and it is looked up by hash. Pass a hashable value,"
                " such as a frozenset for a set; or an array, which is traced."
            )
        return static(x)

    roots = []
    for root in lifted.roots:
        statics = tuple(
            leaf(visit.node, lambda visit=visit: f"`{visit.name}`")
            for visit in root.leaves
        )
        whose = lifted.scopes.index(root.place.scope)
        place = root.place.path, root.place.context, whose
        roots.append((structure(root.structure, static), statics, place))
    leaves = tuple(
        leaf(x, lambda i=i: where(call.paths[i])) for i, x in enumerate(call.leaves)
    )
    reached = tuple(inside[id(module)] for module in lifted.reached)
    function = function_signature(call.opened)
    tree = structure(call.treedef, static)
    scopes = tuple(scope.signature for scope in lifted.scopes)
    return Signature(tree, leaves, function, tuple(roots), reached, scopes)


def function_signature(opened: Opened) -> Any:
    """Hashable; equal for functions whose copies differ only in what they hold.

    `None` if the function is not copied: then it is a part of the tree.
    """
    if not opened.is_copied:
        return None
    origins = _numbered(origins_of(opened.f))
    return tuple((_token(node.x, origins), *node.refs) for node in opened.nodes)


def _numbered(origins: tuple[Any, ...]) -> dict[int, Any]:
    return {id(x): (_ORIGIN, i) for i, x in enumerate(origins)}


def _token(x: Any, origins: dict[int, Any]) -> Any:
    """A hashable form of what a node and its copy have in common."""
    cls = type(x)
    if cls is types.FunctionType:
        return origins.get(id(x), x)
    if cls in DICTS:
        return cls, getattr(x, "default_factory", None), tuple(map(typed, x))
    if cls in (list, tuple, *PARTIALS) or is_leaf(x):  # a cell, a method
        return cls
    return structure(one_level(x))
