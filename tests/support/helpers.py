"""Checks and pytest marks that several test files share."""

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_state as es


# Set by `nox -s fuzz`, to run the same tests with many more examples and rounds.
IS_FUZZ = bool(os.environ.get("EQX_STATE_FUZZ"))

leaks_on_purpose = pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks, reason="JAX's own check is the first to tell"
)


reuses_keys = pytest.mark.usefixtures("_keys_may_be_reused")


@contextlib.contextmanager
def keys_may_be_reused() -> Iterator[None]:
    """Disable JAX's check in all threads: a test calls one model several times."""
    checked = jax.config.jax_debug_key_reuse
    jax.config.update("jax_debug_key_reuse", False)
    try:
        yield
    finally:
        jax.config.update("jax_debug_key_reuse", checked)


@contextlib.contextmanager
def untouched(tree: Any) -> Iterator[None]:
    """Assert that the tree is bit for bit the same afterwards, in the same objects."""
    leaves, treedef = jax.tree.flatten(tree)
    values = [copy.deepcopy(x) if eqx.is_array(x) else x for x in leaves]
    yield
    after, after_def = jax.tree.flatten(tree)
    assert after_def == treedef
    for old, value, new in zip(leaves, values, after, strict=True):
        assert new is old
        # A write in place into a NumPy array would keep its identity.
        assert eqx.tree_equal(new, value)


@contextlib.contextmanager
def rejects(model: Any, error: Any, *fragments: str) -> Iterator[None]:
    """Assert that the block raises one of these errors, and leaves the model alone.

    The message must match all fragments, which are regexes.
    """
    with untouched(model), pytest.raises(error, match=fragments[0]) as info:
        yield
    assert info.type in (error if isinstance(error, tuple) else (error,))
    for fragment in fragments[1:]:
        info.match(fragment)


def close(a: Any, b: Any) -> None:
    """Assert equal trees: numbers up to rounding, keys exactly."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert (x == y).all()
        else:
            assert jnp.result_type(x) == jnp.result_type(y)
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def same(a: Any, b: Any) -> bool:
    """Whether two trees have equal structures and the identical leaves."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def kinds(tree: Any) -> dict[str, Any]:
    """The kind of each array, by name."""
    return {part.name: part.kind for part in es.parts(tree)}
