"""Does `es.checkpoint` save as much memory as `jax.checkpoint` by hand?

This script reports the memory of the intermediate results of a training step:
`temp_size_in_bytes` of XLA's `compiled.memory_analysis()`, for which the step need not
run. `flops` of `cost_analysis()` shows that both recompute as much. For a scan, it
counts one layer.

XLA's CPU compiler drops the barriers of `jax.checkpoint` before it merges common
subexpressions, which undoes the remat of layers that are not in a loop. This script
tells the compiler to keep the barriers; with `--drop-barriers`, it does not.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.random as jr
from _common import (
    arguments,
    by_hand,
    Claim,
    difference,
    es_loop,
    es_scan,
    hand_loop,
    hand_scan,
    Report,
    stack_of_blocks,
    unstack,
)

import eqx_state as es


KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
DOTS = jax.checkpoint_policies.dots_saveable

Step = Callable[..., Any]


def compare(steps: tuple[Step, Step], model: Any, x: Any, options: Any) -> dict:
    """The step of `eqx_state` and the one by hand, compiled, and run once."""
    row: dict[str, Any] = {}
    results = []
    models = model, by_hand(model)
    for name, step, model in zip(("es", "hand"), steps, models, strict=True):
        compiled = jax.jit(step).lower(model, x).compile(options)
        row[f"{name}: temp bytes"] = compiled.memory_analysis().temp_size_in_bytes
        row[f"{name}: flops"] = int(compiled.cost_analysis()["flops"])
        results.append(compiled(model, x))
    row["bytes, es/hand"] = row["es: temp bytes"] / row["hand: temp bytes"]
    row["flops, es/hand"] = row["es: flops"] / row["hand: flops"]
    row["difference"] = difference(*results)
    return row


def main() -> None:
    args = arguments(__doc__, depth=32, width=512, batch=256, drop_barriers=False)
    stack = stack_of_blocks(args.depth, args.width)
    x = jr.normal(jr.key(1), (args.batch, args.width))
    keep = jax.default_backend() == "cpu" and not args.drop_barriers
    options = KEEP_BARRIERS if keep else None
    rows = []
    for layers, on_es, on_hand, model, barriers in (
        ("loop", es_loop, hand_loop, unstack(stack, args.depth), {}),
        # A scan needs no barriers: its forward and backward pass are two loops.
        ("scan", es_scan, hand_scan, stack, {"prevent_cse": False}),
    ):
        figures = compare((on_es(), on_hand()), model, x, options)
        rows.append({"layers": layers, "remat": "none", **figures})
        for remat, policy in (("all", None), ("all but dots", DOTS)):
            es_remat, hand_remat = (
                ft.partial(checkpoint, policy=policy, **barriers)
                for checkpoint in (es.checkpoint, jax.checkpoint)
            )
            steps = on_es(es_remat), on_hand(hand_remat)
            figures = compare(steps, model, x, options)
            rows.append({"layers": layers, "remat": remat, **figures})
    claims = [
        Claim(
            "es.checkpoint: bytes and flops more or less than by hand, share",
            max(
                abs(row[f"{what}, es/hand"] - 1)
                for row in rows
                for what in ("bytes", "flops")
            ),
            0.02,
        ),
        Claim(
            "es.checkpoint of every layer: bytes, to no remat",
            max(
                all_["es: temp bytes"] / none["es: temp bytes"]
                for none, all_ in (rows[:2], rows[3:5])
            ),
            0.5,
        ),
        Claim(
            "es.checkpoint: loss, gradients and new state, difference to by hand",
            max(row["difference"] for row in rows),
            1e-4,
        ),
    ]
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
