"""Programs that write state in a function under a transform of JAX.

`UNDER` contains two programs for each transform: a wrong one, called with a function
and `XS`, and a correct one, called with a layer.
"""

import jax
import jax.experimental
import jax.lax as lax
import jax.numpy as jnp
from catalogue_entry import Layer, Net, program, XS
from jax.sharding import PartitionSpec

import eqx_state as es


MESH = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,))


def inside(f):
    """The new layer after `f(layer, XS)` in a scope."""

    def run(layer):
        _, net = es.mutable(lambda net: f(net.layer, XS))(Net(layer))
        return net.layer

    return run


def leaking():
    """Disable JAX's check for leaks, because the program leaks a tracer on purpose."""
    return jax.check_tracer_leaks(False)


def scalar(f):
    return lambda x: f(x).sum()


# --- Functions that close over a module ---------------------------------------------


SPECS = {"mesh": MESH, "in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i")}


def scanned(f, x):
    return lax.scan(lambda carry, x: (carry, f(x)), 0.0, x)


# The wrong program, the correct one, and how often the correct one calls the layer.
UNDER = {
    "`jax.jit`": (
        lambda f, x: jax.jit(f)(x),
        inside(lambda layer, x: es.jit(lambda x: layer(x))(x)),
        1,
    ),
    "`jax.vmap`": (
        lambda f, x: jax.vmap(f)(x),
        inside(lambda layer, x: es.vmap(lambda x: layer(x))(x)),
        1,
    ),
    "`jnp.vectorize`": (
        lambda f, x: jnp.vectorize(f)(x),
        inside(lambda layer, x: es.vmap(lambda x: layer(x))(x)),
        1,
    ),
    "`jnp.apply_along_axis`": (
        lambda f, x: jnp.apply_along_axis(f, 0, x[None]),
        inside(lambda layer, x: es.vmap(lambda x: layer(x), in_axes=1)(x[None])),
        1,
    ),
    "`jax.grad`": (
        lambda f, x: jax.grad(scalar(f))(x),
        lambda layer: es.grad(lambda layer, x: layer(x).sum())(layer, XS)[1],
        1,
    ),
    "`jax.value_and_grad`": (
        lambda f, x: jax.value_and_grad(scalar(f))(x),
        lambda layer: es.value_and_grad(lambda m, x: m(x).sum())(layer, XS)[0][1],
        1,
    ),
    "`jax.jacfwd`": (
        lambda f, x: jax.jacfwd(f)(x),
        inside(lambda layer, x: es.jacfwd(lambda x: layer(x))(x)),
        1,
    ),
    "`jax.jacrev`": (
        lambda f, x: jax.jacrev(f)(x),
        inside(lambda layer, x: es.jacrev(lambda x: layer(x))(x)),
        1,
    ),
    "`jax.hessian`": (
        lambda f, x: jax.hessian(scalar(f))(x),
        inside(lambda layer, x: es.hessian(scalar(lambda x: layer(x)))(x)),
        1,
    ),
    "`jax.jvp`": (
        lambda f, x: jax.jvp(f, (x,), (x,)),
        inside(lambda layer, x: es.jvp(lambda x: layer(x), (x,), (x,))),
        1,
    ),
    "`jax.vjp`": (
        lambda f, x: jax.vjp(f, x),
        inside(lambda layer, x: es.vjp(lambda x: layer(x), x)[0]),
        1,
    ),
    "`jax.linearize`": (
        lambda f, x: jax.linearize(f, x),
        inside(lambda layer, x: es.linearize(lambda x: layer(x), x)[0]),
        1,
    ),
    "`jax.checkpoint`": (
        lambda f, x: jax.checkpoint(f)(x),
        inside(lambda layer, x: es.checkpoint(lambda x: layer(x))(x)),
        1,
    ),
    "`jax.lax.scan`": (
        scanned,
        inside(lambda layer, x: es.scan(lambda c, x: (c, layer(x)), 0.0, x)),
        3,
    ),
    "`jax.lax.map`": (
        lambda f, x: lax.map(f, x),
        inside(lambda layer, x: es.scan(lambda c, x: (c, layer(x)), None, x)),
        3,
    ),
    "`jax.lax.while_loop`": (
        lambda f, x: lax.while_loop(lambda x: x[1] < 9, f, x),
        inside(lambda layer, x: es.while_loop(lambda x: x[1] < 9, layer, x)),
        4,
    ),
    "`jax.lax.fori_loop`": (
        lambda f, x: lax.fori_loop(0, 2, lambda i, x: f(x), x),
        inside(lambda layer, x: es.fori_loop(0, 2, lambda i, x: layer(x), x)),
        2,
    ),
    "`jax.lax.cond`": (
        lambda f, x: lax.cond(x[1] > 0, lambda: f(x), lambda: x),
        inside(lambda layer, x: es.cond(x[1] > 0, lambda: layer(x), lambda: x)),
        1,
    ),
    "`jax.lax.switch`": (
        lambda f, x: lax.switch(1, [lambda x: x, lambda x: f(x)], x),
        inside(lambda layer, x: es.switch(1, [lambda x: x, lambda x: layer(x)], x)),
        1,
    ),
    "`jax.shard_map`": (
        lambda f, x: jax.shard_map(f, **SPECS)(x),
        inside(lambda layer, x: es.shard_map(lambda x: layer(x), **SPECS)(x)),
        1,
    ),
    "`jax.eval_shape`": (
        lambda f, x: jax.eval_shape(f, x),
        lambda layer: jax.eval_shape(es.mutable(layer), XS)[1] and None,
        0,
    ),
    "`jax.make_jaxpr`": (
        lambda f, x: jax.make_jaxpr(f)(x),
        lambda layer: jax.make_jaxpr(lambda x: es.mutable(layer)(x))(XS) and None,
        0,
    ),
}


