"""The lifting core: how state passes through a JAX transform. All transforms use it.

A lifted transform reaches owned modules through the function, its closure and its
arguments. In the inner trace these very objects have to hold that trace's values,
because the function may close over `self`, and no copy would be seen by the closure. So
their contents are swapped for the time of the trace. After it the old contents are put
back, the writes leave the trace as ordinary outputs, and are committed to the objects
outside.
"""

import contextlib
import functools as ft
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .._compat import out_of_vmaps
from .._errors import NotInitializedError, TraceError
from .._state._collect import leave, Owned, Snapshot
from .._state._scope import alone, is_owned, own, Scope, Sown
from .._state._sow import carried_out
from .._state._write_errors import trace_message
from .._tree._aliasing import modules_below
from .._tree._base import get_place, set_place
from .._tree._compare import identical, same
from .._tree._observe import OBSERVING, Recorder
from .._tree._show import show
from .._tree._walk import is_array, Visit
from ._arguments import check_all_initialized, is_traced
from ._closures import is_model, models_in, owned_in
from ._rebuilt import put_together, Rebuilt, take_apart
from ._root import pour, roots_among, Slot, Values
from ._stand_ins import extents, StandIn, Twice


@jtu.register_static
class Static:
    """Takes a static value out of a trace, as a part of the output's treedef."""

    def __init__(self, value: Any):
        self.value = value


class Made(NamedTuple):
    """What `init` has made in a trace: new arrays, and the rest, which is static.

    The rest is, for each root that is another now, a `Rebuilt`; and for each array a
    `Visit` of its shape.
    """

    arrays: Values
    rest: Static


class Ran(NamedTuple):
    """The result of a call in a trace: its output, its writes, and what it sowed.

    - `sown`: for each scope, the values by name.
    - `made`: while initializing, what was missing before.
    """

    out: Any
    written: Values
    sown: list[Sown]
    made: Made | None = None

    def news(self) -> dict[Slot, Visit]:
        """The new arrays that `init` has made."""
        return {} if self.made is None else self.made.rest.value[1]


