"""`es.Optimizer`, against hand-written optax loops."""

import dataclasses
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
import pytest
from helpers import reuses_keys

import eqx_state as es
from eqx_state._jit.static import can_change


# `optax.adam` promotes implicitly: `float ** int`.
standard = jax.numpy_dtype_promotion("standard")


class Net(es.Module):
    first: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear
    shift: es.Buffer
    calls: es.State

    def __init__(self, key):
        key1, key2 = jr.split(key)
        self.first = eqx.nn.Linear(3, 4, key=key1)
        self.norm = es.nn.BatchNorm(4, axis_name="batch")
        self.dropout = eqx.nn.Dropout(0.0)
        self.second = eqx.nn.Linear(4, 2, key=key2)
        self.shift = jnp.ones(2)
        self.calls = jnp.array(0)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.first(x)))
        return self.second(self.dropout(x)) + self.shift


def loss_fn(model, x):
    model.calls = model.calls + 1
    return jnp.mean(es.vmap(model, axis_name="batch")(x) ** 2)


@eqx.filter_jit
def gradients(model, x, **options):
    (_, model), grads = es.value_and_grad(loss_fn, **options)(model, x)
    return model, grads


@pytest.fixture
def x():
    return jr.normal(jr.key(1), (5, 3))


@pytest.fixture
def net():
    return Net(jr.key(0))


def assert_equal(a, b):
    assert eqx.tree_equal(a, b), f"{a}\n{b}"


def array_leaves(tree):
    return [leaf for leaf in jtu.tree_leaves(tree) if eqx.is_array(leaf)]


# --- A pytree of its state ----------------------------------------------------------


@standard
def test_every_array_in_it_is_of_kind_opt_state(net):
    optimizer = es.Optimizer(optax.adam(optax.constant_schedule(0.1))).init(net)
    parts = es.parts((net, optimizer))
    in_optimizer = [p for p in parts if p.name.startswith("[1]")]
    assert len(in_optimizer) == len(jtu.tree_leaves(optimizer)) > 0
    assert {p.kind for p in in_optimizer} == {es.OptState}
    assert jtu.tree_leaves(es.filter(optimizer, es.trainable)) == []


@pytest.mark.parametrize("rules", [False, True])
def test_what_it_records_of_a_dict_cannot_change(rules):
    # `es.jit` would copy it for each result, and build the optimizer at once.
    tx = optax.sgd(0.1)
    optimizer = es.Optimizer({...: tx} if rules else tx).init({"w": jnp.ones(2)})
    assert not can_change(optimizer.tx)
    assert not can_change(optimizer._made_for)


# --- Models, parameters and other pytrees -------------------------------------------


@standard
def test_a_model_and_its_parameters_give_equal_results(net, x):
    tx = optax.adamw(0.1)
    _, grads = gradients(net, x)
    on_model = es.Optimizer(tx).init(net)
    on_params = es.Optimizer(tx).init(es.filter(net, es.trainable))
    assert_equal(on_model, on_params)

    new, on_model = on_model.update(grads, net)
    params, on_params = on_params.update(grads, es.filter(net, es.trainable))
    assert_equal(on_model, on_params)
    assert_equal(params, es.filter(new, es.trainable))
    assert_equal(es.update(net, params), new)


@standard
def test_parameters_may_lack_the_arrays_that_wrt_excludes_by_path(net, x):
    # An error of `es.freeze` suggests this filter, for trees without an `es.Module`.
    wrt = es.all_of(es.trainable, es.not_(es.under(lambda m: m.first)))
    params = es.filter(net, wrt)
    optimizer = es.Optimizer(optax.adam(0.1), wrt=wrt)
    assert_equal(optimizer.init(params), optimizer.init(net))
    _, grads = gradients(net, x, wrt=wrt)
    new, _ = optimizer.init(net).update(grads, net)
    new_params, _ = optimizer.init(net).update(grads, params)
    assert_equal(new_params, es.filter(new, wrt))


