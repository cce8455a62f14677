"""The one lifting core: state through a JAX transform, in place.

A lifted transform reaches owned modules through the function, its closure and its
arguments. A copy would not do: a closure over `self` goes on seeing the old object. So
the contents of the owned objects are swapped, for the time of the inner trace, for that
trace's values; what was written is collected, the old contents are put back whatever
happens, and what the transform returns is written to them at the end.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from ._base import BaseModule, get_place, set_place
from ._closures import is_model, models_in, owned_in
from ._compare import identical, same
from ._compat import trace_state
from ._errors import NotInitializedError, TraceError
from ._init import check_initialized
from ._module import Module
from ._scope import (
    check_written,
    collect,
    disown,
    is_owned,
    own,
    Place,
    Scope,
    Snapshot,
    trace_message,
)
from ._shared import closed_copy
from ._traverse import (
    check_apart,
    is_array,
    leaves,
    map_with_path,
    modules_in,
    name_of,
    Visit,
    walk,
)


# The leaves of a module by name, in the order of flattening.
Leaves = dict[str, Any]

# What was sown in each scope; JAX sorts a dictionary, but not this one.
Sown = list[OrderedDict[str, list[Any]]]


class Lifted:
    """What one lifted call threads: each owned module within reach, once.

    `reached` has each place where one is reached. `roots` are the outermost of them;
    what is said of each comes as a list, in their order. With `may_initialise` an
    argument may be a model that the call initialises.
    """

    def __init__(self, functions: Any, *arguments: Any, may_initialise: bool = False):
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

    @property
    def is_initialising(self) -> bool:
        """Whether `init` runs its forward pass, which may bring leaves into being."""
        return any(place.scope.initialise is not None for place in self.places)

    def visits(self, i: int, tree: Any = None) -> list[Visit]:
        """The leaves of one root, or of a tree in its place, seen from the model."""
        tree = self.roots[i] if tree is None else tree
        return leaves(tree, self.places[i].path, self.places[i].context)

    def values(self) -> list[Leaves]:
        """What the roots hold now."""
        return [
            {v.name: v.node for v in self.visits(i)} for i in range(len(self.roots))
        ]

    def writable(self) -> list[Leaves]:
        """The arrays that the call may write."""
        return [
            {
                v.name: v.node
                for v in self.visits(i)
                if is_array(v.node) and place.scope.allows(v.kind)
            }
            for i, place in enumerate(self.places)
        ]

    def names_in(self, tree: Any) -> list[set[str]]:
        """The names of the leaves that each root shares with a tree."""
        indices = range(len(self.roots))
        return [{name for name, _ in self.within(i, tree)} for i in indices]

    def within(self, i: int, tree: Any) -> list[tuple[str, str]]:
        """The leaves that the owned modules in a tree share with a root.

        Each with its name in the root, and its name in the tree.
        """
        root, place = self.roots[i], self.places[i]
        paths = {id(v.node): v.path for v in modules_in(root, place.path)}
        return [
            (name_of((*paths[id(v.node)], *leaf.path)), name_of((*v.path, *leaf.path)))
            for v in modules_in(tree)
            if id(v.node) in paths
            for leaf in leaves(v.node)
        ]

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
        saved = [
            (v.node, dict(v.node.__dict__), get_place(v.node))
            for root in self.roots
            for v in modules_in(root)
        ]
        scopes = {
            id(outer): Scope(outer.kinds, outer.initialise, outer.captures)
            for outer in self.scopes
        }
        threaded = list(zip(self.roots, self.places, values, strict=True))
        try:
            before = []
            for root, place, new in threaded:
                pour(root, iter(new.values()))
                own(root, scopes[id(place.scope)], place.path, place.context)
                before.append(Snapshot.of(closed_copy(root)))
            out = self._called(call)
            for scope in scopes.values():
                check_written(walk([*self.roots, out]), scope)
            check_apart([v for r, place, _ in threaded for v in walk(r, place.path)])
            out = disown(out)
            after = [
                collect(root, old, scopes[id(place.scope)], place).tree()
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
        written = []
        for i, (tree, old) in enumerate(zip(after, values, strict=True)):
            visits = self.visits(i, tree)
            if self.places[i].scope.initialise is not None:
                # No tracer may live on: only the structure.
                names = [visit.name for visit in visits]
                self.initialised[i] = jtu.tree_structure(tree), names
            written.append(
                {v.name: v.node for v in visits if not same(old.get(v.name), v.node)}
            )
        return out, written, [scopes[id(outer)].sown for outer in self.scopes]

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
        for place, new in zip(self.places, written, strict=True):
            if new and place.scope.trace != trace_state():
                raise TraceError(trace_message(next(iter(new))))
        for scope, values in zip(self.scopes, sown, strict=True):
            if values and scope.trace != trace_state():
                raise TraceError(trace_message(next(iter(values)), verb="sow"))
        for i, (old, new) in enumerate(zip(self.values(), written, strict=True)):
            if new:
                self._store(i, {**old, **new})
                scope, root = self.places[i].scope, self.roots[i]
                scope.written[id(root)] = root, next(iter(new))
        for scope, values in zip(self.scopes, sown, strict=True):
            for name, new in values.items():
                scope.sown.setdefault(name, []).extend(new)

    def _store(self, i: int, new: Leaves) -> None:
        root, place = self.roots[i], self.places[i]
        if self.initialised[i] is None:
            pour(root, iter(new.values()))
            return
        # Only `init` changes a structure.
        treedef, names = self.initialised[i]
        _merge(root, jtu.tree_unflatten(treedef, [new[name] for name in names]))
        own(root, place.scope, place.path, place.context)


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


def is_traced(tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False) -> Any:
    """For each leaf of an argument or of an output, whether JAX would trace it."""
    traced = {visit.path for visit in leaves(tree) if is_mappable(visit)}
    return map_with_path(lambda p, _: p in traced, tree, is_leaf)


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
