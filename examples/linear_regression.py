"""Fit a line to noisy points: by hand with JAX alone, then shorter.

A model is a pytree of arrays, so JAX can train it like a dict of arrays. Annotations
say what each array is for. The rest of the library is optional.

- `model.filter(es.Parameter)` selects the parameters; `model.update(params)` puts them
  back.
- `es.mutable(loss_fn)` returns `(loss, model)`, which is what `has_aux=True` expects.
- `es.value_and_grad` and `es.Optimizer` do the same work in two lines.
- `es.Initializer` is a placeholder for weights, which `model.init(seed)` draws.

Run `python examples/linear_regression.py [output.png]`; it takes a few seconds.
"""

# %%
import functools as ft
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import eqx_state as es


LEARNING_RATE = 0.5


# %% The model
# Gradients train its weights; the forward pass counts the examples.
class Linear(es.Module):
    w: es.Parameter[Float[Array, "inputs outputs"]]
    b: es.Parameter[Float[Array, " outputs"]]
    seen: es.State[Int[Array, ""]]

    def __init__(self, inputs: int, outputs: int):
        self.w = es.Initializer(lambda key: jr.uniform(key, (inputs, outputs)))
        self.b = jnp.zeros(outputs)
        self.seen = jnp.array(0)

    def __call__(self, x: Float[Array, " inputs"]) -> Float[Array, " outputs"]:
        if self.training:
            self.seen = self.seen + jax.lax.psum(1, "batch")
        return x @ self.w + self.b


def loss_fn(model, xs, ys):
    return jnp.mean((es.vmap(model, axis_name="batch")(xs) - ys) ** 2)


# %% By hand: JAX differentiates with respect to the parameters
# The model is a second argument, which contains the state. `es.mutable` returns it with
# the new state.
@ft.partial(jax.value_and_grad, has_aux=True)
def loss_and_grad(params, model, xs, ys):
    return es.mutable(loss_fn)(model.update(params), xs, ys)


@jax.jit
def step_by_hand(model, xs, ys):
    params = model.filter(es.Parameter)
    (loss, model), grads = loss_and_grad(params, model, xs, ys)
    params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
    return loss, model.update(params)


# %% Shorter, and with any optax optimizer
@es.jit
def step(model, optimizer, xs, ys):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, xs, ys)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


# %% Train both ways from the same start
def train(xs, ys, steps: int):
    """The model after each step by hand, and the model trained the shorter way."""
    model = start = Linear(1, 1).init(42)
    by_hand = [model]
    for _ in range(steps):
        loss, model = step_by_hand(model, xs, ys)
        by_hand.append(model)

    model, optimizer = start, es.Optimizer(optax.sgd(LEARNING_RATE)).init(start)
    for _ in range(steps):
        loss, model, optimizer = step(model, optimizer, xs, ys)
    print(f"loss {loss:.5f} after {model.seen:,} examples")
    return by_hand, model


# %% Compare with the least squares solution
def main(path=None, *, steps=300, tolerance=1e-4) -> Linear:
    """The trained model."""
    rng = np.random.default_rng(0)
    xs = np.float32(rng.uniform(size=(500, 1)))
    ys = np.float32(1.4 * xs - 0.3 + rng.normal(scale=0.1, size=xs.shape))
    by_hand, model = train(xs, ys, steps)

    best, *_ = np.linalg.lstsq(np.hstack([xs, np.ones_like(xs)]), ys[:, 0])
    way = np.array([(m.w[0, 0], m.b[0]) for m in by_hand])
    for name, (w, b) in {"gradient descent": way[-1], "least squares": best}.items():
        print(f"{name:>16}: y = {w:.4f} x {b:+.4f}")
    if path is not None:
        import _pictures  # needs matplotlib

        ends = np.linspace(xs.min(), xs.max(), 2)[:, None]
        line = ends, jax.vmap(model.eval())(np.float32(ends))
        _pictures.linear_regression(path, xs, ys, line, way, best)

    assert eqx.tree_equal(by_hand[-1], model, rtol=1e-4, atol=1e-5)
    assert np.allclose(way[-1], best, atol=tolerance)
    assert model.seen == steps * len(xs)
    return model


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
