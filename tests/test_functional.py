"""`es.functional`: the pure pair that other JAX libraries expect."""

import dataclasses

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqx_state as es


class Net(es.Module):
    linear: eqx.nn.Linear
    count: es.State = 0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))
    table: es.Buffer = 2.0
    index: jax.Array = dataclasses.field(default_factory=lambda: jnp.arange(2))
    act: object = jnp.tanh
    name: str = "net"

    def __call__(self, x, *, scale=1.0):
        if self.training:
            self.count = self.count + 1
            _, self.rng = jr.split(self.rng)
        return scale * self.table * self.act(self.linear(x))


def net():
    return Net(eqx.nn.Linear(2, 1, key=jr.key(1)))


X = jnp.ones(2)


def test_the_pair_is_all_arrays():
    _, params, state = es.functional(net())
    for tree in (params, state):
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))
    assert [p.name for p in es.parts(params)] == ["linear.weight", "linear.bias"]
    assert {p.name for p in es.parts(state)} == {"count", "rng", "table", "index"}


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_apply_equals_mutable():
    model = net()
    apply, params, state = es.functional(model)
    for i in range(1, 4):
        out, state = apply(params, state, X, scale=0.5)
        expected, model = es.mutable(model)(X, scale=0.5)
        assert out == expected
        assert state.count == model.count == i
        assert state.rng == model.rng


def test_state_keeps_its_structure_so_that_plain_jit_compiles_once():
    apply, params, state = es.functional(net())
    traces = []

    @jax.jit
    def step(params, state, x):
        traces.append(1)
        return apply(params, state, x)

    structure = jax.tree.structure(state)
    for _ in range(3):
        _, state = step(params, state, X)
        assert jax.tree.structure(state) == structure
    assert state.count == 3
    assert len(traces) == 1
    _, last = jax.jit(apply)(params, state, X)
    assert last.count == 4


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_in_scan_and_vmap():
    apply, params, state = es.functional(net())
    step = lambda state, x: apply(params, state, x)[::-1]  # noqa: E731
    last, ys = lax.scan(step, state, jnp.ones((3, 2)))
    assert last.count == 3
    assert ys.shape == (3, 1)
    out, states = jax.vmap(apply, in_axes=(None, None, 0))(
        params, state, jnp.ones((3, 2))
    )
    assert out.shape == (3, 1)
    assert states.count.tolist() == [1, 1, 1]


@jax.numpy_dtype_promotion("standard")
@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_with_plain_grad_and_optax():
    apply, params, state = es.functional(net())

    @jax.jit
    def loss_fn(params, state, x):
        out, state = apply(params, state, x)
        return jnp.sum(out**2), state

    grads, state = jax.grad(loss_fn, has_aux=True)(params, state, X)
    expected, _ = es.grad(lambda m, x: jnp.sum(m(x) ** 2))(net(), X)
    np.testing.assert_allclose(grads.linear.weight, expected.linear.weight)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    tx = optax.sgd(0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    out, _ = apply(new, state, X)
    assert out != apply(params, state, X)[0]


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_the_model_comes_back_by_update():
    model = net()
    apply, params, state = es.functional(model)
    _, state = apply(params, state, X)
    _, expected = es.mutable(model)(X)
    assert eqx.tree_equal(es.update(model, params, state), expected)


def test_any_name_of_a_keyword_argument_reaches_the_model():
    class Sum(es.Module):
        weight: es.Parameter = 2.0

        def __call__(self, x, **kwargs):
            return self.weight * x + sum(kwargs.values())

    apply, params, state = es.functional(Sum())
    out, _ = apply(params, state, 3.0, params=1.0, state=2.0, m=3.0, model=4.0)
    assert out == 16.0


def test_of_a_list_like_model():
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(2, 2, key=jr.key(0)), es.nn.Dropout(key=0)]
    )
    apply, params, state = es.functional(model)
    _, new = jax.jit(apply)(params, state, X)
    assert new.layers[1].rng != state.layers[1].rng


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_other_arrays_in_params_are_used():
    apply, params, state = es.functional(net())
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert apply(zeros, state, X)[0] == 0.0
    doubled = es.map(lambda x: 2 * x, state, on=es.Buffer)
    np.testing.assert_allclose(
        apply(params, doubled, X)[0], 2 * apply(params, state, X)[0]
    )


def test_a_write_of_a_parameter_is_an_error():
    class Bad(es.Module):
        w: es.Parameter = 1.0

        def __call__(self):
            self.w = self.w + 1.0

    apply, params, state = es.functional(Bad())
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Bad\.w"):
        apply(params, state)


def test_a_model_before_init():
    class Lazy(es.Module):
        w: es.Parameter = dataclasses.field(
            default_factory=lambda: es.Initializer(lambda key: jnp.ones(2))
        )

    with pytest.raises(es.NotInitializedError, match="`w`"):
        es.functional(Lazy())
