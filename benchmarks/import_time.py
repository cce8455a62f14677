"""How long does `import eqx_state` take, after Equinox, optax and rich are imported?

Each import runs in a new process with warm bytecode caches: a first process, which is
not counted, writes the caches to a separate directory. The figures are milliseconds of
the last `import` statement.
"""

import os
import subprocess
import sys
import tempfile

from _common import arguments, Claim, quartiles, Report


BASE = "equinox, optax, rich"
CASES = {"jax": "time", BASE: "jax, jaxtyping", "eqx_state": f"jax, jaxtyping, {BASE}"}
PROGRAM = """
import {before}
import time
start = time.perf_counter()
import {what}
print(time.perf_counter() - start)
"""


def import_seconds(what: str, before: str, caches: str) -> float:
    env = {**os.environ, "PYTHONPYCACHEPREFIX": caches}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", PROGRAM.format(what=what, before=before)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(run.stdout)


def main() -> None:
    args = arguments(__doc__, repetitions=10)
    seconds: dict[str, list[float]] = {what: [] for what in CASES}
    with tempfile.TemporaryDirectory() as caches:
        for repetition in range(args.repetitions + 1):
            for what, before in CASES.items():
                time = import_seconds(what, before, caches)
                if repetition > 0:
                    seconds[what].append(time)
    rows = []
    for what, times in seconds.items():
        q1, median, q3 = quartiles(times, 1e-3)
        rows.append(
            {"import": what, "after": CASES[what], "ms": median, "q1": q1, "q3": q3}
        )
    text = f"ms to import eqx_state after {BASE}"
    claims = [Claim(text, rows[-1]["ms"], 45.0, of_time=True)]
    Report(vars(args), rows, claims).show()


if __name__ == "__main__":
    main()
