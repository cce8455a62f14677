"""Dropout that draws from its own key."""

import functools as ft
import numbers
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from .._compat import split_like
from .._errors import show
from .._kinds.kinds import Rng
from .._state.lazy import Initializer
from .._state.module import Module
from .._tree.keys import as_key, is_key, next_keys, num_key_axes


class Dropout(Module):
    """Sets elements to zero at random in train mode, and scales the others up.

    The layer keeps each element with probability `1 - p`, and divides it by `1 - p`
    (Srivastava et al., 2014, in the inverted form that Equinox uses). In eval mode, and
    with `p=0`, it returns its input and draws no key.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp
        import jax.random as jr

        dropout = es.nn.Dropout(0.5, key=jr.key(0))
        y, dropout = es.mutable(dropout)(jnp.ones(1000))
        assert set(y.tolist()) == {0.0, 2.0}
        assert (dropout.eval()(jnp.ones(3)) == 1).all()
        ```
    """

    rng: Rng
    p: float = eqx.field(static=True)

    def __init__(self, p: float = 0.5, *, key: Any = None):
        """**Arguments:**

        - `p`: the fraction of elements to drop, at least 0 and at most 1. Default: 0.5.
        - `key`: a PRNG key, or an integer seed, for all random numbers of the layer.
            Default: `init` draws one.

        **Raises:**

        - `TypeError`: `p` is a key.
        - `ValueError`: `p` is not between 0 and 1.
        """
        if is_key(p):
            raise TypeError(
                "`es.nn.Dropout(key)`: the first argument is the fraction of elements"
                " to drop. Pass the key by its name: `es.nn.Dropout(0.5, key=key)`."
            )
        self.p = float(p)
        self.rng = Initializer(lambda key: key) if key is None else as_key(key)
        self._eqx_state_check()

    def _eqx_state_check(self) -> None:
        if not (isinstance(self.p, numbers.Real) and 0 <= self.p <= 1):
            raise ValueError(
                f"`es.nn.Dropout(p={show(self.p)})`: `p` is the fraction of elements to"
                " drop, and must be a number from 0 to 1."
            )

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """**Arguments:**

        - `x`: an array of any shape.
        - `key`: used instead of the layer's own key, which then does not advance.

        **Returns:**

        An array of the shape and dtype of `x`. Integers are rounded: 3 scaled up by
        1 / 0.8 is 4.

        **Raises:**

        - `ValueError`: the layer has several keys, as in an ensemble without `es.vmap`.
        """
        if not self.training or self.p == 0:
            return x
        if key is None:
            self.rng, key = next_keys(self.rng)
        if num_key_axes(key):
            raise ValueError(_SEVERAL.format(jnp.shape(key)))
        x = jnp.asarray(x)
        keep = 1 - self.p
        if keep == 0:
            return jnp.zeros_like(x)
        return _drop(x, key, float(keep))


_SEVERAL: Final = """`es.nn.Dropout` has keys of shape {}, one for each member of an \
ensemble. Map over the members: `es.vmap(ensemble, in_axes=None, axes={{...: 0}})(x)`; \
with an input for each, `es.vmap(ensemble, axes={{...: 0}})(xs)`."""


# `jit` as for `_normalize` in `_batch_norm.py`.
@ft.partial(jax.jit, static_argnums=2, inline=True)
def _drop(x: Array, key: Array, keep: float) -> Array:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        scaled = x / keep
    else:
        scaled = jnp.round(x.astype(float) / keep).astype(x.dtype)
    mask = split_like(jr.bernoulli(key, keep, x.shape), x)
    return jnp.where(mask, scaled, jnp.zeros_like(x))
