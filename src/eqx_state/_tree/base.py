"""The data of an `es.Module`: its flags, and data outside the pytree."""

import dataclasses
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
import jax.tree_util as jtu
import numpy as np

from .._compat import EquinoxMeta
from .._kinds.fields import check_declarations, field
from .._typing import KeyPath
from .unbuilt import CanBeUnbuilt, dict_of, fields_of, set_dict


# One key of a path, as it is printed, and the length of the sequence that it indexes (0
# if it is not an index). If `layers` becomes shorter, `layers[2]` may be a different
# layer.
Step = tuple[str, int]
Steps = tuple[Step, ...]

# Plain Equinox layers and arrays have no flag `frozen`. The nearest `es.Module` above
# stores *frozen paths* instead: paths from it to nodes, and whether each node is
# frozen. A frozen path overrides the flags and paths of modules above. Frozen paths are
# static data, so part of the treedef, and sorted, so that the order of two calls of
# `freeze` does not matter.
FrozenPaths = tuple[tuple[Steps, bool], ...]


def sorted_frozen_paths(paths: dict[Steps, bool]) -> FrozenPaths:
    """Frozen paths as static data of a module."""
    return tuple(sorted(paths.items()))


def keystr(path: KeyPath) -> str:
    """`jax.tree_util.keystr`, but `[0]` for JAX's `[<flat index 0>]`.

    Either all children of a node have such keys, or none has, so names remain unique.
    """
    flat = jtu.FlattenedIndexKey
    return "".join(f"[{k.key}]" if isinstance(k, flat) else str(k) for k in path)


def step_to(node: Any, key: Any) -> Step:
    """The step from `node` to its child under `key`."""
    is_index = isinstance(key, jtu.SequenceKey) and isinstance(node, (list, tuple))
    return keystr((key,)), len(node) if is_index else 0


# The field that `eqx.nn.inference_mode` replaces in every `es.Module`.
INFERENCE: Final = "_eqx_state_inference"


# For type checkers only. On `Module` itself, the decorator of Equinox's metaclass would
# take priority, and `es.field` would be a default value. Deliberately without
# `frozen_default`: `self.mean = …` writes state.
@dataclass_transform(field_specifiers=(dataclasses.field, eqx.field, field))
class _ModuleMeta(EquinoxMeta):
    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        # In `__init_subclass__`, the class would not be a dataclass yet.
        super().__init__(*args)
        check_declarations(cls)


class Fields(dict[str, Any]):
    """The `__dict__` of a module, with data of this one object as attributes.

    Flattening, copies and pickles use the items of `__dict__`, not its attributes.
    """

    # A slot on the module instead would conflict with bases that have slots.

    __slots__ = ("note", "ownership")

    note: Any
    ownership: Any

    def __init__(self, fields: dict[str, Any]):
        super().__init__(fields)
        self.note = self.ownership = None

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class OnlyInScope:
    """A class that modules have only inside a scope, in the place of their own."""

    __slots__ = ()  # otherwise Python would not let `__class__` change

    def _eqx_state_leave(self) -> None:
        """Give the module, in place, the class that it has outside."""


class Placeholder:
    """A leaf of a lazy model that `init` replaces by a value."""

    __slots__ = ()


# Private static fields: whether `module_init` has run, and the frozen paths.
INIT_DONE: Final = "_eqx_state_module_init_done"
FROZEN_PATHS: Final = "_eqx_state_frozen_paths"

# All static fields of an `es.Module`, and their values in a new one.
FLAGS: Final = {"training": True, "frozen": False, INIT_DONE: False, FROZEN_PATHS: ()}


def _inference_node(training: bool) -> list[Any]:
    """The value of the field `INFERENCE`: as true as Equinox's flag, without leaves.

    A list, because `is_leaf=lambda x: isinstance(x, tuple)`, with which users unzip a
    tree, would stop at a tuple; and JAX flattens a list faster than a class of ours.
    """
    return [] if training else [[]]


