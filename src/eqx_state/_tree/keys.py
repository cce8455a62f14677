"""PRNG keys: created from seeds, split, and derived from paths."""

import functools as ft
import hashlib
import operator
from typing import Any

import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from .._errors import show
from .._kinds.kinds import Rng
from .._typing import Tree
from .base import is_eqx_module
from .walk import is_array, map_leaves, Visit


def as_key(seed_or_key: Any) -> Array:
    """A PRNG key from an integer seed; a typed or legacy key is returned unchanged."""
    if is_key(seed_or_key):
        return seed_or_key
    try:
        return jr.key(operator.index(seed_or_key))
    except TypeError:
        is_model = is_eqx_module(seed_or_key)
        given = type(seed_or_key).__name__ if is_model else show(seed_or_key)
        raise TypeError(
            f"`{given}` is neither a PRNG key nor an integer seed. Pass"
            " `jax.random.key(42)`, or `42`."
        ) from None


def is_typed(key: Any) -> bool:
    """Whether `key` is a typed PRNG key (`jax.random.key`), or an array of them."""
    return is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def is_key(x: Any) -> bool:
    """Whether `x` can be split: a typed key, a legacy one, or an array of either."""
    return is_typed(x) or (
        is_array(x) and x.dtype == jnp.uint32 and x.ndim > 0 and x.shape[-1] in (2, 4)
    )


def key_at(key: Array, name: str) -> Array:
    """A key derived from `key` and a name, the same in every process."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    for word in (digest[:4], digest[4:]):
        key = jr.fold_in(key, jnp.uint32(int.from_bytes(word, "little")))
    return key


def data_of(x: Any) -> Any:
    """The data of a typed key; anything else unchanged."""
    return jr.key_data(x) if is_typed(x) else x


def wrapped_like(data: Any, x: Any) -> Any:
    """The inverse of `data_of`: a typed key like `x` if `x` is one, else `data`."""
    return jr.wrap_key_data(data, impl=jr.key_impl(x)) if is_typed(x) else data


def clone(x: Any) -> Any:
    """`x`; if it is a typed key, one that `jax_debug_key_reuse` counts separately.

    JAX cannot differentiate `jax.random.clone`, and a key that a `jax.custom_vjp` has
    returned has a tangent.
    """
    return wrapped_like(data_of(x), x)


def copied(x: Any) -> Any:
    """A copy of an array, which survives donation of the array.

    In a trace, the method `copy` of a typed key is an error of JAX.
    """
    if is_typed(x):
        return jr.wrap_key_data(jr.key_data(x).copy(), impl=jr.key_impl(x))
    return x.copy()


def num_key_axes(key: Array) -> int:
    """The number of axes of an array of keys, not counting a legacy key's words."""
    return key.ndim - (0 if is_typed(key) else 1)


def split_key(key: Array, num: int) -> Array:
    """`num` keys from a key or from each of an array of keys, along a new last axis."""
    # A new first axis would need a transpose, which JAX's check for reused keys counts
    # as a use.
    if num_key_axes(key) == 0:
        return jr.split(key, num)
    return jax.vmap(lambda k: split_key(k, num))(key)


# Outside of a trace, `jax.jit` runs one program instead of five operations. Inside, the
# program is inlined, and its trace is cached.
@ft.partial(jax.jit, inline=True)
def next_keys(key: Array) -> tuple[Array, Array]:
    """The key to store and the key to draw from, or an array of each."""
    keys, axis = split_key(key, 2), num_key_axes(key)
    kept, drawn = (lax.index_in_dim(keys, i, axis, keepdims=False) for i in range(2))
    return kept, drawn


def reseed(tree: Tree, key: Any) -> Tree:
    """Replace every PRNG key (every array of kind `es.Rng`) by a new one.

    **Arguments:**

    - `tree`: any pytree.
    - `key`: a PRNG key, or an integer seed.

    **Returns:**

    The tree, with each `Rng` leaf derived from `key` and the leaf's path. All keys are
    distinct, and adding a layer does not change the keys of the others.

    !!! example

        ```python
        import eqx_state as es
        import jax.random as jr

        model = [es.nn.Dropout(0.5, key=jr.key(0)), es.nn.Dropout(0.5, key=jr.key(0))]
        model = es.reseed(model, 42)
        assert model[0].rng != model[1].rng
        ```
    """
    key = as_key(key)

    def renew(visit: Visit) -> Any:
        x = visit.node
        return _key_like(x, key_at(key, visit.name)) if visit.is_a(Rng) else x

    return map_leaves(renew, tree)


def _key_like(old: Array, key: Array) -> Array:
    """Keys derived from `key`, with the shape and the implementation of `old`."""
    return wrapped_like(jr.bits(key, data_of(old).shape, jnp.uint32), old)
