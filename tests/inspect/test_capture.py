"""`es.capture`: sown values and outputs of modules, through every transform."""

import functools as ft
import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, leaks_on_purpose, untouched
from models import Net

import eqx_state as es


X = jnp.array([1.0, 2.0, 3.0])


class Scale(es.Module):
    factor: es.Parameter = 2.0
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        y = self.factor * x
        self.sow("out", y)
        return y


class Stateless(Scale):
    def __call__(self, x):
        y = self.factor * x
        self.sow("out", y)
        return y


class Times(eqx.Module):
    """A plain Equinox layer, which cannot sow."""

    factor: Any = 2.0

    def __call__(self, x, *, key=None):
        return self.factor * x


class Wrapped(es.Module):
    """A layer called through a transform: `apply(layer, x)`."""

    layer: Any
    apply: object = eqx.field(static=True)

    def __call__(self, x):
        return self.apply(self.layer, x)


def wrapped(apply, layer=None):
    return Wrapped(Scale() if layer is None else layer, apply)


def net(*factors):
    return Net([Scale(x) for x in factors])


def test_capture_returns_sown_values_and_outputs_with_the_result_of_mutable():
    model = net(2.0, 3.0)
    expected = es.mutable(model)(X)
    with untouched(model):
        result, found = es.capture(model, outputs=Scale)(X)
    assert eqx.tree_equal(result, expected)
    names = ["layers[0].out", "layers[0]", "layers[1].out", "layers[1]"]
    assert list(found) == names
    close(list(found.values()), [2 * X, 2 * X, 6 * X, 6 * X])
    assert list(es.capture(model)(X)[1]) == names[::2]


def test_without_capture_sowing_does_nothing_and_does_not_change_the_program():
    class Quiet(Scale):
        def sow(self, name, value):
            pass

    assert es.mutable(Scale())(X)[1].calls == 1
    programs = [
        str(jax.make_jaxpr(lambda x, m=m: es.mutable(m)(x)[0])(X))
        for m in (Scale(), Quiet())
    ]
    assert programs[0] == programs[1]
    assert Scale().sow("out", 1.0) is None
    assert Scale().sow("out", object()) is None
    model = wrapped(lambda layer, x: jax.vmap(lambda x: layer.sow("it", x) or x)(x))
    close(es.mutable(model)(X)[0], X)


def test_the_model_is_found_as_in_mutable():
    class Model(Net):
        @es.capture
        def look(self, x):
            return self(x)

        def encode(self, x, scale):
            return scale * self.layers[0](x)

    model = Model([Scale(), Scale()])
    (_, new), sown = model.look(X)
    assert (list(sown), new.layers[1].calls) == (["layers[0].out", "layers[1].out"], 1)
    for f in (ft.partial(model.encode, X), ft.partial(model.encode, x=X)):
        _, found = es.capture(f, outputs="*")(scale=2.0)
        assert list(found) == ["layers[0].out", "layers[0]"]
    models = Scale(2.0), net(3.0)
    run = es.capture(lambda models, x: models[1](models[0](x)))
    (y, (a, _)), sown = run(models, X)
    assert list(sown) == ["[0].out", "[1].layers[0].out"]
    assert a.calls == 1
    close(y, sown["[1].layers[0].out"])


def test_several_values_of_one_name_form_a_tuple():
    model = wrapped(lambda layer, x: layer(layer(x)))
    _, found = es.capture(model, outputs="layer")(X)
    for name in ("layer", "layer.out"):
        close(list(found[name]), [2 * X, 4 * X])


def test_any_pytree_of_arrays_and_numbers_can_be_captured():
    class Many(es.Module):
        stream: es.RngStream

        def __call__(self):
            x = np.ones(2)
            out = {"a": (1, 2.5, None), "n": x, "key": self.stream()}
            self.sow("many", out)
            x[:] = 0  # the sown value does not change
            return out

    (out, _), found = es.capture(Many(es.RngStream(0)), outputs="*")()
    for many in (found["many"], found[""]):
        assert (many["a"], many["key"]) == ((1, 2.5, None), out["key"])
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(many))
    assert found["many"]["n"].tolist() == [1, 1]
    assert found["stream"] == out["key"]


