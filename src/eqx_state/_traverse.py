"""The one traversal: every module and every leaf, with path, kind and owner.

A leaf's kind depends on the way from the root to it, so it can only be found by walking
down. `walk` does, and all that works by kind or by path stands on it: selecting, modes,
scopes, initialisation, transforms.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ._base import BaseModule
from ._declare import annotation_of, declarations, NOTHING, Spec
from ._kinds import BatchStat, Parameter, Rng, State, TreePart


KeyPath = tuple[Any, ...]
Kind = type[TreePart[Any]]


class Context(NamedTuple):
    """What the way down from the root says about the node that it has reached."""

    spec: Spec = NOTHING  # what the annotation says about this node
    kind: Kind | None = None  # the innermost declaration so far
    covering: Kind | None = None  # the outermost covering one
    unresolved: bool = False  # an annotation further in has no meaning
    frozen: bool = False  # of the nearest `es.Module`
    owner: type | None = None  # class of the nearest module
    field: str = ""  # the field of it that leads here

    def enter(self, node: Any, key: Any) -> "Context":
        """The context of the child of `node` under `key`."""
        if not isinstance(node, eqx.Module):
            return self.declare(self.spec.child(key))
        name = getattr(key, "name", "")
        context = self._replace(owner=type(node), field=name, unresolved=False)
        if isinstance(node, BaseModule):
            context = context._replace(frozen=node.frozen)
        return context.declare(declarations(type(node)).get(name, NOTHING))

    def declare(self, spec: Spec) -> "Context":
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
                " kind around it: `es.Parameter[...]`."
            )

    def kind_of(self, leaf: Any) -> Kind | None:
        """The effective kind of a leaf here; `None` for what has none."""
        if not is_array(leaf):
            return None
        if (declared := self.declared) is not None:
            return declared
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return Rng
        return Parameter if jnp.issubdtype(leaf.dtype, jnp.inexact) else None


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
        return self.context.kind_of(self.node)


def is_array(x: Any) -> bool:
    """Arrays, tracers, NumPy arrays, and the shape and dtype of one."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def name_of(path: KeyPath) -> str:
    """A key path as users write it: `layers[0].norm.mean`."""
    return jtu.keystr(path).removeprefix(".")


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """`(key, child)` one level down, holes included; `None` for a leaf."""
    if isinstance(node, Iterator):  # which JAX takes for a leaf, with a warning
        return None
    entries, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(entries) == 1 and entries[0][1] is node:
        return None
    return [(path[0], child) for path, child in entries]


def walk(tree: Any, path: KeyPath = (), context: Context = ROOT) -> list[Visit]:
    """Every `eqx.Module` and every leaf of `tree`; leaves in the order of flattening.

    Holes (`None`) are no leaves, as everywhere in JAX.
    """
    visits: list[Visit] = []

    def visit(node: Any, path: KeyPath, context: Context) -> None:
        if node is None:
            return
        context = _foreign(node, context)
        below = children(node)
        if below is None:
            visits.append(Visit(path, node, context, True))
            return
        if isinstance(node, eqx.Module):
            visits.append(Visit(path, node, context, False))
        for key, child in below:
            visit(child, (*path, key), context.enter(node, key))

    visit(tree, path, context)
    return visits


def _foreign(node: Any, context: Context) -> Context:
    """Equinox's own state, which knows nothing of kinds, counts as declared."""
    if isinstance(node, (eqx.nn.StateIndex, eqx.nn.State)):
        in_norm = context.owner is not None and issubclass(
            context.owner, eqx.nn.BatchNorm
        )
        return context.declare(Spec(kind=BatchStat if in_norm else State))
    return context


def leaves(tree: Any, path: KeyPath = (), context: Context = ROOT) -> list[Visit]:
    """Only the leaves of the walk."""
    return [v for v in walk(tree, path, context) if v.is_leaf]


