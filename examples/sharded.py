"""Train one model in two processes of four devices each, as on two machines.

Each process reads its own half of scikit-learn's handwritten digits. Each of the eight
devices computes for its part of a batch, and holds an eighth of the parameters and of
the optimizer's state: data-parallel, fully sharded training. JAX's own engine does all
of it, and the model's code does not know: that an array is a parameter, a statistic or
a key is what says where it goes.

- `es.filter` and `es.spec` make a tree of shardings by kind, for `eqx.filter_shard`.
- Batch normalisation averages over the whole batch, and thus over all processes.
- The model is made under `jit`, in parts: no device ever holds all of it.

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
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE = 96
PROCESSES, DEVICES = 2, 4  # of each process
SPLIT = es.any_of(es.Parameter, es.OptState)


# %% The model and the step: as on one device.
class Net(es.Module):
    layers: eqx.nn.Sequential

    def __init__(self, *, key: Key[Array, ""]):
        first, second, dropout, last = jr.split(key, 4)
        relu = eqx.nn.Lambda(jax.nn.relu)
        self.layers = eqx.nn.Sequential(
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

    def __call__(self, image: Float[Array, "64"]) -> Float[Array, "10"]:
        return self.layers(image)


def loss_fn(
    model: Net, images: Float[Array, "b 64"], labels: Int[Array, " b"]
) -> Float[Array, ""]:
    logits = es.vmap(model, axis_name="batch")(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# `eqx.filter_jit` waits for each step, as virtual devices need it: `data_parallel.py`.
@eqx.filter_jit
def train_step(
    model: Net, optimizer: es.Optimizer, mesh: Mesh, images: Array, labels: Array
):
    (_, model), grads = es.value_and_grad(loss_fn)(model, images, labels)
    return shard(optimizer.update(grads, model), mesh)


@eqx.filter_jit
def accuracy(model: Net, images: Array, labels: Array) -> Float[Array, ""]:
    return jnp.mean(jnp.argmax(jax.vmap(model.eval())(images), axis=1) == labels)


# %% What goes where. Parameters and the optimizer's state are cut along the first axis
# that the devices divide; statistics and keys are the same on all devices.
def shard(tree, mesh: Mesh):
    def cut(x: Array) -> NamedSharding:
        axes = [i for i, size in enumerate(x.shape) if size % mesh.size == 0]
        spec = P(*[None] * axes[0], "devices") if axes else P()
        return NamedSharding(mesh, spec)

    parts = jax.tree.map(cut, es.filter(tree, SPLIT))
    whole = es.spec(tree, {...: NamedSharding(mesh, P())})
    return eqx.filter_shard(tree, eqx.combine(parts, whole))


# %% One of the processes.
def work(address: str, process: int, epochs: int, path: str) -> None:
    """Train together with the other process, and save what this one has."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, process)
    mesh = Mesh(jax.devices(), "devices")

    digits = load_digits()
    train_images, images, train_labels, labels = train_test_split(
        np.float32(digits.data / 16),
        np.int32(digits.target),
        test_size=0.2,
        stratify=digits.target,
        random_state=0,
    )
    steps, per_process = len(train_images) // BATCH_SIZE, BATCH_SIZE // PROCESSES
    mine = train_images[process::PROCESSES], train_labels[process::PROCESSES]

    @eqx.filter_jit
    def start():
        model = Net(key=jr.key(0))
        return shard((model, es.Optimizer(optax.adam(1e-3)).init(model)), mesh)

    model, optimizer = start()
    rng, rows = np.random.default_rng(process), NamedSharding(mesh, P("devices"))
    for _ in range(epochs):
        batches = rng.permutation(len(mine[0]))[: steps * per_process]
        for batch in batches.reshape(steps, per_process):
            # The rows of all processes together are one array.
            xs, ys = (
                jax.make_array_from_process_local_data(rows, x[batch]) for x in mine
            )
            model, optimizer = train_step(model, optimizer, mesh, xs, ys)

    statistics = jax.tree.leaves(es.filter(model, es.BatchStat))
    pieces = jax.tree.leaves(es.filter((model, optimizer), SPLIT))
    held = dict.fromkeys(jax.local_devices(), 0)
    for piece in (piece for x in pieces for piece in x.addressable_shards):
        held[piece.device] += piece.data.nbytes
    np.savez(
        path,
        accuracy=accuracy(model, images, labels),
        statistics=np.concatenate(statistics),
        bytes_held=list(held.values()),
        bytes_in_all=sum(x.nbytes for x in pieces),
    )
    jax.distributed.shutdown()


# %% All of them, and what came out.
def main(epochs: int = 10, at_least: float = 0.95) -> float:
    """The test accuracy of the model that the two processes have trained."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"  # a port that is free
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{process}.npz" for process in range(PROCESSES)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, address, str(i), str(epochs), path],
                env=environment,
            )
            for i, path in enumerate(paths)
        ]
        try:
            codes = [process.wait(timeout=240) for process in processes]
        finally:  # none outlives this
            for process in processes:
                process.kill()
                process.wait()
        assert codes == [0] * PROCESSES
        results = [dict(np.load(path)) for path in paths]

    table = Table("process", "test accuracy", "bytes on each device", "of bytes in all")
    for i, result in enumerate(results):
        held, in_all = result["bytes_held"], result["bytes_in_all"]
        shown = f"{held.max():,}", f"{in_all:,}"
        table.add_row(f"{i}", f"{result['accuracy']:.2%}", *shown)
        # An eighth each, and on every device what eight does not divide.
        assert len(held) == DEVICES
        assert (held <= in_all / 8 * 1.01).all()
        assert (result["statistics"] == results[0]["statistics"]).all()
        assert result["accuracy"] >= at_least
    Console().print(table)
    return float(results[0]["accuracy"])


# %%
if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:  # one of the processes that `main` has started
        address, process, epochs, path = sys.argv[1:]
        work(address, int(process), int(epochs), path)
