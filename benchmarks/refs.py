"""What does a call of `jax.jit` cost if its state is stored in JAX's `Ref`s?

Each program adds 1 to each of many small arrays. These are arrays that the function
returns, `Ref`s that are arguments, `Ref`s that the function closes over, or fields of
an `es.Module`. The figures are CPU microseconds of the thread until a call returns. The
programs take turns of some calls in a row.
"""

import functools as ft
import statistics

import jax
import jax.numpy as jnp
from _common import (
    arguments,
    CALLS,
    Claim,
    garbage_set_aside,
    in_a_loop,
    ratio,
    Report,
    take_turns,
    Timer,
)

import eqx_state as es


ARGUMENTS = "`Ref`s, arguments"


class Counts(es.Module):
    counts: list[es.State]

    def __call__(self) -> None:
        self.counts = [x + 1 for x in self.counts]


def main() -> None:
    args = arguments(__doc__, arrays=100, rounds=50)
    arrays = [jnp.zeros(()) for _ in range(args.arrays)]
    refs, closed = ([jax.new_ref(x) for x in arrays] for _ in range(2))

    def write(refs: list[jax.Ref]) -> None:
        for ref in refs:
            ref[...] += 1

    programs = {
        "arrays": ft.partial(jax.jit(lambda xs: [x + 1 for x in xs]), arrays),
        ARGUMENTS: ft.partial(jax.jit(write), refs),
        "`Ref`s, closed over": jax.jit(lambda: write(closed)),
        "`es.jit`, a module": ft.partial(
            es.jit(lambda model: es.mutable(model)()), Counts(arrays)
        ),
    }
    timers = {}
    for name, program in programs.items():
        program()
        timers[name] = Timer(ft.partial(in_a_loop, program))
    with garbage_set_aside():
        take_turns(timers.values(), args.rounds)
    base = timers["arrays"].seconds
    rows = [
        {
            "state": name,
            "µs": round(statistics.median(timer.seconds) / CALLS * 1e6, 1),
            "to arrays": ratio(timer.seconds, base),
        }
        for name, timer in timers.items()
    ]
    ours, theirs = (timers[name].seconds for name in ("`es.jit`, a module", ARGUMENTS))
    text = f"{args.arrays} arrays of state: es.jit of a module, to Refs as arguments"
    Report(
        vars(args), rows, [Claim(text, ratio(ours, theirs), 0.5, of_time=True)]
    ).show()


if __name__ == "__main__":
    main()
