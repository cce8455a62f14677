"""Checks of an optimizer that optax lacks: it broadcasts, and its errors have no names.

What `wrt` may select, whether gradients and state fit the parameters, and the errors.
"""

from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from .._errors import show
from .._kinds.kinds import is_kind, kind_name, Parameter, State
from .._tree.combinators import trainable
from .._tree.compare import is_hole, leaves_like
from .._tree.filters import Filter, filter_text, filters_in
from .._tree.parts import parts
from .._tree.rules import check_names
from .._tree.select import filter
from .._tree.walk import leaves, name_of
from .._typing import KeyPath, PyTree


Shapes: TypeAlias = tuple[tuple[int, ...], ...]


def check_wrt(wrt: Filter, model: PyTree, selected: PyTree) -> None:
    """Raise `ValueError` for arrays that one trains, or does not train, by mistake."""
    check_names(wrt, [model], "`es.Optimizer(wrt=…)`")
    named = tuple(x for x in filters_in(wrt) if is_kind(x) and issubclass(x, State))
    text = filter_text(wrt)
    cure = "es.trainable" if is_kind(wrt) else f"es.all_of(es.trainable, {text})"
    trained = parts(selected)
    for part in trained:
        if issubclass(part.kind, State) and not issubclass(part.kind, named):
            kind = kind_name(part.kind)
            raise ValueError(_STATE.format(text, part.name, kind, cure))
    # If all are frozen, the filter names what to train in a frozen model.
    first = {part.frozen: part.name for part in reversed(trained)}
    if len(first) > 1:
        raise ValueError(_FROZEN.format(text, first[True], first[False], cure))
    for part in parts(filter(model, Parameter)) if wrt is trainable else ():
        # Arrays of integers may be quantized weights, which nobody expects to train.
        is_number = part.value.shape == () and not part.frozen
        if is_number and jnp.issubdtype(part.value.dtype, jnp.integer):
            raise ValueError(_INTEGER.format(part.name, show(part.value)))


def check_no_lookahead(tree: PyTree) -> None:
    """Raise `TypeError` for the parameters or the state of `optax.lookahead`."""
    if any(map(_is_lookahead, jtu.tree_leaves(tree, is_leaf=_is_lookahead))):
        raise TypeError(_LOOKAHEAD)


def _is_lookahead(x: Any) -> bool:
    return isinstance(x, (optax.LookaheadParams, optax.LookaheadState))


def gradients_like(
    grads: PyTree, model: PyTree, selected: PyTree, params: PyTree
) -> PyTree:
    """The gradients of the selected parameters, as a tree like `params`."""
    if isinstance(grads, tuple) and not isinstance(model, tuple):
        raise ValueError(_PAIR)
    given = leaves_like(model, grads, "`es.Optimizer.update`: the tree of gradients")
    known = jtu.tree_leaves(model, is_leaf=is_hole)
    if any(x is None and g is not None for g, x in zip(given, known, strict=True)):
        _check_order(grads, known)
    wanted = jtu.tree_leaves_with_path(selected, is_leaf=is_hole)
    both = zip(wanted, given, strict=True)
    pairs = [(path, x, g) for (path, x), g in both if x is not None]
    # Differentially private transformations take a gradient for each example. With any
    # other transformation, the updates keep the axis of the examples, and
    # `check_updates` rejects them.
    per_example = all(np.shape(g)[1:] == x.shape != np.shape(g) for _, x, g in pairs)
    for path, x, g in pairs:
        if g is None:
            raise ValueError(_NO_GRADIENT.format(_name(path)))
        is_lost = jnp.iscomplexobj(g) and not jnp.iscomplexobj(x)
        if is_lost or (np.shape(g) != x.shape and not per_example):
            found = "gradient", _name(path), show(g), show(x)
            raise ValueError((_COMPLEX if is_lost else _OTHER_SHAPE).format(*found))
    return jtu.tree_unflatten(jtu.tree_structure(params), [g for _, _, g in pairs])


def _check_order(grads: PyTree, known: list[Any]) -> None:
    """Raise `ValueError` if `grads` and the model look swapped."""
    for visit, x in zip(leaves(grads, is_leaf=is_hole), known, strict=True):
        is_foreign = visit.node is not None and not visit.is_a(Parameter)
        if x is None and is_foreign:
            raise ValueError(_SWAPPED.format(visit.name))


