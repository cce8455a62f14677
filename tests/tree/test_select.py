"""`es.filter`, `es.partition`, `es.update`, `es.spec`, `es.map`: their laws."""

from collections.abc import Callable
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


class Cache(es.State):
    pass


class Norm(es.Module):
    scale: es.Parameter
    mean: es.BatchStat


class Layer(eqx.Module):
    norm: Norm
    linear: eqx.nn.Linear
    bias: es.Buffer[Array] | None = None
    width: int = eqx.field(static=True, default=2)


class Model(es.Module):
    layers: list[Layer]
    dropout: eqx.nn.Dropout
    stats: dict[str, es.State]
    steps: Array
    act: Callable[..., Any] = jnp.tanh
    name: str = "model"
    depth: int = 2


def make_model(seed: int = 0) -> Model:
    keys = jr.split(jr.key(seed), 2)
    layers = [
        Layer(Norm(jnp.ones(2), jnp.zeros(2)), eqx.nn.Linear(2, 2, key=key))
        for key in keys
    ]
    stats = {"n": jnp.array(seed), "key": jr.key(seed)}
    return Model(layers, eqx.nn.Dropout(0.5), stats, jnp.array(seed))


ONE = jnp.ones(2)


# --- Laws -----------------------------------------------------------------------------


def test_the_methods_are_the_functions():
    model = make_model()
    params = model.filter(es.Parameter)
    assert type(params) is Model
    assert same(params, es.filter(model, es.Parameter))
    assert same(model.partition(es.State)[1], es.partition(model, es.State)[1])
    assert same(model.update(params), model)


def test_without_a_filter_all_arrays_with_a_kind_are_selected():
    model = make_model()
    filtered = es.filter(model)
    assert (filtered.steps, filtered.act, filtered.name) == (None, None, None)
    assert same(filtered, es.filter(model, es.TreePart))
    assert same(es.partition(model)[0], model)


# --- update ---------------------------------------------------------------------------


P, S = make_model().filter(es.Parameter), make_model().filter(es.State)
SWAPPED = {
    "the whole model": (r"layers\[0\]\.norm\.mean", P, [make_model()]),
    "the second partial": (r"layers\[0\]\.norm\.mean", P, [P, S]),
    "an array": ("the root", None, [ONE]),
    "NumPy": (r"\['b'\]", {"b": None}, [{"b": np.ones(2)}]),
}


@pytest.mark.parametrize(
    ("path", "tree", "partials"), SWAPPED.values(), ids=list(SWAPPED)
)
def test_an_array_for_a_none_of_the_tree_is_an_error(path, tree, partials):
    message = rf"`es\.update`: .* has an array at `{path}`, where the tree has `None`"
    with pytest.raises(ValueError, match=message) as info:
        es.update(tree, *partials)
    assert "`es.update(model, params)`" in str(info.value)
    assert "`eqx.combine(params, rest)`" in str(info.value)


def test_a_none_of_the_tree_and_of_the_partials_remains():
    model = make_model()
    params = model.filter(es.Parameter)
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert same(es.update(params, zeros, params), params)
    assert same(es.update(params.eval(), params), params.eval())


def test_a_leaf_that_is_no_array_may_fill_a_none():
    tree = {"f": None, "w": ONE}
    assert es.update(tree, {"f": jnp.sin, "w": None}) == {"f": jnp.sin, "w": ONE}


def test_update_does_not_change_flags():
    model = make_model()
    other = es.freeze(es.eval(model), lambda m: m.layers[0])
    for tree, partial in ((model, other), (other, model)):
        assert same(es.update(tree, partial.filter(es.Parameter)), tree)
        assert same(es.update(tree, partial), tree)


def test_shapes_and_dtypes_may_change():
    model = make_model()
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), model.filter(es.Parameter))
    assert model.update(stacked).layers[0].norm.scale.shape == (2, 2)
    shapes = jax.eval_shape(lambda m: m, model.filter(es.Parameter))
    assert isinstance(model.update(shapes).layers[0].norm.scale, jax.ShapeDtypeStruct)


DIFFERENT = {
    "fewer layers": ("layers", lambda m: m.replace(layers=m.layers[:1])),
    "another layer": (
        r"layers\[1\].linear",
        lambda m: eqx.tree_at(
            lambda m: m.layers[1].linear, m, eqx.nn.Conv1d(2, 2, 2, key=jr.key(0))
        ),
    ),
    "another static field": (
        r"layers\[0\].width",
        lambda m: es.configure(m, width=3).replace(
            layers=[es.configure(m.layers[0], width=3), m.layers[1]]
        ),
    ),
    "a container for an array": ("steps", lambda m: m.replace(steps=[ONE])),
    "another class": ("the root", lambda m: (m,)),
}


