"""Kinds as classes, and the rules that give each leaf its effective kind."""

from typing import Any, Generic, get_type_hints, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from beartype import beartype
from helpers import kinds
from jaxtyping import Array, jaxtyped

import eqx_state as es


T = TypeVar("T")

BUILT_IN = [
    es.TreePart,
    es.Parameter,
    es.Buffer,
    es.State,
    es.Rng,
    es.BatchStat,
    es.OptState,
]


class Cache(es.State):
    pass


class Ema(es.TreePart, covering=True):
    pass


class SlowEma(Ema):
    pass


class Leaf(es.Module):
    """A module with one leaf for each way to have a kind."""

    param: es.Parameter
    stat: es.BatchStat
    buffer: es.Buffer
    plain: Array
    count: Array


def make_leaf() -> Leaf:
    one = jnp.ones(2)
    return Leaf(one, one, one, one, jnp.arange(2))


# --- The classes ----------------------------------------------------------------------


class First(es.State):
    """A kind from a module whose name sorts before ours."""

    __module__ = "a_module"


@pytest.mark.parametrize(("kind", "name"), [(es.Rng, "es.Rng"), (First, "First")])
def test_messages_name_a_kind_as_users_write_it(kind, name):
    match = rf"Write `w: {name}`.*`es\.partition\(model, {name}\)`"
    with pytest.raises(TypeError, match=match):
        kind(1.0)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_kind_as_a_filter_selects_its_subclasses_too(kind):
    class Mine(kind):
        pass

    class Model(es.Module):
        x: Mine

    model = Model(jnp.ones(2))
    assert kinds(model) == {"x": Mine}
    asked = [k for k in BUILT_IN if es.filter(model, k).x is model.x]
    assert asked == [k for k in BUILT_IN if issubclass(kind, k)]
    assert es.filter(model, Mine).x is model.x


def test_a_kind_with_two_bases_is_both():
    class Frozen(es.BatchStat, es.Buffer):
        pass

    class Model(es.Module):
        x: Frozen
        inner: Frozen[Leaf]

    model = Model(jnp.ones(2), make_leaf())
    assert set(kinds(model).values()) == {Frozen}
    for kind in (es.State, es.Buffer, es.BatchStat):
        assert es.mask(model, kind).x
    assert not es.mask(model, es.Parameter).x


def test_user_defined_kinds_may_be_generic():
    class Mine(es.State[T]):
        pass

    class Other(es.State, Generic[T]):
        pass

    class Model(es.Module):
        x: Mine[Array]
        y: Other[Array]
        z: Mine

    model = Model(*[jnp.ones(2)] * 3)
    assert kinds(model) == {"x": Mine, "y": Other, "z": Mine}
    assert Mine.__mro__[:2] == (Mine, es.State)


def test_a_kind_of_a_type_variable_is_an_ordinary_annotation():
    class Model(es.Module, Generic[T]):
        x: es.State[T]
        y: list[es.BatchStat[T]]
        z: es.Buffer[T] | None

    assert get_type_hints(Model)["x"] == es.State[T]
    assert get_type_hints(Model, include_extras=True)["z"] == es.Buffer[T] | None

    class Counter(es.Module):
        model: Model[Array]
        count: es.State[T][Array]

    model = jaxtyped(Model, typechecker=beartype)(jnp.ones(2), [jnp.ones(2)], None)
    assert kinds(Counter(model, jnp.ones(2))) == {
        "model.x": es.State,
        "model.y[0]": es.BatchStat,
        "count": es.State,
    }


# --- Only arrays have a kind ----------------------------------------------------------


class Holder(es.Module):
    x: Any


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.ones(2, dtype=np.float16), es.Parameter),
        (jnp.ones(2, dtype=jnp.bfloat16), es.Parameter),
        (jnp.ones(2, dtype=jnp.complex64), es.Parameter),
        (jax.ShapeDtypeStruct((2,), jnp.float32), es.Parameter),
        (jnp.arange(2), None),
        (np.array(["a string"]), None),
        (np.zeros(2, dtype=jax.dtypes.float0), None),
        (jr.split(jr.key(0), 3), es.Rng),
        (jax.ShapeDtypeStruct((), jr.key(0).dtype), es.Rng),
        (jr.PRNGKey(0), None),
    ],
)
def test_the_kind_of_an_array_without_a_declaration_and_with_one(value, kind):
    class Declared(es.Module):
        x: es.State

    for tree in (Holder(value), value, {"a": ((value,),)}):
        (part,) = es.parts(tree)
        assert part.kind is kind
        assert part.value is value
    assert kinds(Declared(value)) == {"x": es.State}


@pytest.mark.parametrize("value", [1, True, "text", None, jnp.tanh, object(), ()])
def test_a_value_that_is_not_an_array_has_no_kind(value):
    class Declared(es.Module):
        x: es.State | Any

    assert es.parts([Holder(value)]) == []
    is_none = lambda x: x is None  # noqa: E731
    tree = eqx.tree_at(lambda m: m.x, Declared(0), value, is_leaf=is_none)
    assert es.parts(tree) == []


# --- Covering -------------------------------------------------------------------------


def test_a_subclass_can_turn_covering_off():
    class Open(es.Buffer, covering=False):
        pass

    class Model(es.Module):
        leaf: Open[Leaf]

    assert kinds(Model(make_leaf()))["leaf.param"] is es.Parameter


# --- Layers that do not declare kinds -------------------------------------------------


@pytest.mark.parametrize("kind", [es.Buffer, es.Parameter])
def test_foreign_state_below_a_declaration(kind):
    class Model(es.Module):
        norm: kind[eqx.nn.BatchNorm]

    got = kinds(Model(eqx.nn.BatchNorm(3, "batch", mode="ema")))
    stats = {k for n, k in got.items() if "index" in n}
    assert stats == {es.Buffer if kind is es.Buffer else es.BatchStat}
