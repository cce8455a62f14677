"""What an entry of the misuse catalogue is, and what is checked around each of them.

The programs are in the other `catalogue_*.py`, `docs/what-if.md` lists them, and
`test_catalogue.py` runs them and compares the two.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import keys_may_be_reused, untouched
from models import Layer

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError
XS = jnp.arange(3.0)


class Net(es.Module):
    layer: Layer = dataclasses.field(default_factory=Layer)
    stats: es.State[dict] = dataclasses.field(
        default_factory=lambda: {"last": jnp.zeros(())}
    )
    mean: es.BatchStat = dataclasses.field(default_factory=lambda: jnp.zeros(3))

    def __call__(self, x):
        return self.layer(x)


class Draw(es.Module):
    """Adds noise, from a key of its own."""

    rng: es.Rng = dataclasses.field(default_factory=lambda: jax.random.key(0))

    def __call__(self, x):
        self.rng, key = jax.random.split(self.rng)
        return x + jax.random.normal(key, x.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A program that is wrong, and what comes of it.

    - `says`: a literal part of the error; of a program that works, what happens.
    - `hints`: more that must be in the error, such as the field and the way out.
    """

    title: str
    error: type[Exception] | None
    says: str
    hints: tuple[str, ...]
    instead: str
    program: Callable[["Case"], Any]

    @property
    def outcome(self) -> str:
        return "**works**" if self.error is None else f"`{self.error.__name__}`"

    @property
    def row(self) -> str:
        """This entry in the table of the page."""
        return f"| {self.title} | {self.outcome}<br>{self.says} | {self.instead} |"

    def run(self) -> None:
        case = Case(self)
        # Models are called again and again here, with the keys that they have.
        with keys_may_be_reused():
            self._run(case)

    def _run(self, case: "Case") -> None:
        with case.models:
            self.program(case)
        assert case.errors == 0 if self.error is None else case.errors > 0
        for model, call, before in case.kept:
            assert not any(
                isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(model)
            )
            assert eqx.tree_equal(call(model), before)


@dataclasses.dataclass(frozen=True)
class Theme:
    """A heading of the page, and the entries under it, in order."""

    title: str
    entries: list[Entry] = dataclasses.field(default_factory=list)

    def raises(
        self, title: str, error: type[Exception], says: str, *hints: str, instead: str
    ) -> Callable[[Callable[["Case"], Any]], None]:
        """Decorates a program in which `case.error()` is met, once or more."""
        return lambda f: self.entries.append(
            Entry(title, error, says, hints, instead, f)
        )

    def works(
        self, title: str, says: str, instead: str = ""
    ) -> Callable[[Callable[["Case"], Any]], None]:
        """Decorates a program that asserts what it computes."""
        return lambda f: self.entries.append(Entry(title, None, says, (), instead, f))


class Case:
    """One run of an entry: what the program gives to be checked."""

    def __init__(self, entry: Entry):
        self.entry = entry
        self.errors = 0
        self.models = contextlib.ExitStack()
        self.kept: list[tuple[Any, Callable[[Any], Any], Any]] = []

    def keep(
        self, model: Any, *inputs: Any, call: Callable[[Any], Any] | None = None
    ) -> Any:
        """`model`, which the program leaves as it is, bit for bit.

        A correct call, by default of the model with these inputs, has the same result
        before and after the program.
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
        """The error of the entry comes out of the block."""
        error = self.entry.error
        assert error is not None
        with pytest.raises(error, match=re.escape(self.entry.says)) as info:
            yield
        assert info.type is error
        for text in (*self.entry.hints, *hints):
            assert text in str(info.value), f"{text!r} is not in:\n{info.value}"
        self.errors += 1
