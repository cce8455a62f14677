"""Programs that hand a module to a transform, or put one around the whole call.

`COPYING` has one program for each transform: what is wrong, of a layer and `XS`, and
what is right, of a layer.
"""

import equinox as eqx
import jax
import jax.experimental
import jax.lax as lax
from catalogue_closures import inside, TRACED, within
from catalogue_entry import FROZEN, Layer, Net, Theme, XS
from jax.sharding import SingleDeviceSharding

import eqx_state as es


COPIES = Theme("A module handed to a transform of JAX or Equinox")
DECORATED = Theme("Transforms around whole calls")

COPIED = "or it is a copy made inside the scope"


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
        "`es.jit(self.layer)(x)`",
    ),
    "eqx.filter_jit(self.layer.apply)(x)": (
        lambda layer, x: eqx.filter_jit(layer.apply)(x),
        inside(lambda layer, x: es.jit(layer.apply)(x)),
        "`es.jit(self.layer.apply)(x)`",
    ),
    "eqx.filter_vmap(self.layer)(xs)": (
        lambda layer, x: eqx.filter_vmap(layer)(x),
        inside(lambda layer, x: es.vmap(layer)(x)),
        "`es.vmap(self.layer)(xs)`",
    ),
    "eqx.filter_grad(loss_fn)(self.layer)": (
        lambda layer, x: eqx.filter_grad(lambda m: m(x).sum())(layer),
        lambda layer: es.grad(lambda m: m(XS).sum())(layer)[1],
        "`grads, model = es.grad(loss_fn)(model)`, at the top",
    ),
    "eqx.filter_value_and_grad(loss_fn)(self.layer)": (
        lambda layer, x: eqx.filter_value_and_grad(lambda m: m(x).sum())(layer),
        lambda layer: es.value_and_grad(lambda m: m(XS).sum())(layer)[0][1],
        "`(loss, model), grads = es.value_and_grad(loss_fn)(model)`",
    ),
    "eqx.filter_checkpoint(self.layer)(x)": (
        lambda layer, x: eqx.filter_checkpoint(layer)(x),
        inside(lambda layer, x: es.checkpoint(layer)(x)),
        "`es.checkpoint(self.layer)(x)`",
    ),
    "eqx.filter_closure_convert(self.layer, x)": (
        lambda layer, x: eqx.filter_closure_convert(layer, x)(x),
        lambda layer: eqx.filter_closure_convert(es.mutable(layer), XS)(XS)[1],
        "`eqx.filter_closure_convert(es.mutable(model), x)`",
    ),
    "eqx.filter_eval_shape(self.layer, x)": (
        lambda layer, x: eqx.filter_eval_shape(layer, x),
        lambda layer: eqx.filter_eval_shape(es.mutable(layer), XS) and None,
        "`eqx.filter_eval_shape(es.mutable(model), x)`",
    ),
    "eqx.filter_make_jaxpr(self.layer)(x)": (
        lambda layer, x: eqx.filter_make_jaxpr(layer)(x),
        lambda layer: eqx.filter_make_jaxpr(es.mutable(layer))(XS) and None,
        "`eqx.filter_make_jaxpr(es.mutable(model))(x)`",
    ),
    "eqx.filter_jvp(self.layer, (x,), (t,))": (
        lambda layer, x: eqx.filter_jvp(
            lambda m, x: m(x), (layer, x), (tangent(layer), x)
        ),
        lambda layer: eqx.filter_jvp(es.mutable(layer), (XS,), (XS,))[0][1],
        "`eqx.filter_jvp(es.mutable(model), (x,), (t,))`",
    ),
    "eqx.filter_vjp(self.layer, x)": (
        lambda layer, x: eqx.filter_vjp(lambda m, x: m(x), layer, x),
        within(lambda f: eqx.filter_vjp(f, XS, has_aux=True)[2]),
        "`eqx.filter_vjp(es.mutable(model), x, has_aux=True)`",
    ),
    "eqx.filter_jacfwd(self.layer)(x)": (
        lambda layer, x: eqx.filter_jacfwd(lambda m: m(x))(layer),
        within(lambda f: eqx.filter_jacfwd(f, has_aux=True)(XS)[1]),
        "`eqx.filter_jacfwd(es.mutable(model), has_aux=True)(x)`",
    ),
    "eqx.filter_jacrev(self.layer)(x)": (
        lambda layer, x: eqx.filter_jacrev(lambda m: m(x))(layer),
        within(lambda f: eqx.filter_jacrev(f, has_aux=True)(XS)[1]),
        "`eqx.filter_jacrev(es.mutable(model), has_aux=True)(x)`",
    ),
    "eqx.filter_hessian(self.layer)(x)": (
        lambda layer, x: eqx.filter_hessian(lambda m: m(x).sum())(layer),
        within(lambda f: eqx.filter_hessian(f, has_aux=True)(XS[1])[1]),
        "`eqx.filter_hessian(es.mutable(model), has_aux=True)(x)`",
    ),
    "an `eqx.filter_custom_vjp` function": (
        filter_custom_vjp,
        inside(lambda layer, x: layer(filter_custom_vjp(layer.eval(), x))),
        "pass it `self.layer.eval()`, or only parameters, and write outside of it",
    ),
    "an `eqx.filter_custom_jvp` function": (
        filter_custom_jvp,
        inside(lambda layer, x: layer(filter_custom_jvp(layer.eval(), x))),
        "pass it `self.layer.eval()`, or only parameters, and write outside of it",
    ),
    "eqx.filter_shard(self.layer, sharding)(x)": (
        filter_shard,
        lambda layer: es.mutable(
            eqx.filter_shard(layer, SingleDeviceSharding(jax.devices()[0]))
        )(XS)[1],
        "shard the model before the call",
    ),
    "jax.jit(f)(self.layer, x)": (
        lambda layer, x: jax.jit(lambda m, x: m(x))(layer, x),
        inside(lambda layer, x: es.jit(lambda m, x: m(x))(layer, x)),
        "`es.jit(f)(self.layer, x)`",
    ),
    "jax.vmap(f, (None, 0))(self.layer, xs)": (
        lambda layer, x: jax.vmap(lambda m, x: m(x), (None, 0))(layer, x),
        inside(lambda layer, x: es.vmap(lambda m, x: m(x), (None, 0))(layer, x)),
        "`es.vmap(f, (None, 0))(self.layer, xs)`",
    ),
    "jax.checkpoint(f)(self.layer, x)": (
        lambda layer, x: jax.checkpoint(lambda m, x: m(x))(layer, x),
        inside(lambda layer, x: es.checkpoint(lambda m, x: m(x))(layer, x)),
        "`es.checkpoint(f)(self.layer, x)`",
    ),
    "jax.lax.scan(step, self.layer, xs)": (
        lambda layer, x: lax.scan(lambda m, x: (m, m(x)), layer, x),
        inside(lambda layer, x: es.scan(lambda _, x: (None, layer(x)), None, x[:1])),
        "`es.scan` with a body that closes over `self.layer`",
    ),
    "jax.lax.cond(pred, f, g, self.layer)": (
        lambda layer, x: lax.cond(True, lambda m: m(x), lambda m: x, layer),
        inside(lambda layer, x: es.cond(True, lambda m: m(x), lambda m: x, layer)),
        "`es.cond(pred, f, g, self.layer)`",
    ),
}


