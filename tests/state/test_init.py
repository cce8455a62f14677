"""Lazy models: `es.Initializer`, `es.lazy`, `module_init`, and `init`."""

import copy
import functools as ft
import pickle

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


def test_init_returns_a_new_model():
    model = Net()
    new = model.init(42)
    assert not model.initialized
    assert isinstance(model.a.w, es.Initializer)
    assert new.initialized
    assert not new.initializing
    assert new.a.w.shape == (3,)
    assert new.linear.weight.shape == (2, 3)
    y, new = es.mutable(new)(jnp.ones(3))
    assert y.shape == (2,)


@pytest.mark.parametrize(
    "seed",
    [42, np.int64(42), np.array(42), jnp.array(42), jnp.uint32(42), jr.key(42)],
    ids=repr,
)
def test_a_seed_or_a_key(seed):
    assert equal(Net().init(seed), Net().init(42))
    assert equal(es.init(Net(), seed), Net().init(42))


def test_another_seed_and_the_legacy_key():
    assert not equal(Net().init(0), Net().init(1))
    legacy = Net().init(jr.PRNGKey(0))
    assert legacy.initialized
    assert not equal(legacy, Net().init(jr.PRNGKey(1)))


@pytest.mark.parametrize("bad", ["seed", None, 1.5, jnp.ones(2), jnp.ones(3)], ids=str)
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


def test_any_pytree_of_models():
    models = es.init({"x": [Lazy()], "y": (Lazy(), 3)}, 0)
    assert models["x"][0].w.shape == models["y"][0].w.shape == (3,)
    assert models["y"][1] == 3
    assert es.init([], 0) == []


# --- What an `Initializer` may give -------------------------------------------------


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
        es.Initializer(lambda key: Lazy()),  # which is lazy in turn
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


def test_initializers_in_containers_and_in_plain_modules():
    class Plain(eqx.Module):
        w: jax.Array
        parts: list

    model = Plain(es.Initializer(ones), [es.Initializer(ones), jnp.zeros(1)])
    new = es.init(model, 0)
    assert (new.w == 1).all()
    assert (new.parts[0] == 1).all()
    assert new.parts[1] is model.parts[1]


def test_the_function_is_called_once_with_a_key_of_its_own():
    keys = []
    model = {
        n: es.Initializer(lambda key: keys.append(key) or jnp.ones(1)) for n in "abc"
    }
    es.init(model, 0)
    assert len(keys) == 3
    assert len({tuple(jr.key_data(k).tolist()) for k in keys}) == 3
    assert all(k.shape == () for k in keys)


def test_lazy_is_the_layer_with_a_key():
    def cls(*args, key, **kwargs):
        return {"args": args, "kwargs": kwargs, "key": key}

    made = es.init({"layer": es.lazy(cls, 1, 2, use_bias=False)}, 0)["layer"]
    assert made["args"] == (1, 2)
    assert made["kwargs"] == {"use_bias": False}
    key = es.init({"layer": es.Initializer(lambda key: key)}, 0)["layer"]
    assert made["key"] == key
    for layer in (
        es.lazy(eqx.nn.MLP, 2, 2, 4, 1),
        es.lazy(eqx.nn.Conv2d, 1, 2, 3),
        es.lazy(eqx.nn.GRUCell, 2, 3),
        es.lazy(es.nn.Dropout, 0.5),
    ):
        assert isinstance(es.init([layer], 0)[0], eqx.Module)


def test_lazy_in_lazy():
    def block(size, *, key):
        del key
        return eqx.nn.Sequential([es.lazy(eqx.nn.Linear, size, size) for _ in range(2)])

    class Outer(es.Module):
        block: eqx.nn.Sequential

        def __init__(self):
            self.block = es.lazy(block, 3)

    model = Outer().init(0)
    a, b = model.block.layers
    assert a.weight.shape == b.weight.shape == (3, 3)
    assert (a.weight != b.weight).any()


# --- Partially initialized, twice ---------------------------------------------------


def test_what_is_initialized_keeps_its_value():
    model = Net().replace(a=Lazy().init(0))
    assert not model.initialized
    new = model.init(5)
    assert new.a.w is model.a.w
    assert (new.b.w == Net().init(5).b.w).all()


def test_init_twice_changes_nothing():
    model = Net().init(0)
    again = model.init(1)
    assert equal(model, again)
    assert all(
        a is b
        for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True)
    )
    trained = eqx.tree_at(lambda m: m.a.n, model, jnp.array(7))
    assert trained.init(3, jnp.ones(3)).a.n == 7


# --- The placeholder ----------------------------------------------------------------


