"""`es.vmap`: the namesake of `jax.vmap`, with state and keys carried through."""

import dataclasses
import functools as ft
import inspect
import re

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from vmap_cases import Net, Norm

import eqx_state as es


def pure(scale, mean, xs):
    """What `Norm` does to a batch, by hand."""
    mean = 0.5 * mean + 0.5 * xs.mean()
    return scale * (xs - mean), mean


XS = jnp.array([1.0, 2.0, 6.0])
Y, MEAN = pure(2.0, 0.0, XS)


def check(y, norm):
    np.testing.assert_allclose(y, Y, rtol=1e-6)
    np.testing.assert_allclose(norm.mean, MEAN, rtol=1e-6)
    assert norm.scale == 2.0


# --- What `f` may be ----------------------------------------------------------------


def apply(norm, x):
    return norm(x)


NORM = Norm()
FUNCTIONS = {
    "module": lambda m: m,
    "bound method": lambda m: m.apply,
    "bound dunder": lambda m: m.__call__,
    "closure": lambda m: lambda x: m(x),
    "closure over a method": lambda m: (lambda f: lambda x: f(x))(m.apply),
    "closure over a closure": lambda m: (lambda f: lambda x: f(x))(lambda x: m(x)),
    "closure over a list": lambda m: (lambda ms: lambda x: ms[0](x))([m]),
    "default": lambda m: lambda x, m=m: m(x),
    "keyword default": lambda m: lambda x, *, m=m: m(x),
    "partial": lambda m: ft.partial(apply, m),
    "partial keyword": lambda m: ft.partial(lambda x, norm: norm(x), norm=m),
    "jax partial": lambda m: jtu.Partial(apply, m),
    "eqx partial": lambda m: eqx.Partial(apply, m),
    "partial of a method": lambda m: ft.partial(m.apply, shift=0.0),
    "sequential": lambda m: eqx.nn.Sequential([m]),
    "lambda layer": lambda m: eqx.nn.Lambda(m),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_state_comes_through(name, jit):
    make = FUNCTIONS[name]
    ran = []

    def f(norm, xs):
        ran.append(1)
        return es.vmap(make(norm), axis_name="batch")(xs)

    run = eqx.filter_jit(es.mutable(f)) if jit else es.mutable(f)
    y, new = run(NORM, XS)
    check(y, new)
    assert ran == [1]
    assert NORM.mean == 0.0


@pytest.mark.parametrize(
    "name", ["module", "bound method", "partial", "jax partial", "eqx partial"]
)
def test_mutable_of_vmap(name):
    make = FUNCTIONS[name]
    check(*es.mutable(es.vmap(make(NORM), axis_name="batch"))(XS))


def test_state_of_an_argument():
    run = es.mutable(lambda m, xs: es.vmap(apply, (None, 0), axis_name="batch")(m, xs))
    check(*run(NORM, XS))
    check(*es.mutable(es.vmap(apply, in_axes=(None, 0), axis_name="batch"))(NORM, XS))


def test_a_module_by_keyword():
    class Ensemble(es.Module):
        count: es.State = dataclasses.field(default_factory=lambda: jnp.zeros(3))

        def __call__(self, x):
            self.count = self.count + x
            return self.count

    def f(m, xs):
        return es.vmap(lambda x, *, m: m(x))(xs, m=m)  # keywords: axis 0, as in JAX

    y, new = es.mutable(f)(Ensemble(), XS)
    assert (y == XS).all()
    assert (new.count == XS).all()


def test_several_modules_are_threaded():
    y, new = es.mutable(Net())(XS)
    y1, mean1 = pure(2.0, 0.0, XS)
    y2, mean2 = pure(3.0, 0.0, y1)
    np.testing.assert_allclose(y, y2 + 1.0, rtol=1e-5)
    np.testing.assert_allclose(new.a.mean, mean1, rtol=1e-6)
    np.testing.assert_allclose(new.b.mean, mean2, rtol=1e-6)


def test_a_module_reached_twice_is_threaded_once():
    def f(net, xs):
        inner = net.a

        def g(m, x):
            assert m is inner
            assert net.a is inner
            return m(x)

        return es.vmap(g, in_axes=(None, 0), axis_name="batch")(inner, xs)

    y, new = es.mutable(f)(Net(), XS)
    check(y, new.a)
    assert new.b.mean == 0.0


def test_what_is_written_in_the_lanes_is_seen_afterwards_by_all_aliases():
    def f(net, xs):
        alias = net.a
        es.vmap(alias, axis_name="batch")(xs)
        assert net.a is alias
        alias.mean = alias.mean + 1.0
        return net.a.mean

    mean, new = es.mutable(f)(Net(), XS)
    assert mean == new.a.mean == MEAN + 1.0


def test_state_before_and_after():
    def f(norm, xs):
        norm.mean = 10.0
        y = es.vmap(norm, axis_name="batch")(xs)
        norm.mean = norm.mean * 2.0
        return y

    _, new = es.mutable(f)(NORM, XS)
    np.testing.assert_allclose(new.mean, 2 * (5.0 + 1.5), rtol=1e-6)


def test_submodules_may_be_replaced_in_a_lane():
    def f(net, xs):
        def lane(x):
            net.a = eqx.tree_at(lambda m: m.mean, net.a, lax.pmean(x, "batch"))
            return x

        return es.vmap(lane, axis_name="batch")(xs)

    _, new = es.mutable(f)(Net(), XS)
    assert new.a.mean == 3.0


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
    "out_axes tree": (
        {"out_axes": (1, {"k": 0})},
        lambda x: (x, {"k": x}),
        (M,),
    ),
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
@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_as_jax_vmap(name):
    options, f, args = LIKE_JAX[name]
    expected = jax.vmap(f, **options)(*args)
    result = es.vmap(f, **options)(*args)
    assert eqx.tree_equal(result, expected)
    _, counter = es.mutable(lambda m: es.vmap(f, **options)(*args))(Norm())
    assert counter.mean == 0.0


def test_what_is_not_an_array_passes():
    # As in `eqx.filter_vmap`; JAX's own raises.
    f = lambda x, p, *, k, s: x * p * k + len(s)  # noqa: E731
    assert eqx.tree_equal(es.vmap(f)(XS, 2.0, k=3, s="ab"), XS * 6 + 2)
    assert eqx.tree_equal(es.vmap(f, (0, 0))(XS, 2.0, k=1, s=""), XS * 2)
    with pytest.raises(ValueError, match="nothing is mapped"):
        es.vmap(lambda p: p)(2.0)


def test_spmd_axis_name():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "i")
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def f(x):
        return lax.with_sharding_constraint(2 * x, spread)

    def specs(vmap, **options):
        program = str(jax.make_jaxpr(vmap(f, **options))(XS[:2]))
        return re.findall(r"spec=.*?\)", program)

    assert specs(es.vmap, spmd_axis_name="i") == specs(jax.vmap, spmd_axis_name="i")
    assert specs(es.vmap, spmd_axis_name="i") != specs(es.vmap)


