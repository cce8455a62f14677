"""`es.capture(f, outputs=...)`: what modules return, Equinox's own included."""

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


X = jnp.array([0.5, -1.0])
XS = jnp.stack([X, 2 * X, 3 * X])


def linear(i: int = 2, o: int = 2, key: int = 0) -> eqx.nn.Linear:
    return eqx.nn.Linear(i, o, key=jr.key(key))


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 2, 3, 1, key=jr.key(0))


def by_hand(model, x):
    """The outputs of the two layers of `mlp()`."""
    hidden = model.layers[0](x)
    return hidden, model.layers[1](jax.nn.relu(hidden))


class Layer(es.Module):
    inner: eqx.nn.Linear
    calls: es.State = 0

    def __call__(self, x):
        if self.training:
            self.calls = self.calls + 1
        y = self.inner(x)
        self.sow("doubled", 2 * y)
        return y


def net() -> Net:
    return Net([Layer(linear(key=0)), Layer(linear(key=1))])


def test_a_layer_that_takes_no_key_is_given_none_while_it_is_observed():
    stacked = es.nn.Stacked([Layer(linear()), Layer(linear())])
    key = jr.key(0)  # a stack gives it only to layers that take one
    (y, _), found = es.capture(stacked, outputs="layers")(X, key=key)
    close(y, es.mutable(stacked)(X, key=key)[0])
    assert found["layers"].shape == (2, 2)


# --- What is selected -----------------------------------------------------------------


SELECTIONS = {
    "class": (eqx.nn.Linear, ["layers[0].inner", "layers[1].inner"]),
    "classes": ((Net, Layer), ["layers[0]", "layers[1]", ""]),
    "base class": (es.Module, ["layers[0]", "layers[1]", ""]),
    "glob": ("layers[?]", ["layers[0]", "layers[1]"]),
    "glob of all": (
        "*",
        ["layers[0].inner", "layers[0]", "layers[1].inner", "layers[1]", ""],
    ),
    "name": ("layers[1]", ["layers[1]"]),
    "root": ("", [""]),
    "function": (lambda name, m: isinstance(m, Layer) and "1" in name, ["layers[1]"]),
}


@pytest.mark.parametrize("which", SELECTIONS)
def test_outputs_come_out_by_name_beside_what_is_sown(which):
    selection, names = SELECTIONS[which]
    model = net()
    (y, new), found = es.capture(model, outputs=selection)(X)
    assert [name for name in found if not name.endswith("doubled")] == names
    assert eqx.tree_equal((y, new), es.mutable(model)(X))
    first = model.layers[0].inner(X)
    expected = {"layers[0].inner": first, "layers[0]": first, "": y, "layers[1]": y}
    for name in set(names) & set(expected):
        close(found[name], expected[name])
    assert jnp.array_equal(found["layers[0].doubled"], 2 * first)


def test_a_class_that_no_module_has_selects_nothing():
    (_, _), found = es.capture(mlp(), outputs=eqx.nn.Conv)(X)
    assert found == {}


@pytest.mark.parametrize(
    ("model", "names"), [({}, "none"), (eqx.nn.Dropout(0.1), '`""`')]
)
def test_a_glob_that_matches_nothing_is_an_error_with_the_names(model, names):
    message = r'(?s)outputs="layer\[0\]"\)` matches no module.* The names are '
    with pytest.raises(ValueError, match=message + names):
        es.capture(lambda m: X, outputs="layer[0]")(model)


@pytest.mark.parametrize("options", [{"outputs": eqx.nn.Linear}, {"replace": {"": 0}}])
def test_a_model_without_modules_is_an_error_since_nothing_would_be_seen(options):
    model = linear()
    message = (
        r"(?s)`es\.capture` looks into the model.*`f32\[2\]` here.*es\.vmap\(model"
    )
    with pytest.raises(ValueError, match=message):
        es.capture(lambda x: model(x), **options)(X)


def test_a_model_before_its_init_is_an_error_that_says_so():
    model = {"a": es.lazy(eqx.nn.Linear, 2, 2)}
    with pytest.raises(es.NotInitializedError, match="before it is initialized"):
        es.capture(lambda m, x: m["a"](x), outputs="*")(model, X)


def test_a_message_does_not_list_a_thousand_layers():
    model = [eqx.nn.Identity() for _ in range(100)]
    with pytest.raises(ValueError, match=r'`"\[19\]"`, \.\.\.'):
        es.capture(lambda m: X, outputs="no")(model)


@pytest.mark.parametrize(
    "which", [3, [eqx.nn.Linear], (eqx.nn.Linear, "a"), jnp.ones(2)]
)
def test_what_selects_nothing_is_an_error(which):
    with pytest.raises(TypeError, match=r"`outputs` is a module class or a tuple"):
        es.capture(mlp(), outputs=which)


