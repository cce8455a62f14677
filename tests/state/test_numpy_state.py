"""NumPy arrays and containers as state, with a transform between write and read."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from helpers import rejects

import eqx_state as es


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


def test_a_module_that_a_transform_wrote_must_stay_in_the_model():
    def f(model):
        old = model.layers[0].replace()
        es.checkpoint(lambda x: model.layers[0](x))(1.0)
        model.layers[0] = old

    model = Holder([Count()], [0])
    with rejects(model, ValueError, r"`layers\[0\]\.n` was written"):
        es.mutable(f)(model)


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
