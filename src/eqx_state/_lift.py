"""The one lifting core: state through a JAX transform, in place.

A lifted transform reaches owned modules through the function, its closure and its
arguments. A copy would not do: a closure over `self` goes on seeing the old object. So
the contents of the owned objects are swapped, for the time of the inner trace, for that
trace's values; what was written is collected, the old contents are put back whatever
happens, and what the transform returns is written to them at the end.
"""

import dataclasses
import functools as ft
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from ._base import BaseModule, get_place, set_place
from ._compat import trace_state
from ._errors import TraceError
from ._scope import (
    check_written,
    collect,
    disown,
    is_owned,
    own,
    Place,
    Scope,
    trace_message,
)
from ._traverse import copy_tree, leaves, modules_in, same, Visit


# --- Functions as pytrees -------------------------------------------------------------


class Opened(eqx.Module):
    """A function as a pytree: the modules that it holds, and how to make it again."""

    make: Callable[[Any], Any] = eqx.field(static=True)
    parts: Any


def open_function(f: Any, memo: dict[int, Any] | None = None) -> Any:
    """`f` as a pytree in which the modules that it closes over are nodes.

    Looks into cells, defaults, partials and bound methods. What holds no module stays
    as it is, and so do owned modules, whose identity matters.
    """
    # Each function is opened once; one that closes over itself stays as it is there.
    memo = {} if memo is None else memo

    def open_leaf(x: Any) -> Any:
        if id(x) in memo:
            return memo[id(x)]
        memo[id(x)] = x
        if isinstance(x, types.FunctionType):
            parts, make = _open_held(x, memo), ft.partial(_make_function, x)
        elif isinstance(x, types.MethodType):
            parts, make = open_function((x.__func__, x.__self__), memo), _make_method
        elif isinstance(x, ft.partial):
            parts = open_function((x.func, x.args, x.keywords), memo)
            make = _make_partial
        else:
            return x
        if _holds_module(parts):
            memo[id(x)] = Opened(make, parts)
        return memo[id(x)]

    return jtu.tree_map(open_leaf, f, is_leaf=is_owned)


def _open_held(f: types.FunctionType, memo: dict[int, Any]) -> list[dict[Any, Any]]:
    """The cells, defaults and keyword defaults of a function that hold modules."""
    cells = {i: _contents(cell) for i, cell in enumerate(f.__closure__ or ())}
    held = (cells, dict(enumerate(f.__defaults__ or ())), f.__kwdefaults__ or {})
    opened = ({k: open_function(x, memo) for k, x in part.items()} for part in held)
    # The others are not rebuilt: a list or a `nonlocal` of the caller's stays the same.
    return [{k: x for k, x in part.items() if _holds_module(x)} for part in opened]


def _holds_module(tree: Any) -> bool:
    """Whether there is a module, the function it may be in not being looked into."""
    found: list[Any] = []

    def stop(x: Any) -> bool:
        if isinstance(x, eqx.Module):
            found.append(x)
        return bool(found)

    jtu.tree_leaves(tree, is_leaf=stop)
    return bool(found)


def close(tree: Any) -> Any:
    """The inverse of `open_function`."""
    return jtu.tree_map(
        lambda x: x.make(close(x.parts)) if isinstance(x, Opened) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Opened) or is_owned(x),
    )


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later in the function around
        return None


def _make_function(
    f: types.FunctionType, parts: list[dict[Any, Any]]
) -> types.FunctionType:
    cells, defaults, kwdefaults = parts
    new = types.FunctionType(
        f.__code__,
        f.__globals__,
        f.__name__,
        tuple(defaults.get(i, x) for i, x in enumerate(f.__defaults__ or ())) or None,
        tuple(
            types.CellType(cells[i]) if i in cells else cell
            for i, cell in enumerate(f.__closure__ or ())
        ),
    )
    new.__kwdefaults__ = {**(f.__kwdefaults__ or {}), **kwdefaults} or None
    new.__dict__.update(f.__dict__)
    return new


def _make_method(parts: Any) -> types.MethodType:
    return types.MethodType(*parts)