def test_after_the_call_a_module_that_was_kept_sows_nothing():
    kept = []
    model = wrapped(lambda layer, x: kept.append(layer) or layer(x))
    _, sown = es.capture(model)(X)
    kept[0].sow("late", 1.0)
    assert list(sown) == ["layer.out"]


def test_kinds_are_those_that_may_be_written():
    class Trains(es.Module):
        weight: es.Parameter

        def __call__(self):
            self.weight = self.weight + 1
            self.sow("weight", self.weight)

    (_, new), sown = es.capture(Trains(1.0), kinds=es.Parameter)()
    assert new.weight == sown["weight"] == 2
    with pytest.raises(TypeError, match=r"`es\.capture\(\.\.\., kinds=3\)`"):
        es.capture(Scale(), kinds=3)


# --- Through transforms ---------------------------------------------------------------


@es.custom_vjp
def custom(layer, x):
    return layer(x)


custom.defvjp(lambda m, x: (m(x), x), lambda x, g: (None, g))

THROUGH = {
    "es.jit": lambda f, x: es.jit(f)(x),
    "es.checkpoint": lambda f, x: es.checkpoint(f)(x),
    "es.cond": lambda f, x: es.cond(x.sum() > 0, f, f, x),
    "es.vjp": lambda f, x: es.vjp(f, x)[0],
    "es.hessian": lambda f, x: es.hessian(lambda x: f(x).sum())(x)[0],
    "es.custom_vjp": lambda f, x: custom(f, x),
}
STACKED = {
    "es.vmap": lambda f, xs: es.vmap(f)(xs),
    "es.scan": lambda f, xs: es.scan(lambda c, x: (c, f(x)), None, xs)[1],
    "es.scan with it in the carry": lambda f, xs: es.scan(
        lambda f, x: (f, f(x)), f, xs
    )[1],
}
# These return only outputs; a sow inside them is an error.
PLAIN = {
    "jax.vmap": lambda f, xs: jax.vmap(f)(xs),
    "eqx.filter_vmap": lambda f, xs: eqx.filter_vmap(f)(xs),
    "jax.vmap of es.jit": lambda f, xs: jax.vmap(es.jit(f))(xs),
    "jax.vmap of es.grad": lambda f, xs: jax.vmap(
        lambda x: es.grad(lambda f: f(x).sum())(f)[0] and x
    )(xs),
}


@pytest.mark.parametrize("name", THROUGH)
def test_a_transform_returns_captured_values_unchanged(name):
    if name == "es.custom_vjp" and jax.config.jax_check_tracer_leaks:
        pytest.skip("a traced call of a rule keeps its arguments alive")
    (_, new), found = es.capture(wrapped(THROUGH[name]), outputs="layer")(X)
    assert set(found) == {"layer", "layer.out"}
    close([found["layer"], found["layer.out"]], [2 * X, 2 * X])
    assert new.layer.calls == 1


@pytest.mark.parametrize("name", STACKED)
def test_it_is_stacked_by_lane_or_step(name):
    model = wrapped(STACKED[name], Stateless())
    (ys, _), found = es.jit(es.capture(model, outputs="layer"))(X)
    assert set(found) == {"layer", "layer.out"}
    close([found["layer"], found["layer.out"], ys], [2 * X] * 3)


@pytest.mark.parametrize("name", PLAIN)
def test_outputs_are_stacked_by_lanes_of_plain_jax(name):
    model = wrapped(PLAIN[name], Times(jnp.array(2.0)))
    _, found = es.capture(model, outputs="layer")(X)
    close(found, {"layer": 2 * X})


NESTED = {
    "es of jax": lambda f, x: es.vmap(jax.vmap(f))(x),
    "jax of es": lambda f, x: jax.vmap(es.vmap(f))(x),
    "jax of scan": lambda f, x: jax.vmap(
        lambda x: es.scan(lambda c, x: (c, f(x)), 0, x)
    )(x),
}


