"""The behavior of Flax NNX and Equinox, as `docs/comparison.md` describes it.

If a test fails, the other library has changed, and the page must change, too.
"""

import dataclasses
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqx_state as es


nnx = pytest.importorskip("flax.nnx", reason="Flax needs a newer JAX")
XS = jnp.arange(3.0)


class Calls(nnx.Variable):
    """The number of calls."""


class NNXCounter(nnx.Module):
    def __init__(self):
        self.calls = Calls(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x


class Counter(es.Module):
    calls: es.State = 0

    def __call__(self, x):
        self.calls += 1
        return x


@pytest.mark.parametrize("scan", [jax.lax.scan, lambda f, *args: nnx.scan(f)(*args)])
def test_nnx_cannot_write_in_the_closure_of_a_loop(scan):
    counter = NNXCounter()
    with pytest.raises(Exception, match="Cannot mutate Calls from a different trace"):
        scan(lambda carry, x: (carry, counter(x)), None, XS)

    loop = lambda counter: es.scan(lambda c, x: (c, counter(x)), None, XS)  # noqa: E731
    assert es.mutable(loop)(Counter())[1].calls == 3


def test_nnx_loses_writes_under_a_plain_vmap():
    counter = NNXCounter()
    jax.vmap(lambda counter, x: counter(x), in_axes=(None, 0))(counter, XS)
    assert counter.calls[...] == 0

    mapped = jax.vmap(lambda counter, x: counter(x), in_axes=(None, 0))
    with pytest.raises(dataclasses.FrozenInstanceError, match="Cannot write"):
        es.mutable(mapped)(Counter(), XS)


def test_equinox_does_not_serialize_typed_keys(tmp_path):
    class Keyed(eqx.Module):
        key: jax.Array

    with pytest.raises(Exception, match="Error at leaf with path"):
        eqx.tree_serialise_leaves(io.BytesIO(), Keyed(jr.key(0)))

    es.save(tmp_path / "keyed", Keyed(jr.key(0)))
    assert es.load(tmp_path / "keyed", Keyed(jr.key(1))).key == jr.key(0)


def test_equinox_does_not_see_a_default_that_init_does_not_assign():
    class Plain(eqx.Module):
        scale: float = 1.0

        def __init__(self):
            pass

    with pytest.raises(TypeError, match="is not a leaf of the pytree"):
        eqx.tree_at(lambda m: m.scale, Plain(), 2.0)

    class Scaled(es.Module):
        scale: es.Parameter = 1.0

        def __init__(self):
            pass

    assert eqx.tree_at(lambda m: m.scale, Scaled(), jnp.array(2.0)).scale == 2
