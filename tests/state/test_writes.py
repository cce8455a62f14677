"""Writes in a scope: kinds, numbers, weak types, shapes, dtypes, containers."""

import contextlib
import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import rejects
from state_cases import Layer

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


class Cache(es.State):
    pass


def write(model, *, kinds=es.State, **fields):
    def f(model):
        for name, value in fields.items():
            setattr(model, name, value)

    return es.mutable(f, kinds=kinds)(model)[1]


# --- Kinds --------------------------------------------------------------------------


def test_every_kind_of_state_is_written_by_default():
    class All(es.Module):
        state: es.State
        stat: es.BatchStat
        rng: es.Rng
        opt: es.OptState
        cache: Cache
        noted: Annotated[jax.Array, es.State]
        given: jax.Array = es.field(kind=Cache)

    zero, key = jnp.zeros(2), jr.PRNGKey(1)
    model = All(zero, zero, jr.PRNGKey(0), zero, zero, zero, zero)
    values = {f.name: jnp.ones(2) for f in dataclasses.fields(All)} | {"rng": key}
    new = write(model, **{name: values[name] for name in All.__annotations__})
    for name in All.__annotations__:
        assert (getattr(new, name) == values[name]).all()


def test_the_effective_kind_decides():
    class Net(es.Module):
        moments: es.OptState[Layer]
        outer: es.State[dict]
        plain: dict

    model = Net(
        Layer(),
        {"layer": Layer(), "bare": jnp.zeros(2)},
        {"w": jnp.zeros(2), "rng": jr.key(0)},
    )

    def allowed(m):
        m.moments.weight = jnp.zeros(2)
        m.outer = {**m.outer, "bare": jnp.ones(2)}
        m.plain = {**m.plain, "rng": jr.key(1)}

    _, new = es.mutable(allowed)(model)
    assert (new.moments.weight == 0).all()
    assert (new.outer["bare"] == 1).all()
    assert new.plain["rng"] == jr.key(1)

    def inner_declaration(m):
        m.outer["layer"].weight = jnp.zeros(2)

    with rejects(model, FROZEN, r"Layer\.weight", "`Parameter`"):
        es.mutable(inner_declaration)(model)
    with rejects(model, FROZEN, r"Net\.plain", "`Parameter`"):
        es.mutable(lambda m: setattr(m, "plain", {**m.plain, "w": jnp.ones(2)}))(model)


# --- Numbers, weak types, shapes, dtypes --------------------------------------------


F32, I32, F16, BOOL = jnp.float32, jnp.int32, jnp.float16, jnp.bool_
FITS = [
    (F32, 3, 3.0),
    (I32, True, 1),
    (BOOL, True, True),
]
DOES_NOT_FIT = [
    (I32, 1.5),
    (BOOL, 1),
    (F32, 1j),
    (jnp.uint8, 0.5),
]


class Slot(es.Module):
    x: es.State

    def __call__(self, value):
        self.x = value


@pytest.mark.parametrize(("dtype", "number", "result"), FITS, ids=str)
@pytest.mark.parametrize("inside", ["field", "container"])
def test_a_number_takes_the_old_dtype(dtype, number, result, inside):
    zero = jnp.zeros((), dtype)
    model = Slot(zero if inside == "field" else [{"k": zero}])
    run = es.mutable(lambda m: m(number if inside == "field" else [{"k": number}]))
    _, new = run(model)
    value = new.x if inside == "field" else new.x[0]["k"]
    assert isinstance(value, jax.Array)
    assert value.dtype == dtype
    assert not value.weak_type
    assert value == jnp.array(result, dtype)


@pytest.mark.parametrize(("dtype", "number"), DOES_NOT_FIT, ids=str)
@pytest.mark.parametrize("weak", [False, True], ids=["number", "weak"])
def test_a_number_is_never_truncated(dtype, number, weak):
    if weak:
        number = jnp.asarray(number)
        assert number.weak_type
    model = Slot(jnp.zeros((), dtype))
    with rejects(model, ValueError, "`x`", jnp.dtype(dtype).name):
        es.mutable(model)(number)


