"""`es.nn.Stateful`: Equinox's stateful layers, alone and inside other models."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from equinox_layers import (
    batch_norm,
    batched,
    by_hand,
    close,
    Counter,
    data,
    Inner,
    Net,
    sequential,
    spectral,
    Twice,
)
from helpers import rejects, reuses_keys

import eqx_state as es


@pytest.fixture(params=[sequential, Net])
def make(request):
    return request.param


def values(state):
    """The values in an `eqx.nn.State` or a model, with their types, sorted."""
    leaves = jax.tree.leaves(state)
    typed = [jr.key_data(x) if x.dtype == jr.key(0).dtype else x for x in leaves]
    return sorted(repr(np.asarray(x)) for x in typed)


# --- The same as passing the state by hand --------------------------------------------


def test_training_and_evaluation_equal_passing_the_state_by_hand(make):
    wrap = eqx.filter_jit
    theirs, state = eqx.nn.make_with_state(make)(jr.key(0))
    model = es.nn.Stateful(make(jr.key(0)))
    step = wrap(lambda m, xs: es.mutable(es.vmap(m, axis_name="batch"))(xs))
    hand = wrap(by_hand)
    for seed in range(3):
        y, model = step(model, data(seed))
        expected, state = hand(theirs, state, data(seed))
        assert close(y, expected)
    kept = es.filter(model, es.State)
    assert len(jax.tree.leaves(kept)) == len(jax.tree.leaves(state))
    assert values(kept) == values(state)
    if make is not Net:  # `Net` also writes in eval mode
        y = wrap(es.vmap(model.eval(), axis_name="batch"))(data(3))
        expected, _ = by_hand(eqx.nn.inference_mode(theirs), state, data(3))
        assert close(y, expected)


def test_gradients_equal_those_by_hand(make):
    theirs, state = eqx.nn.make_with_state(make)(jr.key(0))
    model = es.nn.Stateful(make(jr.key(0)))

    def loss(model, xs):
        return jnp.mean(es.vmap(model, axis_name="batch")(xs) ** 2)

    def their_loss(layer, state, xs):
        y, state = by_hand(layer, state, xs)
        return jnp.mean(y**2), state

    (value, new), grads = es.value_and_grad(loss)(model, data(0))
    hand = eqx.filter_value_and_grad(their_loss, has_aux=True)
    (expected, state), their_grads = hand(theirs, state, data(0))
    assert close(value, expected)
    ours = jax.tree.leaves(grads)
    assert len(ours) == len(jax.tree.leaves(their_grads))
    assert close(ours, jax.tree.leaves(their_grads))
    assert values(es.filter(new, es.State)) == values(state)


def test_a_training_loop_is_traced_once(make):
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model, xs):
        return batched(model)(xs)

    model = es.nn.Stateful(make(jr.key(0)))
    treedef = jax.tree.structure(model)
    for seed in range(3):
        _, model = step(model, data(seed))
    assert jax.tree.structure(model) == treedef
    assert not any(getattr(part.value, "weak_type", False) for part in es.parts(model))


# --- Where arrays are stored ----------------------------------------------------------


def test_kinds_and_names():
    layers = [batch_norm("batch")(None), spectral(jr.key(0))]
    model = es.nn.Stateful(eqx.nn.Sequential(layers))
    assert {p.name: p.kind for p in es.parts(model)} == {
        "layer.layers[0].weight": es.Parameter,
        "layer.layers[0].bias": es.Parameter,
        "layer.layers[0].batch_counter.init": es.BatchStat,
        "layer.layers[0].batch_state_index.init[0]": es.BatchStat,
        "layer.layers[0].batch_state_index.init[1]": es.BatchStat,
        "layer.layers[1].layer.weight": es.Parameter,
        "layer.layers[1].layer.bias": es.Parameter,
        "layer.layers[1].uv_index.init[0]": es.State,
        "layer.layers[1].uv_index.init[1]": es.State,
    }


def test_a_state_that_has_moved_on_is_taken_over():
    theirs, state = eqx.nn.make_with_state(sequential)(jr.key(0))
    _, state = by_hand(theirs, state, data(0))
    model = es.nn.Stateful(theirs, state)
    y, _ = batched(model)(data(1))
    assert close(y, by_hand(theirs, state, data(1))[0])


def test_an_index_that_occurs_twice_is_one_state():
    inner = Inner(2)
    model = es.nn.Stateful(Twice(inner, inner))
    theirs, state = Twice(inner, inner), eqx.nn.State(inner)
    assert len(jax.tree.leaves(es.filter(model, es.State))) == 2
    step = eqx.filter_jit(lambda model, x: es.mutable(model)(x))
    for _ in range(3):
        y, model = step(model, jnp.ones(2))
        expected, state = theirs(jnp.ones(2), state)
        assert close(y, expected)
    assert model.layer.a.total.init["n"] == 6
    assert eqx.tree_equal(es.nn.Stateful(model.layer).layer, model.layer)


def test_an_index_after_one_that_occurs_twice():
    def make():
        inner = Inner(2)
        return Twice(inner, Twice(inner, Inner(2)))

    a, b = es.nn.Stateful(make()), es.nn.Stateful(make())
    assert jax.tree.structure(a) == jax.tree.structure(b)
    theirs = make()
    state = eqx.nn.State(theirs)
    assert close(es.mutable(a)(jnp.ones(2))[0], theirs(jnp.ones(2), state)[0])


def test_two_wrapped_layers_in_one_model_have_separate_states():
    a, b = (es.nn.Stateful(Inner(2)) for _ in range(2))
    _, a = es.mutable(a)(jnp.ones(2))
    model = es.nn.Stateful(Twice(a.layer, b.layer))
    _, model = es.mutable(model)(jnp.ones(2))
    assert model.layer.a.total.init["n"] == 2
    assert model.layer.b.total.init["n"] == 1


# --- Layers without state -------------------------------------------------------------


class Plain(eqx.Module):
    """Has the signature of a stateful layer, and no state."""

    weight: jax.Array
    inference: bool = False

    def __call__(self, x, state, *, key=None):
        assert isinstance(state, eqx.nn.State)
        noise = 0.0 if key is None else jr.normal(key, x.shape)
        return (1 if self.inference else 2) * self.weight * x + noise, state


def plain_model():
    return eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jr.key(0)), eqx.nn.Dropout(0.0)])


@pytest.mark.parametrize(
    ("make", "is_given", "frozen"),
    [(lambda: Plain(jnp.full(2, 3.0)), False, False), (plain_model, True, True)],
    ids=["layer", "sequential"],
)
def test_a_layer_that_takes_a_state_may_have_none(make, is_given, frozen):
    layer, state = eqx.nn.make_with_state(make)()
    model = es.nn.Stateful(layer, state) if is_given else es.nn.Stateful(make())
    model = model.freeze() if frozen else model
    assert es.parts(es.filter(model, es.State)) == []
    xs = data(0)[:, :2]
    for mode, theirs in [(True, layer), (False, eqx.nn.inference_mode(layer))]:
        expected, _ = jax.vmap(theirs, in_axes=(0, None))(xs, state)
        y, new = es.mutable(es.vmap(model.train(mode)))(xs)
        assert close(y, expected)
        assert eqx.tree_equal(new, model.train(mode))
        # Nothing is written, so no scope is needed.
        assert close(jax.vmap(model.train(mode))(xs), expected)
    grads, _ = es.grad(lambda m: es.vmap(m)(xs).sum(), wrt=es.Parameter)(model)
    assert all((g != 0).all() for g in jax.tree.leaves(grads))


@reuses_keys
def test_a_layer_without_state_gets_a_key():
    model = es.nn.Stateful(Plain(jnp.ones(2)))
    x, key = jnp.ones(2), jr.key(0)
    assert close(model(x, key=key), 2 * x + jr.normal(key, x.shape))


# --- Inside other models --------------------------------------------------------------


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


@reuses_keys
def test_a_key_is_passed_to_a_layer_that_takes_one():
    model = es.nn.Stateful(Net(jr.key(0)))
    a, b = (es.mutable(model)(jnp.ones(3), key=jr.key(i))[0] for i in (1, 2))
    assert not close(a, b)
    without = es.nn.Stateful(Twice(Inner(2), Inner(2)))
    y, _ = es.mutable(without)(jnp.ones(2), key=jr.key(0))
    assert close(y, jnp.full(2, 3.0))


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


# --- Bad input ------------------------------------------------------------------------


def test_a_layer_without_state():
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    with pytest.raises(TypeError, match="`Linear` has no `eqx.nn.StateIndex`"):
        es.nn.Stateful(linear)
    with pytest.raises(TypeError, match="`list` has no `eqx.nn.StateIndex`"):
        es.nn.Stateful([Inner(2)])
    with pytest.raises(TypeError, match="`BatchNorm` has no `eqx.nn.StateIndex`"):
        es.nn.Stateful(eqx.nn.BatchNorm)

    class Wrong(es.Module):
        inner: Inner

        def __call__(self, x, state):
            return self.inner(x, state)

    with pytest.raises(TypeError, match="`GRUCell`.*not a layer that takes a `state`"):
        es.nn.Stateful(eqx.nn.GRUCell(2, 2, key=jr.key(0)))
    with pytest.raises(TypeError, match="`Plain` .* is not a layer"):
        es.nn.Stateful(Plain)
    with pytest.raises(TypeError, match=r"Wrong` has no .* outside the `es.Module`s"):
        es.nn.Stateful(Wrong(Inner(2)))


def test_missing_and_foreign_states():
    layer, state = eqx.nn.make_with_state(Inner)(2)
    with pytest.raises(
        ValueError, match=r"`total`(.|\n)*es.nn.Stateful\(layer, state\)"
    ):
        es.nn.Stateful(layer)
    with pytest.raises(ValueError, match="the given state .* `inner.total`. It is"):
        es.nn.Stateful(Net(jr.key(0)), state)


def test_a_returned_state_that_is_incomplete():
    class Part(Twice):
        def __call__(self, x, state):
            return self.a(x, state.substate(self.a))

    model = es.nn.Stateful(Part(Inner(2), Inner(2)))
    with rejects(
        model, ValueError, r"returned state has no value for `b\.total`", "update"
    ):
        es.mutable(model)(jnp.ones(2))


@pytest.mark.parametrize("result", ["y", "wrong pair"])
def test_a_result_that_is_not_a_pair(result):
    class Bad(Inner):
        def __call__(self, x, state):
            return x if result == "y" else (x, x)

    model = es.nn.Stateful(Bad(2))
    with rejects(model, TypeError, r"`.*Bad` was called", r"f32\[2\].*instead of"):
        es.mutable(model)(jnp.ones(2))


def test_a_layer_may_set_weakly_typed_values():
    class Reset(eqx.Module):
        n: eqx.nn.StateIndex

        def __call__(self, x, state):
            return 0.5 ** state.get(self.n)[0] * x, state.set(self.n, (jnp.array(0), x))

    given = jnp.array(7), jnp.zeros(())
    theirs, state = eqx.nn.make_with_state(lambda: Reset(eqx.nn.StateIndex(given)))()
    model = es.nn.Stateful(Reset(eqx.nn.StateIndex(given)))
    step = eqx.filter_jit(lambda model, x: es.mutable(lambda m: (m(x), m(x)))(model))
    (a, b), new = step(model, jnp.ones(()))
    expected, state = theirs(jnp.ones(()), state)
    assert (a, b) == (expected, theirs(jnp.ones(()), state)[0])
    assert not new.layer.n.init[0].weak_type
    assert all(map(eqx.is_array, jax.tree.leaves(model)))
    assert "weak=" not in repr(model)
    assert jax.tree.structure(new) == jax.tree.structure(model)
