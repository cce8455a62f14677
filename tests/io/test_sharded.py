"""`es.load` loads arrays into shards, and reads only the parts that it needs."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import safetensors
import sharded_loading
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)
from processes import run_two
from sharded_loading import (
    abstract,
    are_shards_of,
    count_reads,
    DEPTH,
    EMBED,
    held,
    make,
    MLP,
    Read,
    run,
)

import eqx_state as es


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def read(monkeypatch):
    """Returns the number of bytes that were read from files so far."""
    monkeypatch.setattr(np, "memmap", np.memmap)
    monkeypatch.setattr(safetensors, "safe_open", safetensors.safe_open)
    monkeypatch.setattr(Read, "size", 0)
    count_reads()
    return lambda: Read.size


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.reshape(jax.devices(), (2, 4)), ("a", "b"))


def struct(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def size(tree):
    return sum(sharded_loading.data_of(x).nbytes for x in jax.tree.leaves(tree))


# --- One process ----------------------------------------------------------------------

ARRAYS = {
    "float": jnp.arange(64.0).reshape(8, 8),
    "bfloat16": jnp.arange(64.0).reshape(8, 8).astype(jnp.bfloat16),
    "float8": jnp.arange(64.0).reshape(8, 8).astype(jnp.float8_e4m3fn),
    "keys": jr.split(jr.key(0), (8, 8)),
    "rbg": jr.split(jr.key(0, impl="rbg"), (8, 8)),
    "bool": jnp.arange(64).reshape(8, 8) % 3 == 0,
    "empty": jnp.zeros((8, 0)),
}
SPECS = [P(), P("a"), P("b", "a"), P(None, ("b", "a"))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_array_has_the_sharding_of_like(spec, mesh, path, read):
    place = NamedSharding(mesh, spec)
    es.save(path, ARRAYS)
    like = jax.tree.map(lambda x: struct(x, place), ARRAYS)
    if spec == P("b", "a"):  # `like` need not be abstract
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if x.size else x, ARRAYS)
        like = jax.device_put(zeros, place)
    loaded = es.load(path, like)
    # Each part is read once, however many devices store it.
    assert read() == size(ARRAYS)
    for name, x in loaded.items():
        assert x.sharding.is_equivalent_to(place, x.ndim), name
        assert x.dtype == ARRAYS[name].dtype
        assert are_shards_of(x, ARRAYS[name])


def test_a_single_device_and_no_device(path):
    es.save(path, {"a": jnp.ones(2), "b": jnp.ones(2), "c": np.ones(2), "k": jr.key(0)})
    last = SingleDeviceSharding(jax.devices()[-1])
    like = {
        "a": struct(jnp.zeros(2), last),
        "b": jnp.zeros(2),
        "c": np.zeros(2),
        "k": struct(jr.key(1), last),
    }
    loaded = es.load(path, like)
    assert loaded["a"].sharding == loaded["k"].sharding == last
    assert not loaded["b"].committed
    assert type(loaded["c"]) is np.ndarray
    assert loaded["k"] == jr.key(0)


def test_an_abstract_mesh_uses_the_mesh_of_the_context(mesh, path):
    x = jnp.arange(8.0)
    es.save(path, x)
    like = struct(x, NamedSharding(mesh.abstract_mesh, P("b")))
    with jax.set_mesh(mesh):
        loaded = es.load(path, like)
    assert loaded.sharding.is_equivalent_to(NamedSharding(mesh, P("b")), 1)
    assert are_shards_of(loaded, x)


def test_an_abstract_mesh_without_a_mesh_in_the_context_is_an_error(mesh, path, read):
    es.save(path, {"x": jnp.arange(8.0)})
    like = {"x": struct(jnp.zeros(8), NamedSharding(mesh.abstract_mesh, P("b")))}
    with pytest.raises(ValueError, match=r"array `\['x'\]`"):
        es.load(path, like)
    with pytest.raises(ValueError, match=r"array `\['x'\]`"):
        es.load_state_dict(like, {"['x']": jnp.zeros(8)})
    assert read() == 0
    # An empty mesh does not name devices.
    empty = jax.sharding.get_abstract_mesh()
    like = {"x": struct(jnp.zeros(8), NamedSharding(empty, P()))}
    assert es.load(path, like)["x"].tolist() == list(range(8))


# No such axis; an axis that does not divide the size.
@pytest.mark.parametrize("name", ["z", "b"])
def test_a_mesh_in_the_context_that_does_not_fit(name, mesh, path):
    x = {"blocks": es.nn.Stacked([{"x": jnp.arange(4.0)}] * 2)}
    es.save(path, x)
    place = NamedSharding(mesh.abstract_mesh, P(None, "b"))
    like = jax.tree.map(lambda x: struct(x, place), x)
    other = jax.make_mesh((8,), (name,), axis_types=(AxisType.Auto,))
    # Added to the error of JAX.
    message = r"about the array `\['blocks'\]\.layers\['x'\]`"
    with jax.set_mesh(other), pytest.raises(ValueError, match=message):
        es.load(path, like)


def test_a_mesh_whose_axes_are_in_the_types(path):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    x = jnp.arange(16.0).reshape(2, 8)
    es.save(path, x)
    loaded = es.load(path, struct(x, NamedSharding(mesh, P(None, "a"))))
    assert jax.typeof(loaded).sharding.spec == P(None, "a")
    assert are_shards_of(loaded, x)


def test_only_selected_arrays_are_read_and_nothing_if_there_is_an_error(path, read):
    es.save(path, [jnp.ones(3), jnp.ones(2), jr.key(0)])
    with pytest.raises(ValueError, match="does not fit"):
        es.load(path, [jnp.ones(3), jnp.ones(3), jr.key(0)])
    assert read() == 0
    es.load(path, [jnp.ones(3), jnp.ones(3), jr.key(0)], es.not_(es.Parameter))
    assert read() == size(jr.key(0))


def test_in_a_trace(mesh, path):
    es.save(path, jnp.arange(8.0))
    like = struct(jnp.zeros(8), NamedSharding(mesh, P("a")))
    assert jax.jit(lambda: es.load(path, like) * 2)()[3] == 6.0


def test_a_file_that_is_replaced_while_it_is_loaded(path, monkeypatch):
    """The loaded arrays are those of the file that was opened."""
    safe_open = safetensors.safe_open

    def open_and_replace(*args, **kwargs):
        opened = safe_open(*args, **kwargs)
        new = {"b": jnp.ones(3), "a": jnp.ones(2, jnp.float8_e5m2)}
        es.save(path, new, metadata={"longer": "header"})
        return opened

    tree = {"a": jnp.zeros(2, jnp.float8_e5m2), "b": jnp.zeros(3)}
    es.save(path, tree)
    monkeypatch.setattr(safetensors, "safe_open", open_and_replace)
    assert eqx.tree_equal(es.load(path, jax.tree.map(jnp.ones_like, tree)), tree)


def test_a_stack_in_shards_from_a_list_of_layers(path, read):
    mesh = Mesh(np.reshape(jax.devices()[:6], (3, 2)), ("stage", "model"))
    model = make()
    es.save(path, {"blocks": list(model["blocks"])})
    for along_stack in (None, "stage"):
        places = {"up": P(along_stack, "model"), "down": P(along_stack, None, "model")}
        shapes = eqx.filter_eval_shape(make)
        shardings = es.spec(
            shapes,
            {
                es.path_matches(f"*.{k}"): NamedSharding(mesh, p)
                for k, p in places.items()
            }
            | {...: NamedSharding(mesh, P())},
        )
        loaded = es.load(path, jax.tree.map(struct, shapes, shardings))
        assert are_shards_of(loaded, model)
        assert loaded["blocks"].layers.up.sharding.spec == places["up"]
    assert read() == 2 * size(model)


def test_cast_converts_the_parts_that_are_read(mesh, path, read):
    layers = [{"w": jnp.full((8, 3), i, jnp.float32)} for i in range(4)]
    tree = {"blocks": layers, "b": jnp.ones(8)}
    es.save(path, tree)
    stack = {"blocks": es.nn.Stacked(layers), "b": tree["b"]}
    place = NamedSharding(mesh, P("b"))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), stack)
    loaded = es.load(path, jax.tree.map(lambda x: struct(x, place), half), cast=True)
    assert read() == size(tree)
    assert are_shards_of(loaded, half)
    layers[3]["w"] = layers[3]["w"].at[7, 2].set(3.4e38)
    es.save(path, tree)
    text = r"too large:\n    \['blocks'\]\[3\]\['w'\]: float32 does not fit into bf"
    with pytest.raises(ValueError, match=text):
        es.load(path, half, cast=True)


# --- Two processes --------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The results of two processes that load one file and compute together."""
    folder = tmp_path_factory.mktemp("two")
    es.save(folder / "model.safetensors", make())
    run_two(sharded_loading.__file__, folder / "model.safetensors", folder)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


def test_each_process_reads_only_the_arrays_that_it_stores(seen):
    split = DEPTH * (4 * 2 * MLP * EMBED + 2 * MLP)
    everywhere = DEPTH * (2 * 4 + 4)
    for of_process in seen:
        assert of_process["read"] == of_process["held"] == split // 2 + everywhere
        assert of_process["shards"]


def test_the_processes_compute_and_save_by_orbax(seen):
    y, _ = run(make())
    for of_process in seen:
        np.testing.assert_allclose(of_process["y"], y, rtol=1e-5, atol=1e-5)
        error = of_process["error"]
        assert "['blocks'].layers.up: it is split over several" in error
        assert "Orbax" in error
        assert ".rng" not in error
        assert of_process.get("restored", True)  # without Orbax, there is no result


def test_the_abstract_model_contains_shardings():
    like = abstract(Mesh(jax.devices(), "model"))["blocks"].layers
    assert like.up.sharding.spec == P(None, "model", None)
    assert like.gate.dtype == jnp.bfloat16
    assert held(jnp.ones(3)) == 12
