"""Cutting a tree into the arrays that JAX traces, and the rest."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_state as es
from eqx_state._transforms.cut import cut


class Layer(es.Module):
    w: es.Parameter
    size: int = 3
    name: str = "layer"


def make(**fields):
    layer = Layer(jnp.ones(2), **fields)
    return {"layer": layer, "x": 2.0, "f": jnp.sin, "a": np.ones(3), "s": np.array("a")}


def test_what_is_cut_joins_again():
    tree = make()
    arrays, rest = cut(tree)
    assert eqx.tree_equal(rest.join(arrays), tree)
    # Numbers count outside of modules only, and strings are not for JAX.
    assert arrays["x"] == 2.0
    assert arrays["layer"].size is None
    assert arrays["s"] is None
    assert "sin" in repr(rest)


def test_a_rest_is_static_and_compared_by_typed_value():
    rest = cut(make())[1]
    assert jax.tree.leaves(rest) == []
    same = [cut(Layer(jnp.ones(2)))[1] for _ in range(2)]
    assert same[0] == same[1]
    assert hash(same[0]) == hash(same[1])
    assert jax.tree.structure(same[0]) == jax.tree.structure(same[1])


@pytest.mark.parametrize("fields", [{"size": 4}, {"size": True}, {"name": "other"}])
def test_rests_that_differ(fields):
    a, b = (cut(Layer(jnp.ones(2), **x))[1] for x in ({"size": 1}, fields))
    assert a != b
    assert a.difference(b) in ("size", "name")
    assert a != "rest"
