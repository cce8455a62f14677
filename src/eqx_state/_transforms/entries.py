"""The error for an entry in a container of a module that no scope owns.

Modules are frozen, but not the dicts and lists in their fields. A transform calls its
function with copies of such a module, and what the function puts into a dict of a copy
is lost with it. Where the function itself is the module and not a copy, a tracer would
remain in the dict.
"""

from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._state.scope import is_owned
from .._tree.base import dynamic_names, INFERENCE, is_eqx_module
from .._tree.compare import identical
from .._tree.unbuilt import fields_of
from .._tree.walk import flatten
from .reach import WRAPPERS


class Contents(NamedTuple):
    """A container in a field of a module, and what was in it before a call."""

    module: eqx.Module
    name: str
    container: Any
    leaves: list[Any]
    structure: Any


def contents_in(tree: Any) -> list[Contents]:
    """All containers in fields of modules in `tree` that no scope owns."""
    modules: list[eqx.Module] = []

    def is_leaf(x: Any) -> bool:
        if is_eqx_module(x) and not is_owned(x):
            modules.append(x)
        # Of an iterator JAX would warn, and an outdated state refuses to flatten.
        return is_owned(x) or isinstance(x, (Iterator, eqx.nn.State))

    jtu.tree_leaves(tree, is_leaf=is_leaf)
    return [
        Contents(module, name, value, *_flat(value))
        for module in modules
        if not isinstance(module, WRAPPERS)
        for name in dynamic_names(type(module))
        if name != INFERENCE
        if isinstance(value := fields_of(module).get(name), _CONTAINERS)
    ]


# A tuple does not change, but may contain a list that does.
_CONTAINERS: Final = (dict, list, tuple)


def _flat(container: Any) -> tuple[list[Any], Any]:
    return jtu.tree_flatten(container, is_leaf=lambda x: not isinstance(x, _CONTAINERS))


def check_unchanged(before: list[Contents], out: Any) -> None:
    """Raise `FrozenInstanceError` if a container changed, unless `out` has its module.

    `out`: the output of the call, in which the module leaves the transform.
    """
    for module, name, container, leaves, structure in before:
        now, new_structure = _flat(container)
        if new_structure == structure and identical(now, leaves):
            continue
        if not any(x is module for x in flatten(out)[2]):
            cls, code = type(module).__qualname__, _LIST
            code = _DICT if isinstance(container, Mapping) else code
            raise FrozenInstanceError(_LOST.format(cls, name) + code.format(name))


_LOST: Final = """Cannot change what is in `{0}.{1}`: this `{0}` is outside \
`es.mutable`, and a transform calls its function with a copy of it, so the change \
would be lost. Assign a new container, and call the transform through `es.mutable`, \
which returns the new model:

    y = es.jit(model)(x)                       # wrong
    y, model = es.mutable(es.jit(model))(x)    # right
"""

_DICT: Final = """    self.{0}["max"] = x                        # wrong
    self.{0} = {{**self.{0}, "max": x}}        # right"""

_LIST: Final = """    self.{0}.append(x)                         # wrong
    self.{0} = [*self.{0}, x]                  # right"""
