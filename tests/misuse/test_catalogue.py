"""Every program on the page `docs/what-if.md` ends as its row says.

The models that it was given are untouched, no tracer is left in them, and a correct
call afterwards returns what it did before.
"""

import importlib
from pathlib import Path

import catalogue_entry
import pytest


for path in Path(__file__).parent.glob("catalogue_*.py"):
    importlib.import_module(path.stem)
ROWS = catalogue_entry.rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_what_happens(row):
    catalogue_entry.run(row)


def test_each_row_has_a_program_and_each_program_a_row():
    assert sorted(row.title for row in ROWS) == sorted(catalogue_entry.PROGRAMS)
