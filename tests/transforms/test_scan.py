"""`es.scan`: the namesake of `jax.lax.scan`, with state carried from step to step.

Inside a scope a Python loop is the reference: state is written in place there.
"""

import dataclasses
import functools as ft
import inspect

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import close

import eqx_state as es


XS = jnp.array([1.0, 2.0, 4.0])


class Cell(es.Module):
    weight: es.Parameter = 0.5
    total: es.State = 0.0

    def __call__(self, h, x):
        self.total = self.total + x
        h = jnp.tanh(self.weight * h + x * self.total)
        return h, h * self.weight

    def scaled(self, factor, h, x):
        return self(h, factor * x)


class Net(es.Module):
    cell: Cell = dataclasses.field(default_factory=Cell)
    other: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5, 1.0))
    steps: es.State = 0


def by_hand(f, init, xs=None, length=None, reverse=False):
    """What `lax.scan` computes, as a Python loop."""
    n = jax.tree.leaves(xs)[0].shape[0] if length is None else length
    carry, ys = init, [None] * n
    for i in reversed(range(n)) if reverse else range(n):
        carry, ys[i] = f(carry, jax.tree.map(lambda x, i=i: x[i], xs))
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def check(f, model, *args):
    """`f(model, scan, *args)` threads the state that the Python loop threads."""
    expected = es.mutable(f)(model, by_hand, *args)
    ours = es.mutable(f)(model, es.scan, *args)
    close(ours, expected)
    with jax.disable_jit():
        close(es.mutable(f)(model, es.scan, *args), expected)
    return ours


# --- As `jax.lax.scan` --------------------------------------------------------------


def test_the_signature_is_that_of_jax():
    ours, theirs = (inspect.signature(f).parameters for f in (es.scan, lax.scan))
    assert list(ours) == list(theirs)
    for name in ours:
        assert (ours[name].kind, ours[name].default) == (
            (theirs[name].kind, theirs[name].default)
        )


def add(c, x):
    return c + x, c * x


ARRAYS = {
    "array": lambda scan: scan(add, jnp.float32(1.0), XS),
    "number": lambda scan: scan(add, 0.0, XS),
    "integer": lambda scan: scan(lambda c, _: (c + 1, c), 0, None, length=3),
    "length by place": lambda scan: scan(lambda c, _: (c + 1, c), 0, None, 3),
    "bool": lambda scan: scan(lambda c, x: (~c, c), jnp.array(True), XS),
    "weak type": lambda scan: scan(lambda c, x: (jnp.float32(2.0) * x, c), 0.0, XS),
    "weak integer": lambda scan: scan(lambda c, x: (x, c), 0, jnp.arange(3)),
    "none": lambda scan: scan(lambda c, x: (c, x), None, XS),
    "no output": lambda scan: scan(lambda c, x: (c + x, None), 0.0, XS),
    "nested": lambda scan: scan(
        lambda c, x: ({"a": (c["a"][0] + x[0], None)}, [x, c]),
        {"a": (0.0, None)},
        (XS, {"b": jnp.ones((3, 2)), "c": None}),
    ),
    "reverse": lambda scan: scan(add, 0.0, XS, reverse=True),
    "unroll": lambda scan: scan(add, 0.0, XS, unroll=2),
    "unroll all": lambda scan: scan(add, 0.0, XS, unroll=True),
    "transpose": lambda scan: scan(add, 0.0, XS, _split_transpose=True),
    "numpy": lambda scan: scan(add, np.float32(1.0), np.arange(3, dtype=np.float32)),
    "zero length": lambda scan: scan(add, 0.0, jnp.zeros((0,))),
    "length of zero": lambda scan: scan(lambda c, _: (c, c), 0.0, None, length=0),
    "keys": lambda scan: scan(
        lambda c, k: (c, jr.normal(k)), 0.0, jr.split(jr.key(0), 3)
    ),
    "key carried": lambda scan: scan(
        lambda k, _: tuple(jr.split(k)), jr.key(0), None, length=3
    ),
    "keywords": lambda scan: scan(f=add, init=0.0, xs=XS, length=3),
    "nest": lambda scan: scan(lambda c, x: scan(add, c + x, XS), 0.0, XS),
}
# Without `jit` JAX refuses a loop of no steps.
JITTED_ONLY = {"zero length", "length of zero"}


