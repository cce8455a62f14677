"""`es.per_layer`: each layer of a stack is updated as in a list of layers."""

import functools as ft
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import optax.contrib
import pytest
from helpers import reuses_keys
from jax.sharding import PartitionSpec as P

import eqx_state as es


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Layer(es.Module):
    w: es.Parameter
    b: es.Parameter

    def __init__(self, seed, scale=1.0):
        # As many rows as there are layers.
        self.w = scale * jr.normal(jr.key(seed), (3, 4))
        self.b = scale * jr.normal(jr.key(seed + 100), (3,))


class Net(es.Module):
    head: es.Parameter
    blocks: es.nn.Stacked | list


def listed(seed=0, n=3):
    """A model, or gradients for it; its layers differ in size by powers of ten."""
    layers = [Layer(seed + i, 10.0**i) for i in range(n)]
    return Net(jr.normal(jr.key(seed + 50), (4, 4)), layers)


def stacked(seed=0, n=3):
    net = listed(seed, n)
    return net.replace(blocks=es.nn.Stacked(net.blocks))


def nested(seed=0, n=3):
    """Three stacks of two layers, as one stack; as a list, six layers."""
    layers = listed(seed, 2 * n).blocks
    inner = [es.nn.Stacked(layers[2 * i : 2 * i + 2]) for i in range(n)]
    return Net(listed(seed).head, es.nn.Stacked(inner))


def nested_list(seed=0, n=3):
    layers = listed(seed, 2 * n).blocks
    return Net(listed(seed).head, [layers[2 * i : 2 * i + 2] for i in range(n)])


def trained(tx, make, steps=3, **kwargs):
    """The model and the optimizer after some steps, with gradients of any size."""
    model = make()
    optimizer = es.Optimizer(tx, **kwargs).init(model)
    for i in range(steps):
        grads = jax.tree.map(lambda g: 0.1 * g, make(10 * i + 1))
        value = jnp.float32(5 - i)
        model, optimizer = optimizer.update(grads, model, value=value, grad=grads)
    return model, optimizer


def close(a, b):
    a, b = es.state_dict(a), es.state_dict(b)
    assert a.keys() == b.keys()
    for name in a:
        size = jnp.abs(a[name]).max()
        assert jnp.allclose(a[name], b[name], rtol=1e-4, atol=1e-5 * size), name


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def by_rank(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim >= 2 else "vector", params)


def is_square(params):
    return es.mask(params, lambda part: part.value.shape == (3, 4))


def of_names(params):
    return es.mask(params, es.path_matches("blocks[*].w"))


RATE = 0.1
SGD = optax.sgd(RATE)
LAMB = optax.lamb(RATE, weight_decay=0.1)
TXS = {
    "adafactor": optax.adafactor(RATE, min_dim_size_to_factor=2),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.1), SGD),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.1), SGD),
    "fromage": optax.fromage(RATE),
    "inject": optax.inject_hyperparams(optax.lamb)(RATE),
    "lamb": LAMB,
    "lars": optax.lars(RATE, weight_decay=0.1),
    "mask by rank": optax.adamw(RATE, weight_decay=0.5, mask=is_matrix),
    "mask by shape": optax.masked(LAMB, is_square),
    "muon": optax.contrib.muon(RATE),
    "MultiSteps": optax.MultiSteps(LAMB, 2),
    "novograd": optax.novograd(RATE),
    "partition": optax.partition({"matrix": LAMB, "vector": SGD}, by_rank),
    "plateau": optax.chain(LAMB, optax.contrib.reduce_on_plateau(patience=1)),
    "polyak": optax.chain(LAMB, optax.polyak_sgd()),
    "schedule": optax.inject_hyperparams(optax.lamb)(
        optax.linear_schedule(RATE, 0.0, 3)
    ),
    "schedule_free": optax.contrib.schedule_free(LAMB, RATE),
    "sm3": optax.sm3(RATE),
}
if hasattr(optax.contrib, "galore"):  # newer than the oldest optax
    TXS["galore"] = optax.contrib.galore(RATE, rank=2)