def copying(name, wrong, right, instead):
    title = f"call {name}" if name[:3] == "an " else f"write `{name}`"

    @COPIES.raises(
        f"{title} in a call",
        FROZEN,
        COPIED,
        "`Layer.count`",
        "es.vmap(self.layer)(x)",
        instead=instead,
    )
    def program(case):
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

    @COPIES.raises(
        f"write `{name}` in a call",
        es.TraceError,
        TRACED,
        "`layer.count`",
        instead="the transform of `es`, or `es.mutable` inside",
    )
    def _(case, wrong=wrong):
        net = case.keep(Net(), XS)
        with case.error():
            es.mutable(lambda net, x: wrong(net.layer, x))(net, XS)


for name, wrong, instead in (
    (
        "jax.jit(self.layer)(x)",
        lambda layer, x: jax.jit(layer)(x),
        "`es.jit(self.layer)(x)`",
    ),
    (
        "jax.checkpoint(self.layer)(x)",
        lambda layer, x: jax.checkpoint(layer)(x),
        "`es.checkpoint(self.layer)(x)`",
    ),
    (
        "jax.lax.cond(pred, self.layer, g, x)",
        lambda layer, x: lax.cond(True, layer, lambda x: x, x),
        "`es.cond(pred, self.layer, g, x)`",
    ),
):

    @COPIES.raises(
        f"write `{name}` in a call",
        TypeError,
        "unhashable type: a `Layer` with arrays",
        instead=instead,
    )
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


