"""After tracing, nothing of the library is left: programs equal those of plain JAX.

The hand-written programs use dictionaries of arrays, `jax.vmap`, `jax.value_and_grad`
and optax. Each test compiles both programs, and counts the instructions of all their
computations. Both run under `eqx.filter_jit`, which adds one instruction of its own.
"""

import collections
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import reuses_keys

import eqx_state as es


SIZES, P, EPS, MOMENTUM, BATCH = (5, 16, 3), 0.25, 1e-5, 0.9, 8


# --- With the library -----------------------------------------------------------------


class Net(es.Module):
    first: eqx.nn.Linear
    norm: es.nn.BatchNorm
    drop1: es.nn.Dropout
    drop2: es.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.first = eqx.nn.Linear(SIZES[0], SIZES[1], key=keys[0])
        self.norm = es.nn.BatchNorm(
            SIZES[1], axis_name="batch", eps=EPS, momentum=MOMENTUM, debias=False
        )
        self.drop1 = es.nn.Dropout(P, key=keys[1])
        self.drop2 = es.nn.Dropout(P, key=keys[2])
        self.last = eqx.nn.Linear(SIZES[1], SIZES[2], key=keys[3])

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.first(self.drop1(x))))
        return self.last(self.drop2(x))


def es_loss(model, x, y):
    return jnp.mean((es.vmap(model, axis_name="batch")(x) - y) ** 2)


@eqx.filter_jit
def es_step(model, optimizer, x, y):
    (loss, model), grads = es.value_and_grad(es_loss)(model, x, y)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


@eqx.filter_jit
def es_forward(model, x):
    return es.mutable(es.vmap(model, axis_name="batch"))(x)


@eqx.filter_jit
def es_eval_step(model, x, y):
    return es_loss(model, x, y)


# --- By hand --------------------------------------------------------------------------


def by_hand(model):
    """The arrays of the model as dictionaries of parameters, statistics and keys."""
    params = {
        "w1": model.first.weight,
        "b1": model.first.bias,
        "scale": model.norm.weight,
        "shift": model.norm.bias,
        "w2": model.last.weight,
        "b2": model.last.bias,
    }
    stats = {"mean": model.norm.mean, "var": model.norm.var}
    keys = {"drop1": model.drop1.rng, "drop2": model.drop2.rng}
    return params, stats, keys


def dropout(x, lane_key):
    _, key = jr.split(lane_key, 2)
    keep = 1 - P
    mask = jr.bernoulli(key, keep, x.shape)
    return jnp.where(mask, x / keep, jnp.zeros_like(x))


def normalize(params, deviation, rest, var):
    scale = jax.lax.rsqrt(var + EPS) * params["scale"]
    return deviation * scale + (params["shift"] - rest * scale)


def lane(params, stats, keys, x):
    x = params["w1"] @ dropout(x, keys["drop1"]) + params["b1"]
    mean = jax.lax.pmean(x, "batch")
    x = x - mean
    rest, square = jax.lax.pmean((x, x * x), "batch")
    rest = jax.lax.stop_gradient(rest)
    var = square - jnp.minimum(jnp.square(rest), jax.lax.stop_gradient(square))
    new = {"mean": mean + rest, "var": var}
    x = jax.nn.relu(normalize(params, x, rest, var))
    x = params["w2"] @ dropout(x, keys["drop2"]) + params["b2"]

    def average(old, new):
        return MOMENTUM * old + (1 - MOMENTUM) * jax.lax.stop_gradient(new)

    return x, jax.tree.map(average, stats, new)


def forward(params, stats, keys, x):
    # The key of the model advances once, and each example gets its own key.
    pairs = {name: jr.split(key, 2) for name, key in keys.items()}
    new_keys = {name: pair[0] for name, pair in pairs.items()}
    lane_keys = {name: jr.split(pair[1], len(x)) for name, pair in pairs.items()}
    mapped = jax.vmap(
        lane, in_axes=(None, None, 0, 0), out_axes=(0, None), axis_name="batch"
    )
    out, stats = mapped(params, stats, lane_keys, x)
    return out, stats, new_keys


def loss_fn(params, stats, keys, x, y):
    out, stats, keys = forward(params, stats, keys, x)
    return jnp.mean((out - y) ** 2), (stats, keys)


