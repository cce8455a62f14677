"""Postponed annotations, and `es.parts`."""

import sys
import textwrap
import types
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import kinds

import eqx_state as es


Make = Callable[[str], types.ModuleType]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Create a Python module from its source, with all annotations postponed."""

    def make(source: str, name: str = "postponed") -> types.ModuleType:
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        head = """
            from __future__ import annotations
            import equinox as eqx, eqx_state as es, jax.numpy as jnp, typing
            from typing import TYPE_CHECKING
        """
        exec(textwrap.dedent(head) + textwrap.dedent(source), module.__dict__)
        return module

    return make


ONE = jnp.ones(1)


# --- Postponed annotations ------------------------------------------------------------


def test_a_module_with_postponed_annotations(make):
    module = make("""
        from jaxtyping import Array, Float

        class Cache(es.State): ...

        class Model(es.Module):
            a: es.Parameter[Float[Array, "i o"]]
            b: Cache
            d: Later
            f: "es.Rng"
            child: Model | None = None

        class Later(es.State): ...
    """)
    inner = module.Model(ONE, ONE, ONE, ONE)
    assert kinds(module.Model(ONE, ONE, ONE, ONE, inner).child) == {
        "a": es.Parameter,
        "b": module.Cache,
        "d": module.Later,
        "f": es.Rng,
    }


LOCAL = {
    "in the class itself": """
        class Model(es.Module):
            class Cache(es.State): ...
            x: Cache
        def make():
            return Model
        """,
    "not the name of a caller": """
        Cache = es.State
        def inner():
            class Model(es.Module):
                x: Cache
            return Model
        def make():
            Cache = es.Parameter
            return inner()
        """,
    "hidden by the name of a field": """
        Cache = es.State
        class Model(es.Module):
            x: Cache
            Cache: typing.Any = es.field(static=True, default=3)
        def make():
            return Model
        """,
}


@pytest.mark.parametrize("source", LOCAL.values(), ids=list(LOCAL))
def test_names_that_are_local(make, source):
    model = make(source).make()(ONE)
    (part,) = es.parts(model)
    assert issubclass(part.kind, es.State)


def test_names_under_type_checking_that_do_not_decide_a_kind(make):
    module = make("""
        from jaxtyping import Float
        if TYPE_CHECKING:
            from jax import Array
            from somewhere import Layer
            import numpy as np

        class Inner(es.Module):
            w: es.Parameter
            s: es.State

        class Model(es.Module):
            a: es.Parameter[Array]
            b: es.State[Float[Array, "i"]]
            c: typing.Annotated[np.ndarray, es.Buffer]
            d: Array = es.field(kind=es.State)
            layers: list[Layer]
            covered: es.Buffer[Layer]
    """)
    layers = [module.Inner(ONE, ONE), eqx.nn.LayerNorm(1)]
    model = module.Model(ONE, ONE, ONE, ONE, layers, module.Inner(ONE, ONE))
    got = kinds(model)
    assert (got["a"], got["b"]) == (es.Parameter, es.State)
    assert (got["c"], got["d"]) == (es.Buffer, es.State)
    assert (got["layers[0].w"], got["layers[0].s"]) == (es.Parameter, es.State)
    assert got["layers[1].weight"] is es.Parameter
    assert got["covered.w"] is es.Buffer


UNRESOLVED = {
    "an array": ("x: Missing", ONE),
    "a key": ("x: Missing", jr.key(0)),
    "an attribute": ("x: Missing.kind", ONE),
    "in a tuple": ("x: tuple[es.State, Missing]", (ONE, ONE)),
    "unpacked": ("x: tuple[*Missing]", (ONE,)),
    "optional": ("x: Missing | None", ONE),
    "around": ("x: Missing[es.State | int]", ONE),
}


@pytest.mark.parametrize(("field", "value"), UNRESOLVED.values(), ids=list(UNRESOLVED))
def test_an_unresolved_name_that_would_decide_a_kind_is_an_error(make, field, value):
    model = make(f"class Model(es.Module):\n    {field}").Model(value)
    for use in (es.parts, es.filter):
        with pytest.raises(
            TypeError, match=r"`Model\.x` decides .* cannot be resolved"
        ):
            use(model)


def test_an_unresolved_name_inside_a_declaration_is_an_error_too(make):
    module = make("""
        class Inner(es.Module):
            x: Missing
        class Model(es.Module):
            inner: es.State[Inner]
    """)
    with pytest.raises(TypeError, match=r"`Inner\.x` decides"):
        es.parts(module.Model(module.Inner(ONE)))


@pytest.mark.parametrize("kind", ["es.State", "int"])
def test_a_name_that_appears_later(make, kind):
    module = make("class Model(es.Module):\n    x: list[Missing]\n    y: Missing")
    model = module.Model([ONE], ONE)
    with pytest.raises(TypeError, match=r"`Model\.x` decides"):
        es.parts(model)
    exec(f"Missing = {kind}", module.__dict__)
    expected = es.Parameter if kind == "int" else es.State
    assert kinds(model) == {"x[0]": expected, "y": expected}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="has no statement `type`")
def test_a_name_in_an_alias_that_appears_later(make):
    module = make("type Alias = Missing\nclass Model(es.Module):\n    x: Alias")
    model = module.Model(ONE)
    with pytest.raises(TypeError, match=r"`Model\.x` decides.*cannot be resolved"):
        es.parts(model)
    module.Missing = es.State
    assert kinds(model) == {"x": es.State}


def test_a_plain_equinox_module_falls_back_to_the_convention(make):
    module = make("class Model(eqx.Module):\n    x: Missing\n    y: list[Missing]")
    assert kinds(module.Model(ONE, [jr.key(0)])) == {"x": es.Parameter, "y[0]": es.Rng}


TWO_KINDS = [
    "es.State | es.Rng",
    "typing.Union[es.Parameter, es.State, None]",
    "list[es.Parameter | es.State]",
    "dict[str, list[es.Parameter]] | dict[str, list[es.State]]",
    "tuple[es.Parameter] | tuple[es.State]",
]


@pytest.mark.parametrize("annotation", TWO_KINDS)
def test_a_union_of_two_kinds_is_an_error(make, annotation):
    with pytest.raises(TypeError, match=r"Model\.field.*two different kinds"):
        make(f"class Model(es.Module):\n    field: {annotation}")


# --- Parts ----------------------------------------------------------------------------


class Norm(es.Module):
    mean: es.BatchStat


def test_parts():
    model = [es.freeze(Norm(jnp.zeros(1))), {"b": Norm(np.ones(2)), "a": jr.key(0)}]
    parts = es.parts(model)
    assert [(p.name, p.kind, p.frozen) for p in parts] == [
        ("[0].mean", es.BatchStat, True),
        ("[1]['a']", es.Rng, False),
        ("[1]['b'].mean", es.BatchStat, False),
    ]
    leaves = dict(jtu.tree_leaves_with_path(model))
    assert all(leaves[p.path] is p.value for p in parts)


def test_parts_print_without_their_values():
    (part,) = es.parts(Norm(jnp.zeros(1)))
    assert repr(part) == "Part(name='mean', kind=BatchStat, value=f32[1])"
