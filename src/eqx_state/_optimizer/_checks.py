"""Checks of what an optimizer is given and of what it computes."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from .._kinds._kinds import Parameter
from .._tree._base import is_module
from .._tree._bind import written
from .._tree._compare import is_hole
from .._tree._parts import parts
from .._tree._rules import check_rules, is_rules
from .._tree._walk import is_array, leaves, name_of
from .._typing import KeyPath, PyTree


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