# --- Without leaving a trace ----------------------------------------------------------


def test_models_of_plain_equinox_stay_what_they_are():
    model = mlp()
    with untouched(model):
        (y, new), found = es.capture(model, outputs="*")(X)
    assert list(found) == ["layers[0]", "layers[1]", ""]
    close([found["layers[0]"], found["layers[1]"]], list(by_hand(model, X)))
    assert eqx.tree_equal(new, model)
    assert [type(x) for _, x in es.modules(new)] == [
        type(x) for _, x in es.modules(model)
    ]
    assert jnp.array_equal(y, model(X))


def test_in_the_call_a_module_has_its_classes_fields_and_repr():
    class Model(es.Module):
        layer: eqx.nn.Linear
        stats: es.State = 0

        def __call__(self, x):
            assert isinstance(self.layer, eqx.nn.Linear)
            assert type(self.layer).__name__ == "Linear"
            assert repr(self.layer) == shown
            assert es.modules(self)[1][0] == "layer"
            self.stats = self.stats + 1
            other = self.layer.__class__(2, 2, key=jr.key(1))
            return other(self.layer(x))

    shown = repr(linear())
    (_, new), found = es.capture(Model(linear()), outputs=(Model, eqx.nn.Linear))(X)
    assert list(found) == ["layer", ""]
    assert new.stats == 1


def test_without_outputs_no_class_changes():
    def f(model, x):
        assert type(model.layers[0]) is Layer
        assert type(model.layers[0].inner) is eqx.nn.Linear
        return model(x)

    _, found = es.capture(f)(net(), X)
    assert list(found) == ["layers[0].doubled", "layers[1].doubled"]


def test_modules_that_are_returned_kept_or_sown_are_ordinary():
    kept = []

    class Model(es.Module):
        layer: Layer

        def __call__(self, x):
            kept.append(self.layer)
            self.layer(x)
            self.sow("part", self.layer.inner)
            return self, [self.layer.inner]

    ((out, new), found) = es.capture(Model(Layer(linear())), outputs=eqx.nn.Linear)(X)
    assert [*found] == ["layer.inner", "layer.doubled", "part"]
    for x in (out, new, found["part"]):
        assert {type(m) for _, m in es.modules(x)} <= {Model, Layer, eqx.nn.Linear}
    assert jnp.array_equal(kept[0].eval()(X), kept[0].inner(X))  # sees no capture
    assert eqx.tree_equal(out[0], new)


def test_modules_may_be_assigned_and_moved_in_the_call():
    class Model(es.Module):
        a: Layer
        b: Layer

        def __call__(self, x):
            x = self.a(x)
            self.a, self.b = self.b, self.a
            return self.a(x)

    model = Model(Layer(linear(key=0)), Layer(linear(key=1)))
    run = es.capture(model, outputs=Layer, kinds=es.TreePart)
    (_, new), found = run(X)
    first = model.a.inner(X)
    assert jnp.array_equal(found["a"][0], first)
    assert jnp.array_equal(found["a"][1], model.b.inner(first))
    assert eqx.tree_equal(new.b.inner, model.a.inner)


def test_a_module_that_is_assigned_is_seen_and_one_that_moves_out_is_not():
    class Model(es.Module):
        a: Any
        b: Any

        def __call__(self, x):
            self.a, self.b = Layer(self.b.inner), self.a
            return self.a(self.b(x))

    model = Model(Layer(linear(key=0)), Layer(linear(key=1)))
    _, found = es.capture(model, outputs="a", kinds=es.TreePart)(X)
    close(found["a"], model.b.inner(model.a.inner(X)))


# --- Through transforms ---------------------------------------------------------------


LIKE = {
    "plain": lambda f, x: f(x),
    "es.jit": lambda f, x: es.jit(f)(x),
    "es.checkpoint": lambda f, x: es.checkpoint(f)(x),
    "es.cond": lambda f, x: es.cond(x.sum() > 0, f, f, x),
    "es.switch": lambda f, x: es.switch(1, [f, f], x),
    "es.value_and_grad": lambda f, x: es.value_and_grad(
        lambda x, f: f(x).sum(), argnums=1
    )(x, f)[0][0],
    "es.grad": lambda f, x: es.grad(lambda f: f(x).sum())(f)[0] and None,
    "es.mutable": lambda f, x: es.mutable(f)(x)[0],
}
STACKED = {
    "jax.vmap": lambda f, xs: jax.vmap(f)(xs),
    "es.vmap": lambda f, xs: es.vmap(f)(xs),
    "eqx.filter_vmap": lambda f, xs: eqx.filter_vmap(f)(xs),
    "jax.vmap, axes": lambda f, xs: jax.vmap(f, in_axes=1, out_axes=1)(xs.T),
    "es.scan": lambda f, xs: es.scan(lambda c, x: (c, f(x)), None, xs)[1],
    "jax.vmap of es.jit": lambda f, xs: jax.vmap(es.jit(f))(xs),
    "jax.vmap of es.checkpoint": lambda f, xs: jax.vmap(es.checkpoint(f))(xs),
    "jax.vmap of es.grad": lambda f, xs: jax.vmap(
        lambda x: es.grad(lambda f: f(x).sum())(f)[0] and x
    )(xs),
    "es.jit of jax.vmap": lambda f, xs: es.jit(jax.vmap(f))(xs),
    "jax.vmap of a closure": lambda f, xs: jax.vmap(lambda x: f(x))(xs),
}


