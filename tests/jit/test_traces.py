"""The number of traces of `es.jit`: one for all calls with the same signature."""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import reuses_keys
from jit_cases import Layer, X

import eqx_state as es


# --- One trace ------------------------------------------------------------------------


def test_calls_of_one_signature_share_a_program():
    def step(model, x, scale=1.0):
        y, model = es.mutable(model)(x)
        return scale * y, model

    f = eqx.debug.assert_max_traces(step, max_traces=1)
    jitted, model = es.jit(f), Layer(2.0)
    for _ in range(3):
        _, model = jitted(model, X)  # with the original arrays and with updated ones
    jitted(Layer(5.0), X)  # only its arrays differ
    jitted(x=X, model=model)
    jitted(jax.tree.map(lambda x: x, model), np.asarray(X))
    jitted(es.update(model, es.filter(Layer(1.0), es.Parameter)), X)
    jitted(model.eval().train().freeze().unfreeze(), X)
    assert eqx.debug.get_num_traces(jitted) == 1
    with pytest.raises(RuntimeError, match="only be traced 1 times"):
        jitted(model, X[:2])


class Counting(es.Module):
    weight: es.Parameter
    traces: Any = es.field(static=True)
    count: es.State = 0

    def __call__(self, x):
        self.traces.count += 1
        self.count = self.count + 1
        return self.weight * x

    @es.jit
    def decorated(self, x):
        return self(x)


class Log:
    """Counts traces."""

    def __init__(self):
        self.count = 0


WRAPPERS = {
    "inside": lambda m: es.mutable(es.jit(m)),
    "decorated": lambda m: es.mutable(m.decorated),
    "partial": lambda m: es.jit(eqx.Partial(es.mutable(call), m)),
}


def call(model, x):
    return model(x)


@pytest.mark.parametrize("case", WRAPPERS)
def test_a_loop_over_fresh_wrappers_of_a_model_traces_once(case):
    model = Counting(2.0, Log())
    traces = model.traces
    for i in range(3):
        y, model = WRAPPERS[case](model)(X + i)
        assert jnp.array_equal(y, 2 * (X + i))
        assert model.count == i + 1
    WRAPPERS[case](Counting(3.0, traces))(X)
    assert traces.count == 1


# --- Several traces -------------------------------------------------------------------


def python_calls(f, *args):
    """The number of Python functions that a call runs."""
    count = 0

    def see(_frame, event, _arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        f(*args)
    finally:
        sys.setprofile(None)
    return count


@reuses_keys
def test_every_shape_and_sharding_takes_the_fast_path():
    """This includes JAX's fast path, which a failed first trace disables for good."""
    f = es.jit(lambda xs: [x + 1 for x in xs])
    mesh = jax.sharding.Mesh(jax.devices()[:2], "devices")
    split = jax.sharding.NamedSharding(mesh, jax.P("devices"))
    counts = []
    for xs in ([jnp.zeros(2)], [jnp.zeros(4)], [jax.device_put(jnp.zeros(4), split)]):
        for _ in range(2):
            f(xs)
        counts.append(python_calls(f, xs))
    assert counts == counts[:1] * 3
