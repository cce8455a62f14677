"""`es.Optimizer` with rules: one optax transformation per group."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
import optax.contrib
import pytest
from helpers import close

import eqx_state as es


# optax promotes implicitly: `bool * float`, `float ** int`.
pytestmark = pytest.mark.usefixtures("_standard")


@pytest.fixture
def _standard():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(es.Module):
    body: eqx.nn.Linear
    norm: es.nn.BatchNorm
    head: eqx.nn.Linear


def make():
    a, b = jr.split(jr.key(0))
    norm = es.nn.BatchNorm(4, axis_name="batch")
    return Net(eqx.nn.Linear(3, 4, key=a), norm, eqx.nn.Linear(4, 2, key=b))


BIAS = es.path_matches("*.bias")
HEAD = es.under(lambda m: m.head)


def gradients(model):
    return jtu.tree_map(lambda p: 2 * p + 1, es.filter(model, es.trainable))


def nbytes(tree):
    return sum(x.nbytes for x in jtu.tree_leaves(tree) if eqx.is_array(x))


# --- Groups equal separate runs -------------------------------------------------------


TXS = {
    "adam and sgd": (optax.adam(0.1), optax.sgd(0.5, momentum=0.9)),
    "norms": (
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(0.1)),
    ),
    "multi_steps": (optax.MultiSteps(optax.adam(0.1), 2), optax.adam(0.1)),
}


def run_alone(tx, params, steps):
    """Train a list of arrays, as in a program without modules."""
    state = tx.init(params)
    for _ in range(steps):
        grads = [2 * p + 1 for p in params]
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("txs", TXS.values(), ids=TXS)
def test_groups_equal_separate_runs(txs):
    model, steps = make(), 3
    filters = (BIAS, es.all_of(es.trainable, es.not_(BIAS)))
    expected = model
    for tx, which in zip(txs, filters, strict=True):
        params, treedef = jtu.tree_flatten(es.filter(expected, which))
        new = jtu.tree_unflatten(treedef, run_alone(tx, params, steps))
        expected = es.update(expected, new)
    optimizer = es.Optimizer({BIAS: txs[0], es.Parameter: txs[1]}).init(model)
    for _ in range(steps):
        model, optimizer = optimizer.update(gradients(model), model)
    close(model, expected)


def test_two_optimizers_with_the_same_rules_are_equal():
    txs = optax.adam(0.1), optax.sgd(0.1)
    a, b = (es.Optimizer({BIAS: txs[0], ...: txs[1]}).init(make()) for _ in range(2))
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    assert a.tx != es.Optimizer({BIAS: txs[1], ...: txs[0]}).tx
    assert "es.path_matches('*.bias')" in repr(a)
    assert "_made_for" not in repr(a)


def test_filters_that_print_the_same_are_different_groups():
    def under(name):
        return es.under(lambda m: getattr(m, name))

    head, body = under("head"), under("body")
    assert repr(head) == repr(body)
    rules = {head: optax.sgd(1.0), body: optax.sgd(0.0), ...: None}
    model = make()
    new, _ = es.Optimizer(rules).init(model).update(gradients(model), model)
    assert (new.head.weight != model.head.weight).all()
    assert (new.body.weight == model.body.weight).all()


# --- Parameters without a transformation ----------------------------------------------


def test_none_leaves_arrays_unchanged_and_needs_no_memory():
    model = make()
    optimizer = es.Optimizer({HEAD: optax.adam(0.1), ...: None}).init(model)
    assert nbytes(optimizer) == 2 * nbytes(model.head) + 4
    new, optimizer = optimizer.update(gradients(model), model)
    assert new.body.weight is model.body.weight
    assert (new.head.weight != model.head.weight).all()
    updates, _ = optimizer.update(gradients(model), model, apply_updates=False)
    assert updates.body.weight is None
    assert updates.head.weight.shape == model.head.weight.shape
    assert eqx.tree_equal(
        es.update(model, eqx.apply_updates(model, updates)).norm, model.norm
    )


def test_integers_that_the_filter_selects_belong_to_no_group():
    model = {"codes": jnp.arange(3), "gain": jnp.ones(2)}
    optimizer = es.Optimizer({...: optax.sgd(1.0)}, wrt=lambda part: True).init(model)
    new, _ = optimizer.update(model, model)
    assert new["codes"] is model["codes"]
    assert (new["gain"] == 0).all()


# --- Different models and modes -------------------------------------------------------


def test_rules_may_name_arrays_that_only_the_whole_model_has():
    model = make()
    by_state = lambda part: part.kind is es.BatchStat  # noqa: E731
    optimizer = es.Optimizer({by_state: None, ...: optax.sgd(0.1)}).init(model)
    params = model.filter(es.trainable)
    new, _ = optimizer.update(gradients(model), params)
    expected, _ = optimizer.update(gradients(model), model)
    assert eqx.tree_equal(es.update(model, new), expected)


# --- Further arguments ----------------------------------------------------------------


def test_further_arguments_are_passed_to_the_groups():
    plateau = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.1, patience=1)
    )
    model = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    rules = {es.path_matches("*a*"): optax.MultiSteps(plateau, 1), ...: optax.sgd(0.1)}
    optimizer = es.Optimizer(rules).init(model)
    grads = {"a": jnp.ones(()), "b": jnp.ones(())}
    for _ in range(4):
        model, optimizer = optimizer.update(grads, model, value=jnp.array(1.0))
    assert jnp.allclose(model["b"], -0.4)
    assert -0.4 < model["a"] < -0.1


# --- Errors ---------------------------------------------------------------------------


def test_a_parameter_without_a_rule_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"no rule matches `body\.weight`"):
        es.Optimizer({BIAS: optax.sgd(0.1)}).init(make())


def test_a_learning_rate_is_not_a_transformation():
    with pytest.raises(TypeError, match=r"\{es\.Parameter: optax\.adam\(.*`float` was"):
        es.Optimizer({es.Parameter: 1e-3})


def test_a_filter_without_a_match():
    rules = {es.path_matches("*.biases"): optax.sgd(0.1), ...: optax.sgd(0.2)}
    with pytest.raises(ValueError, match=r"es\.Optimizer.*\*\.biases.*no array"):
        es.Optimizer(rules).init(make())


def test_a_key_that_is_not_a_filter():
    with pytest.raises(TypeError, match="`'bias'` is not a filter"):
        es.Optimizer({"bias": optax.sgd(0.1), ...: optax.sgd(0.1)})
    with pytest.raises(TypeError, match="`'head'` is not a filter"):
        es.Optimizer({"head": optax.sgd(0.1)})  # a label, as for `optax.partition`
