"""What the modules of a model are called with, in the table of `es.tabulate`."""

import functools as ft
import gc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import zoo
from helpers import leaks_on_purpose, reuses_keys, untouched
from tables import cells

import eqx_state as es


def linear(i: int = 2, o: int = 3) -> eqx.nn.Linear:
    return eqx.nn.Linear(i, o, key=jr.key(0))


def calls(tree: Any, *inputs: Any) -> dict[str, tuple[str, str]]:
    rows = cells(es.tabulate(tree, *inputs))
    return {path: tuple(row[1:3]) for path, row in rows.items()}


TRANSFORMS = {
    "plain": lambda layer, xs: layer(xs[0]),
    "es.vmap": lambda layer, xs: es.vmap(layer)(xs),
    "es.scan": lambda layer, xs: es.scan(lambda c, x: (c, layer(x)), None, xs),
    "es.checkpoint": lambda layer, xs: es.checkpoint(layer)(xs[0]),
    "es.jit": lambda layer, xs: es.jit(layer)(xs[0]),
    "es.cond": lambda layer, xs: es.cond(xs[0, 0] > 0, layer, layer, xs[0]),
    "jax.vmap": lambda layer, xs: jax.vmap(layer)(xs),
    "eqx.filter_vmap": lambda layer, xs: eqx.filter_vmap(layer)(xs),
    "eqx.filter_jit": lambda layer, xs: eqx.filter_jit(layer)(xs[0]),
    "eqx.filter_checkpoint": lambda layer, xs: eqx.filter_checkpoint(layer)(xs[0]),
    "jax.lax.scan": lambda layer, xs: jax.lax.scan(lambda c, x: (c, layer(x)), 0, xs),
    "jax.jit": lambda layer, xs: jax.jit(lambda layer, x: layer(x))(layer, xs[0]),
    "jax.grad": lambda layer, xs: jax.grad(lambda x: layer(x).sum())(xs[0]),
}


# Equinox's own checkpoint leaks in what it keeps for the next call.
LEAKING = pytest.param("eqx.filter_checkpoint", marks=leaks_on_purpose)


@pytest.mark.parametrize(
    "transform", [LEAKING if name in LEAKING.values else name for name in TRANSFORMS]
)
@pytest.mark.parametrize("kind", ["equinox", "es"])
def test_calls_are_recorded_in_a_transform(transform, kind):
    class Model(es.Module):
        layers: list[Any]

        def __call__(self, xs):
            for layer in self.layers:
                TRANSFORMS[transform](layer, xs)

    make = {"equinox": lambda: linear(2, 2), "es": lambda: zoo.Dense(key=jr.key(0))}[
        kind
    ]
    found = calls(Model([make(), make()]), jnp.ones((4, 2)))
    assert found[""] == ("f32[4,2]", "None")
    for name in ("layers[0]", "layers[1]"):
        inputs, output = found[name]
        assert inputs.splitlines()[0] == "f32[2]"
        assert output == "f32[2]"


@pytest.mark.parametrize("name", [n for n in zoo.CASES if n != "tree"])
def test_the_zoo_is_recorded(name):
    case = zoo.CASES[name]
    model, x = case.model(), case.inputs()[0]
    shape = f"f32[{','.join(map(str, case.shape))}]"
    with untouched(model):
        found = calls(model, x)
    assert found[""] == (shape, shape)


def test_every_layer_of_the_zoo_that_is_called_is_recorded():
    found = calls(zoo.CASES["nested containers"].model(), jnp.ones(2))
    assert all(inputs == "f32[2]" for inputs, _ in list(found.values())[1:-1])
    assert len(found) == 8
    found = calls(zoo.CASES["frozen halves"].model(), jnp.ones(2))
    assert found["backbone.norm"] == ("f32[1,2]", "f32[1,2]")
    assert found["backbone.dense"] == ("f32[2]", "f32[2]")


def test_equinox_layers_in_equinox_layers():
    mlp = eqx.nn.MLP(2, 3, 4, 1, key=jr.key(0))
    model = eqx.nn.Sequential([mlp, eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(0.5)])
    assert list(calls(model, jnp.ones(2)).values())[1:-1] == [
        ("f32[2]", "f32[3]"),
        ("f32[2]", "f32[3]"),
        ("f32[2]", "f32[4]"),
        ("f32[4]", "f32[3]"),
    ]


