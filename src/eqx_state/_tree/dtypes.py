"""Dtypes: strong types, values that fit into state, NumPy arrays as JAX arrays.

Numbers and weakly typed arrays become strongly typed in a field that declares a kind,
and take the dtype of the state that they are written to. In state both would recompile
the training step: a weak type becomes strong at the first update, and a Python number
is a new constant at every step. The user has chosen the dtype of every other value, so
a different dtype is an error rather than a silent conversion.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import show
from .._kinds.fields import declarations, declared_child
from .._kinds.kinds import Kind, NOTHING, Parameter, Spec
from .base import is_eqx_module
from .context import children, with_children
from .walk import is_array, is_numpy


NUMBERS: Final = (bool, int, float, complex)


def strengthen(value: Any, spec: Spec, old: Any = None) -> Any:
    """Make the numbers and weak arrays of `value` strong where `spec` has a kind.

    Where they replace an array in `old`, they have its dtype, if that can hold them.
    Modules in `value` are unchanged: their own declarations apply to their fields.
    """
    if spec == NOTHING or is_eqx_module(value) or value is None:
        return value
    below = children(value)
    if below is None:
        return value if spec.kind is None else to_strong(value, old, spec.kind)
    before = dict(children(old) or ())
    new = [
        strengthen(child, _inner(spec, value, key), before.get(key))
        for key, child in below
    ]
    is_same = all(x is child for x, (_, child) in zip(new, below, strict=True))
    return value if is_same else with_children(value, new)


def _inner(spec: Spec, node: Any, key: Any) -> Spec:
    inner, outer = declared_child(spec, node, key), spec.kind
    is_covered = inner.kind is None or (outer is not None and outer.covering)
    return inner._replace(kind=outer) if is_covered else inner


def strengthen_field(cls: type, name: str, value: Any, old: Any = None) -> Any:
    """`strengthen` for the value of a field of an `es.Module`."""
    return strengthen(value, declarations(cls).get(name, NOTHING), old)


def to_strong(leaf: Any, old: Any = None, kind: Kind | None = None) -> Any:
    """A number or a weak array as a strong array; anything else unchanged.

    The dtype is that of the array `old`, if there is one and it can hold the value.
    """
    if type(leaf) in NUMBERS:
        if is_array(old) and not jnp.issubdtype(old.dtype, jnp.inexact):
            kind = None  # an integer for an integer
        # `jnp.asarray(1.0)` without a dtype would be weak.
        return jnp.asarray(leaf, _strong_dtype(leaf, dtype_for(leaf, kind), old))
    if is_weak(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(weak_type=False)
        return leaf.astype(_strong_dtype(leaf, leaf.dtype, old))
    return leaf


def dtype_for(number: Any, kind: Kind | None) -> Any:
    """The dtype of a Python number in a field of a kind."""
    # `scale: es.Parameter = 1` means a weight, and integers are not trained.
    is_weight = type(number) is int and kind is not None and issubclass(kind, Parameter)
    return jnp.result_type(float if is_weight else type(number))


def _strong_dtype(leaf: Any, own: Any, old: Any) -> Any:
    if not is_array(old) or not is_numeric(old.dtype):
        return own
    dtype = canonical(old.dtype)
    return dtype if _promoted(dtype, leaf) == dtype and holds(dtype, leaf) else own


def _promoted(dtype: Any, leaf: Any) -> Any:
    """The dtype to which JAX promotes a number or a weak array beside this dtype."""
    # Under strict promotion JAX would raise an error that does not name the field.
    # `np.zeros` adds no operation to a trace.
    with jax.numpy_dtype_promotion("standard"):
        return canonical(jnp.result_type(np.zeros((), dtype), leaf))


def is_weak(x: Any) -> bool:
    """Whether an array is weakly typed. Typed keys lack the attribute."""
    return getattr(x, "weak_type", False)


def fit_leaf(old: Any, new: Any, name: str) -> Any:
    """`new`, converted if needed to replace `old`; `ValueError` if it does not fit."""
    if isinstance(new, jax.ShapeDtypeStruct) and isinstance(old, jax.Array):
        raise ValueError(f"Cannot write `{name}`: `{show(new)}` has no values.")
    if not is_array(old) or not is_numeric(old.dtype):
        return new
    dtype = canonical(old.dtype)
    is_number = type(new) in NUMBERS  # `np.float64`, a subclass of `float`, is not one
    if is_number or is_weak(new):
        if (promoted := _promoted(dtype, new)) != dtype:
            given = f"the number {new!r}" if is_number else f"`{show(new)}`"
            error = _DTYPE.format(name, show(old), given, promoted.name, dtype.name)
            raise ValueError(error)
    elif not is_numpy(new) or not same_type(old, new):
        return new
    # JAX would wrap such an integer around. Without x64, that includes integers of a
    # NumPy int64 array.
    if not holds(dtype, new):
        given = repr(new) if is_number else f"an integer in `{show(new)}`"
        raise ValueError(_RANGE.format(name, given, show(old)))
    return new if is_numpy(new) else jnp.asarray(new, dtype=dtype)


def holds(dtype: Any, x: Any) -> bool:
    """Whether a dtype can represent all integers in a number or an array.

    `True` if this process cannot read the values: in a tracer, or in an array that is
    partly on other processes. JAX wraps such integers around.
    """
    if type(x) is not int and not (is_array(x) and jnp.issubdtype(x.dtype, np.integer)):
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        least, most = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    else:  # `int` of the largest bfloat16 is negative
        least, most = float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)
    if type(x) is int:
        return least <= x <= most
    own = jnp.iinfo(x.dtype)
    # Reading an array waits for its values, so compare the dtypes first.
    if not is_readable(x) or x.size == 0 or least <= own.min and own.max <= most:
        return True
    values = np.asarray(x)
    return least <= int(values.min()) and int(values.max()) <= most


def is_readable(x: Any) -> bool:
    """Whether this process can read the values of an array."""
    is_concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_numpy(x) or (is_concrete and x.is_fully_addressable)


def is_traceable(x: Any) -> bool:
    """Whether `x` is an array that JAX can trace."""
    return is_array(x) and fits_jax(x)


def fits_jax(x: Any) -> bool:
    """Whether an array has a dtype in JAX that can hold its values.

    Not strings, for example; and without x64, no int64 or float64 that is too large.
    """
    if not is_numpy(x):
        return True
    if not is_numeric(x.dtype):
        return False
    try:
        dtype = jnp.result_type(x)
    except TypeError:  # such as `np.longdouble`
        return False
    return fits(dtype, x)


def fits(dtype: Any, x: Any) -> bool:
    """Whether a dtype can hold all numbers of a NumPy array, but for rounding.

    No integer may wrap around, and no float become infinite or NaN.
    """
    if not holds(dtype, x):
        return False
    if dtype == x.dtype or not jnp.issubdtype(dtype, jnp.inexact):
        return True
    new = converted(dtype, x)
    # Compare NaNs, too: some float8 dtypes have no infinity, and overflow to NaN.
    return all(np.array_equal(is_(x), is_(new)) for is_ in (np.isinf, np.isnan))


def converted(dtype: Any, x: Any) -> Any:
    """A NumPy array in a different dtype, without NumPy's warnings."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def as_jax(x: Any, name: str) -> jax.Array:
    """A number or a NumPy array as a new JAX array with equal values."""
    dtype = jnp.result_type(x)
    if not holds(dtype, x):
        raise ValueError(_NEEDS_X64.format(name, show(x), dtype.name))
    # JAX may read a NumPy array after `asarray` has returned, or even use its memory.
    return jnp.asarray(np.array(x) if is_numpy(x) else x)


def same_type(old: Any, new: Any) -> bool:
    """Whether two arrays have the same shape, and the same dtype as JAX arrays."""
    if not is_array(new) or old.shape != new.shape:
        return False
    return old.dtype == new.dtype or canonical(old.dtype) == canonical(new.dtype)


def canonical(dtype: Any) -> Any:
    """The dtype to which JAX converts a dtype: float32 for float64 without x64."""
    return jax.dtypes.canonicalize_dtype(dtype) if is_numeric(dtype) else dtype


def is_numeric(dtype: Any) -> bool:
    """Whether a dtype is for numbers or bools, not strings (NumPy) or keys (JAX)."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))


_DTYPE: Final = """Cannot write `{}`: its value is `{}`, and {} would make it {}. \
State keeps its dtype, because a new one recompiles the step. Convert the new value, \
`jnp.asarray(value, dtype=jnp.{})`, or give the field the wider dtype initially."""

_RANGE: Final = """Cannot write `{}`: {} does not fit into `{}`. Give the field a \
wider dtype initially."""

_NEEDS_X64: Final = """`{}`: an integer in `{}` does not fit into `{}`, the dtype to \
which JAX converts it. Call `jax.config.update('jax_enable_x64', True)` at the start \
of the program, or use smaller numbers."""
