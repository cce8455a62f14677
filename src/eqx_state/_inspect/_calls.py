"""What the modules of a model are called with, and what they return: only shapes.

Python looks up `__call__` on the class, and to patch a class would affect every other
model. So in a private copy each module gets a subclass of its class, which records the
calls. Nothing is computed.
"""

import contextlib
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._transforms._mutable import carried, mutable
from .._tree._base import is_eqx_module
from .._tree._modes import eval
from .._tree._surgery import map_modules
from .._tree._walk import is_array, is_numpy
from .._typing import PyTree


@dataclasses.dataclass
class Call:
    """The first call of a module, and how many there were."""

    inputs: str
    outputs: str
    times: int = 1


class _Place:
    """Where a module records its calls, as static data, which survives transforms.

    `by_name` tells modules apart that are equal otherwise.
    """

    def __init__(self, calls: dict[str, Call], name: str, by_name: bool):
        self.calls, self.name = calls, name
        self.key = (id(calls), name if by_name else None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def note(self, inputs: str) -> Call | None:
        """Note that a call begins; return it if it is the module's first."""
        if self.name in self.calls:
            self.calls[self.name].times += 1
            return None
        return self.calls.setdefault(self.name, Call(inputs, ""))


class _Quiet:
    """Keeps the user's `__init_subclass__`, perhaps a registry, from running."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


_PLACE = "_eqx_state_place_of_record"


# Not a leak: JAX keeps every pytree class forever anyway.
@ft.cache
def _recording(cls: Any) -> Any:
    """A subclass of a module class whose instances record their calls."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        call = super(recording, self).__call__
        if (place := getattr(self, _PLACE)) is None:  # made by `type(self)(...)`
            return call(*args, **kwargs)
        first = place.note(_show_arguments(args, kwargs))
        out = call(*args, **kwargs)
        if first is not None:
            first.outputs = summary(out)
        return out

    ft.update_wrapper(__call__, cls.__call__, updated=())
    body = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {_PLACE: Any},
        _PLACE: eqx.field(default=None, init=False, repr=False, static=True),
    }
    recording = type(cls)(cls.__name__, (_Quiet, cls), body)
    return recording


def _recorded(tree: PyTree, calls: dict[str, Call], by_name: bool) -> PyTree:
    """A copy of a tree whose modules record their calls."""

    def copy(module: Any, name: str) -> Any:
        # An `eqx.nn.Shared` returns not an output but a part of the model.
        if not callable(module) or isinstance(module, eqx.nn.Shared):
            return module
        try:
            cls = _recording(type(module))
        except Exception:  # its metaclass forbids it, so its calls are not recorded
            return module
        new = object.__new__(cls)
        new.__dict__.update(module.__dict__, **{_PLACE: _Place(calls, name, by_name)})
        return new

    return map_modules(copy, tree)


def model_of(tree: PyTree, inputs: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """The model in a callable, and a function that puts another model in its place."""
    found = carried(tree)
    if found is None and not inputs:
        return tree, lambda model: model
    if found is None or (inputs and not callable(tree)):
        name = getattr(tree, "__name__", type(tree).__qualname__)
        raise TypeError(
            f"`es.tabulate` was given inputs, and `{name}` is not a model that can be"
            " called; a function is not looked into. Pass a module, a bound method"
            " `model.encode`, a transform of `es` such as `es.vmap(model)`, or"
            " `functools.partial(model, key=key)` for keyword arguments."
        )
    return found


def record(
    model: PyTree, put: Callable[[Any], Any], inputs: tuple[Any, ...]
) -> dict[str, Call]:
    """The calls that `put(model)(*inputs)` makes in eval mode, by module name."""
    # Modules that are told apart never reuse each other's traces, so every call is
    # seen. But a model that stacks its layers needs them equal. Then it is traced with
    # equal ones, and some calls may be missed.
    model = eval(model)
    with contextlib.suppress(Exception):
        return _calls(model, put, inputs, by_name=True)
    return _calls(model, put, inputs, by_name=False)


def _calls(
    model: PyTree, put: Any, inputs: tuple[Any, ...], by_name: bool
) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    # NumPy arrays stay concrete: the model may use them as shapes.
    parts = eqx.partition(model, lambda x: is_array(x) and not is_numpy(x))
    args = eqx.partition(inputs, is_array)

    def call(arrays: tuple[Any, Any]) -> None:
        private = _recorded(eqx.combine(arrays[0], parts[1]), calls, by_name)
        given = eqx.combine(arrays[1], args[1])
        out, _ = mutable(put(private))(*given)
        if "" not in calls:  # another method than `__call__`
            calls[""] = Call(_show_arguments(given, {}), summary(out))

    jax.eval_shape(call, (parts[0], args[0]))
    return calls


# --- In words -------------------------------------------------------------------------


def summary(tree: PyTree) -> str:
    """A pytree with the shapes and dtypes of its arrays, `f32[4,32]`."""

    def struct(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x

    return eqx.tree_pformat(
        jtu.tree_map(struct, tree, is_leaf=_is_opaque),
        width=40,
        struct_as_array=True,
        truncate_leaf=_is_opaque,
    )


def _is_opaque(x: Any) -> bool:
    return is_eqx_module(x) or isinstance(x, eqx.nn.State)


def _show_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    # Equinox's layers pass `key=None` on to each other, which says nothing.
    named = [f"{name}={summary(x)}" for name, x in kwargs.items() if x is not None]
    return "\n".join([*map(summary, args), *named])
