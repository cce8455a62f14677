"""`es.Optimizer`: an optax transformation and its state, as one pytree."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Self, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from .._errors import NotInitializedError, show
from .._kinds.kinds import is_kind, kind_name, OptState, Parameter, State
from .._state.lazy import check_not_a_class, check_ready
from .._tree.base import is_module
from .._tree.compare import difference, is_hole, leaves_like, same_modes
from .._tree.dtypes import NUMBERS, to_strong
from .._tree.filters import (
    check_filter,
    Filter,
    filter_text,
    filters_in,
    TO_TRAIN,
    trainable,
)
from .._tree.parts import is_inexact, parts
from .._tree.rules import (
    AbstractPerParameter,
    check_names,
    check_rules,
    misplaced,
    nothing_selected,
)
from .._tree.select import filter, update
from .._tree.walk import copy_tree, leaves, name_of
from .._typing import KeyPath, PyTree, Tree
from .groups import (
    by_key,
    GROUP_AT,
    Groups,
    in_groups,
    Labels,
    with_extra_args,
    with_values,
)
from .refit import kept


_Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class _MadeFor:
    """Static data about the model that an optimizer's state was created for."""

    selected: Any  # the structure of the parameters that `wrt` selected in `init`
    labels: Labels | None  # the group of each of these parameters, if there are groups
    shapes: _Shapes  # of these parameters
    opt_state: Any  # the structure of the state itself
    # The argument of `init`: its structure, which of its leaves `wrt` selects and which
    # are numbers, and the shapes of its arrays. Not compared, because an optimizer
    # accepts a model or only its parameters.
    whole: Any = dataclasses.field(compare=False)
    is_selected: tuple[bool, ...] = dataclasses.field(compare=False)
    is_number: tuple[bool, ...] = dataclasses.field(compare=False)
    model: PyTree = dataclasses.field(compare=False)