@standard
def test_a_plain_pytree_of_arrays():
    params = {"w": jnp.ones(2), "steps": jnp.array(3), "key": jr.key(0), "f": None}
    grads = {"w": jnp.ones(2), "steps": None, "key": None, "f": None}
    optimizer = es.Optimizer(optax.adam(0.5)).init(params)
    new, optimizer = optimizer.update(grads, params)
    assert jnp.allclose(new["w"], 0.5)
    assert all(new[name] is params[name] for name in ("steps", "key", "f"))


def test_update_changes_only_the_trained_arrays(net, x):
    model, grads = gradients(net, x)
    optimizer = es.Optimizer(optax.sgd(0.1)).init(net)
    new, _ = optimizer.update(grads, model)
    assert type(new) is Net
    params, rest = es.partition(new, es.trainable)
    old_params, old_rest = es.partition(model, es.trainable)
    assert all(
        a is b or a == b
        for a, b in zip(jtu.tree_leaves(rest), jtu.tree_leaves(old_rest), strict=True)
    )
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, old_params, grads)
    assert eqx.tree_equal(params, expected, rtol=1e-6, atol=1e-7)
    assert new.calls == 1


@standard
def test_apply_updates_false_returns_the_updates(net, x):
    model, grads = gradients(net, x)
    optimizer = es.Optimizer(optax.adamw(0.1)).init(net)
    updates, after = optimizer.update(grads, model, apply_updates=False)
    new, also_after = optimizer.update(grads, model)
    assert_equal(after, also_after)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)
    assert_equal(eqx.apply_updates(model, updates), new)


# --- The same numbers as an optax loop ----------------------------------------------


@reuses_keys
@standard
def test_a_training_loop_equals_the_hand_written_one_and_compiles_once(net, x):
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model, optimizer, x):
        model, grads = gradients(model, x)
        return grads, *optimizer.update(grads, model)

    schedule = optax.exponential_decay(0.1, 2, 0.5)
    tx = optax.chain(
        optax.clip_by_global_norm(0.01),
        optax.inject_hyperparams(optax.adamw)(schedule, weight_decay=0.3),
    )
    model, optimizer = net, es.Optimizer(tx).init(net)
    by_hand, treedef = jtu.tree_flatten(es.filter(net, es.trainable))
    opt_state = tx.init(by_hand)
    for _ in range(4):
        grads, model, optimizer = step(model, optimizer, x)
        # A list of arrays, as in a program without modules.
        updates, opt_state = tx.update(jtu.tree_leaves(grads), opt_state, by_hand)
        by_hand = optax.apply_updates(by_hand, updates)
        params = es.filter(model, es.trainable)
        expected = treedef.unflatten(by_hand)
        assert eqx.tree_equal(params, expected, rtol=1e-5, atol=1e-6)
    assert model.calls == 4
    assert not any(leaf.weak_type for leaf in array_leaves(optimizer))


@standard
@pytest.mark.parametrize("of_params", [False, True])
def test_a_mask_for_weight_decay_comes_from_a_filter(net, of_params):
    def is_matrix(part):
        return part.value.ndim > 1

    of_model = es.mask(net, es.trainable, is_matrix)

    def mask(params):
        return es.mask(params, is_matrix) if of_params else of_model

    model = net.eval()
    grads = jax.tree.map(jnp.zeros_like, es.filter(net, es.trainable))
    tx = optax.adamw(0.1, weight_decay=1.0, mask=mask)
    new, _ = es.Optimizer(tx).init(net).update(grads, model)
    assert jnp.allclose(new.first.weight, 0.9 * net.first.weight)
    assert_equal(new.first.bias, net.first.bias)
    assert_equal(new.norm, model.norm)


def test_further_arguments_that_the_transformation_does_not_take_are_ignored():
    model = {"w": jnp.ones(2)}
    optimizer = es.Optimizer(optax.sgd(0.5)).init(model)
    new, _ = optimizer.update(model, model, value=jnp.array(1.0))
    assert (new["w"] == 0.5).all()


# --- Only arrays that `wrt` selects are passed to optax -----------------------------


