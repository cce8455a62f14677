"""Generics: the values of type variables, and starred tuples."""

import types
import typing
from typing import Generic, TypeVar, Unpack

import equinox as eqx
import jax.numpy as jnp
import pytest
from helpers import kinds
from jaxtyping import Array, Float
from typing_extensions import TypeAliasType, TypeVarTuple

import eqx_state as es


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
A = TypeVar("A")
B = TypeVar("B")
Stateful = TypeVar("Stateful", bound=es.State)
Late = TypeVar("Late", bound="es.BatchStat")
Later = TypeVar("Later", bound="DefinedLater")  # noqa: F821
Tagged = TypeAliasType("Tagged", tuple[T, es.Buffer], type_params=(T,))
ONE = jnp.ones(2)


def test_type_variables_are_passed_on_to_base_classes(base):
    class Two(base, Generic[A, B]):
        a: A
        b: B

    class Turned(Two[B, A], Generic[A, B]):
        pass

    class Wrapped(Two[list[T], es.Rng], Generic[T]):
        c: T

    class Plain(Two[list[es.State], es.Rng]):
        pass

    class Both(Turned[es.State, es.Buffer]):
        pass

    class Last(Wrapped[es.BatchStat]):
        pass

    assert kinds(Plain([ONE], ONE)) == {"a[0]": es.State, "b": es.Rng}
    assert kinds(Both(ONE, ONE)) == {"a": es.Buffer, "b": es.State}
    model = Last([ONE], ONE, ONE)
    assert kinds(model) == {"a[0]": es.BatchStat, "b": es.Rng, "c": es.BatchStat}
    model = Wrapped([ONE], ONE, ONE)
    assert kinds(model) == {"a[0]": es.Parameter, "b": es.Rng, "c": es.Parameter}


def test_the_bound_of_a_type_variable(base):
    class Model(base, Generic[Stateful, Late]):
        a: Stateful
        b: Late

    class Narrowed(Model[es.Rng, es.BatchStat]):
        pass

    assert kinds(Model(ONE, ONE)) == {"a": es.State, "b": es.BatchStat}
    assert kinds(Narrowed(ONE, ONE)) == {"a": es.Rng, "b": es.BatchStat}


def test_an_attribute_of_a_module_that_is_still_being_imported(monkeypatch):
    late = types.ModuleType("late")
    monkeypatch.setitem(globals(), "late", late)

    class Model(es.Module):
        x: "late.Cache"

    with pytest.raises(TypeError, match="Model.x` decides the kind.*resolved"):
        es.parts(Model(ONE))
    late.Cache = type("Cache", (es.State,), {})
    monkeypatch.setitem(globals(), "defined_after", late)
    assert kinds(Model(ONE)) == {"x": late.Cache}


def test_a_bound_that_is_defined_later(monkeypatch):
    class Box(eqx.Module, Generic[Later]):
        value: Later

    class Holder(eqx.Module):
        box: Box[es.State]

    monkeypatch.delitem(globals(), "DefinedLater", raising=False)
    for _ in range(2):  # alternate: the result for one class must not affect the other
        assert kinds(Box(ONE)) == {"value": es.Parameter}
        assert kinds(Holder(Box(ONE))) == {"box.value": es.State}
    monkeypatch.setitem(globals(), "DefinedLater", es.BatchStat)
    assert kinds(Holder(Box(ONE))) == {"box.value": es.State}
    assert kinds(Box(ONE)) == {"value": es.BatchStat}


def test_an_alias_with_arguments(base):
    class Model(base, Generic[A]):
        p: Tagged[es.State]
        q: Tagged[A]

    class Concrete(Model[es.Rng]):
        pass

    expected = {"p[0]": es.State, "p[1]": es.Buffer, "q[0]": es.Rng, "q[1]": es.Buffer}
    assert kinds(Concrete((ONE, ONE), (ONE, ONE))) == expected


def test_arguments_for_a_type_variable_tuple_apply_to_all_fields(base):
    class Many(base, Generic[*Ts]):
        items: list

    class Model(base):
        one: Many[es.State, es.State]
        none: Many[Array, Array]

    model = Model(Many([ONE]), Many([ONE]))
    assert [*kinds(model).values()] == [es.State, es.Parameter]


# --- Tuples -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (tuple[es.Rng, *tuple[es.State, ...]], [es.Rng, es.State, es.State]),
        (
            typing.Tuple[es.Rng, Unpack[typing.Tuple[es.State, ...]]],  # noqa: UP006, UP044
            [es.Rng, es.State, es.State],
        ),
        (tuple[*tuple[es.State, ...], es.State], [es.State] * 3),
        (tuple[es.Rng, es.State], [es.Rng, es.State, es.Parameter]),
    ],
    ids=str,
)
def test_starred_tuples(base, annotation, expected):
    class Model(base):
        x: annotation

    model = Model((ONE, ONE, ONE))
    assert list(kinds(model).values()) == expected


def test_a_kind_after_a_starred_tuple_must_be_the_same():
    with pytest.raises(TypeError, match=r"Model\.x.*`Parameter` and `State`"):

        class Model(es.Module):
            x: tuple[*tuple[es.State, ...], es.Parameter]


def test_a_union_of_containers(base):
    class Model(base):
        a: list[es.State] | tuple[es.Parameter, es.Buffer]
        b: dict[str, es.State] | tuple[es.Parameter, es.Buffer]
        c: tuple[es.State, es.Buffer]

    tuples = Model((ONE, ONE), (ONE, ONE), (ONE, ONE))
    expected = [es.Parameter, es.Buffer] * 2 + [es.State, es.Buffer]
    assert list(kinds(tuples).values()) == expected
    # A list in place of a tuple also works.
    others = Model([ONE, ONE], {"x": ONE}, [ONE, ONE])
    expected = [es.State, es.State, es.State, es.State, es.Buffer]
    assert list(kinds(others).values()) == expected


# --- Cases in which a kind could get lost ------------------------------------------


def test_a_mixin_that_declares_no_fields_does_not_remove_a_kind():
    class Mean:
        mean: Array

    class Stat(es.Module):
        mean: es.BatchStat

    class Norm(Mean, Stat):
        pass

    assert kinds(Norm(ONE)) == {"mean": es.BatchStat}


def test_a_kind_inside_a_shape():
    class Model(es.Module):
        x: Float[es.State, "2"]

    assert kinds(Model(ONE)) == {"x": es.State}