@pytest.mark.parametrize("name", TXS)
def test_a_stack_is_trained_like_a_list(name):
    tx = TXS[name]
    if name not in ("plateau", "polyak"):  # these look across arrays
        close(trained(tx, listed)[0], trained(es.per_layer(tx), stacked)[0])
    model, optimizer = trained(es.per_layer(tx), stacked, steps=1)
    for x in jax.tree.leaves(optimizer.opt_state.stacks["blocks"]):
        assert x.shape[0] == 3
    assert eqx.tree_equal(jax.tree.structure(model), jax.tree.structure(stacked()))


AROUND = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "groups": lambda tx: {es.inside(Layer): tx, ...: optax.adam(RATE)},
    "inject": lambda tx: optax.inject_hyperparams(
        lambda learning_rate: optax.chain(tx, optax.scale(learning_rate))
    )(learning_rate=0.5),
    "masked": lambda tx: optax.masked(tx, lambda p: es.mask(p, of_w)),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "partition": lambda tx: optax.partition({True: tx, False: SGD}, of_names),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, RATE),
}
of_w = es.path_matches("*.w")


@pytest.mark.parametrize(
    ("make", "other"), [(stacked, listed), (nested, nested_list)], ids=["", "nested"]
)
@pytest.mark.parametrize("name", AROUND)
def test_it_may_be_inside_other_transformations(name, make, other):
    around = AROUND[name]
    close(trained(around(LAMB), other)[0], trained(around(es.per_layer(LAMB)), make)[0])


def test_optax_alone():
    tx, model = es.per_layer(LAMB), stacked()
    state = tx.init(model)
    updates, state = tx.update(stacked(1), state, model)
    expected, _ = LAMB.update(listed(1), LAMB.init(listed()), listed())
    close(expected, updates)
    assert state.others[0].count == 1
    assert (state.stacks["blocks"][0].count == jnp.ones(3)).all()
    sgd = es.per_layer(SGD)  # without parameters
    updates, _ = sgd.update(stacked(1), sgd.init(stacked()))
    assert eqx.tree_equal(updates, jax.tree.map(lambda g: -RATE * g, stacked(1)))


def test_the_program_does_not_grow_with_the_depth():
    def equations(n):
        model = stacked(n=n).blocks
        optimizer = es.Optimizer(es.per_layer(optax.contrib.muon(RATE))).init(model)
        step = lambda m, o: o.update(m, m)  # noqa: E731
        return str(eqx.filter_make_jaxpr(step)(model, optimizer)[0]).count("=")

    assert equations(2) == equations(9)


# --- A function of the layer


def rates(layer):
    return optax.sgd(0.5**layer)


@pytest.mark.parametrize("make", [stacked, nested])
def test_a_function_of_the_layer(make):
    rules = {es.inside(es.nn.Stacked): es.per_layer(rates), ...: optax.sgd(1.0)}
    model = make()
    ones = jax.tree.map(jnp.ones_like, model)
    updates, _ = (
        es.Optimizer(rules).init(model).update(ones, model, apply_updates=False)
    )
    w = updates.blocks.layers.w if make is stacked else updates.blocks.layers.layers.w
    numbers = jnp.arange(w[..., 0, 0].size).reshape(w.shape[:-2])
    assert jnp.allclose(w, -(0.5 ** numbers[..., None, None]))


def test_a_function_of_the_layer_is_for_stacks_only():
    with pytest.raises(ValueError, match=r"(?s)`head` is not in.*es\.inside"):
        es.Optimizer(es.per_layer(rates)).init(stacked())


@pytest.mark.parametrize("wrong", [optax.lamb, 0.1, Layer])
def test_it_takes_a_transformation(wrong):
    with pytest.raises(TypeError, match=r"takes an optax transformation.*was given"):
        es.per_layer(wrong)


def test_a_function_of_the_layer_returns_a_transformation():
    with pytest.raises(
        TypeError, match=r"takes an optax.*`.*<lambda>` returned `float`"
    ):
        es.per_layer(lambda layer: 0.1).init(stacked().blocks)


