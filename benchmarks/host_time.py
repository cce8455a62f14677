"""How long does the host take for a training step, relative to nested dicts?

The model has N blocks of Linear, BatchNorm, relu and Dropout, and is trained with adam.
It is so small that the device has almost nothing to do. All programs run in one
process: one es model under `es.jit` and `eqx.filter_jit`; its arrays under `jax.jit`,
as a flat list (the floor) and as nested dicts (the reference); and the same model in
other libraries.

`es.jit` also runs with a model and an optimizer that Python reads after each step, so
that their fields are built.

Each program runs forty steps in a row, as a user would, and the programs take turns, in
a different order each time. The claims are about these figures. Afterwards, the
programs take turns after every step (`in turns / ref`), so each empties the processor's
caches for the others. The figures are microseconds until the call returns, until the
loss is ready, and of CPU time of the calling thread, with quartiles. Ratios are medians
over the rounds. The garbage collector ignores objects that exist at the start.

Finally, the script measures how soon a call returns if its result takes long.

`--deep 50 1000` measures growth, the exponent of a log-log fit, with a step that adds 1
to each array: XLA takes too long to compile a training step of 1000 blocks. `--picture
FILE` draws the time until the call returns against the depth (with matplotlib).
"""

import functools as ft
import importlib.util
import os
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
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
)
from _training import (
    Batch,
    CLASSES,
    Data,
    equinox,
    es_and_hand,
    es_model,
    es_step,
    FILTER_JIT,
    FLOOR,
    haiku,
    Labels,
    NNX,
    nnx,
    OURS,
    PLAIN_JIT,
    Program,
    READ,
    REFERENCE,
    Times,
    touch,
)
from jaxtyping import Array

import eqx_state as es


Programs = dict[str, Program]

# The package that must be installed, and the function that creates the programs.
MAKERS = ((None, es_and_hand), ("flax", nnx), ("haiku", haiku), (None, equinox))
TOUCHING = ((None, ft.partial(es_and_hand, step=touch)),)


def run_all(programs: Programs, data: Data, steps: int, turns: int = 0) -> None:
    """Run `steps` steps in blocks, and `turns` steps one at a time."""
    blocks = [lambda p=program: p.run(data) for program in programs.values()]
    single = [lambda p=program: p.run(data, p.turns) for program in programs.values()]
    with garbage_set_aside():
        take_turns(blocks, steps, in_a_row=min(BLOCK, steps))
        take_turns(single, turns)


def row(what: str, name: str, program: Program, to: Program) -> dict[str, Any]:
    def microseconds(times: list[float]) -> list[int]:
        return [round(t) for t in quartiles(times, 1e-6)]

    times, ref = program.times, to.times
    returned, ready = microseconds(times.returned), microseconds(times.ready)
    turns = program.turns.returned, to.turns.returned
    return {
        "of": what,
        "program": name,
        "returns": returned[1],
        "q1": returned[0],
        "q3": returned[2],
        "ready": ready[1],
        "ready q1": ready[0],
        "ready q3": ready[2],
        "CPU": microseconds(times.cpu)[1],
        "returns / ref": ratio(times.returned, ref.returned),
        "ready / ref": ratio(times.ready, ref.ready),
        "CPU / ref": ratio(times.cpu, ref.cpu),
        "in turns / ref": ratio(*turns) if turns[0] else None,
    }


def steps(
    depth: int, args: Any, makers: Any, what: str
) -> tuple[list[dict[str, Any]], Programs]:
    """A row for each way to write a step of this many blocks."""
    x = jr.normal(jr.key(2), (args.batch, args.width))
    data = x, jr.randint(jr.key(3), (args.batch,), 0, CLASSES)
    programs, missing = {}, []
    for package, make in makers:
        if package and not importlib.util.find_spec(package):
            missing.append(package)
        else:
            programs.update(make(depth, args.width))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compile one on each core
        list(pool.map(lambda program: program.warm_up(data), programs.values()))
    for program in programs.values():
        program.step(program.state, *data)
    run_all(programs, data, args.steps, args.turns)
    what = f"{depth} {what}"
    rows = [row(what, *item, programs[REFERENCE]) for item in programs.items()]
    for package in missing:
        rows.append({**dict.fromkeys(rows[0]), "of": what, "program": f"no {package}"})
    return rows, programs


def waiting(args: Any) -> tuple[list[dict[str, Any]], Programs]:
    """A row for each way to call a function that takes long to compute."""

    def work(state: tuple[Array, Array], x: Batch, y: Labels) -> tuple[Array, Any]:
        n, matrix = state
        out = jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ matrix), matrix)
        return out[0, 0], state

    matrix = jr.normal(jr.key(0), (512, 512))
    data = jnp.ones((1, 1)), jnp.zeros((1,), jnp.int32)
    jits = {PLAIN_JIT: jax.jit, OURS: es.jit, "eqx.filter_jit": eqx.filter_jit}
    programs = {name: Program(jit(work), None) for name, jit in jits.items()}
    n = jnp.array(20)
    for program in programs.values():
        program.state = n, matrix
        program.warm_up(data)
    calibration = programs[PLAIN_JIT]
    calibration.run(data, calibration.turns)
    n = jnp.array(int(20 * args.wait_ms / 1e3 / calibration.turns.ready.pop()))
    calibration.turns = Times()
    for program in programs.values():
        program.state = n, matrix
    run_all(programs, data, args.waits)
    what = f"{args.wait_ms:,} ms"
    rows = [row(what, *item, programs[PLAIN_JIT]) for item in programs.items()]
    return rows, programs


