"""The one lifting core: state through a JAX transform, in place.

A lifted transform reaches owned modules through the function, its closure and its
arguments. A copy would not do: a closure over `self` goes on seeing the old object. So
the contents of the owned objects are swapped, for the time of the inner trace, for that
trace's values; what was written is collected, the old contents are put back whatever
happens, and what the transform returns is written to them at the end.
"""

import contextlib
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._compat import trace_state
from .._errors import NotInitializedError, TraceError
from .._state._collect import check_written, collect, Snapshot
from .._state._init import check_initialized
from .._state._module import Module
from .._state._nn_shared import closed_copy
from .._state._scope import disown, is_owned, own, Place, Scope
from .._state._write import trace_message
from .._tree._aliasing import check_apart, check_not_shared
from .._tree._base import BaseModule, get_place, set_place
from .._tree._compare import identical, same
from .._tree._show import show
from .._tree._walk import is_array, leaves, modules_in, Visit, walk
from ._closures import is_model, models_in, owned_in
from ._stand_ins import by_entry, StandIn, Twice


# Leaves of a module by their position, in the order of flattening. Not by name: those
# of two may be equal.
Leaves = dict[int, Any]

# What was sown in each scope; JAX sorts a dictionary, but not this one.
Sown = list[OrderedDict[str, list[Any]]]