def test_weak_types_become_strong():
    model = Slot(jnp.zeros((), F16))
    for value in (jnp.asarray(1.0), jnp.asarray(2)):
        assert value.weak_type
        _, new = es.mutable(model)(value)
        assert new.x.dtype == F16
        assert not new.x.weak_type
    _, new = jax.jit(lambda m: es.mutable(m)(jnp.sin(1.0) * 2))(model)
    assert not new.x.weak_type


@pytest.mark.parametrize(
    "value", [np.float64(0.5), np.array(0.5)], ids=["f64", "array"]
)
def test_values_of_numpy_take_the_old_dtype(value):
    # JAX converts NumPy's float64, the type of `np.mean`, to its own float: float32.
    _, new = es.mutable(Slot(jnp.zeros(())))(value)
    assert isinstance(new.x, jax.Array)
    assert (new.x, new.x.dtype) == (0.5, F32)
    assert es.mutable(Slot(value))(value)[1].x == 0.5


@pytest.mark.parametrize("dtype", [np.float64, jnp.bfloat16], ids=str)
def test_an_update_in_place_does_not_change_the_array_of_the_caller(dtype):
    class Net(es.Module):
        n: es.State

        def __call__(self):
            # Arrays of types that NumPy does not have are read-only.
            with contextlib.suppress(ValueError):
                self.n += self.n.dtype.type(1)

    array = np.zeros(2, dtype)
    model = Net(array)
    es.mutable(model)()
    assert model.n is array
    assert (array.astype(float) == 0).all()
    array += array.dtype.type(1)  # the caller can still write to it

    written = np.zeros(2, np.float32)
    _, new = es.mutable(Slot(jnp.ones(2)))(written)
    written += 1.0
    assert (new.x == 0.0).all()


I64, U64 = np.int64(2**40), np.uint64(2**40)
TOO_LARGE = {
    "number into int8": (jnp.int8, -129),
    "number into float16": (F16, 70_000),
    "weak array into uint8": (jnp.uint8, jnp.asarray(300)),
    "NumPy's scalar into uint32": (jnp.uint32, U64),
    "NumPy's array into int32": (I32, np.array([1, -(2**40)])),
}
LARGEST = {
    "number into bfloat16": (jnp.bfloat16, -256),
    "weak array into bfloat16": (jnp.bfloat16, jnp.asarray(256)),
    "NumPy's scalar into uint32": (jnp.uint32, np.uint64(2**32 - 1)),
    "NumPy's array into int32": (I32, np.array([-(2**31), 2**31 - 1])),
    "nothing of NumPy's into int32": (I32, np.zeros(0, np.int64)),
}


def written(how, dtype, value):
    """The value of a slot after a write, as a field or in place."""
    zeros = jnp.zeros(jnp.shape(value), dtype)
    model = Slot(zeros if how == "field" else {"k": zeros})
    if how == "in place":
        run = es.mutable(lambda m: m.x.update(k=value))
    else:
        run = es.mutable(lambda m: m(value))
    return run(model)[1].x


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.parametrize("how", ["field", "in place"])
def test_an_integer_that_does_not_fit_the_dtype_is_an_error(name, how):
    dtype, value = TOO_LARGE[name]
    given = str(value) if type(value) is int else "an integer in `.*`"
    with pytest.raises(ValueError, match=f"`x.*`: {given} does not fit into `[iuf]"):
        written(how, dtype, value)


@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("how", ["field", "in place"])
def test_the_largest_integer_of_a_dtype_can_be_written(name, how):
    dtype, value = LARGEST[name]
    new = jax.tree.leaves(written(how, dtype, value))[0]
    assert new.dtype == dtype
    assert not new.weak_type
    assert np.array_equal(np.asarray(new).astype(np.int64), np.asarray(value))


