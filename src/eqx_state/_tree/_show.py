"""Pytrees in words, for messages: no values, no whole models."""

import equinox as eqx

from .._typing import PyTree


def show(tree: PyTree) -> str:
    """A pytree on as few lines as it fits, an array as its dtype and shape."""
    return eqx.tree_pformat(tree, short_arrays=True)
