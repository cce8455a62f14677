"""Comparing trees: the first difference, and whether two leaves are the same."""

import math
from typing import Any

import equinox as eqx
import numpy as np
import optax
import pytest

import eqx_state as es
from eqx_state._tree.compare import (
    difference,
    difference_of_leaves,
    same,
)


class Model(es.Module):
    w: Any
    v: Any
    label: Any = eqx.field(static=True, default="a")


class NoTruth:
    def __eq__(self, other):
        return np.zeros(2)

    __hash__ = None


ARRAY = np.zeros(2)
TEXT = "a text"


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (ARRAY, ARRAY, True),
        (ARRAY, ARRAY.copy(), False),  # arrays are compared by identity
        (0.0, ARRAY, False),
        (257, int("257"), True),
        (1, 2, False),
        (1, 1.0, False),
        (TEXT, "".join(TEXT), True),
        (math.nan, math.nan, True),  # the same object
        (math.nan, float("nan"), False),
        (NoTruth(), NoTruth(), False),
    ],
)
def test_same(a, b, equal):
    assert same(a, b) is equal


def test_two_objects_that_only_their_identity_distinguishes():
    a, b = (Model(1, 2, optax.sgd(0.1)) for _ in range(2))
    text = difference(a, b)
    assert "first at `label`: two different `GradientTransform" in text
    assert "`TX = optax.adam(1e-3)`" in text
    assert difference(Model(1, 2, "a"), Model(1, 2, "b")) == (
        "first at `label`: expected `'a'`, got `'b'`"
    )


def test_the_difference_of_leaves():
    model = Model(ARRAY, {"n": 1})
    assert difference_of_leaves(model, Model(ARRAY, {"n": 1})) is None
    for other, name in (
        (Model(ARRAY, {"n": 2}), "v['n']"),
        (Model(ARRAY.copy(), {"n": 1}), "w"),
        (Model(ARRAY, {"n": 1, "more": 2}), "v['more']"),
        (Model(ARRAY, {}), "v['n']"),
    ):
        assert difference_of_leaves(model, other) == name
        assert difference_of_leaves(other, model) == name
