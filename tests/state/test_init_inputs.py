"""`init(key, *inputs)`: the forward pass fills what is missing."""

import collections
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_state as es


class Dense(es.Module):
    """Takes its size from the input."""

    size: int = eqx.field(static=True)
    w: es.Parameter | None = None
    calls: es.State = 0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def __call__(self, x):
        if self.initializing and self.w is None:
            shape = (self.size, x.shape[-1])
            self.w = es.Initializer(lambda key: jr.normal(key, shape))
        if self.training:
            self.calls = self.calls + 1
            _, self.rng = jr.split(self.rng)
        return self.w @ x


class Net(es.Module):
    layers: list
    stats: es.State[dict] = dataclasses.field(default_factory=dict)

    def __call__(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x)
        if self.initializing and not self.stats:
            self.stats = {"mean": jnp.zeros(x.shape)}
        return x * scale

    def encode(self, x):
        return self.layers[0](x)


def net():
    return Net([Dense(4), Dense(2)])


def test_shapes_come_from_the_inputs():
    model = net()
    new = model.init(0, jnp.ones(3))
    assert new.layers[0].w.shape == (4, 3)
    assert new.layers[1].w.shape == (2, 4)
    assert new.stats["mean"].shape == (2,)
    assert new.initialized
    assert model.layers[0].w is None
    assert not new.initializing


def test_it_only_fills_what_was_missing():
    model = net()
    kept = jnp.zeros((4, 3))
    model = Net([Dense(4, kept), Dense(2)])
    new = model.init(0, jnp.ones(3))
    assert new.layers[0].w is kept
    assert new.layers[1].w.shape == (2, 4)
    for layer, old in zip(new.layers, model.layers, strict=True):
        assert layer.calls == 0
        assert layer.rng == old.rng
    again = new.init(1, jnp.ones(3))
    assert eqx.tree_equal(again, new)


def test_the_keys_are_those_of_the_path():
    class Eager(es.Module):
        layers: list

    lazy = es.Initializer(lambda key: jr.normal(key, (4, 3)))
    eager = Eager([Dense(4, lazy), Dense(2)]).init(5)
    assert (net().init(5, jnp.ones(3)).layers[0].w == eager.layers[0].w).all()


def test_the_forward_pass_runs_once():
    runs = []

    class Counts(es.Module):
        w: es.Parameter | None = None

        def __call__(self, x, *, key=None):
            runs.append((self.initializing, self.training))
            if self.w is None:
                self.w = jnp.ones(x.shape)
            return x

    Counts().init(0, jnp.ones(3))
    assert runs == [(True, True)]
    Counts().eval().init(0, jnp.ones(3))
    assert runs[1:] == [(True, False)]
    Counts().init(0)
    assert len(runs) == 2
    model = Counts().init(0, jnp.ones(3))
    es.mutable(model)(jnp.ones(3))
    assert runs[3:] == [(False, True)]


def test_initializing_is_true_below_and_false_elsewhere():
    seen = {}

    class Sees(es.Module):
        def __call__(self, x):
            seen["call"] = self.initializing
            seen["copy"] = self.eval().initializing
            return x

        def module_init(self, key):
            pass

    model = eqx.nn.Lambda(Sees())
    es.init(model, 0, jnp.ones(1))
    assert seen["call"]
    assert not seen["copy"]
    assert not Sees().initializing
    assert es.mutable(lambda m: m.initializing)(Sees().init(0))[0] is False


def test_several_inputs_and_no_arrays():
    assert net().init(0, jnp.ones(3), 2.0).layers[0].w.shape == (4, 3)


# --- `call` -------------------------------------------------------------------------


def test_call_is_run_in_place_of_the_model():
    new = net().init(0, jnp.ones(3), call=lambda m, x: m.encode(x))
    assert new.layers[0].w.shape == (4, 3)
    assert new.layers[1].w is None
    new = net().init(0, jnp.ones(3), call=Net.encode)
    assert new.layers[0].w.shape == (4, 3)


def test_call_without_inputs():
    new = net().init(0, call=lambda m: m(jnp.ones(3)))
    assert new.layers[1].w.shape == (2, 4)


@pytest.mark.parametrize("closure", [False, True], ids=["argument", "closure"])
def test_call_maps_over_a_batch(closure):
    def call(model, xs):
        if closure:
            return es.vmap(lambda x: model(x), axis_name="batch")(xs)
        return es.vmap(model, axis_name="batch")(xs)

    new = net().init(0, jnp.ones((8, 3)), call=call)
    assert new.layers[0].w.shape == (4, 3)
    assert new.layers[1].w.shape == (2, 4)
    assert new.stats["mean"].shape == (2,)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(new))
    single = net().init(0, jnp.ones(3))
    assert (new.layers[0].w == single.layers[0].w).all()
    y, _ = es.mutable(lambda m, xs: jax.vmap(m.eval())(xs))(new, jnp.ones((8, 3)))
    assert y.shape == (8, 2)


