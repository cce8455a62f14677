"""What the way from the root of a tree to a node says about that node.

The kind of an array depends on every declaration above it. A `Context` sums them up.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._kinds.fields import declared_child, declared_inside
from .._kinds.kinds import Axes, Kind, NOTHING, Parameter, Rng, Spec
from .base import (
    BaseModule,
    fields_of,
    is_eqx_module,
    is_module,
    MARKS,
    Marks,
    name_of_steps,
    sorted_marks,
    Step,
    step_to,
)


_Tree = TypeVar("_Tree")


class AxesAbove(NamedTuple):
    """An `es.Axes` on a field further up, or several, for the members of a union."""

    axes: tuple[Axes, ...]
    field: str  # `Block.up`
    depth: int  # how many keys further up


# The stacks of layers around a node, the outermost first: where the key path enters the
# layers of each, and how many there are.
Stacks: TypeAlias = tuple[tuple[int, int], ...]


class Context(NamedTuple):
    """What is known about a node from the nodes above it."""

    spec: Spec = NOTHING  # what the nearest annotation declares for this node
    kind: Kind | None = None  # the innermost kind declared so far
    covering: Kind | None = None  # the outermost covering kind
    unresolved: bool = False  # an unresolved annotation is further in than `kind`
    frozen: bool = False  # whether a module above is frozen, or a mark says so
    owners: tuple[type, ...] = ()  # classes of the modules around, the nearest last
    field: str = ""  # the field of the nearest module that leads here
    axes: tuple[AxesAbove, ...] = ()  # the outermost first
    marks: Marks = ()  # what is frozen below, or not, by its path from here
    lost: tuple[str, str] | None = None  # a node above, and a path that it lacks now
    stacks: Stacks = ()

    def enter(self, node: Any, key: Any) -> "Context":
        """The context of the child of `node` under `key`."""
        if is_eqx_module(node):
            around = self
            if is_module(node):
                fields = fields_of(node)
                around = self.inside(fields["frozen"], fields[MARKS])
            return around.fields_of(type(node), [key.name])[0]
        below = self.below(declared_child(self.spec, node, key))
        return below.at(step_to(node, key)) if self.marks else below

    def below(self, spec: Spec) -> "Context":
        """The context one key further down, where `spec` is declared."""
        here = self._replace(axes=self._axes_below()) if self.axes else self
        return here.declare(spec)

    def inside(self, frozen: bool, marks: Marks) -> "Context":
        """The context in an `es.Module` that has this flag and these marks."""
        if frozen:  # and stays so, wherever it is put
            return self._replace(frozen=True, marks=marks, lost=None)
        # A module's own marks count before those from further out.
        merged = sorted_marks({**dict(self.marks), **dict(marks)})
        return self._replace(marks=merged) if marks else self

    def at(self, step: Step) -> "Context":
        """The context one step further down, as far as marks are concerned."""
        marks = {path[1:]: x for path, x in self.marks if path[0] == step}
        frozen = marks.pop((), self.frozen)
        return self._replace(frozen=frozen, marks=sorted_marks(marks))

    def checked(self, name: str, steps: Iterable[Step]) -> "Context":
        """The context of a node, which says so if its children do not fit the marks."""
        there = set(steps)
        for path, _ in self.marks:
            if path[0] not in there:
                return self._replace(lost=(name, name + name_of_steps(path)))
        return self

    def fields_of(self, cls: type, names: list[str]) -> "list[Context]":
        """The contexts of these fields of a module of this class."""
        specs = declared_inside(cls, self.spec)
        around = self._replace(
            spec=NOTHING,
            unresolved=False,
            owners=(*self.owners, cls),
            axes=self._axes_below(),
        )
        found = []
        for name in names:
            context = around.declare(specs.get(name, NOTHING), name)
            found.append(context.at((f".{name}", 0)) if self.marks else context)
        return found

    def _axes_below(self) -> tuple[AxesAbove, ...]:
        return tuple(above._replace(depth=above.depth + 1) for above in self.axes)

    def declare(self, spec: Spec, field: str | None = None) -> "Context":
        """The context after one more declaration, that of `field` if it is given."""
        if field is None:
            if spec is NOTHING and self.spec is NOTHING:
                return self
            field = self.field
        axes = self.axes
        if spec.axes:
            owner = "" if self.owner is None else f"{self.owner.__qualname__}."
            axes = (*axes, AxesAbove(spec.axes, f"{owner}{field}", 0))
        unresolved = self.unresolved or spec.unresolved
        new = self._replace(spec=spec, unresolved=unresolved, field=field, axes=axes)
        if spec.kind is None:
            return new
        covering = self.covering or (spec.kind if spec.kind.covering else None)
        return new._replace(kind=spec.kind, covering=covering, unresolved=False)

    def seen_from(self, depth: int, start: int) -> "Context":
        """The context of a node if its path had `start` keys in place of `depth`.

        The places of stacks are counted in keys. Stacks further out are not seen.
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
        """The kind that a declaration says; `TypeError` if none can be resolved."""
        if self.unresolved and self.covering is None:
            self._check_resolved()
        return self.covering or self.kind

    def _check_resolved(self) -> None:
        # Annotations of plain Equinox modules are not meant for us.
        if self.owner is not None and issubclass(self.owner, BaseModule):
            raise TypeError(
                f"The annotation of `{self.owner.__qualname__}.{self.field}` decides"
                " the kind of an array, and it cannot be resolved. Import the name"
                " at run time (not only under `TYPE_CHECKING`), or declare the kind"
                " around it: `es.Parameter[...]`. A class made in a function is not"
                " found by annotations that are strings."
            )

    def kind_of(self, array: Any) -> Kind | None:
        """The effective kind of an array here; `None` if it has none."""
        declared = self.declared
        return undeclared(array.dtype) if declared is None else declared


@ft.cache  # JAX's test of dtypes takes as long as a whole step of a walk
def undeclared(dtype: Any) -> Kind | None:
    """The kind of an array of this dtype that nothing is declared for."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return Rng
    return Parameter if jnp.issubdtype(dtype, jnp.inexact) else None


ROOT = Context()


# --- One level of a pytree: the keys that lead to declarations.


@dataclasses.dataclass(frozen=True)
class AlikeKey:
    """The key of a child whose own key equals an earlier sibling's, or prints alike.

    Arrays are told apart by name and by key path, so no two may share one.
    """

    key: Any
    position: int

    def __str__(self) -> str:
        return f"{self.key}~{self.position}"


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """`(key, child)` one level down, holes included; `None` for a leaf.

    The keys are those of JAX, but no two are alike.
    """
    if is_leaf(node):
        return None
    entries, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    keys = [path[0] for path, _ in entries]
    if not (isinstance(node, dict) and all(type(key) is str for key in node)):
        keys = _apart(keys)
    return list(zip(keys, (child for _, child in entries), strict=True))


def map_children(f: Callable[[Any, Any], Any], node: _Tree) -> _Tree:
    """A new node with `f(key, child)` in place of each child; a leaf is returned."""
    if (below := children(node)) is None:
        return node
    return with_children(node, [f(key, child) for key, child in below])


def with_children(node: _Tree, new: list[Any]) -> _Tree:
    """A new node with these children in place of its own, in their order."""
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
    """Whether JAX takes `x` for a leaf."""
    if is_eqx_module(x):
        return False
    # JAX would answer for an iterator, too, but with a warning.
    return isinstance(x, Iterator) or jtu.all_leaves((x,))