def test_calls_are_counted_and_the_first_is_shown():
    class Twice(es.Module):
        layer: Any
        unused: Any

        def __call__(self, x):
            return self.layer(self.layer(x)[None, 0] * 1.0)

    double = eqx.nn.Lambda(lambda x: jnp.concatenate([x, x]))
    found = calls(Twice(double, linear()), jnp.ones(2))
    assert found["layer"] == ("f32[2]\n(2 calls)", "f32[4]")
    assert found[""] == ("f32[2]", "f32[2]")
    assert found["unused"] == ("", "")


def test_an_array_of_numpy_may_be_a_shape():
    class Zeros(es.Module):
        shape: es.Buffer

        def __call__(self, x):
            return x[0] + jnp.zeros([int(n) for n in self.shape])

    assert calls(Zeros(np.array([2, 3])), jnp.ones(3))[""] == ("f32[3]", "f32[2,3]")


def test_nested_inputs_and_outputs_are_readable():
    class Model(es.Module):
        inner: Any

        def __call__(self, batch, flag, layer):
            return self.inner(batch["x"], scale=2.0, key=None), flag

    class Inner(eqx.Module):
        def __call__(self, x, scale, key):
            return {"y": x, "n": x.astype(int)}

    inputs = {"x": np.ones((2, 3), np.float32), "k": jr.key(0)}
    found = calls(Model(Inner()), inputs, "mean", linear())
    assert found[""] == (
        "{'k': key<fry>[], 'x': f32[2,3]}\n'mean'\nLinear(...)",
        "({'n': i32[2,3], 'y': f32[2,3]}, 'mean')",
    )
    assert found["inner"][0] == "f32[2,3]\nscale=2.0"


def test_layers_that_must_be_alike():
    class Model(es.Module):
        layers: list[Any]

        def __call__(self, x):
            stack = jax.tree.map(lambda *a: jnp.stack(a), *self.layers)
            return es.scan(lambda x, layer: (layer(x), None), x, stack)[0]

    found = calls(Model([linear(2, 2), linear(2, 2)]), jnp.ones(2))
    assert found["layers[0]"][1] == "f32[2]"


def test_bound_methods():
    class Model(es.Module):
        layer: Any

        def encode(self, x):
            return self.layer(x)

    found = calls(Model(linear()).encode, jnp.ones(2))
    assert found[""] == found["layer"] == ("f32[2]", "f32[3]")


@pytest.mark.parametrize("partial", [ft.partial, eqx.Partial])
def test_keyword_arguments_by_a_partial(partial):
    class Model(es.Module):
        layer: Any

        def __call__(self, x, *, scale):
            return self.layer(x) * scale

    found = calls(partial(Model(linear()), scale=jnp.ones(3)), jnp.ones(2))
    assert found["layer"] == ("f32[2]", "f32[3]")


def test_of_a_module_that_calls_itself_the_outer_call_is_shown():
    class Twice(es.Module):
        def __call__(self, x, n):
            return x if n == 0 else self(x[None], n - 1)

    assert calls(Twice(), jnp.ones(2), 2)[""][0].startswith("f32[2]\n2")


def test_a_class_that_cannot_be_subclassed_goes_unrecorded():
    class Meta(type(es.Module)):
        def __new__(cls, name, bases, body, *, size):
            return super().__new__(cls, name, bases, body)

    class Odd(es.Module, metaclass=Meta, size=1):
        layer: Any

        def __call__(self, x):
            return self.layer(x)

    found = calls(Odd(linear()), jnp.ones(2))
    assert found[""] == found["layer"] == ("f32[2]", "f32[3]")


def test_equinox_models_with_state():
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "b", mode="batch")
    found = calls(eqx.nn.Sequential([linear(), model]), jnp.ones(2), state)
    assert found["layers[1]"] == ("f32[3]\nstate=State(...)", "(f32[3], State(...))")


