"""Laws for every model, tested with random models; `nox -s fuzz` tries many more."""

import copy
import pickle

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from hypothesis import given
from random_models import Cache, KINDS, trees

import eqx_state as es


FILTERS = st.sampled_from(
    [
        *KINDS,
        es.TreePart,
        es.trainable,
        es.not_(es.State),
        es.any_of(es.Rng, es.BatchStat),
        es.all_of(es.State, es.not_(Cache)),
        es.path_matches("*f0*"),
        lambda part: part.value.ndim == 1,
    ]
)
lazy_trees = trees(is_lazy=True)


def identical(a, b):
    """Assert the same structure and identical leaves."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x is y


def equal(a, b):
    """Assert the same structure and types, and arrays that are equal bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert isinstance(x, type(y)) or isinstance(y, type(x))
        if eqx.is_array(x):
            assert x.dtype == y.dtype
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jr.key_data(x), jr.key_data(y)
            assert np.array_equal(x, y)
        else:
            assert x == y


def zeros(x):
    """Zeros of the same type, so that no value is left."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jr.wrap_key_data(zeros(jr.key_data(x)), impl=jr.key_impl(x))
    return np.zeros_like(x) if isinstance(x, np.ndarray) else jnp.zeros_like(x)


def modes(tree):
    return [
        (module.training, module.frozen)
        for _, module in es.modules(tree)
        if isinstance(module, es.Module)
    ]


@given(trees())
def test_every_array_has_the_kind_that_the_rules_give_it(built):
    parts = es.parts(built.value)
    assert [part.kind for part in parts] == built.effective
    assert [id(part.value) for part in parts] == [
        id(x) for x in jax.tree.leaves(built.value) if eqx.is_array(x)
    ]
    assert len({part.name for part in parts}) == len(parts)


@given(trees())
def test_every_array_with_a_kind_is_in_exactly_one_partition(built):
    tree = built.value
    effective = list(dict.fromkeys(k for k in built.effective if k is not None))
    exactly = [lambda part, kind=kind: part.kind is kind for kind in effective]
    *by_kind, rest = es.partition(tree, *exactly)
    identical(eqx.combine(*by_kind, rest), tree)
    counts = [len(jax.tree.leaves(part)) for part in by_kind]
    assert counts == [built.effective.count(kind) for kind in effective]


@given(lazy_trees, st.lists(FILTERS, max_size=3))
def test_partition_then_combine_is_the_identity(built, filters):
    parts = es.partition(built.value, *filters)
    identical(eqx.combine(*parts), built.value)
    identical(es.update(built.value, *parts), built.value)
    for i, part in enumerate(parts[:-1]):  # the first match wins
        earlier = es.any_of(*filters[:i])
        identical(part, es.filter(built.value, es.not_(earlier), filters[i]))


@given(lazy_trees, st.lists(FILTERS, max_size=2))
def test_filter_then_update_is_the_identity(built, filters):
    part = es.filter(built.value, *filters)
    identical(es.update(built.value, part), built.value)
    identical(es.filter(es.update(built.value, part), *filters), part)


@given(lazy_trees, st.lists(FILTERS, max_size=2))
def test_mask_filter_and_map_agree(built, filters):
    mask = es.mask(built.value, *filters)
    identical(eqx.filter(built.value, mask), es.filter(built.value, *filters))
    on = es.all_of(*(filters or [es.TreePart]))
    mapped = es.map(lambda x: "selected", built.value, on=on)
    chosen = jax.tree.map(lambda x, m: "selected" if m else x, built.value, mask)
    identical(mapped, chosen)


@given(trees(), FILTERS, st.booleans())
def test_update_takes_the_last_value_and_does_not_change_modes(built, chosen, is_eval):
    tree = built.value
    first, last = (es.map(lambda x, s=s: s, tree, on=chosen) for s in ("first", "last"))
    nothing = es.filter(es.train(tree, not is_eval), lambda part: False)
    new = es.update(tree, first, last, nothing)
    mask = es.mask(tree, chosen)
    expected = jax.tree.map(lambda x, m: "last" if m else x, tree, mask)
    assert jax.tree.structure(new) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        assert x is y or x == y == "last"
    assert modes(new) == modes(tree)


@given(lazy_trees)
def test_train_and_eval_change_only_modes(built):
    tree = built.value
    train, evaluation = es.train(tree), es.eval(tree)
    identical(es.train(evaluation), train)
    identical(es.eval(train), evaluation)
    identical(es.eval(evaluation), evaluation)
    assert all(training for training, _ in modes(train))
    assert not any(training for training, _ in modes(evaluation))
    assert [frozen for _, frozen in modes(evaluation)] == [f for _, f in modes(tree)]
    for part, other in zip(es.parts(tree), es.parts(evaluation), strict=True):
        assert part.value is other.value
        assert part.kind is other.kind


@given(trees())
def test_flatten_and_unflatten_are_inverse_and_treedefs_are_equal(built):
    tree = built.value
    leaves, treedef = jax.tree.flatten(tree)
    again = jax.tree.unflatten(treedef, leaves)
    identical(again, tree)
    assert hash(jax.tree.structure(again)) == hash(treedef)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert len(set(paths)) == len(paths) == len(leaves)


@given(trees())
def test_a_copy_is_equal_and_independent(built):
    tree = built.value
    for again in (copy.copy(tree), copy.deepcopy(tree)):
        equal(again, tree)
        assert modes(again) == modes(tree)


@given(trees())
def test_a_mutable_call_that_writes_nothing_is_the_identity(built):
    tree = built.value
    out, new = es.mutable(lambda tree: 1)(tree)
    assert out == 1
    identical(new, tree)


@given(trees())
def test_loading_a_state_dict_restores_every_array(built):
    tree = built.value
    arrays = es.state_dict(tree)
    assert list(arrays) == [part.name for part in es.parts(tree)]
    equal(es.load_state_dict(tree, arrays), tree)
    empty = es.map(zeros, tree, on=lambda part: True)
    equal(es.load_state_dict(empty, arrays), tree)


@given(built=trees())
def test_save_and_load_are_inverse(built, tmp_path_factory):
    tree = built.value
    path = tmp_path_factory.getbasetemp() / "law.safetensors"
    es.save(path, tree)
    equal(es.load(path, tree), tree)
    abstract = eqx.filter_eval_shape(lambda: tree)
    loaded = es.load(path, abstract)
    for part, new in zip(es.parts(tree), es.parts(loaded), strict=True):
        assert (part.name, part.kind) == (new.name, new.kind)
        equal(jnp.asarray(part.value), new.value)


@given(trees())
def test_a_pickled_tree_is_equal(built):
    again = pickle.loads(pickle.dumps(built.value))
    equal(again, built.value)
    assert modes(again) == modes(built.value)
