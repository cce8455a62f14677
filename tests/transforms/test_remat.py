"""`es.checkpoint`: the namesake of `jax.checkpoint`, through which state is carried."""

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
from helpers import close, rejects
from ways import WAYS

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


class Cell(es.Module):
    weight: es.Parameter = 0.5
    total: es.State = 0.0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def __call__(self, x):
        self.total = self.total + x
        self.rng, key = jr.split(self.rng)
        return jnp.sin(self.weight * x) + self.total * jr.uniform(key)

    def shifted(self, shift, x):
        return self(x) + shift


class Net(es.Module):
    a: Cell = dataclasses.field(default_factory=Cell)
    b: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5, 1.0, jr.key(1)))
    steps: es.State = 0


def plain(f, **options):
    return f


def check(f, model):
    """`f(model, checkpoint)`: value, gradient and state as without it."""
    ours, expected = (
        es.value_and_grad(lambda m, c=c: f(m, c))(model) for c in (es.checkpoint, plain)
    )
    close(ours, expected)
    return ours


def sines(f, *args):
    """How often the backward pass and the forward pass take a sine or a cosine."""
    text = str(jax.make_jaxpr(jax.grad(f))(*args))
    return text.count("= sin ") + text.count("= cos ")


# --- As `jax.checkpoint` ------------------------------------------------------------


def test_the_signature_is_that_of_jax():
    ours, theirs = (
        {p.name: (p.kind, p.default) for p in inspect.signature(f).parameters.values()}
        for f in (es.checkpoint, jax.checkpoint)
    )
    theirs.pop("concrete", None)  # deprecated there
    theirs.setdefault("static_argnames", ours["static_argnames"])  # not in JAX < 0.10.2
    assert list(ours.items()) == list(theirs.items())


