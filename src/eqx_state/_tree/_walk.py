"""The one traversal: every module and every leaf, with path, kind and owner.

A leaf's kind depends on the way from the root to it, so it can only be found by walking
down. `walk` does, and all that works by kind or by path stands on it: selecting, modes,
scopes, initialisation, transforms.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import MISSING
from .._kinds._annotations import NOTHING, Spec
from .._kinds._fields import annotation_of, declared_child, declared_inside
from .._kinds._kinds import BatchStat, Parameter, Rng, State, TreePart
from ._base import BaseModule, fields_of, INFERENCE, is_eqx_module, is_module


KeyPath = tuple[Any, ...]


Kind = type[TreePart[Any]]


class Context(NamedTuple):
    """What the way down from the root says about the node that it has reached."""

    spec: Spec = NOTHING  # what the annotation says about this node
    kind: Kind | None = None  # the innermost declaration so far
    covering: Kind | None = None  # the outermost covering one
    unresolved: bool = False  # an annotation further in has no meaning
    frozen: bool = False  # of the nearest `es.Module`
    owners: tuple[type, ...] = ()  # classes of the modules around, the nearest last
    field: str = ""  # the field of the nearest that leads here

    def enter(self, node: Any, key: Any) -> "Context":
        """The context of the child of `node` under `key`."""
        if is_eqx_module(node):
            is_es = is_module(node)
            frozen = node.frozen if is_es else self.frozen
            return self.field_of(type(node), frozen, key.name)
        return self.declare(declared_child(self.spec, node, key))

    def field_of(self, cls: type, frozen: bool, name: str) -> "Context":
        """The context of a field of a module of this class."""
        specs, below = declared_inside(cls, self.spec)
        spec = specs.get(name, NOTHING)
        around = self if below is NOTHING else self.declare(below)
        owners = (*self.owners, cls)
        context = Context(
            spec, around.kind, around.covering, False, frozen, owners, name
        )
        return context.declare(spec)

    def declare(self, spec: Spec) -> "Context":
        if spec is NOTHING and self.spec is NOTHING:
            return self
        if spec.kind is None:
            unresolved = self.unresolved or spec.unresolved
            return self._replace(spec=spec, unresolved=unresolved)
        covering = spec.kind if spec.kind.covering else None
        return self._replace(
            spec=spec,
            kind=spec.kind,
            covering=self.covering or covering,
            unresolved=False,
        )

    @property
    def owner(self) -> type | None:
        """The class of the nearest module."""
        return self.owners[-1] if self.owners else None

    @property
    def declared(self) -> Kind | None:
        if self.unresolved and self.covering is None:
            self._check_resolved()
        return self.covering or self.kind

    def _check_resolved(self) -> None:
        # Equinox's own modules may say what they like.
        if self.owner is not None and issubclass(self.owner, BaseModule):
            annotation = annotation_of(self.owner, self.field)
            raise TypeError(
                f"The annotation `{self.owner.__qualname__}.{self.field}: {annotation}`"
                " decides the kind of an array, and it cannot be resolved. Import the"
                " name at run time (not only under `TYPE_CHECKING`), or declare the"
                " kind around it: `es.Parameter[...]`. If it names a class made in a"
                " function, the annotations in that class must not be strings."
            )

    def kind_of(self, array: Any) -> Kind | None:
        """The effective kind of an array here; `None` if it has none."""
        if (declared := self.declared) is not None:
            return declared
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return Rng
        return Parameter if jnp.issubdtype(array.dtype, jnp.inexact) else None


ROOT = Context()


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
        """`None` for what is not an array, too."""
        return self.context.kind_of(self.node) if is_array(self.node) else None


def is_array(x: Any) -> bool:
    """Arrays, tracers, NumPy arrays, and the shape and dtype of one."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def name_of(path: KeyPath) -> str:
    """A key path as users write it: `layers[0].norm.mean`."""
    return jtu.keystr(path).removeprefix(".")


