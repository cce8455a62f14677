"""A model that no program changes."""

from collections.abc import Iterator

import equinox as eqx
import pytest
from helpers import untouched
from misuse import Net, XS

import eqx_state as es


@pytest.fixture
def net() -> Iterator[Net]:
    """A model, which is bit for bit the same after the test, and runs as before."""
    net = Net()
    before = es.mutable(net)(XS)
    with untouched(net):
        yield net
    assert eqx.tree_equal(es.mutable(net)(XS), before)
