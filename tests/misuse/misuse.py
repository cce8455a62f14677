"""What the tests of wrong programs share: models, `fails`, and the rows of a page.

A program that is not on the page is an ordinary test, decorated with its error:

    @fails(FROZEN, "`Layer.count`", "a short fragment of the message")
    def test_what_the_program_does(net):
        net(XS)

The tables of `docs/troubleshooting.md` say how programs end. `test_troubleshooting.py`
contains the programs of the table of messages, and `test_what_if.py` all others.
"""

import builtins
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from models import Layer

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError
XS = jnp.arange(3.0)
TROUBLESHOOTING = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
TABLE = re.compile(r"^\|[-|]+\|\n((?:\| .* \|\n)+)", re.MULTILINE)
ERROR = re.compile(r"`(\w+)`<br>(.*)")
ERRORS = {**vars(builtins), **vars(dataclasses), **vars(jax.errors), **vars(es)}


class Net(es.Module):
    layer: Layer = dataclasses.field(default_factory=Layer)
    stats: es.State[dict] = dataclasses.field(
        default_factory=lambda: {"last": jnp.zeros(())}
    )
    mean: es.BatchStat = dataclasses.field(default_factory=lambda: jnp.zeros(3))

    def __call__(self, x):
        return self.layer(x)


def loss_fn(net):
    return net(XS).sum()


@contextlib.contextmanager
def fails(error: type[Exception], *texts: str) -> Iterator[None]:
    """Assert that the block, or the decorated program, raises exactly this error.

    Its message and its notes must contain all these texts.
    """
    with pytest.raises(error) as info:
        yield
    assert info.type is error
    said = "\n".join([str(info.value), *getattr(info.value, "__notes__", ())])
    assert [text for text in texts if text not in said] == [], said


class Page:
    """The rows of the tables on the page, and their programs.

    With `messages`, the rows of the section "Other messages", and else all others.

    A row has a title. If it has an error, its program must raise it. Otherwise, the
    program asserts its results.
    """

    def __init__(self, *, messages: bool):
        self.rows: dict[str, tuple[type[Exception], str] | None] = {}
        self.programs: dict[str, Callable[[Net], Any]] = {}
        text = TROUBLESHOOTING.read_text(encoding="utf-8")
        before, _, after = text.partition("\n## Other messages\n")
        table, _, after = after.partition("\n## ")
        text = table if messages else before + after
        for line in "".join(TABLE.findall(text)).splitlines():
            first, second, _ = line[2:-2].split(" | ")
            if ERROR.fullmatch(first):
                first, second = second, first
            error = ERROR.fullmatch(second)
            self.rows[first] = error and (ERRORS[error[1]], error[2])

    def program(self, title: str, *texts: str) -> Callable[[Callable], None]:
        """Decorate the program of a row, which is called with a `Net`.

        Its message must contain these texts, besides that of the row.
        """
        row = self.rows[title]

        def add(run: Callable[[Net], Any]) -> None:
            self.programs[title] = fails(*row, *texts)(run) if row else run

        return add
