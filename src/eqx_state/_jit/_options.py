"""The options of `es.jit`: what is donated, and what `jax.jit` is given besides."""

from typing import Any, Final

from ._donation import Donate, WORDS
from ._static import typed


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
