"""`es.Optimizer`: an optax transformation and its state, as one pytree."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from .._errors import NotInitializedError
from .._kinds.kinds import OptState
from .._state.lazy import check_not_a_class, check_ready
from .._state.lost import warn_if_lost
from .._state.marks import left_out, marked
from .._tree.combinators import trainable
from .._tree.compare import difference, same_modes
from .._tree.dtypes import to_strong
from .._tree.filters import check_filter, Filter, TO_TRAIN
from .._tree.followers import AbstractPerParameter
from .._tree.keys import copied
from .._tree.modules import replace
from .._tree.parts import is_inexact
from .._tree.rules import check_rules, misplaced, nothing_selected
from .._tree.select import filter, update
from .._tree.walk import abstract, is_array
from .._typing import PyTree, Tree
from .checks import (
    check_no_lookahead,
    check_shapes,
    check_updates,
    check_wrt,
    gradients_like,
    SAME_MODEL,
    Shapes,
    shapes_of,
)
from .groups import (
    by_key,
    GROUP_AT,
    Groups,
    in_groups,
    Labels,
    with_extra_args,
    with_values,
)
from .layers import is_transformation
from .refit import kept
from .whole_arrays import check_stacks


@dataclasses.dataclass(frozen=True)
class _MadeFor:
    """Static data about the model that an optimizer's state was created for."""

    selected: Any  # the structure of the parameters that `wrt` selected in `init`
    labels: Labels | None  # the group of each of these parameters, if there are groups
    shapes: Shapes  # of these parameters
    opt_state: Any  # the structure of the state itself
    # The argument of `init`, with the shapes of its arrays. Not compared, because an
    # optimizer accepts a model or only its parameters. Not a tree, because `es.jit`
    # would copy a dict for each result: static data that can change.
    model: tuple[Any, tuple[Any, ...]] = dataclasses.field(compare=False)