class Optimizer(AbstractPerParameter):
    """An optax optimizer and its state, as one pytree that passes through `jit`.

    Weight decay, clipping and norms apply only to the leaves that `wrt` selects.

    If `tx` is a mapping of rules, each array that `wrt` selects belongs to one group.
    Each group has its own transformation, which sees only that group.

    `optax.lookahead` is not supported, because its parameters are a pair.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp
        import optax

        model = {"w": jnp.ones(3), "b": jnp.ones(3)}
        optimizer = es.Optimizer(optax.adam(0.1)).init(model)
        grads = jax.grad(lambda m: jnp.sum(m["w"] ** 2))(model)
        model, optimizer = optimizer.update(grads, model)
        assert (model["w"] < 1).all()

        decayed = optax.adamw(0.1, weight_decay=0.1)
        rules = {es.path_matches("*b*"): optax.adam(0.1), ...: decayed}
        optimizer = es.Optimizer(rules).init(model)
        ```
    """

    opt_state: OptState[Any]
    tx: Any = eqx.field(static=True)
    wrt: Filter = eqx.field(static=True)
    _made_for: _MadeFor | None = eqx.field(static=True, repr=False)

    def __init__(
        self,
        tx: optax.GradientTransformation | optax.MultiSteps | Mapping[Any, Any],
        wrt: Filter = trainable,
    ):
        """**Arguments:**

        - `tx`: an optax transformation, such as `optax.adamw(1e-3)`, or an
            `optax.MultiSteps` object; or rules as for `es.spec`, a mapping from filters
            to such transformations, one for each group. In rules, `None` means that an
            array is not updated and uses no memory. Transformations are static and
            compared by identity, so create them once, outside the training loop.
        - `wrt`: the filter for the arrays to optimize. Default: `es.trainable`.

        **Raises:**

        - `TypeError`: `tx` is not a transformation but, say, the model or a learning
            rate; or `wrt`, or a key of the rules, is not a filter.
        """
        self.tx, txs = tx, [tx]
        if isinstance(tx, Mapping):
            check_rules(tx, "`es.Optimizer`")
            self.tx = Groups(tuple(tx), tuple(tx.values()))
            txs = [x for x in tx.values() if x is not None]
        for x in txs:
            if is_module(x) or not hasattr(x, "init"):
                name = getattr(x, "__qualname__", type(x).__qualname__)
                raise TypeError(_NO_MODEL.format("tx", _A_TX, name))
        if any(map(eqx.is_array, jtu.tree_leaves(wrt))):
            raise TypeError(_NO_MODEL.format("wrt", "a filter", type(wrt).__qualname__))
        check_filter(wrt, TO_TRAIN)
        self.wrt = wrt
        self.opt_state = None
        self._made_for = None

    def init(self, model: PyTree) -> Self:
        """The optimizer with its state for a model, or for the parameters of a model.

        **Raises:**

        - `es.NotInitializedError`: the model still contains an `es.Initializer`.
        - `TypeError`: the transformation is or contains `optax.lookahead`; the model is
            a class.
        - `ValueError`: `wrt` selects no array; or some that are frozen, and some that
            are not; or state whose kind it does not name. A parameter is an integer,
            such as `1` for `1.0`. No rule matches one of the parameters, or a filter or
            a name in the rules matches no array of the model. A stateful module occurs
            twice in the model.
        """
        check_not_a_class(model)
        _check_no_lookahead(model)
        selected, labels = self._selected(model), None
        if not jtu.tree_leaves(selected):
            raise nothing_selected("es.Optimizer(wrt", self.wrt, model)
        _check_wrt(self.wrt, model, selected)
        if isinstance(self.tx, Groups):
            labels = self.tx.labels(model, self.wrt)
        values, whole = jtu.tree_flatten(model)
        is_selected = [x is not None for x in whole.flatten_up_to(selected)]
        params = in_groups(selected, labels)
        opt_state = jtu.tree_map(to_strong, self._tx(labels, params).init(params))
        _check_no_lookahead(opt_state)  # of a model that is not a pair
        made = _MadeFor(
            jtu.tree_structure(selected),
            labels,
            _shapes_of(params),
            jtu.tree_structure(opt_state),
            whole,
            tuple(is_selected),
            _are_numbers(values),
            _abstract(model),
        )
        return self._with(opt_state, made)

    def update(
        self, grads: PyTree, model: Tree, *, apply_updates: bool = True, **extra: Any
    ) -> tuple[Tree, Self]:
        """One step: `(updated model, optimizer)`.

        **Arguments:**

        - `grads`: the gradients, as `es.value_and_grad` returns them, each of the shape
            of its parameter. Gradients outside `wrt` are ignored. Those of complex
            parameters are conjugated here, because the gradient of JAX is the conjugate
            of the direction of steepest ascent. A transformation such as
            `optax.contrib.dpsgd` takes one gradient for each example, stacked.
        - `model`: the model, or the parameters, as given to `init`. Its mode may
            differ.
        - `apply_updates`: if `False`, return the updates instead of the model.
        - `**extra`: passed on to transformations with extra arguments, such as
            `value=loss`. Trees like the parameters (`grad=`, conjugated like `grads`),
            and `value_fn=`, work only without groups.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        - `ValueError`: the model or the gradients differ in structure or shapes from
            the model given to `init`; `wrt` selects different leaves; or a gradient is
            complex and its parameter is not (the message names the first path); or the
            result of `es.grad` or `update` was not unpacked.
        """
        made = self._made("update")
        selected = self._selected(model)
        params = _in_mode_of(made.selected, selected, _OTHER_MODEL)
        params = in_groups(params, made.labels)
        # `es.eval((model, optimizer))` changes the mode of the moments, too.
        what = "its state is not what `init` has made"
        state = _in_mode_of(made.opt_state, self.opt_state, what)
        tx = self._tx(made.labels, params)
        _check_shapes(tx, state, params, made.shapes)
        selected = in_groups(selected, made.labels)
        grads = _conjugated(_gradients(grads, model, selected, params))
        if "grad" in extra:
            extra["grad"] = _conjugated(extra["grad"])
        updates, state = tx.update(grads, state, params, **extra)
        _check_updates(params, updates)
        state = jtu.tree_map(to_strong, state)
        made = dataclasses.replace(made, opt_state=jtu.tree_structure(state))
        optimizer = self._with(state, made)
        if apply_updates:
            return update(model, optax.apply_updates(params, updates)), optimizer
        treedef = jtu.tree_structure(selected)
        return jtu.tree_unflatten(treedef, jtu.tree_leaves(updates)), optimizer

    def refit(self, model: PyTree) -> Self:
        """The optimizer for a model that has changed, with the state that still fits.

        Use it after freezing or unfreezing, and after you have replaced or added
        layers. Moments are kept for parameters that still have the same name and shape,
        also if a parameter now belongs to a different group. Counts and hyperparameters
        are kept, too. Everything else is as `init` makes it, such as the moments of
        parameters that are new, unfrozen, or of a different shape.

        Names decide, as in files, not the objects. A layer that you append to a list is
        new. If you take one out of the middle of a list, the names behind it shift, and
        a later layer gets the moments of the one that had its name before.

        **Arguments:**

        - `model`: the new model, or its parameters, as for `init`.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        - All errors of `init`.

        !!! example

            ```python
            import equinox as eqx
            import eqx_state as es
            import jax.random as jr
            import optax


            class Net(es.Module):
                body: eqx.nn.Linear
                head: eqx.nn.Linear


            a, b, c = jr.split(jr.key(0), 3)
            net = Net(eqx.nn.Linear(2, 3, key=a), eqx.nn.Linear(3, 1, key=b))
            optimizer = es.Optimizer(optax.adam(0.1)).init(net)
            net, optimizer = optimizer.update(net, net)  # as if these were gradients

            net = net.replace(head=eqx.nn.Linear(3, 5, key=c))
            adam, *_ = optimizer.refit(net).opt_state
            assert adam.count == 1
            assert (adam.mu.body.weight == optimizer.opt_state[0].mu.body.weight).all()
            assert (adam.mu.head.weight == 0).all()
            ```
        """
        self._made("refit")
        new = self._with(None, None).init(model)
        group = GROUP_AT if isinstance(self.tx, Groups) else None
        return jtu.tree_unflatten(jtu.tree_structure(new), kept(self, new, group))

    @property
    def hyperparams(self) -> dict[Any, Any]:
        """The values that `optax.inject_hyperparams` stores in the state, by name.

        The dict cannot be written: `optimizer.set(…)` returns an optimizer with others.

        With groups, the keys are `(group, name)`, where `group` is the filter in the
        rules. If two values still share a name, their keys are `(path, name)`, with
        their paths in `opt_state`.

        !!! example

            ```python
            import eqx_state as es
            import jax.numpy as jnp
            import optax

            sgd = optax.inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.float32)
            optimizer = es.Optimizer(sgd(learning_rate=0.5)).init({"w": jnp.ones(2)})
            optimizer = optimizer.set(learning_rate=0.25)
            assert optimizer.hyperparams == {"learning_rate": 0.25}
            ```
        """
        self._made("hyperparams")
        return by_key(self.opt_state, self.tx)

    def set(self, *, group: Any = None, **values: Any) -> Self:
        """The optimizer with new hyperparameters: `.set(learning_rate=1e-4)`.

        Structure, shapes and dtypes do not change, so the step is not recompiled.

        **Arguments:**

        - `group`: the filter of the group in the rules, or a path as in `hyperparams`.
            Default: set every value of this name.
        - `**values`: numbers, by their names in `hyperparams`.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        - `ValueError`: there is no hyperparameter of this name, or a schedule drives
            it; or the value is not a number, has a different shape, is a float instead
            of an integer, complex instead of real, or too large for the dtype.
        """
        made = self._made("set")
        return self._with(with_values(self.opt_state, self.tx, group, values), made)

    def _recorded_model(self) -> PyTree:
        return None if self._made_for is None else self._made_for.model

    def _made(self, method: str) -> _MadeFor:
        if self._made_for is None:
            raise NotInitializedError(_BEFORE_INIT.format(method))
        return self._made_for

    def _tx(self, labels: Labels | None, params: PyTree) -> Any:
        if labels is None:
            return with_extra_args(self.tx)
        return self.tx.transformation(labels, params)

    def _selected(self, model: PyTree) -> PyTree:
        values, structure = jtu.tree_flatten(model)
        made = self._made_for
        if made is not None and structure == made.whole:
            # The model that `init` saw: no walk, unless an array became a number.
            if _are_numbers(values) == made.is_number:
                pairs = zip(values, made.is_selected, strict=True)
                kept = [x if is_selected else None for x, is_selected in pairs]
                return jtu.tree_unflatten(structure, kept)
        check_ready(model)
        return filter(model, self.wrt, is_inexact)

    def _with(self, opt_state: PyTree, made_for: _MadeFor | None) -> Self:
        new = copy_tree(self)
        object.__setattr__(new, "opt_state", opt_state)
        object.__setattr__(new, "_made_for", made_for)
        return new


