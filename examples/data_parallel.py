"""Train one network on eight devices, with the same result as on one device.

Every device stores the whole network, and computes on an eighth of each batch. This is
data parallelism, the first method to try if one device is too slow. The devices here
are virtual devices of the CPU; with real devices, the program is the same. The network
and its training step do not mention devices, because JAX runs a program on the devices
that store its arrays.

- `es.spec` chooses a sharding for each array, by kind. Here, every device stores all of
  the network. In `sharded.py`, which runs in two processes, parameters are split.
- Batch normalization averages over the whole batch, not over the part of each device.
- Each image has its own dropout mask, which does not depend on the number of devices.

Run `python examples/data_parallel.py [output.png]`; it takes under a minute on two
cores.
"""

# %% Create eight virtual devices, before JAX starts
# Omit this if you have eight.
import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int, Key
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE = 96


# %% The network and the step, as for one device
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


def loss_fn(model, images: Float[Array, "b 64"], labels: Int[Array, " b"]):
    logits = es.vmap(model, axis_name="batch")(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@es.jit
def step(model, optimizer, images, labels):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, images, labels)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


# %% Place the arrays
# The network and the optimizer's state on every device, and a part of each batch on
# each. JAX does the rest.
def on_each(devices, tree):
    places = es.spec(tree, {...: NamedSharding(Mesh(devices, "devices"), P())})
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, places), rest)


def by_rows(devices, batch):
    return jax.device_put(batch, NamedSharding(Mesh(devices, "devices"), P("devices")))


def train(devices, images, labels, epochs: int):
    """All losses, the trained model, its optimizer, and the last batch."""
    model = make_net(jr.key(0))
    optimizer = es.Optimizer(optax.sgd(0.1, momentum=0.9)).init(model)
    model, optimizer = on_each(devices, (model, optimizer))
    steps = len(images) // BATCH_SIZE
    rng, losses = np.random.default_rng(0), []
    for _ in range(epochs):
        batches = rng.permutation(len(images))[: steps * BATCH_SIZE]
        for rows in batches.reshape(steps, BATCH_SIZE):
            batch = by_rows(devices, (images[rows], labels[rows]))
            loss, model, optimizer = step(model, optimizer, *batch)
            # `float` waits for the step. Virtual devices share one pool of threads, and
            # several steps at once can occupy all of them and block each other forever.
            losses.append(float(loss))
    return np.array(losses), model, optimizer, batch


# %% Train on one device and on eight, and compare
def main(path=None, *, epochs=20, at_least=0.95) -> float:
    """The test accuracy of the network that was trained on eight devices."""
    digits = load_digits()
    images, labels = np.float32(digits.data / 16), np.int32(digits.target)
    train_images, images, train_labels, labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    devices = jax.devices()
    assert len(devices) == 8, "XLA_FLAGS was set, or JAX was running, before this"
    one, *_ = train(devices[:1], train_images, train_labels, epochs)
    eight, model, optimizer, batch = train(devices, train_images, train_labels, epochs)

    logits = jax.vmap(es.eval(model))(images)
    accuracy = float(jnp.mean(jnp.argmax(logits, axis=1) == labels))
    print(f"test accuracy {accuracy:.2%}")
    print(f"largest difference of two losses: {abs(eight - one).max():.1e}")
    if path is not None:
        import _pictures  # needs matplotlib

        weights, statistics = model.layers[0].weight, model.layers[1].mean
        arrays = {"batch": batch[0], "weights": weights, "statistics": statistics}
        _pictures.data_parallel(path, one, eight, arrays)

    # Each device has twelve rows and the whole network, and the devices communicate.
    assert {shard.data.shape for shard in batch[0].addressable_shards} == {(12, 64)}
    for part in es.parts((model, optimizer)):
        assert part.value.sharding.device_set == set(devices), part.name
        assert part.value.sharding.is_fully_replicated, part.name
    assert "all-reduce" in step.lower(model, optimizer, *batch).compile().as_text()
    # Take one more step from the same arrays, on eight devices and on one. The results
    # are equal up to rounding. Compare only one step, because rounding errors grow
    # during training, by an amount that depends on the processor.
    together = jax.block_until_ready(step(model, optimizer, *batch))
    first = devices[:1]
    alone = step(*on_each(first, (model, optimizer)), *by_rows(first, batch))
    for part, expected in zip(es.parts(together), es.parts(alone), strict=True):
        x, y = part.value, expected.value
        if part.kind is es.Rng:
            x, y = jr.key_data(x), jr.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4, err_msg=part.name)
    np.testing.assert_allclose(eight[:5], one[:5], rtol=1e-3, atol=1e-4)
    assert accuracy >= at_least, accuracy
    return accuracy


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