@standard
def test_weight_decay_sees_only_the_trained_leaves(net, x):
    wrt = es.all_of(es.trainable, es.not_(es.under(lambda m: m.first)))
    grads = jax.tree.map(jnp.zeros_like, es.filter(net, es.trainable))
    optimizer = es.Optimizer(optax.adamw(0.1, weight_decay=1.0), wrt=wrt).init(net)
    new, _ = optimizer.update(grads, net)
    assert_equal(new.first, net.first)
    assert_equal((new.norm.mean, new.norm.var), (net.norm.mean, net.norm.var))
    assert_equal((new.shift, new.calls), (net.shift, net.calls))
    assert jnp.allclose(new.second.weight, 0.9 * net.second.weight)
    assert jnp.allclose(new.norm.weight, 0.9 * net.norm.weight)


def test_gradients_outside_wrt_are_ignored():
    optimizer = es.Optimizer(optax.sgd(1.0), wrt=es.path_matches("*'a'*"))
    model = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    grads = {"a": jnp.ones(2), "b": jnp.full(2, jnp.nan)}
    new, _ = optimizer.init(model).update(grads, model)
    assert (new["b"] == 0).all()
    new, _ = optimizer.init(model).update(grads, {"a": model["a"], "b": None})
    assert (new["a"] == -1).all()


def test_what_is_not_a_filter_is_an_error_immediately():
    with pytest.raises(TypeError, match="is not a filter"):
        es.Optimizer(optax.sgd(0.1), "bias")


@pytest.mark.parametrize(
    ("wrt", "said"),
    [
        (es.trainable, r"(\d+) parameters, \1 of them frozen.*es\.parts"),
        (es.path_matches("frist.*"), r"nearest names: `first\."),
    ],
)
def test_a_filter_that_selects_no_array_is_an_error(net, wrt, said):
    model = net.freeze() if wrt is es.trainable else net
    with pytest.raises(ValueError, match=rf"wrt=es\..*selects no .*{said}"):
        es.Optimizer(optax.sgd(0.1), wrt).init(model)


def test_integers_are_not_trained():
    class Table(es.Module):
        scale: es.Parameter = jnp.array(1)
        count: es.State = 0

    for wrt, name in ((es.trainable, "scale"), (es.State, "scale")):
        message = rf"1 parameters.*`{name}` is `i32\[\]`.*trained: .*astype"
        with pytest.raises(ValueError, match=message):
            es.Optimizer(optax.sgd(0.1), wrt).init(Table())
    with pytest.raises(ValueError, match=r"0 parameters.*The array` is `i32\[3\]`"):
        es.grad(lambda x: 1.0, wrt=lambda part: True)(jnp.arange(3))


class Quantized(es.Module):
    scale: es.Parameter
    codes: es.Parameter = dataclasses.field(
        default_factory=lambda: jnp.arange(3, dtype=jnp.int8)
    )
    gain: es.Parameter = 1.0


def test_an_integer_beside_trained_parameters():
    optimizer, message = es.Optimizer(optax.sgd(0.1)), r"`scale`.*`i32\[\]`.*es\.Buffer"
    with pytest.raises(ValueError, match=message):
        optimizer.init(Quantized(jnp.array(1)))
    new, _ = optimizer.init(Quantized(1.0)).update(Quantized(1.0), Quantized(1.0))
    assert_equal(new.codes, Quantized(1.0).codes)
    # Frozen, or not among what the filter is about.
    optimizer.init([Quantized(jnp.array(1)).freeze(), Quantized(1.0)])
    gain = es.path_matches("gain")
    es.Optimizer(optax.sgd(0.1), wrt=gain).init(Quantized(jnp.array(1)))


NAMED = es.path_matches("norm.*")
NORM = es.under(lambda net: net.norm)


@pytest.mark.parametrize(
    ("wrt", "cure"),
    [
        (NAMED, r"es\.all_of\(es\.trainable, es\.path_matches\('norm\.\*'\)\)"),
        (NORM, r"es\.all_of\(es\.trainable, es\.under"),
        (es.not_(es.inside(eqx.nn.Linear)), r"es\.all_of\(es\.trainable, es\.not_"),
        (lambda part: "norm" in part.name, r"es\.all_of\(es\.trainable"),
        (es.TreePart, r"wrt=es\.trainable`"),
    ],
)
def test_statistics_are_trained_only_if_their_kind_is_named(net, wrt, cure):
    message = rf"selects `norm\.mean`, which is `es\.BatchStat`.*{cure}.*any_of"
    with pytest.raises(ValueError, match=message):
        es.Optimizer(optax.sgd(1.0), wrt).init(net)
    for kind in (es.BatchStat, es.State):
        wrt = es.any_of(es.trainable, kind)
        ones = jax.tree.map(jnp.ones_like, es.filter(net, wrt))
        new, _ = es.Optimizer(optax.sgd(1.0), wrt).init(net).update(ones, net)
        assert_equal(new.norm.mean, net.norm.mean - 1)


