"""The kinds of the arrays of every Equinox layer, without any declaration.

If a new version of Equinox adds a class, a test here fails until the class is listed.
"""

import functools as ft
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqx_state as es


def linear(inputs=2, outputs=3):
    return eqx.nn.Linear(inputs, outputs, key=jr.key(0))


def tied():
    pair = (eqx.nn.Embedding(4, 2, key=jr.key(0)), linear(2, 4))
    return eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def norm(mode="ema"):
    return eqx.nn.BatchNorm(3, "batch", mode=mode)


# For each class: how to create it, in several ways if its arrays differ.
MAKERS = {
    "PReLU": [eqx.nn.PReLU],
    "MultiheadAttention": [
        lambda: eqx.nn.MultiheadAttention(2, 4, dropout_p=0.5, key=jr.key(0))
    ],
    "BatchNorm": [norm, lambda: norm("batch")],
    "Conv": [lambda: eqx.nn.Conv(2, 1, 1, 3, key=jr.key(0))],
    "ConvTranspose": [lambda: eqx.nn.ConvTranspose(2, 1, 1, 3, key=jr.key(0))],
    "Dropout": [eqx.nn.Dropout],
    "Embedding": [lambda: eqx.nn.Embedding(4, 2, key=jr.key(0))],
    "RotaryPositionalEmbedding": [lambda: eqx.nn.RotaryPositionalEmbedding(4)],
    "Identity": [eqx.nn.Identity],
    "Linear": [linear, lambda: eqx.nn.Linear(2, 3, use_bias=False, key=jr.key(0))],
    "MLP": [lambda: eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0))],
    "GroupNorm": [lambda: eqx.nn.GroupNorm(2, 4)],
    "LayerNorm": [lambda: eqx.nn.LayerNorm(3)],
    "RMSNorm": [lambda: eqx.nn.RMSNorm(3)],
    "AdaptivePool": [lambda: eqx.nn.AdaptivePool(3, 2, jnp.mean)],
    "Pool": [lambda: eqx.nn.Pool(0, jax.lax.add, 2, 2)],
    "GRUCell": [lambda: eqx.nn.GRUCell(2, 3, key=jr.key(0))],
    "LSTMCell": [lambda: eqx.nn.LSTMCell(2, 3, key=jr.key(0))],
    "Lambda": [lambda: eqx.nn.Lambda(jnp.tanh), lambda: eqx.nn.Lambda(linear())],
    "Sequential": [lambda: eqx.nn.Sequential([linear(), eqx.nn.Dropout()])],
    "Shared": [tied],
    "SpectralNorm": [lambda: eqx.nn.SpectralNorm(linear(), "weight", key=jr.key(0))],
    "StateIndex": [
        lambda: eqx.nn.StateIndex(jnp.zeros(2)),
        lambda: eqx.nn.StateIndex({"key": jr.key(0)}),
    ],
    "WeightNorm": [lambda: eqx.nn.WeightNorm(linear())],
}
for n in (1, 2, 3):
    for name in (f"Conv{n}d", f"ConvTranspose{n}d"):
        layer = getattr(eqx.nn, name)
        MAKERS[name] = [lambda layer=layer: layer(1, 1, 3, key=jr.key(0))]
    for name in (f"{kind}Pool{n}d" for kind in ("Max", "Avg")):
        MAKERS[name] = [ft.partial(getattr(eqx.nn, name), 2)]
        MAKERS[f"Adaptive{name}"] = [ft.partial(getattr(eqx.nn, f"Adaptive{name}"), 2)]

ABSTRACT = {"StatefulLayer"}  # cannot be instantiated
NOT_MODULES = {"State"}  # has no key paths; tested below

PUBLIC = {
    name: cls
    for name, cls in vars(eqx.nn).items()
    if isinstance(cls, type) and not name.startswith("_")
}
CASES = [(name, i) for name, makers in MAKERS.items() for i in range(len(makers))]


def test_every_public_class_of_equinox_is_listed():
    assert set(PUBLIC) == MAKERS.keys() | ABSTRACT | NOT_MODULES


@pytest.mark.parametrize(("name", "i"), CASES)
def test_the_kinds_of_a_layer(name, i):
    make = MAKERS[name][i]
    layer = make()
    assert isinstance(layer, PUBLIC[name])
    parts = es.parts(layer)
    arrays = [x for x in jax.tree.leaves(layer) if eqx.is_array(x)]
    assert len({part.name for part in parts}) == len(arrays)
    # State is the initial value of an `eqx.nn.StateIndex`; the rest are parameters.
    state = es.BatchStat if name == "BatchNorm" else es.State
    for part in parts:
        is_initial = "init" in re.split(r"\W", part.name)
        assert part.kind is (state if is_initial else es.Parameter)
    trained = eqx.filter(eqx.nn.delete_init_state(layer), eqx.is_inexact_array)
    ours = es.filter(layer, es.trainable)
    assert eqx.tree_equal(jax.tree.leaves(ours), jax.tree.leaves(trained))
    shapes = es.parts(eqx.filter_eval_shape(make))
    assert [(x.name, x.kind) for x in shapes] == [(x.name, x.kind) for x in parts]


def test_equinoxs_own_state():
    _, state = eqx.nn.make_with_state(norm)()
    assert [part.kind for part in es.parts(state)] == [es.State] * 3
    assert not jax.tree.leaves(es.filter(state, es.trainable))
