# pyright: strict
"""What goes into the gradients and the transforms comes out with its type."""

from collections.abc import Callable
from typing import Any, assert_type

import jax.numpy as jnp
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

    @es.jit
    def jitted(self, x: Array, n: int = 1) -> tuple[Array, str]:
        return n * self(x), "jitted"

    @es.jit(donate="all-except-first")
    def donating(self, x: Array, *, scale: float) -> Array:
        return scale * self(x)

    @es.checkpoint
    def remat(self, x: Array, scale: float = 1.0) -> Array:
        return self(x, scale)

    @staticmethod
    @es.jit
    def double(x: Array) -> Array:
        return 2 * x

    @property
    @es.jit
    def norm(self) -> Array:
        return jnp.sum(self.weight)


def loss(model: Model, x: Array, n: int = 3) -> Array:
    return n * model(x).sum()


def loss_and_aux(model: Model, x: Array) -> tuple[Array, str]:
    return model(x).sum(), "aux"


def check(model: Model, x: Array) -> None:
    assert_type(es.mutable(model)(x), tuple[Array, Model])
    assert_type(es.mutable(model)(x, scale=2.0), tuple[Array, Model])
    assert_type(es.mutable(model, kinds=es.TreePart)(x), tuple[Array, Model])
    half = {es.Parameter: "bfloat16", es.path_matches("*.bias"): None, ...: "float16"}
    assert_type(es.mutable(model, cast=half)(x), tuple[Array, Model])
    assert_type(es.mutable(model, cast=jnp.bfloat16)(x), tuple[Array, Model])
    assert_type(es.mutable(model, cast="bfloat16")(x), tuple[Array, Model])
    assert_type(
        es.value_and_grad(loss, cast=half)(model, x, n=2),
        tuple[tuple[Array, Model], Model],
    )
    assert_type(es.mutable(loss)(model, x, n=2)[0], Array)
    assert_type(es.mutable(model.encode)(x)[0], tuple[Array, int])
    assert_type(es.mutable(es.vmap(model, axis_name="batch"))(x)[0], Array)

    assert_type(es.grad(loss)(model, x), tuple[Model, Model])
    assert_type(
        es.value_and_grad(loss, kinds=(es.State, es.Buffer))(model, x),
        tuple[tuple[Array, Model], Model],
    )
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

    assert_type(es.mutable(loss, argnums=0)(model, x), tuple[Array, Any])
    assert_type(es.mutable(loss, argnums=(0, 1))(model, x, n=2), tuple[Array, Any])
    assert_type(es.grad(loss, argnums=0)(model, x), tuple[Model, Model])
    assert_type(es.grad(loss, argnums=1)(model, x), tuple[Any, Any])
    assert_type(es.grad(loss, argnums=(0, 1))(model, x), tuple[Any, Any])
    assert_type(es.value_and_grad(loss, argnums=1)(model, x, n=2)[0][0], Array)
    assert_type(
        es.value_and_grad(loss, argnums=(0, 1))(model, x), tuple[tuple[Array, Any], Any]
    )
    assert_type(
        es.value_and_grad(loss_and_aux, has_aux=True, argnums=0)(model, x)[0][1], Model
    )

    assert_type(model.encode(x), tuple[Array, int])
    assert_type(es.vmap(model)(x), Array)


def make(x: Array) -> Model:
    return Model(x, x)


def one() -> int:
    return 1


def same(_: int, model: Model) -> Model:
    return model


def check_functions(model: Model, x: Array) -> None:
    assert_type(es.jit(loss)(model, x, n=2), Array)
    assert_type(es.jit(loss, donate="warn")(model, x, 2), Array)
    assert_type(es.jit(donate="all")(loss_and_aux)(model, x), tuple[Array, str])
    assert_type(es.jit(model)(x, scale=2.0), Array)
    assert_type(es.jit(model.__call__)(x, 2.0), Array)
    assert_type(es.jit(one)(), int)
    assert_type(es.jit(es.jit(model.encode))(x), tuple[Array, int])
    assert_type(es.jit(es.mutable(model))(x), tuple[Array, Model])
    assert_type(es.mutable(es.jit(model))(x)[0], Array)
    assert_type(es.jit(es.value_and_grad(loss))(model, x)[1], Model)
    assert_type(es.jit(make)(x), Model)

    es.jit(loss).lower(model, x).compile()
    Model.jitted.lower(model, x, n=2).as_text()
    assert_type(es.jit(loss).clear_cache(), None)
    Model.jitted.clear_cache()

    assert_type(es.checkpoint(loss)(model, x, n=2), Array)
    assert_type(es.checkpoint(model, prevent_cse=False)(x, scale=2.0), Array)
    assert_type(es.checkpoint(loss_and_aux, static_argnums=1)(model, x)[1], str)
    assert_type(es.vmap(es.checkpoint(es.jit(model)))(x), Array)

    assert_type(model.jitted(x, n=2), tuple[Array, str])
    assert_type(Model.jitted(model, x), tuple[Array, str])
    assert_type(model.donating(x, scale=2.0), Array)
    assert_type(model.remat(x, scale=2.0), Array)
    assert_type(es.mutable(model.jitted)(x)[0], tuple[Array, str])
    assert_type(Model.double(x), Array)
    assert_type(model.norm, Array)


