"""Run pyright, mypy and ty over `good/` and `bad/`, against the installed package.

`good/` must pass. In `bad/`, each checker must reject each line marked `# error`, and
nothing else. The files are copied to an empty directory, so that neither the sources
nor the configuration of a project that happens to be near play a part.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).parent
PYTHON = [sys.executable, "-m"]
CHECKERS = {
    "pyright": [*PYTHON, "pyright", "--pythonpath", sys.executable],
    "mypy": [*PYTHON, "mypy", "--strict", "--explicit-package-bases"],
    "ty": [*PYTHON, "ty", "check", "--python", sys.prefix, "--output-format=concise"],
}
# pyright: `/tmp/x/bad/a.py:3:5 - error: …`, mypy: `bad/a.py:3: error: …`,
# ty: `bad/a.py:3:5: error[rule] …`.
DIAGNOSTIC = re.compile(r"^\s*(\S+\.py):(\d+)(?::\d+)?(?: -|:) (?:error|warning)\b")

Place = tuple[str, int]


def marked(folder: Path) -> set[Place]:
    """The places marked `# error` in `bad/`."""
    return {
        (f"bad/{path.name}", i)
        for path in folder.glob("bad/*.py")
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith("# error")
    }


def reported(output: str, folder: Path) -> dict[Place, str]:
    """The places that a checker complains about, with its first words on each."""
    places: dict[Place, str] = {}
    for line in output.splitlines():
        if match := DIAGNOSTIC.match(line):
            path = (folder / match[1]).relative_to(folder)
            places.setdefault((path.as_posix(), int(match[2])), line.strip())
    return places


def main() -> int:
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for part in ("good", "bad"):
            shutil.copytree(HERE / part, folder / part)
        expected = marked(folder)
        processes = {
            checker: subprocess.Popen(
                [*command, "good", "bad"],
                cwd=folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for checker, command in CHECKERS.items()
        }
        for checker, process in processes.items():
            output = process.communicate()[0]
            found = reported(output, folder)
            accepted = sorted(expected - set(found))
            rejected = sorted(set(found) - expected)
            for file, line in accepted:
                print(f"{checker}: {file}:{line} is accepted, and must not be")
            for place in rejected:
                print(f"{checker}: must not be rejected: {found[place]}")
            if not found:
                print(output)
            print(
                f"{checker}: {len(expected) - len(accepted)} of {len(expected)} errors "
                f"found, {len(rejected)} complaints too many"
            )
            failures += len(accepted) + len(rejected)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