def test_a_plain_transform_in_the_forward_pass_is_an_error():
    model = net()
    with pytest.raises(es.TraceError, match=r"Dense\.w"):
        model.init(0, jnp.ones((8, 3)), call=lambda m, xs: jax.vmap(m)(xs))
    assert model.layers[0].w is None


def test_a_model_that_is_not_callable():
    class Data(es.Module):
        w: es.Parameter = 1.0

    with pytest.raises(TypeError, match=r"`Data`.*call=lambda"):
        Data().init(0, jnp.ones(3))
    with pytest.raises(TypeError, match=r"call=lambda"):
        es.init([Data()], 0, jnp.ones(3))


def test_lists_of_models():
    new = es.init([Dense(2)], 0, jnp.ones(3), call=lambda ms, x: ms[0](x))
    assert new[0].w.shape == (2, 3)


# --- Around it ----------------------------------------------------------------------


def test_an_exception_leaves_the_model_alone():
    class Bad(Dense):
        def __call__(self, x):
            super().__call__(x)
            raise KeyError("half-way")

    model = Bad(4)
    with pytest.raises(KeyError, match="half-way"):
        model.init(0, jnp.ones(3))
    assert model.w is None


def test_filter_eval_shape_with_inputs():
    shapes = eqx.filter_eval_shape(net().init, jr.key(0), jnp.ones(3))
    assert shapes.layers[0].w == jax.ShapeDtypeStruct((4, 3), jnp.float32)
    assert shapes.stats["mean"].shape == (2,)
    by_shape = eqx.filter_eval_shape(
        net().init, 0, jax.ShapeDtypeStruct((3,), jnp.float32)
    )
    assert by_shape.layers[1].w.shape == (2, 4)


def test_under_jit():
    new = eqx.filter_jit(net().init)(jr.key(0), jnp.ones(3))
    assert new.layers[1].w.shape == (2, 4)
    traces = []

    @eqx.filter_jit
    def step(model, x):
        traces.append(1)
        return es.mutable(model)(x)[1]

    for _ in range(3):
        new = step(new, jnp.ones(3))
    assert new.layers[0].calls == 3
    assert len(traces) == 1


def test_hooks_and_initializers_come_before_the_forward_pass():
    order = []

    class All(es.Module):
        a: es.Parameter
        b: es.Parameter | None = None
        c: es.Parameter | None = None

        def module_init(self, key):
            order.append("hook")
            self.b = jnp.ones(2)

        def __call__(self, x):
            order.append("call")
            assert self.a.shape == self.b.shape
            if self.c is None:
                self.c = jnp.ones(x.shape)
            return x

    draw = es.Initializer(lambda key: order.append("draw") or jnp.ones(2))
    new = All(draw).init(0, jnp.ones(3))
    assert order == ["draw", "hook", "call"]
    assert new.c.shape == (3,)


through = pytest.mark.parametrize(
    "transform",
    [lambda f: f, es.jit, lambda f: es.vmap(f, in_axes=None, axis_size=4)],
    ids=["eager", "jit", "vmap"],
)


@through
def test_a_module_made_in_the_forward_pass_is_initialized(transform):
    class Outer(es.Module):
        inner: Dense | None = None
        layer: eqx.nn.Linear | None = None

        def __call__(self, x):
            if self.inner is None:
                self.inner = Dense(5)
                self.layer = es.lazy(eqx.nn.Linear, x.shape[0], 2)
            return self.inner(x), self.layer(x)

    new = Outer().init(0, jnp.ones(3), call=lambda m, x: transform(m)(x))
    assert new.inner.w.shape == (5, 3)
    assert new.layer.weight.shape == (2, 3)
    assert new.inner.calls.dtype == jnp.int32
    (y, _), new = es.mutable(new)(jnp.ones(3))
    assert y.shape == (5,)


@through
def test_a_module_of_as_many_leaves_takes_the_place_of_another(transform):
    class One(es.Module):
        a: es.State = 1

    class Other(es.Module):
        b: es.State = 2

    class Outer(es.Module):
        inner: eqx.Module | None = None

        def replace(self):
            self.inner = Other()

        def __call__(self):
            self.inner = One()
            transform(self.replace)()
            assert self.inner.b == 2

    assert es.init(Outer(), 0, call=lambda m: m()).inner.b == 2


