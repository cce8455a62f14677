"""Which parameter a moment of an optimizer, or an array of an average, belongs to.

Rules for the parameters of a model also hold for what is kept beside each of them: its
momentum lies where the parameter lies, and under its name. The class that keeps such
arrays is an `AbstractFollower`. Its copies of the model are found as nodes of the
model's own class: nothing has to be known of the structure around them.
"""

import abc
from collections.abc import Iterator
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp

from .._typing import KeyPath, PyTree
from ._walk import is_array, leaves, Visit, walk


class AbstractFollower(eqx.Module):
    """A module that keeps arrays for the parameters of a model."""

    @abc.abstractmethod
    def _followed(self) -> PyTree:
        """The model it was made for, with a shape or an array at each parameter.

        `None` if it was not made for one yet.
        """


class Followed(NamedTuple):
    """A parameter, and the tree in which its path and its name begin."""

    tree: PyTree
    parameter: Visit


def followed(tree: PyTree) -> dict[KeyPath, Followed]:
    """By the path of each array in `tree` that belongs to a parameter: that parameter.

    It is the one in `tree`, if the model is there, too: `(model, optimizer)`. Otherwise
    it is that of the model that the follower was made for, where it has a shape and no
    value.
    """
    found: dict[KeyPath, Followed] = {}
    for visit in walk(tree):
        if isinstance(visit.node, AbstractFollower):
            model = visit.node._followed()
            parameters = _arrays(model)
            if not parameters:
                continue
            where, start = _model_in(tree, visit, model, parameters)
            by_path = _arrays(where)
            for path, below in _copies(visit, model, parameters):
                found[path] = Followed(where, by_path[(*start, *below)])
    return found


def followed_parameters(tree: PyTree) -> list[Visit]:
    """The parameters that the followers in `tree` were made for.

    A follower need not have arrays for them: `optax.sgd` keeps no moments.
    """
    return [
        parameter
        for visit in walk(tree)
        if isinstance(visit.node, AbstractFollower)
        for parameter in _arrays(visit.node._followed()).values()
    ]


def _arrays(tree: PyTree) -> dict[KeyPath, Visit]:
    return {visit.path: visit for visit in leaves(tree) if is_array(visit.node)}


def _copies(
    follower: Visit, model: PyTree, parameters: dict[KeyPath, Visit]
) -> Iterator[tuple[KeyPath, KeyPath]]:
    """The paths of the follower's arrays in its tree, and of their parameters."""

    def is_copy(node: PyTree) -> bool:
        if not _is_alike(node, model):
            return False
        paths = _arrays(node).keys()
        return bool(paths) and paths <= parameters.keys()

    for visit in leaves(follower.node, follower.path, is_leaf=is_copy):
        if is_copy(visit.node):
            for below in _arrays(visit.node):
                yield (*visit.path, *below), below


def _is_alike(node: PyTree, model: PyTree) -> bool:
    if not is_array(model):
        return type(node) is type(model)
    # The whole model is one array. Neither a count nor a learning rate is its moment.
    is_inexact = is_array(node) and jnp.issubdtype(node.dtype, jnp.inexact)
    return is_inexact and node.shape == model.shape


def _model_in(
    tree: PyTree, follower: Visit, model: PyTree, parameters: dict[KeyPath, Visit]
) -> tuple[PyTree, KeyPath]:
    """The tree that has the model, and the model's path there.

    Of several models of a class it is the one that is nearest to the follower. If that
    cannot be told, it is none of them.
    """

    def stops(node: PyTree) -> bool:
        is_model = _is_alike(node, model) and parameters.keys() <= _arrays(node).keys()
        return is_model or isinstance(node, AbstractFollower)

    models = [
        visit.path
        for visit in leaves(tree, is_leaf=stops)
        if stops(visit.node) and not isinstance(visit.node, AbstractFollower)
    ]
    near = [_common(path, follower.path) for path in models]
    models = [path for path, n in zip(models, near, strict=True) if n == max(near)]
    return (tree, models[0]) if len(models) == 1 else (model, ())


def _common(a: KeyPath, b: KeyPath) -> int:
    """How many keys two paths begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
