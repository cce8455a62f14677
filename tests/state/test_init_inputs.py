"""`init(key, *inputs)`: the forward pass sets fields that are missing."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import leaks_on_purpose, rejects

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


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


def net():
    return Net([Dense(4), Dense(2)])


def test_init_sets_only_missing_values():
    kept = jnp.zeros((4, 3))
    model = Net([Dense(4, kept), Dense(2)])
    new = model.init(0, jnp.ones(3))
    assert new.layers[0].w is kept
    assert new.layers[1].w.shape == (2, 4)
    for layer, old in zip(new.layers, model.layers, strict=True):
        assert layer.calls == 0
        assert layer.rng == old.rng
    assert eqx.tree_equal(new.init(1, jnp.ones(3)), new)


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


def test_call_maps_over_a_batch():
    def call(model, xs):
        return es.vmap(lambda x: model(x), axis_name="batch")(xs)

    new = net().init(0, jnp.ones((8, 3)), call=call)
    assert new.layers[0].w.shape == (4, 3)
    assert new.layers[1].w.shape == (2, 4)
    assert new.stats["mean"].shape == (2,)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(new))
    assert (new.layers[0].w == net().init(0, jnp.ones(3)).layers[0].w).all()


# --- Order, new modules, containers -------------------------------------------------


def test_initializers_come_first_then_hooks_then_the_forward_pass_and_new_hooks():
    order = []

    class Inner(es.Module):
        def module_init(self, key):
            order.append("hook of inner")

        def __call__(self, x):
            return x

    class Outer(es.Module):
        a: es.Parameter
        b: es.Parameter | None = None
        inner: Inner | None = None

        def module_init(self, key):
            order.append("hook")
            self.b = jnp.ones(2)

        def __call__(self, x):
            order.append("call")
            assert self.initializing
            assert not self.eval().initializing  # a copy is not being initialized
            assert self.a.shape == self.b.shape
            if self.inner is None:
                self.inner = Inner()
            return es.vmap(self.inner)(x)

    draw = es.Initializer(lambda key: order.append("draw") or jnp.ones(2))
    new = Outer(draw).init(0, jnp.ones(3))
    assert order == ["draw", "hook", "call", "hook of inner"]
    assert new.initialized
    assert not new.initializing
    assert es.mutable(lambda m: m.initializing)(new)[0] is False


def test_a_module_created_in_the_forward_pass_is_initialized():
    class Outer(es.Module):
        inner: Dense | None = None
        layer: eqx.nn.Linear | None = None

        def __call__(self, x):
            if self.inner is None:
                self.inner = Dense(5)
                self.layer = es.lazy(eqx.nn.Linear, x.shape[0], 2)
            return self.inner(x), self.layer(x)

    many = lambda m, x: es.jit(es.vmap(m, in_axes=None, axis_size=4))(x)  # noqa: E731
    new = Outer().init(0, jnp.ones(3), call=many)
    assert new.inner.w.shape == (5, 3)
    assert new.layer.weight.shape == (2, 3)
    assert new.inner.calls.dtype == jnp.int32
    (y, _), new = es.mutable(new)(jnp.ones(3))
    assert y.shape == (5,)


@pytest.mark.parametrize("holes", [None, {"a": [None]}])
def test_a_container_of_none_is_set_by_the_forward_pass(holes):
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


@pytest.mark.parametrize("reverse", [False, True])
def test_init_sees_the_first_step_of_a_loop(reverse):
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


RUNS = {
    "scan": lambda f: es.scan(lambda c, x: (f(c), x), 0, jnp.ones(3)),
    "while_loop": lambda f: es.while_loop(lambda i: i < 3, lambda i: f(i) + 1, 0),
    "fori_loop": lambda f: es.fori_loop(0, 3, lambda i, c: f(c), 0),
    "cond": lambda f: [es.cond(True, f, lambda c: c, 0) for _ in range(3)],
}


@pytest.mark.parametrize("name", RUNS)
def test_init_sees_the_state_that_an_ordinary_call_would_see(name):
    class Counts(es.Module):
        n: es.State = 0
        w: es.Parameter | None = None
        seen: es.Buffer[jax.Array | None] = None

        def __call__(self, x):
            RUNS[name](self.step)
            if self.initializing:
                self.seen = self.n
            return x

        def step(self, c):
            if self.initializing and self.w is None:
                self.w = jnp.ones(())
            self.n = self.n + 1
            return c

    model = Counts().init(0, 1.0)
    assert (model.seen, model.n, model.w) == (3, 0, 1.0)


# --- Inside transforms --------------------------------------------------------------


class Stackable(es.Module):
    s: es.State
    w: es.Parameter | None = None

    def __call__(self, x):
        if self.initializing and self.w is None:
            self.w = es.Initializer(lambda key: jr.normal(key, (3, 3)))
        return self.w @ x


STACKED = {
    "axes": lambda m, x: es.vmap(m, in_axes=None, axes={...: 0})(x),
    "argument": lambda m, x: es.vmap(lambda m: m(x))(m),
    "scan": lambda m, x: es.scan(lambda x, m: (m(x), None), x, m)[0],
}


@pytest.mark.parametrize("name", STACKED)
def test_layers_of_a_stack_are_initialized_one_by_one(name):
    run, x = STACKED[name], jnp.ones(3)
    stack = eqx.filter_vmap(Stackable)(jnp.zeros(3))
    with pytest.raises(
        ValueError, match=r"Stackable\.w` is created by `init` in one (lane|step) of"
    ):
        stack.init(42, x, call=run)
    keys = jr.split(jr.key(0), 3)
    stack = eqx.filter_vmap(lambda key: Stackable(jnp.zeros(())).init(key, x))(keys)
    assert stack.w.shape == (3, 3, 3)
    assert es.mutable(run)(stack, x)[0].shape[-1] == 3


def test_a_new_parameter_is_mapped_like_the_existing_parameters():
    class Two(es.Module):
        v: es.Parameter
        w: es.Parameter | None = None

        def __call__(self, x):
            if self.initializing and self.w is None:
                self.w = jnp.ones(x.shape)
            return self.v * self.w * x

    def by_kind(m, axis):
        return {es.Parameter: axis}

    def by_array(m, axis):
        return es.spec(m, {es.Parameter: axis})

    def run(of, axis):
        return lambda m, xs: es.vmap(lambda m, x: m(x), (of(m, axis), 0))(m, xs)

    xs, one_lane = jnp.ones((2, 3)), r"Two\.w` is created by `init` in one lane"
    for of in (by_kind, by_array):
        assert Two(jnp.ones(())).init(0, xs, call=run(of, None)).w.shape == (3,)
        with pytest.raises(ValueError, match=one_lane):
            Two(jnp.ones(2)).init(0, xs, call=run(of, 0))


def test_a_new_parameter_is_mapped_by_the_entry_of_its_argument():
    class Late(es.Module):
        w: es.Parameter | None = None

        def __call__(self, x):
            if self.initializing and self.w is None:
                self.w = jnp.ones(())
            return self.w * x

    def init(a, b, entries):
        def call(models, xs):
            return es.vmap(lambda a, b, x: b(a(x)), (*entries, 0))(*models, xs)

        return es.init((a, b), 0, jnp.ones(2), call=call)

    mapped = Late(jnp.ones(2))
    assert init(Late(), mapped, (None, 0))[0].w.shape == ()
    assert init(mapped, Late(), (0, None))[1].w.shape == ()
    for entries in ((0, 0), (0, {...: 0})):
        with pytest.raises(ValueError, match=r"Late\.w` is created by `init` in one"):
            init(mapped, Late(), entries)


def mapped_by(axes):
    return lambda m, xs: es.vmap(lambda m, x: m(x), (axes, 0))(m, xs)


FILTERS = {
    "a name": es.path_matches("*inner.w"),
    "a node": es.under(lambda m: m.inner.w),
    "a class": es.all_of(es.Parameter, es.inside(Stackable)),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_new_parameter_is_mapped_by_filters(name):
    class Outer(es.Module):
        v: es.Parameter
        inner: Stackable

        def __call__(self, x):
            return self.v * self.inner(x).sum()

    xs, inner = jnp.ones((2, 3)), Stackable(jnp.zeros(()))
    mapped = {FILTERS[name]: 0, es.Parameter: None}
    shared = {FILTERS[name]: None, es.Parameter: 0}
    with pytest.raises(ValueError, match=r"Stackable\.w` is created by `init` in one"):
        es.init(Outer(1.0, inner), 0, xs, call=mapped_by(mapped))
    outer = Outer(jnp.ones(2), inner)
    new = es.init(outer, 0, xs, call=mapped_by(shared))
    assert new.inner.w.shape == (3, 3)
    assert es.mutable(mapped_by(shared))(new, xs)[0].shape == (2,)


def test_the_arrays_of_the_caller_are_not_changed():
    class Net(es.Module):
        n: es.State
        w: es.Parameter
        table: es.Buffer

        def module_init(self, key):
            self.n += 1
            self.w += 1

        def __call__(self, x):
            self.n += 1
            self.w += 1
            assert isinstance(self.table, jax.Array)
            return x

    arrays = [np.array([2, 3]), np.array([2.0, 3.0]), np.array([2, 3])]
    net = Net(*arrays).init(0, 0.0)
    assert [x.tolist() for x in arrays] == [[2, 3], [2.0, 3.0], [2, 3]]
    assert net.n.tolist() == [3, 4]
    assert net.table is arrays[2]


@pytest.mark.parametrize("transform", [lambda f: f, es.vmap])
def test_a_value_that_is_not_an_array_is_not_missing(transform):
    class Scale(es.Module):
        by: Any = "unknown"

        def __call__(self, x):
            if isinstance(self.by, str):
                self.by = jnp.ones(x.shape)
            return x * self.by

    class Net(es.Module):
        scale: Scale

        def __call__(self, x):
            return transform(self.scale)(x)

    assert Net(Scale()).init(0, jnp.ones((2, 3))).scale.by == "unknown"


MADE = {
    "vmap": lambda m, x: es.vmap(m)(x[None]),
    "jvp": lambda m, x: es.jvp(m, (x,), (x,)),
}


@jax.check_tracer_leaks(False)  # JAX's error would come before ours
@pytest.mark.parametrize("run", MADE.values(), ids=MADE)
def test_new_values_must_not_depend_on_traced_values(run):
    class Shift(es.Module):
        first: es.State | None = None

        def __call__(self, x):
            if self.first is None:
                self.first = x
            return x - self.first

    made = r"`.*Shift\.first` is created by `init` from values of a transform"
    with rejects(model := Shift(), ValueError, made):
        model.init(0, jnp.ones(3), call=run)


@leaks_on_purpose
def test_a_transform_that_raises_creates_nothing():
    class Shift(es.Module):
        first: es.State | None = None

    def run(model, xs):
        with pytest.raises(ValueError, match="is created by `init` from values of a"):
            es.vmap(lambda x: setattr(model, "first", x))(xs)
        assert model.first is None
        model.first = jnp.zeros(3)

    assert Shift().init(0, jnp.ones(3), call=run).first.tolist() == [0, 0, 0]


def test_a_module_that_is_created_in_a_transform_can_be_written():
    class Lazy(es.Module):
        inner: es.State[Dense] | None = None

        def __call__(self, xs):
            def create(x):
                if self.initializing and self.inner is None:
                    self.inner = Dense(3, jnp.ones((3, 3)))
                return x

            es.vmap(create)(xs)
            return self.inner(xs)

    model = Lazy().init(0, jnp.ones(3))
    y, new = es.mutable(model)(jnp.ones(3))
    assert (y == 3.0).all()
    assert new.inner.calls == model.inner.calls + 1


def test_a_list_of_numpy_arrays_that_replaces_an_array_has_arrays_of_jax():
    class Lazy(es.Module):
        stats: es.State = 0.0

        def __call__(self, seen):
            self.stats = [np.zeros(2)]
            seen.append(self.stats[0])

    seen = []
    Lazy().init(0, seen)
    assert isinstance(seen[0], jax.Array)


def test_a_layer_that_takes_its_shapes_from_an_input():
    class Lazy(es.Module):
        w: es.Parameter | None = None
        n: es.State | None = None

        def __call__(self, x):
            self.n = x if self.n is None else self.n
            self.w = x if self.w is None else self.w
            return self.w * x

    model = Lazy(n=jnp.zeros(3))
    with rejects(model, FROZEN, r"Lazy\.w`", r"model\.init\(42, x\)"):
        es.mutable(model)(jnp.ones(3))
    model = Lazy(w=jnp.ones(3))
    with rejects(model, ValueError, "`n`", r"model\.init\(42, x\)"):
        es.mutable(model)(jnp.ones(3))
    assert es.mutable(Lazy().init(42, jnp.ones(3)))(jnp.ones(3))[0].shape == (3,)


class Gate(es.Module):
    w: es.Parameter | None = None

    def __call__(self, x):
        if self.initializing and self.w is None:
            self.w = es.Initializer(lambda key: jr.uniform(key, ()) + 1.0)
        return self.w * x


@pytest.mark.parametrize("is_carried", [False, True])
def test_the_condition_of_a_while_loop_may_create_fields(is_carried):
    class Model(es.Module):
        gate: Gate

        def __call__(self, x):
            if not is_carried:
                return es.while_loop(lambda x: self.gate(x) < 10, lambda x: x * 2, x)
            _, x = es.while_loop(
                lambda c: c[0](c[1]) < 10, lambda c: (c[0], 2 * c[1]), (self.gate, x)
            )
            return x

    model = Model(Gate()).init(0, 1.0)
    assert model.gate.w is not None
    assert model(1.0) >= 4.0


def test_a_loop_that_does_not_reach_the_model_is_only_traced():
    def f(model, x):
        def body(i, x):
            is_traced.append(isinstance(x, jax.core.Tracer))
            return x

        return es.fori_loop(0, 2, body, x)

    is_traced: list[bool] = []
    Dense(2).init(0, jnp.ones(3), call=f)
    assert is_traced
    assert all(is_traced)


def test_a_scan_over_something_without_an_axis():
    def forward(model, xs):
        return es.scan(lambda c, x: (c, model(x)), 0, xs)

    with rejects(model := Gate(), ValueError, "`xs` has shape", "no first axis"):
        model.init(0, 3.0, call=forward)


def test_a_scan_over_a_layer_that_is_not_a_stack():
    class Counts(es.Module):
        n: es.State = 0

        def __call__(self, x):
            return x + self.n

    def forward(model, x):
        return es.scan(lambda x, layer: (layer(x), None), x, model)[0]

    with rejects(model := Counts(), ValueError, "`n` has shape"):
        model.init(0, 1, call=forward)
