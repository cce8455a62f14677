"""Train and eval, freeze and unfreeze: new trees with every module switched."""

from collections.abc import Callable
from typing import Any, Final

import jax.tree_util as jtu

from .._typing import PyTree, Tree
from .base import (
    FROZEN_PATHS,
    FrozenPaths,
    has_inference,
    is_module,
    Placeholder,
    sorted_frozen_paths,
    step_to,
    Steps,
)
from .compare import check_not_repeated
from .context import children, ROOT
from .unbuilt import fields_of
from .walk import all_modules, copy_tree, is_array, leaves
from .where import is_marker, marker, selected_nodes, Where


def train(tree: Tree, mode: bool = True) -> Tree:
    """`tree` with every module in it in train mode.

    Sets `training` on every `es.Module`, and the bool attribute `inference` on all
    other modules, such as Equinox's layers. `equinox.nn.inference_mode` does the same.

    **Arguments:**

    - `tree`: any pytree.
    - `mode`: `False` for eval mode.

    **Raises:**

    - `ValueError`: a stateful module occurs twice in the tree.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es

        model = es.eval((es.nn.BatchNorm(3), eqx.nn.Dropout(0.5)))
        assert not model[0].training and model[1].inference
        model = es.train(model)
        assert model[0].training and not model[1].inference
        ```
    """
    check_not_repeated(tree)
    tree = copy_tree(tree)
    for module in all_modules(tree):
        if is_module(module):
            object.__setattr__(module, "training", bool(mode))
        elif has_inference(module):
            object.__setattr__(module, "inference", not mode)
    return tree


def eval(tree: Tree) -> Tree:
    """`tree` with every module in it in eval mode: `es.train(tree, False)`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es

        assert es.eval(eqx.nn.Dropout(0.5)).inference
        ```
    """
    return train(tree, False)


def freeze(tree: Tree, where: Callable[[Tree], Any] | None = None) -> Tree:
    """`tree` with all of it frozen, or only the nodes that `where` selects.

    Frozen parameters are not `es.trainable`: they get no gradient, no weight decay and
    no optimizer state. Frozen layers of `es.nn` use their `BatchStat` without updating
    it, as in eval mode. Other state can still be written.

    `es.freeze` sets the flag `frozen` of every `es.Module` in a frozen node. Such a
    module remains frozen if you move it. Plain Equinox layers and single arrays have no
    flag: the nearest `es.Module` above them stores their paths. A replacement that you
    put at such a path is frozen, too, until `es.unfreeze`.

    **Arguments:**

    - `tree`: any pytree.
    - `where`: selects a node or a tuple of nodes, as in `equinox.tree_at`: modules,
        containers or arrays. Default: the whole tree.

    **Raises:**

    - `TypeError`: `where` is not a function, or is a filter or a module.
    - `ValueError`: `where` selects something without arrays; it selects a node that
        does not contain an `es.Module` and is not inside one; or a stateful module
        occurs twice in the tree.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr


        class Net(es.Module):
            norm: es.nn.BatchNorm
            mlp: eqx.nn.MLP


        net = Net(es.nn.BatchNorm(3), eqx.nn.MLP(3, 1, 8, 1, key=jr.key(0)))
        net = es.freeze(net, lambda net: (net.norm, net.mlp.layers[0]))
        trained = [part.name for part in es.parts(es.filter(net, es.trainable))]
        assert trained == ["mlp.layers[1].weight", "mlp.layers[1].bias"]
        ```
    """
    return _set_frozen(tree, where, True)


def unfreeze(tree: Tree, where: Callable[[Tree], Any] | None = None) -> Tree:
    """`tree` with all of it, or only the nodes that `where` selects, trainable again.

    Arguments and errors are those of `es.freeze`. To unfreeze a part of a frozen model,
    select it from the whole model: `es.unfreeze(model, lambda m: m.head)`.
    `model.replace(head=es.unfreeze(model.head))` is frozen, because `model` still is.

    !!! example

        ```python
        import eqx_state as es

        norm = es.freeze(es.nn.BatchNorm(3))
        assert norm.frozen and not es.unfreeze(norm).frozen
        ```
    """
    return _set_frozen(tree, where, False)