def test_a_model_keeps_its_classes_in_view():
    class Base(es.Module):
        def __call__(self, x):
            return x

    class Model(es.Module):
        layer: Base

        def __call__(self, x):
            assert isinstance(self.layer, Base)
            assert type(self.layer).__qualname__ == Base.__qualname__
            made = type(self.layer)()
            return made(self.layer.eval()(self.layer(x)))

    assert calls(Model(Base()), jnp.ones(2))["layer"] == ("f32[2]\n(2 calls)", "f32[2]")


def test_what_runs_when_a_class_is_made_does_not_run():
    made = []

    class Registered(es.Module):
        def __init_subclass__(cls, called, **kwargs):
            super().__init_subclass__(**kwargs)
            made.append(called)

    class Model(Registered, called="model"):
        def __call__(self, x):
            return x

    assert calls(Model(), jnp.ones(2))[""] == ("f32[2]", "f32[2]")
    assert made == ["model"]


# --- Nothing is computed, nothing is changed ------------------------------------------


def test_nothing_is_computed():
    ran = []

    class Model(es.Module):
        layer: Any
        constant: Any

        def __call__(self, x):
            jax.debug.callback(lambda: ran.append(1))
            shape = jax.ShapeDtypeStruct((3,), jnp.float32)
            y = jax.pure_callback(lambda _: ran.append(2), shape, jnp.ones(3))
            return self.layer(x) + y * jnp.asarray(self.constant)

    model = Model(linear(), np.ones(3, np.float32))
    assert calls(model, np.ones(2, np.float32))["layer"] == ("f32[2]", "f32[3]")
    jax.effects_barrier()
    assert ran == []


@reuses_keys
def test_nothing_is_changed():
    model = zoo.CASES["average and keys"].model()
    traces = []

    @eqx.filter_jit
    def step(model, x):
        traces.append(1)
        return es.mutable(model)(x)

    step(model, jnp.ones(2))
    classes = [
        (type(m), type(m).__dict__.get("__call__")) for _, m in es.modules(model)
    ]
    with untouched(model):
        es.tabulate(model, jnp.ones(2))
    after = [(type(m), type(m).__dict__.get("__call__")) for _, m in es.modules(model)]
    assert classes == after
    step(model, jnp.ones(2))
    assert traces == [1]


def test_the_users_error_comes_out():
    class Model(es.Module):
        layer: Any

        def __call__(self, x):
            raise RuntimeError("mine")

    model = Model(linear())
    with untouched(model), pytest.raises(RuntimeError, match="^mine(\n|$)"):
        es.tabulate(model, jnp.ones(2))
    with pytest.raises(TypeError, match="dot_general requires contracting"):
        es.tabulate(linear(), jnp.ones(5))
    assert type(model.layer) is eqx.nn.Linear


def test_what_cannot_be_called_is_an_error():
    for what in ([linear()], es.Optimizer(optax.sgd(1.0)).init(linear())):
        with pytest.raises(TypeError, match=r"`es\.tabulate` was given inputs, and `"):
            es.tabulate(what, jnp.ones(2))

    def forward(x, layer=linear()):  # noqa: B008
        return layer(x)

    with pytest.raises(
        TypeError, match=r"`forward` is not a model .* is not looked into"
    ):
        es.tabulate(forward, jnp.ones(2))


def test_classes_do_not_pile_up():
    class Model(es.Module):
        layer: Any

        def __call__(self, x):
            return self.layer(x)

    model = Model(linear())
    for _ in range(3):
        es.tabulate(model, jnp.ones(2))
        gc.collect()
        assert len(Model.__subclasses__()) == 1
        made = [c for c in eqx.nn.Linear.__subclasses__() if c.__name__ == "Linear"]
        assert len(made) == 1


def test_calling_again_records_again():
    class Model(es.Module):
        layers: list[Any]

        def __call__(self, x):
            return run(self.layers[1], run(self.layers[0], x))

    @eqx.filter_jit
    def run(layer, x):
        return layer(x)

    model = Model([linear(2, 2), linear(2, 2)])
    assert calls(model, jnp.ones(2)) == calls(model, jnp.ones(2))
    assert calls(model, jnp.ones(2))["layers[1]"] == ("f32[2]", "f32[2]")
