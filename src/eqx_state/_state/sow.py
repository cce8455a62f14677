"""Values that leave a captured call beside its output: what modules sow and return.

They are kept in the innermost scope of the observer that wants them, by key. Each
transform carries out of its trace what its inner scopes keep, as it does with what was
written.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._compat import has_escaped, out_of_vmaps
from .._errors import show, TraceError
from .._tree.base import BaseModule, ownership_of
from .._tree.dtypes import as_jax, is_numeric
from .._tree.observe import OBSERVING
from .._tree.walk import is_numpy, name_of, walk
from .._typing import KeyPath, PyTree
from .scope import is_any_open, is_owned, Ownership, Reports, Scope
from .write import trace_message


class Key(NamedTuple):
    """Under which values are kept: the name of what is sown, or of a module.

    - `is_output`: whether the values are outputs of the module.
    - `time`: of several calls of a module, the one that is meant.
    """

    name: str
    is_output: bool = False
    time: int = 0

    def __str__(self) -> str:
        if not self.is_output:
            return f"`{self.name}`"
        return f"the output of `{self.name or 'the model'}`"


def sow(module: BaseModule, name: str, value: Any) -> None:
    """Hand a value to the observers that keep what is sown, if there are any."""
    place = ownership_of(module)
    if place is None or not place.scope.is_open:
        return
    for key, path in _outward(place):
        if not isinstance(name, str):
            raise TypeError(_NOT_A_NAME.format(type(module).__qualname__))
        place.scope.check_thread()  # another one has no observer, and would lose it
        keep(OBSERVING.get()[key], Key(name_of((*path, jtu.GetAttrKey(name)))), value)


def _outward(place: Ownership) -> Iterator[tuple[Hashable, KeyPath]]:
    """The observers that keep what a module here sows, and its path in their models."""
    for key, inside, outside in place.scope.reports:
        if place.path[: len(inside)] == inside:
            yield key, (*outside, *place.path[len(inside) :])


def reporting(model: PyTree) -> Reports:
    """What a new scope of this model reports: as the modules in it do so far."""
    if not is_any_open():
        return ()
    visits = [v for v in walk(model, is_leaf=is_owned) if is_owned(v.node)]
    return tuple(
        (key, visit.path, path)
        for visit in visits
        for key, path in _outward(ownership_of(visit.node))
    )


def keep(scope: Scope, key: Key, value: Any) -> None:
    """Add a pytree of arrays and numbers, of the active trace."""
    leaves, structure = jtu.tree_flatten(value)
    if any(map(has_escaped, leaves)):
        raise TraceError(_ESCAPED.format(key))
    if not all(map(_is_sowable, leaves)):
        raise TypeError(_NOT_ARRAYS.format(key, show(value)))
    leaves = [x if isinstance(x, jax.Array) else as_jax(x, key.name) for x in leaves]
    value = jtu.tree_unflatten(structure, leaves)
    if values := carried_out(scope, key, [value]):
        scope.sown.setdefault(key, []).extend(values)


def carried_out(scope: Scope, key: Key, values: Sequence[Any]) -> Sequence[Any]:
    """Values of the active trace as values of the scope's.

    Outputs of a module's calls have a new first axis for each `jax.vmap` in between.
    With any other transform of JAX in between there are none, and the observer misses
    the module; for what is sown it is a `TraceError`, since the layer is the user's.
    """
    if scope.is_here:
        return values
    # Equinox's own models map their layers by `jax.vmap`. A layer that sows is ours,
    # and the model around it can be mapped by `es.vmap`.
    if not key.is_output:
        raise TraceError(trace_message(key.name, verb="sow"))
    if (out := out_of_vmaps(values, scope.trace)) is None:
        scope.observer.key.missed[key.name] = None
    return out or []


def _is_sowable(x: Any) -> bool:
    return is_numeric(x.dtype) if is_numpy(x) else eqx.is_array_like(x)


_NOT_A_NAME: Final = """`{}.sow`: the name comes first, and is a string: \
`self.sow("name", value)`."""

_ESCAPED: Final = """Cannot capture {}: it is a tracer of a JAX transform that is \
over. Compute it in the call, under a transform of `es`."""

_NOT_ARRAYS: Final = """Cannot capture {}: arrays, numbers and pytrees of them come \
out of a transform, and this is `{}`. Sow something else, or select fewer modules: \
`outputs=lambda name, module: ...`."""
