"""The private copy of a model: made when a scope opens, collected when it closes.

`write` has checked each write when it happened. The checks at the end need the whole
model, and run before anything reaches the caller: the result is a whole new model, or
an error.
"""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu

from .._compat import has_escaped
from .._errors import show, TraceError
from .._tree.base import is_module, ownership_of
from .._tree.compare import check_apart, same
from .._tree.dtypes import same_type, to_strong
from .._tree.keys import is_key
from .._tree.walk import (
    all_modules,
    drop_cached,
    is_array,
    leaves,
    occurs_twice,
    Traversal,
    traverse,
    Visit,
)
from .codecs import ScopedShared, snapshot
from .marks import marked
from .scope import is_owned, Scope, structure_error
from .write import kind_at, kind_message


class OwnedTree(NamedTuple):
    """A tree that a scope owns while a call runs, and its traversal from before."""

    tree: Any
    before: Traversal
    scope: Scope


class Collected(NamedTuple):
    """A tree after a call.

    `origins`: for each leaf, the number of the leaf that it replaces, or `None`.
    """

    leaves: list[Any]
    structure: Any
    origins: Sequence[int | None]


class PrivateCopy:
    """A copy of a model that a scope owns while a call runs.

    - `tree`: the copy. The codecs of the scope have replaced values in it.
    - `given`: the leaves of the model, or those that replace them.
    """

    def __init__(self, model: Any, scope: Scope, given: Traversal | None = None):
        """`given`: the traversal of the model, perhaps with other leaves."""
        self.model, self.scope = model, scope
        given = traverse(model) if given is None else given
        if occurs_twice(given.modules):
            # Check it now: unflattening would turn one module into two.
            check_apart(given.visits, scope.state_kinds)
        # An outer scope may write it while the call runs, through a closure.
        self.is_of_scope = any(map(is_owned, given.modules))
        values = self.given = given.leaves
        for codec in scope.codecs:
            values = codec.enter(model, values)
        self.tree = jtu.tree_unflatten(given.structure, values)
        before = given.again(self.tree)
        if scope.take(before):
            before = before._replace(structure=jtu.tree_structure(self.tree))
        scope.traversals[id(self.tree)] = self.before = before

    def leave(self, out: Any) -> tuple[Any, Any]:
        """The output of a call, and the new model, as the caller gets them."""
        out, (after,) = leave(out, [OwnedTree(self.tree, self.before, self.scope)])
        self._check_not_covered()
        new = [
            self._restored(x, k)
            for x, k in zip(after.leaves, after.origins, strict=True)
        ]
        result = out, jtu.tree_unflatten(after.structure, new)
        for codec in self.scope.codecs:
            result = codec.close(result)
        return result

    def _restored(self, x: Any, k: int | None) -> Any:
        # Compare leaf by leaf. After `self.prev = self.cur`, `prev` must not become the
        # caller's own array of `cur`.
        if k is not None and x is self.before.leaves[k]:
            return self.given[k]
        given = None if k is None else self.given[k]
        for codec in self.scope.codecs:
            x = codec.restore(x, given)
        # `init` only keeps what was missing.
        is_kept = not self.scope.is_initializing
        return marked(x, given, lambda: self._name(k)) if is_kept else x

    def _name(self, k: int | None) -> str:
        return [visit.name for visit in self.before.visits if visit.is_leaf][k or 0]

    def _check_not_covered(self) -> None:
        """Raise `ValueError` if the model itself was written during the call."""
        if not self.is_of_scope:
            return
        # Not strict: while `init` runs, the closure may have added leaves.
        for visit, old in zip(_leaves_named(self.model), self.given, strict=False):
            if visit.node is not old:
                raise ValueError(COVERED.format(visit.name))


def _leaves_named(model: Any) -> list[Visit]:
    """The leaves of a model, with names that begin at the model of the outer scope."""
    named: list[Visit] = []
    for visit in leaves(model, is_leaf=is_owned):
        if is_owned(visit.node):
            ownership = ownership_of(visit.node)
            named += leaves(visit.node, ownership.path, ownership.context)
        else:
            named.append(visit)
    return named


def leave(out: Any, owned: Sequence[OwnedTree]) -> tuple[Any, list[Collected]]:
    """Check a call that returned `out`, and collect the trees that its scopes own.

    Returns the output, or a snapshot of it if a scope owns a module in it; and each
    tree after the call.
    """
    after = [x.before.again(x.tree) for x in owned]
    inside = [module for each in after for module in each.modules]
    outside = all_modules(out)
    # The order matters. Check for lost writes first: the other checks do not find
    # them.
    for scope in {id(x.scope): x.scope for x in owned}.values():
        _check_written({*map(id, inside), *map(id, outside)}, scope)
    if occurs_twice(inside):
        kinds = {kind: None for x in owned for kind in x.scope.state_kinds}
        check_apart([visit for each in after for visit in each.visits], (*kinds,))
    collected = [_collect(x, each) for x, each in zip(owned, after, strict=True)]
    return snapshot(out) if any(map(_is_of_scope, outside)) else out, collected