def compilations(args: Any) -> int:
    """How often XLA compiles for 100 training steps, one evaluation, 100 more steps."""
    count = 0

    def listen(event: str, _seconds: float, **_: Any) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    step = es.jit(lambda model, x, y: es_step(model, x, y))
    x, y = jnp.ones((args.batch, args.width)), jnp.zeros((args.batch,), jnp.int32)
    net, optimizer = es_model(4, args.width)
    jax.monitoring.register_event_duration_secs_listener(listen)
    for mode, times in (("train", 100), ("eval", 1), ("train", 100)):
        net = net.train(mode == "train")
        for _ in range(times):
            _, (net, optimizer) = step((net, optimizer), x, y)
    return count


def returned_by_depth(measured: Mapping[int, Programs]) -> dict[str, dict[int, float]]:
    """For each program and depth: the median seconds until the call returns."""
    medians: dict[str, dict[int, float]] = {}
    for depth, programs in sorted(measured.items()):
        for name, program in programs.items():
            median = statistics.median(program.times.returned)
            medians.setdefault(name, {})[depth] = median
    return medians


def draw(medians: Mapping[str, Mapping[int, float]], path: str) -> None:
    """Draw the cost of a step against depth: in total, and minus the floor."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (whole, over) = plt.subplots(
        1, 2, figsize=(12, 5), sharex=True, layout="constrained"
    )
    floor = medians.get(FLOOR, {})
    for number, (name, by_depth) in enumerate(medians.items()):
        style = {
            "color": f"C{number}",
            "marker": "os^Dv"[number % 5],
            "markersize": 4,
            "linewidth": 2.5 if name == OURS else 1.2,
            "label": name,
            "zorder": 3 if name == OURS else 2,
        }
        whole.plot(by_depth.keys(), [1e3 * t for t in by_depth.values()], **style)
        above = {n: 1e3 * (t - floor[n]) for n, t in by_depth.items() if n in floor}
        # A log scale cannot show a program that took no longer than the floor.
        above = {n: t for n, t in above.items() if t > 0}
        if name != FLOOR:
            over.plot(above.keys(), above.values(), **style)
    depths = sorted({n for by_depth in medians.values() for n in by_depth})
    for axes, title in (
        (whole, "until the call returns"),
        (over, f"the same, over the floor ({FLOOR})"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="blocks", title=title)
        axes.set_xticks(depths, map(str, depths), minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    whole.set_ylabel("ms for a step")
    figure.legend(*whole.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=150)


def ours_to(programs: Programs, name: str, ours: str = OURS) -> float:
    """How long `es.jit` takes to return, relative to a different program."""
    return ratio(programs[ours].times.returned, programs[name].times.returned)


def difference_of_losses(programs: Programs) -> float:
    names = FLOOR, REFERENCE, OURS, FILTER_JIT
    losses = [programs[name].first_loss for name in names if name in programs]
    return (max(losses) - min(losses)) / abs(losses[0])


def main() -> None:
    args = arguments(
        __doc__,
        depths=(10, 50),
        deep=(),
        width=4,
        batch=4,
        steps=200,
        turns=40,
        wait_ms=1000,
        waits=5,
        picture="",
    )
    compiled = compilations(args)
    measured = {n: steps(n, args, MAKERS, "blocks") for n in args.depths}
    touched = {n: steps(n, args, TOUCHING, "touched") for n in args.deep}
    wait_rows, waits = waiting(args)
    both = [*measured.values(), *touched.values()]
    rows = [r for rows, _ in both for r in rows]
    rows += wait_rows
    by_depth = {depth: programs for depth, (_, programs) in measured.items()}
    if args.picture:
        draw(returned_by_depth(by_depth), args.picture)

    text = "compilations of es.jit over train x 100, eval, train x 100"
    claims = [Claim(text, compiled, 2)]
    text = "the loss of the es model, difference to its arrays by hand, share"
    different = max(map(difference_of_losses, by_depth.values()))
    claims.append(Claim(text, different, 1e-5))
    for depth, programs in by_depth.items():
        limits = {FLOOR: 1.15, REFERENCE: 1.0, FILTER_JIT: 0.4, NNX: 0.15}
        for name in programs:
            if name in limits or name.startswith("NNX, "):
                claim = f"{depth} blocks: host time of es.jit, to {name}"
                limit = limits.get(name, 1.0)
                claims.append(
                    Claim(claim, ours_to(programs, name), limit, of_time=True)
                )
        text = f"{depth} blocks: host time of {READ}, to {FILTER_JIT}"
        found = ours_to(programs, FILTER_JIT, READ)
        claims.append(Claim(text, found, 0.65, of_time=True))
    touching = returned_by_depth({n: programs for n, (_, programs) in touched.items()})
    if (exponent := growth(touching.get(OURS, {}))) is not None:
        claims.append(
            Claim("growth: host time of es.jit", exponent, 1.05, of_time=True)
        )
    text = f"es.jit returns from work of {args.wait_ms:,} ms, to {PLAIN_JIT}"
    claims.append(Claim(text, ours_to(waits, PLAIN_JIT), 2.0, of_time=True))
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