def test_keyword_arguments_are_mapped_over_axis_0():
    y = es.vmap(lambda x, *, y: x[0] + y, in_axes=1)(M, y=jnp.arange(3.0))
    assert (y == M[0] + jnp.arange(3.0)).all()


def test_positional_options():
    assert inspect.signature(es.vmap).parameters.keys() == {
        *("f", "in_axes", "out_axes", "axis_name", "axis_size", "spmd_axis_name"),
        "axes",
    }
    assert (es.vmap(lambda x: x, 1, 1)(M) == M).all()


BAD = {
    "nothing mapped": (lambda: es.vmap(lambda x: x, in_axes=None)(M), "axis_size"),
    "no arguments": (lambda: es.vmap(lambda: 1)(), "axis_size"),
    "sizes": (lambda: es.vmap(lambda x, y: x)(M, jnp.ones(3)), "size"),
    "axis_size": (lambda: es.vmap(lambda x: x, axis_size=5)(M), "5"),
    "rank": (lambda: es.vmap(lambda x: x, in_axes=2)(M), "axis 2"),
    "negative rank": (lambda: es.vmap(lambda x: x, in_axes=-3)(M), "axis -3"),
    "too few in_axes": (lambda: es.vmap(lambda x, y: x, in_axes=(0,))(M, M), "in_axes"),
    "tree of in_axes": (
        lambda: es.vmap(lambda x: x, in_axes=([0, 0],))([M]),
        "(?i)prefix|length|key|arity",
    ),
    "out_axes None": (lambda: es.vmap(lambda x: x, out_axes=None)(M), "out_axes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_axes(name):
    call, fragment = BAD[name]
    with pytest.raises(ValueError, match=fragment):
        call()


def test_leaves_that_are_no_arrays_are_passed_on():
    seen = []

    def f(x, options):
        seen.append(options)
        return x, options["act"]

    y, act = es.vmap(f)(M, {"act": jnp.tanh, "name": "text"})
    assert seen == [{"act": jnp.tanh, "name": "text"}]
    assert act is jnp.tanh
    assert (y == M).all()


def test_modules_are_returned_stacked():
    def f(x):
        return Norm(x)

    new = es.vmap(f)(XS)
    assert (new.scale == XS).all()
    assert new.mean.shape == (3,)


@pytest.mark.parametrize("scope", [False, True], ids=["outside", "inside"])
def test_nonlocal_variables_are_the_callers(scope):
    runs = 0

    def f(dropout):
        def lane(x):
            nonlocal runs
            runs += 1
            return dropout(x)

        return es.vmap(lane)(XS)

    dropout = es.nn.Dropout(0.5, key=0).eval()
    y = es.mutable(f)(dropout)[0] if scope else f(dropout)
    assert (y == XS).all()
    assert runs == 1


@pytest.mark.parametrize("typed", [True, False])
def test_keys_of_a_stack_are_split_and_are_not_taken_for_used(typed):
    class Stack(es.Module):
        dropouts: es.nn.Dropout

        def __call__(self, x):
            return es.scan(lambda x, drop: (drop(x), None), x, self.dropouts)[0]

    keys = jr.split(jr.key(0) if typed else jr.PRNGKey(0), 3)
    stack = Stack(eqx.filter_vmap(lambda key: es.nn.Dropout(0.5, key=key))(keys))
    by_hand = [jr.clone(key) if typed else key for key in stack.dropouts.rng]
    step = es.jit(lambda stack, x: es.mutable(es.vmap(stack))(x))
    with jax.debug_key_reuse(True):
        for _ in range(2):
            ys, stack = step(stack, jnp.ones((4, 64)))
            assert len(np.unique(ys == 0, axis=0)) == 4  # each lane has its mask
    for key, now in zip(by_hand, stack.dropouts.rng, strict=True):
        assert jnp.all(jr.split(jr.split(key)[0])[0] == now)


def test_a_lane_may_close_over_a_part_beside_the_whole():
    class Layer(es.Module):
        w: es.Parameter
        n: es.State = 0

        def __call__(self, x):
            return x * self.w

    layers = [Layer(2.0), Layer(3.0)]

    def lane(x, *, layer=layers[0]):
        return layers[0](x) + layer(x)  # reads only, outside of a scope

    assert es.vmap(lane)(jnp.ones(2)).tolist() == [4.0, 4.0]