def under(name, wrong, right, runs):
    @program(
        f"write state under {name}",
        "`Layer.count` (`layer.count`)",
        "es.vmap(lambda x: self.layer(x))",
        "call `es.mutable` inside the transform",
        "each lane then has its own model",
    )
    def _(case):
        net = case.keep(Net(), XS)
        f = es.mutable(lambda net, x: wrong(lambda x: net.layer(x), x))
        for run in (f, es.jit(f)):
            with case.error():
                run(net, XS)
        new = right(case.keep(Layer(), XS))
        assert new is None or new.count == runs


for entry in UNDER.items():
    under(entry[0], *entry[1])


def custom_jvp(f):
    wrapped = jax.custom_jvp(lambda x: f(x))
    wrapped.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return wrapped


def custom_vjp(f):
    wrapped = jax.custom_vjp(lambda x: f(x))
    wrapped.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    return wrapped


def with_its_rule(net, x):
    rule = es.custom_vjp(lambda layer, x: layer(x))
    rule.defvjp(lambda layer, x: (layer(x), None), lambda _, g: (None, g))
    return rule(net.layer, x)


def outside_of_it(net, x):
    net.layer.count = net.layer.count + 1
    return custom_jvp(lambda x: 2.0 * x)(x)


for name, custom, right in [
    ("custom_jvp", custom_jvp, outside_of_it),
    ("custom_vjp", custom_vjp, with_its_rule),
]:

    @program(f"write state under `jax.{name}`", "`layer.count`")
    def _(case, custom=custom, right=right):
        net = case.keep(Net(), XS)

        def wrong(net, x):
            return custom(lambda x: net.layer(x))(x)

        with case.error():
            es.jit(es.mutable(wrong))(net, XS)
        y, new = es.jit(es.mutable(right))(net, XS)
        assert new.layer.count == 1
        assert (y == 2 * XS).all()


def write(net, x):
    net.mean = x
    return x


def in_callback(callback):
    def program(case):
        net = case.keep(Net(), XS)

        def f(net, x):
            return callback(lambda x: write(net, x), x)

        with case.error(), leaking():
            jax.block_until_ready(es.jit(es.mutable(f))(net, XS))
            jax.effects_barrier()

    return program


CALLBACKS = {
    "`jax.pure_callback`": lambda f, x: jax.pure_callback(f, x, x),
    "`jax.experimental.io_callback`": lambda f, x: jax.experimental.io_callback(
        f, x, x
    ),
    "`jax.debug.callback`": lambda f, x: jax.debug.callback(
        lambda x: [f(x)].clear(), x
    ),
}
for name, callback in CALLBACKS.items():
    program(f"write state under `jit` in {name}", "`Net.mean`")(in_callback(callback))


@program(
    "write into a dict of state under `jax.vmap`", "`stats['last']`", "{**self.stats"
)
def _(case):
    net = case.keep(Net())

    def wrong(net, x):
        net.stats["last"] = x
        return x

    def right(net, x):
        net.stats = {**net.stats, "last": lax.pmean(x, "batch")}
        return x

    with case.error(), leaking():
        es.mutable(lambda net: jax.vmap(lambda x: wrong(net, x))(XS))(net)
    f = es.vmap(right, in_axes=(None, 0), axis_name="batch")
    assert es.mutable(f)(net, XS)[1].stats["last"] == 1.0


@program("write under `jax.vmap` by `object.__setattr__`", "`layer.count`")
def _(case):
    net = case.keep(Net(), XS)

    def write(net, x):
        object.__setattr__(net.layer, "count", x)
        return x

    with case.error(), leaking():
        es.mutable(lambda net: jax.vmap(lambda x: write(net, x))(XS))(net)


@program("catch a `TraceError` and go on")
def _(case):
    net = case.keep(Net(), XS)

    def f(net, x):
        try:
            jax.vmap(lambda x: net.layer(x))(x)
        except es.TraceError:
            return net.layer(x)

    for run in (es.mutable(f), es.jit(es.mutable(f))):
        y, new = run(net, XS)
        assert (y == 2 * XS).all()
        assert new.layer.count == 1
