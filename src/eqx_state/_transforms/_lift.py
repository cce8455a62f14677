"""The one lifting core: state through a JAX transform, in place.

A lifted transform reaches owned modules through the function, its closure and its
arguments. A copy would not do: a closure over `self` goes on seeing the old object. So
the contents of the owned objects are swapped, for the time of the inner trace, for that
trace's values; what was written is collected, the old contents are put back whatever
happens, and what the transform returns is written to them at the end.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._compat import trace_state
from .._errors import NotInitializedError, TraceError
from .._state._collect import leave, Owned, Snapshot
from .._state._init import check_initialized, made_in, put_in
from .._state._module import Module
from .._state._scope import is_owned, own, Scope, Sown
from .._state._write_errors import trace_message
from .._tree._aliasing import check_not_shared, modules_below
from .._tree._base import get_place, set_place
from .._tree._compare import identical, same
from .._tree._show import show
from .._tree._walk import is_array, leaves, name_of, Visit
from ._closures import is_model, models_in, owned_in
from ._root import pour, roots_among, Slot, Values
from ._stand_ins import by_entry, StandIn, Twice


@jtu.register_static
class Static:
    """Takes what is not an array out of a trace, as part of the output's structure."""

    def __init__(self, value: Any):
        self.value = value


class Made(NamedTuple):
    """What was not there before: its arrays, and where it belongs beside what else."""

    arrays: list[Any]
    rest: Static


class Ran(NamedTuple):
    """What a call in a trace has returned, written and sown.

    - `sown`: in each scope, by name.
    - `made`: while initializing, what it has brought into being.
    """

    out: Any
    written: Values
    sown: list[Sown]
    made: Made | None = None


def is_initializing(*given: Any) -> bool:
    """Whether `init` runs its forward pass on a module that these reach.

    A loop or a branch cannot bring anything into being. So a transform then calls its
    function once without one, or does without one altogether.
    """
    return any(get_place(x).scope.is_initializing for x in owned_in(given))


