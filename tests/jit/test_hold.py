"""`es.hold`: the same results as `es.jit`, with a carry that the held step stores."""

import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import reuses_keys
from jit_cases import X

import eqx_state as es
from eqx_state._jit.packing import LIMIT


both = pytest.mark.parametrize("donate", [False, True])
promotes = jax.numpy_dtype_promotion("standard")  # `optax.adam` promotes implicitly


class Mean(es.Module):
    sum: es.State = 0.0
    count: es.State = 0

    def __call__(self, x):
        self.sum = self.sum + x
        self.count = self.count + 1
        return self.sum / self.count.astype(float)


class Net(es.Module):
    inner: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    outer: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        # The gradient of a bias before a BatchNorm is rounding, which adam enlarges.
        self.inner = eqx.nn.Linear(3, 4, use_bias=False, key=keys[0])
        self.norm = es.nn.BatchNorm(4)
        self.dropout = es.nn.Dropout(0.5, key=keys[1])
        self.outer = eqx.nn.Linear(4, 2, key=keys[2])

    def __call__(self, x):
        y = self.dropout(self.norm(jax.vmap(self.inner)(x)))
        return jax.vmap(self.outer)(y)


def training(key):
    net = Net(key)
    return net, es.Optimizer(optax.adam(0.1)).init(net)


def train(carry, x):
    net, optimizer = carry
    loss_fn = lambda net, x: jnp.mean(jnp.square(net(x)))  # noqa: E731
    (loss, net), grads = es.value_and_grad(loss_fn)(net, x)
    net, optimizer = optimizer.update(grads, net)
    return (net, optimizer), loss


def add(carry, x):
    return jax.tree.map(lambda c: c + x, carry), x


def plain(carry, x):
    return es.jit(add)(carry, x)[0]


# --- Results --------------------------------------------------------------------------


@both
@promotes
def test_training_equals_training_under_jit(donate, getkey):
    carry = training(getkey())
    given = jax.tree.map(jnp.copy, carry)
    run, step = es.hold(train, carry, donate=donate), es.jit(train)
    expected = carry
    for _ in range(3):
        x = jr.normal(getkey(), (8, 3))
        expected, loss = step(expected, x)
        assert jnp.allclose(run(x), loss, rtol=1e-5)
    assert eqx.tree_equal(run.carry, expected, rtol=1e-4, atol=1e-5)
    assert eqx.tree_equal(carry, given)


def test_modules_in_the_carry_write_their_state():
    mean = Mean()
    run = es.hold(lambda mean, x: (mean, mean(x)), mean)
    assert [run(jnp.array(x)) for x in (1.0, 2.0, 6.0)] == [1.0, 1.5, 3.0]
    assert run.carry.count == 3
    assert mean.count == 0


def test_a_written_module_must_be_returned():
    def step(mean, x):
        before = jax.tree.map(lambda x: x, mean)
        return before, mean(x)

    run = es.hold(step, Mean())
    with pytest.raises(ValueError, match=r"`sum` was written in a module of the carry"):
        run(jnp.array(1.0))
    assert run.carry.count == 0


def test_writing_a_parameter_is_an_error():
    class Layer(es.Module):
        w: es.Parameter = 1.0

        def __call__(self):
            self.w = self.w + 1

    run = es.hold(lambda layer: (layer, layer()), Layer())
    with pytest.raises(AttributeError, match="`w` is a `Parameter`"):
        run()


@both
@reuses_keys
def test_every_type_of_array_can_be_in_the_carry(donate):
    big = jnp.arange(LIMIT, dtype=jnp.float32)
    carry = {
        "scalar": jnp.ones(()),
        "vector": X,
        "matrix": jnp.ones((2, 3)),
        "half": jnp.ones(3, jnp.bfloat16),
        "halves": jnp.ones((2, 2), jnp.bfloat16),
        "alone": jnp.arange(3, dtype=jnp.int16),
        "flags": [jnp.array([True, False]), jnp.array(True)],
        "empty": jnp.ones((0, 3)),
        "big": big,
        "weak": jnp.array(1.0),
        "number": 2.0,
        "numpy": np.arange(3, dtype=np.int32),
        "keys": [jr.key(0), jr.key(2), jr.split(jr.key(1, impl="rbg"), 2)],
        "static": ("word", None, jnp.tanh),
    }

    def change(x):
        if isinstance(x, jax.Array):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            if is_key or x.dtype == bool:
                return x[::-1] if x.shape else x
            return x * 2
        return x

    def step(carry, factor):
        return jax.tree.map(change, carry), factor

    run, jitted = es.hold(step, carry, donate=donate), es.jit(step)
    expected = {**carry, "number": jnp.asarray(2.0)}
    assert eqx.tree_equal(run.carry, {**expected, "numpy": jnp.asarray(carry["numpy"])})
    for _ in range(2):
        run(1)
        expected, _ = jitted(expected, 1)
    assert eqx.tree_equal(run.carry, expected)
    assert run.carry["number"].weak_type
    assert run.carry["weak"].weak_type
    assert big[-1] == LIMIT - 1


