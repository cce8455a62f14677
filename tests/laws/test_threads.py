"""Sixteen threads at once: each gets bit for bit the result that it would get alone.

A test runs a few rounds, 63 in `nox -s fuzz`. All threads start each round together.
"""

import concurrent.futures
import os
import sys
import threading
import types
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import IS_FUZZ, reuses_keys, untouched
from models import Layer, Lazy, Net, Noisy

import eqx_state as es
from eqx_state._jit import programs as _programs
from eqx_state._jit.options import Options


THREADS = 16
ROUNDS = 63 if IS_FUZZ else 3  # of about a second each

pytestmark = pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="the leak check fails with threads, also around `eqx.filter_jit`",
)


@pytest.fixture(autouse=True)
def _switch_often():
    """Switch threads after every microsecond, and restore the filters of warnings."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with warnings.catch_warnings():
        yield
    sys.setswitchinterval(interval)


def at_once(work, rounds=ROUNDS, prepare=None):
    """The results of `work(thread, round)`, as one list per round.

    A round begins when all threads have finished the previous one, and one of them has
    called `prepare`.
    """
    start = threading.Barrier(THREADS, prepare)

    def run(thread):
        try:
            # JAX stores these settings per thread.
            with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
                results = []
                for i in range(rounds):
                    start.wait(timeout=300)
                    results.append(work(thread, i))
                return results
        except BaseException:
            start.abort()  # so that the other threads do not wait
            raise

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(run, thread) for thread in range(THREADS)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if not isinstance(error, (threading.BrokenBarrierError, types.NoneType)):
            raise error
    by_thread = [future.result() for future in futures]
    return [list(results) for results in zip(*by_thread, strict=True)]


# --- The jobs of the threads ----------------------------------------------------------


def make_net(seed):
    return Net([Layer(), Noisy(jr.key(seed)), Layer(3.0)])


def data(seed):
    return jr.normal(jr.key(seed), (5,))


TX = optax.sgd(0.1)
SHARED = make_net(7)


@es.jit
def step(model, optimizer, xs):
    def loss_fn(model):
        return jnp.mean(jnp.square(es.vmap(model)(xs)))

    (loss, model), grads = es.value_and_grad(loss_fn)(model)
    return loss, *optimizer.update(grads, model)


def train(seed):
    model = make_net(seed)
    optimizer = es.Optimizer(TX).init(model)
    for _ in range(3):
        loss, model, optimizer = step(model, optimizer, data(seed))
    return loss, model, optimizer


def scan(seed):
    def run(net, xs):
        return es.scan(lambda carry, x: (carry, net(x)), None, xs)

    return es.mutable(run)(make_net(seed), data(seed))


def capture(seed):
    return es.capture(es.vmap(SHARED), outputs="*")(data(seed))


def initialize(seed):
    return es.init(Lazy(), seed, data(seed))


JOBS = [train, scan, capture, initialize]


def test_each_thread_gets_the_serial_result():
    def work(thread, i):
        return JOBS[(thread + i) % len(JOBS)](i % 3)

    with untouched(SHARED):
        rounds = at_once(work)
    expected = [[job(seed) for job in JOBS] for seed in range(3)]
    for i, results in enumerate(rounds):
        for thread, found in enumerate(results):
            assert eqx.tree_equal(found, expected[i % 3][(thread + i) % len(JOBS)])


# --- First use in several threads -----------------------------------------------------


class First:
    """In each round a class, a model and a function that no thread has used before."""

    def __init__(self):
        self.rounds = []

    def __call__(self):
        class Inner(es.Module):
            w: "es.Parameter"
            count: "es.State"

            def __call__(self, x):
                self.count = self.count + 1
                return jnp.tanh(x * self.w)

        traces = []

        def step(model, x):
            traces.append(threading.get_ident())
            return es.mutable(model)(x)

        model = Net([Inner(jnp.array(2.0), jnp.array(i)) for i in range(3)])
        self.rounds.append((Inner, model, es.jit(step), traces))


def test_all_threads_use_new_classes_at_once():
    first = First()

    def work(thread, i):
        cls, model, step, _ = first.rounds[i]
        ways = [
            lambda: (repr(cls(1.0, 2)), cls(1.0, 2)),
            lambda: [(part.name, part.kind.__name__) for part in es.parts(model)],
            lambda: es.mutable(model)(data(0)),
            lambda: step(model, data(0)),
            lambda: es.tabulate(model, data(0)),
        ]
        order = [(thread + j) % len(ways) for j in range(len(ways))]
        return dict(sorted((way, ways[way]()) for way in order))

    rounds = at_once(work, prepare=first)
    for i, results in enumerate(rounds):
        alone = work(0, i)
        assert all(eqx.tree_equal(found, alone) for found in results)


def test_a_function_that_all_threads_call_first_is_traced_once():
    first = First()

    def work(thread, i):
        _, model, step, _ = first.rounds[i]
        return step(model, data(0))

    for results in at_once(work, prepare=first):
        assert all(eqx.tree_equal(found, results[0]) for found in results)
    assert [len(traces) for *_, traces in first.rounds] == ROUNDS * [1]


def test_two_threads_that_observe_a_class_at_once_use_one_subclass_of_it():
    meeting = threading.Barrier(2)
    used = []

    class Meeting(type(es.Module)):
        """Both threads create the subclass before either of them uses it."""

        def __init__(cls, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if threading.current_thread() is not threading.main_thread():
                meeting.wait(timeout=300)

    class Layer(es.Module, metaclass=Meeting):
        def __call__(self, x):
            used.append(type(self))
            return x

    layer = Layer()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        capture = es.capture(layer, outputs=Layer)
        for future in [pool.submit(capture, 1.0) for _ in range(2)]:
            future.result()
    assert len(used) == 2
    assert len(set(used)) == 1
    assert used[0] is not Layer


def test_names_are_defined_while_threads_look_them_up(monkeypatch):
    # A class that is imported for type checkers only is such a name.
    module = types.ModuleType("late_names")
    monkeypatch.setitem(sys.modules, "late_names", module)
    source = """
