"""`es.jit` does not keep models, arrays or tracers of a call alive."""

import dataclasses
import gc
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_state as es
from eqx_state._jit.options import Options
from eqx_state._jit.programs import programs_of


X = jnp.array([1.0, 2.0, 3.0])


class Layer(es.Module):
    weight: es.Parameter
    total: es.State

    def __call__(self, x):
        self.total = self.total + self.weight * x
        return x * self.total


class Model(es.Module):
    a: Layer
    b: Layer


def model(seed=0):
    return Model(*(Layer(1.0 + i, 0.5 * i * X) for i in (seed, seed + 1)))


@es.jit
def shared_step(layer, x):
    return layer(x)


def pure(m, x):
    y, m = es.jit(es.mutable(m.a))(x)
    return jnp.sum(y + m.total)


def freed(make):
    """Whether a model is freed once the call that `make` returns has run."""
    m = model(3)
    parts = [weakref.ref(x) for x in (m, m.a, m.a.total)]
    call = make(m)
    del m
    call(X)
    del call
    gc.collect()
    return [ref() is None for ref in parts] == [True, True, True]


def closure_in_scope(m, x):
    return es.jit(lambda x: m.a(x))(x)


def fails(m, x):
    return m.a(x) + "text"


def swallow(m, x):
    try:
        es.jit(fails)(m, x)
    except Exception:
        return


KEEPERS = {
    "argument": lambda m: lambda x: es.jit(pure)(m, x),
    "partial": lambda m: es.jit(eqx.Partial(pure, m)),
    "method": lambda m: lambda x: es.mutable(es.jit(m.a.__call__))(x),
    "closure": lambda m: es.jit(lambda x: pure(m, x)),
    "closure in a scope": lambda m: lambda x: es.mutable(closure_in_scope)(m, x),
    "after an error": lambda m: lambda x: swallow(m, x),
    "lowered": lambda m: lambda x: es.jit(pure).lower(m, x).compile()(m, x),
}


@pytest.mark.parametrize("case", KEEPERS)
def test_nothing_of_a_call_is_kept_alive(case):
    assert freed(KEEPERS[case])


def test_no_tracer_leaks():
    def loss(m, x):
        y = es.jit(m.a)(x) + es.jit(lambda x: m.b(x))(x)
        return jnp.sum(y + es.jit(lambda x: es.jit(m.a)(x) + shared_step(m.b, x))(x))

    with jax.checking_leaks():
        for _ in range(2):
            es.mutable(loss)(model(), X)
        with pytest.raises(Exception, match="Leaked"):
            es.jit([].append)(X)


# --- Objects that are created and deleted ---------------------------------------------


def counts():
    gc.collect()
    return len(jax.live_arrays()), len(gc.get_objects())


class Plain:
    """Compared by identity."""


def test_many_models_leave_nothing():
    log = Plain()
    log.traces = 0

    @es.jit
    def step(m, x):
        log.traces += 1
        return es.mutable(m)(x)

    def work(num):
        for i in range(num):
            y, layer = step(Layer(jnp.asarray(np.float32(i)), nothing), x)
        assert layer.total == y == num - 1

    x, nothing = jnp.ones(()), jnp.zeros(())
    work(10)
    programs = programs_of(step.__wrapped__, Options())
    plans, before = programs.plans, counts()
    work(300)
    after = counts()
    assert log.traces == 1
    assert len(plans) == 1
    assert programs.plans is plans
    assert len(programs.by_key) == 1
    assert after[0] == before[0]
    assert after[1] - before[1] < 50


def static_value():
    value = Plain()
    return lambda x: es.jit(lambda x, value: x)(x, value), value


def closure():
    value = Plain()
    return es.jit(lambda x: x if value else 2.0 * x), value


def callable_object():
    class Callable:
        def __call__(self, x):
            return x

    value = Callable()
    return es.jit(value), value


class Trainer:
    def __init__(self):
        self.model = model()

    def step(self, x, model=None):
        return (model or self.model).a.weight * x


