"""Does a long training loop run in constant memory?

Each round trains, evaluates, and fine-tunes with the blocks frozen. Then it saves the
model and its optimizer, and the next round continues with the loaded ones. The steps
donate their arrays. After the first rounds (`--warm-up`), the process must not grow by
more than 16 MB, must not have more live arrays or a thousand more Python objects, and
must not compile: each mode was compiled in the first round.

The memory is the resident set, after the garbage collector has run.
"""

import gc
import itertools
import math
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import jax
import jax.random as jr
from _common import arguments, Claim, Report
from _training import Batch, CLASSES, Data, es_loss, es_model, Labels, Loss, Net

import eqx_state as es


TRAIN, EVALUATE, TUNE = 100, 10, 50  # steps in a round
MB, OBJECTS = 16.0, 1000.0


class Soak:
    """The loop, and how often each mode was traced."""

    def __init__(self, depth: int, width: int, batch: int, folder: str):
        self.model = es_model(depth, width)
        self.path = os.path.join(folder, "checkpoint.safetensors")
        self.shape = batch, width
        self.key = jr.key(1)
        self.rounds = self.steps = 0
        self.loss = math.nan
        self.traces: Counter[str] = Counter()
        # The data come first and are not donated; the model is.
        self.step = es.jit(self._step, donate="all-except-first")
        self.evaluate = es.jit(self._evaluate)
        self.batch = es.jit(self._batch)

    def _step(self, data: Data, model: tuple[Net, es.Optimizer]) -> tuple[Loss, Any]:
        net, optimizer = model
        self.traces["tune" if net.blocks[0].frozen else "train"] += 1
        (loss, net), grads = es.value_and_grad(es_loss)(net, *data)
        return loss, optimizer.update(grads, net)

    def _evaluate(self, net: Net, x: Batch, y: Labels) -> Loss:
        self.traces["evaluate"] += 1
        return es_loss(net, x, y)

    def _batch(self, key: Any) -> tuple[Any, Data]:
        key, of_x, of_y = jr.split(key, 3)
        x, y = jr.normal(of_x, self.shape), jr.randint(of_y, self.shape[:1], 0, CLASSES)
        return key, (x, y)

    def data(self) -> Data:
        self.key, data = self.batch(self.key)
        self.steps += 1
        return data

    def round(self) -> None:
        for _ in range(TRAIN):
            _, self.model = self.step(self.data(), self.model)
        net, optimizer = self.model
        for _ in range(EVALUATE):
            loss = self.evaluate(net.eval(), *self.data())
        tuned = net.freeze(lambda net: net.blocks)
        tuning = tuned, es.Optimizer(optimizer.tx).init(tuned)
        for _ in range(TUNE):
            _, tuning = self.step(self.data(), tuning)
        self.model = tuning[0].unfreeze(), optimizer
        es.save(self.path, self.model)
        self.model = es.load(self.path, self.model)
        self.loss = float(loss)
        self.rounds += 1


class Compilations:
    """The number of programs that XLA has compiled, of any function."""

    def __init__(self) -> None:
        self.number = 0
        jax.monitoring.register_event_duration_secs_listener(self.listen)

    def listen(self, event: str, duration: float, **_: Any) -> None:
        self.number += event == "/jax/core/compile/backend_compile_duration"


def resident() -> float:
    """The current memory of the process, in MB."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 1e6
    # On other systems, the peak so far, which does not grow in constant memory.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def figures(soak: Soak, compilations: Compilations, minutes: float) -> dict[str, Any]:
    gc.collect()
    return {
        "minutes": minutes,
        "rounds": soak.rounds,
        "steps": soak.steps,
        "loss": soak.loss,
        "MB resident": resident(),
        "live arrays": len(jax.live_arrays()),
        "objects": len(gc.get_objects()),
        "compilations": compilations.number,
    }


def main() -> None:
    args = arguments(
        __doc__, minutes=30.0, warm_up=3, samples=20, depth=6, width=64, batch=32
    )
    compilations = Compilations()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(args.depth, args.width, args.batch, folder)
        for _ in range(args.warm_up):
            soak.round()
        start, rows = time.monotonic(), []
        for sample in itertools.count():
            minutes = (time.monotonic() - start) / 60
            rows.append(figures(soak, compilations, minutes))
            if minutes >= args.minutes:
                break
            until = start + 60 * args.minutes * (sample + 1) / args.samples
            soak.round()
            while time.monotonic() < until:
                soak.round()

    def growth(what: str) -> float:
        return max(row[what] for row in rows[1:]) - rows[0][what]

    claims = [
        Claim("MB by which the process grew", growth("MB resident"), MB),
        Claim("arrays left over", growth("live arrays"), 0),
        Claim("Python objects left over", growth("objects"), OBJECTS),
        Claim("programs compiled after the first rounds", growth("compilations"), 0),
    ]
    for mode in ("train", "evaluate", "tune"):
        claims.append(Claim(f"times that `{mode}` was traced", soak.traces[mode], 1))
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
