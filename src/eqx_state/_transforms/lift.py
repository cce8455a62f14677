"""The lifting core: how state passes through a JAX transform. All transforms use it.

A transform of JAX sees the arguments of a function, but not the values that the
function closes over. A layer writes `self.mean = …`, often in a closure over `self`.
Every transform of `es` carries such writes out of its trace in five steps:

1. *Reach.* `Lifted(functions, arguments)` finds the modules that an open scope owns: in
   the functions, in their closures, and among the arguments.
2. *Swap.* A closure refers to the object itself, so set the fields of the object to the
   values of the trace, and restore them afterwards. A module among the arguments is a
   value, as in JAX: the function gets a copy of it.
3. *Run* the function, in scopes that belong to the inner trace.
4. *Collect* the leaves that were written. They leave the trace as ordinary outputs.
5. *Commit* them to the modules outside: all or nothing.

One flat mapping contains all leaves of all modules, by `LeafIndex`. The keys cannot be
names, because two leaves may have equal names.

A module that no scope owns is data: JAX traces its arrays in an argument, and treats
them as constants in a closure.
"""

import contextlib
import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._errors import NotInitializedError, show, TraceError
from .._state.collect import leave, OwnedTree, Snapshot
from .._state.init import (
    check_created,
    check_initialized,
    Created,
    created_error,
    InitScope,
)
from .._state.scope import (
    closed_copy,
    is_constant,
    is_owned,
    own,
    Ownership,
    Scope,
    ScopedShared,
    Sown,
)
from .._state.sow import carried_out
from .._state.write import trace_message
from .._tree.base import BaseModule, is_module, ownership_of, set_ownership
from .._tree.compare import identical, modules_below, unchanged
from .._tree.observe import OBSERVING
from .._tree.walk import dynamic_names, is_array, leaves, Visit, walk
from .reach import by_entry, models_in, owned_in


# The index of a lifted module, and of one of its leaves in the order of flattening.
LeafIndex = tuple[int, int]

Values = dict[LeafIndex, Any]


@dataclasses.dataclass(eq=False)
class LiftedModule:
    """An outermost module among the owned modules that a transform reaches.

    - `ownership`, `visits`: its ownership, and the visits of a walk. Their paths begin
        at the model that the scope owns.
    - `original`: the module that `module` is a copy of, or else `module` itself.
    """

    module: BaseModule
    ownership: Ownership
    visits: list[Visit]
    original: BaseModule

    @property
    def is_copy(self) -> bool:
        return self.original is not self.module

    def __post_init__(self) -> None:
        self.leaves = [visit for visit in self.visits if visit.is_leaf]
        nodes = [visit for visit in self.visits if not visit.is_leaf]
        self.modules = [visit for visit in nodes if is_module(visit.node)]
        is_shared = any(isinstance(visit.node, ScopedShared) for visit in nodes)
        tree = closed_copy(self.module) if is_shared else self.module
        self.structure = jtu.tree_structure(tree)


def _roots_among(
    reached: Sequence[Any], originals: dict[int, Any]
) -> list[LiftedModule]:
    """The outermost modules among `reached`, each once.

    `originals`: the original of each copy, by the `id` of the copy.
    """
    roots: list[LiftedModule] = []
    inside: set[int] = set()
    for module in reached:
        if id(module) in inside:
            continue
        at = ownership_of(module)
        visits = walk(module, at.path, at.context)
        root = LiftedModule(module, at, visits, originals.get(id(module), module))
        below = {id(visit.node) for visit in root.modules}
        # In `lambda x: layer(x) + model(x)` the layer may come before the model that
        # contains it: remove the layer again.
        roots = [x for x in roots if id(x.module) not in below] + [root]
        inside |= below
    return roots


# --- Arguments are copies -------------------------------------------------------------


