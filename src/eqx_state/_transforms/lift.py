"""The lifting core: how state passes through a JAX transform. All transforms use it.

A transform of JAX sees the arguments of a function, but not the values that the
function closes over. A layer writes `self.mean = …`, often in a closure over `self`.
Every transform of `es` carries such writes out of its trace in three steps:

1. *Reach.* `Lifted(by_reference, by_value)` finds the modules that an open scope owns:
   in the functions, in their closures, and among the arguments. A closure refers to the
   object itself. A module among the arguments is a value, as in JAX, so the function
   gets a copy of it (`roots`).
2. *Swap.* `run` sets the fields of these modules to the values of the trace, calls the
   function in scopes that belong to the trace, and restores the fields. The leaves that
   were written leave the trace as ordinary outputs, by slot.
3. *Commit* them to the modules outside: all or nothing.

A module that no scope owns is data: JAX traces its arrays in an argument, and treats
them as constants in a closure.
"""

import contextlib
import functools as ft
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._errors import NotInitializedError, show, TraceError
from .._state.copy import Collected, leave, OwnedTree
from .._state.init import check_created, Created
from .._state.lazy import check_initialized
from .._state.observe import OBSERVING
from .._state.scope import is_owned, own, Scope, Sown
from .._state.sow import carried_out
from .._state.write import trace_message
from .._tree.base import is_module, ownership_of, set_ownership
from .._tree.compare import same
from .._tree.walk import all_modules
from .clashes import check_not_covered, check_written_once
from .entries import check_unchanged, contents_in
from .reach import models_in, owned_in
from .roots import (
    by_entry,
    Copies,
    copy_arguments,
    Field,
    fields_in,
    Leaf,
    Root,
    roots_among,
    Values,
)


class Ran(NamedTuple):
    """All that leaves the trace of a call: its output, its writes, its sown values.

    Only `Lifted.run` makes one. A transform returns it whole from its trace, perhaps
    with a different `out` and `written`, and passes it whole to `commit`: a transform
    that took it apart could forget a part. `sown` has an entry for each scope, with the
    scope's values by key.
    """

    out: Any
    written: Values
    sown: list[Sown]

    def without_sown(self, refused: str) -> tuple[Any, Values]:
        """`out` and `written`; `ValueError` with the text `refused` for a sown value.

        For loops, whose trace returns only the carry.
        """
        for key in itertools.chain(*self.sown):
            raise ValueError(refused.format(key))
        return self.out, self.written


