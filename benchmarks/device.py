"""Does the host keep an accelerator busy? Training steps of a GPT and of a ResNet.

Both models compute in bfloat16. The batch is doubled until a step takes a quarter of a
second, or until the memory is full. Each way to write the step then runs some steps in
a row. "host" is the share of the time in which the host was calling, and not waiting;
`eqx.filter_jit` waits in each call. The bytes are the arguments, the outputs and the
intermediate results of a donated step, without those that share memory.

Afterwards, the first losses with a small batch are compared with those of the CPU, and
`--tests` runs twenty tests of transforms on the device, from a checkout. With an H100,
all of this takes less than five minutes; on a CPU, use `--small`.
"""

import functools as ft
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from _common import arguments, Claim, Report
from _training import FILTER_JIT, Labels, Loss, OURS, Program, REFERENCE, ways
from jaxtyping import Array, Float, Int

import eqx_state as es


CLASSES, VOCABULARY = 10, 256
ADAM = optax.adam(1e-3)
TESTS = ("tests/transforms/test_zoo.py", "-k", "jit and not shard", "--maxfail=1")
Images = Float[Array, "batch channels height width"]
Tokens = Int[Array, "batch time"]


class Attention(es.Module):
    layer: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP
    dropout: es.nn.Dropout

    def __init__(self, width: int, key: Array):
        attention, mlp, dropout = jr.split(key, 3)
        self.layer = eqx.nn.MultiheadAttention(width // 64 or 1, width, key=attention)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=mlp)
        self.dropout = es.nn.Dropout(0.1, key=dropout)

    def __call__(self, xs: Float[Array, "time width"]) -> Float[Array, "time width"]:
        mask = jnp.tril(jnp.ones((len(xs), len(xs)), bool))
        first, second = (jax.vmap(norm) for norm in self.norms)
        ys = first(xs)
        xs = xs + self.dropout(self.layer(ys, ys, ys, mask=mask))
        return xs + jax.vmap(self.mlp)(second(xs))


class GPT(es.Module):
    embedding: eqx.nn.Embedding
    positions: es.Parameter
    blocks: list[Attention]
    head: eqx.nn.Linear

    def __init__(self, depth: int, width: int, length: int, key: Array):
        embedding, positions, head, *blocks = jr.split(key, depth + 3)
        self.embedding = eqx.nn.Embedding(VOCABULARY, width, key=embedding)
        self.positions = 0.02 * jr.normal(positions, (length, width))
        self.blocks = [Attention(width, key) for key in blocks]
        self.head = eqx.nn.Linear(width, VOCABULARY, key=head)

    def __call__(self, tokens: Int[Array, " time"]) -> Float[Array, "time vocabulary"]:
        xs = jax.vmap(self.embedding)(tokens) + self.positions
        for block in self.blocks:
            xs = block(xs)
        return jax.vmap(self.head)(xs).astype(jnp.float32)


class Residual(es.Module):
    layers: list[eqx.nn.Conv2d]
    norms: list[es.nn.BatchNorm]

    def __init__(self, channels: int, key: Array):
        keys = jr.split(key)
        conv = ft.partial(eqx.nn.Conv2d, channels, channels, 3, padding=1)
        self.layers = [conv(key=key) for key in keys]
        self.norms = [es.nn.BatchNorm(channels, axis_name="batch") for _ in keys]

    def __call__(self, x: Float[Array, "c h w"]) -> Float[Array, "c h w"]:
        y = jax.nn.relu(self.norms[0](self.layers[0](x)))
        return jax.nn.relu(x + self.norms[1](self.layers[1](y)))


class ResNet(es.Module):
    stem: eqx.nn.Conv2d
    blocks: list[Residual]
    head: eqx.nn.Linear

    def __init__(self, depth: int, channels: int, key: Array):
        stem, head, *blocks = jr.split(key, depth + 2)
        self.stem = eqx.nn.Conv2d(3, channels, 3, padding=1, key=stem)
        self.blocks = [Residual(channels, key) for key in blocks]
        self.head = eqx.nn.Linear(channels, CLASSES, key=head)

    def __call__(self, x: Float[Array, "3 h w"]) -> Float[Array, " classes"]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2))).astype(jnp.float32)


