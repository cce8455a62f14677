"""Programs that are wrong in a way that users get wrong, and what comes of each.

The programs are in `catalogue_*.py`: to add one is to decorate a function there, and to
add its row to `docs/what-if.md`. Either it works as one would expect, or it raises the
error that says why and what to write. In both cases the models are untouched, no tracer
is left in them, and a correct call afterwards returns what it did before.
"""

import re
from collections import Counter
from pathlib import Path

import catalogue_axes as axes
import catalogue_closures as closures
import catalogue_derivatives as derivatives
import catalogue_files as files
import catalogue_handed as handed
import catalogue_held as held
import catalogue_jit as jit
import catalogue_keys as keys
import catalogue_kinds as kinds
import catalogue_lifted as lifted
import catalogue_looking as looking
import catalogue_nested as nested
import catalogue_places as places
import catalogue_stacks as stacks
import catalogue_threads as threads
import catalogue_training as training
import catalogue_writes as writes
import pytest


THEMES = [
    writes.OUTSIDE,
    writes.INSIDE,
    closures.CLOSURES,
    handed.COPIES,
    handed.DECORATED,
    threads.COPIED,
    kinds.KINDS,
    kinds.SHAPES,
    places.PLACES,
    lifted.LIFTED,
    derivatives.DERIVATIVES,
    stacks.STACKS,
    nested.NESTED,
    looking.LOOKING,
    jit.STATIC,
    held.HELD,
    keys.KEYS,
    training.MODES,
    training.TRAINING,
    axes.AXES,
    files.FILES,
    files.HABITS,
]
ENTRIES = [entry for theme in THEMES for entry in theme.entries]
PAGE = Path(__file__).parents[2] / "docs" / "what-if.md"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_what_happens(entry):
    entry.run()


def test_the_page_lists_the_entries_in_order():
    listed = re.findall(
        r"^(?:## .*|\| (?!If you|---).*)$", PAGE.read_text(), re.MULTILINE
    )
    expected = []
    for theme in THEMES:
        expected += [f"## {theme.title}", *(entry.row for entry in theme.entries)]
    assert listed == expected


def test_titles_are_names():
    assert [t for t, n in Counter(e.title for e in ENTRIES).items() if n > 1] == []
    assert [e.title for e in ENTRIES if "|" in e.title + e.says + e.instead] == []
