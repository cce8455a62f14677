"""`es.Optimizer`: an optax transformation and its state, as one pytree."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from .._errors import NotInitializedError
from .._kinds.kinds import OptState, Parameter
from .._state.init import check_ready
from .._tree.base import is_module
from .._tree.compare import difference, is_hole, leaves_like, same_modes
from .._tree.dtypes import to_strong
from .._tree.filters import Filter, trainable, written
from .._tree.parts import parts
from .._tree.rules import AbstractFollower, check_rules, is_rules
from .._tree.select import filter, update
from .._tree.walk import copy_tree, is_array, leaves, name_of
from .._typing import KeyPath, PyTree
from .groups import (
    by_key,
    check_extra,
    Groups,
    in_groups,
    Labels,
    with_extra_args,
    with_values,
)


# --- Checks of what an optimizer is given and of what it computes.


Shapes: TypeAlias = tuple[tuple[int, ...], ...]


def models_of(model: PyTree) -> tuple[PyTree, ...]:
    """The two models of `optax.lookahead`, `fast` first, or the one model."""
    return tuple(model) if isinstance(model, optax.LookaheadParams) else (model,)


def shapes_of(tree: PyTree) -> Shapes:
    """The shape of each array, in the order of flattening."""
    return tuple(x.shape for x in jtu.tree_leaves(tree))


START_ANEW = """The optimizer's state belongs to one set of parameters. For another \
model, or after freezing or unfreezing, start with a fresh one: `optimizer = \
es.Optimizer(tx).init(model)`."""


def _is_transformation(x: Any) -> bool:
    # An `es.Module` and an `es.Optimizer` have two methods of these names, too.
    if is_module(x) or isinstance(x, type) or hasattr(x, "opt_state"):
        return False
    return all(callable(getattr(x, name, None)) for name in ("init", "update"))


def _has_labels(x: Any) -> bool:
    """Whether it leads from something to transformations, as `optax.partition` does."""
    return isinstance(x, Mapping) and any(map(_is_transformation, x.values()))


def check_arguments(tx: Any, wrt: Any) -> None:
    """Raise `TypeError` unless these are a transformation, or rules, and a filter."""
    if isinstance(tx, Mapping) and not tx:
        raise ValueError(_NO_RULES)
    if is_rules(tx) or _has_labels(tx):
        check_rules(tx, "`es.Optimizer`")
        for key, value in tx.items():
            if value is not None and not _is_transformation(value):
                shown = "..." if key is ... else written(key)
                raise TypeError(_NOT_IN_RULES.format(shown, _described(value)))
    elif not _is_transformation(tx):
        raise TypeError(_NOT_A_TRANSFORMATION.format(_described(tx)))
    is_model = is_module(wrt) or any(map(is_array, jtu.tree_leaves(wrt)))
    if is_model or _is_transformation(wrt) or not callable(wrt):
        raise TypeError(
            "`es.Optimizer(tx, wrt)`: `wrt` is a filter, which says what is optimized,"
            f" and a `{type(wrt).__qualname__}` was given. The model is given to"
            " `init`:\n\n"
            "    es.Optimizer(tx, model)                          # wrong\n"
            "    es.Optimizer(tx).init(model)                     # right\n"
            "    es.Optimizer(tx, wrt=es.Parameter).init(model)   # right"
        )


def _described(x: Any) -> str:
    if inspect.isroutine(x):
        return f"the function `{x.__name__}` was given; call it"
    return f"a `{type(x).__qualname__}` was given"


_NO_RULES: Final = """`es.Optimizer({})`: an empty mapping has no rules, so that no \
parameter has a transformation: `es.Optimizer({es.path_matches("*.bias"): \
optax.adam(1e-3), ...: optax.adamw(1e-3)})`."""

_NOT_IN_RULES: Final = """`es.Optimizer`: the rule of `{}` leads to an optax \
transformation, or to `None`, which leaves the arrays as they are, and {}:

    es.Optimizer({{es.Parameter: 1e-3}})                # wrong
    es.Optimizer({{es.Parameter: optax.adam(1e-3)}})    # right"""

_NOT_A_TRANSFORMATION: Final = """`es.Optimizer(tx)`: `tx` is an optax transformation, \
or rules that lead to some, and {}. The model is given to `init`:

    es.Optimizer(model, optax.adam(1e-3))          # wrong
    es.Optimizer(1e-3), es.Optimizer(optax.adam)   # wrong
    es.Optimizer(optax.adam(1e-3)).init(model)     # right"""