def add(carry: Array, x: tuple[Array, Model]) -> tuple[Array, list[Array]]:
    return carry + x[1](x[0]), [carry]


def check_loops(model: Model, x: Array) -> None:
    assert_type(es.scan(add, x, (x, model)), tuple[Array, list[Array]])
    assert_type(es.scan(add, x, xs=(x, model), reverse=True, unroll=2)[0], Array)

    def carried(carry: tuple[Model, int], y: Array) -> tuple[tuple[Model, int], None]:
        return carry, None

    assert_type(es.scan(carried, (model, 1), x), tuple[tuple[Model, int], None])

    def no_xs(carry: Array, _: None) -> tuple[Array, Array]:
        return model(carry), carry

    assert_type(es.scan(no_xs, x, None, 3), tuple[Array, Array])
    assert_type(es.scan(no_xs, x, length=3), tuple[Array, Array])

    def not_done(carry: tuple[int, Model]) -> Array:
        return carry[1].mean < 1

    def body(carry: tuple[int, Model]) -> tuple[int, Model]:
        return carry

    assert_type(es.while_loop(not_done, body, (0, model)), tuple[int, Model])
    bounded = es.while_loop(not_done, body, (0, model), max_steps=9)
    assert_type(bounded, tuple[int, Model])
    assert_type(es.fori_loop(0, 3, lambda i, y: model(y), x), Array)
    assert_type(es.fori_loop(0, x, same, model, unroll=2), Model)


def first(x: Array, model: Model) -> tuple[Array, Model]:
    return x, model


def second(x: Array, model: Model) -> tuple[Array, Model]:
    return model(x), model


def check_branches(model: Model, x: Array, i: int, flag: bool) -> None:
    assert_type(es.cond(flag, first, second, x, model), tuple[Array, Model])
    assert_type(es.cond(x > 0, model, model.__call__, x), Array)
    assert_type(es.cond(x > 0, one, one), int)
    assert_type(es.switch(i, [first, second], x, model), tuple[Array, Model])
    assert_type(es.switch(x, (model, model.__call__), x), Array)
    branches: list[Callable[[Array], Array]] = [model, Model.double]
    assert_type(es.switch(i, branches, x), Array)


def train(model: Model, x: Array) -> Model:
    y, model = es.mutable(es.vmap(model))(x)
    assert_type(y, Array)
    y, model = es.mutable(model)(x)
    (value, model), grads = es.value_and_grad(loss)(model, x)
    assert_type(value, Array)
    assert_type(model, Model)
    assert_type(grads, Model)
    return model


@es.custom_vjp
def scaled(x: Array, n: int) -> Array:
    return n * x


def scaled_fwd(x: Array, n: int) -> tuple[Array, int]:
    return n * x, n


def scaled_bwd(n: int, g: Array) -> tuple[Array, None]:
    return n * g, None


scaled.defvjp(scaled_fwd, scaled_bwd)


def square(x: Array) -> Array:
    return x**2


def square_and_count(x: Array) -> tuple[Array, int]:
    return x**2, 3


def derivatives(x: Array) -> None:
    assert_type(scaled(x, 2), Array)
    assert_type(es.vjp(square, x)[0], Array)
    assert_type(es.vjp(square_and_count, x, has_aux=True)[2], int)
    assert_type(es.jvp(square, (x,), (x,))[0], Array)
    assert_type(es.linearize(square, x)[0], Array)
    es.jacfwd(square)(x)
    es.hessian(square, argnums=(0,))(x)
