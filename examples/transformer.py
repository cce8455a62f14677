"""A character transformer that writes with a cache of a kind of its own.

It is trained on the texts with which scikit-learn describes its datasets. To write a
text, it keeps the keys and values of the characters before, so that each further
character costs one pass of one character.

- `class Cache(es.State)` is the kind. Its fields are `None` in training, which knows
  nothing of them. `es.configure(model, keys=..., values=..., position=0)` gives every
  layer room for a cache, and the same `__call__` then goes on where it stopped.
- `es.scan` runs the blocks, one `Block` with stacked arrays: the cache and the keys of
  the dropout layers are sliced as the weights are, and written back stacked.
- `es.mutable(write, kinds=Cache)` may write the cache, and nothing else. In it
  `es.scan` carries the cache from one character to the next.
- `self.sow("weights", ...)` costs nothing, until `es.capture` asks for it.

Run `python examples/transformer.py [output.png]`. The picture is written to
`transformer.png` in the current directory if no path is given. It takes about a minute
on two cores.
"""

# %%
import math
import sys
from importlib import resources
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

import eqx_state as es


BATCH_SIZE = 32
CONTEXT = 64
EVERY = 25  # steps the losses are noted
DEPTH, HEADS, WIDTH = 2, 2, 64


# %% The model. In the attention the new characters come after those in the cache.
class Cache(es.State):
    """What a transformer remembers of the characters before."""


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
        thought = jax.vmap(lambda x: self.mlp(self.norms[1](x)))(xs)
        return xs + self.dropouts[1](thought)


class Transformer(es.Module):
    characters: es.Parameter[Float[Array, "vocabulary width"]]
    places: es.Parameter[Float[Array, "context width"]]
    blocks: Block  # a stack: each of its arrays has an axis of size `DEPTH` in front
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
        """The logits of the character after each of the text's."""
        position = 0
        if self.position is not None:
            position, self.position = self.position, self.position + len(text)
        places = jax.lax.dynamic_slice_in_dim(self.places, position, len(text))
        xs = self.characters[text] + places
        xs, _ = es.scan(lambda xs, block: (block(xs, position), None), xs, self.blocks)
        return jax.vmap(lambda x: self.head(self.norm(x)))(xs)


