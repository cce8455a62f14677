"""Leaving a scope: collect the new model from the private copy, and check it.

`write` has checked each write when it happened. The checks here need the whole model,
and run before anything reaches the caller: the result is a whole new model, or an
error.
"""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu
import numpy as np

from .._compat import has_escaped
from .._errors import show, TraceError
from .._tree.base import ownership_of
from .._tree.compare import check_apart, difference, flatten_apart, unchanged
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
        """The snapshot of a tree. `ValueError` if a stateful module occurs twice."""
        # Check it now: unflattening would turn the module into two.
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
    """Give a private copy of a model to a scope. Also returns a walk of the copy."""
    before = given
    # NumPy arrays can be changed in place, so copy the caller's.
    if any(isinstance(x, np.ndarray) for x in given.leaves):
        before = given._replace(leaves=own_arrays(walk(given.tree()), scope))
    private = before.tree()
    visits = own(private, scope)
    is_tied = any(isinstance(visit.node, ScopedShared) for visit in visits)
    if is_tied or scope.observer is not None:
        # In a nested scope, `given` has `ScopedShared` for `eqx.nn.Shared`. And the
        # tags of the copy are static data, so part of its structure. A module that is
        # assigned in the call is tagged, too.
        structure = jtu.tree_structure(closed_copy(private))
        before = before._replace(structure=structure)
    return OwnedTree(private, before, scope), visits


def given_back(given: Snapshot, owned: OwnedTree, after: Snapshot) -> Any:
    """The tree after a call, with the caller's own arrays for unwritten leaves."""
    before, is_alike = owned.before.leaves, after.structure == owned.before.structure
    pairs = zip(before, given.leaves, strict=True)
    constants = {id(x): own for x, own in pairs if isinstance(x, np.ndarray)}
    # Compare leaf by leaf; only constants by identity. After `self.prev = self.cur`,
    # `prev` must not become the caller's NumPy array of `cur`.
    leaves = [
        given.leaves[k] if is_alike and x is before[k] else constants.get(id(x), x)
        for k, x in enumerate(after.leaves)
    ]
    return after._replace(leaves=leaves).tree()


def leave(out: Any, owned: Sequence[OwnedTree]) -> tuple[Any, list[Snapshot]]:
    """Check a call that returned `out`, and collect the trees that its scopes own.

    Returns the output with a snapshot for each owned module, and each tree after the
    call. In both, `eqx.nn.Shared` is Equinox's own class again.
    """
    # The order matters. Check for lost writes first: the other checks do not find
    # modules that are no longer in the trees. Check for repeated modules before
    # `_collect`, which flattens, and would silently turn one module into two.
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
    # `__dict__`, which changes the treedef without a write.
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

    If a call removes a module from a list, for example, the writes to it would be lost.
    `visits`: all nodes of model and output.
    """
    inside = {id(visit.node) for visit in visits if not visit.is_leaf}
    for key, (module, name) in scope.written.items():
        if key not in inside and ownership_of(module).scope is scope:
            raise ValueError(_LOST.format(name))


def _settle(visit: Visit, old: Any, scope: Scope) -> Any:
    """The leaf of the new model that replaces `old`.

    `write` has checked assignments to fields. This also checks values that were put
    into containers, which does not call `__setattr__`.
    """
    new = visit.node
    if unchanged(old, new):
        return new
    if has_escaped(new):
        raise TraceError(_ESCAPED.format(visit.name))
    if not scope.allows(kind_at(visit)):
        raise FrozenInstanceError(kind_message(visit, visit.name, scope, old))
    if scope.is_initializing:
        old = None  # the new value may have any shape and dtype
    new = scope.fit_leaf(old, new, visit.path)
    if is_numpy(new) and is_numeric(new.dtype):
        new = as_jax(new, visit.name)  # a copy: user code may change the NumPy array
    new = to_strong(new)
    if is_array(old) and not same_type(old, new):
        raise ValueError(_OTHER_TYPE.format(visit.name, show(old), show(new)))
    return new


_STRUCTURE: Final = """A call keeps the structure of the model, but this one changed \
it, {}. Construct the model with the final structure of every field: zeros instead of \
`None`, lists of the final length. Switch modes outside the call, by `train` and \
`eval`. If a layer takes shapes from an input, initialize it first: `model = \
model.init(42, x)`."""

_LOST: Final = """`{}` was written, but its module is no longer in the model, so the \
write would be lost. If you replaced the module, write to its replacement, and assign \
a new list instead of changing the old one: `self.layers = [*self.layers[:-1], new]`. \
If a loop returned the module in its carry, assign it: `self.cell, ys = \
es.scan(step, self.cell, xs)`."""

_ESCAPED: Final = """`{}` contains a tracer of a JAX transform that has returned: code \
inside the transform stored it without assigning a field, for example in a dict. Use \
the `es` transform, which also returns the new state, and assign a new container: \
`self.stats = {{**self.stats, "a": x}}`."""

_OTHER_TYPE: Final = """`{}` was changed from `{}` to `{}`. State keeps its shape and \
dtype, because a change recompiles the step. Give the field its final shape and dtype \
when you construct the model, or convert the new value: \
`value.astype(self.field.dtype)`."""
