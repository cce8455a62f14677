"""Checks that several test files share."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import pytest


@contextlib.contextmanager
def untouched(tree: Any) -> Iterator[None]:
    """Afterwards the tree is bit for bit what it was, whatever happened."""
    leaves, treedef = jax.tree.flatten(tree)
    values = [copy.deepcopy(x) if eqx.is_array(x) else x for x in leaves]
    yield
    after, after_def = jax.tree.flatten(tree)
    assert after_def == treedef
    for old, value, new in zip(leaves, values, after, strict=True):
        assert new is old
        assert eqx.tree_equal(new, value)  # NumPy arrays could have been written into


@contextlib.contextmanager
def rejects(model: Any, error: Any, *fragments: str) -> Iterator[None]:
    """Raises this error (or one of these), with all these regexes in its text.

    The model is untouched.
    """
    with untouched(model), pytest.raises(error, match=fragments[0]) as info:
        yield
    assert info.type in (error if isinstance(error, tuple) else (error,))
    for fragment in fragments[1:]:
        info.match(fragment)
