"""`es.vmap`: signature and results of `jax.vmap`, and state that lanes share."""

import dataclasses
import functools as ft
import inspect
import re

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import rejects

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


class Norm(es.Module):
    """Writes a statistic that is averaged over the lanes."""

    scale: es.Parameter = 2.0
    mean: es.BatchStat = 0.0

    def __call__(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * lax.pmean(x, "batch")
        return self.scale * (x - self.mean)


class Net(es.Module):
    a: Norm = dataclasses.field(default_factory=Norm)
    b: Norm = dataclasses.field(default_factory=lambda: Norm(3.0))
    bias: es.Parameter = 1.0

    def __call__(self, xs):
        return es.vmap(lambda x: self.b(self.a(x)) + self.bias, axis_name="batch")(xs)


class Tally(es.Module):
    weight: es.Parameter = 1.0
    total: es.BatchStat = 0.0

    def __call__(self, x):
        self.total = self.total + x
        return self.weight * x


XS = jnp.array([1.0, 2.0, 6.0])


# --- State --------------------------------------------------------------------------


WAYS = {
    "the function": lambda m, xs: es.vmap(m, axis_name="batch")(xs),
    "its closure": lambda m, xs: es.vmap(lambda x: m(x), axis_name="batch")(xs),
    "an argument": lambda m, xs: es.vmap(
        lambda m, x: m(x), in_axes=(None, 0), axis_name="batch"
    )(m, xs),
}


@pytest.mark.parametrize("way", WAYS)
def test_outside_a_scope_it_works_as_long_as_nothing_is_written(way):
    assert (WAYS[way](Norm(mean=1.0).eval(), XS) == 2 * (XS - 1)).all()
    with rejects(model := Norm(), FROZEN, r"Norm\.mean"):
        WAYS[way](model, XS)


def test_an_argument_is_a_copy_and_a_closure_the_object():
    def f(net, xs):
        inner = net.a

        def g(m, x):
            assert net.a is inner is not m
            m(x)
            return inner.mean, m.mean

        seen = es.vmap(g, in_axes=(None, 0), axis_name="batch")(inner, xs)
        return seen, inner.mean

    ((before, in_lanes), after), _ = es.mutable(f)(Net(), XS)
    assert before.tolist() == [0.0] * 3
    assert in_lanes.tolist() == [after] * 3 == [1.5] * 3


def test_a_module_by_keyword_has_axis_0():
    f = es.mutable(lambda m, xs: es.vmap(lambda x, *, m: m(x))(xs, m=m))
    _, new = f(Tally(jnp.ones(3), jnp.zeros(3)), XS)
    assert (new.total == XS).all()


def test_submodules_may_be_replaced_in_a_lane():
    def f(net, xs):
        def lane(x):
            net.a = eqx.tree_at(lambda m: m.mean, net.a, lax.pmean(x, "batch"))
            return x

        return es.vmap(lane, axis_name="batch")(xs)

    assert es.mutable(f)(Net(), XS)[1].a.mean == 3.0


def test_a_module_that_a_lane_returns_is_a_snapshot():
    def f(model):
        return es.vmap(lambda x: (model, Norm(x), "text", 1.0))(XS)

    (out, made, *rest), new = es.mutable(f)(Tally(1.0, 2.0))
    assert out.total.tolist() == [2.0] * 3
    assert (made.scale == XS).all()
    assert rest[0] == "text"
    assert rest[1].tolist() == [1.0] * 3
    assert new.total == 2.0
    with pytest.raises(FROZEN, match=r"Tally\.total"):
        out(1.0)


def fails(net, x):
    net.a(x)
    raise KeyError("half-way")


def leaves_unreduced(net, x):
    net.a(x)
    net.b.mean = x


@pytest.mark.parametrize(
    ("lane", "error", "options"),
    [
        (fails, KeyError, {}),
        (leaves_unreduced, ValueError, {}),
        (lambda net, x: net.a(x), ValueError, {"out_axes": 5}),
    ],
)
def test_an_error_leaves_nothing_half_written(lane, error, options):
    def f(net, xs):
        with pytest.raises(error, match=r"half-way|`b\.mean`|out of bounds"):
            es.vmap(lambda x: lane(net, x), axis_name="batch", **options)(xs)
        assert (net.a.mean, net.b.mean) == (4.0, 0.0)
        return es.vmap(net.a, axis_name="batch")(xs)

    _, new = es.mutable(f)(Net(a=Norm(mean=4.0)), XS)
    np.testing.assert_allclose(new.a.mean, 3.5)


def test_an_error_removes_attributes_that_no_write_has_created():
    def f(net, xs):
        def lane(x):
            object.__setattr__(net.a, "note", x)
            raise KeyError("half-way")

        with pytest.raises(KeyError, match="half-way"):
            es.vmap(lane)(xs)
        return hasattr(net.a, "note")

    assert not es.mutable(f)(Net(), XS)[0]


def test_a_value_that_becomes_an_array_in_a_lane_is_an_error():
    class Switch(es.Module):
        mode: es.State = "cold"

        def __call__(self, x):
            def lane(x):
                self.mode = jnp.ones(())
                return x

            return es.vmap(lane)(x)

    match = r"`mode` was changed from `'cold'` to `f32\[\]` inside a transform"
    with pytest.raises(ValueError, match=match):
        es.mutable(Switch())(XS)


# --- Signature and return value of `jax.vmap` ---------------------------------------


M = jnp.arange(6.0).reshape(2, 3)
LIKE_JAX = {
    "default": ({}, lambda x, y: x + y, (M, M)),
    "in_axes": ({"in_axes": (0, None)}, lambda x, y: x + y, (M, M[0])),
    "in_axes list": ({"in_axes": [1, 0]}, lambda x, y: x * y, (M, M[0])),
    "in_axes negative": ({"in_axes": -1}, lambda x, y: x + y, (M, M)),
    "in_axes None": ({"in_axes": (None, 1)}, lambda x, y: (x, y), (M, M)),
    "in_axes tree": (
        {"in_axes": ({"a": 0, "b": None},)},
        lambda d: d["a"] + d["b"],
        ({"a": M, "b": M[0]},),
    ),
    "in_axes prefix": (
        {"in_axes": ({"a": 0, "b": 1}, None)},
        lambda d, c: (d["a"][0], d["b"][1], c),
        ({"a": (M, M), "b": [M.T, M.T]}, 3.0),
    ),
    "out_axes": ({"out_axes": 1}, lambda x: x, (M,)),
    "out_axes negative": ({"out_axes": -1}, lambda x: x, (M,)),
    "out_axes tree": ({"out_axes": (1, {"k": 0})}, lambda x: (x, {"k": x}), (M,)),
    "out_axes prefix": ({"out_axes": (1, 0)}, lambda x: ((x, x), x), (M,)),
    "out_axes None": (
        {"out_axes": (0, None), "axis_name": "i"},
        lambda x: (x, lax.psum(x, "i")),
        (M,),
    ),
    "axis_name": ({"axis_name": "i"}, lambda x: x - lax.pmean(x, "i"), (M,)),
    "axis_size": ({"axis_size": 4, "in_axes": None}, lambda x: x, (M,)),
    "axis_size alone": ({"axis_size": 4}, lambda: jnp.ones(2), ()),
    "axis_index": ({"axis_name": "i"}, lambda x: x + lax.axis_index("i"), (M[0],)),
    "constants": ({}, lambda x: (x, 1.0, jnp.ones(2)), (M,)),
    "None out": ({}, lambda x: (x, None), (M,)),
    "int arrays": ({}, lambda x: x + 1, (jnp.arange(3),)),
    "numpy": ({}, lambda x: x + 1, (np.arange(3),)),
    "keys": ({}, lambda k: jr.normal(k, (2,)), (jr.split(jr.key(0), 3),)),
    "empty": ({}, lambda x, y: (x, y), (M, ())),
}


@pytest.mark.parametrize("name", LIKE_JAX)
@jax.numpy_dtype_promotion("standard")
@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_equals_jax_vmap(name):
    options, f, args = LIKE_JAX[name]
    expected = jax.vmap(f, **options)(*args)
    assert eqx.tree_equal(es.vmap(f, **options)(*args), expected)
    _, counter = es.mutable(lambda m: es.vmap(f, **options)(*args))(Norm())
    assert counter.mean == 0.0


def test_values_that_are_not_arrays_pass_through():
    # As in `eqx.filter_vmap`; `jax.vmap` raises an error.
    def f(x, p, options, *, k, s):
        return x * p * k + len(s), options["act"]

    y, act = es.vmap(f)(XS, 2.0, {"act": jnp.tanh, "name": "text"}, k=3, s="ab")
    assert (y == XS * 6 + 2).all()
    assert act is jnp.tanh
    y = es.vmap(lambda x, *, y: x[0] + y, in_axes=1)(M, y=jnp.arange(3.0))
    assert (y == M[0] + jnp.arange(3.0)).all()


def test_options():
    assert [*inspect.signature(es.vmap).parameters] == [
        *("f", "in_axes", "out_axes", "axis_name", "axis_size", "spmd_axis_name"),
        "axes",
    ]
    mesh = jax.sharding.Mesh(jax.devices()[:2], "i")
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def f(x):
        return lax.with_sharding_constraint(2 * x, spread)

    def specs(vmap, **options):
        program = str(jax.make_jaxpr(vmap(f, **options))(XS[:2]))
        return re.findall(r"spec=.*?\)", program)

    assert specs(es.vmap, spmd_axis_name="i") == specs(jax.vmap, spmd_axis_name="i")
    assert specs(es.vmap, spmd_axis_name="i") != specs(es.vmap)


class Caller(es.Module):
    weight: es.Parameter = 2.0

    def both(self, d, *rest, by=0.0):
        return d["x"], rest, by


D = {"x": XS}
BAD = {
    "nothing is mapped": (lambda: es.vmap(jnp.sin, None)(M), r"es\.vmap.*axis_size"),
    "no arguments": (lambda: es.vmap(lambda: 1)(), r"es\.vmap.*`axis_size`"),
    "rank": (lambda: es.vmap(jnp.sin, 2)(M), r"`args\[0\]` has shape .* no axis 2"),
    "negative": (lambda: es.vmap(jnp.sin, -3)(M), r"`args\[0\]` .* no axis -3"),
    "NumPy's zero": (
        lambda: es.vmap(jnp.sin, np.int64(0))(M),
        r"no axis np\.int64\(0\).*`int`",
    ),
    "a callable": (
        lambda: es.vmap(jnp.sin, in_axes=eqx.if_array(0))(M),
        r"`args\[0\]` .*if_array.*eqx\.if_array\(0\)",
    ),
    "too few": (lambda: es.vmap(lambda x, y: x, (0,))(M, M), r"es\.vmap`: `in_axes`"),
    "another tree": (
        lambda: es.vmap(lambda x: x, in_axes=({"a": 0},))([M]),
        r"es\.vmap`: `in_axes` must be one entry",
    ),
    "out_axes None": (lambda: es.vmap(lambda x: x, out_axes=None)(M), "out_axes"),
    "sizes": (
        lambda: es.vmap(Caller().both)(D, jnp.ones(2)),
        r"(?s)size 3: axis 0 of argument args\[0\]\['x'\].*size 2: .*args\[1\]",
    ),
    "sizes by name": (
        lambda: es.vmap(Caller().both)(D, by=jnp.ones(2)),
        r"size 2: axis 0 of argument kwargs\['by'\]",
    ),
    "sizes of a model": (
        lambda: es.vmap(es.checkpoint(Tally(jnp.ones(2))), axes={es.Parameter: 0})(XS),
        r"size 2: axis 0 of argument f\.f\.weight",
    ),
    "sizes of a model in a scope": (
        lambda: es.mutable(lambda m: es.vmap(m["a"], axes={es.State: 0})(XS))(
            {"a": Tally(1.0, jnp.ones(2))}
        ),
        r"size 2: axis 0 of argument modules\[\['a'\]\.total\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_axes_that_do_not_fit(name):
    call, match = BAD[name]
    with pytest.raises(ValueError, match=match):
        call()


def test_axes_that_are_not_axes():
    with pytest.raises(ValueError, match=r"`es\.vmap`: `in_axes` must be one entry"):
        es.vmap(jnp.sin, in_axes={"x": 0})(XS)
    with pytest.raises(
        TypeError, match=r"`es.vmap`: `out_axes` must be an integer.*if_array"
    ):
        es.vmap(jnp.sin, out_axes=eqx.if_array(0))(XS)


# --- Decorating, copying, inner gradients -------------------------------------------


def test_self_of_a_decorated_method_belongs_to_the_function():
    class Net(es.Module):
        total: Tally

        @ft.partial(es.vmap, in_axes=(0, None), axes={es.BatchStat: 0})
        def add(self, x, y, *, z=0.0):
            """Doc."""
            self.total(x + y)
            return x + y

    model = Net(Tally(1.0, jnp.ones(3)))
    called = es.mutable(model.add)(XS, 1.0)
    threaded = es.mutable(lambda m, *args: m.add(*args))(model, XS, 1.0)
    for y, new in (called, threaded):
        assert (y == XS + 1).all()
        assert (new.total.total == XS + 2).all()
    assert Net.add.__doc__ == "Doc."


def test_the_wrapper():
    def f(x, y=1):
        """Doc."""

    wrapped = es.vmap(f, in_axes=(0, None), axes={es.State: 0})
    assert wrapped.__wrapped__ is f
    assert (wrapped.__doc__, wrapped.__name__) == ("Doc.", "f")
    assert inspect.signature(wrapped) == inspect.signature(f)
    assert hash(wrapped) == hash(es.vmap(f, in_axes=(0, None), axes={es.State: 0}))


def test_gradients_of_each_example():
    class Net(es.Module):
        w: es.Parameter = 2.0
        calls: es.State = 0

        def __call__(self, x):
            self.calls = self.calls + 1
            return self.w * x

    def f(model, xs):
        return es.vmap(es.grad(lambda m, x: m(x) ** 2), (None, 0))(model, xs)

    alone = f(Net(), XS)
    (in_scope, new) = es.mutable(f)(Net(), XS)
    for grads, models in (alone, in_scope):
        assert (grads.w == 4 * XS**2).all()
        assert models.calls.tolist() == [1, 1, 1]
    assert new.calls == 0


def test_a_collective_without_the_name_of_the_lanes():
    def centered(x):
        return x - jax.lax.pmean(x, "batch")

    with pytest.raises(NameError, match="batch") as info:
        es.vmap(centered)(jnp.ones(3))
    assert 'es.vmap(f, axis_name="batch")' in str(info.value.__notes__)
    with pytest.raises(NameError, match="undefined") as info:
        es.vmap(lambda x: undefined)(jnp.ones(3))  # noqa: F821
    assert "axis_name" not in str(getattr(info.value, "__notes__", ""))
