"""Strict promotion in every test, and fresh keys."""

import itertools
import zlib
from collections.abc import Callable, Iterator

import hypothesis
import jax
import jax.random as jr
import pytest
from helpers import IS_FUZZ, keys_may_be_reused
from jaxtyping import Array, Key


# The first example of a property is much slower than the others, because it compiles.
hypothesis.settings.register_profile("eqx_state", deadline=None, derandomize=True)
hypothesis.settings.register_profile(
    "fuzz", deadline=None, derandomize=False, max_examples=500, print_blob=True
)
hypothesis.settings.load_profile("fuzz" if IS_FUZZ else "eqx_state")


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """Make implicit promotion an error.

    If a library promotes (`optax.adam` computes `float ** int`), decorate the test with
    `@jax.numpy_dtype_promotion("standard")`.
    """
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def _keys_may_be_reused() -> Iterator[None]:
    with keys_may_be_reused():
        yield


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], Key[Array, ""]]:
    """Returns a function that returns a new key per call, the same in every run."""
    seeds = itertools.count(zlib.crc32(request.node.nodeid.encode()))
    return lambda: jr.key(next(seeds))
