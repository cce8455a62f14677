"""PRNG keys as state: a stream that returns a fresh key on each call."""

from typing import Any

from jaxtyping import Array

from ._kinds.kinds import Rng
from ._state.module import Module
from ._tree.keys import as_key, next_keys


class RngStream(Module):
    """A module that returns a fresh PRNG key on each call.

    Each call advances the stream, in train and eval mode alike, so calls need
    `es.mutable` in both modes.

    !!! example

        ```python
        import eqx_state as es
        import jax.random as jr

        stream = es.RngStream(jr.key(0))
        a, stream = es.mutable(stream)()
        b, stream = es.mutable(stream)()
        assert a != b
        ```
    """

    key: Rng

    def __init__(self, key: Any):
        """**Arguments:**

        - `key`: a PRNG key, or an integer seed.
        """
        self.key = as_key(key)

    def __call__(self) -> Array:
        """**Returns:**

        A PRNG key that no other call has returned.

        **Raises:**

        - `dataclasses.FrozenInstanceError`: called outside `es.mutable`.
        """
        self.key, key = next_keys(self.key)
        return key
