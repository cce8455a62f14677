"""Random programs mean the same with `eqx_state` and in plain Python.

A program is drawn as source (`program_writer`, `program_statements`, `program_loops`),
for a random model (`program_models`). It runs twice: with the library, and with the
names of `program_reference`, which traces nothing. One in four must end in an error
(`program_faults`). What the library does not keep yet is not written (`OFF`).

Faults that it has found. All but the inner scope's were looked for in one old version,
which had all of them: programs were drawn in order, those of a form that can show the
fault were run, and this is the number of the first that did. The generator has changed
since, so the numbers say how near a fault lies, and are not to be had again.

| fault | program |
|---|---|
| functions that share a dictionary or a cell under `es.jit` get copies apart | 21 |
| a stack that is scanned, or mapped, and closed over is its slice there | 33 |
| one program of `es.jit` for modules of one scope and of two | 45 |
| a function among the arguments of `es.jit` comes out as another | 54 |
| one module twice in an argument of `es.jit` goes unseen | 81 |
| an inner scope returns what its call has written to the outer model | 82 |
| a function that `es.jit` returns keeps the first call's model | 155 |
| integers that are cut when written | 236 |
| state that is not an array, lost in loops | 285 |
| `es.jit` takes unequal dataclasses for equal | 1698 |
"""

import functools as ft
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
from program_models import build, flt, Jax, mix, PlainKey, STATICS, total, two, worth
from program_objects import leaves_of
from program_reference import Reference
from program_statements import programs

import eqx_state as es


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


def run_reference(spec: Any, text: str) -> tuple[float, list[Any]]:
    world = Reference()
    names = {
        **COMMON,
        "ensemble": world.ensemble,
        "eqx": _Partials,
        "es": world,
        "jtu": _Partials,
        "pmean": world.pmean,
        "sown": lambda sown: sown[1],
        "weigh": world.weigh,
        "KEY": world.key(77),
    }
    x, model = run(text, names, build(spec, world), 0.5)
    return x, leaves_of(model)


def check(spec: Any, text: str, expected: Any = None) -> None:
    """The outputs and the whole new state are as the reference says."""
    given, x = build(spec, Jax()), jnp.float32(0.5)
    if expected is not None:
        with rejects(given, *expected):
            run(text, LIBRARY, given, x)
        return
    wanted_x, wanted = run_reference(spec, text)
    with untouched(given):
        x, model = run(text, LIBRARY, given, x)
    leaves = [x for x in jax.tree.leaves(model) if eqx.is_array(x)]
    for new, old in zip([x, *leaves], [wanted_x, *wanted], strict=True):
        if isinstance(old, PlainKey):
            np.testing.assert_array_equal(jr.key_data(new), old.data)
        else:
            np.testing.assert_allclose(new, old, rtol=1e-3, atol=1e-4)


@leaks_on_purpose
@reuses_keys
@pytest.mark.parametrize("piece", range(8 if IS_FUZZ else 1))
@hypothesis.settings(max_examples=2500 if IS_FUZZ else 30)
@hypothesis.given(program=programs())
def test_a_program_means_what_plain_python_means(piece, program):
    spec, text, expected = program
    hypothesis.note(f"{spec}\n{text}\n{expected}")
    check(spec, text, expected)
