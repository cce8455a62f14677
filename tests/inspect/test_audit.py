"""`es.audit` names what is legal in a step and seldom meant, and is quiet otherwise."""

import dataclasses
import functools as ft
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import reuses_keys, untouched
from jax.sharding import Mesh, PartitionSpec as P

import eqx_state as es


X, XS = jnp.ones(3), jnp.ones((4, 3))


class Cell(es.Module):
    weight: es.Parameter = dataclasses.field(default_factory=lambda: jnp.ones(3))
    mean: es.BatchStat = dataclasses.field(default_factory=lambda: jnp.zeros(3))

    def __call__(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x
        return self.weight * x


class Net(es.Module):
    cell: Cell
    linear: eqx.nn.Linear
    dropout: es.nn.Dropout

    def __call__(self, x):
        return self.dropout(self.linear(self.cell(x)))


def make():
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    return Net(Cell(), linear, es.nn.Dropout(0.5, key=jr.key(1)))


def loss_fn(model, x):
    return jnp.sum(model(x) ** 2)


def start(model, tx=None):
    with jax.numpy_dtype_promotion("standard"):
        return model, es.Optimizer(tx or optax.adamw(0.1)).init(model)


def trained(model, optimizer, x, loss_fn=loss_fn, wrt=es.trainable):
    (loss, model), grads = es.value_and_grad(loss_fn, wrt=wrt)(model, x)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


def with_loss(loss_fn):
    def step(model, optimizer, x):
        return trained(model, optimizer, x, loss_fn)

    return step


def audit(step, *args, jit=es.jit):
    """Kinds and names of the findings."""
    with jax.numpy_dtype_promotion("standard"), untouched(args):
        found = es.audit(jit(step))(*args)
    for finding in found:
        assert str(finding).startswith(f"{finding.kind}: `{finding.name}` ")
        assert "\n" not in str(finding)
    return [(finding.kind, finding.name) for finding in found]


LOST = [("lost", "model.cell.mean"), ("lost", "model.dropout.rng")]


@pytest.mark.parametrize(
    "jit",
    [lambda f: f, es.jit, eqx.filter_jit, jax.jit],
    ids=["plain", "es", "eqx", "jax"],
)
def test_the_findings_are_the_same_however_a_step_is_compiled(jit):
    class Noisy(es.Module):
        net: Net
        rng: es.Rng

        def __call__(self, x):
            return self.net(x) + jr.normal(self.rng) + TABLE[0, :3]

    def loss_fn(model, x):
        return jnp.sum(model.net.dropout(model.net.cell(x)) * jr.normal(model.rng))

    def dropping(model, x):
        return es.mutable(model)(x)[0], model

    model = Noisy(make(), jr.key(0))
    assert audit(trained, *start(make()), X, jit=jit) == []
    assert audit(with_loss(loss_fn), *start(model), X, jit=jit) == [
        ("repeated key", "model.rng"),
        ("untrained", "model.net.linear"),
    ]
    assert audit(dropping, model, X, jit=jit) == [
        ("lost", "model.net.cell.mean"),
        ("lost", "model.net.dropout.rng"),
        ("repeated key", "model.rng"),
        ("constant", "TABLE"),
    ]


# --- Lost -----------------------------------------------------------------------------


def unpacked_wrongly(model, optimizer, x):
    loss, grads = es.value_and_grad(loss_fn)(model, x)
    return loss[0], *optimizer.update(grads, model)


def updated_the_old_model(model, optimizer, x):
    (loss, _), grads = es.value_and_grad(loss_fn)(model, x)
    return loss, *optimizer.update(grads, model)


@pytest.mark.parametrize("step", [unpacked_wrongly, updated_the_old_model])
def test_a_new_model_that_is_dropped_beside_its_gradients(step):
    # What is lost also comes back unchanged. It is named once.
    assert audit(step, *start(make()), X) == LOST


def call(model, x):
    return es.mutable(model)(x)[0]


def over_old_models(model, xs):
    for x in xs:
        y, new = es.mutable(model)(x)
    return new


LOSING = {
    "alone": lambda model, xs: call(model, xs[0]),
    "lane of es": lambda model, xs: es.vmap(call, in_axes=(None, 0))(model, xs),
    "lane": lambda model, xs: jax.vmap(lambda x: call(model, x))(xs),
    "es.scan": lambda m, xs: es.scan(lambda c, x: (c, call(m, x)), 0, xs)[1],
    "scan": lambda m, xs: jax.lax.scan(lambda c, x: (c, call(m, x)), 0, xs)[1],
    "while_loop": lambda model, xs: es.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, call(model, c[1])), (0, xs[0])
    ),
    "cond": lambda model, xs: es.cond(
        xs[0, 0] > 0, lambda x: call(model, x), lambda x: x, xs[0]
    ),
    "checkpoint": lambda model, xs: es.checkpoint(call)(model, xs[0]),
    "es.jit": lambda model, xs: es.jit(call)(model, xs[0]),
    "gradient of jit": lambda model, xs: jax.grad(
        lambda x: jnp.sum(es.jit(call)(model, x))
    )(xs[0]),
    "lanes of jit": lambda model, xs: jax.vmap(lambda x: es.jit(call)(model, x))(xs),
    "in a scope": lambda model, xs: es.mutable(call)(model, xs[0]),
    "all but the last": over_old_models,
}


