"""What a call consists of: arrays, and all that its program depends on.

JAX flattens. Its treedefs alone do not say which program is right: to a treedef, `1`,
`True` and `1.0` are equal. So whenever JAX passes a node, the static data of that node
are listed, too.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._tree.base import is_eqx_module
from .._tree.unbuilt import dict_of, fields_of, Unbuilt


# Stands for the called function, which a form must not keep alive.
_CALLED: Final = object()


class Form(NamedTuple):
    """A flattened tree.

    - `treedef`: JAX's, in which a module that is not built yet is a leaf.
    - `static`: the static data of all nodes, and then the leaves that are not arrays;
        of a module that is not built yet, its `Token`.
    - `places`: the positions of the leaves in `static`.
    - `arrays`: in JAX's order, also those of modules that are not built yet.
    """

    treedef: Any
    static: list[Any]
    places: list[int]
    arrays: list[Any]


def form_of(tree: Any, origin: Any = None) -> Form:
    """The form of a tree. The called function, `origin`, may be a leaf."""
    static: list[Any] = []
    unread: dict[int, Unbuilt] = {}  # by the `id` of the module

    def look(node: Any) -> bool:
        """List the static data of a node. Is it a module that is not built yet?"""
        read = _READERS.get(type(node), _learn)
        if read is None:
            return False
        data = read(node)
        if type(data) is Unbuilt:
            unread[id(node)] = data
            return True
        static.extend(data)
        return False

    leaves, treedef = jtu.tree_flatten(tree, is_leaf=look)
    arrays: list[Any] = []
    places: list[int] = []
    for place, x in enumerate(leaves):
        if type(x) in _ARRAYS:
            arrays.append(x)
            continue
        places.append(place)
        if (unbuilt := unread.get(id(x))) is not None:
            arrays += unbuilt.arrays
            static.append(unbuilt.token)
        else:
            static.append(_CALLED if x is origin else x)
    return Form(treedef, static, places, arrays)


# --- The static data of nodes ---------------------------------------------------------


# How to read the static data of a node, by its class; `None` for a node without any,
# and for a leaf. If a module is not built yet, its reader returns its `Unbuilt`. JAX
# itself keeps the classes of nodes alive.
_Reader = Callable[[Any], Any]
_READERS: Final[dict[type, _Reader | None]] = dict.fromkeys(
    (list, tuple, bool, int, float, str, type(None), types.FunctionType)
)
_ARRAYS: Final[set[type]] = set()


def _learn(x: Any) -> Any:
    """The static data of `x`. The next node of its class has an entry in `_READERS`."""
    cls = type(x)
    if is_eqx_module(x):
        read = _reader_of_modules(cls)
    elif eqx.is_array(x):
        _ARRAYS.add(cls)
        read = None
    elif jtu.all_leaves([x]):
        return ()  # and no entry: the class may be registered as a node later
    else:
        is_named_tuple = _one_level(x) == (cls,)
        read = None if is_named_tuple else _one_level
    _READERS[cls] = read
    return () if read is None else read(x)


def _reader_of_modules(cls: type) -> _Reader:
    names = static_names(cls)

    def read(module: Any) -> Any:
        fields = dict_of(module)
        # After `object.__setattr__`, the arrays are no longer those of the module.
        if type(fields) is Unbuilt and not fields:
            return fields
        fields = fields_of(module)
        return [fields.get(name) for name in names]

    return read


def static_names(cls: type) -> tuple[str, ...]:
    """The names of the static fields of a module."""
    return tuple(f.name for f in dataclasses.fields(cls) if f.metadata.get("static"))


def _one_level(node: Any) -> tuple[Any, ...]:
    """The static data of any other node, such as the keys of a dict."""
    _, data = jtu.default_registry.flatten_one_level(node)
    return tuple(data) if type(data) in (list, tuple) else (data,)
