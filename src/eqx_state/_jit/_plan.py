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

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.tree_util as jtu

from ._codegen import Code, Mismatch as Mismatch
from ._form_of import ARRAY, ArraySlot, form_of
from ._forms import Apart, NAMES, Slot
from ._rows import Alike, RowSlot


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
