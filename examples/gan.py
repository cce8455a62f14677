"""Train a Wasserstein GAN on scikit-learn's 1,797 handwritten digits.

A generator turns noise into images, and a critic estimates the Wasserstein distance
between the distributions of generated and real images. The estimate is a lower bound if
the critic is 1-Lipschitz, which spectral normalization ensures. Equinox's
`SpectralNorm` has state: two singular vectors.

- `es.nn.Stateful` wraps `eqx.nn.SpectralNorm` into a layer that stores its own state.
- `es.RngStream` stores the key of the noise. Under `es.vmap`, each image draws its own.
- One compiled step trains two networks with two `es.Optimizer`s. Each loss updates the
  state of one network.
- `es.Ema` computes a moving average of the generator's parameters and statistics.

Run `python examples/gan.py [output.png]`; it takes about a minute on two cores.
"""

# %%
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.svm import SVC

import eqx_state as es


BATCH_SIZE, CRITIC_STEPS, POWER_ITERATIONS = 64, 4, 3
LATENT, WIDTH, PIXELS = 32, 256, 64


# %% The two networks
class Generator(es.Module):
    noise: es.RngStream
    layers: eqx.nn.Sequential

    def __init__(self, *, key: Key[Array, ""]):
        noise, first, second, last = jr.split(key, 4)
        relu = eqx.nn.Lambda(jax.nn.relu)
        self.noise = es.RngStream(noise)
        self.layers = eqx.nn.Sequential(
            [
                eqx.nn.Linear(LATENT, WIDTH, use_bias=False, key=first),
                es.nn.BatchNorm(WIDTH, axis_name="batch", momentum=0.9),
                relu,
                eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=second),
                es.nn.BatchNorm(WIDTH, axis_name="batch", momentum=0.9),
                relu,
                eqx.nn.Linear(WIDTH, PIXELS, key=last),
                eqx.nn.Lambda(jax.nn.sigmoid),
            ]
        )

    def __call__(self) -> Float[Array, "64"]:
        return self.layers(jr.normal(self.noise(), (LATENT,)))


class Critic(es.Module):
    layers: list[es.nn.Stateful]

    def __init__(self, *, key: Key[Array, ""]):
        self.layers = []
        sizes = [(PIXELS, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
        for (inputs, outputs), keys in zip(sizes, jr.split(key, (3, 2)), strict=True):
            weights, vectors = keys
            linear = eqx.nn.Linear(inputs, outputs, key=weights)
            norm = eqx.nn.SpectralNorm(linear, "weight", POWER_ITERATIONS, key=vectors)
            self.layers.append(es.nn.Stateful(norm))

    def __call__(self, x: Float[Array, "64"]) -> Float[Array, "1"]:
        for layer in self.layers[:-1]:
            # This activation keeps the norms of gradients (Anil et al., 2019).
            a, b = jnp.split(layer(x), 2)
            x = jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)])
        return self.layers[-1](x)


# %% One step: train the critic on several batches, then the generator on the critic
def generate(generator: Generator, size: int = BATCH_SIZE) -> Float[Array, "b 64"]:
    return es.vmap(generator, axis_name="batch", axis_size=size)()


def critic_loss(critic: Critic, real: Float[Array, "b 64"], fake: Float[Array, "b 64"]):
    values = es.vmap(critic)(jnp.concatenate([real, fake]))
    return jnp.mean(values[len(real) :]) - jnp.mean(values[: len(real)])


def generator_loss(generator: Generator, critic: Critic) -> Float[Array, ""]:
    return -jnp.mean(jax.vmap(critic)(generate(generator)))


@es.jit
def step(models, optimizers, average: es.Ema, real: Float[Array, "n b 64"]):
    (generator, critic), (for_generator, for_critic) = models, optimizers
    for images in real:
        fake, generator = es.mutable(generate)(generator)
        (loss, critic), grads = es.value_and_grad(critic_loss)(critic, images, fake)
        critic, for_critic = for_critic.update(grads, critic)
    # In eval mode, the critic does not write state, so plain `jax.vmap` is enough.
    grads, generator = es.grad(generator_loss)(generator, critic.eval())
    generator, for_generator = for_generator.update(grads, generator)
    average = average.update(generator)
    return loss, (generator, critic), (for_generator, for_critic), average


