"""Every row of "Other messages" in `docs/troubleshooting.md` is as it says.

The page itself runs the programs of its headings.
"""

import os
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import reuses_keys
from misuse import Layer, Page, XS

import eqx_state as es


PAGE = Page(messages=True)
program = PAGE.program


@reuses_keys  # otherwise JAX has a different error for a leaked value
@pytest.mark.parametrize("title", PAGE.rows)
def test_what_happens(title, net):
    PAGE.programs[title](net)


@program(
    "use a pickle of a class that has gained a field",
    "'Net' object has no attribute 'layer'",
)
def _(net):
    old = pickle.loads(pickle.dumps(net))
    object.__delattr__(old, "layer")  # as if `Net` had been without it
    new = es.load_state_dict(net, es.state_dict(old), strict=False)
    assert eqx.tree_equal(new, net)
    es.mutable(old)(XS)


@program(
    "set an entry of a dict in a transform without `es.mutable`: `es.jit(f)(model, x)`",
    "`Net.stats`",
)
def _(net):
    es.jit(lambda net, x: net.stats.update(last=x.sum()))(net, XS)


@program('write a static field: `self.mode = "fast"`', "Mode.mode`")
def _(net):
    class Mode(es.Module):
        mode: str = eqx.field(static=True, default="slow")

        def __call__(self):
            self.mode = "fast"

    es.mutable(Mode())()


@program("keep a counter in an integer array without a kind", "`count: es.State`")
def _(net):
    class Counter(es.Module):
        count: jax.Array

        def __call__(self):
            self.count = self.count + 1

    es.mutable(Counter(jnp.array(0)))()


@program("misspell a field: `self.cuont = …`; or do not declare it", "`Layer.cuont`")
def _(net):
    es.mutable(lambda net: setattr(net.layer, "cuont", 1))(net)


@program("draw from one key twice")
def _(net):
    key = jr.key(0)
    with jax.debug_key_reuse(True):
        for shape in ((3,), (5, 3)):  # JAX 0.8 does not check what it has compiled
            jr.normal(key, shape)


@program("use a model that was donated")
def _(net):
    given = jax.tree.map(jnp.copy, net)
    step = es.jit(lambda net: es.mutable(net)(XS), donate="all")
    _, new = step(given)
    assert step(new)[1].layer.count == 2
    float(given.layer.count)


@program("write in a second thread while the call runs", "Open a scope in each thread")
def _(net):
    def f(net):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(net, XS).result()

    es.mutable(f)(net)


@program("write into a dict of state under `jax.vmap`", "`stats['last']`", "{**self.st")
def _(net):
    if jax.config.jax_check_tracer_leaks:
        pytest.skip("JAX's own check is the first to tell")

    def write(net, x):
        net.stats["last"] = x
        return x

    es.mutable(lambda net: jax.vmap(lambda x: write(net, x))(XS))(net)


@program("keep a value of a compiled call in a list or in a global variable")
def _(net):
    if jax.config.jax_check_tracer_leaks:
        pytest.skip("JAX's own check is the first to tell")

    seen = []
    es.jit(es.mutable(lambda net: seen.append(net(XS))))(net)
    seen[0] + 1


@program("read a number under `jit`: `float(self.count)`")
def _(net):
    es.jit(es.mutable(lambda net: float(net.layer.count)))(net)


@program("write `if self.count > 3:` under `jit`")
def _(net):
    es.jit(es.mutable(lambda net: net(XS) if net.layer.count > 3 else XS))(net)


@program("call `jax.jit(self.layer)(x)`, or use a model as the key of a dict")
def _(net):
    with pytest.raises(TypeError, match="unhashable type: `Net` with arrays"):
        hash(net)
    es.mutable(lambda net: jax.jit(net.layer)(XS))(net)


@program("take `jax.grad` of a model that holds a counter")
def _(net):
    jax.grad(lambda net: es.mutable(net)(XS)[0].sum())(net)


@program("pass a batch to a model of one example")
def _(net):
    eqx.nn.Linear(3, 3, key=jr.key(0))(jnp.ones((4, 3)))


@program("index an ensemble: `ensemble[0]`")
def _(net):
    ensemble = eqx.filter_vmap(Layer)(jnp.ones(3), jnp.zeros(3, int))
    assert es.map(lambda x: x[0], ensemble, on=lambda part: True).weight == 1
    ensemble[0]


@program("scan over a list of plain layers")
def _(net):
    layers = [eqx.nn.Linear(3, 3, key=jr.key(i)) for i in range(3)]
    es.scan(lambda x, layer: (layer(x), None), XS, layers)