@pytest.mark.parametrize("where", LOSING)
def test_a_new_model_that_is_dropped_in_a_transform(where):
    assert audit(lambda model, xs: LOSING[where](model, xs), make(), XS) == LOST


class Outer(es.Module):
    net: Net

    def assigned(self, xs):
        self.net, ys = es.scan(lambda net, x: (net, net(x)), self.net, xs)
        return ys

    def dropped(self, xs):
        return es.scan(lambda net, x: (net, net(x)), self.net, xs)[1]

    def rebound(self, xs):
        net, ys = self.net, []
        for x in xs:
            y, net = es.mutable(net)(x)
            ys.append(y)
        return ys


@pytest.mark.parametrize("name", ["assigned", "dropped", "rebound"])
def test_a_new_module_that_a_method_does_not_assign(name):
    def step(model, xs):
        return es.mutable(getattr(model, name))(xs)

    lost = [(kind, x.replace("model", "model.net")) for kind, x in LOST]
    assert audit(step, Outer(make()), XS) == ([] if name == "assigned" else lost)


def test_state_that_is_written_twice_has_the_name_of_its_own_argument():
    def step(other, model, xs):
        y, new = es.mutable(model)(xs[0])
        return other, es.mutable(new)(y)[0]

    assert audit(step, make(), make(), XS) == LOST


def test_state_that_a_later_call_overwrites_is_not_lost():
    class Last(es.Module):
        x: es.State

        def __call__(self, x):
            self.x = x

    def step(model, xs):
        for x in xs:
            _, model = es.mutable(model)(x)
        return model

    assert audit(step, Last(X), XS) == []


def test_an_optimizer_that_is_dropped_is_named_as_a_whole():
    def returned_the_old_one(model, optimizer, x):
        return *trained(model, optimizer, x)[:2], optimizer

    def made_in_the_step(model, x):
        return trained(*start(model), x)[:2]

    model, optimizer = start(make())
    assert audit(returned_the_old_one, model, optimizer, X) == [("lost", "optimizer")]
    assert audit(made_in_the_step, model, X) == [("lost", "optimizer")]


def test_the_object_of_a_method_is_called_self_and_other_arguments_by_position():
    model = make()
    found = es.audit(es.mutable(model))(X)
    assert found == []
    found = es.audit(ft.partial(lambda *models: call(models[0], X)))(model)
    assert [x.name for x in found] == ["models[0].cell.mean", "models[0].dropout.rng"]
    assert es.audit(lambda **kw: call(kw["m"], X))(m=model)[0].name == "m.cell.mean"


# --- Keys -----------------------------------------------------------------------------


class Noise(es.Module):
    rng: es.Rng

    def __call__(self, x):
        return x + jr.normal(self.rng, x.shape)


