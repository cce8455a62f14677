"""Which claims hold? Runs the other scripts, and prints all claims in one table.

Each script runs in its own process. `--quick` uses small sizes and few rounds. `--only`
names the scripts to run. `--picture FILE` is for `host_time.py`. Exits with 1 if a
script fails, or if one of its results is wrong. A time that misses its target is shown,
but is not a failure.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _common import arguments, Claim, show_claims


# The options of each script, and those for `--quick`.
SCRIPTS = {
    "host_time": (
        "--depths 10 20 50 200 --deep 50 200 1000",
        "--depths 5 20 --deep 50 200 --steps 40 --turns 5 --waits 3",
    ),
    "refs": ("", "--rounds 20"),
    "tracing": (
        "--depths 50 200 --rounds 5",
        "--depths 10 50 100 --rounds 3",
    ),
    "selecting": (
        "--depths 50 200 1000",
        "--depths 50 100 200 --rounds 40",
    ),
    "donated_memory": ("--depths 20", "--depths 5"),
    "import_time": ("", "--repetitions 5"),
    "scan_depth": (
        "--depths 12 24 96 --repetitions 1 --steps 20",
        "--depths 4 8 --width 16 --batch 16 --repetitions 1 --steps 5",
    ),
    "checkpoint_memory": ("", "--depth 6 --width 128 --batch 64"),
    "sharding": ("", "--rounds 2 --depths 5 --steps 50"),
}


def run(script: str, options: list[str]) -> dict[str, Any] | None:
    """The report of a script; `None` if it printed no report."""
    path = Path(__file__).with_name(f"{script}.py")
    command = [sys.executable, str(path), *options, "--targets", "--json"]
    print(f"{script}.py {' '.join(options)}", end=" ", file=sys.stderr, flush=True)
    start = time.perf_counter()
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(f"({time.perf_counter() - start:.0f} s)", file=sys.stderr)
    # Ignore the exit status, which is 1 also if a time misses its target.
    return json.loads(child.stdout) if child.stdout else None


def main() -> None:
    args = arguments(__doc__, quick=False, only=tuple(SCRIPTS), picture="")
    reports = {}
    for script in args.only:
        options = SCRIPTS[script][args.quick].split()
        if script == "host_time" and args.picture:
            options += ["--picture", args.picture]
        reports[script] = run(script, options)
    made = {script: report for script, report in reports.items() if report}
    claims = [Claim(**claim) for report in made.values() for claim in report["claims"]]
    if args.json:
        print(json.dumps(made, indent=2))
    else:
        show_claims(claims)
    failed = [script for script in reports if script not in made]
    for script in failed:
        print(f"{script}.py failed", file=sys.stderr)
    if failed or not all(claim.holds or claim.of_time for claim in claims):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
