"""Code that takes trees of one structure apart, and that puts them together.

Flattening calls Python for every module, and again for every static value to compare.
The code made here is for one structure: it goes down the tree by name, compares types,
lengths and static values as it goes, and gives up (`Mismatch`) wherever anything is not
as it was, so that the general way can take over.

Nodes that are alike form a *group*. One loop takes a group apart, and puts what it
finds into the lists of the groups below, of which the last is that of the arrays: there
is no call for each module, and a model has as much code as it has different layers. To
put a tree together, the loops run in the opposite order, over slices of those lists.
"""

import abc
import dataclasses
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._tree.base import INFERENCE, is_eqx_module
from .._tree.compare import identical
from .forms import (
    Apart,
    check_static,
    checked_dict,
    Code,
    Dict,
    dict_of,
    Form,
    Items,
    Mismatch as Mismatch,
    Mode,
    NAMES,
    Node,
    one_level,
    refuse_owned,
    Slot,
    Static,
)
from .static import typed


# --- The nodes that have a row of their own: modules, and containers of like things.


class RowSlot(Slot):
    """A node with a row of its own, whose slots are `inner`. It is one in another."""

    @abc.abstractmethod
    def row_apart(self, code: Apart, v: str) -> None:
        """Add the row that takes it apart."""

    @abc.abstractmethod
    def row_together(self, code: Code, row: Iterator[str]) -> str:
        """Add the row that makes it, and return an expression for it."""


class Root(RowSlot):
    """What holds the whole tree."""

    def row_apart(self, code: Apart, v: str) -> None:
        self.all_apart(code, [v])

    def row_together(self, code: Code, row: Iterator[str]) -> str:
        (tree,) = self.all_together(code, row)
        return tree


class Alike(RowSlot):
    """A sequence or a dict of two or more nodes that are alike, each in a slot."""

    def row_apart(self, code: Apart, v: str) -> None:
        if type(self.x) is dict:
            get = operator.itemgetter(*sorted(self.x))
            v = f"{code.constant(get)}({checked_dict(code, v, self.x)})"
        else:
            v = code.of_type(v, type(self.x))
            code.check(f"len({v}) != {len(self.x)}")
        code.add(f"{code.lists[self.below[0].key]} += {v}")

    def row_together(self, code: Code, row: Iterator[str]) -> str:
        cls, v = type(self.x), next(row)  # one expression, for all slots
        if cls is dict:
            return f"dict(zip({code.constant(tuple(sorted(self.x)))}, {v}))"
        return f"{code.constant(cls)}({v if cls in (list, tuple) else f'*{v}'})"


class Module(RowSlot):
    """An Equinox module that has just its fields, as it has after unflattening."""

    def row_apart(self, code: Apart, v: str) -> None:
        d = code.named(f"dict_of({code.of_type(v, type(self.x))})")
        refuse_owned(code, d, self.x)
        code.check(f"len({d}) != {len(self.below)}")
        values = [f"{d}[{name!r}]" for name in module_fields(type(self.x))]
        fields = dict(zip(values, self.below, strict=True))
        check_static(code, {v: x.x for v, x in fields.items() if type(x) is Static})
        for v, x in fields.items():
            if type(x) is not Static:
                x.apart(code, v)

    def row_together(self, code: Code, row: Iterator[str]) -> str:
        cls = type(self.x)
        fields = dict(zip(module_fields(cls), self.below, strict=True))
        # To copy a dict takes less time than to make one of as many items. That of an
        # instance shares its keys with others: it is smaller, and so are its copies.
        like = dict_of(object.__new__(cls))
        like |= {k: x.x if type(x) is Static else None for k, x in fields.items()}
        d = code.named(f"{code.constant(like.copy)}()")
        for name, value in zip(fields, self.all_together(code, row), strict=True):
            if type(fields[name]) is not Static:
                code.add(f"{d}[{name!r}] = {value}")
        module = code.named(f"new({code.constant(cls)})")
        code.add(f"set_dict({module}, {d})")
        return module


def module_fields(cls: type) -> dict[str, bool]:
    """The fields of a module, and which are static: these first, as Equinox does it."""
    static = {f.name: f.metadata.get("static", False) for f in dataclasses.fields(cls)}
    return dict(sorted(static.items(), key=lambda item: not item[1]))


# --- Which form each node of a tree has, and which nodes are alike.


@dataclasses.dataclass(frozen=True)
class ArraySlot:
    """Stands in a tree for the array of this number."""

    number: int


ARRAY: Final = 0  # the key of all arrays


def form_of(tree: Any) -> Root:
    """The form of a tree."""
    finder = _Finder()
    return Root(tree, finder.key(Root), [finder.find(tree)])