REPEATING = {
    "call": lambda model, xs: (model(xs), model),
    "lanes": lambda model, xs: (jax.vmap(model)(xs), model),
    "carry": lambda model, xs: jax.lax.scan(lambda m, x: (m, m(x)), model, xs),
    "branch": lambda m, xs: (
        jax.lax.cond(xs[0, 0] > 0, lambda x: m(x), lambda x: x, xs),
        m,
    ),
    "old mode": lambda model, xs: (model(xs), model.eval()),
    "fold": lambda m, xs: (jr.normal(jr.fold_in(m.rng, 1)), m),
    "split": lambda m, xs: (jr.normal(jr.split(m.rng, (2, 2))[1][0]), m),
    "split for lanes": lambda m, xs: (jax.vmap(jr.normal)(jr.split(m.rng, 3)), m),
}


@pytest.mark.parametrize("make_key", [jr.key, jr.PRNGKey])
@pytest.mark.parametrize("how", REPEATING)
def test_a_key_that_is_drawn_from_and_comes_back(how, make_key):
    found = audit(lambda model, xs: REPEATING[how](model, xs), Noise(make_key(0)), XS)
    assert found == [("repeated key", "model.rng")]


KEY, OLD_KEY = jr.key(0), jr.PRNGKey(0)


def test_keys_of_a_stack_that_come_out_of_a_loop():
    def step(stack, x):
        return jax.lax.scan(lambda x, layer: (layer(x), layer), x, stack)

    stack = Noise(jr.split(KEY, 2))
    assert audit(step, stack, X) == [("repeated key", "stack.rng")]


@pytest.mark.parametrize("key", [KEY, OLD_KEY])
def test_a_key_that_the_step_closes_over(key):
    assert audit(lambda x: x + jr.normal(key), X) == [("repeated key", "key")]


@pytest.mark.parametrize(
    "step",
    [
        lambda key, n: (jr.normal(key), n),  # the caller has to split it
        lambda key, n: (jr.normal(jr.fold_in(key, n)), key, n + 1),
        lambda key, n: (jr.normal(jr.fold_in(KEY, n)), n + 1),
        lambda key, n: (key, n + 1),
        lambda key, n: (jr.normal(jr.fold_in(jr.split(key)[0], n)), key, n + 1),
    ],
    ids=["not returned", "folded", "closed over", "not drawn from", "split, folded"],
)
def test_keys_that_differ_in_the_next_step(step):
    assert audit(step, KEY, jnp.array(0)) == []


def test_lanes_that_fold_a_counter_into_their_keys():
    class Counted(es.Module):
        rng: es.Rng
        n: es.State = 0

        def __call__(self, x):
            self.n = self.n + 1
            return x + jr.normal(jr.fold_in(self.rng, self.n), x.shape)

    assert audit(es.mutable(es.vmap(Counted(KEY))), XS) == []


@reuses_keys
def test_two_equal_keys():
    layers = [es.nn.Dropout(0.5, key=KEY), es.nn.Dropout(0.5, key=KEY)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    step = es.mutable(lambda model, x: [m(x) for m in model])
    assert audit(step, layers, X) == [("equal keys", "model[1].rng")]
    assert audit(es.mutable(lambda model: None), stacked) == [
        ("equal keys", "model.rng")
    ]
    assert audit(step, es.reseed(layers, 0), X) == []
    abstract = jax.eval_shape(lambda: layers)
    assert audit(step, abstract, X) == []
    found = []
    jax.jit(lambda x: found.extend(es.audit(step)(layers, x)))(X)
    assert [(x.kind, x.name) for x in found] == [("equal keys", "model[1].rng")]


# --- Trained and written --------------------------------------------------------------


def without(where):
    return es.all_of(es.trainable, es.not_(es.under(where)))


TXS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(0.1),
    "schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 10)),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(0.1)
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(0.1),
    "several steps": optax.MultiSteps(optax.adam(0.1), 1),
}


@pytest.mark.parametrize("tx", TXS)
def test_a_layer_that_no_gradient_reaches(tx):
    def unused(model, x):
        return jnp.sum(model.dropout(model.cell(x)) ** 2)

    found = audit(with_loss(unused), *start(make(), TXS[tx]), X)
    assert found == [("untrained", "model.linear")]