@pytest.mark.parametrize(
    "carry", [(), None, X, jnp.ones(()), {"a": X}, [jr.key(0)], {"word": "b"}]
)
@both
def test_a_carry_may_be_any_tree(carry, donate):
    run = es.hold(lambda carry: (carry, 1), carry, donate=donate)
    assert run() == 1
    assert run() == 1
    assert eqx.tree_equal(run.carry, carry)


def test_the_result_must_be_a_tuple_or_list_of_two():
    assert es.hold(lambda c: [c, 3], X)() == 3
    for out, shown in (X, r"f32\[3\]"), ((X, X, X), "tuple of 3"):
        with pytest.raises(TypeError, match=f"`es.hold` must return a .*`{shown}`"):
            es.hold(lambda c, out=out: out, X)()


def test_a_type_error_inside_the_function_is_raised_unchanged():
    with pytest.raises(TypeError, match=r"^len\(\) takes exactly one argument"):
        es.hold(lambda c: len(c, c), X)()


# --- Compilations ---------------------------------------------------------------------


@both
def test_each_structure_and_mode_is_traced_once(donate):
    traces = 0

    def step(mean, x):
        nonlocal traces
        traces += 1
        return mean, mean(x) if mean.training else x

    run = es.hold(step, Mean(), donate=donate)
    for _ in range(3):
        run(jnp.array(1.0))
    assert traces == 1
    for _ in range(2):
        run.carry = run.carry.eval()
        run(jnp.array(1.0))
        assert traces == 2
        run.carry = run.carry.train()
        run(jnp.array(1.0))
        assert traces == 2
    assert run.carry.count == 5


def test_static_values_in_the_carry_are_distinguished_by_type():
    class Scaled(es.Module):
        x: es.State
        factor: Any

    x = jnp.ones(2)
    run = es.hold(lambda model: (model, model.x * model.factor), Scaled(x, 1))
    for factor in (1.0, 1, 0.0, -0.0):
        run.carry = Scaled(x, factor)
        assert np.array_equal(np.signbit(run()), np.signbit(x * factor))
        assert repr(run.carry.factor) == repr(factor)


def test_arguments_are_bound_as_by_jit():
    traces = 0

    def step(c, x, power, *, scale=1):
        nonlocal traces
        traces += 1
        return c, scale * x**power

    run = es.hold(step, X)
    assert run(jnp.array(3), 2) == run(jnp.array(3), power=2) == 9
    assert run(np.array(3), 2, scale=2) == 18
    assert traces == 2
    assert run(jnp.array(3), 3) == 27
    assert traces == 3
    with pytest.raises(TypeError, match="missing a required argument: 'power'"):
        run(jnp.array(3), scale=1)
    with pytest.raises(TypeError, match="cannot be hashed"):
        run({1}, 2)


def test_a_weak_type_may_become_strong():
    run = es.hold(add, [0.0, 1.0])
    for _ in range(3):
        run(jnp.ones(()))
    assert run.carry == [3, 4]
    assert not any(x.weak_type for x in run.carry)
    assert len(run._held[1]) == 1


def test_a_strong_type_remains_strong():
    run = es.hold(lambda n, reset: (0 if reset else n + 1, n), jnp.ones((), jnp.int32))
    for reset in (False, True, False):
        run(reset)
    assert run.carry == 1
    assert not run.carry.weak_type


# --- The carry ------------------------------------------------------------------------


@both
def test_the_carry_that_is_read_is_a_separate_tree(donate):
    carry = {"list": [X, X + 1], "big": jnp.zeros(LIMIT)}
    run = es.hold(add, carry, donate=donate)
    read = run.carry
    read["list"].clear()
    run(1.0)
    assert eqx.tree_equal(run.carry, plain(carry, 1.0))
    # Deleting arrays that were read or returned must not affect the held step.
    for x in jax.tree.leaves(run.carry) if donate else run.carry["list"]:
        x.delete()
    run(1.0)
    assert eqx.tree_equal(run.carry, plain(carry, 2.0))


