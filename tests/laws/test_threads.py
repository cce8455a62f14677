"""Sixteen threads at once: each gets bit for bit the result that it would get alone.

A test runs a few rounds, 63 in `nox -s fuzz`. All threads start each round together.
"""

import concurrent.futures
import hashlib
import os
import sys
import threading
import types
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import IS_FUZZ, reuses_keys, untouched

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


def bits(tree):
    """A digest of the structure, the static values and every bit of the arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    digest = hashlib.sha256(str(treedef).encode())
    for x in leaves:
        if eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jr.key_data(x)
        if eqx.is_array(x):
            digest.update(f"{x.dtype}{x.shape}{x.weak_type}".encode())
            digest.update(np.asarray(x).tobytes())
        else:
            digest.update(repr(x).encode())
    return digest.hexdigest()


# --- Models ---------------------------------------------------------------------------


class Block(es.Module):
    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    calls: es.State = 0

    def __init__(self, key):
        self.linear = eqx.nn.Linear(4, 4, key=key)
        self.norm = es.nn.BatchNorm(4, axis_name="batch")
        self.dropout = es.nn.Dropout(0.5, key=key)

    def __call__(self, x):
        if self.training:
            self.calls = self.calls + 1
        x = jax.nn.tanh(self.norm(self.linear(x)))
        self.sow("activation", x)
        return self.dropout(x)


class Net(es.Module):
    blocks: list[Block]
    table: es.Buffer

    def __init__(self, seed):
        self.blocks = [Block(key) for key in jr.split(jr.key(seed), 2)]
        self.table = jnp.arange(4.0)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x + self.table


class Cell(es.Module):
    matrix: es.Parameter
    hidden: es.State
    rng: es.RngStream

    def __init__(self, seed):
        self.matrix = jr.normal(jr.key(seed), (3, 3))
        self.hidden = jnp.zeros(3)
        self.rng = es.RngStream(jr.key(seed))

    def __call__(self, x):
        noise = jr.normal(self.rng(), (3,))
        self.hidden = jnp.tanh(self.matrix @ self.hidden + x + noise)
        return self.hidden


def data(seed, width=4):
    return jr.normal(jr.key(seed), (5, width))


def batched(model):
    return es.vmap(model, axis_name="batch")


def loss_fn(model, xs):
    return jnp.mean(jnp.square(batched(model)(xs)))


TX = optax.sgd(0.1, momentum=0.9)


@es.jit
def train(model, optimizer, xs):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, xs)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


SHARED = Net(7)


# --- The jobs of the threads ----------------------------------------------------------


def build(seed, **_):
    return Net(seed), Cell(seed), es.parts(Net(seed))[3].name


def declare(seed, **_):
    class Node(es.Module):
        w: "es.Parameter"
        stats: "dict[str, es.BatchStat]"
        inner: "Node | None"
        late: "list[es.Parameter[jax.Array]]"
        count: es.State = np.array(1)

        def __call__(self, x):
            self.count = self.count + 1
            self.stats = {"mean": self.stats["mean"] + jnp.mean(x)}
            return x * self.w if self.inner is None else self.inner(x) * self.w

    def make(inner):
        return Node(float(seed), {"mean": jnp.zeros(())}, inner, [jnp.ones(2)])

    out, new = es.mutable(make(make(None)))(data(seed))
    kinds = {part.name: (part.kind.__name__, part.value) for part in es.parts(new)}
    return out, kinds, repr(new), es.tabulate(new)


def differentiate(seed, **_):
    return es.value_and_grad(loss_fn)(Net(seed), data(seed))


def scan(seed, **_):
    def run(cell, xs):
        return es.scan(lambda carry, x: (carry + cell(x), x), jnp.zeros(3), xs)

    return es.mutable(run)(Cell(seed), data(seed, 3))


def switch(seed, **_):
    net = Net(seed)
    frozen = net.freeze(lambda net: net.blocks[0])
    trained = es.filter(frozen, es.trainable)
    modes = net.eval(), net.eval().train(), frozen, frozen.unfreeze(), trained
    return modes, [es.mutable(batched(mode))(data(seed)) for mode in modes[:3]]


def jit_shared(seed, **_):
    model = Net(seed)
    optimizer = es.Optimizer(TX).init(model)
    losses = []
    for _ in range(3):
        loss, model, optimizer = train(model, optimizer, data(seed))
        losses.append(loss)
    return losses, model, optimizer


def jit_own(seed, own, **_):
    model, outs = Cell(seed), []
    for x in data(seed, 3):
        out, model = own(model, x)
        outs.append(out)
    return outs, model


def jit_in_scope(seed, **_):
    return es.mutable(lambda net, xs: es.jit(batched(net))(xs))(Net(seed), data(seed))


def capture(seed, **_):
    return es.capture(batched(Net(seed)), outputs="*")(data(seed))


def tabulate(seed, **_):
    return es.tabulate(batched(Net(seed)), data(seed)), es.tabulate(Cell(seed), depth=1)


def files(seed, folder, **_):
    path = folder / f"{threading.get_ident()}.safetensors"
    es.save(path, Net(seed))
    return path.read_bytes(), es.load(path, Net(seed + 1))


def read_shared(seed, **_):
    out, new = es.mutable(batched(SHARED))(data(seed))
    return out, new, SHARED.filter(es.BatchStat), SHARED.update(new.filter(es.State))


def initialize(seed, **_):
    class Lazy(es.Module):
        linear: eqx.nn.Linear = es.lazy(eqx.nn.Linear, 2, 3)
        cells: list[Block] = eqx.field(default_factory=lambda: [es.lazy(Block)])

    return es.state_dict(Lazy().init(seed))


JOBS = [
    build,
    declare,
    differentiate,
    scan,
    switch,
    jit_shared,
    jit_own,
    jit_in_scope,
    capture,
    tabulate,
    files,
    read_shared,
    initialize,
]
SEEDS = 4


def test_each_thread_gets_the_serial_result(tmp_path):
    # There are 13 jobs, so threads 0 and 13 run the same job in the same round.
    own = [es.jit(lambda cell, x: es.mutable(cell)(x)) for _ in range(THREADS)]

    def work(thread, i):
        job, seed = JOBS[(thread + i) % len(JOBS)], i % SEEDS
        return job, seed, bits(job(seed, own=own[thread], folder=tmp_path))

    with untouched(SHARED):
        rounds = at_once(work)
    expected = {
        (job, seed): bits(job(seed, own=own[0], folder=tmp_path))
        for job in JOBS
        for seed in range(min(SEEDS, ROUNDS))
    }
    for results in rounds:
        for job, seed, found in results:
            assert found == expected[job, seed], (job.__name__, seed)
    assert {job for results in rounds for job, _, _ in results} == set(JOBS)


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

        class Outer(es.Module):
            layers: "list[Inner]"
            mean: "es.BatchStat[jax.Array]"

            def __call__(self, x):
                assert len({type(layer) for layer in self.layers}) == 1
                for layer in self.layers:
                    x = layer(x)
                self.mean = jnp.mean(x)
                return x

        traces = []

        def step(model, x):
            traces.append(threading.get_ident())
            return es.mutable(model)(x)

        inner = [Inner(jnp.array(2.0), jnp.array(i)) for i in range(3)]
        model = Outer(inner, jnp.array(0.0))
        self.rounds.append((Inner, model, es.jit(step), traces))


def test_all_threads_use_new_classes_at_once():
    first = First()

    def work(thread, i):
        cls, model, step, _ = first.rounds[i]
        ways = [
            lambda: (repr(cls(1.0, 2)), bits(cls(1.0, 2))),
            lambda: [(part.name, part.kind.__name__) for part in es.parts(model)],
            lambda: bits(es.mutable(model)(data(0))),
            lambda: bits(step(model, data(0))),
            lambda: es.tabulate(model, data(0)),
        ]
        results = {}
        for j in range(len(ways)):
            way = (thread + j) % len(ways)
            results[way] = ways[way]()
        return results

    rounds = at_once(work, prepare=first)
    for i, results in enumerate(rounds):
        alone = work(0, i)
        assert all(found == alone for found in results)


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


def test_a_function_that_all_threads_call_first_is_traced_once():
    first = First()

    def work(thread, i):
        _, model, step, _ = first.rounds[i]
        return bits(step(model, data(0)))

    rounds = at_once(work, prepare=first)
    assert all(len(set(results)) == 1 for results in rounds)
    assert [len(traces) for *_, traces in first.rounds] == ROUNDS * [1]


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


def test_a_check_fails_in_a_program_that_another_thread_compiles():
    # The second thread waits for the program of the first, and that program has a
    # check.
    is_traced = threading.Event()

    @es.jit
    def f(x):
        if len(x) == 1:  # this program cannot raise, and `es.jit` knows that
            return x
        y = x
        for i in range(150):  # takes a while to compile
            y = jnp.sin(y @ jnp.ones((2, 2)) + i)
        y = eqx.error_if(y, x[0] < 0, "negative")
        is_traced.set()
        return y

    f(jnp.ones(1))
    f(jnp.ones(1))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(f, jnp.ones(2))
        assert is_traced.wait(timeout=60)
        threading.Event().wait(0.3)
        second = pool.submit(f, -jnp.ones(2))
        assert first.exception() is None
        with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
            second.result()


@pytest.mark.parametrize("is_good", [True, False])
def test_a_program_that_another_thread_is_inspecting(monkeypatch, is_good):
    # The program has run, but it is not known yet whether it can raise.
    is_looking, may_end = threading.Event(), threading.Event()

    def look(jaxpr):
        if not is_looking.is_set():
            is_looking.set()
            may_end.wait(timeout=60)
        return callbacks_in(jaxpr)

    callbacks_in = _programs.callbacks_in
    f = es.jit(lambda x: x if len(x) == 1 else eqx.error_if(x, x[0] < 0, "negative"))
    f(jnp.ones(1))  # now there is a fast path
    monkeypatch.setattr(_programs, "callbacks_in", look)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(f, jnp.ones(2))
        assert is_looking.wait(timeout=60)
        if is_good:
            assert eqx.tree_equal(pool.submit(f, jnp.ones(2)).result(), jnp.ones(2))
        else:
            with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
                pool.submit(f, -jnp.ones(2)).result()
        may_end.set()
        assert eqx.tree_equal(first.result(), jnp.ones(2))


@pytest.mark.parametrize("is_good", [True, False])
def test_another_thread_compiles_a_program_after_the_look_up(is_good):
    f = es.jit(lambda x: x if len(x) == 1 else eqx.error_if(x, x[0] < 0, "negative"))
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
        if is_good:
            assert eqx.tree_equal(pool.submit(f, jnp.ones(2)).result(), jnp.ones(2))
        else:
            with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
                pool.submit(f, -jnp.ones(2)).result()


def test_saves_to_one_file_at_once(tmp_path):
    path = tmp_path / "model.safetensors"
    models = [Net(seed) for seed in range(4)]
    es.save(path, models[0])
    whole = {bits(model) for model in models}

    def work(thread, i):
        es.save(path, models[thread % 4])
        return bits(es.load(path, models[0]))

    for results in at_once(work):
        assert set(results) <= whole
    assert os.listdir(tmp_path) == [path.name]


# --- One scope and another thread -----------------------------------------------------


@pytest.mark.parametrize("where", ["scope", "transform"])
@pytest.mark.parametrize("how", ["write", "write a container", "transform"])
def test_a_scope_belongs_to_the_thread_that_opened_it(where, how):
    class Machine(es.Module):
        phase: es.State[list]
        count: es.State = 0

        def __call__(self):
            self.count = self.count + 1
            if where == "transform":
                es.checkpoint(self.elsewhere)()
            else:
                self.elsewhere()
            self.count = self.count + 1

        def elsewhere(self):
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                with pytest.raises(RuntimeError, match="a different thread has opened"):
                    pool.submit(self.use).result()

        def use(self):
            if how == "write":
                self.count = 5
            elif how == "write a container":
                self.phase = [self.phase[0] + 1]
            else:
                es.checkpoint(lambda: self.count)()

    model = Machine([jnp.zeros(())])
    with untouched(model):
        _, new = es.mutable(model)()
    assert (new.count, new.phase[0]) == (2, 0)


@reuses_keys
def test_another_thread_may_open_its_own_scope_inside_a_call():
    def f(model, x):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            y, inner = pool.submit(es.mutable(model.eval().train()), x).result()
        return y, inner, model(x)

    cell = Cell(0)
    (y, inner, same), new = es.mutable(f)(cell, jnp.ones(3))
    assert eqx.tree_equal((y, inner), (same, new))
