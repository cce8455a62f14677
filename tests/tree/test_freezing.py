"""Fine-tuning with a frozen backbone, in each of three ways, and unfreezing it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import untouched

import eqx_state as es


# `optax.adamw` promotes implicitly: `float ** int`.
standard = jax.numpy_dtype_promotion("standard")


class Block(es.Module):
    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout

    def __init__(self, n_in: int, n_out: int, key):
        a, b = jr.split(key)
        self.linear = eqx.nn.Linear(n_in, n_out, key=a)
        self.norm = es.nn.BatchNorm(n_out, axis_name="batch", momentum=0.5)
        self.dropout = es.nn.Dropout(0.25, key=b)

    def __call__(self, x, *, key=None):
        return self.dropout(jnp.tanh(self.norm(self.linear(x))))


class Net(es.Module):
    backbone: Any
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(self.backbone(x))


class OnConstant(es.Module):
    backbone: es.Buffer[Any]
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(self.backbone(x))


NOT_THE_BACKBONE = es.all_of(es.trainable, es.not_(es.under(lambda m: m.backbone)))

XS = jr.normal(jr.key(10), (6, 3))
YS = jr.normal(jr.key(11), (6, 2))


def block():
    """A block that has seen data, so that its statistics are not the initial ones."""
    return es.mutable(es.vmap(Block(3, 4, jr.key(0)), axis_name="batch"))(2 * XS)[1]


def head():
    return eqx.nn.Linear(4, 2, key=jr.key(1))


WAYS = {
    "freeze": (lambda: Net(block(), head()).freeze(lambda m: m.backbone), es.trainable),
    "buffer": (lambda: OnConstant(block().eval(), head()), es.trainable),
    "wrt": (lambda: Net(block().eval(), head()), NOT_THE_BACKBONE),
}


def loss_fn(model, xs, ys):
    return jnp.mean((es.vmap(model, axis_name="batch")(xs) - ys) ** 2)


def fit(model, wrt=es.trainable):
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model, optimizer):
        (_, model), grads = es.value_and_grad(loss_fn, wrt=wrt)(model, XS, YS)
        model, optimizer = optimizer.update(grads, model)
        return model, optimizer, grads

    optimizer = es.Optimizer(ADAMW, wrt=wrt).init(model)
    for _ in range(2):
        model, optimizer, grads = step(model, optimizer)
    return model, optimizer, grads


def names(tree):
    return [part.name for part in es.parts(tree)]


def moved(before, after):
    """The names of the arrays that differ in a bit, except for keys."""
    pairs = zip(es.parts(before), es.parts(after), strict=True)
    return {a.name for a, b in pairs if not eqx.tree_equal(a.value, b.value)} - {
        part.name for part in es.parts(after) if part.name.endswith("rng")
    }


def memory(tree):
    leaves = jax.tree.leaves(tree)
    return len(leaves), sum(leaf.nbytes for leaf in leaves)


ADAMW = optax.adamw(0.1, weight_decay=0.3)
HEAD = {"head.weight", "head.bias"}
STATISTICS = {f"backbone.norm.{name}" for name in ("mean", "var", "count")}
BACKBONE = STATISTICS | {
    f"backbone.{layer}.{name}"
    for layer in ("linear", "norm")
    for name in ("weight", "bias")
}


@standard
@pytest.mark.parametrize("way", WAYS)
def test_only_the_head_moves(way):
    make, wrt = WAYS[way]
    model = make()
    with untouched(model):
        new, optimizer, grads = fit(model, wrt)
    assert moved(model, new) == HEAD
    assert set(names(grads)) == HEAD
    assert jax.tree.leaves(grads.backbone) == []  # `None`, not zeros
    assert jax.tree.structure(new) == jax.tree.structure(model)
    # The head has 10 numbers. Adam stores two moments of each, and a step count.
    assert memory(optimizer.opt_state) == (5, 4 * (2 * 10 + 1))
    if way != "freeze":
        return
    new, unfrozen, grads = fit(model.unfreeze())
    assert moved(model, new) == HEAD | BACKBONE
    assert set(names(grads)) == HEAD | BACKBONE - STATISTICS
    with pytest.raises(ValueError, match=r"(?s)`backbone\.linear\..*\.refit"):
        optimizer.update(grads, model.unfreeze())


def test_plain_layers_are_frozen_by_their_nearest_es_module():
    layers = [eqx.nn.Linear(3, 4, key=jr.key(0)), block().norm, es.nn.Dropout(key=0)]
    alone = es.freeze(eqx.nn.Sequential(layers))
    # There is no `es.Module` above the linear layer, so no flag applies to it.
    assert names(es.filter(alone, es.trainable)) == [
        "layers[0].weight",
        "layers[0].bias",
    ]

    class Holder(es.Module):
        layers: eqx.nn.Sequential

    held = es.freeze(Net(Holder(alone), head()), lambda m: m.backbone)
    assert set(names(es.filter(held, es.trainable))) == HEAD


# --- Wrapping a frozen layer ----------------------------------------------------------


class Scaled(es.Module):
    inner: Any
    scale: es.Parameter = 1.0

    def __call__(self, x):
        return self.scale * self.inner(x)


def trained_names(model):
    return {part.name for part in es.parts(model) if es.trainable(part)}


def wrap_linear(module, name):
    return Scaled(module) if isinstance(module, eqx.nn.Linear) else module


WRAPPED = {
    "tree_at": lambda m: eqx.tree_at(lambda m: m.inner, m, Scaled(m.inner)),
    "map_modules": lambda m: es.map_modules(wrap_linear, m),
    "another layer": lambda m: m.replace(inner=eqx.nn.Linear(2, 2, key=jr.key(1))),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=list(WRAPPED))
@pytest.mark.parametrize("where", [None, lambda m: m.inner], ids=["all", "inner"])
def test_a_layer_that_replaces_a_frozen_layer_is_frozen(where, wrap):
    start = Scaled(eqx.nn.Linear(2, 2, key=jr.key(0)))
    wrapped = wrap(start.freeze(where))
    assert trained_names(wrapped) == (set() if where is None else {"scale"})
    # A part of the new layer can be unfrozen by its path.
    if isinstance(wrapped.inner, Scaled):
        tuned = wrapped.unfreeze(lambda m: m.inner.scale)
        assert trained_names(tuned) - trained_names(wrapped) == {"inner.scale"}
    assert trained_names(wrapped.unfreeze()) == trained_names(wrap(start))
    assert jax.tree.structure(wrapped.unfreeze()) == jax.tree.structure(wrap(start))


def test_where_may_return_lists_in_a_tuple():
    class Net(es.Module):
        first: es.Parameter
        layers: list

    net = Net(jnp.ones(1), [jnp.ones(2), jnp.ones(3)])
    for where in (
        lambda net: (net.first, [x for x in net.layers]),
        lambda net: (net.first, net.layers),
    ):
        frozen = es.freeze(net, where)
        assert [part.frozen for part in es.parts(frozen)] == [True] * 3
    one = es.freeze(net, lambda net: (net.first, net.layers[1:]))
    assert [part.frozen for part in es.parts(one)] == [True, False, True]
