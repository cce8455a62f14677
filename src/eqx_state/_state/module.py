"""`es.Module`: an Equinox module whose annotations say what its fields are.

It is a frozen dataclass and a pytree like any other `eqx.Module`. The main difference:
in a scope, an assignment calls `write` instead of raising an error. The public methods
forward to functions of the same name.
"""

import dataclasses
import functools as ft
import itertools
from collections.abc import Callable
from typing import Any, Self, TYPE_CHECKING

import equinox as eqx

from .._compat import boundary, own_annotations
from .._kinds.annotations import remember_statement
from .._kinds.fields import (
    ArrayDefault,
    declarations,
    is_class_var,
    own_default,
)
from .._kinds.kinds import is_kind, kind_name
from .._tree import modes, modules, select
from .._tree.base import (
    BaseModule,
    FLAGS,
    INFERENCE,
    ownership_of,
)
from .._tree.compare import check_not_repeated
from .._tree.dtypes import strengthen_field
from .._tree.filters import Filter
from .._tree.walk import all_modules
from . import init, lazy
from .call_names import name_calls
from .sow import sow
from .write import frozen_error, no_field_message, write


if TYPE_CHECKING:
    _computed = property
else:

    class _computed:
        """A property that a field of the same name may replace."""

        def __init__(self, f):
            self.f = f
            self.__doc__ = f.__doc__

        def __get__(self, instance, owner=None):
            return self if instance is None else self.f(instance)