def owned_copy(module: Any, values: Iterator[Any] | None = None) -> Any:
    """A copy of an owned module with the same ownership, and new leaves if given."""
    ownership, copy = ownership_of(module), closed_copy(module)
    if values is not None:
        copy = jtu.tree_map(lambda _: next(values), copy)
    own(copy, ownership.scope, ownership.path, ownership.context)
    return copy


def copy_arguments(
    tree: Any, treatments: Sequence[Any] = ()
) -> tuple[Any, dict[int, Any]]:
    """`tree` with a copy of each owned module; and the original of each copy, by `id`.

    `treatments` says for each leaf how the transform treats it: in `es.vmap`, its axis;
    in loops and derivatives, where each place has its own values, its number.
    Occurrences of a module with equal treatments share one copy: in `f(self.a,
    self.a)`, both arguments are the same object.
    """
    if not treatments:
        treatments = [None] * jtu.tree_structure(tree).num_leaves
    entries = [*by_entry(tree, treatments)]
    copies: dict[tuple[int, tuple[Any, ...]], Any] = {}
    originals: dict[int, Any] = {}
    # Copy the largest first: in `f(model.layer, model)` the copy of the layer has to be
    # the layer of the copied model, even if the model has no other leaves.
    by_size = sorted(entries, key=lambda x: -jtu.tree_structure(x[0]).num_nodes)
    for module, treatment in by_size:
        if not is_owned(module) or (id(module), treatment) in copies:
            continue
        visits = walk(module), walk(owned_copy(module))
        pairs = zip(*map(_extents, visits), strict=True)
        for (original, start, stop), (copy, *_) in pairs:
            copies.setdefault((id(original), treatment[start:stop]), copy)
            originals[id(copy)] = original
    new = [copies[id(x), t] if is_owned(x) else x for x, t in entries]
    treedef = jtu.tree_structure(tree, is_leaf=is_owned)
    return jtu.tree_unflatten(treedef, new), originals


def _extents(visits: list[Visit]) -> Iterator[tuple[Any, int, int]]:
    """Every `es.Module` in a tree, and the range of its leaves among all leaves."""
    start = 0
    for visit in visits:
        if visit.is_leaf:
            start += 1
        elif is_module(visit.node):
            size = jtu.tree_structure(visit.node).num_leaves
            yield visit.node, start, start + size


# --- What a transform takes and returns -----------------------------------------------


@jtu.register_static
class StaticOutput:
    """A static value that leaves a trace as part of the output's treedef."""

    def __init__(self, value: Any):
        self.value = value


class Ran(NamedTuple):
    """The result of a call in a trace: its output, its writes, and its sown values.

    `sown` has an entry for each scope, with the scope's values by key.
    """

    out: Any
    written: Values
    sown: list[Sown]


