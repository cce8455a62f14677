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
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._errors import TraceError
from .._state._scope import is_owned
from .._tree._children import with_children
from .._tree._compare import identical
from ._closures import ATOMS, DICTS, held, is_model, models_in, PARTIALS, step
from ._transform import Transform


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """Something on the way from a function to the modules that it holds.

    `refs` says what a copy has in place of each of `below`: the node of this number,
    the value `~ref` if negative, or the same object if `None`.
    """

    x: Any
    below: list[tuple[Any, Any]]  # as `held` lists it
    above: "list[tuple[Node, Any]]"  # the nodes that hold it, and its key there
    number: int | None = None  # among the nodes that are copied
    refs: list[int | None] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        name, node = "", self
        while node.number:  # up to the function, which has number 0
            node, key = node.above[0]
            name = step(node.x, key) + name
        return name.removeprefix(".")


class Opened:
    """A function, and what a copy of it may hold in place of its modules.

    `values` are those modules, and what lies in one container with them. It is the
    function itself if JAX sees all of them (`is_copied` is false).
    """

    def __init__(self, f: Any):
        self.f = f
        self.values: list[Any] = [f]
        self.nodes = _nodes(f)
        self.is_copied = any(map(_hides, self.nodes))
        if self.is_copied:
            self._find_values()

    def _find_values(self) -> None:
        self.values = []
        numbers = {id(node.x): node.number for node in self.nodes}
        known: dict[int, int] = {}
        for node in self.nodes:
            for _, x in node.below:
                if _is_free(x):  # once, so that it is one module in a copy, too
                    ref = ~known.setdefault(id(x), len(self.values))
                elif type(x) not in ATOMS and id(x) in numbers:
                    ref = numbers[id(x)]
                else:  # a setting beside a module may change together with it
                    is_beside = type(node.x) is not types.FunctionType
                    ref = ~len(self.values) if is_beside else None
                if ref == ~len(self.values):
                    self.values.append(x)
                node.refs.append(ref)

    @ft.cached_property
    def tree(self) -> Any:
        """The values as a pytree, in which each has its name."""
        if not self.is_copied:
            return self.f
        names: list[str] = []
        for node in self.nodes:
            for (key, _), ref in zip(node.below, node.refs, strict=True):
                if ref == ~len(names):
                    names.append((node.name + step(node.x, key)).removeprefix("."))
        return _Values(tuple(names), self.values)

    def copy(self, tree: Any) -> "Copy":
        """The function, which holds what `tree` has."""
        return Copy(self, tree)


class _Values(NamedTuple):
    """Values by name, as a pytree. Two may have one name."""

    names: tuple[str, ...]
    values: list[Any]


jtu.register_pytree_with_keys(
    _Values,
    lambda x: ([*zip(map(jtu.GetAttrKey, x.names), x.values, strict=True)], x.names),
    lambda names, values: _Values(names, [*values]),
)


def _nodes(f: Any) -> list[Node]:
    """The nodes that lead to a module, and the containers inside these, numbered."""
    if not held(f):  # a function without a closure, or a model: at each call
        return []
    nodes: dict[int, Node] = {}
    leading: list[Node] = []
    todo: list[tuple[Any, list[tuple[Node, Any]]]] = [(f, [])]
    while todo:  # no recursion: what a function holds may be a long chain
        x, above = todo.pop()
        if id(x) in nodes:
            nodes[id(x)].above += above
        elif (below := held(x)) is not None:
            node = nodes[id(x)] = Node(x, below, above)
            todo += [
                (y, [(node, k)]) for k, y in reversed(below) if type(y) not in ATOMS
            ]
            if type(x) is eqx.Partial:  # which is a module, whatever it holds
                leading.append(node)
        elif _is_free(x):
            leading += [node for node, _ in above]
    while leading:
        node = leading.pop()
        if node.number is not None:
            continue
        node.number = 0
        leading += [outer for outer, _ in node.above]
        if type(node.x) is not types.FunctionType:
            inside = [nodes.get(id(y)) for _, y in node.below]
            leading += [child for child in inside if child and _is_container(child.x)]
    found = [node for node in nodes.values() if node.number is not None]
    for number, node in enumerate(found):
        node.number = number
    return found


def _is_free(x: Any) -> bool:
    return is_model(x) and not is_owned(x)


def _is_container(x: Any) -> bool:
    return not callable(x) and type(x) is not types.CellType


def _hides(node: Node) -> bool:
    """Whether JAX does not see what lies below."""
    return isinstance(node.x, (types.FunctionType, types.MethodType, ft.partial))