@pytest.mark.parametrize(
    "wrt", [es.Parameter, es.under(lambda net: (net.first, net.second))]
)
def test_frozen_arrays_are_not_trained_beside_others(net, wrt):
    optimizer = es.Optimizer(optax.sgd(0.1), wrt)
    message = r"selects `first\.\w+`, which is frozen, and `\w+\.weight`, which is not"
    with pytest.raises(ValueError, match=message):
        optimizer.init(es.freeze(net, lambda net: net.first))
    optimizer.init(net)
    optimizer.init(es.freeze(net))  # of a frozen model, `wrt` names what to train


# --- Modes may differ, structures may not -------------------------------------------


@standard
@pytest.mark.parametrize(
    ("at_init", "of_grads", "at_update"),
    [(es.train, es.eval, es.eval), (es.eval, es.train, es.train)],
)
def test_train_and_eval_may_differ(net, x, at_init, of_grads, at_update):
    tx = optax.adam(0.1)
    _, grads = gradients(net, x)
    expected, after = es.Optimizer(tx).init(net).update(grads, net)
    new, optimizer = (
        es.Optimizer(tx).init(at_init(net)).update(of_grads(grads), at_update(net))
    )
    assert_equal(new, at_update(expected))
    assert_equal(jtu.tree_leaves(optimizer), jtu.tree_leaves(after))


class Stack(es.Module):
    layers: list
    scale: es.Parameter


def stack(sizes, **options):
    layers = [
        eqx.nn.Linear(m, n, key=jr.key(0), **options)
        for m, n in zip(sizes, sizes[1:], strict=False)
    ]
    return Stack(layers, jnp.ones(()))


@pytest.mark.parametrize(
    ("other", "path"),
    [
        (lambda: stack([2, 2, 2, 2]), r"layers"),
        (lambda: stack([2, 2, 2], use_bias=False), r"layers\[0\]\.(bias|use_bias)"),
        (lambda: stack([2, 2, 2]).replace(scale=None), r"scale"),
        (lambda: {"a": jnp.ones(2)}, "the root|Stack"),
    ],
    ids=["more", "no bias", "hole", "dict"],
)
@pytest.mark.parametrize("as_gradients", [False, True])
def test_a_different_structure_is_an_error_that_names_the_path(
    other, path, as_gradients
):
    model = stack([2, 2, 2])
    optimizer = es.Optimizer(optax.sgd(0.1, momentum=0.5)).init(model)
    grads = es.filter(model, es.trainable)
    wrong = other()
    wrong_grads = es.filter(wrong, es.trainable)
    with pytest.raises(ValueError, match=path):
        optimizer.update(wrong_grads, model if as_gradients else wrong)
    optimizer.update(grads, model)


def test_a_model_without_its_parameters_is_an_error_that_says_so():
    model = stack([2, 2, 2])
    optimizer = es.Optimizer(optax.sgd(0.1)).init(model)
    grads = es.filter(model, es.trainable)
    message = r"`layers\[0\]\.\w+`.*got `None`.*all of its parameters.*refit"
    for filter in (es.State, es.path_matches("*weight")):
        with pytest.raises(ValueError, match=message):
            optimizer.update(grads, es.filter(model, filter))
    with pytest.raises(ValueError, match=message):
        optimizer.update(grads, model.freeze(lambda m: m.layers[0]))


def test_a_missing_gradient_is_an_error_that_names_the_path(net, x):
    optimizer = es.Optimizer(optax.sgd(0.1)).init(net)
    wrt = es.all_of(es.trainable, es.not_(es.path_matches("second.bias")))
    _, grads = gradients(net, x, wrt=wrt)
    with pytest.raises(ValueError, match=r"second\.bias"):
        optimizer.update(grads, net)


