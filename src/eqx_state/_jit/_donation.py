"""Which arrays `es.jit` gives away, and JAX's warning of those that it cannot use."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any, Final, get_args, Literal


Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
WORDS: Final[tuple[Donate, ...]] = get_args(Donate)


def donates(donate: Donate, is_first: bool) -> bool:
    """Whether the arrays of the first argument, or those of the others, are donated."""
    return donate != "none" and not (is_first and donate.endswith("first"))


_NUMBERS: Final = itertools.count()


@contextlib.contextmanager
def quiet(donate: Donate) -> Iterator[None]:
    """Inside, JAX does not warn of donated arrays of which it could make no use.

    `warnings.catch_warnings` would put back the filters that it found, and undo what
    another thread has set meanwhile. So each call adds a filter, and removes just that.
    """
    if not donate.startswith("all"):
        yield
        return
    # The number, in a comment, tells it from those of other threads and of the user.
    message = f"Some donated buffers were not usable(?#{next(_NUMBERS)})"
    warnings.filterwarnings("ignore", message=message)
    filters: Any = warnings.filters
    before = filters
    try:
        yield
    finally:
        # Meanwhile `catch_warnings` may have put a copy in their place.
        for filters in (before, warnings.filters):
            for entry in list(filters):
                if entry[1] is not None and entry[1].pattern == message:
                    with contextlib.suppress(ValueError):
                        filters.remove(entry)