OPTIONS = {
    "default": {},
    "prevent_cse": {"prevent_cse": False},
    "everything": {"policy": jax.checkpoint_policies.everything_saveable},
    "nothing": {"policy": jax.checkpoint_policies.nothing_saveable},
    "names": {"policy": jax.checkpoint_policies.save_only_these_names("inner")},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_computes_again_what_jax_computes_again(name):
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


def test_parameters_are_no_residuals_of_their_own():
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
    "keyword": lambda c: c(lambda x, *, y: x * y)(2.0, y=3.0),
    "none": lambda c: c(lambda x, y: (x, y))(1.0, None),
    "numpy": lambda c: c(lambda x: 2 * x)(np.arange(3)),
    "key": lambda c: jr.key_data(c(lambda k: jr.split(k))(jr.key(0))),
    "static": lambda c: c(lambda x, n: x ** len(n), static_argnums=1)(2.0, "abc"),
    "negative": lambda c: c(lambda x, n: x ** len(n), static_argnums=(-1,))(2.0, "abc"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_on_arrays_it_is_the_checkpoint_of_jax(name):
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
        with pytest.raises(ValueError, match=r"static_argnums"):
            es.checkpoint(lambda x, y: x, static_argnums=i)(1.0, 2.0)


def test_what_is_no_array_passes_through():
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


FUNCTIONS = {
    **{name: way for name, way in WAYS.items() if name != "jit"},
    "sequential": lambda m: eqx.nn.Sequential([eqx.nn.Lambda(m)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_state_is_written_once_and_each_key_drawn_once(name):
    def f(m, checkpoint):
        return checkpoint(FUNCTIONS[name](m))(0.3) ** 2

    if name == "sequential":

        def f(m, checkpoint):
            call = eqx.nn.Lambda(m)
            return checkpoint(lambda x: call(x))(0.3) ** 2

    ((_, new), _) = check(f, Cell())
    assert new.total == jnp.float32(0.3)
    assert new.rng == jr.split(jr.key(0))[0]


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_state_is_written_before_inside_and_after():
    def f(net, checkpoint):
        net.steps = net.steps + 10
        cell = net.a

        def g(x):
            net.steps = net.steps + 1
            return net.b(cell(x)) + net.a.total

        y = checkpoint(g)(0.3)
        seen = net.a.total + cell.total
        net.steps = net.steps + 100
        return checkpoint(g)(y) * seen

    (_, new), _ = check(f, Net())
    assert new.steps == 112


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_modules_among_the_arguments_are_written_in_place():
    def f(net, checkpoint):
        def g(cells, x, *, b):
            return cells["a"](x) * b(x)

        y = checkpoint(g)({"a": net.a}, 0.3, b=net.b)
        return y * net.a.total * net.b.total

    check(f, Net())


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_a_module_that_is_returned_may_be_assigned():
    def f(net, checkpoint):
        def g(cell):
            return cell(0.3), cell

        y, net.a = checkpoint(g)(net.a)
        return y * net.a.total * net.a.weight

    check(f, Net())
    run = eqx.filter_jit(es.mutable(lambda net: f(net, es.checkpoint)))
    assert run(Net())[1].a.total == jnp.float32(0.3)


@pytest.mark.parametrize("make", ["decorator", "partial"])
def test_it_decorates_methods(make):
    policy = jax.checkpoint_policies.everything_saveable
    decorator = {
        "decorator": es.checkpoint,
        "partial": ft.partial(es.checkpoint, policy=policy),
    }[make]

    class Block(es.Module):
        weight: es.Parameter = 0.5
        calls: es.State = 0

        @decorator
        def __call__(self, x, power=1):
            self.calls = self.calls + 1
            return jnp.sin(self.weight * x) ** power

        @decorator
        def twice(self, x):
            return self(x) + self(x)

    (_, new), grads = es.value_and_grad(lambda m, x: m.twice(x))(Block(), 0.3)
    assert new.calls == 2
    close(grads.weight, 2 * 0.3 * jnp.cos(0.15))
    assert es.mutable(Block())(0.3, power=2)[1].calls == 1
    assert es.mutable(Block().twice)(0.3)[1].calls == 2


def test_mutable_of_checkpoint():
    expected = es.mutable(Cell())(0.3)
    close(es.mutable(es.checkpoint(Cell()))(0.3), expected)
    close(es.mutable(es.checkpoint(Cell().shifted))(0.0, 0.3), expected)
    close(eqx.filter_jit(es.mutable(es.checkpoint(Cell())))(0.3), expected)
    out, _ = es.mutable(es.checkpoint(lambda m, x: m(x)))(Cell(), 0.3)
    close(out, expected[0])


def test_the_function_is_traced_once():
    traces = []

    def loss(m, x):
        return es.checkpoint(lambda x: traces.append(1) or m(x))(x)

    run, model = eqx.filter_jit(es.value_and_grad(loss)), Cell()
    for _ in range(2):
        (_, model), _ = run(model, jnp.float32(0.3))
    assert len(traces) == 1


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_dropout_has_one_mask_in_both_passes():
    class Block(es.Module):
        weight: es.Parameter
        drop: es.nn.Dropout

        def __call__(self, x):
            return self.drop(self.weight * x)

    def f(block, checkpoint):
        x = jnp.arange(1.0, 17.0)
        return jnp.sum(checkpoint(block)(x) ** 2)

    block = Block(jnp.ones(16), es.nn.Dropout(0.5, key=jr.key(0)))
    _, grads = check(f, block)
    assert 0 < (grads.weight == 0).sum() < 16


def test_checkpoints_in_checkpoints_and_in_other_transforms():
    class Small(es.Module):
        weight: es.Parameter = 0.5
        total: es.State = 0.0

        def __call__(self, x):
            self.total = self.total + 1.0
            return jnp.sin(self.weight * x)

    def f(m, checkpoint):
        def inner(x):
            return checkpoint(m)(x) + m.total

        y = checkpoint(lambda x: checkpoint(inner)(m(x)))(0.3)
        ys = es.vmap(checkpoint(m))(jnp.stack([y, 2 * y])).sum()
        y = es.scan(checkpoint(lambda c, _: (m(c), None)), ys, None, length=3)[0]
        return es.cond(y > 0, checkpoint(m), lambda x: x, y)

    (_, new), _ = check(f, Small())
    assert new.total == 7.0


def test_second_derivatives():
    class Small(es.Module):
        weight: es.Parameter
        total: es.State = 0.0

        def __call__(self, x):
            self.total = self.total + x * self.weight
            return jnp.sin(self.weight * x)

    def f(weight, checkpoint):
        y, new = es.mutable(lambda m: checkpoint(m)(0.3))(Small(weight))
        return y * new.total

    for transform in (
        lambda f: jax.hessian(f)(jnp.float32(0.5)),
        lambda f: jax.jvp(f, (jnp.float32(0.5),), (1.0,)),
        lambda f: jax.vmap(jax.grad(f))(jnp.array([0.5, 1.0])),
    ):
        ours, expected = (
            transform(ft.partial(f, checkpoint=c)) for c in (es.checkpoint, plain)
        )
        close(ours, expected)


def test_kinds_frozen_layers_and_eval_mode():
    class Keeper(es.Module):
        kept: es.BatchStat = 0.0

        def __call__(self, x):
            if self.training and not self.frozen:
                self.kept = self.kept + x
            return x + 1.0

    def f(models):
        return es.checkpoint(lambda x: models[1](models[0](x)))(1.0)

    models = [Keeper(), Keeper().freeze()]
    out, new = es.mutable(f)(models)
    assert (out, new[0].kept, new[1].kept) == (3.0, 1.0, 0.0)
    assert f(es.eval(models)) == 3.0  # no scope needed
    with rejects(models, FROZEN, r"Keeper\.kept"):
        f(models)
    with rejects(models, FROZEN, r"Keeper\.kept", "`BatchStat`"):
        es.mutable(f, kinds=es.Rng)(models)