def _set_frozen(tree: Tree, where: Where | None, frozen: bool) -> Tree:
    check_not_repeated(tree)
    values, structure = jtu.tree_flatten(tree)
    # One array may occur twice, so replace each occurrence by a unique sentinel.
    marked = [marker(v) if _is_place(v.node) else v.node for v in leaves(tree)]
    copy = jtu.tree_unflatten(structure, marked)
    nodes = [copy] if where is None else selected_nodes(where, copy)
    ways = _ways_to(nodes, copy)
    for node in nodes:
        if id(node) not in ways:
            raise ValueError(_NOTHING_TO_FREEZE)
        _set_at(node, ways[id(node)], frozen)
    return jtu.tree_unflatten(jtu.tree_structure(copy), values)


def _is_place(x: Any) -> bool:
    """Whether `x` is an array, or a placeholder for one."""
    return is_array(x) or isinstance(x, Placeholder)


# The nodes above a node, the root first, and the key of the next node in each.
_Way = tuple[tuple[Any, Any], ...]


def _set_at(node: Any, way: _Way, frozen: bool) -> None:
    """Freeze or unfreeze a node of a private copy, in place."""
    steps = [step_to(above, key) for above, key in way]
    # The modules around the node, and the path from each to it; the nearest last.
    around = [(x, tuple(steps[i:])) for i, (x, _) in enumerate(way) if is_module(x)]
    modules = [x for x in all_modules(node) if is_module(x)]
    holds_any = any(map(is_marker, jtu.tree_leaves(node)))
    if not modules and not (around and holds_any):
        raise ValueError(_NOTHING_TO_FREEZE)
    for module in modules:
        object.__setattr__(module, "frozen", frozen)
        _set_frozen_paths(module, {})
    for module, steps in around:
        # Drop the frozen paths of the node and below, including outdated ones, which
        # differ only in the length of a sequence.
        n, names = len(steps), [name for name, _ in steps]
        frozen_paths: FrozenPaths = fields_of(module)[FROZEN_PATHS]
        others = {p: x for p, x in frozen_paths if [name for name, _ in p[:n]] != names}
        _set_frozen_paths(module, others)
    # Add a frozen path only if the node would otherwise inherit a different setting.
    context = ROOT
    for above, key in way:
        context = context.enter(above, key)
    if around and context.frozen is not frozen:
        module, steps = around[-1]
        _set_frozen_paths(
            module, {**dict(fields_of(module)[FROZEN_PATHS]), steps: frozen}
        )


def _set_frozen_paths(module: Any, paths: dict[Steps, bool]) -> None:
    object.__setattr__(module, FROZEN_PATHS, sorted_frozen_paths(paths))


def _ways_to(nodes: list[Any], tree: PyTree) -> dict[int, _Way]:
    """The ways to these nodes by `id`. Nodes that are not in the tree are left out.

    In one pass, because there may be hundreds: `lambda m: [x.bias for x in m.layers]`.
    """
    wanted, found = {id(node) for node in nodes}, dict[int, _Way]()

    def visit(node: Any, way: _Way) -> None:
        if id(node) in wanted:
            found.setdefault(id(node), way)
        for key, child in children(node) or ():
            visit(child, (*way, (node, key)))

    visit(tree, ())
    return found


_NOTHING_TO_FREEZE: Final = """There is no `es.Module` to freeze here: `where` must \
select nodes of the tree that contain an `es.Module`, or layers and arrays inside one, \
which stores their paths. Select a part from the model, `model.unfreeze(lambda model: \
model.head)`, not `es.unfreeze(model.head)`. (Layers of an `es.nn.Stacked` can only be \
frozen together: `model.blocks.layers.norm`.) Otherwise, declare the field as a \
constant, `backbone: es.Buffer[eqx.nn.MLP]`, or exclude it where you use the \
parameters: `wrt=es.all_of(es.trainable, es.not_(es.under(lambda model: \
model.backbone)))`."""
