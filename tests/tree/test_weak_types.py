"""Fields that declare a kind: their array defaults, numbers and weak types."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array

import eqx_state as es


ONE = jnp.ones(2)


# --- Array defaults -------------------------------------------------------------------


@pytest.mark.parametrize("default", [np.ones(2), jnp.arange(2), jr.key(0)])
@pytest.mark.parametrize("how", ["bare", "eqx.field", "custom __init__"])
def test_an_array_as_a_class_default(default, how):
    value = eqx.field(default=default) if how == "eqx.field" else default

    class Mine(es.Module):
        a: es.State = value

        if how == "custom __init__":

            def __init__(self):
                pass

    first, second = Mine(), Mine()
    assert first.a is not second.a
    assert first.a is not default
    assert (first.a == default).all()
    assert (first.a.dtype, first.a.shape) == (default.dtype, default.shape)
    if how != "custom __init__":
        assert Mine(ONE).a is ONE


def test_an_array_default_is_copied_and_may_be_replaced():
    class Parent(es.Module):
        a: es.Parameter = np.array(1)

    class Child(Parent):
        a: es.Parameter = np.array(2)

    first = Child().a
    first[...] = 5
    assert (Parent().a, Child().a) == (1, 2)


@pytest.mark.parametrize(
    "annotation",
    ["ClassVar[Array]", ClassVar[Array], ClassVar],
    ids=["postponed", "subscripted", "bare"],
)
def test_a_class_variable_is_not_a_field(annotation):
    class Mine(es.Module):
        table: annotation = ONE
        kind: annotation = es.State  # without `ClassVar` this is an error
        a: es.State = 0

    assert Mine.table is ONE
    assert Mine.kind is es.State
    assert Mine().table is ONE
    assert len(jax.tree.leaves(Mine())) == 1


# --- Numbers and weak types -----------------------------------------------------------

WEAK = [1, True, 1j, jnp.asarray(1.0)]
FORMS = [
    "es.State[Array]",
    "es.Parameter | None",
    "Array = es.field(kind=es.State, converter=lambda x: x)",
]


def is_strong(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.weak_type


def one_field(text: str) -> Any:
    namespace = {"es": es, "Array": Array, "jnp": jnp, "__name__": __name__}
    exec(f"class Mine(es.Module):\n    x: {text}", namespace)
    return namespace["Mine"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", WEAK, ids=repr)
def test_numbers_and_weak_arrays_become_strong(form, value):
    cls = one_field(form)
    nothing = cls(ONE).replace(x=None)  # `replace` keeps the dtype of an array
    for got in (cls(value).x, nothing.replace(x=value).x):
        assert is_strong(got)
        assert (got == value).all()
        is_weight = type(value) is int and "Parameter" in form
        assert got.dtype == jnp.asarray(1.0 if is_weight else value).dtype
    assert is_strong(jax.jit(cls)(value).x)
    default = type("Default", (cls,), {"__annotations__": {"x": es.State}, "x": 1.0})
    assert is_strong(default().x)


def test_init_reads_arrays_and_a_converter_gets_the_number():
    def convert(x):
        converted.append(x)
        return x

    class Mine(es.Module):
        x: es.State
        y: Array = es.field(kind=es.State, converter=convert)

        def __init__(self):
            self.x, self.y = 1, 2
            assert is_strong(self.x)

    converted: list[Any] = []
    assert is_strong(Mine().y)
    assert converted == [2]
    assert type(converted[0]) is int


def test_strong_arrays_are_stored_as_the_same_objects():
    cls = one_field("es.State")
    for value in (ONE, np.ones(2), jr.key(0), np.float32(1), jnp.arange(2)):
        assert cls(value).x is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("list[es.State]", [1, 2.0]),
        ("tuple[es.Parameter, es.State]", (1, 2)),
        ("es.State[dict[str, list[Array]]]", {"a": [1, jnp.asarray(1.0)]}),
        ("Any = es.field(kind=es.State, converter=lambda x: [x, 2.0])", 1.0),
    ],
)
def test_numbers_in_containers_become_strong(text, value):
    namespace = {"es": es, "Array": Array, "Any": Any, "__name__": __name__}
    exec(f"class Mine(es.Module):\n    x: {text}", namespace)
    before = jax.tree.map(lambda x: x, value)
    model = namespace["Mine"](value)
    leaves = jax.tree.leaves(model)
    assert leaves
    assert all(map(is_strong, leaves))
    assert type(model.x) in (type(value), list)
    assert repr(before) == repr(value)


def test_an_integer_for_a_parameter_is_a_weight():
    class Weight(es.Parameter):
        pass

    class Mine(es.Module):
        a: Weight = 1
        b: dict[str, es.Parameter | None] = es.field(
            default_factory=lambda: {"x": 2, "y": None}
        )
        c: es.Parameter[tuple[Array, ...]] = (3, True, 4.0)
        d: es.Buffer[list[es.Parameter]] = es.field(default_factory=lambda: [5])
        e: es.Parameter = es.Initializer(lambda key: 6)
        f: Array = es.field(kind=es.Parameter, converter=lambda x: x, default=7)
        g: es.State = 8
        h: es.Parameter = None

        def module_init(self, key):
            self.h = 9

    model = Mine().init(0)
    kept = {"c[1]": "bool", "d[0]": "int32", "g": "int32"}
    for part in es.parts(model):
        assert part.value.dtype == kept.get(part.name, "float32"), part
    assert es.grad(lambda m: m.a * m.e * m.h * 1.0)(model)[0].a == 54
    for old in (jnp.arange(2), jnp.ones(2, "float16")):
        new = model.replace(a=old).replace(a=0).a
        assert new.dtype == old.dtype
    assert model.replace(a=jnp.ones(2, "float16")).replace(a=10**5).a.dtype == "float32"
    with pytest.raises(ValueError, match=r'jnp.asarray\(2, "float32"\)'):
        es.mutable(lambda m: m)(eqx.tree_at(lambda m: m.a, model, 2))


def test_values_without_a_declared_kind_are_not_converted():
    class Mine(es.Module):
        size: int
        pair: tuple[int, es.State]
        inner: es.State[eqx.nn.Dropout]
        weak: Array
        text: es.State[str]
        none: es.State | None = None

    mine = Mine(3, (4, 5), eqx.nn.Dropout(0.5), jnp.asarray(1.0), "text")
    assert (type(mine.size), type(mine.pair[0]), type(mine.inner.p)) == (
        int,
        int,
        float,
    )
    assert is_strong(mine.pair[1])
    assert mine.weak.weak_type
    assert (mine.text, mine.none) == ("text", None)


def test_the_shape_of_a_weak_array():
    class Scale(es.Module):
        factor: es.Parameter

    shape = jax.eval_shape(lambda: 2.0 * jnp.array(1.0))
    assert shape.weak_type
    scale = Scale(shape)
    assert not scale.factor.weak_type
    assert (scale.factor.shape, scale.factor.dtype) == ((), jnp.float32)
