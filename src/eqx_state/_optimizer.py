"""`es.Optimizer`: an optax transformation and its state, as one pytree."""

from typing import Any, Self, TypeVar

import equinox as eqx
import jax.tree_util as jtu
import optax

from ._compare import is_hole
from ._errors import NotInitializedError
from ._filters import Filter, trainable
from ._init import check_ready
from ._kinds import OptState, Parameter
from ._select import difference, filter, leaves_like, same_modes, update
from ._strong import to_strong
from ._traverse import copy_tree, parts


_Tree = TypeVar("_Tree")


class _Leaf:
    """Stands in an error message for a parameter that `init` was given."""

    def __repr__(self) -> str:
        return "an array"


class Optimizer(eqx.Module):
    """An optax optimizer that carries its own state, and passes through `jit`.

    Weight decay, clipping and norms see only the leaves that `wrt` selects.

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
    _structure: Any = eqx.field(static=True, repr=False)

    def __init__(self, tx: optax.GradientTransformation, wrt: Filter = trainable):
        """**Arguments:**

        - `tx`: an optax transformation, such as `optax.adamw(1e-3)`. It is static, and
            compared by identity: make it once, outside the training loop.
        - `wrt`: the filter for what is optimised. Default: `es.trainable`.
        """
        self.tx = tx
        self.wrt = wrt
        self.opt_state = None
        self._structure = None

    def init(self, model: Any) -> Self:
        """The optimizer with the state for a model, or for parameters of one.

        **Raises:**

        - `es.NotInitializedError`: the model still holds an `es.Initializer`.
        - `ValueError`: one stateful module is in two places of the model.
        """
        check_ready(model)
        params = filter(model, self.wrt)
        opt_state = jtu.tree_map(to_strong, self.tx.init(params))
        return self._with(opt_state, jtu.tree_structure(params))

    def update(
        self, grads: Any, model: _Tree, *, apply_updates: bool = True, **extra: Any
    ) -> tuple[_Tree, Self]:
        """One step: `(updated model, optimizer)`.

        **Arguments:**

        - `grads`: the gradients, as `es.value_and_grad` returns them. What lies outside
            `wrt` is not looked at.
        - `model`: the model, or the parameters, as given to `init`. It may be in
            another mode.
        - `apply_updates`: if `False`, the updates are returned in place of the model.
        - `**extra`: passed on to transformations that take more, such as `value=loss`.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        - `ValueError`: the model or the gradients have another structure than the model
            given to `init`, or `wrt` selects other leaves; it names the first path.
        """
        if self._structure is None:
            raise NotInitializedError(
                "`es.Optimizer.update` was called before `init`: there is no state yet."
                " `init` returns a new optimizer: `optimizer ="
                " es.Optimizer(tx).init(model)`."
            )
        check_ready(model)
        _check_order(grads, model)
        selected = filter(model, self.wrt)
        params = self._as_at_init(selected, "what `wrt` selects of the model")
        given = leaves_like(selected, grads, "`es.Optimizer.update`: the gradients")
        holes, treedef = jtu.tree_flatten(selected, is_leaf=is_hole)
        given = [None if x is None else g for x, g in zip(holes, given, strict=True)]
        grads = jtu.tree_unflatten(treedef, given)
        grads = self._as_at_init(grads, "the tree of gradients")
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(grads, self.opt_state, params, **extra)
        optimizer = self._with(jtu.tree_map(to_strong, opt_state), self._structure)
        if apply_updates:
            return update(model, optax.apply_updates(params, updates)), optimizer
        treedef = jtu.tree_structure(selected)
        return jtu.tree_unflatten(treedef, jtu.tree_leaves(updates)), optimizer

    def _as_at_init(self, tree: Any, what: str) -> Any:
        """`tree` in the mode of the model that `init` was given.

        The moments, and labels or masks that optax was given, are in that mode.
        """
        if jtu.tree_structure(tree) == self._structure:
            return tree
        leaves = [_Leaf()] * self._structure.num_leaves
        at_init = same_modes(jtu.tree_unflatten(self._structure, leaves))
        now = same_modes(tree)
        if jtu.tree_structure(now) != jtu.tree_structure(at_init):
            raise ValueError(
                f"`es.Optimizer.update`: {what} is not what `init` was given,"
                f" {difference(at_init, now)}. The optimizer's state belongs to"
                " one set of parameters. For another model, or after freezing or"
                " unfreezing, start with a fresh one:"
                " `optimizer = es.Optimizer(tx).init(model)`."
            )
        return jtu.tree_unflatten(self._structure, jtu.tree_leaves(tree))

    def _with(self, opt_state: Any, structure: Any) -> Self:
        new = copy_tree(self)
        object.__setattr__(new, "opt_state", opt_state)
        object.__setattr__(new, "_structure", structure)
        return new


def _check_order(grads: Any, model: Any) -> None:
    """State among the gradients that the model lacks: they have changed places."""
    held = {part.name for part in parts(model)}
    for part in parts(grads):
        is_parameter = part.kind is not None and issubclass(part.kind, Parameter)
        if not is_parameter and part.name not in held:
            raise ValueError(
                f"`es.Optimizer.update`: the gradients have `{part.name}`, which is no"
                " parameter and which the model has not. The gradients come first:"
                " `model, optimizer = optimizer.update(grads, model)`."
            )
