"""`es.Optimizer`: an optax transformation and its state, as one pytree."""

import inspect
from typing import Any, NamedTuple, Self, TypeVar

import equinox as eqx
import jax.tree_util as jtu
import optax

from .._errors import NotInitializedError
from .._kinds._kinds import OptState
from .._state._init import check_ready
from .._tree._bind import Filter
from .._tree._compare import difference, is_hole, leaves_like, same_modes
from .._tree._filters import trainable
from .._tree._select import filter, update
from .._tree._walk import copy_tree
from .._tree._weak_types import to_strong
from .._typing import PyTree
from ._checks import (
    check_arguments,
    check_gradients,
    check_order,
    check_shapes,
    check_updates,
    models_of,
    Shapes,
    shapes_of,
    START_ANEW,
)


_Tree = TypeVar("_Tree")


class _MadeFor(NamedTuple):
    """What an optimizer's state was made for, as static data."""

    params: Any  # the structure of what `wrt` selected in `init`
    shapes: Shapes  # those of the parameters
    opt_state: Any  # the structure of the state itself


class Optimizer(eqx.Module):
    """An optax optimizer that carries its own state, and passes through `jit`.

    Weight decay, clipping and norms see only the leaves that `wrt` selects.

    For `optax.lookahead` the model is `optax.LookaheadParams(model, model)`, and the
    gradients are those of its `fast`; `wrt` selects in each of the two.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp
        import optax

        model = {"w": jnp.ones(3)}
        optimizer = es.Optimizer(optax.adam(0.1)).init(model)
        grads = jax.grad(lambda m: jnp.sum(m["w"] ** 2))(model)
        model, optimizer = optimizer.update(grads, model)
        assert (model["w"] < 1).all()
        ```
    """

    opt_state: OptState[Any]
    tx: optax.GradientTransformation = eqx.field(static=True)
    wrt: Filter = eqx.field(static=True)
    _made_for: _MadeFor | None = eqx.field(static=True, repr=False)

    def __init__(self, tx: optax.GradientTransformation, wrt: Filter = trainable):
        """**Arguments:**

        - `tx`: an optax transformation, such as `optax.adamw(1e-3)`, or an
            `optax.MultiSteps` object. It is static, and compared by identity: make it
            once, outside the training loop.
        - `wrt`: the filter for what is optimized. Default: `es.trainable`.

        **Raises:**

        - `TypeError`: `tx` is not a transformation but, say, the model or a learning
            rate; or `wrt` is not a filter.
        """
        check_arguments(tx, wrt)
        self.tx = tx
        self.wrt = wrt
        self.opt_state = None
        self._made_for = None

    def init(self, model: PyTree) -> Self:
        """The optimizer with the state for a model, or for parameters of one.

        **Raises:**

        - `es.NotInitializedError`: the model still holds an `es.Initializer`.
        - `ValueError`: one stateful module is in two places of the model; or the two
            models of an `optax.LookaheadParams` differ in more than values and modes.
        """
        for each in models_of(model):
            check_ready(each)
        params = self._selected(model)
        if isinstance(params, optax.LookaheadParams):
            structure = jtu.tree_structure(params.fast)
            what = "`slow` is another model than `fast`"
            params = params._replace(slow=_in_mode_of(structure, params.slow, what))
        opt_state = jtu.tree_map(to_strong, self.tx.init(params))
        return self._with(opt_state, jtu.tree_structure(params), shapes_of(params))

    def update(
        self, grads: PyTree, model: _Tree, *, apply_updates: bool = True, **extra: Any
    ) -> tuple[_Tree, Self]:
        """One step: `(updated model, optimizer)`.

        **Arguments:**

        - `grads`: the gradients, as `es.value_and_grad` returns them, each of the shape
            of its parameter. Gradients outside `wrt` are ignored. A transformation such
            as `optax.contrib.dpsgd` takes one gradient for each example, stacked.
        - `model`: the model, or the parameters, as given to `init`. It may be in
            another mode.
        - `apply_updates`: if `False`, the updates are returned in place of the model.
        - `**extra`: passed on to transformations that take more, such as `value=loss`.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        - `ValueError`: the model or the gradients have another structure or other
            shapes than the model given to `init`, or `wrt` selects other leaves; or a
            gradient is complex and its parameter is not. The message names the first
            path.
        """
        if self._made_for is None:
            raise NotInitializedError(
                "`es.Optimizer.update` was called before `init`: there is no state yet."
                " `init` returns a new optimizer: `optimizer ="
                " es.Optimizer(tx).init(model)`."
            )
        structure, shapes, state_structure = self._made_for
        for each in models_of(model):
            check_ready(each)
        check_order(grads, models_of(model)[0])
        selected = self._selected(model)
        what = "what `wrt` selects of the model is not what `init` was given"
        params = _in_mode_of(structure, selected, what)
        check_shapes(self.tx, self.opt_state, params, shapes)
        grads = _gradients(grads, selected, structure)
        # `es.eval((model, optimizer))` switches the moments, too.
        what = "its state is not what `init` has made"
        state = _in_mode_of(state_structure, self.opt_state, what)

        def step(grads: PyTree) -> tuple[PyTree, PyTree]:
            return _update_of(self.tx)(grads, state, params, **extra)

        check_gradients(selected, grads, step)
        updates, opt_state = step(grads)
        opt_state = jtu.tree_map(to_strong, opt_state)
        check_updates(selected, updates)
        optimizer = self._with(opt_state, structure, shapes)
        if apply_updates:
            return update(model, optax.apply_updates(params, updates)), optimizer
        treedef = jtu.tree_structure(selected)
        return jtu.tree_unflatten(treedef, jtu.tree_leaves(updates)), optimizer

    def _selected(self, model: PyTree) -> PyTree:
        # `wrt` is a filter on a model, so it selects in each of a pair.
        if isinstance(model, optax.LookaheadParams):
            return optax.LookaheadParams(*(filter(m, self.wrt) for m in model))
        return filter(model, self.wrt)

    def _with(self, opt_state: PyTree, structure: Any, shapes: Any) -> Self:
        new = copy_tree(self)
        made_for = _MadeFor(structure, shapes, jtu.tree_structure(opt_state))
        object.__setattr__(new, "opt_state", opt_state)
        object.__setattr__(new, "_made_for", made_for)
        return new


