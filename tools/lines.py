"""Count lines of code, comments and docstrings, for each folder and in total.

    python tools/lines.py                  # src/eqx_state
    python tools/lines.py tests examples   # other folders
    python tools/lines.py --files          # also each file

A line of code is any line that contains code, including the lines of a long string. A
comment counts even if it shares its line with code. Blank lines are not counted.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("code", "comments", "docstrings")
# Tokens that are not code.
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(source: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                string = node.body[0]
                found.update(range(string.lineno, (string.end_lineno or 0) + 1))
    return found


def count(path: Path) -> Counter[str]:
    source = path.read_text()
    docstrings, comments, code = docstring_lines(source), set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    lines = (code - docstrings, comments, docstrings)
    return Counter(dict(zip(COLUMNS, map(len, lines), strict=True)))


def show(name: str, counts: Counter[str]) -> None:
    print(*(f"{counts[column]:>10,}" for column in COLUMNS), f"  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="*", default=["src/eqx_state"])
    parser.add_argument("--files", action="store_true")
    args = parser.parse_args()
    print(*(f"{column:>10}" for column in COLUMNS))
    for folder in args.folders:
        top = ROOT / folder
        by_folder: dict[str, Counter[str]] = {}
        for path in sorted(top.rglob("*.py")):
            found = count(path)
            if args.files:
                show(str(path.relative_to(ROOT)), found)
            name = str(path.parent.relative_to(ROOT))
            by_folder.setdefault(name, Counter()).update(found)
        for name, counts in by_folder.items():
            show(f"{name}/", counts)
        show(f"{folder} in all", sum(by_folder.values(), Counter()))


if __name__ == "__main__":
    main()
