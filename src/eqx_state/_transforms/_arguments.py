"""Arguments and outputs: what JAX would trace, what may not be given, their names."""

import functools as ft
import inspect
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._state._init import check_initialized
from .._state._module import Module
from .._state._scope import is_owned
from .._tree._aliasing import check_not_shared
from .._tree._walk import is_array, leaves, Visit
from .._typing import KeyPath
from ._closures import owned_in
from ._stand_ins import by_entry
from ._transform import Transform


def check_given(*arguments: Any) -> None:
    """Raise `ValueError` if an argument has one stateful module in two places.

    In the trace they would be two modules. Owned modules are exempt: they are not
    flattened, and stay the objects that they are.
    """
    for tree in arguments:
        if not (is_array(tree) or owned_in(tree)):
            check_not_shared(tree)


def check_all_initialized(models: list[Any]) -> None:
    """Raise `NotInitializedError`, which names the place, if a model is not ready."""
    for x in models:
        if getattr(x, "__func__", None) is not Module.init:
            check_initialized(x)


def why_not_called(f: Any, *args: Any) -> str | None:
    """Why `f` cannot be called with these arguments, as far as its signature says."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # it has none
        return None
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(error)
    return None


def positional_names(f: Any) -> list[str]:
    """The names of the positional parameters of `f`, if it has a signature."""
    while isinstance(f, Transform):
        f = f.f
    if isinstance(f, eqx.Partial):  # into which `inspect` does not look
        f = ft.partial(f.func, *f.args, **f.keywords)
    try:
        found = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return []
    last = inspect.Parameter.POSITIONAL_OR_KEYWORD  # or a kind before it
    return [p.name for p in found if p.kind <= last]


def argument_name(argument: int | str, below: KeyPath, names: list[str]) -> str:
    """A leaf of an argument, given by position or by name, as `model.layers[0].w`."""
    if isinstance(argument, int):
        is_named = argument < len(names)
        argument = names[argument] if is_named else f"args[{argument}]"
    return f"{argument}{jtu.keystr(below)}"


def is_mappable(visit: Visit) -> bool:
    """Whether JAX would trace a leaf: an array, or a number outside of a module."""
    return is_array(visit.node) or (
        visit.context.owner is None and eqx.is_array_like(visit.node)
    )


def is_traced(tree: Any) -> Any:
    """For each leaf of an argument or of an output, whether JAX would trace it.

    Owned modules count as leaves, and are never traced: the roots take care of them.
    """
    flags = [is_mappable(visit) for visit in leaves(tree)]
    traced = [not is_owned(x) and flag[0] for x, flag in by_entry(tree, flags)]
    return jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_owned), traced)
