"""Prints which folder of the package imports which, and how often, as a table.

`python tools/layers.py`. The table is in `src/eqx_state/README.md`.
"""

import ast
import collections
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent / "src" / "eqx_state"
FOUNDATION = ("_compat", "_errors", "_typing")
LAYERS = ["_io", "nn", "others", "_inspect", "_jit", "_transforms", "_state", "_tree"]
LAYERS += ["_kinds", "foundation"]


def layer(name: str) -> str:
    """The row of a module: its folder, or what single files are called together."""
    if name in FOUNDATION:
        return "foundation"
    return name if name in LAYERS else "others"


def imports(path: Path) -> list[str]:
    """The first names below the package of what a file imports from it."""
    here = path.relative_to(ROOT).parts[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = here[: len(here) - node.level + 1]
            below = node.module.split(".") if node.module else [node.names[0].name]
            found.append([*above, *below][0])
    return found


def main() -> None:
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for path in ROOT.rglob("*.py"):
        first = path.relative_to(ROOT).with_suffix("").parts[0]
        if first != "__init__":
            counts.update((layer(first), layer(name)) for name in imports(path))
    print("| imports from |", " | ".join(f"`{x}`" for x in LAYERS), "|")
    print("|---" * (len(LAYERS) + 1) + "|")
    for row in LAYERS[:-1]:
        cells = (str(counts[row, column] or "") for column in LAYERS)
        print(f"| `{row}` |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
