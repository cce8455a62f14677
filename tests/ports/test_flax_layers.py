"""The wrappers on the pages of `docs/from` equal the layers that they wrap."""

import ast
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import reuses_keys
from load_scripts import ROOT, tool

import eqx_state as es


nnx = pytest.importorskip("flax.nnx", reason="Flax needs a newer JAX")

pytestmark = reuses_keys  # both programs draw from the same keys

STEPS = 20
TX = optax.adam(1e-2)
KEY = jr.key(3)
INIT_KEY, STREAM_KEY = jr.split(KEY)  # as the wrappers split it
XS = jr.normal(jr.key(0), (32, 4))
YS = XS.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The classes and functions of the pages, without their training runs."""
    script = tool("pages").script
    pages = ROOT / "docs/from/others.md", ROOT / "docs/from/nnx.md"
    tree = ast.parse("\n".join(script(page) for page in pages))
    kinds = ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    path = tmp_path_factory.mktemp("page") / "flax_layers.py"
    path.write_text(ast.unparse(tree))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mse(predictions):
    return jnp.mean((predictions - YS) ** 2)


def train(layer):
    """Losses and the trained layer, by `eqx_state`."""

    @es.jit
    def step(layer, optimizer):
        run = es.value_and_grad(lambda layer: mse(layer(XS)))
        (loss, layer), grads = run(layer)
        return loss, *optimizer.update(grads, layer)

    losses, optimizer = [], es.Optimizer(TX).init(layer)
    for _ in range(STEPS):
        loss, layer, optimizer = step(layer, optimizer)
        losses.append(loss)
    return losses, layer


def train_by_hand(loss_fn, params, state, keys):
    """The same for `loss_fn(params, state, key) -> (loss, state)`."""

    @jax.jit
    def step(params, state, opt_state, key):
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, state), grads = value_and_grad(params, state, key)
        updates, opt_state = TX.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), state, opt_state

    losses, opt_state = [], TX.init(params)
    for _ in range(STEPS):
        key, keys = es.mutable(keys)()
        loss, params, state, opt_state = step(params, state, opt_state, key)
        losses.append(loss)
    return losses, params, state


def assert_same_bits(*trees):
    a, b = (jax.tree.map(lambda x: x.tobytes(), jax.device_get(t)) for t in trees)
    assert jax.tree.leaves(a) == jax.tree.leaves(b)
    assert len(set(jax.tree.leaves(a))) > STEPS  # the loss changes at each step


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_a_wrapped_linen_module_trains_as_by_hand(page):
    module = page.LinenBlock()
    layer = page.FromLinen(module, XS, key=KEY)

    def loss_fn(params, stats, key):
        variables, rngs = {"params": params, "batch_stats": stats}, {"dropout": key}
        predictions, new = module.apply(
            variables, XS, train=True, rngs=rngs, mutable=["batch_stats"]
        )
        return mse(predictions), new["batch_stats"]

    variables = module.init(INIT_KEY, XS, train=False)
    start = variables["params"], variables["batch_stats"]
    keys = es.RngStream(STREAM_KEY)
    expected = train_by_hand(loss_fn, *start, keys)
    losses, layer = train(layer)
    assert_same_bits((losses, layer.params, layer.stats), expected)

    variables = {"params": expected[1], "batch_stats": expected[2]}
    assert (layer.eval()(XS) == module.apply(variables, XS, train=False)).all()


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_a_wrapped_nnx_module_trains_as_by_hand(page):
    module = page.NNXBlock(nnx.Rngs(0))
    layer = page.FromNNX(module)
    optimizer = nnx.Optimizer(module, TX, wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        loss, grads = nnx.value_and_grad(lambda module: mse(module(XS)))(module)
        optimizer.update(module, grads)
        return loss

    expected = [step(module, optimizer) for _ in range(STEPS)]
    _, *states, keys, rest = page.split(module)
    losses, layer = train(layer)
    ours = layer.params, layer.stats, layer.rest
    assert_same_bits((losses, *ours), (expected, *states, rest))
    assert eqx.tree_equal(layer.keys, keys)

    module.eval()
    assert (layer.eval()(XS) == module(XS)).all()