class Late(eqx.Module):
    x: "Missing"
    y: "es.State"
"""
    vars(module).update(eqx=eqx, es=es)
    exec(source, vars(module))
    model = module.Late(jnp.ones(2), jnp.ones(2))

    def work(thread, i):
        setattr(module, f"name_{thread}_{i}", None)
        return [[part.kind for part in es.parts(model)] for _ in range(20)]

    for results in at_once(work):
        assert results == THREADS * [20 * [[es.Parameter, es.State]]]
    module.Missing = es.Buffer
    assert [part.kind for part in es.parts(model)] == [es.Buffer, es.State]


# --- State of the process -------------------------------------------------------------


def test_concurrent_calls_do_not_change_the_filters_of_warnings():
    layer = eqx.nn.Linear(3, 3, key=jr.key(0))
    f = es.jit(lambda x: layer(x), donate="all")
    f(jnp.ones(3))
    before = list(warnings.filters)
    at_once(lambda thread, i: [f(jnp.ones(3)) for _ in range(3)])
    assert warnings.filters == before


def test_a_call_does_not_stop_another_thread_from_recording_warnings():
    tracing, may_end = threading.Event(), threading.Event()

    @es.jit
    def f(x):
        tracing.set()
        may_end.wait(timeout=60)
        return 2 * x

    thread = threading.Thread(target=f, args=(jnp.ones(3),))
    thread.start()
    tracing.wait(timeout=60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        may_end.set()
        thread.join()
        warnings.warn("mine", stacklevel=1)
    assert [str(w.message) for w in caught] == ["mine"]


def checked(x):
    """With one element, a program that cannot raise, and `es.jit` knows that."""
    return x if len(x) == 1 else eqx.error_if(x, x[0] < 0, "negative")


def test_a_check_fails_in_a_program_that_another_thread_is_inspecting(monkeypatch):
    # The program has run, but it is not known yet whether it can raise.
    is_looking, may_end = threading.Event(), threading.Event()

    def look(jaxpr):
        if not is_looking.is_set():
            is_looking.set()
            may_end.wait(timeout=60)
        return callbacks_in(jaxpr)

    callbacks_in = _programs.callbacks_in
    f = es.jit(checked)
    f(jnp.ones(1))  # now there is a fast path
    monkeypatch.setattr(_programs, "callbacks_in", look)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(f, jnp.ones(2))
        assert is_looking.wait(timeout=60)
        with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
            pool.submit(f, -jnp.ones(2)).result()
        may_end.set()
        assert eqx.tree_equal(first.result(), jnp.ones(2))


def test_another_thread_compiles_a_program_after_the_look_up():
    f = es.jit(checked)
    f(jnp.ones(1))
    (program,) = _programs.programs_of(f, Options()).by_key.values()
    run = program.jitted

    def late(*arrays):
        program.jitted = run
        pool.submit(f, jnp.ones(2)).result()
        return run(*arrays)

    # Called after the look-up, which found no program that can raise.
    program.jitted = late
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
            pool.submit(f, -jnp.ones(2)).result()


def test_saves_to_one_file_at_once(tmp_path):
    path = tmp_path / "model.safetensors"
    models = [make_net(seed) for seed in range(2)]
    es.save(path, models[0])

    def work(thread, i):
        es.save(path, models[thread % 2])
        return es.load(path, models[0])

    for results in at_once(work):
        for found in results:
            assert any(eqx.tree_equal(found, model) for model in models)
    assert os.listdir(tmp_path) == [path.name]


# --- One scope and another thread -----------------------------------------------------


def add(layer):
    layer.count = layer.count + 1


@pytest.mark.parametrize("use", [add, lambda layer: es.checkpoint(layer)(1.0)])
@pytest.mark.parametrize("around", [lambda f: f, es.checkpoint])
def test_a_scope_belongs_to_the_thread_that_opened_it(use, around):
    def in_a_thread(layer):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with pytest.raises(RuntimeError, match="a different thread has opened"):
                pool.submit(use, layer).result()

    def run(layer):
        add(layer)
        around(in_a_thread)(layer)
        add(layer)

    model = Layer()
    with untouched(model):
        _, new = es.mutable(run)(model)
    assert new.count == 2


@reuses_keys
def test_another_thread_may_open_its_own_scope_inside_a_call():
    def f(model, x):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            y, inner = pool.submit(es.mutable(model.eval().train()), x).result()
        return y, inner, model(x)

    (y, inner, same), new = es.mutable(f)(Noisy(jr.key(0)), jnp.ones(3))
    assert eqx.tree_equal((y, inner), (same, new))