@dataclasses.dataclass(frozen=True)
class AlikeKey:
    """The key of a child, if one before it has an equal key, or one that prints alike.

    Names and key paths are what arrays are told apart by, so each has one of its own.
    """

    key: Any
    position: int

    def __str__(self) -> str:
        return f"{self.key}~{self.position}"


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """`(key, child)` one level down, holes included; `None` for a leaf.

    The keys are those of JAX, with two exceptions: no two are alike, and a dataclass
    that is registered without key paths has the names of its fields.
    """
    if is_leaf(node):
        return None
    entries, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    keys = [path[0] for path, _ in entries]
    if dataclasses.is_dataclass(node) and jtu.FlattenedIndexKey in map(type, keys):
        keys = _field_keys(keys, treedef)
    if not (isinstance(node, dict) and all(type(key) is str for key in node)):
        keys = _apart(keys)
    return list(zip(keys, (child for _, child in entries), strict=True))


def _apart(keys: list[Any]) -> list[Any]:
    seen: set[Any] = set()
    found = []
    for i, key in enumerate(keys):
        same = {key, str(key)}
        found.append(key if seen.isdisjoint(same) else AlikeKey(key, i))
        seen |= same
    return found


def _field_keys(keys: list[Any], treedef: Any) -> list[Any]:
    """For each child the name of the field that holds it, else the key that it has.

    Found by marks in the places of the children, as one array may be in two fields.
    """
    marks = [object() for _ in keys]
    try:
        marked = jtu.tree_unflatten(treedef, marks)
        names = [f.name for f in dataclasses.fields(marked)]
        fields = {id(getattr(marked, name)): jtu.GetAttrKey(name) for name in names}
    except Exception:  # it accepts nothing but arrays
        return keys
    return [fields.get(id(mark), key) for mark, key in zip(marks, keys, strict=True)]


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[tuple[KeyPath, Any]], Any]:
    """As `jax.tree_util.tree_flatten_with_path`, with the key paths that a walk has."""
    entries: list[tuple[KeyPath, Any]] = []

    def enter(node: Any, path: KeyPath) -> None:
        if is_leaf(node) or (node is not None and (below := children(node)) is None):
            entries.append((path, node))
        elif node is not None:
            for key, child in below:
                enter(child, (*path, key))

    enter(tree, ())
    return entries, jtu.tree_structure(tree, is_leaf=is_leaf)


