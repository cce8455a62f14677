"""The modules of a result, which are built when they are read.

The outermost modules of a call's result are *unbuilt* (see `_tree/unbuilt.py`), and the
outermost modules among the arguments of the next call may be. So the code that flattens
or builds the whole tree treats them as leaves. If a module is still unbuilt when it is
passed to a call, its arrays go straight in: one comparison shows that it has the
structure and the static values for which the program was compiled.
"""

import functools as ft
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._tree.unbuilt import AbstractResult, dict_of, set_dict, Unbuilt
from .code import Mismatch
from .flattening import ArraySlot, builder, flattener, has_only_fields
from .static import is_hashable, structure, typed


class Structure:
    """One object for all modules of equal structure and static values."""

    __slots__ = ("__weakref__",)


# If two threads create a structure at the same time, one of them is not found again,
# and modules that have it are built to be compared.
_STRUCTURES: Final = weakref.WeakValueDictionary[Any, Structure]()

# A module of fewer arrays is built at once: unread, it would save less time than it
# costs when it is read.
_FEW: Final = 8


def structures_in(tree: Any, origin: Any) -> dict[int, Structure]:
    """The structure of each outermost module that may be unbuilt, by its `id`.

    Others are built at once: modules of few arrays; those with a static value that can
    change in place; classes that `Unbuilt` does not suit. A structure would keep the
    called function, `origin`, alive, so there is none for a module that contains it.
    """

    def static(x: Any) -> Any:
        if x is origin or not is_hashable(x):
            raise _Unsuitable
        return typed(x)

    found = {}
    for module in filter(_is_result, jtu.tree_leaves(tree, is_leaf=_is_result)):
        own_lookup = type(module).__getattribute__
        if own_lookup is not AbstractResult.__getattribute__:
            continue
        leaves, treedef = jtu.tree_flatten(module)
        is_slot = [isinstance(x, ArraySlot) or eqx.is_array(x) for x in leaves]
        if sum(is_slot) < _FEW or not has_only_fields(module):
            continue
        try:
            statics = [
                None if is_array else (static(x),)
                for x, is_array in zip(leaves, is_slot, strict=True)
            ]
            key = structure(treedef, static), tuple(statics)
        except _Unsuitable:
            continue
        found[id(module)] = _STRUCTURES.setdefault(key, Structure())
    return found


class _Unsuitable(Exception):
    """A static value because of which a module is built at once."""


def _is_result(x: Any) -> bool:
    return AbstractResult in type(x).__mro__


class Recipe:
    """How to make one of the modules of a result.

    `module`: has an `ArraySlot` for each array. The code that builds the module is
    generated when a result is read for the first time.
    """

    def __init__(self, module: Any, structure: Structure):
        self.module, self.structure = module, structure
        leaves = jtu.tree_leaves(module)
        self.size = sum(isinstance(x, ArraySlot) for x in leaves)

    def unbuilt(self, arrays: Sequence[Any]) -> Any:
        """The module with these arrays, unbuilt."""
        module = object.__new__(type(self.module))
        set_dict(module, Unbuilt(arrays, self.build, self.structure))
        return module

    def build(self, arrays: Sequence[Any]) -> Any:
        """The module with these arrays, with its fields."""
        return without_collection(self._build, arrays)

    @ft.cached_property
    def _build(self) -> Callable[[Sequence[Any]], Any]:
        return builder(self.module, {})[0]


class Builder:
    """Builds the output of a call, whose outermost modules may be unbuilt.

    `tree`: has an `ArraySlot` for each array.
    """

    def __init__(self, tree: Any, origin: Any):
        structures = structures_in(tree, origin)
        self.build, modules = builder(tree, structures)
        self.recipes = [(n, Recipe(x, structures[id(x)])) for n, x in modules]

    def __call__(self, arrays: Sequence[Any], at_once: bool) -> Any:
        """`arrays`: in JAX's order. `at_once`: whether to leave no module unbuilt."""
        items: list[Any] = []
        start = 0
        for number, recipe in self.recipes:
            end = start + number - len(items)
            items += arrays[start:end]
            start = end + recipe.size
            make = recipe.build if at_once else recipe.unbuilt
            items.append(make(arrays[end:start]))
        items += arrays[start:]
        return without_collection(self.build, items)


class _Argument(NamedTuple):
    """The place of a module that may be unbuilt, in the arguments of a call."""

    number: int  # of the leaf
    cls: type
    structure: Structure
    flatten: Callable[[Any], Sequence[Any]]


class Flattener:
    """Collects the arrays of a tree in JAX's order.

    It raises `Mismatch` or `KeyError` for a tree that differs from `tree` in more than
    its arrays. The tree may contain unbuilt modules. The flattener does not keep
    `origin` alive.
    """

    def __init__(self, tree: Any, origin: Any):
        structures = structures_in(tree, origin)
        self.flatten, modules = flattener(tree, origin, structures)
        by_structure = {}
        self.arguments = []
        for number, x in modules:
            s = structures[id(x)]
            if s not in by_structure:
                by_structure[s] = flattener(x, origin, {})[0]
            self.arguments.append(_Argument(number, type(x), s, by_structure[s]))
        arrays = [x for x in jtu.tree_leaves(tree) if eqx.is_array(x)]
        self.types = frozenset(map(type, arrays))

    def __call__(self, tree: Any) -> Sequence[Any]:
        items = self.flatten(tree)
        arrays: list[Any] = []
        start = 0
        for argument in self.arguments:
            end = argument.number
            if start < end:
                arrays += self._checked(items[start:end])
            start = end + 1
            if type(module := items[end]) is not argument.cls:
                raise Mismatch
            fields = dict_of(module)
            is_unbuilt = type(fields) is Unbuilt and not fields
            if is_unbuilt and fields.structure is argument.structure:
                arrays += fields.arrays
            else:
                arrays += self._checked(argument.flatten(module))
        if start < len(items):
            arrays += self._checked(items[start:])
        return arrays

    def _checked(self, arrays: Sequence[Any]) -> Sequence[Any]:
        is_known = self.types.issuperset(map(type, arrays))
        if not is_known and not all(map(eqx.is_array, arrays)):
            raise Mismatch
        return arrays


def without_collection(
    build: Callable[[Sequence[Any]], Any], given: Sequence[Any]
) -> Any:
    """Build a tree, with garbage collection disabled if the tree is large.

    Each module allocates two tracked objects, so a large tree would trigger collections
    that traverse everything built so far. The caller usually drops the old tree right
    afterwards, so the total hardly changes.
    """
    if len(given) < _MANY or not gc.isenabled():
        return build(given)
    gc.disable()
    try:
        return build(given)
    finally:
        gc.enable()


_MANY: Final = 100
