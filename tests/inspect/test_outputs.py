"""`es.capture(f, outputs=..., replace=...)`: captured and replaced outputs."""

import dataclasses
import gc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close
from models import Net

import eqx_state as es


X = jnp.array([0.5, -1.0])
XS = jnp.stack([X, 2 * X, 3 * X])


def linear(key: int = 0) -> eqx.nn.Linear:
    return eqx.nn.Linear(2, 2, key=jr.key(key))


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 2, 3, 1, key=jr.key(0))


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


# --- Selecting modules ----------------------------------------------------------------


SELECTIONS = {
    "class": (eqx.nn.Linear, ["layers[0].inner", "layers[1].inner"]),
    "classes": ((Net, Layer), ["layers[0]", "layers[1]", ""]),
    "no such class": (eqx.nn.Conv, []),
    "glob": ("layers[?]", ["layers[0]", "layers[1]"]),
    "glob of all": (
        "*",
        ["layers[0].inner", "layers[0]", "layers[1].inner", "layers[1]", ""],
    ),
    "root": ("", [""]),
    "function": (lambda name, m: isinstance(m, Layer) and "1" in name, ["layers[1]"]),
}


@pytest.mark.parametrize("which", SELECTIONS)
def test_outputs_are_returned_by_name_together_with_sown_values(which):
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


def test_an_assigned_module_is_captured_by_its_new_path():
    class Model(es.Module):
        a: Any
        b: Any

        def __call__(self, x):
            self.a, self.b = Layer(self.b.inner), self.a
            return self.a(self.b(x))

    model = Model(Layer(linear(key=0)), Layer(linear(key=1)))
    (_, new), found = es.capture(model, outputs="a", kinds=es.TreePart)(X)
    close(found["a"], model.b.inner(model.a.inner(X)))
    assert eqx.tree_equal(new.b.inner, model.a.inner)


@pytest.mark.parametrize("options", [{"outputs": eqx.nn.Linear}, {"replace": {"": 0}}])
def test_a_model_without_modules_is_an_error(options):
    model = linear()
    message = (
        r"(?s)`es\.capture` looks into the model.*`f32\[2\]`, which.*es\.vmap\(model"
    )
    with pytest.raises(ValueError, match=message):
        es.capture(lambda x: model(x), **options)(X)


@pytest.mark.parametrize("which", [3, (eqx.nn.Linear, "a"), linear()])
def test_an_invalid_selection_is_an_error(which):
    with pytest.raises(TypeError, match=r"`outputs` must be a module class or a tuple"):
        es.capture(mlp(), outputs=which)


@pytest.mark.parametrize("name", ["mutable", "find_nonfinite"])
def test_a_transform_that_uses_its_own_copy_of_the_model_is_an_error(name):
    inner = getattr(es, name)(lambda model, x: model(x))
    for f in (es.jit(inner), eqx.Partial(inner, net())):
        with pytest.raises(TypeError, match="writable itself, as `es.mutable` does"):
            es.capture(f)(net(), X)


# --- How calls are intercepted --------------------------------------------------------


def test_during_the_call_a_module_has_the_fields_class_and_repr_of_its_class():
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
    # After the call, nothing is captured.
    assert jnp.array_equal(kept[0].eval()(X), kept[0].inner(X))
    assert eqx.tree_equal(out[0], new)


def test_init_subclass_of_a_class_does_not_run():
    made = []

    class Registered(es.Module):
        def __init_subclass__(cls, called, **kwargs):
            super().__init_subclass__(**kwargs)
            made.append(called)

    class Model(Registered, called="model"):
        def __call__(self, x):
            return x

    close(es.capture(Model(), outputs="")(X)[1], {"": X})
    assert made == ["model"]


def test_generated_classes_do_not_accumulate():
    class Own(es.Module):
        def __call__(self, x):
            return x

    for _ in range(3):
        es.capture(Own(), outputs="*")(X)
        es.tabulate(Own(), X)
        gc.collect()
        assert len(Own.__subclasses__()) == 1


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


# --- Compiled once --------------------------------------------------------------------


