"""Programs that use derivatives or `es.shard_map` wrongly."""

import jax
import jax.numpy as jnp
from catalogue_entry import Layer, Net, program
from jax.sharding import Mesh, PartitionSpec as P

import eqx_state as es


X = jnp.array(3.0)
# Two devices, each with half of the rows.
MESH = Mesh(jax.devices()[:2], "data")


def sharded(f, **options):
    return es.shard_map(
        f, mesh=MESH, in_specs=P("data"), out_specs=P("data"), **options
    )


# JAX < 0.10 does not name the path.
PLACE = ("NoneType", "out[1]") if jax.__version_info__ >= (0, 10) else ()


@program("pass a cotangent for an integer counter in the output", *PLACE)
def _(case):
    net = case.keep(Net(), X)

    def f(net):
        out, vjp_fn = es.vjp(lambda x: (net.layer(x), net.layer.count), X)
        return vjp_fn(jax.tree.map(jnp.ones_like, out))

    with case.error():
        es.mutable(f)(net)


@program("differentiate by `argnums` with respect to integers")
def _(case):
    layer = case.keep(Layer(), X)
    for jacobian in (es.jacfwd, es.jacrev, es.hessian):
        with case.error("argument 1"):
            es.mutable(jacobian(lambda layer, n: layer(X) * n, 1))(layer, jnp.array(3))


@program("close over a layer in an `es.custom_vjp`", "`Layer`", "Pass it")
def _(case):
    layer = case.keep(Layer(), X)

    def run(layer, x):
        rule = es.custom_vjp(lambda x: layer(x))
        return rule.defvjp(lambda x: (x, None), lambda _, g: (g,))(x)

    with case.error():
        es.mutable(run)(layer, X)


class Tracked(Layer):
    mean: es.BatchStat = 0.0

    @es.custom_vjp
    def __call__(self, x):
        self.mean = self.mean + x
        return self.weight * x

    def _fwd(self, x):
        self.mean = self.mean + x
        return self.weight * x, None

    def _bwd(_, g):
        return None, g

    __call__.defvjp(_fwd, _bwd)


@program("let a gradient flow through state that an `es.custom_vjp` writes")
def _(case):
    model = case.keep(Tracked(), X)

    def loss(m, x):
        return m(x) + 5 * m.mean

    (grads, by_x), (new, _) = es.grad(loss, argnums=(0, 1))(model, X)
    assert (by_x, grads.weight, new.mean) == (1.0, 0.0, 3.0)


@program("write state in the backward rule of an `es.custom_vjp`", "`Layer.count`")
def _(case):
    layer = case.keep(Layer(), X)

    def bwd(layer, g):
        layer.count = layer.count + 1
        return None, g

    rule = es.custom_vjp(lambda layer, x: x)
    rule.defvjp(lambda layer, x: (x, layer), bwd)
    with case.error():
        es.grad(lambda layer, x: rule(layer, x) * layer.weight)(layer, X)


@program(
    "write a different statistic on each device under `es.shard_map`",
    "`mean`",
    'jax.lax.pmean(mean, "data")',
)
def _(case):
    net = case.keep(Net(mean=jnp.zeros(())), X)

    def run(net, xs):
        def rows(xs):
            net.mean = jnp.mean(xs)
            return xs

        return sharded(rows)(xs)

    with case.error():
        es.mutable(run)(net, jnp.arange(4.0))


@program("write state under `es.shard_map(check_vma=False)`", "`layer.count`")
def _(case):
    net = case.keep(Net(), X)
    with case.error():
        es.mutable(lambda net: sharded(net, check_vma=False)(jnp.arange(4.0)))(net)
