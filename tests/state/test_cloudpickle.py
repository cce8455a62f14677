"""Models and functions that cloudpickle sends to a process without their classes.

Joblib, ray, dask and submitit use it for classes of `__main__` and of notebooks.
"""

import os
import pickle
import subprocess
import sys
import types
from typing import Any

import cloudpickle
import equinox as eqx
import jax
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


def kinds(tree):
    return {part.name: str(part.kind) for part in es.parts(tree)}


def called(model):
    y, new = es.mutable(model)(jnp.ones(()))
    return float(y), float(new.count), kinds(new)


def cases():
    """Objects, and functions of them. All classes are local, so pickled by value."""

    class Plain(eqx.Module):
        mask: es.Buffer
        w: jax.Array

    class Net(es.Module):
        mask: es.Buffer
        mean: es.BatchStat
        inner: Plain

    class Behavior(models.Layer):
        def __call__(self, x):
            return super().__call__(2 * x)

    class Redeclared(models.Layer):
        weight: es.Buffer

    class Static(models.Layer):
        width: int = eqx.field(static=True, default=2)

    one = jnp.ones(())
    plain = Plain(one, one)
    return {
        "es.Module": (Net(one, one, plain), kinds),
        "one static field": (Static(), called),
        "inside an es.Module": (models.Net([plain]), kinds),
        "eqx.Module": (plain, kinds),
        "a function": (lambda: Net(one, one, one), lambda make: make()),
        "no fields": (Behavior(), called),
        "no fields, twice": ([Behavior(), Behavior()], lambda xs: called(xs[1])),
        "another kind": (Redeclared(), called),
        "importable": (es.mutable(models.Layer()), lambda f: float(f(jnp.ones(()))[0])),
    }


FAIL = {
    "es.Module": ("load", "Net"),
    "one static field": ("load", "Static"),
    "inside an es.Module": ("load", "Plain"),
    "eqx.Module": ("use", "Plain"),
    "a function": ("use", "Net"),
}
WORK = ["no fields", "no fields, twice", "another kind", "importable"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pickles")
    found: dict[str, Any] = {}
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        for i, case in enumerate(cases().values()):
            (folder / f"{i}.in").write_bytes(cloudpickle.dumps(case))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOADER, str(folder)]
    subprocess.run(command, env=environment, check=True)
    for i, name in enumerate(cases()):
        found[name] = pickle.loads((folder / f"{i}.out").read_bytes())
    return found


@pytest.mark.parametrize("name", FAIL)
def test_a_class_that_got_its_fields_later_is_an_error(name, results):
    (where, cls), (found, message) = FAIL[name], results[name]
    assert found == where, message
    assert f"TypeError: `{cls}`, defined in `tests.state.test_cloudpickle`" in message
    assert "was pickled by value, as cloudpickle does" in message
    assert f"from my_models import {cls}`" in message


@pytest.mark.parametrize("name", WORK)
def test_other_classes_work(name, results):
    loaded, use = cases()[name]
    assert results[name] == ("works", use(loaded))


@pytest.mark.parametrize("base", [es.Module, eqx.Module], ids=["es", "eqx"])
def test_fields_that_are_set_after_the_creation_of_a_class(base):
    """The two steps of cloudpickle, by hand."""

    class Net(base):
        mask: es.Buffer

    late = types.new_class("Net", (base,), exec_body=lambda body: None)
    for name in ("__annotations__", "__dataclass_fields__", "__init__"):
        setattr(late, name, vars(Net)[name])
    # A plain module as `pickle` makes one: Equinox's `__init__` would fail.
    new = late if base is es.Module else lambda x: object.__new__(late)
    with pytest.raises(TypeError, match=r"`Net`, defined in .*from my_models import"):
        es.parts(new(jnp.ones(())))
