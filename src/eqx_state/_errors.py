"""The two errors that a caller might want to catch. All others are built-in types."""

import equinox as eqx

from ._typing import PyTree


class TraceError(RuntimeError):
    """State was written inside a JAX transform that cannot carry it out.

    `jax.vmap`, `jax.lax.scan`, `jax.grad`, … replace arrays by tracers that mean
    nothing once the transform has returned. The `es` transform of the same name carries
    the state through.
    """


class NotInitializedError(RuntimeError):
    """A model still holds an `es.Initializer`, or a `module_init` that has not run."""


# --- Pytrees in words, for messages: no values, no whole models.


def show(tree: PyTree) -> str:
    """A pytree on as few lines as it fits, an array as its dtype and shape."""
    return eqx.tree_pformat(tree, short_arrays=True)
