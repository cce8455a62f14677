"""Do tracing and lowering take as long as by hand, and is the program the same?

Compares the step of `host_time.py` under `es.jit` with a step by hand under `jax.jit`,
with dicts of parameters, explicit state and explicit keys. Each trace uses a new
function, so nothing of the step is cached. The functions of `jax.numpy` that it calls
have been traced before.

All programs and depths take turns, in a different order each round. The figures are CPU
milliseconds of the thread. Before each trace, the garbage collector is told to ignore
all existing objects, such as earlier traces. Ratios are medians over the rounds. Growth
is the exponent of a log-log fit over 50 blocks or more.

The programs are compared at the smallest depth: the loss over three steps, and the
number of each instruction in the optimized HLO, for training and for evaluation.
"""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.random as jr
from _common import (
    arguments,
    Claim,
    garbage_set_aside,
    growth,
    opcodes,
    quartiles,
    ratio,
    Report,
    take_turns,
    Timer,
)
from _training import (
    CLASSES,
    Data,
    es_loss,
    es_model,
    es_step,
    hand_eval_loss,
    hand_model,
    hand_step,
    OURS,
)

import eqx_state as es


BY_HAND = "jax.jit, by hand"


class Tracing(Timer):
    """Traces and lowers a step of this state."""

    def __init__(self, jit: Callable[..., Any], step: Any, state: Any, data: Data):
        super().__init__(lambda: jit(lambda *args: step(*args)).lower(state, *data))

    def __call__(self) -> None:
        with garbage_set_aside():
            super().__call__()


def compare(model: Any, data: Data) -> list[Claim]:
    """Compare the programs for training and evaluation, and their losses."""
    net, _ = model
    state = hand_model(model)
    ours = es.jit(es_step).lower(model, *data).compile()
    by_hand = jax.jit(hand_step).lower(state, *data).compile()
    eval_args = es.eval(net), *data
    our_loss = es.jit(es_loss).lower(*eval_args).compile()
    loss_by_hand = jax.jit(hand_eval_loss).lower(state, *data).compile()
    claims = []
    for what, a, b in (
        ("train", ours, by_hand),
        ("eval", our_loss, loss_by_hand),
    ):
        counts = opcodes(a.as_text()), opcodes(b.as_text())
        different = sum(counts[0][op] != counts[1][op] for op in counts[0] | counts[1])
        text = f"HLO, {what}: opcodes not as often as by hand"
        claims.append(Claim(text, different, 0))
    losses = [(our_loss(*eval_args), loss_by_hand(state, *data))]
    for _ in range(3):
        loss, model = ours(model, *data)
        loss_2, state = by_hand(state, *data)
        losses.append((loss, loss_2))
    difference = max(abs(float(a / b) - 1) for a, b in losses)
    text = "the loss by es.jit, difference to by hand, share"
    return [*claims, Claim(text, difference, 1e-5)]


def main() -> None:
    args = arguments(
        __doc__, depths=(10, 50, 200, 1000), width=4, batch=4, rounds=10, deep_rounds=3
    )
    x = jr.normal(jr.key(2), (args.batch, args.width))
    data = x, jr.randint(jr.key(3), (args.batch,), 0, CLASSES)
    timers: dict[str, dict[int, Tracing]] = {OURS: {}, BY_HAND: {}}
    models = {depth: es_model(depth, args.width) for depth in args.depths}
    for depth, model in models.items():
        timers[OURS][depth] = Tracing(es.jit, es_step, model, data)
        timers[BY_HAND][depth] = Tracing(jax.jit, hand_step, hand_model(model), data)
    claims = compare(models[min(models)], data)  # which also warms up
    for rounds, deep in ((args.rounds, False), (args.deep_rounds, True)):
        chosen = [
            by_depth[depth]
            for by_depth in timers.values()
            for depth in args.depths
            if (depth > 200) is deep
        ]
        take_turns(chosen, rounds)
    rows = []
    for name, by_depth in timers.items():
        medians = {n: statistics.median(t.seconds) for n, t in by_depth.items()}
        exponent = growth(medians)
        for depth, timer in by_depth.items():
            q1, median, q3 = quartiles(timer.seconds, 1e-3)
            relative = ratio(timer.seconds, timers[BY_HAND][depth].seconds)
            rows.append(
                {
                    "program": name,
                    "blocks": depth,
                    "ms": median,
                    "q1": q1,
                    "q3": q3,
                    "ratio": relative,
                    "growth": exponent,
                }
            )
            if name == OURS:
                text = f"{depth} blocks: trace + lower, to by hand"
                claims.append(Claim(text, relative, 1.10, of_time=True))
        if name == OURS and exponent is not None:
            claims.append(Claim("growth: trace + lower", exponent, 1.05, of_time=True))
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