class Lifted:
    """The owned modules that one lifted call reaches, and all their leaves.

    - `reached`: the modules, once for each place where one is reached.
    - `roots`: the outermost of them, each once.
    - `values`: the leaves of all roots.
    - `writable`: those of `values` that are arrays which the call may write.
    - `records`: the roots that are the records of observers, by their index.

    `stand_ins` are among the arguments; writes to one go to the original. With
    `may_initialize` an argument may be a model that the call itself initializes.
    """

    def __init__(
        self,
        functions: Any,
        *arguments: Any,
        stand_ins: Sequence[StandIn] = (),
        may_initialize: bool = False,
    ):
        self.given = functions, arguments
        self.in_function = owned_in(functions)
        # The arguments may be functions, too, and may lead to the same modules.
        self.reached = [*self.in_function, *owned_in(arguments)]
        observers = [scope.observer for scope in OBSERVING.get().values()]
        records = {id(x.record): x for x in observers if isinstance(x, Recorder)}
        self.reached += [x.record for x in records.values()]
        # There may be several scopes: `es.mutable` calls nest, and a function may reach
        # modules of an outer one.
        scopes = [get_place(module).scope for module in self.reached]
        # Equinox's own modules, whose calls may be observed, do not lead to a scope.
        scopes += OBSERVING.get().values()
        self.scopes = list({id(scope): scope for scope in scopes}.values())
        with alone(self.scopes):
            originals = {id(x.module): x.original for x in stand_ins}
            self.roots = roots_among(self.reached, originals)
        roots = enumerate(self.roots)
        self.records = {
            i: records[id(x.module)] for i, x in roots if id(x.module) in records
        }
        if not self._reaches_model and not may_initialize:
            check_all_initialized(jtu.tree_leaves(self.given, is_leaf=is_model))
        self.values: Values = {
            (i, k): visit.node
            for i, root in enumerate(self.roots)
            for k, visit in enumerate(root.leaves)
        }
        # Nothing new can be made in a loop or a branch, whose structure is fixed. While
        # `init` runs, transforms therefore first call their function without a trace.
        self.is_initializing = any(scope.is_initializing for scope in self.scopes)
        has_twice = stand_ins and not self.is_initializing
        self.twice = Twice(self.roots, self.writable) if has_twice else Twice([], {})

    @property
    def _reaches_model(self) -> bool:
        """Whether there is more than the records of observers."""
        return len(self.roots) > len(self.records)

    @ft.cached_property
    def writable(self) -> Values:
        # Cached, and not worked out for each call: the kinds of all leaves are asked.
        # NumPy arrays are constants here (`_collect.enter`), which may be shapes.
        return {
            (i, k): visit.node
            for i, root in enumerate(self.roots)
            for k, visit in enumerate(root.leaves)
            if is_array(visit.node) and not isinstance(visit.node, np.ndarray)
            if root.place.scope.allows(visit.kind)
        }

    def name(self, slot: Slot) -> str:
        """The name of a leaf in the model."""
        i, k = slot
        return self.roots[i].leaves[k].name

    @ft.cached_property
    def _slots(self) -> dict[int, list[Slot]]:
        """The slots of each module in the roots, in the order of its leaves."""
        return {
            id(x.module): [(i, k) for k in range(x.start, x.stop)]
            for i, root in enumerate(self.roots)
            for x in extents(root.visits)
        }

    def slots(self, module: Any) -> list[Slot]:
        """The slots of an owned module that is a root, or inside one."""
        return self._slots[id(module)]

    def fill(self, tree: Any, new: Iterable[Any]) -> tuple[Any, Values]:
        """`tree` with other leaves. Those of owned modules come as values by slot."""
        new, values = iter(new), {}

        def put(x: Any) -> Any:
            if not is_owned(x):
                return next(new)
            values.update((slot, next(new)) for slot in self.slots(x))
            return x

        return jtu.tree_map(put, tree, is_leaf=is_owned), values

    def split(self, out: Any) -> tuple[Any, Any]:
        """The arrays that a call has computed, and the rest of its output.

        Arrays from outside that the call only returns do not pass through the trace,
        which would make new arrays of them. So a module that is returned still has its
        own parameters, and may be assigned: for a scope they are unchanged.
        """
        outside = {id(x) for x in self.values.values()}
        computed = jtu.tree_map(
            lambda x, traced: traced and id(x) not in outside, out, is_traced(out)
        )
        return eqx.partition(out, computed)

    def run(self, values: Values, call: Callable[[], Any]) -> Ran:
        """Run `call()` in the active trace, while the roots hold these values.

        This is surprisingly subtle; three decisions make it work.

        *Contents are swapped.* The obvious way would be to give the function copies
        that hold the values of the trace. That works for arguments, but `lambda x:
        self.layer(x)` holds the object itself, and would go on reading the outer values
        and writing to the outer scope. So the objects keep their identity, and their
        fields change.

        *Contents are restored*, whatever happens. JAX decides how often a function is
        traced: a loop traces its body again if the weak types of the carry have to
        settle, and a function that is passed as two branches is traced only once. So a
        trace must leave nothing behind in the objects, neither its tracers nor its
        writes. The writes are returned, leave the transform as outputs, and `commit`
        writes them, once.

        *Containers are checked.* Restoring a field puts back the list that it held, but
        not what was in the list: a function that has the list from outside may have
        changed it. There is no right way to merge such a change, so it is an error.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(alone(self.scopes))
            inner = {id(scope): scope.inner() for scope in self.scopes}
            for scope in inner.values():
                stack.enter_context(scope)
            stack.enter_context(alone(inner.values()))
            # Entered last, and so left first: the locks are held as long as contents
            # are swapped.
            stack.enter_context(self._restored())
            owned = [self._enter(i, values, inner) for i in range(len(self.roots))]
            self.twice.watch()
            out, after = leave(self._called(call), owned)
        self._check_containers()
        made = None
        if self.is_initializing:
            after, made = self._made([x.before for x in owned], after)
        written = self._merged(self._written(values, after))
        self.twice.check(written, self.name)
        sown = [inner[id(scope)].sown for scope in self.scopes]
        return Ran(out, written, sown, made)

    def _merged(self, written: Values) -> Values:
        """The writes, in which the record of an observer is one for all lanes.

        Only if nothing but `jax.vmap` lies between the active trace and its scope.
        """
        merged = dict(written)
        for (i, k), x in written.items():
            if i in self.records:
                lanes = out_of_vmaps(x, self.roots[i].place.scope.trace)
                if lanes is not None:
                    merged[i, k] = self.records[i].merge(lanes)
        return merged

    def trace_error(self, slot: Slot) -> TraceError:
        """The error for a write in a trace that it cannot leave."""
        if (observer := self.records.get(slot[0])) is not None:
            return TraceError(observer.trace_message)
        scope = self.roots[slot[0]].place.scope
        return TraceError(trace_message(scope, self.name(slot)))

    def _made(
        self, before: list[Snapshot], after: list[Snapshot]
    ) -> tuple[list[Snapshot], Made]:
        """The snapshots of the old leaves only, and all that `init` has made."""
        known = []
        results: dict[int, Rebuilt] = {}
        arrays: Values = {}
        news: dict[Slot, Visit] = {}
        for i, root in enumerate(self.roots):
            old, result, made, new = take_apart(i, root, before[i], after[i])
            known.append(old)
            if result is not None:
                results[i] = result
                arrays |= made
                news |= new
        return known, Made(arrays, Static((results, news)))

    def _written(self, values: Values, after: list[Snapshot]) -> Values:
        """The leaves that differ from `values`; `ValueError` if one is not an array."""
        written = {}
        for i, new in enumerate(after):
            for k, x in enumerate(new.leaves):
                if same(old := values[i, k], x):
                    continue
                if is_array(old) and is_array(x):
                    written[i, k] = x
                else:
                    shown = self.name((i, k)), show(old), show(x)
                    raise ValueError(_NOT_AN_ARRAY.format(*shown))
        return written

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """Put the contents and places of all modules in the roots back at the end."""
        saved = [
            (v.node, dict(v.node.__dict__), get_place(v.node))
            for root in self.roots
            for v in root.modules
        ]
        try:
            yield
        finally:
            for module, fields, place in saved:
                module.__dict__.clear()
                module.__dict__.update(fields)
                set_place(module, place)

    def _enter(self, i: int, values: Values, inner: dict[int, Scope]) -> Owned:
        """Put these values into a root, and give the root to an inner scope.

        The inner scope belongs to the inner trace. With the outer one each write would
        be refused, as a write in another trace.
        """
        root = self.roots[i]
        scope = inner[id(root.place.scope)]
        path, context = root.place.path, root.place.context
        outer = [(visit.node, get_place(visit.node)) for visit in root.modules]
        new = [values[i, k] for k in range(len(root.leaves))]
        pour(root.module, iter(new))
        own(root.module, scope, path, context)
        for module, place in outer:
            # Without a place the module is not owned, and `pour` has replaced it.
            if place is not None:
                # An outer transform wants to know of reads in an inner one, too.
                get_place(module).watches = place.watches
                get_place(module).thread = threading.get_ident()
        return Owned(root.module, Snapshot(new, root.structure), scope, path, context)

    def _called(self, call: Callable[[], Any]) -> Any:
        """`call()`. If it fails at an Initializer, name that one in the error."""
        try:
            return call()
        except (NotInitializedError, TypeError):
            # Not before the call, because a function may close over a lazy model and
            # initialize it.
            if not self._reaches_model:
                check_all_initialized(models_in(self.given))
            raise

    def _check_containers(self) -> None:
        """Raise `TraceError` if `call` changed a container of modules from outside."""
        for root in self.roots:
            modules = [visit.node for visit in root.modules]
            if not identical(modules_below(root.module), modules):
                raise TraceError(_CONTAINER_CHANGED)

    def commit(self, ran: Ran) -> None:
        """Write to the owned modules, and record what was sown: all or nothing."""
        with alone(self.scopes):
            self._commit(ran)

    def _commit(self, ran: Ran) -> None:
        # Everything that can raise comes first. If a transform of JAX lies between the
        # scope and us, the values are its tracers and must not reach the modules, none
        # of them: an `except` in user code would otherwise see a model half written.
        written = self._merged(ran.written)
        for i, k in written:
            is_merged = written[i, k] is not ran.written[i, k]
            if not (is_merged or self.roots[i].place.scope.is_here):
                raise self.trace_error((i, k))
        sown = [
            (scope.sown, key, carried_out(scope, key, values))
            for scope, kept in zip(self.scopes, ran.sown, strict=True)
            for key, values in kept.items()
        ]
        by_root: dict[int, dict[int, Any]] = {}
        for (i, k), x in written.items():
            by_root.setdefault(i, {})[k] = x
        for i, new in by_root.items():
            # To the original, which for a stand-in is another module than the root.
            original, scope = self.roots[i].original, self.roots[i].place.scope
            old = jtu.tree_leaves(original)
            pour(original, (new.get(k, x) for k, x in enumerate(old)))
            if i not in self.records:  # they are in no model, and cannot drop out
                scope.written[id(original)] = original, self.name((i, next(iter(new))))
        # After the writes, since new leaves shift the positions of the others.
        if ran.made is not None:
            results = ran.made.rest.value[0]
            # Stand-ins last: another root may hold what one stands for, as it was.
            for i in sorted(results, key=lambda i: self.roots[i].is_stand_in):
                put_together(i, self.roots[i], results[i], ran.made.arrays)
        for kept, key, values in sown:
            kept.setdefault(key, []).extend(values)


_NOT_AN_ARRAY: Final = """`{0}` was `{1}`, and was written inside a transform: it is \
now `{2}`. Only arrays come out of a transform, so other state has to keep its value \
there. Make it an array,

    phase: es.State = "cold"    # wrong
    phase: es.State = 0         # right

or write it outside of the transform."""

_CONTAINER_CHANGED: Final = """A list or a dictionary of modules was changed inside a \
transform, by a function that has it from outside. The transform puts the modules back \
as they were, but not what is in such a container. Replace it instead of writing into \
it:

    layers[0], layers[1] = layers[1], layers[0]     # wrong
    self.layers = [self.layers[1], self.layers[0]]  # right"""