class Lifted:
    """What one lifted call threads: each owned module within reach, once.

    `reached` has each place where one is reached. `roots` are the outermost of them;
    what is said of each comes as a list, in their order. `stand_ins` are among the
    arguments: what is written to one goes to the original. With `may_initialise` an
    argument may be a model that the call initialises.
    """

    def __init__(
        self,
        functions: Any,
        *arguments: Any,
        stand_ins: Sequence[StandIn] = (),
        may_initialise: bool = False,
    ):
        self.given = functions, arguments
        self.in_function = owned_in(functions)
        # A function among the arguments may close over the same modules.
        self.reached = [*self.in_function, *owned_in(arguments)]
        self.roots: list[BaseModule] = []
        inside_roots: set[int] = set()
        for module in self.reached:
            if id(module) not in inside_roots:
                inside = {id(v.node) for v in modules_in(module)}
                # A closure may lead to a part before an argument leads to the whole.
                outer = [root for root in self.roots if id(root) not in inside]
                self.roots = [*outer, module]
                inside_roots |= inside
        if not self.roots and not may_initialise:
            _check_initialized(jtu.tree_leaves(self.given, is_leaf=is_model))
        self.places: list[Place] = [get_place(root) for root in self.roots]
        self.initialised: list[Any] = [None for _ in self.roots]
        # A parent's scope may be that of an outer `es.mutable`.
        self.scopes = list({id(p.scope): p.scope for p in self.places}.values())
        originals = {id(x.module): x.original for x in stand_ins}
        self.originals = [originals.get(id(root), root) for root in self.roots]
        self.twice: Twice | None = None
        if stand_ins and not self.is_initialising:
            self.twice = Twice(self.roots, self.originals, self.writable())

    @property
    def is_initialising(self) -> bool:
        """Whether `init` runs its forward pass, which may bring leaves into being."""
        return any(place.scope.initialise is not None for place in self.places)

    def check_apart(self, *arguments: Any) -> None:
        """Raise `ValueError` if one of them has a stateful module in two places.

        In the trace it would be two. A module of a scope stays the one that it is.
        """
        for tree in arguments:
            if not owned_in(tree):
                check_not_shared(tree)

    def visits(self, i: int, tree: Any = None) -> list[Visit]:
        """The leaves of one root, or of a tree in its place, seen from the model."""
        tree = self.roots[i] if tree is None else tree
        return leaves(tree, self.places[i].path, self.places[i].context)

    def name(self, i: int, k: int) -> str:
        """The name in the model of a leaf of a root."""
        if self.initialised[i] is not None:
            return self.initialised[i][1][k]
        return self.visits(i)[k].name

    def values(self) -> list[Leaves]:
        """What the roots hold now."""
        with _alone(self.scopes):
            return [_by_position(root) for root in self.roots]

    def writable(self) -> list[Leaves]:
        """The arrays that the call may write."""
        return [
            {
                k: v.node
                for k, v in enumerate(self.visits(i))
                if is_array(v.node) and place.scope.allows(v.kind)
            }
            for i, place in enumerate(self.places)
        ]

    def threaded(self, i: int, state: Leaves) -> Leaves:
        """The state of a root that is written to it, and not to a stand-in."""
        others = {} if self.twice is None else self.twice.others
        return {k: x for k, x in state.items() if (i, k) not in others}

    def is_stand_in(self, i: int) -> bool:
        """Whether a root stands for another module, as an argument."""
        return self.originals[i] is not self.roots[i]

    def split(self, out: Any) -> tuple[Any, Any]:
        """The arrays that a call has computed, and the rest of its output.

        The arrays of a module that are those from outside go round the trace: a
        module that comes back with its parameters may then be assigned.
        """
        outside = {id(x) for old in self.values() for x in old.values()}
        computed = jtu.tree_map(
            lambda x, traced: traced and id(x) not in outside, out, is_traced(out)
        )
        return eqx.partition(out, computed)

    def run(
        self, values: list[Leaves], call: Callable[[], Any]
    ) -> tuple[Any, list[Leaves], Sown]:
        """`call()` in the active trace, with these leaves in the roots meanwhile.

        Returns its output, the leaves that it has written, and what it has sown.
        """
        with _alone(self.scopes):
            scopes = {
                id(outer): Scope(outer.kinds, outer.initialise, outer.captures)
                for outer in self.scopes
            }
            with _alone(scopes.values()):
                return self._run(values, call, scopes)

    def _run(
        self, values: list[Leaves], call: Callable[[], Any], scopes: dict[int, Scope]
    ) -> tuple[Any, list[Leaves], Sown]:
        saved = [
            (v.node, dict(v.node.__dict__), get_place(v.node))
            for root in self.roots
            for v in modules_in(root)
        ]
        threaded = list(zip(self.roots, self.places, values, strict=True))
        try:
            before = []
            for root, place, new in threaded:
                pour(root, iter(new.values()))
                own(root, scopes[id(place.scope)], place.path, place.context)
                before.append(Snapshot.of(closed_copy(root)))
            for module, _, place in saved:
                if place is not None:
                    new_place = get_place(module)
                    new_place.watches = place.watches
                    new_place.thread = threading.get_ident()
            if self.twice is not None:
                self.twice.watch()
            out = self._called(call)
            for scope in scopes.values():
                check_written(walk([*self.roots, out]), scope)
            check_apart([v for r, place, _ in threaded for v in walk(r, place.path)])
            out = disown(out)
            after = [
                collect(root, old, scopes[id(place.scope)], place)
                for (root, place, _), old in zip(threaded, before, strict=True)
            ]
        finally:
            for scope in scopes.values():
                scope.close()
            for module, fields, place in saved:
                module.__dict__.clear()
                module.__dict__.update(fields)
                set_place(module, place)
        self._check_containers([module for module, _, _ in saved])
        written = [
            self._written(i, new, old)
            for i, (new, old) in enumerate(zip(after, values, strict=True))
        ]
        if self.twice is not None:
            self.twice.check(written, self.name)
        return out, written, [scopes[id(outer)].sown for outer in self.scopes]

    def _written(self, i: int, after: Snapshot, old: Leaves) -> Leaves:
        """The leaves of a root after a call that are not those from before."""
        if self.places[i].scope.initialise is not None:
            return self._initialised(i, after, old)
        new = enumerate(after.leaves)
        written = {k: x for k, x in new if not same(old[k], x)}
        for k, x in written.items():
            if not (is_array(old[k]) and is_array(x)):
                raise ValueError(_static_message(self.name(i, k), old[k], x))
        return written

    def _initialised(self, i: int, after: Snapshot, old: Leaves) -> Leaves:
        """`_written` while initialising: new leaves come after the old ones."""
        positions = {visit.path: k for k, visit in enumerate(self.visits(i))}
        names, written = {}, {}
        for visit in self.visits(i, after.tree()):
            k = positions.setdefault(visit.path, len(positions))
            names[k] = visit.name
            if not same(old.get(k), visit.node):
                written[k] = visit.node
        # No tracer may live on: only the structure, and which leaf goes where.
        self.initialised[i] = after.structure, names
        return written

    def _called(self, call: Callable[[], Any]) -> Any:
        """`call()`; what it has taken for a value, and is none yet, is named."""
        try:
            return call()
        except (NotInitializedError, TypeError):
            # Not before: a function may initialise what it closes over.
            if not self.roots:
                _check_initialized(models_in(self.given))
            raise

    def _check_containers(self, modules: list[BaseModule]) -> None:
        """Nothing that is outside may have been moved by what runs inside."""
        now = [visit.node for root in self.roots for visit in modules_in(root)]
        if not identical(now, modules):
            raise TraceError(
                "A list or a dictionary of modules was changed inside a transform, by"
                " a function that has it from outside. The transform puts the modules"
                " back as they were, but not what is in such a container. Replace it"
                " instead of writing into it:\n\n"
                "    layers[0], layers[1] = layers[1], layers[0]     # wrong\n"
                "    self.layers = [self.layers[1], self.layers[0]]  # right"
            )

    def commit(self, written: list[Leaves], sown: Sown) -> None:
        """Write the leaves to the owned modules, and sow the values: all or none."""
        with _alone(self.scopes):
            self._commit(written, sown)

    def _commit(self, written: list[Leaves], sown: Sown) -> None:
        for i, new in enumerate(written):
            if new and self.places[i].scope.trace != trace_state():
                raise TraceError(trace_message(self.name(i, next(iter(new)))))
        for scope, values in zip(self.scopes, sown, strict=True):
            if values and scope.trace != trace_state():
                raise TraceError(trace_message(next(iter(values)), verb="sow"))
        # Stand-ins last: `init` may bring leaves into being in what another root has.
        for i in sorted(range(len(self.roots)), key=self.is_stand_in):
            if new := written[i]:
                self._store(i, new)
                scope, root = self.places[i].scope, self.originals[i]
                scope.written[id(root)] = root, self.name(i, next(iter(new)))
        for scope, values in zip(self.scopes, sown, strict=True):
            for name, new in values.items():
                scope.sown.setdefault(name, []).extend(new)

    def _store(self, i: int, written: Leaves) -> None:
        root, place = self.originals[i], self.places[i]
        new = {**_by_position(root), **written}
        if self.initialised[i] is None:
            pour(root, iter(new.values()))
            return
        # Only `init` changes a structure.
        treedef, names = self.initialised[i]
        _merge(root, jtu.tree_unflatten(treedef, [new[k] for k in names]))
        own(root, place.scope, place.path, place.context)


