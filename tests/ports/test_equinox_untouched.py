"""Importing `eqx_state` does not change the output of programs that only use Equinox.

As a script, this file prints the output of each program. It runs in two processes,
because an import cannot be undone.
"""

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array


PROGRAMS = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def attempt(f, *args, **kwargs):
    """Print what the call returns or raises."""
    try:
        print(f(*args, **kwargs))
    except Exception as e:
        print(type(e).__module__, type(e).__qualname__, e)


@program
def states():
    net, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")
    axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
    batched = eqx.filter_vmap(net, **axes)
    old = state
    for _ in range(2):
        ys, state = eqx.filter_jit(batched)(jnp.array([[0.5, -1.0], [1.0, 2.0]]), state)
        print(ys, state)
    print(net, eqx.filter_make_jaxpr(batched)(jnp.ones((3, 2)), state)[0])
    attempt(state.get, eqx.nn.StateIndex(0))
    attempt(state.set, net.batch_counter, jnp.array(1.0))
    old.set(net.batch_counter, jnp.array(1))
    attempt(old.get, net.batch_counter)
    attempt(setattr, net, "missing", 2)


@program
def run_time_errors():
    def check(x):
        return eqx.error_if(x, x < 0, "it is negative")

    def branched(x, i):
        return eqx.branched_error_if(x, x < 0, i, ["zero", "one"])

    x = jnp.array(-1.0)
    attempt(check, x)
    attempt(eqx.filter_jit(check), x)
    attempt(eqx.filter_jit(branched), x, jnp.array(1))
    attempt(eqx.filter_vmap(eqx.filter_jit(check)), x[None])
    print(eqx.filter_jit(check)(-x))
    print(eqx.filter_make_jaxpr(check)(x)[0])
    print(logging.getLogger("jax._src.callback").filters)


@program
def the_library_itself():
    for module in (eqx, eqx.nn, eqx.debug, jax, jtu):
        print(*(f"{name}: {x!r}" for name, x in sorted(vars(module).items())), sep="\n")
    for cls in (eqx.Module, eqx.nn.State, eqx.nn.Shared, type(eqx.Module), Array):
        print(cls, cls.__mro__, cls.__doc__)
        print(*(f"{name}: {x!r}" for name, x in sorted(vars(cls).items())), sep="\n")
    print(jax.config.values)
    print(warnings.filters, sys.getswitchinterval(), sys.getrecursionlimit())
    print(sys.excepthook, sys.displayhook, warnings.showwarning)
    print(logging.getLogger("jax").handlers, logging.getLogger().handlers)


# --- The two runs ---------------------------------------------------------------------


def run_all():
    printed = {}
    for name, f in PROGRAMS.items():
        out = io.StringIO()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                f()
        said = [f"{w.category.__name__}: {w.message}" for w in caught]
        printed[name] = [*out.getvalue().splitlines(), *said]
    json.dump(printed, sys.stdout)


# The line appears in tracebacks, so it is the same in both processes.
RUN = """
import runpy, sys
__import__(sys.argv[2])
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def output(imported):
    """The output of each program, without addresses."""
    command = [sys.executable, "-c", RUN, __file__, imported]
    env = os.environ | {"JAX_DEBUG_KEY_REUSE": "0"}  # the programs reuse keys
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(re.sub(r"0x[0-9a-f]+", "0x", done.stdout))


def test_programs_that_use_equinox_alone_are_the_same_with_eqx_state_imported():
    without = output("sys")
    imported = output("eqx_state")
    assert without.keys() == imported.keys() == PROGRAMS.keys()
    for name, lines in without.items():
        assert len(lines) > 3
        assert imported[name] == lines, name


if __name__ == "__main__":
    run_all()
