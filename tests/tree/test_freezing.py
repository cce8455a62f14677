"""Fine-tuning with a frozen backbone, in each of three ways, and unfreezing it."""

from typing import Any, NamedTuple

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
    "frozen in a jit": (
        lambda: eqx.filter_jit(lambda m: m.freeze(lambda m: m.backbone))(
            Net(block(), head())
        ),
        es.trainable,
    ),
    "buffer": (lambda: OnConstant(block().eval(), head()), es.trainable),
    "wrt": (lambda: Net(block().eval(), head()), NOT_THE_BACKBONE),
}


def loss_fn(model, xs, ys):
    return jnp.mean((es.vmap(model, axis_name="batch")(xs) - ys) ** 2)


def make_step(wrt, max_traces=1):
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=max_traces)
    def step(model, optimizer):
        (loss, model), grads = es.value_and_grad(loss_fn, wrt=wrt)(model, XS, YS)
        model, optimizer = optimizer.update(grads, model)
        return model, optimizer, grads

    return step


def fit(model, wrt=es.trainable):
    step, optimizer = make_step(wrt), es.Optimizer(ADAMW, wrt=wrt).init(model)
    for _ in range(STEPS):
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


ADAMW, STEPS = optax.adamw(0.1, weight_decay=0.3), 3
HEAD = {"head.weight", "head.bias"}
STATISTICS = {f"backbone.norm.{name}" for name in ("mean", "var", "count")}
BACKBONE = STATISTICS | {
    f"backbone.{layer}.{name}"
    for layer in ("linear", "norm")
    for name in ("weight", "bias")
}


# --- The backbone does not change ---------------------------------------------------


class Tuned(NamedTuple):
    way: str
    start: Any
    wrt: Any
    new: Any
    optimizer: es.Optimizer
    grads: Any


@pytest.fixture(scope="module", params=list(WAYS))
def tuned(request):
    """A model before and after fine-tuning, for each way of freezing."""
    make, wrt = WAYS[request.param]
    model = make()
    with untouched(model):
        return Tuned(request.param, model, wrt, *fit(model, wrt))


def test_only_the_head_moves(tuned):
    assert moved(tuned.start, tuned.new) == HEAD
    assert set(names(tuned.grads)) == HEAD
    assert jax.tree.leaves(tuned.grads.backbone) == []  # `None`, not zeros
    assert jax.tree.structure(tuned.new) == jax.tree.structure(tuned.start)


@standard
def test_the_optimizer_is_as_large_as_one_for_the_head(tuned):
    alone = es.Optimizer(ADAMW).init(tuned.start.head)
    optimizer = es.Optimizer(ADAMW, wrt=tuned.wrt).init(tuned.start)
    assert memory(optimizer.opt_state) == memory(alone.opt_state)
    assert memory(tuned.optimizer.opt_state) == memory(alone.opt_state)
    # The head has 10 numbers. Adam stores two moments of each, and a step count.
    assert memory(alone.opt_state) == (5, 4 * (2 * 10 + 1))


@standard
def test_plain_layers_are_frozen_by_their_nearest_es_module():
    layers = [eqx.nn.Linear(3, 4, key=jr.key(0)), block().norm, es.nn.Dropout(key=0)]
    alone = es.freeze(eqx.nn.Sequential(layers))
    # There is no `es.Module` above the linear layer, so no flag applies to it.
    assert names(es.filter(alone, es.trainable)) == [
        "layers[0].weight",
        "layers[0].bias",
    ]
    model = Net(alone, head())
    linear = {"backbone.layers[0].weight", "backbone.layers[0].bias"}
    assert moved(model, fit(model)[0]) == HEAD | linear

    class Holder(es.Module):
        layers: eqx.nn.Sequential

    held = es.freeze(Net(Holder(alone), head()), lambda m: m.backbone)
    assert set(names(es.filter(held, es.trainable))) == HEAD


# --- Gradual unfreezing -------------------------------------------------------------


def another_class(model):
    # A declaration cannot be undone, so use a class that does not declare a kind.
    return Net(model.backbone, model.head)


UNFREEZE = {
    "freeze": lambda m: m.unfreeze(),
    "frozen in a jit": eqx.filter_jit(lambda m: es.unfreeze(m)),
    "buffer": lambda m: another_class(m).train(),
    "wrt": lambda m: m.train(),  # here the filter is widened instead
}


@standard
def test_an_unfrozen_backbone_is_trained_by_a_new_optimizer(tuned):
    model = UNFREEZE[tuned.way](tuned.new)
    new, optimizer, grads = fit(model)
    assert moved(model, new) == HEAD | BACKBONE
    assert set(names(grads)) == HEAD | BACKBONE - STATISTICS
    params = jax.tree.leaves(es.filter(model, es.trainable))
    assert memory(optimizer.opt_state) == memory(ADAMW.init(params))
    # A new optimizer starts from zeros, and the old one does not fit the model.
    fresh = es.Optimizer(ADAMW).init(model)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(fresh.opt_state))
    if tuned.way.startswith("freeze"):
        with pytest.raises(ValueError, match=r"(?s)`backbone\.linear\..*\.refit"):
            tuned.optimizer.update(grads, model)


# --- Wrapping a frozen layer ----------------------------------------------------------


class Scaled(es.Module):
    inner: Any
    scale: es.Parameter = 1.0

    def __call__(self, x):
        return self.scale * self.inner(x)


def trained_names(model):
    return {part.name for part in es.parts(model) if es.trainable(part)}


def after_a_step(model):
    optimizer = es.Optimizer(optax.sgd(0.5)).init(model)
    grads, model = es.grad(lambda m, x: jnp.sum(m(x) ** 2))(model, jnp.ones(2))
    return optimizer.update(grads, model)[0]


def wrap_linear(module, name):
    return Scaled(module) if isinstance(module, eqx.nn.Linear) else module


WRAPPED = {
    "tree_at": lambda m: eqx.tree_at(lambda m: m.inner, m, Scaled(m.inner)),
    "replace": lambda m: m.replace(inner=Scaled(m.inner)),
    "map_modules": lambda m: es.map_modules(wrap_linear, m),
    "another layer": lambda m: m.replace(inner=eqx.nn.Linear(2, 2, key=jr.key(1))),
    "another module": lambda m: m.replace(
        inner=Scaled(eqx.nn.Linear(2, 2, key=jr.key(1)))
    ),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=list(WRAPPED))
@pytest.mark.parametrize("where", [None, lambda m: m.inner], ids=["all", "inner"])
def test_a_layer_that_replaces_a_frozen_layer_is_frozen(where, wrap):
    start = Scaled(eqx.nn.Linear(2, 2, key=jr.key(0)))
    wrapped = wrap(start.freeze(where))
    assert trained_names(wrapped) == (set() if where is None else {"scale"})
    if where is not None:
        assert moved(wrapped, after_a_step(wrapped)) == {"scale"}
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
