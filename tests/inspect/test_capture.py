"""`es.capture` and `self.sow`: values on the way, through every transform."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import leaks_on_purpose, untouched

import eqx_state as es


class Scale(es.Module):
    factor: es.Parameter = 2.0
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        y = self.factor * x
        self.sow("out", y)
        return y


class Net(es.Module):
    layers: list[Scale]

    def __init__(self, *factors):
        self.layers = [Scale(x) for x in factors]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Wrapped(es.Module):
    """A layer called through a transform: `apply(layer, x)`."""

    layer: Scale
    apply: object = eqx.field(static=True)

    def __call__(self, x):
        return self.apply(self.layer, x)


def wrapped(apply, factor=2.0):
    return Wrapped(Scale(factor), apply)


X = jnp.array([1.0, 2.0, 3.0])


def test_what_is_sown_comes_out_by_path_beside_what_mutable_returns():
    net = Net(2.0, 3.0)
    (y, new), sown = es.capture(net)(X)
    expected_y, expected = es.mutable(net)(X)
    assert eqx.tree_equal((y, new), (expected_y, expected))
    assert list(sown) == ["layers[0].out", "layers[1].out"]
    assert jnp.array_equal(sown["layers[0].out"], 2 * X)
    assert jnp.array_equal(sown["layers[1].out"], 6 * X)


def test_without_capture_sowing_does_nothing_and_leaves_no_trace_in_the_program():
    class Quiet(Scale):
        def sow(self, name, value):
            pass

    y, new = es.mutable(Scale())(X)
    assert new.calls == 1
    programs = [
        str(jax.make_jaxpr(lambda x, m=m: es.mutable(m)(x)[0])(X))
        for m in (Scale(), Quiet())
    ]
    assert programs[0] == programs[1]
    assert Scale().sow("out", 1.0) is None
    assert Scale().sow("out", object()) is None


@pytest.mark.parametrize("f", [es.capture, lambda f: eqx.filter_jit(es.capture(f))])
def test_the_model_is_untouched(f):
    net = Net(2.0, 3.0)
    with untouched(net):
        f(net)(X)


def test_a_method_a_function_and_a_tuple_of_models_are_called_as_by_mutable():
    a, b = Scale(2.0), Net(3.0)
    (_, _), sown = es.capture(a.__call__)(X)
    assert list(sown) == ["out"]
    (y, (a, b)), sown = es.capture(lambda models, x: models[1](models[0](x)))((a, b), X)
    assert list(sown) == ["[0].out", "[1].layers[0].out"]
    assert a.calls == 1
    assert jnp.array_equal(y, sown["[1].layers[0].out"])


def test_what_is_sown_several_times_is_a_tuple():
    net = wrapped(lambda layer, x: layer(layer(x)))
    _, sown = es.capture(net)(X)
    first, second = sown["layer.out"]
    assert jnp.array_equal(first, 2 * X)
    assert jnp.array_equal(second, 4 * X)


def test_any_pytree_of_arrays_and_numbers_can_be_sown():
    class Sower(es.Module):
        key: es.Rng

        def __call__(self):
            self.sow("many", {"a": (1, 2.5, None), "n": np.ones(2), "key": self.key})

    _, sown = es.capture(Sower(jr.key(0)))()
    many = sown["many"]
    assert many["a"][0] == 1
    assert many["a"][1] == 2.5
    assert many["a"][2] is None
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(many))
    assert many["key"] == jr.key(0)


def test_an_array_that_is_written_into_afterwards_was_sown_as_it_was():
    class Sower(es.Module):
        def __call__(self):
            x = np.ones(2)
            self.sow("x", x)
            x[:] = 0

    _, sown = es.capture(Sower())()
    assert sown["x"].tolist() == [1, 1]


# --- Through transforms ---------------------------------------------------------------


def by_loop(layer, xs):
    return jnp.stack([layer.factor * x for x in xs])


THROUGH = {
    "jit": lambda layer, x: es.jit(layer)(x),
    "jit of a closure": lambda layer, x: es.jit(lambda x: layer(x))(x),
    "checkpoint": lambda layer, x: es.checkpoint(layer)(x),
    "jit of checkpoint": lambda layer, x: es.jit(es.checkpoint(layer))(x),
    "cond": lambda layer, x: es.cond(x.sum() > 0, layer, layer, x),
    "switch": lambda layer, x: es.switch(1, [layer, layer, layer], x),
}


@pytest.mark.parametrize("name", THROUGH)
@pytest.mark.parametrize("outer", [es.capture, lambda f: es.jit(es.capture(f))])
def test_it_comes_out_of_a_transform_as_without_it(name, outer):
    (y, new), sown = outer(wrapped(THROUGH[name]))(X)
    assert jnp.array_equal(sown["layer.out"], 2 * X)
    assert jnp.array_equal(y, 2 * X)
    assert new.layer.calls == 1


STACKED = {
    "vmap": lambda layer, xs: es.vmap(layer)(xs),
    "scan": lambda layer, xs: es.scan(lambda c, x: (c, layer(x)), None, xs)[1],
    "scan backwards": lambda layer, xs: es.scan(
        lambda c, x: (c, layer(x)), None, xs, reverse=True
    )[1],
    "scan of jit": lambda layer, xs: es.scan(
        lambda c, x: (c, es.jit(layer)(x)), None, xs
    )[1],
    "vmap of scan": lambda layer, xs: es.vmap(
        lambda row: es.scan(lambda c, x: (c, layer(x)), None, row[None])[1][0]
    )(xs),
}


@pytest.mark.parametrize("name", STACKED)
def test_it_is_stacked_by_lane_or_step(name):
    class Stateless(Scale):
        def __call__(self, x):
            y = self.factor * x
            self.sow("out", y)
            return y

    net = Wrapped(Stateless(2.0), STACKED[name])
    (ys, _), sown = es.capture(net)(X)
    expected = by_loop(net.layer, X)
    assert jnp.array_equal(sown["layer.out"].reshape(-1), expected)
    assert sown["layer.out"].shape[0] == 3
    assert jnp.array_equal(ys, expected)


def test_what_all_lanes_sow_alike_is_stacked_too():
    class Sower(es.Module):
        def __call__(self, x):
            self.sow("constant", jnp.ones(2))
            return x

    _, sown = es.capture(es.vmap(Sower()))(X)
    assert sown["constant"].shape == (3, 2)


def test_a_scanned_stack_of_layers_sows_under_the_name_of_the_stack():
    class Stack(es.Module):
        blocks: Scale

        def __call__(self, x):
            return es.scan(lambda x, block: (block(x), None), x, self.blocks)[0]

    blocks = eqx.filter_vmap(Scale)(jnp.array([2.0, 3.0]))
    (y, new), sown = es.capture(Stack(blocks))(1.0)
    assert sown["blocks.out"].tolist() == [2.0, 6.0]
    assert y == 6.0
    assert new.blocks.calls.tolist() == [1, 1]


def test_a_layer_that_is_called_in_two_transforms_sows_a_tuple():
    net = wrapped(
        lambda f, x: es.checkpoint(f)(x) + es.vmap(f.factor.__mul__)(x) + f(x)
    )
    _, sown = es.capture(net)(X)
    assert [x.shape for x in sown["layer.out"]] == [(3,), (3,)]


def test_a_module_in_the_carry_sows():
    def apply(layer, xs):
        layer, ys = es.scan(lambda layer, x: (layer, layer(x)), layer, xs)
        return ys

    _, sown = es.capture(wrapped(apply))(X)
    assert jnp.array_equal(sown["layer.out"], 2 * X)


def test_one_jitted_function_is_traced_with_and_without_capture():
    @es.jit
    def apply(layer, x):
        return layer(x)

    net = wrapped(apply)
    for _ in range(2):
        y, _ = es.mutable(net)(X)
        (y2, _), sown = es.capture(net)(X)
        assert list(sown) == ["layer.out"]
        assert jnp.array_equal(y, y2)


def loss_fn(net, x):
    return jnp.sum(net(x))


GRADIENTS = {
    "value_and_grad": es.value_and_grad(loss_fn),
    "grad": es.grad(loss_fn),
    "wrt": es.value_and_grad(loss_fn, wrt=es.under(lambda net: net.layers[0])),
    "jit inside": es.value_and_grad(es.jit(loss_fn)),
    "checkpoint inside": es.value_and_grad(es.checkpoint(loss_fn)),
}


@pytest.mark.parametrize("f", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("jit", [lambda f: f, es.jit, eqx.filter_jit])
def test_what_is_sown_in_a_loss_comes_out_beside_what_the_gradient_returns(f, jit):
    net = Net(2.0, 3.0)
    result, sown = jit(es.capture(f))(net, X)
    assert eqx.tree_equal(result, jit(f)(net, X))
    _, expected = es.capture(loss_fn)(net, X)
    assert list(sown) == ["layers[0].out", "layers[1].out"]
    assert eqx.tree_equal(sown, expected)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(sown))


def test_the_lanes_of_a_loss_are_stacked_and_its_state_comes_back():
    @es.jit
    @es.capture
    @ft.partial(es.value_and_grad, has_aux=True)
    def step(net, xs):
        ys = es.vmap(lambda x: net(x))(xs)
        net.layers[0](1.0)
        return jnp.sum(ys), "aux"

    net = Net(2.0, 3.0)
    (((loss, aux), new), grads), sown = step(net, X)
    assert (loss, aux) == (36.0, "aux")
    assert [layer.calls for layer in new.layers] == [2, 1]
    assert grads.layers[0].factor == 18.0
    first, again = sown["layers[0].out"]
    assert (first.tolist(), again) == ([2.0, 4.0, 6.0], 2.0)
    assert sown["layers[1].out"].tolist() == [6.0, 12.0, 18.0]


def test_a_gradient_with_arguments_of_a_partial_captures():
    net = Net(2.0, 3.0)
    expected = es.capture(es.value_and_grad(loss_fn))(net, x=X)
    for f in (
        es.capture(ft.partial(es.value_and_grad(loss_fn), net)),
        es.capture(eqx.Partial(ft.partial(es.value_and_grad(loss_fn), x=1.0), net)),
        es.capture(es.value_and_grad(ft.partial(loss_fn, net))),
    ):
        assert eqx.tree_equal(f(x=X), expected)


def test_a_decorated_method_captures_beside_its_gradient():
    class Trained(Scale):
        @es.capture
        @es.value_and_grad
        def loss(self, x):
            return jnp.sum(self(x))

    (((loss, new), grads), sown) = Trained(2.0).loss(X)
    assert (loss, new.calls, grads.factor, list(sown)) == (12.0, 1, 6.0, ["out"])


def test_kinds_of_a_captured_gradient_are_those_that_may_be_written():
    def grow(layer, x):
        layer.factor = 2 * layer.factor
        return jnp.sum(layer(x))

    (((_, new), grads), _) = es.capture(es.value_and_grad(grow), kinds=es.TreePart)(
        Scale(2.0), X
    )
    assert (new.factor, grads.factor) == (4.0, 12.0)


def test_it_can_be_captured_inside_of_a_gradient_by_who_threads_the_state():
    def loss_fn(net, x):
        (y, net), sown = es.capture(net)(x)
        return jnp.sum(y), (net, sown)

    ((loss, (net, sown)), _), grads = es.value_and_grad(loss_fn, has_aux=True)(
        Net(2.0, 3.0), X
    )
    assert jnp.array_equal(sown["layers[1].out"], 6 * X)
    assert grads.layers[0].factor == 18
    assert net.layers[0].calls == 1


def test_it_is_a_pytree_that_filter_jit_traces_once():
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def look(captured, x):
        return captured(x)

    for factor in (2.0, 3.0):
        _, sown = look(es.capture(Net(factor)), X)
        assert jnp.array_equal(sown["layers[0].out"], factor * X)


def test_a_decorated_method_captures():
    class Looking(es.Module):
        layer: Scale

        @es.capture
        def look(self, x):
            return self.layer(x)

    (y, new), sown = Looking(Scale(2.0)).look(X)
    assert list(sown) == ["layer.out"]
    assert new.layer.calls == 1


def test_kinds_are_those_that_may_be_written():
    class Trains(es.Module):
        weight: es.Parameter

        def __call__(self):
            self.weight = self.weight + 1
            self.sow("weight", self.weight)

    (_, new), sown = es.capture(Trains(1.0), kinds=es.Parameter)()
    assert new.weight == sown["weight"] == 2


def test_initializing_sows_nothing():
    class Lazy(es.Module):
        weight: es.Parameter = es.Initializer(lambda key: jr.normal(key, (3,)))

        def __call__(self, x):
            self.sow("x", x)
            return self.weight * x

    model = Lazy().init(0, X)
    _, sown = es.capture(model)(X)
    assert list(sown) == ["x"]


# --- Misuse ---------------------------------------------------------------------------


@pytest.mark.parametrize("f", [es.mutable, es.capture, es.find_nonfinite])
@pytest.mark.parametrize("around", [lambda f: f, es.jit, eqx.Partial])
def test_a_transform_with_a_copy_of_its_own_is_rejected(f, around):
    with pytest.raises(TypeError, match=r"es\.capture\(model\)\(x\)      # right"):
        es.capture(around(f(Scale())))


@pytest.mark.parametrize("f", [es.grad, es.value_and_grad])
@pytest.mark.parametrize("around", [es.jit, es.vmap, lambda f: eqx.Partial(es.jit(f))])
def test_a_gradient_inside_of_another_transform_is_rejected(f, around):
    with pytest.raises(TypeError, match=r"es\.jit\(es\.capture\(es\.value_and_grad"):
        es.capture(around(f(Scale())))


@pytest.mark.parametrize("f", [es.grad, es.value_and_grad])
def test_argnums_are_those_of_the_gradient(f):
    right = rf"es\.capture\(es\.{f.__name__}\(loss, argnums=1\)\)     # right"
    with pytest.raises(TypeError, match=right):
        es.capture(f(lambda x, m: m(x)), argnums=1)


IN_PLAIN_TRANSFORMS = {
    "at once": lambda layer, x: layer.sow("out", x),
    "jit": lambda layer, x: es.jit(lambda x: layer.sow("out", x))(x),
    "checkpoint": lambda layer, x: es.checkpoint(lambda x: layer.sow("out", x))(x),
}


@pytest.mark.parametrize("f", IN_PLAIN_TRANSFORMS.values(), ids=IN_PLAIN_TRANSFORMS)
def test_sowing_in_a_plain_transform_is_an_error_that_names_ours(f):
    net = wrapped(lambda layer, x: jax.vmap(lambda x: f(layer, x))(x))
    with pytest.raises(es.TraceError, match=r"Cannot sow `layer\.out` here: this"):
        es.capture(net)(X)


def test_without_capture_sowing_in_a_plain_transform_does_nothing():
    net = wrapped(lambda layer, x: jax.vmap(lambda x: layer.sow("it", x) or x)(x))
    assert jnp.array_equal(es.mutable(net)(X)[0], X)


@pytest.mark.parametrize("transform", [es.jit, es.checkpoint, es.vmap])
def test_the_order_is_that_of_sowing(transform):
    net = Net(*[2.0] * 12)
    _, sown = es.capture(transform(net))(X)
    assert list(sown) == [f"layers[{i}].out" for i in range(12)]


LOOPS = {
    "while": lambda layer, x: es.while_loop(lambda x: x.sum() < 50, layer, x),
    "while test": lambda layer, x: es.while_loop(
        lambda x: layer.sow("out", x) is not None or x.sum() < 5, lambda x: 2 * x, x
    ),
    "fori": lambda layer, x: es.fori_loop(0, 3, lambda i, x: layer(x), x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_stacks_nothing_cannot_sow(name):
    with pytest.raises(ValueError, match=r"`layer\.out` was sown .* `es\.scan` stacks"):
        es.capture(wrapped(LOOPS[name]))(X)


@pytest.mark.parametrize("times", [0, 2])
def test_branches_sow_alike(times):
    def apply(layer, x):
        def other(x):
            for _ in range(times):
                x = layer(x)
            return x

        return es.cond(x.sum() > 0, layer, other, x)

    with pytest.raises(ValueError, match=r"`layer\.out` was sown in one branch of `es"):
        es.capture(wrapped(apply))(X)


@pytest.mark.parametrize("value", ["text", jnp.sin, {"a": object()}, np.array("a")])
def test_what_is_no_array_cannot_be_sown(value):
    net = wrapped(lambda layer, x: layer.sow("it", value))
    with pytest.raises(TypeError, match=r"Cannot sow `layer\.it`: arrays, numbers and"):
        es.capture(net)(X)


def test_the_error_shows_what_was_sown_with_short_arrays():
    net = wrapped(lambda layer, x: layer.sow("it", (x, "text")))
    with pytest.raises(TypeError, match=r"this is `\(f32\[3\], 'text'\)`"):
        es.capture(net)(X)


def test_after_the_call_a_module_that_was_kept_sows_nothing():
    kept = []
    net = wrapped(lambda layer, x: kept.append(layer) or layer(x))
    _, sown = es.capture(net)(X)
    kept[0].sow("late", 1.0)
    assert list(sown) == ["layer.out"]


def test_a_failed_call_leaves_nothing_behind():
    net = wrapped(lambda layer, x: layer(x) + jnp.ones((7, 7)))
    with (
        untouched(net),
        pytest.raises((TypeError, ValueError), match="shape|broadcast"),
    ):
        es.capture(net)(X)
    assert list(es.capture(Scale())(X)[1]) == ["out"]


@pytest.mark.parametrize("name", [1, None, jnp.ones(2)])
def test_the_name_is_a_string(name):
    net = wrapped(lambda layer, x: layer.sow(name, x))
    with pytest.raises(TypeError, match=r"`Scale\.sow`: the name is not a string"):
        es.capture(net)(X)


@leaks_on_purpose
def test_a_dead_tracer_cannot_be_sown():
    def apply(layer, x):
        dead = []
        jax.vmap(lambda x: dead.append(x) or x)(x)
        layer.sow("dead", dead[0])

    with pytest.raises(es.TraceError, match=r"`layer\.dead`: it is a tracer"):
        es.capture(wrapped(apply))(X)


def test_a_constant_comes_out_of_checkpoint_as_an_array():
    def apply(layer, x):
        def constant(x):
            layer.sow("one", 1)
            return jnp.array(2)

        return es.checkpoint(constant)(x)

    (y, _), sown = es.capture(wrapped(apply))(X)
    assert isinstance(y, jax.Array)
    assert isinstance(sown["layer.one"], jax.Array)


def test_errors_about_kinds_name_the_function():
    with pytest.raises(TypeError, match=r"`es\.capture\(\.\.\., kinds=3\)`"):
        es.capture(Scale(), kinds=3)


def test_branches_may_sow_in_any_order():
    class Net(es.Module):
        n: es.State = 0

        def __call__(self, x):
            def a():
                self.sow("p", x)
                self.sow("q", 2 * x)
                return x

            def b():
                self.sow("q", 3 * x)
                self.sow("p", 4 * x)
                return x

            return es.cond(x > 0, a, b)

    sown = [es.capture(Net())(x)[1] for x in (1.0, -1.0)]
    assert sown == [{"p": 1.0, "q": 2.0}, {"q": -3.0, "p": -4.0}]
