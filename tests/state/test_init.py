"""Lazy models: `es.Initializer`, `es.lazy`, `module_init`, and `init`."""

import copy
import functools as ft
import operator
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_state as es


def ones(key, value=1.0):
    return jnp.full(3, value)


class Lazy(es.Module):
    """Draws from its own key."""

    w: es.Parameter
    n: es.State = 0

    def __init__(self, size=3):
        self.w = es.Initializer(lambda key: jr.normal(key, (size,)))

    def __call__(self, x):
        if self.training:
            self.n = self.n + 1
        return self.w * x


class Net(es.Module):
    a: Lazy
    b: Lazy
    linear: eqx.nn.Linear

    def __init__(self):
        self.a, self.b = Lazy(), Lazy()
        self.linear = es.lazy(eqx.nn.Linear, 3, 2)

    def __call__(self, x):
        return self.linear(self.b(self.a(x)))


def equal(a, b):
    return bool(eqx.tree_equal(a, b))


# --- `init(seed_or_key)` ------------------------------------------------------------


@pytest.mark.parametrize("seed", [np.int64(42), jnp.uint32(42), jr.key(42)], ids=repr)
def test_a_seed_or_a_key(seed):
    assert equal(es.init(Net(), seed), Net().init(42))
    assert not equal(es.init(Net(), seed), Net().init(1))
    legacy = Net().init(jr.PRNGKey(0))
    assert not equal(legacy, Net().init(jr.PRNGKey(1)))


@pytest.mark.parametrize("bad", ["seed", 1.5, jnp.ones(2)], ids=str)
def test_a_bad_key(bad):
    with pytest.raises(TypeError, match="key"):
        Net().init(bad)


def test_keys_differ_by_path_and_by_nothing_else():
    class Bigger(es.Module):
        first: Lazy
        a: Lazy
        layers: list
        b: Lazy
        linear: eqx.nn.Linear

    net = Net()
    bigger = Bigger(Lazy(), net.a, [Lazy(), Lazy()], net.b, net.linear).init(7)
    small = net.init(7)
    for name in ("a", "b", "linear"):
        assert equal(getattr(small, name), getattr(bigger, name))
    drawn = [bigger.first.w, bigger.a.w, bigger.b.w, *(m.w for m in bigger.layers)]
    assert len({tuple(w.tolist()) for w in drawn}) == 5


# --- Values of an `Initializer` -----------------------------------------------------


def test_an_array_a_pytree_or_a_module():
    class Any(es.Module):
        array: es.Parameter
        number: es.State
        tree: es.State[dict]
        module: Lazy
        rng: es.Rng

    model = Any(
        es.Initializer(ones),
        es.Initializer(lambda key: 1),
        es.Initializer(lambda key: {"a": jnp.zeros(2), "b": [0.0]}),
        es.Initializer(lambda key: Lazy()),  # itself a lazy module
        es.Initializer(lambda key: key),
    ).init(0)
    assert model.initialized
    assert model.number.dtype == jnp.int32
    assert not model.number.weak_type
    assert model.tree["b"][0].dtype == jnp.float32
    assert model.module.w.shape == (3,)
    assert [p.kind for p in es.parts(model) if p.name == "rng"] == [es.Rng]
    structure = jax.tree.structure(model)
    _, new = es.mutable(lambda m: None)(model)
    assert jax.tree.structure(new) == structure


def test_lazy_is_the_layer_with_a_key():
    def cls(*args, key, **kwargs):
        return {"args": args, "kwargs": kwargs, "key": key}

    made = es.init({"layer": es.lazy(cls, 1, 2, use_bias=False)}, 0)["layer"]
    assert made["args"] == (1, 2)
    assert made["kwargs"] == {"use_bias": False}
    key = es.init({"layer": es.Initializer(lambda key: key)}, 0)["layer"]
    assert made["key"] == key


# --- Partly initialized models, and a second `init` ---------------------------------


def test_init_twice_changes_nothing():
    model = Net().init(0)
    again = model.init(1)
    assert equal(model, again)
    assert all(map(operator.is_, jax.tree.leaves(model), jax.tree.leaves(again)))
    trained = eqx.tree_at(lambda m: m.a.n, model, jnp.array(7))
    assert trained.init(3, jnp.ones(3)).a.n == 7


