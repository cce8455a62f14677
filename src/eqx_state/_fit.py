"""State keeps its shape and dtype: what is written is made to fit, or does not fit."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ._base import is_eqx_module
from ._strong import is_weak, NUMBERS
from ._traverse import is_array


def fit(old: Any, new: Any, name: str) -> Any:
    """`new` with the numbers and weak arrays in it cast to the dtypes of `old`."""
    structures = [jtu.tree_structure(x, is_leaf=is_eqx_module) for x in (old, new)]
    if structures[0] != structures[1]:
        return new
    return jtu.tree_map(
        lambda a, b: fit_leaf(a, b, name), old, new, is_leaf=is_eqx_module
    )


def fit_leaf(old: Any, new: Any, name: str) -> Any:
    if not is_array(old) or jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return new
    is_number = type(new) in NUMBERS  # and not `np.float64`, a subclass of `float`
    if not is_number and not (is_weak(new)):
        return new
    dtype = jax.dtypes.canonicalize_dtype(old.dtype)
    with jax.numpy_dtype_promotion("standard"):
        promoted = (
            jnp.promote_types(dtype, type(new))
            if is_number
            else jnp.result_type(jnp.zeros((), dtype), new)
        )
    if promoted != dtype:
        # Without 64 bits JAX has no float64, which is what a Python float promotes to.
        other = jax.dtypes.canonicalize_dtype(promoted).name
        given = f"the number {new!r}" if is_number else show(new)
        raise ValueError(
            f"Cannot write `{name}`: it holds {show(old)}, and {given} would make it"
            f" {other}. State keeps its dtype, or every step would be compiled"
            f" anew. Convert it: `jnp.asarray(value, dtype=jnp.{dtype.name})`, or make"
            " the field of that dtype to begin with."
        )
    try:
        return jnp.asarray(new, dtype=dtype)
    except OverflowError as e:
        raise ValueError(
            f"Cannot write `{name}`: {new!r} does not fit into {show(old)}. Make the"
            " field of a wider dtype to begin with."
        ) from e


def show(x: Any) -> str:
    return f"`{eqx.tree_pformat(x, short_arrays=True)}`"


def same_type(old: Any, new: Any) -> bool:
    if not is_array(new):
        return False
    dtypes = [
        (
            x.dtype
            if jnp.issubdtype(x.dtype, jax.dtypes.extended)
            else jax.dtypes.canonicalize_dtype(x.dtype)
        )
        for x in (old, new)
    ]
    return old.shape == new.shape and dtypes[0] == dtypes[1]


def is_numeric(dtype: Any) -> bool:
    """Whether JAX has arrays of a NumPy dtype; NumPy has strings and objects, too."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))
