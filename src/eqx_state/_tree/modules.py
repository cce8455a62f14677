"""The modules of a tree: list them, map over them, and replace their fields."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx

from .._errors import public_name
from .._typing import KeyPath, PyTree, Tree
from .base import FROZEN_PATHS, INFERENCE, INIT_DONE, is_eqx_module, is_module
from .context import map_children
from .dtypes import NUMBERS, strengthen_field
from .parts import check_stack, without_axis
from .select import check_function_first
from .unbuilt import fields_of
from .walk import copy_tree, name_of, walk


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


def map_modules(f: Callable[[Any, str], Any], tree: Tree) -> Tree:
    """`tree` with every `eqx.Module` replaced by `f(module, name)`, children first.

    **Arguments:**

    - `f`: takes a module, whose submodules have already been replaced, and its name.
        Returns the replacement. An `es.nn.Stacked` contains one module for all of its
        layers, whose arrays have an extra first axis.
    - `tree`: any pytree. A module that occurs twice is mapped once.

    **Raises:**

    - `TypeError`: `f` returned `None` for the root; or the tree was passed before the
        function.
    - `ValueError`: `f` put an array into an `es.nn.Stacked` that lacks the axis of the
        layers. Map over each layer instead, and stack the results.

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
    check_function_first("es.map_modules(f, tree)", f, tree)
    # From `id` to node and result. Storing the node keeps its `id` from being reused.
    done: dict[int, tuple[Any, Any]] = {}

    def rebuild(node: Any, path: KeyPath) -> Any:
        if id(node) in done:
            return done[id(node)][1]
        out = map_children(lambda key, child: rebuild(child, (*path, key)), node)
        if is_eqx_module(node):
            # Stacks in an ensemble have an extra first axis, so they cannot be checked.
            is_stack = is_module(node) and node._eqx_state_is_stack
            if is_stack and without_axis(node) is None:
                check_stack(out)
            out = f(out, name_of(path))
            done[id(node)] = node, out
        return out

    new = rebuild(tree, ())
    if new is None and tree is not None:
        raise TypeError(_NO_ROOT.format(type(tree).__name__))
    return new


def configure(tree: Tree, **attributes: Any) -> Tree:
    """`tree` with these attributes set on every module that has them.

    An `es.nn.Stacked` contains one module for all of its layers: an array for it needs
    the extra first axis of the stack.

    **Raises:**

    - `ValueError`: no module has one of them, or a layer of `es.nn` does not accept the
        value.

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
        raise ValueError(
            f"`es.configure`: no module in the tree has an attribute {names}."
        )
    for module, name in places:
        old, new = getattr(module, name), attributes[name]
        if is_eqx_module(old) and isinstance(new, (*NUMBERS, str)):
            said = name, public_name(type(old)), type(module).__qualname__
            raise ValueError(_A_LAYER.format(*said))
        _assign(module, name, new)
    for module in {id(m): m for m, _ in places if is_module(m)}.values():
        module._eqx_state_check()
    return tree


def _has(module: eqx.Module, name: str) -> bool:
    hidden = (INIT_DONE, INFERENCE, FROZEN_PATHS)
    return name not in hidden and name in {f.name for f in dataclasses.fields(module)}


def replace(module: Any, **fields: Any) -> Any:
    """A copy of a module with these fields; `TypeError` for an unknown name.

    In a field that declares a kind, a number keeps the dtype of the array that it
    replaces, if that can hold it.
    """
    for name in fields:
        if not _has(module, name):
            cls = type(module).__qualname__
            raise TypeError(f"`{cls}.replace`: there is no field `{name}`.")
    new = copy_tree(module)
    for name, value in fields.items():
        _assign(new, name, value)
    if is_module(new):
        new._eqx_state_check()
    return new


def _assign(module: eqx.Module, name: str, value: Any) -> None:
    if is_module(module):
        old = fields_of(module).get(name)
        value = strengthen_field(type(module), name, value, old)
        if name == "frozen":  # replaces earlier settings for parts
            object.__setattr__(module, FROZEN_PATHS, ())
    object.__setattr__(module, name, value)


_NO_ROOT: Final = """`es.map_modules`: the function returned `None` for the `{}` \
itself. Modules are frozen, so it must return a new module, and one that should not \
change as it is: `return module`."""

_A_LAYER: Final = """`es.configure`: `{0}` is a layer, `{1}`, in `{2}`, and not a \
number. Name an attribute of the layer, such as `p=0.1` of a dropout."""