class Lifted:
    """The owned modules that one lifted call reaches, and all their leaves.

    - `given`: the functions and arguments as they were given.
    - `arguments`: the given arguments, with a copy of each owned module; `originals`:
        the original of each copy, by the `id` of the copy.
    - `reached`: the modules, once per occurrence; `roots`: the outermost, each once.
    - `values`: the leaves of all roots.
    - `created`: the fields that `init` has created in the last run.
    - `scopes`: the scopes that own the modules; several if `es.mutable` is nested.

    The modules in `functions` are not copied: a loop passes its carry there, too.
    `treatments`, one for each leaf of the arguments, are those of `copy_arguments`.
    """

    def __init__(
        self, functions: Any, arguments: Any = (), treatments: Sequence[Any] = ()
    ):
        self.given = functions, arguments
        found = owned_in(self.given)
        # Add the scopes of observers. An observer also records calls of Equinox's
        # modules, which no scope owns.
        scopes = [*(ownership_of(x).scope for x in found), *OBSERVING.get().values()]
        self.scopes = list({id(scope): scope for scope in scopes}.values())
        for scope in self.scopes:
            scope.check_thread()
        # JAX fixes the structure of a loop or a branch in advance. While `init` runs,
        # these transforms first call their function without a trace, which creates all
        # fields.
        self.is_initializing = any(scope.is_initializing for scope in self.scopes)
        self.arguments, self.originals = arguments, {}
        if found:
            self.arguments, self.originals = copy_arguments(arguments, treatments)
        self.reached = owned_in((functions, self.arguments)) if found else []
        self.created: list[tuple[InitScope, Created]] = []
        self.roots = _roots_among(self.reached, self.originals)
        self.values: Values = {
            (i, k): visit.node
            for i, root in enumerate(self.roots)
            for k, visit in enumerate(root.leaves)
        }

    @ft.cached_property
    def writable(self) -> Values:
        """The arrays among `values` that the call may write."""
        return {
            (i, k): visit.node
            for i, root in enumerate(self.roots)
            for k, visit in enumerate(root.leaves)
            if is_array(visit.node) and root.ownership.scope.allows(visit.kind)
            if not is_constant(visit, root.ownership.scope)
        }

    def name(self, slot: LeafIndex) -> str:
        """The name of a leaf in the model."""
        i, k = slot
        return self.roots[i].leaves[k].name

    @ft.cached_property
    def _slots(self) -> dict[int, list[LeafIndex]]:
        """The leaves of each module, by its `id`; parents first."""
        return {
            id(module): [(i, k) for k in range(start, stop)]
            for i, root in enumerate(self.roots)
            for module, start, stop in _extents(root.visits)
        }

    @ft.cached_property
    def _owners(self) -> dict[LeafIndex, tuple[Any, int]]:
        """For each leaf, the innermost module outside, and the leaf's number in it."""
        return {
            (i, k): (self.originals.get(id(module), module), k - start)
            for i, root in enumerate(self.roots)
            for module, start, stop in _extents(root.visits)  # parents first
            for k in range(start, stop)
        }

    def has(self, module: Any) -> bool:
        """Whether a module is lifted, or inside a lifted module."""
        return id(module) in self._slots

    def slots(self, module: Any) -> list[LeafIndex]:
        """The leaves of a module that is lifted, or inside a lifted module."""
        return self._slots[id(module)]

    def fill(self, tree: Any, new: Iterable[Any]) -> tuple[Any, Values]:
        """`tree` with new leaves; and as `Values`, the new leaves of owned modules.

        The modules themselves do not change.
        """
        new, values = iter(new), {}

        # Not `is_owned`: JAX may trace the forward rule of an `es.custom_vjp` after the
        # scope of the call has closed.
        def put(x: Any) -> Any:
            if not self.has(x):
                return next(new)
            values.update((slot, next(new)) for slot in self.slots(x))
            return x

        return jtu.tree_map(put, tree, is_leaf=self.has), values

    # --- Swap, run, collect -----------------------------------------------------------

    def run(self, values: Values, call: Callable[[], Any]) -> Ran:
        """Run `call()` in the active trace, while the modules have these values.

        JAX decides how often it traces a function: a loop traces its body twice if weak
        types in the carry have to settle, and a function that is passed as two branches
        is traced once. A trace therefore leaves no tracers and no writes in the
        modules; `commit` writes once.
        """
        inner = {id(scope): scope.inner() for scope in self.scopes}
        before = self._contents()
        with contextlib.ExitStack() as stack:
            for scope in inner.values():
                stack.enter_context(scope)
            stack.enter_context(self._swapped(values, inner))
            owned = [self._owned(i, values, inner) for i in range(len(self.roots))]
            out = self._called(call)
            self.created = [
                (scope, inner[id(scope)].take_created())
                for scope in self.scopes
                if isinstance(scope, InitScope)
            ]
            out, after = leave(out, owned)
        # A function that closes over `layers = self.layers` may have called
        # `layers.reverse()`. The restored field contains this list, and the change
        # cannot leave the trace.
        if not identical(self._contents(), before):
            raise TraceError(_CONTAINER_CHANGED)
        sown = [inner[id(scope)].sown for scope in self.scopes]
        return Ran(out, self._written(values, after), sown)

    def _called(self, call: Callable[[], Any]) -> Any:
        """Run `call()`. If it uses an Initializer, raise an error that names it."""
        try:
            return call()
        except NotInitializedError:
            # Not before the call: a function may close over a lazy model, and
            # initialize it.
            for model in models_in(self.given):
                check_initialized(model)
            raise

    def _owned(self, i: int, values: Values, inner: dict[int, Scope]) -> OwnedTree:
        """A lifted module and its snapshot, for the end of the inner scope."""
        root, at = self.roots[i], self.roots[i].ownership
        before = [values[i, k] for k in range(len(root.leaves))]
        snapshot = Snapshot(before, root.structure)
        scope = inner[id(at.scope)]
        return OwnedTree(root.module, snapshot, scope, at.path, at.context)

    @contextlib.contextmanager
    def _swapped(self, values: Values, inner: dict[int, Scope]) -> Iterator[None]:
        """Give the modules these values and an inner scope, and restore them at exit.

        The inner scope belongs to the inner trace. The outer scope, which belongs to a
        different trace, would reject each write.
        """
        saved = [
            (v.node, dict(v.node.__dict__), ownership_of(v.node))
            for root in self.roots
            for v in root.modules
        ]
        try:
            for i, root in enumerate(self.roots):
                at = root.ownership
                _set_leaves(
                    root.module, (values[i, k] for k in range(len(root.leaves)))
                )
                own(root.module, inner[id(at.scope)], at.path, at.context)
            yield
        finally:
            for module, fields, ownership in saved:
                module.__dict__.clear()
                module.__dict__.update(fields)
                set_ownership(module, ownership)

    def _contents(self) -> list[Any]:
        """All modules and leaves in the originals of the lifted modules."""
        found: list[Any] = []
        for root in self.roots:
            found += modules_below(root.original) + jtu.tree_leaves(root.original)
        return found

    def _written(self, values: Values, after: list[Snapshot]) -> Values:
        """The leaves that differ from `values`; `ValueError` if one is not an array."""
        written = {}
        for i, new in enumerate(after):
            for k, x in enumerate(new.leaves):
                if unchanged(old := values[i, k], x):
                    continue
                if not (is_array(old) and is_array(x)):
                    shown = self.name((i, k)), show(old), show(x)
                    raise ValueError(_NOT_AN_ARRAY.format(*shown))
                written[i, k] = x
        return written

    def create(self, values: Values, call: Callable[[], Any]) -> None:
        """Run `call()` outside a trace, to create all fields that `init` still misses.

        Its writes are dropped, because the transform runs the function again.
        """
        self.commit(self.run({**self.values, **values}, call)._replace(written={}))

    # --- Commit -----------------------------------------------------------------------

    def commit(self, ran: Ran) -> None:
        """Write to the owned modules, and record the sown values: all or nothing."""
        # Everything that can raise comes first, so that an `except` in user code never
        # sees a half-written model. If this call runs inside a plain `jax.vmap` in the
        # scope, the new values are tracers of that `vmap`, and must not reach the
        # modules.
        self._check_written_once(ran.written)
        for i, k in ran.written:
            scope = self.roots[i].ownership.scope
            if not scope.is_here:
                raise TraceError(trace_message(self.name((i, k))))
        for _, fields in self.created:
            check_created(fields)
        sown = [
            (scope.sown, key, out)
            for scope, kept in zip(self.scopes, ran.sown, strict=True)
            for key, values in kept.items()
            if (out := carried_out(scope, key, values))
        ]
        by_root: dict[int, dict[int, Any]] = {}
        for (i, k), x in ran.written.items():
            by_root.setdefault(i, {})[k] = x
            owner, _ = self._owners[i, k]
            if ownership_of(owner) is None:  # appended to a list, so not owned yet
                owner = self.roots[i].original
            scope = self.roots[i].ownership.scope
            scope.written[id(owner)] = owner, self.name((i, k))
        for i, new in by_root.items():
            old = jtu.tree_leaves(self.roots[i].original)
            values = (new.get(k, x) for k, x in enumerate(old))
            _set_leaves(self.roots[i].original, values, keep=True)
        # After the writes: a new leaf shifts the positions of the others.
        for scope, fields in self.created:
            scope.put_created(
                [(self.originals.get(id(x), x), name, new) for x, name, new in fields]
            )
        for kept, key, values in sown:
            kept.setdefault(key, []).extend(values)

    def check_not_created(
        self, is_stack: Callable[[int, Visit], bool], what: str
    ) -> None:
        """Raise `ValueError` if `init` has created an array in one layer of a stack.

        `is_stack`: whether an array at this visit, in this root, is stacked.
        """
        inside = {
            id(v.node): (i, v) for i, x in enumerate(self.roots) for v in x.modules
        }
        for module, name, value in (field for _, x in self.created for field in x):
            if id(module) in inside:
                i, at = inside[id(module)]
                key = jtu.GetAttrKey(name)
                made = leaves(value, (*at.path, key), at.context.enter(module, key))
                if any(is_array(v.node) and is_stack(i, v) for v in made):
                    raise created_error(module, name, f"in one {what}")

    def _check_written_once(self, written: Values) -> None:
        """Raise `ValueError` if one state has two new values.

        For example, the function wrote it through an argument and through the closure.
        """
        if not self.originals:
            return
        # Compare modules and not paths: after `layers[0], layers[1] = layers[1],
        # layers[0]`, the recorded paths are old.
        writers: dict[tuple[int, int], int] = {}
        for slot in written:
            owner, number = self._owners[slot]
            if writers.setdefault((id(owner), number), slot[0]) != slot[0]:
                name = self.name(slot)
                raise ValueError(_WRITTEN_TWICE.format(name, name.rpartition(".")[2]))


