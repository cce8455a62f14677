"""Straight-line code that takes trees of one structure apart, and puts them together.

Flattening calls Python for every module, and again for every static value to compare.
The code made here is for one structure: it goes down the tree by name, compares types,
lengths and static values as it goes, and gives up (`Mismatch`) wherever anything is not
as it was, so that the general way can take over. Each module has a function of its own,
shared by all that are alike.

`_form_of` says which of six forms a node has; each form knows both directions.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._tree._base import Fields, is_eqx_module, is_module
from .._tree._compare import identical
from ._codegen import Code, Library
from ._static import is_hashable, typed


class Mismatch(Exception):
    """A tree is not of the structure that a plan was made for."""


class Unplannable(Exception):
    """There is no plan for this tree."""


@dataclasses.dataclass(frozen=True)
class ArraySlot:
    """Where an array goes in a tree: the next, or one that is known by its number."""

    number: int | None = None

    @property
    def is_new(self) -> bool:
        return self.number is None


def flattener(tree: Any, origin: Any) -> Callable[[Any, Callable[[Any], Any]], None]:
    """A function of a tree and of `add`, which is called with each array in it.

    It raises `Mismatch` (or `KeyError`) for a tree that differs from this one in more
    than its arrays. Their places may hold anything: the caller looks at the types. The
    function `origin` is not kept alive.
    """
    try:
        code = Code(Library(_NAMES, origin), "v, add")
        _form_of(tree).apart(code, "v")
        return code.compile()
    except _TOO_DEEP:
        raise Unplannable("nested too deep") from None


def builder(tree: Any) -> Callable[[Callable[[], Any], list[Any]], Any]:
    """A function that makes this tree, with arrays in the places of the `ArraySlot`s.

    It takes `next_array`, which is called for one after the other, and a list of those
    that are known by number.
    """
    try:
        code = Code(Library(_NAMES), "next_array, known")
        code.add(f"return {_form_of(tree).together(code)}")
        return code.compile()
    except _TOO_DEEP:
        leaves, treedef = jtu.tree_flatten(tree)

    def array(slot: ArraySlot, next_array: Callable[[], Any], known: list[Any]) -> Any:
        return next_array() if slot.number is None else known[slot.number]

    return lambda *arrays: treedef.unflatten(
        [array(x, *arrays) if isinstance(x, ArraySlot) else x for x in leaves]
    )


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
    "typed": typed,
}

# Raised by Python for code that is nested too deep, or while we make such code.
_TOO_DEEP: Final = (RecursionError, SyntaxError, MemoryError)


# --- The forms ------------------------------------------------------------------------


class _Form(abc.ABC):
    """A node of a tree, as code sees it."""

    def __init__(self, x: Any):
        self.x = x

    @abc.abstractmethod
    def apart(self, code: Code, v: str) -> None:
        """Add the code that takes apart what the expression `v` gives."""

    @abc.abstractmethod
    def together(self, code: Code) -> str:
        """Add the code that makes it, and return an expression for it."""


class _Array(_Form):
    def apart(self, code: Code, v: str) -> None:
        code.add(f"add({v})")

    def together(self, code: Code) -> str:
        return code.named(
            "next_array()" if self.x.is_new else f"known[{self.x.number}]"
        )


class _Static(_Form):
    def apart(self, code: Code, v: str) -> None:
        x = self.x
        differs = f"{v} is not {code.constant(x)}"
        if type(x).__eq__ is not object.__eq__:
            otherwise = f"typed({v}) != {code.constant(code.library.intern(typed(x)))}"
            # A value without a hash, such as a list, may have changed in place.
            differs = f"{differs} and {otherwise}" if is_hashable(x) else otherwise
        code.check(differs)

    def together(self, code: Code) -> str:
        return code.constant(self.x)


class _Sequence(_Form):
    """A tuple, a list, or a named tuple."""

    def apart(self, code: Code, v: str) -> None:
        names = code.unpacked(code.of_type(v, type(self.x)), len(self.x))
        for name, child in zip(names, self.x, strict=True):
            _form_of(child).apart(code, name)

    def together(self, code: Code) -> str:
        listed = ", ".join([_form_of(child).together(code) for child in self.x])
        if type(self.x) is list:
            return f"[{listed}]"
        if type(self.x) is tuple:
            return f"({listed},)" if listed else "()"
        return f"{code.constant(type(self.x))}({listed})"


class _Dict(_Form):
    """A dict with keys of one type, in JAX's order."""

    def apart(self, code: Code, v: str) -> None:
        v = code.of_type(v, dict)
        code.check(f"len({v}) != {len(self.x)}")
        if int in map(type, self.x):  # and not `True`, which is as good a key
            code.check(f"{{*map(type, {v})}} != {code.constant({int})}")
        for key in sorted(self.x):
            _form_of(self.x[key]).apart(code, f"{v}[{key!r}]")

    def together(self, code: Code) -> str:
        items = [
            f"{key!r}: {_form_of(self.x[key]).together(code)}" for key in sorted(self.x)
        ]
        return f"{{{', '.join(items)}}}"