def test_each_layer_has_its_own_hyperparameters():
    inject = optax.inject_hyperparams(optax.lamb, hyperparam_dtype=jnp.float32)
    tx = es.per_layer(lambda layer: inject(0.5**layer))
    model = stacked().blocks
    optimizer = es.Optimizer(tx).init(model)
    assert jnp.allclose(
        optimizer.hyperparams["learning_rate"], jnp.array([1, 0.5, 0.25])
    )
    one = optimizer.set(learning_rate=0.25).hyperparams["learning_rate"]
    assert (one == jnp.full(3, 0.25)).all()
    each = optimizer.set(learning_rate=jnp.array([0.0, 1.0, 0.0]))
    new, _ = each.update(model, model)
    moved = jnp.any(new.layers.w != model.layers.w, axis=(1, 2))
    assert moved.tolist() == [False, True, False]


# --- What a layer sees


def test_a_mask_by_name_or_shape_sees_the_arrays_of_a_layer():
    seen = []

    def note(params):
        seen.extend((p.name, p.value.shape) for p in es.parts(params))
        return es.mask(params, lambda part: seen.append((part.name, part.value.shape)))

    es.per_layer(optax.masked(SGD, note)).init(stacked().blocks)
    assert ("[2].w", (3, 4)) in seen
    assert ("[0].b", (3,)) in seen
    assert {shape for _, shape in seen} == {(3, 4), (3,)}


def legacy_noise():
    """As `optax.add_noise`, with a legacy key, as `optax.contrib.sophia` has it."""

    def update(updates, key, params=None):
        return jax.tree.map(lambda g: jr.normal(key, g.shape), updates), key

    return optax.GradientTransformation(lambda params: jr.PRNGKey(0), update)


@pytest.mark.parametrize("tx", [optax.add_noise(1.0, 0.5, jr.key(0)), legacy_noise()])
@reuses_keys
def test_each_layer_draws_its_own_noise(tx):
    tx, model = es.per_layer(tx), [stacked().blocks, stacked().blocks]
    zeros = jax.tree.map(jnp.zeros_like, model)
    noise, _ = tx.update(zeros, tx.init(model), model)
    drawn = [*noise[0].layers.w, *noise[1].layers.w]
    assert len({float(x[0, 0]) for x in drawn}) == 6


def test_a_function_of_all_parameters_is_not_passed_to_layers():
    search = optax.scale_by_backtracking_linesearch(3)
    model = stacked()
    value_fn = lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p))  # noqa: E731
    extra = {"value": value_fn(model), "value_fn": value_fn}
    outside = optax.chain(es.per_layer(LAMB), search)
    es.Optimizer(outside).init(model).update(model, model, grad=model, **extra)
    inside = es.Optimizer(es.per_layer(search))
    inside.init(listed()).update(listed(), listed(), grad=listed(), **extra)
    with pytest.raises(TypeError, match="'value_fn'"):
        inside.init(model).update(model, model, grad=model, **extra)


def test_gradients_per_example_look_across_layers():
    tx = optax.contrib.dpsgd(RATE, 1.0, 0.1, 0)
    model = stacked()
    per_example = jax.tree.map(lambda x: jnp.stack([x] * 3), model)
    with pytest.raises(ValueError, match=r"`blocks\.layers\.w`.*outside"):
        es.Optimizer(es.per_layer(tx)).init(model).update(per_example, model)


def test_an_array_without_the_axis_of_the_stack():
    model = eqx.tree_at(lambda m: m.blocks.layers.b, stacked(), jnp.ones(2))
    with pytest.raises(ValueError, match=r"3 layers and an array of shape \(2,\)"):
        es.Optimizer(es.per_layer(SGD)).init(model)


def test_per_layer_of_per_layer():
    twice = es.per_layer(es.per_layer(LAMB))
    close(trained(twice, stacked)[0], trained(es.per_layer(LAMB), stacked)[0])


@pytest.mark.parametrize("tx", [SGD, rates])
def test_a_shard_of_the_layers_is_updated_outside(tx):
    mesh = jax.make_mesh((2,), ("layers",), (jax.sharding.AxisType.Auto,))
    model = stacked(n=2).blocks
    optimizer = es.Optimizer(es.per_layer(tx)).init(model)
    shards = ft.partial(es.shard_map, mesh=mesh, out_specs=P("layers"))
    with pytest.raises(ValueError, match=r"2 layers.*`layers\.w`.*update outside"):
        shards(optimizer.update, in_specs=P("layers"))(model, model)
    grads = shards(lambda m: m, in_specs=P("layers"))(model)
    close(optimizer.update(model, model)[0], optimizer.update(grads, model)[0])