class Module(BaseModule):
    """Base class for models with state. An ordinary frozen `equinox.Module`, plus:

    - fields annotated with kinds (`es.Parameter`, `es.State`, …);
    - the flags `training` and `frozen`, which are static, so part of the treedef.
        Initially they are `True` and `False`;
    - inside `es.mutable`, `self.field = value` writes state.

    The methods forward to functions of `es` with the same name, which take any pytree.
    Only `replace` and `sow` have no such function. The library itself calls only the
    functions, so a subclass may redefine any method.

    A `functools.cached_property` is computed at each read, so it never uses old values.

    In a field that declares a kind, a Python number, a bool or a weakly typed array
    becomes a strongly typed array; in an `es.Parameter`, an integer becomes a float,
    because integers cannot be trained. If pytree surgery puts a number there, as in
    `eqx.tree_at(lambda m: m.scale, model, 0.5)`, running, training or saving the model
    raises a `ValueError`. Class defaults may be arrays; every instance gets its own
    copy.

    **Raises:**

    - `TypeError`, when the class is defined: a field named `training` or `frozen`, a
        union of two kinds, a kind on a static field.
    - `dataclasses.FrozenInstanceError`: a field was assigned outside `es.mutable`.
    - `ValueError`, at construction: the instance contains one stateful module twice.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Counter(es.Module):
            step: es.Parameter
            count: es.State = 0.0

            def __call__(self, x):
                if self.training:
                    self.count = self.count + self.step
                return x + self.count


        counter = Counter(jnp.array(2.0))
        y, counter = es.mutable(counter)(1.0)
        assert y == 3.0 and counter.count == 2.0
        assert counter.eval()(1.0) == 3.0
        ```
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        remember_statement(cls)
        name_calls(cls)
        annotations = own_annotations(cls)
        for base, name in itertools.product(cls.__mro__, FLAGS):
            if base is not BaseModule and (
                name in base.__dict__ or name in own_annotations(base)
            ):
                raise TypeError(
                    f"`{cls.__qualname__}.{name}`: this name is taken. Every"
                    f" `es.Module` has a flag `{name}`, which `train`, `eval`, `freeze`"
                    f" and `unfreeze` set. Choose a different name, such as `{name}_`."
                )
        for name, value in cls.__dict__.items():
            if not is_kind(value) or is_class_var(annotations.get(name)):
                continue
            own_name = f"{cls.__qualname__}.{name}"
            if value.__qualname__ != own_name:  # not a class defined in this body
                raise TypeError(
                    f"`{own_name}` is set to a kind, which only means something as an"
                    f" annotation: `{name}: {kind_name(value)}`."
                )
        # Include the cached properties of mixins, which may be plain Python classes.
        found = {k: x for base in cls.__mro__[::-1] for k, x in vars(base).items()}
        for name, value in found.items():
            if type(value) is ft.cached_property:
                setattr(cls, name, _computed(value.func))
        for name in annotations:
            if is_class_var(annotations[name]):
                continue
            default = cls.__dict__.get(name)
            if isinstance(default, dataclasses.Field):
                setattr(cls, name, own_default(default))
            elif eqx.is_array(default):
                setattr(cls, name, own_default(dataclasses.field(default=default)))
            elif name not in cls.__dict__ and name in Module.__dict__:
                # A field may have the name of one of our methods, which would otherwise
                # be the default value of the field.
                setattr(cls, name, dataclasses.field())

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls, *args, **kwargs)
        declared = declarations(cls)
        # Set defaults here: if a user's `__init__` does not assign a field with a
        # default, Equinox leaves the field out of the pytree.
        for f in dataclasses.fields(cls):
            default = f.default
            if isinstance(f.default_factory, ArrayDefault):
                default = f.default_factory()
            elif f.name not in declared:
                continue
            if default is not dataclasses.MISSING:
                object.__setattr__(self, f.name, _strong(f, cls, default))
        return self

    def __check_init__(self) -> None:
        # Equinox has stored the results of converters without our `__setattr__`.
        for name in declarations(type(self)):
            if name in self.__dict__:
                value = strengthen_field(type(self), name, self.__dict__[name])
                object.__setattr__(self, name, value)
        check_not_repeated(self)

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if (ownership := ownership_of(self)) is not None:
                write(self, ownership, name, value)
                return
            fields = {f.name: f for f in dataclasses.fields(self)}
            if name in fields:
                value = _strong(fields[name], type(self), value)
            try:
                super().__setattr__(name, value)
            except dataclasses.FrozenInstanceError:
                if name not in fields:
                    message = no_field_message(self, name, value)
                    raise dataclasses.FrozenInstanceError(message) from None
                raise frozen_error(self, name) from None

        def __delattr__(self, name: str) -> None:
            raise dataclasses.FrozenInstanceError(
                f"Cannot delete `{type(self).__qualname__}.{name}`. Set it to `None` in"
                " a copy: `model.replace(...)`."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By default `copy.copy` and `pickle` call `__new__`, after which Equinox allows
        # writes to the copy, as to a module whose `__init__` still runs.
        if type(self).__reduce__ is not object.__reduce__:
            return super().__reduce_ex__(protocol)
        state: Any = dict(self.__dict__)
        if type(self).__getstate__ is not object.__getstate__:
            state = self.__getstate__()
        return _rebuild, (type(self), state)

    def __hash__(self) -> int:
        # As in Equinox, but without the internal field that repeats `training`.
        names = [f.name for f in dataclasses.fields(self) if f.name != INFERENCE]
        try:
            return hash(tuple((name, getattr(self, name)) for name in names))
        except TypeError:
            raise TypeError(
                f"unhashable type: `{type(self).__qualname__}` with arrays. JAX's own"
                " transforms hash what they call, and those of `es` do not:\n\n"
                "    jax.checkpoint(self.layer)(x)                    # wrong\n"
                "    es.checkpoint(self.layer)(x)                     # right\n"
                "    jax.jit(lambda layer, x: layer(x))(layer, x)     # an argument"
            ) from None

    @_computed
    def initialized(self) -> bool:
        """Whether no `es.Initializer` is left and every `module_init` has run."""
        return lazy.missing(self) is None

    @_computed
    def initializing(self) -> bool:
        """Whether `init` is running: its forward pass, or a `module_init`."""
        ownership = ownership_of(self)
        return ownership is not None and ownership.scope.is_initializing

    @_computed
    def inference(self) -> Any:
        """The value that `equinox.nn.inference_mode` replaces; truthy in eval mode."""
        return self.__dict__[INFERENCE]

    @boundary
    def init(
        self, key: Any, *inputs: Any, call: Callable[..., Any] | None = None
    ) -> Self:
        """`es.init` of this module."""
        return init.init(self, key, *inputs, call=call)

    def train(self, mode: bool = True) -> Self:
        """`es.train` of this module."""
        return modes.train(self, mode)

    def eval(self) -> Self:
        """`es.eval` of this module."""
        return modes.eval(self)

    def freeze(self, where: Callable[[Self], Any] | None = None) -> Self:
        """`es.freeze` of this module."""
        return modes.freeze(self, where)

    def unfreeze(self, where: Callable[[Self], Any] | None = None) -> Self:
        """`es.unfreeze` of this module."""
        return modes.unfreeze(self, where)

    def filter(self, *filters: Filter) -> Self:
        """`es.filter` of this module."""
        return select.filter(self, *filters)

    def partition(self, *filters: Filter) -> tuple[Self, ...]:
        """`es.partition` of this module."""
        return select.partition(self, *filters)

    def update(self, *partials: Any) -> Self:
        """`es.update` of this module."""
        return select.update(self, *partials)

    def replace(self, **fields: Any) -> Self:
        """Return a copy with these fields; an unknown name is a `TypeError`.

        In a field that declares a kind, a number keeps the dtype of the array that it
        replaces, if that can hold it: `model.replace(count=0)`.
        """
        return modules.replace(self, **fields)

    def sow(self, name: str, value: Any) -> None:
        """Pass a value to `es.capture`, under this module's path and `name`.

        The value is an array, a number, or a pytree of them. Outside `es.capture`,
        `sow` does nothing.
        """
        sow(self, name, value)


def _strong(f: dataclasses.Field[Any], cls: type, value: Any) -> Any:
    # Pass the user's value to the converter. `__check_init__` makes the result strong.
    has_converter = f.metadata.get("converter") is not None
    return value if has_converter else strengthen_field(cls, f.name, value)


def _rebuild(cls: type, state: Any) -> Any:
    declarations(cls)  # raises if the class got fields after its creation
    self = object.__new__(cls)
    # Look it up on the class: a user's `__getattr__` could fail on an instance without
    # fields.
    if (setstate := getattr(cls, "__setstate__", None)) is not None:
        setstate(self, state)
    else:
        self.__dict__.update(state)
    # Also the plain modules in it, before their arrays are missed somewhere else.
    for module in all_modules(self):
        declarations(type(module))
    return self