class _Finder:
    """Finds the forms of the nodes of a tree."""

    def __init__(self) -> None:
        self.keys: dict[Any, int] = {(Slot,): ARRAY}
        self.numbers = itertools.count()  # of the arrays, in JAX's order

    def key(self, *what: Any) -> int:
        return self.keys.setdefault(what, len(self.keys))

    def find(self, x: Any) -> Form:
        if isinstance(x, ArraySlot):
            return Slot(x.number, ARRAY)
        if eqx.is_array(x):
            return Slot(next(self.numbers), ARRAY)
        if type(x) in (tuple, list) or _is_named_tuple(x):
            return self._made(Items, x, [*map(self.find, x)])
        if type(x) is dict and set(map(type, x)) in (set(), {str}, {int}):
            keys = sorted(x)
            return self._made(Dict, x, [self.find(x[key]) for key in keys], keys)
        if is_eqx_module(x):
            static = module_fields(type(x))
            # With more in its `__dict__`, a cache say, Equinox flattens it otherwise.
            if dict_of(x).keys() == static.keys():
                return self._made(
                    Module, x, [self._field(x, *f) for f in static.items()]
                )
        elif x is None or jtu.all_leaves([x]):
            return self._static(x)
        below, aux = one_level(x)
        return self._made(Node, x, [*map(self.find, below)], [aux])

    def _field(self, module: Any, name: str, is_static: bool) -> Form:
        x = dict_of(module)[name]
        form = self._static(x) if is_static else self.find(x)
        if name == INFERENCE and type(form) is Items and not form.slots:
            return Mode(x, form.key, form.below)
        return form

    def _static(self, x: Any) -> Form:
        return Static(x, self.key(Static, _same_if(x)))

    def _made(
        self, cls: type[Form], x: Any, below: list[Form], data: Sequence[Any] = ()
    ) -> Form:
        keys = tuple(child.key for child in below)
        are_alike = len(below) > 1 and len({*keys}) == 1
        if are_alike and cls in (Items, Dict) and isinstance(below[0], Slot):
            cls = Alike
        return cls(x, self.key(cls, type(x), keys, *map(_same_if, data)), below)


def _same_if(x: Any) -> Any:
    """Hashable; equal for static values that may stand for each other."""
    if type(x) is tuple:
        return tuple(map(_same_if, x))
    return typed(x) if type(x) in _VALUES else (_same_if, id(x))


_VALUES: Final = frozenset({str, int, bool, float, type(None)})


def _is_named_tuple(x: Any) -> bool:
    """Whether `x` is one as JAX knows it, and not registered as something else."""
    if not (isinstance(x, tuple) and hasattr(type(x), "_fields")):
        return False
    below, aux = one_level(x)
    return aux is type(x) and identical(list(below), list(x))


class Unplannable(Exception):
    """There is no plan for this tree."""


def flattener(tree: Any, origins: tuple[Any, ...]) -> Callable[[Any], Sequence[Any]]:
    """A function of a tree, which returns its arrays in JAX's order.

    It raises `Mismatch` (or `KeyError`) for a tree that differs from this one in more
    than its arrays. Their places may hold anything: the caller looks at the types. The
    functions `origins` are not kept alive.
    """
    try:
        return _Groups(tree).apart(origins).compile()
    except _TOO_DEEP:
        raise Unplannable("nested too deep") from None


def builder(tree: Any) -> Callable[[Sequence[Any]], Any]:
    """A function of arrays, which makes this tree, with them for its `ArraySlot`s."""
    try:
        return _Groups(tree).together().compile()
    except _TOO_DEEP:
        leaves, treedef = jtu.tree_flatten(tree)
    return lambda arrays: treedef.unflatten(
        [arrays[x.number] if isinstance(x, ArraySlot) else x for x in leaves]
    )


# Raised by Python for code that is nested too deep, or while we make such code.
_TOO_DEEP: Final = (RecursionError, SyntaxError, MemoryError)


@dataclasses.dataclass
class _List:
    """A list in the code, and what is in it, in this order."""

    name: str
    members: list[Slot] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Group:
    """Nodes that are alike.

    - `form`: one of them.
    - `starts`: for the key of a slot in them, how long the list of that key is before
        they are taken apart.
    """

    form: RowSlot
    list: _List
    starts: dict[int, int] = dataclasses.field(default_factory=dict)


class _Groups:
    """The groups of a tree, each before those that it leads to; and the arrays."""

    def __init__(self, tree: Any):
        root = form_of(tree)
        self.lists = {ARRAY: _List("arrays")}
        self.groups: list[_Group] = []
        self._find(root)
        self.groups.reverse()
        self.lists[root.key].members.append(root)
        for group in self.groups:
            for slot in group.form.inner:
                group.starts[slot.key] = len(self.lists[slot.key].members)
            for member in group.list.members:
                for slot in member.inner:
                    self.lists[slot.key].members.append(slot)
        self.order = [array.x for array in self.lists[ARRAY].members]

    def _find(self, form: RowSlot) -> None:
        new = self.lists[form.key] = _List(f"list{len(self.lists)}")
        for slot in form.inner:
            if isinstance(slot, RowSlot) and slot.key not in self.lists:
                self._find(slot)
        self.groups.append(_Group(form, new))

    def apart(self, origins: tuple[Any, ...]) -> Code:
        """A function that takes the tree apart."""
        names = {key: x.name for key, x in self.lists.items()}
        code = Apart("tree", names, origins)
        for name in names.values():
            code.add(f"{name} = []")
        code.add(f"{self.groups[0].list.name}.append(tree)")
        for group in self.groups:
            with code.block(f"for v in {group.list.name}:"):
                group.form.row_apart(code, "v")
        # Where the arrays are, in JAX's order.
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        code.add(f"return {_picked(code, names[ARRAY], places)}")
        return code

    def together(self) -> Code:
        """A function that puts it together."""
        code = Code("given", NAMES)
        code.add(f"{self.lists[ARRAY].name} = {_picked(code, 'given', self.order)}")
        for group in reversed(self.groups):
            code.add(f"{group.list.name} = []")
            header, row = self._loop(group)
            with code.block(header):
                made = group.form.row_together(code, iter(row))
                code.add(f"{group.list.name}.append({made})")
        code.add(f"return {self.groups[0].list.name}[0]")
        return code

    def _loop(self, group: _Group) -> tuple[str, list[str]]:
        """The head of a loop that makes a group, and what is in the slots in it."""
        form, number = group.form, len(group.list.members)
        sizes, before = Counter(slot.key for slot in form.inner), Counter[int]()
        columns = []
        for slot in form.inner:
            name, size = self.lists[slot.key].name, sizes[slot.key]
            start = group.starts[slot.key]
            end = start + number * size
            if isinstance(form, Alike):
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
