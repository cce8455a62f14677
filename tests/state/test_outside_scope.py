"""Writing to a module outside a scope: one message, and the three usual causes."""

import dataclasses

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


class Net(es.Module):
    layer: Layer


def run(call):
    with pytest.raises(FROZEN) as info:
        call()
    return str(info.value)


def test_outside_a_scope_the_message_shows_the_call():
    text = run(lambda: Layer()(X))
    assert text.startswith("Cannot write `Layer.count`: modules are frozen, and this")
    for advice in (
        "y, model = es.mutable(model)(x)     # right",
        "y = model.eval()(x)",
        "model = model.replace(count=value)",
        "In a layer, write only in train mode",
        "es.mutable(es.vmap(model))(xs)",
    ):
        assert advice in text
    assert "usual causes" not in text


# An argument of the transform, and a variable that its function closes over.
TRACED = {
    "jax.jit": lambda m: jax.jit(lambda m, x: m(x))(m, X),
    "jax.grad": lambda m: jax.grad(lambda w: m.replace(weight=w)(X))(m.weight),
    "jax.vmap": lambda m: jax.vmap(lambda w: m.replace(weight=w)(X))(X[None]),
    "eqx.filter_jit": lambda m: eqx.filter_jit(m)(X),
    "eqx.filter_grad": lambda m: eqx.filter_grad(lambda m: m(X))(m),
    "es.jit": lambda m: es.jit(m)(X),
}
CONSTANT = {
    "jax.jit": lambda m: jax.jit(lambda x: m(x))(X),
    "jax.grad": lambda m: jax.grad(lambda x: m(x))(X),
    "eqx.filter_vmap": lambda m: eqx.filter_vmap(lambda x: m(x))(X[None]),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_model_that_is_an_argument_of_a_transform(name):
    text = run(lambda: TRACED[name](Layer()))
    assert "this `Layer` is outside `es.mutable`. It is an argument of a" in text
    assert "(loss, model), grads = es.value_and_grad(loss_fn)(model, x)" in text
    assert "es.jit(lambda model, x: es.mutable(model)(x))(model, x)" in text
    assert "For predictions, pass `model.eval()`" in text
    assert "closes over it" not in text


@pytest.mark.parametrize("name", CONSTANT)
def test_a_model_that_the_function_of_a_transform_closes_over(name):
    text = run(lambda: CONSTANT[name](Layer()))
    assert "or `eqx.filter_grad`, closes over it" in text
    assert "ys, model = es.mutable(es.vmap(model))(xs)" in text
    assert "It is an argument" not in text


def test_a_stream_that_draws_in_the_constructor():
    class Noisy(es.Module):
        stream: es.RngStream

        def __init__(self, key):
            self.stream = es.RngStream(key)
            self.stream()

    for make in (Noisy, jax.jit(Noisy)):
        text = run(lambda make=make: make(jax.random.key(0)))
        assert "`a, b = jax.random.split(key)`, use `a`, and" in text
        assert "In a layer" not in text


def loss_fn(model, x):
    return model(x)


def maml(model, x):
    params = es.filter(model, es.Parameter)
    grads = jax.grad(lambda params: loss_fn(model.eval().update(params), x))(params)
    fast = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return loss_fn(model.update(fast), x)


def maml_in_a_call(model, x):
    loss, copy = es.mutable(loss_fn)(model.update(es.filter(model, es.Parameter)), x)
    return loss * copy.weight


def loop(stack, x):
    for layer in stack:
        x = layer(x)
    return x


def stack():
    return es.nn.Stacked([Layer(), Layer()])


# The wrong program, the advice in the message, and the program that follows it.
CAUSES = {
    "an updated copy": (
        lambda: es.value_and_grad(maml)(Layer(), X),
        "y, copy = es.mutable(model.update(params))(x)",
        lambda: es.value_and_grad(maml_in_a_call)(Layer(), X),
    ),
    "a transform of Equinox": (
        lambda: es.mutable(lambda n: eqx.filter_jit(n.layer)(X))(Net(Layer())),
        "or use the transform of `es`",
        lambda: es.mutable(lambda n: es.jit(n.layer)(X))(Net(Layer())),
    ),
    "a layer that the call creates": (
        lambda: es.mutable(lambda net: Layer()(X))(Net(Layer())),
        "It was created in this call. Create it in `__init__`, and store it in a field",
        lambda: es.mutable(lambda net: net.layer(X))(Net(Layer())),
    ),
    "a layer of a stack": (
        lambda: es.mutable(loop)(stack(), X),
        "x = self.blocks(x)",
        lambda: es.mutable(stack())(X),
    ),
    "a closure": (
        lambda: es.value_and_grad(lambda x: loss_fn(Layer(), x))(X),
        "a variable that the function closes over. Pass it",
        lambda: es.value_and_grad(loss_fn)(Layer(), X),
    ),
    "a later argument": (
        lambda: es.value_and_grad(lambda x, model: loss_fn(model, x))(X, Layer()),
        "es.value_and_grad(loss_fn, argnums=1)(x, model)     # two models: argnums=(0,",
        lambda: es.value_and_grad(lambda x, m: loss_fn(m, x), argnums=1)(X, Layer()),
    ),
    "a keyword": (
        lambda: es.mutable(lambda x, model: loss_fn(model, x))(X, model=Layer()),
        "a keyword",
        lambda: es.mutable(lambda x, m: loss_fn(m, x), argnums=1)(X, Layer()),
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_inside_a_scope_the_three_usual_causes_are_listed(cause):
    wrong, advice, right = CAUSES[cause]
    text = run(wrong)
    assert text.startswith("Cannot write `Layer.count`: this `Layer` is not part of an")
    assert advice in text
    assert text.count("\n- ") == 3
    assert "eval mode: `model.eval()(x)`" in text
    right()


def test_a_layer_that_was_assigned_is_a_copy():
    def assign(net):
        net.layer = new = Layer()
        new.count = 1

    run_all = es.mutable(assign, kinds=es.TreePart)
    assert "Write through the field" in run(lambda: run_all(Net(Layer())))


def test_an_undeclared_array_is_a_parameter_only_by_default():
    class Norm(es.Module):
        mean: jax.Array
        weight: es.Parameter

        def __call__(self, name):
            setattr(self, name, X)

    default, cure = "only by default: its field declares", "`mean: es.BatchStat`"
    text = run(lambda: es.mutable(Norm(0 * X, 0 * X))("mean"))
    assert default in text
    assert cure in text
    assert default not in run(lambda: es.mutable(Norm(0 * X, 0 * X))("weight"))


def test_a_misspelled_field():
    def write(layer, name):
        setattr(layer, name, 1)

    for call in (lambda *args: es.mutable(write)(*args), write):
        text = run(lambda call=call: call(Layer(), "cuont"))
        assert "has no field `cuont`: did you mean `count`? Or declare it" in text
        text = run(lambda call=call: call(Layer(), "velocity"))
        assert "has no field `velocity`. Declare it in the class body: `vel" in text


def test_in_the_forward_pass_of_init():
    assert "`es.init` makes writable" in run(
        lambda: Net(Layer()).init(0, X, call=lambda n, x: n.layer.train()(x))
    )


@pytest.mark.parametrize("flag", ["training", "frozen"])
def test_a_flag_is_part_of_the_structure(flag):
    text = run(lambda: setattr(Layer(), flag, True))
    assert f"`Layer.{flag}`: a static field" in text
    assert "model = model.eval()" in text


def test_a_layer_that_writes_in_eval_mode_is_not_told_to_use_eval_mode():
    class Cache(es.Module):
        last: es.State = 0.0

        def __call__(self, x):
            self.last = x

    cache = Cache().eval()
    says = (
        "It is in eval mode",
        "writes all the same",
        r"mutable\(model\.eval\(\)\)\(x\)",
    )
    with rejects(cache, FROZEN, r"Cache\.last`", *says):
        cache(1.0)
