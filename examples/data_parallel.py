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
def train(devices, images, labels, epochs: int):
    """The model, its losses, the compiled step, and a batch as it lay."""
    mesh = Mesh(devices, "devices")
    rows = NamedSharding(mesh, P("devices"))
    model = make_net(jr.key(0))
    trained = model, OPTIMIZER.init(model)
    on_all = es.spec(trained, {...: NamedSharding(mesh, P())})
    model, optimizer = eqx.filter_shard(trained, on_all)

    steps = len(images) // BATCH_SIZE
    rng, losses, step = np.random.default_rng(0), [], None
    for _ in range(epochs):
        batches = rng.permutation(len(images))[: steps * BATCH_SIZE]
        for batch in batches.reshape(steps, BATCH_SIZE):
            xs, ys = jax.device_put((images[batch], labels[batch]), rows)
            if step is None:
                step = train_step.lower(model, optimizer, xs, ys).compile()
            # What comes out lies where it was: the same program takes it again.
            model, optimizer, loss = step(model, optimizer, xs, ys)
            losses.append(loss)
    return model, np.array(losses), step, xs


def accuracy(model, images: Array, labels: Array) -> float:
    logits = jax.vmap(es.eval(model), axis_name="batch")(images)
    return float(jnp.mean(jnp.argmax(logits, axis=1) == labels))


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
    reference, one, _, _ = train(devices[:1], *train_data, epochs)
    model, eight, step, batch = train(devices, *train_data, epochs)

    reached = accuracy(model, images, labels)
    difference = np.abs(eight - one).max()
    console = Console()
    console.print(f"test accuracy {reached:.2%}")
    console.print(f"largest difference of a loss from that on one: {difference:.1e}")
    parts = {
        "batch": batch,
        "weights": model.layers[0].weight,
        "statistics": model.layers[1].mean,
    }
    plot(one, eight, parts).savefig(path)
    console.print(f"Losses, and what is where: {Path(path).resolve()}")

    # Every device has twelve rows of its own, and a whole network. As on one device are
    # the losses, the weights and the statistics.
    assert [shard.data.shape for shard in batch.addressable_shards] == [(12, 64)] * 8
    assert len({shard.index[0].start for shard in batch.addressable_shards}) == 8
    assert "all-reduce" in step.as_text()  # the devices do talk to one another
    assert difference <= tolerance, difference
    for part, expected in zip(es.parts(model), es.parts(reference), strict=True):
        assert part.value.sharding.device_set == set(devices), part.name
        assert part.value.sharding.is_fully_replicated, part.name
        if part.kind is not es.Rng:
            off = np.abs(np.asarray(part.value) - np.asarray(expected.value)).max()
            assert off <= 10 * tolerance, part.name
    assert reached >= at_least, reached
    return reached


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "data_parallel.png")
