"""Read the tables of `es.tabulate`."""

import re


def cells(table: str) -> dict[str, list[str]]:
    """The rows of a table, by path. The lines of a cell are joined by newlines."""
    rows: dict[str, list[str]] = {}
    blocks = [block.splitlines() for block in re.split("\n─+\n", table)]
    # Two spaces or more separate the columns, which begin where their headers do.
    starts = [found.start() for found in re.finditer(r"\S+( \S+)*", blocks[0][-1])]
    ends = [*starts[1:], None]
    blocks[-1] = blocks[-1][:-2]  # without the totals below the table
    for lines in blocks:
        columns = [
            [line[start:end].strip() for line in lines]
            for start, end in zip(starts, ends, strict=True)
        ]
        path, *rest = ("\n".join(column).strip() for column in columns)
        rows[path] = rest
    return rows