# %% Train
def train(models, images, steps: int):
    """The estimates of the distance, the averaged generator, and the critic."""
    # Reduce the critic's learning rate to zero, so that its singular vectors can catch
    # up with its matrices.
    half = steps * CRITIC_STEPS // 2
    rates = 3e-4, optax.linear_schedule(1e-3, 0.0, half, transition_begin=half)
    optimizers = tuple(
        es.Optimizer(optax.adam(rate, b1=0.5, b2=0.9)).init(model)
        for rate, model in zip(rates, models, strict=True)
    )
    average = es.Ema(0.99, on=es.any_of(es.Parameter, es.BatchStat)).init(models[0])
    rng, estimates = np.random.default_rng(0), []
    for i in range(1, steps + 1):
        real = images[rng.choice(len(images), (CRITIC_STEPS, BATCH_SIZE))]
        loss, models, optimizers, average = step(models, optimizers, average, real)
        estimates.append(-loss)
        if i % 100 == 0:
            print(f"step {i}: estimated distance {-loss:.3f}")
    _, critic = models
    return np.array(estimates), average.model, critic


# %% Measure the critic's layers, and the distance of samples to real images
def spectral_norm(layer: es.nn.Stateful) -> float:
    """The largest singular value of the matrix that the critic uses."""
    norm = layer.layer
    weight, (u, v) = norm.layer.weight, norm.uv_index.init
    return float(jnp.linalg.norm(weight, 2) / (u @ weight @ v))


def frechet_distance(xs: Float[np.ndarray, "n d"], ys: Float[np.ndarray, "m d"]):
    """Between normal distributions fitted to the two sets (Dowson and Landau, 1982)."""
    a, b = np.cov(xs.T), np.cov(ys.T)
    # The trace of the square root of `a @ b`, whose eigenvalues are not negative.
    overlap = np.sqrt(np.linalg.eigvals(a @ b).real.clip(0)).sum()
    means = np.sum((xs.mean(0) - ys.mean(0)) ** 2)
    return float(means + np.trace(a) + np.trace(b) - 2 * overlap)


# %% Train, draw samples, and classify them
def main(path=None, *, steps=1000, least_share=0.03, closer=10.0, norm=1.05):
    """The Fréchet distance of samples to real digits, in 20 principal components."""
    digits = load_digits()
    images = np.float32(digits.data / 16)
    for_generator, for_critic = jr.split(jr.key(0))
    models = untrained, _ = Generator(key=for_generator), Critic(key=for_critic)
    estimates, average, critic = train(models, images, steps)

    # The stream also advances in eval mode, so call the generator by `es.mutable`.
    draw = es.jit(lambda g: es.mutable(generate)(g.eval(), 2000)[0])
    samples, before = np.asarray(draw(average)), np.asarray(draw(untrained))
    pca = PCA(20).fit(images)
    floor, reached, at_first = (
        frechet_distance(pca.transform(xs), pca.transform(images[1::2]))
        for xs in (images[::2], samples, before)
    )
    classifier = SVC(gamma=1.0 / 8).fit(images, digits.target)
    shares = np.bincount(classifier.predict(samples), minlength=10) / len(samples)
    norms = [spectral_norm(layer) for layer in critic.layers]
    print(f"Fréchet distance: {at_first:.2f} untrained, {reached:.2f} trained,")
    print(f"{floor:.2f} between two halves of the real digits")
    print("share of each digit:", *(f"{share:.1%}" for share in shares))
    print("spectral norms:", *(f"{norm:.4f}" for norm in norms))
    if path is not None:
        import _pictures  # needs matplotlib

        _pictures.gan(path, images, samples, estimates)

    assert max(norms) <= norm, norms
    assert min(shares) >= least_share, shares
    assert reached * closer <= at_first, (reached, at_first)
    return reached


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
