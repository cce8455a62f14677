"""What the layers below `es.Module` need of it: its flags, and data of its own."""

import dataclasses
import types
from typing import (
    Any,
    ClassVar,
    dataclass_transform,
    Final,
    Self,
    TYPE_CHECKING,
    TypeGuard,
)

import equinox as eqx
import numpy as np

from .._compat import EquinoxMeta
from .._kinds._fields import check_declarations, field


# The field of every `es.Module` that Equinox's function for modes replaces.
INFERENCE: Final = "_eqx_state_inference"

# The scopes that are open now, in all threads. Ownership does not rest on it: it only
# tells that no module can be owned, without a look at any.
OPEN_SCOPES: Final[set[int]] = set()


# For type checkers alone: on the class itself it would lose against Equinox's
# metaclass, and `es.field` would read as a default value. Deliberately not
# `frozen_default`: `self.mean = …` is how state is written.
@dataclass_transform(field_specifiers=(dataclasses.field, eqx.field, field))
class _ModuleMeta(EquinoxMeta):
    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        # Here it is a dataclass, which it is not yet in `__init_subclass__`.
        super().__init__(*args)
        check_declarations(cls)


class Fields(dict[str, Any]):
    """The `__dict__` of a module, and what belongs to this one object alone.

    Flattening, copies and pickles take the items of a `__dict__`, so they come without
    it. A slot of the module would serve as well, but for bases that have slots, too.
    """

    __slots__ = ("cached", "place")

    def __init__(self, fields: dict[str, Any]):
        super().__init__(fields)
        self.cached: dict[Any, Any] = {}
        self.place: Any = None

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


# The only static field that is not for users; the name is one that they do not use.
INIT_DONE: Final = "_eqx_state_module_init_done"


class _Training:
    """Sets the flag `training`, also where `eqx.nn.inference_mode` does.

    That function replaces nodes of the pytree, and a static flag is not a node. So each
    module also has a node without leaves, `[]` in train mode and `[[]]` in eval mode,
    in whose place it puts a bool. Equinox's unflattening sets static fields last, so
    the bool is there when the flag is set. Reading does not come here: the flag is in
    `__dict__`.
    """

    def __set__(self, module: eqx.Module, training: bool) -> None:
        # This runs for each module that is unflattened, so it goes straight there.
        fields = object.__getattribute__(module, "__dict__")
        fields["training"] = training
        node = fields.setdefault(INFERENCE, [])
        if type(node) is list and bool(node) is not training:
            return
        if is_flag := isinstance(node, (int, np.bool_)):  # a bool is an integer
            fields["training"] = training = not node
        # Anything else holds the node's place, say within a `jax.tree.map`.
        if is_flag or type(node) is list:
            fields[INFERENCE] = [] if training else [[]]


class BaseModule(eqx.Module, metaclass=_ModuleMeta):
    """The data of an `es.Module`; its behaviour is in `_module.py`.

    The flags are static fields: they are part of the treedef.
    """

    _eqx_state_inference: Any = eqx.field(init=False, repr=False)
    training: bool = eqx.field(init=False, static=True, repr=False)
    frozen: bool = eqx.field(init=False, static=True, repr=False)
    _eqx_state_module_init_done: bool = eqx.field(init=False, static=True, repr=False)

    # Whether eval mode does not keep it from writing, which errors must know.
    _eqx_state_writes_in_eval: ClassVar[bool] = False

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls)
        # A dataclass does not store `init=False` defaults on the instance, and the
        # treedef of a fresh module would differ from that of an unflattened one.
        object.__setattr__(self, "training", True)
        object.__setattr__(self, "frozen", False)
        object.__setattr__(self, INIT_DONE, False)
        return self

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            # Equinox makes a pytree of each bound method. Nothing else has to go there.
            value = super(eqx.Module, self).__getattribute__(name)
            if type(value) is types.MethodType and value.__self__ is self:
                return super().__getattribute__(name)
            if OPEN_SCOPES and name[:2] != "__":
                place = get_place(self)
                if place is not None and place.thread is not None:
                    place.note_read(name)
            return value

    def module_init(self, key: Any) -> None:
        """The hook that `init` calls once, after all Initializers: override it.

        In it any field may be assigned. `key` is a PRNG key of this module's own.
        """


if not TYPE_CHECKING:
    # Not in the body, where it would be the default value of the field.
    BaseModule.training = _Training()


def is_module(x: Any) -> TypeGuard[BaseModule]:
    """Whether `x` is an `es.Module`.

    `isinstance` asks a metaclass in Python, and that the module for its `__class__`, in
    Python, too. Walks ask this of every node.
    """
    return BaseModule in type(x).__mro__


def is_eqx_module(x: Any) -> TypeGuard[eqx.Module]:
    """Whether `x` is a module, of whatever library; as `is_module`."""
    return eqx.Module in type(x).__mro__


FLAGS: Final = ("training", "frozen", INIT_DONE)


def fields_of(module: eqx.Module) -> dict[str, Any]:
    """A module's `__dict__`, and not by way of `Module.__getattribute__` in Python."""
    return object.__getattribute__(module, "__dict__")


def own_data(module: eqx.Module) -> Fields:
    """A module's `__dict__`, which can hold what belongs to this one object alone."""
    fields = fields_of(module)
    if type(fields) is not Fields:
        fields = Fields(fields)
        object.__setattr__(module, "__dict__", fields)
    return fields


def forget_cached(module: eqx.Module) -> None:
    """Drop what was computed from the fields that a module had until now."""
    fields = fields_of(module)
    if type(fields) is Fields:
        fields.cached.clear()


def get_place(module: eqx.Module) -> Any:
    """Where in an open scope `module` is, or `None` for an ordinary frozen module."""
    fields = fields_of(module)
    return fields.place if type(fields) is Fields else None


def set_place(module: BaseModule, place: Any) -> None:
    """Put a module into a scope, or with `None` out of it."""
    own_data(module).place = place


def dynamic_names(cls: type) -> list[str]:
    """The fields of a module class that are children in the pytree, in their order."""
    fields = dataclasses.fields(cls)
    return [f.name for f in fields if not f.metadata.get("static", False)]


def field_names(module: Any) -> list[str]:
    """The fields that a user has given a module, or sees in its repr."""
    return [f.name for f in dataclasses.fields(module) if f.repr]


def declared_fields(module: Any) -> str:
    """A sentence for errors: the fields of a module's class."""
    names = field_names(module)
    return f"The fields are: {', '.join(names)}." if names else "It declares no fields."


def has_inference(module: eqx.Module) -> bool:
    """Whether a module has the flag of Equinox's layers, a bool called `inference`."""
    return type(module.__dict__.get("inference")) is bool
