"""Modules whose fields are built when they are first read.

`es.jit` returns its results like this. In a training loop, nothing reads the model
between two steps, so its arrays go straight into the next call, and no field is built.
Such a module is an object of its final class. Only its `__dict__` is different: an
empty `Unbuilt`, which knows the arrays, and how to make the fields. Everything that
reads a module reads an attribute first, `__dict__` included, so `__getattribute__`
builds the fields. `fields_of` does the same for our own code, which goes around it.
"""

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, Final, TYPE_CHECKING

import equinox as eqx

from .._compat import BoundMethod


# These run in C. `module.__dict__` would call `__getattribute__`, in Python.
_DICT: Final[Any] = next(
    vars(c)["__dict__"] for c in eqx.Module.__mro__ if "__dict__" in vars(c)
)
dict_of: Final[Callable[[Any], dict[str, Any]]] = _DICT.__get__
set_dict: Final[Callable[[Any, dict[str, Any]], None]] = _DICT.__set__


class Unbuilt(dict[str, Any]):
    """The `__dict__` of a module whose fields are not built yet.

    It contains only what `object.__setattr__` has written. `make` makes another module
    of the class from the arrays, which are in JAX's order. `token` is one object
    for all modules of equal structure and static values.
    """

    __slots__ = ("arrays", "make", "token")

    def __init__(
        self,
        arrays: Sequence[Any],
        make: Callable[[Sequence[Any]], Any],
        token: object,
    ):
        self.arrays, self.make, self.token = arrays, make, token


# Threads that read a module at once get the same fields.
_LOCK: Final = threading.RLock()


def build(module: eqx.Module) -> dict[str, Any]:
    """Build the fields of a module, if no other thread has; return its `__dict__`."""
    with _LOCK:
        fields = dict_of(module)
        if type(fields) is Unbuilt:
            written = fields
            fields = dict_of(written.make(written.arrays))
            fields.update(written)
            set_dict(module, fields)
        return fields


def fields_of(module: eqx.Module) -> dict[str, Any]:
    """A module's `__dict__`, without calling `Module.__getattribute__`."""
    fields = dict_of(module)
    return build(module) if type(fields) is Unbuilt else fields


class CanBeUnbuilt(eqx.Module):
    """A module that `es.jit` may return unbuilt."""

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            # The lookup would find a class default before it called `__getattr__`.
            if type(dict_of(self)) is Unbuilt:
                build(self)
            # Skip Equinox's version, which does the same as the rest of this function,
            # but more slowly: JAX reads the `__dict__` of every module that it
            # flattens, so `es.update` would take 10% longer.
            value = super(eqx.Module, self).__getattribute__(name)
            is_method = type(value) is types.MethodType and value.__self__ is self
            if is_method and not (name.startswith("__") and name.endswith("__")):
                return BoundMethod(value.__func__, self)
            return value
