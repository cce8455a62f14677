"""The kinds of the arrays of every Equinox layer, without any declaration.

If a new version of Equinox adds a class, a test here fails until the class is listed.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqx_state as es


P, B, S = es.Parameter, es.BatchStat, es.State
AFFINE = {"weight": P, "bias": P}
GATES = {"weight_ih": P, "weight_hh": P, "bias": P}


def linear(inputs=2, outputs=3):
    return eqx.nn.Linear(inputs, outputs, key=jr.key(0))


def tied():
    pair = (eqx.nn.Embedding(4, 2, key=jr.key(0)), linear(2, 4))
    return eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def norm(mode):
    return eqx.nn.BatchNorm(3, "batch", mode=mode)


# For each class: how to create it, and the kinds of all its arrays.
KINDS = {
    "PReLU": [(eqx.nn.PReLU, {"negative_slope": P})],
    "MultiheadAttention": [
        (
            lambda: eqx.nn.MultiheadAttention(2, 4, dropout_p=0.5, key=jr.key(0)),
            {f"{name}_proj.weight": P for name in ("query", "key", "value", "output")},
        )
    ],
    "BatchNorm": [
        (
            lambda: norm("ema"),
            AFFINE
            | {"ema_first_time_index.init": B}
            | {f"ema_state_index.init[{i}]": B for i in range(2)},
        ),
        (
            lambda: norm("batch"),
            AFFINE
            | {"batch_counter.init": B}
            | {f"batch_state_index.init[{i}]": B for i in range(2)},
        ),
    ],
    "Conv": [(lambda: eqx.nn.Conv(2, 1, 1, 3, key=jr.key(0)), AFFINE)],
    "ConvTranspose": [
        (lambda: eqx.nn.ConvTranspose(2, 1, 1, 3, key=jr.key(0)), AFFINE)
    ],
    "Dropout": [(eqx.nn.Dropout, {})],
    "Embedding": [(lambda: eqx.nn.Embedding(4, 2, key=jr.key(0)), {"weight": P})],
    "RotaryPositionalEmbedding": [
        (lambda: eqx.nn.RotaryPositionalEmbedding(4), {}),
    ],
    "Identity": [(eqx.nn.Identity, {})],
    "Linear": [
        (linear, AFFINE),
        (lambda: eqx.nn.Linear(2, 3, use_bias=False, key=jr.key(0)), {"weight": P}),
    ],
    "MLP": [
        (
            lambda: eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0)),
            {f"layers[{i}].{name}": P for i in range(2) for name in AFFINE},
        )
    ],
    "GroupNorm": [(lambda: eqx.nn.GroupNorm(2, 4), AFFINE)],
    "LayerNorm": [(lambda: eqx.nn.LayerNorm(3), AFFINE)],
    "RMSNorm": [(lambda: eqx.nn.RMSNorm(3), AFFINE)],
    "AdaptivePool": [(lambda: eqx.nn.AdaptivePool(3, 2, jnp.mean), {})],
    "Pool": [(lambda: eqx.nn.Pool(0, jax.lax.add, 2, 2), {})],
    "GRUCell": [(lambda: eqx.nn.GRUCell(2, 3, key=jr.key(0)), GATES | {"bias_n": P})],
    "LSTMCell": [(lambda: eqx.nn.LSTMCell(2, 3, key=jr.key(0)), GATES)],
    "Lambda": [
        (lambda: eqx.nn.Lambda(jnp.tanh), {}),
        (lambda: eqx.nn.Lambda(linear()), {"fn.weight": P, "fn.bias": P}),
    ],
    "Sequential": [
        (
            lambda: eqx.nn.Sequential([linear(), eqx.nn.Dropout()]),
            {"layers[0].weight": P, "layers[0].bias": P},
        )
    ],
    "Shared": [(tied, {"pytree[0].weight": P, "pytree[1].bias": P})],
    "SpectralNorm": [
        (
            lambda: eqx.nn.SpectralNorm(linear(), "weight", key=jr.key(0)),
            {"layer.weight": P, "layer.bias": P}
            | {f"uv_index.init[{i}]": S for i in range(2)},
        )
    ],
    "StateIndex": [
        (lambda: eqx.nn.StateIndex(jnp.zeros(2)), {"init": S}),
        (lambda: eqx.nn.StateIndex({"key": jr.key(0)}), {"init['key']": S}),
    ],
    "WeightNorm": [
        (
            lambda: eqx.nn.WeightNorm(linear()),
            {"layer.weight": P, "layer.bias": P, "g": P},
        )
    ],
}
for n in (1, 2, 3):
    for name in (f"Conv{n}d", f"ConvTranspose{n}d"):
        layer = getattr(eqx.nn, name)
        KINDS[name] = [(lambda layer=layer: layer(1, 1, 3, key=jr.key(0)), AFFINE)]
    for name in (f"{kind}Pool{n}d" for kind in ("Max", "Avg")):
        KINDS[name] = [(ft.partial(getattr(eqx.nn, name), 2), {})]
        adaptive = f"Adaptive{name}"
        KINDS[adaptive] = [(ft.partial(getattr(eqx.nn, adaptive), 2), {})]

ABSTRACT = {"StatefulLayer"}  # cannot be instantiated
NOT_MODULES = {"State"}  # has no key paths; tested below

PUBLIC = {
    name: cls
    for name, cls in vars(eqx.nn).items()
    if isinstance(cls, type) and not name.startswith("_")
}
CASES = [(name, i) for name, cases in KINDS.items() for i in range(len(cases))]


def test_every_public_class_of_equinox_is_listed():
    assert set(PUBLIC) == KINDS.keys() | ABSTRACT | NOT_MODULES


@pytest.mark.parametrize(("name", "i"), CASES)
def test_the_kinds_of_a_layer(name, i):
    make, expected = KINDS[name][i]
    layer = make()
    assert isinstance(layer, PUBLIC[name])
    parts = es.parts(layer)
    assert {part.name: part.kind for part in parts} == expected
    arrays = [x for x in jax.tree.leaves(layer) if eqx.is_array(x)]
    assert len(parts) == len(arrays)  # each array has its own name
    shapes = eqx.filter_eval_shape(make)
    assert {part.name: part.kind for part in es.parts(shapes)} == expected


@pytest.mark.parametrize(("name", "i"), CASES)
def test_parameters_are_what_equinox_trains(name, i):
    layer = KINDS[name][i][0]()
    ours = es.filter(layer, es.trainable)
    expected = eqx.filter(eqx.nn.delete_init_state(layer), eqx.is_inexact_array)
    assert eqx.tree_equal(jax.tree.leaves(ours), jax.tree.leaves(expected))


def test_equinoxs_own_state():
    _, state = eqx.nn.make_with_state(norm)("ema")
    assert [part.kind for part in es.parts(state)] == [S] * 3
    assert not jax.tree.leaves(es.filter(state, es.trainable))