# --- Ensembles, loops, files, shardings, changed models


def test_an_ensemble():
    tx = es.per_layer(LAMB)
    models, optimizers = eqx.filter_vmap(
        lambda scale: (
            m := jax.tree.map(lambda x: x * scale, stacked()),
            es.Optimizer(tx).init(m),
        )
    )(jnp.array([1.0, 2.0]))
    new, _ = eqx.filter_vmap(lambda m, o: o.update(m, m))(models, optimizers)
    double = jax.tree.map(lambda x: 2 * x, stacked())
    expected, _ = es.Optimizer(tx).init(double).update(double, double)
    assert jnp.allclose(new.blocks.layers.w[1], expected.blocks.layers.w, rtol=1e-5)


def test_in_a_loop_it_compiles_once():
    model = stacked()
    optimizer = es.Optimizer(es.per_layer(optax.MultiSteps(LAMB, 2))).init(model)

    def step(carry, _):
        model, optimizer = carry
        return optimizer.update(model, model), None

    (new, _), _ = jax.lax.scan(step, (model, optimizer), length=3)
    for _ in range(3):
        (model, optimizer), _ = step((model, optimizer), None)
    close(model, new)


def test_it_is_saved_and_loaded(tmp_path):
    _, optimizer = trained(es.per_layer(LAMB), stacked)
    es.save(tmp_path / "a.safetensors", optimizer)
    fresh = es.Optimizer(es.per_layer(LAMB)).init(stacked())
    loaded = es.load(tmp_path / "a.safetensors", fresh)
    close(optimizer, loaded)
    assert any(name.endswith("mu.blocks[2].w") for name in es.state_dict(loaded))


def test_moments_follow_their_parameters():
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    optimizer = es.Optimizer(es.per_layer(TXS["lamb"])).init(stacked())
    rules = {es.path_matches("blocks*.w"): P("data"), ...: P()}
    found = es.sharding(optimizer, mesh, rules).opt_state
    assert found.stacks["blocks"][0].mu.blocks.layers.w.spec == P("data")
    assert found.stacks["blocks"][0].mu.blocks.layers.b.spec == P()
    assert found.others[0].mu.head.spec == P()


def test_moments_are_created_in_the_shards_of_their_parameters():
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    shards = jax.sharding.NamedSharding(mesh, P(None, None, "data"))
    model = eqx.tree_at(
        lambda m: m.blocks.layers.w,
        stacked(),
        replace_fn=lambda w: jax.device_put(w, shards),
    )
    optimizer = es.Optimizer(es.per_layer(LAMB)).init(model)
    adam = optimizer.opt_state.stacks["blocks"][0]
    assert adam.mu.blocks.layers.w.sharding == shards
    assert len(adam.nu.blocks.layers.b.devices()) == 1
    # In a trace, shardings are not known.
    jax.jit(lambda m: es.Optimizer(es.per_layer(LAMB)).init(m).opt_state)(model)


@pytest.mark.parametrize("group", [False, True])
def test_a_layer_that_is_appended_starts_at_zero(group):
    inject = optax.inject_hyperparams(optax.lamb, hyperparam_dtype=jnp.float32)
    tx = es.per_layer(inject(RATE))
    tx = {es.inside(Layer): tx, ...: SGD} if group else tx
    model, optimizer = trained(tx, stacked)
    optimizer = optimizer.set(learning_rate=0.5)
    longer = model.replace(blocks=es.nn.Stacked([*model.blocks, Layer(7)]))
    for new, n in ((longer, 4), (model.replace(blocks=model.blocks[:2]), 2)):
        refitted = optimizer.refit(new)
        before, after = es.state_dict(optimizer), es.state_dict(refitted)
        for name, x in after.items():
            if name.endswith("count") and ".stacks" in name:
                assert x.tolist() == [3, 3, 3, 0][:n]
            elif "learning_rate" in name and ".stacks" in name:
                assert (x == 0.5).all()
            elif "blocks[3]" in name:
                assert not x.any()
            elif "hyperparams" not in name:
                assert (x == before[name]).all()
        refitted.update(new, new)


INJECT = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)