def loss(model: Any, x: Any, y: Labels) -> Loss:
    logits = es.vmap(model, axis_name="batch")(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step(state: tuple[Any, es.Optimizer], x: Any, y: Labels) -> tuple[Loss, Any]:
    model, optimizer = state
    cast = {es.Parameter: jnp.bfloat16, es.Buffer: jnp.bfloat16}
    (value, model), grads = es.value_and_grad(loss, cast=cast)(model, x, y)
    return value, optimizer.update(grads, model)


def made(model: Any) -> tuple[Any, es.Optimizer]:
    return model, es.Optimizer(ADAM).init(model)


def gpt(small: bool) -> tuple[Any, Any]:
    """The model, and a function from a size to a batch."""
    depth, width, length = (2, 16, 8) if small else (12, 768, 512)

    def batch(size: int) -> tuple[Tokens, Tokens]:
        text = jr.randint(jr.key(1), (size, length + 1), 0, VOCABULARY)
        return text[:, :-1], text[:, 1:]

    return made(GPT(depth, width, length, jr.key(0))), batch


def resnet(small: bool) -> tuple[Any, Any]:
    """The model, and a function from a size to a batch."""
    depth, channels, side = (2, 4, 8) if small else (16, 128, 32)

    def batch(size: int) -> tuple[Images, Labels]:
        x = jr.normal(jr.key(1), (size, 3, side, side), jnp.bfloat16)
        return x, jr.randint(jr.key(2), (size,), 0, CLASSES)

    return made(ResNet(depth, channels, jr.key(0))), batch


def seconds(program: Program, data: Any, steps: int) -> tuple[float, float]:
    """The time of a step, and the time in which the host was calling."""
    loss, calling, start = None, 0.0, time.perf_counter()
    for _ in range(steps):
        before = time.perf_counter()
        loss, program.state = program.step(program.state, *data)
        calling += time.perf_counter() - before
    jax.block_until_ready((loss, program.state))
    return (time.perf_counter() - start) / steps, calling / steps


def largest(state: Any, batch: Any, limit: float) -> int:
    """The batch size at which a step takes `limit` seconds, or half of what fits."""
    size, program = 4, Program(es.jit(step), state)
    while True:
        try:
            seconds(program, batch(2 * size), 1)  # compiles
            taken, _ = seconds(program, batch(2 * size), 2)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return size // 2  # memory for the other programs
        size *= 2
        if taken > limit / 2:
            return size


def donated_bytes(state: Any, data: Any) -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        compiled = es.jit(step, donate="all").lower(state, *data).compile()
    m = compiled.memory_analysis()
    inside = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return inside - m.alias_size_in_bytes


def losses(state: Any, data: Any, device: Any) -> list[float]:
    state, data = (
        jax.tree.map(lambda x: jax.device_put(x, device) if eqx.is_array(x) else x, t)
        for t in (state, data)
    )
    found, jitted = [], es.jit(step)
    for _ in range(3):
        loss, state = jitted(state, *data)
        found.append(float(loss))
    return found


def main() -> None:
    args = arguments(
        __doc__,
        models=("gpt", "resnet"),
        steps=20,
        limit=0.25,
        small=False,
        tests=False,
    )
    cpu = jax.local_devices(backend="cpu")[0]
    device = jax.devices()[0]
    rows: list[dict[str, Any]] = []
    claims = []
    for name in args.models:
        state, batch = {"gpt": gpt, "resnet": resnet}[name](args.small)
        size = 8 if args.small else largest(state, batch, args.limit)
        data, times = batch(size), {}
        for way, program in ways(state, step):
            if way not in (OURS, FILTER_JIT, REFERENCE):
                continue
            seconds(program, data, 3)
            times[way], calling = seconds(program, data, args.steps)
            rows.append(
                {
                    "model": name,
                    "batch": size,
                    "program": way,
                    "ms a step": 1e3 * times[way],
                    "host": calling / times[way],
                    "bytes": donated_bytes(state, data) if way == OURS else None,
                }
            )
            del program
        text = f"{name}: time of a step under es.jit, to {REFERENCE}"
        claims.append(Claim(text, times[OURS] / times[REFERENCE], 1.02, of_time=True))
        ours, theirs = (losses(state, batch(4), x) for x in (device, cpu))
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        claims.append(Claim(f"{name}: losses, difference to the CPU's", apart, 0.03))
    if args.tests:
        # The tests ask for eight virtual devices of the CPU.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        root = Path(__file__).resolve().parent.parent
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        code = subprocess.run([*command, *TESTS], cwd=root, env=env).returncode
        claims.append(Claim("tests of transforms that failed on the device", code, 0))
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