def with_cache(model: Transformer) -> Transformer:
    """The model in eval mode, with room for a text and none in it yet."""
    empty = jnp.zeros((DEPTH, CONTEXT, HEADS, WIDTH // HEADS))
    return es.configure(model.eval(), keys=empty, values=empty, position=0)


# %% One training step.
def loss_fn(model: Transformer, texts: Int[Array, "b t"]) -> Float[Array, ""]:
    logits = es.vmap(model)(texts[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()


@es.jit
def step(model: Transformer, optimizer: es.Optimizer, texts: Int[Array, "b t"]):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, texts)
    model, optimizer = optimizer.update(grads, model)
    return model, optimizer, loss


evaluate = es.jit(loss_fn)  # in eval mode nothing is drawn or written


# %% Writing and reading with the cache.
def write(
    model: Transformer, start: Int[Array, " t"], length: int, key: Key[Array, ""]
) -> Int[Array, " length"]:
    """A text that goes on after `start`, character by character."""

    def next_character(logits, key):
        character = jr.categorical(key, logits / 0.6)
        return model(character[None])[0], character

    logits = model(start)[-1]  # the start is read at once
    _, text = es.scan(next_character, logits, jr.split(key, length))
    return text


def read(model: Transformer, text: Int[Array, " t"]) -> Float[Array, "t vocabulary"]:
    """What `model(text)` returns, by one character at a time."""
    _, logits = es.scan(lambda _, c: (None, model(c[None])[0]), None, text)
    return logits


# %% The texts, and what the model has to beat.
def load_texts() -> tuple[str, str]:
    """Nine of ten paragraphs to train on, and the others."""
    folder = resources.files("sklearn.datasets.descr")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=str)
    texts = [f.read_text(encoding="utf-8") for f in files]
    paragraphs = "\n\n".join(texts).split("\n\n")
    held_out = paragraphs[::10]
    del paragraphs[::10]
    return "\n\n".join(paragraphs), "\n\n".join(held_out)


def frequency_losses(train: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """The loss of a guess by how often characters occur, alone and after another."""
    pairs = np.full((max(train.max(), test.max()) + 1,) * 2, 0.1)
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    single = pairs.sum(axis=0) / pairs.sum()
    pairs /= pairs.sum(axis=1, keepdims=True)
    likelihoods = {"unigrams": single[test[1:]], "bigrams": pairs[test[:-1], test[1:]]}
    return {name: float(-np.log(p).mean()) for name, p in likelihoods.items()}


def plot(losses, baselines, text: str, weights, samples) -> Figure:
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for name, curve in losses.items():
        axes.plot(EVERY * np.arange(1, len(curve) + 1), curve, label=name)
    for (name, loss), style in zip(baselines.items(), [":", "--"], strict=True):
        axes.axhline(loss, color="0.5", linestyle=style, label=name)
    axes.set(xlabel="step", ylabel="nats per character")
    axes.legend()
    above, below = right.subfigures(2, 1, height_ratios=(3, 1))
    above.suptitle("where each block looks, from each row's character")
    for ax, heads in zip(above.subplots(1, DEPTH), weights, strict=True):
        ax.imshow(np.mean(heads, axis=0), cmap="Blues", vmin=0)
        ax.set_xticks(range(len(text)), text, family="monospace", fontsize=7)
        ax.set_yticks(range(len(text)), text, family="monospace", fontsize=7)
        ax.tick_params(length=0)
    below.suptitle("what it writes")
    written = "\n".join(sample.replace("\n", " ") for sample in samples)
    below.text(0.5, 0.75, written, ha="center", va="top", family="monospace", size=8)
    return figure


# %% Train, compare both ways of reading, and write.
def main(
    steps: int = 500, path: str | Path = "transformer.png", better_by: float = 0.3
) -> tuple[float, list[str]]:
    """The loss on the paragraphs held out, and what the model has written."""
    texts = load_texts()
    alphabet = sorted(set("".join(texts)))
    numbers = {character: i for i, character in enumerate(alphabet)}
    train, held_out = (np.array([numbers[c] for c in text], np.int32) for text in texts)
    windows = np.lib.stride_tricks.sliding_window_view(train, CONTEXT + 1)
    tests = np.lib.stride_tricks.sliding_window_view(held_out, CONTEXT + 1)[::CONTEXT]

    model = Transformer(len(alphabet), key=jr.key(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 6e-3, steps // 8, steps)
    optimizer = es.Optimizer(optax.adamw(schedule, weight_decay=0.1)).init(model)
    console, rng = Console(), np.random.default_rng(0)
    recent: list[Array] = []
    losses: dict[str, list[float]] = {"training": [], "held out": []}
    for i in track(range(1, steps + 1), "transformer", console=console):
        batch = windows[rng.integers(len(windows), size=BATCH_SIZE)]
        model, optimizer, loss = step(model, optimizer, batch)
        recent.append(loss)
        if i % EVERY == 0:
            losses["training"].append(float(np.mean(recent[-EVERY:])))
            losses["held out"].append(float(evaluate(model.eval(), tests)))

    # All at once, and by the cache.
    model, text = model.eval(), tests[0, :CONTEXT]
    decoder = with_cache(model)
    (logits, _), sown = es.capture(model)(text)
    cached, after = es.jit(es.mutable(read, kinds=Cache))(decoder, text)
    assert np.allclose(cached, logits, atol=1e-4)
    assert after.position == CONTEXT

    # The decoder itself stays empty: each text begins anew.
    prompt, samples = "The dataset ", []
    start = np.array([numbers[c] for c in prompt])
    writer = es.jit(es.mutable(write, kinds=Cache))
    for key in jr.split(jr.key(1), 3):
        written, _ = writer(decoder, start, CONTEXT - len(prompt), key)
        samples.append(prompt + "".join(alphabet[c] for c in written))

    baselines = frequency_losses(train, held_out)
    loss = losses["held out"][-1]
    console.print(f"held out: {loss:.2f} nats per character")
    for name, baseline in baselines.items():
        console.print(f"{name}: {baseline:.2f}")
    console.print(*samples, sep="\n", markup=False, highlight=False)
    shown = "".join(alphabet[c] for c in text[:24]).replace("\n", " ")
    weights = sown["blocks.attention.weights"][:, :, :24, :24]
    plot(losses, baselines, shown, weights, samples).savefig(path)
    console.print(f"Losses, attention and texts: {Path(path).resolve()}")

    assert loss < baselines["bigrams"] - better_by
    return loss, samples


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "transformer.png")
