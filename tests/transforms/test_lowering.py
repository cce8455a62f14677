"""Steps that are lowered, compiled ahead of time, exported, or evaluated for shapes."""

import copy

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import untouched

import eqx_state as es


class Net(es.Module):
    weight: es.Parameter
    norm: es.nn.BatchNorm
    steps: es.State = 0

    def __init__(self, key):
        self.weight = jr.normal(key, (3, 2))
        self.norm = es.nn.BatchNorm(3, axis_name="batch")
        self.steps = 0

    def __call__(self, x):
        self.steps = self.steps + 1
        return jnp.sum(self.norm(self.weight @ x))


def loss(model, x):
    return jnp.mean(es.vmap(model, axis_name="batch")(x) ** 2)


def step(model, optimizer, x):
    (value, model), grads = es.value_and_grad(loss)(model, x)
    model, optimizer = optimizer.update(grads, model)
    return value, model, optimizer


def forward(model, x):
    return es.mutable(es.vmap(model, axis_name="batch"))(x)


# Compiled once; all tests compare with these.
plain_step, plain_forward = jax.jit(step), jax.jit(forward)


@pytest.fixture
def training():
    """A model, its optimizer and a batch. All leaves are arrays."""
    model = Net(jr.key(0))
    optimizer = es.Optimizer(optax.sgd(0.1, momentum=0.5)).init(model)
    return model, optimizer, jr.normal(jr.key(1), (4, 2))


def shapes(tree):
    return eqx.filter_eval_shape(lambda: tree)


def assert_close(a, b):
    assert eqx.tree_equal(a, b, rtol=1e-5, atol=1e-5)


# --- `lower` and `compile` ------------------------------------------------------------


def test_a_step_is_compiled_from_shapes_alone(training):
    with untouched(training):
        compiled = es.jit(step).lower(*shapes(training)).compile()
        value, model, optimizer = compiled(*training)
    assert_close((value, model, optimizer), plain_step(*training))
    assert compiled(model, optimizer, training[-1])[1].steps == 2


def test_both_stages_have_the_interface_of_jax(training):
    lowered = es.jit(step).lower(*training)
    assert "module @jit_step" in lowered.as_text()
    assert "stablehlo" in lowered.as_text(dialect="stablehlo")
    compiled = lowered.compile({"xla_embed_ir_in_executable": False})
    assert "HloModule jit_step" in compiled.as_text()
    expected = plain_step.lower(*training).cost_analysis()
    assert lowered.cost_analysis()["flops"] == expected["flops"]
    assert compiled.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis() is not None


def test_static_arguments_and_results_keep_their_positions():
    def f(tree, x, *, scale, name="f"):
        return {"out": scale * x + tree["a"], "name": name, "rest": tree["rest"]}

    x, tree = jnp.ones(3), {"a": jnp.ones(3), "rest": ("text", None, jnp.sin, 2)}
    compiled = es.jit(f).lower(shapes(tree), shapes(x), scale=2, name="g").compile()
    got = compiled(tree, x, scale=2, name="g")
    assert eqx.tree_equal(got, f(tree, x, scale=2, name="g"))
    assert eqx.tree_equal(compiled(x=x, name="g", tree=tree, scale=2), got)


def test_a_model_and_a_decorated_method_are_lowered(training):
    model, _, x = training
    mapped = es.jit(es.mutable(es.vmap(model, axis_name="batch")))
    assert_close(mapped.lower(shapes(x)).compile()(x), plain_forward(model, x))

    class Scaled(es.Module):
        weight: es.Parameter

        @es.jit
        def __call__(self, x, by):
            return by * self.weight * x

    scaled = Scaled(3.0)
    compiled = Scaled.__call__.lower(shapes(scaled), shapes(x), 2).compile()
    assert jnp.allclose(compiled(scaled, x, 2), 6 * x)


def test_donation_is_compiled_in():
    f = es.jit(lambda x, y: (x + 1, y + 1), donate="all-except-first")
    x, y = jnp.ones(3), jnp.ones(3)
    compiled = copy.copy(f.lower(x, y)).compile()
    copy.copy(compiled)(x, y)  # both stages may be copied
    assert not x.is_deleted()
    assert y.is_deleted()


def test_a_compiled_program_serves_its_own_signature_only(training):
    model, _, x = training
    f = es.jit(lambda model, x, by: jnp.sum(model.weight) + by * x)
    compiled = f.lower(*shapes((model, x)), 2).compile()
    others = (model, x, 3), (model, x, 2.0), (model.eval(), x, 2), ((model,), x, 2)
    for args in others:
        match = r"(?s)compiled by `es\.jit.*a different structure or different"
        with pytest.raises(TypeError, match=match):
            compiled(*args)
    with pytest.raises(TypeError, match="Argument types differ"):
        compiled(model, jnp.ones((5, 2)), 2)


def test_lowering_in_a_scope_writes_nothing_and_the_program_does(training):
    model, _, x = training

    class Outer(es.Module):
        net: Net

        def __call__(self, x):
            apply = es.jit(es.vmap(self.net, axis_name="batch"))
            program = apply.lower(x).compile()
            assert self.net.steps == 0
            return program(x), program(x)

    (first, second), new = es.mutable(Outer(model))(x)
    expected, once = plain_forward(model, x)
    assert_close(first, expected)
    assert_close((second, new.net), plain_forward(once, x))


# --- Export ---------------------------------------------------------------------------


def test_an_exported_step_equals_the_step(training):
    with untouched(training):
        exported = jax.export.export(plain_step)(*shapes(training))
        assert_close(exported.call(*training), plain_step(*training))
    platforms = jax.export.export(plain_step, platforms=["cpu", "cuda"])(*training)
    assert platforms.platforms == ("cpu", "cuda")