@program("change the dtype in a layer of a stack", "float16")
def _(net):
    to_half = eqx.nn.Lambda(lambda x: x.astype(jnp.float16))
    es.nn.Stacked([to_half] * 2)(XS)


@program("call an `eqx.nn.BatchNorm` without its state")
def _(net):
    norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
    es.vmap(lambda x: norm(x), axis_name="batch")(XS[None])


@program("save numbers as metadata", "'int' object")
def _(net):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        es.save(path, net, metadata={"step": "3"})
        assert es.load_metadata(path) == {"step": "3"}
        es.save(path, net, metadata={"step": 3})


@program(
    "load a file's adapters into a model without any: `es.load(path, model, Adapter)`",
    "`Adapter`",
)
def _(net):
    class Adapter(es.Parameter): ...

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        es.save(path, net)
        es.load(path, net, Adapter)


@program("pass `es.jit` a set, or a list with other values than arrays", "is a `set`")
def _(net):
    total = es.jit(lambda rows: sum(XS[i] for i in rows))
    assert total(frozenset({0, 2})) == 2.0
    total({0, 2})


@program("average or scale a model by `es.map` without a filter", "on=es.TreePart")
def _(net):
    es.map(lambda w: 0.9 * w, net)


@program("write a different shape or dtype", "`mean`", "bf16[3]", "f32[3]", "astype")
def _(net):
    net = net.replace(mean=jnp.zeros(3, jnp.bfloat16))
    with pytest.raises(ValueError, match=r"from `f32\[\]` to `f32\[3\]`.* shape"):
        es.mutable(lambda net: net.stats.update(last=XS))(net)
    es.jit(es.mutable(lambda net: setattr(net, "mean", XS)))(net)


@program("write a float into an integer state", "`layer.count`", "dtype=jnp.int32)")
def _(net):
    with pytest.raises(ValueError, match="State keeps its dtype, because"):
        es.mutable(lambda net: setattr(net.layer, "count", jnp.array(0.5)))(net)
    es.mutable(lambda net: setattr(net.layer, "count", 0.5))(net)


@program(
    "put a number into a field that declares a kind, by `eqx.tree_at`",
    "`layer.weight`",
    'jnp.asarray(0.5, "float32")',
)
def _(net):
    es.mutable(eqx.tree_at(lambda m: m.layer.weight, net, 0.5))(XS)


@program("swap the arguments: `es.update(params, model)`", "`es.update(model, params)`")
def _(net):
    es.update(net.filter(es.not_(es.BatchStat)), net)


@program("replace a layer, and write to the old one", "`layer.count`")
def _(net):
    def f(net):
        old, net.layer = net.layer, net.layer.replace(count=0)
        old(XS)

    es.mutable(f)(net)


@program("freeze a layer of a model without any `es.Module`", "es.Buffer[", "es.under(")
def _(net):
    es.freeze([eqx.nn.Linear(3, 1, key=jr.key(0))], lambda m: m[0])


@program(
    "freeze a plain layer, then change the structure around it",
    "`inner[0]`",
    "es.unfreeze(model, lambda m: m.inner)",
)
def _(net):
    class Model(es.Module):
        inner: list[eqx.nn.Linear]

    layers = [eqx.nn.Linear(3, 3, key=jr.key(i)) for i in range(2)]
    model = Model(layers).freeze(lambda m: m.inner[0])
    es.filter(model.replace(inner=layers[1:]), es.trainable)


@program(
    'donate inside a call: `es.jit(f, donate="all")(self.layer, x)`',
    "es.jit(step, donate='all')(model, x)",
)
def _(net):
    f = es.jit(lambda layer, x: layer(x), donate="all")
    es.mutable(lambda net: f(net.layer, XS))(net)


@program("create an ensemble from one key: `eqx.filter_vmap(Net)(key)`")
def _(net):
    def make(key):
        return eqx.nn.Linear(3, 3, key=key)

    with pytest.raises(ValueError, match=r"One key .*`jax\.random\.split\(key, n\)`"):
        es.vmap(make)(jr.key(0))
    eqx.filter_vmap(make)(jr.key(0))


@program("pass one example to `es.vmap(model)`")
def _(net):
    es.vmap(eqx.nn.Linear(3, 3, key=jr.key(0)))(XS)


@program("pass a cotangent for an integer output of `es.vjp`")
def _(net):
    def f(net):
        out, vjp_fn = es.vjp(lambda x: (net.layer(x), net.layer.count), XS)
        return vjp_fn(jax.tree.map(jnp.ones_like, out))

    es.mutable(f)(net)


@program("map over models in different modes by `jax.tree.map`")
def _(net):
    if jax.__version_info__ < (0, 9):
        pytest.skip("JAX 0.8 has a different message")
    jax.tree.map(jnp.add, net, net.eval())