def method():
    value = Trainer()
    return es.jit(value.step), value


def method_of_equal_objects():
    @dataclasses.dataclass
    class Equal(Trainer):
        n: int = 0

        def __post_init__(self):
            super().__init__()

    value = Equal()
    assert value == Equal()
    return es.jit(es.vmap(value.step)), value


def method_of_a_module():
    value = Plain()
    f = types.MethodType(lambda m, x: m.weight * x if value else x, model().a)
    return es.jit(eqx.Partial(es.vmap(f))), value


GOING = [
    static_value,
    closure,
    callable_object,
    method,
    method_of_equal_objects,
    pytest.param(
        method_of_a_module,
        marks=pytest.mark.skipif(
            tuple(map(int, eqx.__version__.split("."))) < (0, 13, 3),
            reason="in Equinox 0.13.2, the static data of a method are nested deeper",
        ),
    ),
]


@pytest.mark.parametrize("make", GOING)
def test_a_value_that_only_a_function_refers_to_is_freed_with_it(make):
    call, value = make()
    for _ in range(3):
        call(X)
    gone = weakref.ref(value)
    del call, value
    for _ in range(2):  # first the function is freed, then the values in its programs
        gc.collect()
    assert gone() is None


def test_the_arrays_of_an_object_are_freed_with_it():
    def run():
        trainer = Trainer()
        for _ in range(2):
            es.jit(trainer.step)(X)  # the arrays of the model are constants
        return weakref.ref(trainer), weakref.ref(trainer.model.a.weight)

    refs = run()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_each_object_and_each_method_has_its_own_programs():
    class Scale:
        def __init__(self, by):
            self.by, self.traces = by, []

        def up(self, x):
            self.traces.append("up")
            return self.by * x

        def down(self, x):
            self.traces.append("down")
            return x / self.by

    one, two = Scale(2.0), Scale(4.0)
    for _ in range(2):
        for scale in (one, two):
            assert jnp.array_equal(es.jit(scale.up)(X), scale.by * X)
            assert jnp.array_equal(es.jit(scale.down)(X), X / scale.by)
    assert one.traces == two.traces == ["up", "down"]


def test_methods_of_objects_without_weak_references():
    class Scale:
        __slots__ = ("by",)

        def up(self, x):
            return self.by * x

    for by in (2.0, 3.0):
        scale = Scale()
        scale.by = by
        for _ in range(2):
            assert jnp.array_equal(es.jit(scale.up)(X), by * X)


# --- `clear_cache` --------------------------------------------------------------------


def test_clear_cache_drops_the_programs_of_one_function():
    traces = []

    def f(m, x):
        traces.append("f")
        return es.mutable(m.a)(x)

    @es.jit
    def g(x):
        traces.append("g")
        return x

    jitted = es.jit(f)
    for times in (1, 2):
        for _ in range(2):
            y, layer = jitted(model(), X)
            assert jnp.array_equal(layer.total, X)
            assert jnp.array_equal(y, X * X)
            g(X)
        assert traces == ["f", "g", *["f"] * (times - 1)]
        assert jitted.clear_cache() is None
    assert layer.weight == 1.0


def test_clear_cache_of_a_method_and_of_other_options():
    traces = []

    class Model(es.Module):
        w: es.Parameter

        @es.jit
        def method(self, x):
            traces.append(1)
            return self.w * x

    m, trainer = Model(1.0), Trainer()
    for _ in range(2):
        m.method(X)
        Model.method.clear_cache()
        assert jnp.array_equal(es.jit(trainer.step)(X), X)
        es.jit(trainer.step).clear_cache()
    assert len(traces) == 2
    plain, donating = es.jit(pure), es.jit(pure, donate="all")
    plain(model(), X)
    programs = programs_of(pure, Options())
    donating.clear_cache()
    assert programs.by_key
    plain.clear_cache()
    assert not programs.by_key
