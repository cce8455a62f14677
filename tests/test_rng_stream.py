"""Keys as state: `es.Rng`, `es.RngStream`, `es.reseed`, and when a key advances."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqx_state as es


def data(tree):
    """The raw words of each key in the tree, as tuples."""
    keys = jax.tree.leaves(es.filter(tree, es.Rng))
    typed = [jnp.issubdtype(k.dtype, jax.dtypes.prng_key) for k in keys]
    raw = [jr.key_data(k) if t else k for k, t in zip(keys, typed, strict=True)]
    return [tuple(row) for k in raw for row in k.reshape(-1, k.shape[-1]).tolist()]


MAKE = pytest.mark.parametrize("make", [jr.key, jr.PRNGKey], ids=["typed", "legacy"])


# --- `es.RngStream` -----------------------------------------------------------------


@MAKE
def test_a_stream_gives_fresh_keys_and_advances(make):
    stream, seen = es.RngStream(make(0)), []
    assert [part.kind for part in es.parts(stream)] == [es.Rng]
    for _ in range(4):
        key, stream = es.mutable(stream)()
        seen += [key, stream.key]
    assert len({tuple(d) for k in seen for d in data({"k": es.RngStream(k)})}) == 8
    assert key.dtype == make(0).dtype
    assert key.shape == make(0).shape


@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_a_stream_advances_in_either_mode():
    stream = es.RngStream(jr.key(0))
    key, new = es.mutable(stream.eval())()
    expected, _ = es.mutable(stream)()
    assert key == expected
    assert new.key != stream.key


# --- `es.reseed` --------------------------------------------------------------------


class Net(es.Module):
    rng: es.Rng
    dropout: es.nn.Dropout
    layers: list
    weight: es.Parameter = 1.0
    count: es.State = 0
    name: str = "net"


def net(make=jr.key, extra=0):
    dropouts = [es.nn.Dropout(key=make(0)) for _ in range(2 + extra)]
    return Net(make(0), dropouts[0], dropouts[1:])


@MAKE
def test_reseed_gives_every_key_a_new_distinct_one(make):
    model = net(make)
    assert len(set(data(model))) == 1
    new = es.reseed(model, jr.key(1))
    assert len(set(data(new))) == 3
    assert not set(data(new)) & set(data(model))
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert new.rng.dtype == model.rng.dtype
    assert new.rng.shape == model.rng.shape
    others = es.not_(es.Rng)
    assert eqx.tree_equal(es.filter(new, others), es.filter(model, others))
    assert len(set(data(model))) == 1


def test_reseed_gives_the_same_keys_everywhere():
    new = es.reseed({"a": jr.key(0), "b": jr.split(jr.key(1), 2)}, 7)
    assert data(new) == [
        (2643255193, 1512653493),
        (41186234, 3292627797),
        (3324119682, 3990394024),
    ]


def test_reseed_of_stacked_keys():
    stack = {"a": jr.split(jr.key(0), 3), "b": jr.split(jr.key(0), (2, 2))}
    new = es.reseed(stack, 0)
    assert jax.tree.map(jnp.shape, new) == {"a": (3,), "b": (2, 2)}
    assert len(set(data(new))) == 7


def test_reseed_of_different_implementations():
    stack = {"a": jr.key(0, impl="rbg"), "b": jr.key(0)}
    new = es.reseed(stack, 0)
    assert jax.tree.map(lambda k: k.dtype, new) == jax.tree.map(
        lambda k: k.dtype, stack
    )
    assert (new["a"] != stack["a"]).all()


def test_a_legacy_key_of_a_different_implementation():
    with jax.default_prng_impl("rbg"):
        key, layer = jr.PRNGKey(0), es.lazy(eqx.nn.Linear, 3, 2)
        assert key.shape == (4,)
        legacy = es.init([layer], key)
        typed = es.init([layer], jr.wrap_key_data(key))
    assert eqx.tree_equal(legacy, typed)


# --- `Dropout` ----------------------------------------------------------------------


@jax.debug_key_reuse(False)  # on purpose: one key is drawn from twice
def test_dropout_draws_only_in_train_mode():
    dropout, x = es.nn.Dropout(0.5, key=jr.PRNGKey(0)), jnp.ones(100)
    y, new = es.mutable(dropout)(x)
    assert set(y.tolist()) == {0.0, 2.0}
    assert (new.rng != dropout.rng).any()
    y, new = es.mutable(dropout.eval())(x)
    assert (y == x).all()
    assert (new.rng == dropout.rng).all()
    assert (dropout.eval()(x) == x).all()  # no scope is needed
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Dropout\.rng"):
        dropout(x)


# --- JAX's check that no key is used twice ------------------------------------------


def vmap_without_a_draw_and_then_draw(model, x):
    def f(m):
        es.vmap(lambda x: x if m.training else m(x))(x)
        return m(x)

    es.mutable(f)(model)


def train_jitted(model, x):
    for _ in range(3):
        _, model = eqx.filter_jit(es.mutable(es.vmap(model)))(x)


def train_after_reseed(model, x):
    es.mutable(es.reseed(model, 1))(x)


@pytest.mark.parametrize(
    "run", [vmap_without_a_draw_and_then_draw, train_jitted, train_after_reseed]
)
def test_no_key_is_used_twice(run):
    with jax.debug_key_reuse(True):
        run(es.nn.Dropout(0.5, key=jr.key(0)), jnp.ones(3))