class _Module(_Form):
    """An Equinox module that has just its fields, as it has after unflattening."""

    def fields(self) -> list[tuple[str, _Form]]:
        """Static ones first, as Equinox has them."""
        values, fields = _DICT.__get__(self.x), dataclasses.fields(self.x)
        static = {f.name: f.metadata.get("static", False) for f in fields}
        return [
            (name, _Static(values[name]) if static[name] else _form_of(values[name]))
            for name in sorted(static, key=lambda name: not static[name])
        ]

    def apart(self, code: Code, v: str) -> None:
        fields, inner = self.fields(), code.inner()
        d = inner.named(f"dict_of({inner.of_type('v', type(self.x))})")
        _refuse_owned(inner, d, self.x)
        inner.check(f"len({d}) != {len(fields)}")
        for name, form in fields:
            form.apart(inner, f"{d}[{name!r}]")
        code.add(f"{code.constant(inner.compile())}({v}, add)")

    def together(self, code: Code) -> str:
        inner = code.inner()
        items = [f"{name!r}: {form.together(inner)}" for name, form in self.fields()]
        made = inner.named(f"new({inner.constant(type(self.x))})")
        inner.add(f"set_dict({made}, {{{', '.join(items)}}})")
        inner.add(f"return {made}")
        return code.named(f"{code.constant(inner.compile())}(next_array, known)")


class _Node(_Form):
    """A node that only JAX can take apart."""

    def apart(self, code: Code, v: str) -> None:
        v = code.of_type(v, type(self.x))
        _refuse_owned(code, f"dict_of({v})", self.x)
        below, aux = _one_level(self.x)
        children, data = code.variable(), code.variable()
        code.add(f"{children}, {data} = one_level({v})")
        _take_data(code, data, aux)
        names = code.unpacked(children, len(below))
        for name, child in zip(names, below, strict=True):
            _form_of(child).apart(code, name)

    def together(self, code: Code) -> str:
        below, _ = _one_level(self.x)
        listed = ", ".join([_form_of(child).together(code) for child in below])
        treedef = jtu.tree_structure(self.x, is_leaf=lambda y: y is not self.x)
        return f"{code.constant(treedef.unflatten)}([{listed}])"


def _form_of(x: Any) -> _Form:
    if eqx.is_array(x) or isinstance(x, ArraySlot):
        return _Array(x)
    if type(x) in (tuple, list) or _is_named_tuple(x):
        return _Sequence(x)
    if type(x) is dict and set(map(type, x)) in (set(), {str}, {int}):
        return _Dict(x)
    if is_eqx_module(x):
        # With more in its `__dict__`, a cache say, Equinox flattens it in another way.
        is_plain = {f.name for f in dataclasses.fields(x)} == set(_DICT.__get__(x))
        return _Module(x) if is_plain else _Node(x)
    return _Static(x) if x is None or jtu.all_leaves([x]) else _Node(x)


def _is_named_tuple(x: Any) -> bool:
    """Whether `x` is one as JAX knows it, and not registered as something else."""
    if not (isinstance(x, tuple) and hasattr(type(x), "_fields")):
        return False
    below, aux = _one_level(x)
    return aux is type(x) and identical(list(below), list(x))


def _take_data(code: Code, v: str, aux: Any) -> None:
    """Code that compares the static data of a node."""
    if type(aux) is not tuple:
        _Static(aux).apart(code, v)
        return
    v = code.of_type(v, tuple)  # rarely the same object: JAX makes a new one
    for name, x in zip(code.unpacked(v, len(aux)), aux, strict=True):
        _take_data(code, name, x)


def _refuse_owned(code: Code, d: str, x: Any) -> None:
    """Code that refuses a module which a scope owns, and which is threaded.

    `d`: the code for its `__dict__`.
    """
    if is_module(x):
        code.check(f"type({d}) is Fields and {d}.place is not None")
