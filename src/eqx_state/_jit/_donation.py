"""Which arrays `es.jit` gives away, and JAX's warning of those that it cannot use."""

import contextlib
import threading
import warnings
from typing import Any, Final, get_args, Literal


Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
WORDS: Final[tuple[Donate, ...]] = get_args(Donate)


def donates(donate: Donate, is_first: bool) -> bool:
    """Whether the arrays of the first argument, or those of the others, are donated."""
    return donate != "none" and not (is_first and donate.endswith("first"))


class _Ignored:
    """Inside, a warning is ignored, in all threads.

    `warnings.catch_warnings` would put back what it has found, and undo what another
    thread has set meanwhile.
    """

    def __init__(self, message: str):
        self.message = message
        self.lock = threading.Lock()
        self.calls = 0
        self.filters: Any = []
        self.entry: Any = None

    def __enter__(self) -> None:
        with self.lock:
            self.calls += 1
            if self.calls == 1:
                warnings.filterwarnings("ignore", message=self.message)
                self.filters, self.entry = warnings.filters, warnings.filters[0]

    def __exit__(self, *_: Any) -> None:
        with self.lock:
            self.calls -= 1
            if self.calls == 0:
                # Meanwhile `catch_warnings` may have put a copy in their place.
                for filters in (self.filters, warnings.filters):
                    with contextlib.suppress(ValueError):
                        filters.remove(self.entry)


# In a group: not to be taken for a filter of the user's.
_UNUSABLE: Final = _Ignored("(?:Some donated buffers were not usable)")


def quiet(donate: Donate) -> Any:
    """Inside, JAX does not warn of donated arrays of which it could make no use."""
    return _UNUSABLE if donate.startswith("all") else contextlib.nullcontext()
