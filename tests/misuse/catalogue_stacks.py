"""Programs that stack layers, and treat a stack as if it were a list."""

import os
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from catalogue_entry import FROZEN, Layer, Theme

import eqx_state as es


STACKS = Theme("Stacks of layers")
X = jnp.ones(3)


class Deep(es.Module):
    blocks: es.nn.Stacked[Layer]

    def __call__(self, x):
        return self.blocks(x)


def layers(n=3):
    return [Layer(float(i + 1)) for i in range(n)]


def deep(n=3):
    return Deep(es.nn.Stacked(layers(n)))


# --- Making one -----------------------------------------------------------------------


@STACKS.raises(
    "stack layers of different sizes",
    ValueError,
    "layers 0 and 1 differ, first at `weight`",
    "Layers that have to differ belong in a list",
    instead="a list; or stacks of those that are alike",
)
def _(case):
    a, b = case.keep((eqx.nn.Linear(2, 2, key=jr.key(0)), Layer()))
    with case.error():
        es.nn.Stacked([a, eqx.nn.Linear(2, 2, key=jr.key(1), dtype=jnp.float16)])
    with case.error():
        es.nn.Stacked([b, Layer(jnp.ones(2))])


@STACKS.raises(
    "stack layers of which some are in eval mode, or frozen",
    ValueError,
    "layers 0 and 1 differ, first at",
    "or modes",
    instead="`es.eval` or `es.freeze` of the whole stack",
)
def _(case):
    a, b = case.keep(tuple(layers(2)))
    for other in (b.eval(), b.freeze()):
        with case.error():
            es.nn.Stacked([a, other])


@STACKS.raises(
    "stack one layer several times: `es.nn.Stacked([layer] * 3)`",
    ValueError,
    "The same stateful module is in two places",
    instead="a layer for each place, with its own key",
)
def _(case):
    layer = case.keep(Layer(), X)
    with case.error():
        es.nn.Stacked([layer] * 3)


@STACKS.raises(
    "make a stack of one layer: `es.nn.Stacked(Block(key))`",
    TypeError,
    "takes a list of layers, and was given a `Layer`",
    instead="a list; or `es.nn.Stacked.make(Block, keys)`",
)
def _(case):
    with case.error():
        es.nn.Stacked(case.keep(Layer(), X))


@STACKS.raises(
    "make a stack with one key: `es.nn.Stacked.make(Block, key)`",
    TypeError,
    "takes one key for each layer, and was given a single key",
    instead="`jax.random.split(key, n)`",
)
def _(case):
    with case.error():
        es.nn.Stacked.make(lambda key: Layer(jr.normal(key)), jr.key(0))


@STACKS.raises(
    "make a stack of a class that takes more than a key: `es.nn.Stacked.make("
    "eqx.nn.Linear, keys)`",
    TypeError,
    "calls `Linear` with a key and nothing else",
    "missing a required argument: 'out_features'",
    instead="`lambda key: eqx.nn.Linear(8, 8, key=key)`",
)
def _(case):
    with case.error():
        es.nn.Stacked.make(eqx.nn.Linear, jr.split(jr.key(0), 2))


@STACKS.works(
    "stack lazy layers",
    "`init` makes each of them with a key of its own, and stacks them",
)
def _(case):
    lazy = [es.lazy(eqx.nn.Linear, 3, 3) for _ in range(2)]
    stacked = es.init(es.nn.Stacked(lazy), 0)
    assert stacked.layers.weight.shape == (2, 3, 3)
    assert (stacked[0].weight != stacked[1].weight).all()


# --- Running it -----------------------------------------------------------------------


@STACKS.raises(
    "let a layer of a stack change the shape or the dtype",
    TypeError,
    "structure, shapes and dtypes must stay",
    "was given `f32[3]`, and returned `f16[",
    instead="`y.astype(x.dtype)` in the layer",
)
def _(case):
    def to_half(x):
        return x.astype(jnp.float16)

    for change in (to_half, lambda x: to_half(x)[None]):
        stacked = case.keep(es.nn.Stacked([eqx.nn.Lambda(change)] * 2))
        with case.error():
            stacked(X)


