"""How long does `es.sharding` take, and what does a large transformer need per device?

The transformers have the sizes of two known models, with about 7 and 70 billion
parameters in float32. They exist only as shapes (`jax.eval_shape`), together with
adam's moments and an average of the parameters. The mesh is abstract. All arrays are
sharded by the names of their axes: heads, hidden units of MLPs and the vocabulary over
`model`, and the width over `data`. `by_hand` computes the same sum without `es`, from
the sizes.

A second part measures how long `es.sharding` takes for a list of many small blocks.

A third part measures how long the host takes for a sharded step. It is the training
step of `host_time.py`, with matrices split over 8 virtual devices. The es model is
compared with nested dicts, whose results are put into the same `NamedSharding`s. The
programs take turns, with forty steps in a row, and times are until the call returns.
Ratios are of 10th percentiles, because other processes can only make a step slower.
"""

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools as ft
import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from _common import arguments, BLOCK, Claim, garbage_set_aside, Report, take_turns
from _training import (
    CLASSES,
    es_and_hand,
    es_model,
    es_step,
    OURS,
    Program,
    REFERENCE,
)
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

import eqx_state as es


class Size(NamedTuple):
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 32_000

    @property
    def head(self) -> int:
        return self.embed // self.heads


SIZES = {
    "7B": Size(32, 4096, 32, 32, 11_008),
    "70B": Size(80, 8192, 64, 8, 28_672),
}
DATA, MODEL = 32, 8
MESH = AbstractMesh((DATA, MODEL), ("data", "model"))
RULES = {
    "vocab": "model",
    "mlp": "model",
    "heads": "model",
    "kv_heads": "model",
    "embed": "data",
}

Norm = Annotated[eqx.nn.RMSNorm, es.Axes(weight="embed")]


class Block(es.Module):
    query: es.Parameter[Float[Array, "heads head embed"]]
    key: es.Parameter[Float[Array, "kv_heads head embed"]]
    value: es.Parameter[Float[Array, "kv_heads head embed"]]
    out: es.Parameter[Float[Array, "embed heads head"]]
    gate: es.Parameter[Float[Array, "mlp embed"]]
    up: es.Parameter[Float[Array, "mlp embed"]]
    down: es.Parameter[Float[Array, "embed mlp"]]
    norms: tuple[Norm, Norm]

    def __init__(self, size: Size, key: Array):
        _, embed, heads, kv_heads, mlp, _ = size
        keys = iter(jr.split(key, 7))
        self.query = jr.normal(next(keys), (heads, size.head, embed))
        self.key = jr.normal(next(keys), (kv_heads, size.head, embed))
        self.value = jr.normal(next(keys), (kv_heads, size.head, embed))
        self.out = jr.normal(next(keys), (embed, heads, size.head))
        self.gate = jr.normal(next(keys), (mlp, embed))
        self.up = jr.normal(next(keys), (mlp, embed))
        self.down = jr.normal(next(keys), (embed, mlp))
        self.norms = tuple(eqx.nn.RMSNorm(embed, use_bias=False) for _ in range(2))


class Transformer(es.Module):
    words: es.Parameter[Float[Array, "vocab embed"]]
    blocks: list[Block]
    norm: Norm
    head: es.Parameter[Float[Array, "vocab embed"]]

    def __init__(self, size: Size, key: Array):
        words, head, *keys = jr.split(key, size.layers + 2)
        self.words = jr.normal(words, (size.vocab, size.embed))
        self.blocks = [Block(size, k) for k in keys]
        self.norm = eqx.nn.RMSNorm(size.embed, use_bias=False)
        self.head = jr.normal(head, (size.vocab, size.embed))


def make(size: Size) -> tuple[Transformer, es.Optimizer, es.Ema]:
    model = Transformer(size, jr.key(0))
    return model, es.Optimizer(optax.adam(1e-3)).init(model), es.Ema(0.999).init(model)


def bytes_per_device(shapes: Any, shardings: Any) -> int:
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)