@pytest.mark.parametrize("name", LIKE)
@pytest.mark.parametrize("outer", [lambda f: f, es.jit])
def test_an_output_comes_out_of_a_transform_as_without_it(name, outer):
    model = mlp()
    run = outer(es.capture(LIKE[name], outputs="layers[?]", argnums=0))
    _, found = run(model, X)
    close([found["layers[0]"], found["layers[1]"]], list(by_hand(model, X)))


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("outer", [lambda f: f, es.jit])
def test_an_output_is_stacked_by_lane_or_step(name, outer):
    model = mlp()
    run = outer(es.capture(STACKED[name], outputs="layers[?]", argnums=0))
    _, found = run(model, XS)
    expected = jax.vmap(lambda x: by_hand(model, x))(XS)
    close([found["layers[0]"], found["layers[1]"]], list(expected))


NESTED = {
    "es of jax": lambda f, x: es.vmap(jax.vmap(f))(x),
    "jax of es": lambda f, x: jax.vmap(es.vmap(f))(x),
    "jax of jax": lambda f, x: jax.vmap(lambda x: jax.vmap(f)(x))(x),
    "jax of jit of jax": lambda f, x: jax.vmap(es.jit(jax.vmap(f)))(x),
    "scan of jax": lambda f, x: es.scan(lambda c, x: (c, jax.vmap(f)(x)), 0, x),
    "jax of scan": lambda f, x: jax.vmap(
        lambda x: es.scan(lambda c, x: (c, f(x)), 0, x)
    )(x),
}


@pytest.mark.parametrize("name", NESTED)
def test_of_two_axes_the_outer_one_is_first(name):
    model, x = mlp(), jnp.stack([XS, -XS])
    _, found = es.capture(NESTED[name], outputs="layers[1]")(model, x)
    expected = jax.vmap(jax.vmap(lambda x: by_hand(model, x)[1]))(x)
    close(found["layers[1]"], expected)


@pytest.mark.parametrize("vmap", [jax.vmap, es.vmap], ids=["jax", "es"])
def test_what_all_lanes_return_alike_is_stacked_too(vmap):
    def f(model, xs):
        return vmap(lambda x: x + model(X))(xs)

    (_, _), found = es.capture(f, outputs="")(linear(), XS)
    close(found[""], jnp.stack([linear()(X)] * 3))


def test_a_layer_that_is_called_twice_has_a_tuple():
    model = linear()
    _, found = es.capture(lambda m, x: m(m(x)), outputs="")(model, X)
    close(list(found[""]), [model(X), model(model(X))])


def test_layers_of_equinox_that_map_and_scan_inside():
    attention = eqx.nn.MultiheadAttention(2, 4, key=jr.key(0))
    _, found = es.capture(attention, outputs=eqx.nn.Linear)(*[jnp.ones((3, 4))] * 3)
    close(found["query_proj"], jax.vmap(attention.query_proj)(jnp.ones((3, 4))))
    assert list(found) == ["query_proj", "key_proj", "value_proj", "output_proj"]
    model = eqx.nn.Sequential([linear(), eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(0)])
    _, found = es.capture(eqx.filter_vmap(model), outputs="*layers*")(XS)
    close(found["_fun.layers[2]"], jax.vmap(model)(XS))


def test_state_and_outputs_come_out_together():
    model = [es.nn.BatchNorm(2, axis_name="batch"), es.nn.Dropout(0.5, key=jr.key(3))]
    model = eqx.nn.Sequential(model)
    run = es.capture(es.vmap(model, axis_name="batch"), outputs="*")
    plain = es.mutable(es.vmap(model, axis_name="batch"))(XS)
    (result, found), again = run(XS), es.jit(run)(XS)
    close(result, plain)
    close(again[0], plain)
    close(found[""], plain[0])
    close(found, again[1])
    assert list(found) == ["layers[0]", "layers[1]", ""]


def test_frozen_and_in_eval_mode():
    for model in (net().eval(), net().freeze()):
        _, found = es.capture(es.vmap(model), outputs=Layer)(XS)
        assert found["layers[1]"].shape == (3, 2)


