"""Train one network on eight devices, and get what one device gets.

Every device has the whole network, and computes for its eighth of each batch: data
parallelism, the first thing to try when one device is too slow. The devices are virtual
ones of this machine's CPU; on real ones the program is the same. Nothing in the network
or in its training step speaks of devices: where the arrays lie decides.

- `es.spec` says by kind where things go: the network to all devices, as it is here, or
  parameters in pieces, as in `sharded.py`, which runs in two processes.
- Batch normalisation averages over the whole batch, not over a device's part of it.
- Each image draws its own dropout mask, the same one on however many devices.
- The step is compiled once, and would refuse arrays that lie elsewhere.

Run `python examples/data_parallel.py [output.png]`. The picture is written to
`data_parallel.png` in the current directory if no path is given. It takes under a
minute on two cores.
"""

# %% JAX reads this when it looks for devices. Not needed where there are eight.
import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int, Key
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE = 96
OPTIMIZER = es.Optimizer(optax.sgd(0.1, momentum=0.9))


# %% The network and the step: as on one device.
def make_net(key: Key[Array, ""]) -> eqx.nn.Sequential:
    first, second, dropout, last = jr.split(key, 4)
    relu = eqx.nn.Lambda(jax.nn.relu)
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(64, 128, use_bias=False, key=first),
            es.nn.BatchNorm(128, axis_name="batch", momentum=0.9),
            relu,
            eqx.nn.Linear(128, 128, use_bias=False, key=second),
            es.nn.BatchNorm(128, axis_name="batch", momentum=0.9),
            relu,
            es.nn.Dropout(0.2, key=dropout),
            eqx.nn.Linear(128, 10, key=last),
        ]
    )


def loss_fn(
    model: eqx.nn.Sequential, images: Float[Array, "b 64"], labels: Int[Array, " b"]
) -> Float[Array, ""]:
    logits = es.vmap(model, axis_name="batch")(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@es.jit
def train_step(model, optimizer: es.Optimizer, images: Array, labels: Array):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, images, labels)
    model, optimizer = optimizer.update(grads, model)
    return model, optimizer, loss


# %% Where things are: the network and the optimizer's state on every device, and of the
# batch a part on each. All else follows from that.
def on_each(devices, tree):
    places = es.spec(tree, {...: NamedSharding(Mesh(devices, "devices"), P())})
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, places), rest)


def by_rows(devices, batch):
    return jax.device_put(batch, NamedSharding(Mesh(devices, "devices"), P("devices")))


def train(devices, images, labels, epochs: int):
    """The model and optimizer, the losses, the compiled step, and the last batch."""
    model = make_net(jr.key(0))
    trained = on_each(devices, (model, OPTIMIZER.init(model)))
    steps = len(images) // BATCH_SIZE
    rng, losses, step = np.random.default_rng(0), [], None
    for _ in range(epochs):
        batches = rng.permutation(len(images))[: steps * BATCH_SIZE]
        for rows in batches.reshape(steps, BATCH_SIZE):
            batch = by_rows(devices, (images[rows], labels[rows]))
            if step is None:
                step = train_step.lower(*trained, *batch).compile()
            # What comes out lies where it was: the same program takes it again.
            *trained, loss = step(*trained, *batch)
            # `float` waits for the step. Virtual devices share one pool of threads, and
            # many steps at once can take all of them without one being able to finish.
            losses.append(float(loss))
    return trained, np.array(losses), step, batch


def accuracy(model, images: Array, labels: Array) -> float:
    logits = jax.vmap(es.eval(model), axis_name="batch")(images)
    return float(jnp.mean(jnp.argmax(logits, axis=1) == labels))


def numbers(x: Array) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jr.key_data(x) if is_key else x)


