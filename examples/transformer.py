"""A character transformer with a key-value cache, which has its own kind of state.

The model learns from scikit-learn's descriptions of its datasets. To write a text, it
caches the keys and values of the previous characters, so each new character costs a
forward pass of only one character.

- `class Cache(es.State)` is the kind. Fields of this kind are `None` in training.
  `es.configure(model, keys=..., values=..., position=0)` gives every layer a cache, and
  the same `__call__` then continues where the last call stopped.
- `es.scan` runs the blocks, which are one `Block` with stacked arrays. It slices cache
  and dropout keys like the weights, and stacks the new values.
- `es.mutable(write, kinds=Cache)` can write only the cache. Inside it, `es.scan`
  carries the cache from one character to the next.
- `self.sow("weights", ...)` costs nothing outside `es.capture`.

Run `python examples/transformer.py [output.png]`; it takes about a minute on two cores.
"""

# %%
import math
import sys
from importlib import resources

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

import eqx_state as es


BATCH_SIZE = 32
CONTEXT = 64
EVERY = 25  # steps between two evaluations
DEPTH, HEADS, WIDTH = 2, 2, 64


# %% The model
# With a cache, new characters also attend to cached ones.
class Cache(es.State):
    """The keys and values of the previous characters, and their number."""


class Attention(es.Module):
    project_in: eqx.nn.Linear
    project_out: eqx.nn.Linear
    keys: Cache[Float[Array, "context heads size"] | None] = None
    values: Cache[Float[Array, "context heads size"] | None] = None

    def __init__(self, *, key: Key[Array, ""]):
        key_in, key_out = jr.split(key)
        self.project_in = eqx.nn.Linear(WIDTH, 3 * WIDTH, use_bias=False, key=key_in)
        self.project_out = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key_out)

    def __call__(
        self, xs: Float[Array, "t width"], position: Int[Array, ""] | int
    ) -> Float[Array, "t width"]:
        projected = jax.vmap(self.project_in)(xs).reshape(len(xs), 3, HEADS, -1)
        queries, keys, values = jnp.unstack(projected, axis=1)
        if self.keys is not None:
            insert = jax.lax.dynamic_update_slice_in_dim
            keys = self.keys = insert(self.keys, keys, position, axis=0)
            values = self.values = insert(self.values, values, position, axis=0)
        before = jnp.arange(len(keys))[None] <= position + jnp.arange(len(xs))[:, None]
        scores = jnp.einsum("thd,shd->hts", queries, keys) / math.sqrt(WIDTH // HEADS)
        weights = jax.nn.softmax(jnp.where(before[None], scores, -jnp.inf))
        self.sow("weights", weights)
        mixed = jnp.einsum("hts,shd->thd", weights, values)
        return jax.vmap(self.project_out)(mixed.reshape(len(xs), WIDTH))


class Block(es.Module):
    attention: Attention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    dropouts: tuple[es.nn.Dropout, es.nn.Dropout]

    def __init__(self, key: Key[Array, ""]):
        attention, mlp, *dropouts = jr.split(key, 4)
        self.attention = Attention(key=attention)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=mlp)
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.dropouts = tuple(es.nn.Dropout(0.1, key=k) for k in dropouts)

    def __call__(
        self, xs: Float[Array, "t width"], position: Int[Array, ""] | int
    ) -> Float[Array, "t width"]:
        attended = self.attention(jax.vmap(self.norms[0])(xs), position)
        xs = xs + self.dropouts[0](attended)
        hidden = jax.vmap(lambda x: self.mlp(self.norms[1](x)))(xs)
        return xs + self.dropouts[1](hidden)


class Transformer(es.Module):
    characters: es.Parameter[Float[Array, "vocabulary width"]]
    places: es.Parameter[Float[Array, "context width"]]
    blocks: Block  # a stack: each array has a leading axis of size `DEPTH`
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    position: Cache[Int[Array, ""] | None] = None

    def __init__(self, vocabulary: int, *, key: Key[Array, ""]):
        characters, places, blocks, head = jr.split(key, 4)
        self.characters = jr.normal(characters, (vocabulary, WIDTH))
        self.places = jr.normal(places, (CONTEXT, WIDTH))
        self.blocks = eqx.filter_vmap(Block)(jr.split(blocks, DEPTH))
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, vocabulary, key=head)

    def __call__(self, text: Int[Array, " t"]) -> Float[Array, "t vocabulary"]:
        """The logits of the next character after each character of the text."""
        position = 0
        if self.position is not None:
            position, self.position = self.position, self.position + len(text)
        places = jax.lax.dynamic_slice_in_dim(self.places, position, len(text))
        xs = self.characters[text] + places
        xs, _ = es.scan(lambda xs, block: (block(xs, position), None), xs, self.blocks)
        return jax.vmap(lambda x: self.head(self.norm(x)))(xs)


