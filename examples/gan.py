"""Train a Wasserstein GAN on scikit-learn's 1,797 handwritten digits.

A generator makes images of noise, and a critic tells how far their distribution is from
that of the real ones. The estimate is a true lower bound of the Wasserstein distance as
long as the critic changes no faster than its input does. Spectral normalisation sees to
that, and it is a stateful layer of Equinox: it keeps two singular vectors.

- `es.nn.Stateful` makes `eqx.nn.SpectralNorm` a layer that threads its own state.
- `es.RngStream` holds the noise's key: under `es.vmap` each image draws its own.
- Two networks and two `es.Optimizer`s go through one compiled step; each loss threads
  the state of its own network.
- `es.map` keeps a moving average of the generator, of parameters and statistics alone.

Run `python examples/gan.py [output.png]`. The picture is written to `gan.png` in the
current directory if no path is given. It takes about a minute on two cores.
"""

# %%
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
from sklearn.decomposition import PCA
from sklearn.svm import SVC

import eqx_state as es


BATCH_SIZE, CRITIC_STEPS, POWER_ITERATIONS = 64, 4, 3
LATENT, WIDTH, PIXELS = 32, 256, 64


# %% The two networks. Noise and statistics are state, and so are singular vectors.
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


def max_min(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """An activation that keeps the norms of gradients (Anil et al., 2019)."""
    a, b = jnp.split(x, 2)
    return jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)])


def make_critic(key: Key[Array, ""]) -> eqx.nn.Sequential:
    def normalised(inputs: int, outputs: int, key: Key[Array, ""]) -> es.nn.Stateful:
        weights, vectors = jr.split(key)
        linear = eqx.nn.Linear(inputs, outputs, key=weights)
        norm = eqx.nn.SpectralNorm(linear, "weight", POWER_ITERATIONS, key=vectors)
        return es.nn.Stateful(norm)

    first, second, last = jr.split(key, 3)
    return eqx.nn.Sequential(
        [
            normalised(PIXELS, WIDTH, first),
            eqx.nn.Lambda(max_min),
            normalised(WIDTH, WIDTH, second),
            eqx.nn.Lambda(max_min),
            normalised(WIDTH, 1, last),
        ]
    )


# %% One step: the critic learns from several batches, then the generator from it.
def generate(generator: Generator, size: int = BATCH_SIZE) -> Float[Array, "b 64"]:
    return es.vmap(generator, axis_name="batch", axis_size=size)()


def critic_loss(
    critic: eqx.nn.Sequential, real: Float[Array, "b 64"], fake: Float[Array, "b 64"]
) -> Float[Array, ""]:
    values = es.vmap(critic)(jnp.concatenate([real, fake]))
    return jnp.mean(values[len(real) :]) - jnp.mean(values[: len(real)])


def generator_loss(generator: Generator, critic: eqx.nn.Sequential) -> Float[Array, ""]:
    return -jnp.mean(jax.vmap(critic)(generate(generator)))


@es.jit
def train_step(players, optimizers, average: Generator, real: Float[Array, "n b 64"]):
    (generator, critic), (for_generator, for_critic) = players, optimizers
    for images in real:
        fake, generator = es.mutable(generate)(generator)
        (loss, critic), grads = es.value_and_grad(critic_loss)(critic, images, fake)
        critic, for_critic = for_critic.update(grads, critic)
    # In eval mode the critic's singular vectors stay, and plain `jax.vmap` will do.
    grads, generator = es.grad(generator_loss)(generator, es.eval(critic))
    generator, for_generator = for_generator.update(grads, generator)
    average = es.map(
        lambda old, new: 0.99 * old + 0.01 * new,
        average,
        generator,
        on=es.any_of(es.Parameter, es.BatchStat),
    )
    return (generator, critic), (for_generator, for_critic), average, -loss


# %% What is measured: the critic's layers, and the distance of samples to real images.
def spectral_norms(critic: eqx.nn.Sequential) -> list[float]:
    """The largest singular value of each matrix, as the critic uses it."""
    norms = []
    for layer in critic.layers:
        if isinstance(layer, es.nn.Stateful):
            norm = layer.layer
            weight, (u, v) = norm.layer.weight, norm.uv_index.init
            norms.append(float(jnp.linalg.norm(weight, 2) / (u @ weight @ v)))
    return norms


