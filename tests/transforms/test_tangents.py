"""Which tangents and cotangents fit, and the errors for those that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter
    count: es.State
    name: object = "layer"

    def __call__(self, x):
        return self.weight * x, self.count


ONES = jnp.ones(2)


def layer(weight=ONES, count=None, name=None):
    return Layer(weight, count, name)


LAYER = Layer(ONES, jnp.array(3))


def by_vjp(given):
    out, vjp_fn = es.vjp(lambda layer: layer, LAYER)
    return vjp_fn(given)


def by_jvp(given):
    return es.jvp(lambda layer: layer(2.0), (LAYER,), (given,))


def by_linearize(given):
    return es.linearize(lambda layer: layer(2.0), LAYER)[1](given)


STRUCTURE = {by_vjp: ValueError, by_jvp: TypeError, by_linearize: TypeError}
DTYPE = {by_vjp: ValueError, by_jvp: TypeError, by_linearize: ValueError}
each = pytest.mark.parametrize("take", STRUCTURE)


@each
def test_holes_and_zeros_are_taken_where_there_are_no_tangents(take):
    for count in (None, np.zeros((), jax.dtypes.float0)):
        for name in (None, "layer"):
            take(layer(count=count, name=name))
    take(layer().eval())  # modes do not count


@each
@pytest.mark.parametrize(
    ("given", "errors", "message"),
    [
        (
            {"weight": jnp.ones(2)},
            STRUCTURE,
            "^The tree of .*`es.* has another structure than the tree",
        ),
        (layer(weight=None), DTYPE, r"weight` is `f32\[2\]`, and nothing is given"),
        (layer(weight=jnp.ones(3)), None, r"is `f32\[2\]`, and what .* is `f32\[3\]`"),
        (layer(weight=jnp.arange(2)), DTYPE, r"what is given for it is `i32\[2\]`"),
        (layer(count=jnp.array(1)), DTYPE, r"count` is `i32\[\]`, for which there are"),
        (layer(name=jnp.array(1.0)), DTYPE, r"name` is `'layer'`, for which there are"),
    ],
    ids=["structure", "missing", "shape", "dtype", "integer", "static"],
)
def test_what_does_not_fit_is_named(take, given, errors, message):
    error = ValueError if errors is None else errors[take]
    what = {by_vjp: "cotangents", by_jvp: "es.jvp", by_linearize: "es.linearize"}[take]
    with pytest.raises(error, match=what) as info:
        take(given)
    assert info.type is error
    info.match(message)


def test_another_number_of_tangents_is_an_error():
    with pytest.raises(TypeError, match="another structure"):
        es.jvp(jnp.sin, (1.0,), (1.0, 2.0))
    with pytest.raises(TypeError, match="another structure"):
        es.linearize(jnp.sin, 1.0)[1](1.0, 2.0)
    with pytest.raises(TypeError, match="positional argument"):
        es.vjp(jnp.sin, 1.0)[1](1.0, 2.0)


@pytest.mark.parametrize("given", [((1.0,), 1.0), (1.0, (1.0,))])
def test_jvp_takes_tuples(given):
    with pytest.raises(TypeError, match=r"are tuples or lists.*`float`"):
        es.jvp(jnp.sin, *given)


def test_text_in_a_numpy_array_is_not_differentiated():
    named = {"x": 2.0, "names": np.array(["a", "b"])}
    for names in (None, named["names"]):
        tangent = {"x": 1.0, "names": names}
        out, moved = es.jvp(lambda d: d["x"] * 3.0, (named,), (tangent,))
        assert (out, moved) == (6.0, 3.0)
