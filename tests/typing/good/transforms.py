# pyright: strict
"""What goes into `mutable` and the gradients comes out with its type."""

from typing import assert_type

from jaxtyping import Array

import eqx_state as es


class Model(es.Module):
    weight: es.Parameter
    mean: es.BatchStat

    def __call__(self, x: Array, scale: float = 1.0) -> Array:
        self.mean = 0.9 * self.mean + 0.1 * x
        return scale * (self.weight @ x - self.mean)

    @es.vmap
    def encode(self, x: Array) -> tuple[Array, int]:
        return x, 1


def loss(model: Model, x: Array, n: int = 3) -> Array:
    return n * model(x).sum()


def loss_and_aux(model: Model, x: Array) -> tuple[Array, str]:
    return model(x).sum(), "aux"


def check(model: Model, x: Array) -> None:
    assert_type(es.mutable(model)(x), tuple[Array, Model])
    assert_type(es.mutable(model)(x, scale=2.0), tuple[Array, Model])
    assert_type(es.mutable(model, kinds=es.TreePart)(x), tuple[Array, Model])
    assert_type(es.mutable(loss)(model, x, n=2)[0], Array)
    assert_type(es.mutable(model.encode)(x)[0], tuple[Array, int])
    assert_type(es.mutable(es.vmap(model, axis_name="batch"))(x)[0], Array)

    assert_type(es.grad(loss)(model, x), tuple[Model, Model])
    assert_type(
        es.grad(loss_and_aux, has_aux=True)(model, x),
        tuple[Model, tuple[str, Model]],
    )
    assert_type(
        es.value_and_grad(loss)(model, x, n=2), tuple[tuple[Array, Model], Model]
    )
    assert_type(
        es.value_and_grad(loss_and_aux, has_aux=True)(model, x),
        tuple[tuple[tuple[Array, str], Model], Model],
    )

    assert_type(model.encode(x), tuple[Array, int])
    assert_type(es.vmap(model)(x), Array)


def train(model: Model, x: Array) -> Model:
    y, model = es.mutable(es.vmap(model))(x)
    assert_type(y, Array)
    y, model = es.mutable(model)(x)
    (value, model), grads = es.value_and_grad(loss)(model, x)
    assert_type(value, Array)
    assert_type(model, Model)
    assert_type(grads, Model)
    return model
