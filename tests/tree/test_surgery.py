"""Modules by name: listing, mapping, `es.configure` and `replace`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import pytest
from jaxtyping import Array

import eqx_state as es


class Norm(es.Module):
    scale: es.Parameter
    mean: es.BatchStat
    momentum: float = eqx.field(static=True, default=0.9)


class Wrapper(eqx.Module):
    norm: Norm
    act: Callable[..., Any] = jnp.tanh


class Model(es.Module):
    layers: list[Any]
    head: eqx.nn.Linear
    drop: eqx.nn.Dropout


def make_norm() -> Norm:
    return Norm(jnp.ones(2), jnp.zeros(2))


def make_model() -> Model:
    return Model(
        [Wrapper(make_norm()), Wrapper(make_norm())],
        eqx.nn.Linear(2, 2, key=jr.key(0)),
        eqx.nn.Dropout(0.5),
    )


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


NAMES = {
    "",
    "layers[0]",
    "layers[0].norm",
    "layers[1]",
    "layers[1].norm",
    "head",
    "drop",
}

# --- modules, map_modules -------------------------------------------------------------


def test_modules_by_name():
    model = make_model()
    modules = dict(es.modules(model))
    assert set(modules) == NAMES
    assert modules[""] is model
    assert modules["layers[1].norm"] is model.layers[1].norm
    assert dict(es.modules({"a": [model]})).keys() == {
        f"['a'][0].{name}".removesuffix(".") for name in NAMES
    }


def test_a_module_that_occurs_twice_is_listed_and_mapped_once():
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    seen = []

    def f(module, name):
        seen.append(name)
        return eqx.tree_at(lambda m: m.bias, module, None)

    tree = es.map_modules(f, [linear, {"again": linear}])
    assert [name for name, _ in es.modules([linear, linear])] == ["[0]"]
    assert seen == ["[0]"]
    assert tree[0].bias is None
    assert tree[1]["again"] is tree[0]


def test_modules_that_a_node_creates_when_it_is_flattened():
    class Box(eqx.Module):
        n: float

    @jtu.register_pytree_node_class
    class Making:
        def __init__(self, n):
            self.n = n

        def tree_flatten(self):
            return (Box(self.n),), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(children[0].n)

    new = es.map_modules(lambda module, name: module, [Making(n) for n in range(50)])
    assert [node.n for node in new] == list(range(50))


def test_a_module_may_be_an_iterator():
    class Steps(es.Module):
        n: es.State | None = None
        inner: eqx.nn.Dropout = dataclasses.field(default_factory=eqx.nn.Dropout)

        def __iter__(self):
            return self

        def __next__(self):
            raise StopIteration

        def __call__(self, x):
            if self.n is None:
                self.n = x

    model = {"steps": Steps()}
    seen = []
    es.map_modules(lambda module, name: seen.append(name) or module, model)
    assert seen == ["['steps'].inner", "['steps']"]
    new = es.init(model, 0, jnp.ones(2), call=lambda m, x: m["steps"](x))
    assert [(p.name, p.kind) for p in es.parts(new)] == [("['steps'].n", es.State)]


def test_map_modules_maps_children_first():
    model = es.freeze(make_model()).eval()
    order = []

    def f(module, name):
        order.append(name)
        if isinstance(module, Wrapper):
            assert module.norm == "a norm"
            return "a wrapper"
        if isinstance(module, Norm):
            return "a norm"
        return module

    new = es.map_modules(f, model)
    assert set(order) == NAMES
    assert len(order) == len(NAMES)
    assert order.index("layers[0].norm") < order.index("layers[0]") < order.index("")
    assert new.layers == ["a wrapper", "a wrapper"]
    assert (new.training, new.frozen) == (False, True)
    assert new.head.weight is model.head.weight
    assert isinstance(model.layers[0], Wrapper)


# --- configure ------------------------------------------------------------------------


def test_configure_sets_every_module_that_has_the_attribute():
    model = make_model()
    new = es.configure(model, momentum=0.99, p=0.1)
    assert [layer.norm.momentum for layer in new.layers] == [0.99, 0.99]
    assert new.drop.p == 0.1
    assert same(es.configure(new, momentum=0.9, p=0.5), model)
    assert model.drop.p == 0.5
    assert jax.tree.structure(new) != jax.tree.structure(model)


@pytest.mark.parametrize(
    ("attributes", "missing"),
    [({"momentum": 0.5, "rate": 0.9}, "rate"), ({"filter": 3}, "filter")],
)
def test_an_attribute_that_no_module_has_is_an_error(attributes, missing):
    model = make_model()
    with pytest.raises(ValueError, match=rf"es\.configure.*`{missing}`"):
        es.configure(model, **attributes)
    assert model.drop.p == 0.5
    assert model.layers[0].norm.momentum == 0.9


def test_the_error_of_configure_names_all():
    with pytest.raises(ValueError, match=r"attribute `a`, `b`"):
        es.configure(make_norm(), b=1, a=2)


# --- replace --------------------------------------------------------------------------


def test_replace():
    norm = es.freeze(make_norm().eval())
    two = jnp.full(2, 2.0, dtype=jnp.float32)
    new = norm.replace(scale=two, momentum=0.5)
    assert (new.scale, new.mean, new.momentum) == (two, norm.mean, 0.5)
    assert (new.training, new.frozen) == (False, True)
    assert norm.momentum == 0.9
    assert same(norm.replace(), norm)
    assert norm.replace() is not norm


@pytest.mark.parametrize("name", ["scael", "filter"])
def test_replace_rejects_names_that_are_not_fields(name):
    norm = make_norm()
    with pytest.raises(TypeError, match=rf"Norm\.replace.*`{name}`"):
        norm.replace(**{"scale": 3.0, name: 1})
    assert jnp.array_equal(norm.scale, jnp.ones(2))


# --- Code of the class does not run ---------------------------------------------------


def test_no_init_converter_or_check_runs():
    forbidden = []

    class Strict(es.Module):
        w: Array = es.field(
            kind=es.Parameter, converter=lambda x: count("converter", x)
        )
        n: es.State = es.field(default_factory=lambda: count("factory", 0))
        rate: float = eqx.field(static=True, default=0.5)

        def __init__(self, w):
            count("init", None)
            self.w = w
            self.n = 0

        def __check_init__(self):
            count("check", None)

    class Plain(eqx.Module):
        w: Array = eqx.field(converter=lambda x: count("converter", x))

        def __check_init__(self):
            count("check", None)

    def count(what, value):
        forbidden.append(what)
        return value

    tree = [Strict(jnp.ones(2)), Plain(jnp.ones(2))]
    forbidden.clear()
    es.parts(tree)
    es.filter(tree, es.under(lambda t: t[0]), es.not_(es.trainable))
    es.update(es.eval(tree), *es.partition(tree, es.State, lambda part: True))
    es.map(lambda x, y: x, tree, es.mask(tree), on=es.Parameter)
    es.spec(tree, {es.State: 0})
    es.map_modules(lambda module, name: module, tree)
    es.modules(tree)
    es.configure(tree, rate=0.1, w=jnp.zeros(2))
    es.freeze(tree, lambda t: t[0])
    es.unfreeze(tree)
    tree[0].replace(w=jnp.zeros(2))
    with pytest.raises(ValueError, match="structure"):
        es.update(tree, tree[:1])
    assert forbidden == []
