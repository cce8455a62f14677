"""Filters for the arrays of a stack: called per layer, selecting all layers or none."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqx_state as es
from eqx_state._tree.parts import layers_of


class Layer(es.Module):
    w: es.Parameter
    b: es.Parameter
    calls: es.State


def make_layer(i):
    return Layer(jnp.full((2, 3), i), jnp.full(3, i), i)


def make_stack(n=3):
    return es.nn.Stacked([make_layer(float(i)) for i in range(n)])


def make_net():
    return {"blocks": make_stack(), "head": eqx.nn.Linear(3, 2, key=jr.key(0))}


def selected(tree, *filters):
    """The names of the selected arrays; asserts one bool per array in the mask."""
    mask = es.mask(tree, *filters)
    assert eqx.tree_equal(mask, jax.tree.map(bool, mask))
    kept = es.filter(tree, *filters)
    assert eqx.tree_equal(kept, eqx.filter(tree, mask))
    assert eqx.tree_equal(es.partition(tree, es.all_of(*filters))[0], kept)
    return {part.name.removeprefix("['blocks'].") for part in es.parts(kept)}


STACKED = {"layers.w", "layers.b", "layers.calls"}


def test_a_function_sees_each_layer_as_in_a_list():
    net = make_net()
    seen, expected = [], []
    keys = ("name", "path", "kind", "frozen")

    def note(to, part):
        to.append([*(getattr(part, key) for key in keys), np.asarray(part.value)])
        return True

    es.mask(net, ft.partial(note, seen))
    es.mask({**net, "blocks": list(net["blocks"])}, ft.partial(note, expected))
    seen, expected = (sorted(x, key=lambda x: x[0]) for x in (seen, expected))
    assert eqx.tree_equal(seen, expected)


def test_decay_by_rank_leaves_out_the_biases():
    def is_matrix(part):
        return part.value.ndim >= 2

    assert selected(make_net(), is_matrix) == {"layers.w", "['head'].weight"}
    assert selected(jax.eval_shape(make_net), is_matrix) == {
        "layers.w",
        "['head'].weight",
    }
    # The moments of a stack form a stack.
    adam = es.Optimizer(optax.adam(0.1), wrt=is_matrix).init(make_net())
    assert es.filter(adam, is_matrix).opt_state[0].mu["blocks"].layers.b is None


SELECTING = {
    "by name in the layer": (es.path_matches("*].w"), {"layers.w"}),
    "not by the name in the tree": (es.path_matches("*layers*"), set()),
    "every layer by number": (
        es.any_of(*(es.path_matches(f"['blocks'][{i}].w") for i in range(3))),
        {"layers.w"},
    ),
    "no layer": (es.path_matches("['blocks'][3].w"), set()),
    "under the stack": (es.under(lambda m: m["blocks"]), STACKED),
    "under a slice that is all": (es.under(lambda m: m["blocks"][:]), STACKED),
    "under its layers": (es.under(lambda m: m["blocks"].layers.w), {"layers.w"}),
    "under every layer": (
        es.under(lambda m: tuple(layer.b for layer in m["blocks"])),
        {"layers.b"},
    ),
    "under layer and slice": (
        es.under(lambda m: (m["blocks"][0], m["blocks"][1:].layers)),
        STACKED,
    ),
    "inside": (es.inside(Layer), STACKED),
}


@pytest.mark.parametrize("case", SELECTING)
def test_a_path_filter_sees_the_names_in_a_list(case):
    filter, names = SELECTING[case]
    assert selected(make_net(), filter) == names


def test_a_stack_of_one_layer_is_selected_by_name():
    stack = es.nn.Stacked([make_stack()[0]])
    assert selected(stack, es.path_matches("[0].w")) == {"layers.w"}
    assert selected(stack, es.path_matches("[1].w")) == set()


DISAGREEING = {
    "name": es.path_matches("['blocks'][1].w"),
    "all of": es.all_of(es.Parameter, es.path_matches("*[1]*")),
    "under a slice": es.under(lambda m: m["blocks"][1:2]),
    "under an array": es.under(lambda m: m["blocks"][-2].w),
    "value": lambda part: part.value.ndim == 2 and part.value[0, 0] == 1,
}


@pytest.mark.parametrize("case", DISAGREEING)
def test_layers_that_disagree(case):
    net, filter = make_net(), DISAGREEING[case]
    message = (
        r"`\['blocks'\]\.layers\.w` is one array for all layers .*filter `.*` selects"
        r" `\['blocks'\]\[1\]\.w` but not `\['blocks'\]\[0\]\.w`"
    )
    for use in (
        lambda: es.filter(net, filter),
        lambda: es.map(jnp.sin, net, on=filter),
        lambda: es.state_dict(net, filter),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_a_stack_within_a_stack():
    stacks = es.nn.Stacked([make_stack(2) for _ in range(3)])
    net = [stacks]
    names = [layer.name for layer in layers_of(es.parts(net)[0])]
    assert names == [f"[0][{i}][{j}].w" for i in range(3) for j in range(2)]
    assert selected(net, lambda part: part.value.ndim == 2) == {"[0].layers.layers.w"}
    assert selected(net, es.path_matches("[0][?][?].b")) == {"[0].layers.layers.b"}
    ones = es.under(lambda m: [m[0][i][1].w for i in range(3)])
    zeros = es.under(lambda m: [layers[0].w for layers in m[0]])
    assert selected(net, es.any_of(ones, zeros)) == {"[0].layers.layers.w"}
    with pytest.raises(ValueError, match=r"selects `\[0\]\[0\]\[1\]\.w` but not"):
        es.mask(net, ones)


def test_under_jit_the_program_has_one_slice_for_all_layers():
    @jax.jit
    def kept(stacked):
        return es.filter(stacked, lambda part: part.value.ndim == 2)

    for n in (2, 5):
        text = str(jax.make_jaxpr(kept)(make_stack(n)))
        assert text.count("slice") <= 3
    assert kept(make_stack()).layers.b is None


def test_an_array_without_the_axis_has_the_names_of_all_layers():
    stacked = eqx.tree_at(lambda s: s.layers.b, make_stack(), jnp.ones(1))
    assert es.filter(stacked, es.path_matches("[?].b")).layers.b.shape == (1,)
    assert es.filter(stacked, lambda part: part.value.shape == (1,)).layers.w is None


def test_none_and_values_that_are_not_arrays():
    stacked = es.filter(make_stack(), es.path_matches("*.w"))
    assert selected(stacked, es.under(lambda s: s[:])) == {"layers.w"}
    with pytest.raises(ValueError, match="selects nothing"):
        es.mask(make_stack(), es.under(lambda s: len(s)))


def test_a_filter_is_not_called_for_an_empty_stack():
    empty = make_stack()[:0]
    assert es.mask(empty, lambda part: True).layers.w is True


def test_freezing_takes_all_layers():
    net = make_net()
    frozen = es.freeze(net, lambda m: m["blocks"].layers.w)
    assert selected(frozen, es.trainable) == {
        "layers.b",
        "['head'].weight",
        "['head'].bias",
    }
    assert [part.frozen for part in es.parts(frozen["blocks"][1:])] == [
        True,
        False,
        False,
    ]
    for where in (
        lambda m: m["blocks"][0],
        lambda m: m["blocks"][0].w,
        lambda m: m["blocks"][1:],
        lambda m: (m["head"], *m["blocks"]),
    ):
        with pytest.raises(ValueError, match="Layers of an `es.nn.Stacked` can only"):
            es.freeze(net, where)
