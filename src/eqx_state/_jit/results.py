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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._tree.unbuilt import CanBeUnbuilt, dict_of, set_dict, Unbuilt
from .code import Mismatch
from .flattening import build_code, flatten_code, is_plain, SLOT
from .static import structure, typed


class Structure:
    """One object for all modules of equal structure and static values."""

    __slots__ = ("__weakref__",)


# If two threads create a structure at the same time, one of them is not found again,
# and modules that have it are built to be compared.
_STRUCTURES: Final = weakref.WeakValueDictionary[Any, Structure]()

# A module of fewer arrays is built at once: unread, it would save less time than it
# costs when it is read.
_FEW: Final = 8


def structure_of(origin: Any, module: eqx.Module) -> Structure | None:
    """The structure of a module; `None` if the module is always built at once.

    That is: a module of few arrays; one with static values that can change in place, or
    with nodes that the user's code unflattens; a class with its own `__getattribute__`,
    or with a `__del__`, which would run twice. A structure would keep the called
    function, `origin`, alive, so a module that contains it has none.
    """
    cls = type(module)
    is_ours = cls.__getattribute__ is CanBeUnbuilt.__getattribute__
    if not is_ours or hasattr(cls, "__del__"):
        return None
    leaves, treedef = jtu.tree_flatten(module)
    statics = [None if _is_array(x) else (x,) for x in leaves]
    if statics.count(None) < _FEW or not is_plain(module, origin):
        return None
    key = structure(treedef), tuple(x if x is None else typed(x[0]) for x in statics)
    return _STRUCTURES.setdefault(key, Structure())


def _is_array(x: Any) -> bool:
    return x is SLOT or eqx.is_array(x)


def _by_structure(modules: list[tuple[int, Any, Any]]) -> Iterable[tuple[Any, Any]]:
    """One module for each structure."""
    return {s: x for _, x, s in modules}.items()


class Recipe:
    """How to make one of the modules of a result.

    `module`: has a `SLOT` for each array. The code that makes the module is generated
    when a result is read for the first time.
    """

    def __init__(self, module: Any, structure: Structure):
        self.module, self.structure = module, structure
        self.size = sum(x is SLOT for x in jtu.tree_leaves(module))

    def make_unbuilt(self, arrays: Sequence[Any]) -> Any:
        """The module with these arrays, unbuilt."""
        module = object.__new__(type(self.module))
        set_dict(module, Unbuilt(arrays, self.make, self.structure))
        return module

    def make(self, arrays: Sequence[Any]) -> Any:
        """The module with these arrays, with its fields."""
        return without_collection(self._code, arrays)

    @ft.cached_property
    def _code(self) -> Callable[[Sequence[Any]], Any]:
        return build_code(self.module)[0]


class ResultBuilder:
    """Makes the output of a call, whose outermost modules may be unbuilt.

    `tree`: has a `SLOT` for each array.
    """

    def __init__(self, tree: Any, origin: Any):
        self.code, modules = build_code(tree, ft.partial(structure_of, origin))
        recipes = {s: Recipe(x, s) for s, x in _by_structure(modules)}
        self.recipes = [(number, recipes[s]) for number, _, s in modules]

    def __call__(self, arrays: Sequence[Any], at_once: bool) -> Any:
        """`arrays`: in JAX's order. `at_once`: whether to leave no module unbuilt."""
        leaves: list[Any] = []
        end = 0
        for number, recipe in self.recipes:
            start = end + number - len(leaves)  # arrays outside of these modules
            leaves += arrays[end:start]
            end = start + recipe.size
            make = recipe.make if at_once else recipe.make_unbuilt
            leaves.append(make(arrays[start:end]))
        leaves += arrays[end:]
        return without_collection(self.code, leaves)


class _Argument(NamedTuple):
    """The place of a module that may be unbuilt, in the arguments of a call."""

    number: int  # of the leaf
    cls: type
    structure: Structure
    code: Callable[[Any], Sequence[Any]]


class ArgumentFlattener:
    """Collects the arrays of a tree in JAX's order.

    It raises `Mismatch` or `KeyError` for a tree that differs from `tree` in more than
    its arrays. The tree may contain unbuilt modules. The flattener does not keep
    `origin` alive.
    """

    def __init__(self, tree: Any, origin: Any):
        find = ft.partial(structure_of, origin)
        self.code, modules = flatten_code(tree, origin, find)
        codes = {s: flatten_code(x, origin)[0] for s, x in _by_structure(modules)}
        self.arguments = [_Argument(n, type(x), s, codes[s]) for n, x, s in modules]
        self.types = {type(x) for x in jtu.tree_leaves(tree) if eqx.is_array(x)}

    def __call__(self, tree: Any) -> Sequence[Any]:
        leaves = self.code(tree)
        arrays: list[Any] = []
        start = 0
        for argument in self.arguments:
            end = argument.number
            if start < end:
                arrays += self._checked(leaves[start:end])
            start = end + 1
            if type(module := leaves[end]) is not argument.cls:
                raise Mismatch
            fields = dict_of(module)
            # After `object.__setattr__`, the arrays are no longer those of the module.
            is_unread = type(fields) is Unbuilt and not fields
            if is_unread and fields.structure is argument.structure:
                arrays += fields.arrays
            else:
                arrays += self._checked(argument.code(module))
        if start < len(leaves):
            arrays += self._checked(leaves[start:])
        return arrays

    def _checked(self, arrays: Sequence[Any]) -> Sequence[Any]:
        is_known = self.types.issuperset(map(type, arrays))
        if not is_known and not all(map(eqx.is_array, arrays)):
            raise Mismatch
        return arrays


def without_collection(
    code: Callable[[Sequence[Any]], Any], given: Sequence[Any]
) -> Any:
    """Make a tree, with garbage collection disabled if the tree is large.

    Each module allocates two tracked objects, so a large tree would trigger collections
    that traverse everything made so far. The caller usually drops the old tree right
    afterwards, so the total hardly changes.
    """
    if len(given) < _MANY or not gc.isenabled():
        return code(given)
    gc.disable()
    try:
        return code(given)
    finally:
        gc.enable()


# Python starts a collection after 700 new objects, so a smaller tree rarely does.
_MANY: Final = 100