def check_gradients(
    selected: PyTree, grads: PyTree, step: Callable[[Any], tuple[Any, Any]]
) -> None:
    """Raise `ValueError` for a gradient of another shape, or complex for a real one."""
    named = jtu.tree_leaves_with_path(models_of(selected)[0])
    each = [(*x, g) for x, g in zip(named, jtu.tree_leaves(grads), strict=True)]
    for path, x, g in each:
        if jnp.iscomplexobj(g) and not jnp.iscomplexobj(x):
            raise ValueError(
                f"`es.Optimizer.update`: the gradient of {_name(path)} is complex, and"
                " the parameter is real. The imaginary part would be lost. If that is"
                " meant, pass `g.real`."
            )
    other = next((e for e in each if jnp.shape(e[2]) != e[1].shape), None)
    if other is None:
        return
    # Differentially private transformations take a gradient for each example.
    if all(jnp.shape(g)[1:] == x.shape for _, x, g in each):
        with contextlib.suppress(TypeError, ValueError):  # this one does not
            updates, _ = jax.eval_shape(step, grads)
            if shapes_of(updates) == shapes_of(selected):
                return
    path, x, g = other
    raise ValueError(_other_shape(path, x, "gradient", jnp.shape(g)))


def check_updates(params: PyTree, updates: PyTree) -> None:
    """A parameter would take on the shape of its update, since optax adds the two."""
    named, moves = jtu.tree_leaves_with_path(params), jtu.tree_leaves(updates)
    for (path, x), change in zip(named, moves, strict=False):
        if jnp.broadcast_shapes(x.shape, jnp.shape(change)) != x.shape:
            raise ValueError(_other_shape(path, x, "update", jnp.shape(change)))


def _other_shape(path: KeyPath, x: Any, what: str, shape: tuple[int, ...]) -> str:
    return (
        f"`es.Optimizer.update`: the {what} of {_name(path)} has shape {shape}, and the"
        f" parameter {x.shape}. A gradient has the shape of its parameter: optax would"
        " broadcast the two. Average the gradients of several examples first:"
        " `jax.tree.map(lambda g: g.mean(axis=0), grads)`."
    )


def check_order(grads: PyTree, model: PyTree) -> None:
    """State that only the gradients have shows that the two were swapped.

    So does a function or a text, where the model has a hole.
    """
    if type(grads) is tuple and type(model) is not tuple:
        raise ValueError(_PAIR.format(len(grads)))
    held = {part.name for part in parts(model)}
    foreign = [
        part.name
        for part in parts(grads)
        if not (_is_parameter(part.kind) or part.name in held)
    ]
    given, given_def = jtu.tree_flatten(grads, is_leaf=is_hole)
    known, known_def = jtu.tree_flatten(model, is_leaf=is_hole)
    for i, (g, x) in enumerate(zip(given, known, strict=False)):
        is_static = not (is_hole(g) or eqx.is_array_like(g))
        if given_def == known_def and is_static and is_hole(x):
            foreign.append(leaves(grads, is_leaf=is_hole)[i].name)
    if foreign:
        raise ValueError(_SWAPPED.format(foreign[0]))


def _is_parameter(kind: type | None) -> bool:
    return kind is not None and issubclass(kind, Parameter)


_SWAPPED: Final = """`es.Optimizer.update`: the gradients have `{}`, which is not a \
parameter and not in the model. The gradients come first: `model, optimizer = \
optimizer.update(grads, model)`."""

_PAIR: Final = """`es.Optimizer.update`: the gradients are a tuple of {}, and the \
model is not a tuple. `es.grad` returns two things:

    model, optimizer = optimizer.update(es.grad(loss)(model, x), model)    # wrong
    grads, model = es.grad(loss)(model, x)                                 # right
    model, optimizer = optimizer.update(grads, model)"""


def check_shapes(tx: Any, opt_state: PyTree, params: PyTree, before: Shapes) -> None:
    """The state must fit parameters of these shapes, or optax would broadcast it."""
    each = zip(jtu.tree_leaves_with_path(params), before, strict=True)
    changed = [(path, x.shape, old) for (path, x), old in each if x.shape != old]
    if not changed:
        return
    # Inside `vmap` or `shard_map` it may be one lane or shard of a state that was made
    # for the whole, and then its own shapes differ in the same way.
    fitting = jax.eval_shape(tx.init, params)
    same_structure = jtu.tree_structure(fitting) == jtu.tree_structure(opt_state)
    if same_structure and shapes_of(fitting) == shapes_of(opt_state):
        return
    path, shape, old = changed[0]
    raise ValueError(
        "`es.Optimizer.update`: the model is not what `init` was given:"
        f" {_name(path)} has shape {shape}, and had {old}. {START_ANEW}"
    )


def _name(path: KeyPath) -> str:
    return f"`{name_of(path)}`" if path else "the array itself"


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