def _check_wrt(wrt: Filter, model: PyTree, selected: PyTree) -> None:
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


def _check_no_lookahead(tree: PyTree) -> None:
    """Raise `TypeError` for the parameters or the state of `optax.lookahead`."""
    if any(map(_is_lookahead, jtu.tree_leaves(tree, is_leaf=_is_lookahead))):
        raise TypeError(_LOOKAHEAD)


def _is_lookahead(x: Any) -> bool:
    return isinstance(x, (optax.LookaheadParams, optax.LookaheadState))


def _are_numbers(values: list[Any]) -> tuple[bool, ...]:
    return tuple([type(x) in NUMBERS for x in values])


def _shapes_of(tree: PyTree) -> _Shapes:
    """The shape of each array, in the order of flattening."""
    return tuple(x.shape for x in jtu.tree_leaves(tree))


def _abstract(model: PyTree) -> PyTree:
    arrays = filter(model, lambda part: True)
    return jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


def _in_mode_of(structure: Any, tree: PyTree, problem: str) -> Any:
    """`tree` in the mode of `structure`, which may differ from it only in modes."""
    # Moments, labels and masks have the mode that the model had in `init`, and optax
    # compares structures.
    if jtu.tree_structure(tree) == structure:
        return tree
    leaves = ["an array"] * structure.num_leaves
    expected, now = map(same_modes, (jtu.tree_unflatten(structure, leaves), tree))
    if jtu.tree_structure(now) != jtu.tree_structure(expected):
        cure = _NEW_ONE if type(now) is type(expected) else _ONE_MODEL
        said = f"`es.Optimizer`: {problem}, {difference(expected, now)}. {cure}"
        raise ValueError(misplaced(tree) or said)
    return jtu.tree_unflatten(structure, jtu.tree_leaves(tree))