def test_two_models_methods_and_partials():
    class Model(Net):
        def encode(self, x, scale):
            return scale * self.layers[0](x)

    model = Model([linear(), linear()])
    for f in (model.encode, ft.partial(model.encode, scale=2.0)):
        kwargs = {} if isinstance(f, ft.partial) else {"scale": 2.0}
        _, found = es.capture(f, outputs="*")(X, **kwargs)
        assert list(found) == ["layers[0]"]
    models = linear(key=1), [linear(key=2)]
    run = es.capture(lambda ms, x: ms[1][0](ms[0](x)), outputs="*")
    assert list(run(models, X)[1]) == ["[0]", "[1][0]"]


def test_typed_keys_numbers_trees_and_numpy_arrays_are_outputs():
    class Many(es.Module):
        stream: es.RngStream

        def __call__(self, x):
            out = {"x": x, "n": 3, "none": None, "np": np.ones(2), "key": self.stream()}
            return out

    model = Many(es.RngStream(0))
    (out, _), found = es.capture(model, outputs="*")(X)
    assert found[""]["key"] == out["key"] == found["stream"]
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(found))


def test_keys_are_stacked_by_lane():
    class Split(eqx.Module):
        def __call__(self, key):
            return jr.fold_in(key, 1)

    _, found = es.capture(lambda m, k: jax.vmap(m)(k), outputs="")(
        Split(), jr.split(jr.key(0), 3)
    )
    assert found[""].shape == (3,)


def test_the_output_with_equinox_state():
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "b", mode="batch")
    run = jax.vmap(layer, axis_name="b", in_axes=(0, None), out_axes=(0, None))
    _, found = es.capture(
        lambda m, x, s: jax.vmap(
            m, axis_name="b", in_axes=(0, None), out_axes=(0, None)
        )(x, s),
        outputs="",
    )(layer, XS, state)
    close(found[""][0], run(XS, state)[0])


def test_a_captured_output_is_differentiable():
    def penalty(model, x):
        (y, _), found = es.capture(lambda m, x: jax.vmap(m)(x), outputs="layers[0]")(
            model, x
        )
        return jnp.sum(y) + jnp.sum(found["layers[0]"] ** 2)

    def expected(model, x):
        hidden, y = jax.vmap(lambda x: by_hand(model, x))(x)
        return jnp.sum(y) + jnp.sum(hidden**2)

    model = mlp()
    close(es.grad(penalty)(model, XS)[0], es.grad(expected)(model, XS)[0])


# --- Gradients ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outer", [lambda f: f, es.jit, eqx.filter_jit], ids=["plain", "es", "eqx"]
)
def test_outputs_in_a_loss_come_out_beside_gradients_and_state(outer):
    def loss_fn(model, xs):
        return jnp.mean(jax.vmap(model.layers[0].inner)(xs)) + jnp.mean(model(xs[0]))

    model = net()
    run = outer(es.capture(es.value_and_grad(loss_fn), outputs=eqx.nn.Linear))
    (((loss, new), grads), found) = run(model, XS)
    close(((loss, new), grads), es.value_and_grad(loss_fn)(model, XS))
    assert new.layers[0].calls == 1
    lanes, once = found["layers[0].inner"]
    close(lanes, jax.vmap(model.layers[0].inner)(XS))
    close(once, model.layers[0].inner(X))


def loss_of_net(model, x):
    return jnp.sum(model(x))


class Trainer(es.Module):
    net: Net
    steps: es.State = 0

    def __call__(self, x):
        self.steps = self.steps + 1
        (loss, self.net), grads = es.value_and_grad(loss_of_net)(self.net, x)
        return loss, grads


@pytest.mark.parametrize("outer", [lambda f: f, es.jit])
def test_a_gradient_inside_reports_outward_and_its_state_is_kept(outer):
    trainer = Trainer(net())
    (((loss, grads), new), found) = outer(es.capture(trainer, outputs=Layer))(X)
    (result, sown) = es.capture(es.value_and_grad(loss_of_net), outputs=Layer)(
        trainer.net, X
    )
    close(((loss, new.net), grads), result)
    assert (new.steps, new.net.layers[1].calls) == (1, 1)
    close(found, {f"net.{name}": x for name, x in sown.items()})
    assert len(found) == 4


def test_without_outputs_a_gradient_inside_reports_what_is_sown():
    def f(models, x):
        def loss_fn(models):
            return es.checkpoint(models[0])(models[1](x)).sum()

        a, b = models
        (_, (a.net, b)), _ = es.value_and_grad(loss_fn)((a.net, b))
        return es.grad(loss_of_net)(net(), x)[0] and b  # another model says nothing

    def call(models, x):
        return es.jit(f)(models, x)

    for run in (f, call):
        (_, _), found = es.capture(run)((Trainer(net()), net()), X)
        assert sorted(found) == [
            "[0].net.layers[0].doubled",
            "[0].net.layers[1].doubled",
            "[1].layers[0].doubled",
            "[1].layers[1].doubled",
        ]