class _Training:
    """Sets the flag `training`, and lets `eqx.nn.inference_mode` set it, too.

    That function replaces nodes of the pytree by bools, but a static flag is not a
    node. Each module therefore has an `_inference_node`, too, which says the same as
    the flag. Equinox unflattens static fields last, so the bool is in `__dict__` when
    `__set__` sets the flag. Reads find the flag in `__dict__`, because this class has
    no `__get__`.
    """

    def __set__(self, module: eqx.Module, training: bool) -> None:
        fields = fields_of(module)
        fields["training"] = training
        node = fields.get(INFERENCE)
        if type(node) is list and bool(node) is not training:
            return  # they agree, as after most unflattenings
        if isinstance(node, (int, np.bool_)):  # of `inference_mode`; a bool is an int
            fields["training"] = training = not node
        elif type(node) is not list:
            return  # a sentinel that replaces the node, as in a `jax.tree.map`
        fields[INFERENCE] = _inference_node(training)


class BaseModule(CanBeUnbuilt, metaclass=_ModuleMeta):
    """The data of an `es.Module`; its behavior is in `_state/module.py`.

    The flags are static fields, so they are part of the treedef.
    """

    _eqx_state_inference: Any = eqx.field(init=False, repr=False)
    training: bool = eqx.field(init=False, static=True, repr=False)
    frozen: bool = eqx.field(init=False, static=True, repr=False)
    _eqx_state_module_init_done: bool = eqx.field(init=False, static=True, repr=False)
    _eqx_state_frozen_paths: FrozenPaths = eqx.field(
        init=False, static=True, repr=False
    )

    # Whether the field `layers` of this class contains `length` layers, stacked along a
    # first axis. `es.nn.Stacked` sets this to true.
    _eqx_state_is_stack: ClassVar[bool] = False

    def _eqx_state_not_reduced(self, axis_name: Any) -> str:
        """What to do if the lanes of a transform wrote different values to the state.

        `axis_name`: that of the lanes, or several. Layers of the library return advice;
        `""` stands for that of the transform, which may be to map the state.
        """
        del axis_name
        return ""

    def _eqx_state_check(self) -> None:
        """Raise if a setting is invalid.

        Layers of the library check their settings here, for their `__init__` and for
        functions that replace a field.
        """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls)
        # A dataclass does not store `init=False` defaults on the instance, so the
        # treedef of a new module would differ from that of an unflattened one.
        object.__setattr__(self, INFERENCE, _inference_node(True))
        for name, value in FLAGS.items():
            object.__setattr__(self, name, value)
        return self

    def module_init(self, key: Any) -> None:
        """A hook to override: `init` calls it once, after all Initializers.

        It may assign any field. `key` is a PRNG key for this module only.
        """


if not TYPE_CHECKING:
    # In the class body, `_Training()` would be the default value of the field.
    BaseModule.training = _Training()


def is_module(x: Any) -> TypeGuard[BaseModule]:
    """Whether `x` is an `es.Module`."""
    # Walks call this for every node. `isinstance` would run two Python functions: the
    # metaclass's `__instancecheck__` and the module's `__getattribute__`.
    return BaseModule in type(x).__mro__


def is_eqx_module(x: Any) -> TypeGuard[eqx.Module]:
    """Whether `x` is any Equinox module."""
    return eqx.Module in type(x).__mro__


def ownership_of(module: eqx.Module) -> Any:
    """The `Ownership` of a module, or `None` for an ordinary frozen module."""
    fields = dict_of(module)
    return fields.ownership if type(fields) is Fields else None


def set_ownership(module: eqx.Module, ownership: Any) -> None:
    """Set the `Ownership` of a module; `None` removes it."""
    _fields(module).ownership = ownership


def note_of(module: eqx.Module) -> Any:
    """The note that a call has left in its gradients, or `None`."""
    fields = dict_of(module)
    return fields.note if type(fields) is Fields else None


def set_note(module: eqx.Module, note: Any) -> None:
    """Leave a note in a module, outside of the pytree."""
    _fields(module).note = note


def _fields(module: eqx.Module) -> Fields:
    fields = fields_of(module)
    if type(fields) is not Fields:
        fields = Fields(fields)
        set_dict(module, fields)
    return fields


def dynamic_names(cls: type) -> list[str]:
    """The names of the fields that are children in the pytree, in their order."""
    fields = dataclasses.fields(cls)
    return [f.name for f in fields if not f.metadata.get("static", False)]


def has_inference(module: eqx.Module) -> bool:
    """Whether a module has a bool `inference`, the flag of Equinox's layers."""
    return type(module.__dict__.get("inference")) is bool