def test_a_model_in_place_of_the_gradients_counts_by_its_parameters(net):
    # Arrays outside `wrt` are ignored, so a whole model is accepted.
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    new, _ = optimizer.update(net, net)
    assert (new.first.weight == 0).all()
    assert_equal(new.calls, net.calls)


# --- Shapes that optax would broadcast ------------------------------------------------


def shapes(*shape):
    return {"w": jnp.ones(shape), "b": jnp.ones(())}


@jax.numpy_rank_promotion("allow")
@pytest.mark.parametrize("apply_updates", [True, False])
def test_per_example_gradients_are_an_error_in_most_transformations(apply_updates):
    model = {"w": jnp.ones(2)}
    optimizer = es.Optimizer(optax.sgd(0.1, 0.9)).init(model)
    grads = {"w": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match=r"update of `\['w'\]` is `f32\[3,2\]`.*mean"):
        optimizer.update(grads, model, apply_updates=apply_updates)


def test_the_error_for_a_model_that_is_one_array():
    optimizer = es.Optimizer(optax.sgd(0.1, 0.9)).init(jnp.ones(2))
    with pytest.raises(ValueError, match="the array itself has shape"):
        optimizer.update(jnp.ones(3), jnp.ones(3))
    with pytest.raises(ValueError, match="gradient of the array itself"):
        optimizer.update(jnp.ones(3), jnp.ones(2))


class Wave(es.Module):
    z: es.Parameter
    w: es.Parameter
    fixed: es.Buffer