class Lifted:
    """What one lifted call threads: each owned module within reach, once.

    - `reached`: each place where one is reached.
    - `roots`: the outermost of them.
    - `values`: their leaves.
    - `writable`: those that are arrays which the call may write.

    `stand_ins` are among the arguments: what is written to one goes to the original.
    With `may_initialize` an argument may be a model that the call initializes.
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
        # A function among the arguments may close over the same modules.
        self.reached = [*self.in_function, *owned_in(arguments)]
        # A parent's scope may be that of an outer `es.mutable`.
        scopes = [get_place(module).scope for module in self.reached]
        self.scopes = list({id(scope): scope for scope in scopes}.values())
        with _alone(self.scopes):
            originals = {id(x.module): x.original for x in stand_ins}
            self.roots = roots_among(self.reached, originals)
        if not self.roots and not may_initialize:
            _check_initialized(jtu.tree_leaves(self.given, is_leaf=is_model))
        visits = {
            (i, k): visit
            for i, root in enumerate(self.roots)
            for k, visit in enumerate(root.leaves)
        }
        self.values: Values = {slot: v.node for slot, v in visits.items()}
        self.writable: Values = {
            slot: v.node
            for slot, v in visits.items()
            if is_array(v.node) and self.roots[slot[0]].place.scope.allows(v.kind)
        }
        self.is_initializing = any(scope.is_initializing for scope in self.scopes)
        has_twice = stand_ins and not self.is_initializing
        self.twice = Twice(self.roots if has_twice else [], self.writable)

    def check_apart(self, *arguments: Any) -> None:
        """Raise `ValueError` if one of them has a stateful module in two places.

        In the trace it would be two. A module of a scope stays the one that it is.
        """
        for tree in arguments:
            if not owned_in(tree):
                check_not_shared(tree)

    def name(self, slot: Slot) -> str:
        """The name of a leaf in the model."""
        i, k = slot
        return self.roots[i].leaves[k].name

    def split(self, out: Any) -> tuple[Any, Any]:
        """The arrays that a call has computed, and the rest of its output.

        The arrays of a module that are those from outside go round the trace: a
        module that comes back with its parameters may then be assigned.
        """
        outside = {id(x) for x in self.values.values()}
        computed = jtu.tree_map(
            lambda x, traced: traced and id(x) not in outside, out, is_traced(out)
        )
        return eqx.partition(out, computed)

    def run(self, values: Values, call: Callable[[], Any]) -> Ran:
        """`call()` in the active trace, with these values in the roots meanwhile."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_alone(self.scopes))
            inner = {id(scope): scope.inner() for scope in self.scopes}
            for scope in inner.values():
                stack.enter_context(scope)
            stack.enter_context(_alone(inner.values()))
            stack.enter_context(self._restored())
            owned = [self._enter(i, values, inner) for i in range(len(self.roots))]
            self.twice.watch()
            out, after = leave(self._called(call), owned)
        self._check_containers()
        made = None
        if self.is_initializing:
            after, made = self._made([x.before for x in owned], after)
        written = self._written(values, after)
        self.twice.check(written, self.name)
        sown = [inner[id(scope)].sown for scope in self.scopes]
        return Ran(out, written, sown, made)

    def _made(
        self, before: list[Snapshot], after: list[Snapshot]
    ) -> tuple[list[Snapshot], Made]:
        pairs = zip(before, after, strict=True)
        known, found = zip(*[made_in(old, new) for old, new in pairs], strict=True)
        where = [(i, path) for i, parts in enumerate(found) for path in parts]
        values = [value for parts in found for value in parts.values()]
        arrays, static = eqx.partition(values, eqx.is_array)
        return list(known), Made(arrays, Static((where, static)))

    def names_of_made(self, ran: Ran) -> list[tuple[str, Any]]:
        """The name and the arrays of each part that was brought into being."""
        if ran.made is None:
            return []
        paths = [(*self.roots[i].place.path, *p) for i, p in ran.made.rest.value[0]]
        return list(zip(map(name_of, paths), ran.made.arrays, strict=True))

    def _written(self, values: Values, after: list[Snapshot]) -> Values:
        written = {}
        for i, new in enumerate(after):
            for k, x in enumerate(new.leaves):
                if same(old := values[i, k], x):
                    continue
                if is_array(old) and is_array(x):
                    written[i, k] = x
                elif not self.is_initializing:
                    shown = self.name((i, k)), show(old), show(x)
                    raise ValueError(_NOT_AN_ARRAY.format(*shown))
        return written

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """The contents of the roots, and their places, are put back at the end."""
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
        """Put these values into a root, and the root into an inner scope."""
        root = self.roots[i]
        scope = inner[id(root.place.scope)]
        path, context = root.place.path, root.place.context
        outer = [(visit.node, get_place(visit.node)) for visit in root.modules]
        new = [values[i, k] for k in range(len(root.leaves))]
        pour(root.module, iter(new))
        own(root.module, scope, path, context)
        for module, place in outer:
            if place is not None:  # else a copy of it is there
                get_place(module).watches = place.watches
                get_place(module).thread = threading.get_ident()
        return Owned(root.module, Snapshot(new, root.structure), scope, path, context)

    def _called(self, call: Callable[[], Any]) -> Any:
        """`call()`; what it has taken for a value, and is none yet, is named."""
        try:
            return call()
        except (NotInitializedError, TypeError):
            # Not before: a function may initialize what it closes over.
            if not self.roots:
                _check_initialized(models_in(self.given))
            raise

    def _check_containers(self) -> None:
        """Nothing that is outside may have been moved by what runs inside."""
        for root in self.roots:
            modules = [visit.node for visit in root.modules]
            if not identical(modules_below(root.module), modules):
                raise TraceError(_CONTAINER_CHANGED)

    def commit(self, ran: Ran) -> None:
        """Write the values to the owned modules, and sow: all or nothing."""
        with _alone(self.scopes):
            self._commit(ran)

    def _commit(self, ran: Ran) -> None:
        for i, k in ran.written:
            if self.roots[i].place.scope.trace != trace_state():
                raise TraceError(trace_message(self.name((i, k))))
        sown = list(zip(self.scopes, ran.sown, strict=True))
        for scope, values in sown:
            if values and scope.trace != trace_state():
                raise TraceError(trace_message(next(iter(values)), verb="sow"))
        for i in {slot[0]: None for slot in ran.written}:
            original = self.roots[i].original
            old = jtu.tree_leaves(original)
            new = (ran.written.get((i, k), x) for k, x in enumerate(old))
            pour(original, new)
            k = next(k for j, k in ran.written if j == i)
            scope = self.roots[i].place.scope
            scope.written[id(original)] = original, self.name((i, k))
        # Last, since it changes the positions of leaves.
        if ran.made is not None:
            where, static = ran.made.rest.value
            made = eqx.combine(ran.made.arrays, static)
            for (i, path), value in zip(where, made, strict=True):
                place, original = self.roots[i].place, self.roots[i].original
                put_in(original, path, value)
                own(original, place.scope, place.path, place.context)
        for scope, values in sown:
            for name, new in values.items():
                scope.sown.setdefault(name, []).extend(new)


@contextlib.contextmanager
def _alone(scopes: Iterable[Scope]) -> Iterator[None]:
    """No other thread is in any of these scopes meanwhile."""
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope.alone(transform=True))
        yield


_NOT_AN_ARRAY: Final = """`{0}` was `{1}`, and was written inside a transform: it is \
now `{2}`. Only arrays come out of a transform, so that other state keeps its value \
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


def _check_initialized(models: list[Any]) -> None:
    """Raise `NotInitializedError`, with a name in the model, if one is not ready."""
    for x in models:
        if getattr(x, "__func__", None) is not Module.init:
            check_initialized(x)


def is_mappable(visit: Visit) -> bool:
    """What JAX's transforms take for an array: numbers, too, but not a module's."""
    return is_array(visit.node) or (
        visit.context.owner is None and eqx.is_array_like(visit.node)
    )


def is_traced(tree: Any) -> Any:
    """For each leaf of an argument or of an output, whether JAX would trace it.

    Owned modules are leaves, and are not traced as such.
    """
    flags = [is_mappable(visit) for visit in leaves(tree)]
    traced = [not is_owned(x) and flag[0] for x, flag in by_entry(tree, flags)]
    return jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_owned), traced)
