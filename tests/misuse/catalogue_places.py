"""Programs that store modules in a wrong place, or write to one that was removed."""

import types
from typing import Any

import equinox as eqx
import jax.random as jr
import optax
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


class Two(es.Module):
    a: Any
    b: Any


@program("put one stateful module in two places", "call it twice", "eqx.nn.Shared")
def _(case):
    layer = case.keep(Layer(), XS)
    with case.error():
        Two(layer, layer)
    with case.error():
        Two(layer, [Layer(), layer])
    with case.error():
        es.mutable(lambda tree: None)({"a": layer, "b": layer})
    with case.error():
        es.Optimizer(optax.sgd(0.1)).init([layer, layer])
    with case.error():
        es.eval([layer, layer])
    pair = Two(layer, None)
    _, new = es.mutable(lambda m, x: m.a(m.a(x)))(pair, XS)
    assert new.a.count == 2


@program("tie two fields in a call: `self.a = self.b`", "`a`", "`b`")
def _(case):
    model = case.keep(Two(Layer(), Layer(2.0, 5)))
    with case.error():
        es.mutable(lambda m: setattr(m, "a", m.b))(model)
    _, new = es.mutable(lambda m: setattr(m, "a", m.a.replace(count=m.b.count)))(model)
    assert (new.a.count, new.b.count) == (5, 5)


@program("share an Equinox layer without state between two places")
def _(case):
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    model = case.keep(Two(linear, linear))
    assert len(es.parts(model)) == 4


@program("replace a layer, and write to the old one", "`a.count`")
def _(case):
    model = case.keep(Two(Layer(), None))

    def f(model):
        old, model.a = model.a, model.a.replace(count=0)
        old(XS)

    with case.error():
        es.mutable(f)(model)


@program(
    "assign a new layer, and write to the variable",
    "`Layer.count`",
    "Write through the field",
)
def _(case):
    model = case.keep(Two(Layer(), None))

    def f(model, is_right):
        new = model.a = model.a.replace(count=0)
        (model.a if is_right else new)(XS)

    with case.error():
        es.mutable(f)(model, False)
    assert es.mutable(f)(model, True)[1].a.count == 1


@program(
    "hide a module in an object that is not a pytree, under a transform",
    "`layer.count`",
    "pass such a module as an argument",
)
def _(case):
    net = case.keep(Net(), XS)

    def hidden(net):
        box = types.SimpleNamespace(layer=net.layer)
        es.checkpoint(lambda x: box.layer(x))(XS)

    with case.error():
        es.mutable(hidden)(net)
    passed = lambda net: es.checkpoint(lambda layer: layer(XS))(net.layer)  # noqa: E731
    assert es.mutable(passed)(net)[1].layer.count == 1


@program(
    "assign a layer with different weights in a call",
    ".weight` is a",
    "kinds=es.TreePart",
)
def _(case):
    model = case.keep(Two(Layer(), None))
    f = lambda m: setattr(m, "a", Layer(7.0))  # noqa: E731
    with case.error():
        es.mutable(f)(model)
    with case.error():
        es.mutable(lambda m: setattr(m, "a", [Layer(7.0)]))(Two([Layer()], None))
    assert es.mutable(f, kinds=es.TreePart)(model)[1].a.weight == 7.0


@program("call `es.mutable` in a call, and drop the new model")
def _(case):
    net = case.keep(Net(), XS)

    def keep(net):
        _, net.layer = es.mutable(net.layer)(XS)

    _, new = es.mutable(lambda net: es.mutable(net.layer)(XS)[0])(net)
    assert new.layer.count == 0
    assert es.mutable(keep)(net)[1].layer.count == 1