def test_updates_of_complex_parameters_are_conjugated_and_so_is_the_extra_gradient():
    seen = []

    def update(updates, state, params=None, *, grad, **_):
        seen.append(grad)
        return jax.tree.map(jnp.negative, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    model = Wave(jnp.array([1 + 2j]), jnp.array([3.0]), jnp.ones(1))
    optimizer = es.Optimizer(tx).init(model)
    grads = eqx.tree_at(lambda m: m.fixed, model, None)
    updates, _ = optimizer.update(grads, model, apply_updates=False, grad=grads)
    assert (updates.z, updates.w) == (-1 + 2j, -3.0)
    assert (seen[0].z, seen[0].w) == (1 - 2j, 3.0)


def test_a_complex_gradient_of_a_real_parameter_is_an_error():
    model = {"w": jnp.ones(2), "z": jnp.ones(2, complex)}
    optimizer = es.Optimizer(optax.sgd(0.1, 0.9)).init(model)
    grads = {"w": jnp.ones(2), "z": jnp.ones(2, complex)}
    assert optimizer.update(grads, model)[0]["z"].dtype == jnp.complex64
    with pytest.raises(
        ValueError, match=r"gradient of `\['w'\]` is `c64\[2\]`.*real loss"
    ):
        optimizer.update({**grads, "w": grads["z"]}, model)


def test_a_transformation_that_broadcasts_is_an_error_that_names_the_path():
    def update(grads, state, params):
        return jax.tree.map(lambda g: jnp.stack([g, g]), grads), state

    tx = optax.GradientTransformation(lambda params: (), update)
    model = shapes(2)
    with pytest.raises(ValueError, match=r"update of `\['b'\]` is `f32\[2\]`"):
        es.Optimizer(tx).init(model).update(model, model)


def test_a_state_of_all_lanes_or_shards_can_be_updated_per_lane_or_shard():
    # Inside, state and parameters both have different shapes than at `init`.
    tx = optax.sgd(0.1, momentum=0.9)
    model = {"w": jnp.arange(6.0).reshape(2, 3)}
    optimizer = es.Optimizer(tx).init(model)
    expected = optimizer.update(model, model)
    step = lambda optimizer, model: optimizer.update(model, model)  # noqa: E731
    assert eqx.tree_equal(jax.vmap(step)(optimizer, model), expected)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    assert eqx.tree_equal(sharded(optimizer, model), expected)


# --- Weak types and misuse ----------------------------------------------------------


@standard
def test_weak_types_and_numbers_in_the_state_become_strong():
    tx = optax.GradientTransformation(
        lambda params: {"weak": jnp.asarray(1.0), "number": 2},
        lambda g, state, params: (g, jax.tree.map(lambda s: s * 1.0, state)),
    )
    optimizer = es.Optimizer(tx).init({"w": jnp.ones(2)})
    state = optimizer.opt_state
    assert {k: (v.dtype.name, v.weak_type) for k, v in state.items()} == {
        "weak": ("float32", False),
        "number": ("int32", False),
    }


def test_the_gradients_come_first():
    class Counted(es.Module):
        weight: es.Parameter
        count: es.State = 0

    model = Counted(2.0)
    optimizer = es.Optimizer(optax.sgd(1.0)).init(model)
    grads, model = es.grad(lambda model: model.weight**2)(model)
    message = r"(?s)the gradients contain `count`.*optimizer\.update\(grads"
    unpack = r"\(loss, model\), grads = es\.value_and_grad.*grads, model = es\.grad"
    with pytest.raises(ValueError, match=f"{message}.*{unpack}"):
        optimizer.update(model, grads)


def test_a_function_in_the_tree_of_gradients_reveals_the_wrong_order():
    mlp = eqx.nn.MLP(2, 1, 2, 1, key=jr.key(0))
    optimizer = es.Optimizer(optax.sgd(1.0)).init(mlp)
    grads, _ = es.grad(lambda model: model(jnp.ones(2)).sum())(mlp)
    with pytest.raises(ValueError, match=r"the gradients contain `activation`"):
        optimizer.update(mlp, grads)
    params = es.filter(mlp, es.Parameter)
    assert eqx.tree_equal(*(optimizer.update(grads, x)[1] for x in (mlp, params)))


@pytest.mark.parametrize("switch", [es.eval, es.freeze])
def test_a_model_may_be_switched_together_with_its_optimizer(switch):
    class Scale(es.Module):
        w: es.Parameter

    model = Scale(jnp.ones(3))
    optimizer = es.Optimizer(optax.sgd(0.1, momentum=0.9)).init(model)
    grads = es.filter(model, es.trainable)
    expected, _ = optimizer.update(grads, model)
    moved, switched = switch((model, optimizer))
    if switch is es.freeze:
        moved = es.unfreeze(moved)
    new, after = switched.update(grads, moved)
    assert jnp.array_equal(new.w, expected.w)
    assert after.update(grads, new)[0].w[0] < new.w[0]


def test_keys_that_a_filter_selects_are_not_trained():
    class Net(es.Module):
        head: eqx.nn.Sequential

    head = [eqx.nn.Linear(3, 1, key=jr.key(0)), es.nn.Dropout(0.5, key=jr.key(1))]
    net, wrt = Net(eqx.nn.Sequential(head)), es.under(lambda net: net.head)
    optimizer = es.Optimizer(optax.sgd(0.1), wrt=wrt).init(net)
    grad = es.value_and_grad(lambda net, x: jnp.sum(net.head(x)), wrt=wrt)
    (_, net), grads = grad(net, jnp.ones(3))
    new, _ = optimizer.update(grads, net)
    assert (new.head[0].bias != net.head[0].bias).all()


def test_a_transformation_may_be_an_equinox_module():
    class Descent(eqx.Module):
        rate: float

        def init(self, params):
            return ()

        def update(self, updates, state, params=None):
            return jax.tree.map(lambda g: -self.rate * g, updates), state

    model = {"w": jnp.ones(2)}
    for tx in (Descent(0.5), {...: Descent(0.5)}):
        new, _ = es.Optimizer(tx).init(model).update(model, model)
        assert (new["w"] == 0.5).all()


def test_an_optimizer_does_not_keep_the_leaves_of_a_model_alive():
    class Tokenizer: ...

    model = {"w": jnp.ones(2), "tokens": Tokenizer()}
    kept = weakref.ref(model["tokens"])
    optimizer = es.Optimizer(optax.sgd(0.1)).init(model)
    del model
    gc.collect()
    assert kept() is None
    assert optimizer.opt_state is not None


def test_something_else_than_the_model_is_an_error():
    model = eqx.nn.Linear(2, 2, key=jr.key(0))
    optimizer = es.Optimizer(optax.sgd(0.1)).init(model)
    for other in ((model, model), jnp.ones(2)):
        with pytest.raises(ValueError, match="Pass the model that `init`"):
            optimizer.update(other, other)
