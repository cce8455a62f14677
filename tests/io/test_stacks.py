"""Stacks in files and state dicts: names, and exchange with a list of layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import rejects, reuses_keys, untouched

import eqx_state as es


pytestmark = reuses_keys  # layers save both their keys and the key data

KEYS = jr.split(jr.key(0), 3)
TX = optax.adam(0.1)


class Layer(es.Module):
    w: es.Parameter
    rng: es.Rng
    norm: es.nn.BatchNorm
    half: es.Buffer
    table: np.ndarray

    def __init__(self, key):
        a, b, c = jr.split(key, 3)
        self.w = jr.normal(a, (2, 3))
        self.rng = b
        self.norm = es.nn.BatchNorm(2).replace(mean=jr.normal(c, (2,)))
        self.half = self.w.astype(jnp.bfloat16)
        self.table = np.asarray(jr.key_data(b))


class Net(es.Module):
    blocks: es.nn.Stacked | list
    head: eqx.nn.Linear


def layers(seed=0, n=3):
    return [Layer(key) for key in jr.split(jr.key(seed), n)]


def as_list(seed=0):
    return Net(layers(seed), eqx.nn.Linear(3, 2, key=jr.key(seed)))


def as_stack(net):
    return net.replace(blocks=es.nn.Stacked(net.blocks))


def run(net):
    """A model, and its optimizer with a changed state."""
    optimizer = es.Optimizer(TX).init(net)
    optimizer = es.map(lambda x: x + 1, optimizer, on=es.OptState)
    return {"net": net, "optimizer": optimizer}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        assert eqx.tree_equal(x, y)


# --- A list and a stack ---------------------------------------------------------------


def test_a_stack_has_the_state_dict_of_a_list_of_layers():
    net = as_list()
    expected, arrays = es.state_dict(net), es.state_dict(as_stack(net))
    assert list(arrays) == list(expected)
    assert_same(arrays, expected)
    names = list(es.state_dict(as_stack(net), es.Rng))
    assert names == [f"blocks[{i}].rng" for i in range(3)]

    @eqx.filter_jit
    def through(net):
        return es.load_state_dict(net, es.state_dict(net))

    net = as_stack(net)
    assert eqx.tree_equal(through(net), jax.tree.map(jnp.asarray, net))


@pytest.mark.parametrize("is_abstract", [False, True])
def test_each_is_loaded_from_the_file_of_the_other(is_abstract, path, tmp_path):
    nets = run(as_list(0)), run(as_stack(as_list(0)))
    likes = run(as_list(1)), run(as_stack(as_list(1)))
    for net, expected, like in (nets[0], nets[1], likes[1]), (*nets[::-1], likes[0]):
        given = eqx.filter_eval_shape(lambda like=like: like) if is_abstract else like
        with untouched(like):
            es.save(path, net)
            loaded = es.load(path, given)
        if is_abstract:
            expected = jax.tree.map(jnp.asarray, expected)
        assert_same(loaded, expected)
        assert_same(es.load_state_dict(given, es.state_dict(net)), expected)


def test_a_stack_within_a_stack(path):
    lists = [layers(seed, 2) for seed in range(3)]
    stacked = es.nn.Stacked([es.nn.Stacked(each) for each in lists])
    assert_same(es.state_dict(stacked), es.state_dict(lists))
    es.save(path, lists)
    other = jax.tree.map(
        lambda x: x if x.dtype == stacked.layers.layers.rng.dtype else 0 * x, stacked
    )
    assert_same(es.load(path, other), stacked)
    es.save(path, stacked)
    assert_same(es.load(path, [layers(9, 2) for _ in range(3)]), lists)


def test_a_stack_alone_and_one_of_equinox_layers(path):
    linears = [eqx.nn.Linear(2, 2, key=key) for key in KEYS]
    stacked = es.nn.Stacked(linears)
    assert list(es.state_dict(stacked))[:3] == ["[0].weight", "[0].bias", "[1].weight"]
    for each in (linears, linears[:1]):
        es.save(path, es.nn.Stacked(each))
        assert_same(es.load(path, each), each)
        assert_same(es.load(path, es.nn.Stacked(each)), es.nn.Stacked(each))
    legacy = es.nn.Stacked([es.nn.Dropout(key=jr.PRNGKey(i)) for i in range(2)])
    assert_same(es.load_state_dict(legacy, es.state_dict(legacy)), legacy)


# --- Arrays that all layers share -----------------------------------------------------


def test_an_array_without_the_axis_keeps_its_name(path):
    stacked = es.nn.Stacked([eqx.nn.Linear(2, 2, key=key) for key in KEYS])
    tree = [stacked, eqx.tree_at(lambda s: s.layers.weight, stacked, jnp.ones(1))]
    assert list(es.state_dict(tree))[-4:] == [
        "[1].layers.weight",
        *(f"[1][{i}].bias" for i in range(3)),
    ]
    es.save(path, tree)
    assert_same(es.load(path, jax.tree.map(lambda x: 0 * x, tree)), tree)


# --- Errors and missing layers --------------------------------------------------------


def test_a_wrong_shape_in_one_layer(path):
    net = as_list()
    wrong = eqx.tree_at(lambda n: n.blocks[1].w, net, jnp.ones(7))
    es.save(path, wrong)
    message = r"wrong shape:\n    blocks\[1\]\.w: \(7,\) instead of \(2, 3\)$"
    like = as_stack(net)
    with rejects(like, ValueError, message):
        es.load(path, like)


def test_missing_layers_do_not_change(path):
    saved, net = as_list(0), as_stack(as_list(1))
    part = Net(saved.blocks[:1], None)
    es.save(path, part)
    for loaded in (
        es.load(path, net, strict=False),
        es.load_state_dict(net, es.state_dict(part), strict=False),
    ):
        assert_same(list(loaded.blocks), [saved.blocks[0], *list(net.blocks)[1:]])
        assert_same(loaded.head, net.head)


def test_an_abstract_stack_takes_all_layers_or_none(path):
    net = as_stack(as_list())
    abstract = eqx.filter_eval_shape(lambda: net)
    some = {"blocks[1].w": jnp.ones((2, 3))}
    with pytest.raises(
        ValueError, match=r"missing:\n    blocks\[0\]\.w\n    blocks\[2"
    ):
        es.load_state_dict(abstract, some, strict=False)
    pair, other = (abstract, jnp.zeros(2)), jnp.ones(2)
    new = es.load_state_dict(pair, {"[1]": other}, strict=False)
    assert eqx.tree_equal(new, (abstract, other))


def test_filters_select_layers_together(path):
    net = as_stack(as_list())
    with pytest.raises(ValueError, match=r"selects `blocks\[0\]\.w` but not"):
        es.save(path, net, es.path_matches("blocks[0].w"))
    assert not path.exists()
    es.save(path, net, es.path_matches("blocks[?].w"))
    like = as_stack(as_list(1))
    loaded = es.load(path, like, lambda part: part.name.endswith("w"))
    assert (loaded.blocks.layers.w == net.blocks.layers.w).all()
    assert (loaded.blocks.layers.norm.mean == like.blocks.layers.norm.mean).all()


def test_an_array_of_a_stack_that_cannot_be_saved_is_named_once(path):
    stacked = es.nn.Stacked([{"w": jnp.ones(2, complex)}] * 3)
    wide = jax.tree.map(lambda x: np.asarray(x, np.complex128), {"blocks": stacked})
    with rejects(wide, TypeError, r"arrays:\n  \['blocks'\]\.layers\['w'\]: .*128.*$"):
        es.save(path, wide)


def test_weights_of_pytorch_by_the_names_of_layers():
    cells = [eqx.nn.GRUCell(2, 2, key=key) for key in KEYS]
    shapes = {"weight_ih": (6, 2), "weight_hh": (6, 2), "bias_ih": 6, "bias_hh": 6}
    tensors = {
        f"cells.{i}.{name}": np.full(shape, 10 * i + k, "f4")
        for i in range(3)
        for k, (name, shape) in enumerate(shapes.items())
    }
    expected = es.from_torch({"cells": cells}, tensors)["cells"]
    loaded = es.from_torch({"cells": es.nn.Stacked(cells)}, tensors)["cells"]
    assert_same(list(loaded), expected)
    tensors.pop("cells.2.weight_ih")
    with pytest.raises(ValueError, match=r"missing:\n    cells\.2\.weight_ih"):
        es.from_torch({"cells": es.nn.Stacked(cells)}, tensors)
