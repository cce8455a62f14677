"""What `init` does not let pass, and what its errors say."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import rejects

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


class Counter(es.Module):
    n: es.State = 0

    def step(self):
        self.n = self.n + 1


# How `init` comes to run `f(model)`: in a `module_init`, and in the forward pass.


def in_a_hook(f):
    class Model(es.Module):
        a: Counter = Counter()
        b: Counter | None = None
        stats: dict[str, es.State] = es.field(default_factory=lambda: {"mean": 0.0})

        def module_init(self, key):
            f(self)

    return Model(), lambda model: model.init(0)


def in_the_forward_pass(f):
    class Model(es.Module):
        a: Counter = Counter()
        b: Counter | None = None
        stats: dict[str, es.State] = es.field(default_factory=lambda: {"mean": 0.0})

    return Model(), lambda model: es.init(model, 0, call=f)


where = pytest.mark.parametrize("where", [in_a_hook, in_the_forward_pass])


@where
def test_a_module_in_two_places(where):
    def tie(model):
        model.a = Counter()
        model.b = model.a

    model, init = where(tie)
    with rejects(model, ValueError, "`a` and `b`", "Shared"):
        init(model)


@where
def test_a_write_to_a_module_that_is_replaced(where):
    def replace(model):
        old = model.a
        model.a = Counter(5)
        old.n = 9

    model, init = where(replace)
    with rejects(model, ValueError, r"`a\.n` was written", "no longer"):
        init(model)


@where
@jax.check_tracer_leaks(False)  # it leaks, on purpose
def test_a_tracer_in_a_container(where):
    def leak(model):
        jax.jit(lambda x: model.stats.update(mean=x))(1.0)

    model, init = where(leak)
    with rejects(model, es.TraceError, r"stats\['mean'\]", "Replace the container"):
        init(model)


@where
def test_a_write_to_a_copy(where):
    model, init = where(lambda model: model.a.train().step())
    with rejects(model, FROZEN, r"`Counter\.n`", "a copy made inside the call"):
        init(model)


@where
def test_what_is_done_rightly(where):
    def fill(model):
        model.a = Counter(5)
        model.b = Counter()
        model.b.step()
        model.stats = {**model.stats, "var": jnp.ones(())}

    model, init = where(fill)
    new = init(model)
    assert new.b.n == 1
    assert model.b is None


def test_a_layer_of_the_caller_in_a_list_stays_as_it_was():
    mine = Counter()

    class Model(es.Module):
        counters: list[Counter] = es.field(default_factory=list)
        norm: es.nn.BatchNorm | None = None

        def __call__(self, x):
            self.counters.append(mine)

            def step(carry, x):
                self.counters[0].step()
                return carry, x

            return es.scan(step, None, x)[1]

    Model().init(0, jnp.ones((3, 2)))
    assert mine.n == 0


def test_what_differs_between_lanes_is_not_made_once():
    class Lazy(es.Module):
        first: es.State | None = None

        def __call__(self, x):
            if self.first is None:
                self.first = x
            return x - self.first

    model = Lazy()
    with rejects(
        model,
        ValueError,
        r"`.*Lazy\.first` is made by `init` from values of a transform",
    ):
        model.init(0, jnp.ones(3), call=lambda m, xs: es.vmap(m)(xs))


# --- Models that init has not seen --------------------------------------------------


class Lazy(es.Module):
    w: es.Parameter | None = None
    n: es.State | None = None

    def __call__(self, x):
        if self.n is None:
            self.n = jnp.zeros(x.shape)
        if self.w is None:
            self.w = jnp.ones(x.shape)
        return self.w * x


def test_a_layer_that_takes_its_shapes_from_an_input():
    model = Lazy(n=jnp.zeros(3))
    with rejects(model, FROZEN, r"`Lazy\.w`", r"model\.init\(42, x\)"):
        es.mutable(model)(jnp.ones(3))
    model = Lazy(w=jnp.ones(3))
    with rejects(model, ValueError, "`n`", r"model\.init\(42, x\)"):
        es.mutable(model)(jnp.ones(3))
    assert es.mutable(Lazy().init(42, jnp.ones(3)))(jnp.ones(3))[0].shape == (3,)


def test_a_hook_that_has_not_run_is_named_by_its_place():
    class Hooked(es.Module):
        def module_init(self, key):
            pass

    with pytest.raises(es.NotInitializedError, match="`module_init` of `.*Hooked` has"):
        es.mutable(lambda model: None)(Hooked())
    with pytest.raises(es.NotInitializedError, match=r"`module_init` of `\[1\]` has"):
        es.mutable(lambda models: None)([Counter(), Hooked()])


@pytest.mark.parametrize(
    "transform",
    [es.vmap, es.checkpoint, es.jit, lambda f: lambda x: es.cond(True, f, f, x)],
    ids=["vmap", "checkpoint", "jit", "cond"],
)
def test_a_function_initializes_what_it_closes_over(transform):
    class Net(es.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return self.linear(x)

    net = Net(es.lazy(eqx.nn.Linear, 3, 2))
    keys = jr.split(jr.key(0), 4)
    keys = keys if transform is es.vmap else keys[0]
    weights = transform(lambda key: net.init(key).linear.weight)(keys)
    assert weights.shape[-2:] == (2, 3)
    with pytest.raises(es.NotInitializedError, match="initialized: `linear` is"):
        transform(lambda key: net(jnp.ones(3)))(keys)


@pytest.mark.parametrize("transform", [lambda f: f, es.vmap, es.checkpoint])
def test_an_error_of_a_layer_whose_hook_is_to_come_is_its_own(transform):
    class Hooked(es.Module):
        def module_init(self, key):
            pass

        def __call__(self, x):
            raise TypeError("its own")

    class Net(es.Module):
        layer: Hooked | None = None

        def __call__(self, x):
            self.layer = Hooked()
            return transform(self.layer)(x)

    with rejects(Net(), TypeError, "its own"):
        Net().init(0, jnp.ones(3))


@pytest.mark.parametrize("value", [jnp.ones(3), 1.0, None], ids=repr)
def test_a_placeholder_is_made_of_a_function(value):
    match = f"`es.Initializer` was given a `{type(value).__name__}`.*lambda key"
    with pytest.raises(TypeError, match=f"(?s){match}"):
        es.Initializer(value)


def test_a_lazy_layer_is_made_of_its_class_and_without_a_key(getkey):
    layer = eqx.nn.Linear(2, 3, key=getkey())
    right = r"es.lazy\(eqx.nn.Linear, 2, 3\) +# right"
    for args, kwargs in ((layer,), {}), ((eqx.nn.Linear, 2, 3), {"key": getkey()}):
        with pytest.raises(TypeError, match=f"(?s)without the key.*{right}"):
            es.lazy(*args, **kwargs)
