"""Read the tables of `es.tabulate`."""

import re


def cells(table: str) -> dict[str, list[str]]:
    """The rows of a table, by path. The lines of a cell are joined by newlines."""
    rows: dict[str, list[str]] = {}
    for block in re.split(r"\n[├┡└]", table)[:-1]:
        found = [line for line in block.splitlines() if line[:1] in ("│", "┃")]
        columns = zip(*(re.split("[│┃]", line)[1:-1] for line in found), strict=True)
        path, *rest = ("\n".join(x.strip() for x in c).strip() for c in columns)
        rows[path] = rest
    return rows
