"""A small GPT, trained on many devices and on one by the same program.

The annotations name the axes of the weights, and one table says which axis is split
over which axis of the mesh. The program creates the model, its optimizer and the
average of its weights directly in shards, trains and saves them, and loads them onto a
different mesh. The devices are virtual devices of the CPU; with real devices, the
program is the same.

- `es.nn.Stacked` runs the blocks in a scan, and recomputes each in the backward pass.
- `es.sharding` reads the table. Moments and averages are sharded like their weights.
- `cast=` computes in bfloat16. Weights, gradients and state remain in float32.
- `es.Optimizer` has two groups: only matrices have weight decay. `es.Ema` averages the
  weights, and the averaged model writes the texts.
- `class Cache(es.State)` is a kind for cached keys and values. `es.while_loop` carries
  them from one character to the next.

Run `python examples/gpt.py [output.png]`; it takes under three minutes on two cores.
The file needs the extra `io`.
"""

# %% Create eight virtual devices, before JAX starts
# Omit this if you have eight.
import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools as ft
import math
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int, Key
from rich.progress import track

import eqx_state as es


VOCABULARY = 128  # ASCII
DEPTH, HEADS, WIDTH, CONTEXT = 4, 4, 128, 64
BATCH_SIZE = 16
NEWLINE = ord("\n")

# From the axes of the weights to the axes of the mesh. Only the blocks compute in
# bfloat16.
TABLE = {"vocabulary": "model", "heads": "model", "mlp": "model", "width": "data"}
CAST = {es.under(lambda model: model.blocks): jnp.bfloat16}


# %% The model
# Annotations name the axes, including those of Equinox's layers.
class Cache(es.State):
    """The keys and values of the previous characters, and their number."""


Norm = Annotated[eqx.nn.RMSNorm, es.Axes(weight="width")]


