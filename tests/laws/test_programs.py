"""Random programs compute the same with `eqx_state` and in plain Python.

`program_writer`, `program_statements` and `program_loops` draw the source of a program,
for a random model (`program_models`). The program runs twice: with the library, and
with the functions of `program_reference`, which does not trace. About one program in
four must end in an error (`program_faults`).

`nox -s fuzz` runs the programs of the seeds 0 to 20,000. To run other or fewer seeds:

    EQX_STATE_PROGRAMS=20000:21000 pytest -k seeds tests/laws/test_programs.py

If a seed fails, its program is printed, and the remaining seeds still run. When the
generator changes, a seed gives a different program, so a program that has found a fault
is stored as text in `CASES`.

The table lists faults that the programs find. Each fault was put back alone, and the
programs that contain its form ran in the order of their seeds. The seed is the first
one that failed, with the generator of that time.

| fault | seed |
|---|---|
| a function that `es.jit` returns contains the model of the first call | 9 |
| state that is not an array is lost in a transform | 11 |
| if a stack is scanned or mapped, and closed over, the closure sees a slice | 26 |
| state that is used in two ways has two values, without an error | 27 |
| `es.jit` confuses `1` with `True`, and `0` with `False` | 28 |
| integers are truncated when written | 88 |
| a module that occurs twice in an argument of `es.jit` is not reported | 251 |
| `es.jit` uses one program for modules of one scope and of two scopes | 466 |
| `es.jit` treats unequal dataclasses as equal | 532 |
| typed keys in a state other than `es.Rng` are shared | 8 |
| a covered write under a transform is not reported | 11 |
| a scope threads what a partial binds | 11 |
| an owned module with `None` in `in_axes` has one key for all lanes | 138 |
| a covered write in a nested scope is not reported | 617 |

An older generator found three more, in a version with all three: under `es.jit`,
functions that share a dict or a closure cell get separate copies of it; `es.jit`
returns a function among its arguments as a different function; an inner scope returns
what its call wrote to the outer model.
"""

import copy
import functools as ft
import gc
import os
import random
import textwrap
import traceback
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import IS_FUZZ, leaks_on_purpose, rejects, reuses_keys, untouched
from program_models import (
    build,
    Cell,
    flt,
    Jax,
    mix,
    Net,
    Noise,
    PlainKey,
    Spec,
    STATICS,
    total,
    two,
    worth,
)
from program_objects import leaves_of
from program_reference import Reference
from program_statements import of_seed, programs

import eqx_state as es
from eqx_state._jit import results


def weigh(grads: Any) -> Any:
    leaves = jax.tree.leaves(grads)
    return sum((i + 1) * jnp.sum(x) for i, x in enumerate(leaves)) / 8 + jnp.zeros(())


def sown(values: dict[str, Any]) -> Any:
    return sum(jnp.sum(x) for x in jax.tree.leaves(values)) + jnp.zeros(())


COMMON = {
    "flt": flt,
    "ft": ft,
    "mix": mix,
    "total": total,
    "two": two,
    "worth": worth,
    "BIG": np.int64(2**40),
    "STATICS": STATICS,
}
LIBRARY = {
    **COMMON,
    "own": lambda *_: None,
    "copied": lambda tree: jax.tree.map(lambda x: x, tree),
    "ensemble": lambda f, _, **kw: es.vmap(f, axes={...: 0}, **kw),
    "eqx": eqx,
    "es": es,
    "jax": jax,
    "jtu": jtu,
    "pmean": jax.lax.pmean,
    "sown": sown,
    "weigh": weigh,
    "KEY": jr.key(77),
}


class _Partials:
    Partial = ft.partial


def run(text: str, names: dict[str, Any], *args: Any) -> Any:
    namespace = {**names, "__name__": "program"}
    exec(compile(text, "program", "exec"), namespace)
    return namespace["main"](*args)


def reference_names(world: Reference, own: Any) -> dict[str, Any]:
    return {
        **COMMON,
        "copied": world.copy,
        "ensemble": world.ensemble,
        "eqx": _Partials,
        "es": world,
        "jtu": _Partials,
        "own": own,
        "pmean": world.pmean,
        "sown": lambda sown: sown[1],
        "weigh": world.weigh,
        "KEY": world.key(77),
    }


def run_reference(spec: Any, text: str) -> tuple[float, list[Any], Any]:
    """The output, the leaves of the new model, and what `own` shall find."""
    found = []

    def own(old: Any, new: Any, is_certain: bool) -> None:
        pairs = zip(leaves_of(old), leaves_of(new), strict=True)
        # After `m.rng = KEY`, `KEY` is the old and the new value.
        key = names["KEY"]
        found.append([is_certain and a is b and a is not key for a, b in pairs])

    world = Reference()
    names = reference_names(world, own)
    x, model = run(text, names, build(spec, world), 0.5)
    return x, leaves_of(model), iter(found)


def arrays_of(model: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(model) if eqx.is_array(x)]


def check_own(old: Any, new: Any, are_unwritten: list[bool]) -> None:
    """An unwritten array of a model is the caller's own; a written one is JAX's."""
    pairs = zip(arrays_of(old), arrays_of(new), are_unwritten, strict=True)
    for a, b, is_unwritten in pairs:
        if is_unwritten:
            assert b is a
        elif b is not a:
            assert isinstance(b, jax.Array)
            assert b.dtype == jnp.asarray(a).dtype


