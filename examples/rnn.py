"""Recognise a digit that is read row by row, all at once or as the rows come.

Two recurrent layers of Equinox read scikit-learn's 8 × 8 images from top to bottom.
What they have read so far is a hidden state, and there are two places for it. In
training the images are complete: the hidden state is the carry of a scan. In use, rows
come one at a time, from a scanner perhaps: then the model keeps it.

- `es.scan` carries what it is given, and beside it the key of the dropout layer.
- `logits, model = es.mutable(model.step)(row)` reads one row, and returns the model
  that has read it. It gives what the scan gives.
- `Memory` is a kind of its own. `es.map(..., on=Memory)` empties it, or makes room in
  it for many images; `axes={Memory: 0}` maps a step over them, with weights for all.
- The memory is state, so that gradients and the optimizer never see it.

Run `python examples/rnn.py [output.png]`. The picture is written to `rnn.png` in the
current directory if no path is given. It takes under a minute on two cores.
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
from jaxtyping import Array, Float, Int, Key
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE = 96
WIDTH = 96
ROWS = 8

Hidden = tuple[Float[Array, " width"], Float[Array, " width"]]


# %% The model. `advance` is the network, as a function of its hidden state; `__call__`
# and `step` are the two ways to use it.
class Memory(es.State):
    """What a network remembers of the rows before."""


class Reader(es.Module):
    first: eqx.nn.GRUCell
    dropout: es.nn.Dropout
    second: eqx.nn.GRUCell
    head: eqx.nn.Linear
    memory: Memory[Hidden]

    def __init__(self, *, key: Key[Array, ""]):
        first, dropout, second, head = jr.split(key, 4)
        self.first = eqx.nn.GRUCell(8, WIDTH, key=first)
        self.dropout = es.nn.Dropout(0.3, key=dropout)
        self.second = eqx.nn.GRUCell(WIDTH, WIDTH, key=second)
        self.head = eqx.nn.Linear(WIDTH, 10, key=head)
        self.memory = jnp.zeros(WIDTH), jnp.zeros(WIDTH)

    def advance(
        self, hidden: Hidden, row: Float[Array, "8"]
    ) -> tuple[Hidden, Float[Array, "10"]]:
        first = self.first(row, hidden[0])
        second = self.second(self.dropout(first), hidden[1])
        return (first, second), self.head(second)

    def __call__(self, image: Float[Array, "8 8"]) -> Float[Array, "8 10"]:
        """The logits after each row of a complete image."""
        start = jnp.zeros(WIDTH), jnp.zeros(WIDTH)
        _, logits = es.scan(self.advance, start, image)
        return logits

    def step(self, row: Float[Array, "8"]) -> Float[Array, "10"]:
        """The logits after one more row, which is remembered."""
        self.memory, logits = self.advance(self.memory, row)
        return logits


def with_memory(model: Reader, *shape: int) -> Reader:
    """The model with an empty memory for one image, or for as many as `shape` says."""
    return es.map(lambda _: jnp.zeros((*shape, WIDTH)), model, on=Memory)


# %% One training step. A guess counts after every row, if less than after the last.
def loss_fn(
    model: Reader, images: Float[Array, "b 8 8"], labels: Int[Array, " b"]
) -> Float[Array, ""]:
    logits = es.vmap(model)(images)
    after_each = jax.vmap(
        optax.softmax_cross_entropy_with_integer_labels, in_axes=(1, None)
    )(logits, labels).mean(axis=1)
    return jnp.average(after_each, weights=jnp.arange(1.0, ROWS + 1))


@es.jit
def train_step(model: Reader, optimizer: es.Optimizer, images: Array, labels: Array):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, images, labels)
    model, optimizer = optimizer.update(grads, model)
    return model, optimizer, loss


# %% Row by row: one image, or many at a time, each with a memory of its own.
@es.jit
def read(model: Reader, row: Float[Array, "8"]):
    return es.mutable(model.step)(row)


@es.jit
def read_many(model: Reader, rows: Float[Array, "b 8"]):
    return es.mutable(es.vmap(model.step, axes={Memory: 0}))(rows)


def stream(read, model: Reader, rows) -> Float[Array, "rows ..."]:
    """The logits after each row."""
    logits = []
    for row in rows:
        out, model = read(model, row)
        logits.append(out)
    return jnp.stack(logits)


def plot(accuracies, images, labels, probabilities) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2, 3))
    axes = left.subplots()
    axes.plot(range(1, ROWS + 1), accuracies, "o-")
    axes.axhline(0.1, color="0.5", linestyle="--", label="chance")
    axes.set(xlabel="rows read", ylabel="test accuracy", ylim=(0, 1.02))
    axes.legend()
    right.suptitle("image, and the probability of each digit after each row")
    for i, ax in enumerate(right.subplots(2, 6).flat):
        picture = images[i // 2] if i % 2 == 0 else probabilities[i // 2]
        ax.imshow(picture, cmap=["gray_r", "Blues"][i % 2], vmin=0, vmax=1)
        ax.set_yticks([])
        ax.set_xticks([] if i % 2 == 0 else [labels[i // 2]])
    return figure


# %% Train on complete images, then read the test images row by row.
def main(
    epochs: int = 40, path: str | Path = "rnn.png", at_least: float = 0.93
) -> Float[np.ndarray, "8"]:
    """The test accuracy after each row."""
    digits = load_digits()
    train_images, images, train_labels, labels = train_test_split(
        np.float32(digits.images / 16),
        digits.target,
        test_size=0.2,
        stratify=digits.target,
        random_state=0,
    )
    steps = len(train_images) // BATCH_SIZE
    schedule = optax.cosine_onecycle_schedule(epochs * steps, peak_value=5e-3)
    model = Reader(key=jr.key(0))
    optimizer = es.Optimizer(optax.adam(schedule)).init(model)

    console, rng = Console(), np.random.default_rng(0)
    for _ in track(range(epochs), "GRU", console=console):
        batches = rng.permutation(len(train_images))[: steps * BATCH_SIZE]
        for batch in batches.reshape(steps, BATCH_SIZE):
            model, optimizer, loss = train_step(
                model, optimizer, train_images[batch], train_labels[batch]
            )

    model = model.eval()
    scanned = jax.vmap(model)(images)  # in eval mode nothing is drawn or written
    streamed = stream(read_many, with_memory(model, len(images)), images.swapaxes(0, 1))
    accuracies = np.mean(np.argmax(streamed, axis=2) == labels[None], axis=1)
    for rows, accuracy in enumerate(accuracies, start=1):
        console.print(f"test accuracy after row {rows}: {accuracy:.1%}")
    probabilities = jax.nn.softmax(scanned, axis=2)
    plot(accuracies, images, labels, probabilities).savefig(path)
    console.print(f"Accuracy and guesses by row: {Path(path).resolve()}")

    one = stream(read, with_memory(model), images[0])
    assert np.allclose(one, scanned[0], atol=1e-5)
    assert np.allclose(streamed, scanned.swapaxes(0, 1), atol=1e-5)
    assert accuracies[-1] >= at_least
    return accuracies


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "rnn.png")
