"""Train and eval, freeze and unfreeze: new trees with every module switched."""

from collections.abc import Callable
from typing import Any, TypeVar

from ._aliasing import copy_apart
from ._base import has_inference, is_module
from ._filters import selected_nodes, Where
from ._walk import modules_in, set_flags, Visit


_Tree = TypeVar("_Tree")


def train(tree: _Tree, mode: bool = True) -> _Tree:
    """`tree` with every module in it in train mode.

    Sets `training` on every `es.Module`, and the bool attribute `inference` of all
    other modules, so that Equinox's own layers follow. `equinox.nn.inference_mode` does
    the same.

    **Arguments:**

    - `tree`: any pytree.
    - `mode`: `False` for eval mode.

    **Raises:**

    - `ValueError`: one stateful module is in two places of the tree.

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
    mode = bool(mode)

    def flags(visit: Visit) -> dict[str, Any]:
        if is_module(visit.node):
            return {"training": mode}
        return {"inference": not mode} if has_inference(visit.node) else {}

    return set_flags(tree, flags, copy_apart)


def eval(tree: _Tree) -> _Tree:
    """`tree` with every module in it in eval mode: `es.train(tree, False)`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es

        assert es.eval(eqx.nn.Dropout(0.5)).inference
        ```
    """
    return train(tree, False)


def freeze(tree: _Tree, where: Callable[[_Tree], Any] | None = None) -> _Tree:
    """`tree` with every `es.Module` in it frozen.

    The parameters of a frozen module, and of plain Equinox layers inside it, are not
    `es.trainable`: they get no gradient, no weight decay and no optimizer memory. The
    layers of `es.nn` keep their `BatchStat` and use it, as in eval mode.

    **Arguments:**

    - `tree`: any pytree.
    - `where`: selects a node or a tuple of nodes, as in `equinox.tree_at`; only the
        `es.Module`s in these are frozen. Default: all.

    **Raises:**

    - `ValueError`: a selected node holds no `es.Module`; or one stateful module is in
        two places of the tree.

    !!! example

        ```python
        import eqx_state as es

        model = es.freeze([es.nn.BatchNorm(3), es.nn.BatchNorm(3)], lambda m: m[0])
        assert (model[0].frozen, model[1].frozen) == (True, False)
        assert es.filter(model, es.trainable)[0].weight is None
        ```
    """
    return _set_frozen(tree, where, True)


def unfreeze(tree: _Tree, where: Callable[[_Tree], Any] | None = None) -> _Tree:
    """`tree` with every `es.Module` in it (or under `where`) trainable again.

    Arguments and errors as `es.freeze`.

    !!! example

        ```python
        import eqx_state as es

        norm = es.freeze(es.nn.BatchNorm(3))
        assert norm.frozen and not es.unfreeze(norm).frozen
        ```
    """
    return _set_frozen(tree, where, False)


def _set_frozen(tree: _Tree, where: Where | None, frozen: bool) -> _Tree:
    # In the copy no two places share a module, so `id`s tell places apart.
    tree = copy_apart(tree)
    inside = {id(visit.node) for visit in modules_in(tree)}
    nodes = [tree] if where is None else selected_nodes(where, tree)
    chosen = [[visit.node for visit in modules_in(node)] for node in nodes]
    if not all(found and {id(m) for m in found} <= inside for found in chosen):
        raise ValueError(_NOTHING_TO_FREEZE)
    for module in (m for found in chosen for m in found):
        object.__setattr__(module, "frozen", frozen)
    return tree


_NOTHING_TO_FREEZE = """There is no `es.Module` to freeze here: only `es.Module`s have \
the flag `frozen`, plain Equinox layers do not. Either declare the field that holds \
the layer as a constant,

    backbone: es.Buffer[eqx.nn.MLP]

or leave it out where the parameters are used,

    wrt = es.all_of(es.trainable, es.not_(es.under(lambda model: model.backbone)))
    es.value_and_grad(loss_fn, wrt=wrt), es.Optimizer(tx, wrt=wrt)

A `where` selects a node, or a tuple of nodes, that holds an `es.Module`, such as \
`lambda model: model.layers[0]`."""
