"""What the modules of a model are called with, and what they return: only shapes."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._kinds._kinds import State
from .._state._scope import Scope
from .._transforms._mutable import carried, target, thread
from .._tree._base import is_eqx_module
from .._tree._modes import eval
from .._tree._observe import Observer
from .._tree._walk import is_array, is_numpy
from .._typing import PyTree


@dataclasses.dataclass
class Call:
    """The first call of a module, and how many there were."""

    inputs: str
    outputs: str
    times: int = 1


class _Name:
    """The name of a module. Without `by_name` all are equal, as the modules are."""

    def __init__(self, name: str, by_name: bool):
        self.name, self.key = name, name if by_name else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Name) and self.key == other.key


class _Table(Observer):
    """Notes the calls by the name of the module."""

    def __init__(self, by_name: bool):
        # Its own, so that no function that JAX has traced before goes unseen.
        self.key = object()
        self.by_name = by_name
        self.calls: dict[str, Call] = {}

    def select(self, name: str, module: Any) -> _Name:
        return _Name(name, self.by_name)

    def called(self, scope: Any, mark: Any, call: Any, args: Any, kwargs: Any) -> Any:
        __tracebackhide__ = True
        if mark.name in self.calls:
            self.calls[mark.name].times += 1
            return call(*args, **kwargs)
        first = self.calls[mark.name] = Call(_show_arguments(args, kwargs), "")
        out = call(*args, **kwargs)
        first.outputs = summary(out)
        return out


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
    table = _Table(by_name)
    # NumPy arrays stay concrete: the model may use them as shapes.
    parts = eqx.partition(model, lambda x: is_array(x) and not is_numpy(x))
    args = eqx.partition(inputs, is_array)

    def call(arrays: tuple[Any, Any]) -> None:
        model, given = map(eqx.combine, arrays, (parts[1], args[1]))
        called = target(put(model), given, {}, None, "es.tabulate")
        scope = Scope((State,), observer=table)
        out, _ = thread(called.model, scope, called.run, called)
        if "" not in table.calls:  # another method than `__call__`
            table.calls[""] = Call(_show_arguments(given, {}), summary(out))

    jax.eval_shape(call, (parts[0], args[0]))
    return table.calls


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