class Attention(es.Module):
    project_in: es.Parameter[Float[Array, "3 heads size width"]]
    project_out: es.Parameter[Float[Array, "width heads size"]]
    keys: Cache[Float[Array, "context heads size"] | None] = None
    values: Cache[Float[Array, "context heads size"] | None] = None

    def __init__(self, key: Key[Array, ""]):
        key_in, key_out = jr.split(key)
        size, scale = WIDTH // HEADS, 1 / math.sqrt(WIDTH)
        self.project_in = scale * jr.normal(key_in, (3, HEADS, size, WIDTH))
        self.project_out = scale * jr.normal(key_out, (WIDTH, HEADS, size))

    def __call__(
        self, xs: Float[Array, "t width"], position: Int[Array, ""] | int
    ) -> Float[Array, "t width"]:
        queries, keys, values = jnp.einsum("phsw,tw->pths", self.project_in, xs)
        if self.keys is not None:
            insert = jax.lax.dynamic_update_slice_in_dim
            keys = self.keys = insert(self.keys, keys, position, axis=0)
            values = self.values = insert(self.values, values, position, axis=0)
        before = jnp.arange(len(keys))[None] <= position + jnp.arange(len(xs))[:, None]
        scores = jnp.einsum("ths,uhs->htu", queries, keys) / math.sqrt(WIDTH // HEADS)
        weights = jax.nn.softmax(jnp.where(before[None], scores, -jnp.inf))
        mixed = jnp.einsum("htu,uhs->ths", weights, values)
        return jnp.einsum("whs,ths->tw", self.project_out, mixed)


class Block(es.Module):
    attention: Attention
    up: es.Parameter[Float[Array, "mlp width"]]
    down: es.Parameter[Float[Array, "width mlp"]]
    norms: tuple[Norm, Norm]
    dropouts: tuple[es.nn.Dropout, es.nn.Dropout]

    def __init__(self, key: Key[Array, ""]):
        attention, up, down, *dropouts = jr.split(key, 5)
        self.attention = Attention(attention)
        self.up = jr.normal(up, (4 * WIDTH, WIDTH)) / math.sqrt(WIDTH)
        self.down = jr.normal(down, (WIDTH, 4 * WIDTH)) / math.sqrt(4 * WIDTH)
        self.norms = tuple(eqx.nn.RMSNorm(WIDTH, use_bias=False) for _ in range(2))
        self.dropouts = tuple(es.nn.Dropout(0.1, key=k) for k in dropouts)

    def __call__(
        self, xs: Float[Array, "t width"], position: Int[Array, ""] | int
    ) -> Float[Array, "t width"]:
        # Multiply matrices in their own precision, and add in the precision of `xs`.
        attended = self.attention(self.normalized(0, xs), position)
        xs = xs + self.dropouts[0](attended)
        hidden = jax.nn.gelu(self.normalized(1, xs) @ self.up.T)
        return xs + self.dropouts[1](hidden @ self.down.T)

    def normalized(self, i: int, xs: Float[Array, "t width"]):
        return jax.vmap(self.norms[i])(xs).astype(self.up.dtype)


class GPT(es.Module):
    characters: es.Parameter[Float[Array, "vocabulary width"]]  # also the output layer
    places: es.Parameter[Float[Array, "context width"]]
    blocks: es.nn.Stacked[Block]
    norm: Norm
    position: Cache[Int[Array, ""] | None] = None

    def __init__(self, key: Key[Array, ""]):
        characters, places, blocks = jr.split(key, 3)
        self.characters = 0.1 * jr.normal(characters, (VOCABULARY, WIDTH))
        self.places = 0.1 * jr.normal(places, (CONTEXT, WIDTH))
        keys = jr.split(blocks, DEPTH)
        self.blocks = es.nn.Stacked.make(Block, keys, checkpoint=True)
        self.norm = eqx.nn.RMSNorm(WIDTH, use_bias=False)

    def __call__(self, text: Int[Array, " t"]) -> Float[Array, "t vocabulary"]:
        """The logits of the next character after each character of the text."""
        position = 0
        if self.position is not None:
            position, self.position = self.position, self.position + len(text)
        places = jax.lax.dynamic_slice_in_dim(self.places, position, len(text))
        xs = self.blocks(self.characters[text] + places, position)
        return jax.vmap(self.norm)(xs) @ self.characters.T


# %% Model, optimizer and average, which the program creates directly in shards
STEPS, BOTH = 700, 50
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 3e-3, STEPS // 10, STEPS)


def is_matrix(part: es.Part) -> bool:
    return part.value.ndim >= 2


OPTIMIZER = es.Optimizer(
    {is_matrix: optax.adamw(SCHEDULE, weight_decay=0.1), ...: optax.adam(SCHEDULE)}
)
EMA = es.Ema(0.98)


class Trained(NamedTuple):
    model: GPT
    optimizer: es.Optimizer
    ema: es.Ema


def make() -> Trained:
    model = GPT(jr.key(0))
    return Trained(model, OPTIMIZER.init(model), EMA.init(model))


def places_on(mesh: Mesh) -> Trained:
    """The sharding of each array."""
    return es.sharding(jax.eval_shape(make), mesh, TABLE)


def make_on(mesh: Mesh) -> Trained:
    """Model, optimizer and average. Each device stores only its own shards."""
    return jax.jit(make, out_shardings=places_on(mesh))()


# %% One training step
def loss_fn(model: GPT, texts: Int[Array, "b t"]) -> Float[Array, ""]:
    logits = es.vmap(model)(texts[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()


@ft.cache
def step_on(mesh: Mesh):
    """The compiled step, which preserves the shardings."""
    places = places_on(mesh)

    @es.jit
    def step(trained: Trained, texts: Int[Array, "b t"]):
        model, optimizer, ema = trained
        (loss, model), grads = es.value_and_grad(loss_fn, cast=CAST)(model, texts)
        model, optimizer = optimizer.update(grads, model)
        trained = Trained(model, optimizer, ema.update(model))
        return loss, eqx.filter_shard(trained, places)

    return step


def train(trained: Trained, mesh: Mesh, batches, what: str):
    """The losses, and model, optimizer and average after these batches."""
    over_data, losses = NamedSharding(mesh, P("data")), []
    for batch in track(batches, what):
        # With several processes, each loads only the rows of its own devices.
        rows = batch.__getitem__
        texts = jax.make_array_from_callback(batch.shape, over_data, rows)
        loss, trained = step_on(mesh)(trained, texts)
        # `float` waits for the step. Virtual devices share one pool of threads, and
        # several steps at once can occupy all of them and block each other forever.
        losses.append(float(loss))
    return losses, trained


# %% Write with the cache, until the next empty line
def with_cache(model: GPT) -> GPT:
    """The model in eval mode, with an empty cache for one text."""
    empty = jnp.zeros((DEPTH, CONTEXT, HEADS, WIDTH // HEADS))
    return es.configure(model.eval(), keys=empty, values=empty, position=0)


def write(
    model: GPT, start: Int[Array, " t"], key: Key[Array, ""]
) -> tuple[Int[Array, " context"], Int[Array, ""]]:
    """A text that begins with `start`, and its length."""

    def goes_on(state):
        text, length, *_ = state
        is_empty_line = (text[length - 2] == NEWLINE) & (text[length - 1] == NEWLINE)
        return (length < CONTEXT) & ~is_empty_line

    def add_character(state):
        text, length, logits, key = state
        key, now = jr.split(key)
        character = jr.categorical(now, logits / 0.6)
        text = text.at[length].set(character)
        return text, length + 1, model(character[None])[0], key

    text = jnp.zeros(CONTEXT, jnp.int32).at[: len(start)].set(start)
    logits = model(start)[-1]  # the start is read at once
    state = text, jnp.int32(len(start)), logits, key
    text, length, *_ = es.while_loop(goes_on, add_character, state)
    return text, length


def read(model: GPT, text: Int[Array, " t"]) -> Float[Array, "t vocabulary"]:
    """The result of `model(text)`, computed one character at a time."""
    _, logits = es.scan(lambda _, c: (None, model(c[None])[0]), None, text)
    return logits


# %% The text: Python's own reference, which `help()` shows
def load_texts() -> tuple[np.ndarray, np.ndarray]:
    """Windows of characters for training, and windows of held-out text."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)
    held_out, codes = np.split(codes, [len(codes) // 20])
    window = np.lib.stride_tricks.sliding_window_view
    return window(codes, CONTEXT + 1), window(held_out, CONTEXT + 1)[:: 4 * CONTEXT]


def frequency_loss(texts: np.ndarray, tests: np.ndarray) -> float:
    """The loss of predictions from the frequencies of pairs of characters."""
    pairs = np.full((VOCABULARY, VOCABULARY), 0.1)
    np.add.at(pairs, (texts[:, 0], texts[:, 1]), 1)
    pairs /= pairs.sum(axis=1, keepdims=True)
    return float(-np.log(pairs[tests[:, :-1], tests[:, 1:]]).mean())


# %% Train on eight devices and on one, then load a file onto different meshes
def mesh_of(data: int, model: int) -> Mesh:
    devices = np.reshape(jax.devices()[: data * model], (data, model))
    return Mesh(devices, ("data", "model"))


def load(path: Path, mesh: Mesh) -> Trained:
    """Load a file onto this mesh: each device gets its own shards."""
    shapes, places = jax.eval_shape(make), places_on(mesh)
    like = jax.tree.map(lambda x, place: x.update(sharding=place), shapes, places)
    return es.load(path, like)


def curve_in_text(losses, width: int = 60) -> str:
    """A curve as one line of block characters, between its first and last value."""
    means = [np.mean(part) for part in np.array_split(losses, min(width, len(losses)))]
    low, high = min(means), max(means)
    heights = [round(7 * (x - low) / ((high - low) or 1)) for x in means]
    blocks = "".join("▁▂▃▄▅▆▇█"[height] for height in heights)
    return f"loss {means[0]:.2f} {blocks} {means[-1]:.2f}"


def main(path=None, *, steps=STEPS, both=BOTH, better_by=0.3):
    """The loss of the averaged model on held-out text, and three texts it wrote."""
    texts, tests = load_texts()
    rng = np.random.default_rng(0)
    batches = texts[rng.integers(len(texts), size=(steps, BATCH_SIZE))]
    print(es.tabulate(jax.eval_shape(make).model))

    eight, one = mesh_of(4, 2), mesh_of(1, 1)
    losses, saved = train(make_on(eight), eight, batches[:both], "eight devices")
    alone, _ = train(make_on(one), one, batches[:both], "one device   ")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "gpt.safetensors")
        es.save(file, saved)
        turned, loaded = (load(file, mesh) for mesh in (mesh_of(2, 4), one))
    more, trained = train(loaded, one, batches[both:], "one device   ")

    model = trained.ema.model.eval()
    loss, baseline = float(es.jit(loss_fn)(model, tests)), frequency_loss(texts, tests)
    print(f"held out: {loss:.2f} nats per character; by pairs {baseline:.2f}")
    decoder, shown = with_cache(model), tests[0, :CONTEXT]
    cached, after = es.jit(es.mutable(read, kinds=Cache))(decoder, shown)
    prompt, samples = "The ", []
    start = np.array([*map(ord, prompt)])
    # `decoder` does not change, so each text starts with an empty cache.
    writer = es.jit(es.mutable(write, kinds=Cache))
    for key in jr.split(jr.key(1), 3):
        (text, length), _ = writer(decoder, start, key)
        samples.append("".join(map(chr, text[:length])).strip())
    curve = losses + more
    print(curve_in_text(curve), *samples, sep="\n")
    saved_up, turned_up = (x.model.blocks.layers.up for x in (saved, turned))
    if path is not None:
        import _pictures  # needs matplotlib

        split = {"trained": saved_up[0], "loaded": turned_up[0]}
        _pictures.gpt(path, curve, alone, baseline, samples, split)

    # Eight devices compute the same as one, and each stores a part of the weights.
    difference = np.abs(np.subtract(losses, alone)).max()
    print(f"largest difference of two losses in {both} steps: {difference:.1e}")
    np.testing.assert_allclose(losses, alone, rtol=1e-3)
    for up, shape in ((saved_up, (256, 32)), (turned_up, (128, 64))):
        assert {x.data.shape for x in up.addressable_shards} == {(DEPTH, *shape)}
    # A file is the same on every mesh.
    for each in saved, turned:
        assert eqx.tree_equal(jax.device_put(each, places_on(one)), loaded)
    # The predictions with and without the cache are equal.
    np.testing.assert_allclose(cached, model(shown), atol=1e-3)
    assert after.position == CONTEXT
    assert loss < baseline - better_by, loss
    return loss, samples


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
