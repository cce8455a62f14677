"""The error for an entry in a container that a transform has copied.

Modules are frozen, but not the dicts and lists in their fields and around them. A
transform calls its function with copies of a module that no scope owns, and of a dict
of modules, and what the function puts into a copy is lost with it. Where the function
itself is the module and not a copy, a tracer would remain in the dict.
"""

from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._state.scope import is_owned
from .._tree.base import dynamic_names, INFERENCE
from .._tree.compare import identical
from .._tree.unbuilt import fields_of
from .reach import is_model


class Contents(NamedTuple):
    """A container that a function gets, and what was in it before the call.

    It is in the field `name` of `module`. `module` is `None` for an argument that is a
    container of modules.
    """

    module: eqx.Module | None
    name: str
    container: Any
    leaves: list[Any]
    structure: Any


def contents_in(tree: Any) -> list[Contents]:
    """The containers in fields of unowned modules in `tree`, and those of modules."""
    found: list[Contents] = []
    around: list[Contents] = []

    def look(x: Any) -> bool:
        if is_owned(x):
            return True
        if is_model(x):
            for name in dynamic_names(type(x)):
                value = fields_of(x).get(name) if name != INFERENCE else None
                if isinstance(value, _CONTAINERS):
                    found.append(Contents(x, name, value, *_flat(value)))
        elif isinstance(x, (dict, list)):
            leaves, structure = _flat(x)
            if any(map(is_model, leaves)):
                around.append(Contents(None, "", x, leaves, structure))
        # Of an iterator JAX would warn, and an outdated state refuses to flatten.
        return isinstance(x, (Iterator, eqx.nn.State))

    jtu.tree_leaves(tree, is_leaf=look)
    return found + around  # a container in a field is in both


# A tuple does not change, but may contain a list that does.
_CONTAINERS: Final = (dict, list, tuple)


def _flat(container: Any) -> tuple[list[Any], Any]:
    return jtu.tree_flatten(container, is_leaf=lambda x: not isinstance(x, _CONTAINERS))


def check_unchanged(before: list[Contents], out: Any) -> None:
    """Raise `FrozenInstanceError` for a change that the output, `out`, does not show.

    Of a container around modules, only a new entry counts: a function may take its
    argument apart, `head = models.pop("head")`.
    """
    for module, name, container, leaves, structure in before:
        now, new_structure = _flat(container)
        if new_structure == structure and identical(now, leaves):
            continue
        nodes: list[Any] = []
        jtu.tree_leaves(out, is_leaf=nodes.append)
        given_back = set(map(id, nodes))
        if module is None:
            known = given_back.union(map(id, leaves))
            is_lost = id(container) not in given_back
            if is_lost and any(id(x) not in known for x in now):
                raise FrozenInstanceError(_ENTRY.format(type(container).__name__))
        elif id(module) not in given_back:
            code = _DICT if isinstance(container, Mapping) else _LIST
            text = _LOST.format(type(module).__qualname__, name) + code.format(name)
            raise FrozenInstanceError(text)


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

_ENTRY: Final = """Cannot put a new entry into a `{0}` of modules here: it is an \
argument of a transform, which calls its function with a copy of it, so the entry \
would be lost. Return the container, or what you would put into it:

    es.jit(lambda nets, x: nets.update(g=new))(nets, x)               # wrong
    nets = es.jit(lambda nets, x: {{**nets, "g": new}})(nets, x)        # right"""