# --- The placeholder ----------------------------------------------------------------


def test_a_placeholder_is_not_an_array():
    model = Lazy()
    assert es.parts(model.replace(n=None)) == []
    assert "Initializer" in repr(model)
    assert repr(es.Initializer(ones)) == "Initializer"
    assert jax.tree.leaves(es.filter(model, es.Parameter)) == []


@pytest.mark.parametrize(
    "use",
    [jnp.exp, lambda w: w * jnp.ones(3), lambda w: w[0], lambda w: w.shape],
    ids=["exp", "*", "index", "shape"],
)
def test_using_a_placeholder_is_an_error_that_says_what_it_is(use):
    with pytest.raises(es.NotInitializedError, match=r"model\.init\(42\)"):
        use(Lazy().w)


def test_a_lazy_model_pickles_where_its_functions_do():
    class_level = es.Initializer(ones)
    model = pickle.loads(pickle.dumps(class_level))
    assert (es.init([model], 0)[0] == 1).all()
    partial = es.Initializer(ft.partial(ones, value=2.0))
    assert (es.init([copy.deepcopy(partial)], 0)[0] == 2).all()
    layer = pickle.loads(pickle.dumps(es.lazy(eqx.nn.Linear, 3, 2)))
    assert equal(es.init([layer], 0), es.init([es.lazy(eqx.nn.Linear, 3, 2)], 0))


# --- Under transforms ---------------------------------------------------------------


def test_filter_eval_shape():
    calls = []

    class Counts(Net):
        def module_init(self, key):
            calls.append(isinstance(self.a.w, jax.core.Tracer))

    shapes = eqx.filter_eval_shape(Counts().init, 0)
    real = Counts().init(0)
    assert calls == [True, False]
    assert shapes.a.w == jax.ShapeDtypeStruct((3,), jnp.float32)
    describe = lambda p: (p.name, p.kind, p.value.shape, p.value.dtype)  # noqa: E731
    assert list(map(describe, es.parts(shapes))) == list(map(describe, es.parts(real)))


@pytest.mark.parametrize("transform", [es.jit, es.checkpoint])
def test_under_a_transform(transform):
    key = jr.key(0)
    transformed, eager = transform(Lazy().init)(key), Lazy().init(key)
    assert eqx.tree_equal(transformed, eager, rtol=1e-6)


def test_a_lazy_model_may_be_an_argument_of_jit():
    init = es.jit(lambda model, key: model.init(key))
    assert eqx.tree_equal(init(Lazy(), jr.key(0)), Lazy().init(0), rtol=1e-6)