def _set_leaves(module: BaseModule, values: Iterator[Any], keep: bool = False) -> None:
    """Set the leaves of a module in place, in the order of flattening.

    Owned modules inside remain the same objects. Other nodes, such as lists, are
    replaced instead of changed, because the caller may also refer to them. With `keep`,
    a field without a new leaf does not change.
    """

    def put(x: Any) -> Any:
        if is_owned(x):
            _set_leaves(x, values, keep)
            return x
        return next(values)

    fields = module.__dict__
    for name in dynamic_names(type(module)):
        if name in fields:
            old = fields[name]
            if eqx.is_array(old):  # the common case: `tree_map` is slow for one leaf
                new = next(values)
            else:
                new = jtu.tree_map(put, old, is_leaf=is_owned)
                pair = (jtu.tree_leaves(x, is_leaf=is_owned) for x in (old, new))
                if keep and identical(*pair):
                    continue
            object.__setattr__(module, name, new)


_NOT_AN_ARRAY: Final = """`{0}` was changed from `{1}` to `{2}` inside a transform. \
Only arrays can leave a transform. Make it an array, `phase: es.State = 0` instead of \
`"cold"`, or write it outside."""

_CONTAINER_CHANGED: Final = """A function under a transform changed a list or a dict \
in a module that it closes over. After tracing, the transform restores the fields of \
modules, but not the contents of such a container. Assign a new one instead: \
`self.layers = [*reversed(self.layers)]`."""

_WRITTEN_TWICE: Final = """`{0}` is reached twice, and written in both ways: through \
an argument of the transform, and through the closure or a second argument. An \
argument is a copy with its own values (a slice, a lane, the differentiated values), \
so one of the two writes would be lost. Write it in one way:

    lambda layer, x: self.layer(x) + layer(x)    # wrong: both write `{1}`
    lambda layer, x: layer(x)                    # right"""
