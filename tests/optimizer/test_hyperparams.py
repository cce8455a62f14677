"""`Optimizer.hyperparams` and `Optimizer.set`: new values without a retrace."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_state as es


pytestmark = pytest.mark.usefixtures("_standard")


@pytest.fixture
def _standard():
    with jax.numpy_dtype_promotion("standard"):
        yield


MODEL = {"a": jnp.ones(2), "b": jnp.ones(2)}
GRADS = {"a": jnp.ones(2), "b": jnp.ones(2)}
A = es.path_matches("*a*")


def sgd(rate=0.5, **options):
    return optax.inject_hyperparams(optax.sgd, **options)(learning_rate=rate)


def clip(norm=1.0):
    return optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=norm)


# Transformations that wrap `inject_hyperparams`, by name.
WRAPPED = {
    "chain": optax.chain(optax.clip(9.0), optax.chain(sgd(), optax.identity())),
    "multi_steps": optax.MultiSteps(sgd(), 1),
    "partition": optax.transforms.partition(
        {"x": sgd(), "y": optax.sgd(0.5)}, {"a": "x", "b": "y"}
    ),
}


@pytest.mark.parametrize("tx", WRAPPED.values(), ids=WRAPPED)
def test_hyperparams_are_found_and_set_inside_every_wrapper(tx):
    optimizer = es.Optimizer(tx).init(MODEL)
    assert {k: float(v) for k, v in optimizer.hyperparams.items()} == {
        "learning_rate": 0.5
    }
    new = optimizer.set(learning_rate=0)
    assert new.hyperparams["learning_rate"] == 0.0
    assert jtu.tree_structure(new) == jtu.tree_structure(optimizer)
    assert types(new) == types(optimizer)
    assert (new.update(GRADS, MODEL)[0]["a"] == MODEL["a"]).all()
    assert (optimizer.update(GRADS, MODEL)[0]["a"] != MODEL["a"]).all()


def types(tree):
    return [(x.shape, x.dtype, x.weak_type) for x in jtu.tree_leaves(tree)]


def test_several_hyperparams_and_nested_ones():
    inner = optax.inject_hyperparams(optax.adam, static_args=("b1", "b2", "eps"))(0.1)
    tx = optax.chain(clip(2.0), inner)
    optimizer = es.Optimizer(tx).init(MODEL)
    names = ["max_norm", "learning_rate", "eps_root"]
    assert optimizer.hyperparams.keys() == {*names}
    new = optimizer.set(max_norm=3, learning_rate=jnp.array(0.2))
    values = [float(new.hyperparams[name]) for name in names]
    assert values == pytest.approx([3.0, 0.2, 0.0])

    def scaled(factor):
        return optax.chain(optax.scale(factor), sgd(0.3))

    nested = es.Optimizer(optax.inject_hyperparams(scaled)(factor=2.0)).init(MODEL)
    assert list(nested.hyperparams) == ["factor", "learning_rate"]
    new = nested.set(learning_rate=1.0, factor=3.0)
    assert jnp.allclose(new.update(GRADS, MODEL)[0]["a"], 1.0 - 3.0)


def test_hyperparams_cannot_be_written():
    found = es.Optimizer(sgd(0.5)).init(MODEL).hyperparams
    for write in (
        lambda: found.__setitem__("learning_rate", 0.2),
        lambda: found.__delitem__("learning_rate"),
        lambda: found.update(learning_rate=0.2),
        lambda: found.__ior__({"learning_rate": 0.2}),
        found.clear,
    ):
        with pytest.raises(TypeError, match=r"= optimizer\.set\(learning_rate"):
            write()
    # It is a pytree, as a dict is, and its copies can be written.
    assert jax.tree.map(float, found) == {"learning_rate": 0.5}
    assert jtu.keystr(jtu.tree_leaves_with_path(found)[0][0]) == "['learning_rate']"
    for copied in (copy.copy(found), pickle.loads(pickle.dumps(found)), found | {}):
        assert type(copied) is dict
        assert copied == found


def test_set_never_retraces():
    @es.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model, optimizer):
        return optimizer.update(GRADS, model)

    optimizer = es.Optimizer({A: sgd(), ...: optax.MultiSteps(sgd(0.25), 1)}).init(
        MODEL
    )
    model, optimizer = step(MODEL, optimizer)
    assert (model["a"][0], model["b"][0]) == (0.5, 0.75)
    for value in (1, 1.0, np.float64(1), np.array(1), jnp.array(1), jnp.bfloat16(1)):
        optimizer = optimizer.set(learning_rate=value)
        assert not any(x.committed for x in optimizer.hyperparams.values())
        model, optimizer = step(MODEL, optimizer)
        assert (model["a"] == 0).all()
        assert (model["b"] == 0).all()
    model, _ = step(MODEL, optimizer.set(group=A, learning_rate=0.25))
    assert (model["a"][0], model["b"][0]) == (0.75, 0.0)


def test_set_inside_jit():
    @es.jit
    def step(optimizer, rate):
        return optimizer.set(learning_rate=rate).update(GRADS, MODEL)

    model, optimizer = step(es.Optimizer(sgd()).init(MODEL), jnp.array(0.25))
    assert (model["a"] == 0.75).all()
    assert optimizer.hyperparams["learning_rate"] == 0.25


def test_set_does_not_change_the_sharding():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, P())
    optimizer = jax.device_put(es.Optimizer(sgd()).init(MODEL), place)
    new = optimizer.set(learning_rate=0.1)
    assert new.hyperparams["learning_rate"].sharding == place


def test_in_a_stack_a_number_is_for_all():
    stack = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}
    optimizer = jax.vmap(es.Optimizer(sgd()).init)(stack)
    assert optimizer.set(learning_rate=0.1).hyperparams["learning_rate"].shape == (3,)
    rates = jnp.arange(3.0)
    new = optimizer.set(learning_rate=rates)
    assert (new.hyperparams["learning_rate"] == rates).all()
    with pytest.raises(ValueError, match=r"`learning_rate` is `f32\[3\]`.*f32\[2\]"):
        optimizer.set(learning_rate=jnp.ones(2))


def test_set_does_not_change_the_dtype():
    params = {"a": jnp.ones(2, jnp.bfloat16)}
    half = es.Optimizer(sgd()).init(params)
    assert half.set(learning_rate=1e-3).hyperparams["learning_rate"].dtype == "bfloat16"
    full = es.Optimizer(sgd(hyperparam_dtype=jnp.float32)).init(params)
    assert full.set(learning_rate=1e-3).hyperparams["learning_rate"] == np.float32(1e-3)
    shapes = eqx.filter_eval_shape(lambda: full)
    assert shapes.set(learning_rate=1.0).hyperparams["learning_rate"] == 1.0


# --- Groups ---------------------------------------------------------------------------


def test_with_groups_the_keys_are_group_and_name():
    optimizer = es.Optimizer({A: sgd(0.1), ...: sgd(0.2)}).init(MODEL)
    expected = {(A, "learning_rate"): 0.1, (..., "learning_rate"): 0.2}
    assert {k: float(v) for k, v in optimizer.hyperparams.items()} == pytest.approx(
        expected
    )
    both = optimizer.set(learning_rate=0.3).hyperparams
    assert {float(x) for x in both.values()} == {np.float32(0.3)}
    one = optimizer.set(group=..., learning_rate=0.3).hyperparams
    assert one[A, "learning_rate"] == np.float32(0.1)
    assert one[..., "learning_rate"] == np.float32(0.3)


def test_equal_names_in_one_group_are_listed_with_their_paths():
    tx = optax.transforms.partition(
        {"x": sgd(0.1), "y": sgd(0.2)}, {"a": "x", "b": "y"}
    )
    optimizer = es.Optimizer({...: tx}).init(MODEL)
    (x, name), (y, _) = optimizer.hyperparams
    assert name == "learning_rate"
    assert "['x']" in x
    one = optimizer.set(group=y, learning_rate=0.5).hyperparams
    assert [float(value) for value in one.values()] == pytest.approx([0.1, 0.5])
    both = optimizer.set(group=..., learning_rate=0.5).hyperparams
    assert [float(value) for value in both.values()] == [0.5, 0.5]


def test_equal_names_in_a_chain_are_listed_with_their_paths():
    optimizer = es.Optimizer(optax.chain(sgd(0.1), sgd(0.2))).init(MODEL)
    places = [("[0]", "learning_rate"), ("[1]", "learning_rate")]
    assert list(optimizer.hyperparams) == places
    one = optimizer.set(group="[1]", learning_rate=0.5).hyperparams
    assert [float(value) for value in one.values()] == pytest.approx([0.1, 0.5])


# --- Errors ---------------------------------------------------------------------------


def test_an_unknown_name_is_an_error_that_lists_the_names():
    optimizer = es.Optimizer({A: clip(), ...: sgd()}).init(MODEL)
    names = (
        r"`\(es\.path_matches\('\*a\*'\), 'max_norm'\)`, `\(\.\.\., 'learning_rate'\)`"
    )
    with pytest.raises(ValueError, match=rf"`lr` is not a hyper.*be set: {names}\."):
        optimizer.set(lr=0.1)
    match = rf"`learning_rate` of the group `es\.State` is not a.*be set: {names}\."
    with pytest.raises(ValueError, match=match):
        optimizer.set(group=es.State, learning_rate=0.1)
    with pytest.raises(
        ValueError, match="`lr` is not a hyper.*be set: `'learning_rate'`"
    ):
        es.Optimizer(sgd()).init(MODEL).set(lr=0.1)


def test_a_value_that_is_not_injected_is_an_error_that_says_how():
    optimizer = es.Optimizer(optax.sgd(0.1)).init(MODEL)
    assert optimizer.hyperparams == {}
    with pytest.raises(ValueError, match=r"set: none.*optax\.inject_hyperparams\("):
        optimizer.set(learning_rate=0.1)


def test_a_schedule_would_overwrite_the_value():
    tx = optax.inject_hyperparams(optax.sgd)(lambda i: 0.5 / (i + 1), momentum=0.0)
    optimizer = es.Optimizer(tx).init(MODEL)
    assert optimizer.hyperparams["learning_rate"] == 0.5
    _, after = optimizer.update(GRADS, MODEL)
    _, after = after.update(GRADS, MODEL)
    assert after.hyperparams["learning_rate"] == 0.25
    with pytest.raises(ValueError, match="driven by a schedule.*be set: `'momentum'`"):
        optimizer.set(learning_rate=0.1)
    mixed = es.Optimizer({A: tx, ...: sgd()}).init(MODEL)
    with pytest.raises(ValueError, match="driven by a schedule"):
        mixed.set(learning_rate=0.1)
    assert mixed.set(group=..., learning_rate=0.1) is not mixed


def every(every, rate, on):
    return optax.sgd(on * rate * every)


EVERY = optax.inject_hyperparams(every)(every=2, rate=0.1, on=jnp.array(True))


@pytest.mark.parametrize("value", ["0.1", [0.1], 1j])
def test_a_value_is_a_number(value):
    optimizer = es.Optimizer(EVERY).init(MODEL)
    match = r"`every` is `i32\[\]`, but `.*` was given.*dtype must not change"
    with pytest.raises(ValueError, match=match):
        optimizer.set(every=value)
    with pytest.raises(ValueError, match=match):
        optimizer.set(every=2.5)
    assert optimizer.set(every=3).hyperparams["every"] == 3


@pytest.mark.parametrize("value", [1j, jr.key(0), np.array("1")])
def test_a_value_for_a_real_number_is_real(value):
    optimizer = es.Optimizer(EVERY).init(MODEL)
    match = r"`rate` is `f32\[\]`, but `.*` was given.*dtype must not change"
    with pytest.raises(ValueError, match=match):
        optimizer.set(rate=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rate", x) for x in (-(10**400), np.float64(-1e40))),
        *(("every", x) for x in (2**31, np.uint32(2**31), jnp.uint32(2**31))),
    ],
)
def test_a_value_fits_into_the_dtype(name, value):
    optimizer = es.Optimizer(EVERY).init(MODEL)
    with pytest.raises(ValueError, match=f"value of `{name}` is too large for `.32"):
        optimizer.set(**{name: value})


def test_values_at_the_limits_of_the_dtype():
    optimizer = es.Optimizer(EVERY).init(MODEL)
    for name, value in [
        *(("rate", x) for x in (np.inf, -np.inf, 3e38, True, 2**31, jnp.array(1e38))),
        *(("every", x) for x in (-(2**31), 2**31 - 1, False, np.uint8(255))),
        ("on", False),
    ]:
        new = optimizer.set(**{name: value}).hyperparams[name]
        assert new == optimizer.hyperparams[name].dtype.type(value)
    assert jnp.isnan(optimizer.set(rate=np.nan).hyperparams["rate"])
    with pytest.raises(ValueError, match=r"`on` is `bool\[\]`, but `1` was given"):
        optimizer.set(on=1)


@pytest.mark.parametrize("what", ["hyperparams", "set"])
def test_before_init(what):
    with pytest.raises(es.NotInitializedError, match=rf"`es\.Optimizer\.{what}` was"):
        getattr(es.Optimizer(sgd()), what)(learning_rate=0.1)