def check_shapes(tx: Any, opt_state: PyTree, params: PyTree, before: Shapes) -> None:
    """Raise `ValueError` if the state does not fit: optax would broadcast it."""
    now = shapes_of(params)
    # Inside `vmap` or `shard_map`, the model may be one lane or shard of the one given
    # to `init`. The shapes of the state then differ in the same way.
    if now != before:
        fitting = jax.eval_shape(tx.init, params)
        if shapes_of(fitting) != shapes_of(opt_state):
            named = jtu.tree_leaves_with_path(params)
            each = zip(named, before, strict=True)
            path, x, old = next((p, x, b) for (p, x), b in each if x.shape != b)
            raise ValueError(
                "`es.Optimizer.update`: the model is not what `init` was given:"
                f" {_name(path)} has shape {x.shape}, and had {old}. {SAME_MODEL}"
            )


def check_updates(params: PyTree, updates: PyTree) -> None:
    """Raise `ValueError` if adding an update would change a parameter's shape."""
    named, moves = jtu.tree_leaves_with_path(params), jtu.tree_leaves(updates)
    for (path, x), change in zip(named, moves, strict=False):
        if jnp.broadcast_shapes(x.shape, jnp.shape(change)) != x.shape:
            found = "update", _name(path), show(change), show(x)
            raise ValueError(_OTHER_SHAPE.format(*found))


def shapes_of(tree: PyTree) -> Shapes:
    """The shape of each array, in the order of flattening."""
    return tuple(x.shape for x in jtu.tree_leaves(tree))


def _name(path: KeyPath) -> str:
    return f"`{name_of(path)}`" if path else "the array itself"


_STATE: Final = """`es.Optimizer(wrt={0})` selects `{1}`, which is `{2}`: the forward \
pass writes it, and the optimizer would change it, too. Select only parameters: \
`wrt={3}`. To train it all the same, name its kind: \
`wrt=es.any_of(es.trainable, {2})`."""

_FROZEN: Final = """`es.Optimizer(wrt={0})` selects `{1}`, which is frozen, and \
`{2}`, which is not. Leave out what is frozen, `wrt={3}`, or unfreeze it: `model = \
es.unfreeze(model)`."""

_INTEGER: Final = """`es.Optimizer` cannot train `{}`, a parameter, because it is \
`{}`, and only floats and complex numbers have gradients. Write `1.0` instead of `1`. \
If it is a constant, declare it `es.Buffer`; if the model writes it, `es.State`."""

_LOOKAHEAD: Final = """`es.Optimizer` does not support `optax.lookahead`: its \
parameters are not those of a model but a pair, `optax.LookaheadParams`. Use optax \
directly, on the parameters of the model:

    params, rest = es.partition(model, es.trainable)
    params = optax.LookaheadParams.init_synced(params)
    state = tx.init(params)"""

_SWAPPED: Final = """`es.Optimizer.update`: the gradients contain `{}`, which is not a \
parameter and not in the model: they are a model, and the model is its gradients. Pass \
the gradients first, `model, optimizer = optimizer.update(grads, model)`, and unpack \
results in this order:

    (loss, model), grads = es.value_and_grad(loss_fn)(model, xs)
    grads, model = es.grad(loss_fn)(model, xs)"""

_PAIR: Final = """`es.Optimizer.update` was given a tuple instead of the gradients. \
`es.grad` returns the new model, too: `grads, model = es.grad(loss_fn)(model, xs)`."""

_NO_GRADIENT: Final = """`es.Optimizer.update`: `wrt` of the optimizer selects {}, but \
its gradient is `None`. Give both the same filter: `es.Optimizer(tx, wrt=wrt)` and \
`es.value_and_grad(loss_fn, wrt=wrt)`."""

_COMPLEX: Final = """`es.Optimizer.update`: the {} of {} is `{}`, but the parameter is \
`{}`. Its imaginary part would be lost: pass the gradient of a real loss."""

_OTHER_SHAPE: Final = """`es.Optimizer.update`: the {} of {} is `{}`, but the \
parameter is `{}`. Their shapes must be equal, or optax would broadcast them. Average \
the gradients of several examples first: `jax.tree.map(lambda g: g.mean(axis=0), \
grads)`."""

SAME_MODEL: Final = """Pass the model that `init` was given, or all of its \
parameters: `model.filter(es.Parameter)`. For a model that has changed, also by \
freezing, refit the optimizer, which keeps the state that still fits: `optimizer = \
optimizer.refit(model)`."""
