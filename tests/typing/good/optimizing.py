"""Optimizers: rules or a transformation, and hyperparameters."""

from typing import Any, assert_type

import equinox as eqx

import eqx_state as es


def is_matrix(part: es.Part) -> bool:
    return bool(part.value.ndim > 1)


# optax has no types for mypy.
def optimize(model: eqx.nn.Linear, adam: Any) -> None:
    rules = {es.path_matches("*.bias"): adam, is_matrix: None, ...: adam}
    optimizer = es.Optimizer(rules).init(model)
    assert_type(optimizer, es.Optimizer)
    assert_type(optimizer.hyperparams, dict[Any, Any])
    assert_type(optimizer.refit(model), es.Optimizer)
    assert_type(optimizer.set(learning_rate=1e-4), es.Optimizer)
    assert_type(optimizer.set(group=is_matrix, learning_rate=1e-4), es.Optimizer)
    assert_type(optimizer.update(model, model), tuple[eqx.nn.Linear, es.Optimizer])

    assert_type(es.Optimizer({es.Parameter: adam, es.Buffer: None}), es.Optimizer)
    assert_type(es.Optimizer(adam, wrt=es.trainable), es.Optimizer)
    assert_type(es.Optimizer(es.per_layer(adam), stacks="arrays"), es.Optimizer)
    assert_type(es.Optimizer(es.per_layer(lambda layer: adam)), es.Optimizer)


def choose(model: eqx.nn.Linear) -> None:
    rules = {es.path_matches("bias"): 0, es.Parameter: 1, ...: None}
    assert_type(es.spec(model, rules), eqx.nn.Linear)
    es.vmap(model, axes={es.under(lambda m: m.bias): 0, es.State: None})