def test_a_gradient_of_two_models_reports_the_one_that_is_captured():
    def f(model, x):
        def loss_fn(models):
            return sum(loss_of_net(model, x) for model in models)

        ((loss, (_, new)), _) = es.value_and_grad(loss_fn)((net(), model))
        return loss, new

    _, found = es.capture(f)(net(), X)
    assert list(found) == ["layers[0].doubled", "layers[1].doubled"]


def test_a_gradient_in_a_gradient_inside_reports_to_the_outermost():
    def f(trainer, x):
        def outer_loss(trainer):
            (loss, trainer.net), _ = es.value_and_grad(loss_of_net)(trainer.net, x)
            return loss

        return es.value_and_grad(outer_loss)(trainer)[0][0]

    _, found = es.capture(f, outputs="net.layers[0]")(Trainer(net()), X)
    assert sorted(found) == [
        "net.layers[0]",
        "net.layers[0].doubled",
        "net.layers[1].doubled",
    ]


def test_gradients_accumulated_inside_report_each_time():
    def f(model, xs):
        total = 0.0
        for x in xs:
            (loss, model), _ = es.value_and_grad(loss_of_net)(model, x)
            total = total + loss
        return total, model

    ((_, new), _), found = es.capture(f, outputs="layers[1]")(net(), XS)
    assert new.layers[0].calls == 3
    assert len(found["layers[1]"]) == 3


def test_sowing_in_a_gradient_in_a_plain_transform_is_an_error():
    def f(model, xs):
        return jax.vmap(lambda x: es.value_and_grad(loss_of_net)(model, x)[0][0])(xs)

    with pytest.raises(es.TraceError, match=r"Cannot sow `layers\[0\]\.doubled` here"):
        es.capture(f)(net(), XS)


# --- Captures in captures, threads ----------------------------------------------------


def test_an_inner_capture_has_its_own_names_and_the_outer_one_sees_the_calls_too():
    def run(model, x):
        (y, new), inner = es.capture(model.layers[0], outputs="*")(x)
        model.layers = [new, model.layers[1]]
        return model.layers[1](y), inner

    model = net()
    ((_, inner), new), found = es.capture(run, outputs=eqx.nn.Linear)(model, X)
    assert sorted(inner) == ["", "doubled", "inner"]
    close(found["layers[0].inner"], inner["inner"])
    assert list(found) == ["layers[0].inner", "layers[1].inner", "layers[1].doubled"]
    assert [layer.calls for layer in new.layers] == [1, 1]


def test_a_stack_of_layers_has_one_name_for_all():
    stacked = es.nn.Stacked([Layer(linear(key=i)) for i in range(3)])
    (_, new), found = es.capture(stacked, outputs="*")(X)
    x = X
    for i, layer in enumerate(stacked):
        x = layer.inner(x)
        close(found["layers.inner"][i], x)
    assert found["layers"].shape == (3, 2)
    assert new.layers.calls.tolist() == [1, 1, 1]
    assert es.find_nonfinite(stacked)(X) == []


def test_other_transforms_carry_outputs():
    @es.custom_vjp
    def custom(model, x):
        return model(x)

    custom.defvjp(lambda m, x: (m(x), x), lambda x, g: (None, g))
    runs = (
        lambda m, x: es.vjp(m, x)[0],
        lambda m, x: es.jacrev(m)(x),
        lambda m, x: es.hessian(lambda x: m(x).sum())(x),
        lambda m, x: custom(m, x),
        lambda m, x: es.value_and_grad(lambda m, x: custom(m, x).sum())(m, x)[1],
    )
    for run in runs:
        _, found = es.capture(run, outputs="")(linear(), X)
        close(found, {"": linear()(X)})


def test_decorated_calls_are_seen():
    class Jitted(es.Module):
        layer: eqx.nn.Linear

        @es.jit
        def __call__(self, x):
            return self.layer(x)

    class Mapped(eqx.Module):
        layer: eqx.nn.Linear

        @es.vmap
        def __call__(self, x):
            return self.layer(x)

    _, found = es.capture(Jitted(linear()), outputs="*")(X)
    close(found, {"layer": linear()(X), "": linear()(X)})
    _, found = es.capture(Mapped(linear()), outputs="*")(XS)
    close(found["layer"], jax.vmap(linear())(XS))


