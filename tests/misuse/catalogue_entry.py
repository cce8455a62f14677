"""The rows of `docs/what-if.md`, and how to run their programs.

The page is the data. Each program in a `catalogue_*.py` file has the title of a row,
and `test_catalogue.py` checks that it ends as the row says. To add a row, write it on
the page, and decorate its program with `program("the title")`.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import keys_may_be_reused, untouched
from models import Layer

import eqx_state as es


XS = jnp.arange(3.0)
PAGE = Path(__file__).parents[2] / "docs" / "what-if.md"
OUTCOME = r"(?:`(\w+)`|\*\*works\*\*)<br>(.*?)"
ROW = re.compile(rf"\| (.*?) \| {OUTCOME} \| .* ?\|")
# Above a table of programs with the same outcome.
TABLE = re.compile(rf"If you (.*): {OUTCOME}")
ERRORS = {
    error.__name__: error
    for error in (
        AttributeError,
        NameError,
        RuntimeError,
        TypeError,
        UserWarning,
        ValueError,
        dataclasses.FrozenInstanceError,
        es.NotInitializedError,
        es.TraceError,
        jax.errors.JaxRuntimeError,
        jax.errors.KeyReuseError,
        jax.errors.TracerBoolConversionError,
        jax.errors.UnexpectedTracerError,
    )
}
PROGRAMS: dict[str, "Program"] = {}


class Net(es.Module):
    layer: Layer = dataclasses.field(default_factory=Layer)
    stats: es.State[dict] = dataclasses.field(
        default_factory=lambda: {"last": jnp.zeros(())}
    )
    mean: es.BatchStat = dataclasses.field(default_factory=lambda: jnp.zeros(3))

    def __call__(self, x):
        return self.layer(x)


class Draw(es.Module):
    """Adds noise from its own key."""

    rng: es.Rng = dataclasses.field(default_factory=lambda: jax.random.key(0))

    def __call__(self, x):
        self.rng, key = jax.random.split(self.rng)
        return x + jax.random.normal(key, x.shape)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the page: how a program ends.

    - `error`: the class of the error, or `None` if the program works.
    - `says`: a literal part of the message, or what a working program does.
    """

    title: str
    error: type[Exception] | None
    says: str


def rows() -> list[Row]:
    """The rows of all tables.

    In some tables, all programs have the same outcome, which is above the table, as `If
    you write … in a call: …`. The first column of these tables replaces the first `…`,
    and may contain several pieces of code.
    """
    found, table = [], None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        table = None if line.startswith("| If") else TABLE.fullmatch(line) or table
        if row := ROW.fullmatch(line):
            found.append((row[1], row))
        elif table and (row := re.fullmatch(r"\| ([^…].*?) \| .* \|", line)):
            code = re.fullmatch(r"(`[^`]+`(, |$))+", row[1])
            names = re.findall(r"`[^`]+`", row[1]) if code else [row[1]]
            found.extend((table[1].replace("…", name, 1), table) for name in names)
    return [Row(title, m[2] and ERRORS[m[2]], m[3]) for title, m in found]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and texts that its error must contain besides that of the row."""

    run: Callable[["Case"], Any]
    hints: tuple[str, ...]


def program(title: str, *hints: str) -> Callable[[Callable[["Case"], Any]], None]:
    """Decorate the program of a row.

    If the row has an error, the program raises it inside `case.error()`, at least once.
    Otherwise, it asserts its results.
    """
    assert title not in PROGRAMS, title
    return lambda run: PROGRAMS.__setitem__(title, Program(run, hints))


class Case:
    """One run of a program, with the models and errors to check."""

    def __init__(self, row: Row, hints: tuple[str, ...]):
        self.row = row
        self.hints = hints
        self.errors = 0
        self.models = contextlib.ExitStack()
        self.kept: list[tuple[Any, Callable[[Any], Any], Any]] = []

    def keep(
        self, model: Any, *inputs: Any, call: Callable[[Any], Any] | None = None
    ) -> Any:
        """Return `model`, and check that the program leaves it bit for bit unchanged.

        Also check that a correct call, by default of the model with these inputs,
        returns the same before and after the program.
        """
        if call is None and inputs:
            call = lambda m: es.mutable(m)(*inputs)  # noqa: E731
        elif call is None:
            call = es.mutable(lambda m: None)
        self.kept.append((model, call, call(model)))
        self.models.enter_context(untouched(model))
        return model

    @contextlib.contextmanager
    def error(self, *hints: str) -> Iterator[None]:
        """Check that the block raises the error of the row."""
        error = self.row.error
        assert error is not None
        with pytest.raises(error, match=re.escape(self.row.says)) as info:
            yield
        assert info.type is error
        said = "\n".join([str(info.value), *getattr(info.value, "__notes__", ())])
        for text in (*self.hints, *hints):
            assert text in said, f"{text!r} is not in:\n{said}"
        self.errors += 1


def run(row: Row) -> None:
    """Run the program of a row, and check the models that it must not change."""
    program = PROGRAMS[row.title]
    case = Case(row, program.hints)
    # The models are called several times with the same keys.
    with keys_may_be_reused():
        with case.models:
            program.run(case)
        assert (case.errors > 0) == (row.error is not None)
        for model, call, before in case.kept:
            assert not any(
                isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(model)
            )
            assert eqx.tree_equal(call(model), before)
