"""`optimizer.refit(model)`: which state an optimizer keeps for a changed model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import untouched

import eqx_state as es


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Layer(es.Module):
    w: es.Parameter
    b: es.Parameter

    def __init__(self, seed, size=2):
        self.w = jr.normal(jr.key(seed), (size, 2))
        self.b = jnp.zeros(size)


class Net(es.Module):
    body: list[Layer]
    head: Layer
    calls: es.State = 0


def make():
    return Net([Layer(0), Layer(1)], Layer(2))


def trained(optimizer, model):
    """The model and the optimizer after three steps; all gradients are random."""
    for i in range(3):
        params = es.filter(model, es.trainable)
        noise = lambda x, i=i: jr.normal(jr.key(i), x.shape, x.dtype)  # noqa: E731
        model, optimizer = optimizer.update(jax.tree.map(noise, params), model)
    return model, optimizer


def moments(tree):
    """The arrays below `mu` by the name of their parameter."""
    found = {p.name.partition(".mu.")[2]: p.value for p in es.parts(tree)}
    return {name: x for name, x in found.items() if name}


def adams(optimizer):
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731
    leaves = jax.tree.leaves(optimizer.opt_state, is_leaf=is_adam)
    return [x for x in leaves if is_adam(x)]


def kept(old, new):
    """The names of the parameters that keep their moment; all others are zero."""
    before, after = moments(old), moments(new)
    same = {k for k in after if k in before and eqx.tree_equal(after[k], before[k])}
    assert not any(after[k].any() for k in after.keys() - same)
    assert all(after[k].any() for k in same)
    return same


ADAM = optax.adam(0.1)
PLAIN = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "MultiSteps": optax.MultiSteps(ADAM, every_k_schedule=2),
    "masked": optax.masked(ADAM, lambda p: jax.tree.map(lambda x: True, p)),
}
BODY = es.path_matches("body*")
GROUPS = {
    "groups": {BODY: ADAM, ...: optax.adam(0.2)},
    "groups with chain": {BODY: PLAIN["chain"], ...: ADAM},
}
ALL = {f"{k}.{n}" for k in ("body[0]", "body[1]", "head") for n in "wb"}


@pytest.mark.parametrize("tx", PLAIN | GROUPS)
def test_gradual_unfreezing(tx):
    model = make().freeze(lambda m: m.body)
    optimizer = es.Optimizer((PLAIN | GROUPS)[tx]).init(model)
    model, optimizer = trained(optimizer, model)
    for frozen in (lambda m: m.body[0], None):
        model = model.unfreeze()
        model = model if frozen is None else model.freeze(frozen)
        with untouched(optimizer):
            refitted = optimizer.refit(model)
        expected = {n for n in moments(optimizer) if not n.startswith("body[0]")}
        assert kept(optimizer, refitted) == expected
        assert moments(refitted).keys() - expected
        model, optimizer = trained(refitted, model)
    assert moments(optimizer).keys() == ALL


def test_freezing_drops_moments():
    model = make()
    model, optimizer = trained(es.Optimizer(GROUPS["groups"]).init(model), model)
    frozen = model.freeze(lambda m: m.body[1])
    refitted = optimizer.refit(frozen)
    assert kept(optimizer, refitted) == ALL - {"body[1].w", "body[1].b"}
    trained(refitted, frozen)


def test_a_new_head():
    model = make()
    model, optimizer = trained(es.Optimizer(ADAM).init(model), model)
    model = model.replace(head=Layer(3, size=5))
    refitted = optimizer.refit(model)
    assert kept(optimizer, refitted) == ALL - {"head.w", "head.b"}
    assert [x.count for x in adams(refitted)] == [x.count for x in adams(optimizer)]
    trained(refitted, model)


def test_hyperparameters_and_counts_are_kept():
    adam = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)
    model = make()
    rules = {BODY: adam(0.5), ...: adam(0.25)}
    model, optimizer = trained(es.Optimizer(rules).init(model), model)
    optimizer = optimizer.set(group=BODY, learning_rate=0.125)
    refitted = optimizer.refit(model.replace(head=Layer(4, size=3)))
    assert refitted.hyperparams == optimizer.hyperparams
    assert refitted.hyperparams[BODY, "learning_rate"] == 0.125
    assert [x.count for x in adams(refitted)] == [3, 3]


def test_a_parameter_that_changes_its_group_keeps_its_moments():
    last = es.under(lambda m: m.body[-1])
    rules = {last: optax.adam(0.2), ...: ADAM}
    model = make()
    model, optimizer = trained(es.Optimizer(rules).init(model), model)
    model = model.replace(body=[*model.body, Layer(5)])
    refitted = optimizer.refit(model)
    # `body[1]` was the last layer, and is now in the group of the rest.
    assert kept(optimizer, refitted) == ALL
    group = refitted.opt_state.inner_states[1].inner_state[0]
    assert eqx.tree_equal(group.mu.body[1].w, moments(optimizer)["body[1].w"])
    trained(refitted, model)


def test_a_group_that_was_empty_is_new():
    model = make().freeze(lambda m: m.body)
    optimizer = es.Optimizer({BODY: ADAM, ...: ADAM}).init(model)
    model, optimizer = trained(optimizer, model)
    refitted = optimizer.refit(model.unfreeze())
    assert [x.count for x in adams(refitted)] == [0, 3]


def test_names_decide_in_a_list():
    model = make()
    model = model.replace(body=[*model.body, Layer(5)])
    model, optimizer = trained(es.Optimizer(ADAM).init(model), model)
    shorter = model.replace(body=[model.body[0], model.body[2]])
    before, after = moments(optimizer), moments(optimizer.refit(shorter))
    assert after.keys() == ALL
    # The layer `body[2]` is now `body[1]`, and has the moments of the old `body[1]`.
    assert eqx.tree_equal(after["body[1].w"], before["body[1].w"])


def test_another_shape_of_the_same_name_is_new():
    # A moment of adafactor may keep its shape while its parameter does not.
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    model = {"w": jnp.ones((3, 4)), "b": jnp.ones(2)}
    model, optimizer = trained(es.Optimizer(tx).init(model), model)
    refitted = optimizer.refit({**model, "w": jnp.ones((3, 5))})
    old, new = optimizer.opt_state[0], refitted.opt_state[0]
    assert old.v_row["w"].shape == new.v_row["w"].shape
    assert (old.v_row["w"] > 0).all()
    assert not new.v_row["w"].any()
    assert new.v["b"] is old.v["b"]


def test_another_dtype_of_the_same_name():
    model = {"w": jnp.ones(3), "z": jnp.ones(3, complex)}
    model, optimizer = trained(es.Optimizer(ADAM).init(model), model)
    half = {"w": model["w"].astype("bfloat16"), "z": model["z"].real}
    mu = optimizer.refit(half).opt_state[0].mu
    assert mu["w"].dtype == "bfloat16"
    assert (mu["w"] == optimizer.opt_state[0].mu["w"].astype("bfloat16")).all()
    assert (mu["z"] == 0).all()


# --- Stacks ---------------------------------------------------------------------------


class Deep(es.Module):
    blocks: es.nn.Stacked | list[Layer]


def of_optimizer(optimizer):
    return {
        name.partition(".mu.")[2]: x
        for name, x in es.state_dict(optimizer).items()
        if ".mu." in name
    }


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (list, es.nn.Stacked, "append"),
        (es.nn.Stacked, list, "append"),
        (es.nn.Stacked, es.nn.Stacked, "append"),
        (es.nn.Stacked, es.nn.Stacked, "shorten"),
    ],
)
def test_a_stack_has_the_names_of_a_list(before, after, change):
    layers = [Layer(i) for i in range(3)]
    model = Deep(before(layers))
    model, optimizer = trained(es.Optimizer(ADAM).init(model), model)
    layers = [*layers, Layer(3)] if change == "append" else layers[:2]
    model = Deep(after(layers))
    refitted = optimizer.refit(model)
    old, new = of_optimizer(optimizer), of_optimizer(refitted)
    assert new.keys() == {f"blocks[{i}].{n}" for i in range(len(layers)) for n in "wb"}
    for name, x in new.items():
        assert (x == old.get(name, 0)).all()
    trained(refitted, model)


def test_stacks_in_stacks_and_arrays_without_the_axis_of_a_stack():
    def stack(n):
        inner = [es.nn.Stacked([Layer(2 * i), Layer(2 * i + 1)]) for i in range(n)]
        return Deep(es.nn.Stacked(inner))

    tx = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), ADAM)
    optimizer = es.Optimizer(tx, stacks="arrays").init(stack(2))
    model, optimizer = trained(optimizer, stack(2))
    refitted = optimizer.refit(stack(3))
    old, new = of_optimizer(optimizer), of_optimizer(refitted)
    assert len(new) == 12
    assert all((x == old.get(name, 0)).all() for name, x in new.items())
    trained(refitted, stack(3))


# --- Errors ---------------------------------------------------------------------------


def test_refit_before_init():
    with pytest.raises(es.NotInitializedError, match=r"`es\.Optimizer\.refit`.*init"):
        es.Optimizer(ADAM).refit(make())


def test_refit_raises_the_errors_of_init():
    optimizer = es.Optimizer(ADAM).init(make())
    with pytest.raises(ValueError, match="selects no inexact array"):
        optimizer.refit(make().freeze())