@COPIES.raises(
    "write `eqx.filter_pure_callback(f, self.layer, x)` in a call",
    jax.errors.JaxRuntimeError,
    COPIED,
    "`Layer.count`",
    instead="`es.mutable` in the callback, which returns the output and the model",
)
def _(case):
    layer = case.keep(Layer(), XS)

    def call(f, shapes):
        return eqx.filter_pure_callback(f, layer, XS, result_shape_dtypes=shapes)

    with case.error():
        call(lambda m, x: m(x), XS)
    shapes = eqx.filter_eval_shape(es.mutable(layer), XS)
    y, new = call(lambda m, x: es.mutable(m)(x), shapes)
    assert (y == 2 * XS).all()
    assert new.count == 1


# --- Around whole calls -------------------------------------------------------------


@DECORATED.raises(
    "decorate a method that writes state with `jax.jit`",
    FROZEN,
    COPIED,
    "Jitted.count",
    instead="`@es.jit` on the method, `es.mutable` around the call",
)
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
    for f in (model.wrong, es.mutable(model.wrong), es.mutable(lambda m: m.wrong(XS))):
        with case.error():
            f(model) if f is not model.wrong else f(XS)
    assert es.mutable(model.right)(XS)[1].count == 1


@DECORATED.works(
    "decorate a method twice: `@es.jit` over `@es.vmap`",
    "`self` belongs to the function, and is not mapped with the arguments",
)
def _(case):
    class Sum(es.Module):
        weight: es.Parameter

        @es.jit
        @es.vmap
        def run(self, x):
            return self.weight.sum() * x

    model = case.keep(Sum(XS))
    assert (model.run(XS) == 3 * XS).all()


@DECORATED.raises(
    "decorate a method that writes state with `eqx.filter_jit`",
    FROZEN,
    COPIED,
    "Jitted.count",
    instead="`@es.jit` on the method",
)
def _(case):
    class Jitted(es.Module):
        count: es.State = 0

        @eqx.filter_jit
        def wrong(self, x):
            self.count = self.count + 1
            return x

        @es.jit
        def right(self, x):
            self.count = self.count + 1
            return x

    model = case.keep(Jitted())
    with case.error():
        es.mutable(model.wrong)(XS)
    with case.error():
        es.mutable(lambda m: m.wrong(XS))(model)
    assert es.mutable(lambda m: m.right(XS))(model)[1].count == 1


@DECORATED.raises(
    "call the model in a jitted step without `es.mutable`",
    FROZEN,
    "this one is in no scope",
    "Layer.count",
    "y, model = es.mutable(model)(x)",
    instead="`y, model = es.mutable(model)(x)` in the step, and return both",
)
def _(case):
    net = case.keep(Net(), XS)
    for jit in (jax.jit, eqx.filter_jit, es.jit):
        with case.error():
            jit(lambda net, x: net(x))(net, XS)
        y, new = jit(lambda net, x: es.mutable(net)(x))(net, XS)
        assert new.layer.count == 1


@DECORATED.works(
    "return a jitted step's loss without its new model",
    "the model outside is unchanged, like any argument of a pure function",
    "`return loss, model`, and `loss, model = step(model, xs)`",
)
def _(case):
    net = case.keep(Net(), XS)

    @es.jit
    def step(net, x):
        y, net = es.mutable(net)(x)
        return y

    for _ in range(2):
        assert (step(net, XS) == 2 * XS).all()
    assert net.layer.count == 0


@DECORATED.works(
    "carry a model through `jax.lax.scan`, with `es.mutable` in the body",
    "the new model is the carry",
    "or `es.scan` inside one `es.mutable`",
)
def _(case):
    net = case.keep(Net(), XS)
    f = jax.jit(lambda net: lax.scan(lambda m, x: es.mutable(m)(x)[::-1], net, XS))
    new, ys = f(net)
    assert new.layer.count == 3
    assert (ys == 2 * XS).all()


@DECORATED.works(
    "close over a model in `es.jit`, and rebind the name",
    "closures are traced like arguments, so the new model is used",
)
def _(case):
    net, traces = case.keep(Net(), XS), []

    @es.jit
    def predict(x):
        traces.append(None)
        return model(x)

    model = net.eval()
    assert (predict(XS) == 2 * XS).all()
    model = eqx.tree_at(lambda m: m.layer.weight, model, model.layer.weight + 1.0)
    assert (predict(XS) == 3 * XS).all()
    assert len(traces) == 1


@DECORATED.raises(
    "take `jax.grad` of a model that holds a counter",
    TypeError,
    "grad requires real- or complex-valued inputs",
    instead="`es.grad(loss_fn)(model)`, or `eqx.filter_grad` in eval mode",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        jax.grad(lambda net: es.mutable(net)(XS)[0].sum())(net)
    grads, new = es.grad(lambda net: net(XS).sum())(net)
    assert grads.layer.weight == 3.0
    assert new.layer.count == 1
