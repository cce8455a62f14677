"""A module that no scope owns is written: one message, and the three usual causes."""

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


def test_outside_of_any_scope_the_call_is_shown():
    text = run(lambda: Layer()(X))
    assert text.startswith("Cannot write `Layer.count`: modules are frozen, and this")
    for advice in (
        "y, model = es.mutable(model)(x)     # right",
        "y = model.eval()(x)",
        "model = model.replace(count=value)",
        "guards what only training changes",
        "es.mutable(es.vmap(model))(xs)",
    ):
        assert advice in text
    assert "private copy" not in text


CAUSES = {
    "another argument": lambda f: f(lambda a, b: b(a(X)))(Layer(), Layer()),
    "by name": lambda f: f(lambda a, b: b(a(X)))(Layer(), b=Layer()),
    "update": lambda f: f(lambda n: es.update(n.layer, n.layer)(X))(Net(Layer())),
    "tree_map": lambda f: f(lambda n: jax.tree.map(lambda x: x, n.layer)(X))(
        Net(Layer())
    ),
    "filter_jit": lambda f: f(lambda n: eqx.filter_jit(n.layer)(X))(Net(Layer())),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_inside_a_scope_the_three_usual_causes_are_listed(cause):
    text = run(lambda: CAUSES[cause](es.mutable))
    assert "this `Layer` is not in the private copy" in text.replace("\n", " ")
    for advice in (
        "argnums=(0, 1))(model, other)          # right",
        "es.vmap(self.layer)(x)              # right",
        "`es.nn.Stacked`",
        "other.eval()",
    ):
        assert advice in text


def test_a_layer_of_a_stack_is_a_copy():
    def f(stack):
        return stack[0](X)

    stack = es.nn.Stacked([Layer(), Layer()])
    with rejects(stack, FROZEN, r"`Layer\.count`", "call the stack"):
        es.mutable(f)(stack)


def test_in_the_forward_pass_of_init():
    assert "`es.init` runs on" in run(
        lambda: Net(Layer()).init(0, X, call=lambda n, x: n.layer.train()(x))
    )


@pytest.mark.parametrize("flag", ["training", "frozen"])
def test_a_flag_is_part_of_the_structure(flag):
    text = run(lambda: setattr(Layer(), flag, True))
    assert f"`Layer.{flag}`: a static field" in text
    assert "model = model.eval()" in text
