"""Which form each node of a tree has, and which nodes are alike."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._tree._base import INFERENCE, is_eqx_module
from .._tree._compare import identical
from ._forms import Dict, dict_of, Form, Items, Mode, Node, one_level, Slot, Static
from ._rows import Alike, Module, module_fields, Root
from ._static import typed


@dataclasses.dataclass(frozen=True)
class ArraySlot:
    """Stands in a tree for the array of this number."""

    number: int


ARRAY: Final = 0  # the key of all arrays


def form_of(tree: Any) -> Root:
    """The form of a tree."""
    finder = _Finder()
    return Root(tree, finder.key(Root), [finder.find(tree)])


class _Finder:
    """Finds the forms of the nodes of a tree."""

    def __init__(self) -> None:
        self.keys: dict[Any, int] = {(Slot,): ARRAY}
        self.numbers = itertools.count()  # of the arrays, in JAX's order

    def key(self, *what: Any) -> int:
        return self.keys.setdefault(what, len(self.keys))

    def find(self, x: Any) -> Form:
        if isinstance(x, ArraySlot):
            return Slot(x.number, ARRAY)
        if eqx.is_array(x):
            return Slot(next(self.numbers), ARRAY)
        if type(x) in (tuple, list) or _is_named_tuple(x):
            return self._made(Items, x, [*map(self.find, x)])
        if type(x) is dict and set(map(type, x)) in (set(), {str}, {int}):
            keys = sorted(x)
            return self._made(Dict, x, [self.find(x[key]) for key in keys], keys)
        if is_eqx_module(x):
            static = module_fields(type(x))
            # With more in its `__dict__`, a cache say, Equinox flattens it otherwise.
            if dict_of(x).keys() == static.keys():
                return self._made(
                    Module, x, [self._field(x, *f) for f in static.items()]
                )
        elif x is None or jtu.all_leaves([x]):
            return self._static(x)
        below, aux = one_level(x)
        return self._made(Node, x, [*map(self.find, below)], [aux])

    def _field(self, module: Any, name: str, is_static: bool) -> Form:
        x = dict_of(module)[name]
        form = self._static(x) if is_static else self.find(x)
        if name == INFERENCE and type(form) is Items and not form.slots:
            return Mode(x, form.key, form.below)
        return form

    def _static(self, x: Any) -> Form:
        return Static(x, self.key(Static, _same_if(x)))

    def _made(
        self, cls: type[Form], x: Any, below: list[Form], data: Sequence[Any] = ()
    ) -> Form:
        keys = tuple(child.key for child in below)
        are_alike = len(below) > 1 and len({*keys}) == 1
        if are_alike and cls in (Items, Dict) and isinstance(below[0], Slot):
            cls = Alike
        return cls(x, self.key(cls, type(x), keys, *map(_same_if, data)), below)


def _same_if(x: Any) -> Any:
    """Hashable; equal for static values that may stand for each other."""
    if type(x) is tuple:
        return tuple(map(_same_if, x))
    return typed(x) if type(x) in _VALUES else (_same_if, id(x))


_VALUES: Final = frozenset({str, int, bool, float, type(None)})


def _is_named_tuple(x: Any) -> bool:
    """Whether `x` is one as JAX knows it, and not registered as something else."""
    if not (isinstance(x, tuple) and hasattr(type(x), "_fields")):
        return False
    below, aux = one_level(x)
    return aux is type(x) and identical(list(below), list(x))