def test_a_placeholder_is_no_array():
    model = Lazy()
    assert es.parts(model.replace(n=None)) == []
    assert "Initializer" in repr(model)
    assert repr(es.Initializer(ones)) == "Initializer"
    assert jax.tree.leaves(es.filter(model, es.Parameter)) == []


@pytest.mark.parametrize(
    "use",
    [lambda w: jnp.dot(jnp.ones(3), w), jnp.sum, jnp.exp],
    ids=["dot", "sum", "exp"],
)
def test_jax_numpy_says_what_a_placeholder_is(use):
    with pytest.raises(es.NotInitializedError, match=r"model\.init\(42\)"):
        use(Lazy().w)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: jnp.ones(3) @ w,
        lambda w: w * jnp.ones(3),
        lambda w: w + 1,
        lambda w: w[0],
        lambda w: w.shape,
        lambda w: jax.nn.relu(w),
    ],
    ids=["@", "*", "number", "index", "shape", "relu"],
)
def test_no_operation_takes_a_placeholder_for_an_array(use):
    with pytest.raises(
        (es.NotInitializedError, TypeError, AttributeError), match="Initializer"
    ):
        use(Lazy().w)


def test_a_lazy_model_pickles_where_its_functions_do():
    class_level = es.Initializer(ones)
    model = pickle.loads(pickle.dumps(class_level))
    assert (es.init([model], 0)[0] == 1).all()
    partial = es.Initializer(ft.partial(ones, value=2.0))
    assert (es.init([copy.deepcopy(partial)], 0)[0] == 2).all()
    layer = pickle.loads(pickle.dumps(es.lazy(eqx.nn.Linear, 3, 2)))
    assert equal(es.init([layer], 0), es.init([es.lazy(eqx.nn.Linear, 3, 2)], 0))


def test_lazy_models_are_pytrees_and_copy():
    model = Net()
    for twin in (
        copy.copy(model),
        copy.deepcopy(model),
        jax.tree.map(lambda x: x, model),
        model.eval().train(),
        model.freeze().unfreeze(),
    ):
        assert equal(twin.init(3), model.init(3))


# --- Under transforms ---------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, jr.key(0)], ids=["seed", "key"])
def test_filter_eval_shape(seed):
    calls = []

    class Counts(Net):
        def module_init(self, key):
            calls.append(isinstance(self.a.w, jax.core.Tracer))

    shapes = eqx.filter_eval_shape(Counts().init, seed)
    real = Counts().init(0)
    assert calls == [True, False]
    assert shapes.a.w == jax.ShapeDtypeStruct((3,), jnp.float32)
    describe = lambda p: (p.name, p.kind, p.value.shape, p.value.dtype)  # noqa: E731
    assert list(map(describe, es.parts(shapes))) == list(map(describe, es.parts(real)))


@pytest.mark.parametrize(
    "jit", [eqx.filter_jit, es.jit, es.checkpoint], ids=["filter_jit", "jit", "remat"]
)
def test_under_jit(jit):
    key = jr.key(0)
    jitted = jit(Net().init)(key)
    assert jax.tree.structure(jitted) == jax.tree.structure(Net().init(key))
    np.testing.assert_allclose(jitted.a.w, Net().init(key).a.w, rtol=1e-6)


def test_under_jit_as_an_argument():
    jitted = es.jit(lambda model, key: model.init(key))(Net(), jr.key(0))
    np.testing.assert_allclose(jitted.a.w, Net().init(0).a.w, rtol=1e-6)


@pytest.mark.parametrize("vmap", [eqx.filter_vmap, es.vmap], ids=["filter_vmap", "es"])
def test_under_vmap(vmap):
    keys = jr.split(jr.key(0), 4)
    ensemble = vmap(Net().init)(keys)
    for i in range(4):
        np.testing.assert_allclose(ensemble.a.w[i], Net().init(keys[i]).a.w, rtol=1e-6)


@pytest.mark.parametrize(
    "transform",
    [es.jit, es.checkpoint, es.vmap],
    ids=["jit", "checkpoint", "vmap"],
)
def test_what_is_not_initialized_has_its_name_in_the_model(transform):
    nets = {"encoder": Net().eval()}
    with pytest.raises(es.NotInitializedError, match="initialized: `.*a.w` is"):
        transform(lambda x, nets: nets["encoder"](x))(jnp.ones((4, 3)), nets)
    with pytest.raises(es.NotInitializedError, match="initialized: `.*a.w` is"):
        transform(es.checkpoint(nets["encoder"]))(jnp.ones((4, 3)))


def test_what_is_not_initialized_in_a_program_has_no_name():
    with pytest.raises(es.NotInitializedError, match="a placeholder for a value"):
        es.jit(lambda x: Net().eval()(x))(jnp.ones(3))
