"""A `Context`: the declarations and flags that a node gets from the nodes above it.

The kind of an array depends on every declaration above it.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._kinds.fields import declared_child, declared_inside
from .._kinds.kinds import Axes, Kind, NOTHING, Parameter, Rng, Spec
from .._typing import Tree
from .base import (
    BaseModule,
    FROZEN_PATHS,
    FrozenPaths,
    is_eqx_module,
    is_module,
    sorted_frozen_paths,
    Step,
    step_to,
)
from .unbuilt import fields_of


class AxesAbove(NamedTuple):
    """The `es.Axes` of a field further up; several if its annotation is a union."""

    axes: tuple[Axes, ...]
    field: str  # `Block.up`
    depth: int  # the number of keys from that field to this node


# The `es.nn.Stacked`s above a node, the outermost first: the length of the path to
# each, and its number of layers.
Stacks: TypeAlias = tuple[tuple[int, int], ...]


class Context(NamedTuple):
    """The declarations, flags and stacks that apply to one node."""

    spec: Spec = NOTHING  # what the nearest annotation declares for this node
    kind: Kind | None = None  # the innermost kind declared so far
    covering: Kind | None = None  # the outermost covering kind
    is_own: bool = False  # a kind is declared inside the nearest module
    unresolved: bool = False  # an annotation further in than `kind` is unresolved
    frozen: bool = False  # because of a module above or a frozen path
    owners: tuple[type, ...] = ()  # classes of the modules above, the nearest last
    field: str = ""  # of the nearest module: the field that leads here
    axes: tuple[AxesAbove, ...] = ()  # the outermost first
    frozen_paths: FrozenPaths = ()  # to nodes below, relative to this node
    lost: tuple[str, str] | None = None  # a node, and a frozen path that it lacks
    stacks: Stacks = ()

    def enter(self, node: Any, key: Any) -> "Context":
        """The context of the child of `node` under `key`."""
        if is_eqx_module(node):
            around = self
            if is_module(node):
                fields = fields_of(node)
                around = self.inside(fields["frozen"], fields[FROZEN_PATHS])
            return around.fields_of(type(node), [key.name])[0]
        below = self.below(declared_child(self.spec, node, key))
        return below.at(step_to(node, key)) if self.frozen_paths else below

    def inside(self, frozen: bool, frozen_paths: FrozenPaths) -> "Context":
        """The context in an `es.Module` that has this flag and these frozen paths."""
        if frozen:  # overrides the frozen paths of modules above
            return self._replace(frozen=True, frozen_paths=frozen_paths, lost=None)
        # The module's own frozen paths override those of modules above.
        merged = sorted_frozen_paths({**dict(self.frozen_paths), **dict(frozen_paths)})
        return self._replace(frozen_paths=merged) if frozen_paths else self

    def at(self, step: Step) -> "Context":
        """The context one step further down, with the rest of the frozen paths."""
        paths = {path[1:]: x for path, x in self.frozen_paths if path[0] == step}
        frozen = paths.pop((), self.frozen)
        return self._replace(frozen=frozen, frozen_paths=sorted_frozen_paths(paths))

    def checked(self, name: str, steps: Iterable[Step]) -> "Context":
        """The context of a node; `lost` if a frozen path leads to a missing child."""
        there = set(steps)
        for path, _ in self.frozen_paths:
            if path[0] not in there:
                below = "".join(step for step, _ in path)
                return self._replace(lost=(name, name + below))
        return self

    def fields_of(self, cls: type, names: list[str]) -> "list[Context]":
        """The contexts of these fields of a module of this class."""
        specs = declared_inside(cls, self.spec)
        around = self._replace(
            spec=NOTHING,
            unresolved=False,
            is_own=False,
            owners=(*self.owners, cls),
        )
        found = []
        for name in names:
            context = around._replace(field=name).below(specs.get(name, NOTHING))
            found.append(context.at((f".{name}", 0)) if self.frozen_paths else context)
        return found

    def below(self, spec: Spec) -> "Context":
        """The context one key further down, with the declaration `spec`."""
        if spec is NOTHING and self.spec is NOTHING and not self.axes:
            return self
        axes = [above._replace(depth=above.depth + 1) for above in self.axes]
        if spec.axes:
            owner = "" if self.owner is None else f"{self.owner.__qualname__}."
            axes.append(AxesAbove(spec.axes, f"{owner}{self.field}", 0))
        new = self._replace(spec=spec, axes=tuple(axes))
        if spec.kind is None:
            return new._replace(unresolved=self.unresolved or spec.unresolved)
        return new._replace(
            kind=spec.kind,
            covering=self.covering or (spec.kind if spec.kind.covering else None),
            unresolved=spec.unresolved,
            is_own=True,
        )

    def seen_from(self, depth: int, start: int) -> "Context":
        """The context for a path whose first `depth` keys are replaced by `start` keys.

        The path lengths in `stacks` change with the path. Stacks within the first
        `depth` keys are removed.
        """
        if not self.stacks:
            return self
        stacks = tuple((at - depth + start, n) for at, n in self.stacks if at >= depth)
        return self._replace(stacks=stacks)

    @property
    def owner(self) -> type | None:
        """The class of the nearest module."""
        return self.owners[-1] if self.owners else None

    @property
    def declared(self) -> Kind | None:
        """The declared kind, or `None`; `TypeError` if it cannot be resolved."""
        if self.unresolved and self.covering is None:
            self._check_resolved()
        return self.covering or self.kind

    def _check_resolved(self) -> None:
        # In a plain Equinox module an unresolved annotation is not an error: it was not
        # written for this library.
        if self.owner is not None and issubclass(self.owner, BaseModule):
            raise TypeError(
                f"The annotation of `{self.owner.__qualname__}.{self.field}` decides"
                " the kind of an array, but it cannot be resolved. Import the name at"
                " run time (not only under `TYPE_CHECKING`), or declare the kind around"
                " it: `es.Parameter[...]`. A string annotation may not find a class"
                " that is defined in a function."
            )

    def kind_of(self, array: Any) -> Kind | None:
        """The effective kind of an array here; `None` if it has none."""
        declared = self.declared
        return undeclared(array.dtype) if declared is None else declared


@ft.cache  # JAX's test of dtypes takes as long as a whole step of a walk
def undeclared(dtype: Any) -> Kind | None:
    """The kind of an array of this dtype without a declaration."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return Rng
    return Parameter if jnp.issubdtype(dtype, jnp.inexact) else None


