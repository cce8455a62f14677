"""How long does the host take for a training step, over `jax.jit` on nested dicts?

A step of N blocks of Linear, BatchNorm, relu and Dropout, with adam, small enough that
the device has almost nothing to do. All programs take turns in one process, in another
order each round: the same es model under `es.jit` and `eqx.filter_jit`, and its arrays
as a flat list (the floor) and as nested dicts under `jax.jit`; and the model as others
write it. Measured are the times until the call returns and until the loss is ready, and
the CPU time of the thread that calls; all in microseconds, with quartiles. Ratios are
medians over the rounds. Then: how soon does a call return whose result takes long?
"""

import importlib.util
import os
import random
import statistics
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from _common import arguments, Report
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
    REFERENCE,
)
from jaxtyping import Array

import eqx_state as es


def take_turns(programs: dict[str, Program], data: Data, rounds: int) -> None:
    order, shuffle = list(programs.values()), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for program in order:
            program.run(data)


def row(what: str, name: str, program: Program, to: Program) -> dict[str, Any]:
    def microseconds(times: list[float]) -> list[int]:
        return [round(1e6 * t) for t in statistics.quantiles(times, n=4)]

    def ratio(times: list[float], others: list[float]) -> float:
        pairs = zip(times, others, strict=True)
        return statistics.median(t / other for t, other in pairs)

    returned, ready = microseconds(program.returned), microseconds(program.ready)
    return {
        "of": what,
        "program": name,
        "returns": returned[1],
        "q1": returned[0],
        "q3": returned[2],
        "ready": ready[1],
        "ready q1": ready[0],
        "ready q3": ready[2],
        "CPU": microseconds(program.cpu)[1],
        "returns / ref": ratio(program.returned, to.returned),
        "ready / ref": ratio(program.ready, to.ready),
        "CPU / ref": ratio(program.cpu, to.cpu),
    }


def steps(depth: int, args: Any) -> tuple[list[dict[str, Any]], dict[str, Program]]:
    """A row for each way to write a step of this many blocks."""
    x = jr.normal(jr.key(2), (args.batch, args.width))
    data = x, jr.randint(jr.key(3), (args.batch,), 0, CLASSES)
    programs, missing = {}, []
    for package, make in {None: es_and_hand, "flax": nnx, "haiku": haiku}.items():
        if package is None or importlib.util.find_spec(package):
            programs |= make(depth, args.width)
        else:
            missing.append(package)
    programs |= equinox(depth, args.width)
    for program in programs.values():
        program.warm_up(data)
    take_turns(programs, data, args.steps)
    what = f"{depth} blocks"
    rows = [row(what, *item, programs[REFERENCE]) for item in programs.items()]
    for package in missing:
        rows.append({**dict.fromkeys(rows[0]), "of": what, "program": f"no {package}"})
    return rows, programs


def waiting(args: Any) -> tuple[list[dict[str, Any]], dict[str, Program]]:
    """A row for each way to call what takes long to compute."""

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
    calibration.run(data)
    n = jnp.array(int(20 * args.wait_ms / 1e3 / calibration.ready.pop()))
    calibration.returned.clear()
    calibration.cpu.clear()
    for program in programs.values():
        program.state = n, matrix
    take_turns(programs, data, args.waits)
    what = f"{args.wait_ms:,} ms"
    rows = [row(what, *item, programs[PLAIN_JIT]) for item in programs.items()]
    return rows, programs


def compilations(args: Any) -> int:
    """How often XLA compiles for 20 steps of training, one of evaluation, 20 more."""
    count = 0

    def listen(event: str, _seconds: float, **_: Any) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    step = es.jit(lambda model, x, y: es_step(model, x, y))
    x, y = jnp.ones((args.batch, args.width)), jnp.zeros((args.batch,), jnp.int32)
    net, optimizer = es_model(4, args.width)
    jax.monitoring.register_event_duration_secs_listener(listen)
    for mode, times in (("train", 20), ("eval", 1), ("train", 20)):
        net = net.train(mode == "train")
        for _ in range(times):
            _, (net, optimizer) = step((net, optimizer), x, y)
    return count


def main() -> None:
    args = arguments(
        __doc__,
        depths=[10, 50],
        width=4,
        batch=4,
        steps=200,
        wait_ms=1000,
        waits=5,
        targets=False,
    )
    os.environ.setdefault("COLUMNS", "150")  # where there is no terminal
    compiled = compilations(args)
    measured = {depth: steps(depth, args) for depth in args.depths}
    wait_rows, waits = waiting(args)
    rows = [row for rows, _ in measured.values() for row in rows] + wait_rows

    def ours_to(programs: dict[str, Program], name: str) -> float:
        """How long `es.jit` takes to return, relative to another program."""
        pairs = zip(programs[OURS].returned, programs[name].returned, strict=True)
        return statistics.median(ours / other for ours, other in pairs)

    def same_loss(programs: dict[str, Program]) -> bool:
        names = FLOOR, REFERENCE, OURS, FILTER_JIT
        losses = [programs[name].first_loss for name in names]
        return max(losses) - min(losses) <= 1e-5 * abs(losses[0])

    claims = {
        "es.jit: 2 compilations over train x 20, eval, train x 20": compiled == 2,
        "the es model and its arrays by hand have the same loss, to 1e-5": all(
            same_loss(programs) for _, programs in measured.values()
        ),
    }
    if args.targets:  # of times, and only as good as the machine is quiet
        for depth, (_, programs) in measured.items():
            limits = {name: 1.0 for name in programs if name.startswith("NNX, ")}
            limits |= {REFERENCE: 1.15, FILTER_JIT: 0.4, NNX: 0.15}
            for name, limit in limits.items():
                if name in programs:
                    claim = f"{depth} blocks: es.jit <= {limit} x {name}"
                    claims[claim] = ours_to(programs, name) <= limit
        soon = ours_to(waits, PLAIN_JIT) <= 2
        claims["es.jit returns from long work within 2 x jax.jit"] = soon
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
