"""Numbers and weak types become strongly typed arrays where a field declares a kind.

In state both would recompile the training step: a weak type becomes strong at the first
update, and a Python number is another constant at every step.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp

from .._kinds._fields import declarations, declared_child
from .._kinds._spec import NOTHING, Spec
from ._base import is_eqx_module
from ._children import children, with_children


NUMBERS: Final = (bool, int, float, complex)


def strengthen(value: Any, spec: Spec) -> Any:
    """`value` with its numbers and weak arrays made strong where `spec` has a kind.

    The fields of a module inside `value` are left to their own declarations.
    """
    if spec == NOTHING or is_eqx_module(value) or value is None:
        return value
    below = children(value)
    if below is None:
        return value if spec.kind is None else to_strong(value)
    new = [strengthen(child, _inner(spec, value, key)) for key, child in below]
    is_same = all(x is child for x, (_, child) in zip(new, below, strict=True))
    return value if is_same else with_children(value, new)


def _inner(spec: Spec, node: Any, key: Any) -> Spec:
    inner = declared_child(spec, node, key)
    return inner if inner.kind else inner._replace(kind=spec.kind)


def strengthen_field(cls: type, name: str, value: Any) -> Any:
    """`strengthen` for a value of a field of an `es.Module`."""
    return strengthen(value, declarations(cls).get(name, NOTHING))


def to_strong(leaf: Any) -> Any:
    """A number as an array, a weak array as a strong one; anything else as it is."""
    if type(leaf) in NUMBERS:
        # With a dtype, since `jnp.asarray(1.0)` would stay weak.
        return jnp.asarray(leaf, dtype=jnp.result_type(type(leaf)))
    if is_weak(leaf):
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return leaf.update(weak_type=False) if is_shape else leaf.astype(leaf.dtype)
    return leaf


def is_weak(x: Any) -> bool:
    """Whether an array is weakly typed. Keys have no such attribute."""
    return getattr(x, "weak_type", False)
