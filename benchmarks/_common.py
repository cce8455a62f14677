"""A deep model, with `eqx_state` and by hand; tools to measure and to print figures."""

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import platform
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float
from rich.console import Console
from rich.table import Table

import eqx_state as es


DROP, EPS, MOMENTUM = 0.1, 1e-5, 0.9

Batch = Float[Array, "batch width"]
Tree = Any


def _as_it_is(f: Any) -> Any:
    return f


# With `eqx_state`.
class Block(es.Module):
    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout

    def __init__(self, width: int, key: Array):
        linear, dropout = jr.split(key)
        self.linear = eqx.nn.Linear(width, width, key=linear)
        self.norm = es.nn.BatchNorm(width, eps=EPS, momentum=MOMENTUM, debias=False)
        self.dropout = es.nn.Dropout(DROP, key=dropout)

    def __call__(self, x: Batch) -> Batch:
        y = self.norm(jax.vmap(self.linear)(x))
        return self.dropout(jax.nn.gelu(y))


def stack_of_blocks(depth: int, width: int) -> Block:
    """One block whose arrays have a first axis of size `depth`."""
    return eqx.filter_vmap(lambda key: Block(width, key))(jr.split(jr.key(0), depth))


def stacked_blocks(depth: int, width: int, **options: Any) -> es.nn.Stacked[Block]:
    keys = jr.split(jr.key(0), depth)
    return es.nn.Stacked.make(lambda key: Block(width, key), keys, **options)


def unstack(tree: Tree, depth: int) -> list[Tree]:
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(depth)]


def es_loop(remat: Callable[..., Any] = _as_it_is) -> Callable[..., Any]:
    def loss_fn(blocks: list[Block], x: Batch) -> Float[Array, ""]:
        for block in blocks:
            x = remat(block)(x)
        return jnp.mean(jnp.square(x))

    return _es_step(loss_fn)


def es_scan(remat: Callable[..., Any] = _as_it_is) -> Callable[..., Any]:
    def loss_fn(stack: Block, x: Batch) -> Float[Array, ""]:
        x, _ = es.scan(lambda x, block: (remat(block)(x), None), x, stack)
        return jnp.mean(jnp.square(x))

    return _es_step(loss_fn)


def es_stacked() -> Callable[..., Any]:
    return _es_step(lambda stacked, x: jnp.mean(jnp.square(stacked(x))))


