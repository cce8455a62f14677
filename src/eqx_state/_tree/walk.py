"""The one traversal: every module and every leaf, with path, kind and owner.

The kind of a leaf depends on every node above it, so it is known only after walking
down from the root. Selecting, modes, scopes, initialization and transforms all use
`walk`.
"""

import functools as ft
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
import numpy as np

from .._compat import MISSING
from .._kinds.kinds import BatchStat, Kind, NOTHING, State
from .._typing import KeyPath, PyTree, Tree
from .base import (
    BaseModule,
    dynamic_names,
    FROZEN_PATHS,
    INFERENCE,
    is_eqx_module,
    is_module,
    keystr,
    step_to,
)
from .context import children, Context, is_leaf, ROOT, undeclared
from .unbuilt import fields_of


def is_array(x: Any) -> bool:
    """Whether `x` is an array, a tracer, a NumPy array or a `jax.ShapeDtypeStruct`."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def abstract(x: Any) -> Any:
    """The shape and dtype of an array; anything else unchanged."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x


def is_numpy(x: Any) -> bool:
    """Whether `x` is a NumPy array or a NumPy scalar."""
    return isinstance(x, (np.ndarray, np.generic))


def name_of(path: KeyPath) -> str:
    """A key path as users write it: `layers[0].norm.mean`."""
    return keystr(path).removeprefix(".")


class Visit(NamedTuple):
    """One node of the walk: a leaf, or a module (before its contents)."""

    path: KeyPath
    node: Any
    context: Context
    is_leaf: bool

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def kind(self) -> Kind | None:
        """The effective kind of an array; `None` for any other node."""
        return self.context.kind_of(self.node) if is_array(self.node) else None

    def is_a(self, kind: Kind) -> bool:
        """Whether the node is an array of this kind or of a subclass."""
        own = self.kind
        return own is not None and issubclass(own, kind)


# Creates a `Visit` without the named tuple's `__new__`, a Python function, which is
# slower.
_visit: Callable[[tuple[KeyPath, Any, Context, bool]], Visit] = ft.partial(
    tuple.__new__, Visit
)


def walk(
    tree: PyTree,
    path: KeyPath = (),
    context: Context = ROOT,
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Visit]:
    """Every `eqx.Module` and every leaf of `tree`; leaves in the order of flattening.

    Holes (`None`) are not leaves, as in JAX. `is_leaf` is that of `jax.tree.flatten`: a
    node for which it is true is a leaf, and the walk does not go below it.
    """
    return _Walk(is_leaf).run(tree, path, context)


def leaves(
    tree: PyTree,
    path: KeyPath = (),
    context: Context = ROOT,
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Visit]:
    """The leaves of the walk, without the modules."""
    return [v for v in walk(tree, path, context, is_leaf) if v.is_leaf]


def modules_in(tree: PyTree) -> Iterator[Visit]:
    """Every `es.Module` in the tree, parents first."""
    return (v for v in walk(tree) if is_module(v.node))


def map_leaves(
    f: Callable[[Visit], Any], tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> Tree:
    """`tree` with each leaf replaced by `f(visit)`."""
    new = [f(visit) for visit in leaves(tree, is_leaf=is_leaf)]
    return jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_leaf), new)


def kinds_of(leaves: list[Any], tree: PyTree) -> list[Kind | None]:
    """The `Visit.kind` of each leaf; faster than a walk with paths.

    `leaves`: those of `tree`, as `jax.tree.leaves` gives them.
    """
    contexts = _Walk(only_contexts=True).run(tree, (), ROOT)
    # All modules of a class share contexts, so look at each context only once.
    ids = [*map(id, contexts)]
    declared = {i: x and x.declared for i, x in zip(ids, contexts, strict=True)}
    return [
        declared[i] or (context and undeclared(x.dtype))
        for x, i, context in zip(leaves, ids, contexts, strict=True)
    ]


