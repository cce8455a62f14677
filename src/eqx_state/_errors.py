"""The two errors that a caller might want to catch. All others are built-in types."""


class TraceError(RuntimeError):
    """State was written inside a JAX transform that cannot carry it out.

    `jax.vmap`, `jax.lax.scan`, `jax.grad`, … replace arrays by tracers that mean
    nothing once the transform has returned. The `es` transform of the same name carries
    the state through.
    """


class NotInitializedError(RuntimeError):
    """A model still holds an `es.Initializer`, or a `module_init` that has not run."""
