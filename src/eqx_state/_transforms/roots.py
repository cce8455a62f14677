"""What a transform lifts: the modules that a scope owns, with their fields and leaves.

The identity of a leaf is its *slot*: its position among the leaves of all lifted
modules, in the order of flattening. A module is a range of slots.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._state.scope import is_owned, own, Ownership, traversal_of
from .._tree.base import (
    BaseModule,
    dynamic_names,
    INFERENCE,
    is_module,
    ownership_of,
    set_ownership,
)
from .._tree.compare import identical
from .._tree.unbuilt import fields_of
from .._tree.walk import copy_tree, Traversal, Visit


# The values of leaves, by slot.
Values = dict[int, Any]


@dataclasses.dataclass(eq=False)
class Root:
    """An outermost module among the owned modules that a transform reaches.

    - `original`: the module that `module` is a copy of, or else `module` itself.
    - `traversal`: its paths begin at the model that the scope owns.
    - `slots`: those of its leaves.
    - `has_strays`: whether user code has put a module into a list of the model. No
        scope owns it, so it is a part of the field that contains the list.
    """

    module: BaseModule
    original: BaseModule
    ownership: Ownership
    traversal: Traversal
    slots: range

    def __post_init__(self) -> None:
        # Now, because `is_owned` is false when the scope has closed.
        modules = filter(is_module, self.traversal.modules)
        self.has_strays = not all(map(is_owned, modules))

    @property
    def is_copy(self) -> bool:
        return self.original is not self.module


@dataclasses.dataclass(eq=False)
class Field:
    """A field of a lifted module with its leaves and the owned modules in it.

    - `module`, `outside`: the innermost owned module with this field, and the module of
        which it is a copy, or else itself.
    - `slots`: those of its leaves, by position.
    - `structure`, `contents`: the value taken apart, into leaves and owned modules;
        `None` if it is one leaf.
    - `given`, `given_contents`: the value outside and what is in it, unless it is one
        leaf.
    """

    module: BaseModule
    outside: BaseModule
    name: str
    slots: dict[int, int]
    structure: Any = None
    contents: Sequence[Any] = ()
    given: Any = None
    given_contents: Sequence[Any] = ()

    def swap(self, values: Values) -> None:
        """Set the field of the lifted module to these values.

        Owned modules in it remain the same objects. Other nodes, such as lists, are
        replaced instead of changed, because user code may also refer to them.
        """
        if self.structure is None:
            new = values[self.slots[0]]
        else:
            new = self.structure.unflatten(self._filled(self.contents, values))
        object.__setattr__(self.module, self.name, new)

    def write(self, new: Mapping[int, Any]) -> None:
        """Write new leaves, by slot, to the module outside."""
        if self.structure is None:
            (value,) = new.values()
        else:
            old = fields_of(self.outside)[self.name]
            below, structure = jtu.tree_flatten(old, is_leaf=is_owned)
            assert len(below) == len(self.contents)
            value = structure.unflatten(self._filled(below, new))
        object.__setattr__(self.outside, self.name, value)

    def _filled(self, below: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
        """What is in the field, with new leaves, by slot, in the place of its own."""
        slots = self.slots
        return [new.get(slots[i], x) if i in slots else x for i, x in enumerate(below)]

    def is_intact(self) -> bool:
        """Whether the container outside still has the same contents."""
        if self.structure is None:
            return True
        below = jtu.tree_leaves(self.given, is_leaf=is_owned)
        return identical(below, [*self.given_contents])


class Leaf(NamedTuple):
    """A leaf of a lifted module: its visit, its root and the field that holds it.

    `number`: its position in the field.
    """

    visit: Visit
    root: Root
    field: Field
    number: int


def roots_among(reached: Sequence[Any], copies: "Copies") -> list[Root]:
    """The outermost modules among `reached`, each once, and their slots."""
    outermost: list[tuple[BaseModule, Traversal]] = []
    inside: set[int] = set()
    for module in reached:
        if id(module) in inside:
            continue
        traversal = copies.traversals.get(id(module))
        if traversal is None:
            traversal = traversal_of(module)
        below = set(map(id, traversal.modules))
        # In `lambda x: layer(x) + model(x)` the layer may come before the model that
        # contains it: remove the layer again.
        outermost = [(x, t) for x, t in outermost if id(x) not in below]
        outermost.append((module, traversal))
        inside |= below
    sizes = (len(t.leaves) for _, t in outermost)
    stops = [*itertools.accumulate(sizes, initial=0)]
    pairs = zip(outermost, itertools.pairwise(stops), strict=True)
    return [
        Root(x, copies.original(x), ownership_of(x), t, range(*ends))
        for (x, t), ends in pairs
    ]


def fields_in(root: Root, copies: "Copies") -> list[Field]:
    """The fields of a root and of all owned modules in it."""
    # `add` and `container` take the next slot at each leaf, so they have to go through
    # the leaves in JAX's order.
    slots = iter(root.slots)
    fields: list[Field] = []

    def add(module: BaseModule) -> None:
        outside, values = copies.original(module), fields_of(module)
        for name in dynamic_names(type(module)):
            value = values.get(name)
            if eqx.is_array(value):  # without a flattening
                fields.append(Field(module, outside, name, {0: next(slots)}))
            elif is_owned(value):
                add(value)
            elif value is not None and name != INFERENCE:
                fields.append(container(module, outside, name, value))

    def container(module: Any, outside: Any, name: str, value: Any) -> Field:
        below, structure = jtu.tree_flatten(value, is_leaf=is_owned)
        own: dict[int, int] = {}
        for i, x in enumerate(below):
            if is_owned(x):
                add(x)
            else:
                own[i] = next(slots)
        given = fields_of(outside)[name]
        now = jtu.tree_leaves(given, is_leaf=is_owned)
        return Field(module, outside, name, own, structure, below, given, now)

    add(root.module)
    return fields


# --- Arguments are copies -------------------------------------------------------------


class Copies(NamedTuple):
    """The copies of owned modules among the arguments of a transform.

    - `originals`: the original of each copy, by the `id` of the copy.
    - `traversals`: those of the outermost copies, by the `id` of the copy.
    """

    originals: dict[int, Any]
    traversals: dict[int, Traversal]

    def original(self, x: Any) -> Any:
        return self.originals.get(id(x), x)

    def originals_in(self, modules: Iterable[Any]) -> list[Any]:
        """The originals of the copies among these modules."""
        return [self.originals[id(x)] for x in modules if id(x) in self.originals]


def owned_copy(module: Any, values: Iterator[Any]) -> Any:
    """A copy of an owned module with the same ownership, and new leaves."""
    given = traversal_of(module)
    copy = given.structure.unflatten([next(values) for _ in given.leaves])
    own(given.again(copy), ownership_of(module).scope)
    return copy


def copy_arguments(tree: Any, treatments: Sequence[Any] = ()) -> tuple[Any, Copies]:
    """`tree` with a copy of each owned module, and the copies.

    `treatments` says for each leaf how the transform treats it: in `es.vmap`, its axis;
    in loops and derivatives, where each place has its own values, its number.
    Occurrences of a module with equal treatments share one copy: in `f(self.a,
    self.a)`, both arguments are the same object.
    """
    if not treatments:
        treatments = [None] * jtu.tree_structure(tree).num_leaves
    entries = [*by_entry(tree, treatments)]
    known: dict[tuple[int, tuple[Any, ...]], Any] = {}
    copies = Copies({}, {})
    # Copy the largest first: in `f(model.layer, model)` the copy of the layer has to be
    # the layer of the copied model, even if the model has no other leaves.
    by_size = sorted(entries, key=lambda x: -jtu.tree_structure(x[0]).num_nodes)
    for module, treatment in by_size:
        if not is_owned(module) or (id(module), treatment) in known:
            continue
        given, copy = traversal_of(module), copy_tree(module)
        new = copies.traversals[id(copy)] = given.again(copy)
        own(new, ownership_of(module).scope)
        for (original, start, stop), (inner, *_) in zip(
            given.extents(), new.extents(), strict=True
        ):
            if is_owned(original):
                known.setdefault((id(original), treatment[start:stop]), inner)
                copies.originals[id(inner)] = original
            else:
                set_ownership(inner, None)
    leaves = [known[id(x), t] if is_owned(x) else x for x, t in entries]
    treedef = jtu.tree_structure(tree, is_leaf=is_owned)
    return jtu.tree_unflatten(treedef, leaves), copies


def by_entry(tree: Any, values: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each leaf of a tree, paired with a tuple of its `values`.

    Owned modules count as leaves here. `values` has an entry for each leaf that JAX
    sees, so the tuple of a module contains several.
    """
    rest = iter(values)
    for x in jtu.tree_leaves(tree, is_leaf=is_owned):
        count = jtu.tree_structure(x).num_leaves if is_owned(x) else 1
        yield x, tuple(itertools.islice(rest, count))