def test_threads_capture_at_once():
    model, found, barrier = mlp(), {}, threading.Barrier(2)

    class Waiting(es.Module):
        net: eqx.nn.MLP

        def __call__(self, x):
            barrier.wait()
            y = jax.vmap(self.net)(x)
            barrier.wait()
            return y

    def run(name, which, x):
        _, found[name] = es.capture(Waiting(model), outputs=which)(x)

    inputs = {"a": ("net.layers[0]", XS), "b": ("net.layers[1]", -XS)}
    threads = [
        threading.Thread(target=run, args=(name, *args))
        for name, args in inputs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close(found["a"], {"net.layers[0]": jax.vmap(model.layers[0])(XS)})
    assert list(found["b"]) == ["net.layers[1]"]
    assert eqx.nn.Linear.__call__.__qualname__ == "Linear.__call__"


def test_a_call_in_another_thread_is_an_error_and_not_lost():
    errors = []

    def f(model, x):
        def call():
            try:
                model.layers[0](x)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return x

    for model in (mlp(), net()):
        es.capture(f, outputs="layers[0]")(model, X)
    assert len(errors) == 2
    assert all("was called in another thread" in error for error in errors)


def test_after_an_error_nothing_is_observed():
    def fails(model, x):
        model(x)
        raise KeyError("mine")

    model = mlp()
    with untouched(model), pytest.raises(KeyError, match="mine"):
        es.capture(fails, outputs="*")(model, X)
    assert list(es.capture(model, outputs=eqx.nn.MLP)(X)[1]) == [""]


# --- Compiled once --------------------------------------------------------------------


def test_a_jitted_function_inside_is_traced_once_for_all_captures():
    traces = []

    @es.jit
    def apply(layer, x):
        traces.append(1)
        return layer(x)

    def f(model, x):
        return apply(model.layers[1], apply(model.layers[0], x))

    model = [linear(key=0), linear(key=1)]
    model = eqx.nn.Sequential(model)
    plain, _ = es.mutable(f)(model, X)
    count = len(traces)
    for scale in (1.0, 2.0):
        _, found = es.capture(f, outputs=eqx.nn.Linear)(model, scale * X)
        close(found["layers[0]"], model.layers[0](scale * X))
    assert len(traces) == count + 2  # the layers know their names
    close(es.mutable(f)(model, X)[0], plain)
    assert len(traces) == count + 2


def test_a_jitted_capture_is_traced_once():
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def look(captured, x):
        return captured(x)

    for key in (0, 1):
        model = linear(key=key)
        run = es.capture(model, outputs=eqx.nn.Linear, replace={"": 2 * model(X)})
        _, found = look(run, X)
        close(found[""], 2 * model(X))


def test_without_arguments_that_are_modules_a_jitted_function_is_not_stale():
    model = linear()
    double = es.jit(lambda x: 2 * x)

    def f(model, x):
        return double(model(x))

    for _ in range(2):
        close(es.mutable(f)(model, X)[0], 2 * model(X))
        close(es.capture(f, outputs="")(model, X)[1], {"": model(X)})


# --- In other transforms --------------------------------------------------------------


FOREIGN = {
    "jax.jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "eqx.filter_jit": lambda f, x: eqx.filter_jit(f)(x),
    "jax.checkpoint": lambda f, x: jax.checkpoint(lambda x: f(x))(x),
    "jax.lax.scan": lambda f, x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None]),
    "jax.lax.cond": lambda f, x: jax.lax.cond(True, lambda: f(x), lambda: x),
    "jax.lax.while_loop": lambda f, x: jax.lax.while_loop(
        lambda x: False, lambda x: f(x), x
    ),
    "jax.grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jax.jvp": lambda f, x: jax.jvp(lambda x: f(x), (x,), (x,)),
    "jax.eval_shape": lambda f, x: jax.eval_shape(lambda x: f(x), x),
    "jit in vmap": lambda f, x: jax.vmap(jax.jit(lambda x: f(x)))(x[None]),
    "jit in jit": lambda f, x: jax.jit(lambda x: es.jit(f)(x))(x),
}


@leaks_on_purpose
@pytest.mark.parametrize("name", FOREIGN)
def test_in_another_transform_of_jax_it_is_an_error_that_names_ours(name):
    match = r"(?s)output of `layers\[0\]` here.*`es\.jit`.*`es\.scan`.*es\.value_and"
    with pytest.raises(es.TraceError, match=match):
        es.capture(FOREIGN[name], outputs="layers[0]")(Net([linear()]), X)
    # Modules that are not selected are not affected.
    _, found = es.capture(FOREIGN[name])(Net([linear()]), X)
    assert found == {}


@pytest.mark.parametrize(
    "loop",
    [
        lambda f, x: es.while_loop(lambda x: x.sum() < 50, lambda x: f(x) + 40.0, x),
        lambda f, x: es.fori_loop(0, 3, lambda i, x: f(x), x),
        lambda f, x: es.while_loop(lambda x: f(x).sum() < -9, lambda x: x, x),
    ],
    ids=["while", "fori", "test of while"],
)
def test_a_loop_that_stacks_nothing_is_an_error(loop):
    with pytest.raises(ValueError, match=r"The output of `the model` was captured in"):
        es.capture(loop, outputs="")(linear(), X)


