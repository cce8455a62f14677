"""`es.checkpoint`: `jax.checkpoint`, with state carried through."""

import dataclasses
import functools as ft
import inspect

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


class Cell(es.Module):
    weight: es.Parameter = 0.5
    total: es.State = 0.0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def __call__(self, x):
        self.total = self.total + x
        self.rng, key = jr.split(self.rng)
        return jnp.sin(self.weight * x) + self.total * jr.uniform(key)


class Net(es.Module):
    a: Cell = dataclasses.field(default_factory=Cell)
    b: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5, 1.0, jr.key(1)))
    steps: es.State = 0


def plain(f, **options):
    return f


def check(f, model):
    """Assert that value, gradient and state equal those without checkpointing."""
    ours, expected = (
        es.value_and_grad(lambda m, c=c: f(m, c))(model) for c in (es.checkpoint, plain)
    )
    close(ours, expected)
    return ours


def sines(f, *args):
    """The number of sines and cosines in the forward and the backward pass."""
    text = str(jax.make_jaxpr(jax.grad(f))(*args))
    return text.count("= sin ") + text.count("= cos ")


# --- Like `jax.checkpoint` ----------------------------------------------------------


def test_the_signature_is_that_of_jax():
    ours, theirs = (
        {p.name: (p.kind, p.default) for p in inspect.signature(f).parameters.values()}
        for f in (es.checkpoint, jax.checkpoint)
    )
    theirs.pop("concrete", None)  # deprecated in JAX
    theirs.setdefault("static_argnames", ours["static_argnames"])  # not in JAX < 0.10.2
    assert list(ours.items()) == list(theirs.items())


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


def test_the_wrapper():
    def named(x, y=2):
        """Doc."""

    wrapped = es.checkpoint(named)
    assert wrapped.__wrapped__ is named
    assert (wrapped.__name__, wrapped.__doc__) == ("named", "Doc.")
    assert inspect.signature(wrapped) == inspect.signature(named)
    cell = Cell()
    leaves = jax.tree.leaves(es.checkpoint(cell))
    assert len(leaves) == 3
    assert leaves[0] is cell.weight


# --- State --------------------------------------------------------------------------


@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_a_module_that_is_returned_may_be_assigned():
    def f(net, checkpoint):
        def g(cell):
            return cell(0.3), cell

        y, net.a = checkpoint(g)(net.a)
        return y * net.a.total * net.a.weight

    check(f, Net())
    run = eqx.filter_jit(es.mutable(lambda net: f(net, es.checkpoint)))
    assert run(Net())[1].a.total == jnp.float32(0.3)


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
