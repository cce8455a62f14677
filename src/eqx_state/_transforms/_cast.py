"""`cast=`: other dtypes for a model inside a call, and its own outside.

The arrays that the rules select are cast where the private copy is made, inside of what
is differentiated, so gradients come back through the cast. After the call what was not
written is the caller's own array again, and what was written is cast back.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._state._collect import Snapshot
from .._state._init import check_initialized
from .._state._scope import Scope
from .._tree._bind import written
from .._tree._rules import check_rules, choose
from .._tree._show import show
from .._tree._walk import is_array, is_numpy, leaves


class Cast(NamedTuple):
    """A rule mapping to dtypes, as a static value, and the name of its transform."""

    rules: tuple[tuple[Any, Any], ...]
    what: str

    def inside(self, model: Any, given: Snapshot, scope: Scope) -> Snapshot:
        """The snapshot `given` of a model with its dtypes inside of the call.

        The scope comes to know the arrays that have others outside.
        """
        check_initialized(model)  # what is not there yet matches no filter
        rules = dict(self.rules)
        own, new = {}, []
        # Moments and averages are not computed with, and keep their precision.
        keys = choose(rules, model, self.what, follow=False)
        for visit, key in zip(leaves(model), keys, strict=True):
            x, dtype = visit.node, None if key is None else rules[key]
            if dtype is not None and _is_real(x) and x.dtype != dtype:
                own[visit.path] = x.dtype
                x = jnp.asarray(x).astype(dtype)
            new.append(x)
        scope.own_dtypes = own
        return given._replace(leaves=new)


def as_cast(cast: Any, what: str) -> Cast | None:
    """The argument `cast=` of a transform, checked; `None` if it was not given."""
    if cast is None:
        return None
    what = f"`{what}(cast=...)`"
    if not isinstance(cast, Mapping):
        raise TypeError(_NOT_RULES.format(what, show(cast)))
    check_rules(cast, what)
    return Cast(tuple((key, _as_dtype(cast, key, what)) for key in cast), what)


def _as_dtype(cast: Mapping[Any, Any], key: Any, what: str) -> Any:
    if cast[key] is None:
        return None
    name = "..." if key is ... else written(key)
    try:
        # NumPy would take the dtype of an array for the array.
        dtype = None if is_array(cast[key]) else jnp.dtype(cast[key])
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(_NOT_A_DTYPE.format(what, name, show(cast[key])))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(_NEEDS_X64.format(what, name, dtype.name))
    return dtype


def own_again(new: Any, inside: Snapshot, given: Snapshot) -> Any:
    """The model after a call, with the caller's dtypes and the caller's arrays."""
    out = []
    for x, cast, own in zip(
        jtu.tree_leaves(new), inside.leaves, given.leaves, strict=True
    ):
        # By place, and not only by identity: one array may have been written to the
        # place of another, and was cast then.
        if x is cast:
            out.append(own)
        else:
            dtype = None if cast is own else jax.dtypes.canonicalize_dtype(own.dtype)
            out.append(x if dtype is None else x.astype(dtype))
    return jtu.tree_unflatten(jtu.tree_structure(new), out)


def _is_real(x: Any) -> bool:
    is_values = is_numpy(x) or isinstance(x, jax.Array)
    return is_values and jnp.issubdtype(x.dtype, jnp.floating)


_NOT_RULES: Final = """{}: rules are a mapping from filters to dtypes, and `{}` was \
given. It does not say which arrays are cast:

    cast=jnp.bfloat16                   # wrong
    cast={{es.Parameter: jnp.bfloat16}}   # right: the statistics stay in float32"""

_NOT_A_DTYPE: Final = """{0}: the value for `{1}` is `{2}`, and arrays are cast to a \
real floating dtype, or left as they are by `None`: `cast={{es.Parameter: \
jnp.bfloat16}}`. Integers, bools and complex arrays are never cast."""

_NEEDS_X64: Final = """{}: the value for `{}` is {}, which JAX does not have unless \
`jax.config.update('jax_enable_x64', True)` is called when the program starts."""
