"""Writing in a scope, `self.field = value`, and sowing: what a scope allows."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import has_escaped, trace_state
from .._errors import TraceError
from .._kinds._kinds import kind_name
from .._tree._base import (
    BaseModule,
    declared_fields,
    fields_of,
    get_place,
    is_module,
)
from .._tree._compare import same
from .._tree._context import Context
from .._tree._keys import is_key
from .._tree._show import show
from .._tree._walk import is_array, is_numpy, leaves, modules_in, name_of, Visit, walk
from .._tree._weak_types import NUMBERS, strengthen_field, to_strong
from .._typing import KeyPath
from ._fit import as_jax, is_numeric
from ._scope import own, Place, Scope


def write(module: BaseModule, place: Place, name: str, value: Any) -> None:
    """`module.name = value` inside a scope."""
    with place.scope.alone(transform=False):
        _write(module, place, name, value)


def _write(module: BaseModule, place: Place, name: str, value: Any) -> None:
    scope, cls = place.scope, type(module)
    where = f"{cls.__qualname__}.{name}"
    key = jtu.GetAttrKey(name)
    path = (*place.path, key)
    full_name = name_of(path)
    if not scope.is_open:
        raise frozen(
            f"Cannot write `{where}`: the scope of `es.mutable` that owned this module"
            " has closed, and has returned the new model. A module kept from inside"
            " (in a closure, a generator, a thread) is only a snapshot. Write while"
            " the call runs, or call again: `y, model = es.mutable(model)(x)`."
        )
    if scope.trace != trace_state():
        raise TraceError(trace_message(full_name, where))
    context = place.context.enter(module, key)
    field = next((f for f in dataclasses.fields(module) if f.name == name), None)
    if field is None:
        drawn = scope.accept(None, value, path, context)
        raise frozen(no_field_message(module, name, drawn))
    if field.metadata.get("static", False) and not scope.allows(None):
        raise frozen(
            f"Cannot write `{where}`: a static field is part of the structure of the"
            " tree, which a call cannot change. Declare it `es.State` if it is an"
            " array; modes are switched from outside: `model = model.eval()`."
        )
    old = fields_of(module).get(name)
    value = scope.accept(old, value, path, context)
    if is_array(old) and is_array(value):
        # Most writes: nothing in it is to be looked for, and nothing to be owned.
        new = to_strong(value)
        _check_kind(old, Visit(path, new, context, True), scope, where)
    else:
        value = strengthen_field(cls, name, value)
        _check_kinds(old, value, path, context, scope, where)
        new = _adopt(value, scope)
        for visit in modules_in(old):  # what was written there is replaced knowingly
            scope.written.pop(id(visit.node), None)
        own(new, scope, path, context)
    object.__setattr__(module, name, new)
    scope.written[id(module)] = module, full_name


def _belongs_to(x: Any, scope: Scope) -> bool:
    place = get_place(x) if is_module(x) else None
    return place is not None and place.scope is scope


def _adopt(value: Any, scope: Scope) -> Any:
    """`value` with copies of the modules that do not belong to `scope` already."""
    if all(v.is_leaf for v in walk(value)):
        return value
    return jtu.tree_map(lambda x: x, value, is_leaf=lambda x: _belongs_to(x, scope))


def _check_kinds(
    old: Any, new: Any, path: KeyPath, context: Context, scope: Scope, where: str
) -> None:
    """Every leaf that differs must be of a kind that the scope allows.

    A module that the scope owns already may move; what comes of it is seen at the end.
    """
    before = {v.path: v.node for v in leaves(old, path, context)}
    for visit in leaves(new, path, context, lambda x: _belongs_to(x, scope)):
        if not is_module(visit.node):
            _check_kind(before.get(visit.path), visit, scope, where)


def _check_kind(old: Any, visit: Visit, scope: Scope, where: str) -> None:
    if not same(old, visit.node) and not scope.allows(kind_at(visit)):
        raise frozen(kind_message(visit, where, scope, old))


def kind_at(visit: Visit) -> type | None:
    """The kind of what is, or should be, an array here."""
    return visit.kind if is_array(visit.node) else visit.context.declared


def kind_message(visit: Visit, where: str, scope: Scope, old: Any) -> str:
    kind, allowed = (
        kind_at(visit),
        " and ".join(f"`{k.__name__}`" for k in scope.kinds),
    )
    if kind is None:
        what = "an array without a kind" if is_array(visit.node) else "not an array"
        return (
            f"Cannot write `{where}`: `{visit.name}` is {what}, and this scope writes "
            f"{allowed}. What a forward pass changes is declared so: "
            f"`{visit.context.field}: es.State`."
        )
    if old is None:
        return (
            f"Cannot write `{where}`: `{visit.name}` is a `{kind.__name__}` that is not"
            " there yet, and a call keeps the structure of the model. Layers that take"
            " their shapes from an input make their arrays in `init`, which returns a"
            " new model:\n\n    model = model.init(42, x)"
        )
    return (
        f"Cannot write `{where}`: `{visit.name}` is a `{kind.__name__}`, and this scope"
        f" writes {allowed}. If it is meant, name the kind: `es.mutable(f,"
        f" kinds={kind_name(kind)})`, or `kinds=es.TreePart` for all. If it is no"
        f" `{kind.__name__}`, declare what it is: `{visit.context.field}: es.State`."
    )


def no_field_message(module: BaseModule, name: str, value: Any) -> str:
    """The error for a field that is assigned and that the class does not declare."""
    cls = type(module).__qualname__
    place = get_place(module)
    is_forward = place is not None and not place.scope.is_initializing
    declared = _annotation_for(value, is_forward)
    constant = ""
    if type(value) in NUMBERS and not is_forward:
        constant = f" (or, for a constant, `{name}: {type(value).__name__}`)"
    return (
        f"Cannot write `{cls}.{name}`: `{cls}` has no field `{name}`. Declare it in the"
        f" class body, `{name}: {declared}`{constant}. {declared_fields(module)}"
    )


def _annotation_for(value: Any, is_forward: bool) -> str:
    """How to declare a field that is to hold `value`.

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