def stopped(model, x):
    return jnp.sum(model.dropout(model.linear(jax.lax.stop_gradient(model.cell(x)))))


def half_used(model, x):
    return jnp.sum(model.dropout(model.linear.weight @ model.cell(x)) ** 2)


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [(stopped, "model.cell"), (half_used, "model.linear.bias")],
)
def test_an_array_without_a_gradient(loss_fn, name):
    step = with_loss(loss_fn)
    assert audit(step, *start(make()), X) == [("untrained", name)]


def test_what_the_user_leaves_out_is_not_named():
    def frozen(model):
        return start(es.freeze(model, lambda m: m.linear))

    def in_groups(model):
        rules = {es.under(lambda m: m.linear): None, ...: optax.sgd(0.1)}
        return model, es.Optimizer(rules).init(model)

    def by_wrt(model):
        wrt = es.all_of(es.trainable, es.not_(es.under(lambda m: m.linear)))
        return model, es.Optimizer(optax.sgd(0.1), wrt=wrt).init(model)

    for leave_out in (frozen, in_groups, by_wrt):
        assert audit(trained, *leave_out(make()), X) == []


class State(NamedTuple):
    params: Any
    opt_state: Any


@pytest.mark.parametrize("make_state", [State, lambda *both: both])
def test_plain_jax_and_optax(make_state):
    tx = optax.adam(0.1)

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.sum(p["w"] * x) ** 2)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return make_state(optax.apply_updates(params, updates), opt_state)

    params = {"w": jnp.ones(3), "unused": jnp.ones(3)}
    found = audit(step, make_state(params, tx.init(params)), X)
    [(kind, name)] = found
    assert kind == "untrained"
    assert name.endswith("['unused']")