def test_branches_call_alike():
    def f(model, x):
        return es.cond(x.sum() > 0, model.layers[0], lambda x: x, x)

    match = r"output of `layers\[0\]` was captured in one branch of `es\.cond`"
    with pytest.raises(ValueError, match=match):
        es.capture(f, outputs="*")(Net([linear()]), X)


def test_what_is_not_an_array_is_an_error_that_names_the_module():
    class Texts(eqx.Module):
        def __call__(self, x):
            return x, "mean"

    match = r"output of `the model`: arrays.*this is `\(f32\[2\], 'mean'\)`"
    with pytest.raises(TypeError, match=match):
        es.capture(Texts(), outputs="")(X)


@leaks_on_purpose
def test_a_dead_tracer_is_an_error():
    dead = []
    jax.vmap(lambda x: dead.append(x) or x)(X)
    with pytest.raises(es.TraceError, match="output of `the model`: it is a tracer"):
        es.capture(eqx.nn.Lambda(lambda x: dead[0]), outputs="")(X)


def test_an_output_and_a_sown_value_have_different_names():
    class Model(es.Module):
        norm: Any

        def __call__(self, x):
            self.sow("norm", x)
            return self.norm(x)

    model = Model(linear())
    with pytest.raises(ValueError, match=r"`norm` is a module whose output was"):
        es.capture(model, outputs="*")(X)
    assert list(es.capture(model, outputs="")(X)[1]) == ["norm", ""]


def test_a_class_that_cannot_be_subclassed_is_an_error():
    class Meta(type(es.Module)):
        def __new__(cls, name, bases, body, *, size):
            return super().__new__(cls, name, bases, body)

    class Odd(es.Module, metaclass=Meta, size=1):
        def __call__(self, x):
            return x

    with pytest.raises(
        TypeError, match=r"cannot see the calls of `\['a'\]`, a `.*Odd`"
    ):
        es.capture(lambda m, x: m["a"](x), outputs="*")({"a": Odd()}, X)
    assert es.capture(lambda m, x: m["a"](x))({"a": Odd()}, X)[1] == {}


# --- Replaced outputs -----------------------------------------------------------------


def test_a_value_takes_the_place_of_an_output_and_is_shown():
    model = mlp()
    patch = jnp.array([1.0, 2.0, 3.0])
    run = es.capture(model, outputs="layers*", replace={"layers[0]": patch})
    (y, new), found = run(X)
    close(found, {"layers[0]": patch, "layers[1]": model.layers[1](patch)})
    close(y, model.layers[1](patch))
    assert eqx.tree_equal(new, model)


@pytest.mark.parametrize("vmap", [jax.vmap, es.vmap], ids=["jax", "es"])
@pytest.mark.parametrize("outer", [lambda f: f, es.jit])
def test_a_function_of_the_output_takes_its_place(vmap, outer):
    model = mlp()
    run = es.capture(
        lambda m, xs: vmap(m)(xs), outputs="*", replace={"layers[0]": lambda y: 2 * y}
    )
    (ys, _), found = outer(run)(model, XS)
    hidden = 2 * jax.vmap(model.layers[0])(XS)
    expected = jax.vmap(model.layers[1])(jax.nn.relu(hidden))
    close([found["layers[0]"], found[""], ys], [hidden, expected, expected])


def test_a_replaced_module_still_writes_its_state():
    (y, new), found = es.capture(net(), replace={"layers[1]": 0})(X)
    assert (y == 0.0).all()
    assert y.dtype == X.dtype
    assert [layer.calls for layer in new.layers] == [1, 1]
    assert list(found) == ["layers[0].doubled", "layers[1].doubled"]


def test_gradients_flow_around_what_is_replaced():
    run = es.capture(es.value_and_grad(loss_of_net), replace={"layers[1]": 3.0})
    ((loss, _), grads), _ = run(net(), X)
    assert loss == 6.0
    assert all((x == 0).all() for x in jax.tree.leaves(grads))


def test_replacing_works_where_nothing_can_be_stacked():
    def f(model, x):
        return es.fori_loop(0, 2, lambda i, x: model(x), x)

    (y, _), found = es.capture(f, replace={"": lambda y: y + 1.0})(eqx.nn.Identity(), X)
    close(y, X + 2)
    assert found == {}


def test_each_call_has_its_own_replacement_also_in_compiled_functions():
    for jit in (es.jit, eqx.filter_jit):
        apply = jit(lambda layer, x: layer(x))
        for value in (1.0, 2.0):
            run = es.capture(lambda m, x, f=apply: f(m, x), replace={"": value})
            assert (run(linear(), X)[0][0] == value).all()


