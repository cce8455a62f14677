"""Models and optimizers can be stored in Equinox's own files, and with Orbax.

Neither saves values that are not arrays, such as functions. Equinox does not save typed
keys, so these tests save their key data. The guide *Checkpoints* saves the arrays of a
model with Orbax.
"""

import io

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


class Net(es.Module):
    """Arrays with several kinds and without, and a value that is not an array."""

    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    table: es.Buffer
    index: jax.Array
    act: object

    def __init__(self, key):
        a, b, c, d, e = jr.split(key, 5)
        self.linear = eqx.nn.Linear(2, 2, key=a)
        self.norm = es.nn.BatchNorm(2).replace(mean=jr.normal(b, (2,)))
        self.dropout = es.nn.Dropout(0.5, key=c)
        self.table = jr.normal(d, (3,), jnp.bfloat16)
        self.index = jr.permutation(e, 4)
        self.act = jnp.tanh


ADAM = optax.adam(1e-2)


def trained(seed):
    """A model and its optimizer."""
    model = Net(jr.key(seed))
    optimizer = es.Optimizer(ADAM).init(model)
    return model, es.map(lambda x: x + 1, optimizer, on=es.OptState)


# --- Equinox --------------------------------------------------------------------------


def is_typed(x):
    return eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def write(file, x):
    eqx.default_serialise_filter_spec(file, jr.key_data(x) if is_typed(x) else x)


def read(file, x):
    if not is_typed(x):
        return eqx.default_deserialise_filter_spec(file, x)
    return jr.wrap_key_data(jnp.load(file), impl=jr.key_impl(x))


@pytest.mark.parametrize("name", CASES)
def test_every_model_through_a_file_of_equinox(name):
    model, other = CASES[name].model(), CASES[name].make(key=jr.key(8))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model, write)
    file.seek(0)
    with untouched(other):
        loaded = eqx.tree_deserialise_leaves(file, other, read)
    expected = es.load_state_dict(other, es.state_dict(model))
    assert eqx.tree_equal(loaded, expected)


def test_a_file_of_equinox_without_the_keys_into_an_abstract_tree(tmp_path):
    tree, like = trained(0), trained(1)
    saved, _ = es.partition(tree, es.not_(es.Rng))
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", saved)
    holes = eqx.filter_eval_shape(lambda: es.filter(like, es.not_(es.Rng)))
    loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", holes)
    assert eqx.tree_equal(es.update(like, loaded), es.update(like, saved))


# --- Orbax ----------------------------------------------------------------------------


@pytest.fixture
def through_orbax(tmp_path):
    """Save and restore the state dict, so that only arrays are saved."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax needs a newer JAX")

    def through(tree, like):
        arrays = es.state_dict(like)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "1", es.state_dict(tree))
            checkpointer.wait_until_finished()
            return es.load_state_dict(
                like, checkpointer.restore(tmp_path / "1", arrays)
            )

    return through


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_model_and_its_optimizer_through_orbax(is_abstract, through_orbax):
    tree, like = trained(0), trained(1)
    like = eqx.filter_eval_shape(lambda: like) if is_abstract else like
    with untouched(tree), untouched(like):
        assert eqx.tree_equal(through_orbax(tree, like), tree)


def test_orbax_keeps_arrays_spread_over_devices(through_orbax):
    mesh = Mesh(jax.devices(), "devices")
    rows, whole = NamedSharding(mesh, P("devices")), NamedSharding(mesh, P())
    tree = [jnp.arange(16.0).reshape(8, 2), es.nn.Dropout(key=0)]
    tree = eqx.filter_shard(tree, es.spec(tree, {es.Parameter: rows, ...: whole}))
    loaded = through_orbax(tree, tree)
    assert eqx.tree_equal(loaded, tree)
    assert loaded[0].sharding == rows