def map_with_path(
    f: Callable[..., Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> Any:
    """As `jax.tree_util.tree_map_with_path`, with the key paths that a walk has."""
    entries, treedef = flatten_with_path(tree, is_leaf)
    return jtu.tree_unflatten(treedef, [f(path, x) for path, x in entries])


def is_leaf(x: Any) -> bool:
    """Whether JAX takes `x` for a leaf; for an iterator it does so with a warning."""
    if is_eqx_module(x):
        return False
    return isinstance(x, Iterator) or jtu.all_leaves((x,))


def walk(tree: Any, path: KeyPath = (), context: Context = ROOT) -> list[Visit]:
    """Every `eqx.Module` and every leaf of `tree`; leaves in the order of flattening.

    Holes (`None`) are no leaves, as everywhere in JAX.
    """
    found = _Walk()
    found.step_of(tree)(tree, path, context)
    found.steps.clear()  # they lead back to it, and what it found would live on
    return found.visits


Step = Callable[[Any, KeyPath, Context], None]


class _Walk:
    """A walk, and what it has learnt of classes: models repeat themselves.

    It is done with when the walk is. Kept longer, it would keep classes alive.
    """

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self.steps: dict[type, Step] = {}

    def step_of(self, node: Any) -> Step:
        """What is to be done at a node, which depends on its class."""
        cls = type(node)
        if cls not in self.steps:
            self.steps[cls] = self.make_step(node, cls)
        return self.steps[cls]

    def make_step(self, node: Any, cls: type) -> Step:
        if node is None:
            return self.hole
        if issubclass(cls, (eqx.nn.StateIndex, eqx.nn.State)):
            return self.foreign
        if is_eqx_module(node):
            return _ModuleStep(self, cls)
        if cls in (list, tuple):
            return self.sequence
        return self.leaf if is_leaf(node) else self.container

    def hole(self, node: Any, path: KeyPath, context: Context) -> None:
        pass

    def leaf(self, node: Any, path: KeyPath, context: Context) -> None:
        self.visits.append(Visit(path, node, context, True))

    def sequence(self, node: Any, path: KeyPath, context: Context) -> None:
        spec = context.spec
        each = None if spec.items else context.declare(spec.element(node, None))
        for i, child in enumerate(node):
            below = context.declare(spec.element(node, i)) if each is None else each
            self.step_of(child)(child, (*path, jtu.SequenceKey(i)), below)

    def container(self, node: Any, path: KeyPath, context: Context) -> None:
        for key, child in children(node) or ():
            self.step_of(child)(child, (*path, key), context.enter(node, key))

    def foreign(self, node: Any, path: KeyPath, context: Context) -> None:
        """Equinox's own state, which knows nothing of kinds, counts as declared."""
        owner = context.owner
        in_norm = owner is not None and issubclass(owner, eqx.nn.BatchNorm)
        context = context.declare(Spec(kind=BatchStat if in_norm else State))
        if is_eqx_module(node):
            self.visits.append(Visit(path, node, context, False))
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
        frozen = values["frozen"] if self.has_flags else context.frozen
        # The context lies there, too, so that no other has its identity.
        known = self.contexts.get((id(context), frozen))
        if known is None:
            known = context, self.fields(context, frozen)
            self.contexts[id(context), frozen] = known
        for name, key, below in known[1]:
            child = values.get(name)
            step_of(child)(child, (*path, key), below)

    def fields(self, context: Context, frozen: bool) -> list[tuple[str, Any, Context]]:
        """Name, key and context of each field that is a child in the pytree."""
        return [
            (name, jtu.GetAttrKey(name), context.field_of(self.cls, frozen, name))
            for name in dynamic_names(self.cls)
            if name != INFERENCE  # nothing is there to be visited
        ]


def leaves(tree: Any, path: KeyPath = (), context: Context = ROOT) -> list[Visit]:
    """Only the leaves of the walk."""
    return [v for v in walk(tree, path, context) if v.is_leaf]


def modules_in(
    tree: Any, path: KeyPath = (), context: Context = ROOT
) -> Iterator[Visit]:
    """Every `es.Module` in the tree, parents first."""
    return (v for v in walk(tree, path, context) if is_module(v.node))


def copy_tree(tree: Any) -> Any:
    """The same leaves in new containers and new modules, which belong to no scope."""
    return jtu.tree_map(lambda x: x, tree)


def drop_cached(tree: Any) -> bool:
    """Whether a `functools.cached_property` had left a value in `tree`, now removed.

    In a module of Equinox it lies among the fields, and changes the treedef.
    """
    dropped = False
    for module in (visit.node for visit in walk(tree) if not visit.is_leaf):
        fields = fields_of(module)
        for name in [k for k in fields if _is_cached(type(module), k, fields[k])]:
            del fields[name]
            dropped = True
    return dropped


def _is_cached(cls: type, name: str, value: Any) -> bool:
    # Or the module is a copy of one that had a value.
    is_property = isinstance(getattr(cls, name, None), ft.cached_property)
    return is_property or value is MISSING


def dynamic_names(cls: type) -> list[str]:
    """The fields of a module class that are children in the pytree, in their order."""
    fields = dataclasses.fields(cls)
    return [f.name for f in fields if not f.metadata.get("static", False)]


def field_names(module: Any) -> list[str]:
    """The fields that a user has given a module, or sees in its repr."""
    return [f.name for f in dataclasses.fields(module) if f.repr]


def declared_fields(module: Any) -> str:
    """A sentence for errors: the fields of a module's class."""
    names = field_names(module)
    return f"The fields are: {', '.join(names)}." if names else "It declares no fields."


def has_inference(module: eqx.Module) -> bool:
    """Whether a module has the flag of Equinox's layers, a bool called `inference`."""
    return type(module.__dict__.get("inference")) is bool


def set_flags(
    tree: Any,
    values: Callable[[Visit], dict[str, Any]],
    copy: Callable[[Any], Any] = copy_tree,
) -> Any:
    """A copy of `tree` with the attributes that `values` returns for a module."""
    tree = copy(tree)
    for visit in walk(tree):
        if not visit.is_leaf:
            for name, value in values(visit).items():
                object.__setattr__(visit.node, name, value)
    return tree