def test_map_passes_the_subtree_at_a_leaf_like_jax():
    moments = {"w": (jnp.ones(2), jnp.zeros(2)), "b": (None, None)}
    out = es.map(
        lambda p, mv: p + mv[0], {"w": ONE, "b": None}, moments, on=es.Parameter
    )
    assert (out["w"] == ONE + 1).all()
    assert out["b"] is None


@pytest.mark.parametrize(("path", "change"), DIFFERENT.values(), ids=list(DIFFERENT))
def test_a_different_structure_is_an_error_that_names_the_first_path(path, change):
    model = make_model()
    before = jax.tree.leaves(model)
    other = change(model)
    for partial in (other, es.filter(other, es.Parameter)):
        with pytest.raises(ValueError, match=rf"es\.update.*first at `?{path}[`:]"):
            es.update(model, partial)
    # As in `jax.tree.map`, a container may be at the position of a leaf.
    if path != "steps":
        said = rf"`es\.map`: tree number 1.*first at `?{path}[`:]"
        with pytest.raises(ValueError, match=said):
            es.map(lambda x, y: x, model, other, on=es.TreePart)
    with pytest.raises(ValueError, match=rf"number 1.*first at `?{path}[`:]"):
        es.update(model, model, other)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(model), strict=True))


def test_the_error_shows_small_structures_in_full_and_large_ones_by_their_keys():
    large = {f"a long name {i}": ONE for i in range(9)}
    for expected, other, shown in (
        ({"x": ONE}, {"y": ONE}, r"expected `{'x': f32\[.*\]}`, got `{'y': f32"),
        (large, ONE, r"expected `dict of \['a long name 0'\], .*'\]`, got `f32"),
    ):
        with pytest.raises(ValueError, match=rf"`es\.update`: The partial.*{shown}"):
            es.update(expected, other)


def test_different_auxiliary_data_of_a_node_is_a_different_structure():
    sin, cos = ({"f": [jax.tree_util.Partial(f, ONE)]} for f in (jnp.sin, jnp.cos))
    with pytest.raises(ValueError, match=r"es\.update.*first at `\['f'\]\[0\]`:"):
        es.update(sin, cos)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_a_traced_ref_is_not_an_array_although_it_has_the_class_of_one(transform):
    def check(ref, x):
        if eqx.is_array(ref):
            pytest.skip("To JAX 0.8, a traced `Ref` is a `jax.Array`.")
        tree, arrays, others = [ref, {"a": x}], [None, {"a": x}], [ref, {"a": None}]
        assert same(es.filter(tree), arrays)
        first, rest = es.partition(tree, es.TreePart)
        assert same(first, arrays)
        assert same(rest, others)
        assert es.mask(tree, es.TreePart) == [False, {"a": True}]
        assert same(es.update(tree, es.filter(tree)), tree)
        assert same(es.map(lambda y: y, tree, on=es.TreePart), tree)
        return x.sum()

    def f(x):
        check(jax.new_ref(x), x)
        return check(jax.new_ref(jnp.zeros(())), x)

    transform(f)(jnp.ones(2))


# --- map ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [es.eval, es.freeze])
def test_flags_may_differ_between_the_trees_of_map(mode):
    ema, model = mode(make_model(0)), make_model(1)

    def step(e, p):
        return 0.9 * e + 0.1 * p

    new = es.map(step, ema, model, on=es.Parameter)
    a, b, c = (m.layers[0].linear.weight for m in (ema, model, new))
    assert jnp.allclose(c, step(a, b))
    assert jax.tree.structure(new) == jax.tree.structure(ema)
    assert new.stats["n"] is ema.stats["n"]


def test_map_over_trees_with_none():
    model = make_model()
    params = model.filter(es.Parameter)
    new = es.map(lambda x, y: y, model, params, on=es.Parameter)
    assert same(new, model)
    with pytest.raises(ValueError, match=r"es\.map.*at `layers\[0\]\.norm\.mean"):
        es.map(lambda x, y: y, model, params, on=es.State)
    over_holes = es.map(lambda x, y: x + y, params, model, on=es.TreePart)
    assert over_holes.stats == {"n": None, "key": None}


@pytest.mark.parametrize("rest", [(), (es.Parameter,)])
def test_map_requires_a_filter(rest):
    model = make_model()
    message = r"`es\.map` needs `on=`.*`es\.map\(f, tree, on=es\.Parameter\)`.*counters"
    with pytest.raises(TypeError, match=message):
        es.map(lambda *xs: xs[0], model, *rest)


def test_map_takes_the_function_first():
    model = make_model()
    for tree, given in ((model, "a `Model`"), ({"a": ONE}, "a `dict`")):
        match = rf"`es\.map\(f, tree, on=.*\)` takes the function first.*{given} first"
        with pytest.raises(TypeError, match=match):
            es.map(tree, lambda p: 0.5 * p, on=es.Parameter)
    assert es.map(jnp.sin, jnp.cos, on=es.Parameter) is jnp.cos  # a tree without arrays
