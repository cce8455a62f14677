"""`es.vmap`: signature and results of `jax.vmap`; state and keys in the lanes.

`test_vmap_axes.py` tests the rules of `axes` and `in_axes`.
"""

import copy
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
from helpers import reuses_keys
from models import Noisy

import eqx_state as es


class Norm(es.Module):
    """Writes a statistic that is averaged over the lanes."""

    scale: es.Parameter = 2.0
    mean: es.BatchStat = 0.0

    def __call__(self, x):
        self.mean = 0.5 * self.mean + 0.5 * lax.pmean(x, "batch")
        return self.scale * (x - self.mean)


class Tally(es.Module):
    weight: es.Parameter = 1.0
    total: es.BatchStat = 0.0

    def __call__(self, x):
        self.total = self.total + x
        return self.weight * x


XS = jnp.array([1.0, 2.0, 6.0])


# --- State --------------------------------------------------------------------------


def test_a_module_by_keyword_has_axis_0():
    f = es.mutable(lambda m, xs: es.vmap(lambda x, *, m: m(x))(xs, m=m))
    _, new = f(Tally(jnp.ones(3), jnp.zeros(3)), XS)
    assert (new.total == XS).all()


def test_a_module_that_a_lane_returns_is_a_snapshot():
    def f(model):
        return es.vmap(lambda x: (model, Norm(x), "text", 1.0))(XS)

    (out, made, *rest), new = es.mutable(f)(Tally(1.0, 2.0))
    assert out.total.tolist() == [2.0] * 3
    assert (made.scale == XS).all()
    assert rest[0] == "text"
    assert rest[1].tolist() == [1.0] * 3
    assert new.total == 2.0


def unreduced(norm, x):
    norm(x)
    norm.scale = x


@pytest.mark.parametrize(
    ("lane", "options"), [(unreduced, {}), (lambda norm, x: norm(x), {"out_axes": 5})]
)
def test_an_error_leaves_nothing_half_written(lane, options):
    def f(norm, xs):
        with pytest.raises(ValueError, match=r"`scale`|out of bounds"):
            es.vmap(lambda x: lane(norm, x), axis_name="batch", **options)(xs)
        return float(norm.mean), float(norm.scale)

    assert es.mutable(f, kinds=es.TreePart)(Norm(mean=4.0), XS)[0] == (4.0, 2.0)


def test_an_error_removes_attributes_that_no_write_has_created():
    def f(norm, xs):
        def lane(x):
            object.__setattr__(norm, "note", x)
            raise KeyError("half-way")

        with pytest.raises(KeyError, match="half-way"):
            es.vmap(lane)(xs)
        return hasattr(norm, "note")

    assert not es.mutable(f)(Norm(), XS)[0]


def test_a_value_that_becomes_an_array_in_a_lane_is_an_error():
    class Switch(es.Module):
        mode: es.State = "cold"

        def __call__(self, x):
            self.mode = jnp.ones(())

    match = r"`mode` was changed from `'cold'` to `f32\[\]` inside a transform"
    with pytest.raises(ValueError, match=match):
        es.mutable(es.vmap(Switch()))(XS)


# --- Keys ---------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("make", [jr.key, jr.PRNGKey], ids=["typed", "legacy"])
@reuses_keys
def test_each_lane_has_its_own_key_and_the_key_of_the_model_advances_once(make, impl):
    with jax.default_prng_impl(impl):
        check_each_lane_has_its_own_key(make)


def check_each_lane_has_its_own_key(make):
    model = Noisy(make(0))
    y, new = es.mutable(es.vmap(model))(jnp.zeros(4))
    assert len(set(y.tolist())) == 4
    assert (new.rng.shape, new.rng.dtype) == (model.rng.shape, model.rng.dtype)
    again, newer = es.mutable(es.vmap(new))(jnp.zeros(4))
    assert not set(y.tolist()) & set(again.tolist())
    assert (newer.rng != new.rng).any()
    # It advances once, however often the lanes draw.
    _, twice = es.mutable(lambda m: es.vmap(lambda x: m(m(x)))(jnp.zeros(4)))(model)
    assert (twice.rng == new.rng).all()


def test_state_that_has_the_form_of_a_legacy_key_is_shared():
    class Pair(es.Module):
        pair: es.State

    class Seed(es.Module):
        pair: es.Rng  # a number, and no key

    for model in (Pair(jnp.zeros(2, jnp.uint32)), Seed(jnp.uint32(0))):
        ys, _ = es.mutable(lambda m: es.vmap(lambda x: m.pair)(jnp.zeros(3)))(model)
        assert (ys == 0).all()


