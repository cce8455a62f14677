"""`es.functional`: the pure function and arrays that other JAX libraries expect."""

import dataclasses
import os
import subprocess
import sys
import weakref

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_state as es


class Net(es.Module):
    linear: eqx.nn.Linear
    count: es.State = 0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))
    table: es.Buffer = 2.0
    index: jax.Array = dataclasses.field(default_factory=lambda: jnp.arange(2))
    act: object = jnp.tanh
    name: str = "net"

    def __call__(self, x, *, scale=1.0):
        if self.training:
            self.count = self.count + 1
            _, self.rng = jr.split(self.rng)
        return scale * self.table * self.act(self.linear(x))


def net():
    return Net(eqx.nn.Linear(2, 1, key=jr.key(1)))


X = jnp.ones(2)


def test_params_and_state_contain_all_arrays_and_nothing_else():
    model = net()
    _, params, state = es.functional(model)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((params, state)))
    assert list(params) == ["linear.weight", "linear.bias"]
    assert list(state) == ["count", "rng", "table", "index"]
    assert {**params, **state} == es.state_dict(model)


@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_apply_equals_mutable():
    model = net()
    apply, params, state = es.functional(model)
    for i in range(1, 4):
        out, state = apply(params, state, X, scale=0.5)
        expected, model = es.mutable(model)(X, scale=0.5)
        assert out == expected
        assert state["count"] == model.count == i
        assert state["rng"] == model.rng


@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_of_a_method():
    class Named(Net):
        def scaled(self, x, by):
            return by * self(x)

    model = Named(eqx.nn.Linear(2, 1, key=jr.key(1)))
    apply, params, state = es.functional(model.scaled)
    assert {**params, **state} == es.state_dict(model)
    out, state = jax.jit(apply)(params, state, X, by=2.0)
    expected, new = es.mutable(model.scaled)(X, by=2.0)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert eqx.tree_equal(es.load_state_dict(model, {**params, **state}), new)


def test_a_model_before_init():
    with pytest.raises(es.NotInitializedError, match=r"`\[0\]`"):
        es.functional([es.lazy(eqx.nn.Linear, 2, 3)])


# --- Names ----------------------------------------------------------------------------


def test_missing_and_unknown_names_are_listed():
    apply, params, state = es.functional(net())
    old = {"linear.w": params["linear.weight"], "linear.bias": params["linear.bias"]}
    with pytest.raises(ValueError, match="different names than the model") as info:
        apply(old, state, X)
    assert str(info.value).splitlines()[1:-1] == [
        "  missing in `params`: linear.weight",
        "  unknown in `params`: linear.w",
    ]
    with pytest.raises(ValueError, match=r"missing in `state`: count\n.*index"):
        apply(params, {}, X)
    with pytest.raises(ValueError, match="unknown in `state`: 3"):
        apply(params, {**state, 3: X}, X)
    with pytest.raises(TypeError, match=r"`params` must be a dict, but is a `Net`"):
        apply(net(), state, X)
    apply, _, _ = es.functional(jnp.ones(2))
    with pytest.raises(ValueError, match="missing in `params`: the array itself"):
        apply({}, {})


# --- Arrays ---------------------------------------------------------------------------


def test_jit_compiles_once_and_weak_arrays_become_strong():
    class Step(es.Module):
        inner: dict
        count: es.State = 0

        def __call__(self):
            self.count += 1
            return 1.0

    apply, params, state = es.functional(Step({"n": jnp.asarray(1)}))
    run = jax.jit(eqx.debug.assert_max_traces(apply, max_traces=1))
    for _ in range(3):
        _, state = run(params, state)
    assert state["count"] == 3
    assert not state["inner['n']"].weak_type


def test_arrays_of_numpy_are_passed_on():
    class Table(es.Module):
        rows: np.ndarray = dataclasses.field(default_factory=lambda: np.arange(3))

        def __call__(self, i):
            return self.rows[i]

    model = Table()
    apply, params, state = es.functional(model)
    assert state["rows"] is model.rows
    out, new = apply(params, state, 2)
    assert (out, type(new["rows"])) == (2, np.ndarray)


def test_of_an_abstract_model():
    model = net().eval()
    apply, params, state = es.functional(eqx.filter_eval_shape(lambda m: m, model))
    assert isinstance(params["linear.weight"], jax.ShapeDtypeStruct)
    arrays = es.state_dict(model)
    out, _ = apply({k: arrays[k] for k in params}, {k: arrays[k] for k in state}, X)
    assert (out == model(X)).all()


def test_apply_does_not_keep_the_arrays_alive():
    model = net()
    apply, params, state = es.functional(model)
    weight = weakref.ref(model.linear.weight)
    del model, params
    assert weight() is None
    assert apply is not None


# --- Export ---------------------------------------------------------------------------


SERVER = """
import sys
import jax, jax.export, jax.numpy as jnp, numpy as np

folder, = sys.argv[1:]
exported = jax.export.deserialize(bytearray(open(folder + "/model", "rb").read()))
arrays = dict(np.load(folder + "/arrays.npz"))
key = jax.random.wrap_key_data(arrays.pop("rng"))
params = {k: arrays.pop(k) for k in ["linear.weight", "linear.bias"]}
state = {**arrays, "rng": key}
for _ in range(2):
    y, state = exported.call(params, state, jnp.ones(2))
np.savez(folder + "/out.npz", y=y, count=state["count"],
         rng=jax.random.key_data(state["rng"]))
assert not {"eqx_state", "equinox"} & set(sys.modules)
"""


@jax.debug_key_reuse(False)  # on purpose: keys are drawn from twice
def test_a_serialized_program_runs_without_this_library(tmp_path):
    pytest.importorskip("flatbuffers", reason="JAX needs it to serialize")
    apply, params, state = es.functional(net())
    exported = jax.export.export(jax.jit(apply))(params, state, X)
    (tmp_path / "model").write_bytes(exported.serialize())
    arrays = {**params, **state, "rng": jr.key_data(state["rng"])}
    np.savez(tmp_path / "arrays.npz", **arrays)
    own = ("PYTHONPATH", "JAX_DEBUG_KEY_REUSE")  # the server draws from the same keys
    environment = {k: v for k, v in os.environ.items() if k not in own}
    command = [sys.executable, "-c", SERVER, tmp_path]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    out = np.load(tmp_path / "out.npz")
    for _ in range(2):
        y, state = jax.jit(apply)(params, state, X)
    np.testing.assert_allclose(out["y"], y, rtol=1e-6)
    assert out["count"] == state["count"] == 2
    assert (out["rng"] == jr.key_data(state["rng"])).all()
