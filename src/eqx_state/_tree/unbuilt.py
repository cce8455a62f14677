"""Modules whose fields are built when they are first read.

`es.jit` returns its results like this. In a training loop, nothing reads the model
between two steps, so its arrays go straight into the next call, and no field is built.
Such a module is an object of its final class. Only its `__dict__` is different: an
empty `Unbuilt`, which knows the arrays, and how to build the fields. Everything that
reads a module reads an attribute first, `__dict__` included, so `__getattribute__`
builds the fields. `fields_of` does the same for our own code, which goes around it.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any, Final, TYPE_CHECKING

import equinox as eqx


# These run in C. `module.__dict__` would call `__getattribute__`, in Python.
_DICT: Final[Any] = next(
    vars(c)["__dict__"] for c in eqx.Module.__mro__ if "__dict__" in vars(c)
)
dict_of: Final[Callable[[Any], dict[str, Any]]] = _DICT.__get__
set_dict: Final[Callable[[Any, dict[str, Any]], None]] = _DICT.__set__


class Unbuilt(dict[Any, Any]):
    """The `__dict__` of a module whose fields are not built yet.

    `build` creates another module of the class from the arrays, in JAX's order.
    `structure` is one object for all modules of equal structure and static values.
    """

    __slots__ = ("arrays", "build", "structure")

    def __init__(
        self,
        arrays: Sequence[Any],
        build: Callable[[Sequence[Any]], Any],
        structure: object,
    ):
        self.arrays, self.build, self.structure = arrays, build, structure


def built(module: eqx.Module, unbuilt: Unbuilt) -> dict[str, Any]:
    """Build the fields of a module, and return its new `__dict__`."""
    fields = dict_of(unbuilt.build(unbuilt.arrays))
    # `object.__setattr__` may have written before the first read.
    fields.update({name: x for name, x in unbuilt.items() if name is not _FIELDS})
    # If two threads get here, both use the fields of the first.
    fields = unbuilt.setdefault(_FIELDS, fields)
    set_dict(module, fields)
    return fields


_FIELDS: Final = object()


def fields_of(module: eqx.Module) -> dict[str, Any]:
    """A module's `__dict__`, without calling `Module.__getattribute__`."""
    fields = dict_of(module)
    return built(module, fields) if type(fields) is Unbuilt else fields


class AbstractResult(eqx.Module):
    """A module that `es.jit` may return unbuilt."""

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            # The lookup would find a class default before it called `__getattr__`.
            if type(fields := dict_of(self)) is Unbuilt:
                built(self, fields)
            # Equinox's version also turns bound methods into pytrees, and is slower.
            # JAX reads the `__dict__` of every module that it flattens, so `es.update`
            # would take 10% longer. Skip only `eqx.Module` in the MRO: a mixin after it
            # may define `__getattribute__`.
            value = super(eqx.Module, self).__getattribute__(name)
            if type(value) is types.MethodType and value.__self__ is self:
                return super().__getattribute__(name)
            return value
