"""Transformations of optax, in `es.Optimizer` and by hand.

One for each structure of a state, and for each way to pass arguments to `update`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
import optax.contrib
import pytest
from helpers import reuses_keys

import eqx_state as es


RATE = 0.05
SGD = optax.sgd(RATE)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def by_rank(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def norm(updates):
    return optax.global_norm(updates)


def plateau():
    return optax.chain(SGD, optax.contrib.reduce_on_plateau(patience=1))


MAKE = {
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=2),
    "adam with a schedule": lambda: optax.adam(optax.linear_schedule(RATE, 0.0, 4)),
    "apply_if_finite": lambda: optax.apply_if_finite(SGD, 2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE)),
    "dpsgd": lambda: optax.contrib.dpsgd(RATE, 1.0, 0.1, 3),
    "freeze": lambda: optax.chain(SGD, optax.freeze(False)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.exponential_decay(RATE, 2, 0.5)
    ),
    "lbfgs": lambda: optax.lbfgs(),
    "masked": lambda: optax.masked(optax.adam(RATE), is_matrix),
    "monitor": lambda: optax.chain(SGD, optax.monitor({"norm": norm})),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), 2),
    "MultiSteps of reduce_on_plateau": lambda: optax.MultiSteps(plateau(), 1),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("sgd", SGD)),
    "opaque sam": lambda: optax.contrib.sam(SGD, SGD, opaque_mode=True),
    "partition": lambda: optax.transforms.partition(
        {"matrix": optax.adam(RATE), "vector": SGD}, by_rank
    ),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(RATE),
    "stateless": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(lambda g: -RATE * g, updates)
    ),
}

# The state does not contain the measured values before the first step.
GROWS = {"monitor"}

# These take stacked gradients, one per example.
PER_EXAMPLE = {"dpsgd"}


def distance(tree):
    """A loss for parameters in any pytree."""
    return sum(jnp.sum(jnp.square(p - 1)) for p in jtu.tree_leaves(tree))


def of_value(params):
    return {"value": distance(params)}


def of_line_search(params):
    grad = jax.grad(distance)(params)
    return {"value": distance(params), "grad": grad, "value_fn": distance}


# Further arguments of `update`, computed from its parameters.
EXTRA = {
    "MultiSteps of reduce_on_plateau": of_value,
    "lbfgs": of_line_search,
    "opaque sam": lambda params: {"grad_fn": lambda p, i: jax.grad(distance)(p)},
    "polyak_sgd": of_value,
}


class Net(es.Module):
    weight: es.Parameter
    inner: dict
    calls: es.State = 0

    def __init__(self):
        self.weight = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
        self.inner = {"bias": jnp.linspace(0.1, 0.5, 4), "size": 4}


def gradients(params, per_example):
    grads = jax.grad(distance)(params)
    if not per_example:
        return grads
    return jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)


def types(tree):
    return [
        (x.shape, x.dtype, getattr(x, "weak_type", None)) for x in jtu.tree_leaves(tree)
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
@reuses_keys  # ours and the hand-written steps draw the same noise
@pytest.mark.parametrize("name", MAKE)
def test_three_steps_equal_the_hand_written_ones(name):
    if name == "monitor" and not hasattr(optax, "monitor"):
        pytest.skip("optax before 0.2.7 does not have it")
    tx, model = MAKE[name](), Net()
    optimizer = es.Optimizer(tx).init(model)
    # A list of arrays, as in a program without modules.
    params = jtu.tree_leaves(es.filter(model, es.trainable))
    state = tx.init(params)
    extra = EXTRA.get(name, lambda params: {})
    before = types(optimizer)
    for _ in range(3):
        selected = es.filter(model, es.trainable)
        grads = gradients(selected, name in PER_EXAMPLE)
        model, optimizer = optimizer.update(grads, model, **extra(selected))
        grads = gradients(params, name in PER_EXAMPLE)
        updates, state = tx.update(grads, state, params, **extra(params))
        params = optax.apply_updates(params, updates)
        now = jtu.tree_leaves(es.filter(model, es.trainable))
        # Before optax 0.2.7, some results are NaN, by hand, too.
        pair = jax.tree.map(jnp.nan_to_num, (now, params))
        assert eqx.tree_equal(*pair, rtol=1e-5, atol=1e-6)
        if name not in GROWS:
            assert types(optimizer) == before  # a jitted loop compiles once
    if name not in GROWS:  # a model that has not changed keeps the whole state
        kept = jtu.tree_leaves(optimizer.refit(model))
        pairs = zip(kept, jtu.tree_leaves(optimizer), strict=True)
        assert all(x is y for x, y in pairs)


STARTS_WITH_ARRAYS = {
    "add_noise": lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "dog": lambda: optax.contrib.dog(),
    "dowg": lambda: optax.contrib.dowg(),
    "inject": lambda: optax.inject_hyperparams(optax.sgd)(jnp.array(RATE)),
    "lbfgs": lambda: optax.lbfgs(linesearch=None),
    "mechanize": lambda: optax.contrib.mechanize(SGD),
    "prodigy": lambda: optax.contrib.prodigy(),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(RATE),
}


@pytest.mark.parametrize("name", STARTS_WITH_ARRAYS)
@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
@reuses_keys
def test_the_first_step_can_donate_everything(name):
    tx = STARTS_WITH_ARRAYS[name]()
    step = es.jit(lambda model, optimizer: optimizer.update(model, model), donate="all")
    for _ in range(2):  # nothing of the transformation itself is donated
        model, kept = Net(), Net()
        optimizer = es.Optimizer(tx).init(model)
        model, optimizer = step(model, optimizer)
        assert jnp.isfinite(model.weight).all()
        es.Optimizer(tx).init(kept)
        assert not kept.weight.is_deleted()
