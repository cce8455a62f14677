"""`es.per_layer`: an optax transformation that treats each layer of a stack alone."""

import functools as ft
import inspect
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax

from .._compat import manual_axes
from .._tree.keys import is_key, key_at, num_key_axes
from .._tree.parts import check_has_axes, in_a_layer, is_in_a_layer
from .._tree.walk import leaves, name_of, Visit
from .._typing import KeyPath, PyTree
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

    name: str  # of the stack; outside of stacks, of the first array
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

    A mask that is a function is called with the arrays of one layer. A mask that is a
    tree of bools is used as it is, and not checked: if you have made it from the
    shapes of the stacked arrays, it sees an axis too many.

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
    - `ValueError`, in `update`: `tx` calls an argument that is a function of all
        parameters, such as `value_fn=`; or there is one gradient for each example; or
        in `es.shard_map`, a device has only some of the layers.

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
    make: Any = None if _is_transformation(tx) else tx
    if make is not None:
        given = getattr(tx, "__qualname__", type(tx).__qualname__)
        if not _is_users_function(make):
            raise TypeError(_NOT_A_TX.format(given))
        if not _takes_a_number(make):
            raise TypeError(_NO_ARGUMENT.format(given))

    def of(layer: Any) -> optax.GradientTransformationExtraArgs:
        return with_extra_args(tx if make is None else _made(make, layer))

    def init(params: PyTree) -> PerLayerState:
        others, stacks = _by_stack(params)
        if make is not None and others is not None:
            raise ValueError(_OUTSIDE.format(others.name))

        def made(part: _Part) -> Any:
            def init_layer(layer: Any, params: PyTree) -> Any:
                own = ft.partial(_own_key, part, layer)
                return jtu.tree_map(own, of(layer).init(params))

            own_params = _only(params, part)
            return _placed(_mapped(init_layer, part, own_params), own_params)

        return _state(made, others, stacks)

    def update(
        updates: PyTree,
        state: PerLayerState,
        params: PyTree | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PerLayerState]:
        others, stacks = _by_stack(updates)
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
            def update_layer(layer: Any, trees: Any, like: Any, state: Any) -> Any:
                updates, params = trees
                own = {k: _of_all(k, x) for k, x in shared.items()}
                return of(layer).update(updates, state, params, **like, **own)

            trees = [x if x is None else _only(x, part) for x in (updates, params)]
            also = {k: _only(x, part) for k, x in like.items()}
            is_stack = part is not others
            old = state.stacks[part.name] if is_stack else state.others
            new, old = _mapped(update_layer, part, trees, also, old)
            for i, x in zip(part.positions, jtu.tree_leaves(new), strict=True):
                values[i] = x
            return old

        state = _state(updated, others, stacks)
        return structure.unflatten(values), state

    return optax.GradientTransformationExtraArgs(init, update)


def _is_transformation(x: Any) -> bool:
    is_model = isinstance(x, (type, eqx.Module))
    return hasattr(x, "init") and hasattr(x, "update") and not is_model


def _is_users_function(x: Any) -> bool:
    """Whether `x` may be a function of the layer, and not, say, `optax.adam` itself."""
    of_optax = str(getattr(x, "__module__", "")).partition(".")[0] == "optax"
    is_model = isinstance(x, (type, eqx.Module))
    return callable(x) and not is_model and not of_optax


def _takes_a_number(make: Callable[..., Any]) -> bool:
    """Whether the user's function can be called with one argument."""
    try:
        inspect.signature(make).bind(0)
    except (TypeError, ValueError):  # `ValueError`: it has no signature
        return False
    return True


def _made(make: Callable[[Any], Any], layer: Any) -> Any:
    """The transformation that the user's function returns for a layer."""
    try:
        made = make(layer)
    except _NOT_CONCRETE as error:
        error.add_note(_TRACED)
        raise
    if not _is_transformation(made):
        name = getattr(make, "__qualname__", type(make).__qualname__)
        raise TypeError(_RETURNED.format(name, type(made).__qualname__))
    return made


_NOT_CONCRETE: Final = (
    jax.errors.ConcretizationTypeError,  # `if layer > 1`
    jax.errors.TracerArrayConversionError,  # `np.sqrt(layer)`
    jax.errors.TracerIntegerConversionError,  # `rates[layer]`
)


def _by_stack(tree: PyTree) -> tuple[_Part | None, list[_Part]]:
    """The arrays outside of stacks, if there are any, and those of each stack."""
    others: list[int] = []
    stacks: dict[KeyPath, _Part] = {}
    visits = leaves(tree)
    for i, visit in enumerate(visits):
        above = visit.context.stacks
        if above and not is_in_a_layer():  # there, the arrays lack the axis
            _check_has_all_layers(visit)
            path = visit.path[: above[-1][0]]
            new = _Part(name_of(path), tuple(n for _, n in above), [])
            stacks.setdefault(path, new).positions.append(i)
        else:
            others.append(i)
    first = _Part(visits[others[0]].name, (), others) if others else None
    return first, [*stacks.values()]


