"""Programs that give `es.jit` functions, unusual static values, and deep trees."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


@program("share a dict with a module in it between two functions under `es.jit`")
def _(case):
    layer = case.keep(Layer().eval(), XS)

    def run(transform):
        shared = {"layer": layer, "hidden": jnp.zeros(3)}

        def encode(x):
            shared["hidden"] = shared["layer"](x)

        def decode():
            return shared["hidden"] + 1

        def step(x):
            encode(x)
            return decode()

        return transform(step)(XS)

    with jax.check_tracer_leaks(False):
        assert (run(es.jit) == run(lambda f: f)).all()


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
    "later calls would get the module of the first one",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(lambda n, x: es.jit(lambda m: lambda: m(x))(n.layer)())(net, XS)

    def right(net, x):
        weight = es.jit(lambda layer: 2 * layer.weight)(net.layer)
        return (lambda: weight * x)()

    assert (es.mutable(right)(net, XS)[0] == 4 * XS).all()


@program("call one jitted function on modules of one scope, then of two")
def _(case):
    net = case.keep(Net(), XS)
    both = es.jit(lambda a, b, x: a(x) + b(x))

    def f(net, x):
        both(net.layer, net.layer, x)
        _, inner = es.mutable(lambda m, x: both(m.layer, net.layer, x))(net, x)
        return inner.layer.count

    count, new = es.mutable(f)(net, XS)
    assert (count, new.layer.count) == (3, 3)


@dataclasses.dataclass(frozen=True)
class Scale:
    name: str
    factor: dataclasses.InitVar[float]

    def __post_init__(self, factor):
        object.__setattr__(self, "_factor", factor)

    def __eq__(self, other):
        return (self.name, self._factor) == (other.name, other._factor)

    def __hash__(self):
        return hash((self.name, self._factor))


@program(
    "pass `es.jit` a dataclass with an `__eq__` of its own, or with `compare=False`"
)
def _(case):
    f = es.jit(lambda scale, x: scale._factor * x)
    for factor in (1.0, 2.0):
        assert (f(Scale("s", factor), XS) == factor * XS).all()


@program("pass `es.jit` a `jax.ShapeDtypeStruct`, or return one")
def _(case):
    f = es.jit(lambda like, x: (jnp.zeros(like.shape) + x, like))
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    y, same = f(like, XS)
    assert (y == XS).all()
    assert same == like


@program("return a result that is nested hundreds of levels deep from `es.jit`")
def _(case):
    def nested(x):
        for _ in range(210):
            x = (x,)
        return x

    assert (jax.tree.leaves(es.jit(nested)(XS))[0] == XS).all()


@program("jit an object that cannot be called: `es.jit(None)`, a property", "@property")
def _(case):
    for x in (None, 3, property(lambda self: 1)):
        with case.error():
            es.jit(x)


@program(
    "train a model with one stateful module in two places under `es.jit`",
    "`layers[0]`",
    "`layers[2]`",
)
def _(case):
    layer = case.keep(Layer(), XS)
    model = eqx.nn.Sequential([layer, eqx.nn.Lambda(jax.nn.relu), layer])
    with case.error():
        es.jit(lambda m, x: es.mutable(m)(x))(model, XS)
