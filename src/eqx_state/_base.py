"""What the layers below `es.Module` need to know of it: two flags and one slot."""

import dataclasses
import types
from typing import Any, ClassVar, dataclass_transform, Self, TYPE_CHECKING, TypeGuard

import equinox as eqx

from ._compat import EquinoxMeta
from ._declare import check_declarations, field


# For type checkers alone: on the class itself it would lose against Equinox's
# metaclass, and `es.field` would read as a default value. Deliberately not
# `frozen_default`: `self.mean = …` is how state is written.
@dataclass_transform(field_specifiers=(dataclasses.field, eqx.field, field))
class _ModuleMeta(EquinoxMeta):
    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        # Here it is a dataclass, which it is not yet in `__init_subclass__`.
        super().__init__(*args)
        check_declarations(cls)


class BaseModule(eqx.Module, metaclass=_ModuleMeta):
    """The data of an `es.Module`; its behaviour is in `_module.py`.

    The flags are static fields: they are part of the treedef. The slot lies outside
    `__dict__`, so it is no part of the pytree: copies and pickles come without it.
    """

    __slots__ = ("_place",)

    training: bool = eqx.field(init=False, static=True, repr=False)
    frozen: bool = eqx.field(init=False, static=True, repr=False)
    _module_init_done: bool = eqx.field(init=False, static=True, repr=False)

    # Whether eval mode does not keep it from writing, which errors must know.
    _writes_in_eval: ClassVar[bool] = False

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls)
        # A dataclass does not store `init=False` defaults on the instance, and the
        # treedef of a fresh module would differ from that of an unflattened one.
        object.__setattr__(self, "training", True)
        object.__setattr__(self, "frozen", False)
        object.__setattr__(self, "_module_init_done", False)
        return self

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            # Equinox makes a pytree of each bound method. Nothing else has to go there.
            value = super(eqx.Module, self).__getattribute__(name)
            if type(value) is types.MethodType and value.__self__ is self:
                return super().__getattribute__(name)
            return value

    def module_init(self, key: Any) -> None:
        """The hook that `init` calls once, after all Initializers: override it.

        In it any field may be assigned. `key` is a PRNG key of this module's own.
        """


def is_module(x: Any) -> TypeGuard[BaseModule]:
    """Whether `x` is an `es.Module`.

    `isinstance` asks a metaclass in Python, and that the module for its `__class__`, in
    Python, too. Walks ask this of every node.
    """
    return BaseModule in type(x).__mro__


def is_eqx_module(x: Any) -> TypeGuard[eqx.Module]:
    """Whether `x` is a module, of whatever library; as `is_module`."""
    return eqx.Module in type(x).__mro__


FLAGS = ("training", "frozen", "_module_init_done")


def get_place(module: eqx.Module) -> Any:
    """Where in an open scope `module` is, or `None` for an ordinary frozen module."""
    try:
        return object.__getattribute__(module, "_place")
    except AttributeError:
        return None


def set_place(module: BaseModule, place: Any) -> None:
    """Put a module into a scope, or with `None` out of it."""
    object.__setattr__(module, "_place", place)
