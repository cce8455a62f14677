"""Small arrays in buffers: splitting a buffer returns the arrays, on any device."""

import types

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_state._jit.packing import BufferKey, Pack


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_split_is_the_inverse_of_join(platform):
    arrays = [jnp.arange(6.0).reshape(2, 3), jnp.ones(()), jnp.arange(4.0)]
    device = types.SimpleNamespace(platform=platform)
    key = BufferKey(arrays[0].dtype, types.SimpleNamespace(device_set=[device]), True)
    pack = Pack(key, (2, 0, 1), tuple(arrays[i].shape for i in (2, 0, 1)))
    for through in (lambda f: f, jax.jit):
        buffer = through(pack.join)(arrays)
        assert buffer.shape == (11,)
        back = through(pack.split)(buffer)
        assert eqx.tree_equal(back, [arrays[i] for i in (2, 0, 1)])
