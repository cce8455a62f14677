"""A write in a transform of JAX or Equinox: it is an error in each of them.

`tests/transforms/test_raw_transforms.py` has the corners of JAX: custom rules, nesting,
and calls of `es.mutable` inside a transform.
"""

import copy
import types

import equinox as eqx
import jax
import jax.experimental
import jax.lax as lax
import jax.numpy as jnp
import pytest
from helpers import leaks_on_purpose
from jax.sharding import PartitionSpec, SingleDeviceSharding
from misuse import fails, FROZEN, XS

import eqx_state as es


MESH = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,))
SPECS = {"mesh": MESH, "in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i")}


def custom_jvp(f):
    wrapped = jax.custom_jvp(lambda x: f(x))
    wrapped.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return wrapped


def custom_vjp(f):
    wrapped = jax.custom_vjp(lambda x: f(x))
    wrapped.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    return wrapped


# `f` closes over a layer.
CLOSED_OVER = {
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "vectorize": lambda f, x: jnp.vectorize(f)(x),
    "apply_along_axis": lambda f, x: jnp.apply_along_axis(f, 0, x[None]),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jacrev": lambda f, x: jax.jacrev(f)(x),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: jax.vjp(f, x),
    "linearize": lambda f, x: jax.linearize(f, x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "scan": lambda f, x: lax.scan(lambda carry, x: (carry, f(x)), 0.0, x),
    "map": lambda f, x: lax.map(f, x),
    "while_loop": lambda f, x: lax.while_loop(lambda x: x[1] < 9, f, x),
    "fori_loop": lambda f, x: lax.fori_loop(0, 2, lambda i, x: f(x), x),
    "cond": lambda f, x: lax.cond(x[1] > 0, lambda: f(x), lambda: x),
    "switch": lambda f, x: lax.switch(1, [lambda x: x, lambda x: f(x)], x),
    "shard_map": lambda f, x: jax.shard_map(f, **SPECS)(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
    # Without `jit`, JAX calls these functions with arrays, and the write arrives.
    "custom_jvp": lambda f, x: jax.jit(custom_jvp(f))(x),
    "custom_vjp": lambda f, x: jax.jit(custom_vjp(f))(x),
}


@pytest.mark.parametrize("name", CLOSED_OVER)
@fails(
    es.TraceError,
    "`Layer.count` (`layer.count`)",
    "es.vmap(lambda x: self.layer(x))",
    "call `es.mutable` inside the transform",
    "each lane then has its own model",
)
def test_a_layer_that_a_function_closes_over(name, net):
    if name == "custom_vjp" and jax.config.jax_check_tracer_leaks:
        pytest.skip("a traced call of a rule keeps its arguments alive")
    run = lambda net, x: CLOSED_OVER[name](lambda x: net.layer(x), x)  # noqa: E731
    es.mutable(run)(net, XS)


@fails(es.TraceError, "`layer.count`")
def test_a_layer_that_is_the_function(net):
    es.mutable(lambda net: jax.vmap(net.layer)(XS))(net)


@fails(es.TraceError, "`layer.count`", "pass such a module as an argument")
def test_a_layer_in_an_object_that_is_not_a_pytree(net):
    def hidden(net):
        box = types.SimpleNamespace(layer=net.layer)
        es.checkpoint(lambda x: box.layer(x))(XS)

    es.mutable(hidden)(net)


@fails(es.TraceError, "Cannot sow `y`", "this code runs inside a JAX transform")
def test_sow():
    class Sower(es.Module):
        def __call__(self, x):
            self.sow("y", x)

    es.capture(lambda m, xs: jax.vmap(lambda x: m(x))(xs))(Sower(), XS)


@leaks_on_purpose
@fails(
    jax.errors.JaxRuntimeError, "`Net.mean`", "that this module belongs to has ended"
)
def test_a_callback(net):
    def f(net, x):
        write = lambda x: setattr(net, "mean", x)  # noqa: E731
        return jax.experimental.io_callback(lambda x: write(x) or x, x, x)

    jax.block_until_ready(es.jit(es.mutable(f))(net, XS))
    jax.effects_barrier()


def filter_custom_vjp(layer, x):
    f = eqx.filter_custom_vjp(lambda layer, x: layer(x))
    f.def_fwd(lambda perturbed, layer, x: (layer(x), None))
    f.def_bwd(lambda residuals, g, perturbed, layer, x: layer)
    return f(layer, x)


def filter_custom_jvp(layer, x):
    f = eqx.filter_custom_jvp(lambda layer, x: layer(x))
    f.def_jvp(lambda primals, tangents: (primals[0](primals[1]), tangents[1]))
    return f(layer, x)


# The layer is an argument, which the transform copies; or it is copied by hand.
COPIED = {
    "filter_vmap": lambda m, x: eqx.filter_vmap(m)(x),
    "filter_grad": lambda m, x: eqx.filter_grad(lambda m: m(x).sum())(m),
    "filter_checkpoint": lambda m, x: eqx.filter_checkpoint(m)(x),
    "filter_closure_convert": lambda m, x: eqx.filter_closure_convert(m, x)(x),
    "filter_eval_shape": lambda m, x: eqx.filter_eval_shape(m, x),
    "filter_make_jaxpr": lambda m, x: eqx.filter_make_jaxpr(m)(x),
    "filter_vjp": lambda m, x: eqx.filter_vjp(lambda m, x: m(x), m, x),
    "filter_jacrev": lambda m, x: eqx.filter_jacrev(lambda m: m(x))(m),
    "filter_custom_vjp": filter_custom_vjp,
    "filter_custom_jvp": filter_custom_jvp,
    "filter_shard": lambda m, x: eqx.filter_shard(
        m, SingleDeviceSharding(jax.devices()[0])
    )(x),
    "jit": lambda m, x: jax.jit(lambda m, x: m(x))(m, x),
    "scan": lambda m, x: lax.scan(lambda m, x: (m, m(x)), m, x),
    "cond": lambda m, x: lax.cond(True, lambda m: m(x), lambda m: x, m),
    "train": lambda m, x: m.train()(x),
    "replace": lambda m, x: m.replace(count=5)(x),
    "copy": lambda m, x: copy.copy(m)(x),
    "tree.map": lambda m, x: jax.tree.map(lambda x: x, m)(x),
    "tree_at": lambda m, x: eqx.tree_at(lambda m: m.weight, m, jnp.array(1.0))(x),
}


@pytest.mark.parametrize("name", COPIED)
@fails(
    FROZEN,
    "`Layer.count`",
    "is not part of an argument",
    "Give the copy an",
    "es.vmap(self.layer)(xs)",
)
def test_a_copy_of_a_layer(name, net):
    es.mutable(lambda net, x: COPIED[name](net.layer, x))(net, XS)
