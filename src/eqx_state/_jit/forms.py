"""The nodes of a tree, as generated code sees them.

There are a few forms of nodes, and each knows both directions: the code that takes such
a node apart, and the code that makes it. Some nodes have a *row* of their own (see
`_rows.py`). In the row of another they are a *slot*, and so are arrays. All else is a
part of the row that it is in: static values are constants there, and other containers
are taken apart on the spot.

Nodes that are alike all the way down, but for their arrays, have the same `key`. One
row in a loop serves all of them (see `_plan.py`).
"""

import abc
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._tree.base import Fields, is_module
from .static import is_hashable, typed


# --- Functions made of source code, which names the objects that it needs.


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


# In C, and not by way of `Module.__getattribute__`, which is Python.
_DICT: Final[Any] = next(
    vars(c)["__dict__"] for c in eqx.Module.__mro__ if "__dict__" in vars(c)
)
dict_of: Final[Callable[[Any], dict[str, Any]]] = _DICT.__get__


def one_level(node: Any) -> tuple[tuple[Any, ...], Any]:
    """The children of a node that is not a leaf, and its static data."""
    below, aux = jtu.default_registry.flatten_one_level(node)
    return tuple(below), aux


NAMES: Final[dict[str, Any]] = {
    "one_level": one_level,
    "dict_of": dict_of,
    "set_dict": _DICT.__set__,
    "Fields": Fields,
    "new": object.__new__,
}


class Apart(Code):
    """Code that takes a tree apart, and puts what is in slots into lists by key."""

    def __init__(self, argument: str, lists: Mapping[int, str], weak: Iterable[Any]):
        super().__init__(argument, NAMES, weak)
        self.lists = lists


class Form(abc.ABC):
    """A node of a tree.

    - `x`: the node, and `below`, what is in it.
    - `slots`: what it has in the row that it is in.
    """

    def __init__(self, x: Any, key: int, below: Sequence["Form"] = ()):
        self.x, self.key, self.below = x, key, below
        self.inner = [slot for child in below for slot in child.slots]

    @property
    def slots(self) -> "list[Slot]":
        return self.inner

    @abc.abstractmethod
    def apart(self, code: Apart, v: str) -> None:
        """Continue the row that takes apart what the expression `v` gives."""

    @abc.abstractmethod
    def together(self, code: Code, row: Iterator[str]) -> str:
        """Continue the row that makes it, and return an expression for it.

        `row`: expressions for what goes into the slots, one after the other.
        """

    def all_apart(self, code: Apart, values: Sequence[str]) -> None:
        for v, child in zip(values, self.below, strict=True):
            child.apart(code, v)

    def all_together(self, code: Code, row: Iterator[str]) -> list[str]:
        return [child.together(code, row) for child in self.below]


class Slot(Form):
    """An array, whose `x` is its number."""

    @property
    def slots(self) -> "list[Slot]":
        return [self]

    def apart(self, code: Apart, v: str) -> None:
        code.add(f"{code.lists[self.key]}.append({v})")

    def together(self, code: Code, row: Iterator[str]) -> str:
        return next(row)


class Static(Form):
    """A value that is not an array: compared, and a constant where it is made."""

    def apart(self, code: Apart, v: str) -> None:
        check_static(code, {v: self.x})

    def together(self, code: Code, row: Iterator[str]) -> str:
        return code.constant(self.x)


def check_static(code: Code, expected: Mapping[str, Any]) -> None:
    """Code that compares what these expressions give with static values.

    Only if one is not the same object, a function is called, to compare by value.
    """
    only_same, same, equal = [], [], []
    for v, x in expected.items():
        is_other = f"{v} is not {code.constant(x)}"
        if type(x).__eq__ is object.__eq__:
            only_same.append(is_other)
        else:
            # A value without a hash, such as a list, may have changed in place.
            same.append(is_other if is_hashable(x) else "True")
            equal.append((v, x))
    if only_same:
        code.check(" or ".join(only_same))
    if same:
        compare = code.constant(_Static([x for _, x in equal]))
        with code.block(f"if {' or '.join(same)}:"):
            code.check(f"{compare}({', '.join(v for v, _ in equal)})")


