"""Models and functions that cloudpickle sends to a process without their classes.

Joblib, ray, dask and submitit use it for classes of `__main__` and of notebooks.
"""

import copy
import os
import pickle
import subprocess
import sys
import types

import cloudpickle
import equinox as eqx
import jax.numpy as jnp
import models
import pytest

import eqx_state as es


# Loads each file in the new process, calls a function with the object, and stores the
# result, or the error and where it was raised.
LOADER = """
import pathlib, pickle, sys
import cloudpickle

for path in pathlib.Path(sys.argv[1]).glob("*.in"):
    where = "load"
    try:
        loaded, use = pickle.loads(path.read_bytes())
        where = "use"
        result = "works", use(loaded)
    except Exception as error:
        result = where, f"{type(error).__name__}: {error}"
    path.with_suffix(".out").write_bytes(pickle.dumps(result))
"""


def called(model):
    y, new = es.mutable(model)(jnp.ones(()))
    return float(y), float(new.count), [str(part.kind) for part in es.parts(new)]


def cases():
    """Objects, and functions of them. All classes are local, so pickled by value."""

    class Plain(eqx.Module):
        mask: es.Buffer

    class Behavior(models.Layer):
        def __call__(self, x):
            return super().__call__(2 * x)

    class Redeclared(models.Layer):
        weight: es.Buffer

    class Static(models.Layer):
        width: int = eqx.field(static=True, default=2)

    one = jnp.ones(())
    return {
        "es.Module": (Static(), called),
        "inside an es.Module": (models.Net([Plain(one)]), es.parts),
        "eqx.Module": (Plain(one), es.parts),
        "no fields": ([Behavior(), Behavior()], lambda xs: called(xs[1])),
        "another kind": (Redeclared(), called),
        "importable": (es.mutable(models.Layer()), lambda f: float(f(jnp.ones(()))[0])),
    }


# Where the error is raised, and the class that it names.
FAIL = {
    "es.Module": ("load", "Static"),
    "inside an es.Module": ("load", "Plain"),
    "eqx.Module": ("use", "Plain"),
}


def test_only_a_class_that_got_its_fields_later_is_an_error(tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        for name, case in cases().items():
            (tmp_path / f"{name}.in").write_bytes(cloudpickle.dumps(case))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOADER, str(tmp_path)]
    subprocess.run(command, env=environment, check=True)
    for name, (loaded, use) in cases().items():
        found, result = pickle.loads((tmp_path / f"{name}.out").read_bytes())
        if name not in FAIL:
            assert (found, result) == ("works", use(loaded))
            continue
        where, cls = FAIL[name]
        assert found == where, result
        assert f"TypeError: `{cls}`, defined in `tests.state.test_clou" in result
        assert "was pickled by value, as cloudpickle does" in result
        assert f"from my_models import {cls}`" in result


@pytest.mark.parametrize("base", [es.Module, eqx.Module], ids=["es", "eqx"])
def test_fields_that_are_set_after_the_creation_of_a_class(base):
    """The two steps of cloudpickle, by hand."""

    class Net(base):
        mask: es.Buffer

    late = types.new_class("Net", (base,), exec_body=lambda body: None)
    for name in ("__annotations__", "__dataclass_fields__", "__init__"):
        setattr(late, name, vars(Net)[name])
    # As `pickle` makes one: Equinox's `__init__` would fail.
    net, around = object.__new__(late), models.Net([])
    object.__setattr__(around, "layers", [net])
    is_ours = base is es.Module
    for use in (
        lambda: late(jnp.ones(())) if is_ours else es.parts(net),
        lambda: copy.copy(net) if is_ours else copy.copy(around),
    ):
        with pytest.raises(TypeError, match=r"`Net`, defined in .*from my_models imp"):
            use()