@contextlib.contextmanager
def _alone(scopes: Iterable[Scope]) -> Iterator[None]:
    """No other thread is in any of these scopes meanwhile."""
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope.alone(transform=True))
        yield


def _by_position(tree: Any) -> Leaves:
    return dict(enumerate(jtu.tree_leaves(tree)))


def _static_message(name: str, old: Any, new: Any) -> str:
    return (
        f"`{name}` was `{show(old)}`, and was written inside a transform: it is now"
        f" `{show(new)}`. Only arrays come out of a transform, so that other state"
        " keeps its value there. Make it an array,\n\n"
        '    phase: es.State = "cold"    # wrong\n'
        "    phase: es.State = 0         # right\n\n"
        "or write it outside of the transform."
    )


def _merge(root: BaseModule, tree: BaseModule) -> None:
    """Make `root` what `tree` is; the `es.Module`s in it stay the objects they are."""
    old = {visit.path: visit.node for visit in modules_in(root)}
    staying: dict[int, BaseModule] = {}
    for visit in reversed(list(modules_in(tree))):  # children first
        fields = jtu.tree_map(
            lambda x: staying.get(id(x), x),
            visit.node.__dict__,
            is_leaf=lambda x: id(x) in staying,
        )
        node = old.get(visit.path)
        if type(node) is type(visit.node) and is_owned(node):
            staying[id(visit.node)] = node
        else:
            node = visit.node
        node.__dict__.update(fields)


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


def pour(module: BaseModule, values: Any) -> None:
    """Put leaves, in the order of flattening, into a module and the modules inside it.

    The owned modules stay the objects that they are; all other nodes are made anew, so
    that what the caller has put into a list of ours stays the caller's.
    """
    children = [
        f.name for f in dataclasses.fields(module) if not f.metadata.get("static")
    ]

    def put(x: Any) -> Any:
        if is_owned(x):
            pour(x, values)
            return x
        return next(values)

    for name in children:
        if name in module.__dict__:
            old = module.__dict__[name]
            new = jtu.tree_map(put, old, is_leaf=is_owned)
            object.__setattr__(module, name, new)
