"""Followers of parameters: the moments of optimizers, and averages.

Rules give each of these arrays the value of its parameter: a moment has the sharding of
its parameter.
"""

import abc
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from .._typing import KeyPath, PyTree
from .context import children
from .unbuilt import CanBeUnbuilt
from .walk import is_array, leaves, Visit, walk


class AbstractPerParameter(CanBeUnbuilt):
    """A module with arrays for the parameters of a model, such as their moments.

    Rules give each of these arrays the value of its parameter: a moment has the
    sharding of its parameter.
    """

    @abc.abstractmethod
    def _recorded_model(self) -> PyTree:
        """The recorded model, with a shape or an array for each parameter.

        `None` before `init`.
        """


class ParameterOf(NamedTuple):
    """A parameter, and the tree to which its path and its name are relative."""

    tree: PyTree
    parameter: Visit


def parameters_of(tree: PyTree) -> dict[KeyPath, ParameterOf]:
    """Map the path of each moment or average in `tree` to its parameter.

    If `tree` also contains the model, as in `(model, optimizer)`, that is the parameter
    in `tree`. Otherwise it is that of the recorded model, which may only have a shape.
    """
    # In any optimizer state, moments are in trees of the class of the model.
    # `optax.tree_utils.tree_map_params` raises an error for the states of
    # `optax.partition`, `masked` and `lbfgs`.
    found: dict[KeyPath, ParameterOf] = {}
    arrays, owners = _arrays(tree), [owner.path for owner in _per_parameter_in(tree)]
    for owner, model in zip(owners, recorded_models(tree), strict=True):
        parameters = _arrays(model)
        similar = _similar(tree, model, parameters)
        # An array of the same shape as a model that is one array may be anything.
        starts = [
            path
            for path, below in similar
            if below == parameters.keys() != {()}
            and not any(path[: len(other)] == other for other in owners)
        ]
        # If several nodes look like the model, choose the one whose path has the
        # longest prefix in common with that of the owner; on a tie, none.
        near = [_common(start, owner) for start in starts]
        if near.count(max(near, default=0)) == 1:
            where, visits, start = tree, arrays, starts[near.index(max(near))]
        else:
            where, visits, start = model, parameters, ()
        # The state of `optax.chain` is a tuple, and so may be the model: take the tree
        # that has most of the parameters. In a model with a part of the same class,
        # take the outermost.
        for path, below in sorted(reversed(similar), key=lambda pair: len(pair[1])):
            if path[: len(owner)] == owner:
                for x in below:
                    found[*path, *x] = ParameterOf(where, visits[*start, *x])
    return found


def recorded_models(tree: PyTree) -> list[PyTree]:
    """The models that the optimizers and averages in `tree` have recorded."""
    return [owner.node._recorded_model() for owner in _per_parameter_in(tree)]


def _per_parameter_in(tree: PyTree) -> list[Visit]:
    return [
        visit for visit in walk(tree) if isinstance(visit.node, AbstractPerParameter)
    ]


def _arrays(tree: PyTree) -> dict[KeyPath, Visit]:
    return {visit.path: visit for visit in leaves(tree) if is_array(visit.node)}


def _similar(
    node: PyTree, model: PyTree, parameters: Mapping[KeyPath, Visit], path: KeyPath = ()
) -> list[tuple[KeyPath, set[KeyPath]]]:
    """Every tree of the model's class: its path, and the parameters that are in it.

    Parents come first. The trees of a group contain only a part of the parameters.
    """
    if is_array(model):
        is_similar = is_array(node) and node.shape == model.shape
    else:
        is_similar = type(node) is type(model)
    # A counter of steps is not like a parameter.
    below = {
        x
        for x, visit in (_arrays(node) if is_similar else {}).items()
        if x in parameters and _is_inexact(visit) == _is_inexact(parameters[x])
    }
    found = [(path, below)] if below else []
    for key, child in children(node) or ():
        found += _similar(child, model, parameters, (*path, key))
    return found


def _is_inexact(visit: Visit) -> bool:
    return bool(jnp.issubdtype(visit.node.dtype, jnp.inexact))


def _common(a: KeyPath, b: KeyPath) -> int:
    """The length of the common prefix of two paths."""
    pairs = zip(a, b, strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
