"""`eqx.nn.Shared`: one node in two places of a tree, with state and without."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import rejects
from models import Layer

import eqx_state as es


class Norm(es.Module):
    """Scales by a parameter, and shifts by the mean of the batch, which it averages."""

    scale: es.Parameter
    mean: es.BatchStat = 0.0

    def __call__(self, x):
        self.mean = 0.5 * self.mean + 0.5 * lax.pmean(x, "batch")
        return self.scale * x + self.mean


def by_hand(scale, mean, xs):
    """Two blocks with one `Norm`, without modules: the loss, and the mean after it."""
    mean = 0.5 * mean + 0.5 * jnp.mean(xs)
    xs = jnp.sin(scale * xs + mean)
    mean = 0.5 * mean + 0.5 * jnp.mean(xs)
    return jnp.mean((scale * xs + mean) ** 2), mean


def loss_fn(model, xs):
    return jnp.mean(model(xs) ** 2)


XS = jnp.array([0.5, -1.0, 2.0])


def run(model, xs, how):
    """`(loss, model, grads)`, the gradients `None` where none are asked for."""
    f = es.value_and_grad(loss_fn) if "grad" in how else es.mutable(loss_fn)
    out = (eqx.filter_jit(f) if "jit" in how else f)(model, xs)
    return (*out[0], out[1]) if "grad" in how else (*out, None)


every_how = pytest.mark.parametrize("how", ["eager", "jit", "grad", "jit grad"])


# --- One parameter in two places ----------------------------------------------------


class Decoder(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key):
        a, b = jr.split(key)
        embed = eqx.nn.Embedding(5, 3, key=a)
        head = eqx.nn.Linear(3, 5, use_bias=False, key=b)
        self.shared = eqx.nn.Shared(
            (embed, head), lambda t: t[1].weight, lambda t: t[0].weight
        )

    def __call__(self, token):
        embed, head = self.shared()
        return head(jnp.tanh(embed(token)))


TOKENS = jnp.array([0, 3, 3, 1])


def next_token_loss(model, tokens):
    logits = jax.nn.log_softmax(es.vmap(model)(tokens[:-1]))
    return -jnp.mean(logits[jnp.arange(3), tokens[1:]])


def untied_loss(embedding, head, tokens):
    logits = jax.nn.log_softmax(jnp.tanh(embedding[tokens[:-1]]) @ head.T)
    return -jnp.mean(logits[jnp.arange(3), tokens[1:]])


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_tied_weight_gets_the_sum_of_both_gradients(jit):
    model = Decoder(jr.key(0))
    weight = model.shared.pytree[0].weight
    loss, (left, right) = jax.value_and_grad(untied_loss, (0, 1))(
        weight, weight, TOKENS
    )
    f = es.value_and_grad(next_token_loss)
    (out, _), grads = (eqx.filter_jit(f) if jit else f)(model, TOKENS)
    assert jnp.allclose(out, loss, rtol=1e-6)
    assert [part.name for part in es.parts(grads)] == ["shared.pytree[0].weight"]
    (grad,) = jax.tree.leaves(grads)
    assert jnp.allclose(grad, left + right, atol=1e-6)
    assert not jnp.allclose(grad, left, atol=1e-3)
    assert not jnp.allclose(grad, right, atol=1e-3)


@jax.numpy_dtype_promotion("standard")  # `optax.adam` promotes: `float ** int`
def test_a_tied_weight_is_one_parameter_in_the_loop():
    tx = optax.adam(0.1)

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model, optimizer):
        (_, model), grads = es.value_and_grad(next_token_loss)(model, TOKENS)
        return optimizer.update(grads, model)

    model = Decoder(jr.key(0))
    optimizer = es.Optimizer(tx).init(model)
    weight = model.shared.pytree[0].weight
    state = tx.init(weight)
    shapes = [leaf.shape for leaf in jax.tree.leaves(optimizer)]
    assert shapes == [(), (5, 3), (5, 3)]  # the count and the two moments
    for _ in range(4):
        model, optimizer = step(model, optimizer)
        grad = jax.grad(lambda w: untied_loss(w, w, TOKENS))(weight)
        updates, state = tx.update(grad, state, weight)
        weight = optax.apply_updates(weight, updates)
    embed, head = model.shared()
    assert embed.weight is head.weight
    assert jnp.allclose(embed.weight, weight, rtol=1e-4, atol=1e-5)


def test_shared_modules_without_a_write_need_no_scope():
    shared = eqx.nn.Shared((Layer(), Layer(3.0)), lambda t: t[1], lambda t: t[0])
    a, b = es.eval(shared)()
    assert (a(1.0), b(1.0)) == (2.0, 2.0)
    assert [part.name for part in es.parts(shared)] == [
        "pytree[0].weight",
        "pytree[0].count",
    ]


# --- With state in it ---------------------------------------------------------------


class Around(eqx.Module):
    """A block, with the `Norm` that it may share."""

    norm: Norm

    def __call__(self, x):
        return self.norm(x)


class Counting(es.Module):
    """A block with state of its own on the way to what it shares."""

    norm: Norm
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.norm(x)


class TiedNorm(es.Module):
    """The tied node is itself stateful: one `Norm` for two blocks."""

    shared: eqx.nn.Shared

    def __call__(self, xs):
        return es.vmap(self.one, axis_name="batch")(xs)

    def one(self, x):
        first, second = self.shared()
        return second(jnp.sin(first(x)))


class PlainTiedNorm(eqx.Module):
    shared: eqx.nn.Shared
    __call__ = TiedNorm.__call__
    one = TiedNorm.one


class OpenedOutside(es.Module):
    """The blocks are taken out first, and each is mapped by itself."""

    shared: eqx.nn.Shared

    def __call__(self, xs):
        first, second = (es.vmap(f, axis_name="batch") for f in self.shared())
        return second(jnp.sin(first(xs)))


def tied_norm(block, holder=TiedNorm):
    norm = Norm(1.5)
    return holder(
        eqx.nn.Shared(
            (block(norm), block(norm)), lambda t: t[1].norm, lambda t: t[0].norm
        )
    )


@every_how
@pytest.mark.parametrize("holder", [TiedNorm, PlainTiedNorm, OpenedOutside])
def test_a_tied_module_is_updated_by_both_its_users(holder, how):
    (loss, mean), grad = jax.value_and_grad(by_hand, has_aux=True)(
        jnp.array(1.5), jnp.array(0.0), XS
    )
    out, new, grads = run(tied_norm(Around, holder), XS, how)
    assert jnp.allclose(out, loss, rtol=1e-6)
    first, _ = new.shared.pytree
    assert jnp.allclose(first.norm.mean, mean, rtol=1e-6)
    assert len(jax.tree.leaves(es.filter(new, es.BatchStat))) == 1
    if grads is not None:
        assert jnp.allclose(grads.shared.pytree[0].norm.scale, grad, rtol=1e-5)
        assert len(jax.tree.leaves(grads)) == 1


class Language(es.Module):
    """The weight of embedding and head is tied; between them are stateful layers."""

    shared: eqx.nn.Shared

    def __init__(self):
        embed = eqx.nn.Embedding(5, 3, key=jr.key(0))
        head = eqx.nn.Linear(3, 5, use_bias=False, key=jr.key(1))
        norm = es.nn.BatchNorm(3, axis_name="batch", momentum=0.5)
        layers = {"norm": norm, "more": [es.nn.Dropout(0.5, key=2), Layer()]}
        self.shared = eqx.nn.Shared(
            (embed, layers, head), lambda t: t[2].weight, lambda t: t[0].weight
        )

    def __call__(self, token):
        embed, layers, head = self.shared()
        x = layers["norm"](embed(token))
        for layer in layers["more"]:
            x = layer(x)
        return head(x)


class Untied(es.Module):
    """The same without `eqx.nn.Shared`: the embedding is held once."""

    embed: eqx.nn.Embedding
    layers: Any

    def __call__(self, token):
        x = self.layers["norm"](self.embed(token))
        for layer in self.layers["more"]:
            x = layer(x)
        return self.embed.weight @ x


def token_loss(model, tokens):
    # `Layer` counts in every lane: once, as the lanes share it.
    logits = es.vmap(model, axis_name="batch")(tokens[:-1])
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(3), tokens[1:]])


@jax.debug_key_reuse(False)  # on purpose: the same draws twice
@every_how
def test_layers_beside_a_tied_weight_keep_their_state(how):
    model = Language()
    embed, layers, _ = model.shared.pytree
    untied = Untied(embed, layers)
    f = es.value_and_grad(token_loss) if "grad" in how else es.mutable(token_loss)
    f = eqx.filter_jit(f) if "jit" in how else f
    expected, out = f(untied, TOKENS), f(model, TOKENS)
    leaves = [jax.tree.leaves(eqx.filter(t, eqx.is_array)) for t in (expected, out)]
    for ours, theirs in zip(*leaves, strict=True):
        same = jnp.allclose if jnp.issubdtype(ours.dtype, jnp.inexact) else jnp.equal
        assert jnp.all(same(ours, theirs))
    new = out[0][1] if "grad" in how else out[1]
    assert new.shared.pytree[1]["more"][1].count == 1


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_shared_opened_twice_has_one_state(jit):
    def f(shared, x):
        (a, _), (_, b) = shared(), shared()
        return b(a(x))

    shared = eqx.nn.Shared((Layer(), Layer()), lambda t: t[1], lambda t: t[0])
    y, new = (eqx.filter_jit(es.mutable(f)) if jit else es.mutable(f))(shared, 1.0)
    assert (y, new.pytree[0].count) == (4.0, 2)


def test_what_a_call_returns_is_shared_as_equinox_shares_it():
    model = Language()
    for pick in (lambda m: m.shared, lambda m: [m.shared, m]):
        out, new = es.mutable(pick)(model)
        assert jax.tree.structure(out) == jax.tree.structure(pick(model))
        assert type(new.shared) is eqx.nn.Shared


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_several_nodes_are_tied_at_once(jit):
    def f(shared, x):
        for layer in shared():
            x = layer(x)
        return x

    layers = (Layer(2.0), Layer(3.0), Layer(), Layer())
    shared = eqx.nn.Shared(layers, lambda t: t[2:], lambda t: t[:2])
    y, new = (eqx.filter_jit(es.mutable(f)) if jit else es.mutable(f))(shared, 1.0)
    assert y == 36.0
    assert [layer.count for layer in new.pytree[:2]] == [2, 2]


def test_shared_in_a_loop_is_traced_once():
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model):
        return es.value_and_grad(loss_fn)(model, XS)[0][1]

    model, mean = tied_norm(Around), jnp.array(0.0)
    for _ in range(3):
        model = step(model)
        _, mean = by_hand(jnp.array(1.5), mean, XS)
    assert jnp.allclose(model.shared.pytree[0].norm.mean, mean, rtol=1e-5)


def test_state_around_a_tied_node_is_refused():
    # The second block is made for the call: it holds what the tree does not hold there.
    model = tied_norm(Counting)
    with rejects(model, dataclasses.FrozenInstanceError, "Counting.calls", "Shared"):
        es.mutable(model)(XS)
