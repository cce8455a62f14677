"""Every transformation of optax and `optax.contrib`, in `es.Optimizer` and by hand.

The tests use the names in the installed optax. A new transformation fails until a table
here contains its arguments.
"""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
import optax.contrib
import pytest
from helpers import reuses_keys

import eqx_state as es


RATE = 0.05


def sgd():
    return optax.sgd(RATE)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def all_matrices(params):
    return jax.tree.map(lambda p: optax.contrib.MuonDimensionNumbers(), params)


def by_rank(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def every_other(step, **extra):
    return step % 2 == 0


def norm(updates):
    return optax.global_norm(updates)


# Arguments that transformations require, by parameter name.
ARGUMENTS: dict[str, Any] = {
    "adv_optimizer": sgd(),
    "base_optimizer": sgd(),
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.1,
    "fast_optimizer": optax.sgd(RATE, momentum=0.9),
    "freeze_mask": True,
    "gamma": 0.5,
    "inner": optax.sgd(RATE, momentum=0.9),
    "l2_norm_clip": 1.0,
    "learning_rate": RATE,
    "mask": is_matrix,
    "max_backtracking_steps": 3,
    "max_consecutive_errors": 2,
    "max_delta": 0.1,
    "max_linesearch_steps": 3,
    "max_norm": 0.1,
    "measure": norm,
    "measure_name": "norm",
    "measures": {"norm": norm},
    "noise_multiplier": 0.1,
    "optimizer": sgd(),
    "param_labels": by_rank,
    "should_transform_fn": every_other,
    "slow_step_size": 0.5,
    "step_size": -RATE,
    "step_size_fn": lambda step: -RATE / (1 + step),
    "sync_period": 2,
    "threshold": 0.1,
    "transforms": {"matrix": optax.adam(RATE), "vector": sgd()},
    "tx": sgd(),
}

# Transformations that need special construction.
MADE = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE)),
    "freeze": lambda: optax.chain(sgd(), optax.freeze(False)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.exponential_decay(RATE, 2, 0.5)
    ),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.sgd)(
        learning_rate=RATE
    ),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("sgd", sgd())),
    # It works only for matrices, and `muon` applies it only to them.
    "scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(weight_dimension_numbers=all_matrices), is_matrix
    ),
    "selective_transform": lambda: optax.selective_transform(sgd(), freeze_mask=False),
    "stateless": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(lambda g: -RATE * g, updates)
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda g, p: -RATE * (g + p)
    ),
    # Objects of optax, and other ways to call its functions.
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), 2),
    "MultiSteps.gradient_transformation": lambda: optax.MultiSteps(
        optax.adam(RATE), 2
    ).gradient_transformation(),
    "MultiSteps of reduce_on_plateau": lambda: optax.MultiSteps(
        optax.chain(sgd(), optax.contrib.reduce_on_plateau(patience=1)), 1
    ),
    "opaque sam": lambda: optax.contrib.sam(sgd(), sgd(), opaque_mode=True),
    "monitor of measure_with_ema": lambda: optax.chain(
        sgd(), optax.monitor({"norm": optax.measure_with_ema(norm, 0.9)})
    ),
    "schedule": lambda: optax.adam(optax.linear_schedule(RATE, 0.0, 4)),
}

# Functions that do not return a transformation, although their annotation allows it.
NO_OPTIMIZERS = {
    "measure_with_ema",  # its updates are a number, so it is tested through `monitor`
    "matrix_inverse_pth_root",
    "schedule_free_eval_params",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
}

# Here optax treats `None` in a tree as a parameter, and `None` has no dtype.
WITHOUT_HOLES = {"galore", "scale_by_galore"}

# The state does not contain the measured values before the first step.
GROWS = {"monitor", "monitor of measure_with_ema"}

# These take stacked gradients, one per example.
PER_EXAMPLE = {"differentially_private_aggregate", "dpsgd"}


def distance(tree):
    """A loss for parameters in any pytree."""
    return sum(jnp.sum(jnp.square(p - 1)) for p in jtu.tree_leaves(tree))


def of_value(params):
    return {"value": distance(params)}


def of_line_search(params):
    grad = jax.grad(distance)(params)
    return {"value": distance(params), "grad": grad, "value_fn": distance}


def of_objective(params):
    return {"obj_fn": distance}


# Further arguments of `update`, computed from its parameters.
EXTRA = {
    "MultiSteps of reduce_on_plateau": of_value,
    "hutchinson_estimator_diag_hessian": of_objective,
    "lbfgs": of_line_search,
    "momo": of_value,
    "momo_adam": of_value,
    "opaque sam": lambda params: {"grad_fn": lambda p, i: jax.grad(distance)(p)},
    "polyak_sgd": of_value,
    "reduce_on_plateau": of_value,
    "scale_by_backtracking_linesearch": of_line_search,
    "scale_by_polyak": of_value,
    "scale_by_zoom_linesearch": of_line_search,
    "sophia": of_objective,
}


def functions():
    """The functions of optax that return a transformation, by name."""
    found = {}
    for module in (optax, optax.contrib):
        for name, f in vars(module).items():
            if inspect.isfunction(f) and not name.startswith("_"):
                returned = inspect.signature(f).return_annotation
                is_said = "GradientTransformation" in str(returned)
                if is_said or returned is inspect.Signature.empty:
                    found[name] = f
    return {k: f for k, f in found.items() if k not in NO_OPTIMIZERS}


FUNCTIONS = functions()
OTHERS = [name for name in MADE if name not in FUNCTIONS]
# `es.Optimizer` does not support `lookahead`.
NAMES = [name for name in (*FUNCTIONS, *OTHERS) if name != "lookahead"]


def make(name):
    if name in MADE:
        return MADE[name]()
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty}
    if {"seed", "key"} & {p.name for p in parameters}:  # optax < 0.2.5 has no `key`
        needed.add("key" if "key" in {p.name for p in parameters} else "seed")
    given = {**ARGUMENTS, "key": jr.key(3), "seed": 3}
    return FUNCTIONS[name](**{name: given[name] for name in needed})


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
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_equal_the_hand_written_ones(name):
    if name.startswith("monitor") and not hasattr(optax, "monitor"):
        pytest.skip("optax before 0.2.7 does not have it")
    tx, model = make(name), Net()
    if name in WITHOUT_HOLES:
        model = {"weight": model.weight, "bias": model.inner["bias"]}
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


@jax.numpy_dtype_promotion("standard")
def test_evaluation_parameters_of_schedule_free():
    tx = optax.contrib.schedule_free_sgd(RATE)
    model = Net()
    optimizer = es.Optimizer(tx).init(model)
    params = jtu.tree_leaves(es.filter(model, es.trainable))
    state = tx.init(params)
    for _ in range(3):
        grads = jax.grad(distance)(es.filter(model, es.trainable))
        model, optimizer = optimizer.update(grads, model)
        updates, state = tx.update(jax.grad(distance)(params), state, params)
        params = optax.apply_updates(params, updates)
    eval_params = optax.contrib.schedule_free_eval_params
    selected = es.filter(model, es.trainable)
    averaged = es.update(model, eval_params(optimizer.opt_state, selected))
    expected = eval_params(state, params)
    now = jtu.tree_leaves(es.filter(averaged, es.trainable))
    assert eqx.tree_equal(now, expected, rtol=1e-5, atol=1e-6)