@reuses_keys
def test_equinox_and_optax():
    tx = optax.adam(0.1)

    def step(model, opt_state, x):
        grads = eqx.filter_grad(lambda m: jnp.sum(m.layers[0](x)))(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state

    model = eqx.nn.MLP(3, 3, 3, 1, key=KEY)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    assert audit(step, model, opt_state, X) == [("untrained", "model.layers[1]")]


def test_moments_that_are_not_zero_hide_what_is_untrained():
    """With moments from before, adam would move a parameter without a gradient."""
    model, optimizer = start(make())
    optimizer = es.map(lambda x: x + 1, optimizer, on=es.OptState)
    step = with_loss(half_used)
    assert audit(step, model, optimizer, X) == []


def test_moments_that_are_used_before_they_are_updated_are_not_taken_for_zero():
    class Delayed(es.Module):
        weight: es.Parameter
        other: es.Parameter
        last: es.OptState

    def step(model):
        grads = 2 * model.weight
        new = model.weight - model.last
        return model.replace(weight=new, last=grads, other=model.other - grads)

    assert audit(step, Delayed(X, X, 0 * X)) == []


def test_a_step_that_returns_the_old_model_too():
    def step(model, optimizer, x):
        return model, *trained(model, optimizer, x, half_used)

    assert audit(step, *start(make()), X) == [("untrained", "model.linear.bias")]


def test_two_models_of_one_structure_are_told_apart():
    def step(target, online, optimizer, x):
        _, online, optimizer = trained(online, optimizer, x, half_used)
        return online, optimizer, target

    model, optimizer = start(make())
    found = audit(step, make().eval(), model, optimizer, X)
    assert found == [("untrained", "online.linear.bias")]


def test_a_model_in_a_carry_that_comes_out_of_it():
    class Run(es.Module):
        model: Net
        optimizer: es.Optimizer

    def step(run, x):
        return trained(run.model, run.optimizer, x, half_used)[1:]

    found = audit(step, Run(*start(make())), X)
    assert found == [("untrained", "run.model.linear.bias")]


def test_a_statistic_in_train_mode_that_is_not_written():
    def without_statistics(model, x):
        return jnp.sum(model.dropout(model.linear(model.cell.weight * x)) ** 2)

    step = with_loss(without_statistics)
    model = make()
    assert audit(step, *start(model), X) == [("unwritten", "model.cell.mean")]
    off = eqx.tree_at(lambda m: m.cell, model, model.cell.eval())
    assert audit(step, *start(off), X) == []
    frozen = eqx.tree_at(lambda m: m.cell, model, model.cell.freeze())
    assert audit(step, *start(frozen), X) == []


# --- Constants and static values ------------------------------------------------------


TABLE, NUMPY = jnp.ones((40, 40)), np.ones((30, 40), np.float32)


def with_table(x):
    return TABLE @ x


class Trainer:
    def __init__(self):
        self.table = TABLE

    @es.jit
    def step(self, x):
        return self.table @ x


@reuses_keys
def test_large_arrays_that_the_step_closes_over():
    linear, small, x = eqx.nn.Linear(40, 40, key=KEY), jnp.ones(40), jnp.ones(40)
    square = optax.l2_loss
    options = {1: TABLE, "a": 2}  # keys that JAX cannot sort

    def later():
        return unset

    steps = {
        "TABLE": lambda x: jax.vmap(lambda x: later() if x is None else with_table(x))(
            x[None]
        ),
        "NUMPY": lambda x: square(NUMPY @ x) + small[:30],
        "linear.weight": lambda x: jax.lax.scan(
            lambda c, _: (linear(c), 0), x, None, 2
        ),
        "options[1]": lambda x: options[1] @ x,
    }
    for name, step in steps.items():
        assert audit(step, x) == [("constant", name)]
    unset = None
    for found in (
        es.audit(Trainer().step)(x),
        es.audit(ft.partial(lambda x, table: table @ x, table=TABLE))(x),
    ):
        assert [f.kind for f in found] == ["constant"]
        assert found[0].name.endswith("table")
    made = lambda x: x + jnp.sum(jnp.asarray(np.ones(4000, np.float32)))  # noqa: E731
    assert audit(made, x) == []


def test_python_numbers_among_the_arguments_of_a_compiled_step():
    class Power(eqx.Module):
        n: int

    def step(model, x, scale, options):
        return scale * x**model.n + options["by"][0]

    args = Power(2), X, 0.5, {"by": [1, True, "text"]}
    for wrap in (es.jit, eqx.filter_jit, lambda f: es.jit(ft.partial(f))):
        found = es.audit(wrap(step))(*args)
        assert [(f.kind, f.name) for f in found] == [
            ("static", "scale"),
            ("static", "options['by'][0]"),
        ]
    # Not compiled; or `jax.jit`, to which a number is an array.
    assert es.audit(step)(*args) == []
    assert es.audit(jax.jit(lambda x, n: x + n))(X, 2) == []


# --- What an audit leaves as it was ---------------------------------------------------


@reuses_keys
@pytest.mark.parametrize("jit", [es.jit, eqx.filter_jit])
def test_programs_have_no_marks(jit):
    traces = []

    def step(model, x):
        traces.append(None)
        return es.mutable(model)(x)

    compiled, model = jit(step), make()
    before = str(jax.make_jaxpr(step)(model, X))
    assert es.audit(compiled)(model, X) == []
    text = compiled.lower(model, X).as_text()
    compiled(model, X)
    assert es.audit(compiled)(model, X) == []
    compiled(model, X)
    assert len(traces) == 4  # two audits, and one program
    assert "optimization_barrier" not in text
    assert str(jax.make_jaxpr(step)(model, X)) == before


def test_an_error_ends_the_audit():
    def step(model, x):
        es.mutable(model)(x)
        raise KeyError("in the step")

    with pytest.raises(KeyError, match="in the step"):
        es.audit(step)(make(), X)
    jaxpr = jax.make_jaxpr(lambda model: es.mutable(model)(X))(make())
    assert "eqx_state" not in str(jaxpr)


# --- Primitives -----------------------------------------------------------------------


def test_a_solver_whose_jaxprs_are_unknown_needs_all_of_its_inputs():
    def step(model, x):
        y, new = es.mutable(model)(x)
        scale = 1 + new.cell.mean**2
        solve, _ = jax.scipy.sparse.linalg.cg(lambda v: scale * v, y)
        return solve, model

    assert audit(step, make(), X) == [LOST[1]]


def test_state_that_reaches_an_output_after_several_iterations():
    def step(model, x):
        (y, new) = es.mutable(model)(x)
        shift = lambda c: (c[0] + 1, c[2], c[3], c[3])  # noqa: E731
        out = jax.lax.while_loop(lambda c: c[0] < 3, shift, (0, y, y, new.cell.mean))
        _, scanned = jax.lax.scan(
            lambda c, _: ((c[1], c[1]), c[0]), (y, new.cell.mean), None, 3
        )
        return out[1], scanned, model

    assert audit(step, make(), X) == [LOST[1]]


def test_state_that_decides_what_is_printed():
    def step(model, x):
        _, new = es.mutable(model)(x)
        jax.lax.cond(
            jnp.all(new.cell.mean > 0), lambda: jax.debug.print("yes"), lambda: None
        )
        return model

    assert audit(step, make(), X) == [LOST[1]]


def test_zeros_of_other_primitives():
    """Gradients that are zero, and remain so whatever an optimizer computes of them."""

    class Decay(es.Module):
        used: es.Parameter
        unused: es.Parameter
        moment: es.OptState

    def step(model, x):
        grads = eqx.filter_grad(lambda m: jnp.sum(m.used * x))(model)
        squared = jax.lax.integer_pow(grads.unused, 2) + 0.9 * model.moment
        update = jnp.concatenate([squared[:1], -squared[1:]]) / (1 + jnp.sqrt(squared))
        inverse = jnp.where(x > 0, 0 * squared, 0.5 * (squared + squared))
        new = model.unused - update - 0.1 * model.unused / 2 - inverse
        return model.replace(used=model.used - grads.used, unused=new, moment=squared)

    assert audit(step, Decay(X, X, 0 * X), X) == [("untrained", "model.unused")]


def test_zeros_of_the_tangents_of_integers_are_no_constants():
    @jax.custom_jvp
    def take(x, index):
        return x[index]

    @take.defjvp
    def _(primals, tangents):
        return take(*primals), tangents[0][primals[1]]

    def step(x, index):
        return jax.jvp(take, (x, index), (x, np.zeros(index.shape, jax.dtypes.float0)))

    assert audit(step, X, jnp.zeros(2000, int)) == []


def test_state_that_varies_in_a_shard_map():
    class Mean(es.Module):
        mean: es.BatchStat

        def __call__(self, x):
            self.mean = jax.lax.pmean(self.mean + x, "data")

    def step(model, x):
        new = jax.shard_map(
            lambda model, x: es.mutable(model)(x)[1],
            mesh=Mesh(jax.devices()[:2], "data"),
            in_specs=P("data"),
            out_specs=P(),
        )(model, x)
        return model, new.mean

    assert audit(step, Mean(jnp.ones(2)), jnp.ones(2)) == []
    found = audit(lambda model, x: step(model, x)[0], Mean(jnp.ones(2)), jnp.ones(2))
    assert found == [("lost", "model.mean")]


def test_arrays_that_jax_does_not_have_are_static():
    words = np.array(["a", "b"])
    step = lambda model, words: (*es.mutable(model)(X), model, words)  # noqa: E731
    assert audit(step, make(), words, jit=lambda f: f) == []
    assert es.audit(lambda model, words: (call(model, X), words))(make(), words)


def test_a_class_without_a_signature():
    assert es.audit(dict)(a=X) == []


def test_init_in_a_step():
    class Lazy(es.Module):
        linear: eqx.nn.Linear
        calls: es.State = 0

        def __call__(self, x):
            self.calls = self.calls + 1
            return self.linear(x)

    def step(x):
        model = Lazy(es.lazy(eqx.nn.Linear, 3, 3)).init(0, x)
        return es.mutable(model)(x)

    assert audit(step, X) == []


def test_the_check_for_reused_keys_does_not_see_the_marks():
    def step(model, x):
        return es.mutable(model)(x)[0]

    expected = audit(step, make(), X)
    with jax.debug_key_reuse(True):
        assert audit(step, make(), X) == expected != []