class Optimizer(AbstractPerParameter):
    """An optax optimizer and its state, as one pytree that passes through `jit`.

    Weight decay, clipping and norms apply only to the leaves that `wrt` selects.

    If `tx` is a mapping of rules, each array that `wrt` selects belongs to one group.
    Each group has its own transformation, which sees only that group.

    An `es.nn.Stacked` is one array to optax. A transformation that looks at whole
    arrays, such as `optax.lamb`, belongs in [`es.per_layer`][eqx_state.per_layer], and
    is an error in `init` otherwise, unless you pass `stacks="arrays"`.

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
    stacks: Literal["arrays"] | None = eqx.field(static=True, repr=False)
    _made_for: _MadeFor | None = eqx.field(static=True, repr=False)

    def __init__(
        self,
        tx: optax.GradientTransformation | optax.MultiSteps | Mapping[Any, Any],
        wrt: Filter = trainable,
        *,
        stacks: Literal["arrays"] | None = None,
    ):
        """**Arguments:**

        - `tx`: an optax transformation, such as `optax.adamw(1e-3)`, or an
            `optax.MultiSteps` object; or rules as for `es.spec`, a mapping from filters
            to such transformations, one for each group. In rules, `None` means that an
            array is not updated and uses no memory. Transformations are static and
            compared by identity, so create them once, outside the training loop.
        - `wrt`: the filter for the arrays to optimize. Default: `es.trainable`.
        - `stacks`: `"arrays"` if a transformation that looks at whole arrays, such as
            `optax.lamb`, or a mask by `ndim`, is meant to see an `es.nn.Stacked` as one
            array. By default that is an error in `init`, because all layers would share
            one norm: use [`es.per_layer`][eqx_state.per_layer]. A mask that is a tree
            of bools, and transformations that are not of optax, are not checked.

        **Raises:**

        - `TypeError`: `tx` is not a transformation but, say, the model or a learning
            rate; or `wrt`, or a key of the rules, is not a filter.
        - `ValueError`: `stacks` is neither `"arrays"` nor `None`.
        """
        if stacks not in ("arrays", None):
            raise ValueError(_STACKS.format(stacks))
        self.tx, txs = tx, [tx]
        if isinstance(tx, Mapping):
            check_rules(tx, "`es.Optimizer`")
            self.tx = Groups(tuple(tx), tuple(tx.values()))
            txs = [x for x in tx.values() if x is not None]
        for x in txs:
            if not is_transformation(x):
                name = getattr(x, "__qualname__", type(x).__qualname__)
                raise TypeError(_NO_MODEL.format("tx", _A_TX, name))
        if any(map(eqx.is_array, jtu.tree_leaves(wrt))):
            raise TypeError(_NO_MODEL.format("wrt", "a filter", type(wrt).__qualname__))
        check_filter(wrt, TO_TRAIN)
        self.wrt = wrt
        self.stacks = stacks
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
            twice in the model. A transformation of optax that looks at whole arrays, or
            a mask with different values for a stack and for its layers, would be
            applied to an `es.nn.Stacked` outside of `es.per_layer`.
        """
        check_not_a_class(model)
        check_no_lookahead(model)
        selected, labels = self._selected(model), None
        if not jtu.tree_leaves(selected):
            raise nothing_selected("es.Optimizer(wrt", self.wrt, model)
        check_wrt(self.wrt, model, selected)
        if isinstance(self.tx, Groups):
            labels = self.tx.labels(model, selected)
        params = in_groups(selected, labels)
        tx = self._tx(labels, params)
        if self.stacks is None:
            check_stacks(tx, params)
        opt_state = _own(tx.init(params))
        check_no_lookahead(opt_state)  # of a model that is not a pair
        values, structure = jtu.tree_flatten(model)
        # No other leaves: the optimizer must not keep objects of the user alive.
        shapes = tuple(abstract(x) if is_array(x) else None for x in values)
        made = _MadeFor(
            jtu.tree_structure(selected),
            labels,
            shapes_of(params),
            jtu.tree_structure(opt_state),
            (structure, shapes),
        )
        return replace(self, opt_state=opt_state, _made_for=made)

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

        **Warns:**

        - `es.LostStateWarning`: `grads` is the result of an `es.grad` or
            `es.value_and_grad` whose call wrote state, and `model` still has the arrays
            from before. To drop the state, pass `model.filter(es.Parameter)`.
        """
        made = self._made("update")
        selected = self._selected(model)
        params = _in_mode_of(made.selected, selected, _OTHER_MODEL)
        params = in_groups(params, made.labels)
        # `es.eval((model, optimizer))` changes the mode of the moments, too.
        what = "its state is not what `init` has made"
        state = _in_mode_of(made.opt_state, self.opt_state, what)
        tx = self._tx(made.labels, params)
        check_shapes(tx, state, params, made.shapes)
        selected = in_groups(selected, made.labels)
        own_grads = gradients_like(grads, model, selected, params)
        warn_if_lost(grads, model, stacklevel=3)
        grads = _conjugated(own_grads)
        if "grad" in extra:
            extra["grad"] = _conjugated(extra["grad"])
        updates, state = tx.update(grads, state, params, **extra)
        check_updates(params, updates)
        state = jtu.tree_map(to_strong, state)
        state = marked(state, self.opt_state, lambda: "optimizer")
        made = dataclasses.replace(made, opt_state=jtu.tree_structure(state))
        optimizer = replace(self, opt_state=state, _made_for=made)
        if apply_updates:
            model = left_out(model, selected)
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
        a later layer gets the moments of the one that had its name before. A list and
        an `es.nn.Stacked` have the same names, so each keeps the state of the other.

        With [`es.per_layer`][eqx_state.per_layer], each layer has its own counts and
        hyperparameters. A layer that you append to a stack has counts of 0, so that a
        schedule starts for it, and the hyperparameters of the other layers. A stack
        that is new to the optimizer, such as one that was frozen, has the counts and
        hyperparameters of the arrays outside of stacks, or else of another stack; and
        if such arrays are new, they have those of a stack.
        Values that differ from layer to layer are not passed on.

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
        new = self.init(model)
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
        self._made("set")
        new = with_values(self.opt_state, self.tx, group, values)
        return replace(self, opt_state=new)

    def _recorded_model(self) -> PyTree:
        made = self._made_for
        return None if made is None else jtu.tree_unflatten(*made.model)

    def _made(self, method: str) -> _MadeFor:
        if self._made_for is None:
            raise NotInitializedError(_BEFORE_INIT.format(method))
        return self._made_for

    def _tx(self, labels: Labels | None, params: PyTree) -> Any:
        if labels is None:
            return with_extra_args(self.tx)
        return self.tx.transformation(labels, params)

    def _selected(self, model: PyTree) -> PyTree:
        check_ready(model)
        return filter(model, self.wrt, is_inexact)


def _own(opt_state: PyTree) -> PyTree:
    """The state with arrays of its own, so that the first step can donate them.

    Those of optax may be the parameters themselves, the key that a transformation was
    created with, or one array in two places.
    """
    values, structure = jtu.tree_flatten(opt_state)
    del opt_state
    for i, x in enumerate(values):  # one by one, to need the memory of one array
        x = to_strong(x)
        values[i] = copied(x) if eqx.is_array(x) else x
    return structure.unflatten(values)


def _conjugated(grads: PyTree) -> PyTree:
    """The direction of steepest ascent for each gradient of JAX.

    In JAX, a step against the gradient itself does not descend: for `abs(z) ** 2` the
    gradient is `2 * conj(z)`.
    """
    return jtu.tree_map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, grads)


def _in_mode_of(structure: Any, tree: PyTree, problem: str) -> Any:
    """`tree` in the mode of `structure`, which may differ from it only in modes."""
    # Moments, labels and masks have the mode that the model had in `init`, and optax
    # compares structures.
    if jtu.tree_structure(tree) == structure:
        return tree
    arrays = ["an array"] * structure.num_leaves
    expected, now = map(same_modes, (jtu.tree_unflatten(structure, arrays), tree))
    if jtu.tree_structure(now) != jtu.tree_structure(expected):
        said = f"`es.Optimizer`: {problem}, {difference(expected, now)}. {SAME_MODEL}"
        raise ValueError(misplaced(tree) or said)
    return jtu.tree_unflatten(structure, jtu.tree_leaves(tree))


_OTHER_MODEL: Final = "what `wrt` selects in this model is not what `init` was given"

_NO_MODEL: Final = """`es.Optimizer(tx, wrt)`: `{}` is {}, but `{}` was given. Pass \
the model to `init`: `es.Optimizer(optax.adam(1e-3)).init(model)`. To train a part of \
it: `wrt=es.all_of(es.trainable, es.under(lambda model: model.head))`."""

_A_TX: Final = """an optax transformation, or rules for them, `{es.Parameter: \
optax.adam(1e-3)}`"""

_STACKS: Final = """`es.Optimizer(stacks=…)` is `"arrays"` if a transformation is \
meant to see stacks as whole arrays, or `None`, but `{}` was given."""

_BEFORE_INIT: Final = """`es.Optimizer.{}` was called before `init`, which returns \
a new optimizer: `optimizer = es.Optimizer(tx).init(model)`."""
