"""Numbers and weak types become strongly typed arrays where a field declares a kind.

In state both would recompile the training step: a weak type becomes strong at the first
update, and a Python number is another constant at every step.
"""

from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import show
from .._kinds.fields import declarations, declared_child
from .._kinds.kinds import NOTHING, Spec
from .base import is_eqx_module
from .context import children, with_children
from .walk import is_array, is_numpy


NUMBERS: Final = (bool, int, float, complex)


def strengthen(value: Any, spec: Spec) -> Any:
    """`value` with its numbers and weak arrays made strong where `spec` has a kind.

    The fields of a module inside `value` are left to their own declarations.
    """
    if spec == NOTHING or is_eqx_module(value) or value is None:
        return value
    below = children(value)
    if below is None:
        return value if spec.kind is None else to_strong(value)
    new = [strengthen(child, _inner(spec, value, key)) for key, child in below]
    is_same = all(x is child for x, (_, child) in zip(new, below, strict=True))
    return value if is_same else with_children(value, new)


def _inner(spec: Spec, node: Any, key: Any) -> Spec:
    inner = declared_child(spec, node, key)
    return inner if inner.kind else inner._replace(kind=spec.kind)


def strengthen_field(cls: type, name: str, value: Any) -> Any:
    """`strengthen` for a value of a field of an `es.Module`."""
    return strengthen(value, declarations(cls).get(name, NOTHING))


def to_strong(leaf: Any) -> Any:
    """A number as an array, a weak array as a strong one; anything else as it is."""
    if type(leaf) in NUMBERS:
        # With a dtype, since `jnp.asarray(1.0)` would stay weak.
        return jnp.asarray(leaf, dtype=jnp.result_type(type(leaf)))
    if is_weak(leaf):
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return leaf.update(weak_type=False) if is_shape else leaf.astype(leaf.dtype)
    return leaf


def is_weak(x: Any) -> bool:
    """Whether an array is weakly typed. Keys have no such attribute."""
    return getattr(x, "weak_type", False)


# --- State keeps its shape and dtype: a written value is cast to fit, or refused.
#
# Only numbers and weakly typed arrays are cast, as JAX casts them next to an array. All
# other values have a dtype that somebody chose: if it differs, that is an error rather
# than a silent conversion.


def as_inside(old: Any, new: Any, own: Any) -> Any:
    """`new` in the dtype that `old` has inside of a `cast`, if that loses nothing.

    `own` is the dtype outside, to which the value will be cast in the end; `None` if
    that is the same. A float that is wider stays as it is: its dtype is an error, as
    without a `cast`. So are weak types and numbers, which are cast in any case.
    """
    if not is_array(old) or not eqx.is_array(new) or is_weak(new):
        return new
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (old, new)):
        return new
    inside, given = (jax.dtypes.canonicalize_dtype(x.dtype) for x in (old, new))
    widest = inside if own is None else jax.dtypes.canonicalize_dtype(own)
    with jax.numpy_dtype_promotion("standard"):
        fits = jnp.promote_types(given, widest) == widest
    return jnp.asarray(new).astype(inside) if fits and given != inside else new


def fit(old: Any, new: Any, name: str) -> Any:
    """`new`, with its numbers and weakly typed arrays cast to the dtypes of `old`."""
    if is_array(old):  # most of what is written
        return fit_leaf(old, new, name)
    structures = [jtu.tree_structure(x, is_leaf=is_eqx_module) for x in (old, new)]
    if structures[0] != structures[1]:
        return new
    return jtu.tree_map(
        lambda a, b: fit_leaf(a, b, name), old, new, is_leaf=is_eqx_module
    )