def test_a_traced_integer_wraps_as_in_jax():
    # The value is not known while tracing.
    _, new = jax.jit(lambda m: es.mutable(m)(jnp.int32(299) + 1))(Slot(jnp.int32(0)))
    assert new.x == 300
    weak = jax.jit(lambda m, n: es.mutable(m)(n))
    _, new = weak(Slot(jnp.uint8(0)), 300)
    assert new.x == np.int32(300).astype(np.uint8)


def test_an_array_of_numpy_never_becomes_a_jax_array_of_other_numbers():
    big = np.array([0, 2**40])
    # Inside, it remains the array that it is.
    sums, new = es.mutable(lambda model: model.x.sum())(Slot(big))
    assert sums == 2**40
    assert new.x is big
    with rejects(model := Slot(big), ValueError, "read-only"):
        es.mutable(lambda model: model.x.fill(0))(model)

    class Sows(es.Module):
        def __call__(self, value):
            self.sow("value", value)

    for value in (big, I64, 2**40):
        with rejects(model := Sows(), ValueError, "`value`", "jax_enable_x64"):
            es.capture(model)(value)

    class Drawn(es.Module):
        n: es.State = None

        def module_init(self, key):
            self.n = big

    with rejects(model := Drawn(), ValueError, "`n`", "jax_enable_x64"):
        model.init(0)


def test_an_abstract_model_stays_abstract():
    model = Slot(jax.ShapeDtypeStruct((2,), F32))
    _, new = es.mutable(model)(jax.ShapeDtypeStruct((2,), F32))
    assert new.x == model.x


# --- Containers -----------------------------------------------------------------------


class Stats(es.Module):
    stats: es.State[dict]
    heads: es.Parameter[dict]
    history: es.State[list]

    def __init__(self):
        self.stats = {"a": jnp.zeros(2), "b": {"c": jnp.array(0)}}
        self.heads = {"w": jnp.zeros(2)}
        self.history = [jnp.zeros(()), jnp.zeros(())]


INTO = {
    "parameter": (lambda m, x: m.heads.update(w=x), FROZEN, ["heads", "`Parameter`"]),
    "lost key": (lambda m, x: m.stats.pop("a"), ValueError, ["stats"]),
    "tracer": (
        lambda m, x: jax.vmap(lambda x: m.history.__setitem__(1, x))(x),
        es.TraceError,
        [r"history\[1\]", r"self\.stats = \{\*\*self\.stats"],
    ),
    "parameter's tracer": (
        lambda m, x: jax.vmap(lambda y: m.heads.update(w=x + y))(x),
        (es.TraceError, FROZEN),
        [r"heads\['w'\]"],
    ),
}


@pytest.mark.parametrize("transform", [lambda f: f, es.jit])
def test_a_write_to_a_module_that_is_removed_is_an_error(transform):
    class Counter(es.Module):
        n: es.State = 0

        def __call__(self):
            self.n = self.n + 1

    class Net(es.Module):
        layers: list[Counter]

        def __call__(self):
            transform(self.layers[1])()
            self.layers[1] = Counter()

    model = Net([Counter(), Counter()])
    with rejects(model, ValueError, r"`layers\[1\]\.n` was written, but its module is"):
        es.mutable(model)()


@pytest.mark.parametrize("name", INTO)
@jax.check_tracer_leaks(False)  # some leak on purpose
def test_invalid_writes_to_containers(name):
    f, error, fragments = INTO[name]
    with rejects(model := Stats(), error, *fragments):
        es.mutable(f)(model, jnp.ones(2))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.5, r"the number 0\.5 would make it float32\. State keeps its dtype"),
        (jnp.ones(()), r"from `i32\[\]` to `f32\[\]`\. State keeps its shape"),
        (2**40, r"1099511627776 does not fit into `i32\[\]`"),
    ],
)
def test_the_error_says_why_a_value_does_not_fit(value, said):
    model = Stats()
    with rejects(model, ValueError, rf"stats\['b'\]\['c'\].*{said}"):
        es.mutable(lambda m: m.stats["b"].update(c=value))(model)
