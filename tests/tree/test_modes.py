"""Train and eval, freeze and unfreeze."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import same
from jaxtyping import Array

import eqx_state as es


class Norm(es.Module):
    scale: es.Parameter
    mean: es.BatchStat


class Foreign(eqx.Module):
    """A plain Equinox module around an `es.Module`."""

    norm: Norm
    dropout: eqx.nn.Dropout


class Model(es.Module):
    norm: Norm
    layers: list[Any]
    inner: Foreign
    linear: eqx.nn.Linear


def make_norm() -> Norm:
    return Norm(jnp.ones(2), jnp.zeros(2))


def make_model() -> Model:
    layers = [make_norm(), {"drop": eqx.nn.Dropout(0.5)}, (make_norm(), None)]
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    inner = Foreign(make_norm(), eqx.nn.Dropout(0.5))
    return Model(make_norm(), layers, inner, linear)


def flags(tree: Any, name: str) -> dict[str, bool]:
    # Only of a field: every `es.Module` also has `inference` as a property.
    return {n: vars(m)[name] for n, m in es.modules(tree) if name in vars(m)}


# --- Train and eval -------------------------------------------------------------------


def test_eval_and_train_switch_every_module():
    model = make_model()
    assert set(flags(model, "frozen").values()) == {False}
    new = es.eval(model)
    expected = {"", "norm", "layers[0]", "layers[2][0]", "inner.norm"}
    assert flags(new, "training") == dict.fromkeys(expected, False)
    assert flags(new, "inference") == dict.fromkeys(
        ["layers[1]['drop']", "inner.dropout"], True
    )
    assert same(model.eval(), new)
    assert same(es.train(new), model)
    assert same(new.train(), model)
    # The original model does not change.
    assert set(flags(model, "training").values()) == {True}
    assert set(flags(model, "inference").values()) == {False}


def test_none_does_not_change():
    params = make_model().filter(es.Parameter)
    assert set(flags(es.eval(params), "inference").values()) == {None}
    assert same(es.train(es.eval(params)), params)


def test_inference_is_switched_only_where_it_is_a_mode():
    class Own(es.Module):
        inference: bool

    class Traced(eqx.Module):
        inference: Array
        inference_too: bool = False

    class Static(eqx.Module):
        inference: bool = eqx.field(static=True, default=False)

    class Method(eqx.Module):
        def inference(self):
            return "called"

    own, traced, static, method = es.eval(
        (Own(False), Traced(jnp.array(False)), Static(), Method())
    )
    assert own.inference is False
    assert not traced.inference
    assert traced.inference_too is False
    assert static.inference is True
    assert method.inference() == "called"


# --- Equinox's own switch -------------------------------------------------------------


@pytest.mark.parametrize("start", [es.train, es.eval])
@pytest.mark.parametrize("value", [True, False])
def test_inference_mode_is_eval_mode(start, value):
    model = start(make_model())
    tree = [model, {"a": (start(make_norm()), None)}]
    new = eqx.nn.inference_mode(tree, value=value)
    expected = es.train(tree, not value)
    assert same(new, expected)
    assert hash(jax.tree.structure(new)) == hash(jax.tree.structure(expected))
    assert tree[0].training is (start is es.train)
    # Switching by both libraries, in any order, and twice.
    assert same(eqx.nn.inference_mode(new, value=value), expected)
    assert same(es.train(new), es.train(tree))
    assert same(es.eval(new), es.eval(tree))
    assert same(eqx.nn.inference_mode(new, value=not value), es.train(tree, value))


def test_the_node_for_inference_mode_is_hidden_from_users():
    norm = make_norm()
    with pytest.raises(TypeError, match="argument"):
        Norm(jnp.ones(2), jnp.zeros(2), _eqx_state_inference=True)
    with pytest.raises(ValueError, match="no module in the tree has an attribute"):
        es.configure(norm, _eqx_state_inference=True)
    with pytest.raises(TypeError, match="there is no field `_eqx_state_inference`"):
        norm.replace(_eqx_state_inference=True)
    assert "inference" not in str(norm)
    # `jax.tree.map` may put a container there, and remove it again, as for any field.
    wrapped = jax.tree.map(lambda x: (x,), norm, is_leaf=lambda x: x is not norm)
    assert wrapped.training
    back = jax.tree.map(lambda x: x[0], wrapped, is_leaf=lambda x: type(x) is tuple)
    assert same(back, norm)


# --- Freeze and unfreeze --------------------------------------------------------------


def frozen(tree: Any) -> set[str]:
    return {name for name, flag in flags(tree, "frozen").items() if flag}


NO_MODULE = {
    "None": lambda m: m.layers[2][1],
    "one of two": lambda m: (m.norm, m.layers[1]),
    "one of two not of the tree": lambda m: (m.norm, make_norm()),
}


@pytest.mark.parametrize("where", NO_MODULE.values(), ids=list(NO_MODULE))
def test_where_without_an_es_module_is_an_error_that_names_the_other_ways(where):
    model = make_model()
    match = (
        r"(?s)es\.Buffer\[.*"
        r"es\.all_of\(es\.trainable, es\.not_\(es\.under\("
    )
    for f in (es.freeze, es.unfreeze):
        with pytest.raises(ValueError, match=match):
            f(model, where)


def test_a_plain_layer_is_unfrozen_from_the_model():
    class Net(es.Module):
        head: eqx.nn.Linear

    net = Net(eqx.nn.Linear(2, 2, key=jr.key(0))).freeze()
    match = (
        r"`model\.unfreeze\(lambda model: model\.head\)`, not `es\.unfreeze\(model\.he"
    )
    with pytest.raises(ValueError, match=match):
        es.unfreeze(net.head)
    assert not any(x.frozen for x in es.parts(net.unfreeze(lambda model: model.head)))


@pytest.mark.parametrize("where", [None, lambda t: t[0].bias], ids=["default", "array"])
def test_a_tree_without_an_es_module_cannot_be_frozen(where):
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    with pytest.raises(ValueError, match=r"There is no `es\.Module` to freeze here"):
        es.freeze([linear], where)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("norm", "str"),
        (es.Parameter, "es.Parameter"),
        (es.under(lambda m: m.norm), "es.under"),
        (es.nn.BatchNorm(3), "BatchNorm"),
    ],
)
def test_where_is_a_function_and_not_a_filter_or_a_layer(where, name):
    match = f"`where` must be a function from the tree to one of its nodes.* `{name}"
    with pytest.raises(TypeError, match=match):
        es.freeze(make_model(), where)
    with pytest.raises(TypeError, match=match):
        es.filter(make_model(), es.under(where))


def test_a_class_as_where():
    """The message contains code that freezes all modules of the class."""
    model = make_model()
    with pytest.raises(TypeError, match="the class `Norm` was given") as info:
        model.freeze(Norm)
    code = str(info.value).split("`")[-2]
    frozen = eval(code, {"es": es, "model": model, "Norm": Norm})
    expected = dict.fromkeys(["norm", "layers[0]", "layers[2][0]", "inner.norm"], True)
    assert flags(frozen, "frozen") == {"": False, **expected}


def test_where_may_be_a_method_of_a_module():
    class Select(eqx.Module):
        def norm(self, model):
            return model.norm

    assert es.freeze(make_model(), Select().norm).norm.frozen


def test_a_missing_attribute_in_where_names_where():
    with pytest.raises(AttributeError, match=r"'nrom'\n.*`where`.* here `Model`"):
        es.freeze(make_model(), lambda model: model.nrom)


# --- Methods are a convenience --------------------------------------------------------


def test_a_subclass_may_redefine_the_methods():
    class Odd(es.Module):
        x: es.Parameter
        norm: Norm

        def train(self):
            raise AssertionError

        eval = freeze = unfreeze = filter = update = partition = replace = train

    odd = Odd(jnp.ones(2), make_norm())
    assert same(es.train(es.eval(odd)), odd)
    assert frozen(es.freeze(odd, lambda m: m.norm)) == {"norm"}
    assert same(es.unfreeze(es.freeze(odd)), odd)
    assert same(es.update(odd, es.filter(odd, es.Parameter)), odd)
    assert same(eqx.combine(*es.partition(odd, es.Parameter)), odd)
    assert es.configure(odd, scale=1.0).norm.scale == 1.0
    assert len(es.modules(es.map_modules(lambda m, n: m, odd))) == 2


def test_fields_may_have_the_names_of_methods():
    class Conv(es.Module):
        filter: es.Parameter
        update: es.State
        partition: str
        eval: Array
        init: Array

    conv = es.eval(Conv(jnp.ones(2), jnp.ones(2), "text", jnp.ones(2), jnp.ones(2)))
    assert es.filter(conv, es.Parameter).update is None
    assert same(es.update(conv, es.filter(conv)), conv)
    with pytest.raises(TypeError, match="argument"):
        Conv()


@pytest.mark.parametrize("value", [1, np.bool_(True)], ids=repr)
def test_inference_mode_accepts_other_types_of_bools(value):
    norm = es.nn.BatchNorm(3)
    switched = eqx.nn.inference_mode(norm, value)
    assert same(switched, es.eval(norm))
    assert same(eqx.nn.inference_mode(switched, type(value)(False)), norm)
