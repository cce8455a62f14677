"""Programs that pass a module to a transform, or put a transform around the whole call.

`COPYING` contains two programs for each transform: a wrong one, called with a layer and
`XS`, and a correct one, called with a layer.
"""

import equinox as eqx
import jax
import jax.experimental
import jax.lax as lax
from catalogue_closures import inside
from catalogue_entry import Layer, Net, program, XS
from jax.sharding import SingleDeviceSharding

import eqx_state as es


def within(transform):
    """The new layer after `transform(f, x)`, where `f(x)` returns the new layer."""
    return lambda layer: transform(lambda x: es.mutable(layer)(x))


def filter_custom_vjp(layer, x):
    f = eqx.filter_custom_vjp(lambda layer, x: layer(x))
    f.def_fwd(lambda perturbed, layer, x: (layer(x), None))
    f.def_bwd(lambda residuals, g, perturbed, layer, x: layer)
    return f(layer, x)


def filter_custom_jvp(layer, x):
    f = eqx.filter_custom_jvp(lambda layer, x: layer(x))
    f.def_jvp(lambda primals, tangents: (primals[0](primals[1]), tangents[1]))
    return f(layer, x)


def filter_shard(layer, x):
    return eqx.filter_shard(layer, SingleDeviceSharding(jax.devices()[0]))(x)


def tangent(layer):
    return eqx.filter(layer, eqx.is_inexact_array)


COPYING = {
    "eqx.filter_jit(self.layer)(x)": (
        lambda layer, x: eqx.filter_jit(layer)(x),
        inside(lambda layer, x: es.jit(layer)(x)),
    ),
    "eqx.filter_vmap(self.layer)(xs)": (
        lambda layer, x: eqx.filter_vmap(layer)(x),
        inside(lambda layer, x: es.vmap(layer)(x)),
    ),
    "eqx.filter_grad(loss_fn)(self.layer)": (
        lambda layer, x: eqx.filter_grad(lambda m: m(x).sum())(layer),
        lambda layer: es.grad(lambda m: m(XS).sum())(layer)[1],
    ),
    "eqx.filter_value_and_grad(loss_fn)(self.layer)": (
        lambda layer, x: eqx.filter_value_and_grad(lambda m: m(x).sum())(layer),
        lambda layer: es.value_and_grad(lambda m: m(XS).sum())(layer)[0][1],
    ),
    "eqx.filter_checkpoint(self.layer)(x)": (
        lambda layer, x: eqx.filter_checkpoint(layer)(x),
        inside(lambda layer, x: es.checkpoint(layer)(x)),
    ),
    "eqx.filter_closure_convert(self.layer, x)": (
        lambda layer, x: eqx.filter_closure_convert(layer, x)(x),
        lambda layer: eqx.filter_closure_convert(es.mutable(layer), XS)(XS)[1],
    ),
    "eqx.filter_eval_shape(self.layer, x)": (
        lambda layer, x: eqx.filter_eval_shape(layer, x),
        lambda layer: eqx.filter_eval_shape(es.mutable(layer), XS) and None,
    ),
    "eqx.filter_make_jaxpr(self.layer)(x)": (
        lambda layer, x: eqx.filter_make_jaxpr(layer)(x),
        lambda layer: eqx.filter_make_jaxpr(es.mutable(layer))(XS) and None,
    ),
    "eqx.filter_jvp(self.layer, (x,), (t,))": (
        lambda layer, x: eqx.filter_jvp(
            lambda m, x: m(x), (layer, x), (tangent(layer), x)
        ),
        lambda layer: eqx.filter_jvp(es.mutable(layer), (XS,), (XS,))[0][1],
    ),
    "eqx.filter_vjp(self.layer, x)": (
        lambda layer, x: eqx.filter_vjp(lambda m, x: m(x), layer, x),
        within(lambda f: eqx.filter_vjp(f, XS, has_aux=True)[2]),
    ),
    "eqx.filter_jacfwd(self.layer)(x)": (
        lambda layer, x: eqx.filter_jacfwd(lambda m: m(x))(layer),
        within(lambda f: eqx.filter_jacfwd(f, has_aux=True)(XS)[1]),
    ),
    "eqx.filter_jacrev(self.layer)(x)": (
        lambda layer, x: eqx.filter_jacrev(lambda m: m(x))(layer),
        within(lambda f: eqx.filter_jacrev(f, has_aux=True)(XS)[1]),
    ),
    "eqx.filter_hessian(self.layer)(x)": (
        lambda layer, x: eqx.filter_hessian(lambda m: m(x).sum())(layer),
        within(lambda f: eqx.filter_hessian(f, has_aux=True)(XS[1])[1]),
    ),
    "eqx.filter_custom_vjp(f)(self.layer, x)": (
        filter_custom_vjp,
        inside(lambda layer, x: layer(filter_custom_vjp(layer.eval(), x))),
    ),
    "eqx.filter_custom_jvp(f)(self.layer, x)": (
        filter_custom_jvp,
        inside(lambda layer, x: layer(filter_custom_jvp(layer.eval(), x))),
    ),
    "eqx.filter_shard(self.layer, sharding)(x)": (
        filter_shard,
        lambda layer: es.mutable(
            eqx.filter_shard(layer, SingleDeviceSharding(jax.devices()[0]))
        )(XS)[1],
    ),
    "jax.jit(f)(self.layer, x)": (
        lambda layer, x: jax.jit(lambda m, x: m(x))(layer, x),
        inside(lambda layer, x: es.jit(lambda m, x: m(x))(layer, x)),
    ),
    "jax.vmap(f, (None, 0))(self.layer, xs)": (
        lambda layer, x: jax.vmap(lambda m, x: m(x), (None, 0))(layer, x),
        inside(lambda layer, x: es.vmap(lambda m, x: m(x), (None, 0))(layer, x)),
    ),
    "jax.checkpoint(f)(self.layer, x)": (
        lambda layer, x: jax.checkpoint(lambda m, x: m(x))(layer, x),
        inside(lambda layer, x: es.checkpoint(lambda m, x: m(x))(layer, x)),
    ),
    "jax.lax.scan(step, self.layer, xs)": (
        lambda layer, x: lax.scan(lambda m, x: (m, m(x)), layer, x),
        inside(lambda layer, x: es.scan(lambda _, x: (None, layer(x)), None, x[:1])),
    ),
    "jax.lax.cond(pred, f, g, self.layer)": (
        lambda layer, x: lax.cond(True, lambda m: m(x), lambda m: x, layer),
        inside(lambda layer, x: es.cond(True, lambda m: m(x), lambda m: x, layer)),
    ),
}