def make_step(tx):
    @eqx.filter_jit
    def step(params, stats, keys, opt_state, x, y):
        (loss, (stats, keys)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, stats, keys, x, y
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return loss, params, stats, keys, opt_state

    return step


@eqx.filter_jit
def eval_step(params, stats, x, y):
    def lane(x):
        x = params["w1"] @ x + params["b1"]
        x = (x - stats["mean"]) * (jax.lax.rsqrt(stats["var"] + EPS) * params["scale"])
        x = jax.nn.relu(x + params["shift"])
        return params["w2"] @ x + params["b2"]

    return jnp.mean((jax.vmap(lane)(x) - y) ** 2)


# --- Comparing ------------------------------------------------------------------------


def opcodes(jitted, *args):
    """The number of occurrences of each opcode in the optimized program.

    In ` %name = f32[8,16]{1,0} fusion(%a, %b), kind=...`, the opcode is the word before
    the first parenthesis after the type. A tuple type contains parentheses as well.
    """
    text = jitted.lower(*args).compile().compiled.as_text()
    instructions = re.findall(r"^ +(?:ROOT )?%?[\w.\-]+ = (.*)$", text, re.MULTILINE)
    assert instructions
    matches = [re.match(r"(?:\(.*?\)|\S+) ([a-z][\w\-]*)\(", i) for i in instructions]
    return collections.Counter(match[1] for match in matches)


def assert_close(a, b):
    assert eqx.tree_equal(a, b, rtol=1e-6, atol=1e-6)


@pytest.fixture
def model():
    return Net(jr.key(0))


@pytest.fixture
def data():
    return jr.normal(jr.key(1), (BATCH, SIZES[0])), jr.normal(jr.key(2), (BATCH, 3))


@jax.numpy_dtype_promotion("standard")  # for `optax.adamw`
def test_a_training_step_equals_the_hand_written_program(model, data):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))
    optimizer = es.Optimizer(tx).init(model)
    step, (params, stats, keys) = make_step(tx), by_hand(model)
    opt_state = tx.init(params)

    args = (params, stats, keys, opt_state, *data)
    assert opcodes(es_step, model, optimizer, *data) == opcodes(step, *args)

    for _ in range(3):
        by_library, model, optimizer = es_step(model, optimizer, *data)
        loss, params, stats, keys, opt_state = step(
            params, stats, keys, opt_state, *data
        )
        assert_close(by_library, loss)
    # The gradient of a bias before a normalization is noise, which adam amplifies.
    del params["b1"]
    es_params, es_stats, es_keys = by_hand(model)
    del es_params["b1"]
    assert eqx.tree_equal((es_stats, es_params), (stats, params), rtol=1e-3, atol=1e-3)
    assert eqx.tree_equal(es_keys, keys)


def test_a_forward_pass_equals_the_hand_written_program(model, data):
    x, _ = data
    params, stats, keys = by_hand(model)

    @eqx.filter_jit
    def with_params(params, stats, keys, x):
        return params, forward(params, stats, keys, x)

    assert opcodes(es_forward, model, x) == opcodes(with_params, params, stats, keys, x)
    y, new = es_forward(model, x)
    _, (expected, stats, keys) = with_params(params, stats, keys, x)
    assert_close(y, expected)
    assert_close(by_hand(new)[1], stats)
    assert eqx.tree_equal(by_hand(new)[2], keys)


def test_an_eval_step_equals_the_hand_written_program(model, data):
    params, stats, _ = by_hand(model)
    model = model.eval()
    by_library = opcodes(es_eval_step, model, *data)
    assert by_library == opcodes(eval_step, params, stats, *data)
    assert_close(es_eval_step(model, *data), eval_step(params, stats, *data))


# --- Loops and branches ---------------------------------------------------------------


class Cell(es.Module):
    weight: es.Parameter
    h: es.State
    drop: es.nn.Dropout

    def __call__(self, x):
        self.h = jnp.tanh(self.weight @ self.h + x)
        return self.drop(self.h)


class Scanned(es.Module):
    cell: Cell

    def __call__(self, xs):
        return es.scan(lambda carry, x: (carry, self.cell(x)), None, xs)[1]


def scanned():
    cell = Cell(jnp.ones((4, 4)), jnp.zeros(4), es.nn.Dropout(0.5, key=0))
    return Scanned(cell), jnp.ones((5, 4))


def scan_by_hand(model, xs):
    cell = model.cell

    def step(carry, x):
        h, rng = carry
        h = jnp.tanh(cell.weight @ h + x)
        rng, key = jr.split(rng)
        mask = jr.bernoulli(key, 0.5, h.shape)
        return (h, rng), jnp.where(mask, h / 0.5, jnp.zeros_like(h))

    (h, rng), ys = jax.lax.scan(step, (cell.h, cell.drop.rng), xs)
    return ys, model.replace(cell=cell.replace(h=h, drop=cell.drop.replace(rng=rng)))


class Branching(es.Module):
    positive: es.State = 0
    total: es.State = 0.0
    weight: es.Parameter = 2.0

    def __call__(self, x):
        def on_positive(x):
            self.positive = self.positive + 1
            return x * self.weight

        def otherwise(x):
            self.total = self.total + x
            return x

        return es.cond(x > 0, on_positive, otherwise, x)


def branching():
    return Branching(), jnp.array(1.0)


def cond_by_hand(model, x):
    y, positive, total = jax.lax.cond(
        x > 0,
        lambda x: (x * model.weight, model.positive + 1, model.total),
        lambda x: (x, model.positive, model.total + x),
        x,
    )
    return y, model.replace(positive=positive, total=total)


@reuses_keys
@pytest.mark.parametrize(
    ("make", "hand_written"),
    [(scanned, scan_by_hand), (branching, cond_by_hand)],
    ids=["scan", "cond"],
)
def test_a_loop_or_branch_equals_the_hand_written_program(make, hand_written):
    model, x = make()
    ours = eqx.filter_jit(lambda model, x: es.mutable(model)(x))
    theirs = eqx.filter_jit(hand_written)
    assert opcodes(ours, model, x) == opcodes(theirs, model, x)
    assert eqx.tree_equal(ours(model, x), theirs(model, x))


def test_keys_that_no_lane_draws_from_cost_nothing():
    model, xs = Net(jr.key(0)).eval(), jnp.ones((BATCH, SIZES[0]))
    ours, theirs = (
        eqx.filter_jit(vmap(lambda model, x: model(x), (None, 0)))
        for vmap in (es.vmap, jax.vmap)
    )
    assert opcodes(ours, model, xs) == opcodes(theirs, model, xs)