class Plain(eqx.Module):
    """Equinox's own, with a key of its own and a layer."""

    key: jax.Array
    noisy: Noisy


class Cached(es.Module):
    cache: es.State[dict]  # with a typed key in it


def draw(key, x):
    return jr.normal(key) + 0 * x


def drawn(model, x):
    """A draw by a layer that no scope owns."""
    return es.mutable(model)(0 * x)[0]


def gradient(model, x):
    return es.grad(lambda m: m(0 * x) * (1 + m.weight))(model)[0].weight


class Weighted(Noisy):
    weight: es.Parameter = 1.0


def noisy(make=jr.key):
    return Noisy(make(0))


# A function, its arguments, `in_axes`, and the number of draws in three lanes.
KEYS = {
    "typed": (drawn, (noisy(),), (None, 0), 3),
    "legacy": (drawn, (noisy(jr.PRNGKey),), (None, 0), 3),
    "a key for all": (drawn, (noisy(),), ({es.Rng: None}, 0), 1),
    "split by a rule": (drawn, (noisy(),), ({es.Rng: es.SPLIT}, 0), 3),
    "a stream": (
        lambda m, x: es.mutable(lambda m: draw(m(), x))(m)[0],
        (es.RngStream(0),),
        (None, 0),
        3,
    ),
    "in a list": (lambda m, x: drawn(m[0], x), ([noisy()],), (None, 0), 3),
    "in a prefix": (lambda m, x: drawn(m[0], x), ([noisy()],), ([None], 0), 3),
    "a key in a list": (lambda m, x: draw(m[0], x), ([jr.key(0)],), (None, 0), 1),
    "a key in Equinox": (
        lambda m, x: draw(m.key, x),
        (Plain(jr.key(0), noisy()),),
        (None, 0),
        3,
    ),
    "a layer in Equinox": (
        lambda m, x: drawn(m.noisy, x),
        (Plain(jr.key(0), noisy()),),
        (None, 0),
        3,
    ),
    "a typed key in state": (
        lambda m, x: draw(m.cache["key"], x),
        (Cached({"key": jr.key(0)}),),
        (None, 0),
        3,
    ),
    "a key in a partial": (
        lambda f, x: f(x),
        (eqx.Partial(draw, jr.key(0)),),
        (None, 0),
        1,
    ),
    "a layer in a partial": (
        lambda f, x: f(x),
        (eqx.Partial(drawn, noisy()),),
        (None, 0),
        3,
    ),
    "gradients": (gradient, (Weighted(jr.key(0)),), (None, 0), 3),
    "a tree of axes": (
        lambda m, x: draw(m.rng, x),
        (noisy(),),
        (es.spec(noisy(), {}), 0),
        1,
    ),
}


@pytest.mark.parametrize("scope", ["no scope", "a scope", "es.jit"])
@pytest.mark.parametrize("name", KEYS)
@reuses_keys
def test_each_lane_has_the_keys_of_a_module_among_the_arguments(name, scope):
    f, args, in_axes, number = KEYS[name]
    run = lambda args: es.vmap(f, in_axes)(*args, jnp.zeros(3))  # noqa: E731
    if scope == "a scope":
        run = lambda args, run=run: es.mutable(run)(args)[0]  # noqa: E731
    run = es.jit(run) if scope == "es.jit" else run
    assert len(set(run(args).tolist())) == number


def one_step(model, x):
    return es.scan(lambda x, m: (drawn(m, x), None), x, jax.tree.map(lift, model))[0]


def lift(x):
    return x[None]


# What a lane does with a module that it gets.
INSIDE = {
    "jit": lambda m, x: es.jit(drawn)(m, x),
    "checkpoint": lambda m, x: es.checkpoint(drawn)(m, x),
    "cond": lambda m, x: es.cond(True, drawn, lambda m, x: x, m, x),
    "switch": lambda m, x: es.switch(1, [lambda m, x: x, drawn], m, x),
    "scan, a slice": one_step,
    "scan, a carry": lambda m, x: es.scan(lambda m, _: (m, drawn(m, x)), m, length=1)[
        1
    ][0],
    "fori_loop": lambda m, x: es.fori_loop(
        0, 1, lambda i, c: (c[0], drawn(*c)), (m, x)
    )[1],
    "while_loop": lambda m, x: es.while_loop(
        lambda c: c[1] == 0, lambda c: (c[0], drawn(*c)), (m, x)
    )[1],
    "vjp": lambda m, x: es.vjp(drawn, m, x)[0],
    "jvp": lambda m, x: es.jvp(lambda x: drawn(m, x), (x,), (x,))[0],
    "vmap": lambda m, x: es.vmap(drawn, (None, 0))(m, x[None])[0],
    "capture": lambda m, x: es.capture(m)(0 * x)[0][0],
}


