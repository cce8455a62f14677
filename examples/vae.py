"""Learn to draw handwritten digits: a variational autoencoder.

A pixel of scikit-learn's digits says how many of 16 cells are dark, so that images are
binomial given what the decoder makes of a latent vector. Training raises a lower bound
(ELBO) on the log-likelihood of the images (Kingma and Welling, 2014).

- The model draws its latents itself, with keys from an `es.RngStream` that it holds; no
  key is handed through the program, and a step returns the model with the next one.
- `es.vmap` gives each image a key of its own, and the batch one running average.
- In eval mode a call is deterministic: `model.eval()` takes the mean of the latents.
- A frozen model still draws, while its norms use the averages: how the bound is tested.

Run `python examples/vae.py [output.png]`. The picture is written to `vae.png` in the
current directory if no path is given. It takes under a minute on two cores.
"""

# %%
import math
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE = 96
LATENTS = 10
CELLS = 16  # of a pixel


# %% The model. Its encoder says where an image may lie among the latents, as the mean
# and the log of the scale of a normal distribution; the decoder takes it from there.
class VAE(es.Module):
    encoder: eqx.nn.Sequential
    decoder: eqx.nn.Sequential
    draw_key: es.RngStream

    def __init__(self, width: int = 256, *, key: Key[Array, ""]):
        encoder, decoder, stream = jr.split(key, 3)
        self.encoder = network([64, width, width, 2 * LATENTS], encoder)
        self.decoder = network([LATENTS, width, width, 64], decoder)
        self.draw_key = es.RngStream(stream)

    def __call__(
        self, image: Float[Array, "64"]
    ) -> tuple[Float[Array, "64"], Float[Array, ""]]:
        """The logits of the pixels, and what it costs to tell the latents."""
        mean, log_scale = jnp.split(self.encoder(image / CELLS), 2)
        latent = mean
        if self.training:
            latent = mean + jnp.exp(log_scale) * jr.normal(self.draw_key(), mean.shape)
        cost = (mean**2 + jnp.exp(2 * log_scale) - 1) / 2 - log_scale
        return self.decoder(latent), jnp.sum(cost)

    def imagine(self) -> Float[Array, "64"]:
        """The logits of an image that nobody has drawn."""
        return self.decoder(jr.normal(self.draw_key(), (LATENTS,)))


def network(sizes: list[int], key: Key[Array, ""]) -> eqx.nn.Sequential:
    keys = jr.split(key, len(sizes) - 1)
    layers = []
    for before, after, key in zip(sizes[:-2], sizes[1:-1], keys[:-1], strict=True):
        layers += [
            eqx.nn.Linear(before, after, key=key),
            es.nn.BatchNorm(after, axis_name="batch", momentum=0.9),
            eqx.nn.Lambda(jax.nn.relu),
        ]
    return eqx.nn.Sequential([*layers, eqx.nn.Linear(*sizes[-2:], key=keys[-1])])


# %% The bound, and one training step.
def log_likelihood(
    images: Float[Array, "b 64"], logits: Float[Array, "b 64"]
) -> Float[Array, " b"]:
    choices = jnp.array([math.log(math.comb(CELLS, k)) for k in range(CELLS + 1)])
    dark, light = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    pixels = choices[images.astype(int)] + images * dark + (CELLS - images) * light
    return jnp.sum(pixels, axis=1)


def loss_fn(model: VAE, images: Float[Array, "b 64"]) -> Float[Array, ""]:
    """Minus the bound, in nats per image."""
    logits, cost = es.vmap(model, axis_name="batch")(images)
    return jnp.mean(cost - log_likelihood(images, logits))


@es.jit
def step(model: VAE, optimizer: es.Optimizer, images: Float[Array, "b 64"]):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, images)
    model, optimizer = optimizer.update(grads, model)
    return model, optimizer, loss


@es.jit
def evaluate(model: VAE, images: Float[Array, "b 64"]) -> Float[Array, ""]:
    loss, _ = es.mutable(loss_fn)(model.freeze(), images)
    return loss


# %% What the model has to beat: pixels that know nothing of each other.
def loss_of_pixels(train_images: np.ndarray, images: np.ndarray) -> float:
    """The loss when each pixel follows how often it was how dark in training."""
    levels = np.arange(CELLS + 1)[:, None, None]
    counts = np.sum(train_images == levels, axis=1) + 0.1
    likelihood = counts / counts.sum(axis=0)
    pixels = np.take_along_axis(likelihood, images.astype(int), axis=0)
    return -float(np.log(pixels).sum(axis=1).mean())


def plot(losses, baseline: float, images, guesses, samples) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for name, curve in losses.items():
        axes.plot(range(1, len(curve) + 1), curve, label=name)
    axes.axhline(baseline, color="0.5", linestyle="--", label="independent pixels")
    axes.set(xlabel="epoch", ylabel="nats per image", ylim=(None, 1.8 * baseline))
    axes.legend()
    rows = np.stack([images[:12], guesses[:12], images[12:], guesses[12:]])
    grids = {
        "test images, and below each its reconstruction": rows,
        "samples": samples.reshape(4, 12, 64),
    }
    for ax, (title, grid) in zip(right.subplots(2, 1), grids.items(), strict=True):
        tiles = np.pad(grid.reshape(4, 12, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)])
        mosaic = tiles.swapaxes(1, 2).reshape(4 * 10, 12 * 10)
        ax.imshow(mosaic, cmap="gray_r", vmin=0, vmax=CELLS)
        ax.set_title(title, size="medium")
        ax.axis("off")
    return figure


# %% Train, test, draw.
def main(
    epochs: int = 80, path: str | Path = "vae.png", better_by: float = 10.0
) -> float:
    """The loss on the test images, in nats per image."""
    train_images, images = train_test_split(
        np.float32(load_digits().data), test_size=0.2, random_state=0
    )
    steps = len(train_images) // BATCH_SIZE
    schedule = optax.cosine_decay_schedule(2e-3, epochs * steps)
    model = VAE(key=jr.key(0))
    optimizer = es.Optimizer(optax.adam(schedule)).init(model)

    console, rng = Console(), np.random.default_rng(0)
    losses: dict[str, list[float]] = {"training": [], "test": []}
    for _ in track(range(epochs), "VAE", console=console):
        batches = rng.permutation(len(train_images))[: steps * BATCH_SIZE]
        seen = []
        for batch in batches.reshape(steps, BATCH_SIZE):
            model, optimizer, loss = step(model, optimizer, train_images[batch])
            seen.append(loss)
        losses["training"].append(float(np.mean(seen)))
        losses["test"].append(float(evaluate(model, images)))

    baseline = loss_of_pixels(train_images, images)
    console.print(
        f"test images: {losses['test'][-1]:.1f} nats each,"
        f" {baseline:.1f} with independent pixels"
    )
    model = model.eval()
    logits, _ = jax.vmap(model)(images[:24])  # nothing is drawn, nothing written
    imagined, model = es.mutable(es.vmap(model.imagine, axis_size=48))()
    guesses, samples = (CELLS * jax.nn.sigmoid(x) for x in (logits, imagined))
    plot(losses, baseline, images[:24], guesses, samples).savefig(path)
    console.print(f"Loss, reconstructions, samples: {Path(path).resolve()}")

    assert losses["test"][-1] < baseline - better_by
    return losses["test"][-1]


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "vae.png")