class Lifted:
    """The owned modules that one lifted call reaches, and all their leaves.

    - `given`: what was given, by reference and by value.
    - `arguments`: what was given by value, with a copy of each owned module.
    - `reached`: the modules, once per occurrence.
    - `roots`: the outermost of them, each once; `fields`: theirs.
    - `leaves`, `values`: the leaves and their values, by slot.
    - `created`: the fields that `init` has created in the last run. They are not in
        `Ran`, because the modules in it could not be outputs of a trace.
    - `scopes`: the scopes that own the modules; several if `es.mutable` is nested.

    `by_reference`: functions, and arguments of which the call gets the objects
    themselves, because the transform does not give them values of their own.
    `treatments`, one for each leaf of `by_value`, are those of `copy_arguments`.
    """

    def __init__(
        self, by_reference: Any, by_value: Any = (), treatments: Sequence[Any] = ()
    ):
        self.given = by_reference, by_value
        reached = owned_in(self.given)
        # Add the scopes of observers. An observer also records calls of Equinox's
        # modules, which no scope owns.
        scopes = [*(ownership_of(x).scope for x in reached), *OBSERVING.get().values()]
        self.scopes = list({id(scope): scope for scope in scopes}.values())
        for scope in self.scopes:
            scope.check_thread()
        self.is_initializing = any(scope.is_initializing for scope in self.scopes)
        self.arguments, self.copies = by_value, Copies({}, {})
        if reached:
            self.arguments, self.copies = copy_arguments(by_value, treatments)
        if self.copies.originals:
            reached = owned_in((by_reference, self.arguments))
        self.created: list[tuple[Any, Created]] = []
        self.reached = reached
        self.roots = roots_among(reached, self.copies)
        self.fields = [x for root in self.roots for x in fields_in(root, self.copies)]
        at: dict[int, tuple[Field, int]] = {}
        for field in self.fields:
            for number, slot in field.slots.items():
                at[slot] = field, number
        visits = [
            (visit, root)
            for root in self.roots
            for visit in root.traversal.visits
            if visit.is_leaf
        ]
        self.leaves = [Leaf(*pair, *at[slot]) for slot, pair in enumerate(visits)]
        self.values: Values = {k: leaf.visit.node for k, leaf in enumerate(self.leaves)}

    @ft.cached_property
    def writable(self) -> Values:
        """The arrays among `values` that the call may write."""
        return {
            k: visit.node
            for k, (visit, root, _, _) in enumerate(self.leaves)
            if isinstance(visit.node, jax.Array)
            and root.ownership.scope.allows(visit.kind)
        }

    def name(self, slot: int) -> str:
        """The name of a leaf in the model."""
        return self.leaves[slot].visit.name

    @ft.cached_property
    def _slots(self) -> dict[int, range]:
        """The slots of each module, by its `id`."""
        return {
            id(module): root.slots[start:stop]
            for root in self.roots
            for module, start, stop in root.traversal.extents()
        }

    def has(self, module: Any) -> bool:
        """Whether a module is lifted, or inside a lifted module."""
        return id(module) in self._slots

    def slots(self, module: Any) -> range:
        """The slots of a module that is lifted, or inside a lifted module."""
        return self._slots[id(module)]

    def by_slot(self, tree: Any, values: Sequence[Any]) -> Values:
        """The `values` of the leaves in owned modules, given one for each leaf."""
        return {
            slot: value
            for x, own in by_entry(tree, values)
            if is_owned(x)
            for slot, value in zip(self.slots(x), own, strict=True)
        }

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

    # --- Swap -------------------------------------------------------------------------

    def run(
        self,
        values: Values,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] = {},
        returned: Collection[int] = (),
    ) -> Ran:
        """Run `f(*args, **kwargs)` in the active trace, with these values.

        `returned`: the slots of copies that the transform returns in any case.

        JAX decides how often it traces a function: a loop traces its body twice if weak
        types in the carry have to settle. A trace therefore leaves no tracers and no
        writes in the modules; `commit` writes once.
        """
        inner: dict[int, Any] = {id(scope): scope.inner() for scope in self.scopes}
        with contextlib.ExitStack() as stack:
            for scope in inner.values():
                stack.enter_context(scope)
            stack.enter_context(self._swapped(values, inner))
            before = contents_in((f, args, kwargs))
            given_out = self._called(f, args, kwargs)
            check_unchanged(before, given_out)
            self.created = [
                (scope, inner[id(scope)].take_created())
                for scope in self.scopes
                if scope.is_initializing
            ]
            owned = [self._owned(root, values, inner) for root in self.roots]
            out, after = leave(given_out, owned)
        # A function that closes over `layers = self.layers` may have called
        # `layers.reverse()`. The restored field contains this list, and the change
        # cannot leave the trace.
        if not all(field.is_intact() for field in self.fields):
            raise TraceError(_CONTAINER_CHANGED)
        written = self._written(values, after)
        if self.copies.originals:
            check_written_once(self.leaves, written.keys() - {*returned})
            originals = [self.leaves[slot].field.outside for slot in returned]
            originals += self.copies.originals_in(all_modules(given_out))
            check_not_covered(self.leaves, written, originals)
        return Ran(out, written, [inner[id(scope)].sown for scope in self.scopes])

    def _called(self, f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `f`. If it uses an Initializer, raise an error that names it."""
        try:
            return f(*args, **kwargs)
        except NotInitializedError:
            # Not before the call: a function may close over a lazy model, and
            # initialize it.
            for model in models_in(self.given):
                check_initialized(model)
            raise

    def _owned(self, root: Root, values: Values, inner: dict[int, Scope]) -> OwnedTree:
        """A lifted module with its values in the trace, for the end of its scope."""
        before = root.traversal.with_leaves([values[k] for k in root.slots])
        return OwnedTree(root.module, before, inner[id(root.ownership.scope)])

    @contextlib.contextmanager
    def _swapped(self, values: Values, inner: dict[int, Scope]) -> Iterator[None]:
        """Give the modules these values and an inner scope, and restore them at exit.

        The inner scope belongs to the inner trace. The outer scope, which belongs to a
        different trace, would reject each write.
        """
        modules = [
            (module, dict(module.__dict__), ownership_of(module))
            for root in self.roots
            for module in filter(is_module, root.traversal.modules)
        ]
        try:
            for field in self.fields:
                field.swap(values)
            for root in self.roots:
                now = root.traversal
                if root.has_strays:  # which are copies now
                    now = now.again(root.module)
                scope = inner[id(root.ownership.scope)]
                scope.traversals[id(root.module)] = now
                own(now, scope)
            yield
        finally:
            for module, fields, ownership in modules:
                module.__dict__.clear()
                module.__dict__.update(fields)
                set_ownership(module, ownership)

    def _written(self, values: Values, after: list[Collected]) -> Values:
        """The leaves that differ from `values`; `ValueError` if one is not an array."""
        written = {}
        for root, new in zip(self.roots, after, strict=True):
            for slot, x in zip(root.slots, new.leaves, strict=True):
                if same(old := values[slot], x):
                    continue
                if slot not in self.writable or not isinstance(x, jax.Array):
                    shown = self.name(slot), show(old), show(x)
                    raise ValueError(_NOT_AN_ARRAY.format(*shown))
                written[slot] = x
        return written

    def probe(self, f: Callable[..., Any], *args: Any) -> None:
        """Trace a branch or a step that JAX may never run, to see what it writes.

        Under `jax.disable_jit`, JAX runs only the branch that is taken, and as many
        steps as there are. But a key of a lane of `es.vmap` advances if some branch
        draws from it, so that the numbers do not depend on this option.
        """
        is_in_lane = any(isinstance(x, jax.core.Tracer) for x in self.writable.values())
        if jax.config.jax_disable_jit and is_in_lane:
            with contextlib.suppress(Exception):  # `f` may need values
                jax.eval_shape(f, *args)

    # --- Commit -----------------------------------------------------------------------

    def commit_written(self, written: Values) -> None:
        """Commit the writes of traces that have sown nothing: see `without_sown`."""
        self.commit(Ran(None, written, [Sown() for _ in self.scopes]))

    def commit(self, ran: Ran) -> None:
        """Write to the owned modules, and record the sown values: all or nothing."""
        # Everything that can raise comes first, so that an `except` in user code never
        # sees a half-written model. If this call runs inside a plain `jax.vmap` in the
        # scope, the new values are tracers of that `vmap`, and must not reach the
        # modules.
        check_written_once(self.leaves, ran.written)
        for slot in ran.written:
            if not self.leaves[slot].root.ownership.scope.is_here:
                raise TraceError(trace_message(self.name(slot)))
        for _, fields in self.created:
            check_created(fields)
        sown = [
            (scope.sown, key, out)
            for scope, kept in zip(self.scopes, ran.sown, strict=True)
            for key, values in kept.items()
            if (out := carried_out(scope, key, values))
        ]
        by_field: dict[Field, Values] = {}
        for slot, x in ran.written.items():
            _, root, field, _ = self.leaves[slot]
            if x is self.values[slot]:
                # Under `jax.disable_jit`, JAX has not run the branch that writes it. A
                # transform around this one finds writes by identity.
                x = jnp.copy(x)
            by_field.setdefault(field, {})[slot] = x
            module = field.outside
            root.ownership.scope.written[id(module)] = module, self.name(slot)
        for field, new in by_field.items():
            field.write(new)
        # After the writes: a new leaf shifts the positions of the others.
        for scope, fields in self.created:
            scope.put_created(
                [(self.copies.original(x), name, new) for x, name, new in fields]
            )
        for kept, key, values in sown:
            kept.setdefault(key, []).extend(values)


_NOT_AN_ARRAY: Final = """`{0}` was changed from `{1}` to `{2}` inside a transform. \
Only arrays can leave a transform. Make it an array of JAX, `phase: es.State = 0` \
instead of `"cold"`, and assign it, `self.stats = {{"a": x}}`; or write it outside."""

_CONTAINER_CHANGED: Final = """A function under a transform changed a list or a dict \
in a module that it closes over. After tracing, the transform restores the fields of \
modules, but not the contents of such a container. Assign a new one instead: \
`self.layers = [*reversed(self.layers)]`."""
