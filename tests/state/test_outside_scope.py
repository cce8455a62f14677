"""A module in no scope is written: the error says where it comes from, by cause."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import rejects

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError
X = jnp.ones(())


class Layer(es.Module):
    weight: es.Parameter = 2.0
    count: es.State = 0

    def __call__(self, x):
        if self.training:
            self.count = self.count + 1
        return self.weight * x

    def with_other(self, other, x):
        return other(self(x))


class Always(Layer):
    def __call__(self, x):
        self.count = self.count + 1
        return self.weight * x


class Net(es.Module):
    layer: Layer

    def map(self, x):
        return es.map(lambda w: w, self.layer)(x)


def pair(a, b):
    return b(a(X))


def run(call):
    with pytest.raises(FROZEN) as info:
        call()
    return str(info.value)


RUNS = [es.mutable, es.value_and_grad, es.grad, es.capture]
each_run = pytest.mark.parametrize("f", RUNS, ids=lambda f: f.__name__)


# --- Nothing around -------------------------------------------------------------------


def test_called_directly():
    text = run(lambda: Layer()(X))
    assert text.startswith(
        "Cannot write `Layer.count`: modules are frozen, and this one is in no scope of"
        " `es.mutable`. State is written in a call that returns the new model:"
    )
    assert "y, model = es.mutable(model)(x)     # right" in text
    assert "y = model.eval()(x)" in text
    assert "or it is a copy made inside the scope: `jax.jit`" in text


def test_in_eval_mode_the_advice_is_not_to_switch_to_eval_mode():
    text = run(lambda: Always().eval()(X))
    assert "It is in eval mode, and writes all the same" in text
    assert "    if self.training:\n        self.count = ..." in text
    assert "y, model = es.mutable(model)(x)     # right" in text
    assert "eval()" not in text


@pytest.mark.parametrize("mode", [es.train, es.eval])
def test_a_class_that_writes_in_either_mode_says_so(mode):
    text = run(mode(es.RngStream(0)))
    assert "A `RngStream` writes in train and in eval mode alike" in text
    assert "eval()" not in text
    assert "if self.training" not in text


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("training", False, "eval()"),
        ("training", True, "train()"),
        ("frozen", True, "freeze()"),
        ("frozen", False, "unfreeze()"),
    ],
)
def test_flags_are_switched_by_methods(name, value, right):
    model = Layer()
    with rejects(
        model, FROZEN, rf"`Layer\.{name}`: it is a flag", rf"= model\.{right}"
    ):
        setattr(model, name, value)


class Fields(es.Module):
    weight: es.Parameter = 1.0
    table: es.Buffer = 1.0
    plain: jax.Array = dataclasses.field(default_factory=lambda: jnp.ones(2))
    layer: Layer = dataclasses.field(default_factory=Layer)
    linear: object = dataclasses.field(default_factory=lambda: eqx.nn.Identity())
    count: es.State = 0
    stats: list[es.State] = dataclasses.field(default_factory=lambda: [0])
    rng: jax.Array = dataclasses.field(default_factory=lambda: jax.random.key(0))
    index: jax.Array = dataclasses.field(default_factory=lambda: jnp.arange(2))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("weight", "declared `es.Parameter`"),
        ("table", "declared `es.Buffer`"),
        ("plain", "an array without a declaration, which counts as an `es.Parameter`"),
        ("layer", "a module of its own"),
        ("linear", "a module of its own"),
    ],
)
def test_what_is_not_state_is_replaced(name, what):
    text = run(lambda: setattr(Fields(), name, None))
    assert f"The field is {what}: it is not written but replaced" in text
    assert f"model = model.replace({name}=value)" in text
    assert f"declare it, `{name}: es.State`" in text


@pytest.mark.parametrize("name", ["count", "stats", "rng", "index"])
def test_what_may_be_state_is_written_in_a_scope(name):
    assert "State is written in a call" in run(lambda: setattr(Fields(), name, None))


# --- A scope around -------------------------------------------------------------------


@each_run
def test_another_argument(f):
    model, teacher = Layer(), Layer()
    text = run(lambda: f(pair)(model, teacher))
    assert f"in argument 1 of `pair`, and `es.{f.__name__}` threads only argu" in text
    assert f"    es.{f.__name__}(pair, argnums=(0, 1))(...)     # right" in text
    assert "pass it in eval mode: `teacher.eval()`" in text
    assert "this one is in no scope of `es.mutable`" in text
    f(pair, argnums=(0, 1))(model, teacher)
    f(pair)(model, teacher.eval())


@each_run
def test_the_model_after_the_data(f):
    text = run(lambda: f(lambda x, model: model(x))(X, Layer()))
    assert f"    es.{f.__name__}(<lambda>, argnums=1)(...)     # right" in text


def test_an_argument_that_argnums_leaves_out():
    text = run(lambda: es.mutable(pair, argnums=1)(Layer(), Layer()))
    assert "in argument 0 of `pair`, and `es.mutable` threads only argument 1" in text
    assert "es.mutable(pair, argnums=(0, 1))" in text
    three = es.mutable(lambda a, b, c: c[0](pair(a, b)), argnums=(0, 1))
    text = run(lambda: three(Layer(), Layer(), [Layer()]))
    assert "threads only argument 0 and argument 1" in text
    assert "argnums=(0, 1, 2)" in text


@each_run
def test_an_argument_by_name(f):
    text = run(lambda: f(pair)(Layer(), b=Layer()))
    assert "It is in the argument `b` of `pair`" in text
    assert f"    es.{f.__name__}(pair, argnums=(0, 1))(model, b)     # right" in text


@each_run
def test_an_argument_beside_what_the_function_is_called_on(f):
    model, other = Layer(), Layer()
    right = "lambda model, other: ..., argnums=(0, 1))(model, other)     # right"
    text = run(lambda: f(model.with_other)(other, X))
    assert "in argument 0, and" in text
    assert "the object that `with_other` is called on" in text
    assert right in text
    text = run(lambda: f(model.with_other)(other=other, x=X))
    assert "in the argument `other`, and" in text
    assert right in text


@each_run
def test_what_the_function_is_called_on_if_argnums_names_another(f):
    text = run(lambda: f(Layer().with_other, argnums=0)(Layer(), X))
    assert "It is the object that `with_other` is called on, and `argnums=`" in text


GLOBAL_TEACHER = Layer()


@each_run
def test_what_the_function_has_from_outside(f):
    teacher = {"t": [Layer()]}
    text = run(lambda: f(lambda m: teacher["t"][0](m(X)))(Layer()))
    assert "`<lambda>` has it from outside, as `teacher`" in text
    assert "lambda m, teacher: teacher(m(x)), argnums=(0, 1))(model, teacher)" in text
    for wrapped in (
        lambda g: g,
        ft.partial,
        eqx.Partial,
        lambda g: ft.partial(eqx.Partial(g)),
        lambda g: ft.wraps(g)(lambda *args: g(*args)),
        es.checkpoint,
    ):
        text = run(lambda wrapped=wrapped: f(wrapped(lambda m: GLOBAL_TEACHER(X)))(X))
        assert "has it from outside, as `GLOBAL_TEACHER`" in text


def test_a_teacher_beside_what_the_function_is_called_on():
    teacher = Layer()

    class Distilled(Layer):
        def __call__(self, x):
            return teacher(x)

    text = run(lambda: es.mutable(Distilled().__call__)(X))
    assert "in a variable from outside, `teacher`, and `es.mutable` threads" in text


@each_run
def test_the_original_of_what_is_threaded(f):
    model = Layer()
    text = run(lambda: f(lambda m: model(X))(model))
    assert f"It is the model that `es.{f.__name__}` was given" in text
    assert "private copy" in text
    assert "teacher" not in text


def test_in_eval_mode_the_advice_is_to_guard_the_write():
    text = run(lambda: es.mutable(pair)(Layer(), Always().eval()))
    assert "in argument 1 of `pair`" in text
    assert "It is in eval mode, and writes all the same" in text
    assert "teacher.eval()" not in text


def test_what_writes_in_either_mode_is_not_switched():
    text = run(lambda: es.mutable(lambda m, s: s())(Layer(), es.RngStream(0)))
    assert "in argument 1" in text
    assert "A `RngStream` writes in train and in eval mode alike" in text
    assert "teacher.eval()" not in text


@each_run
def test_a_copy_made_inside(f):
    text = run(lambda: f(Net(Layer()).map)(X))
    assert "or it is a copy made inside the scope" in text
    assert "`es.map`" in text
    assert "es.vmap(self.layer)(x)" in text
    assert "model.eval()" not in text


def test_a_copy_made_in_the_forward_pass_of_init():
    text = run(lambda: Net(Layer()).init(0, X, call=lambda net, x: net.map(x)))
    assert "it is a copy made inside the scope" in text


def test_of_nested_scopes_the_inner_one_explains():
    def outer(a, b):
        return es.mutable(lambda m: b(X))(a)

    text = run(lambda: es.mutable(outer)(Layer(), Layer()))
    assert "has it from outside, as `b`" in text


def test_what_is_outside_may_be_anything():
    unsortable = {1: X, "a": X}

    def f(m):
        return m.layer.eval().train()(X), unsortable

    assert "a copy made inside" in run(lambda: es.mutable(f)(Net(Layer())))


def test_a_name_that_is_not_bound_any_more():
    def make():
        gone = X

        def f(m):
            return m.layer.eval().train()(X) if m is not None else gone  # noqa: F821

        del gone
        return f

    assert "a copy made inside" in run(lambda: es.mutable(make())(Net(Layer())))


def test_a_user_may_raise_the_same_error():
    def f(m):
        raise FROZEN("mine")

    assert run(lambda: es.mutable(f)(Layer())) == "mine"


def test_python_suggests_no_other_field():
    with pytest.raises(FROZEN) as info:
        Layer()(X)
    assert info.value.name is None