def _make_partial(parts: Any) -> ft.partial[Any]:
    f, args, keywords = parts
    return ft.partial(f, *args, **keywords)


# --- Owned modules --------------------------------------------------------------------


class Lifted:
    """What one lifted call threads: each owned module within reach, once.

    `roots` are the outermost of them.
    """

    def __init__(self, *trees: Any):
        self.roots: list[BaseModule] = []
        reached: set[int] = set()
        for visit in (visit for tree in trees for visit in modules_in(tree)):
            if is_owned(visit.node) and id(visit.node) not in reached:
                inside = {id(v.node) for v in modules_in(visit.node)}
                # A closure may lead to a part before an argument leads to the whole.
                outer = [root for root in self.roots if id(root) not in inside]
                self.roots = [*outer, visit.node]
                reached |= inside
        self.places: list[Place] = [get_place(root) for root in self.roots]

    def leaves(self, i: int, tree: Any = None) -> list[Visit]:
        """The leaves of one root, or of a tree in its place, seen from the model."""
        tree = self.roots[i] if tree is None else tree
        return leaves(tree, self.places[i].path, self.places[i].context)

    def run(self, values: list[list[Any]], call: Callable[[], Any]) -> tuple[Any, Any]:
        """`call()` in the active trace, with these leaves in the roots meanwhile.

        Returns its output, and for each root the tree after the call.
        """
        saved = [
            (v.node, dict(v.node.__dict__), get_place(v.node))
            for root in self.roots
            for v in modules_in(root)
        ]
        # A parent's scope may be that of an outer `es.mutable`: one inner scope for
        # each.
        scopes = {
            id(p.scope): Scope(p.scope.kinds, p.scope.initialise) for p in self.places
        }
        threaded = list(zip(self.roots, self.places, values, strict=True))
        try:
            before = []
            for root, place, new in threaded:
                pour(root, iter(new))
                own(root, scopes[id(place.scope)], place.path, place.context)
                before.append(copy_tree(root))
            out = disown(call())
            for scope in scopes.values():
                check_written(self.roots, scope)
            after = [
                collect(root, old, scopes[id(place.scope)], place)
                for (root, place, _), old in zip(threaded, before, strict=True)
            ]
        finally:
            for scope in scopes.values():
                scope.is_open = False
            for module, fields, place in saved:
                module.__dict__.clear()
                module.__dict__.update(fields)
                set_place(module, place)
        return out, after

    def commit(self, after: list[Any]) -> None:
        """Write the trees after the call to the owned modules, all or none."""
        for i, (place, tree) in enumerate(zip(self.places, after, strict=True)):
            old = {v.path: v.node for v in self.leaves(i)}
            for visit in self.leaves(i, tree):
                if not same(old.get(visit.path), visit.node):
                    _check_reachable(place, visit)
                    place.scope.written[id(self.roots[i])] = self.roots[i], visit.name
        for root, place, tree in zip(self.roots, self.places, after, strict=True):
            if jtu.tree_structure(tree) == jtu.tree_structure(root):
                pour(root, iter(jtu.tree_leaves(tree)))
            else:  # only `init` changes a structure
                root.__dict__.update(tree.__dict__)
                own(root, place.scope, place.path, place.context)


def _check_reachable(place: Place, visit: Visit) -> None:
    if place.scope.trace != trace_state():
        raise TraceError(trace_message(visit.name))


def pour(module: BaseModule, values: Any) -> None:
    """Put leaves, in the order of flattening, into a module and the modules inside it.

    The `es.Module`s stay the objects that they are; all other nodes are made anew.
    """
    children = [
        f.name for f in dataclasses.fields(module) if not f.metadata.get("static")
    ]

    def put(x: Any) -> Any:
        if isinstance(x, BaseModule):
            pour(x, values)
            return x
        return next(values)

    for name in children:
        if name in module.__dict__:
            old = module.__dict__[name]
            new = jtu.tree_map(put, old, is_leaf=lambda x: isinstance(x, BaseModule))
            object.__setattr__(module, name, new)
