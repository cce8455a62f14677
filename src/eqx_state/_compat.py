"""Every place where a JAX or Python version, or a private name of JAX, matters."""

import inspect
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax
import jax.core


try:
    from jax.extend.core import get_opaque_trace_state as _get_trace_state
except ImportError:  # JAX < 0.8
    from jax.core import (  # pyright: ignore[reportAttributeAccessIssue]
        get_opaque_trace_state as _get_trace_state,
    )


def trace_state() -> Any:
    """Which trace is active now: equal (`==`) values mean the same trace."""
    return _get_trace_state(convention="eqx_state")


def has_escaped(leaf: Any) -> bool:
    """Whether `leaf` is a tracer of a trace that is not open here any more.

    A tracer may be used where it was made and in every trace inside; so it is looked
    for in the chain from the active trace outwards.
    """
    if not isinstance(leaf, jax.core.Tracer):
        return False
    trace = trace_state()._trace_ref()
    while trace is not None:
        if trace is leaf._trace:
            return False
        trace = getattr(trace, "parent_trace", None)
    return True


def is_mapped(leaf: Any) -> bool:
    """Inside `jax.vmap`: whether the lanes have different values for `leaf`."""
    if not isinstance(leaf, jax.core.Tracer):
        return False
    is_of_this_vmap = leaf._trace is trace_state()._trace_ref()
    return is_of_this_vmap and getattr(leaf, "batch_dim", None) is not None


def spread_like(mapped: list[tuple[Any, int]], x: Any) -> Any:
    """`x`, spread over devices along axis 0 as these arrays are along theirs.

    `jax.vmap` wants what it maps over spread alike where types have shardings (a mesh
    with `AxisType.Explicit`, as `jax.make_mesh` makes). Elsewhere `x` as it is.
    """
    for value, axis in mapped:
        sharding = jax.typeof(value).sharding
        if (names := sharding.spec[axis]) is not None:
            spec = jax.sharding.PartitionSpec(names)
            like = jax.sharding.NamedSharding(sharding.mesh, spec)
            return jax.sharding.reshard(x, like)
    return x


def own_annotations(cls: type) -> dict[str, Any]:
    """The annotations written in the body of `cls`, unresolved names and all."""
    try:
        return inspect.get_annotations(cls)
    except NameError:  # Python >= 3.14 evaluates lazily
        import annotationlib  # pyright: ignore[reportMissingImports]

        return annotationlib.get_annotations(
            cls, format=annotationlib.Format.FORWARDREF
        )


if TYPE_CHECKING:
    from equinox._module._module import (
        _ModuleMeta as EquinoxMeta,  # pyright: ignore[reportPrivateUsage]
    )
else:
    EquinoxMeta = type(eqx.Module)