def frechet_distance(xs: Float[np.ndarray, "n d"], ys: Float[np.ndarray, "m d"]):
    """Between the normal distributions of two sets (Dowson and Landau, 1982)."""
    a, b = np.cov(xs.T), np.cov(ys.T)
    # The trace of the square root of `a @ b`, whose eigenvalues are not negative.
    overlap = np.sqrt(np.linalg.eigvals(a @ b).real.clip(0)).sum()
    means = np.sum((xs.mean(0) - ys.mean(0)) ** 2)
    return float(means + np.trace(a) + np.trace(b) - 2 * overlap)


def mosaic(images: Float[np.ndarray, "n 64"]) -> Float[np.ndarray, "80 80"]:
    """The first 64 images on one sheet, with a margin around each."""
    framed = np.pad(images[:64].reshape(8, 8, 8, 8), ((0, 0), (0, 0), (1, 1), (1, 1)))
    return framed.swapaxes(1, 2).reshape(80, 80)


def plot(real, samples, estimates) -> Figure:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    *sheets, curve = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
    titled = {"real digits": real, "samples": samples}
    for ax, (title, images) in zip(sheets, titled.items(), strict=True):
        ax.imshow(mosaic(images), cmap="gray_r", vmin=0, vmax=1)
        ax.set_title(title)
        ax.axis("off")
    width = max(len(estimates) // 50, 1)
    smooth = np.convolve(estimates, np.ones(width) / width, "valid")
    curve.plot(estimates, lw=0.5, alpha=0.4, color="C0")
    curve.plot(np.arange(len(smooth)) + width / 2, smooth, color="C0")
    curve.set(title="critic's estimate of the distance", xlabel="step", ylim=(0, None))
    return figure


# %% Train, draw samples, and have a classifier of real digits look at them.
def main(
    steps: int = 1000,
    path: str | Path = "gan.png",
    least_share: float = 0.03,
    closer: float = 10.0,
    norm: float = 1.01,
) -> float:
    """The Fréchet distance of samples to real digits, in 20 principal components."""
    digits = load_digits()
    images = np.float32(digits.data / 16)
    for_generator, for_critic = jr.split(jr.key(0))
    generator, critic = Generator(key=for_generator), make_critic(for_critic)
    untrained = average = generator
    players = generator, critic
    # The critic comes to rest: its singular vectors follow matrices that still change.
    half = steps * CRITIC_STEPS // 2
    rates = 3e-4, optax.linear_schedule(1e-3, 0.0, half, transition_begin=half)
    optimizers = tuple(
        es.Optimizer(optax.adam(rate, b1=0.5, b2=0.9)).init(player)
        for player, rate in zip(players, rates, strict=True)
    )
    console, rng, estimates = Console(), np.random.default_rng(0), []
    for _ in track(range(steps), "training", console=console):
        batches = rng.choice(len(images), (CRITIC_STEPS, BATCH_SIZE))
        players, optimizers, average, estimate = train_step(
            players, optimizers, average, images[batches]
        )
        estimates.append(estimate)
    estimates = np.array(estimates)
    _, critic = players

    # The stream advances in eval mode, too, so that this writes state.
    draw = es.jit(lambda g: es.mutable(generate)(g.eval(), 2000)[0])
    samples, before = np.asarray(draw(average)), np.asarray(draw(untrained))
    pca = PCA(20).fit(images)
    floor, reached, at_first = (
        frechet_distance(pca.transform(xs), pca.transform(images[1::2]))
        for xs in (images[::2], samples, before)
    )
    classifier = SVC(gamma=1.0 / 8).fit(images, digits.target)
    shares = np.bincount(classifier.predict(samples), minlength=10) / len(samples)
    norms = spectral_norms(critic)
    console.print(f"Fréchet distance: {at_first:.2f} untrained, {reached:.2f} trained,")
    console.print(f"{floor:.2f} between two halves of the real digits")
    console.print("share of each digit:", *(f"{share:.1%}" for share in shares))
    console.print("spectral norms:", *(f"{norm:.4f}" for norm in norms))

    plot(images, samples, estimates).savefig(path)
    console.print(f"Digits, samples and the estimate: {Path(path).resolve()}")

    assert max(norms) <= norm, norms
    assert min(shares) >= least_share, shares
    assert reached * closer <= at_first, (reached, at_first)
    return reached


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "gan.png")
