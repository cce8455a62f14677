"""The nodes that have a row of their own: modules, and containers of like things."""

import abc
import dataclasses
import operator
from collections.abc import Iterator

from ._codegen import Code
from ._forms import (
    Apart,
    check_static,
    checked_dict,
    dict_of,
    refuse_owned,
    Slot,
    Static,
)


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