@pytest.mark.parametrize("name", NESTED)
def test_of_two_axes_the_outer_one_is_first(name):
    x = jnp.stack([X, 10 * X])
    _, found = es.capture(wrapped(NESTED[name], Times()), outputs="layer")(x)
    close(found["layer"], 2 * x)
    across = wrapped(lambda f, x: jax.vmap(f, in_axes=1, out_axes=1)(x), Times())
    close(es.capture(across, outputs="layer")(x)[1]["layer"], 2 * x.T)


def test_an_output_that_is_equal_in_all_lanes_is_stacked_too():
    model = wrapped(lambda f, xs: jax.vmap(lambda x: x + f(X))(xs), Times())
    _, found = es.capture(model, outputs="layer")(X)
    close(found["layer"], jnp.stack([2 * X] * 3))


def test_keys_are_stacked_by_lane():
    split = eqx.nn.Lambda(lambda key: jr.fold_in(key, 1))
    run = es.capture(lambda m, keys: jax.vmap(m)(keys), outputs="")
    assert run(split, jr.split(jr.key(0), 3))[1][""].shape == (3,)


def test_all_layers_of_a_stack_have_one_name():
    class Block(Scale):
        inner: Times = Times(10.0)

        def __call__(self, x):
            return self.inner(super().__call__(x))

    stacked = es.nn.Stacked([Block(2.0), Block(3.0)])
    (_, new), found = es.capture(stacked, outputs="*")(X)
    assert sorted(found) == ["", "layers", "layers.inner", "layers.out"]
    close(found["layers.out"], jnp.stack([2 * X, 60 * X]))
    close(found["layers"], 10 * found["layers.out"])
    assert new.layers.calls.tolist() == [1, 1]
    key = jr.key(0)  # a stack passes it only to layers that take a key
    close(es.capture(stacked, outputs="layers")(X, key=key)[0][0], found[""])


def test_layers_of_equinox_that_map_inside_and_decorated_calls():
    attention = eqx.nn.MultiheadAttention(2, 4, key=jr.key(0))
    _, found = es.capture(attention, outputs=eqx.nn.Linear)(*[jnp.ones((3, 4))] * 3)
    close(found["query_proj"], jax.vmap(attention.query_proj)(jnp.ones((3, 4))))
    assert list(found) == ["query_proj", "key_proj", "value_proj", "output_proj"]
    model = eqx.nn.Sequential([Times(), eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(0)])
    _, found = es.capture(eqx.filter_vmap(model), outputs="*layers*")(X)
    close(found["_fun.layers[2]"], jnp.tanh(2 * X))

    class Mapped(eqx.Module):
        layer: Times

        @es.vmap
        def __call__(self, x):
            return self.layer(x)

    _, found = es.capture(Mapped(Times()), outputs="layer")(X)
    close(found, {"layer": 2 * X})


def test_sown_values_are_in_the_order_of_sowing():
    _, sown = es.capture(es.jit(net(*[2.0] * 12)))(X)
    assert list(sown) == [f"layers[{i}].out" for i in range(12)]


def test_branches_may_sow_in_any_order():
    class Model(es.Module):
        def __call__(self, x):
            def a():
                self.sow("p", x)
                self.sow("q", 2 * x)

            def b():
                self.sow("q", 3 * x)
                self.sow("p", 4 * x)

            es.cond(x > 0, a, b)

    sown = [es.capture(Model())(x)[1] for x in (1.0, -1.0)]
    assert sown == [{"p": 1.0, "q": 2.0}, {"q": -3.0, "p": -4.0}]


# --- Gradients ------------------------------------------------------------------------


def loss_fn(model, x):
    return jnp.sum(model(x))


GRADIENTS = {
    "value_and_grad": es.value_and_grad(loss_fn),
    "grad": es.grad(loss_fn),
    "wrt": es.value_and_grad(loss_fn, wrt=es.under(lambda net: net.layers[0])),
    "jit inside": es.value_and_grad(es.jit(loss_fn)),
}