def _gradients(grads: PyTree, selected: PyTree, structure: Any) -> PyTree:
    """The gradients of what is selected, in the mode of `init`."""
    if isinstance(selected, optax.LookaheadParams):
        selected, structure = selected.fast, structure.children()[0]  # of `fast`
    given = leaves_like(selected, grads, "`es.Optimizer.update`: the gradients")
    holes, treedef = jtu.tree_flatten(selected, is_leaf=is_hole)
    given = [None if x is None else g for x, g in zip(holes, given, strict=True)]
    what = "the tree of gradients is not what `init` was given"
    return _in_mode_of(structure, jtu.tree_unflatten(treedef, given), what)


class _Leaf:
    """Stands in an error message for a parameter that `init` was given."""

    def __repr__(self) -> str:
        return "an array"


def _in_mode_of(structure: Any, tree: PyTree, problem: str) -> Any:
    """`tree` in the mode of a structure, which may differ from its own in modes."""
    # The moments, and labels or masks that optax was given, are in the mode that the
    # model had in `init`, and optax compares structures.
    if jtu.tree_structure(tree) == structure:
        return tree
    leaves = [_Leaf()] * structure.num_leaves
    expected, now = map(same_modes, (jtu.tree_unflatten(structure, leaves), tree))
    if jtu.tree_structure(now) != jtu.tree_structure(expected):
        raise ValueError(
            f"`es.Optimizer`: {problem}, {difference(expected, now)}. {START_ANEW}"
        )
    return jtu.tree_unflatten(structure, jtu.tree_leaves(tree))


def _update_of(tx: Any) -> Any:
    """The `update` of a transformation, which accepts further arguments."""
    if isinstance(tx, optax.GradientTransformation):
        return optax.with_extra_args_support(tx).update
    # For an object such as `optax.MultiSteps`, optax would drop those arguments.
    parameters = inspect.signature(tx.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tx.update
    return lambda grads, state, params, **extra: tx.update(grads, state, params)
