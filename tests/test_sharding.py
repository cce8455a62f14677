"""Models, optimizers and keys on several devices, and in several processes.

`es.spec` returns shardings by kind, which JAX's own functions accept. For every layout,
training equals training on one device.
"""

import functools as ft

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest
import sharded_training
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from processes import run_two
from sharded_training import (
    data_parallel,
    in_one_piece,
    LAYOUTS,
    Net,
    put_rows,
    start,
    train,
)

import eqx_state as es


# Bytes of the parameters with adam's two moments, and bytes of its step count.
MOMENTS, COUNT = 3 * 4 * (16 * 32 + 2 * 32 + 32 * 8 + 8), 4
WHOLE, SPLIT = MOMENTS + COUNT, MOMENTS // 8 + COUNT
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="session")
def mesh():
    assert jax.device_count() == 8
    return Mesh(jax.devices(), "devices")


@ft.cache
def trained_on_one_device(whole_batch=False):
    one = Mesh(jax.devices()[:1], "devices")
    trained = start(data_parallel, one, whole_batch)
    return in_one_piece(train(trained, data_parallel, one), one)


def assert_close(arrays, expected):
    assert arrays.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(arrays[name], x, rtol=0, atol=1e-5, err_msg=name)


# --- Shardings by kind ----------------------------------------------------------------


def split_parameters(tree, mesh):
    split, whole = NamedSharding(mesh, P("devices")), NamedSharding(mesh, P())
    return es.spec(tree, {es.Parameter: split, ...: whole})


PLACE = {
    "filter_shard": eqx.filter_shard,
    "with_sharding_constraint": lambda model, shardings: jax.jit(
        lambda model: jax.lax.with_sharding_constraint(model, shardings)
    )(model),
    "out_shardings": lambda model, shardings: jax.jit(
        lambda model: model, out_shardings=shardings
    )(model),
}


def assert_split_by_kind(model):
    for part in es.parts(model):
        is_whole = part.value.sharding.is_fully_replicated
        assert is_whole is not issubclass(part.kind, es.Parameter), part.name


@pytest.mark.parametrize("place", PLACE)
def test_jax_and_equinox_accept_shardings_by_kind(place, mesh):
    model = Net(False, key=jr.key(0))
    placed = PLACE[place](model, split_parameters(model, mesh))
    assert_split_by_kind(placed)
    before, after = (in_one_piece(m, mesh) for m in (model, placed))
    assert_close(after, before)


# --- Training -------------------------------------------------------------------------


@jax.numpy_dtype_promotion("standard")  # for `optax.adam`
@pytest.mark.parametrize(("layout", "whole_batch"), [("data", False), ("full", True)])
def test_training_equals_that_on_one_device(layout, whole_batch, mesh):
    layout = LAYOUTS[layout]
    results = train(start(layout, mesh, whole_batch), layout, mesh)
    model = results[1]
    assert (model.norm.mean != 0).all()
    assert model.norm.mean.sharding.is_fully_replicated
    assert model.dropout.rng.sharding.is_fully_replicated
    assert_close(in_one_piece(results, mesh), trained_on_one_device(whole_batch))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="JAX < 0.10 cannot draw from keys whose type says how they are split",
)
@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="JAX 0.12 cannot take the `pmean` of lanes that are split over devices",
)
@jax.numpy_dtype_promotion("standard")
def test_training_where_the_types_of_arrays_say_how_they_are_split():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((8,), ("devices",), axis_types=explicit)
    results = train(start(data_parallel, mesh), data_parallel, mesh)
    assert_close(in_one_piece(results, mesh), trained_on_one_device())


def test_dropout_draws_the_same_masks_from_keys_on_all_devices(mesh):
    dropout = es.nn.Dropout(0.5, key=jr.key(0))
    xs = np.ones((64, 16), "f4")
    expected, after = es.mutable(es.vmap(dropout))(xs)
    replicated = eqx.filter_shard(dropout, NamedSharding(mesh, P()))
    ys, new = eqx.filter_jit(es.mutable(es.vmap(replicated)))(put_rows(xs, mesh))
    assert (ys == expected).all()
    assert new.rng == after.rng
    assert len(ys.sharding.device_set) == 8


# --- `jax.shard_map` ------------------------------------------------------------------


# --- Two processes --------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    """A function that returns what a process saved for a layout."""
    folder = tmp_path_factory.mktemp("two_processes")
    run_two(sharded_training.__file__, folder)
    return lambda layout, process: dict(np.load(folder / f"{layout}-{process}.npz"))


@jax.numpy_dtype_promotion("standard")
@each_layout
def test_two_processes_equal_one_device(layout, of_two_processes):
    results = [of_two_processes(layout, process) for process in "01"]
    sizes = [(r.pop("before").tolist(), r.pop("after").tolist()) for r in results]
    each = {"data": WHOLE, "full": SPLIT}[layout]
    assert sizes == [([each] * 4, [each] * 4)] * 2
    for arrays in results:
        assert_close(arrays, trained_on_one_device())
    assert eqx.tree_equal(*results)
