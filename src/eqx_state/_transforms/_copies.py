"""Copies of functions that hold other modules: for `es.jit` and `es.vmap`.

A module that no scope owns belongs to the caller, and cannot be swapped in place:
another thread may be using it. So where a transform has to give such a module other
values, it runs a copy of the function instead. Only the function that is transformed,
and what it closes over, is ever copied; a function that is an argument or a field stays
the object that it is.
"""

import copy
import dataclasses
import functools as ft
import types
from collections.abc import Iterable
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._errors import TraceError
from .._state._scope import is_owned
from .._tree._compare import identical
from .._tree._static_values import structure, typed
from .._tree._walk import is_leaf
from ._closures import _ATOMS, _DICTS, _names, _PARTIALS, held, is_model, models_in
from ._transform import Transform


@jtu.register_pytree_with_keys_class
class _Values:
    """Values by name, as a pytree. Two may have one name."""

    def __init__(self, names: tuple[str, ...], values: list[Any]):
        self.names, self.values = names, values

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        named = zip(self.names, self.values, strict=True)
        return [(jtu.GetAttrKey(name), value) for name, value in named], self.names

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.values, self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> "_Values":
        return cls(names, list(values))


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    """Something on the way from a function to the modules that it holds."""

    x: Any
    below: list[Any]
    # The node above that was met first, and which of what it holds this is.
    above: "tuple[_Node, int] | None"
    # Among the nodes that are copied; `None`: it stays as it is.
    number: int | None = None
    # For each of `below` its number among the values, if it is one of them.
    values: list[int | None] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        if self.above is None:
            return ""
        node, i = self.above
        return node.name + _names(node.x)[i]


class Opened:
    """A function, and what a copy of it may hold in place of its modules.

    - `tree`: those modules, and what lies in one container with them, as a pytree. It
        is the function itself if JAX sees all of them (`is_copied` is false).
    - `shape`: hashable; equal for functions whose copies differ in `tree` alone.
    """

    def __init__(self, f: Any, origin: Any = None):
        """`shape` may be kept for longer than the function `origin`, and lacks it."""
        self.f = f
        self.nodes: dict[int, _Node] = {}
        self._walk(f)
        self.copied = self._on_the_way()
        self.is_copied = any(map(_hides, self.copied))
        self.tree: Any = f
        self.shape: Any = None
        if self.is_copied:
            self._number()
            self.shape = tuple(
                (_token(node.x, origin), tuple(node.values), self._numbers_below(node))
                for node in self.copied
            )

    def _walk(self, f: Any) -> None:
        todo: list[tuple[Any, tuple[_Node, int] | None]] = [(f, None)]
        while todo:  # no recursion: what a function holds may be a long chain
            x, above = todo.pop()
            if id(x) in self.nodes or (below := held(x)) is None:
                continue
            node = self.nodes[id(x)] = _Node(x, below, above)
            todo += [
                (below[i], (node, i))
                for i in reversed(range(len(below)))
                if type(below[i]) not in _ATOMS
            ]

    def _on_the_way(self) -> list[_Node]:
        """The nodes that lead to a module, and the containers inside these."""
        above: dict[int, list[_Node]] = {}
        todo = []
        for node in self.nodes.values():
            below = [x for x in node.below if type(x) not in _ATOMS]
            for child in below:
                if id(child) in self.nodes:
                    above.setdefault(id(child), []).append(node)
            # Equinox's partial is a module, whatever it holds.
            if type(node.x) is eqx.Partial or any(map(_is_free, below)):
                todo.append(node)
        found: set[int] = set()
        while todo:
            node = todo.pop()
            if id(node.x) in found:
                continue
            found.add(id(node.x))
            todo += above.get(id(node.x), [])
            if type(node.x) is not types.FunctionType:
                # A setting that lies beside a module may change together with it.
                inside = [self.nodes.get(id(child)) for child in node.below]
                todo += [child for child in inside if child and _is_container(child.x)]
        return [node for key, node in self.nodes.items() if key in found]

    def _number(self) -> None:
        """Give each node its number, and collect the values."""
        values: list[Any] = []
        names: list[str] = []
        known: dict[int, int] = {}
        for number, node in enumerate(self.copied):
            node.number = number
        for node in self.copied:
            name, keys = node.name, _names(node.x)
            for key, x in zip(keys, node.below, strict=True):
                index = None
                if _is_free(x):  # once, so that in a copy it is one module, too
                    index = known.setdefault(id(x), len(values))
                elif type(node.x) is not types.FunctionType and self._node(x) is None:
                    index = len(values)
                if index == len(values):
                    values.append(x)
                    names.append((name + key).removeprefix("."))
                node.values.append(index)
        self.tree = _Values(tuple(names), values)

    @property
    def values(self) -> list[Any]:
        """What the function holds, each on its own; a part may be held beside it."""
        return self.tree.values if self.is_copied else [self.tree]

    def _node(self, x: Any) -> _Node | None:
        """The node of what is copied."""
        node = self.nodes.get(id(x))
        return None if node is None or node.number is None else node

    def _numbers_below(self, node: _Node) -> tuple[int | None, ...]:
        below = map(self._node, node.below)
        return tuple(None if child is None else child.number for child in below)

    def copy(self, tree: Any) -> "Copy":
        """The function, which holds what `tree` has."""
        return Copy(self, tree)