def by_hand(size: Size) -> int:
    """The parameters on one device."""
    layers, embed, heads, kv_heads, mlp, vocab = size
    width = embed // DATA
    attention = 2 * (heads + kv_heads) // MODEL * size.head * width
    block = attention + 3 * mlp // MODEL * width + 2 * width
    return 4 * (layers * block + 2 * vocab // MODEL * width + width)


class Pair(es.Module):
    up: es.Parameter[Float[Array, "mlp embed"]]
    down: es.Parameter[Float[Array, "embed mlp"]]


def seconds(f: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    start = time.process_time()
    out = f(*args)
    return time.process_time() - start, out


def of_many_arrays(number: int, rounds: int) -> float:
    """The median seconds of `es.sharding` for a list of pairs."""
    pairs = [Pair(jnp.zeros((8, 4)), jnp.zeros((4, 8)))] * (number // 2)
    mesh, rules = AbstractMesh((4, 2), ("data", "model")), {"mlp": "model"}
    shapes = jax.eval_shape(lambda: pairs)
    times = (seconds(es.sharding, shapes, mesh, rules) for _ in range(rounds))
    return statistics.median(took for took, _ in times)


def sharded_steps(depth: int, width: int, rounds: int) -> dict[str, Program]:
    """The programs, after they took turns. All have the same arrays in shards."""
    mesh = Mesh(np.reshape(jax.devices(), (4, 2)), ("data", "model"))
    shapes = jax.eval_shape(lambda: es_model(depth, width))
    rules = {lambda part: part.value.ndim == 2: P("model", "data")}
    places = es.sharding(shapes, mesh, rules)

    def step(model: Any, x: Array, y: Array) -> Any:
        loss, model = es_step(model, x, y)
        return loss, eqx.filter_shard(model, places)

    x = jr.normal(jr.key(2), (8, width))
    data = jax.device_put(
        (x, jr.randint(jr.key(3), (8,), 0, CLASSES)), NamedSharding(mesh, P("data"))
    )
    programs = {
        name: program
        for name, program in es_and_hand(depth, width, step)
        if name in (OURS, REFERENCE)
    }
    for program in programs.values():
        program.warm_up(data)
    with garbage_set_aside():
        runs = (ft.partial(program.run, data) for program in programs.values())
        take_turns(runs, rounds, in_a_row=BLOCK)
    return programs


def dispatch_ratio(programs: dict[str, Program]) -> float:
    def lowest(program: Program) -> float:
        times = program.times.returned
        return statistics.quantiles(times, n=10, method="inclusive")[0]

    return lowest(programs[OURS]) / lowest(programs[REFERENCE])


def main() -> None:
    args = arguments(
        __doc__, arrays=10_000, rounds=5, depths=(5, 20), width=8, steps=200
    )
    rows, claims = [], []
    for name, size in SIZES.items():
        tracing, shapes = seconds(jax.eval_shape, ft.partial(make, size))
        sharding, shardings = seconds(es.sharding, shapes, MESH, RULES)
        params, moments, average = map(bytes_per_device, shapes, shardings)
        rows.append(
            {
                "model": name,
                "parameters": sum(x.size for x in jax.tree.leaves(shapes[0])),
                "arrays": len(es.parts(shapes)),
                "parameters, MB": params / 1e6,
                "moments, MB": moments / 1e6,
                "average, MB": average / 1e6,
                "all, MB": (params + moments + average) / 1e6,
                "eval_shape, s": tracing,
                "es.sharding, s": sharding,
            }
        )
        off = abs(params - by_hand(size))
        off += abs(moments - 2 * params - 4)  # adam's count
        off += abs(average - params - 8)  # the weight and the count of the average
        claims += [
            Claim(f"{name}: bytes on a device that differ from those by hand", off, 0),
            Claim(f"{name}: seconds of es.sharding", sharding, 5, of_time=True),
        ]
    took = of_many_arrays(args.arrays, args.rounds)
    claim = f"seconds of es.sharding of {args.arrays:,} arrays"
    claims.append(Claim(claim, took, 1, of_time=True))
    for depth in args.depths:
        programs = sharded_steps(depth, args.width, args.steps)
        ours, by_dicts = (programs[name].first_loss for name in (OURS, REFERENCE))
        what = f"{depth} blocks in shards"
        off = abs(ours - by_dicts) / abs(by_dicts)
        claims.append(Claim(f"{what}: the loss, difference to by hand", off, 1e-5))
        claim = f"{what}: host time of {OURS}, to {REFERENCE}"
        value = dispatch_ratio(programs)
        claims.append(Claim(claim, value, 1.05, of_time=True))
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
