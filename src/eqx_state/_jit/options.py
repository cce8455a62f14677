"""The options of `es.jit`: what is donated, and what `jax.jit` is given besides."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any, Final, get_args, Literal

from .static import typed


# --- Which arrays `es.jit` gives away, and JAX's warning of those that it cannot use.


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


class Options:
    """Hashable; equal if functions are compiled alike."""

    def __init__(self, donate: Donate = "none", **for_jax: Any):
        self.donate: Donate = donate
        self.for_jax = for_jax
        self._key = donate, frozenset((k, typed(x)) for k, x in for_jax.items())
        self._hash = hash(self._key)  # asked for at each call

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self._key == other._key


def checked(donate: Any, for_jax: dict[str, Any]) -> Options:
    """The options that a user has given, if they can be."""
    if donate not in WORDS:
        raise ValueError(
            f"`es.jit(donate={donate!r})`: `donate` is one of"
            f" {', '.join(map(repr, WORDS))}."
        )
    for name in for_jax:
        if name in _INSTEAD:
            raise TypeError(_NOT_OURS.format(name, _INSTEAD[name]))
        if name not in _PASSED_ON:
            raise TypeError(_UNKNOWN.format(name, ", ".join(_PASSED_ON)))
    return Options(donate, **for_jax)


_PASSED_ON: Final = ("compiler_options", "inline", "keep_unused", "backend", "device")

_STATIC: Final = """All but arrays is static already: `2` is, and `jnp.array(2)` is \
traced."""
_DONATE: Final = """Say `donate="all"`, or `donate="all-except-first"` and put what is \
used again into the first argument."""
_INSTEAD: Final = {
    "static_argnums": _STATIC,
    "static_argnames": _STATIC,
    "donate_argnums": _DONATE,
    "donate_argnames": _DONATE,
    "in_shardings": """Arrays are used where they are: `jax.device_put(model, \
shardings)` before the call.""",
    "out_shardings": """Put the results where they belong in the function: \
`jax.lax.with_sharding_constraint(x, sharding)`; or use `jax.jit`, if all arguments \
and results are made of arrays.""",
}

_NOT_OURS: Final = """`es.jit({}=...)` is not possible. The arguments of the function \
become a flat list of arrays before `jax.jit` sees them, which could not tell them \
apart. {}"""

_UNKNOWN: Final = """`es.jit` got an unexpected keyword argument '{}'. It takes \
`donate`, and passes on to `jax.jit`: {}."""