def _check_has_all_layers(visit: Visit) -> None:
    """Raise `ValueError` unless an array has the axes of the stacks around it."""
    lengths = tuple(n for _, n in visit.context.stacks)
    if manual_axes() and visit.node.shape[: len(lengths)] != lengths:
        length = "×".join(map(str, lengths))
        raise ValueError(_A_SHARD.format(visit.name, visit.node.shape, length))
    check_has_axes(visit)


def _state(
    f: Callable[[_Part], Any], others: _Part | None, stacks: list[_Part]
) -> PerLayerState:
    first = None if others is None else f(others)
    return PerLayerState(first, {stack.name: f(stack) for stack in stacks})


def _only(tree: PyTree, part: _Part) -> PyTree:
    """`tree` with the leaves of one part; every other leaf is a hole of optax.

    Not `None`, which some transformations read as a parameter.
    """
    values, structure = jtu.tree_flatten(tree)
    kept: list[Any] = [optax.MaskedNode()] * len(values)
    for i in part.positions:
        kept[i] = values[i]
    return structure.unflatten(kept)


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
        is_sharded = is_known and len(x.devices()) > 1
        is_alike = moment.shape == x.shape
        return jax.device_put(moment, x.sharding) if is_sharded and is_alike else moment

    return jtu.tree_map(
        lambda x: jtu.tree_map(place, x, params) if is_like(x) else x,
        state,
        is_leaf=is_like,
    )


def _own_key(part: _Part, layer: Any, x: Any) -> Any:
    """The key of this layer, if `x` is a key: layers must not draw the same noise."""
    is_one = part.lengths != () and is_key(x) and num_key_axes(x) == 0
    return jr.fold_in(key_at(x, part.name), layer) if is_one else x


def _of_all(name: str, x: Any) -> Any:
    """An argument of `update` as a layer sees it: no function of all parameters."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(_OF_ALL.format(name))

    is_function = callable(x) and jtu.all_leaves([x])
    return refuse if is_function and is_in_a_layer() else x


_NOT_A_TX: Final = """`es.per_layer` takes an optax transformation, \
`es.per_layer(optax.lamb(1e-3))`, or a function of the layer's number that returns \
one, `es.per_layer(lambda layer: optax.adamw(1e-3 * 0.8 ** (11 - layer)))`, but `{}` \
was given."""

_NO_ARGUMENT: Final = """The function that `es.per_layer` takes has the number of the \
layer as its argument, but `{}` cannot be called with one argument. Pass a \
transformation, `es.per_layer(optax.lamb(1e-3))`, or a function, `es.per_layer(lambda \
layer: optax.adamw(1e-3 * 0.8 ** (11 - layer)))`."""

_RETURNED: Final = """The function that `es.per_layer` takes returns an optax \
transformation, but `{}` returned `{}`: `es.per_layer(lambda layer: optax.adamw(1e-3 * \
0.8 ** (11 - layer)))`."""

_TRACED: Final = """The function in `es.per_layer` is called once for all layers, so \
the number of the layer is traced. Compute with it in `jax.numpy`, such as \
`optax.sgd(jnp.where(layer > 1, 1e-3, 1e-4))` or `optax.sgd(jnp.array(rates)[layer])`. \
For layers with different transformations, divide the stack into two, \
`(stacked[:2], stacked[2:])`, and give each one a group of its own."""

_A_SHARD: Final = """`es.per_layer` needs all layers of a stack, but in this \
`es.shard_map`, `{}` has shape {}, and the stack has {} layers. Return the gradients \
from `es.shard_map`, and update outside: `model, optimizer = optimizer.update(grads, \
model)`."""

_OUTSIDE: Final = """`es.per_layer` was given a function of the layer's number, but \
`{}` is not in an `es.nn.Stacked`. Give such arrays a group of their own:

    es.Optimizer({{es.inside(es.nn.Stacked): es.per_layer(make), ...: tx}})"""

_OF_ALL: Final = """The transformation in `es.per_layer` called `{}=`, a function of \
all parameters, but it sees one layer. Keep what looks across arrays outside, such as \
a line search: `optax.chain(es.per_layer(tx), optax.scale_by_zoom_linesearch(15))`."""

_OTHER_SHAPE: Final = """`es.per_layer`: the gradient and the parameter `{}` have \
different shapes. A transformation that takes one gradient for each example looks \
across layers, so keep it outside: \
`optax.chain(optax.contrib.differentially_private_aggregate(...), es.per_layer(tx))`."""