# --- Checks that optax lacks: it broadcasts, and its errors have no names -------------


def _gradients(
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
    # `_check_updates` rejects them.
    per_example = all(np.shape(g)[1:] == x.shape != np.shape(g) for _, x, g in pairs)
    for path, x, g in pairs:
        if g is None:
            raise ValueError(_NO_GRADIENT.format(_name(path)))
        is_lost = jnp.iscomplexobj(g) and not jnp.iscomplexobj(x)
        if is_lost or (np.shape(g) != x.shape and not per_example):
            found = "gradient", _name(path), show(g), show(x)
            raise ValueError((_COMPLEX if is_lost else _OTHER_SHAPE).format(*found))
    return jtu.tree_unflatten(jtu.tree_structure(params), [g for _, _, g in pairs])


def _conjugated(grads: PyTree) -> PyTree:
    """The direction of steepest ascent for each gradient of JAX.

    In JAX, a step against the gradient itself does not descend: for `abs(z) ** 2` the
    gradient is `2 * conj(z)`.
    """
    values, treedef = jtu.tree_flatten(grads)
    conjugated = [jnp.conj(g) if jnp.iscomplexobj(g) else g for g in values]
    return jtu.tree_unflatten(treedef, conjugated)


def _check_order(grads: PyTree, known: list[Any]) -> None:
    """Raise `ValueError` if `grads` and the model look swapped."""
    for visit, x in zip(leaves(grads, is_leaf=is_hole), known, strict=True):
        is_foreign = visit.node is not None and not visit.is_a(Parameter)
        if x is None and is_foreign:
            raise ValueError(_SWAPPED.format(visit.name))


def _check_shapes(tx: Any, opt_state: PyTree, params: PyTree, before: _Shapes) -> None:
    """Raise `ValueError` if the state does not fit: optax would broadcast it."""
    now = _shapes_of(params)
    # Inside `vmap` or `shard_map`, the model may be one lane or shard of the one given
    # to `init`. The shapes of the state then differ in the same way.
    if now != before:
        fitting = jax.eval_shape(tx.init, params)
        if _shapes_of(fitting) != _shapes_of(opt_state):
            named = jtu.tree_leaves_with_path(params)
            each = zip(named, before, strict=True)
            path, x, old = next((p, x, b) for (p, x), b in each if x.shape != b)
            raise ValueError(
                "`es.Optimizer.update`: the model is not what `init` was given:"
                f" {_name(path)} has shape {x.shape}, and had {old}. {_NEW_ONE}"
            )


def _check_updates(params: PyTree, updates: PyTree) -> None:
    """Raise `ValueError` if adding an update would change a parameter's shape."""
    named, moves = jtu.tree_leaves_with_path(params), jtu.tree_leaves(updates)
    for (path, x), change in zip(named, moves, strict=False):
        if jnp.broadcast_shapes(x.shape, jnp.shape(change)) != x.shape:
            found = "update", _name(path), show(change), show(x)
            raise ValueError(_OTHER_SHAPE.format(*found))


def _name(path: KeyPath) -> str:
    return f"`{name_of(path)}`" if path else "the array itself"


_NEW_ONE: Final = """For a different model, or after freezing or unfreezing, refit \
the optimizer, which keeps the state that still fits: `optimizer = \
optimizer.refit(model)`."""

_ONE_MODEL: Final = """Pass the model that `init` was given, or its parameters. With \
`argnums=(0, 1)`, models and gradients are tuples: `(loss, (a, b)), (grads, _) = …`."""

_OTHER_MODEL: Final = "what `wrt` selects in this model is not what `init` was given"

_NO_MODEL: Final = """`es.Optimizer(tx, wrt)`: `{}` is {}, but `{}` was given. Pass \
the model to `init`: `es.Optimizer(optax.adam(1e-3)).init(model)`. To train a part of \
it: `wrt=es.all_of(es.trainable, es.under(lambda model: model.head))`."""

_A_TX: Final = """an optax transformation, or rules for them, `{es.Parameter: \
optax.adam(1e-3)}`"""

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

_BEFORE_INIT: Final = """`es.Optimizer.{}` was called before `init`, which returns \
a new optimizer: `optimizer = es.Optimizer(tx).init(model)`."""

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
