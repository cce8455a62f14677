"""The data of an `es.Module`: its flags, and what belongs to one object alone."""

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
import jax.tree_util as jtu
import numpy as np

from .._compat import EquinoxMeta
from .._kinds.fields import check_declarations, field
from .._typing import KeyPath


# One key of a path as it is printed, and how many elements the sequence has that it
# leads into: with another number of them, an index may mean another element.
Step = tuple[str, int]
Steps = tuple[Step, ...]

# Plain Equinox layers and arrays cannot carry a flag, so the nearest `es.Module` above
# them has *marks*: paths from it, and whether the node there is frozen, whatever is
# above it. They are static data, and so part of the treedef. Sorted by path, they are
# equal for the same nodes, in whatever order these were frozen.
Marks = tuple[tuple[Steps, bool], ...]


def sorted_marks(marks: dict[Steps, bool]) -> Marks:
    """The marks of what is frozen, as static data of a module."""
    return tuple(sorted(marks.items()))


def keystr(path: KeyPath) -> str:
    """`jax.tree_util.keystr`, but `[0]` for JAX's `[<flat index 0>]`.

    The children of a node either all have such keys or none, so names stay distinct.
    """
    flat = jtu.FlattenedIndexKey
    return "".join(f"[{k.key}]" if isinstance(k, flat) else str(k) for k in path)


def step_to(node: Any, key: Any) -> Step:
    """The step from `node` to its child under `key`."""
    is_index = isinstance(key, jtu.SequenceKey) and isinstance(node, (list, tuple))
    return keystr((key,)), len(node) if is_index else 0


def name_of_steps(path: Steps) -> str:
    """The path as it is printed."""
    return "".join(name for name, _ in path)


# The field of every `es.Module` that `eqx.nn.inference_mode` replaces.
INFERENCE: Final = "_eqx_state_inference"

# The scopes that are open now, and the threads in which they are. It only answers
# quickly that no module can be owned; who owns a module is in its `place`.
OPEN_SCOPES: Final[dict[int, int]] = {}


# For type checkers only. On the class itself the decorator would lose against that of
# Equinox's metaclass, and `es.field` would read as a default value. Deliberately not
# `frozen_default`: `self.mean = …` is how state is written.
@dataclass_transform(field_specifiers=(dataclasses.field, eqx.field, field))
class _ModuleMeta(EquinoxMeta):
    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        # Not in `__init_subclass__`, where the class is not a dataclass yet.
        super().__init__(*args)
        check_declarations(cls)


class Fields(dict[str, Any]):
    """The `__dict__` of a module, and what belongs to this one object alone.

    Flattening, copies and pickles take the items of a `__dict__`, and leave the rest
    behind.
    """

    # A slot of the module would do the same, but fails with bases that have slots, too.

    __slots__ = ("place",)

    place: Any

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Placeholder:
    """A leaf that stands for a value which will be drawn, in a lazy model."""

    __slots__ = ()


# The static fields that are not for users: whether `module_init` has run, and what is
# frozen below by its path.
INIT_DONE: Final = "_eqx_state_module_init_done"
MARKS: Final = "_eqx_state_frozen_paths"


class _Training:
    """Sets the flag `training`, and lets `eqx.nn.inference_mode` set it, too.

    That function replaces nodes of the pytree by bools, and a static flag is not a
    node. So each module also has a node without leaves, `[]` in train mode and `[[]]`
    in eval mode, for it to replace. Equinox's unflattening sets static fields last, so
    the bool is there when this sets the flag. Reads do not come here: they find the
    flag in `__dict__`.
    """

    def __set__(self, module: eqx.Module, training: bool) -> None:
        # It runs at each unflattening of a module, hence the shortcut.
        fields = object.__getattribute__(module, "__dict__")
        fields["training"] = training
        node = fields.setdefault(INFERENCE, [])
        if type(node) is list and bool(node) is not training:
            return
        if is_flag := isinstance(node, (int, np.bool_)):  # a bool is an integer
            fields["training"] = training = not node
        # Anything else is a stand-in for the node, as within a `jax.tree.map`.
        if is_flag or type(node) is list:
            fields[INFERENCE] = [] if training else [[]]


class BaseModule(eqx.Module, metaclass=_ModuleMeta):
    """The data of an `es.Module`; its behavior is in `_state/module.py`.

    The flags are static fields: they are part of the treedef.
    """

    _eqx_state_inference: Any = eqx.field(init=False, repr=False)
    training: bool = eqx.field(init=False, static=True, repr=False)
    frozen: bool = eqx.field(init=False, static=True, repr=False)
    _eqx_state_module_init_done: bool = eqx.field(init=False, static=True, repr=False)
    _eqx_state_frozen_paths: Marks = eqx.field(init=False, static=True, repr=False)

    # Whether its field `layers` holds `length` layers as one, each array with an axis
    # more. This is how `es.nn.Stacked` is known here.
    _eqx_state_is_stack: ClassVar[bool] = False

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls)
        # A dataclass does not store `init=False` defaults on the instance, and the
        # treedef of a fresh module would differ from that of an unflattened one.
        object.__setattr__(self, "training", True)
        object.__setattr__(self, "frozen", False)
        object.__setattr__(self, INIT_DONE, False)
        object.__setattr__(self, MARKS, ())
        return self

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            # Equinox's own does more at each attribute, to make pytrees of bound
            # methods. JAX comes here for the `__dict__` of every module that it
            # flattens: `es.update` would take a tenth longer. After `eqx.Module` there
            # may be a base with attributes of its own making.
            value = super(eqx.Module, self).__getattribute__(name)
            if type(value) is types.MethodType and value.__self__ is self:
                return super().__getattribute__(name)
            return value

    def module_init(self, key: Any) -> None:
        """The hook that `init` calls once, after all Initializers: override it.

        In it any field may be assigned. `key` is a PRNG key of this module's own.
        """


if not TYPE_CHECKING:
    # Not in the body, where it would be the default value of the field.
    BaseModule.training = _Training()


def is_module(x: Any) -> TypeGuard[BaseModule]:
    """Whether `x` is an `es.Module`."""
    # Walks ask this of every node, and `isinstance` would run two Python functions: the
    # metaclass's `__instancecheck__` and the module's `__getattribute__`.
    return BaseModule in type(x).__mro__


def is_eqx_module(x: Any) -> TypeGuard[eqx.Module]:
    """Whether `x` is any Equinox module."""
    return eqx.Module in type(x).__mro__


FLAGS: Final = ("training", "frozen", INIT_DONE, MARKS)


def fields_of(module: eqx.Module) -> dict[str, Any]:
    """A module's `__dict__`, without a call of `Module.__getattribute__`."""
    return object.__getattribute__(module, "__dict__")


def ownership_of(module: eqx.Module) -> Any:
    """Where in an open scope `module` is, or `None` for an ordinary frozen module."""
    fields = fields_of(module)
    return fields.place if type(fields) is Fields else None


def set_ownership(module: eqx.Module, place: Any) -> None:
    """Put a module into a scope, or take it out with `None`."""
    fields = fields_of(module)
    if type(fields) is not Fields:
        fields = Fields(fields)
        object.__setattr__(module, "__dict__", fields)
    fields.place = place


def dynamic_names(cls: type) -> list[str]:
    """The fields of a module class that are children in the pytree, in their order."""
    fields = dataclasses.fields(cls)
    return [f.name for f in fields if not f.metadata.get("static", False)]


def has_inference(module: eqx.Module) -> bool:
    """Whether a module has the flag of Equinox's layers, a bool called `inference`."""
    return type(module.__dict__.get("inference")) is bool
