"""`cast=`: the dtypes of a model inside a call.

The selected arrays are cast when the private copy is created, inside the
differentiated function, so gradients pass back through the cast. After the call,
unwritten arrays are the caller's own again, and written arrays are cast back.
"""

import contextlib
from collections.abc import Hashable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._errors import show
from .._kinds.kinds import Buffer, Parameter
from .._state.codecs import Codec
from .._state.lazy import check_initialized
from .._tree.dtypes import canonical, is_weak
from .._tree.rules import check_rules, choose
from .._tree.walk import is_array, leaves
from .._typing import KeyPath, PyTree


CastLike: TypeAlias = Mapping[Any, Any] | DTypeLike | None


class Cast(NamedTuple):
    """Rules from filters to dtypes, as a static value. Errors name the `caller`."""

    rules: tuple[tuple[Any, Any], ...]
    caller: str


class CastCodec(Codec):
    """The selected real floating arrays have a different dtype inside a call."""

    def __init__(self, cast: Cast):
        self.rules, self.caller = dict(cast.rules), cast.caller
        # For the path of each array that was cast, its dtype outside.
        self.outer: dict[KeyPath, Any] = {}

    @property
    def cache_key(self) -> Hashable:
        return tuple(self.outer.items())

    def enter(self, model: PyTree, values: list[Any]) -> list[Any]:
        check_initialized(model)  # filters cannot match missing arrays
        new = []
        # Do not cast moments and averages: the forward pass does not compute with them.
        keys = choose(self.rules, model, self.caller, per_parameter=False)
        for visit, key, x in zip(leaves(model), keys, values, strict=True):
            dtype = None if key is None else self.rules[key]
            if dtype is not None and _is_real(x) and x.dtype != dtype:
                self.outer[visit.path] = x.dtype
                x = x.astype(dtype)
            new.append(x)
        return new

    def write(self, old: Any, new: Any, path: KeyPath) -> Any:
        return _narrowed(old, new, self.outer.get(path))

    def restore(self, new: Any, given: Any) -> Any:
        if not _is_real(new) or not is_array(given):
            return new
        return new.astype(canonical(given.dtype))


def _narrowed(old: Any, new: Any, own: Any) -> Any:
    """`new` in the dtype that `old` has inside a `cast`, unless `new` is too wide.

    `own` is the dtype outside the call, to which the value is cast back; `None` if the
    `cast` does not change it. A float that is wider than `own`, or than `old` if `own`
    is `None`, is returned unchanged, so that it is rejected, as without a `cast`.
    Numbers and weak types are unchanged, too: they are cast anyway.
    """
    if not is_array(old) or not eqx.is_array(new) or is_weak(new):
        return new
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (old, new)):
        return new
    inside, given = canonical(old.dtype), canonical(new.dtype)
    widest = inside if own is None else canonical(own)
    with jax.numpy_dtype_promotion("standard"):
        fits = jnp.promote_types(given, widest) == widest
    return jnp.asarray(new).astype(inside) if fits and given != inside else new


def _is_real(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def as_cast(cast: Any, caller: str) -> Cast | None:
    """The argument `cast=` of a transform, checked; `None` if it was not given."""
    if cast is None:
        return None
    caller = f"`{caller}(cast=...)`"
    if not isinstance(cast, Mapping):
        # Buffers, too: a float32 constant would make all that follows float32.
        cast = {Parameter: cast, Buffer: cast}
    check_rules(cast, caller)
    return Cast(tuple((k, _as_dtype(x, caller)) for k, x in cast.items()), caller)


def codecs_of(cast: Cast | None) -> list[Codec]:
    """The codecs that a scope needs for this cast."""
    return [] if cast is None else [CastCodec(cast)]


def _as_dtype(x: Any, caller: str) -> Any:
    """`x` as a real floating dtype; `None` stands for the dtype of each array."""
    if x is None:
        return None
    # `jnp.dtype` would accept an array.
    with contextlib.suppress(TypeError):
        dtype = None if is_array(x) else jnp.dtype(x)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            return dtype
    raise TypeError(_NOT_A_DTYPE.format(caller, show(x)))


_NOT_A_DTYPE: Final = """{}: `{}` is not a real floating dtype. Pass one, \
`cast=jnp.bfloat16`, or a mapping from filters to such dtypes, or to `None` to leave \
the arrays unchanged: `cast={{es.Parameter: jnp.bfloat16}}`. Integers, bools and \
complex arrays are never cast."""
