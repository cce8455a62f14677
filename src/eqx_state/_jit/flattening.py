"""Generates code that flattens and builds trees of one structure.

To flatten a tree, JAX calls a Python function for every module; to compare treedefs, it
calls Python functions for the static values. The code generated here is for one
structure. It reads fields by name, compares types, lengths and static values, and
raises `Mismatch` if anything has changed, so that the slow path can take over.

Nodes of equal structure form a *group*. One loop flattens a group, and appends the
children to the lists of the groups below; the last list contains the arrays. The code
does not call a function per module, and its length depends on the number of different
layers. To build a tree, the loops run in the opposite order, over slices of the lists.
"""

import dataclasses
import functools as ft
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._tree.base import INFERENCE, is_eqx_module
from .._tree.compare import identical
from .._tree.unbuilt import can_be_unbuilt, dict_of, fields_of
from .code import Code, Mismatch, one_level
from .static import can_change, is_fixed, typed


# Stands for an array in a tree. It is a plain object because JAX recommends that the
# `__init__` of a pytree leaves these alone.
SLOT: Final = object()

# The structure of a module that is a leaf of the code, like the arrays; or `None`.
_StructureOf = Callable[[Any], Any]

# These modules: the number of the leaf in JAX's order, the module, its structure.
_Modules = list[tuple[int, Any, Any]]


def flatten_code(
    tree: Any, origin: Any, structure_of: _StructureOf | None = None
) -> tuple[Callable[[Any], Sequence[Any]], _Modules]:
    """A function of a tree that returns its leaves in JAX's order.

    It raises `Mismatch` (or `KeyError`) for a tree that differs from this one in more
    than its leaves, which it does not check. It does not keep `origin` alive. If
    `structure_of` has a structure for an outermost module, the module is a leaf.
    """
    try:
        groups = _Groups(tree, structure_of)
        return groups.apart(origin).compile(), groups.modules
    except _TOO_DEEP:
        return _refuse, []


def _refuse(_: Any) -> Any:
    raise Mismatch


def build_code(
    tree: Any, structure_of: _StructureOf | None = None
) -> tuple[Callable[[Sequence[Any]], Any], _Modules]:
    """A function of leaves that builds this tree, which has a `SLOT` for each array.

    `structure_of`: as for `flatten_code`.
    """
    try:
        groups = _Groups(tree, structure_of)
        return groups.together().compile(), groups.modules
    except _TOO_DEEP:
        static, treedef = jtu.tree_flatten(tree)

    def build(given: Sequence[Any]) -> Any:
        rest = iter(given)
        filled = [next(rest) if x is SLOT else x for x in static]
        return treedef.unflatten(filled)

    return build, []


def is_plain(module: eqx.Module, origin: Any) -> bool:
    """Whether a module has only nodes with code and fixed static values.

    These values do not include `origin`.
    """

    def is_one(node: Leaf | Container) -> bool:
        if isinstance(node, Leaf):
            is_ours = node.x is not origin and is_fixed(node.x)
            return is_ours or not node.is_static
        return not isinstance(node, Node) and all(map(is_one, node.below))

    return is_one(_Finder().find(module))


# Python raises these errors for a tree, or for code, that is nested too deep.
_TOO_DEEP: Final = (RecursionError, SyntaxError, MemoryError)


# --- Nodes ----------------------------------------------------------------------------


ARRAY: Final = 0  # the key of all arrays


@dataclasses.dataclass
class Leaf:
    """An array or a module, with its number as `x`; or a static value, which is `x`."""

    x: Any
    key: int  # equal for all nodes of a group
    is_static: bool


