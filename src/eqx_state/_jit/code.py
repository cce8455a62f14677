"""Functions compiled from generated source code, with objects as constants."""

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax.tree_util as jtu

from .._tree.unbuilt import build, dict_of, set_dict, Unbuilt
from .static import can_change, is_fixed, typed


class Mismatch(Exception):
    """A tree does not have the structure for which the code was generated."""


def one_level(node: Any) -> tuple[tuple[Any, ...], Any]:
    """The children of a node that is not a leaf, and its static data."""
    below, aux = jtu.default_registry.flatten_one_level(node)
    return tuple(below), aux


_NAMES: Final[dict[str, Any]] = {
    "Mismatch": Mismatch,
    "one_level": one_level,
    "dict_of": dict_of,
    "set_dict": set_dict,
    "Unbuilt": Unbuilt,
    "build": build,
    "new": object.__new__,
    "copy": copy.copy,
}


class Code:
    """The source of a function of one argument, line by line.

    The code may refer to the object `weak`, but does not keep it alive.
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
        """Inside this context, add lines to the block with this header."""
        self.add(header)
        before, self.indent = self.indent, self.indent + "    "
        yield
        self.indent = before

    def check(self, differs: str) -> None:
        """Raise `Mismatch` if this expression is true."""
        self.add(f"if {differs}: raise Mismatch")

    def check_static(self, expected: Mapping[str, Any]) -> None:
        """Raise `Mismatch` unless these expressions have these values.

        The code compares by identity first, and by value only if that fails.
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
            # Always compare a list by value, since it may have changed in place.
            tests = [
                f"{v} is not {self.constant(x)}" if is_fixed(x) else "True"
                for v, x in by_value.items()
            ]
            with self.block(f"if {' or '.join(tests)}:"):
                self.check(f"{differ}({', '.join(by_value)})")

    def own(self, x: Any) -> str:
        """An expression for a static value of a new tree.

        A list is copied, so that a change in place does not reach later results.
        """
        constant = self.constant(x)
        return f"copy({constant})" if can_change(x) else constant

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
        """The compiled function."""
        # Defaults are local variables, which are faster than globals.
        constants = {f"c{i}": x for i, x in enumerate(self.constants)}
        arguments = ", ".join([self.argument, *(f"{c}={c}" for c in constants)])
        source = "\n".join([f"def function({arguments}):", *self.lines])
        namespace = {**_NAMES, **constants}
        exec(compile(source, "<plan>", "exec"), namespace)
        return namespace["function"]


class _Differ:
    """Whether static values differ from these.

    It stores the last objects that were equal, and first compares by identity with
    these, because comparing treedefs by value is slow.
    """

    def __init__(self, values: list[Any]):
        self.typed = [*map(typed, values)]
        self.can_change = [not is_fixed(x) for x in values]
        self.last = values

    def __call__(self, *values: Any) -> bool:
        last = self.last
        for i, x in enumerate(values):
            is_known = x is last[i] and not self.can_change[i]
            if not is_known and typed(x) != self.typed[i]:
                return True
        self.last = [*values]
        return False
