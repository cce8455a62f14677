"""Plans: straight-line code that takes trees of one structure apart, and rebuilds them.

Flattening calls Python for every module, and again for every static value to compare.
A plan is code made for one structure: it goes down the tree by name, compares types,
lengths and static values as it goes, and gives up (`Mismatch`) wherever anything is not
as it was, so that the general way can take over. Modules that occur as elements of
containers have a function of their own, shared by all that are alike.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._tree._base import Fields, is_eqx_module, is_module
from .._tree._compare import identical
from .._tree._static_values import canonical, is_hashable, typed


class Mismatch(Exception):
    """A tree is not of the structure that a plan was made for."""


class Unplannable(Exception):
    """There is no plan for this tree."""


# In C, and not by way of `Module.__getattribute__`, which is Python.
_DICT: Final[Any] = next(
    vars(c)["__dict__"] for c in eqx.Module.__mro__ if "__dict__" in vars(c)
)


def _one_level(node: Any) -> tuple[tuple[Any, ...], Any]:
    """The children of a node that is not a leaf, and its static data."""
    below, aux = jtu.default_registry.flatten_one_level(node)
    return tuple(below), aux


_NAMES: Final[dict[str, Any]] = {
    "Mismatch": Mismatch,
    "one_level": _one_level,
    "dict_of": _DICT.__get__,
    "set_dict": _DICT.__set__,
    "Fields": Fields,
    "new": object.__new__,
}


@dataclasses.dataclass(frozen=True)
class ArraySlot:
    """Where an array goes in a tree: the next, or one that is known by its number."""

    number: int | None = None

    def take(self, next_array: Callable[[], Any], known: list[Any]) -> Any:
        """The array."""
        return next_array() if self.number is None else known[self.number]


# What Python raises for code that is nested too deep, or while we make such code.
_TOO_DEEP: Final = (RecursionError, SyntaxError, MemoryError)


class _Function:
    """Source code, with the objects that it names."""

    def __init__(self, arguments: str):
        self.lines = [f"def function({arguments}):"]
        self.constants: list[Any] = []
        self.numbers: dict[int, int] = {}  # of each constant, by its `id`
        self.variables = 0

    def add(self, line: str) -> None:
        self.lines.append("    " + line)

    def constant(self, x: Any) -> str:
        """The name of an object."""
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.constants)
            self.constants.append(x)
        return f"c{self.numbers[id(x)]}"

    def variable(self) -> str:
        """A new name."""
        self.variables += 1
        return f"v{self.variables}"

    def compile(self, known: dict[Any, Any]) -> Callable[..., Any]:
        """The function; the one that is known already, if it is the same."""
        source = "\n".join(self.lines)
        key = source, tuple(map(id, self.constants))
        if key not in known:
            constants = {f"c{i}": x for i, x in enumerate(self.constants)}
            namespace = {**_NAMES, **constants}
            exec(compile(source, "<plan>", "exec"), namespace)
            known[key] = namespace["function"]
        return known[key]


def _is_plain(module: eqx.Module) -> bool:
    """Whether a module has just its fields, as it has after unflattening.

    If there is more, in a cache say, Equinox flattens it in another way.
    """
    return {f.name for f in dataclasses.fields(module)} == set(_DICT.__get__(module))


def _is_static(f: dataclasses.Field[Any]) -> bool:
    return f.metadata.get("static", False)


def _is_named_tuple(x: Any) -> bool:
    """Whether `x` is one as JAX knows it, and not registered as something else."""
    if not (isinstance(x, tuple) and hasattr(type(x), "_fields")):
        return False
    below, aux = _one_level(x)
    return aux is type(x) and identical(list(below), list(x))


def _key_type(x: Any) -> type | None:
    """What all keys of a dict are; `None` if it has to be left to JAX."""
    if type(x) is not dict:
        return None
    types = set(map(type, x)) or {str}
    return types.pop() if types in ({str}, {int}) else None


# --- Taking apart ---------------------------------------------------------------------


def flattener(tree: Any, origin: Any) -> Callable[[Any, Callable[[Any], Any]], None]:
    """A function of a tree and of `add`, which is called with each array in it.

    It raises `Mismatch` (or `KeyError`) for a tree that differs from this one in more
    than its arrays. Their places may hold anything: the caller looks at the types. The
    function `origin` is not kept alive.
    """
    try:
        return _Flattener(origin).function(tree)
    except _TOO_DEEP:
        raise Unplannable("nested too deep") from None


class _Flattener:
    def __init__(self, origin: Any):
        self.origin = weakref.ref(origin)
        self.known: dict[Any, Any] = {}
        self.same: dict[Any, _Same] = {}

    def function(self, tree: Any) -> Callable[..., None]:
        code = _Function("v, add")
        self.emit(code, "v", tree)
        return code.compile(self.known)

    def emit(self, code: _Function, v: str, x: Any) -> None:
        """Code that takes apart what the expression `v` gives, as `x` is."""
        if eqx.is_array(x):
            code.add(f"add({v})")
        elif x is None:
            self.check(code, f"{v} is not None")
        elif type(x) in (tuple, list) or _is_named_tuple(x):
            v = self.of_type(code, v, type(x))
            for name, child in self.unpacked(code, v, x):
                self.emit_element(code, name, child)
        elif key_type := _key_type(x):
            v = self.of_type(code, v, dict)
            self.check(code, f"len({v}) != {len(x)}")
            if key_type is int:  # and not `True`, which is as good a key
                types = code.constant({int})
                self.check(code, f"{{*map(type, {v})}} != {types}")
            for key in sorted(x):
                self.emit_element(code, f"{v}[{key!r}]", x[key])
        elif is_eqx_module(x) and _is_plain(x):
            self.emit_module(code, v, x)
        elif jtu.all_leaves([x]):
            self.emit_static(code, v, x)
        else:
            self.emit_node(code, v, x)

    def emit_element(self, code: _Function, v: str, x: Any) -> None:
        if is_eqx_module(x) and _is_plain(x):
            code.add(f"{code.constant(self.function(x))}({v}, add)")
        else:
            self.emit(code, v, x)

    def emit_node(self, code: _Function, v: str, x: Any) -> None:
        """Code for a node that only JAX can take apart."""
        v = self.of_type(code, v, type(x))
        self.check_free(code, f"dict_of({v})", x)
        below, aux = _one_level(x)
        children, data = code.variable(), code.variable()
        code.add(f"{children}, {data} = one_level({v})")
        self.emit_data(code, data, aux)
        for name, child in self.unpacked(code, children, below):
            self.emit_element(code, name, child)

    def emit_data(self, code: _Function, v: str, aux: Any) -> None:
        if type(aux) is not tuple:
            self.emit_static(code, v, aux)
            return
        v = self.of_type(code, v, tuple)  # mostly made anew, and never the same object
        for name, x in self.unpacked(code, v, aux):
            self.emit_data(code, name, x)

    def unpacked(
        self, code: _Function, v: str, x: Sequence[Any]
    ) -> list[tuple[str, Any]]:
        """Adds names for the elements of `v`, which is to be as long as `x`."""
        self.check(code, f"len({v}) != {len(x)}")
        names = [code.variable() for _ in x]
        if names:
            code.add(f"{', '.join(names)}, = {v}")
        return list(zip(names, x, strict=True))

    def check_free(self, code: _Function, d: str, x: Any) -> None:
        """Code that refuses a module which a scope owns, and which is threaded.

        `d`: the code for its `__dict__`.
        """
        if is_module(x):
            self.check(code, f"type({d}) is Fields and {d}.place is not None")

    def emit_module(self, code: _Function, v: str, x: eqx.Module) -> None:
        v = self.of_type(code, v, type(x))
        values, d = _DICT.__get__(x), code.variable()
        code.add(f"{d} = dict_of({v})")
        self.check_free(code, d, x)
        self.check(code, f"len({d}) != {len(values)}")
        fields = dataclasses.fields(x)
        for f in fields:
            if _is_static(f):
                self.emit_static(code, f"{d}[{f.name!r}]", values[f.name])
        for f in fields:
            if not _is_static(f):
                self.emit(code, f"{d}[{f.name!r}]", values[f.name])

    def emit_static(self, code: _Function, v: str, x: Any) -> None:
        if x is self.origin():
            self.check(code, f"{v} is not {code.constant(self.origin)}()")
            return
        same = code.constant(self.same.setdefault(typed(x), _Same(x)))
        if not is_hashable(x):  # a list, say, which may have changed in place
            code.add(f"{same}({v})")
            return
        differs = f"{v} is not {code.constant(x)}"
        if (ours := canonical(x)) is not x:  # the caller's own, or what we have made
            differs += f" and {v} is not {code.constant(ours)}"
        code.add(f"if {differs}: {same}({v})")

    def of_type(self, code: _Function, v: str, cls: type) -> str:
        name = code.variable()
        code.add(f"{name} = {v}")
        self.check(code, f"type({name}) is not {code.constant(cls)}")
        return name

    def check(self, code: _Function, differs: str) -> None:
        code.add(f"if {differs}: raise Mismatch")


class _Same:
    """Compares a static value that is not the same object."""

    def __init__(self, x: Any):
        self.typed = typed(x)

    def __call__(self, x: Any) -> None:
        if typed(x) != self.typed:
            raise Mismatch


# --- Putting together -----------------------------------------------------------------


def builder(tree: Any) -> Callable[[Callable[[], Any], list[Any]], Any]:
    """A function that makes this tree, with arrays in the places of the `ArraySlot`s.

    It takes `next_array`, which is called for one after the other, and a list of those
    that are known by number.
    """
    code = _Function(_ARGUMENTS)
    try:
        code.add(f"return {_Builder().expression(code, tree)}")
        return code.compile({})
    except _TOO_DEEP:
        return _general_builder(tree)


def _general_builder(tree: Any) -> Callable[[Callable[[], Any], list[Any]], Any]:
    leaves, treedef = jtu.tree_flatten(tree)

    def build(next_array: Callable[[], Any], known: list[Any]) -> Any:
        return treedef.unflatten(
            [
                x.take(next_array, known) if isinstance(x, ArraySlot) else x
                for x in leaves
            ]
        )

    return build


_ARGUMENTS: Final = "next_array, known"


class _Builder:
    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def function(self, x: eqx.Module) -> Callable[..., Any]:
        code = _Function(_ARGUMENTS)
        code.add(f"return {self.module(code, x)}")
        return code.compile(self.known)

    def expression(self, code: _Function, x: Any) -> str:
        if isinstance(x, ArraySlot):
            if x.number is not None:
                return f"known[{x.number}]"
            return self.named(code, "next_array()")
        if x is None:
            return "None"
        if type(x) in (tuple, list) or _is_named_tuple(x):
            elements = [self.element(code, child) for child in x]
            if type(x) is list:
                return f"[{', '.join(elements)}]"
            listed = "".join(f"{element}, " for element in elements)
            return f"({listed})" if type(x) is tuple else self.call(code, x, elements)
        if _key_type(x):
            items = (f"{key!r}: {self.element(code, x[key])}" for key in sorted(x))
            return f"{{{', '.join(items)}}}"
        if is_eqx_module(x) and _is_plain(x):
            return self.module(code, x)
        if jtu.all_leaves([x]):
            return code.constant(canonical(x))
        return self.general(code, x)

    def call(self, code: _Function, x: Any, arguments: list[str]) -> str:
        return f"{code.constant(type(x))}({', '.join(arguments)})"

    def element(self, code: _Function, x: Any) -> str:
        if is_eqx_module(x) and _is_plain(x):
            made = f"{code.constant(self.function(x))}({_ARGUMENTS})"
            return self.named(code, made)
        return self.expression(code, x)

    def named(self, code: _Function, expression: str) -> str:
        """A name for what may be evaluated only once, and in this order."""
        name = code.variable()
        code.add(f"{name} = {expression}")
        return name

    def module(self, code: _Function, x: eqx.Module) -> str:
        """Adds the code that makes a module, and returns its name."""
        values, o = _DICT.__get__(x), code.variable()
        fields = sorted(dataclasses.fields(x), key=_is_static)  # as Equinox has them
        items = [f"{f.name!r}: {self.field(code, f, values[f.name])}" for f in fields]
        code.add(f"{o} = new({code.constant(type(x))})")
        code.add(f"set_dict({o}, {{{', '.join(items)}}})")
        return o

    def field(self, code: _Function, f: dataclasses.Field[Any], x: Any) -> str:
        if _is_static(f):
            return code.constant(canonical(x))
        return self.expression(code, x)

    def general(self, code: _Function, x: Any) -> str:
        """What only JAX can make."""
        leaves, treedef = jtu.tree_flatten(x)
        values = [self.expression(code, leaf) for leaf in leaves]
        return f"{code.constant(treedef.unflatten)}([{', '.join(values)}])"