@pytest.mark.parametrize("f", GRADIENTS.values(), ids=GRADIENTS)
def test_a_captured_gradient_returns_values_next_to_its_result(f):
    model = net(2.0, 3.0)
    result, found = es.capture(f, outputs="layers[1]")(model, X)
    assert eqx.tree_equal(result, f(model, X))
    expected = es.capture(loss_fn, outputs="layers[1]")(model, X)[1]
    assert sorted(found) == ["layers[0].out", "layers[1]", "layers[1].out"]
    assert eqx.tree_equal(found, dict(expected))
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(found))


def test_gradients_of_partials_methods_and_other_kinds():
    model = net(2.0, 3.0)
    expected = es.capture(es.value_and_grad(loss_fn))(model, x=X)
    for f in (
        es.capture(ft.partial(es.value_and_grad(loss_fn), model)),
        es.capture(eqx.Partial(ft.partial(es.value_and_grad(loss_fn), x=1.0), model)),
    ):
        assert eqx.tree_equal(f(x=X), expected)

    class Trained(Scale):
        @ft.partial(es.capture, kinds=es.TreePart)
        @es.value_and_grad
        def loss(self, x):
            self.factor = 2 * self.factor
            return jnp.sum(self(x))

    (((loss, new), grads), sown) = Trained(2.0).loss(X)
    assert (loss, new.factor, grads.factor, list(sown)) == (24.0, 4.0, 12.0, ["out"])


def test_values_captured_inside_a_gradient_are_differentiable():
    def penalty(model, x):
        (y, model), found = es.capture(model, outputs="layers[0]")(x)
        return jnp.sum(y) + jnp.sum(found["layers[0]"] ** 2), (model, found)

    ((loss, (model, found)), _), grads = es.value_and_grad(penalty, has_aux=True)(
        net(2.0, 3.0), X
    )
    assert loss == 36 + 56
    assert grads.layers[0].factor == 18 + 56
    assert model.layers[0].calls == 1
    close(found["layers[1].out"], 6 * X)


class Trainer(es.Module):
    net: Net
    steps: es.State = 0

    def __call__(self, x):
        self.steps = self.steps + 1
        (loss, self.net), grads = es.value_and_grad(loss_fn)(self.net, x)
        return loss, grads


def test_a_gradient_inside_reports_outward_and_its_state_is_kept():
    trainer = Trainer(net(2.0, 3.0))
    (((loss, grads), new), found) = es.jit(es.capture(trainer, outputs=Scale))(X)
    run = es.capture(es.value_and_grad(loss_fn), outputs=Scale)
    result, expected = run(trainer.net, X)
    close(((loss, new.net), grads), result)
    assert (new.steps, new.net.layers[1].calls) == (1, 1)
    close(found, {f"net.{name}": x for name, x in expected.items()})
    assert len(found) == 4


def test_an_inner_gradient_reports_sown_values_without_outputs():
    def f(models, x):
        def loss(models):
            return es.checkpoint(models[0])(models[1](x)).sum()

        a, b = models
        (_, (a.net, b)), _ = es.value_and_grad(loss)((a.net, b))
        # A separate model reports nothing.
        return es.grad(loss_fn)(net(2.0), x)[0] and b

    for run in (f, lambda models, x: es.jit(f)(models, x)):
        _, found = es.capture(run)((Trainer(net(2.0)), net(3.0)), X)
        assert sorted(found) == ["[0].net.layers[0].out", "[1].layers[0].out"]


# --- Misuse ---------------------------------------------------------------------------


@pytest.mark.parametrize("around", [es.vmap, lambda f: eqx.Partial(es.jit(f))])
def test_capture_of_a_gradient_inside_a_transform_is_an_error(around):
    with pytest.raises(TypeError, match=r"es\.jit\(es\.capture\(es\.value_and_grad"):
        es.capture(around(es.grad(Scale())))


def test_argnums_belong_to_the_gradient():
    right = r"`es\.capture\(es\.value_and_grad\(loss, argnums=1\)\)`"
    with pytest.raises(TypeError, match=right):
        es.capture(es.value_and_grad(lambda x, m: m(x)), argnums=1)


