"""`es.Optimizer`: an optax transformation and its state, as one pytree."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from ._errors import NotInitializedError
from ._kinds._kinds import OptState, Parameter
from ._state._init import check_ready
from ._tree._base import is_module
from ._tree._compare import difference, is_hole, leaves_like, same_modes
from ._tree._filters import Filter, trainable
from ._tree._parts import parts
from ._tree._select import filter, update
from ._tree._walk import copy_tree, is_array, name_of
from ._tree._weak_types import to_strong
from ._typing import KeyPath


_Tree = TypeVar("_Tree")


class _Leaf:
    """Stands in an error message for a parameter that `init` was given."""

    def __repr__(self) -> str:
        return "an array"


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
    _structure: Any = eqx.field(static=True, repr=False)
    _shapes: Any = eqx.field(static=True, repr=False)
    _state_structure: Any = eqx.field(static=True, repr=False)

    def __init__(self, tx: optax.GradientTransformation, wrt: Filter = trainable):
        """**Arguments:**

        - `tx`: an optax transformation, such as `optax.adamw(1e-3)`. It is static, and
            compared by identity: make it once, outside the training loop. An
            `optax.MultiSteps` object is one, too.
        - `wrt`: the filter for what is optimised. Default: `es.trainable`.

        **Raises:**

        - `TypeError`: `tx` is not a transformation but, say, the model or a learning
            rate; or `wrt` is not a filter.
        """
        _check_arguments(tx, wrt)
        self.tx = tx
        self.wrt = wrt
        self.opt_state = None
        self._structure = self._shapes = self._state_structure = None

    def init(self, model: Any) -> Self:
        """The optimizer with the state for a model, or for parameters of one.

        **Raises:**

        - `es.NotInitializedError`: the model still holds an `es.Initializer`.
        - `ValueError`: one stateful module is in two places of the model; or the two
            models of an `optax.LookaheadParams` differ in more than values and modes.
        """
        _check_ready(model)
        params = self._selected(model)
        if isinstance(params, optax.LookaheadParams):
            structure = jtu.tree_structure(params.fast)
            what = "`slow` is another model than `fast`"
            params = params._replace(slow=_in_mode_of(structure, params.slow, what))
        opt_state = jtu.tree_map(to_strong, self.tx.init(params))
        return self._with(opt_state, jtu.tree_structure(params), _shapes(params))

    def update(
        self, grads: Any, model: _Tree, *, apply_updates: bool = True, **extra: Any
    ) -> tuple[_Tree, Self]:
        """One step: `(updated model, optimizer)`.

        **Arguments:**

        - `grads`: the gradients, as `es.value_and_grad` returns them: each of the shape
            of its parameter. What lies outside `wrt` is not looked at. A transformation
            such as `optax.contrib.dpsgd` takes one gradient for each example, stacked.
        - `model`: the model, or the parameters, as given to `init`. It may be in
            another mode.
        - `apply_updates`: if `False`, the updates are returned in place of the model.
        - `**extra`: passed on to transformations that take more, such as `value=loss`.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        - `ValueError`: the model or the gradients have another structure or other
            shapes than the model given to `init`, or `wrt` selects other leaves; or a
            gradient is complex and its parameter is not. It names the first path.
        """
        if self._structure is None:
            raise NotInitializedError(
                "`es.Optimizer.update` was called before `init`: there is no state yet."
                " `init` returns a new optimizer: `optimizer ="
                " es.Optimizer(tx).init(model)`."
            )
        _check_ready(model)
        is_pair = isinstance(model, optax.LookaheadParams)
        _check_order(grads, model.fast if is_pair else model)
        selected = self._selected(model)
        what = "what `wrt` selects of the model is not what `init` was given"
        params = _in_mode_of(self._structure, selected, what)
        self._check_shapes(params)
        grads = self._gradients(grads, selected)
        # Whoever switches a tree of a model and its optimizer switches the moments.
        what = "its state is not what `init` has made"
        state = _in_mode_of(self._state_structure, self.opt_state, what)

        def step(grads: Any) -> tuple[Any, Any]:
            return _update_of(self.tx)(grads, state, params, **extra)

        _check_gradients(selected, grads, step)
        updates, opt_state = step(grads)
        opt_state = jtu.tree_map(to_strong, opt_state)
        _check_updates(selected, updates)
        optimizer = self._with(opt_state, self._structure, self._shapes)
        if apply_updates:
            return update(model, optax.apply_updates(params, updates)), optimizer
        treedef = jtu.tree_structure(selected)
        return jtu.tree_unflatten(treedef, jtu.tree_leaves(updates)), optimizer

    def _selected(self, model: Any) -> Any:
        if isinstance(model, optax.LookaheadParams):
            # `wrt` says what it says of the model that is differentiated.
            return optax.LookaheadParams(*(filter(m, self.wrt) for m in model))
        return filter(model, self.wrt)

    def _gradients(self, grads: Any, selected: Any) -> Any:
        """The gradients of what is selected, in the mode of `init`."""
        structure = self._structure
        if isinstance(selected, optax.LookaheadParams):
            selected, structure = selected.fast, structure.children()[0]  # of `fast`
        given = leaves_like(selected, grads, "`es.Optimizer.update`: the gradients")
        holes, treedef = jtu.tree_flatten(selected, is_leaf=is_hole)
        given = [None if x is None else g for x, g in zip(holes, given, strict=True)]
        grads = jtu.tree_unflatten(treedef, given)
        what = "the tree of gradients is not what `init` was given"
        return _in_mode_of(structure, grads, what)

    def _check_shapes(self, params: Any) -> None:
        """The state must be one for parameters of these shapes; optax broadcasts."""
        shapes = _shapes(params)
        if shapes == self._shapes:
            return
        # A lane of `vmap` and a shard in `shard_map` may have a state that was made for
        # the whole: then it has other shapes, too.
        fitting, state = jax.eval_shape(self.tx.init, params), self.opt_state
        same_structure = jtu.tree_structure(fitting) == jtu.tree_structure(state)
        if same_structure and _shapes(fitting) == _shapes(state):
            return
        paths = [path for path, _ in jtu.tree_leaves_with_path(params)]
        each = zip(paths, self._shapes, shapes, strict=True)
        path, old, new = next(x for x in each if x[1] != x[2])
        raise ValueError(
            "`es.Optimizer.update`: the model is not what `init` was given:"
            f" {_show(path)} has shape {new}, and had {old}. {_START_ANEW}"
        )

    def _with(self, opt_state: Any, structure: Any, shapes: Any) -> Self:
        new = copy_tree(self)
        object.__setattr__(new, "opt_state", opt_state)
        object.__setattr__(new, "_state_structure", jtu.tree_structure(opt_state))
        object.__setattr__(new, "_structure", structure)
        object.__setattr__(new, "_shapes", shapes)
        return new


def _in_mode_of(structure: Any, tree: Any, problem: str) -> Any:
    """`tree` in the mode of a structure, which must be its own but for that.

    The moments, and labels or masks that optax was given, are in the mode of the model
    that `init` was given.
    """
    if jtu.tree_structure(tree) == structure:
        return tree
    leaves = [_Leaf()] * structure.num_leaves
    expected, now = map(same_modes, (jtu.tree_unflatten(structure, leaves), tree))
    if jtu.tree_structure(now) != jtu.tree_structure(expected):
        raise ValueError(
            f"`es.Optimizer`: {problem}, {difference(expected, now)}. {_START_ANEW}"
        )
    return jtu.tree_unflatten(structure, jtu.tree_leaves(tree))


def _show(path: KeyPath) -> str:
    return f"`{name_of(path)}`" if path else "the array itself"


def _shapes(tree: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape for x in jtu.tree_leaves(tree))


_START_ANEW = """The optimizer's state belongs to one set of parameters. For another \
model, or after freezing or unfreezing, start with a fresh one: `optimizer = \
es.Optimizer(tx).init(model)`."""


