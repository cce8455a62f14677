"""Programs that pass functions, unusual static values or deep trees to `es.jit`."""

import functools as ft

import equinox as eqx
import jax.numpy as jnp
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


@program("pass `es.jit` a function that closes over a model")
def _(case):
    layer = case.keep(Layer().eval(), XS)

    def apply(x):
        return layer(x)

    for jit in (es.jit, eqx.filter_jit):
        y, same = jit(lambda f, x: (f(x), f))(apply, XS)
        assert (y == 2 * XS).all()
        assert same is apply


@program("pass `es.jit` a `functools.partial`, an optax transformation, a bound method")
def _(case):
    traces = []

    @es.jit
    def f(act, x):
        traces.append(1)
        return act(x)

    double = ft.partial(jnp.multiply, 2.0)
    for _ in range(2):
        assert (f(double, XS) == 2 * XS).all()
    f(ft.partial(jnp.multiply, 2.0), XS)
    assert len(traces) == 2


@program(
    "return a function that holds a module of the scope from `es.jit`",
    "later calls would return the module of the first call",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(lambda n, x: es.jit(lambda m: lambda: m(x))(n.layer)())(net, XS)

    def right(net, x):
        weight = es.jit(lambda layer: 2 * layer.weight)(net.layer)
        return (lambda: weight * x)()

    assert (es.mutable(right)(net, XS)[0] == 4 * XS).all()


@program("jit an object that cannot be called: `es.jit(None)`, a property", "@property")
def _(case):
    for x in (None, 3, property(lambda self: 1)):
        with case.error():
            es.jit(x)
