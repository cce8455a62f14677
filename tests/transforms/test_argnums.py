"""`argnums=` of `es.mutable`, `es.value_and_grad`, `es.grad` and `es.capture`."""

import dataclasses
import functools as ft

import equinox as eqx
import jax.numpy as jnp
import pytest
from helpers import rejects, untouched

import eqx_state as es


class Counter(es.Module):
    weight: es.Parameter = 2.0
    count: es.State = 0

    def __call__(self, x):
        self.count = self.count + 1
        y = self.weight * x
        self.sow("out", y)
        return y

    def apply(self, other, x):
        return self.weight * other(x)


def first_and_last(a, x, b):
    return a(x) + b(x)


def test_an_integer_names_one_argument():
    a, b = Counter(), Counter(3.0)
    with untouched((a, b)):
        y, new = es.mutable(lambda x, m: m(x), argnums=1)(1.0, b)
        (loss, grown), grads = es.value_and_grad(lambda x, m: m(x), argnums=1)(4.0, b)
        only_grads, last = es.grad(lambda x, m: m(x), argnums=1)(4.0, b)
    assert (y, new.count, type(new)) == (3.0, 1, Counter)
    assert (loss, grown.count, grads.weight, grads.count) == (12.0, 1, 4.0, None)
    assert eqx.tree_equal((only_grads, last), (grads, grown))


@pytest.mark.parametrize(
    ("argnums", "weights"), [([0, 2], [2, 3]), ((-3, -1), [2, 3]), ((2, 0), [3, 2])]
)
def test_a_tuple_gives_a_tuple_of_models_and_of_gradients(argnums, weights):
    a, b = Counter(), Counter(3.0)
    with untouched((a, b)):
        y, new = es.mutable(first_and_last, argnums=argnums)(a, 1.0, b)
        (loss, models), grads = es.value_and_grad(first_and_last, argnums=argnums)(
            a, 4.0, b
        )
    assert y == 5.0
    assert type(new) is type(models) is type(grads) is tuple
    assert [m.count for m in new] == [m.count for m in models] == [1, 1]
    assert [m.weight for m in new] == weights
    assert (loss, [g.weight for g in grads]) == (20.0, [4.0, 4.0])


def test_filters_see_the_tuple():
    wrt = es.all_of(es.trainable, es.path_matches("[1].*"))
    grads, _ = es.grad(first_and_last, argnums=(0, 2), wrt=wrt)(
        Counter(), 1.0, Counter()
    )
    assert [g.weight for g in grads] == [None, 1.0]


def test_with_argnums_the_object_bound_to_f_is_not_writable():
    carried, given = Counter(5.0), Counter()
    for f in (carried.apply, ft.partial(Counter.apply, carried)):
        grads, new = es.grad(f, argnums=0)(given, 2.0)
        assert (grads.weight, new.count) == (10.0, 1)
    with rejects(carried, dataclasses.FrozenInstanceError, r"Counter\.count"):
        es.mutable(carried, argnums=0)(jnp.ones(()))


def test_argnums_of_a_decorated_method_do_not_count_self():
    class Trainer(es.Module):
        rate: es.Parameter = 5.0

        @ft.partial(es.value_and_grad, argnums=0)
        def loss(self, model, x):
            return self.rate * model(x)

    (loss, new), grads = Trainer().loss(Counter(), 2.0)
    assert (loss, new.count, grads.weight) == (20.0, 1, 10.0)


def test_sown_values_are_named_by_the_position_in_the_tuple():
    ((y, new), sown) = es.capture(first_and_last, argnums=(0, 2))(
        Counter(), 1.0, Counter(3.0)
    )
    assert (y, [m.count for m in new]) == (5.0, [1, 1])
    assert sown == {"[0].out": 2.0, "[1].out": 3.0}


@pytest.mark.parametrize("argnums", [1.0, (0, "x"), {0, 1}])
def test_argnums_are_integers(argnums):
    with pytest.raises(TypeError, match=r"`es\.mutable\(\.\.\., argnums="):
        es.mutable(first_and_last, argnums=argnums)


def test_a_model_that_is_passed_by_keyword_is_an_error():
    def step(model, x):
        return model(x)

    functions = (step, "step"), (eqx.filter_jit(step), "step"), (lambda **_: 0, "f")
    for f, name in functions:
        shown = rf"`es\.mutable\({name}\)` was called without a positional argument"
        with pytest.raises(TypeError, match=shown):
            es.mutable(f)(model=Counter(), x=1.0)


def test_a_module_that_wraps_a_module_is_the_model():
    class Logged(eqx.Module):
        inner: Counter

        @property
        def __wrapped__(self):
            return self.inner

        def __call__(self, x):
            return self.inner(x)

    assert es.mutable(Logged(Counter()))(1.0)[1].inner.count == 1


def test_argnums_that_name_no_module_with_inexact_arrays():
    loss = lambda model, i: model(i.astype(float))  # noqa: E731
    with pytest.raises(ValueError, match="has 0 parameters"):
        es.grad(loss, argnums=1)(Counter(), jnp.array(2))
