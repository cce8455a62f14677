"""Functions made of source code, which names the objects that it needs."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .static import is_hashable, typed


class Mismatch(Exception):
    """A tree is not of the structure that code was made for."""


# In C, and not by way of `Module.__getattribute__`, which is Python.
_DICT: Final[Any] = next(
    vars(c)["__dict__"] for c in eqx.Module.__mro__ if "__dict__" in vars(c)
)
dict_of: Final[Callable[[Any], dict[str, Any]]] = _DICT.__get__


def one_level(node: Any) -> tuple[tuple[Any, ...], Any]:
    """The children of a node that is not a leaf, and its static data."""
    below, aux = jtu.default_registry.flatten_one_level(node)
    return tuple(below), aux


_NAMES: Final[dict[str, Any]] = {
    "Mismatch": Mismatch,
    "one_level": one_level,
    "dict_of": dict_of,
    "set_dict": _DICT.__set__,
    "new": object.__new__,
}


class Code:
    """The source of a function of one argument, line by line.

    The object `weak` may be named, and is not kept alive.
    """

    def __init__(self, argument: str, weak: Any = None):
        self.argument, self.weak = argument, weak
        self.lines: list[str] = []
        self.indent = "    "
        self.constants: list[Any] = []
        self.numbers: dict[int, int] = {}  # of each constant, by its `id`
        self.variables = itertools.count()

    def add(self, line: str) -> None:
        self.lines.append(self.indent + line)

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

    def check_static(self, expected: Mapping[str, Any]) -> None:
        """Give up unless these expressions give these values.

        Only if one is not the same object, a function is called, to compare by value.
        """
        same, by_value = [], {}
        for v, x in expected.items():
            if type(x).__eq__ is object.__eq__:
                same.append(f"{v} is not {self.constant(x)}")
            else:
                by_value[v] = x
        if same:
            self.check(" or ".join(same))
        if by_value:
            differ = self.constant(_Differ([*by_value.values()]))
            # A list, say, may have been changed in place.
            tests = [
                f"{v} is not {self.constant(x)}" if is_hashable(x) else "True"
                for v, x in by_value.items()
            ]
            with self.block(f"if {' or '.join(tests)}:"):
                self.check(f"{differ}({', '.join(by_value)})")

    def constant(self, x: Any) -> str:
        """An expression for an object."""
        if x is self.weak and x is not None:
            return f"{self.constant(weakref.ref(x))}()"
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.constants)
            self.constants.append(x)
        return f"c{self.numbers[id(x)]}"

    def variable(self) -> str:
        """A new name."""
        return f"v{next(self.variables)}"

    def compile(self) -> Callable[[Any], Any]:
        """The function."""
        # Defaults are local variables, which take less time than global ones.
        constants = {f"c{i}": x for i, x in enumerate(self.constants)}
        arguments = ", ".join([self.argument, *(f"{c}={c}" for c in constants)])
        source = "\n".join([f"def function({arguments}):", *self.lines])
        namespace = {**_NAMES, **constants}
        exec(compile(source, "<plan>", "exec"), namespace)
        return namespace["function"]


class _Differ:
    """Whether static values differ from these.

    It remembers the last objects that did not: to compare a treedef, say, takes long,
    and it may be equal at each call, and never the same.
    """

    def __init__(self, values: list[Any]):
        self.typed = [*map(typed, values)]
        self.can_change = [not is_hashable(x) for x in values]
        self.last = values

    def __call__(self, *values: Any) -> bool:
        last = self.last
        for i, x in enumerate(values):
            is_known = x is last[i] and not self.can_change[i]
            if not is_known and typed(x) != self.typed[i]:
                return True
        self.last = [*values]
        return False
