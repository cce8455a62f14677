"""The signature of a call: all that is static in it."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from .._state._scope import is_owned
from .._transforms._lift import Lifted
from .._tree._static_values import is_hashable, structure, typed
from .._tree._walk import name_of
from .._typing import KeyPath


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


def signature_of(
    entries: list[tuple[KeyPath, Any]],
    treedef: Any,
    lifted: Lifted,
    origin: Any,
    shape: Any,
    is_array: Callable[[Any], bool],
) -> Signature:
    """The signature of a call with these leaves, owned modules among them.

    The leaves are those of `((first,), (function, rest, keywords))`. `shape` is that of
    the function, if it is opened. The function `origin`, whose programs they all are,
    does not occur in it, and is not kept alive.
    """
    inside = {
        id(visit.node): (i, name_of(visit.path))
        for i, root in enumerate(lifted.roots)
        for visit in root.modules
    }

    def static(x: Any) -> Any:
        return _ORIGIN if x is origin else typed(x)

    def leaf(x: Any, where: Callable[[], str]) -> Any:
        if is_owned(x):
            return inside[id(x)]
        if is_array(x):
            return _ARRAY
        if not is_hashable(x):
            raise TypeError(
                f"`es.jit`: {where()} is a `{type(x).__name__}`, which cannot be"
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
        scope = root.place.scope
        whose = lifted.scopes.index(scope), scope.kinds, scope.captures
        place = root.place.path, root.place.context, whose
        roots.append((structure(root.structure, static), statics, place))
    leaves = tuple(leaf(x, lambda path=path: _where(path)) for path, x in entries)
    reached = tuple(inside[id(module)] for module in lifted.reached)
    return Signature(structure(treedef, static), leaves, shape, tuple(roots), reached)


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