class Container:
    """A tuple, a list or a named tuple; subclasses are for other nodes.

    `slots` are the children that the code stores in lists: all except static values.
    """

    is_static = False
    may_be_uniform = True

    def __init__(self, x: Any, key: int, below: Sequence["Leaf | Container"]):
        self.x, self.key, self.below = x, key, below
        self.slots = [child for child in below if not child.is_static]
        # In a list of layers of equal structure, all children belong to one group. Add
        # them to its list, or take them from it, in one operation.
        is_one_group = len({child.key for child in self.slots}) == 1
        are_all = len(self.slots) == len(below) > 1
        self.is_uniform = self.may_be_uniform and is_one_group and are_all

    def apart(self, code: Code, lists: Mapping[int, str]) -> None:
        """Add the code that flattens the node `v`."""
        code.check(f"type(v) is not {code.constant(type(self.x))}")
        children = self.children(code)
        if self.is_uniform:
            code.add(f"{lists[self.slots[0].key]} += {children}")
        elif self.below:
            names = [code.variable() for _ in self.below]
            code.add(f"{', '.join(names)}, = {children}")
            self.sort(code, names, lists)

    def children(self, code: Code) -> str:
        """An expression for the children, after a check of their number."""
        code.check(f"len(v) != {len(self.below)}")
        return "v"

    def sort(self, code: Code, values: list[str], lists: Mapping[int, str]) -> None:
        """Add code that compares static children, and appends the others to lists.

        `values`: expressions for the children.
        """
        below = [*zip(values, self.below, strict=True)]
        code.check_static({v: child.x for v, child in below if child.is_static})
        for v, child in below:
            if not child.is_static:
                code.add(f"{lists[child.key]}.append({v})")

    def together(self, code: Code, slots: list[str]) -> str:
        """An expression for the node, from expressions for its slots.

        If the node is uniform, `slots` has one expression for all slots.
        """
        if self.is_uniform:
            return self.make(code, f"*{slots[0]}")
        rest = iter(slots)
        values = [code.own(x.x) if x.is_static else next(rest) for x in self.below]
        return self.make(code, ", ".join(values))

    def make(self, code: Code, values: str) -> str:
        """An expression for the node. `values`: expressions, separated by commas."""
        if type(self.x) is list:
            return f"[{values}]"
        if type(self.x) is tuple:
            return f"({values},)" if values else "()"
        return f"{code.constant(type(self.x))}({values})"


class Dict(Container):
    """A dict with keys of one type, which JAX can sort."""

    def children(self, code: Code) -> str:
        keys = sorted(self.x)
        code.check(f"len(v) != {len(keys)}")
        if int in map(type, keys):  # `d[1]` would also find the key `True`
            code.check(f"{{*map(type, v)}} != {code.constant({int})}")
        if len(keys) < 2:
            return f"[{', '.join(f'v[{key!r}]' for key in keys)}]"
        return f"{code.constant(operator.itemgetter(*keys))}(v)"

    def make(self, code: Code, values: str) -> str:
        return f"dict(zip({code.constant(tuple(sorted(self.x)))}, [{values}]))"


class Node(Container):
    """A node that only JAX can flatten."""

    def children(self, code: Code) -> str:
        code.add("children, data = one_level(v)")
        _check_data(code, "data", one_level(self.x)[1])
        code.check(f"len(children) != {len(self.below)}")
        return "children"

    def make(self, code: Code, values: str) -> str:
        treedef = jtu.tree_structure(self.x, is_leaf=lambda y: y is not self.x)
        return f"{code.constant(treedef.unflatten)}([{values}])"


def _check_data(code: Code, v: str, data: Any) -> None:
    """Add code that compares the static data of a node."""
    if type(data) is not tuple:
        code.check_static({v: data})
        return
    # Compare the elements: JAX creates a new tuple each time it flattens the node.
    code.check(f"type({v}) is not tuple or len({v}) != {len(data)}")
    for i, x in enumerate(data):
        _check_data(code, f"{v}[{i}]", x)


class Module(Container):
    """An Equinox module whose `__dict__` contains only its fields."""

    may_be_uniform = False

    def apart(self, code: Code, lists: Mapping[int, str]) -> None:
        cls, fields = type(self.x), module_fields(type(self.x))
        code.check(f"type(v) is not {code.constant(cls)}")
        code.add("d = dict_of(v)")
        if can_be_unbuilt(self.x):
            code.add("if type(d) is Unbuilt: d = build(v)")
        code.check(f"len(d) != {len(fields)}")
        if INFERENCE in fields:
            # All modules of one result share the list in this field, and it does not
            # change in place. `mode0` or `mode1` is the last list that was compared, so
            # one comparison is enough for all of these modules.
            mode = fields_of(self.x)[INFERENCE]
            with code.block(f"if d[{INFERENCE!r}] is not mode{len(mode)}:"):
                code.add(f"mode{len(mode)} = d[{INFERENCE!r}]")
                code.check(f"mode{len(mode)} != {mode}")
        self.sort(code, [f"d[{name!r}]" for name in data_fields(cls)], lists)

    def together(self, code: Code, slots: list[str]) -> str:
        cls, fields = type(self.x), fields_of(self.x)
        below = dict(zip(data_fields(cls), self.below, strict=True))
        names = [name for name, child in below.items() if not child.is_static]
        # Copying a dict is faster than creating one. The dict of an instance shares its
        # keys with other instances, so its copies are small.
        like = dict_of(object.__new__(cls))
        like |= {k: None if k in names else fields[k] for k in module_fields(cls)}
        code.add(f"d = {code.constant(like.copy)}()")
        for name, value in zip(names, slots, strict=True):
            code.add(f"d[{name!r}] = {value}")
        for name, x in fields.items():
            if name not in (*names, INFERENCE) and can_change(x):
                code.add(f"d[{name!r}] = {code.own(x)}")
        code.add(f"module = new({code.constant(cls)})")
        code.add("set_dict(module, d)")
        return "module"