class Copy:
    """A copy of a function, `f`, for a transform to run.

    Functions that share a cell or a container share the copy of it. Functions may lead
    back to themselves, so it takes two steps: cells, lists, dicts and functions are
    made empty, and filled when all are there. Tuples, methods and partials cannot be
    filled later; they are made of their parts, and form no circle among themselves.
    """

    def __init__(self, opened: Opened, tree: Any):
        self.f = tree
        self.made: dict[int, Any] = {}
        # Cells, lists and dicts, each with its contents when the call begins.
        self.given: list[tuple[Node, Any, list[Any]]] = []
        if opened.is_copied:
            self.nodes, self.values = opened.nodes, tree.values
            self.f = self._new(0, opened.f)
            for node in self.nodes:
                self._fill(node, self._new(node.number, node.x))
            pairs = [*zip(self.values, opened.values, strict=True)]
            pairs += [(self.made[i], node.x) for i, node in enumerate(self.nodes)]
            self.originals = {id(new): x for new, x in pairs}

    def _new(self, ref: int | None, x: Any) -> Any:
        """The object in place of `x` in the copy; it may still be empty."""
        if ref is None:
            return x
        if ref < 0:
            return self.values[~ref]
        if ref not in self.made:
            self.made[ref] = self._make(self.nodes[ref])
        return self.made[ref]

    def _below(self, node: Node) -> list[tuple[Any, Any]]:
        below = zip(node.refs, node.below, strict=True)
        return [(key, self._new(ref, x)) for ref, (key, x) in below]

    def _make(self, node: Node) -> Any:
        x, cls = node.x, type(node.x)
        if cls is types.CellType:
            return types.CellType()
        if cls is list or cls in DICTS:
            return copy.copy(x)
        if cls is types.FunctionType:
            closure = zip(node.refs, x.__closure__ or (), strict=False)
            new = types.FunctionType(
                x.__code__,
                x.__globals__,
                closure=tuple(self._new(ref, cell) for ref, cell in closure),
            )
            new.__dict__ = x.__dict__  # the caller sees what is counted there
            for name in ft.WRAPPER_ASSIGNMENTS:
                setattr(new, name, getattr(x, name))
            return new
        below = [child for _, child in self._below(node)]
        if cls is types.MethodType:
            return types.MethodType(*below)
        if cls in PARTIALS:
            f, args, keywords = below
            new: Any = cls(f, *args, **keywords)
            if cls is not eqx.Partial:
                new.__dict__.update(x.__dict__)
            return new
        if isinstance(x, Transform):
            return x.of(*below)
        return with_children(x, below)

    def _fill(self, node: Node, new: Any) -> None:
        """The second step."""
        if type(new) is types.FunctionType:
            defaults = self._below(node)[len(new.__closure__ or ()) :]
            by_position = len(node.x.__defaults__ or ())
            new.__defaults__ = tuple(child for _, child in defaults[:by_position])
            new.__kwdefaults__ = dict(defaults[by_position:])
        elif type(new) in (types.CellType, list, *DICTS):
            _put(new, self._below(node))
            self.given.append((node, new, _contents(new)))

    def _original(self, x: Any) -> Any:
        """The caller's object in place of a part of the copy."""
        if type(x) is types.MethodType:  # each look-up makes another one
            return types.MethodType(*map(self._original, (x.__func__, x.__self__)))
        return self.originals.get(id(x), x)

    def finish(self, out: Any) -> Any:
        """The output of the call, with the caller's functions in place of copies.

        The call may have put something into what it holds: that goes to the caller's,
        too, as if there were no copy. Raises `TraceError` if it is a module, which
        would come out only when the function is traced; and if other code, which has
        the caller's, has changed something there meanwhile.
        """
        for node, new, before in self.given:
            outside = [x for _, x in held(node.x) or ()]
            if not identical(outside, [x for _, x in node.below]):
                raise TraceError(_CHANGED_OUTSIDE.format(node.name))
            if identical(after := _contents(new), before):
                continue
            if not identical(models_in(after), models_in(before)):
                raise TraceError(_CHANGED.format(node.name))
            _put(node.x, [(k, self._original(y)) for k, y in held(new) or ()])
        if not self.made:
            return out
        return jtu.tree_map(lambda x: self._original(x) if callable(x) else x, out)


def _contents(x: Any) -> list[Any]:
    keys = [*x] if isinstance(x, dict) else []
    return keys + [child for _, child in held(x) or ()]


def _put(x: Any, below: list[tuple[Any, Any]]) -> None:
    """Fill a cell, a list or a dict."""
    if type(x) is types.CellType:
        if below:
            ((_, x.cell_contents),) = below
        else:  # the call has deleted the name
            del x.cell_contents
    elif type(x) is list:
        x[:] = [child for _, child in below]
    else:
        x.clear()
        x.update(below)


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