def _is_of_scope(module: Any) -> bool:
    if isinstance(module, ScopedShared):
        return True
    return is_module(module) and ownership_of(module) is not None


def _collect(owned: OwnedTree, after: Traversal) -> Collected:
    """A private tree after the call, checked against the one before."""
    tree, before, scope = owned
    # A `functools.cached_property` of an Equinox module may have stored its value in
    # `__dict__`, which changes the treedef without a write.
    if after.structure != before.structure:
        drop_cached(tree)
        after = before.again(tree)
    visits = [visit for visit in after.visits if visit.is_leaf]
    origins: Sequence[int | None] = range(len(visits))
    if after.structure != before.structure:
        if not scope.is_initializing:
            raise structure_error(before.structure.unflatten(before.leaves), tree)
        known = [visit.path for visit in before.visits if visit.is_leaf]
        numbers = {path: k for k, path in enumerate(known)}
        origins = [numbers.get(visit.path) for visit in visits]
    old = [None if k is None else before.leaves[k] for k in origins]
    pairs = zip(visits, old, strict=True)
    new = [_settle(visit, x, scope) for visit, x in pairs]
    return Collected(new, after.structure, origins)


def _check_written(there: set[int], scope: Scope) -> None:
    """Check that every module that was written is still in the model or the output.

    If a call removes a module from a list, for example, the writes to it would be lost.
    `there`: the `id` of each module of model and output.
    """
    for key, (module, name) in scope.written.items():
        if key not in there and ownership_of(module).scope is scope:
            raise ValueError(_LOST.format(name))


def _settle(visit: Visit, old: Any, scope: Scope) -> Any:
    """The leaf of the new model that replaces `old`.

    `write` has checked assignments to fields. This also checks values that were put
    into containers, which does not call `__setattr__`.
    """
    new = visit.node
    if same(old, new):
        return new
    if has_escaped(new):
        raise TraceError(_ESCAPED.format(visit.name))
    if not scope.allows(kind_at(visit)):
        raise FrozenInstanceError(kind_message(visit, visit.name, scope, old))
    new = to_strong(scope.fit_leaf(old, new, visit.path))
    if not scope.is_initializing and is_array(old) and not same_type(old, new):
        cure = _ONE_KEY if is_key(old) else _CONVERT
        raise ValueError(_OTHER_TYPE.format(visit.name, show(old), show(new)) + cure)
    return new


_OTHER_TYPE: Final = """`{}` was changed from `{}` to `{}`. State keeps its shape and \
dtype, because a change recompiles the step. """

_CONVERT: Final = """Give the field its final shape and dtype when you construct the \
model; or, if it loses nothing, convert the new value: \
`value.astype(self.field.dtype)`."""

_ONE_KEY: Final = """Keep one key, and draw from the other: `self.rng, key = \
jax.random.split(self.rng)`."""

_LOST: Final = """`{}` was written, but its module is no longer in the model, so the \
write would be lost. If you replaced the module, write to its replacement, and assign \
a new list instead of changing the old one: `self.layers = [*self.layers[:-1], new]`. \
If a loop returned the module in its carry, assign it: `self.cell, ys = \
es.scan(step, self.cell, xs)`. If the module is not for the model, but gradient steps \
away from it (MAML), give it a call of its own: `loss, m = es.mutable(loss_fn)(m, \
xs)`."""

_ESCAPED: Final = """`{}` contains a tracer of a JAX transform that has returned: code \
inside the transform stored it without assigning a field, for example in a dict. Use \
the `es` transform, which also returns the new state, and assign a new container: \
`self.stats = {{**self.stats, "a": x}}`."""

COVERED: Final = """`{0}` was written through the closure. The same module is also an \
argument, of which the call returns a copy without this write, and to assign the copy \
would undo the write. Use the module in one way, as the argument or by the closure:

    self.cell, ys = es.scan(lambda c, x: (c, self.cell(x)), self.cell, xs)   # wrong
    self.cell, ys = es.scan(lambda c, x: (c, c(x)), self.cell, xs)           # right
    _, ys = es.scan(lambda c, x: (c, self.cell(x)), 0, xs)                   # right"""
