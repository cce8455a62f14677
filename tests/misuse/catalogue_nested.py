"""Programs that open a scope inside a scope, and where the new state is stored."""

import equinox as eqx
import jax
import jax.numpy as jnp
from catalogue_entry import Net, program, XS

import eqx_state as es


ROWS = jnp.arange(12.0).reshape(4, 3)


def loss_fn(net, x):
    return jnp.sum(net(x) ** 2)


def expected(net, rows):
    """The sum of the gradients, and the model after all calls."""
    total = 0.0
    for x in rows:
        (_, net), grads = es.value_and_grad(loss_fn)(net, x)
        total = total + grads.layer.weight
    return total, net


class Trainer(es.Module):
    net: Net

    def assigned(self, rows):
        total = 0.0
        for x in rows:
            (_, self.net), grads = es.value_and_grad(loss_fn)(self.net, x)
            total = total + grads.layer.weight
        return total

    def scanned(self, rows):
        def step(total, x):
            (loss, self.net), grads = es.value_and_grad(loss_fn)(self.net, x)
            return total + grads.layer.weight, loss

        return es.scan(step, 0.0, rows)[0]

    def in_place(self, rows):
        total = 0.0
        for x in rows:
            loss, pull = es.vjp(loss_fn, self.net, x)
            grads, _ = pull(jnp.ones_like(loss))
            total = total + grads.layer.weight
        return total

    def dropped(self, rows):
        net, total = self.net, 0.0
        for x in rows:
            (_, net), grads = es.value_and_grad(loss_fn)(net, x)
            total = total + grads.layer.weight
        return total


@program("accumulate gradients in a scope, and assign each new module")
def _(case):
    net = case.keep(Net(), XS)
    total, new = expected(net, ROWS)
    assert new.layer.count == 4
    for run in (Trainer(net).assigned, Trainer(net).scanned):
        y, trainer = es.mutable(run)(ROWS)
        assert y == total
        assert eqx.tree_equal(trainer.net, new)


@program("rebind a variable to the new module in a scope: `(loss, net), grads = ...`")
def _(case):
    net = case.keep(Net(), XS)
    y, trainer = es.mutable(Trainer(net).dropped)(ROWS)
    assert y == expected(net, ROWS)[0]
    assert trainer.net.layer.count == 0
    total, new = es.jit(expected)(net, ROWS)  # pure: it returns the model
    assert (total, new.layer.count) == (y, 4)


@program("adapt a model in a loss (MAML), and drop it")
def _(case):
    def adapted_loss(net, x):
        grads, fast = es.grad(loss_fn)(net, x)
        fast = es.map(lambda p, g: p - 0.1 * g, fast, grads, on=es.trainable)
        return loss_fn(fast.eval(), x)

    def by_hand(weight, x):
        fast = weight - 0.1 * 2 * weight * jnp.sum(x**2)
        return jnp.sum((fast * x) ** 2)

    net = case.keep(Net(), XS)
    x = jnp.array([0.1, 0.2, 0.3])
    (loss, new), grads = es.value_and_grad(adapted_loss)(net, x)
    value, slope = jax.value_and_grad(by_hand)(net.layer.weight, x)
    assert jnp.allclose(loss, value)
    assert jnp.allclose(grads.layer.weight, slope)
    assert eqx.tree_equal(new, net)

    def of_tasks(net, xs):
        return jnp.mean(jax.vmap(lambda x: adapted_loss(net, x))(xs))

    (_, new), _ = es.value_and_grad(of_tasks)(net, jnp.stack([x, 2 * x]))
    assert eqx.tree_equal(new, net)
