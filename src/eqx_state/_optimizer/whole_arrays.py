"""Finds transformations of optax to which a stack is not the same as its layers.

A transformation is a pair of functions, and the transformations that it is made of are
in their closures. So follow the closures: the `__qualname__` of a function says which
function of optax has made it.
"""

import contextlib
import functools as ft
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jax.tree_util as jtu
import optax

from .._tree.parts import in_a_layer, slice_at
from .._tree.walk import leaves, map_leaves, name_of, Visit
from .._typing import PyTree
from .layers import PerLayerState


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
    for problem in _problems(tx, params, {}):
        raise ValueError(_PER_LAYER.format(problem, _stack_in(params)))


def _stack_in(params: PyTree) -> str | None:
    """The name of a stack that contains one of the arrays; `None` if there is none."""
    for visit in leaves(params):
        if stacks := visit.context.stacks:
            return name_of(visit.path[: stacks[-1][0]])
    return None


def _problems(x: Any, params: PyTree, seen: dict[Any, Any]) -> Iterator[str]:
    """The transformations and masks in `x` that would be applied to a stack."""
    key = id(x), id(params)
    if key in seen or _stack_in(params) is None:
        return
    seen[key] = x, params  # keep them alive, so that no `id` is used twice
    name, inside = _maker(x), _closure(x)
    if name in _WHOLE:
        yield f"`{name}` looks at whole arrays"
    elif name == "masked" and "inner" in inside:
        yield from _unlike_layers(inside["mask"], params)
        selected = _where(inside["mask"], True, params)
        yield from _problems(inside["inner"], selected, seen)
    elif name == "partition" and "transforms" in inside:
        labels = inside["param_labels"]
        yield from _unlike_layers(labels, params)
        for label, tx in inside["transforms"].items():
            yield from _problems(tx, _where(labels, label, params), seen)
    elif "numeric_hps" in inside:  # `inject_hyperparams`, which makes it in each step
        values = {k: f(f.init()) for k, f in inside["sched_hps"].items()}
        values |= {**inside["numeric_hps"], **inside["other_hps"]}
        yield from _problems(inside["inner_factory"](**values), params, seen)
    elif getattr(x, "__module__", "") != PerLayerState.__module__:
        for part in _made_of(x):
            yield from _problems(part, params, seen)


def _made_of(x: Any) -> Iterable[Any]:
    """What a function or an object could call."""
    if isinstance(x, types.FunctionType):
        defaults = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
        return (*_closure(x).values(), *defaults)
    if isinstance(x, types.MethodType):
        return x.__self__, x.__func__
    if isinstance(x, ft.partial):
        return (x.func, *x.args, *x.keywords.values())
    if isinstance(x, Mapping):
        return x.values()
    if isinstance(x, (tuple, list)):
        return x
    is_like_optax = hasattr(x, "init") and hasattr(x, "update")  # `optax.MultiSteps`
    return getattr(x, "__dict__", {}).values() if is_like_optax else ()


def _closure(f: Any) -> dict[str, Any]:
    """The variables of a function's closure."""
    found: dict[str, Any] = {}
    code, cells = getattr(f, "__code__", None), getattr(f, "__closure__", None)
    for name, cell in zip(code.co_freevars if code else (), cells or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    return found


def _maker(f: Any) -> str:
    """The function of optax that has made `f`; `""` for any other `f`."""
    is_optax = str(getattr(f, "__module__", "")).partition(".")[0] == "optax"
    is_function = isinstance(f, types.FunctionType)
    return f.__qualname__.partition(".")[0] if is_optax and is_function else ""


# --- Masks and labels: a tree of values, or a function of the parameters that returns
# one. The tree may be a prefix of the parameters.


def _is_function(mask: Any) -> bool:
    return callable(mask) and jtu.all_leaves([mask])


def _answers(mask: Any, params: PyTree) -> PyTree:
    """The value that a mask has for each array."""
    values = mask(params) if _is_function(mask) else mask
    return jtu.tree_map(
        lambda x, below: jtu.tree_map(lambda _: x, below), values, params
    )


def _where(mask: Any, value: Any, params: PyTree) -> PyTree:
    """The parameters for which a mask has this value; others are holes of optax."""
    answers = jtu.tree_leaves(_answers(mask, params))
    flat, structure = jtu.tree_flatten(params)
    pairs = zip(flat, answers, strict=True)
    return structure.unflatten(
        x if a == value else optax.MaskedNode() for x, a in pairs
    )


def _unlike_layers(mask: Any, params: PyTree) -> Iterator[str]:
    """Yields a mask that has different values for a stack and for one layer of it."""
    if _is_function(mask):
        whole, layer = jtu.tree_leaves(_answers(mask, params)), None
        # A mask that fails for layers is meant for stacks.
        with contextlib.suppress(Exception), in_a_layer():
            layer = jtu.tree_leaves(_answers(mask, map_leaves(_first_layer, params)))
        if layer is not None and layer != whole:
            name, own = _maker(mask), mask.__qualname__
            yield f"`{name}` looks at whole arrays" if name else _MASK.format(own)


def _first_layer(visit: Visit) -> Any:
    index = (0,) * len(visit.context.stacks)
    return slice_at(visit.node, index) if index else visit.node


_MASK: Final = "the mask `{}` has different values for the arrays of one layer"

_PER_LAYER: Final = """`es.Optimizer`: {0}, and to optax the `es.nn.Stacked` at `{1}` \
is one array for all of its layers. Apply it to each layer, as in a list: \
`es.per_layer(tx)`. What looks across arrays stays outside: \
`optax.chain(optax.clip_by_global_norm(1.0), es.per_layer(tx))`. If whole stacks are \
meant: `es.Optimizer(tx, stacks="arrays")`."""
