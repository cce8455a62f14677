"""Programs that stack layers wrongly, or treat a stack as a list."""

import os
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from catalogue_entry import Layer, program

import eqx_state as es


X = jnp.ones(3)


class Deep(es.Module):
    blocks: es.nn.Stacked[Layer]

    def __call__(self, x):
        return self.blocks(x)


def layers(n=3):
    return [Layer(float(i + 1)) for i in range(n)]


def deep(n=3):
    return Deep(es.nn.Stacked(layers(n)))


# --- Creating a stack -----------------------------------------------------------------


@program("stack layers of different sizes", "Put layers that must differ into a list")
def _(case):
    a, b = case.keep((eqx.nn.Linear(2, 2, key=jr.key(0)), Layer()))
    with case.error():
        es.nn.Stacked([a, eqx.nn.Linear(2, 2, key=jr.key(1), dtype=jnp.float16)])
    with case.error():
        es.nn.Stacked([b, Layer(jnp.ones(2))])


@program("stack layers, some in eval mode or frozen", "the values of their arrays")
def _(case):
    a, b = case.keep(tuple(layers(2)))
    for other in (b.eval(), b.freeze()):
        with case.error():
            es.nn.Stacked([a, other])


@program("stack one layer several times: `es.nn.Stacked([layer] * 3)`")
def _(case):
    layer = case.keep(Layer(), X)
    with case.error():
        es.nn.Stacked([layer] * 3)


@program(
    "make a stack of classes: `es.nn.Stacked([Block, Block])`", "es.nn.Stacked.make("
)
def _(case):
    class Block(eqx.nn.Linear):
        pass

    Block.__qualname__ = "Block"
    with case.error("lambda key: Block(..., key=key)"):
        es.nn.Stacked([Block, Block])


@program("make a stack with one key: `es.nn.Stacked.make(Block, key)`")
def _(case):
    with case.error():
        es.nn.Stacked.make(lambda key: Layer(jr.normal(key)), jr.key(0))


# --- Running it -----------------------------------------------------------------------


@program("let a layer of a stack change the shape", "got `f32[1,3]`")
def _(case):
    stacked = case.keep(es.nn.Stacked([eqx.nn.Lambda(lambda x: x[None])] * 2))
    with case.error():
        stacked(X)


@program("let a layer of a stack change the dtype", "float16")
def _(case):
    to_half = eqx.nn.Lambda(lambda x: x.astype(jnp.float16))
    stacked = case.keep(es.nn.Stacked([to_half] * 2))
    with case.error():
        stacked(X)


@program("take one layer out of a stack, `self.blocks[0]`, and call it in train mode")
def _(case):
    model = case.keep(deep(), X)
    with case.error():
        es.mutable(lambda model, x: model.blocks[0](x))(model, X)
    y, _ = es.mutable(lambda model, x: model.blocks[1](x))(model.eval(), X)
    assert (y == 2 * X).all()


@program(
    "call an ensemble of stacks without `es.vmap`",
    "shape (2, 3)",
    "`es.vmap(model, axes={...: 0})`",
)
def _(case):
    ensemble = jax.tree.map(lambda x: jnp.stack([x, x]), deep())
    run = es.mutable(es.vmap(case.keep(ensemble), in_axes=None, axes={...: 0}))
    with case.error():
        es.mutable(ensemble)(X)
    ys, new = run(X)
    assert ys.tolist() == [[6.0] * 3] * 2
    assert new.blocks.layers.count.tolist() == [[1] * 3] * 2


@program(
    "put adapters into a stack by `es.map_modules` (LoRA)",
    "has 3 layers and an array of shape (1,), `down`",
    "es.nn.Stacked([add(b, key) for b, key in zip(stack, keys)])",
)
def _(case):
    class LoRA(es.Module):
        base: Layer
        down: es.Parameter

        def __call__(self, x):
            return self.base(x) + self.down * x

    def around(module, name):
        is_layer = isinstance(module, Layer)
        return LoRA(module, jnp.zeros(1)) if is_layer else module

    model = case.keep(deep(), X)
    with case.error():
        es.map_modules(around, model)
    with case.error():
        model.blocks.replace(layers=around(model.blocks.layers, ""))(X)
    adapted = es.nn.Stacked([around(layer, "") for layer in model.blocks])
    y, new = es.mutable(Deep(adapted))(X)
    assert (y == 6 * X).all()
    assert es.map_modules(lambda module, name: module, new).blocks._length == 3
    ensemble = jax.tree.map(lambda x: jnp.stack([x, x]), model)
    es.map_modules(lambda module, name: module, ensemble)


# --- Its arrays -----------------------------------------------------------------------


@program(
    "select one layer of a stack: `es.path_matches('blocks[0].weight')`",
    "selects `blocks[0].weight` but not `blocks[1].weight`",
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


@program("freeze some layers of a stack: `es.freeze(model, lambda m: m.blocks[0])`")
def _(case):
    model = case.keep(deep(), X)
    for where in (lambda m: m.blocks[0], lambda m: m.blocks[1:]):
        with case.error():
            es.freeze(model, where)
    first, rest = es.freeze(model.blocks[:1]), model.blocks[1:]
    trained = es.parts(es.filter([first, rest], es.trainable))
    assert [part.name for part in trained] == ["[1].layers.weight"]


# --- Files ----------------------------------------------------------------------------


@program("load a checkpoint with fewer layers")
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
