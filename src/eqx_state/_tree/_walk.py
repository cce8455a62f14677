"""The one traversal: every module and every leaf, with path, kind and owner.

A leaf's kind depends on the way from the root to it, so it can only be found by walking
down. `walk` does that, and everything that works by kind or by path stands on it:
selecting, modes, scopes, initialization, transforms.
"""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .._compat import MISSING
from .._kinds._kinds import BatchStat, Kind, State
from .._kinds._spec import Spec
from .._typing import KeyPath, PyTree
from ._base import (
    BaseModule,
    dynamic_names,
    fields_of,
    INFERENCE,
    is_eqx_module,
    is_module,
    MARKS,
)
from ._children import children, is_leaf
from ._context import Context, ROOT
from ._frozen import step_to


_Tree = TypeVar("_Tree")


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


def is_array(x: Any) -> bool:
    """Whether `x` is an array, a tracer, a NumPy array or a `jax.ShapeDtypeStruct`."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def is_numpy(x: Any) -> bool:
    """Whether `x` is a NumPy array or a NumPy scalar."""
    return isinstance(x, (np.ndarray, np.generic))


def name_of(path: KeyPath) -> str:
    """A key path as users write it: `layers[0].norm.mean`."""
    return jtu.keystr(path).removeprefix(".")


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
    found = _Walk(is_leaf)
    found.step_of(tree)(tree, path, context)
    found.steps.clear()  # they lead back to it, and what it found would live on
    return found.visits


Step = Callable[[Any, KeyPath, Context], None]


class _Walk:
    """A walk, and what it has learned of classes: models repeat themselves.

    It lives no longer than the walk. A cache that outlived it would keep classes alive.
    """

    def __init__(self, is_leaf: Callable[[Any], bool] | None):
        self.is_leaf = is_leaf
        self.visits: list[Visit] = []
        self.steps: dict[type, Step] = {}

    def step_of(self, node: Any) -> Step:
        """What to do at a node, which depends on its class."""
        cls = type(node)
        if cls not in self.steps:
            self.steps[cls] = self.make_step(node, cls)
        return self.steps[cls]

    def make_step(self, node: Any, cls: type) -> Step:
        if issubclass(cls, (eqx.nn.StateIndex, eqx.nn.State)):
            return self.foreign
        if node is None:
            step = self.hole
        elif is_eqx_module(node):
            is_stack = BaseModule in cls.__mro__ and cls._eqx_state_is_stack
            step = (_StackStep if is_stack else _ModuleStep)(self, cls)
        elif cls in (list, tuple):
            step = self.sequence
        else:
            step = self.leaf if is_leaf(node) else self.container
        return step if self.is_leaf is None else self.unless_leaf(step, self.is_leaf)

    def unless_leaf(self, step: Step, is_leaf: Callable[[Any], bool]) -> Step:
        def stop_or_step(node: Any, path: KeyPath, context: Context) -> None:
            (self.leaf if is_leaf(node) else step)(node, path, context)

        return stop_or_step

    def hole(self, node: Any, path: KeyPath, context: Context) -> None:
        pass

    def leaf(self, node: Any, path: KeyPath, context: Context) -> None:
        if context.marks:
            context = context.checked(jtu.keystr(path), ())
        self.visits.append(Visit(path, node, context, True))

    def sequence(self, node: Any, path: KeyPath, context: Context) -> None:
        if context.marks:  # each child has a context of its own
            self.container(node, path, context)
            return
        spec = context.spec
        each = None if spec.items else context.below(spec.element(node, None))
        for i, child in enumerate(node):
            below = context.below(spec.element(node, i)) if each is None else each
            self.step_of(child)(child, (*path, jtu.SequenceKey(i)), below)

    def container(self, node: Any, path: KeyPath, context: Context) -> None:
        below = children(node) or ()
        if context.marks:
            steps = [step_to(node, key) for key, _ in below]
            context = context.checked(jtu.keystr(path), steps)
        for key, child in below:
            self.step_of(child)(child, (*path, key), context.enter(node, key))

    def foreign(self, node: Any, path: KeyPath, context: Context) -> None:
        """Equinox's own state, which knows nothing of kinds, counts as declared."""
        owner = context.owner
        in_norm = owner is not None and issubclass(owner, eqx.nn.BatchNorm)
        context = context.declare(Spec(kind=BatchStat if in_norm else State))
        stops = self.is_leaf is not None and self.is_leaf(node)
        if stops or is_eqx_module(node):
            self.visits.append(Visit(path, node, context, stops))
        if not stops:
            self.container(node, path, context)