def _is_transformation(x: Any) -> bool:
    # An `es.Module` and an optimizer have two methods of these names, too.
    if is_module(x) or isinstance(x, (Optimizer, type)):
        return False
    return all(callable(getattr(x, name, None)) for name in ("init", "update"))


def _check_arguments(tx: Any, wrt: Any) -> None:
    if not _is_transformation(tx):
        given = f"a `{type(tx).__qualname__}` was given"
        if inspect.isroutine(tx):
            given = f"the function `{tx.__name__}` was given; call it"
        raise TypeError(
            f"`es.Optimizer(tx)`: `tx` is an optax transformation, and {given}. The"
            " model is given to `init`:\n\n"
            "    es.Optimizer(model, optax.adam(1e-3))          # wrong\n"
            "    es.Optimizer(1e-3), es.Optimizer(optax.adam)   # wrong\n"
            "    es.Optimizer(optax.adam(1e-3)).init(model)     # right"
        )
    is_model = is_module(wrt) or any(map(is_array, jtu.tree_leaves(wrt)))
    if is_model or _is_transformation(wrt) or not callable(wrt):
        raise TypeError(
            "`es.Optimizer(tx, wrt)`: `wrt` is a filter, which says what is optimised,"
            f" and a `{type(wrt).__qualname__}` was given. The model is given to"
            " `init`:\n\n"
            "    es.Optimizer(tx, model)                          # wrong\n"
            "    es.Optimizer(tx).init(model)                     # right\n"
            "    es.Optimizer(tx, wrt=es.Parameter).init(model)   # right"
        )