def steps(tx, model, n=3):
    optimizer = es.Optimizer(tx).init(model)
    for _ in range(n):
        model, optimizer = optimizer.update(es.filter(model, es.trainable), model)
    return model, optimizer


@pytest.mark.parametrize("make", [stacked, nested])
@pytest.mark.parametrize("frozen", ["blocks", "head"])
def test_a_part_that_is_new_has_counts_and_hyperparameters(frozen, make):
    model = es.freeze(make(), lambda m: getattr(m, frozen))
    model, optimizer = steps(es.per_layer(INJECT(RATE)), model)
    optimizer, model = optimizer.set(learning_rate=0.5), es.unfreeze(model)
    refitted = optimizer.refit(model)
    for name, x in es.state_dict(refitted).items():
        if "['learning_rate']" in name:
            assert (x == 0.5).all()
        elif name.endswith("count"):
            assert (x == 3).all()
        elif ".mu." in name:
            assert x.any() == (frozen not in name)
    assert len(refitted.hyperparams) == 2 * len(optimizer.hyperparams)
    traced = es.jit(lambda optimizer, model: optimizer.refit(model))(optimizer, model)
    assert eqx.tree_equal(traced, refitted)


def test_rates_by_layer_are_neither_lent_nor_replaced():
    tx = es.per_layer(lambda layer: INJECT(0.5**layer))
    one, three = stacked(n=1).blocks, stacked().blocks
    for old in ({"one": one}, {"three": three}):
        _, optimizer = steps(tx, old)
        parts = optimizer.refit({"one": one, "three": three}).opt_state.stacks
        rates = [x.hyperparams["learning_rate"].tolist() for x in parts.values()]
        assert rates == [[1.0], [1.0, 0.5, 0.25]]
        assert all((x.count == 3).all() for x in parts.values())
    longer = optimizer.refit({"three": stacked(n=4).blocks})
    rates = longer.hyperparams["learning_rate"]
    assert rates.tolist() == [1.0, 0.5, 0.25, 0.125]


@reuses_keys
def test_keys_and_moments_are_not_lent():
    # As many numbers as one layer has, which is all that `flatten` shows of a model.
    model = {"w": jnp.ones(15)}
    noise = optax.add_noise(1.0, 0.5, jr.key(0))
    tx = es.per_layer(optax.chain(noise, optax.flatten(optax.adam(RATE))))
    _, optimizer = steps(tx, model)
    state = optimizer.refit({**model, "blocks": stacked().blocks}).opt_state
    noise, (adam, *_) = state.stacks["['blocks']"]
    assert adam.count.tolist() == [3, 3, 3]
    assert not adam.mu.any()
    assert len({*map(str, jr.key_data(noise.rng_key))}) == 3


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(("before", "after"), [(listed, stacked), (stacked, listed)])
def test_a_list_and_a_stack_keep_the_state_of_each_other(before, after, group):
    tx = es.per_layer(LAMB)
    tx = {es.inside(Layer): tx, ...: SGD} if group else tx
    model, optimizer = trained(tx, before)
    blocks = [*model.blocks]
    blocks = es.nn.Stacked(blocks) if after is stacked else blocks
    other = model.replace(blocks=blocks)
    expected, _ = optimizer.update(before(1), model)
    close(expected, optimizer.refit(other).update(after(1), other)[0])


def test_nested_stacks_keep_their_counts():
    _, optimizer = trained(es.per_layer(LAMB), nested)
    refitted = optimizer.refit(nested(n=4))
    count = refitted.opt_state.stacks["blocks.layers"][0].count
    assert count.tolist() == [[3, 3], [3, 3], [3, 3], [0, 0]]


# --- The error without `es.per_layer`


class OwnDict(dict): ...


class OwnList(list): ...


def own(container):
    """A transformation that looks up another one in a container."""
    return optax.GradientTransformation(
        lambda params: (), lambda updates, state, params=None: container
    )