def test_donation_deletes_only_arrays_of_the_held_step():
    """Not arrays of the first carry, of an argument, of an output or of a closure."""
    big, constant = jnp.ones(LIMIT), jnp.full(LIMIT, 2.0)

    def step(carry, x, which):
        new = {"new": x, "constant": constant, "old": carry, "sum": carry + 1}[which]
        return new, (carry, new)

    run = es.hold(step, big, donate=True)
    kept = [big, constant]
    # Without `jit`, a step may return its arguments themselves.
    for disabled in (True, False):
        with jax.disable_jit(disabled):
            for which in ("old", "new", "sum", "constant", "old", "sum", "sum"):
                kept += run(x := jnp.full(LIMIT, 3.0), which)
                kept.append(x)
    assert not any(x.is_deleted() for x in kept)
    held = run._held[1]
    run(big, "sum")
    assert all(x.is_deleted() for x in held)


def test_a_numpy_array_of_the_caller_may_change_later():
    x = np.zeros(LIMIT, np.float32)
    run = es.hold(lambda c: (c, c), x)
    x += 1
    assert (run() == 0).all()


def test_arrays_lie_in_one_buffer_for_each_dtype():
    floats, ints = [jnp.ones(n) for n in range(1, 9)], [X.astype(int)] * 3
    flags = [jnp.array(True), jnp.array(False)]
    carry = floats, ints, flags, jnp.zeros(LIMIT), jr.key(0)
    run = es.hold(lambda c: (c, 0), carry)
    assert len(run._held[1]) == 5
    run()
    assert len(run._held[1]) == 5


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_arrays_keep_their_sharding(getkey):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    explicit = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec
    named = jax.sharding.NamedSharding
    for place, buffers in (
        (None, 1),
        (jax.devices()[1], 1),
        (named(mesh, spec()), 1),
        (named(explicit, spec()), 3),
    ):
        carry = [X, X + 1, jr.normal(getkey(), (2, 2))]
        if place is not None:
            carry = jax.device_put(carry, place)
        run = es.hold(add, carry)
        run(1.0)
        assert len(run._held[1]) == buffers
        for x, y in zip(run.carry, carry, strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
            assert x.committed == y.committed
        assert eqx.tree_equal(run.carry, plain(carry, 1.0))
    rows = jax.device_put([jnp.ones((2, 3)), jnp.ones((4, 3))], named(mesh, spec("d")))
    run = es.hold(add, [*rows, *jax.device_put([X, X], named(mesh, spec()))])
    run(1.0)
    assert [x.sharding.is_fully_replicated for x in run.carry] == [False] * 2 + [
        True
    ] * 2


# --- Errors ---------------------------------------------------------------------------


@both
def test_an_invalid_carry_is_an_error(donate):
    hold = lambda c: es.hold(lambda c: (c, 0), c, donate=donate)  # noqa: E731
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    with pytest.raises(TypeError, match=r"`\['a'\]` as `Sh.*, which has a shape"):
        hold({"a": shape})
    mean = Mean()
    with pytest.raises(ValueError, match="occurs twice"):
        hold([mean, mean])

    class Lazy(es.Module):
        w: es.Parameter = es.Initializer(jr.normal)

    with pytest.raises(es.NotInitializedError, match="`w`"):
        hold(Lazy())
    with pytest.raises(TypeError, match="cannot be called"):
        es.hold(3, X)
    with pytest.raises(TypeError, match="`donate` must be `True` or `False`"):
        es.hold(add, X, donate="all")
    with pytest.raises(ValueError, match="`the carry`: .*does not fit into `int32`"):
        hold(np.array([2**40]))
    run = hold(X)
    with pytest.raises(ValueError, match="occurs twice"):
        run.carry = [mean, mean]
    assert (run.carry == X).all()


def refuse(c, x):
    c = eqx.error_if(c, x < 0, "must not be negative")
    return c + x, x


@pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="`eqx.error_if` fails under the leak check, also in `eqx.filter_jit`",
)
def test_a_failed_check_does_not_change_the_carry():
    run = es.hold(refuse, X)
    for _ in range(2):
        run(jnp.array(1.0))
        with pytest.raises(eqx.EquinoxRuntimeError, match="must not be negative"):
            run(jnp.array(-1.0))
    assert (run.carry == X + 2).all()


@both
def test_an_error_before_the_run_does_not_change_the_carry(donate):
    def step(c, x, fail):
        assert not fail, "no"
        return c + x, x

    run = es.hold(step, X, donate=donate)
    deleted = jnp.ones(())
    deleted.delete()
    for _ in range(2):
        with pytest.raises(AssertionError, match="no"):
            run(jnp.ones(()), True)
        with pytest.raises(RuntimeError, match="deleted"):
            run(deleted, False)
        run(jnp.ones(()), False)
    assert (run.carry == X + 2).all()


@pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks, reason="the leak check fails with threads"
)
@both
def test_calls_from_several_threads_run_one_after_another(donate):
    run = es.hold(add, [X, X], donate=donate)
    threads = [
        threading.Thread(target=lambda: [run(jnp.ones(())) for _ in range(20)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eqx.tree_equal(run.carry, [X + 80, X + 80])