FOREIGN = {
    "jax.jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "jax.grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jit in vmap": lambda f, x: jax.vmap(jax.jit(lambda x: f(x)))(x[None]),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_outputs_inside_other_transforms_of_jax_are_reported_as_missed(name):
    model = wrapped(FOREIGN[name], Times(jnp.array(2.0)))
    match = r"did not see what `layer` returned(?s:.*)with jax\.disable_jit\(\):"
    with pytest.raises(es.TraceError, match=match):
        es.capture(model, outputs="layer")(X)
    with pytest.warns(UserWarning, match=match) as warned:
        assert list(es.capture(model, outputs="*")(X)[1]) == [""]
    assert warned[0].filename == __file__
    assert es.capture(model)(X)[1] == {}  # `layer` is not selected
    if name != "jax.grad":
        with jax.disable_jit():
            assert list(es.capture(model, outputs="*")(X)[1]) == ["layer", ""]


LOOPS = {
    "while": lambda f, x: es.while_loop(lambda x: x.sum() < 50, f, x),
    "while test": lambda f, x: es.while_loop(
        lambda x: f(x).sum() < 5, lambda x: 2 * x, x
    ),
    "fori": lambda f, x: es.fori_loop(0, 3, lambda i, x: f(x), x),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_that_stacks_nothing_is_an_error(loop):
    for layer, options, match in (
        (Stateless(), {}, r"Cannot capture `layer\.out` in .* `es\.scan`, which"),
        (
            Times(),
            {"outputs": "layer"},
            "Cannot capture the output of `layer` in a step",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            es.capture(wrapped(loop, layer), **options)(X)


@pytest.mark.parametrize("times", [0, 2])
def test_branches_must_sow_and_call_equally_often(times):
    def apply(layer, x):
        def other(x):
            for _ in range(times):
                x = layer(x)
            return x

        return es.cond(x.sum() > 0, layer, other, x)

    for layer, options, match in (
        (Scale(), {}, r"capture `layer\.out`: the branches of `es\.cond`"),
        (Times(), {"outputs": "layer"}, "the output of `layer`: the branches"),
    ):
        with pytest.raises(ValueError, match=match):
            es.capture(wrapped(apply, layer), **options)(X)


@pytest.mark.parametrize("value", [{"a": object()}, np.array("a")])
def test_a_value_that_is_not_an_array_cannot_be_captured(value):
    for apply, name in (
        (lambda layer, x: layer.sow("it", (x, value)), r"`layer\.it`"),
        (lambda layer, x: (x, value), "the output of `the model`"),
    ):
        match = rf"{name}: only arrays, numbers and .*this is `\(f32\[3\], "
        with pytest.raises(TypeError, match=match):
            es.capture(wrapped(apply), outputs="")(X)


@leaks_on_purpose
def test_a_dead_tracer_cannot_be_captured():
    dead = []
    jax.vmap(lambda x: dead.append(x) or x)(X)
    for apply, name in (
        (lambda layer, x: layer.sow("dead", dead[0]), r"`layer\.dead`"),
        (lambda layer, x: dead[0], "the output of `the model`"),
    ):
        with pytest.raises(es.TraceError, match=f"{name}: it is a tracer"):
            es.capture(wrapped(apply), outputs="")(X)


def test_sowing_in_another_thread_is_an_error_and_not_lost():
    errors = []

    def apply(layer, x):
        def work():
            with pytest.raises(RuntimeError, match="different thread") as info:
                layer.sow("it", x)
            errors.append(info.value)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    es.capture(wrapped(apply))(X)
    assert len(errors) == 1


def test_the_name_is_a_string():
    model = wrapped(lambda layer, x: layer.sow(1, x))
    with pytest.raises(TypeError, match=r"`Scale\.sow`: the first argument must be"):
        es.capture(model)(X)


def test_an_output_and_a_sown_value_have_different_names():
    class Model(es.Module):
        norm: Any

        def __call__(self, x):
            self.sow("norm", x)
            return self.norm(x)

    with pytest.raises(ValueError, match=r"`norm` is a module whose output was"):
        es.capture(Model(Times()), outputs="*")(X)
    assert list(es.capture(Model(Times()), outputs="")(X)[1]) == ["norm", ""]