def _is_free(x: Any) -> bool:
    return is_model(x) and not is_owned(x)


def _is_container(x: Any) -> bool:
    return not callable(x) and type(x) is not types.CellType


def _hides(node: _Node) -> bool:
    """Whether JAX does not see what lies below."""
    return isinstance(node.x, (types.FunctionType, types.MethodType, ft.partial))


def _token(x: Any, origin: Any) -> Any:
    """What a node and its copy have in common, hashable."""
    cls = type(x)
    if cls is types.FunctionType:
        return "origin" if x is origin else x
    if cls in _DICTS:
        return cls, getattr(x, "default_factory", None), tuple(map(typed, x))
    if is_leaf(x) or cls in _PARTIALS:
        return cls
    return structure(jtu.tree_structure(x, is_leaf=lambda y: y is not x))


class Copy:
    """A copy of a function, `f`, for a transform to run.

    Functions that share a cell or a container share the copy of it.
    """

    def __init__(self, opened: Opened, tree: Any):
        self.nodes = opened.copied if opened.is_copied else []
        self.known = opened.nodes
        self.values: list[Any] = tree.values if opened.is_copied else []
        self.made: dict[int, Any] = {}
        self.f = self._of(opened.f) if opened.is_copied else tree
        for node in self.nodes:  # they may lead back to one another
            self._fill(node)
        self.originals = self._originals()
        self.given = [
            (node, new, _contents(new), models_in(new))
            for node in self.nodes
            if _is_mutable(new := self.made[id(node.x)])
        ]

    def _of(self, x: Any) -> Any:
        """The copy of a node, which may still be empty; anything else as it is."""
        node = self.known.get(id(x))
        if node is None or node.number is None:
            return x
        if id(x) not in self.made:
            self.made[id(x)] = self._make(node)
        return self.made[id(x)]

    def _below(self, node: _Node) -> list[Any]:
        return [
            self._of(x) if index is None else self.values[index]
            for index, x in zip(node.values, node.below, strict=True)
        ]

    def _make(self, node: _Node) -> Any:
        x, cls = node.x, type(node.x)
        if cls is types.CellType:
            return types.CellType()
        if cls is list:
            return []
        if cls in _DICTS:
            return copy.copy(x)
        if cls is types.FunctionType:
            closure = tuple(map(self._of, x.__closure__ or ()))
            new = types.FunctionType(
                x.__code__, x.__globals__, x.__name__, x.__defaults__, closure
            )
            new.__kwdefaults__ = x.__kwdefaults__
            new.__dict__ = x.__dict__  # a counter there is the caller's, too
            for name in ft.WRAPPER_ASSIGNMENTS:
                setattr(new, name, getattr(x, name))
            return new
        below = self._below(node)
        if cls is types.MethodType:
            return types.MethodType(*below)
        if cls in _PARTIALS:
            f, args, keywords = below
            new = cls(f, *args, **keywords)
            if cls is not eqx.Partial:
                new.__dict__.update(x.__dict__)
            return new
        if isinstance(x, Transform):
            return x.of(*below)
        one_level = jtu.tree_structure(x, is_leaf=lambda y: y is not x)
        return jtu.tree_unflatten(one_level, below)

    def _fill(self, node: _Node) -> None:
        new = self._of(node.x)
        if _is_mutable(new):
            _put(new, self._below(node), _keys(new))
        elif type(new) is types.FunctionType:
            below = iter(self._below(node)[len(new.__closure__ or ()) :])
            if new.__defaults__:
                new.__defaults__ = tuple(next(below) for _ in new.__defaults__)
            if new.__kwdefaults__:
                new.__kwdefaults__ = {name: next(below) for name in new.__kwdefaults__}

    def _originals(self) -> dict[int, Any]:
        found = {id(self.made[id(node.x)]): node.x for node in self.nodes}
        for node in self.nodes:
            for index, x in zip(node.values, node.below, strict=True):
                if index is not None:
                    found[id(self.values[index])] = x
        return found

    def _original(self, x: Any) -> Any:
        """For a part of the copy, what the caller has in its place."""
        if type(x) is types.MethodType:  # made anew whenever it is looked up
            return types.MethodType(*map(self._original, (x.__func__, x.__self__)))
        return self.originals.get(id(x), x)

    def finish(self, out: Any) -> Any:
        """The output of the call, with the caller's functions in place of copies.

        The call may have put something into what it holds: that goes to the caller's,
        too, as if there were no copy. Raises `TraceError` if it is a module, which
        would come out only when the function is traced; and if other code, which has
        the caller's, has changed something there meanwhile.
        """
        for node, new, before, models in self.given:
            name = node.name.removeprefix(".")
            if not identical(held(node.x) or [], node.below):
                raise TraceError(_CHANGED_OUTSIDE.format(name))
            if not identical(models_in(new), models):
                raise TraceError(_CHANGED.format(name))
            if not identical(_contents(new), before):
                _put(node.x, list(map(self._original, held(new) or ())), _keys(new))
        return jtu.tree_map(lambda x: self._original(x) if callable(x) else x, out)


def _is_mutable(x: Any) -> bool:
    return type(x) in (types.CellType, list, *_DICTS)


def _keys(x: Any) -> list[Any]:
    return list(x) if isinstance(x, dict) else []


def _contents(x: Any) -> list[Any]:
    return [*_keys(x), *(held(x) or ())]


def _put(x: Any, values: list[Any], keys: Iterable[Any] = ()) -> None:
    """Fill a cell, a list, or a dict with these keys."""
    if type(x) is types.CellType:
        (x.cell_contents,) = values
    elif type(x) is list:
        x[:] = values
    else:
        items = list(zip(keys, values, strict=True))
        x.clear()
        x.update(items)


_CHANGED: Final = """`{0}` was changed by a function under `es.jit` or `es.vmap` that \
has it from outside. What a transform changes there is lost: it runs a copy of the \
function, and runs it once. Take it as an argument, and return the new one:

    @es.jit
    def step({0}, x):
        ...
        return {0}"""


_CHANGED_OUTSIDE: Final = """`{0}` was changed while a function under `es.jit` or \
`es.vmap` that has it from outside was running, by code that has it in another way: \
through a global name or an object, say. The transform runs a copy of the function, \
which does not see that. Take `{0}` as an argument, and return the new one."""
