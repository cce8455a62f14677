"""The options of `es.jit`: donation, and options that are passed on to `jax.jit`."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Final, get_args, Literal

from .static import typed


Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
_WORDS: Final[tuple[Donate, ...]] = get_args(Donate)


class Options:
    """The options of a compiled function: hashable, and compared by value."""

    def __init__(self, donate: Donate = "none", **for_jax: Any):
        if donate not in _WORDS:
            words = ", ".join(map(repr, _WORDS))
            raise ValueError(_UNKNOWN_WORD.format(donate, words))
        for name in for_jax:
            if name not in _PASSED_ON:
                raise TypeError(_NOT_PASSED_ON.format(name, ", ".join(_PASSED_ON)))
        self.donate: Donate = donate
        self.for_jax = for_jax
        self._key = donate, frozenset((k, typed(x)) for k, x in for_jax.items())
        self._hash = hash(self._key)  # each call uses it

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self._key == other._key

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Suppress JAX's warning about unusable donated arrays, for `"all..."`."""
        if not self.donate.startswith("all"):
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _NOT_USABLE)
            yield


_NOT_USABLE: Final = "Some donated buffers were not usable"

_UNKNOWN_WORD: Final = "`es.jit(donate={!r})`: `donate` is one of {}."

_PASSED_ON: Final = ("compiler_options", "inline", "keep_unused", "backend", "device")

_NOT_PASSED_ON: Final = """`es.jit` got an unexpected keyword argument '{}'. It takes \
`donate`, and passes on to `jax.jit`: {}. Others are not needed: every leaf that is \
not an array is static already, and arrays keep their shardings (`jax.device_put`)."""
