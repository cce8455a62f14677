"""Finds transformations of optax to which a stack is not the same as its layers.

A transformation is a pair of functions, and the transformations that it is made of are
in their closures. So follow the closures: the `__qualname__` of a function says which
function of optax has made it.
"""

import contextlib
import inspect
import types
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.tree_util as jtu
import optax

from .._transforms.reach import captured
from .._tree.parts import in_a_layer, slice_at
from .._tree.walk import leaves, map_leaves, name_of, Visit
from .._typing import PyTree
from .layers import is_function, is_of_optax, PerLayerState


# Each of them looks at single arrays: their norms, means, or numbers of axes. A test
# compares all transformations of optax with this list.
_WHOLE: Final = frozenset(
    {
        "adaptive_grad_clip",
        "centralize",
        "clip_by_block_rms",
        "scale_by_distance_over_gradients",
        "scale_by_factored_rms",
        "scale_by_galore",
        "scale_by_muon",
        "scale_by_novograd",
        "scale_by_param_block_norm",
        "scale_by_param_block_rms",
        "scale_by_sm3",
        "scale_by_trust_ratio",
    }
)


def check_stacks(tx: Any, params: PyTree) -> None:
    """Raise `ValueError` if `tx` treats a stack in `params` unlike a list of layers."""
    if (stack := _stack_in(params)) is None:
        return
    seen: set[int] = set()
    todo = [tx]
    for x in todo:  # it grows, and keeps all objects alive, so that no `id` is reused
        if id(x) in seen or getattr(x, "__module__", "") == PerLayerState.__module__:
            continue
        seen.add(id(x))
        name = _maker(x)
        if name in _WHOLE:
            raise ValueError(_PER_LAYER.format(_LOOKS.format(name), stack))
        inside = inspect.getclosurevars(x).nonlocals if name else {}
        if name == "masked" and "inner" in inside:
            _check_labels(inside["mask"], {True: inside["inner"]}, params, stack)
        elif name == "partition" and "transforms" in inside:
            _check_labels(inside["param_labels"], inside["transforms"], params, stack)
        elif "numeric_hps" in inside:  # `inject_hyperparams`, which makes it each time
            values = {k: f(f.init()) for k, f in inside["sched_hps"].items()}
            values |= {**inside["numeric_hps"], **inside["other_hps"]}
            todo.append(inside["inner_factory"](**values))
        else:
            todo += captured(x)
            if isinstance(x, Mapping):  # also of a user's class, as the following
                todo += x.values()
            elif isinstance(x, (list, tuple)):
                todo += x
            if hasattr(x, "init") and hasattr(x, "update"):  # as `optax.MultiSteps`
                todo += getattr(x, "__dict__", {}).values()


def _stack_in(params: PyTree) -> str | None:
    """Where a stack is that contains one of the arrays; `None` if there is none."""
    for visit in leaves(params):
        if stacks := visit.context.stacks:
            name = name_of(visit.path[: stacks[-1][0]])
            return f"at `{name}`" if name else "that it trains"
    return None


def _maker(f: Any) -> str:
    """The function of optax that has made `f`; `""` for any other `f`."""
    is_made = is_of_optax(f) and isinstance(f, types.FunctionType)
    return f.__qualname__.partition(".")[0] if is_made else ""


def _check_labels(
    labels: Any, txs: Mapping[Any, Any], params: PyTree, stack: str
) -> None:
    """`check_stacks` for the transformation of each label, and for the labels.

    `labels`: a tree of labels, which may be a prefix of the parameters; or a function
    of the parameters that returns one, as masks by `ndim` do.
    """

    def of(params: PyTree) -> list[Any]:
        tree = labels(params) if is_function(labels) else labels
        return jtu.tree_leaves(jax.tree.broadcast(tree, params))

    found = of_layer = of(params)
    # A function that fails for layers is meant for stacks.
    with contextlib.suppress(Exception), in_a_layer():
        of_layer = of(map_leaves(_first_layer, params))
    if of_layer != found:
        name = getattr(labels, "__qualname__", type(labels).__qualname__)
        raise ValueError(_PER_LAYER.format(_MASK.format(name), stack))
    values, structure = jtu.tree_flatten(params)
    for label, tx in txs.items():
        pairs = zip(values, found, strict=True)
        own = [x if y == label else optax.MaskedNode() for x, y in pairs]
        check_stacks(tx, structure.unflatten(own))


def _first_layer(visit: Visit) -> Any:
    index = (0,) * len(visit.context.stacks)
    return slice_at(visit.node, index) if index else visit.node


_LOOKS: Final = "`{}` looks at whole arrays"

_MASK: Final = "the mask `{}` has different values for the arrays of one layer"

_PER_LAYER: Final = """`es.Optimizer`: {0}, and to optax the `es.nn.Stacked` {1} is \
one array for all of its layers. Apply it to each layer, as in a list: \
`es.per_layer(tx)`. What looks across arrays stays outside: \
`optax.chain(optax.clip_by_global_norm(1.0), es.per_layer(tx))`. If whole stacks are \
meant: `es.Optimizer(tx, stacks="arrays")`."""
