"""Writing in a scope: `self.field = value`.

A write is checked when it happens, so that the traceback of an error leads to the line
that wrote. The checks at the end (`_collect.py`) are for what no `__setattr__` sees.
"""

import dataclasses
from typing import Any

import jax.tree_util as jtu

from .._errors import TraceError
from .._tree._base import BaseModule, fields_of, get_place, is_module
from .._tree._compare import same
from .._tree._context import Context
from .._tree._walk import is_array, leaves, modules_in, name_of, Visit, walk
from .._tree._weak_types import strengthen_field, to_strong
from .._typing import KeyPath
from ._scope import is_in_backward_rule, own, Place, Scope
from ._write_errors import (
    CLOSED,
    frozen,
    kind_at,
    kind_message,
    no_field_message,
    STATIC,
    trace_message,
)


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
    if not (scope.is_open or is_in_backward_rule(scope)):
        raise frozen(CLOSED.format(where))
    if not scope.is_here:
        raise TraceError(trace_message(scope, full_name, where))
    context = place.context.enter(module, key)
    field = next((f for f in dataclasses.fields(module) if f.name == name), None)
    if field is None:
        drawn = scope.accept(None, value, path, context)
        raise frozen(no_field_message(module, name, drawn))
    if field.metadata.get("static", False) and not scope.allows(None):
        raise frozen(STATIC.format(where))
    old = fields_of(module).get(name)
    value = scope.accept(old, value, path, context)
    if is_array(old) and is_array(value):
        # Most writes take this path: an array has no modules to adopt, and no leaves to
        # compare.
        new = to_strong(value)
        _check_kind(old, Visit(path, new, context, True), scope, where)
    else:
        value = strengthen_field(cls, name, value)
        _check_kinds(old, value, path, context, scope, where)
        new = _adopt(value, scope)
        # These modules are replaced on purpose. Otherwise the end of the scope would
        # complain that what was written to them is lost.
        for visit in modules_in(old):
            scope.written.pop(id(visit.node), None)
        own(new, scope, path, context)
    object.__setattr__(module, name, new)
    scope.written[id(module)] = module, full_name


def _belongs_to(x: Any, scope: Scope) -> bool:
    place = get_place(x) if is_module(x) else None
    return place is not None and place.scope is scope


def _adopt(value: Any, scope: Scope) -> Any:
    """`value`, with copies of the modules that `scope` does not own already."""
    if all(v.is_leaf for v in walk(value)):
        return value
    return jtu.tree_map(lambda x: x, value, is_leaf=lambda x: _belongs_to(x, scope))


def _check_kinds(
    old: Any, new: Any, path: KeyPath, context: Context, scope: Scope, where: str
) -> None:
    """Raise if a leaf differs whose kind the scope does not allow.

    A module that the scope already owns may move. Whether it then is in the model twice
    is checked when the scope ends.
    """
    before = {v.path: v.node for v in leaves(old, path, context)}
    for visit in leaves(new, path, context, lambda x: _belongs_to(x, scope)):
        if not is_module(visit.node):
            _check_kind(before.get(visit.path), visit, scope, where)


def _check_kind(old: Any, visit: Visit, scope: Scope, where: str) -> None:
    if not same(old, visit.node) and not scope.allows(kind_at(visit)):
        raise frozen(kind_message(visit, where, scope, old))