def compare(found: list[Any], wanted: list[Any]) -> None:
    for new, old in zip(found, wanted, strict=True):
        if isinstance(old, PlainKey):
            np.testing.assert_array_equal(jr.key_data(new), old.data)
        else:
            np.testing.assert_allclose(new, old, rtol=1e-3, atol=1e-4)


def check(spec: Any, text: str, expected: Any = None) -> None:
    """Assert that the outputs and the new state equal those of the reference."""
    given, x = build(spec, Jax()), jnp.float32(0.5)
    if expected is not None:
        with rejects(given, *expected):
            run(text, LIBRARY, given, x)
        return
    wanted_x, wanted, found = run_reference(spec, text)
    names = {**LIBRARY, "own": lambda a, b, _: check_own(a, b, next(found))}
    with untouched(given):
        x, model = run(text, names, given, x)
    compare([x, *arrays_of(model)], [wanted_x, *wanted])


LOOKS = (
    lambda model: None,
    jax.tree.leaves,
    copy.copy,
    lambda model: model.training,
    lambda model: [part.value for part in es.parts(model)],
)


def check_loop(spec: Any, text: str) -> None:
    """Check a loop under `es.jit` that looks at some of its results.

    `es.jit` builds a result when something looks at it, and takes the arrays of other
    results as they are.
    """
    world, rng = Reference(), random.Random(text)
    x, model = 0.5, build(spec, world)
    names = reference_names(world, lambda *_: None)
    for _ in range(3):
        x, model = run(text, names, model, x)
    wanted = [x, *leaves_of(model)]
    step = es.jit(lambda model, x: run(text, LIBRARY, model, x))
    x, model = jnp.float32(0.5), build(spec, Jax())
    for _ in range(3):
        x, model = step(model, x)
        rng.choice(LOOKS)(model)
    compare([x, *arrays_of(model)], wanted)


@pytest.fixture(autouse=True, scope="module")
def _modules_of_any_size_are_unbuilt() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "_FEW", 0)
        yield


KEYED = Spec(Net, (Spec(Noise, (), 9), Spec(Cell, (), 14, True)), 3)
CASES = {
    "axes of one name": """
        def main(model, x):
            def lane(x):
                mean = lambda x: pmean(x, "l1")
                return mix(total(es.vmap(mean, axis_name="l1")(two(x))), mean(x))
            return total(es.vmap(lane, axis_name="l1")(two(x))), model
    """,
    "a branch that is not taken draws": """
        def main(model, x):
            def f(m, x):
                lane = lambda x: es.cond(False, m.body, lambda x: x, x)
                return total(es.vmap(lane)(two(x)))
            return es.mutable(f)(model, x)
    """,
    "one key for all lanes": """
        def main(model, x):
            def f(m, x):
                lane = lambda noise, x: mix(noise(x), total(m.stack.w))
                axes = ({es.Rng: None}, 0)
                return total(es.vmap(lane, axes)(m.body, two(x)))
            return es.mutable(f)(model, x)
    """,
    "a key for each lane of an argument": """
        def main(model, x):
            def f(m, x):
                lane = lambda noise, x: mix(noise(x), total(m.stack.w))
                return total(es.vmap(lane, (None, 0))(m.body, two(x)))
            return es.mutable(f)(model, x)
    """,
    "a gradient with respect to a NumPy array": """
        def main(model, x):
            grads, new = es.grad(lambda m, x: m.peek(x))(model, x)
            own(model, new, True)
            return mix(x, weigh(grads)), new
    """,
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_that_has_found_a_fault(name):
    check(KEYED, textwrap.dedent(CASES[name]))


PIECE = 250  # seeds per test
SEEDS = os.environ.get("EQX_STATE_PROGRAMS", "0:20000" if IS_FUZZ else "0:30")
FIRST, END = map(int, SEEDS.split(":"))


@leaks_on_purpose
@reuses_keys
@hypothesis.settings(max_examples=500 if IS_FUZZ else 30)
@hypothesis.given(program=programs())
def test_a_program_computes_the_same_as_in_plain_python(program):
    spec, text, expected = program
    hypothesis.note(f"{spec}\n{text}\n{expected}")
    check(spec, text, expected)


@leaks_on_purpose
@reuses_keys
@pytest.mark.parametrize("first", range(FIRST, END, PIECE))
def test_the_programs_of_these_seeds_compute_the_same_as_in_plain_python(first):
    failed = []
    for seed in range(first, min(first + PIECE, END)):
        spec, text, expected = of_seed(seed)
        try:
            check(spec, text, expected)
            if expected is None and seed % 4 == 0:
                check_loop(spec, text)
        except (Exception, pytest.fail.Exception):
            failed.append(seed)
            print(f"Seed {seed}: {spec}\n{text}\n{expected}")
            traceback.print_exc()
    if END - FIRST > PIECE:
        # Each program compiles its own functions: gigabytes after some thousands.
        jax.clear_caches()
        gc.collect()
    assert not failed