@pytest.mark.parametrize("name", ARRAYS)
def test_on_arrays_it_is_the_scan_of_jax(name):
    run = ARRAYS[name]

    def look(tree):
        types = [getattr(x, "weak_type", type(x)) for x in jax.tree.leaves(tree)]
        return jax.tree.structure(tree), types

    def check(ours, theirs):
        assert eqx.tree_equal(ours, theirs, typematch=True)
        assert look(ours) == look(theirs)

    check(run(es.scan), run(lax.scan))
    if name not in JITTED_ONLY:
        with jax.disable_jit():
            check(run(es.scan), run(lax.scan))


def test_it_is_differentiated_and_mapped_as_the_scan_of_jax():
    def f(scan, a, xs):
        return scan(lambda c, x: (jnp.sin(a * c + x), c), a, xs)[0]

    for transform in (
        lambda f: jax.grad(f, (0, 1)),
        lambda f: lambda a, xs: jax.jvp(f, (a, xs), (a, xs)),
        lambda f: lambda a, xs: jax.linearize(f, a, xs)[1](a, xs),
        lambda f: lambda a, xs: jax.vmap(f, (None, 0))(a, jnp.stack([xs, 2 * xs])),
    ):
        run = transform(ft.partial(f, es.scan)), transform(ft.partial(f, lax.scan))
        close(*(g(0.7, XS) for g in run))


def test_what_is_no_array_passes_through():
    def step(c, x):
        h, f = c
        return (f(h) + x[0], f), (h, x[1], "text")

    (h, f), (hs, g, text) = es.scan(step, (0.0, jnp.sin), (XS, jnp.cos))
    expected, expected_ys = lax.scan(lambda h, x: (jnp.sin(h) + x, h), 0.0, XS)
    assert (f, g, text) == (jnp.sin, jnp.cos, "text")
    close((h, hs), (expected, expected_ys))


# --- State of the function and its closure ------------------------------------------


