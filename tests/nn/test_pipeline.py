"""`es.nn.Stacked` inside `es.shard_map` over its layers: the stages of a pipeline."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, rejects, reuses_keys
from jax.sharding import Mesh, PartitionSpec as P

import eqx_state as es


pytestmark = reuses_keys  # the tests call one model in several ways

SIZE, DEPTH, MICRO = 3, 4, 3
STAGES = Mesh(np.array(jax.devices()[:2]), "stage")
BOTH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "stage"))
ALL: dict = {...: P("stage")}


class Block(es.Module):
    linear: eqx.nn.Linear
    dropout: es.nn.Dropout
    mean: es.BatchStat
    calls: es.State = 0

    def __init__(self, key):
        a, b = jr.split(key)
        self.linear = eqx.nn.Linear(SIZE, SIZE, key=a)
        self.dropout = es.nn.Dropout(0.5, key=b)
        self.mean = jnp.zeros(SIZE)

    def __call__(self, xs):
        self.calls = self.calls + 1
        self.mean = 0.9 * self.mean + 0.1 * xs.mean(0)
        ys = jax.vmap(self.linear)(xs) - self.mean[None]
        return xs + self.dropout(jnp.tanh(ys))


def make(depth=DEPTH):
    return es.nn.Stacked.make(Block, jr.split(jr.key(0), depth))


XS = jr.normal(jr.key(1), (MICRO, 5, SIZE))


def staged(f, mesh=STAGES, out_specs=ALL[...], **options):
    options = {"in_specs": P(), **options}
    return es.shard_map(f, mesh=mesh, out_specs=out_specs, **options)


# --- The layers of a shard ------------------------------------------------------------


def views(stack):
    """What a stack says about its layers, each with an axis for the stages."""
    return {
        "len": jnp.array([len(stack), len(stack[:1]), len(stack[0:2])]),
        "iteration": jnp.stack([layer.mean[0] for layer in stack]),
        "index": jnp.stack([stack[0].mean[0], stack[-1].mean[0]]),
        "slice": stack[:1].layers.mean,
        "reversed": stack[::-1].layers.mean,
    }


def by_closure(f, stack, axes=ALL):
    run = es.mutable(lambda stack: staged(lambda: f(stack), axes=axes)())
    return es.jit(run)(stack)[0]


def by_argument(f, stack, axes=ALL):
    return es.jit(es.mutable(lambda stack: staged(f, in_specs=(axes,))(stack)))(stack)[
        0
    ]


def by_jax(f, stack):
    arrays, rest = eqx.partition(stack, eqx.is_array)
    whole = lambda arrays: f(eqx.combine(arrays, rest))  # noqa: E731
    specs = {"in_specs": ALL[...], "out_specs": ALL[...]}
    return jax.jit(jax.shard_map(whole, mesh=STAGES, **specs))(arrays)


@pytest.mark.parametrize("how", [by_closure, by_argument, by_jax])
def test_a_shard_has_its_own_layers(how):
    mean = jnp.arange(12.0).reshape(DEPTH, SIZE)
    stack = eqx.tree_at(lambda s: s.layers.mean, make(), mean)
    parts = views(stack[:2]), views(stack[2:])
    close(how(views, stack), jax.tree.map(lambda *x: jnp.concatenate(x), *parts))
    with pytest.raises(IndexError, match="out of range"):
        how(lambda stack: stack[2].mean, stack)


@pytest.mark.parametrize("how", [by_closure, by_argument])
def test_one_array_that_is_not_sharded_is_named(how):
    axes = {es.Parameter: P("stage"), es.State: P("stage"), es.Rng: P()}
    said = r"shard.* has 2 layers.*`dropout\.rng` has size 4.*also its keys"
    with rejects(stack := make(), ValueError, said):
        how(lambda stack: stack(XS[0]), stack, axes)


def test_a_replicated_stack_has_all_layers():
    def f(stack):
        assert len(stack) == DEPTH
        return stack(XS[0])

    run = lambda stack: staged(lambda: f(stack), out_specs=P())()  # noqa: E731
    close(es.mutable(run)(make().eval()), es.mutable(make().eval())(XS[0]))


@pytest.mark.parametrize("members", [2, 6])
def test_the_axis_of_an_ensemble_is_not_that_of_the_layers(members):
    # Each device has 1 or 3 members, which is no shard of 6 or of 4 layers.
    depth = {2: 6, 6: 4}[members]
    ensemble = eqx.filter_vmap(lambda keys: es.nn.Stacked.make(Block, keys))(
        jr.split(jr.key(0), (members, depth))
    )
    with pytest.raises(ValueError, match="es.vmap"):
        by_closure(lambda m: m(XS[0]), ensemble)
    ys = by_closure(lambda m: es.vmap(lambda m: m(XS[0]))(m), ensemble)
    assert ys.shape == (members, 5, SIZE)


# --- A pipeline -----------------------------------------------------------------------


def pipeline(stack, xs):
    """The stack applied to micro-batches; each device runs the layers of its stage."""
    stage, stages = jax.lax.axis_index("stage"), jax.lax.axis_size("stage")

    def tick(x, t):
        # The first stage takes the next micro-batch, the others what they received.
        x = jnp.where(stage == 0, xs[jnp.minimum(t, len(xs) - 1)], x)
        # A stage that has no micro-batch must not update its state.
        is_busy = (stage <= t) & (t < stage + len(xs))
        y = es.cond(is_busy, stack, lambda x: x, x)
        sent = [(i, i + 1) for i in range(stages - 1)]
        return jax.lax.ppermute(y, "stage", sent), y

    first = jnp.zeros_like(xs[0])
    _, ys = es.scan(tick, first, jnp.arange(len(xs) + stages - 1))
    is_last = stage == stages - 1
    return jax.lax.psum(jnp.where(is_last, ys[stages - 1 :], 0), "stage")


def by_pipeline(mesh):
    def loss(stack, xs):
        run = staged(lambda xs: pipeline(stack, xs), mesh, P(), axes=ALL)
        return (run(xs) ** 2).mean()

    return loss


def by_stack(stack, xs):
    _, ys = es.scan(lambda carry, x: (carry, stack(x)), None, xs)
    return (ys**2).mean()


CASES = {
    "train": (STAGES, make),
    "a mesh with one more axis": (BOTH, make),
    "eval": (STAGES, lambda: make().eval()),
}
if jax.__version_info__ >= (0, 10):  # JAX 0.8 raises an `AssertionError`
    CASES["remat"] = STAGES, lambda: es.configure(make(), checkpoint=True)


@pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="JAX's check finds a leak in such a pipeline of plain JAX, too",
)
@pytest.mark.parametrize(("mesh", "make"), CASES.values(), ids=CASES)
def test_a_pipeline_equals_the_stack_in_loss_state_and_gradients(mesh, make):
    results = [
        es.jit(es.value_and_grad(loss))(make(), XS)
        for loss in (by_pipeline(mesh), by_stack)
    ]
    close(*results)
    (_, new), _ = results[0]
    assert new.layers.calls.tolist() == [MICRO] * DEPTH
