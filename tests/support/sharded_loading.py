"""A stack of layers that is loaded in shards; as a script, one of two processes."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import processes
import safetensors
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

import eqx_state as es


DEPTH, MLP, EMBED = 3, 16, 6
RULES = {"mlp": "model", es.Rng: P()}
X = np.linspace(-1.0, 1.0, EMBED, dtype="f4")


class Block(es.Module):
    up: es.Parameter[Float[Array, "mlp embed"]]
    down: es.Parameter[Float[Array, "embed mlp"]]
    gate: es.Buffer[Float[Array, " mlp"]]  # bfloat16
    dropout: es.nn.Dropout
    calls: es.State = 0

    def __init__(self, key):
        up, down, gate, dropout = jr.split(key, 4)
        self.up = jr.normal(up, (MLP, EMBED))
        self.down = jr.normal(down, (EMBED, MLP)) / MLP
        self.gate = jr.uniform(gate, (MLP,), jnp.bfloat16)
        self.dropout = es.nn.Dropout(0.5, key=dropout)

    def __call__(self, x):
        self.calls = self.calls + 1
        hidden = jnp.tanh(self.up @ x) * self.gate.astype(x.dtype)
        return x + self.dropout(self.down @ hidden)


def make() -> dict[str, Any]:
    return {"blocks": es.nn.Stacked.make(Block, jr.split(jr.key(0), DEPTH))}


def run(model: Any) -> tuple[Array, Any]:
    return es.jit(es.mutable(lambda model: model["blocks"](X)))(model)


def abstract(mesh: Mesh) -> Any:
    """The model without values: the shape, dtype and sharding of each array."""
    shapes = eqx.filter_eval_shape(make)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        es.sharding(shapes, mesh, RULES),
    )


class Read:
    """Wraps a reader of arrays in files, and counts the bytes that it reads."""

    size = 0

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_slice(self, name: str) -> Any:
        return Read(self.inner.get_slice(name))

    def __getitem__(self, box: Any) -> Any:
        part = self.inner[box]
        Read.size += part.nbytes
        return part


def count_reads(safe_open: Any = safetensors.safe_open, memmap: Any = np.memmap) -> Any:
    """Count from now on. `np.memmap` reads float8, which `safe_open` cannot."""
    safetensors.safe_open = lambda *args, **kwargs: Read(safe_open(*args, **kwargs))
    np.memmap = lambda *args: Read(memmap(*args))


def held(tree: Any) -> int:
    """The bytes of all arrays that this process stores, counting equal shards once."""
    return sum(
        shard.data.nbytes
        for x in jax.tree.leaves(tree)
        for shard in {str(s.index): s for s in data_of(x).addressable_shards}.values()
    )


def data_of(x: Any) -> Any:
    return jr.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def are_shards_of(tree: Any, whole: Any) -> bool:
    """Whether each shard in this process equals its part of the whole array."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(whole), strict=True)
    return all(
        np.array_equal(shard.data, np.asarray(data_of(y))[shard.index])
        for x, y in pairs
        for shard in data_of(x).addressable_shards
    )


def through_orbax(path: Path, tree: Any, like: Any) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, like)


def main(address: str, process: str, path: str, folder: str) -> None:
    """Load, run, save and restore with Orbax, and write the results to a file."""
    processes.join(address, process)
    mesh = Mesh(jax.devices(), "model")
    like = abstract(mesh)
    count_reads()
    loaded = es.load(path, like)
    seen = {"read": Read.size, "held": held(loaded)}
    whole = make()
    seen["shards"] = are_shards_of(loaded, whole)
    y, new = run(loaded)
    gathered = jax.jit(lambda y: y, out_shardings=NamedSharding(mesh, P()))(y)
    seen["y"] = np.asarray(gathered).tolist()
    try:
        es.save(Path(folder, f"{process}.safetensors"), loaded)
    except TypeError as error:
        seen["error"] = str(error)
    if importlib.util.find_spec("orbax") is not None:
        restored = through_orbax(Path(folder, "orbax"), loaded, like)
        seen["restored"] = are_shards_of(restored, whole)
    Path(folder, f"{process}.json").write_text(json.dumps(seen))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