@STACKS.raises(
    "take one layer out of a stack, `self.blocks[0]`, and call it in train mode",
    FROZEN,
    "it is a copy made inside the scope",
    instead="`self.blocks(x)`; or a list of layers; in eval mode it works",
)
def _(case):
    model = case.keep(deep(), X)
    with case.error():
        es.mutable(lambda model, x: model.blocks[0](x))(model, X)
    y, _ = es.mutable(lambda model, x: model.blocks[1](x))(model.eval(), X)
    assert (y == 2 * X).all()


@STACKS.raises(
    "call an ensemble of stacks without `es.vmap`",
    ValueError,
    "the first axis of each of its arrays has to be that of its 3 layers",
    "`layers.weight`",
    "`es.vmap(model, axes={...: 0})`",
    instead="`es.vmap(model, in_axes=None, axes={...: 0})(x)`",
)
def _(case):
    ensemble = jax.tree.map(lambda x: jnp.stack([x, x]), deep())
    run = es.mutable(es.vmap(case.keep(ensemble), in_axes=None, axes={...: 0}))
    with case.error():
        es.mutable(ensemble)(X)
    ys, new = run(X)
    assert ys.tolist() == [[6.0] * 3] * 2
    assert new.blocks.layers.count.tolist() == [[1] * 3] * 2


# --- Its arrays -----------------------------------------------------------------------


@STACKS.raises(
    "select one layer of a stack: `es.path_matches('blocks[0].weight')`",
    ValueError,
    "is one array for all layers of an `es.nn.Stacked`",
    "selects `blocks[0].weight` but not `blocks[1].weight`",
    instead="`es.path_matches('blocks[*].weight')`; or a list of layers",
)
def _(case):
    model = case.keep(deep(), X)
    one = es.path_matches("blocks[0].weight")
    for use in (es.filter, es.mask, es.state_dict):
        with case.error():
            use(model, one)
    with case.error():
        es.spec(model, {one: 0, ...: None})
    with case.error():
        es.filter(model, es.under(lambda model: model.blocks[0].weight))
    kept = es.filter(model, es.path_matches("blocks[*].weight")).blocks.layers
    assert (kept.weight is not None, kept.count) == (True, None)


@STACKS.works(
    "leave biases out of weight decay by `part.value.ndim >= 2`, in a stack",
    "a filter sees each layer without the stack's axis",
)
def _(case):
    stacked = case.keep(
        es.nn.Stacked.make(
            lambda key: eqx.nn.Linear(2, 2, key=key), jr.split(jr.key(0), 3)
        )
    )
    decayed = es.mask(stacked, lambda part: part.value.ndim >= 2).layers
    assert (decayed.weight, decayed.bias) == (True, False)


@STACKS.raises(
    "freeze some layers of a stack: `es.freeze(model, lambda m: m.blocks[0])`",
    ValueError,
    "cannot be frozen without the others",
    instead="`m.blocks`, or `m.blocks.layers.norm`; or two stacks, one of them frozen",
)
def _(case):
    model = case.keep(deep(), X)
    for where in (lambda m: m.blocks[0], lambda m: m.blocks[1:]):
        with case.error():
            es.freeze(model, where)
    first, rest = es.freeze(model.blocks[:1]), model.blocks[1:]
    trained = es.parts(es.filter([first, rest], es.trainable))
    assert [part.name for part in trained] == ["[1].layers.weight"]


# --- Files ----------------------------------------------------------------------------


@STACKS.works(
    "load the file of a list of layers into a stack, or the other way",
    "files have the names of the layers: `blocks[0].weight`",
)
def _(case):
    model = case.keep(deep(), X)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        es.save(path, {"blocks": layers()})
        loaded = es.load(path, {"blocks": es.nn.Stacked(layers()[::-1])})
    assert eqx.tree_equal(loaded["blocks"], model.blocks)


@STACKS.raises(
    "load a checkpoint of another depth",
    ValueError,
    "does not fit the tree",
    instead="`es.load(path, like, strict=False)`: layers that the file lacks stay",
)
def _(case):
    shallow, model = case.keep(deep(2), X), case.keep(deep(), X)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        es.save(path, shallow)
        with case.error("missing:\n    blocks[2].count\n    blocks[2].weight"):
            es.load(path, model)
        loaded = es.load(path, model, strict=False)
        assert eqx.tree_equal(loaded, model)
        es.save(path, model)
        with case.error("unexpected:\n    blocks[2].count\n    blocks[2].weight"):
            es.load(path, shallow)