def frozen(message: str) -> dataclasses.FrozenInstanceError:
    return dataclasses.FrozenInstanceError(message)


def trace_message(name: str, where: str = "", verb: str = "write") -> str:
    """What to say when state is written in a trace that it cannot leave."""
    field = f"`{where}` (`{name}`)" if where else f"`{name}`"
    return (
        f"Cannot {verb} {field} here: this code runs inside a JAX"
        " transform, which the mutable scope lies outside of. What is computed here is"
        " a tracer, and it would leak. Use the transform of `es`, which carries state"
        " through and is called as its namesake in JAX:\n\n"
        "    jax.vmap(lambda x: self.layer(x))(xs)    # wrong\n"
        "    es.vmap(lambda x: self.layer(x))(xs)     # right\n\n"
        "Likewise `es.scan`, `es.while_loop`, `es.fori_loop`, `es.cond`, `es.switch`,"
        " `es.checkpoint`, `es.jit`; for `jax.grad` it is `es.value_and_grad`, with the"
        " model as its argument. Or call `es.mutable` inside the transform, and return"
        " the new model from it."
    )


def sow(module: BaseModule, name: str, value: Any) -> None:
    """Note a value in the scope, if it captures."""
    place = get_place(module)
    if place is None or not (place.scope.is_open and place.scope.captures):
        return
    if not isinstance(name, str):
        raise TypeError(
            f"`{type(module).__qualname__}.sow`: the name is not a string, but a"
            f" `{type(name).__name__}`. It comes first: `self.sow('name', value)`."
        )
    full_name = name_of((*place.path, jtu.GetAttrKey(name)))
    if place.scope.trace != trace_state():
        raise TraceError(trace_message(full_name, verb="sow"))
    values = jtu.tree_leaves(value)
    if any(map(has_escaped, values)):
        raise TraceError(
            f"Cannot sow `{full_name}`: it is a tracer of a JAX transform that is over."
            " Sow it where it is computed, under the transform of `es`."
        )
    if not all(map(_is_sowable, values)):
        raise TypeError(
            f"Cannot sow `{full_name}`: arrays, numbers and pytrees of them come out of"
            f" a transform, and this is `{show(value)}`."
        )
    value = jtu.tree_map(
        lambda x: x if isinstance(x, jax.Array) else as_jax(x, full_name), value
    )
    place.scope.sown.setdefault(full_name, []).append(value)


def _is_sowable(x: Any) -> bool:
    return is_numeric(x.dtype) if is_numpy(x) else eqx.is_array_like(x)
