"""`base`: for tests of fields that `es.Module` and `eqx.Module` have alike."""

import equinox as eqx
import pytest

import eqx_state as es


@pytest.fixture(params=[es.Module, eqx.Module], ids=["es", "eqx"])
def base(request):
    return request.param