class Traversal(NamedTuple):
    """A walk that is kept, so that a tree of the same structure needs no second one.

    - `visits`: every module and every leaf.
    - `leaves`, `structure`: as `jax.tree.flatten` gives them.
    - `modules`: every `eqx.Module`, in the order of the visits.
    - `path`, `context`: those of the root.
    """

    visits: list[Visit]
    leaves: list[Any]
    structure: Any
    modules: list[Any]
    path: KeyPath
    context: Context

    def again(self, tree: PyTree) -> "Traversal":
        """The traversal of `tree`, which may be a later state of the same tree."""
        leaves, structure, modules = flatten(tree)
        # Kinds depend on classes and on flags, which are part of the structure.
        if structure != self.structure:
            return traverse(tree, self.path, self.context)
        nodes, new = iter(modules), iter(leaves)
        visits = [
            _visit((path, next(new if is_leaf else nodes), context, is_leaf))
            for path, _, context, is_leaf in self.visits
        ]
        return self._replace(visits=visits, leaves=leaves, modules=modules)

    def with_leaves(self, leaves: list[Any]) -> "Traversal":
        """This traversal with other `leaves`; those in `visits` are the old ones."""
        return self._replace(leaves=leaves)

    def extents(self) -> Iterator[tuple[BaseModule, int, int]]:
        """Each `es.Module`, and where its leaves begin and end; parents first."""
        paths = [visit.path for visit in self.visits]
        starts = [0, *itertools.accumulate(visit.is_leaf for visit in self.visits)]
        for i, (path, node, _, _) in enumerate(self.visits):
            if BaseModule in type(node).__mro__:
                stop = i + 1
                while stop < len(paths) and paths[stop][: len(path)] == path:
                    stop += 1
                yield node, starts[i], starts[stop]


def traverse(tree: PyTree, path: KeyPath = (), context: Context = ROOT) -> Traversal:
    """Walk a tree, and keep the walk."""
    visits = walk(tree, path, context)
    leaves = [node for _, node, _, is_leaf in visits if is_leaf]
    modules = [node for _, node, _, is_leaf in visits if not is_leaf]
    structure = jtu.tree_structure(tree)
    return Traversal(visits, leaves, structure, modules, path, context)


def flatten(tree: PyTree) -> tuple[list[Any], Any, list[Any]]:
    """The leaves, the structure, and every `eqx.Module` of a tree, parents first."""
    modules: list[Any] = []

    def record(node: Any) -> bool:
        if eqx.Module in type(node).__mro__:
            if node is tree and modules:
                raise _cycle_error(tree)
            modules.append(node)
            return False
        return isinstance(node, Iterator)  # a leaf to JAX, which would warn

    leaves, structure = jtu.tree_flatten(tree, is_leaf=record)
    return leaves, structure, modules


def _cycle_error(tree: PyTree) -> ValueError:
    """The error for a tree that contains itself."""
    found = jtu.tree_leaves_with_path(
        tree, lambda path, x: path != () and x is tree, is_leaf_takes_path=True
    )
    path = next(path for path, x in found if x is tree)
    return ValueError(_CYCLE.format(name_of(path), type(tree).__name__))


_CYCLE: Final = """`{}` is the `{}` itself, so that the model contains itself. A \
pytree is a tree: flattening would not end. Do not store a parent in a child. Pass \
what the child needs when you call it: `self.child(x, self.scale)`."""


def all_modules(tree: PyTree) -> list[Any]:
    """Every `eqx.Module` of a tree, parents first."""
    return flatten(tree)[2]


def occurs_twice(modules: list[Any]) -> bool:
    """Whether one of these modules is in the list twice."""
    return len(set(map(id, modules))) < len(modules)


# --- The implementation. Models repeat the same classes, so choose the step for all
# nodes of a class at the first one.


_Step = Callable[[Any, KeyPath, Context], None]


