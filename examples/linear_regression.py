"""Fit a line to noisy points, by hand and then shorter: the first program of Treex.

A model is a pytree of arrays, and its annotations say what each array is. JAX itself
can train it; what this library adds is there when it is wanted.

- `model.filter(es.Parameter)` takes the parameters out, and `model.update(params)` puts
  them back: the rest is what one writes for a dict of arrays.
- `es.mutable(loss_fn)` returns `(loss, new model)`, as `has_aux=True` wants it.
- `es.value_and_grad` and `es.Optimizer` say the same in two lines, with equal weights.
- `es.Initializer` leaves the random weights to `model.init(seed)`.

Run `python examples/linear_regression.py [output.png]`. The picture is written to
`linear_regression.png` in the current directory if no path is given. It takes a few
seconds.
"""

# %%
import functools as ft
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from rich.console import Console

import eqx_state as es


LEARNING_RATE = 0.5


# %% The model. Its weights are trained; the number of examples that it has seen is not.
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


def loss_fn(
    model: Linear, xs: Float[Array, "n inputs"], ys: Float[Array, "n outputs"]
) -> Float[Array, ""]:
    guesses = es.vmap(model, axis_name="batch")(xs)
    return jnp.mean((guesses - ys) ** 2)


# %% By hand. The gradient is that of the first argument, which holds parameters alone;
# the model comes besides, with its state, and leaves with the state that was written.
@ft.partial(jax.value_and_grad, has_aux=True)
def loss_and_grad(params: Linear, model: Linear, xs: Array, ys: Array):
    return es.mutable(loss_fn)(model.update(params), xs, ys)


@jax.jit
def step_by_hand(model: Linear, xs: Array, ys: Array):
    params = model.filter(es.Parameter)
    (loss, model), grads = loss_and_grad(params, model, xs, ys)
    params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
    return model.update(params), loss


# %% Shorter, and with any optimizer of optax.
@es.jit
def step(model: Linear, optimizer: es.Optimizer, xs: Array, ys: Array):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, xs, ys)
    model, optimizer = optimizer.update(grads, model)
    return model, optimizer, loss


# %% The points with the line, and the way to it across the loss.
def plot(xs, ys, model: Linear, way: np.ndarray, best: np.ndarray) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = np.linspace(xs.min(), xs.max(), 2, dtype=np.float32)[:, None]
    left.scatter(xs, ys, s=6, color="0.6", label="data")
    left.plot(ends, jax.vmap(model.eval())(ends), "C0", linewidth=2, label="prediction")
    left.set(xlabel="x", ylabel="y")
    left.legend()

    w, b = np.meshgrid(np.linspace(0.2, 2, 80), np.linspace(-0.8, 0.4, 80))
    losses = np.mean((w[..., None] * xs[:, 0] + b[..., None] - ys[:, 0]) ** 2, axis=-1)
    levels = np.geomspace(losses.min() * 1.05, losses.max(), 14)
    right.contour(w, b, losses, levels, colors="0.8", linewidths=0.8)
    right.plot(*way.T, "C0.-", label="gradient descent")
    right.plot(*best, "k*", markersize=12, label="least squares")
    right.set(xlabel="w", ylabel="b")
    right.legend()
    return figure


# %% Both ways from the same start, and what algebra says.
def main(
    steps: int = 300,
    path: str | Path = "linear_regression.png",
    tolerance: float = 1e-4,
) -> Linear:
    """The trained model."""
    rng = np.random.default_rng(0)
    xs = np.float32(rng.uniform(size=(500, 1)))
    ys = np.float32(1.4 * xs - 0.3 + rng.normal(scale=0.1, size=xs.shape))

    model = start = Linear(1, 1).init(42)
    way = [start]
    for _ in range(steps):
        model, loss = step_by_hand(model, xs, ys)
        way.append(model)

    shorter = start
    optimizer = es.Optimizer(optax.sgd(LEARNING_RATE)).init(shorter)
    for _ in range(steps):
        shorter, optimizer, _ = step(shorter, optimizer, xs, ys)

    best, *_ = np.linalg.lstsq(np.hstack([xs, np.ones_like(xs)]), ys[:, 0])
    weights = np.array([(m.w[0, 0], m.b[0]) for m in way])
    console = Console()
    for name, (w, b) in {"gradient descent": weights[-1], "algebra": best}.items():
        console.print(f"{name:>16}: y = {w:.4f} x {b:+.4f}")
    console.print(f"loss {loss:.5f} after {model.seen:,} examples")
    plot(xs, ys, model, weights, best).savefig(path)
    console.print(f"Data, line and descent: {Path(path).resolve()}")

    assert eqx.tree_equal(model, shorter, rtol=1e-5, atol=1e-6)
    assert np.allclose(weights[-1], best, atol=tolerance)
    assert model.seen == steps * len(xs)
    return model


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "linear_regression.png")
