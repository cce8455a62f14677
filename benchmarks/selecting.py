"""How long does it take to select outside `jit`, compared with Equinox's functions?

`es.filter` computes the mask of a kind and creates one tree; `eqx.partition` gets a
ready mask and creates two trees. `es.eval` is compared with `eqx.nn.inference_mode`, on
the same model and on a model of Equinox's stock layers. `es.mutable` of a function that
does nothing is compared with a `jax.tree.map` of the model. The model is that of
`host_time.py`.

All operations and depths take turns, with forty calls in a row, in a different order
each time. The figures are CPU microseconds of the thread, without the time to free the
result. The garbage collector stays on, but ignores objects that existed before, such as
the models. Ratios are medians over the rounds. Growth is the exponent of a log-log fit
over 50 blocks or more.
"""

import statistics
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
from _common import (
    arguments,
    BLOCK,
    Claim,
    garbage_set_aside,
    growth,
    quartiles,
    ratio,
    Report,
    take_turns,
    Timer,
)
from _training import Net, StockNet

import eqx_state as es


FILTER, EVAL, STOCK_EVAL = "es.filter", "es.eval", "es.eval, stock layers"
PARTITION, INFERENCE = "eqx.partition, ready mask", "eqx.nn.inference_mode"
STOCK_INFERENCE, COMBINE = f"{INFERENCE}, stock layers", "eqx.combine"
TREE_MAP, MUTABLE = "jax.tree.map", "es.mutable, nothing written"
REFERENCES = {
    FILTER: PARTITION,
    "es.partition": PARTITION,
    "es.update": COMBINE,
    "es.mask": TREE_MAP,
    MUTABLE: TREE_MAP,
    EVAL: INFERENCE,
    "es.train": INFERENCE,
    STOCK_EVAL: STOCK_INFERENCE,
}
LIMITS = {
    FILTER: 0.7,
    "es.partition": 0.6,
    "es.update": 1.0,
    "es.mask": 1.0,
    EVAL: 0.4,
}


def operations(depth: int, width: int) -> dict[str, Callable[[], Any]]:
    net = Net(depth, width, jr.key(0))
    stock, _ = eqx.nn.make_with_state(StockNet)(depth, width, jr.key(0))
    mask, state, evaluating = (
        es.mask(net, es.Parameter),
        es.filter(net, es.State),
        es.eval(net),
    )
    return {
        PARTITION: lambda: eqx.partition(net, mask),
        FILTER: lambda: es.filter(net, es.Parameter),
        "es.partition": lambda: es.partition(net, es.Parameter),
        COMBINE: lambda: eqx.combine(state, net),
        "es.update": lambda: es.update(net, state),
        TREE_MAP: lambda: jax.tree.map(eqx.is_inexact_array, net),
        "es.mask": lambda: es.mask(net, es.Parameter),
        MUTABLE: lambda: es.mutable(lambda net: None)(net),
        INFERENCE: lambda: eqx.nn.inference_mode(net),
        EVAL: lambda: es.eval(net),
        "es.train": lambda: es.train(evaluating),
        STOCK_INFERENCE: lambda: eqx.nn.inference_mode(stock),
        STOCK_EVAL: lambda: es.eval(stock),
    }


def differences(by_name: dict[str, Callable[[], Any]]) -> int:
    """The number of results that differ from Equinox's."""
    results = {name: f() for name, f in by_name.items()}
    pairs = (
        (results[FILTER], results[PARTITION][0]),
        (results["es.partition"], results[PARTITION]),
        (results["es.update"], results[COMBINE]),
        (results[STOCK_EVAL], results[STOCK_INFERENCE]),
        (results[MUTABLE][1], results[COMBINE]),
    )
    return sum(not eqx.tree_equal(ours, theirs) for ours, theirs in pairs)


def main() -> None:
    args = arguments(__doc__, depths=(50, 200, 1000), width=4, rounds=120)
    made = {depth: operations(depth, args.width) for depth in args.depths}
    different = sum(map(differences, made.values()))
    timers = {
        name: {depth: Timer(made[depth][name]) for depth in args.depths}
        for name in made[args.depths[0]]
    }
    with garbage_set_aside():
        everything = [timer for t in timers.values() for timer in t.values()]
        take_turns(everything, args.rounds, in_a_row=BLOCK)
    rows, claims = [], []
    for name, by_depth in timers.items():
        medians = {n: statistics.median(t.seconds) for n, t in by_depth.items()}
        exponent = growth(medians)
        for depth, timer in by_depth.items():
            q1, median, q3 = quartiles(timer.seconds, 1e-6)
            to = REFERENCES.get(name)
            relative = to and ratio(timer.seconds, timers[to][depth].seconds)
            rows.append(
                {
                    "operation": name,
                    "blocks": depth,
                    "µs": round(median),
                    "q1": round(q1),
                    "q3": round(q3),
                    "ratio": relative,
                    "to": to,
                    "growth": exponent,
                }
            )
            if name in LIMITS:
                claim = f"{depth} blocks: {name}, to {to}"
                claims.append(Claim(claim, relative, LIMITS[name], of_time=True))
        if to and exponent is not None:
            claims.append(Claim(f"growth: {name}", exponent, 1.05, of_time=True))
    claims.append(Claim("selecting: results that differ from Equinox's", different, 0))
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
