"""Recognize digits row by row, from complete images or as the rows arrive.

Two recurrent layers of Equinox read scikit-learn's 8 × 8 images from top to bottom. In
training, the images are complete, and the hidden state is the carry of a scan. In use,
the rows arrive one at a time, as from a scanner, and the model stores the hidden state.

- `es.scan` carries the hidden state, together with the key of the dropout layer.
- `logits, model = es.mutable(model.step)(row)` reads one row, and returns a model with
  the new hidden state. The logits equal those of the scan.
- `Memory` is a user-defined kind. `es.map(..., on=Memory)` clears the memory, or
  enlarges it for many images. `axes={Memory: 0}` maps a step over the images, with
  shared weights.
- The memory is state, so gradients and the optimizer ignore it.

Run `python examples/rnn.py [output.png]`; it takes under a minute on two cores.
"""

# %%
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE = 96
WIDTH = 96
ROWS = 8

Hidden = tuple[Float[Array, " width"], Float[Array, " width"]]


# %% The model
# `advance` is the network as a function of its hidden state. `__call__` reads a
# complete image, and `step` one row.
class Memory(es.State):
    """The hidden state after the previous rows."""


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
        """The logits after one more row. Updates the memory."""
        self.memory, logits = self.advance(self.memory, row)
        return logits


# %% One training step
# The loss weighs the predictions after later rows more.
def loss_fn(model: Reader, images: Float[Array, "b 8 8"], labels: Int[Array, " b"]):
    logits = es.vmap(model)(images)
    labels = jnp.repeat(labels[:, None], ROWS, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.average(losses.mean(axis=0), weights=jnp.arange(1.0, ROWS + 1))


@es.jit
def step(model, optimizer, images, labels):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, images, labels)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


# %% Train on complete images
def train(images, labels, epochs: int) -> Reader:
    steps = len(images) // BATCH_SIZE
    schedule = optax.cosine_onecycle_schedule(epochs * steps, peak_value=5e-3)
    model = Reader(key=jr.key(0))
    optimizer = es.Optimizer(optax.adam(schedule)).init(model)
    rng = np.random.default_rng(0)
    for epoch in range(1, epochs + 1):
        batches = rng.permutation(len(images))[: steps * BATCH_SIZE]
        for batch in batches.reshape(steps, BATCH_SIZE):
            xs, ys = images[batch], labels[batch]
            loss, model, optimizer = step(model, optimizer, xs, ys)
        if epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    return model


# %% Read row by row: one image, or many at once, each with its own memory
@es.jit
def read(model: Reader, row: Float[Array, "8"]):
    return es.mutable(model.step)(row)


@es.jit
def read_many(model: Reader, rows: Float[Array, "b 8"]):
    return es.mutable(es.vmap(model.step, axes={Memory: 0}))(rows)


def with_memory(model: Reader, *shape: int) -> Reader:
    """The model with an empty memory for one image, or for as many as `shape` says."""
    return es.map(lambda _: jnp.zeros((*shape, WIDTH)), model, on=Memory)


def stream(read, model: Reader, rows) -> Float[Array, "rows ..."]:
    """The logits after each row."""
    logits = []
    for row in rows:
        out, model = read(model, row)
        logits.append(out)
    return jnp.stack(logits)


# %% Train, then read the test images in both ways
def main(path=None, *, epochs=40, at_least=0.9) -> Float[np.ndarray, "8"]:
    """The test accuracy after each row."""
    digits = load_digits()
    images, labels = np.float32(digits.images / 16), digits.target
    train_images, images, train_labels, labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    model = train(train_images, train_labels, epochs).eval()

    scanned = jax.vmap(model)(images)  # eval mode: no state is written
    streamed = stream(read_many, with_memory(model, len(images)), images.swapaxes(0, 1))
    one = stream(read, with_memory(model), images[0])
    accuracies = np.mean(np.argmax(streamed, axis=2) == labels[None], axis=1)
    print("test accuracy after each row:", *(f"{a:.1%}" for a in accuracies))
    if path is not None:
        import _pictures  # needs matplotlib

        _pictures.rnn(path, accuracies, images, labels, jax.nn.softmax(scanned, axis=2))

    assert np.allclose(one, scanned[0], atol=1e-4)
    assert np.allclose(streamed, scanned.swapaxes(0, 1), atol=1e-4)
    assert accuracies[-1] >= at_least
    return accuracies


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