@pytest.mark.parametrize("transform", [lambda f: f, es.vmap], ids=["eager", "vmap"])
def test_the_hook_of_a_module_made_in_the_forward_pass_runs_after_it(transform):
    order = []

    class Hooked(es.Module):
        def module_init(self, key):
            order.append("hook")

        def __call__(self, x):
            order.append("call")
            return x

    class Outer(es.Module):
        inner: Hooked | None = None

        def __call__(self, x):
            if self.inner is None:
                self.inner = Hooked()
            return transform(self.inner)(x)

    assert Outer().init(0, jnp.ones(3)).initialized
    assert order == ["call", "hook"]


@pytest.mark.parametrize(
    "run",
    [
        lambda f, x: es.scan(lambda c, x: (c, f(x)), None, x[None])[1][0],
        lambda f, x: es.fori_loop(0, 2, lambda i, x: f(x), x),
        lambda f, x: es.while_loop(lambda x: x.sum() < 0, f, x),
        lambda f, x: es.cond(True, f, f, x),
        lambda f, x: es.vmap(f)(x[None])[0],
    ],
    ids=["scan", "fori_loop", "while_loop", "cond", "vmap"],
)
def test_functions_among_the_leaves(run):
    class Net(es.Module):
        mlp: eqx.nn.MLP  # holds its activation

        def __init__(self):
            self.mlp = es.lazy(eqx.nn.MLP, 3, 3, 4, 1)

        def __call__(self, x):
            return run(self.mlp, x)

    x = jnp.ones(3)
    net = Net().init(0, x)
    assert eqx.tree_equal(net, Net().init(0))
    np.testing.assert_allclose(run(net.mlp, x), es.mutable(net)(x)[0], rtol=1e-6)


@pytest.mark.parametrize("holes", [None, [], [None], [None, [None]], {}, {"a": None}])
def test_a_container_of_holes_becomes_what_the_forward_pass_makes_of_it(holes):
    class Net(es.Module):
        layers: object

        def __call__(self, x):
            if self.initializing:
                self.layers = [Dense(2), Dense(3), Dense(4)]
            for layer in self.layers:
                x = layer(x)
            return x

    net = Net(holes).init(0, jnp.ones(3))
    assert [layer.w.shape for layer in net.layers] == [(2, 3), (3, 2), (4, 3)]


def test_a_dict_keeps_its_class_and_its_factory_and_gets_new_keys():
    class Net(es.Module):
        layers: dict
        own: es.Parameter | None = None

        def __call__(self, x):
            if self.own is None:
                self.own = x
                self.layers = self.layers | {"c": x}
            return x

    x = jnp.ones(2)
    layers = collections.defaultdict(list, {"a": x, "b": None})
    new = Net(layers).init(0, x)
    assert isinstance(new.layers, collections.defaultdict)
    assert new.layers.default_factory is list
    assert (new.own.shape, new.layers["a"].shape, new.layers["b"]) == ((2,), (2,), None)
    assert new.layers["c"].shape == (2,)


def test_what_is_not_an_array_is_not_kept_when_a_transform_writes_it():
    class Layer(es.Module):
        phase: es.State = "cold"
        weight: es.Parameter | None = None

        def __call__(self, x):
            self.phase = "warm"
            if self.weight is None:
                self.weight = jnp.ones(x.shape)
            return self.weight * x

    class Net(es.Module):
        layer: Layer

        def __call__(self, xs):
            return es.vmap(self.layer)(xs)

    net = Net(Layer()).init(0, jnp.ones((2, 3)))
    assert net.layer.weight.shape == (3,)
    assert net.layer.phase == "cold"
    with pytest.raises(ValueError, match=r"`layer.phase` was changed from `'cold'`"):
        es.mutable(net)(jnp.ones((2, 3)))


@pytest.mark.parametrize("lifted", [es.vmap, es.jit, es.checkpoint])
def test_an_array_of_numpy_stays_a_shape_in_a_transform(lifted):
    class Zeros(es.Module):
        shape: es.Buffer
        w: es.Parameter | None = None

        def __call__(self, x):
            if self.initializing and self.w is None:
                self.w = jnp.ones([int(n) for n in self.shape])
            return self.w * jnp.sum(x)

    model = Zeros(np.array([2, 3])).init(
        0, jnp.ones((4, 1)), call=lambda m, x: lifted(m)(x)
    )
    assert model.w.shape == (2, 3)
    assert type(model.shape) is np.ndarray


@pytest.mark.parametrize("reverse", [False, True])
def test_init_sees_the_step_with_which_a_loop_begins(reverse):
    class Shift(es.Module):
        first: es.State | None = None

        def __call__(self, x):
            if self.initializing and self.first is None:
                self.first = x
            return x - self.first

    def run(model, xs):
        return es.scan(lambda c, x: (c, model(x)), None, xs, reverse=reverse)[1]

    model = Shift().init(0, jnp.array([1.0, 2.0, 4.0]), call=run)
    assert model.first == (4.0 if reverse else 1.0)
