"""A model trained on a mesh of devices; as a script, one of several processes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import processes
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_state as es


XS, YS = (np.random.default_rng(0).normal(size=(64, n)).astype("f4") for n in (16, 8))
ADAM = optax.adam(1e-2)


class Net(es.Module):
    """Takes one example under `es.vmap`, or the whole batch.

    The first layer has no bias, since batch normalization would remove it: adam would
    take steps along the rounding errors in its gradient.
    """

    first: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    last: eqx.nn.Linear
    whole_batch: bool = eqx.field(static=True)

    def __init__(self, whole_batch, *, key):
        first, dropout, last = jr.split(key, 3)
        self.first = eqx.nn.Linear(16, 32, use_bias=False, key=first)
        axis_name = None if whole_batch else "batch"
        self.norm = es.nn.BatchNorm(32, axis_name, momentum=0.9)
        self.dropout = es.nn.Dropout(0.5, key=dropout)
        self.last = eqx.nn.Linear(32, 8, key=last)
        self.whole_batch = whole_batch

    def __call__(self, x):
        first, last = self.first, self.last
        if self.whole_batch:
            first, last = jax.vmap(first), jax.vmap(last)
        return last(self.dropout(jax.nn.relu(self.norm(first(x)))))


def loss_fn(model, xs, ys):
    if not model.whole_batch:
        model = es.vmap(model, axis_name="batch")
    return jnp.mean((model(xs) - ys) ** 2)


def data_parallel(tree, mesh):
    """Each device stores the whole model and optimizer."""
    return es.spec(tree, {...: NamedSharding(mesh, P())})


def fully_sharded(tree, mesh):
    """Each device stores a part of each parameter and of its optimizer state."""

    def along_one_axis(x):
        axes = [i for i, n in enumerate(x.shape) if n % mesh.size == 0]
        spec = P(*[None] * axes[0], mesh.axis_names) if axes else P()
        return NamedSharding(mesh, spec)

    split = es.filter(tree, es.any_of(es.Parameter, es.OptState))
    return eqx.combine(jax.tree.map(along_one_axis, split), data_parallel(tree, mesh))


Layout = Callable[[Any, Mesh], Any]


def start(layout: Layout, mesh: Mesh, whole_batch: bool = False) -> Any:
    """A new model and its optimizer, created with their shardings."""

    @eqx.filter_jit
    def new():
        model = Net(whole_batch, key=jr.key(0))
        trained = model, es.Optimizer(ADAM).init(model)
        return eqx.filter_shard(trained, layout(trained, mesh))

    return new()


def train(trained: Any, layout: Layout, mesh: Mesh, steps: int = 5) -> Any:
    """The loss of the last step, the model and the optimizer."""

    @eqx.filter_jit
    def step(model, optimizer, xs, ys):
        (loss, model), grads = es.value_and_grad(loss_fn)(model, xs, ys)
        trained = optimizer.update(grads, model)
        return loss, *eqx.filter_shard(trained, layout(trained, mesh))

    model, optimizer = trained
    xs, ys = (put_rows(x, mesh) for x in (XS, YS))
    for _ in range(steps):
        loss, model, optimizer = step(model, optimizer, xs, ys)
    return loss, model, optimizer


def put_rows(x: np.ndarray, mesh: Mesh) -> jax.Array:
    """Split the rows over the devices; each process provides its own rows."""
    rows = np.split(x, jax.process_count())[jax.process_index()]
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_process_local_data(sharding, rows)


def in_one_piece(tree: Any, mesh: Mesh) -> dict[str, np.ndarray]:
    """Every array by its name, gathered from all devices and processes."""

    def data(x):
        return jr.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    arrays = {part.name: part.value for part in es.parts(tree)}
    whole = NamedSharding(mesh, P())
    gathered = jax.jit(lambda xs: jax.tree.map(data, xs), out_shardings=whole)(arrays)
    return jax.tree.map(np.asarray, gathered)


def bytes_per_device(tree: Any, *filters: Any) -> list[int]:
    """The bytes of the selected arrays on each device of this process."""
    totals = dict.fromkeys(jax.local_devices(), 0)
    for x in jax.tree.leaves(es.filter(tree, *filters)):
        for shard in x.addressable_shards:
            totals[shard.device] += shard.data.nbytes
    return list(totals.values())


LAYOUTS: dict[str, Layout] = {"data": data_parallel, "full": fully_sharded}
TRAINED = es.any_of(es.Parameter, es.OptState)


def main(address: str, process: str, folder: str) -> None:
    """Join a second process, train, and save the gathered results of this process."""
    processes.join(address, process)
    mesh = Mesh(jax.devices(), "devices")
    for name, layout in LAYOUTS.items():
        trained = start(layout, mesh)
        before = bytes_per_device(trained, TRAINED)
        loss, *trained = train(trained, layout, mesh)
        after = bytes_per_device(trained, TRAINED)
        arrays = in_one_piece((loss, *trained), mesh)
        path = Path(folder, f"{name}-{process}.npz")
        np.savez(path, before=before, after=after, **arrays)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
