"""Learn to draw handwritten digits: a variational autoencoder.

In scikit-learn's digits, each pixel is the number of dark cells among 16, so the
decoder predicts a binomial distribution for each pixel. Training maximizes the evidence
lower bound (ELBO) on the log-likelihood of the images (Kingma and Welling, 2014).

- The model draws its own latents, with keys from an `es.RngStream`. The program does
  not pass keys around, and a step returns the model with an advanced stream.
- `es.vmap` gives each image its own key, and all images share the running averages.
- In eval mode, a call is deterministic: `model.eval()` uses the mean of the latents.
- A frozen model still draws latents, but its `BatchNorm` layers use their running
  averages. The program estimates the bound on test images in this way.

Run `python examples/vae.py [output.png]`; it takes under a minute on two cores.
"""

# %%
import math
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE = 96
LATENTS = 10
CELLS = 16  # in each pixel


# %% The model
# The encoder returns the mean and the log scale of a normal distribution over the
# latents; the decoder returns the logits of the pixels.
def network(*sizes: int, key: Key[Array, ""]) -> eqx.nn.Sequential:
    layers = []
    for i, (size, following) in enumerate(zip(sizes, sizes[1:], strict=False)):
        layers += [
            eqx.nn.Linear(size, following, key=jr.fold_in(key, i)),
            es.nn.BatchNorm(following, axis_name="batch", momentum=0.9),
            eqx.nn.Lambda(jax.nn.relu),
        ]
    return eqx.nn.Sequential(layers[:-2])  # the last layer is linear


class VAE(es.Module):
    encoder: eqx.nn.Sequential
    decoder: eqx.nn.Sequential
    draw_key: es.RngStream

    def __init__(self, width: int = 256, *, key: Key[Array, ""]):
        encoder, decoder, stream = jr.split(key, 3)
        self.encoder = network(64, width, width, 2 * LATENTS, key=encoder)
        self.decoder = network(LATENTS, width, width, 64, key=decoder)
        self.draw_key = es.RngStream(stream)

    def __call__(
        self, image: Float[Array, "64"]
    ) -> tuple[Float[Array, "64"], Float[Array, ""]]:
        """The logits of the pixels, and the KL divergence from the prior."""
        mean, log_scale = jnp.split(self.encoder(image / CELLS), 2)
        latent = mean
        if self.training:
            latent = mean + jnp.exp(log_scale) * jr.normal(self.draw_key(), mean.shape)
        kl = (mean**2 + jnp.exp(2 * log_scale) - 1) / 2 - log_scale
        return self.decoder(latent), jnp.sum(kl)

    def imagine(self) -> Float[Array, "64"]:
        """The logits of a new image."""
        return self.decoder(jr.normal(self.draw_key(), (LATENTS,)))


# %% The bound, and one training step
def log_likelihood(
    images: Float[Array, "b 64"], logits: Float[Array, "b 64"]
) -> Float[Array, " b"]:
    choices = jnp.array([math.log(math.comb(CELLS, k)) for k in range(CELLS + 1)])
    dark, light = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    pixels = choices[images.astype(int)] + images * dark + (CELLS - images) * light
    return jnp.sum(pixels, axis=1)


def loss_fn(model: VAE, images: Float[Array, "b 64"]) -> Float[Array, ""]:
    """Minus the bound, in nats per image."""
    logits, kl = es.vmap(model, axis_name="batch")(images)
    return jnp.mean(kl - log_likelihood(images, logits))


@es.jit
def step(model, optimizer, images):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, images)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


@es.jit
def evaluate(model, images):
    loss, _ = es.mutable(loss_fn)(model.freeze(), images)
    return loss


# %% Train
def train(images, test_images, epochs: int):
    """The losses after each epoch, and the trained model."""
    steps = len(images) // BATCH_SIZE
    schedule = optax.cosine_decay_schedule(2e-3, epochs * steps)
    model = VAE(key=jr.key(0))
    optimizer = es.Optimizer(optax.adam(schedule)).init(model)
    losses: dict[str, list[float]] = {"training": [], "test": []}
    rng = np.random.default_rng(0)
    for epoch in range(1, epochs + 1):
        batches = rng.permutation(len(images))[: steps * BATCH_SIZE]
        in_epoch = []
        for batch in batches.reshape(steps, BATCH_SIZE):
            loss, model, optimizer = step(model, optimizer, images[batch])
            in_epoch.append(loss)
        losses["training"].append(float(np.mean(in_epoch)))
        losses["test"].append(float(evaluate(model, test_images)))
        if epoch % 10 == 0:
            print(f"epoch {epoch}: {losses['test'][-1]:.1f} nats per test image")
    return losses, model


# %% Compare with a model of independent pixels, and draw samples
def independent_pixels(train_images: np.ndarray, images: np.ndarray) -> float:
    """The loss of independent pixels, with the frequencies of the training images."""
    levels = np.arange(CELLS + 1)[:, None, None]
    counts = np.sum(train_images == levels, axis=1) + 0.1
    likelihood = counts / counts.sum(axis=0)
    pixels = np.take_along_axis(likelihood, images.astype(int), axis=0)
    return -float(np.log(pixels).sum(axis=1).mean())


def main(path=None, *, epochs=80, better_by=10.0) -> float:
    """The loss on the test images, in nats per image."""
    train_images, images = train_test_split(
        np.float32(load_digits().data), test_size=0.2, random_state=0
    )
    losses, model = train(train_images, images, epochs)
    loss = losses["test"][-1]
    baseline = independent_pixels(train_images, images)
    print(f"test images: {loss:.1f} nats; with independent pixels {baseline:.1f}")

    model = model.eval()
    logits, _ = jax.vmap(model)(images[:24])  # eval mode: no state is written
    imagined, model = es.mutable(es.vmap(model.imagine, axis_size=48))()
    guesses, samples = (CELLS * jax.nn.sigmoid(x) for x in (logits, imagined))
    if path is not None:
        import _pictures  # needs matplotlib

        _pictures.vae(path, losses, baseline, images[:24], guesses, samples)

    assert loss < baseline - better_by
    return loss


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
