"""Train one model in two processes with four devices each, as on two machines.

Each process reads its own half of scikit-learn's handwritten digits. Each of the eight
devices computes on a part of the batch, and stores an eighth of the parameters and of
the optimizer's state. This is fully sharded data parallelism, implemented by JAX: the
model is written for one device, and only the shardings differ.

- `es.filter` and `es.spec` create a tree of shardings by kind, for `eqx.filter_shard`.
- Batch normalization averages over the whole batch, and therefore over all processes.
- The model is created in shards, under `jit`. No device ever stores all of it.

Run `python examples/sharded.py`. It starts the two processes itself, on eight virtual
devices of this machine's CPU, and takes under a minute on two cores.
"""

# %%
import os
import socket
import subprocess
import sys
import tempfile

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
PROCESSES, DEVICES = 2, 4  # of each process
SPLIT = es.any_of(es.Parameter, es.OptState)


# %% The model
def make_net(key: Key[Array, ""]) -> eqx.nn.Sequential:
    first, second, dropout, last = jr.split(key, 4)
    relu = eqx.nn.Lambda(jax.nn.relu)
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(64, 256, key=first),
            es.nn.BatchNorm(256, axis_name="batch", momentum=0.9),
            relu,
            eqx.nn.Linear(256, 256, key=second),
            es.nn.BatchNorm(256, axis_name="batch", momentum=0.9),
            relu,
            es.nn.Dropout(0.3, key=dropout),
            eqx.nn.Linear(256, 10, key=last),
        ]
    )


# %% Shard the arrays
# Parameters and the optimizer's state are split along their first axis that the number
# of devices divides. Statistics and keys are on all devices.
def shard(tree):
    mesh = Mesh(jax.devices(), "devices")

    def split(x: Array) -> NamedSharding:
        axes = [i for i, size in enumerate(x.shape) if size % mesh.size == 0]
        spec = P(*[None] * axes[0], "devices") if axes else P()
        return NamedSharding(mesh, spec)

    pieces = jax.tree.map(split, es.filter(tree, SPLIT))
    whole = es.spec(tree, {...: NamedSharding(mesh, P())})
    return eqx.filter_shard(tree, eqx.combine(pieces, whole))


@es.jit
def start():
    model = make_net(jr.key(0))
    return shard((model, es.Optimizer(optax.adam(1e-3)).init(model)))


# %% One training step
def loss_fn(model, images: Float[Array, "b 64"], labels: Int[Array, " b"]):
    logits = es.vmap(model, axis_name="batch")(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@es.jit
def step(model, optimizer, images, labels):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, images, labels)
    model, optimizer = shard(optimizer.update(grads, model))
    return loss, model, optimizer


@es.jit
def accuracy(model, images, labels) -> Float[Array, ""]:
    return jnp.mean(jnp.argmax(jax.vmap(es.eval(model))(images), axis=1) == labels)


# %% Train together with the other process, on this process's part of the images
def train(images, labels, epochs: int):
    model, optimizer = start()
    per_process = BATCH_SIZE // PROCESSES
    steps = len(images) // per_process
    rng = np.random.default_rng(jax.process_index())
    rows = NamedSharding(Mesh(jax.devices(), "devices"), P("devices"))
    for _ in range(epochs):
        batches = rng.permutation(len(images))[: steps * per_process]
        for batch in batches.reshape(steps, per_process):
            # Combine the rows of all processes into one array.
            xs = jax.make_array_from_process_local_data(rows, images[batch])
            ys = jax.make_array_from_process_local_data(rows, labels[batch])
            loss, model, optimizer = step(model, optimizer, xs, ys)
            loss.block_until_ready()  # for virtual devices: see `data_parallel.py`
    return model, optimizer


# %% The program of one process
def work(address: str, process: int, epochs: int, path: str) -> None:
    """Train together with the other process, and save results of this process."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, process)
    digits = load_digits()
    images, labels = np.float32(digits.data / 16), np.int32(digits.target)
    train_images, images, train_labels, labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    size = len(train_images) // PROCESSES  # the same number of steps in each process
    mine = slice(process * size, (process + 1) * size)
    model, optimizer = train(train_images[mine], train_labels[mine], epochs)

    pieces = jax.tree.leaves(es.filter((model, optimizer), SPLIT))
    held = dict.fromkeys(jax.local_devices(), 0)
    for piece in (piece for x in pieces for piece in x.addressable_shards):
        held[piece.device] += piece.data.nbytes
    np.savez(
        path,
        accuracy=accuracy(model, images, labels),
        statistics=np.concatenate(jax.tree.leaves(es.filter(model, es.BatchStat))),
        bytes_held=list(held.values()),
        bytes_in_all=sum(x.nbytes for x in pieces),
    )
    jax.distributed.shutdown()


# %% Start both processes, and compare their results
def main(*, epochs=10, at_least=0.95) -> float:
    """The test accuracy of the model that the two processes trained."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"  # a free port
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{i}.npz" for i in range(PROCESSES)]
        commands = [
            [sys.executable, __file__, address, str(i), str(epochs), path]
            for i, path in enumerate(paths)
        ]
        processes = [subprocess.Popen(line, env=environment) for line in commands]
        try:
            codes = [process.wait(timeout=240) for process in processes]
        finally:  # end both processes, also after an error
            for process in processes:
                process.kill()
                process.wait()
        assert codes == [0] * PROCESSES
        results = [dict(np.load(path)) for path in paths]

    for i, result in enumerate(results):
        held, in_all = result["bytes_held"], result["bytes_in_all"]
        print(f"process {i}: test accuracy {result['accuracy']:.2%},", end=" ")
        print(f"{held.max():,} of {in_all:,} bytes on each device")
        # An eighth on each device, except arrays whose axes eight does not divide.
        assert len(held) == DEVICES
        assert (held <= in_all / 8 * 1.01).all()
        assert (result["statistics"] == results[0]["statistics"]).all()
        assert result["accuracy"] >= at_least
    return float(results[0]["accuracy"])


# %%
if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:  # a process that `main` has started
        address, process, epochs, path = sys.argv[1:]
        work(address, int(process), int(epochs), path)