class _Static:
    """Whether static values are others than these.

    The last objects that were not are known: to compare a treedef, say, takes long, and
    it may be equal at each call, and never the same.
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


class Items(Form):
    """A tuple, a list, or a named tuple."""

    def apart(self, code: Apart, v: str) -> None:
        v = code.of_type(v, type(self.x))
        self.all_apart(code, code.unpacked(v, len(self.x)))

    def together(self, code: Code, row: Iterator[str]) -> str:
        listed = ", ".join(self.all_together(code, row))
        if type(self.x) is list:
            return f"[{listed}]"
        if type(self.x) is tuple:
            return f"({listed},)" if listed else "()"
        return f"{code.constant(type(self.x))}({listed})"


class Mode(Items):
    """The node of an `es.Module` that `eqx.nn.inference_mode` replaces.

    Nobody writes into it, so that one list will do for all modules of a tree.
    """

    def apart(self, code: Apart, v: str) -> None:
        seen, v = f"mode{self.key}", code.named(v)
        code.begin_with(f"{seen} = None")
        with code.block(f"if {v} is not {seen}:"):
            super().apart(code, v)
            code.add(f"{seen} = {v}")

    def together(self, code: Code, row: Iterator[str]) -> str:
        name = f"mode{self.key}"
        code.begin_with(f"{name} = {super().together(code, row)}")
        return name


class Dict(Form):
    """A dict with keys of one type, in JAX's order."""

    def apart(self, code: Apart, v: str) -> None:
        v = checked_dict(code, v, self.x)
        self.all_apart(code, [f"{v}[{key!r}]" for key in sorted(self.x)])

    def together(self, code: Code, row: Iterator[str]) -> str:
        pairs = zip(sorted(self.x), self.all_together(code, row), strict=True)
        return f"{{{', '.join(f'{key!r}: {value}' for key, value in pairs)}}}"


def checked_dict(code: Code, v: str, x: dict[Any, Any]) -> str:
    """Code that gives up unless `v` is a dict as long as `x`; a name for it."""
    v = code.of_type(v, dict)
    code.check(f"len({v}) != {len(x)}")
    if int in map(type, x):  # and not `True`, which is as good a key
        code.check(f"{{*map(type, {v})}} != {code.constant({int})}")
    return v


class Node(Form):
    """A node that only JAX can take apart."""

    def apart(self, code: Apart, v: str) -> None:
        v = code.of_type(v, type(self.x))
        refuse_owned(code, f"dict_of({v})", self.x)
        _, aux = one_level(self.x)
        children, data = code.variable(), code.variable()
        code.add(f"{children}, {data} = one_level({v})")
        _check_data(code, data, aux)
        self.all_apart(code, code.unpacked(children, len(self.below)))

    def together(self, code: Code, row: Iterator[str]) -> str:
        listed = ", ".join(self.all_together(code, row))
        treedef = jtu.tree_structure(self.x, is_leaf=lambda y: y is not self.x)
        return f"{code.constant(treedef.unflatten)}([{listed}])"


def _check_data(code: Code, v: str, aux: Any) -> None:
    """Code that compares the static data of a node."""
    if type(aux) is not tuple:
        check_static(code, {v: aux})
        return
    v = code.of_type(v, tuple)  # rarely the same object: JAX makes a new one
    for name, x in zip(code.unpacked(v, len(aux)), aux, strict=True):
        _check_data(code, name, x)


def refuse_owned(code: Code, d: str, x: Any) -> None:
    """Code that refuses a module which a scope owns, and which is threaded.

    `d`: the code for its `__dict__`.
    """
    if is_module(x):
        code.check(f"type({d}) is Fields and {d}.place is not None")
