"""Run pages as a reader would: the blocks of a page as one script, in a new process.

`python tools/pages.py [NAME...]` runs all pages, or those whose path contains one of
these names. `--needs io` runs the pages that need only the extra `io`, `--needs none`
those without requirements, and `--needs more` all others.

A page states its requirements before its first block, in a paragraph that begins with
"This page needs": the extra `io`, other packages, and environment variables. The tests
run the same blocks with different settings, for example with eight devices.
"""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
NEEDS = re.compile(r"^This page needs (.*?)\n\n", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def script(page: Path) -> str:
    """The code of a page, including the blocks in tabs."""
    text = page.read_text(encoding="utf-8")
    return "\n\n".join(textwrap.dedent(code) for _, code in BLOCK.findall(text))


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if script(page)]


def needs(page: Path) -> tuple[set[str], dict[str, str]]:
    """The packages and extras that a page needs, and its environment variables."""
    found = NEEDS.search(page.read_text(encoding="utf-8").partition("```")[0])
    names = re.findall(r"`([^`]+)`", found[1]) if found else []
    settings = [name.split("=", 1) for name in names if re.match("[A-Z_]+=", name)]
    return {name for name in names if re.fullmatch("[a-z-]+", name)}, dict(settings)


def run(page: Path) -> bool:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.py")
        file.write_text(script(page), encoding="utf-8")
        settings = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        done = subprocess.run(
            [sys.executable, file],
            cwd=folder,
            env=settings | needs(page)[1],
            stdout=subprocess.DEVNULL,
        )
    seconds = time.perf_counter() - start
    fate = "FAILED" if done.returncode else "ok"
    print(f"{page}: {fate}, {seconds:.0f} s", flush=True)
    return done.returncode == 0


def main(*args: str) -> None:
    chosen = pages()
    if args and args[0] == "--needs":
        which, args = args[1], args[2:]
        kinds = {frozenset(): "none", frozenset({"io"}): "io"}
        chosen = [
            p for p in chosen if kinds.get(frozenset(needs(p)[0]), "more") == which
        ]
    if args:
        chosen = [p for p in chosen if any(name in str(p) for name in args)]
    failed = [page for page in chosen if not run(page)]
    if failed:
        sys.exit(f"{len(failed)} of {len(chosen)} pages failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
