"""`es.nn.Stateful` inside other models: scopes, keys, modes, nested `es.Module`s."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from equinox_layers import (
    batch_norm,
    batched,
    close,
    Counter,
    data,
    Inner,
    Net,
    sequential,
    Twice,
)
from helpers import reuses_keys

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


def test_several_calls_in_one_scope():
    class Model(es.Module):
        norm: es.nn.Stateful

        def __call__(self, x):
            return self.norm(self.norm(x))

    model = Model(es.nn.Stateful(Inner(2)))
    _, model = es.mutable(lambda m, x: m(m(x)))(model, jnp.ones(2))
    assert model.norm.layer.total.init["n"] == 4


def test_an_es_module_inside_keeps_its_own_state():
    counter, norm = Counter(), batch_norm("batch")(None)
    inner = es.nn.Stateful(eqx.nn.Sequential([counter, norm]))
    model = es.nn.Stateful(eqx.nn.Sequential([inner, norm, Counter()]))
    model = batched(model)(data(0))[1]
    model = batched(model)(data(1))[1]
    nested = model.layer.layers[0].layer
    assert model.layer.layers[2].count == nested.layers[0].count == 2
    assert nested.layers[1].batch_counter.init == 2
    assert model.layer.layers[1].batch_counter.init == 2


def test_the_modules_inside_keep_their_identity_within_a_scope():
    model = es.nn.Stateful(eqx.nn.Sequential([Inner(2), Counter()]))

    def f(m, x):
        counter = m.layer.layers[1]
        m(x)
        counter(x)  # read before the call of the layer

    _, new = es.mutable(f)(model, jnp.ones(2))
    assert new.layer.layers[1].count == 2


def test_within_sequential_scan_init_and_an_ensemble():
    model = eqx.nn.Sequential([es.nn.Stateful(Net(jr.key(0))), Counter()])
    y, new = es.mutable(model)(jnp.ones(3), key=jr.key(3))
    assert new.layers[0].layer.calls.init == new.layers[1].count == 1
    assert eqx.tree_equal(model.layers[0].init(0), model.layers[0])
    stack = eqx.filter_vmap(lambda key: es.nn.Stateful(Net(key)))(
        jr.split(jr.key(0), 2)
    )
    run = es.mutable(es.vmap(stack, in_axes=None, axes={...: 0}))
    y, stack = run(jnp.ones(3))
    assert stack.layer.calls.init.tolist() == [1, 1]
    assert y.shape == (2, 3)


def test_init_with_inputs_draws_and_keeps_the_state():
    lazy = es.lazy(eqx.nn.Linear, 3, 3)
    layer = eqx.nn.Sequential([lazy, batch_norm("batch")(None)])
    model = es.nn.Stateful(layer)

    def call(m, xs):
        return es.vmap(m, axis_name="batch")(xs)

    model = model.init(0, data(0), call=call)
    assert model.layer.layers[0].weight.shape == (3, 3)
    assert model.layer.layers[1].batch_counter.init == 0


# --- Keys -----------------------------------------------------------------------------


@reuses_keys
def test_a_key_is_passed_to_a_layer_that_takes_one():
    model = es.nn.Stateful(Net(jr.key(0)))
    a, b = (es.mutable(model)(jnp.ones(3), key=jr.key(i))[0] for i in (1, 2))
    assert not close(a, b)
    without = es.nn.Stateful(Twice(Inner(2), Inner(2)))
    y, _ = es.mutable(without)(jnp.ones(2), key=jr.key(0))
    assert close(y, jnp.full(2, 3.0))


# --- Modes ----------------------------------------------------------------------------


@reuses_keys
def test_frozen_statistics_are_used_and_do_not_change():
    dropout = eqx.nn.Dropout(0.5)
    layer = eqx.nn.Sequential([sequential(jr.key(0)), Counter(), dropout])
    model = batched(es.nn.Stateful(layer))(data(0), key=jr.split(jr.key(0), 8))[1]
    keys = jr.split(jr.key(1), 8)
    y, new = batched(model.freeze())(data(1), key=keys)
    without, with_dropout = model.eval().layer.layers, model.layer.layers[2]
    evaluated = es.vmap(es.nn.Stateful(without[0]))(data(1))
    subkeys = jax.vmap(lambda key: jr.split(key, 3)[2])(keys)
    assert close(y, jax.vmap(lambda x, k: with_dropout(x, key=k))(evaluated, subkeys))
    assert eqx.tree_equal(new.layer.layers[0], model.layer.layers[0])
    assert new.layer.layers[1].count == 2
    assert not jax.tree.leaves(es.filter(model.freeze(), es.trainable))


def test_a_frozen_batch_stat_does_not_change_if_the_layer_ignores_inference():
    class Odd(eqx.nn.BatchNorm):
        def __call__(self, x, state, *, key=None, inference=None):
            state = state.set(self.batch_counter, state.get(self.batch_counter) + 1)
            return x, state

    model = es.nn.Stateful(Odd(3, "batch", mode="batch")).freeze()
    y, new = es.mutable(model)(jnp.ones(3))
    assert eqx.tree_equal(new, model)
    assert model(jnp.ones(3)).shape == (3,)  # it writes nothing, so it needs no scope
