"""`es.per_layer`: an optax transformation that treats each layer of a stack alone."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax

from .._tree.base import is_module
from .._tree.keys import is_key, key_at, num_key_axes
from .._tree.parts import check_has_axes, in_a_layer, is_in_a_layer
from .._tree.walk import leaves, name_of
from .._typing import PyTree
from .groups import with_extra_args


class PerLayerState(NamedTuple):
    """The states of a transformation: that of all other arrays, and one per stack.

    `stacks` has them by the name of the stack. All of their arrays have the axes of the
    layers in front, such as a count for each layer.
    """

    others: Any
    stacks: dict[str, Any]


class _Part(NamedTuple):
    """The arrays of a stack, or all arrays outside of stacks.

    In a stack of stacks, those of an inner stack.
    """

    name: str | None  # of the stack; `None` outside of stacks
    lengths: tuple[int, ...]  # of the stacks around the arrays, outermost first
    positions: list[int]  # of the arrays among the leaves


def per_layer(
    tx: optax.GradientTransformation
    | optax.MultiSteps
    | Callable[[Any], optax.GradientTransformation | optax.MultiSteps],
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation that runs `tx` on each layer of each stack.

    To optax, an `es.nn.Stacked` is one array for all of its layers. Transformations
    that look at whole arrays would treat twelve layers as one: trust ratios (`lamb`,
    `lars`), `muon`, `adafactor`, norms of blocks, adaptive clipping, masks by `ndim`.
    With `es.per_layer` they give the result that they give for a list of layers. `tx`
    runs under `jax.vmap`, so the program has one size at any depth, and moments stay
    stacked. Arrays outside of stacks are updated as usual.

    Element-wise transformations (`sgd`, `adam`, `adamw`, `lion`, …) do not need it.
    Inside, `tx` sees the arrays of one layer, so keep outside what looks across arrays:
    `optax.clip_by_global_norm`, `optax.apply_if_finite`, a line search, `optax.lbfgs`,
    methods that estimate one learning rate for the model (`dog`, `prodigy`,
    `mechanize`), and `schedule_free`, whose `schedule_free_eval_params` needs its state
    outside. For example,
    `optax.chain(optax.clip_by_global_norm(1.0), es.per_layer(optax.lamb(1e-3)))`.

    The layers do not get functions of all parameters, such as `value_fn=`. A mask that
    is a function is called with the arrays of one layer. A mask that is a tree of bools
    is used as it is, and not checked: if you have made it from the shapes of the
    stacked arrays, it sees an axis too many.

    After `optimizer.refit(model)`, a layer that was appended to a stack has counts of
    0. It has the hyperparameters of the other layers, if these are all equal and `tx`
    does not make them differ; otherwise those that `tx` gives it.

    **Arguments:**

    - `tx`: an optax transformation; or a function of the number of the layer, a traced
        integer, that returns one. In a stack of stacks of length `n`, layer `j` of
        stack `i` has the number `i * n + j`. With a function, every parameter has to be
        in a stack.

    **Returns:**

    A transformation for `es.Optimizer`, or for optax alone. It can be one of several
    groups, and be inside `optax.MultiSteps` or `optax.inject_hyperparams`, or around
    them. If they are inside, each layer has its own values.

    **Raises:**

    - `TypeError`: `tx` is neither a transformation nor a function that returns one for
        the number of a layer.
    - `ValueError`, in `init`: `tx` is a function, and an array is not in a stack.
    - `ValueError`, in `update`: there is one gradient for each example; or in
        `es.shard_map`, a device has only some of the layers.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.numpy as jnp
        import jax.random as jr
        import optax

        keys = jr.split(jr.key(0), 12)
        blocks = es.nn.Stacked.make(lambda k: eqx.nn.Linear(4, 4, key=k), keys)
        head = eqx.nn.Linear(4, 2, key=jr.key(1))
        model = {"blocks": blocks, "head": head}

        tx = optax.chain(optax.clip_by_global_norm(1.0), es.per_layer(optax.lamb(1e-3)))
        optimizer = es.Optimizer(tx).init(model)
        assert optimizer.opt_state[1].stacks["['blocks']"][0].count.shape == (12,)

        # Learning rates that grow from the first layer to the last:
        rates = es.per_layer(lambda layer: optax.adamw(1e-3 * 0.8 ** (11 - layer)))
        rules = {es.inside(es.nn.Stacked): rates, ...: optax.adamw(1e-3)}
        optimizer = es.Optimizer(rules).init(model)
        ```
    """
    make: Any = None if is_transformation(tx) else tx
    name = getattr(tx, "__qualname__", type(tx).__name__)
    if make is not None and not _is_users_function(make):
        raise TypeError(_NOT_A_TX.format(f"`{name}` was given"))

    def of(layer: Any) -> optax.GradientTransformationExtraArgs:
        made: Any = tx if make is None else make(layer)
        if not is_transformation(made):
            given = f"`{name}` returned `{type(made).__qualname__}`"
            raise TypeError(_NOT_A_TX.format(given))
        return with_extra_args(made)

    def init(params: PyTree) -> PerLayerState:
        parts = _by_stack(params)
        if make is not None and None in parts:
            outside = leaves(params)[parts[None].positions[0]]
            raise ValueError(_OUTSIDE.format(outside.name))

        def made(part: _Part) -> Any:
            def init_layer(layer: Any, params: PyTree) -> Any:
                own_key = ft.partial(_own_key, part, layer)
                return jtu.tree_map(own_key, of(layer).init(params))

            own = _only(params, part)
            return _placed(_mapped(init_layer, part, own), own)

        return _state({name: made(part) for name, part in parts.items()})

    def update(
        updates: PyTree,
        state: PerLayerState,
        params: PyTree | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PerLayerState]:
        values, structure = jtu.tree_flatten(updates)
        if params is not None:
            olds = structure.flatten_up_to(params)
            for visit, old in zip(leaves(updates), olds, strict=True):
                if visit.context.stacks and visit.node.shape != old.shape:
                    raise ValueError(_OTHER_SHAPE.format(visit.name))
        # Trees like the parameters are mapped, and all other arguments are shared.
        like = {k: x for k, x in extra.items() if jtu.tree_structure(x) == structure}
        shared = {k: x for k, x in extra.items() if k not in like}

        def updated(part: _Part) -> Any:
            # A function of all parameters, such as `value_fn=`, is none of one layer.
            is_shared = lambda x: not (part.lengths and is_function(x))  # noqa: E731
            own = {k: x for k, x in shared.items() if is_shared(x)}

            def update_layer(layer: Any, trees: Any, like: Any, state: Any) -> Any:
                updates, params = trees
                return of(layer).update(updates, state, params, **like, **own)

            trees = [_only(x, part) for x in (updates, params)]
            also = {k: _only(x, part) for k, x in like.items()}
            old = state.others if part.name is None else state.stacks[part.name]
            new, old = _mapped(update_layer, part, trees, also, old)
            for i, x in zip(part.positions, jtu.tree_leaves(new), strict=True):
                values[i] = x
            return old

        states = {k: updated(part) for k, part in _by_stack(updates).items()}
        return structure.unflatten(values), _state(states)

    return optax.GradientTransformationExtraArgs(init, update)