def module_fields(cls: type) -> dict[str, bool]:
    """The fields of a module, and whether each is static; static ones first."""
    fields = {f.name: f.metadata.get("static", False) for f in dataclasses.fields(cls)}
    static = dict.fromkeys((name for name in fields if fields[name]), True)
    return static | {name: False for name in fields if not fields[name]}


def data_fields(cls: type) -> list[str]:
    """The fields of a module, without `INFERENCE`, which only repeats its mode."""
    return [name for name in module_fields(cls) if name != INFERENCE]


class _Finder:
    """Finds the nodes of a tree, with equal keys for nodes of equal structure."""

    def __init__(self, structure_of: _StructureOf | None = None):
        self.structure_of = structure_of
        self.keys: dict[Any, int] = {ARRAY: ARRAY}
        self.numbers = itertools.count()  # of the leaves, in JAX's order
        self.modules: _Modules = []

    def find(self, x: Any, is_outermost: bool = True) -> Leaf | Container:
        if x is SLOT or eqx.is_array(x):
            return Leaf(next(self.numbers), ARRAY, False)
        if is_outermost and can_be_unbuilt(x):
            if self.structure_of and (structure := self.structure_of(x)) is not None:
                number = next(self.numbers)
                self.modules.append((number, x, structure))
                return Leaf(number, ARRAY, False)
            is_outermost = False
        cls, find = type(x), ft.partial(self.find, is_outermost=is_outermost)
        if cls in (tuple, list) or _is_named_tuple(x):
            return self._container(Container, x, map(find, x))
        if cls is dict and {*map(type, x)} in (set(), {str}, {int}):
            keys = sorted(x)
            return self._container(Dict, x, (find(x[k]) for k in keys), *keys)
        if is_eqx_module(x):
            fields, static = fields_of(x), module_fields(cls)
            mode = fields.get(INFERENCE, [])
            # If `__dict__` contains more, such as a cache, leave the module to JAX.
            if fields.keys() == static.keys() and mode in ([], [[]]):
                below = (
                    self._static(fields[k]) if static[k] else find(fields[k])
                    for k in data_fields(cls)
                )
                return self._container(Module, x, below, len(mode))
        elif x is None or jtu.all_leaves([x]):
            return self._static(x)
        children, data = one_level(x)
        return self._container(Node, x, map(find, children), data)

    def _static(self, x: Any) -> Leaf:
        return Leaf(x, self._key("static", _same_if(x)), True)

    def _container(
        self, cls: type[Container], x: Any, below: Iterable[Any], *data: Any
    ) -> Container:
        below = [*below]
        keys = tuple(child.key for child in below)
        return cls(x, self._key(cls, type(x), keys, *map(_same_if, data)), below)

    def _key(self, *what: Any) -> int:
        return self.keys.setdefault(what, len(self.keys))


def _same_if(x: Any) -> Any:
    """A hashable form of a static value, equal for values that can be interchanged."""
    if type(x) is tuple:
        return tuple(map(_same_if, x))
    return typed(x) if type(x) in _VALUES else _Identity(x)


class _Identity:
    """A key for an object. It keeps the object alive, so that no `id` is reused.

    JAX creates the data of some nodes, such as `{"shape": (3, 4)}` for a sparse matrix,
    each time it flattens them.
    """

    def __init__(self, x: Any):
        self.x = x

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and self.x is other.x


