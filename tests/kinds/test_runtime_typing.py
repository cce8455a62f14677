"""jaxtyping's import hook with beartype checks annotations inside kinds."""

import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import pytest

import eqx_state as es


LAYERS = Path(__file__).parents[1] / "support" / "hooked_layers.py"
ONE = jnp.ones(())


@pytest.fixture(
    params=["", "from __future__ import annotations\n"], ids=["eager", "postponed"]
)
def hooked(request, monkeypatch, tmp_path):
    """The layers under the hook, with annotations evaluated at once or postponed."""
    (tmp_path / "hooked.py").write_text(request.param + LAYERS.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    with jaxtyping.install_import_hook("hooked", "beartype.beartype"):
        module = importlib.import_module("hooked")
    yield module
    monkeypatch.delitem(sys.modules, "hooked")


def linear(hooked, weight=(2, 3), bias=(3,), base="Linear"):
    return getattr(hooked, base)(jnp.ones(weight), jnp.ones(bias))


@pytest.mark.parametrize("base", ["Linear", "PlainLinear"])
def test_shapes_and_dtypes_inside_a_kind_are_checked(hooked, base):
    assert linear(hooked, base=base)(jnp.ones(2)).shape == (3,)
    for wrong in ({"weight": (2,)}, {"bias": (4,)}):
        with pytest.raises(jaxtyping.TypeCheckError, match=base):
            linear(hooked, base=base, **wrong)
    with pytest.raises(jaxtyping.TypeCheckError, match=base):
        getattr(hooked, base)(jnp.ones((2, 3), dtype=jnp.int32), jnp.ones(3))
    with pytest.raises(jaxtyping.TypeCheckError, match="x"):
        linear(hooked, base=base)(jnp.ones((2, 2)))


@pytest.mark.parametrize("base", ["Bare", "PlainBare"])
@pytest.mark.parametrize("value", [jr.key(0), {"a": ONE}, None, "text"], ids=type)
def test_bare_kinds_accept_any_value(hooked, base, value):
    assert getattr(hooked, base)(value, value).b is value


def test_numbers_are_accepted_where_a_kind_is_declared(hooked):
    bare = hooked.Bare(1.0, 2)
    assert (bare.a.dtype, bare.b.dtype) == (jnp.float32, jnp.int32)
    assert hooked.Count(0).n.dtype == jnp.int32


def test_containers_of_kinds(hooked):
    ok = hooked.Containers([ONE], {"a": ONE}, (ONE, ONE), (), None, {"s": ONE})
    assert [part.kind for part in es.parts(ok)] == [
        es.Parameter,
        es.BatchStat,
        es.Parameter,
        es.State,
        es.BatchStat,
    ]
    for wrong in (
        ([ONE], {"a": ONE}, (ONE,), (), None, {"s": ONE}),
        ([ONE], {"a": ONE}, (ONE, ONE), (), None, {"s": jnp.ones(2)}),
    ):
        with pytest.raises(jaxtyping.TypeCheckError, match="Containers"):
            hooked.Containers(*wrong)


def test_the_hook_does_not_change_kinds(hooked):
    bare = hooked.Bare(ONE, ONE)
    assert [part.kind for part in es.parts(bare)] == [es.Parameter, hooked.Cache]


def test_functions_on_trees_are_not_checked(hooked):
    # They put arrays of other shapes, and no arrays, into fields: stacks, masks, axes.
    model = linear(hooked)
    assert es.filter(model, es.State).weight is None
    assert es.mask(model, es.Parameter).weight is True
    stacked = es.map(lambda x: jnp.stack([x, x]), model, on=es.Parameter)
    assert model.update(stacked).weight.shape == (2, 2, 3)
    assert model.replace(weight=ONE).weight.shape == ()