# %% One training step
def loss_fn(model: Transformer, texts: Int[Array, "b t"]) -> Float[Array, ""]:
    logits = es.vmap(model)(texts[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()


@es.jit
def step(model, optimizer, texts):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, texts)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


evaluate = es.jit(loss_fn)  # called in eval mode, which writes no state


# %% Train
def train(model, text: Int[np.ndarray, " n"], tests: Int[np.ndarray, "m t"], steps):
    """The losses at each evaluation, and the trained model."""
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 6e-3, steps // 8, steps)
    optimizer = es.Optimizer(optax.adamw(schedule, weight_decay=0.1)).init(model)
    losses: dict[str, list[float]] = {"training": [], "held out": []}
    rng, recent = np.random.default_rng(0), []
    for i in range(1, steps + 1):
        batch = windows[rng.integers(len(windows), size=BATCH_SIZE)]
        loss, model, optimizer = step(model, optimizer, batch)
        recent.append(loss)
        if i % EVERY == 0:
            losses["training"].append(float(np.mean(recent[-EVERY:])))
            losses["held out"].append(float(evaluate(model.eval(), tests)))
            print(f"step {i}: {losses['held out'][-1]:.2f} nats per held-out character")
    return losses, model


# %% Write and read with the cache
def with_cache(model: Transformer) -> Transformer:
    """The model in eval mode, with an empty cache for one text."""
    empty = jnp.zeros((DEPTH, CONTEXT, HEADS, WIDTH // HEADS))
    return es.configure(model.eval(), keys=empty, values=empty, position=0)


def write(
    model: Transformer, start: Int[Array, " t"], length: int, key: Key[Array, ""]
) -> Int[Array, " length"]:
    """A continuation of `start`, character by character."""

    def next_character(logits, key):
        character = jr.categorical(key, logits / 0.6)
        return model(character[None])[0], character

    logits = model(start)[-1]  # the start is read at once
    _, text = es.scan(next_character, logits, jr.split(key, length))
    return text


def read(model: Transformer, text: Int[Array, " t"]) -> Float[Array, "t vocabulary"]:
    """The result of `model(text)`, computed one character at a time."""
    _, logits = es.scan(lambda _, c: (None, model(c[None])[0]), None, text)
    return logits


# %% The texts and the baselines
def load_texts() -> tuple[str, str]:
    """Nine of ten paragraphs for training, the rest held out."""
    folder = resources.files("sklearn.datasets.descr")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=str)
    texts = [f.read_text(encoding="utf-8") for f in files]
    paragraphs = "\n\n".join(texts).split("\n\n")
    held_out = paragraphs[::10]
    del paragraphs[::10]
    return "\n\n".join(paragraphs), "\n\n".join(held_out)


def frequency_losses(train: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """The losses of predictions from the frequencies of characters and of pairs."""
    pairs = np.full((max(train.max(), test.max()) + 1,) * 2, 0.1)
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    single = pairs.sum(axis=0) / pairs.sum()
    pairs /= pairs.sum(axis=1, keepdims=True)
    likelihoods = {"unigrams": single[test[1:]], "bigrams": pairs[test[:-1], test[1:]]}
    return {name: float(-np.log(p).mean()) for name, p in likelihoods.items()}


# %% Train, compare reading with and without the cache, and write
def main(path=None, *, steps=500, better_by=0.3):
    """The loss on the held-out paragraphs, and three texts that the model wrote."""
    texts = load_texts()
    alphabet = sorted(set("".join(texts)))
    index = {character: i for i, character in enumerate(alphabet)}
    text, held_out = (np.array([index[c] for c in text], np.int32) for text in texts)
    tests = np.lib.stride_tricks.sliding_window_view(held_out, CONTEXT + 1)[::CONTEXT]
    model = Transformer(len(alphabet), key=jr.key(0))
    losses, model = train(model, text, tests, steps)

    model, shown = model.eval(), tests[0, :CONTEXT]
    (logits, _), sown = es.capture(model)(shown)
    decoder = with_cache(model)
    cached, after = es.jit(es.mutable(read, kinds=Cache))(decoder, shown)

    # `decoder` does not change, so each text starts with an empty cache.
    prompt, samples = "The dataset ", []
    start = np.array([index[c] for c in prompt])
    writer = es.jit(es.mutable(write, kinds=Cache))
    for key in jr.split(jr.key(1), 3):
        written, _ = writer(decoder, start, CONTEXT - len(prompt), key)
        samples.append(prompt + "".join(alphabet[c] for c in written))

    loss, baselines = losses["held out"][-1], frequency_losses(text, held_out)
    print("held out:", *(f"{name} {x:.2f}," for name, x in baselines.items()))
    print(f"transformer {loss:.2f}", *samples, sep="\n")
    if path is not None:
        import _pictures  # needs matplotlib

        shown = "".join(alphabet[c] for c in shown[:24]).replace("\n", " ")
        weights = sown["blocks.attention.weights"][:, :, :24, :24]
        _pictures.transformer(path, losses, EVERY, baselines, shown, weights, samples)

    assert np.allclose(cached, logits, atol=1e-3)
    assert after.position == CONTEXT
    assert loss < baselines["bigrams"] - better_by
    return loss, samples


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