_VALUES: Final = frozenset({str, int, bool, float, type(None)})


def _is_named_tuple(x: Any) -> bool:
    """Whether JAX flattens `x` as a named tuple.

    It does not if the class of `x` is registered as a pytree with its own functions.
    """
    if not (isinstance(x, tuple) and hasattr(type(x), "_fields")):
        return False
    below, aux = one_level(x)
    return aux is type(x) and identical(list(below), list(x))


# --- Groups ---------------------------------------------------------------------------


@dataclasses.dataclass
class _Group:
    """Nodes of equal structure: one as a template, and all in the order of their list.

    `starts`: for the key of each slot, the length of the list of that key before this
    group is flattened.
    """

    node: Container
    name: str  # of the list
    members: list[Any] = dataclasses.field(default_factory=list)
    starts: dict[int, int] = dataclasses.field(default_factory=dict)


class _Groups:
    """The groups of a tree, parents before children; and the arrays."""

    def __init__(self, tree: Any, structure_of: _StructureOf | None):
        finder = _Finder(structure_of)
        root = finder.find([tree])  # a container, even if the tree is a leaf
        self.modules = finder.modules
        self.lists = {ARRAY: "arrays"}
        self.groups: list[_Group] = []
        self._find(root)
        self.groups.reverse()
        self.groups[0].members.append(root)
        arrays: list[Any] = []
        members = {group.node.key: group.members for group in self.groups}
        members[ARRAY] = arrays
        for group in self.groups:
            for slot in group.node.slots:
                group.starts[slot.key] = len(members[slot.key])
            for member in group.members:
                for slot in member.slots:
                    members[slot.key].append(slot)
        self.order = [array.x for array in arrays]

    def _find(self, node: Any) -> None:
        self.lists[node.key] = f"list{len(self.lists)}"
        for slot in node.slots:
            if slot.key not in self.lists:
                self._find(slot)
        self.groups.append(_Group(node, self.lists[node.key]))

    def apart(self, origin: Any) -> Code:
        """The code that flattens the tree."""
        code = Code("tree", origin)
        for name in self.lists.values():
            code.add(f"{name} = []")
        code.add("mode0 = mode1 = None")
        code.add(f"{self.groups[0].name}.append([tree])")
        for group in self.groups:
            with code.block(f"for v in {group.name}:"):
                group.node.apart(code, self.lists)
        # The positions of the arrays, in JAX's order.
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        code.add(f"return {_picked(code, 'arrays', places)}")
        return code

    def together(self) -> Code:
        """The code that builds the tree."""
        code = Code("given")
        code.add(f"arrays = {_picked(code, 'given', self.order)}")
        for group in reversed(self.groups):
            code.add(f"{group.name} = []")
            header, slots = self._loop(group)
            with code.block(header):
                made = group.node.together(code, slots)
                code.add(f"{group.name}.append({made})")
        code.add(f"return {self.groups[0].name}[0][0]")
        return code

    def _loop(self, group: _Group) -> tuple[str, list[str]]:
        """The header of a loop that builds a group, and expressions for its slots.

        If several slots of one member have equal keys, they are adjacent in their list.
        """
        slots, number = group.node.slots, len(group.members)
        sizes, before = Counter(slot.key for slot in slots), Counter[int]()
        columns = []
        for slot in slots:
            name, size = self.lists[slot.key], sizes[slot.key]
            start = group.starts[slot.key]
            end = start + number * size
            if group.node.is_uniform:
                header = f"for i in range({start}, {end}, {size}):"
                return header, [f"{name}[i:i + {size}]"]
            first = start + before[slot.key]
            before[slot.key] += 1
            one, all_ = f"{name}[{first}]", f"{name}[{first}:{end}:{size}]"
            columns.append(one if number == 1 else all_)
        if not columns:
            return f"for _ in range({number}):", []
        names, listed = [f"x{i}" for i in range(len(columns))], ", ".join(columns)
        rows = f"(({listed},),)" if number == 1 else f"zip({listed})"
        return f"for {', '.join(names)}, in {rows}:", names


def _picked(code: Code, v: str, numbers: list[int]) -> str:
    """An expression for the elements of `v` with these numbers."""
    if len(numbers) < 2:
        return f"[{', '.join(f'{v}[{i}]' for i in numbers)}]"
    return f"{code.constant(operator.itemgetter(*numbers))}({v})"
