"""`es.audit` names what it should, according to the page `docs/troubleshooting.md`."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from misuse import loss_fn, Net, TROUBLESHOOTING, XS

import eqx_state as es


NAMES = re.compile(r"^\| (.*?) \| .*`es\.audit` names it: `([\w ]+)`", re.MULTILINE)
ROWS = dict(NAMES.findall(TROUBLESHOOTING.read_text(encoding="utf-8")))
SGD = optax.sgd(optax.constant_schedule(0.1))  # which counts its steps
STEPS: dict[str, Callable[[Net], tuple[Any, ...]]] = {}


def row(title: str) -> Callable[[Any], Any]:
    """Decorate a function that returns the step of a row, and its arguments."""
    return lambda make: STEPS.setdefault(title, make)


@pytest.mark.parametrize("title", ROWS)
def test_the_audit_names_it(title, net):
    assert STEPS.keys() == ROWS.keys()
    step, *args = STEPS[title](net)
    kinds = {finding.kind for finding in es.audit(step)(*args)}
    # `Net.mean` is a statistic that no program writes.
    assert ROWS[title] in kinds
    assert kinds <= {ROWS[title], "unwritten"}


def started(model):
    return model, es.Optimizer(SGD).init(model)


def with_loss(loss):
    def step(model, optimizer):
        (_, model), grads = es.value_and_grad(loss)(model)
        return optimizer.update(grads, model)

    return step


@row("write `self.mean.at[0].set(1.0)` and drop the result")
def _(net):
    class Norm(es.Module):
        net: Net
        mean: es.BatchStat

        def __call__(self, x):
            self.mean.at[0].set(1.0)
            return self.net(x)

    return with_loss(loss_fn), *started(Norm(net, XS))


@row("use the model from before the call again")
def _(net):
    def step(net, optimizer):
        (_, new), grads = es.value_and_grad(loss_fn)(net)
        return optimizer.update(grads, net)

    return step, *started(net)


@row("forget `eval` when you test a model in `es.mutable`")
def _(net):
    return lambda net, x: es.mutable(net)(x)[0], net, XS


class Draw(es.Module):
    rng: es.Rng

    def __call__(self, x):
        self.rng, key = jr.split(self.rng)
        return x + jr.normal(key, x.shape)


@row("draw from `self.rng` without advancing it")
def _(net):
    class Wrong(Draw):
        def __call__(self, x):
            return x + jr.normal(self.rng, x.shape)

    return es.mutable(lambda model, x: model(x)), Wrong(jr.key(0)), XS


@row("make two layers with one key")
def _(net):
    models = [Draw(jr.key(0)), Draw(jr.key(0))]
    return es.mutable(lambda models, x: [m(x) for m in models]), models, XS


@row("unpack the result like JAX's: `loss, grads = es.value_and_grad(loss_fn)(model)`")
def _(net):
    def step(net, optimizer):
        loss, grads = es.value_and_grad(loss_fn)(net)
        return loss[0], optimizer.update(grads, net)

    return step, *started(net)


@row("unpack it like JAX's with `has_aux=True`: `(loss, aux), grads = …`")
def _(net):
    def step(net, optimizer):
        f = es.value_and_grad(lambda net: (loss_fn(net), "aux"), has_aux=True)
        (loss, aux), grads = f(net)
        return loss, optimizer.update(grads, net)

    return step, *started(net)


@row("create the optimizer in the training step")
def _(net):
    return lambda net: with_loss(loss_fn)(*started(net))[0], net


@row("create an ensemble from copies of one model")
def _(net):
    ensemble = jax.tree.map(lambda *xs: jnp.stack(xs), *[Draw(jr.key(0))] * 2)
    return es.mutable(es.vmap(ensemble, axes={...: 0}, in_axes=None)), XS


class Trainer(es.Module):
    net: Net

    def rebound(self):
        net = self.net
        for _ in range(2):
            (loss, net), _ = es.value_and_grad(loss_fn)(net)
        return loss

    def inner(self):
        return es.mutable(self.net)(XS)[0]

    def scanned(self):
        step = lambda layer, x: (layer, layer(x))  # noqa: E731
        return es.scan(step, self.net.layer, XS)[1]


@row("rebind a variable to the new module in a scope: `(loss, net), grads = …`")
def _(net):
    return es.mutable(Trainer.rebound), Trainer(net)


@row("call `es.mutable` in a call, and drop the new model")
def _(net):
    return es.mutable(Trainer.inner), Trainer(net)


@row("carry a module through `es.scan`, and drop the new one")
def _(net):
    return es.mutable(Trainer.scanned), Trainer(net)


@row("adapt a model in a loss (MAML), and drop it")
def _(net):
    def adapted_loss(net):
        grads, fast = es.grad(loss_fn)(net)
        fast = es.map(lambda p, g: p - 0.1 * g, fast, grads, on=es.trainable)
        return loss_fn(fast.eval())

    return with_loss(adapted_loss), *started(net)


@row("use weight decay with `paramax.NonTrainable` constants")
def _(net):
    class NonTrainable(eqx.Module):
        tree: Any

    def loss(model):
        return jnp.sum(jax.lax.stop_gradient(model["scale"].tree) * model["w"])

    model = {"scale": NonTrainable(jnp.ones(2)), "w": jnp.ones(2)}
    tx = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))
    return with_loss(loss), model, es.Optimizer(tx).init(model)


@row("return a jitted step's loss without its new model")
def _(net):
    return es.jit(lambda net, x: es.mutable(net)(x)[0]), net, XS


def closing_over(net):
    model = eqx.nn.Linear(40, 40, key=jr.key(0))
    return es.jit(lambda x: model(x)), jnp.ones(40)


row("pass `es.jit` a function that closes over a model")(closing_over)
row("close over a model in `es.jit`, and rebind the name")(closing_over)
