"""The one traversal: every module and every leaf, with path, kind and owner.

A leaf's kind depends on the way from the root to it, so it can only be found by walking
down. `walk` does that, and everything that works by kind or by path stands on it:
selecting, modes, scopes, initialization, transforms.
"""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .._compat import MISSING
from .._kinds.kinds import BatchStat, Kind, Spec, State
from .._typing import KeyPath, PyTree
from .base import (
    BaseModule,
    dynamic_names,
    fields_of,
    INFERENCE,
    is_eqx_module,
    is_module,
    keystr,
    MARKS,
    step_to,
)
from .context import children, Context, is_leaf, ROOT, undeclared


_Tree = TypeVar("_Tree")


def is_array(x: Any) -> bool:
    """Whether `x` is an array, a tracer, a NumPy array or a `jax.ShapeDtypeStruct`."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def is_numpy(x: Any) -> bool:
    """Whether `x` is a NumPy array or a NumPy scalar."""
    return isinstance(x, (np.ndarray, np.generic))


def name_of(path: KeyPath) -> str:
    """A key path as users write it: `layers[0].norm.mean`."""
    return keystr(path).removeprefix(".")


class Visit(NamedTuple):
    """One stop of the walk: a module (before what it holds) or a leaf."""

    path: KeyPath
    node: Any
    context: Context
    is_leaf: bool

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def kind(self) -> Kind | None:
        """`None` also for what is not an array."""
        return self.context.kind_of(self.node) if is_array(self.node) else None

    def is_a(self, kind: Kind) -> bool:
        """Whether it is an array of this kind or of one derived from it."""
        own = self.kind
        return own is not None and issubclass(own, kind)


# `Visit(...)` as often as there are nodes: without the Python function that takes the
# fields one by one.
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

    Holes (`None`) are not leaves, as everywhere in JAX. `is_leaf` is that of
    `jax.tree.flatten`: a node for which it is true counts as a leaf, and nothing below
    it is visited.
    """
    return _Walk(is_leaf).run(tree, path, context)


def leaves(
    tree: PyTree,
    path: KeyPath = (),
    context: Context = ROOT,
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Visit]:
    """Only the leaves of the walk."""
    return [v for v in walk(tree, path, context, is_leaf) if v.is_leaf]


def modules_in(
    tree: PyTree, path: KeyPath = (), context: Context = ROOT
) -> Iterator[Visit]:
    """Every `es.Module` in the tree, parents first."""
    return (v for v in walk(tree, path, context) if is_module(v.node))


def map_leaves(
    f: Callable[[Visit], Any],
    tree: _Tree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> _Tree:
    """`tree` with `f(visit)` in place of each leaf."""
    new = [f(visit) for visit in leaves(tree, is_leaf=is_leaf)]
    return jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_leaf), new)


def kinds_of(leaves: list[Any], tree: PyTree) -> list[Kind | None]:
    """The `Visit.kind` of each leaf, in less time than a walk with paths takes.

    `leaves`: those of `tree`, as `jax.tree.leaves` gives them.
    """
    contexts = _Walk(only_contexts=True).run(tree, (), ROOT)
    # What is declared for a leaf is in its context, and there is one of these for each
    # field of a class, not of each module.
    ids = [*map(id, contexts)]
    declared = {i: x and x.declared for i, x in zip(ids, contexts, strict=True)}
    return [
        declared[i] or (context and undeclared(x.dtype))
        for x, i, context in zip(leaves, ids, contexts, strict=True)
    ]


# --- How it walks. Models repeat themselves, so what to do at the nodes of a class is
# decided once, at the first of them.


_Step = Callable[[Any, KeyPath, Context], None]


class _Absent:
    """Stands for a field that a module, which is still being made, lacks."""


_ABSENT: Final = _Absent()


