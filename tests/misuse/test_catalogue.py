"""Every program on the page `docs/what-if.md` ends as its row says.

The program does not change its models, and leaves no tracer in them. A correct call
afterwards returns the same as before.
"""

import importlib
from pathlib import Path

import catalogue_entry
import jax
import pytest


for path in Path(__file__).parent.glob("catalogue_*.py"):
    importlib.import_module(path.stem)
ROWS = catalogue_entry.rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_what_happens(row):
    if "custom_vjp" in row.title and jax.config.jax_check_tracer_leaks:
        pytest.skip("a traced call of a rule keeps its arguments alive")
    catalogue_entry.run(row)


def test_each_row_has_a_program_and_each_program_a_row():
    assert sorted(row.title for row in ROWS) == sorted(catalogue_entry.PROGRAMS)
