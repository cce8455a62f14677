"""Transforms of JAX and Equinox around a write, and around a call of `es.mutable`.

`tests/misuse/test_under_jax.py` lists the transforms that most users need. In every
transform, a write reaches the model or is an error, and a call of `es.mutable` works.
"""

import contextlib

import equinox as eqx
import jax
import jax.experimental
import jax.export
import jax.lax as lax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leaks_on_purpose, rejects, untouched

import eqx_state as es


XS = jnp.array([1.0, 2.0, 4.0])


class Layer(es.Module):
    weight: es.Parameter = 2.0
    total: es.State = 0.0

    def __call__(self, x):
        if self.training:
            self.total = self.total + x.sum()
        return self.weight * x


def custom_vjp(f):
    wrapped = jax.custom_vjp(lambda x: f(x))
    wrapped.defvjp(lambda x: (f(x), x), lambda x, g: (x * g,))
    return wrapped


def filter_custom_vjp(f):
    wrapped = eqx.filter_custom_vjp(lambda x: f(x))
    wrapped.def_fwd(lambda perturbed, x: (f(x), None))
    wrapped.def_bwd(lambda residuals, g, perturbed, x: x * g)
    return wrapped


def custom_vmap(f):
    wrapped = jax.custom_batching.custom_vmap(lambda x: f(x))
    wrapped.def_vmap(lambda size, batched, x: (f(x), batched[0]))
    return wrapped


# --- A write to a module that is closed over ----------------------------------------


# These call their function directly if no outer transform traces or differentiates.
CALLED = {
    "custom_vjp": lambda f, x: custom_vjp(f)(x),
    "grad of custom_vjp": lambda f, x: jax.grad(custom_vjp(f))(x[0]),
    "filter_custom_vjp": lambda f, x: filter_custom_vjp(f)(x),
    "custom_gradient": lambda f, x: jax.custom_gradient(lambda x: (f(x), abs))(x),
    "platform_dependent": lambda f, x: lax.platform_dependent(x, default=f),
    "named_call": lambda f, x: jax.named_call(f)(x),
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize(
    "jit",
    [
        pytest.param(lambda f: f, id="eager"),
        # The trace that the error ends lives as long as the outer trace.
        pytest.param(eqx.filter_jit, id="jit", marks=leaks_on_purpose),
    ],
)
def test_a_write_arrives_or_is_an_error(name, jit):
    expected = XS[0] if name.startswith("grad") else XS.sum()

    def f(layer, x):
        with contextlib.suppress(es.TraceError):
            CALLED[name](lambda x: layer(x), x)
            return True
        return False

    with untouched(layer := Layer()):
        arrived, new = jit(es.mutable(f))(layer, XS)
    assert new.total == (expected if arrived else 0.0)
    if jit is not eqx.filter_jit:
        assert arrived


@pytest.mark.parametrize("is_outer", [False, True])
def test_a_write_under_a_transform_of_jax_and_one_of_es_is_an_error(is_outer):
    transforms = jax.vmap, es.vmap
    first, second = transforms[::-1] if is_outer else transforms

    def f(layer, x):
        def write(x):
            # All lanes write the same value, so it could be shared.
            layer.total = layer.total + 1.0
            return 2 * x

        return first(lambda x: second(write)(x))(x)

    with rejects(layer := Layer(), es.TraceError, "`total`", r"es\.vmap"):
        es.mutable(f)(layer, jnp.ones((2, 2)))


# --- A call of `es.mutable` inside a transform ---------------------------------------


def threaded(x, weight=2.0):
    """A call of `es.mutable`, whose result depends on the new state."""
    layer = Layer(jnp.float32(1.0)).replace(weight=weight)

    def f(layer, x):
        ys = es.scan(lambda c, x: (c + layer(x), layer.total), jnp.float32(0.0), x)
        return ys[0] + es.vmap(layer.eval())(x).sum()

    y, new = es.mutable(f)(layer, x)
    return y * new.total


def by_hand(x, weight=2.0):
    return 2 * weight * x.sum() ** 2


AROUND = {
    "vmap": lambda f: jax.vmap(f)(jnp.stack([XS, 2 * XS])),
    "grad": lambda f: jax.grad(f, (0, 1))(XS, jnp.float32(2.0)),
    "jvp of grad": lambda f: jax.jvp(jax.grad(f), (XS,), (XS,)),
    "while_loop": lambda f: lax.while_loop(
        lambda x: x.sum() < 9, lambda x: x + f(x), XS
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(XS),
    "custom_vjp": lambda f: jax.value_and_grad(custom_vjp(f))(XS),
    "custom_vmap": lambda f: custom_vmap(f)(XS),
    "closure_convert": lambda f: eqx.filter_closure_convert(f, XS)(XS),
    "export": lambda f: jax.export.export(jax.jit(f))(XS).call(XS),
    "pure_callback": lambda f: jax.pure_callback(
        lambda x: np.asarray(f(jnp.asarray(x))), jnp.float32(0.0), XS
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_call_of_mutable_inside_a_transform_works(name):
    ours, expected = AROUND[name](threaded), AROUND[name](by_hand)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