def test_outputs_that_are_trees_are_replaced_by_trees():
    class Pair(eqx.Module):
        def __call__(self, x):
            return x, jr.key(0)

    new = 0, jr.key(7)
    (out, _), _ = es.capture(Pair(), replace={"": new})(X)
    assert (out[0] == 0).all()
    assert out[1] == jr.key(7)
    (out, _), _ = es.capture(Pair(), replace={"": lambda out: "anything"})(X)
    assert out == "anything"


def test_an_array_of_numpy_is_what_jax_makes_of_it():
    for jit in (es.jit, lambda f: f):
        run = jit(es.capture(linear(), outputs="", replace={"": np.full(2, 0.5)}))
        (y, _), found = run(X)
        assert (y == 0.5).all()
        assert (found[""] == 0.5).all()


@pytest.mark.parametrize(
    "value",
    [
        jnp.ones(3),
        jnp.ones(2, int),
        (X, X),
        "text",
        None,
        jnp.ones((3, 2)),
        1j,
        jax.ShapeDtypeStruct((2,), jnp.float32),
    ],
    ids=["shape", "dtype", "tree", "text", "none", "lanes", "number", "abstract"],
)
def test_a_value_that_does_not_fit_is_an_error(value):
    match = r"the output of `\[0\]` is `f32\[2\]`, and a value in its place"
    with pytest.raises(ValueError, match=match):
        es.capture(lambda m, x: m[0](x), replace={"[0]": value})([linear()], X)


@pytest.mark.parametrize(
    "name", ["layer[0]", "layers", "layers[0].weight", "activation"]
)
def test_an_unknown_name_is_an_error_with_the_names(name):
    match = r'no module of this name .* are `""`, `"layers\[0\]"`, `"layers\[1\]"`\.'
    with pytest.raises(ValueError, match=match):
        es.capture(mlp(), replace={name: 0.0})(X)
    with pytest.raises(ValueError, match=match):
        es.capture(es.value_and_grad(lambda m, x: m(x).sum()), replace={name: 0.0})(
            mlp(), X
        )


class Tied(es.Module):
    embed: eqx.nn.Linear
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return x @ self.embed.weight.T

    def encode(self, x):
        return self.embed(x)


@pytest.mark.parametrize("outer", [lambda f: f, es.jit])
def test_a_module_that_is_not_called_is_an_error(outer):
    tied = Tied(linear())
    match = r'(?s)replace=\{"embed": \.\.\.\}.*: `embed` was never called'
    replace = {"": 1.0, "embed": 0.0}
    with pytest.raises(ValueError, match=match):
        outer(es.capture(tied, replace=replace))(X)
    grad = es.value_and_grad(lambda m, x: m(x).sum())
    with pytest.raises(ValueError, match=match):
        outer(es.capture(grad, replace=replace))(tied, X)
    with pytest.raises(ValueError, match="`the model` was never called"):
        es.capture(tied.encode, replace={"": 0.0})(X)
    (y, _), _ = es.capture(tied.encode, replace={"embed": 0.0})(X)
    assert (y == 0).all()
    assert tied.calls == 0
    # One branch of several, and a loop, are calls.
    replace = {"": 0.0}
    for f in (
        lambda m, x: es.cond(x[0] > 9, m, lambda x: x, x),
        lambda m, x: es.while_loop(lambda x: x[0] > 0, m, x),
    ):
        es.capture(f, replace=replace)(tied, X)


def test_a_module_selects_nothing():
    with pytest.raises(
        TypeError, match=r"outputs=Linear\(\.\.\.\)\)`: .* a module class"
    ):
        es.capture(mlp(), outputs=mlp().layers[0])


def test_a_function_that_selects_takes_a_name_and_a_module():
    for which in (lambda m: True, lambda a, b, c: True):
        with pytest.raises(TypeError, match="with the name of a module and the module"):
            es.capture(mlp(), outputs=which)
    for which in (lambda name, *rest: True, min, ft.partial(lambda a, b, c: True, 1)):
        es.capture(mlp(), outputs=which)


@pytest.mark.parametrize("replace", [3, ["layers[0]"], {0: 1.0}])
def test_replace_is_a_mapping_from_names(replace):
    with pytest.raises(TypeError, match=r"`replace` is a mapping from names"):
        es.capture(mlp(), replace=replace)


def test_a_layer_of_a_stack_has_no_name_of_its_own():
    stack = es.nn.Stacked.make(
        lambda k: eqx.nn.Linear(2, 2, key=k), jr.split(jr.key(0), 2)
    )
    match = r"The layers of an `es\.nn\.Stacked` have one name"
    with pytest.raises(ValueError, match=match):
        es.capture(stack, outputs="[0]")(jnp.ones(2))
    with pytest.raises(ValueError, match=match):
        es.capture(stack, replace={"[0]": 0.0})(jnp.ones(2))
