"""The behavior of JAX's `Ref`, as `docs/comparison.md` describes it.

These tests do not call `eqx_state`. If one fails, JAX has changed, and the page must
change, too.
"""

import copy

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import reuses_keys


pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="the page speaks of JAX 0.10.2 and later"
)


NO_REMAT = {"kind": "no_grad_no_remat"}


def zero(**options):
    return jax.new_ref(jnp.zeros(()), **options)


def count(ref):
    ref[...] += 1.0


def test_under_vmap_only_a_mapped_ref_can_be_written():
    mean, xs = zero(), jnp.arange(4.0)

    def norm(x):
        mean[...] = 0.9 * mean[...] + 0.1 * lax.pmean(x, "batch")
        return x - mean[...]

    with pytest.raises(Exception, match="unbatched array reference"):
        jax.vmap(norm, axis_name="batch")(xs)
    assert mean[...] == 0

    counts = jax.new_ref(jnp.zeros(4))
    jax.vmap(lambda ref, x: ref.addupdate(x))(counts, xs)
    assert (counts[...] == xs).all()

    def branch(ref, x):
        lax.cond(x > 1, lambda: count(ref), lambda: None)

    with pytest.raises(NotImplementedError, match="vmap-of-cond"):
        jax.vmap(branch)(counts, xs)


@reuses_keys
def test_lanes_do_not_share_a_key():
    key = jax.new_ref(jr.key(0))

    def draw(key):
        key[...], new = jr.split(key[...])
        return jr.normal(new)

    with pytest.raises(Exception, match="unbatched array reference"):
        jax.vmap(lambda _: draw(key))(jnp.arange(4))
    drawn = jax.vmap(draw)(jax.new_ref(jr.split(jr.key(0), 4)))
    assert len(set(drawn.tolist())) == 4


@pytest.mark.parametrize(("options", "times"), [({}, 2), (NO_REMAT, 1)])
def test_under_checkpoint_a_gradient_writes_twice(options, times):
    ref = zero(**options)

    @jax.checkpoint
    def layer(w):
        count(ref)
        return jnp.sin(w * ref[...])

    gradient = jax.grad(layer)(1.0)
    assert ref[...] == times
    assert jnp.allclose(gradient, times * jnp.cos(times))  # one write would be correct


def test_a_ref_that_is_created_inside_and_written_under_checkpoint():
    def loss(w):
        ref = zero()

        def layer(w):
            ref[...] += lax.stop_gradient(w)
            return jnp.sin(w)

        return jax.checkpoint(layer)(w), ref[...]

    if jax.__version_info__ < (0, 12):
        with pytest.raises(AttributeError, match="'ValAccum' object has no attribute"):
            jax.grad(loss, has_aux=True)(3.0)
    else:
        assert jax.grad(loss, has_aux=True)(3.0)[1] == 3


def test_a_custom_jvp_loses_the_write_in_a_gradient():
    ref = zero()

    @jax.custom_jvp
    def double(x):
        count(ref)
        return 2 * x

    double.defjvp(lambda x, dx: (2 * x[0], 2 * dx[0]))
    double(1.0)
    assert ref[...] == 1
    for jit in (lambda f: f, jax.jit):
        jit(jax.grad(double))(1.0)
        assert ref[...] == 1
    with pytest.raises(NotImplementedError, match="discharge rule"):
        jax.jit(double)(1.0)


def test_a_differentiated_value_needs_stop_gradient():
    def written(stop):
        ref = zero()
        jax.grad(lambda x: (jax.ref.set(ref, ..., stop(x)), x)[1])(3.0)
        return ref[...]

    with pytest.raises(Exception, match="differentiated value"):
        written(lambda x: x)
    assert written(lax.stop_gradient) == 3


def test_a_module_with_a_ref_shares_it_with_its_copies_and_does_not_save_it(tmp_path):
    class Net(eqx.Module):
        weight: jax.Array
        calls: jax.Ref

        def __call__(self, x):
            count(self.calls)
            return self.weight * x

    net = Net(jnp.ones(()), zero())
    best = eqx.tree_at(lambda n: n.weight, net, jnp.zeros(()))
    grads = eqx.filter_jit(eqx.filter_grad(lambda n, x: n(x)))(net, 2.0)
    assert grads.calls is None
    assert best.calls[...] == 1  # the same memory
    count(copy.deepcopy(net).calls)
    assert net.calls[...] == 1
    assert not eqx.is_array(net.calls)

    eqx.tree_serialise_leaves(tmp_path / "net.eqx", net)
    like = Net(jnp.zeros(()), zero())
    loaded = eqx.tree_deserialise_leaves(tmp_path / "net.eqx", like)
    assert [loaded.weight, loaded.calls[...]] == [1, 0]