def copying(name, wrong, right):
    @program(f"write `{name}` in a call", "`Layer.count`", "es.vmap(self.layer)(xs)")
    def _(case):
        net = case.keep(Net(), XS)
        with case.error():
            es.mutable(lambda net, x: wrong(net.layer, x))(net, XS)
        new = right(case.keep(Layer(), XS))
        assert new is None or new.count == 1


for entry in COPYING.items():
    copying(entry[0], *entry[1])


for name, wrong in {
    "jax.vmap(self.layer)(xs)": lambda layer, x: jax.vmap(layer)(x),
    "jax.lax.map(self.layer, xs)": lambda layer, x: lax.map(layer, x),
    "jax.grad(self.layer)(x)": lambda layer, x: jax.grad(layer)(x[0]),
    "jax.eval_shape(self.layer, x)": lambda layer, x: jax.eval_shape(layer, x),
}.items():

    @program(f"write `{name}` in a call", "`layer.count`")
    def _(case, wrong=wrong):
        net = case.keep(Net(), XS)
        with case.error():
            es.mutable(lambda net, x: wrong(net.layer, x))(net, XS)


for name, wrong in (
    ("jax.jit(self.layer)(x)", lambda layer, x: jax.jit(layer)(x)),
    ("jax.checkpoint(self.layer)(x)", lambda layer, x: jax.checkpoint(layer)(x)),
    (
        "jax.lax.cond(pred, self.layer, g, x)",
        lambda layer, x: lax.cond(True, layer, lambda x: x, x),
    ),
):

    @program(f"write `{name}` in a call")
    def _(case, wrong=wrong):
        net = case.keep(Net(), XS)
        with case.error():
            es.mutable(lambda net, x: wrong(net.layer, x))(net, XS)
        _, new = es.mutable(
            lambda net, x: (
                es.jit(net.layer)(x),
                es.checkpoint(net.layer)(x),
                es.cond(True, net.layer, lambda x: x, x),
            )
        )(net, XS)
        assert new.layer.count == 3


# --- Around whole calls -------------------------------------------------------------


@program("decorate a method that writes state with `jax.jit`", "Jitted.count")
def _(case):
    class Jitted(es.Module):
        count: es.State = 0

        @jax.jit
        def wrong(self, x):
            self.count = self.count + 1
            return x

        @es.jit
        def right(self, x):
            self.count = self.count + 1
            return x

    model = case.keep(Jitted())
    with case.error():
        es.mutable(lambda m: m.wrong(XS))(model)
    assert es.mutable(model.right)(XS)[1].count == 1


@program("return a jitted step's loss without its new model")
def _(case):
    net = case.keep(Net(), XS)

    @es.jit
    def step(net, x):
        y, net = es.mutable(net)(x)
        return y

    for _ in range(2):
        assert (step(net, XS) == 2 * XS).all()
    assert net.layer.count == 0


@program("close over a model in `es.jit`, and rebind the name")
def _(case):
    net, traces = case.keep(Net(), XS), []

    @es.jit
    def predict(x):
        traces.append(None)
        return model(x)

    model = net.eval()
    assert (predict(XS) == 2 * XS).all()
    model = eqx.tree_at(lambda m: m.layer.weight, model, model.layer.weight + 1.0)
    assert (predict(XS) == 2 * XS).all()
    assert len(traces) == 1


@program("take `jax.grad` of a model that holds a counter")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        jax.grad(lambda net: es.mutable(net)(XS)[0].sum())(net)
    grads, new = es.grad(lambda net: net(XS).sum())(net)
    assert grads.layer.weight == 3.0
    assert new.layer.count == 1
