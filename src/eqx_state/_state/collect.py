"""Leaving a scope: the new model is collected from the private copy, and checked.

Each write was checked when it happened. What only shows at the end is checked here,
before anything reaches the caller: either a whole new model comes out, or an error.
"""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu
import numpy as np

from .._compat import has_escaped
from .._errors import show, TraceError
from .._tree.base import ownership_of
from .._tree.compare import check_apart, difference, flatten_apart, same
from .._tree.context import Context, ROOT
from .._tree.dtypes import as_jax, is_numeric, same_type, to_strong
from .._tree.walk import drop_cached, is_array, is_numpy, Visit, walk
from .._typing import KeyPath
from .scope import closed_copy, disown, own, own_arrays, Scope, ScopedShared
from .write import kind_at, kind_message


class Snapshot(NamedTuple):
    """A tree at one moment: its leaves, and its structure."""

    leaves: list[Any]
    structure: Any

    @staticmethod
    def of(tree: Any) -> "Snapshot":
        """`ValueError` if a stateful module occurs twice in it."""
        # The last chance to notice: unflattening makes two modules of one.
        return Snapshot(*flatten_apart(tree))

    def tree(self) -> Any:
        """A new tree with these leaves. No scope owns its modules."""
        return jtu.tree_unflatten(self.structure, self.leaves)


class OwnedTree(NamedTuple):
    """A tree that a scope owns while a call runs, and its snapshot from before."""

    tree: Any
    before: Snapshot
    scope: Scope
    path: KeyPath = ()
    context: Context = ROOT


def enter(given: Snapshot, scope: Scope) -> tuple[OwnedTree, list[Visit]]:
    """Give a private copy of a model to a scope. Returns a walk of it, too."""
    before, private = given, given.tree()
    visits = own(private, scope)
    # A NumPy array can be changed in place, so the caller's is copied.
    if any(isinstance(x, np.ndarray) for x in given.leaves):
        before = given._replace(leaves=own_arrays(visits, scope))
        private = before.tree()
        own(private, scope)
    if scope.observer is not None:
        # Marks are part of the structure, also those of modules that are assigned.
        structure = jtu.tree_structure(closed_copy(private))
        before = before._replace(structure=structure)
    return OwnedTree(private, before, scope), visits


def given_back(given: Snapshot, owned: OwnedTree, after: Snapshot) -> Any:
    """The tree after a call, in which unwritten leaves are the caller's own again."""
    before, is_alike = owned.before.leaves, after.structure == owned.before.structure
    pairs = zip(before, given.leaves, strict=True)
    constants = {id(x): own for x, own in pairs if isinstance(x, np.ndarray)}
    # By place, and not by identity, which only constants have: after
    # `self.prev = self.cur`, `prev` must not become the caller's NumPy array of `cur`.
    leaves = [
        given.leaves[k] if is_alike and x is before[k] else constants.get(id(x), x)
        for k, x in enumerate(after.leaves)
    ]
    return after._replace(leaves=leaves).tree()


def leave(out: Any, owned: Sequence[OwnedTree]) -> tuple[Any, list[Snapshot]]:
    """Check a call that returned `out`, and collect the trees that it owned.

    Returns the output with snapshots in place of owned modules, and each tree after the
    call. In both `eqx.nn.Shared` is Equinox's own class again.
    """
    # The order matters. Lost writes come first: the later checks only see what is in
    # the trees now, and a module that dropped out is not there to be checked. Modules
    # that occur twice come before `_collect`, which flattens, and so would silently
    # turn one module into two.
    visits = [walk(x.tree, x.path, x.context) for x in owned]
    inside, outside = [v for found in visits for v in found], walk(out)
    for scope in {id(x.scope): x.scope for x in owned}.values():
        _check_written([*inside, *outside], scope)
    check_apart(inside)
    after = [_collect(x, found) for x, found in zip(owned, visits, strict=True)]
    return disown(out, outside), after


def _collect(owned: OwnedTree, visits: list[Visit]) -> Snapshot:
    """A snapshot of a private tree after the call, checked against the one before."""
    tree, before, scope, path, context = owned
    if any(isinstance(v.node, ScopedShared) for v in visits if not v.is_leaf):
        tree = closed_copy(tree)
    structure = jtu.tree_structure(tree)
    # A `functools.cached_property` of an Equinox module may have stored its value in
    # `__dict__`, which changes the treedef although nothing was written.
    if structure != before.structure:
        drop_cached(tree)
        structure = jtu.tree_structure(tree)
    leaves = [visit for visit in visits if visit.is_leaf]
    if structure == before.structure:
        old = before.leaves
    elif scope.is_initializing:
        known = {v.path: v.node for v in walk(before.tree(), path, context)}
        old = [known.get(visit.path) for visit in leaves]
    else:
        changed = difference(before.tree(), closed_copy(tree))
        raise ValueError(_STRUCTURE.format(changed))
    pairs = zip(leaves, old, strict=True)
    return Snapshot([_settle(visit, x, scope) for visit, x in pairs], structure)


def _check_written(visits: list[Visit], scope: Scope) -> None:
    """Check that every module that was written is still in the model or the output.

    A module may have dropped out of a list, say, and what was written would be lost
    silently. `visits`: all nodes of both.
    """
    inside = {id(visit.node) for visit in visits if not visit.is_leaf}
    for key, (module, name) in scope.written.items():
        if key not in inside and ownership_of(module).scope is scope:
            raise ValueError(_LOST.format(name))


def _settle(visit: Visit, old: Any, scope: Scope) -> Any:
    """The leaf that the new model has in the place of `old`.

    Writes to fields were checked when they happened; this also finds what was put into
    containers, which no `__setattr__` sees.
    """
    new = visit.node
    if same(old, new):
        return new
    if has_escaped(new):
        raise TraceError(_ESCAPED.format(visit.name))
    if not scope.allows(kind_at(visit)):
        raise FrozenInstanceError(kind_message(visit, visit.name, scope, old))
    if scope.is_initializing:
        old = None  # the new value may be of any shape and dtype
    new = scope.fit_leaf(old, new, visit.path)
    if is_numpy(new) and is_numeric(new.dtype):
        new = as_jax(new, visit.name)  # a copy: the writer may go on changing it
    new = to_strong(new)
    if is_array(old) and not same_type(old, new):
        raise ValueError(_OTHER_TYPE.format(visit.name, show(old), show(new)))
    return new


_STRUCTURE: Final = """A call keeps the structure of the model, and this one changed \
it, {}. Give every field its final structure when the model is made: zeros in place of \
`None`, a list of its final length, the mode by `train` and `eval` from outside, what \
takes its shape from an input by `model = model.init(42, x)`."""

_LOST: Final = """`{}` was written, and its module is no longer in the model, so the \
write would be lost. Either it was replaced or taken out of a container: write to the \
new one, and replace containers instead of changing them, `self.layers = \
[*self.layers[:-1], new]`. Or it came back from a loop and was not assigned: \
`self.cell, ys = es.scan(step, self.cell, xs)`."""

_ESCAPED: Final = """`{}` holds a tracer of a JAX transform that is over: something \
was written into a container inside it. Replace the container, `self.stats = \
{{**self.stats, "a": x}}`, and use the transform of `es`, which carries state \
through."""

_OTHER_TYPE: Final = """`{}` was `{}` and is now `{}`. State keeps its shape and \
dtype, so that a step is compiled once. Give it its final shape and dtype when the \
model is made, or convert what is written: `value.astype(self.field.dtype)`."""
