"""`es.checkpoint`: `jax.checkpoint`, with state carried through."""

import functools as ft

import equinox as eqx
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close
from models import Lazy

import eqx_state as es


def plain(f, **options):
    return f


def sines(f, *args):
    """The number of sines and cosines in the forward and the backward pass."""
    text = str(jax.make_jaxpr(jax.grad(f))(*args))
    return text.count("= sin ") + text.count("= cos ")


# --- Like `jax.checkpoint` ----------------------------------------------------------


OPTIONS = {
    "default": {},
    "prevent_cse": {"prevent_cse": False},
    "everything": {"policy": jax.checkpoint_policies.everything_saveable},
    "names": {"policy": jax.checkpoint_policies.save_only_these_names("inner")},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_recomputes_the_same_values_as_jax(name):
    def f(checkpoint, x):
        def g(x):
            inner = jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "inner")
            return jnp.sin(jnp.sin(inner))

        return checkpoint(g, **OPTIONS[name])(x)

    ours, theirs = (ft.partial(f, c) for c in (es.checkpoint, jax.checkpoint))
    assert sines(ours, 0.5) == sines(theirs, 0.5)
    close(jax.grad(ours)(0.5), jax.grad(theirs)(0.5))
    close(
        jax.jvp(jax.grad(ours), (0.5,), (1.0,)),
        jax.jvp(jax.grad(theirs), (0.5,), (1.0,)),
    )
    if name != "everything":
        assert sines(ours, 0.5) > sines(ft.partial(f, plain), 0.5)


def test_parameters_do_not_add_residuals():
    class Deep(es.Module):
        weight: es.Parameter = 0.5

        def __call__(self, x):
            return jnp.sin(self.weight * jnp.sin(self.weight * x))

    def loss(x, checkpoint):
        return es.value_and_grad(lambda m, x: checkpoint(m)(x))(Deep(), x)

    def pure(x):
        return jax.value_and_grad(
            lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(w * jnp.sin(w * x)))(w, x)
        )(0.5, x)

    text = str(jax.make_jaxpr(lambda x: loss(x, es.checkpoint))(0.3))
    expected = str(jax.make_jaxpr(pure)(0.3))
    for primitive in ("= sin ", "= cos "):
        assert text.count(primitive) == expected.count(primitive)


ARGUMENTS = {
    "pytree": lambda c: c(lambda x, y: {"a": x["a"] * y[0]})(
        {"a": jnp.ones(2)}, (3.0,)
    ),
    "numpy": lambda c: c(lambda x: 2 * x)(np.arange(3)),
    "key": lambda c: jr.key_data(c(lambda k: jr.split(k))(jr.key(0))),
    "static": lambda c: c(lambda x, n: x ** len(n), static_argnums=1)(2.0, "abc"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_on_arrays_it_equals_the_checkpoint_of_jax(name):
    close(ARGUMENTS[name](es.checkpoint), ARGUMENTS[name](jax.checkpoint))


def test_arrays_that_are_static_are_not_traced():
    def f(x, n):
        return x * float(n)

    three = jnp.float32(3.0)
    assert jax.grad(es.checkpoint(f, static_argnums=1))(2.0, three) == 3.0
    for names in ("n", ["n"], ("n", "m")):
        assert jax.grad(es.checkpoint(f, static_argnames=names))(2.0, n=three) == 3.0
    with pytest.raises(jax.errors.ConcretizationTypeError, match="float"):
        es.checkpoint(f)(2.0, three)
    for i in (2, -3):
        with pytest.raises(TypeError, match=r"static_argnums=.*does not exist"):
            es.checkpoint(lambda x, y: x, static_argnums=i)(1.0, 2.0)


def test_values_that_are_not_arrays_pass_through():
    f = es.checkpoint(lambda f, x, flag: (f(x) if flag else x, f, "text"))
    y, g, text = f(jnp.sin, 0.5, True)
    assert (g, text) == (jnp.sin, "text")
    close(y, jnp.sin(0.5))
    assert f(jnp.sin, 0.5, False)[0] == 0.5


# --- State --------------------------------------------------------------------------


def test_a_number_in_the_output_is_an_array_whatever_the_model_contains():
    class Sized(es.Module):
        size: int

        def __call__(self, x):
            return x, 5

    for size in (4, 5):
        (_, number), _ = es.mutable(es.checkpoint(Sized(size)))(1.0)
        assert isinstance(number, jax.Array)


# --- While a model is initialized ---------------------------------------------------


def test_init_draws_the_same_values_inside_a_checkpoint():
    def forward(checkpoint):
        def call(m, x):
            g = checkpoint(lambda x: m[0](checkpoint(m[1])(x)))
            return checkpoint(lambda m, x: m(x))(m[2], g(x))

        return call

    ours, expected = (
        es.init([Lazy(), Lazy(), Lazy()], 0, jnp.ones(3), call=forward(c))
        for c in (es.checkpoint, plain)
    )
    assert eqx.tree_equal(ours, expected)
