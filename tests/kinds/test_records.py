"""Kinds in annotations of named tuples, typed dicts and dataclasses; generics."""

import collections
import dataclasses
import typing
from typing import Annotated, Any, Generic, NamedTuple, NotRequired, Required, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
import records_elsewhere as elsewhere
from helpers import kinds, rejects
from jaxtyping import Array
from typing_extensions import (
    ReadOnly,
    TypedDict,
)

import eqx_state as es


T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
ONE = jnp.ones(2)


def registered(cls: Any) -> Any:
    """A dataclass that is a pytree node."""
    cls = dataclasses.dataclass(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    return jtu.register_dataclass(cls, data_fields=names, meta_fields=[])


class Stats(NamedTuple):
    mean: es.BatchStat
    key: "es.Rng | None"
    scale: Annotated[Array, es.Buffer]
    rest: Array


class Entries(TypedDict):
    mean: es.BatchStat
    key: "es.Rng | None"
    scale: Annotated[Array, es.Buffer]
    rest: Array


@registered
class Record:
    mean: es.BatchStat
    key: "es.Rng | None"
    rest: Array
    scale: Array = es.field(kind=es.Buffer)


RECORDS = {"NamedTuple": Stats, "TypedDict": Entries, "dataclass": Record}
DECLARED = {"mean": es.BatchStat, "key": es.Rng, "scale": es.Buffer, "rest": None}


def inside(name: str, before: str, default: Any = es.Parameter) -> dict[str, Any]:
    """The kinds of the arrays of a record of this type at path `before`."""
    form = "['{}']" if name == "TypedDict" else ".{}"
    return {before + form.format(k): v or default for k, v in DECLARED.items()}


@pytest.mark.parametrize("name", RECORDS)
def test_the_annotations_of_a_record_are_read(base, name):
    cls = RECORDS[name]

    class Model(base):
        noted: Annotated[cls | None, "a note"]
        named: dict[str, list[cls]]
        pair: tuple[cls, es.State]
        state: es.State[cls]
        buffer: es.Buffer[cls]

    def make():
        return cls(mean=ONE, key=ONE, scale=ONE, rest=ONE)

    model = Model(make(), {"a": [make()]}, (make(), ONE), make(), make())
    assert kinds(model) == {
        **inside(name, "noted"),
        **inside(name, "named['a'][0]"),
        **inside(name, "pair[0]"),
        "pair[1]": es.State,
        **inside(name, "state", es.State),
        **dict.fromkeys(inside(name, "buffer"), es.Buffer),
    }


@pytest.mark.parametrize("module", [typing, None], ids=["typing", "extensions"])
def test_entries_that_may_be_missing(base, module):
    made = typing.TypedDict if module else TypedDict

    class Some(made, total=False):
        a: es.State
        b: Required[es.BatchStat]

    class More(Some):
        c: NotRequired[ReadOnly[es.Rng]]

    class Model(base):
        x: More

    class Early(base):
        x: Some

    model = Model({"a": ONE, "b": ONE, "c": ONE})
    expected = {"x['a']": es.State, "x['b']": es.BatchStat, "x['c']": es.Rng}
    assert kinds(model) == expected
    assert kinds(Model({"b": ONE, "undeclared": ONE})) == {
        "x['b']": es.BatchStat,
        "x['undeclared']": es.Parameter,
    }
    ordered = collections.OrderedDict(b=ONE, a=ONE)
    assert kinds(Early(ordered)) == {"x['b']": es.BatchStat, "x['a']": es.State}
    assert kinds(Early([ONE])) == {"x[0]": es.Parameter}


def test_a_subclass_of_a_record():
    class Named(Stats):
        """Methods only."""

    class Plain:
        mean: es.Buffer  # not a field: `Plain` is not a dataclass

    @registered
    class Replaced(Plain, Record):
        rest: es.Rng
        extra: es.State = dataclasses.field(kw_only=True)

    assert kinds([Named(ONE, ONE, ONE, ONE)]) == inside("NamedTuple", "[0]")
    new = inside("dataclass", "[0]") | {"[0].rest": es.Rng, "[0].extra": es.State}
    assert kinds([Replaced(ONE, ONE, ONE, ONE, extra=ONE)]) == new


class Sub(elsewhere.Dict):
    own: es.State


def test_records_from_a_different_module():
    class Model(es.Module):
        a: elsewhere.Tuple
        b: Sub
        c: elsewhere.Record
        d: elsewhere.GenericDict[es.State]

    both = {"mean": ONE, "other": [ONE]}
    model = Model(
        elsewhere.Tuple(**both),
        Sub(own=ONE, **both),
        elsewhere.Record(**both),
        {"value": ONE, "many": [ONE]},
    )
    assert kinds(model) == {
        "a.mean": es.BatchStat,
        "a.other[0]": es.Parameter,  # imported for type checkers only
        "b['mean']": es.BatchStat,
        "b['other'][0]": es.Parameter,
        "b['own']": es.State,
        "c.mean": es.BatchStat,
        "c.other[0]": es.Parameter,
        "d['many'][0]": es.State,
        "d['value']": es.State,
    }


class Late(NamedTuple):
    x: "list[DefinedLater]"  # noqa: F821
    y: "tuple[DefinedLater, es.State] | dict[str, DefinedLater]"  # noqa: F821


def test_a_name_in_a_record_may_be_defined_later(monkeypatch):
    model = [Late([ONE], (ONE, ONE))]
    before = {"[0].x[0]": es.Parameter, "[0].y[0]": es.Parameter}
    assert kinds(model) == before | {"[0].y[1]": es.State}
    monkeypatch.setitem(globals(), "DefinedLater", es.BatchStat)
    after = {"[0].x[0]": es.BatchStat, "[0].y[0]": es.BatchStat}
    assert kinds(model) == after | {"[0].y[1]": es.State}


def test_a_name_that_only_the_function_around_a_record_has():
    class Cache(es.State):
        pass

    class Read(NamedTuple):
        x: Cache

    class Unread(NamedTuple):
        x: "Cache"
        y: "es.State"

    class Model(es.Module):
        record: "Read | Unread"

    class Covered(es.Module):
        record: es.Buffer[Unread]

    class Plain(eqx.Module):
        record: Unread

    assert kinds(Model(Read(ONE))) == {"record.x": Cache}
    with pytest.raises(TypeError, match=r"`\S*Model\.record` .* in a function"):
        es.parts(Model(Unread(ONE, ONE)))
    assert kinds(Model(Unread(None, ONE))) == {"record.y": es.State}
    assert set(kinds(Covered(Unread(ONE, ONE))).values()) == {es.Buffer}
    assert kinds(Plain(Unread(ONE, ONE)))["record.x"] is es.Parameter


# --- Generics -----------------------------------------------------------------------


class Pair(NamedTuple, Generic[A, B]):
    a: A
    b: list[B]


class PairOfEntries(TypedDict, Generic[A, B]):
    a: A
    b: list[B]


@registered
class PairOfFields(Generic[A, B]):
    a: A
    b: list[B]


@pytest.mark.parametrize("cls", [Pair, PairOfEntries, PairOfFields])
def test_the_arguments_of_a_generic_record(cls):
    class Model(es.Module):
        x: cls[es.State, es.Buffer]
        y: list[cls[dict[str, es.Rng], Stats]]

    stats = Stats(ONE, ONE, ONE, ONE)
    model = Model(cls(a=ONE, b=[ONE]), [cls(a={"k": ONE}, b=[stats])])
    a, b = ("['a']", "['b']") if cls is PairOfEntries else (".a", ".b")
    assert kinds(model) == {
        f"x{a}": es.State,
        f"x{b}[0]": es.Buffer,
        f"y[0]{a}['k']": es.Rng,
        **inside("NamedTuple", f"y[0]{b}[0]"),
    }


def test_the_arguments_of_a_generic_module(base):
    class Box(base, Generic[T]):
        x: T
        other: Array = dataclasses.field(default_factory=lambda: ONE)

    class Outer(base, Generic[T]):
        box: Box[dict[str, T]]

    class Child(Box[T], Generic[T]):
        own: "list[T] | None" = None

    class Bare(Box):
        pass

    class Settled(Box[es.Rng]):
        pass

    class Model(base):
        one: Box[es.BatchStat]
        nested: Box[Box[tuple[es.State, Array]]] | None
        record: Box[Stats]
        outer: Outer[es.Rng]
        child: list[Box[list[es.State]]]
        none: Box[Array]

    children = [Child([ONE], own=[[ONE]]), Bare([ONE]), Settled(ONE), Box([ONE])]
    model = Model(
        Box(ONE),
        Box(Box((ONE, ONE))),
        Box(Stats(ONE, ONE, ONE, ONE)),
        Outer(Box({"m": ONE})),
        children,
        Box(ONE),
    )
    found = kinds(model)
    for name in [name for name in found if name.endswith(".other")]:
        assert found.pop(name) is es.Parameter  # the type variable does not name a kind
    assert found == {
        "one.x": es.BatchStat,
        "nested.x.x[0]": es.State,
        "nested.x.x[1]": es.Parameter,
        **inside("NamedTuple", "record.x"),
        "outer.box.x['m']": es.Rng,
        "child[0].x[0]": es.State,
        "child[0].own[0][0]": es.State,
        "child[1].x[0]": es.State,
        "child[2].x": es.Rng,
        "child[3].x[0]": es.State,
        "none.x": es.Parameter,
    }


# --- Contradictions -----------------------------------------------------------------


def test_a_record_that_contradicts_itself():
    class Wrong(NamedTuple):
        x: "es.State | es.Parameter"

    with pytest.raises(TypeError, match=r"`.*Wrong\.x`.*`Parameter` and `State`"):
        es.parts(Wrong(ONE))


def test_the_arguments_of_one_class_in_a_union(base):
    class Box(base, Generic[T]):
        x: T

    class Other(base, Generic[T]):
        x: T

    class Model(base):
        box: Box[list[es.State]] | Box[es.Rng] | Other[es.BatchStat] | None

    assert kinds(Model(Box(ONE))) == {"box.x": es.Rng}
    assert kinds(Model(Box([ONE]))) == {"box.x[0]": es.State}
    assert kinds(Model(Other(ONE))) == {"box.x": es.BatchStat}


# --- In a scope ---------------------------------------------------------------------


def test_state_that_a_record_declares_can_be_written():
    class Model(es.Module):
        stats: Stats

        def __call__(self, x):
            self.stats = self.stats._replace(mean=x)
            return self.stats.mean

    model = Model(Stats(mean=0.0, key=jax.random.key(0), scale=1.0, rest=ONE))
    # Fields that declare a kind turn numbers into arrays.
    assert isinstance(model.stats.mean, jax.Array)
    assert isinstance(model.stats.scale, jax.Array)
    y, new = es.mutable(model)(2)
    assert (y, new.stats.mean) == (2.0, 2.0)

    def wrong(m):
        m.stats = m.stats._replace(scale=2.0)

    with rejects(model, dataclasses.FrozenInstanceError, r"stats\.scale", "`Buffer`"):
        es.mutable(wrong)(model)