FUNCTIONS = {
    "module": lambda m: m,
    "bound method": lambda m: ft.partial(m.scaled, 1.0),
    "bound dunder": lambda m: m.__call__,
    "closure": lambda m: lambda c, x: m(c, x),
    "closure over a closure": lambda m: (lambda f: lambda c, x: f(c, x))(
        lambda c, x: m(c, x)
    ),
    "closure over a list": lambda m: (lambda ms: lambda c, x: ms[0](c, x))([m]),
    "default": lambda m: lambda c, x, m=m: m(c, x),
    "partial": lambda m: ft.partial(lambda m, c, x: m(c, x), m),
    "partial keyword": lambda m: ft.partial(lambda c, x, m: m(c, x), m=m),
    "jax partial": lambda m: jtu.Partial(lambda m, c, x: m(c, x), m),
    "eqx partial": lambda m: eqx.Partial(m.scaled, 1.0),
    "checkpoint": lambda m: es.checkpoint(m),
    "jit": lambda m: es.jit(m.__call__),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_state_and_keys_are_carried_from_step_to_step(name):
    check(lambda m, scan, xs: scan(FUNCTIONS[name](m), 0.0, xs), Cell(), XS)


@pytest.mark.parametrize("options", [{"reverse": True}, {"length": 3}], ids=str)
def test_options_with_state(options):
    check(lambda m, scan, xs: scan(m, 0.0, xs, **options), Cell(), XS)


def test_unrolled_with_state():
    expected = es.mutable(lambda m: es.scan(m, 0.0, XS))(Cell())
    for unroll in (2, 3, True):
        ours = es.mutable(lambda m, u=unroll: es.scan(m, 0.0, XS, unroll=u))(Cell())
        close(ours, expected)


def test_state_is_written_before_inside_and_after():
    def f(net, scan, xs):
        net.steps = net.steps + 10
        cell = net.cell

        def step(c, x):
            net.steps = net.steps + 1
            c, y = cell(c, x)  # an alias sees what is written
            return net.other(c, net.cell.total)[0], (y, net.steps)

        out = scan(step, 0.0, xs)
        seen = (net.steps, net.cell.total, cell.total, net.other.total)
        net.steps = net.steps + 100
        return out, seen, scan(step, 1.0, xs)

    ((_, (_, counts)), seen, _), new = check(f, Net(), XS)
    assert counts.tolist() == [11, 12, 13]
    assert seen[:2] == (13, 7.0)
    assert new.steps == 116


def test_a_loop_of_no_steps_writes_what_was_there():
    _, new = es.mutable(lambda m: es.scan(m, 0.0, jnp.zeros((0,))))(Cell())
    close(new, Cell())


def test_nested_scans():
    def f(net, scan, xs):
        def outer(c, x):
            net.steps = net.steps + 1
            return scan(lambda c, x: net.cell(c, x), c * x, xs)

        return scan(outer, 0.0, xs)

    check(f, Net(), XS)


def test_the_body_is_traced_once_and_a_step_compiled_once():
    traces = []

    def f(m, xs):
        def step(c, x):
            traces.append(1)
            return m(c, x)

        return es.scan(step, jnp.float32(0.0), xs)

    run, model = eqx.filter_jit(es.mutable(f)), Cell()
    for _ in range(3):
        _, model = run(model, XS)
    assert len(traces) == 1


def test_a_custom_kind_alone_is_written():
    class Cache(es.State):
        pass

    class Keeper(es.Module):
        kept: Cache = dataclasses.field(default_factory=lambda: jnp.zeros(3))
        i: Cache = 0
        count: es.State = 0

        def __call__(self, c, x):
            self.kept, self.i = self.kept.at[self.i].set(x), self.i + 1
            return c + self.kept.sum(), None

    run = es.mutable(lambda m: es.scan(m, 0.0, XS), kinds=Cache)
    (c, _), new = run(Keeper())
    assert c == 1 + 3 + 7
    close(new, Keeper(XS, 3))


def test_parameters_are_carried_where_they_may_be_written():
    class Decay(es.Module):
        weight: es.Parameter = 2.0

        def __call__(self, c, x):
            self.weight = self.weight * x
            return c, self.weight

    (_, ys), new = es.mutable(lambda m: es.scan(m, 0.0, XS), kinds=es.TreePart)(Decay())
    assert ys.tolist() == [2.0, 4.0, 16.0]
    assert new.weight == 16.0
    run = es.mutable(lambda m: es.scan(m, 0.0, XS))
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Decay\.weight"):
        run(Decay())


def test_eval_mode_and_frozen_layers():
    class Norm(es.Module):
        mean: es.BatchStat = 1.0

        def __call__(self, x):
            if self.training and not self.frozen:
                self.mean = 0.5 * (self.mean + x)
            return x - self.mean

    def f(norms, scan, xs):
        return scan(lambda c, x: (c, norms[1](norms[0](x))), None, xs)

    models = [Norm(), Norm().freeze()]
    _, new = check(f, models, XS)
    assert new[1].mean == 1.0
    assert new[0].mean != 1.0
    out, new = es.mutable(f)(es.eval(models), es.scan, XS)
    assert eqx.tree_equal(new, es.eval(models))
    assert eqx.tree_equal(f(es.eval(models), es.scan, XS), out)  # no scope needed


# --- Gradients ----------------------------------------------------------------------


def test_gradients_of_shared_parameters():
    def loss(net, scan, xs):
        def step(c, x):
            c, y = net.cell(c, x)
            return net.other(c, x)[0], y

        c, ys = scan(step, 0.3, xs)
        return c**2 + jnp.sum(ys)

    def run(scan):
        return es.value_and_grad(lambda net, xs: loss(net, scan, xs))

    expected = run(by_hand)(Net(), XS)
    close(eqx.filter_jit(run(es.scan))(Net(), XS), expected)
    assert jax.tree.leaves(expected[1])


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda w: jax.jvp(f, (w,), (2.0,)),
        lambda f: lambda w: jax.linearize(f, w)[1](2.0),
        lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (2.0,)),
        lambda f: lambda w: jax.vmap(f)(jnp.stack([w, 2 * w])),
    ],
    ids=["jvp", "linearize", "jvp of grad", "vmap"],
)
def test_transforms_around_a_threaded_scan(transform):
    def run(scan):
        def f(weight):
            model = Cell(jnp.float32(1.0)).replace(weight=weight)
            (c, ys), new = es.mutable(lambda m: scan(m, weight, XS))(model)
            return c + jnp.sum(ys) * new.total

        return transform(f)(jnp.float32(0.8))

    close(run(es.scan), run(by_hand))


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_dropout_draws_another_mask_in_each_step():
    drop = es.nn.Dropout(0.5, key=jr.key(3))

    def f(drop, scan):
        return scan(lambda c, _: (c, drop(jnp.ones(64))), None, None, length=3)

    ours, expected = es.mutable(f)(drop, es.scan), es.mutable(f)(drop, by_hand)
    close(ours, expected)  # the same keys in the same order, and as many
    assert len({y.tobytes() for y in np.asarray(ours[0][1])}) == 3