@pytest.mark.parametrize("is_owned", [False, True])
@pytest.mark.parametrize("name", INSIDE)
@reuses_keys
def test_the_keys_of_a_lane_reach_every_transform_inside(name, is_owned):
    run = lambda m, xs: es.vmap(INSIDE[name], (None, 0))(m, xs)  # noqa: E731
    ys = es.mutable(run)(noisy(), XS * 0)[0] if is_owned else run(noisy(), XS * 0)
    assert len(set(ys.tolist())) == 3


@reuses_keys
def test_the_lanes_of_a_lane_have_their_own_keys_and_methods_are_functions():
    inner = es.vmap(drawn, (None, 0))
    ys = es.vmap(inner, (None, 0))(noisy(), jnp.zeros((2, 3)))
    assert len(set(ys.ravel().tolist())) == 6

    class Ensemble(es.Module):
        members: Noisy

        @ft.partial(es.vmap, in_axes=(None, 0))
        def __call__(self, other, x):
            return drawn(self.members, x), drawn(other, x)

    for ys in Ensemble(noisy())(Noisy(jr.key(1)), jnp.zeros(3)):
        assert len(set(ys.tolist())) == 3


@pytest.mark.parametrize("owned", [False, True])
def test_a_module_that_all_lanes_return_has_one_key(owned):
    def run(model, entry=None, f=lambda m, x: (m, x)):
        return es.vmap(f, (entry, 0), (None, 0))(model, XS)

    def call(*args):
        return es.mutable(run)(*args)[0] if owned else run(*args)

    says = r"module as one value.*`out_axes=None`.*`\[0\]\.rng`.*\(\{es\.Rng: None\}"
    with pytest.raises(ValueError, match=says):
        call([noisy()])
    (returned,), _ = call([noisy()], {es.Rng: None})
    assert returned.rng == jr.key(0)
    with pytest.raises(ValueError, match="out_axes"):  # that of JAX
        call([noisy()], None, lambda m, x: x)


@pytest.mark.parametrize("typed", [True, False])
def test_keys_of_a_stack_are_split_and_do_not_count_as_reused(typed):
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
            assert len(np.unique(ys == 0, axis=0)) == 4  # each lane has its own mask
    for key, now in zip(by_hand, stack.dropouts.rng, strict=True):
        assert jnp.all(jr.split(jr.split(key)[0])[0] == now)


@reuses_keys
def test_a_key_that_is_assigned_is_kept_if_it_is_the_same_for_all_lanes():
    class Noise(es.Module):
        rng: es.Rng
        stream: es.RngStream

        def restart(self, x, key):
            self.stream = es.RngStream(key)
            return x

    model, key = Noise(jr.key(0), es.RngStream(1)), jr.key(7)
    for f in (model.restart, es.jit(model.restart), es.checkpoint(model.restart)):
        _, new = es.mutable(es.vmap(f, in_axes=(0, None)))(XS, key)
        assert (new.rng, new.stream.key) == (jr.key(0), key)
    # If each lane has its own key, none is stored, and the model's key advances as
    # usual.
    _, new = es.mutable(es.vmap(model.restart))(XS, jr.split(key, 3))
    assert new.rng == jr.key(0)
    assert new.stream.key not in (jr.key(1), key)


@reuses_keys
def test_the_dropout_of_a_teacher_in_a_buffer_draws_in_each_lane():
    class Distilled(es.Module):
        teacher: es.Buffer[es.nn.Dropout]
        noise: es.Buffer  # a key that is a constant

        def __call__(self, x):
            return self.teacher(x) + 0 * jr.normal(self.noise), jr.normal(self.noise)

    model = Distilled(es.nn.Dropout(0.5, key=jr.key(0)), jr.key(1))
    run = es.mutable(es.vmap(model), kinds=(es.State, es.Buffer))
    (ys, noise), new = run(jnp.ones((4, 32)))
    assert len({tuple(y.tolist()) for y in ys}) == 4
    assert jnp.all(noise == noise[0])
    assert new.teacher.rng != model.teacher.rng
    assert new.noise == model.noise


def test_only_keys_can_be_split():
    with pytest.raises(ValueError, match=r"es\.SPLIT.*`total`"):
        es.mutable(es.vmap(Tally(), axes={es.BatchStat: es.SPLIT}))(XS)
    assert repr(es.SPLIT) == "es.SPLIT"
    assert copy.deepcopy(es.SPLIT) is es.SPLIT


# --- Signature and return value of `jax.vmap` ---------------------------------------