class _Walk:
    """One walk, with a cache of the step for each class of nodes.

    A cache that outlives the walk would keep classes alive.
    """

    def __init__(
        self,
        is_leaf: Callable[[Any], bool] | None = None,
        *,
        only_contexts: bool = False,
    ):
        """`only_contexts`: find the context of each leaf instead of visits.

        The context is `None` for a leaf that is not an array. All paths are empty.
        """
        self.found: list[Any] = []
        self.is_leaf, self.only_contexts = is_leaf, only_contexts
        self.steps: dict[type, _Step] = {}

    def run(self, tree: PyTree, path: KeyPath, context: Context) -> list[Any]:
        self.first(tree, path, context)
        self.steps.clear()  # break the reference cycle, to free the walk at once
        return self.found

    def first(self, node: Any, path: KeyPath, context: Context) -> None:
        """Visit the first node of a class, and choose the step for all of them."""
        step = self.steps[type(node)] = self.make_step(node, type(node))
        step(node, path, context)

    def make_step(self, node: Any, cls: type) -> _Step:
        if issubclass(cls, (eqx.nn.StateIndex, eqx.nn.State)):
            return self.foreign
        if node is None:
            step = self.hole
        elif is_eqx_module(node):
            step = self.module_step(cls)
        elif cls in (list, tuple):
            step = self.sequence
        elif not is_leaf(node):
            step = self.container
        elif self.only_contexts:
            found = self.found.append
            # A traced `jax.Ref` has the class of a traced array, but is not an array.
            if isinstance(node, jax.core.Tracer):
                return lambda node, path, x: found(x if is_array(node) else None)
            # Of any other class, either all leaves are arrays, or none of them.
            if is_array(node):
                return lambda node, path, context: found(context)
            return lambda node, path, context: found(None)
        else:
            step = self.leaf
        return step if self.is_leaf is None else self.unless_leaf(step, self.is_leaf)

    def unless_leaf(self, step: _Step, is_leaf: Callable[[Any], bool]) -> _Step:
        def stop_or_step(node: Any, path: KeyPath, context: Context) -> None:
            (self.leaf if is_leaf(node) else step)(node, path, context)

        return stop_or_step

    def leaf(self, node: Any, path: KeyPath, context: Context) -> None:
        if context.frozen_paths:
            context = context.checked(keystr(path), ())
        self.found.append(_visit((path, node, context, True)))

    def hole(self, node: Any, path: KeyPath, context: Context) -> None:
        pass

    def sequence(self, node: Any, path: KeyPath, context: Context) -> None:
        if context.frozen_paths:  # the contexts of the children differ
            self.container(node, path, context)
            return
        spec = context.spec
        each = None if spec.items else context.below(spec.element(node, None))
        steps, first = self.steps, self.first
        for i, child in enumerate(node):
            below = context.below(spec.element(node, i)) if each is None else each
            child_path = path if self.only_contexts else (*path, jtu.SequenceKey(i))
            steps.get(type(child), first)(child, child_path, below)

    def container(self, node: Any, path: KeyPath, context: Context) -> None:
        below = children(node) or ()
        if context.frozen_paths:
            steps = [step_to(node, key) for key, _ in below]
            context = context.checked(keystr(path), steps)
        for key, child in below:
            step = self.steps.get(type(child), self.first)
            step(child, (*path, key), context.enter(node, key))

    def foreign(self, node: Any, path: KeyPath, context: Context) -> None:
        """Visit Equinox's own state, whose values count as declared `State`."""
        owner = context.owner
        in_norm = owner is not None and issubclass(owner, eqx.nn.BatchNorm)
        kind = BatchStat if in_norm else State
        context = context._replace(
            kind=kind, spec=NOTHING, unresolved=False, is_own=False
        )
        if self.is_leaf is not None and self.is_leaf(node):
            self.leaf(node, path, context)
            return
        if is_eqx_module(node) and not self.only_contexts:
            self.found.append(_visit((path, node, context, False)))
        self.container(node, path, context)

    def module_step(self, cls: Any) -> _Step:
        """The step at the modules of one class."""
        has_flags = BaseModule in cls.__mro__
        is_stack = has_flags and cls._eqx_state_is_stack
        # The field `INFERENCE` has no leaves.
        names = [name for name in dynamic_names(cls) if name != INFERENCE]
        keys = [*map(jtu.GetAttrKey, names)]
        # Name, key and context of each field. The key of the cache has the `id` of a
        # context, which is much faster to compare than the context. The value has the
        # context, so that its `id` is not reused.
        known: dict[Any, tuple[Context, list[tuple[str, Any, Context]]]] = {}
        steps, first, only_contexts = self.steps, self.first, self.only_contexts

        def step(node: Any, path: KeyPath, context: Context) -> None:
            if not only_contexts:
                self.found.append(_visit((path, node, context, False)))
            values: dict[str, Any] = fields_of(node)
            frozen, frozen_paths, stack = False, (), ()
            if has_flags:
                frozen, frozen_paths = values["frozen"], values[FROZEN_PATHS]
            if is_stack:
                stack = ((len(path), values.get("_length", 0)),)
            key = id(context), frozen, stack
            found = known.get(key)
            if found is None or frozen_paths:
                inside = context.inside(frozen, frozen_paths)
                if inside.frozen_paths:
                    there = [(f".{name}", 0) for name in names]
                    inside = inside.checked(keystr(path), there)
                inside = inside._replace(stacks=(*inside.stacks, *stack))
                contexts = inside.fields_of(cls, names)
                found = context, [*zip(names, keys, contexts, strict=True)]
                if not inside.frozen_paths:
                    known[key] = found
            for name, field, below in found[1]:
                if name in values:  # not yet, while `__init__` runs
                    child = values[name]
                    child_path = path if only_contexts else (*path, field)
                    steps.get(type(child), first)(child, child_path, below)

        return step


def copy_tree(tree: Tree) -> Tree:
    """The same leaves in new containers and new modules, which no scope owns."""
    return jtu.tree_map(lambda x: x, tree)


def drop_cached(tree: PyTree) -> None:
    """Remove the values of `functools.cached_property`s.

    A plain Equinox module stores them among its fields, which changes the treedef.
    """
    for module in all_modules(tree):
        fields = fields_of(module)
        for name, value in list(fields.items()):
            declared = getattr(type(module), name, None)
            # A copy of such a module contains `MISSING` under different names.
            if isinstance(declared, ft.cached_property) or value is MISSING:
                del fields[name]