class _Walk:
    """A walk, and what it has learned of classes.

    It lives no longer than the walk. A cache that outlived it would keep classes alive.
    """

    def __init__(
        self,
        is_leaf: Callable[[Any], bool] | None = None,
        *,
        only_contexts: bool = False,
    ):
        """`only_contexts`: find the context of each leaf instead of visits.

        It is `None` for a leaf that is not an array. All paths are empty.
        """
        self.found: list[Any] = []
        self.is_leaf, self.only_contexts = is_leaf, only_contexts
        self.steps: dict[type, _Step] = {_Absent: self.hole}

    def run(self, tree: PyTree, path: KeyPath, context: Context) -> list[Any]:
        self.first(tree, path, context)
        self.steps.clear()  # they lead back to it, and what it found would live on
        return self.found

    def first(self, node: Any, path: KeyPath, context: Context) -> None:
        """The step at the first node of a class, which decides on that of all."""
        step = self.steps[type(node)] = self.make_step(node, type(node))
        step(node, path, context)

    def make_step(self, node: Any, cls: type) -> _Step:
        if issubclass(cls, (eqx.nn.StateIndex, eqx.nn.State)):
            return self.foreign
        if node is None:
            step = self.hole
        elif is_eqx_module(node):
            is_stack = BaseModule in cls.__mro__ and cls._eqx_state_is_stack
            step = (_StackStep if is_stack else _ModuleStep)(self, cls)
        elif cls in (list, tuple):
            step = self.sequence
        elif not is_leaf(node):
            step = self.container
        elif self.only_contexts:
            # All leaves of a class are arrays, or none.
            context_of = self.found.append
            if is_array(node):
                return lambda node, path, context: context_of(context)
            return lambda node, path, context: context_of(None)
        else:
            step = self.leaf
        return step if self.is_leaf is None else self.unless_leaf(step, self.is_leaf)

    def unless_leaf(self, step: _Step, is_leaf: Callable[[Any], bool]) -> _Step:
        def stop_or_step(node: Any, path: KeyPath, context: Context) -> None:
            (self.leaf if is_leaf(node) else step)(node, path, context)

        return stop_or_step

    def leaf(self, node: Any, path: KeyPath, context: Context) -> None:
        if context.marks:
            context = context.checked(keystr(path), ())
        self.found.append(_visit((path, node, context, True)))

    def hole(self, node: Any, path: KeyPath, context: Context) -> None:
        pass

    def sequence(self, node: Any, path: KeyPath, context: Context) -> None:
        if context.marks:  # each child has a context of its own
            self.container(node, path, context)
            return
        spec = context.spec
        each = None if spec.items else context.below(spec.element(node, None))
        steps, first = self.steps, self.first
        for i, child in enumerate(node):
            below = context.below(spec.element(node, i)) if each is None else each
            at = path if self.only_contexts else (*path, jtu.SequenceKey(i))
            steps.get(type(child), first)(child, at, below)

    def container(self, node: Any, path: KeyPath, context: Context) -> None:
        below = children(node) or ()
        if context.marks:
            steps = [step_to(node, key) for key, _ in below]
            context = context.checked(keystr(path), steps)
        for key, child in below:
            step = self.steps.get(type(child), self.first)
            step(child, (*path, key), context.enter(node, key))

    def foreign(self, node: Any, path: KeyPath, context: Context) -> None:
        """Equinox's own state, which knows nothing of kinds, counts as declared."""
        owner = context.owner
        in_norm = owner is not None and issubclass(owner, eqx.nn.BatchNorm)
        context = context.declare(Spec(kind=BatchStat if in_norm else State))
        if self.is_leaf is not None and self.is_leaf(node):
            self.leaf(node, path, context)
            return
        if is_eqx_module(node) and not self.only_contexts:
            self.found.append(_visit((path, node, context, False)))
        self.container(node, path, context)


class _ModuleStep:
    """The step of a walk at the modules of one class."""

    def __init__(self, walk: _Walk, cls: type):
        self.walk, self.cls = walk, cls
        self.has_flags = BaseModule in cls.__mro__
        # Nothing is there to be visited in the field `INFERENCE`.
        self.names = [name for name in dynamic_names(cls) if name != INFERENCE]
        self.keys = [*map(jtu.GetAttrKey, self.names)]
        # The fields of modules that are not frozen, and of those that are, by the
        # identity of the context, which is much faster to compare than the context. It
        # is kept with the fields, so that no other context gets its `id`.
        self.known: tuple[dict[int, Any], dict[int, Any]] = ({}, {})

    def __call__(
        self, node: Any, path: KeyPath, context: Context, within: Context | None = None
    ) -> None:
        """`within`: the context of what it holds, if it is not that of the module."""
        walk = self.walk
        if not walk.only_contexts:
            walk.found.append(_visit((path, node, context, False)))
        context = context if within is None else within
        values: dict[str, Any] = object.__getattribute__(node, "__dict__")
        frozen, marks = False, ()
        if self.has_flags:
            frozen, marks = values["frozen"], values[MARKS]
        known = self.known[frozen].get(id(context))
        if known is None or marks:
            inside = context.inside(frozen, marks)
            known = context, self.fields(inside, path)
            if not inside.marks:
                self.known[frozen][id(context)] = known
        has_paths, steps, first = not walk.only_contexts, walk.steps, walk.first
        for name, key, inside in known[1]:
            child = values.get(name, _ABSENT)
            at = (*path, key) if has_paths else path
            steps.get(type(child), first)(child, at, inside)

    def fields(self, context: Context, path: KeyPath) -> list[tuple[str, Any, Context]]:
        """Name, key and context of each field that is a child in the pytree."""
        if context.marks:
            steps = [(f".{name}", 0) for name in self.names]
            context = context.checked(keystr(path), steps)
        contexts = context.fields_of(self.cls, self.names)
        return [*zip(self.names, self.keys, contexts, strict=True)]


class _StackStep(_ModuleStep):
    """The step at an `es.nn.Stacked`: what is below lies in a stack."""

    def __init__(self, walk: _Walk, cls: type):
        super().__init__(walk, cls)
        self.inside: dict[Any, tuple[Context, Context]] = {}

    def __call__(self, node: Any, path: KeyPath, context: Context, *_: Any) -> None:
        stack = len(path), fields_of(node).get("length", 0)
        # One context for all stacks that are alike, which the steps below know again.
        inside = context._replace(stacks=(*context.stacks, stack))
        _, inside = self.inside.setdefault((id(context), stack), (context, inside))
        super().__call__(node, path, context, inside)


def copy_tree(tree: _Tree) -> _Tree:
    """The same leaves in new containers and new modules, which belong to no scope."""
    return jtu.tree_map(lambda x: x, tree)


def set_flags(tree: _Tree, values: Callable[[Visit], dict[str, Any]]) -> _Tree:
    """Set the attributes that `values` returns for a module, in a private copy."""
    for visit in walk(tree):
        if not visit.is_leaf:
            for name, value in values(visit).items():
                object.__setattr__(visit.node, name, value)
    return tree


def drop_cached(tree: PyTree) -> None:
    """Remove the values of `functools.cached_property`s.

    In a plain Equinox module they lie among the fields, and change the treedef.
    """
    for module in (visit.node for visit in walk(tree) if not visit.is_leaf):
        fields = fields_of(module)
        for name, value in list(fields.items()):
            declared = getattr(type(module), name, None)
            # A copy of such a module has `MISSING` under other names.
            if isinstance(declared, ft.cached_property) or value is MISSING:
                del fields[name]
