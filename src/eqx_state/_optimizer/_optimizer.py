"""`es.Optimizer`: an optax transformation and its state, as one pytree."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Self, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import optax

from .._errors import NotInitializedError
from .._kinds._kinds import OptState
from .._state._init import check_ready
from .._tree._bind import Filter
from .._tree._compare import difference, is_hole, leaves_like, same_modes
from .._tree._filters import trainable
from .._tree._followers import AbstractFollower
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
from ._groups import check_extra, Groups, in_groups, Labels, with_extra_args
from ._hyperparams import by_key, with_values


_Tree = TypeVar("_Tree")


@dataclasses.dataclass(frozen=True)
class _MadeFor:
    """What an optimizer's state was made for, as static data."""

    selected: Any  # the structure of what `wrt` selected in `init`
    labels: Labels | None  # the group of each leaf of that, if there are groups
    shapes: Shapes  # those of the parameters that are optimized
    opt_state: Any  # the structure of the state itself
    # The shapes of all arrays that `init` was given. They are not compared: a model and
    # its parameters are the same to an optimizer.
    model: PyTree = dataclasses.field(compare=False)


class Optimizer(AbstractFollower):
    """An optax optimizer that carries its own state, and passes through `jit`.

    Weight decay, clipping and norms see only the leaves that `wrt` selects.

    With rules in the place of `tx`, each array that `wrt` selects belongs to one group,
    and each group has a transformation of its own, which sees only that group.

    For `optax.lookahead` the model is `optax.LookaheadParams(model, model)`, and the
    gradients are those of its `fast`; `wrt` selects in each of the two.

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
            to such transformations, one for each group. In rules `None` leaves an array
            as it is, without memory for it. Transformations are static, and compared by
            identity: make them once, outside the training loop.
        - `wrt`: the filter for what is optimized. Default: `es.trainable`.

        **Raises:**

        - `TypeError`: `tx` is not a transformation but, say, the model or a learning
            rate; or `wrt`, or a key of the rules, is not a filter.
        - `ValueError`: the rules are empty.
        """
        check_arguments(tx, wrt)
        self.tx = Groups(tx) if isinstance(tx, Mapping) else tx
        self.wrt = wrt
        self.opt_state = None
        self._made_for = None

    def init(self, model: PyTree) -> Self:
        """The optimizer with the state for a model, or for parameters of one.

        **Raises:**

        - `es.NotInitializedError`: the model still holds an `es.Initializer`.
        - `ValueError`: no rule matches one of the parameters, or a filter in the rules
            matches no array of the model; one stateful module is in two places of the
            model; the two models of an `optax.LookaheadParams` differ in more than
            values and modes.
        """
        for each in models_of(model):
            check_ready(each)
        selected, labels = self._selected(model), None
        if isinstance(self.tx, Groups):
            labels = self.tx.labels(model, self.wrt)
        if isinstance(selected, optax.LookaheadParams):
            structure = jtu.tree_structure(selected.fast)
            what = "`slow` is another model than `fast`"
            selected = selected._replace(
                slow=_in_mode_of(structure, selected.slow, what)
            )
        params = in_groups(selected, labels)
        opt_state = jtu.tree_map(to_strong, self._tx(labels, params).init(params))
        made = _MadeFor(
            jtu.tree_structure(selected),
            labels,
            shapes_of(params),
            jtu.tree_structure(opt_state),
            _shapes(models_of(model)[0]),
        )
        return self._with(opt_state, made)

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
            Trees of the shape of the parameters (`grad=`), and `value_fn=`, are for
            optimizers without groups.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        - `ValueError`: the model or the gradients have another structure or other
            shapes than the model given to `init`, or `wrt` selects other leaves; or a
            gradient is complex and its parameter is not. The message names the first
            path.
        """
        made = self._made("update")
        for each in models_of(model):
            check_ready(each)
        check_order(grads, models_of(model)[0])
        selected = self._selected(model)
        what = "what `wrt` selects of the model is not what `init` was given"
        params = _in_mode_of(made.selected, selected, what)
        selected, params = (in_groups(x, made.labels) for x in (selected, params))
        tx = self._tx(made.labels, params)
        check_shapes(tx, self.opt_state, params, made.shapes)
        if made.labels is not None:
            check_extra(extra, params)
        grads = _gradients(grads, selected, jtu.tree_structure(params))
        # `es.eval((model, optimizer))` switches the moments, too.
        what = "its state is not what `init` has made"
        state = _in_mode_of(made.opt_state, self.opt_state, what)

        def step(grads: PyTree) -> tuple[PyTree, PyTree]:
            return tx.update(grads, state, params, **extra)

        check_gradients(selected, grads, step)
        updates, opt_state = step(grads)
        opt_state = jtu.tree_map(to_strong, opt_state)
        check_updates(selected, updates)
        structure = jtu.tree_structure(opt_state)
        made = dataclasses.replace(made, opt_state=structure)
        optimizer = self._with(opt_state, made)
        if apply_updates:
            return update(model, optax.apply_updates(params, updates)), optimizer
        treedef = jtu.tree_structure(selected)
        return jtu.tree_unflatten(treedef, jtu.tree_leaves(updates)), optimizer

    @property
    def hyperparams(self) -> dict[Any, Any]:
        """The values that `optax.inject_hyperparams` keeps in the state, by name.

        With groups the keys are `(group, name)`, where the group is the filter in the
        rules. Where two values still have one name, the keys are `(place, name)`, and
        the place is a path in `opt_state`.

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
        """The optimizer with other hyperparameters: `.set(learning_rate=1e-4)`.

        Structure, shapes and dtypes stay, so that nothing is compiled anew.

        **Arguments:**

        - `group`: the filter in the rules of the group that is meant, or a place as in
            `hyperparams`. By default every value of the name is set.
        - `**values`: numbers, by the names in `hyperparams`.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        - `TypeError`: a value is not a number.
        - `ValueError`: there is no hyperparameter of this name, or a schedule drives
            it; or the value has another shape, or is a float in place of an integer.
        """
        made = self._made("set")
        return self._with(with_values(self.opt_state, self.tx, group, values), made)

    def _followed(self) -> PyTree:
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
        # `wrt` is a filter on a model, so it selects in each of a pair.
        if isinstance(model, optax.LookaheadParams):
            if isinstance(self.tx, Groups):
                raise ValueError(_PAIR_IN_GROUPS)
            return optax.LookaheadParams(*(filter(m, self.wrt) for m in model))
        return filter(model, self.wrt)

    def _with(self, opt_state: PyTree, made_for: _MadeFor) -> Self:
        new = copy_tree(self)
        object.__setattr__(new, "opt_state", opt_state)
        object.__setattr__(new, "_made_for", made_for)
        return new


def _shapes(model: PyTree) -> PyTree:
    arrays = filter(model, lambda part: True)
    return jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


def _gradients(grads: PyTree, selected: PyTree, structure: Any) -> PyTree:
    """The gradients of what is selected, in the mode of `init`."""
    if isinstance(selected, optax.LookaheadParams):
        selected, structure = selected.fast, structure.children()[0]  # of `fast`
    given = leaves_like(selected, grads, "`es.Optimizer.update`: the tree of gradients")
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


_BEFORE_INIT: Final = """`es.Optimizer.{}` was called before `init`: there is no \
state yet. `init` returns a new optimizer: `optimizer = \
es.Optimizer(tx).init(model)`."""

_PAIR_IN_GROUPS: Final = """`es.Optimizer`: `optax.LookaheadParams` was given to an \
optimizer with groups, each of which would see a part of the pair. `optax.lookahead` \
goes around all groups: `optax.lookahead(optax.partition(...), 5, 0.5)`."""
