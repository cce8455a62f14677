"""Does a training step that donates its arrays need as much memory as by hand?

Compares the step of `host_time.py` under `es.jit(donate="all")` with a step by hand
under `jax.jit(donate_argnums=...)`, which uses dicts of parameters and explicit state
and keys; and both without donation. The bytes come from `compiled.memory_analysis()`,
for which the step need not run. "held" is the sum of the arguments, the outputs and the
intermediate results, minus the memory that outputs share with arguments. "peak" is
XLA's own figure, if the version of JAX provides it.
"""

import warnings
from typing import Any

import jax
import jax.random as jr
from _common import arguments, Claim, Report
from _training import CLASSES, es_model, es_step, hand_model, hand_step

import eqx_state as es


def memory(jitted: Any, *args: Any) -> dict[str, int | None]:
    with warnings.catch_warnings():
        # JAX warns about the batch, whose memory no output can use.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        analysis = jitted.lower(*args).compile().memory_analysis()
    inputs, outputs = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    temporary, shared = analysis.temp_size_in_bytes, analysis.alias_size_in_bytes
    return {
        "shared": shared,
        "held": inputs + outputs + temporary - shared,
        "peak": getattr(analysis, "peak_memory_in_bytes", None),
    }


def main() -> None:
    args = arguments(__doc__, depths=(10, 50), width=64, batch=32)
    x = jr.normal(jr.key(2), (args.batch, args.width))
    data = x, jr.randint(jr.key(3), (args.batch,), 0, CLASSES)
    rows, claims = [], []
    for depth in args.depths:
        model = es_model(depth, args.width)
        for donated in (True, False):
            ours = es.jit(es_step, donate="all" if donated else "none")
            argnums = (0, 1, 2) if donated else ()
            by_hand = jax.jit(hand_step, donate_argnums=argnums)
            es_bytes = memory(ours, model, *data)
            hand_bytes = memory(by_hand, hand_model(model), *data)
            row = {"blocks": depth, "donated": "yes" if donated else "no"}
            for what, by_es in es_bytes.items():
                hand = hand_bytes[what]
                row |= {f"{what}: es": by_es, f"{what}: by hand": hand}
                if what != "shared":
                    row[f"{what}, ratio"] = by_es / hand if hand else None
            rows.append(row)
            for what in ("held", "peak"):
                if donated and row[f"{what}, ratio"] is not None:
                    text = f"{depth} blocks: bytes {what} by a donated step, to by hand"
                    claims.append(Claim(text, row[f"{what}, ratio"], 1.01))
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
