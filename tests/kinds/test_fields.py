"""All ways to declare the kind of a field."""

import collections.abc
import dataclasses
import typing
import weakref
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import kinds
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import TypeAliasType

import eqx_state as es


T = TypeVar("T")
Alias = Float[Array, "i o"]
AnyTree = PyTree
StateTree = PyTree[es.State]
StateAlias = TypeAliasType("StateAlias", es.State[Array])
NewState = typing.NewType("NewState", es.State)


class Cache(es.State):
    pass


class Ema(es.TreePart, covering=True):
    pass


ONE = jnp.ones((1, 1))


# --- One array ------------------------------------------------------------------------

# These are strings so that each is tested evaluated, and as text, as with `from
# __future__ import annotations`.
FORMS = {
    es.State: [
        "es.State['NotDefinedAnywhere']",
        "es.State['es.NotDefined']",
        "typing.Optional['es.State']",
        "es.State | float",
        "typing.Annotated[Array, 'a remark', es.State, 3]",
        "typing.Annotated[es.State, 'a remark']",
        "typing.Annotated['NotDefinedAnywhere', es.State]",
        "typing.Annotated[typing.Annotated[Array, es.State], es.Parameter]",
        "es.Parameter[es.State[Array]]",
        "typing.Final[es.State]",
        "StateTree",
        "NewState",
        "StateAlias",
    ],
    Cache: ["Cache[Array]", "es.State[Cache]"],
    # Of two nested covering kinds, the outermost applies.
    Ema: ["es.Parameter[Ema]", "Ema[es.State[Array]]", "Ema[es.Buffer[Array]]"],
    es.Buffer: ["es.State[es.Buffer[Array]]", "es.Buffer[Ema[Array]]"],
    es.Parameter: [
        "Float[Array, 'i o']",
        "typing.Any",
        "T",
        "typing.Annotated[Array, 'a remark']",
        "type[es.State]",
        "typing.Literal['es.State']",
        "collections.abc.Callable[[es.State], es.State]",
    ],
}
FORMS_OF_ONE = [(text, kind) for kind, texts in FORMS.items() for text in texts]


@pytest.mark.parametrize("postponed", [False, True])
@pytest.mark.parametrize(("text", "kind"), FORMS_OF_ONE)
def test_forms_for_one_array(base, text, kind, postponed):
    class Model(base):
        x: text if postponed else eval(text)

    assert kinds(Model(ONE)) == {"x": kind}


# --- Containers -----------------------------------------------------------------------

S, P = es.State, es.Parameter
TWO = {"a": [ONE, ONE], "b": [ONE]}
CONTAINERS = [
    ("typing.List[es.State]", [ONE, ONE], [S, S]),
    ("collections.abc.Sequence[es.State]", [ONE], [S]),
    ("typing.Mapping[str, es.State]", {"a": ONE}, [S]),
    ("collections.OrderedDict[str, es.State]", collections.OrderedDict(a=ONE), [S]),
    ("tuple[Array, es.State]", (ONE, ONE), [P, S]),
    ("typing.Tuple[es.State, es.Rng]", (ONE, ONE), [S, es.Rng]),
    ("tuple[es.State, Any]", (ONE, (ONE, [ONE])), [S, P, P]),
    ("typing.Optional[list[es.State | None]]", [ONE, None], [S]),
    ("dict['NotDefinedAnywhere', Array]", {"a": ONE}, [P]),
    ("tuple[StateAlias, StateAlias]", (ONE, ONE), [S, S]),
    ("list[tuple[es.Parameter, es.State]]", [(ONE, ONE)], [P, S]),
    ("typing.Annotated[list[Array], es.State]", [ONE], [S]),
    ("es.State[AnyTree]", TWO, [S, S, S]),
    ("list[es.State] | dict[str, es.State]", [ONE], [S]),
    ("es.Parameter | list[es.State]", ONE, [P]),
    ("typing.Dict | None", {"a": ONE}, [P]),
]


@pytest.mark.parametrize("postponed", [False, True])
@pytest.mark.parametrize(
    ("text", "value", "expected"), CONTAINERS, ids=[c[0] for c in CONTAINERS]
)
def test_containers(base, text, value, expected, postponed):
    class Model(base):
        x: text if postponed else eval(text)

    assert [part.kind for part in es.parts(Model(value))] == expected


# --- `es.field` -----------------------------------------------------------------------


def test_es_field_takes_the_arguments_of_equinoxs_field(base):
    class Model(base):
        a: Array = es.field(kind=es.State, converter=jnp.asarray)
        b: Array = es.field(kind=es.State, default=2.0, converter=jnp.asarray)
        c: list[Array] = es.field(kind=Cache, default_factory=lambda: [ONE])
        d: Array = es.field(kind=Cache, metadata={"unit": "m"}, default=ONE, repr=False)
        e: Array = es.field(kind=es.Rng, kw_only=True)
        f: int = es.field(static=True, default=3)

    model = Model(1.0, e=jr.key(0))
    expected = {"a": es.State, "b": es.State, "c[0]": Cache, "d": Cache, "e": es.Rng}
    assert kinds(model) == expected
    fields = {f.name: f for f in dataclasses.fields(Model)}
    assert fields["d"].metadata["unit"] == "m"
    assert "d=" not in repr(model)
    assert (model.a, model.b, model.f) == (1.0, 2.0, 3)


def test_es_field_must_not_contradict_the_annotation():
    def make():
        class Model(es.Module):
            x: es.State = es.field(kind=es.Parameter)

        return Model(ONE)

    with pytest.raises(TypeError, match=r"Model\.x.*`State`.*`Parameter`"):
        make()