USES = {
    "mutable": lambda net, x: es.mutable(net)(x),
    "jit": lambda net, x: es.jit(net)(x),
    "checkpoint": lambda net, x: es.checkpoint(net)(x),
    "scan": lambda net, x: es.scan(lambda net, x: (net, net(x)), net, x[None]),
    "cond": lambda net, x: es.cond(True, net, net, x),
    "value_and_grad": lambda net, x: es.value_and_grad(net)(x),
    "after an owned model": lambda net, x: es.mutable(
        lambda other: es.checkpoint(lambda other, net: x)(other, net)
    )(Net().init(0)),
    "cast": lambda net, x: es.mutable(
        net, cast={lambda part: part.value.ndim > 0: jnp.bfloat16}
    )(x),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_uninitialized_value_is_named_by_its_path_in_the_model(use):
    with pytest.raises(es.NotInitializedError, match="initialized: `.*a.w` is"):
        use(Net().eval(), jnp.ones(3))


def test_an_uninitialized_value_in_a_traced_function_has_no_path():
    with pytest.raises(es.NotInitializedError, match="a placeholder for a value"):
        es.jit(lambda x: Net().eval()(x))(jnp.ones(3))


def test_a_hook_that_has_not_run_is_named_by_its_path():
    class Hooked(es.Module):
        def module_init(self, key):
            pass

    with pytest.raises(es.NotInitializedError, match="`module_init` of `.*Hooked` has"):
        es.mutable(lambda model: None)(Hooked())
    with pytest.raises(es.NotInitializedError, match=r"`module_init` of `\[1\]` has"):
        es.mutable(lambda models: None)([0, Hooked()])


def test_a_placeholder_that_the_function_creates_is_an_error_in_a_transform():
    for transform in (es.vmap, es.jit, es.checkpoint):
        with pytest.raises(es.NotInitializedError, match="a placeholder for a value"):
            transform(lambda x: Lazy(()).eval()(x))(jnp.ones(3))


def test_a_placeholder_in_a_layer_of_equinox():
    linear = eqx.nn.Linear(2, 3, key=jr.key(0))
    lazy = eqx.tree_at(lambda m: m.bias, linear, es.Initializer(ones))
    assert es.init(lazy, 0).bias.tolist() == [1.0, 1.0, 1.0]


def test_a_function_may_initialize_a_model_that_it_closes_over():
    net, key = Net().eval(), jr.key(0)
    assert es.jit(lambda key: net.init(key).a.w)(key).shape == (3,)
    with pytest.raises(es.NotInitializedError, match=r"initialized: `a\.w` is"):
        es.jit(lambda x: net(x))(jnp.ones(3))


# --- Bad input ----------------------------------------------------------------------


def test_an_initializer_requires_a_function():
    match = "(?s)`es.Initializer` was given a `float`.*lambda key"
    with pytest.raises(TypeError, match=match):
        es.Initializer(1.0)


def test_lazy_requires_a_class_and_no_key(getkey):
    layer = eqx.nn.Linear(2, 3, key=getkey())
    right = r"es.lazy\(eqx.nn.Linear, 2, 3\) +# right"
    for args, kwargs in ((layer,), {}), ((eqx.nn.Linear, 2, 3), {"key": getkey()}):
        with pytest.raises(TypeError, match=f"(?s)without the key.*{right}"):
            es.lazy(*args, **kwargs)


# --- `module_init` --------------------------------------------------------------------


def test_hooks_run_after_all_initializers_children_first():
    order = []

    class Hooked(es.Module):
        name: str = eqx.field(static=True)
        w: es.Parameter
        inner: es.Module | None = None
        b: es.Parameter | None = None

        def module_init(self, key):
            assert self.w.shape == (3,)
            assert self.inner is None or self.inner.b is not None
            order.append(self.name)
            self.b = jr.normal(key, (2,))

    later = es.Initializer(lambda key: order.append("draw") or jnp.ones(3))
    tree = Hooked("root", later, Hooked("middle", later, Hooked("leaf", later)))
    new = es.init(tree, 0)
    assert order == ["draw"] * 3 + ["leaf", "middle", "root"]
    drawn = [new.b, new.inner.b, new.inner.inner.b]
    assert len({tuple(b.tolist()) for b in drawn}) == 3


class Counted(es.Module):
    runs: es.State = 0
    extra: es.Parameter | None = None
    label: str = eqx.field(static=True, default="new")

    def module_init(self, key):
        self.runs = self.runs + 1
        self.extra = es.Initializer(lambda key: jnp.ones(3))
        self.label = "done"

    def __call__(self, x):
        return x


def test_a_hook_may_assign_any_field_and_runs_once_in_a_life():
    model = Counted()
    assert not model.initialized
    new = model.init(0)
    assert new.initialized
    assert (new.runs, new.label) == (1, "done")
    assert (new.extra == 1).all()
    assert model.runs == 0
    for twin in (new, pickle.loads(pickle.dumps(new)), es.mutable(new)(1.0)[1]):
        assert twin.initialized
        assert twin.init(1, jnp.ones(1)).runs == 1


def test_a_hook_may_replace_an_array_by_a_layer():
    class Layer(es.Module):
        calls: es.State = 0

    class Net(es.Module):
        layer: Any

        def module_init(self, key):
            self.layer = Layer()
            self.layer.calls = self.layer.calls + 1

    assert Net(jnp.zeros(())).init(0).layer.calls == 1
