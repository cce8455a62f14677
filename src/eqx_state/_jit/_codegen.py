"""Functions made of source code, which names the objects that it needs."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any


class Library:
    """Shared by the functions that are made together.

    - `names`: the objects that all of them may name.
    - `weak`: an object that the code may name and does not keep alive.
    """

    def __init__(self, names: Mapping[str, Any], weak: Any = None):
        self.names = names
        self.weak = None if weak is None else weakref.ref(weak)
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.interned: dict[Any, Any] = {}

    def intern(self, key: Any) -> Any:
        """One object for all keys that are equal: code that names it is equal, too."""
        return self.interned.setdefault(key, key)


class Code:
    """The source of a function, line by line."""

    def __init__(self, library: Library, arguments: str):
        self.library, self.arguments = library, arguments
        self.lines = [f"def function({arguments}):"]
        self.constants: list[Any] = []
        self.numbers: dict[int, int] = {}  # of each constant, by its `id`
        self.variables = 0

    def inner(self) -> "Code":
        """Another function of the same arguments."""
        return Code(self.library, self.arguments)

    def add(self, line: str) -> None:
        self.lines.append("    " + line)

    def check(self, differs: str) -> None:
        """Give up if this expression is true."""
        self.add(f"if {differs}: raise Mismatch")

    def constant(self, x: Any) -> str:
        """An expression for an object."""
        weak = self.library.weak
        if weak is not None and x is weak():
            return f"{self.constant(weak)}()"
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.constants)
            self.constants.append(x)
        return f"c{self.numbers[id(x)]}"

    def variable(self) -> str:
        """A new name."""
        self.variables += 1
        return f"v{self.variables}"

    def named(self, expression: str) -> str:
        """A name for what is to be evaluated once, and in this order."""
        name = self.variable()
        self.add(f"{name} = {expression}")
        return name

    def of_type(self, v: str, cls: type) -> str:
        """A name for what is to be of this very type."""
        name = self.named(v)
        self.check(f"type({name}) is not {self.constant(cls)}")
        return name

    def unpacked(self, v: str, length: int) -> list[str]:
        """Names for the elements of `v`, which is to have so many."""
        self.check(f"len({v}) != {length}")
        names = [self.variable() for _ in range(length)]
        if names:
            self.add(f"{', '.join(names)}, = {v}")
        return names

    def compile(self) -> Callable[..., Any]:
        """The function; the one that was made before, if it is the same."""
        source = "\n".join(self.lines)
        known, key = self.library.functions, (source, *map(id, self.constants))
        if key not in known:
            constants = {f"c{i}": x for i, x in enumerate(self.constants)}
            namespace = {**self.library.names, **constants}
            exec(compile(source, "<plan>", "exec"), namespace)
            known[key] = namespace["function"]
        return known[key]
