"""Errors for a write that the scope of the module does not allow.

Errors for a module that no scope owns are in `_outside_scope.py`.
"""

import dataclasses
from typing import Any, Final

import jax.numpy as jnp

from .._kinds._kinds import kind_name
from .._tree._base import BaseModule, declared_fields, get_place
from .._tree._keys import is_key
from .._tree._walk import is_array, Visit, walk
from .._tree._weak_types import NUMBERS
from ._scope import is_in_backward_rule, Scope


CLOSED: Final = """Cannot write `{}`: the scope of `es.mutable` that owned this module \
has closed, and has returned the new model. A module kept from inside (in a closure, a \
generator, a thread) is only a snapshot. Write while the call runs, or call again: \
`y, model = es.mutable(model)(x)`."""

STATIC: Final = """Cannot write `{}`: a static field is part of the structure of the \
tree, which a call cannot change. Declare it `es.State` if it is an array; modes are \
switched from outside: `model = model.eval()`."""

_TRACE: Final = """Cannot {0} {1} here: this code runs inside a JAX transform, and the \
mutable scope was opened outside of it. The values computed here are tracers, which \
would leak. Use the transform of `es`, which carries state through and is called like \
its namesake in JAX:

    jax.vmap(lambda x: self.layer(x))(xs)    # wrong
    es.vmap(lambda x: self.layer(x))(xs)     # right

Likewise `es.scan`, `es.while_loop`, `es.fori_loop`, `es.cond`, `es.switch`, \
`es.checkpoint`, `es.jit`, `es.vjp`, `es.jvp`, `es.linearize`, `es.jacfwd`, \
`es.jacrev`, `es.hessian`; for `jax.grad` it is `es.value_and_grad`, with the model as \
its argument. Or call `es.mutable` inside the transform, and return the new model from \
it."""

_BACKWARD: Final = """Cannot {0} {1} here: this is the backward rule of an \
`es.custom_vjp`, which runs only if there is a gradient, and nothing comes out of it \
but cotangents. Write in the function and in its forward rule, of which one runs:

    def bwd(layer, g): layer.calls = layer.calls + 1    # wrong
    def fwd(layer, x): layer.calls = layer.calls + 1    # right"""

_NO_FIELD: Final = """Cannot write `{0}.{1}`: `{0}` has no field `{1}`. Declare it in \
the class body, `{1}: {2}`{3}. {4}"""

_NO_KIND: Final = """Cannot write `{0}`: `{1}` is {2}, and this scope writes {3}. \
Declare what a forward pass changes: `{4}: es.State`."""

_NOT_THERE: Final = """Cannot write `{0}`: `{1}` is a `{2}` that is not there yet, and \
a call keeps the structure of the model. Layers that take their shapes from an input \
make their arrays in `init`, which returns a new model:

    model = model.init(42, x)"""

_OTHER_KIND: Final = """Cannot write `{0}`: `{1}` is a `{2}`, and this scope writes \
{3}. If it is meant, name the kind: `es.mutable(f, kinds={4})`, or `kinds=es.TreePart` \
for all. If it is not a `{2}`, declare what it is: `{5}: es.State`."""


def frozen(message: str) -> dataclasses.FrozenInstanceError:
    """The error that Python raises for a write to a frozen dataclass."""
    return dataclasses.FrozenInstanceError(message)


def trace_message(
    scope: Scope | None, name: str, where: str = "", verb: str = "write"
) -> str:
    """The error for state that is written in a trace that it cannot leave."""
    text = _BACKWARD if is_in_backward_rule(scope) else _TRACE
    return text.format(verb, f"`{where}` (`{name}`)" if where else f"`{name}`")


def kind_at(visit: Visit) -> type | None:
    """The kind of the array here, or the declared one if there is something else."""
    return visit.kind if is_array(visit.node) else visit.context.declared


def kind_message(visit: Visit, where: str, scope: Scope, old: Any) -> str:
    """The error for an array of a kind that the scope does not write."""
    kind, name, field = kind_at(visit), visit.name, visit.context.field
    allowed = " and ".join(f"`{k.__name__}`" for k in scope.kinds)
    if kind is None:
        what = "an array without a kind" if is_array(visit.node) else "not an array"
        return _NO_KIND.format(where, name, what, allowed, field)
    if old is None:
        return _NOT_THERE.format(where, name, kind.__name__)
    return _OTHER_KIND.format(
        where, name, kind.__name__, allowed, kind_name(kind), field
    )


def no_field_message(module: BaseModule, name: str, value: Any) -> str:
    """The error for a field that is assigned and that the class does not declare."""
    place = get_place(module)
    is_forward = place is not None and not place.scope.is_initializing
    constant = ""
    if type(value) in NUMBERS and not is_forward:
        constant = f" (or, for a constant, `{name}: {type(value).__name__}`)"
    return _NO_FIELD.format(
        type(module).__qualname__,
        name,
        _annotation_for(value, is_forward),
        constant,
        declared_fields(module),
    )


def _annotation_for(value: Any, is_forward: bool) -> str:
    """How to declare a field that will hold `value`.

    `is_forward`: a forward pass assigns it, so it is state. Elsewhere training is the
    usual reason to hold an inexact array.
    """
    visits = walk(value)
    if not all(visit.is_leaf for visit in visits):
        return _class_name(type(value))  # a module, or a container of modules
    held = [visit.node for visit in visits]
    if held and all(map(is_key, held)):
        return "es.Rng"
    is_inexact = [is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x in held]
    if held and all(is_inexact) and not is_forward:
        return "es.Parameter"
    if isinstance(value, str):
        return "str"
    return "Callable" if callable(value) else "es.State"


def _class_name(cls: type) -> str:
    """A class as users write it: `eqx.nn.Linear`, `es.nn.BatchNorm`, `dict`."""
    library, _, _ = cls.__module__.partition("._")
    aliases = {"equinox": "eqx.", "eqx_state": "es."}
    first, dot, rest = library.partition(".")
    prefix = f"{aliases[first]}{rest}{dot}" if first in aliases else ""
    return prefix + cls.__name__
