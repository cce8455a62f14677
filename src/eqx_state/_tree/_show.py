"""Pytrees in words, for messages: no values, no whole models."""

from typing import Any

import equinox as eqx


def show(tree: Any) -> str:
    """A pytree on as few lines as it fits, an array as its dtype and shape."""
    return eqx.tree_pformat(tree, short_arrays=True)
