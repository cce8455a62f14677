"""Models and optimizers go through Equinox's own files, and through Orbax.

Neither saves what is not an array, such as a function. Equinox saves no typed keys:
they go as their key data.
"""

import io
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import untouched
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from zoo import CASES

import eqx_state as es


class Memory(es.State):
    """A kind of one's own."""


class Net(es.Module):
    """An array of every kind and of none, Equinox's layers, and other leaves."""

    layers: list
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    table: es.Buffer
    memory: Memory
    index: jax.Array
    act: object
    name: str

    def __init__(self, key):
        a, b, c, d, e, f, g = jr.split(key, 7)
        self.layers = [eqx.nn.Linear(2, 2, key=k) for k in (a, b)]
        self.norm = es.nn.BatchNorm(2).replace(mean=jr.normal(c, (2,)))
        self.dropout = es.nn.Dropout(0.5, key=d)
        self.table = jr.normal(e, (3,), jnp.bfloat16)
        self.memory = {"last": jr.normal(f, (2,)), "size": jnp.array(3)}
        self.index = jr.permutation(g, 4)
        self.act, self.name = jnp.tanh, "net"


ADAM = optax.adam(1e-2)


def trained(seed):
    """A model and its optimizer."""
    model = Net(jr.key(seed))
    optimizer = es.Optimizer(ADAM).init(model)
    moments = es.map(lambda x: x + 1, optimizer, on=es.OptState)
    return model, moments


# --- Equinox --------------------------------------------------------------------------


def is_typed(x):
    return eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def write(file, x):
    eqx.default_serialise_filter_spec(file, jr.key_data(x) if is_typed(x) else x)


def read(file, x):
    if not is_typed(x):
        return eqx.default_deserialise_filter_spec(file, x)
    return jr.wrap_key_data(jnp.load(file), impl=jr.key_impl(x))


def through_equinox(tree, like):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree, write)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like, read)


@pytest.mark.parametrize("name", CASES)
def test_every_model_through_a_file_of_equinox(name):
    model, other = CASES[name].model(), CASES[name].make(key=jr.key(8))
    with untouched(other):
        loaded = through_equinox(model, other)
    expected = es.load_state_dict(other, es.state_dict(model))
    assert eqx.tree_equal(loaded, expected)


def test_a_model_and_its_optimizer_through_a_file_of_equinox(tmp_path):
    tree = trained(0)
    assert eqx.tree_equal(through_equinox(tree, trained(1)), tree)


def key_data(tree):
    """The tree with legacy keys in place of typed ones."""
    return es.map(jr.key_data, tree, on=lambda part: is_typed(part.value))


def typed(tree, like):
    return es.map(
        lambda new, old: jr.wrap_key_data(new, impl=jr.key_impl(old)),
        tree,
        like,
        on=es.Rng,
    )


def test_a_file_of_equinox_into_an_abstract_tree(tmp_path):
    tree = trained(0)
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", key_data(tree))
    abstract = eqx.filter_eval_shape(lambda: key_data(trained(1)))
    loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", abstract)
    assert eqx.tree_equal(loaded, key_data(tree))


def test_a_file_of_equinox_without_the_keys(tmp_path):
    tree, like = trained(0), trained(1)
    saved, _ = es.partition(tree, es.not_(es.Rng))
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", saved)
    holes = eqx.filter_eval_shape(lambda: es.filter(like, es.not_(es.Rng)))
    loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", holes)
    assert eqx.tree_equal(es.update(like, loaded), es.update(like, saved))


# --- Orbax ----------------------------------------------------------------------------


@pytest.fixture
def ocp():
    return pytest.importorskip("orbax.checkpoint", reason="Orbax needs a newer JAX")


@pytest.fixture
def checkpointer(ocp):
    with ocp.StandardCheckpointer() as checkpointer:
        yield checkpointer


def through_orbax(checkpointer, folder, tree, like):
    """By name, so that only arrays are saved."""
    checkpointer.save(folder, es.state_dict(tree))
    checkpointer.wait_until_finished()
    return es.load_state_dict(like, checkpointer.restore(folder, es.state_dict(like)))


def test_a_model_and_its_optimizer_through_orbax(checkpointer, tmp_path):
    tree, like = trained(0), trained(1)
    with untouched(tree), untouched(like):
        loaded = through_orbax(checkpointer, tmp_path / "1", tree, like)
    assert eqx.tree_equal(loaded, tree)


def test_orbax_into_an_abstract_tree(checkpointer, tmp_path):
    tree = trained(0)
    like = eqx.filter_eval_shape(lambda: trained(1))
    loaded = through_orbax(checkpointer, tmp_path / "1", tree, like)
    assert eqx.tree_equal(loaded, tree)


def test_orbax_keeps_arrays_spread_over_devices(checkpointer, tmp_path):
    mesh = Mesh(jax.devices(), "devices")
    rows, whole = NamedSharding(mesh, P("devices")), NamedSharding(mesh, P())
    tree = [jnp.arange(16.0).reshape(8, 2), es.nn.Dropout(key=0)]
    shardings = es.spec(tree, {es.Parameter: rows, ...: whole})
    tree = eqx.filter_shard(tree, shardings)
    like = jax.tree.map(lambda x: x, tree)
    loaded = through_orbax(checkpointer, tmp_path / "1", tree, like)
    assert eqx.tree_equal(loaded, tree)
    assert loaded[0].sharding == rows


def test_the_arrays_of_a_model_through_orbax_as_a_pytree(checkpointer, tmp_path):
    tree, like = trained(0), trained(1)
    arrays, _ = eqx.partition(tree, eqx.is_array)
    checkpointer.save(tmp_path / "1", arrays)
    checkpointer.wait_until_finished()
    loaded = checkpointer.restore(tmp_path / "1", eqx.filter(like, eqx.is_array))
    assert eqx.tree_equal(es.update(like, loaded), tree)


def test_a_pytree_checkpointer_of_orbax(ocp, tmp_path):
    tree, like = trained(0), trained(1)
    target = es.state_dict(like)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", es.state_dict(tree))
        where = ocp.checkpoint_utils.construct_restore_args(target)
        arrays = checkpointer.restore(tmp_path / "1", item=target, restore_args=where)
    assert eqx.tree_equal(es.load_state_dict(like, arrays), tree)


# --- Python ---------------------------------------------------------------------------


def test_a_dictionary_of_arrays_through_pickle():
    tree, like = trained(0), trained(1)
    arrays = es.state_dict(key_data(tree))
    pickled = pickle.loads(pickle.dumps(jax.device_get(arrays)))
    loaded = es.load_state_dict(key_data(like), pickled)
    assert eqx.tree_equal(typed(loaded, like), tree)