# %% The picture: which device has what of an array, and two curves that are one.
def draw_sharding(axes, array: Array, title: str) -> None:
    height, width = array.shape[0], array.shape[1] if array.ndim > 1 else 8
    pieces: dict[tuple[int, int], list[int]] = {}
    for shard in array.addressable_shards:
        start, stop, _ = shard.index[0].indices(height)
        pieces.setdefault((start, stop), []).append(shard.device.id)
    for i, ((start, stop), ids) in enumerate(sorted(pieces.items())):
        colour = f"C{i}" if len(pieces) > 1 else "0.85"
        box = Rectangle((0, start), width, stop - start, fc=colour, ec="w", alpha=0.6)
        axes.add_patch(box)
        text = f"device {ids[0]}" if len(ids) == 1 else "whole, on\neach device"
        middle = width / 2, (start + stop) / 2
        axes.text(*middle, text, ha="center", va="center", fontsize=8)
    shape = " x ".join(map(str, array.shape))
    axes.set(xlim=(0, width), ylim=(height, 0), title=f"{title}\n{shape}")
    axes.set(xticks=[], yticks=[])


def plot(one, eight, arrays: dict[str, Array]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.3, 1])
    top, bottom = left.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    top.semilogy(one, lw=3, alpha=0.4, label="one device")
    top.semilogy(eight, "k", lw=0.7, label="eight devices")
    top.set(ylabel="training loss")
    top.legend()
    bottom.plot(np.abs(eight - one), "k", lw=0.7)
    bottom.set(xlabel="step", ylabel="difference")
    bottom.ticklabel_format(axis="y", scilimits=(0, 0))
    axes = right.subplots(1, len(arrays))
    for ax, (title, array) in zip(axes, arrays.items(), strict=True):
        draw_sharding(ax, array, title)
    return figure


# %% The same training twice.
def main(
    epochs: int = 20,
    path: str | Path = "data_parallel.png",
    at_least: float = 0.96,
    tolerance: float = 1e-5,
) -> float:
    """The test accuracy of the network that was trained on eight devices."""
    digits = load_digits()
    train_images, images, train_labels, labels = train_test_split(
        np.float32(digits.data / 16),
        np.int32(digits.target),
        test_size=0.2,
        stratify=digits.target,
        random_state=0,
    )
    devices = jax.devices()
    assert len(devices) == 8, "XLA_FLAGS was set, or JAX was running, before this"
    train_data = train_images, train_labels
    _, one, step_alone, _ = train(devices[:1], *train_data, epochs)
    trained, eight, step, batch = train(devices, *train_data, epochs)
    model, _ = trained

    reached = accuracy(model, images, labels)
    difference = np.abs(eight - one).max()
    console = Console()
    console.print(f"test accuracy {reached:.2%}")
    console.print(f"largest difference of a loss from that on one: {difference:.1e}")
    parts = {
        "batch": batch[0],
        "weights": model.layers[0].weight,
        "statistics": model.layers[1].mean,
    }
    plot(one, eight, parts).savefig(path)
    console.print(f"Losses, and what is where: {Path(path).resolve()}")

    # Every device has twelve rows of its own, and a whole network.
    images = batch[0].addressable_shards
    assert [shard.data.shape for shard in images] == [(12, 64)] * 8
    assert len({shard.index[0].start for shard in images}) == 8
    for part in es.parts(trained):
        assert part.value.sharding.device_set == set(devices), part.name
        assert part.value.sharding.is_fully_replicated, part.name
    assert "all-reduce" in step.as_text()  # the devices do talk to one another

    # A step from the same arrays gives the same arrays, up to rounding, before training
    # and after. How far rounding takes two trainings apart depends on the processor.
    untrained = make_net(jr.key(0))
    for start in (untrained, OPTIMIZER.init(untrained)), trained:
        *together, _ = step(*on_each(devices, start), *batch)
        first = devices[:1]
        *alone, _ = step_alone(*on_each(first, start), *by_rows(first, batch))
        for part, expected in zip(es.parts(together), es.parts(alone), strict=True):
            x, y = (numbers(p.value) for p in (part, expected))
            np.testing.assert_allclose(x, y, atol=tolerance, err_msg=part.name)
    assert difference <= 100 * tolerance, difference
    assert reached >= at_least, reached
    return reached


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "data_parallel.png")