class _ModuleStep:
    """The step of a walk at the modules of one class."""

    def __init__(self, walk: _Walk, cls: type):
        self.walk, self.cls = walk, cls
        self.has_flags = BaseModule in cls.__mro__
        self.contexts: dict[Any, tuple[Context, list[Any]]] = {}

    def __call__(self, node: Any, path: KeyPath, context: Context) -> None:
        self.walk.visits.append(Visit(path, node, context, False))
        values, step_of = fields_of(node), self.walk.step_of
        frozen, marks = False, ()
        if self.has_flags:
            frozen, marks = values["frozen"], values[MARKS]
        if marks or context.marks:
            fields = self.fields(context.inside(frozen, marks), jtu.keystr(path))
        else:
            # By identity, which is much faster than a comparison. The context is kept
            # with the result, so that no other context gets its `id`.
            known = self.contexts.get((id(context), frozen))
            if known is None:
                known = context, self.fields(context.inside(frozen, ()))
                self.contexts[id(context), frozen] = known
            fields = known[1]
        for name, key, below in fields:
            if name in values:  # a module that is still being made lacks some
                child = values[name]
                step_of(child)(child, (*path, key), below)

    def fields(
        self, context: Context, name: str = ""
    ) -> list[tuple[str, Any, Context]]:
        """Name, key and context of each field that is a child in the pytree.

        `name` is that of the module, for errors.
        """
        # Nothing is there to be visited in the field `INFERENCE`.
        names = [n for n in dynamic_names(self.cls) if n != INFERENCE]
        if context.marks:
            context = context.checked(name, [(f".{n}", 0) for n in names])
        return [(n, jtu.GetAttrKey(n), context.field_of(self.cls, n)) for n in names]


class _StackStep(_ModuleStep):
    """The step at an `es.nn.Stacked`: what is below lies in a stack."""

    def __init__(self, walk: _Walk, cls: type):
        super().__init__(walk, cls)
        self.inside: dict[Any, tuple[Context, Context]] = {}

    def __call__(self, node: Any, path: KeyPath, context: Context) -> None:
        stack = len(path), fields_of(node).get("length", 0)
        # One context for all stacks that are alike, which the steps below know again.
        inside = context._replace(stacks=(*context.stacks, stack))
        _, inside = self.inside.setdefault((id(context), stack), (context, inside))
        visits, own = self.walk.visits, len(self.walk.visits)
        super().__call__(node, path, inside)
        visits[own] = visits[own]._replace(context=context)


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


# --- Copies ---------------------------------------------------------------------------


def copy_tree(tree: _Tree) -> _Tree:
    """The same leaves in new containers and new modules, which belong to no scope."""
    return jtu.tree_map(lambda x: x, tree)


def set_flags(
    tree: _Tree,
    values: Callable[[Visit], dict[str, Any]],
    copy: Callable[[_Tree], _Tree] = copy_tree,
) -> _Tree:
    """A copy of `tree` with the attributes that `values` returns for a module."""
    tree = copy(tree)
    for visit in walk(tree):
        if not visit.is_leaf:
            for name, value in values(visit).items():
                object.__setattr__(visit.node, name, value)
    return tree


def drop_cached(tree: PyTree) -> bool:
    """Remove the values of `functools.cached_property`s; return whether there were any.

    In a plain Equinox module they lie among the fields, and change the treedef.
    """
    dropped = False
    for module in (visit.node for visit in walk(tree) if not visit.is_leaf):
        fields = fields_of(module)
        for name in [k for k in fields if _is_cached(type(module), k, fields[k])]:
            del fields[name]
            dropped = True
    return dropped


def _is_cached(cls: type, name: str, value: Any) -> bool:
    # `MISSING` is what a copy of a module with a cached value has.
    is_property = isinstance(getattr(cls, name, None), ft.cached_property)
    return is_property or value is MISSING
