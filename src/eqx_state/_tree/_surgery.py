"""Modules by name: list them, map over them, configure them."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx

from .._typing import KeyPath, PyTree
from ._base import (
    declared_fields,
    field_names,
    INFERENCE,
    INIT_DONE,
    is_eqx_module,
    is_module,
    MARKS,
)
from ._children import map_children
from ._walk import copy_tree, name_of, walk
from ._weak_types import strengthen_field


_Tree = TypeVar("_Tree")


def modules(tree: PyTree) -> list[tuple[str, eqx.Module]]:
    """Every `eqx.Module` in `tree` once, with its name; parents first.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        model = eqx.nn.Sequential([es.nn.BatchNorm(3), eqx.nn.Dropout(0.5)])
        names = [name for name, module in es.modules(model)]
        assert names == ["", "layers[0]", "layers[1]"]
        ```
    """
    found: dict[int, tuple[str, eqx.Module]] = {}
    for visit in walk(tree):
        if not visit.is_leaf:
            found.setdefault(id(visit.node), (visit.name, visit.node))
    return list(found.values())


def map_modules(f: Callable[[Any, str], Any], tree: _Tree) -> _Tree:
    """`tree` with every `eqx.Module` replaced by `f(module, name)`, children first.

    **Arguments:**

    - `f`: takes a module, whose own submodules are already replaced, and its name;
        returns what takes its place.
    - `tree`: any pytree. A module in two places is mapped once.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr


        def without_bias(module, name):
            if isinstance(module, eqx.nn.Linear):
                return eqx.tree_at(lambda m: m.bias, module, None)
            return module


        mlp = es.map_modules(without_bias, eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0)))
        assert mlp.layers[0].bias is None
        ```
    """
    # By `id`, with the node, so that no other object gets its `id`.
    done: dict[int, tuple[Any, Any]] = {}

    def rebuild(node: Any, path: KeyPath) -> Any:
        if id(node) in done:
            return done[id(node)][1]
        out = map_children(lambda key, child: rebuild(child, (*path, key)), node)
        if is_eqx_module(node):
            out = f(out, name_of(path))
            done[id(node)] = node, out
        return out

    return rebuild(tree, ())


def configure(tree: _Tree, **attributes: Any) -> _Tree:
    """`tree` with these attributes set on every module that has them.

    **Raises:**

    - `ValueError`: no module has one of them.

    !!! example

        ```python
        import eqx_state as es

        model = es.configure([es.nn.BatchNorm(3), es.nn.Dropout(0.5)], p=0.1)
        assert model[1].p == 0.1
        ```
    """
    tree = copy_tree(tree)
    places = [(m, n) for _, m in modules(tree) for n in attributes if _has(m, n)]
    if missing := set(attributes) - {name for _, name in places}:
        names = ", ".join(f"`{name}`" for name in sorted(missing))
        known = sorted({name for _, m in modules(tree) for name in field_names(m)})
        raise ValueError(
            f"`es.configure`: no module in the tree has an attribute {names}. "
            + (f"There are: {', '.join(known)}." if known else "No module has a field.")
        )
    for module, name in places:
        _assign(module, name, attributes[name])
    return tree


def _has(module: eqx.Module, name: str) -> bool:
    hidden = (INIT_DONE, INFERENCE, MARKS)
    return name not in hidden and name in {f.name for f in dataclasses.fields(module)}


def replace(module: Any, **fields: Any) -> Any:
    """A copy of an `es.Module` with these fields; `TypeError` for an unknown name."""
    for name in fields:
        if not _has(module, name):
            raise TypeError(
                f"`{type(module).__qualname__}.replace`: there is no field `{name}`. "
                f"{declared_fields(module)}"
            )
    new = copy_tree(module)
    for name, value in fields.items():
        _assign(new, name, value)
    return new


def _assign(module: eqx.Module, name: str, value: Any) -> None:
    if is_module(module):
        value = strengthen_field(type(module), name, value)
        if name == "frozen":  # for all of the module, whatever was said before
            object.__setattr__(module, MARKS, ())
    object.__setattr__(module, name, value)
