"""Train a network in forty lines: copy them, and insert your own model and data."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

import eqx_state as es


class Norm(es.Module):
    scale: es.Parameter  # trained
    mean: es.BatchStat  # written by the forward pass

    def __call__(self, x, *, key=None):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * jax.lax.pmean(x, "batch")
        return self.scale * (x - self.mean)


def loss_fn(model, xs, ys):
    return jnp.mean((es.vmap(model, axis_name="batch")(xs) - ys) ** 2)


@es.jit
def step(model, optimizer, xs, ys):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, xs, ys)  # the new model
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


norm, dropout = Norm(jnp.ones(4), jnp.zeros(4)), es.nn.Dropout(0.1, key=jr.key(0))
model = eqx.nn.Sequential([norm, dropout, eqx.nn.MLP(4, 1, 32, 1, key=jr.key(1))])
optimizer = es.Optimizer(optax.adam(1e-2)).init(model)
xs = 3 + jr.normal(jr.key(2), (64, 4))
ys = jnp.sum(xs, axis=1, keepdims=True)
for _ in range(500):
    loss, model, optimizer = step(model, optimizer, xs, ys)
error = loss_fn(es.eval(model), xs, ys) / jnp.var(ys)
print(f"squared error after 500 steps: {error:.1%} of the variance")
assert error < 0.1