def _es_step(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(model: Tree, x: Batch) -> tuple[Array, Tree, Tree]:
        (loss, model), grads = es.value_and_grad(loss_fn)(model, x)
        # The step by hand does not return the parameters either.
        return loss, es.filter(model, es.State), grads

    return step


# By hand.
def by_hand(model: Tree) -> tuple[Tree, Tree]:
    """The parameters and the state of a block, a stack, or a list of blocks."""
    if isinstance(model, list):
        params, state = zip(*map(by_hand, model), strict=True)
        return list(params), list(state)
    linear, norm, dropout = model.linear, model.norm, model.dropout
    params = {
        "matrix": linear.weight,
        "offset": linear.bias,
        "scale": norm.weight,
        "shift": norm.bias,
    }
    return params, {"mean": norm.mean, "var": norm.var, "key": dropout.rng}


def hand_block(
    params: Tree,
    state: Tree,
    x: Batch,
    activation: Callable[[Batch], Batch] = jax.nn.gelu,
    momentum: float = MOMENTUM,
) -> tuple[Batch, Tree]:
    y = jax.vmap(lambda x: params["matrix"] @ x + params["offset"])(x)
    mean = jnp.mean(y, 0)
    y = y - mean
    # The rest of the mean, due to rounding, as in `es.nn.BatchNorm`.
    rest = jax.lax.stop_gradient(jnp.mean(y, 0))
    square = jnp.mean(y * y, 0)
    var = square - jnp.minimum(rest * rest, jax.lax.stop_gradient(square))
    scale = jax.lax.rsqrt(var + EPS) * params["scale"]
    y = activation(y * scale + (params["shift"] - rest * scale))
    next_key, key = jr.split(state["key"])
    mask = jr.bernoulli(key, 1 - DROP, y.shape)
    y = jnp.where(mask, y / (1 - DROP), jnp.zeros_like(y))
    new = {
        name: momentum * state[name] + (1 - momentum) * jax.lax.stop_gradient(moment)
        for name, moment in (("mean", mean + rest), ("var", var))
    }
    return y, {**new, "key": next_key}


def hand_loop(remat: Callable[..., Any] = _as_it_is) -> Callable[..., Any]:
    def loss_fn(params: Tree, state: Tree, x: Batch) -> tuple[Array, Tree]:
        new = []
        for p, s in zip(params, state, strict=True):
            x, s = remat(hand_block)(p, s, x)
            new.append(s)
        return jnp.mean(jnp.square(x)), new

    return _hand_step(loss_fn)


def hand_scan(remat: Callable[..., Any] = _as_it_is) -> Callable[..., Any]:
    def loss_fn(params: Tree, state: Tree, x: Batch) -> tuple[Array, Tree]:
        def layer(x: Batch, ps: tuple[Tree, Tree]) -> tuple[Batch, Tree]:
            return remat(hand_block)(*ps, x)

        x, new = jax.lax.scan(layer, x, (params, state))
        return jnp.mean(jnp.square(x)), new

    return _hand_step(loss_fn)


def _hand_step(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(model: tuple[Tree, Tree], x: Batch) -> tuple[Array, Tree, Tree]:
        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(*model, x)
        return loss, new, grads

    return step


def difference(es_result: Tree, hand_result: Tree) -> float:
    """The largest relative difference of an array.

    It is relative to the largest element of the array, or to 1e-3 if that is larger:
    the gradient of a bias before a BatchNorm consists only of rounding errors.
    """
    loss, model, grads = es_result
    pair = loss, by_hand(model)[1], by_hand(grads)[0]

    def relative(x: Array, y: Array) -> float:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return float(jnp.any(jr.key_data(x) != jr.key_data(y)))
        return float(jnp.max(jnp.abs(x - y)) / jnp.maximum(jnp.max(jnp.abs(y)), 1e-3))

    return max(jax.tree.leaves(jax.tree.map(relative, pair, hand_result)))


# Measuring.
@dataclasses.dataclass
class Timer:
    """A function, and the CPU seconds of this thread in each call."""

    f: Callable[[], Any]
    seconds: list[float] = dataclasses.field(default_factory=list)

    def __call__(self) -> None:
        start = time.thread_time()
        out = self.f()
        self.seconds.append(time.thread_time() - start)
        del out  # after the measurement, which excludes freeing the result


CALLS = 40  # in a row, for calls that take microseconds


def in_a_loop(f: Callable[[], Any]) -> Any:
    for _ in range(CALLS):
        out = f()
    return out


BLOCK = 40  # steps of one program in a row


def take_turns(
    actions: Iterable[Callable[[], Any]], rounds: int, in_a_row: int = 1
) -> None:
    """Call each action `rounds` times, `in_a_row` at once, in an order that changes.

    If programs take turns after every step, each empties the processor's caches for the
    others. A user runs one program, so claims are about steps in a row.
    """
    order, shuffle = list(actions), random.Random(0).shuffle
    for _ in range(math.ceil(rounds / in_a_row)):
        shuffle(order)
        for action in order:
            for _ in range(in_a_row):
                action()


@contextlib.contextmanager
def garbage_set_aside() -> Iterator[None]:
    """Make the garbage collector ignore the objects that exist now.

    A full collection takes time in proportion to all objects of the process, including
    other models and JAX, and would be counted for the program that happens to run. Each
    program still pays for its own garbage.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def opcodes(hlo: str) -> Counter[str]:
    """The number of each instruction in an optimized program, over all computations."""
    indented = (line for line in hlo.splitlines() if line.startswith("  "))
    lines = (line for line in indented if " = " in line)
    # The opcode follows the type. The type of a tuple contains parentheses, too.
    found = (re.search(r" = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(", line) for line in lines)
    return Counter(match[1] for match in found)


def quartiles(times: Sequence[float], unit: float) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    if len(times) < 2:
        return 3 * [times[0] / unit]
    return [t / unit for t in statistics.quantiles(times, n=4, method="inclusive")]


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over the rounds of one time relative to the other."""
    pairs = zip(times, others, strict=True)
    return statistics.median(t / other for t, other in pairs)


def growth(times: Mapping[int, float]) -> float | None:
    """The exponent of a log-log fit of time to depth, for 50 blocks or more."""
    points = [(math.log(n), math.log(t)) for n, t in times.items() if n >= 50]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


@dataclasses.dataclass(frozen=True)
class Claim:
    """The claim that a value is at most a limit. For a time, the limit is a target."""

    text: str
    value: float
    limit: float
    of_time: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


def show_claims(claims: Sequence[Claim]) -> None:
    table = Table("what", "measured", "at most", "")
    for claim in claims:
        verdict = "pass" if claim.holds else "miss" if claim.of_time else "WRONG"
        table.add_row(claim.text, _cell(claim.value), _cell(claim.limit), verdict)
    _console().print(table)


@dataclasses.dataclass(frozen=True)
class Report:
    """Rows of figures with the same columns, and claims about the figures.

    Claims about times are checked only with `--targets`.
    """

    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    claims: Sequence[Claim]

    def show(self) -> None:
        """Print the report. Exit with 1 if a claim does not hold."""
        targets = self.settings["targets"]
        claims = [claim for claim in self.claims if targets or not claim.of_time]
        if self.settings["json"]:
            report = dataclasses.asdict(dataclasses.replace(self, claims=claims))
            print(json.dumps({"versions": versions(), **report}, indent=2))
        else:
            console = _console()
            console.print(_line(versions()), _line(self.settings), sep="\n")
            table = Table(*self.rows[0])
            for row in self.rows:
                table.add_row(*map(_cell, row.values()))
            console.print(table)
            show_claims(claims)
        if not all(claim.holds for claim in claims):
            raise SystemExit(1)


def versions() -> dict[str, str]:
    return {
        **{package: version(package) for package in ("jax", "jaxlib", "equinox")},
        "python": platform.python_version(),
        "backend": jax.default_backend(),
    }


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 150)


def _line(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _cell(x: Any) -> str:
    if x is None:
        return ""
    if isinstance(x, float):
        return f"{x:.3f}" if x == 0 or abs(x) >= 0.01 else f"{x:.1e}"
    return f"{x:,}" if isinstance(x, int) else str(x)


def arguments(doc: str, **defaults: Any) -> argparse.Namespace:
    """The command line: a flag for each default, `--targets` and `--json`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in {**defaults, "targets": False, "json": False}.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            of = type(default[0]) if default else int
            parser.add_argument(flag, type=of, nargs="*", default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()