def test_a_jitted_function_inside_is_traced_once_for_all_captures():
    traces = []

    @es.jit
    def apply(layer, x):
        traces.append(1)
        return layer(x)

    def f(model, x):
        return apply(model.layers[1], apply(model.layers[0], x))

    model = eqx.nn.Sequential([linear(key=0), linear(key=1)])
    plain, _ = es.mutable(f)(model, X)
    count = len(traces)
    for scale in (1.0, 2.0):
        _, found = es.capture(f, outputs=eqx.nn.Linear)(model, scale * X)
        close(found["layers[0]"], model.layers[0](scale * X))
    # Two more: a tag with the path of each layer is part of the cache key.
    assert len(traces) == count + 2
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


# --- Replaced outputs -----------------------------------------------------------------


def test_a_value_replaces_an_output_and_is_captured():
    model = mlp()
    patch = jnp.array([1.0, 2.0, 3.0])
    for value in (patch, np.array(patch)):
        run = es.capture(model, outputs="layers*", replace={"layers[0]": value})
        for jit in (lambda f: f, es.jit):
            (y, new), found = jit(run)(X)
            close(found, {"layers[0]": patch, "layers[1]": model.layers[1](patch)})
            close(y, model.layers[1](patch))
            assert eqx.tree_equal(new, model)


def test_a_function_of_the_output_replaces_it():
    model = mlp()
    run = es.capture(
        es.vmap(model), outputs="*", replace={"layers[0]": lambda y: 2 * y}
    )
    (ys, _), found = es.jit(run)(XS)
    hidden = 2 * jax.vmap(model.layers[0])(XS)
    expected = jax.vmap(model.layers[1])(jax.nn.relu(hidden))
    close([found["layers[0]"], found[""], ys], [hidden, expected, expected])


def test_a_replaced_module_still_writes_its_state():
    (y, new), found = es.capture(net(), replace={"layers[1]": 0})(X)
    assert (y == 0.0).all()
    assert y.dtype == X.dtype
    assert [layer.calls for layer in new.layers] == [1, 1]
    assert list(found) == ["layers[0].doubled", "layers[1].doubled"]


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


class Scale(es.Module):
    factor: es.Parameter

    def __call__(self, x):
        return self.factor * x


class Shifted(es.Module):
    """A layer with a layer inside, and with state."""

    scale: Scale
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.scale(x) + 1


def stack_of_stacks():
    scales = jnp.array([[2.0, 3.0], [5.0, 7.0], [0.5, 0.25]])
    inner = [es.nn.Stacked([Shifted(Scale(x)) for x in row]) for row in scales]
    return es.nn.Stacked(inner, checkpoint=True)


STACKS = {
    "layers": (lambda: es.nn.Stacked([Shifted(Scale(x)) for x in (2.0, 3.0)]), "scale"),
    "unrolled": (
        lambda: es.nn.Stacked([Shifted(Scale(x)) for x in (2.0, 3.0)], unroll=True),
        "scale",
    ),
    "of stacks": (stack_of_stacks, "layers.scale"),
}


