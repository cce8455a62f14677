"""The result of a program: what a trace keeps, and what each call makes of it.

The outermost modules of a result are *unbuilt* (see `_tree/unbuilt.py`): each has its
arrays, and is built when it is read. If it is passed to a call unread, the arrays go
straight in.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._transforms.lift import Ran
from .._tree.base import is_eqx_module
from .._tree.unbuilt import CanBeUnbuilt, fields_of, set_dict, Unbuilt
from .form import form_of, static_names
from .static import can_change, deep_copy, is_fixed, key_of_treedef, LEAF, typed


# Stands for an array in the output of a trace. It is a plain object because JAX
# recommends that the `__init__` of a pytree leaves these alone.
SLOT: Final = object()


class Result(NamedTuple):
    """What a program returns; `ran.out` are the arrays of the output."""

    ran: Ran
    output: "Output"


@jtu.register_static
class Output:
    """The static part of a program's output, which makes the output of each call.

    `owned`: the arrays of the owned modules. If the function returns one of them
    unchanged, the call returns the caller's array and not a copy. Otherwise assigning a
    returned module, `self.layer = layer`, would count as a write to its parameters.
    """

    def __init__(self, out: Any, owned: Iterable[Any], origin: Any):
        leaves, treedef = jtu.tree_flatten(out)
        # For each array its number in `owned`, or `None` if it is new.
        numbers = {id(x): i for i, x in enumerate(owned)}
        self.kept = [numbers.get(id(x)) for x in leaves if eqx.is_array(x)]
        slots = [SLOT if eqx.is_array(x) else x for x in leaves]
        # Copies, because the user may change a list in place after the trace.
        tree = treedef.unflatten(slots)
        self.copies_statics = any(map(can_change, form_of(tree).static))
        if self.copies_statics:
            slots, treedef = _with_own_statics(slots, treedef)
            tree = treedef.unflatten(slots)
        self.leaves, self.treedef = _with_recipes(tree, origin)
        # Those that can raise: known after the first run of the program.
        self.callbacks: frozenset[str] | None = None

    def arrays(self, out: Any) -> list[Any]:
        """The arrays that the program has computed."""
        arrays = filter(eqx.is_array, jtu.tree_leaves(out))
        return [x for x, i in zip(arrays, self.kept, strict=True) if i is None]

    def put(
        self, arrays: list[Any], owned: Sequence[Any] = (), at_once: bool = False
    ) -> Any:
        """The output of the call. `at_once`: whether to leave no module unbuilt."""
        if owned:
            new = iter(arrays)
            arrays = [next(new) if i is None else owned[i] for i in self.kept]
        leaves, treedef = self.leaves, self.treedef
        if self.copies_statics:
            leaves, treedef = _with_own_statics(leaves, treedef)
        return treedef.unflatten(_filled(leaves, arrays, at_once))


# --- Modules that are built when they are read ----------------------------------------


class Token:
    """One object for all modules of equal structure and static values."""

    __slots__ = ("__weakref__",)


# If two threads create a token at the same time, one of them is not found again,
# and modules that have it are built to be compared.
_TOKENS: Final = weakref.WeakValueDictionary[Any, Token]()

# A module of fewer arrays is built at once: unread, it would save less time than it
# costs when it is read.
_FEW: Final = 8


class Recipe:
    """How to make a module of a result from its arrays."""

    def __init__(self, cls: type, leaves: list[Any], treedef: Any, token: object):
        self.cls, self.leaves, self.treedef = cls, leaves, treedef
        self.token = token
        self.size = sum(x is SLOT for x in leaves)

    def make_unbuilt(self, arrays: Sequence[Any]) -> Any:
        """The module with these arrays, unbuilt."""
        module = object.__new__(self.cls)
        set_dict(module, Unbuilt(arrays, self.make, self.token))
        return module

    def make(self, arrays: Sequence[Any]) -> Any:
        """The module with these arrays, with its fields."""
        return self.treedef.unflatten(_filled(self.leaves, arrays, True))


def _recipe(module: Any, origin: Any) -> Recipe | None:
    """How to make a module; `None` if it is always built at once.

    That is: a module of few arrays; one with static values that can change in place, or
    with nodes that the user's code unflattens; a class with its own `__getattribute__`,
    or with a `__del__`, which would run twice. A `Token` would keep the called
    function, `origin`, alive, so a module that contains it has none.
    """
    cls = type(module)
    is_ours = cls.__getattribute__ is CanBeUnbuilt.__getattribute__
    if not is_ours or hasattr(cls, "__del__"):
        return None
    leaves, treedef = jtu.tree_flatten(module)
    nodes, statics = key_of_treedef(treedef), form_of(module).static
    is_plain = all(x is LEAF or issubclass(x[0], _ORDINARY) for x in nodes)
    is_plain &= all(is_fixed(x) and not can_change(x) for x in statics)
    is_plain &= all(x is not origin for x in statics)
    if not is_plain or sum(x is SLOT for x in leaves) < _FEW:
        return None
    key = nodes, tuple(map(typed, leaves))
    return Recipe(cls, leaves, treedef, _TOKENS.setdefault(key, Token()))


# The nodes that JAX and Equinox unflatten.
_ORDINARY: Final = (list, tuple, dict, type(None), eqx.Module)


def _with_recipes(tree: Any, origin: Any) -> tuple[list[Any], Any]:
    """The leaves and the treedef, with recipes as leaves for the outermost modules."""
    recipes: dict[int, Recipe] = {}

    def has_recipe(x: Any) -> bool:
        if (recipe := _recipe(x, origin)) is None:
            return False
        recipes[id(x)] = recipe
        return True

    leaves, treedef = jtu.tree_flatten(tree, is_leaf=has_recipe)
    return [recipes.get(id(x), x) for x in leaves], treedef


def _filled(leaves: list[Any], arrays: Sequence[Any], at_once: bool) -> Iterator[Any]:
    """The leaves, with these arrays."""
    start = 0
    for x in leaves:
        if x is SLOT:
            yield arrays[start]
            start += 1
        elif type(x) is Recipe:
            make = x.make if at_once else x.make_unbuilt
            yield make(arrays[start : start + x.size])
            start += x.size
        else:
            yield x


# --- Static values that can change in place -------------------------------------------


def _with_own_statics(leaves: list[Any], treedef: Any) -> tuple[list[Any], Any]:
    """The same leaves and treedef, with copies of static values that can change.

    Two modules that share a list share its copy, too.
    """
    memo: dict[int, Any] = {}
    modules: list[Any] = []

    def record(node: Any) -> bool:
        if is_eqx_module(node):
            modules.append(node)
        return False

    own = [deep_copy(x, memo) for x in leaves]
    tree = treedef.unflatten([SLOT if type(x) is Recipe else x for x in own])
    jtu.tree_leaves(tree, is_leaf=record)
    for module in modules:  # new ones, which nobody has seen
        fields = fields_of(module)
        for name in static_names(type(module)):
            if name in fields:
                fields[name] = deep_copy(fields[name], memo)
    return own, jtu.tree_structure(tree)