REFUSED = {
    "alone": (LAMB, "scale_by_trust_ratio"),
    "adafactor": (TXS["adafactor"], "scale_by_factored_rms"),
    "chain": (TXS["clip_by_block_rms"], "clip_by_block_rms"),
    "muon": (TXS["muon"], "muon"),
    "groups": ({es.inside(Layer): LAMB, ...: SGD}, "scale_by_trust_ratio"),
    "inject": (TXS["schedule"], "scale_by_trust_ratio"),
    "MultiSteps": (TXS["MultiSteps"], "scale_by_trust_ratio"),
    "method": (optax.MultiSteps(LAMB, 2).gradient_transformation(), "trust_ratio"),
    "named_chain": (optax.named_chain(("a", LAMB)), "scale_by_trust_ratio"),
    "partition": (
        optax.partition({True: LAMB, False: SGD}, of_names),
        "scale_by_trust_ratio",
    ),
    "schedule_free": (TXS["schedule_free"], "scale_by_trust_ratio"),
    "sam": (optax.contrib.sam(LAMB, SGD), "scale_by_trust_ratio"),
    "if finite": (optax.apply_if_finite(LAMB, 2), "scale_by_trust_ratio"),
    "own": (
        optax.GradientTransformation(
            LAMB.init, lambda u, s, p=None, tx=LAMB: tx.update(u, s, p)
        ),
        "scale_by_trust_ratio",
    ),
    "own dict": (own(OwnDict(tx=LAMB)), "scale_by_trust_ratio"),
    "own list": (own(OwnList([LAMB])), "scale_by_trust_ratio"),
    "partial": (
        optax.GradientTransformation(LAMB.init, ft.partial(LAMB.update)),
        "scale_by_trust_ratio",
    ),
    "mask": (TXS["mask by rank"], "mask `is_matrix`"),
    "labels": (
        optax.partition({"matrix": SGD, "vector": SGD}, by_rank),
        "mask `by_rank`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_whole_arrays_of_a_stack_are_an_error(name):
    tx, said = REFUSED[name]
    message = rf"{said}.*`blocks`.*es\.per_layer.*stacks=\"arrays\""
    with pytest.raises(ValueError, match=message):
        es.Optimizer(tx).init(stacked())
    es.Optimizer(tx, stacks="arrays").init(stacked())
    es.Optimizer(tx).init(listed())


def test_a_model_that_is_a_stack_is_named_without_a_path():
    with pytest.raises(ValueError, match=r"`es\.nn\.Stacked` that it trains"):
        es.Optimizer(LAMB).init(stacked().blocks)


def outside(params):
    return es.mask(params, es.path_matches("head"))


ACCEPTED = {
    "inside": optax.chain(optax.clip_by_global_norm(1.0), es.per_layer(LAMB)),
    "inside a group": {es.inside(Layer): es.per_layer(LAMB), ...: LAMB},
    "elsewhere": {es.inside(Layer): optax.adam(RATE), ...: LAMB},
    "masked away": optax.masked(LAMB, outside),
    "mask that is a tree": optax.masked(SGD, is_matrix(stacked())),
    "other label": optax.partition({True: LAMB, False: SGD}, outside),
    "mask by name": optax.adamw(RATE, mask=of_names),
    "mask by rank in a layer": optax.adamw(
        RATE, mask=lambda p: es.mask(p, lambda part: part.value.ndim >= 2)
    ),
    "mask for stacks": optax.masked(
        SGD, lambda p: p.blocks.layers.w.shape[2] and is_matrix(p)
    ),
    "inject inside": optax.inject_hyperparams(
        lambda rate: es.per_layer(optax.lamb(rate))
    )(0.1),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_not_applied_to_whole_stacks_is_no_error(name):
    trained(ACCEPTED[name], stacked, steps=1)


def test_stacks_are_arrays_or_nothing():
    with pytest.raises(ValueError, match=r"`\"arrays\"`.*`layers` was given"):
        es.Optimizer(SGD, stacks="layers")


# --- All of optax


def is_on(*args, **kwargs):
    return True


WITH = ("args", "base_optimizer", "inner", "optimizer", "transforms", "tx")
INNER = ("base_optimizer", "fast_optimizer", "inner", "optimizer", "tx")
ARGUMENTS = {
    "adv_optimizer": SGD,
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.0,
    "f": lambda updates, params: updates,
    "freeze_mask": False,
    "gamma": 0.5,
    "gradient_step": 0,
    "learning_rate": RATE,
    "mask": True,
    "max_consecutive_errors": 2,
    "max_delta": 0.1,
    "max_norm": 0.1,
    "measure": lambda updates, *args, **kwargs: updates,
    "measure_name": "norm",
    "measures": {},
    "param_labels": lambda params: jax.tree.map(lambda x: "a", params),
    "should_transform_fn": is_on,
    "step_size": 0.1,
    "step_size_fn": lambda count: 0.1,
    "threshold": 0.1,
}
OPTIONS = {
    "adafactor": {"min_dim_size_to_factor": 2},
    "add_noise": {"key": 0},
    "lbfgs": {"linesearch": None},
    "noisy_sgd": {"eta": 0.0, "key": 0},
    "scale_by_factored_rms": {"min_dim_size_to_factor": 2},
    "stateless_with_tree_map": {"f": lambda g, p: 0.1 * g},
}
# They need functions of all parameters, gradients per example, or special arguments, or
# return functions that return a transformation; and `lookahead` is refused.
SKIPPED = {
    "differentially_private_aggregate",
    "dpsgd",
    "hutchinson_estimator_diag_hessian",
    "inject_hyperparams",
    "inject_stateful_hyperparams",
    "lookahead",
    "scale_by_backtracking_linesearch",
    "scale_by_muon",
    "scale_by_zoom_linesearch",
    "sophia",
    "split_real_and_imaginary",
}


def all_of_optax():
    """Each function of optax that may return a transformation, by its name."""
    found = {}
    for module in (optax, optax.contrib):
        for name, f in vars(module).items():
            if inspect.isfunction(f) and name not in SKIPPED and name[0] != "_":
                parameters = inspect.signature(f).parameters.values()
                needed = [p for p in parameters if p.default is p.empty]
                known = {*ARGUMENTS, *INNER, "args", "transforms"}
                is_transformation = "GradientTransf" in str(inspect.signature(f))
                if is_transformation or {p.name for p in needed} <= known:
                    found[name] = f
    return found


def made(name, inner):
    """The transformation, or whatever else the function of optax returns."""
    f, options = all_of_optax()[name], OPTIONS.get(name, {})
    if name in ("chain", "named_chain"):
        return f(("a", inner) if name == "named_chain" else inner)
    known = {**ARGUMENTS, **dict.fromkeys(INNER, inner), "transforms": {"a": inner}}
    parameters = inspect.signature(f).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    return f(**{**{name: known[name] for name in needed}, **options})


class Matrix(es.Module):
    w: es.Parameter


def matrices(seed=0, stack=list):
    keys = jr.split(jr.key(seed), 6)
    weights = [10.0**i * jr.normal(key, (3, 4)) for i, key in enumerate(keys)]
    return [stack([Matrix(w) for w in weights[:5]]), Matrix(weights[5])]


def second_updates(tx, name, make):
    params, tx = make(), optax.with_extra_args_support(tx)
    state = tx.init(params)
    for i in range(2):
        extra = {} if name == "sam" else {"value": jnp.float32(2 - i)}
        updates, state = tx.update(make(i + 1), state, params, **extra)
        params = optax.apply_updates(params, updates)
    return es.state_dict(updates)


def are_close(x, y):
    return jnp.allclose(x, y, rtol=1e-3, atol=1e-3 * jnp.abs(x).max())


@pytest.mark.parametrize("name", all_of_optax())
def test_a_transformation_to_which_a_stack_is_no_list_is_refused(name):
    refuses, differs = [], []
    stack = lambda seed=0: matrices(seed, es.nn.Stacked)  # noqa: E731
    for inner in (SGD, LAMB):
        tx = made(name, inner)
        if not isinstance(tx, optax.GradientTransformation):
            return
        expected, found = (second_updates(tx, name, x) for x in (matrices, stack))
        differs.append(not all(are_close(x, found[k]) for k, x in expected.items()))
        refuses.append(is_refused(tx, stack()))
        if not any(
            x in inspect.signature(all_of_optax()[name]).parameters for x in WITH
        ):
            break
    # To `flatten`, all parameters are one array in any case.
    assert refuses == differs or name == "flatten"


def is_refused(tx, model):
    try:
        es.Optimizer(tx).init(model)
    except ValueError as error:
        return "es.per_layer" in str(error)
    return False
