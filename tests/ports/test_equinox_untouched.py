"""Importing `eqx_state` does not change the output of programs that only use Equinox.

As a script, this file prints the output of each program. It runs in two processes,
because an import cannot be undone.
"""

import contextlib
import dataclasses
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
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float


PROGRAMS = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def look(tree, *args):
    """Print everything about a tree; with arguments, also its jaxpr."""
    print(tree)
    print(repr(tree))
    print(jtu.tree_structure(tree))
    print([jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(tree)])
    eqx.tree_pprint(tree, short_arrays=False)
    for x in jtu.tree_leaves(tree):
        if eqx.is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            print(type(x), jax.typeof(x), x.tolist())
    if args:
        print(eqx.filter_make_jaxpr(tree)(*args)[0])


def attempt(f, *args, **kwargs):
    """Print what the call returns or raises."""
    try:
        print(f(*args, **kwargs))
    except Exception as e:
        print(type(e).__module__, type(e).__qualname__, e)


class Model(eqx.Module):
    mlp: eqx.nn.MLP
    scale: Float[Array, ""] = eqx.field(converter=jnp.asarray)
    name: str = eqx.field(static=True, default="model")

    def __call__(self, x):
        return self.scale * self.mlp(x)

    @property
    def doubled(self):
        return 2 * self.scale


def make_model():
    return Model(eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0)), 2.0)


X = [0.5, -1.0]


@program
def states():
    class Counter(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.array(0))

        def __call__(self, x, state):
            count = state.get(self.index)
            return x + count, state.set(self.index, count + 1)

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        spectral: eqx.nn.SpectralNorm
        counter: Counter

        def __init__(self, key):
            linear = eqx.nn.Linear(2, 2, key=key)
            self.norm = eqx.nn.BatchNorm(2, "batch", mode="batch")
            self.spectral = eqx.nn.SpectralNorm(linear, "weight", key=key)
            self.counter = Counter()

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            x, state = self.spectral(x, state)
            return self.counter(x, state)

    net, state = eqx.nn.make_with_state(Net)(jr.key(0))
    look(net)
    look(state)
    traces = []

    def batched(net):
        axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
        return eqx.filter_vmap(net, **axes)

    @eqx.filter_jit
    def step(net, state, xs):
        traces.append("traced")
        return batched(net)(xs, state)

    old = state
    for _ in range(3):
        ys, state = step(net, state, jnp.array([X, [1.0, 2.0]]))
        print(ys, state)
    print(traces)
    print(eqx.filter_make_jaxpr(batched(net))(jnp.ones((3, 2)), state)[0])
    attempt(old.set, Counter().index, jnp.array(1))
    attempt(state.set, net.counter.index, jnp.array(1.0))
    attempt(state.get, Counter().index)
    look(eqx.nn.inference_mode(net))
    look(eqx.nn.delete_init_state(net))
    old.set(net.counter.index, jnp.array(1))
    attempt(old.get, net.counter.index)


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
def frozen_instances():
    class Checked(eqx.Module):
        x: Array
        y: int = 1

        def __init__(self, x, fill=True):
            if fill:
                self.x = x

        def __check_init__(self):
            if self.y != 1:
                raise ValueError("it is not one")

    class Sub(Checked):
        y: int = 2

    model = Checked(jnp.ones(2))
    look(model)
    attempt(Checked, 1, fill=False)
    attempt(Sub, 1)
    attempt(setattr, model, "x", 2)
    attempt(setattr, model, "z", 2)
    attempt(delattr, model, "x")
    attempt(dataclasses.replace, make_model(), missing=1)
    look(dataclasses.replace(make_model(), scale=1.0))
    attempt(Model, 1)
    attempt(
        type(model), "Bad", (eqx.Module,), {"__annotations__": {"x": dict}, "x": {}}
    )
    print(vars(model), dataclasses.fields(Model), model == model, model != make_model())
    attempt(hash, model)


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
