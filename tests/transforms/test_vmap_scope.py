"""`es.vmap` inside and outside of scopes, and what an error in a lane leaves behind."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from vmap_cases import Net, Norm

import eqx_state as es


XS = jnp.array([1.0, 2.0, 6.0])


def apply(norm, x):
    return norm(x)


NORM = Norm()
FUNCTIONS = {
    "module": lambda m: m,
    "bound method": lambda m: m.apply,
    "bound dunder": lambda m: m.__call__,
    "closure": lambda m: lambda x: m(x),
    "closure over a method": lambda m: (lambda f: lambda x: f(x))(m.apply),
    "closure over a closure": lambda m: (lambda f: lambda x: f(x))(lambda x: m(x)),
    "closure over a list": lambda m: (lambda ms: lambda x: ms[0](x))([m]),
    "default": lambda m: lambda x, m=m: m(x),
    "keyword default": lambda m: lambda x, *, m=m: m(x),
    "partial": lambda m: ft.partial(apply, m),
    "partial keyword": lambda m: ft.partial(lambda x, norm: norm(x), norm=m),
    "jax partial": lambda m: jtu.Partial(apply, m),
    "eqx partial": lambda m: eqx.Partial(apply, m),
    "partial of a method": lambda m: ft.partial(m.apply, shift=0.0),
    "sequential": lambda m: eqx.nn.Sequential([m]),
    "lambda layer": lambda m: eqx.nn.Lambda(m),
}


def test_outside_a_scope_without_writes():
    norm = Norm(mean=1.0).eval()
    expected = 2.0 * (XS - 1.0)
    assert (es.vmap(norm)(XS) == expected).all()
    assert (es.vmap(lambda x: norm(x))(XS) == expected).all()
    assert (es.vmap(apply, in_axes=(None, 0))(norm, XS) == expected).all()
    assert (jax.jit(lambda m, x: es.vmap(m)(x))(norm, XS) == expected).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outside_a_scope_a_write_is_an_error(name):
    make = FUNCTIONS[name]
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Norm\.mean"):
        es.vmap(make(NORM), axis_name="batch")(XS)
    assert NORM.mean == 0.0


def test_an_exception_in_a_lane_leaves_nothing_half_written():
    def f(norm, xs):
        def lane(x):
            norm(x)
            raise KeyError("half-way")

        with pytest.raises(KeyError, match="half-way"):
            es.vmap(lane, axis_name="batch")(xs)
        assert norm.mean == 4.0
        assert not isinstance(norm.mean, jax.core.Tracer)
        return es.vmap(norm, axis_name="batch")(xs)

    _, new = es.mutable(f)(Norm(mean=4.0), XS)
    np.testing.assert_allclose(new.mean, 3.5)


def test_an_unreduced_write_leaves_nothing_half_written():
    def f(net, xs):
        def lane(x):
            net.a(x)
            net.b.mean = x

        with pytest.raises(ValueError, match=r"`b\.mean`"):
            es.vmap(lane, axis_name="batch")(xs)
        return net.a.mean, net.b.mean

    out, new = es.mutable(f)(Net(), XS)
    assert out == (0.0, 0.0)
    assert eqx.tree_equal(new, Net())


def test_an_error_after_the_lanes_leaves_nothing_half_written():
    def f(norm, xs):
        with pytest.raises(ValueError, match="out of bounds"):
            es.vmap(norm, axis_name="batch", out_axes=5)(xs)
        return norm.mean

    assert es.mutable(f)(NORM, XS)[0] == 0.0


def test_a_lane_may_not_write_through_a_plain_transform():
    def f(norm, xs):
        return es.vmap(jax.vmap(norm), axis_name="batch")(xs)

    def g(norm, xs):
        return jax.vmap(lambda x: es.vmap(norm, axis_name="batch")(x))(xs)

    for h in (lambda m, x: jax.vmap(es.vmap(m, axis_name="batch"))(x), g):
        with pytest.raises(
            (es.TraceError, dataclasses.FrozenInstanceError), match=r"mean"
        ):
            es.mutable(h)(NORM, XS[None])
    with pytest.raises(
        (es.TraceError, dataclasses.FrozenInstanceError), match=r"Norm\.mean"
    ):
        es.mutable(f)(NORM, XS[None])


def test_a_lane_that_keeps_self_cannot_write_later():
    kept = []

    def f(norm, xs):
        es.vmap(lambda x: kept.append(norm) or x)(xs)
        norm.mean = 1.0  # outside of the lanes it is writable again

    _, new = es.mutable(f)(NORM, XS)
    assert new.mean == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError, match="closed"):
        kept[0].mean = 2.0
