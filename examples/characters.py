"""A character model, trained with groups, accumulated gradients and averaged weights.

A recurrent network learns to write like Python's documentation, which is a part of
every installation of Python. The batches are small, as if the device had little memory.

- Rules choose the optimizer of each array: only matrices have weight decay.
- `optax.MultiSteps` accumulates the gradients of four batches for one update.
- `es.Ema` averages the weights. The averaged model is evaluated, and writes the text.
- The learning rate is an array in the optimizer. If the averaged model no longer
  improves, `optimizer.set(learning_rate=...)` halves it. The step is compiled once.

Run `python examples/characters.py [output.png]`; it takes about a minute on two cores.
"""

# %%
import sys
from pydoc_data.topics import topics

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

import eqx_state as es


BATCH_SIZE, ACCUMULATE = 8, 4
LENGTH, WIDTH = 64, 96
EVERY = 100  # steps between two evaluations


# %% The model
class Writer(es.Module):
    embedding: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    dropout: es.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, characters: int, *, key: Key[Array, ""]):
        embedding, cell, dropout, head = jr.split(key, 4)
        self.embedding = eqx.nn.Embedding(characters, 32, key=embedding)
        self.cell = eqx.nn.GRUCell(32, WIDTH, key=cell)
        self.dropout = es.nn.Dropout(0.1, key=dropout)
        self.head = eqx.nn.Linear(WIDTH, characters, key=head)

    def read(self, hidden: Float[Array, " width"], character: Int[Array, ""]):
        """The hidden state, and the logits of the next character."""
        hidden = self.cell(self.embedding(character), hidden)
        return hidden, self.head(self.dropout(hidden))

    def __call__(self, text: Int[Array, " t"]) -> Float[Array, "t characters"]:
        _, logits = es.scan(self.read, jnp.zeros(WIDTH), text)
        return logits


def loss_fn(model: Writer, texts: Int[Array, "b t+1"]) -> Float[Array, ""]:
    logits = es.vmap(model)(texts[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:])
    return jnp.mean(losses)


# %% The optimizer, and one training step
def make_optimizer(rate: float) -> es.Optimizer:
    adamw = optax.inject_hyperparams(
        optax.adamw, static_args=("b1", "b2"), hyperparam_dtype=jnp.float32
    )
    matrices = es.all_of(es.trainable, lambda part: part.value.ndim > 1)
    decays = {matrices: 0.1, ...: 0.0}
    return es.Optimizer(
        {
            arrays: optax.MultiSteps(adamw(rate, weight_decay=decay), ACCUMULATE)
            for arrays, decay in decays.items()
        }
    )


@es.jit
@eqx.debug.assert_max_traces(max_traces=1)
def step(model: Writer, optimizer: es.Optimizer, ema: es.Ema, texts):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, texts)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer, ema.update(model)


evaluate = es.jit(loss_fn)


# %% Train
# Halve the learning rate if the averaged model improves too little.
def train(model: Writer, text, tests, steps: int, rate: float):
    optimizer, ema = make_optimizer(rate).init(model), es.Ema(0.99).init(model)
    rng = np.random.default_rng(0)
    curves = {"last weights": [], "average": []}
    rates = []
    for i in range(1, steps + 1):
        starts = rng.integers(len(text) - LENGTH, size=BATCH_SIZE)
        texts = text[starts[:, None] + np.arange(LENGTH + 1)]
        _, model, optimizer, ema = step(model, optimizer, ema, texts)
        if i % EVERY == 0:
            best = min(curves["average"], default=np.inf)
            for name, weights in {"last weights": model, "average": ema.model}.items():
                curves[name].append(float(evaluate(weights.eval(), tests)))
            rates.append(float(optimizer.hyperparams[..., "learning_rate"]))
            print(f"step {i}: {curves['average'][-1]:.3f} nats, rate {rates[-1]:.1e}")
            if curves["average"][-1] > best - 0.05:
                optimizer = optimizer.set(learning_rate=rates[-1] / 2)
    return ema.model.eval(), curves, rates


# %% The text: nine of ten paragraphs for training, the rest held out
def load_text() -> tuple[str, str]:
    text = "\n".join(topics[name] for name in sorted(topics))
    parts = "".join(c for c in text if c.isascii()).split("\n\n")
    held_out = parts[::10]
    del parts[::10]
    return "\n\n".join(parts), "\n\n".join(held_out)


def bigram_loss(train: np.ndarray, test: np.ndarray, characters: int) -> float:
    """The loss of a prediction from only the previous character."""
    pairs = np.full((characters, characters), 0.1)
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    pairs /= pairs.sum(axis=1, keepdims=True)
    return float(-np.log(pairs[test[:-1], test[1:]]).mean())


@es.jit
def write(model: Writer, start: Int[Array, " t"], keys: Key[Array, " n"]):
    """A continuation of `start`, character by character."""

    def next_character(carry, key):
        hidden, logits = carry
        character = jr.categorical(key, logits / 0.5)
        return model.read(hidden, character), character

    hidden, logits = es.scan(model.read, jnp.zeros(WIDTH), start)
    _, text = es.scan(next_character, (hidden, logits[-1]), keys)
    return text


# %%
def main(path=None, *, steps=800, rate=2e-2, better_by=0.7, gain=0.02, halvings=1):
    """The losses of the average on the held-out text, and the learning rates."""
    parts = load_text()
    alphabet = sorted(set("".join(parts)))
    index = {character: i for i, character in enumerate(alphabet)}
    text, held_out = (np.array([index[c] for c in p], np.int32) for p in parts)
    windows = np.lib.stride_tricks.sliding_window_view(held_out, LENGTH + 1)
    tests = windows[:: max(1, len(windows) // 100)]
    baseline = bigram_loss(text, held_out, len(alphabet))

    model = Writer(len(alphabet), key=jr.key(0))
    model, curves, rates = train(model, text, tests, steps, rate)
    prompt = "The object "
    start = np.array([index[c] for c in prompt])
    characters = write(model, start, jr.split(jr.key(1), 300))
    written = prompt + "".join(alphabet[i] for i in characters)
    print(f"bigrams: {baseline:.3f} nats\n{written}")
    if path is not None:
        import _pictures  # needs matplotlib

        _pictures.characters(path, EVERY, curves, rates, baseline, written)

    # Better than bigrams; better with the average; and the learning rate fell.
    assert baseline - curves["average"][-1] >= better_by
    assert max(np.subtract(curves["last weights"], curves["average"])) >= gain
    assert rates[-1] <= rate / 2**halvings
    return curves, rates


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
