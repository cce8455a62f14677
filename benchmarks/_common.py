"""One deep model twice, with `eqx_state` and by hand, and how figures are shown."""

import argparse
import dataclasses
import json
import platform
from collections.abc import Callable, Mapping, Sequence
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
        self.norm = es.nn.BatchNorm(width, eps=EPS, momentum=MOMENTUM)
        self.dropout = es.nn.Dropout(DROP, key=dropout)

    def __call__(self, x: Batch) -> Batch:
        y = self.norm(jax.vmap(self.linear)(x))
        return self.dropout(jax.nn.gelu(y))


def stack_of_blocks(depth: int, width: int) -> Block:
    """Blocks as one, with `depth` as the first axis of each of its arrays."""
    return eqx.filter_vmap(lambda key: Block(width, key))(jr.split(jr.key(0), depth))


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


def _es_step(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(model: Tree, x: Batch) -> tuple[Array, Tree, Tree]:
        (loss, model), grads = es.value_and_grad(loss_fn)(model, x)
        # The parameters came in, and by hand they do not go out.
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


def hand_block(params: Tree, state: Tree, x: Batch) -> tuple[Batch, Tree]:
    y = jax.vmap(lambda x: params["matrix"] @ x + params["offset"])(x)
    mean = jnp.mean(y, 0)
    var = jnp.mean(jnp.square(y - mean), 0)
    scale = jax.lax.rsqrt(var + EPS) * params["scale"]
    y = jax.nn.gelu(y * scale + (params["shift"] - mean * scale))
    next_key, key = jr.split(state["key"])
    mask = jr.bernoulli(key, 1 - DROP, y.shape)
    y = jnp.where(mask, y / (1 - DROP), jnp.zeros_like(y))
    new = {
        name: MOMENTUM * state[name] + (1 - MOMENTUM) * jax.lax.stop_gradient(moment)
        for name, moment in (("mean", mean), ("var", var))
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
    """The largest difference of one array, relative to its largest element."""
    loss, model, grads = es_result
    pair = loss, by_hand(model)[1], by_hand(grads)[0]

    def relative(x: Array, y: Array) -> float:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return float(jnp.any(jr.key_data(x) != jr.key_data(y)))
        return float(jnp.max(jnp.abs(x - y)) / (jnp.max(jnp.abs(y)) + 1e-12))

    return max(jax.tree.leaves(jax.tree.map(relative, pair, hand_result)))


# What came out.
@dataclasses.dataclass(frozen=True)
class Report:
    """Rows of figures with the same columns, and the claims that they bear out."""

    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    claims: Mapping[str, bool]

    def show(self) -> None:
        """Prints; exits with 1 if a claim does not hold."""
        versions = {p: version(p) for p in ("jax", "jaxlib", "equinox")}
        versions["python"] = platform.python_version()
        versions["backend"] = jax.default_backend()
        if self.settings["json"]:
            report = {"versions": versions, **dataclasses.asdict(self)}
            print(json.dumps(report, indent=2))
        else:
            console = Console()
            console.print(_line(versions), _line(self.settings), sep="\n")
            table = Table(*self.rows[0])
            for row in self.rows:
                table.add_row(*map(_cell, row.values()))
            console.print(table)
            for claim, holds in self.claims.items():
                console.print(f"{'yes' if holds else 'NO'}: {claim}")
        if not all(self.claims.values()):
            raise SystemExit(1)


def _line(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _cell(x: Any) -> str:
    if x is None:
        return ""
    if isinstance(x, float):
        return f"{x:.3f}" if x == 0 or abs(x) >= 0.01 else f"{x:.1e}"
    return f"{x:,}" if isinstance(x, int) else str(x)


def arguments(doc: str, **defaults: Any) -> argparse.Namespace:
    """The command line: a flag for each default, and `--json`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in {**defaults, "json": False}.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            nargs = "+" if isinstance(default, list) else None
            parser.add_argument(flag, type=int, nargs=nargs, default=default)
    return parser.parse_args()