def fit_leaf(old: Any, new: Any, name: str) -> Any:
    """`new` as it is stored in the place of `old`; `ValueError` if it does not fit."""
    if isinstance(new, jax.Array) and not is_weak(new):
        return new  # most of what is written
    if _is_struct(new) and not _is_struct(old):
        raise ValueError(_STRUCT.format(name, show(new)))
    if not is_array(old) or jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return new
    dtype = jax.dtypes.canonicalize_dtype(old.dtype)
    is_number = type(new) in NUMBERS  # `np.float64`, a subclass of `float`, is not one
    if not is_number and not is_weak(new):
        is_known = is_numpy(new) and is_numeric(new.dtype)
        if is_known and jax.dtypes.canonicalize_dtype(new.dtype) == dtype:
            _check_range(old, new, dtype, name)
        return new
    # Under strict promotion JAX would raise here, with an error that does not name the
    # field; ours below does.
    with jax.numpy_dtype_promotion("standard"):
        promoted = (
            jnp.promote_types(dtype, type(new))
            if is_number
            else jnp.result_type(jnp.zeros((), dtype), new)
        )
    if promoted != dtype:
        # Without 64 bits JAX has no float64, which is what a Python float promotes to.
        other = jax.dtypes.canonicalize_dtype(promoted).name
        given = f"the number {new!r}" if is_number else f"`{show(new)}`"
        raise ValueError(_DTYPE.format(name, show(old), given, other, dtype.name))
    _check_range(old, new, dtype, name)
    return jnp.asarray(new, dtype=dtype)


def _is_struct(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _check_range(old: Any, new: Any, dtype: Any, name: str) -> None:
    if not holds(dtype, new):
        given = f"{new!r}" if type(new) is int else f"an integer in `{show(new)}`"
        raise ValueError(_RANGE.format(name, given, show(old)))


def holds(dtype: Any, x: Any) -> bool:
    """Whether a dtype can represent all the integers in a number or an array.

    `True` if the values cannot be read: for a tracer, and for an array that other
    processes have a part of. JAX wraps those around.
    """
    is_number = type(x) is int
    if not is_number and not (is_array(x) and jnp.issubdtype(x.dtype, jnp.integer)):
        return True
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if is_integer:
        least, most = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    else:  # whose own scalars are not converted to `int` right
        least, most = float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)
    if is_number:
        return least <= x <= most
    own = jnp.iinfo(x.dtype)
    # The dtypes are compared first, since reading an array waits for its values.
    if (least <= own.min and own.max <= most) or not _is_readable(x) or x.size == 0:
        return True
    values = np.asarray(jax.device_get(x))
    return least <= int(values.min()) and int(values.max()) <= most


def _is_readable(x: Any) -> bool:
    if isinstance(x, jax.Array):
        return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    return True


def as_jax(x: Any, name: str) -> jax.Array:
    """A number or a NumPy array as a new JAX array with equal values."""
    dtype = jnp.result_type(x)
    if not holds(dtype, x):
        raise ValueError(_NEEDS_X64.format(name, dtype.name, show(x)))
    # JAX may go on reading a NumPy array after it has returned, or even use its memory.
    return jnp.asarray(np.array(x) if is_numpy(x) else x)


def same_type(old: Any, new: Any) -> bool:
    """Whether two arrays have the same shape, and the same dtype once JAX has them."""
    if not is_array(new) or old.shape != new.shape:
        return False
    if old.dtype == new.dtype:
        return True
    dtypes = [
        (
            x.dtype
            if jnp.issubdtype(x.dtype, jax.dtypes.extended)
            else jax.dtypes.canonicalize_dtype(x.dtype)
        )
        for x in (old, new)
    ]
    return dtypes[0] == dtypes[1]


def is_numeric(dtype: Any) -> bool:
    """Whether JAX supports a NumPy dtype: NumPy also has strings and objects."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))


_STRUCT: Final = """Cannot write `{}`: `{}` is a `jax.ShapeDtypeStruct`, which has a \
shape and a dtype and no values. Write an array: `jnp.zeros(struct.shape, \
struct.dtype)`."""

_DTYPE: Final = """Cannot write `{}`: it holds `{}`, and {} would make it {}. State \
keeps its dtype, or every step would be recompiled. Convert it: \
`jnp.asarray(value, dtype=jnp.{})`, or make the field of that dtype to begin with."""

_RANGE: Final = """Cannot write `{}`: {} does not fit into `{}`. Make the field of a \
wider dtype to begin with."""

_NEEDS_X64: Final = """`{}`: JAX makes {} of `{}`, into which one of its integers does \
not fit. Call `jax.config.update('jax_enable_x64', True)` when the program starts, or \
use smaller numbers."""