ROOT = Context()


# --- One level of a pytree: its keys and children.


@dataclasses.dataclass(frozen=True)
class AlikeKey:
    """Replaces a key that equals an earlier sibling's key, or prints the same.

    Names and key paths identify arrays, so they must be unique.
    """

    key: Any
    position: int

    def __str__(self) -> str:
        return f"{self.key}~{self.position}"


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """`(key, child)` one level down, holes included; `None` for a leaf.

    The keys are JAX's, made unique.
    """
    if is_leaf(node):
        return None
    entries, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    keys = [path[0] for path, _ in entries]
    if not (isinstance(node, dict) and all(type(key) is str for key in node)):
        keys = _apart(keys)
    return list(zip(keys, (child for _, child in entries), strict=True))


def map_children(f: Callable[[Any, Any], Any], node: Tree) -> Tree:
    """A new node with `f(key, child)` for each child; a leaf is returned unchanged."""
    if (below := children(node)) is None:
        return node
    return with_children(node, [f(key, child) for key, child in below])


def with_children(node: Tree, new: list[Any]) -> Tree:
    """A new node with these children instead of its own, in order."""
    treedef = jtu.tree_structure(node, is_leaf=lambda x: x is not node)
    return jtu.tree_unflatten(treedef, new)


def _apart(keys: list[Any]) -> list[Any]:
    seen: set[Any] = set()
    found = []
    for i, key in enumerate(keys):
        same = {key, str(key)}
        found.append(key if seen.isdisjoint(same) else AlikeKey(key, i))
        seen |= same
    return found


def is_leaf(x: Any) -> bool:
    """Whether `x` is a leaf to JAX."""
    if is_eqx_module(x):
        return False
    # Do not pass an iterator to JAX, which would emit a warning.
    return isinstance(x, Iterator) or jtu.all_leaves((x,))
