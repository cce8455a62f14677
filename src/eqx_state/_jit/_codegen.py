"""Functions made of source code, which names the objects that it needs."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class Mismatch(Exception):
    """A tree is not of the structure that code was made for."""


class Code:
    """The source of a function of one argument, line by line.

    - `names`: objects that the code may name.
    - `weak`: objects that the code may name and does not keep alive.
    """

    def __init__(
        self, argument: str, names: Mapping[str, Any], weak: Iterable[Any] = ()
    ):
        self.names = names
        self.weak = {id(x): weakref.ref(x) for x in weak}
        self.argument = argument
        self.lines: list[str] = []
        self.indent = "    "
        self.constants: list[Any] = []
        self.numbers: dict[int, int] = {}  # of each constant, by its `id`
        self.variables = itertools.count()

    def add(self, line: str) -> None:
        self.lines.append(self.indent + line)

    def begin_with(self, line: str) -> None:
        """Add a line at the beginning, unless it is there."""
        if (line := "    " + line) not in self.lines:
            self.lines.insert(0, line)

    @contextlib.contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Inside, lines belong to the block that begins with this line."""
        self.add(header)
        before, self.indent = self.indent, self.indent + "    "
        yield
        self.indent = before

    def check(self, differs: str) -> None:
        """Give up if this expression is true."""
        self.add(f"if {differs}: raise Mismatch")

    def constant(self, x: Any) -> str:
        """An expression for an object."""
        if (weak := self.weak.get(id(x))) is not None:
            return f"{self.constant(weak)}()"
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.constants)
            self.constants.append(x)
        return f"c{self.numbers[id(x)]}"

    def variable(self) -> str:
        """A new name."""
        return f"v{next(self.variables)}"

    def named(self, expression: str) -> str:
        """A name for what is to be evaluated once, and in this order."""
        name = self.variable()
        self.add(f"{name} = {expression}")
        return name

    def of_type(self, v: str, cls: type) -> str:
        """A name for what is to be of this very type."""
        name = v if v.isidentifier() else self.named(v)
        self.check(f"type({name}) is not {self.constant(cls)}")
        return name

    def unpacked(self, v: str, length: int) -> list[str]:
        """Names for the elements of `v`, which is to have so many."""
        self.check(f"len({v}) != {length}")
        names = [self.variable() for _ in range(length)]
        if names:
            self.add(f"{', '.join(names)}, = {v}")
        return names

    def compile(self) -> Callable[[Any], Any]:
        """The function."""
        # Defaults are local variables, which take less time than global ones.
        constants = {f"c{i}": x for i, x in enumerate(self.constants)}
        arguments = ", ".join([self.argument, *(f"{c}={c}" for c in constants)])
        source = "\n".join([f"def function({arguments}):", *self.lines])
        namespace = {"Mismatch": Mismatch, **self.names, **constants}
        exec(compile(source, "<plan>", "exec"), namespace)
        return namespace["function"]