M = jnp.arange(6.0).reshape(2, 3)
LIKE_JAX = {
    "in_axes list": ({"in_axes": [1, 0]}, lambda x, y: x * y, (M, M[0])),
    "in_axes negative": ({"in_axes": -1}, lambda x, y: x + y, (M, M)),
    "in_axes prefix": (
        {"in_axes": ({"a": 0, "b": 1}, None)},
        lambda d, c: (d["a"][0], d["b"][1], c),
        ({"a": (M, M), "b": [M.T, M.T]}, 3.0),
    ),
    "out_axes prefix": ({"out_axes": (1, 0)}, lambda x: ((x, x), x), (M,)),
    "out_axes None": (
        {"out_axes": (0, None), "axis_name": "i"},
        lambda x: (x, lax.psum(x, "i")),
        (M,),
    ),
    "axis_size": ({"axis_size": 4, "in_axes": None}, lambda x: x, (M,)),
    "axis_size alone": ({"axis_size": 4}, lambda: jnp.ones(2), ()),
    "constants": ({}, lambda x: (x, 1.0, jnp.ones(2), None), (M,)),
    "keys": ({}, lambda k: jr.normal(k, (2,)), (jr.split(jr.key(0), 3),)),
    "empty": ({}, lambda x, y: (x, y), (np.arange(3), ())),
}


@pytest.mark.parametrize("name", LIKE_JAX)
@reuses_keys
def test_equals_jax_vmap(name):
    options, f, args = LIKE_JAX[name]
    expected = jax.vmap(f, **options)(*args)
    assert eqx.tree_equal(es.vmap(f, **options)(*args), expected)


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


BAD = {
    "no arguments": (lambda: es.vmap(lambda: 1)(), r"es\.vmap.*`axis_size`"),
    "rank": (lambda: es.vmap(jnp.sin, 2)(M), r"`args\[0\]` has shape .* no axis 2"),
    "NumPy's zero": (
        lambda: es.vmap(jnp.sin, np.int64(0))(M),
        r"no axis np\.int64\(0\).*`int`",
    ),
    "a callable": (
        lambda: es.vmap(jnp.sin, in_axes=eqx.if_array(0))(M),
        r"`args\[0\]` .*if_array.*eqx\.if_array\(0\)",
    ),
    "another tree": (
        lambda: es.vmap(lambda x: x, in_axes=({"a": 0},))([M]),
        r"es\.vmap`: `in_axes` must be one entry",
    ),
    "sizes by name": (
        lambda: es.vmap(lambda x, *, by: x)(XS, by=jnp.ones(2)),
        r"(?s)size 3: axis 0 of argument args\[0\].*size 2: .*kwargs\['by'\]",
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


def test_out_axes_that_are_not_axes():
    match = r"`es.vmap`: `out_axes` must be an integer.*if_array"
    with pytest.raises(TypeError, match=match):
        es.vmap(jnp.sin, out_axes=eqx.if_array(0))(XS)


def test_self_of_a_decorated_method_belongs_to_the_function():
    class Net(es.Module):
        total: Tally

        @ft.partial(es.vmap, in_axes=(0, None), axes={es.BatchStat: 0})
        def add(self, x, y, *, z=0.0):
            self.total(x + y)
            return x + y

    model = Net(Tally(1.0, jnp.ones(3)))
    y, new = es.mutable(model.add)(XS, 1.0)
    assert (y == XS + 1).all()
    assert (new.total.total == XS + 2).all()


def test_a_collective_without_the_name_of_the_lanes():
    def centered(x):
        return x - jax.lax.pmean(x, "batch")

    class Centered(es.Module):
        weight: es.Parameter = 1.0

        def __call__(self, x):
            return jnp.sum(self.weight * centered(x))

    for call in (
        es.vmap(centered),
        es.mutable(Centered()),
        es.mutable(es.vmap(Centered())),
        es.mutable(es.vmap(Centered(), axis_name="other")),
        es.jit(es.mutable(Centered())),
        es.value_and_grad(Centered()),
        es.grad(Centered()),
        es.grad(lambda x: es.mutable(Centered())(x)[0], wrt=lambda part: True),
    ):
        with pytest.raises(NameError, match="batch") as info:
            call(jnp.ones(3))
        notes = str(info.value.__notes__)
        assert notes.count('es.mutable(es.vmap(model, axis_name="batch"))(xs)') == 1
    with pytest.raises(NameError, match="undefined") as info:
        es.vmap(lambda x: undefined)(jnp.ones(3))  # noqa: F821
    assert "axis_name" not in str(getattr(info.value, "__notes__", ""))