def _update_of(tx: Any) -> Any:
    """The `update` of a transformation, which may be given further arguments."""
    if isinstance(tx, optax.GradientTransformation):
        return optax.with_extra_args_support(tx).update
    # For an object such as `optax.MultiSteps`, optax would drop them.
    parameters = inspect.signature(tx.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tx.update
    return lambda grads, state, params, **extra: tx.update(grads, state, params)


def _check_gradients(
    selected: Any, grads: Any, step: Callable[[Any], tuple[Any, Any]]
) -> None:
    params = selected.fast if isinstance(selected, optax.LookaheadParams) else selected
    pairs = zip(jtu.tree_leaves_with_path(params), jtu.tree_leaves(grads), strict=True)
    each = [(path, x, g) for (path, x), g in pairs]
    for path, x, g in each:
        if jnp.iscomplexobj(g) and not jnp.iscomplexobj(x):
            raise ValueError(
                f"`es.Optimizer.update`: the gradient of {_show(path)} is complex, and"
                " the parameter is real. The imaginary part would be lost: take"
                " `g.real`, if it is meant."
            )
    other = next((e for e in each if jnp.shape(e[2]) != e[1].shape), None)
    if other is None:
        return
    # Differentially private transformations take a gradient for each example.
    if all(jnp.shape(g)[1:] == x.shape for _, x, g in each):
        with contextlib.suppress(TypeError, ValueError):  # it takes no others
            updates, _ = jax.eval_shape(step, grads)
            if _shapes(updates) == _shapes(selected):
                return
    path, x, g = other
    raise ValueError(_other_shape(path, x, "gradient", jnp.shape(g)))


def _check_updates(params: Any, updates: Any) -> None:
    """optax adds them, and a parameter would take on the shape of its update."""
    named, moves = jtu.tree_leaves_with_path(params), jtu.tree_leaves(updates)
    for (path, x), change in zip(named, moves, strict=False):
        if jnp.broadcast_shapes(x.shape, jnp.shape(change)) != x.shape:
            raise ValueError(_other_shape(path, x, "update", jnp.shape(change)))


def _other_shape(path: KeyPath, x: Any, what: str, shape: tuple[int, ...]) -> str:
    return (
        f"`es.Optimizer.update`: the {what} of {_show(path)} has shape {shape}, and the"
        f" parameter {x.shape}. A gradient has the shape of its parameter, or optax"
        " broadcasts them. The gradients of several examples are averaged first:"
        " `jax.tree.map(lambda g: g.mean(axis=0), grads)`."
    )


def _check_ready(model: Any) -> None:
    # The two models of a pair are one in the beginning, and each has its own state.
    is_pair = isinstance(model, optax.LookaheadParams)
    for each in model if is_pair else [model]:
        check_ready(each)


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
