"""Does `es.scan` over layers compile a program that does not grow with their number?

Compares training steps of 12 to 96 layers: `es.nn.Stacked`, `es.scan` over the stacked
layers, `jax.lax.scan` by hand, and a Python loop over the layers. The script counts the
equations of the jaxpr and the instructions of the optimized HLO. The programs take
turns. Times are medians: CPU seconds to trace and lower, CPU seconds to compile, and
the duration of a step relative to `jax.lax.scan`, with forty steps in a row.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.random as jr
from _common import (
    arguments,
    BLOCK,
    by_hand,
    Claim,
    difference,
    es_loop,
    es_scan,
    es_stacked,
    hand_scan,
    opcodes,
    ratio,
    Report,
    stack_of_blocks,
    stacked_blocks,
    take_turns,
    unstack,
)


REFERENCE = "scan by hand"
OURS = "es.nn.Stacked", "es.scan"
MOST_IN_A_LOOP = 24  # layers: a longer Python loop takes too long to compile


def cpu_time(f: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    start = time.process_time()
    out = f(*args)
    return time.process_time() - start, out


def duration(f: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    return time.perf_counter() - start


def equations(jaxpr: Any) -> int:
    """The equations of a jaxpr and of those inside it."""
    return sum(
        1 + sum(map(equations, jax.extend.core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


@dataclasses.dataclass
class Program:
    """A way to write the step, with its measurements."""

    make: Callable[[], Callable[..., Any]]
    model: Any
    lowering: list[float] = dataclasses.field(default_factory=list)
    compiling: list[float] = dataclasses.field(default_factory=list)
    running: list[float] = dataclasses.field(default_factory=list)
    compiled: Any = None

    def compile(self, x: Any) -> None:
        step = jax.jit(self.make())  # a new function, so nothing is cached
        seconds, lowered = cpu_time(step.lower, self.model, x)
        self.lowering.append(seconds)
        seconds, self.compiled = cpu_time(lowered.compile)
        self.compiling.append(seconds)

    def run(self, x: Any) -> None:
        self.running.append(duration(self.compiled, self.model, x))


def measure(depth: int, args: Any) -> list[dict[str, Any]]:
    """A row for each way to write a step of this many layers."""
    stack = stack_of_blocks(depth, args.width)
    x = jr.normal(jr.key(1), (args.batch, args.width))
    programs = {
        "es.nn.Stacked": Program(es_stacked, stacked_blocks(depth, args.width)),
        "es.scan": Program(es_scan, stack),
        REFERENCE: Program(hand_scan, by_hand(stack)),
    }
    if depth <= MOST_IN_A_LOOP:
        programs["loop"] = Program(es_loop, unstack(stack, depth))
    for program in programs.values():
        # Warm up: the first trace of a process also traces functions of `jax.numpy`.
        jax.jit(program.make()).lower(program.model, x)
    for _ in range(args.repetitions):
        for program in programs.values():
            program.compile(x)
    runs = [lambda p=program: p.run(x) for program in programs.values()]
    take_turns(runs, args.steps, in_a_row=BLOCK)
    reference = programs[REFERENCE]
    in_reference = reference.compiled(reference.model, x)
    rows = []
    for name, program in programs.items():
        jaxpr = jax.make_jaxpr(program.make())(program.model, x).jaxpr
        row = {
            "layers": depth,
            "program": name,
            "equations": equations(jaxpr),
            "instructions": opcodes(program.compiled.as_text()).total(),
            "trace, CPU s": statistics.median(program.lowering),
            "compile, CPU s": statistics.median(program.compiling),
            "temp bytes": program.compiled.memory_analysis().temp_size_in_bytes,
            "step, to lax.scan": ratio(program.running, reference.running),
            "difference": None,
        }
        if name in OURS:
            loss, *trees = program.compiled(program.model, x)
            layers = (getattr(tree, "layers", tree) for tree in trees)
            row["difference"] = difference((loss, *layers), in_reference)
        rows.append(row)
    return rows


def claims_of(name: str, rows: list[dict[str, Any]]) -> list[Claim]:
    def column(program: str, what: str) -> list[Any]:
        return [row[what] for row in rows if row["program"] == program]

    def to_hand(what: str) -> list[float]:
        pairs = zip(column(name, what), column(REFERENCE, what), strict=True)
        return [a / b for a, b in pairs]

    compiling = column(name, "compile, CPU s")
    return [
        Claim(
            f"{name}: numbers of instructions or equations over all depths",
            max(len(set(column(name, x))) for x in ("equations", "instructions")),
            1,
        ),
        Claim(
            f"{name}: instructions more or less than by hand, share",
            max(abs(x - 1) for x in to_hand("instructions")),
            0.02,
        ),
        Claim(
            f"{name}: memory of a step, to by hand", max(to_hand("temp bytes")), 1.02
        ),
        Claim(
            f"{name}: loss, gradients and new state, difference to by hand",
            max(column(name, "difference")),
            1e-4,
        ),
        Claim(
            f"{name}: compile time of the deepest, to the shallowest",
            compiling[-1] / compiling[0],
            1.2,
            of_time=True,
        ),
        Claim(
            f"{name}: duration of a step, to by hand",
            statistics.median(column(name, "step, to lax.scan")),
            1.02,
            of_time=True,
        ),
    ]


def main() -> None:
    args = arguments(
        __doc__, depths=(12, 24, 48, 96), width=128, batch=128, repetitions=3, steps=80
    )
    rows = [row for depth in args.depths for row in measure(depth, args)]
    claims = [claim for name in OURS for claim in claims_of(name, rows)]
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
