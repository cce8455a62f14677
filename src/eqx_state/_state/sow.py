"""Values that a captured call returns in addition: sown values, outputs of modules.

The innermost scope of the observer stores these values by key. Each transform returns
the values of its inner scopes from its trace, together with the written state.
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
from .._tree.walk import is_numpy, name_of, walk
from .._typing import KeyPath, PyTree
from .observe import OBSERVING
from .scope import is_any_open, is_owned, Ownership, Reports, Scope
from .write import trace_message


class Key(NamedTuple):
    """The key of captured values: the name of a sown value, or of a module.

    - `is_output`: whether the values are outputs of the module.
    - `time`: the number of the call, if the module is called several times.
    """

    name: str
    is_output: bool = False
    time: int = 0

    def __str__(self) -> str:
        if not self.is_output:
            return f"`{self.name}`"
        return f"the output of `{self.name or 'the model'}`"


def sow(module: BaseModule, name: str, value: Any) -> None:
    """Pass a value to the observers that record sown values, if there are any."""
    ownership = ownership_of(module)
    if ownership is None or not ownership.scope.is_open:
        return
    for key, path in _outward(ownership):
        if not isinstance(name, str):
            raise TypeError(_NOT_A_NAME.format(type(module).__qualname__))
        ownership.scope.check_thread()  # in other threads the value would be lost
        keep(OBSERVING.get()[key], Key(name_of((*path, jtu.GetAttrKey(name)))), value)


def _outward(ownership: Ownership) -> Iterator[tuple[Hashable, KeyPath]]:
    """The observers that record the module's sown values, and its path in each."""
    for key, inside, outside in ownership.scope.reports:
        if ownership.path[: len(inside)] == inside:
            yield key, (*outside, *ownership.path[len(inside) :])


def reporting(model: PyTree) -> Reports:
    """The `reports` for a new scope of this model: those of its owned modules."""
    if not is_any_open():
        return ()
    visits = [v for v in walk(model, is_leaf=is_owned) if is_owned(v.node)]
    return tuple(
        (key, visit.path, path)
        for visit in visits
        for key, path in _outward(ownership_of(visit.node))
    )


def keep(scope: Scope, key: Key, value: Any) -> None:
    """Record a pytree of arrays and numbers of the active trace."""
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
    """Convert values of the active trace to values of the scope's trace.

    Each `jax.vmap` in between adds a first axis to outputs of modules. If any other JAX
    transform is in between, the result is empty, and the observer records the module
    that it missed. Sown values raise a `TraceError` under every JAX transform, because
    the user can change the layer.
    """
    if scope.is_here:
        return values
    # Support `jax.vmap` for outputs, because Equinox's models map their layers by it. A
    # layer that sows was written for this library, and can use `es.vmap`.
    if not key.is_output:
        raise TraceError(trace_message(key.name, verb="sow"))
    if (out := out_of_vmaps(values, scope.trace)) is None:
        scope.observer.key.missed[key.name] = None
    return out or []


def _is_sowable(x: Any) -> bool:
    return is_numeric(x.dtype) if is_numpy(x) else eqx.is_array_like(x)


_NOT_A_NAME: Final = """`{}.sow`: the first argument must be the name, a string: \
`self.sow("name", value)`."""

_ESCAPED: Final = """Cannot capture {}: it is a tracer of a JAX transform that has \
returned. Return the value from the transform, or capture it inside the `es` transform \
of the same name."""

_NOT_ARRAYS: Final = """Cannot capture {}: only arrays, numbers and pytrees of them \
can leave a transform, but this is `{}`. Sow arrays, or select fewer modules: \
`outputs=lambda name, module: ...`."""