def modules_in(
    tree: Any, path: KeyPath = (), context: Context = ROOT
) -> Iterator[Visit]:
    """Every `es.Module` in the tree, parents first."""
    return (v for v in walk(tree, path, context) if isinstance(v.node, BaseModule))


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One array of a tree: where it is, what it is.

    **Arguments:**

    - `path`: its JAX key path, a tuple of keys.
    - `kind`: its kind, or `None`.
    - `value`: the array (or `jax.ShapeDtypeStruct`).
    - `frozen`: whether its nearest `es.Module` is frozen.
    """

    path: KeyPath
    kind: Kind | None
    value: Any
    frozen: bool

    @property
    def name(self) -> str:
        """The path as it is written in Python: `layers[0].norm.mean`."""
        return name_of(self.path)

    def __repr__(self) -> str:
        kind = None if self.kind is None else self.kind.__name__
        value = eqx.tree_pformat(self.value, short_arrays=True)
        return f"Part(name={self.name!r}, kind={kind}, value={value})"


def part_of(visit: Visit) -> Part | None:
    """The `Part` at a leaf of the walk; `None` where there is no array."""
    if not is_array(visit.node):
        return None
    return Part(visit.path, visit.kind, visit.node, visit.context.frozen)


def parts(tree: Any) -> list[Part]:
    """Every array in `tree`, with its path, name and kind, in the order of flattening.

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    A list of `es.Part`. Functions, strings and Python numbers are not among them.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        parts = es.parts([eqx.nn.Linear(2, 3, key=jr.key(0)), {"count": 0}])
        assert [(p.name, p.kind) for p in parts] == [
            ("[0].weight", es.Parameter),
            ("[0].bias", es.Parameter),
        ]
        ```
    """
    return [p for p in map(part_of, leaves(tree)) if p is not None]


def copy_tree(tree: Any) -> Any:
    """The same leaves in new containers and new modules, which belong to no scope."""
    return jtu.tree_map(lambda x: x, tree)


def field_names(module: Any) -> list[str]:
    """The fields that a user has given a module, or sees in its repr."""
    return [f.name for f in dataclasses.fields(module) if f.repr]


def has_inference(module: eqx.Module) -> bool:
    """Whether a module has the flag of Equinox's layers, a bool called `inference`."""
    return type(module.__dict__.get("inference")) is bool


def set_flags(tree: Any, values: Callable[[Visit], dict[str, Any]]) -> Any:
    """A copy of `tree` with the attributes that `values` returns for a module."""
    tree = copy_tree(tree)
    for visit in walk(tree):
        if not visit.is_leaf:
            for name, value in values(visit).items():
                object.__setattr__(visit.node, name, value)
    return tree


def first_difference(
    a: Any, b: Any, structure: Callable[[Any], Any], path: KeyPath = ()
) -> tuple[KeyPath, Any, Any]:
    """Where two trees, for which `structure` differs, first do, and what each has."""
    if a is None or b is None or type(a) is not type(b):
        return path, a, b
    below_a, below_b = children(a) or [], children(b) or []
    if [k for k, _ in below_a] != [k for k, _ in below_b]:
        return path, a, b
    if isinstance(a, eqx.Module):
        for f in dataclasses.fields(a):
            if f.metadata.get("static", False):
                left, right = (getattr(x, f.name, None) for x in (a, b))
                if not same(left, right):
                    return (*path, jtu.GetAttrKey(f.name)), left, right
    for (key, x), (_, y) in zip(below_a, below_b, strict=True):
        if structure(x) != structure(y):
            return first_difference(x, y, structure, (*path, key))
    return path, a, b


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are one and the same. Arrays are compared by identity."""
    if a is b or is_array(a) or is_array(b):
        return a is b
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


def difference_of_leaves(a: Any, b: Any) -> str | None:
    """The name of the first leaf that two trees do not have in common, if there is."""
    left, right = ({v.path: v.node for v in leaves(tree)} for tree in (a, b))
    for path in {**left, **right}:
        in_both = path in left and path in right
        if not (in_both and same(left[path], right[path])):
            return name_of(path)
    return None


def structure(tree: Any) -> Any:
    """The treedef in which a hole is a leaf: a tree's and a part of it's are equal."""
    return jtu.tree_structure(tree, is_leaf=lambda x: x is None)


def find_shared(tree: Any, path: KeyPath = ()) -> tuple[str, str] | None:
    """The names of two places that hold one and the same stateful `es.Module`."""
    visits, first = walk(tree, path), dict[int, KeyPath]()

    def has_state(path: KeyPath) -> bool:
        inside = (v for v in visits if v.is_leaf and v.path[: len(path)] == path)
        return any(map(_is_state, inside))

    for visit in visits:
        if isinstance(visit.node, BaseModule) and not visit.is_leaf:
            other = first.setdefault(id(visit.node), visit.path)
            # A constant copy of a stateful module is no second state.
            if other != visit.path and has_state(other) and has_state(visit.path):
                return name_of(other), visit.name
    return None


def _is_state(visit: Visit) -> bool:
    kind = visit.kind
    return kind is not None and issubclass(kind, State)


def check_not_shared(tree: Any, path: KeyPath = ()) -> None:
    """Raise `ValueError` if one stateful module would have to be two."""
    if (names := find_shared(tree, path)) is not None:
        a, b = (f"`{name}`" if name else "the model itself" for name in names)
        raise ValueError(
            f"The same stateful module is in two places, {a} and {b}. A model is a"
            " tree: at the first transform the one module becomes two, and their"
            " states drift apart. Make two of them, or hold it once and call it from"
            " both places, or tie the places by `eqx.nn.Shared`."
        )