# --- Inheritance, generics, abstract classes ------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [(es.Parameter, es.Parameter), (Int[Array, ""], es.State), ("Array", es.State)],
    ids=repr,
)
@pytest.mark.parametrize("how", ["annotation", "specifier"])
def test_a_new_annotation_replaces_or_keeps_the_kind(base, annotation, kind, how):
    class Parent(base):
        if how == "annotation":
            x: es.State
        else:
            x: Array = es.field(kind=es.State)
        y: es.State

    class Child(Parent):
        x: annotation

    class Grandchild(Child):
        pass

    expected = {"x": kind, "y": es.State}
    assert kinds(Parent(jnp.arange(1), ONE)) == {"x": es.State, "y": es.State}
    assert kinds(Child(jnp.arange(1), ONE)) == expected
    assert kinds(Grandchild(jnp.arange(1), ONE)) == expected


def test_abstract_classes(base):
    class AbstractNorm(base):
        mean: eqx.AbstractVar[es.BatchStat]
        scale: eqx.AbstractVar[Array]
        mask: eqx.AbstractClassVar[es.Buffer]

    class Norm(AbstractNorm):
        mean: es.BatchStat
        scale: es.Buffer
        mask: Array = es.field(default_factory=lambda: ONE)

    class Plain(AbstractNorm):
        mean: Array
        scale: Array
        mask: es.Parameter = 1.0

    expected = {"mean": es.BatchStat, "scale": es.Buffer, "mask": es.Buffer}
    assert kinds(Norm(ONE, ONE)) == expected
    found = kinds(Plain(jnp.arange(1), ONE, ONE))
    assert found == {"mean": es.BatchStat, "scale": es.Parameter, "mask": es.Parameter}
    with pytest.raises(TypeError, match="abstract"):
        AbstractNorm()


@pytest.mark.parametrize(
    "declared", [es.Buffer, "eqx.AbstractVar[es.Buffer]"], ids=repr
)
def test_the_nearest_base_with_a_kind_decides(base, declared):
    class Parent(base):
        mask: declared

    class Child(Parent):
        mask: Array

    class Mixin(base):
        mask: eqx.AbstractVar[es.Parameter[Array]]

    class Grandchild(Mixin, Child):
        mask: Float[Array, " n"]

    assert kinds(Child(ONE)) == {"mask": es.Buffer}
    assert kinds(Grandchild(ONE)) == {"mask": es.Parameter}


def test_a_kind_inside_a_container_is_kept(base):
    class Parent(base):
        pair: tuple[es.Parameter, es.State]

    class Child(Parent):
        pair: tuple[Any, ...]

    assert kinds(Child((ONE, ONE))) == {"pair[0]": es.Parameter, "pair[1]": es.State}


def test_the_axes_of_a_kept_kind_are_those_of_the_new_annotation():
    class Parent(es.Module):
        w: es.Buffer[Float[Array, "a b"]]

    class Child(Parent):
        w: Float[Array, "c d"]

    assert es.axis_names(Child(jnp.ones((1, 1)))).w == ("c", "d")


def test_a_static_field_keeps_no_kind():
    class Parent(es.Module):
        rate: es.Parameter

    class Child(Parent):
        rate: float = eqx.field(static=True)

    assert kinds(Child(0.5)) == {}


def test_an_undefined_name_may_be_a_different_kind():
    class Parent(es.Module):
        x: es.State

    class Child(Parent):
        x: "Undefined"  # noqa: F821

    class Plain(eqx.Module):
        x: es.State

    class PlainChild(Plain):
        x: "Undefined"  # noqa: F821

    with pytest.raises(TypeError, match=r"Child\.x.*cannot be resolved"):
        es.parts(Child(ONE))
    assert kinds(PlainChild(ONE)) == {"x": es.State}


Tree = TypeAliasType("Tree", "es.State | dict[str, Tree]")


def test_an_alias_may_contain_itself(base):
    class Model(base):
        x: "Tree"

    assert kinds(Model(jnp.ones(1))) == {"x": es.State}


def test_the_default_of_a_field_does_not_hide_a_name(base):
    class Model(base):
        es: "es.State" = None  # this default does not hide the module `es`

    assert kinds(Model(ONE)) == {"es": es.State}


def test_a_class_keeps_only_the_names_that_its_annotations_need():
    class Data:
        pass

    def make(n, data):
        class Cache(es.State):
            pass

        def inner():
            class Model(es.Module):
                x: "Cache"
                y: "es.BatchStat[Float[Array, 'n']]"

            return Model, Cache, weakref.ref(n), weakref.ref(data)

        return inner()

    model, cache, array, data = make(jnp.zeros(3), Data())
    assert kinds(model(ONE, ONE)) == {"x": cache, "y": es.BatchStat}
    assert array() is None  # `n` is the name of an axis
    assert data() is None


def test_names_of_callers_are_not_found():
    def make():
        class Model(es.Module):
            x: "OfCaller"  # noqa: F821

        return Model

    def call():
        class OfCaller(es.State):
            pass

        return make(), OfCaller

    model, _ = call()
    with pytest.raises(TypeError, match=r"Model\.x` decides the kind.*resolved"):
        es.parts(model(ONE))


def test_a_missing_name_is_looked_up_once(base, monkeypatch):
    fields = "\n".join(f"    f{i}: 'X{i}'" for i in range(30))
    namespace = {"base": base, "__name__": __name__}
    exec(f"class Many(base):\n{fields}", namespace)
    many = namespace["Many"](*[None] * 30)
    es.parts(many)  # reads the annotations
    looked = []
    monkeypatch.setattr(
        "eqx_state._kinds.fields.parse", lambda *args: looked.append(args) or es.State
    )
    es.parts([many] * 20)
    assert looked == []
