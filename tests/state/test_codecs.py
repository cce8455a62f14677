"""NumPy arrays and `eqx.nn.Shared` in a scope."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import rejects
from jax.sharding import PartitionSpec as P

import eqx_state as es


class Embedding(es.Module):
    weight: es.Parameter
    calls: es.State = 0

    def __call__(self, i):
        if self.training:
            self.calls = self.calls + 1
        return self.weight[i]


class Tied(es.Module):
    shared: eqx.nn.Shared

    def __init__(self):
        linear = eqx.nn.Linear(2, 3, use_bias=False, key=jr.key(0))
        pair = Embedding(jnp.arange(6.0).reshape(3, 2)), linear
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, i):
        embedding, linear = self.shared()
        return linear(embedding(i)).sum()


MODEL = Tied()
STRUCTURE = jax.tree.structure(MODEL)


def is_outside(tree):
    """Whether a tree has the structure of the model outside of scopes."""
    return jax.tree.structure(tree) == STRUCTURE


def gradients(model):
    (_, new), grads = es.value_and_grad(Tied.__call__)(model, 1)
    return new, grads


def with_optimizer(model, optimizer):
    new, grads = gradients(model)
    return optimizer.update(grads, new)


def in_a_scan(model, optimizer):
    def step(carry, _):
        return with_optimizer(*carry), None

    return es.scan(step, (model, optimizer), None, length=2)[0]


@pytest.mark.parametrize("train", [with_optimizer, in_a_scan])
@pytest.mark.parametrize("run", [es.mutable, es.capture])
@jax.numpy_dtype_promotion("standard")
def test_an_optimizer_from_outside_trains_in_a_scope(train, run):
    optimizer = es.Optimizer(optax.adam(0.1)).init(MODEL)
    expected, after = train(MODEL, optimizer)
    out = run(train)(MODEL, optimizer)
    ((model, new), given) = out if run is es.mutable else out[0]
    assert eqx.tree_equal(model, expected, rtol=1e-6)
    assert jax.tree.structure(new) == jax.tree.structure(after)
    assert is_outside(given)


def test_what_leaves_a_scope_otherwise():
    box = []

    def run(model):
        y, new = es.mutable(model)(1)
        box.append(new)
        new, grads = gradients(model)
        box.append(new)
        box.append(grads)
        y, pullback = es.vjp(lambda m: m(1), model)
        return pullback, es.linearize(lambda m: m(1), model)[1], model.shared

    (pullback, pushforward, shared), new = es.mutable(run)(MODEL)
    mutated, trained, grads = box
    assert is_outside(mutated) and is_outside(trained) and is_outside(new)  # noqa: PT018
    assert type(grads.shared) is type(shared) is eqx.nn.Shared
    params = MODEL.filter(es.Parameter)
    (by_model,) = pullback(1.0)
    assert jax.tree.structure(by_model) == jax.tree.structure(params)
    assert jnp.isfinite(pushforward(params))


def test_trees_from_outside_meet_the_model_in_a_scope():
    params = jax.tree.map(jnp.zeros_like, MODEL.filter(es.Parameter))
    ema = es.Ema(0.5).init(MODEL)

    def run(model, ema):
        updated = model.update(params)
        like = MODEL.eval().filter(es.Parameter)
        target = eqx.apply_updates(like, gradients(model)[1])
        return updated(1), ema.update(model), target

    (y, averaged, _), _ = es.mutable(lambda m, e: run(m.eval(), e))(MODEL, ema)
    assert y == 0
    assert is_outside(es.train(averaged.model))


# --- NumPy values that JAX cannot hold ------------------------------------------------


class Ids(es.Module):
    ids: es.Buffer
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return x + int(self.ids[0] % 1000) if self.is_big else x

    @property
    def is_big(self):
        return self.ids.dtype == np.int64


MESH = jax.sharding.Mesh(jax.devices()[:1], "data")


@es.custom_vjp
def custom(model, x):
    return model(x)


custom.defvjp(lambda model, x: (model(x), None), lambda _, g: (None, g))
CALLS = {
    "itself": lambda model, x: model(x),
    "custom_vjp": custom,
    "cond": lambda model, x: es.cond(True, model, lambda x: x, x),
    "argument of checkpoint": lambda m, x: es.checkpoint(lambda m, x: m(x))(m, x),
    "shard_map": lambda model, x: es.shard_map(
        model, mesh=MESH, in_specs=P(), out_specs=P()
    )(x),
    "argument of vmap": lambda model, x: es.vmap(lambda m, x: m(x), (None, 0))(
        model, x[None]
    )[0],
}
UNFIT = {
    "integers": np.array([2**40 + 7]),
    "floats": np.array([1e300]),
    "long doubles": np.array([1], np.longdouble),
    "a scalar": np.str_("a"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("value", UNFIT.values(), ids=UNFIT)
def test_an_array_that_jax_cannot_hold_stays_as_it_is(call, value):
    model, x = Ids(value), jnp.float32(1.0)
    y, new = es.mutable(call)(model, x)
    assert y == (1.0 + (2**40 + 7) % 1000 if model.is_big else 1.0)
    assert new.ids is value
    assert new.calls == 1
    seen, _ = es.mutable(lambda model: model.ids.tolist())(model)
    assert seen == value.tolist()


@pytest.mark.parametrize("value", UNFIT.values(), ids=UNFIT)
def test_such_an_array_passes_through_transforms_as_data(value):
    layer, x = Ids(value).eval(), jnp.float32(1.0)
    same = lambda m, a, x: (m.ids is value, a, x)  # noqa: E731
    for out in (
        es.checkpoint(same)(layer, value, x),
        es.cond(True, same, same, layer, value, x),
        es.vmap(same, (None, None, None), axis_size=2, out_axes=None)(layer, value, x),
        es.vmap(same, (None, 0, None), axis_size=2, out_axes=None)(layer, value, x),
    ):
        assert out[0]
        assert out[1] is value


# --- Repeated modules -----------------------------------------------------------------


def test_a_buffer_that_may_be_written_has_state():
    class Frozen(es.Module):
        parts: es.Buffer

        def __call__(self):
            self.parts[0].calls = self.parts[0].calls + 1

    part = Embedding(jnp.ones(2))
    model = Frozen([part, part])
    es.mutable(lambda model: None)(model)
    with pytest.raises(ValueError, match=r"`parts\[0\]` and `parts\[1\]`"):
        es.mutable(model, kinds=(es.State, es.Buffer))()


# --- NumPy arrays as state ------------------------------------------------------------


class Count(es.Module):
    n: es.State = 0

    def __call__(self, x):
        self.n = self.n + 1
        return x


def test_a_numpy_array_that_is_written_is_state_in_a_loop():
    class Rnn(es.Module):
        h: es.State

        def __call__(self, xs):
            buffer = np.zeros(2, np.float32)
            self.h = {"a": buffer}

            def step(c, x):
                self.h = {"a": self.h["a"] + x}
                return c, None

            es.scan(step, 0, xs)
            return buffer

    buffer, new = es.mutable(Rnn({"a": jnp.zeros(2)}))(jnp.ones((3, 2)))
    assert new.h["a"].tolist() == [3.0, 3.0]
    assert buffer.tolist() == [0.0, 0.0]


class Holder(es.Module):
    layers: list[Count]
    stats: list[es.State]


def test_a_list_of_arrays_that_is_changed_in_a_transform_is_an_error():
    def f(model):
        stats = model.stats

        def change(x):
            stats[0] = model.layers[0](x)
            return x

        es.checkpoint(change)(jnp.ones(()))

    model = Holder([Count()], [0.0])
    with rejects(model, es.TraceError, "under a transform changed a list"):
        es.mutable(f)(model)


def test_a_new_module_with_a_numpy_array_may_be_written():
    class Cell(es.Module):
        count: es.State[Count]

        def __call__(self, x):
            self.count = Count(np.zeros(2, np.float32))
            return self.count(x)

    _, new = es.mutable(Cell(Count(jnp.zeros(2))))(0)
    assert new.count.n.tolist() == [1, 1]


class Scaled(es.Module):
    k: es.Buffer
    n: es.State = 0

    def __call__(self, x):
        self.n = self.n + 1
        return self.k * x


class Around(es.Module):
    part: Scaled

    def mutable(self, x):
        _, self.part = es.mutable(self.part)(x)

    def checkpoint(self, x):
        _, self.part = es.checkpoint(lambda x: (self.part(x), self.part))(x)

    def scan(self, x):
        step = lambda part, x: (part, part(x))  # noqa: E731
        self.part, _ = es.scan(step, self.part, x[None])

    def replaced(self, x):
        self.part = self.part.replace(k=np.float32([3.0]))


def test_a_module_with_a_constant_may_be_assigned_after_a_transform():
    model = Around(Scaled(np.float32([2.0])))
    for method in (model.mutable, model.checkpoint, model.scan):
        _, new = es.mutable(method)(jnp.ones(1))
        assert new.part.n == 1
        assert new.part.k.tolist() == [2.0]
    with rejects(model, dataclasses.FrozenInstanceError, r"`part\.k` is a `Buffer`"):
        es.mutable(model.replaced)(jnp.ones(1))