@pytest.mark.parametrize(("make", "name"), STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("jit", [lambda f: f, es.jit])
def test_in_a_stack_a_value_has_the_axis_of_the_layers_in_front(make, name, jit):
    stack = make()
    for of_layer in ("layers", f"layers.{name}"):
        (y, new), found = jit(es.capture(stack, outputs="layers*"))(X)
        # What was found changes nothing.
        run = es.capture(stack, outputs="layers*", replace={of_layer: found[of_layer]})
        close(jit(run)(X), ((y, new), found))
        # Each layer gets its own value.
        size = found[of_layer].size
        value = jnp.arange(float(size)).reshape(found[of_layer].shape)
        run = es.capture(es.vmap(stack), outputs="*", replace={of_layer: value})
        (ys, _), found = jit(run)(XS)
        close(found[of_layer], jnp.stack([value] * 3))
        last = value.reshape(-1, *X.shape)[-1]
        after = last + float(of_layer.endswith("scale"))  # of `Shifted`
        close(ys, jnp.stack([after] * 3))


def test_in_a_stack_a_value_without_the_axis_replaces_each_output():
    stack = es.nn.Stacked([Scale(2.0), Scale(3.0)])
    for value in (X, 1.0):
        _, found = es.capture(stack, outputs="*", replace={"layers": value})(5 * X)
        close(found["layers"], jnp.stack([value * jnp.ones(2)] * 2))
    with pytest.raises(ValueError, match="must have the same structure, shapes"):
        es.capture(stack, replace={"layers": jnp.stack([X] * 3)})(X)


def test_gradients_by_a_value_in_a_stack():
    stack = es.nn.Stacked([Shifted(Scale(2.0)), Shifted(Scale(3.0))])

    def loss(value):
        run = es.capture(stack, replace={"layers.scale": value})
        return run(X)[0][0].sum()

    # The next layer's output is replaced as well, so only the last value counts.
    grads = jax.grad(loss)(jnp.zeros((2, *X.shape)))
    close(grads, jnp.stack([0 * X, jnp.ones_like(X)]))


class Tied(es.Module):
    embed: eqx.nn.Linear
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return x @ self.embed.weight.T

    def encode(self, x):
        return self.embed(x)


def test_a_module_that_is_not_called_is_an_error():
    tied = Tied(linear())
    match = r'(?s)replace=\{"embed": \.\.\.\}.*: `embed` was never called'
    replace = {"": 1.0, "embed": 0.0}
    with pytest.raises(ValueError, match=match):
        es.jit(es.capture(tied, replace=replace))(X)
    grad = es.value_and_grad(lambda m, x: m(x).sum())
    with pytest.raises(ValueError, match=match):
        es.capture(grad, replace=replace)(tied, X)
    with pytest.raises(ValueError, match="`the model` was never called"):
        es.capture(tied.encode, replace={"": 0.0})(X)
    (y, _), _ = es.capture(tied.encode, replace={"embed": 0.0})(X)
    assert (y == 0).all()
    assert tied.calls == 0
    # A call in one branch, or in a loop, counts as a call.
    for f in (
        lambda m, x: es.cond(x[0] > 9, m, lambda x: x, x),
        lambda m, x: es.while_loop(lambda x: x[0] > 0, m, x),
    ):
        es.capture(f, replace={"": 0.0})(tied, X)


def test_a_replacement_of_a_different_structure_is_an_error():
    replaced = es.capture(eqx.nn.LSTMCell(2, 2, key=jr.key(0)), replace={"": [0.0]})
    state = jnp.zeros(2), jnp.zeros(2)
    with pytest.raises(ValueError, match="must have the same structure, shapes"):
        replaced(jnp.ones(2), state)


def test_a_module_that_the_call_creates_from_an_observed_one_has_its_own_class():
    class Layer(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return self.w * x

    def f(layer, x):
        return layer(x), dataclasses.replace(layer, w=layer.w + 1)

    layer = Layer(jnp.ones(3))
    ((y, new), _), found = es.capture(f, outputs=Layer)(layer, 2.0)
    assert type(new) is Layer
    assert eqx.tree_equal(new, Layer(jnp.ones(3) + 1))
    assert list(found) == [""]


def test_the_function_of_a_class_may_be_called_with_a_different_object():
    class Layer(es.Module):
        w: es.Parameter

        def __call__(self, x):
            return self.w * x

    class Sub(Layer):
        def __call__(self, x):
            return Layer.__call__(self, x) + 1

    class Both(es.Module):
        layer: Layer
        sub: Sub

        def __call__(self, x):
            layer, sub = type(self.layer).__call__, type(self.sub).__call__
            others = [layer(self.sub, x), layer(Layer(3.0), x), layer(Stub(), x)]
            copies = [layer(self.layer.eval(), x), sub(eqx.tree_at(w, self.sub, x), x)]
            return [layer(self.layer, x), sub(self.sub, x), *others, *copies]

    class Stub:
        w = 4.0

    def w(layer):
        return layer.w

    model, x = Both(Layer(1.0), Sub(2.0)), jnp.array(1.0)
    want = [1.0, 3.0, 2.0, 3.0, 4.0, 1.0, 2.0]
    assert [float(y) for y in model(x)] == want
    for outputs, names in [
        (Layer, {"layer", "sub"}),
        ("layer", {"layer"}),
        ("sub", {"sub"}),
        (Both, set()),  # whose function is called, and not the module
    ]:
        (out, _), found = es.jit(es.capture(Both.__call__, outputs=outputs))(model, x)
        assert [float(y) for y in out] == want
        assert found.keys() == names
        if outputs is Layer:  # first the copies, then the layers themselves
            assert found == {"layer": (1.0, 1.0), "sub": (2.0, 3.0)}
    bad = Both(Layer(jnp.nan), Sub(2.0))
    assert es.find_nonfinite(Both.__call__)(bad, x) == ["layer"]