def is_transformation(x: Any) -> bool:
    """Whether `x` is a transformation, and not an `es.Module` or a class."""
    is_tx = hasattr(x, "init") and hasattr(x, "update")
    return is_tx and not isinstance(x, type) and not is_module(x)


def _is_users_function(x: Any) -> bool:
    """Whether `x` may be a function of the layer, and not, say, `optax.adam` itself."""
    is_model = isinstance(x, (type, eqx.Module))
    return callable(x) and not is_model and not is_of_optax(x)


def is_of_optax(x: Any) -> bool:
    """Whether optax defines a function."""
    return str(getattr(x, "__module__", "")).partition(".")[0] == "optax"


def _by_stack(tree: PyTree) -> dict[str | None, _Part]:
    """The arrays of each stack, by the name of the stack, and those outside."""
    found: dict[str | None, _Part] = {}
    for i, visit in enumerate(leaves(tree)):
        name, lengths, stacks = None, (), visit.context.stacks
        if stacks and not is_in_a_layer():  # there, the arrays lack the axis
            check_has_axes(visit)
            name = name_of(visit.path[: stacks[-1][0]])
            lengths = tuple(n for _, n in stacks)
        found.setdefault(name, _Part(name, lengths, [])).positions.append(i)
    return found


def _state(states: dict[Any, Any]) -> PerLayerState:
    return PerLayerState(states.pop(None, None), states)


def _only(tree: PyTree, part: _Part) -> PyTree:
    """`tree` with the leaves of one part; every other leaf is a hole of optax.

    Not `None`, which some transformations read as a parameter.
    """
    values, structure = jtu.tree_flatten(tree)
    hole, own = optax.MaskedNode(), {*part.positions}
    return structure.unflatten(x if i in own else hole for i, x in enumerate(values))


def _mapped(f: Callable[..., Any], part: _Part, *trees: PyTree) -> Any:
    """`f(layer, *trees)` for each layer of a stack, with the number of the layer."""
    if not part.lengths:
        return f(None, *trees)
    numbers = jnp.arange(math.prod(part.lengths)).reshape(part.lengths)
    for _ in part.lengths:
        f = jax.vmap(f)
    with in_a_layer():
        return f(numbers, *trees)


def _placed(state: PyTree, params: PyTree) -> PyTree:
    """The state with moments in the shards of their parameters.

    `jnp.zeros_like` creates them there, but not under `vmap`.
    """
    structure = jtu.tree_structure(params)
    is_like = lambda x: jtu.tree_structure(x) == structure  # noqa: E731

    def place(moment: Any, x: Any) -> Any:
        is_known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        if not is_known or len(x.devices()) == 1 or moment.shape != x.shape:
            return moment
        return jax.device_put(moment, x.sharding)

    return jtu.tree_map(
        lambda x: jtu.tree_map(place, x, params) if is_like(x) else x,
        state,
        is_leaf=is_like,
    )


def _own_key(part: _Part, layer: Any, x: Any) -> Any:
    """The key of this layer, if `x` is a key: layers must not draw the same noise."""
    if part.name is None or not is_key(x) or num_key_axes(x):
        return x
    return jr.fold_in(key_at(x, part.name), layer)


def is_function(x: Any) -> bool:
    """Whether `x` is a function, and not a pytree that can be called."""
    return callable(x) and jtu.all_leaves([x])


_NOT_A_TX: Final = """`es.per_layer` takes an optax transformation, \
`es.per_layer(optax.lamb(1e-3))`, or a function of the layer's number that returns \
one, `es.per_layer(lambda layer: optax.adamw(1e-3 * 0.8 ** (11 - layer)))`, but {}."""

_OUTSIDE: Final = """`es.per_layer` was given a function of the layer's number, but \
`{}` is not in an `es.nn.Stacked`. Give such arrays a group of their own:

    es.Optimizer({{es.inside(es.nn.Stacked): es.per_layer(make), ...: tx}})"""

_OTHER_SHAPE: Final = """`es.per_layer`: the gradient and the parameter `{}` have \
different shapes. A transformation that takes one gradient for each example looks \
across layers, so keep it outside: \
`optax.chain(optax.contrib.differentially_private_aggregate(...), es.per_layer(tx))`."""
