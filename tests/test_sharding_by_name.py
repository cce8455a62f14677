"""`es.sharding`: which rule applies to an array, and which rules are errors."""

from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Key

import eqx_state as es


class Block(es.Module):
    up: es.Parameter[Float[Array, "mlp embed"]]
    down: Annotated[eqx.nn.Linear, es.Axes(weight="embed mlp", bias="embed")]
    mean: es.BatchStat[Float[Array, " mlp"]]
    plain: eqx.nn.Linear
    key: es.Rng

    def __init__(self, key: Key[Array, ""]):
        up, down, plain, self.key = jr.split(key, 4)
        self.up = jr.normal(up, (16, 8))
        self.down = eqx.nn.Linear(16, 8, key=down)
        self.mean = jnp.zeros(16)
        self.plain = eqx.nn.Linear(8, 8, key=plain)

    def __call__(self, x):
        hidden = jax.nn.relu(self.up @ x)
        self.mean = 0.9 * self.mean + 0.1 * jax.lax.pmean(hidden, "batch")
        return self.plain(self.down(hidden))


ABSTRACT = AbstractMesh((4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.reshape(jax.devices(), (4, 2)), ("data", "model"))


@pytest.fixture(scope="module")
def block():
    return Block(jr.key(0))


def specs(tree, rules, mesh=ABSTRACT):
    """The spec of each array, by name."""
    shardings = jax.tree.structure(tree).flatten_up_to(es.sharding(tree, mesh, rules))
    found = [s for s in shardings if s is not None]
    assert all(s.mesh == mesh for s in found)
    return {p.name: s.spec for p, s in zip(es.parts(tree), found, strict=True)}


WHOLE = dict.fromkeys(
    "up down.weight down.bias mean plain.weight plain.bias key".split(), P()
)
BY_NAME = WHOLE | {
    "up": P("model", None),
    "down.weight": P(None, "model"),
    "mean": P("model"),
}


# --- Which rule applies ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            {"mlp": ("data", "model"), "embed": None},
            {
                "up": P(("data", "model"), None),
                "down.weight": P(None, ("data", "model")),
                "down.bias": P(None),
                "mean": P(("data", "model")),
            },
        ),
        # `...` is for arrays without any of the names.
        (
            {"mlp": "model", ...: P("data"), es.Rng: P()},
            BY_NAME
            | {n: P("data") for n in ("down.bias", "plain.weight", "plain.bias")},
        ),
        # Kinds come before axis names, the most derived kind first.
        (
            {"mlp": "model", es.State: P("data"), es.Rng: P()},
            BY_NAME | {"mean": P("data")},
        ),
        # Filters come before kinds, in the order of the mapping.
        (
            {
                "mlp": "model",
                es.Parameter: P("data"),
                es.path_matches("*plain.*"): P(None),
                lambda part: part.value.ndim == 2: P("data", "model"),
            },
            {
                "up": P("data", "model"),
                "down.weight": P("data", "model"),
                "down.bias": P("data"),
                "mean": P("model"),
                "plain.weight": P(None),
                "plain.bias": P(None),
            },
        ),
    ],
    ids=["tuple", "rest", "kind", "filter"],
)
def test_rules_apply_in_order(rules, expected, block):
    assert specs(block, rules) == WHOLE | expected
    shapes = jax.eval_shape(lambda: block)
    assert specs([shapes], rules) == {
        f"[0].{name}": spec for name, spec in (WHOLE | expected).items()
    }


def test_what_is_not_an_array_has_no_sharding(mesh):
    tree = [eqx.nn.MLP(8, 8, 8, 1, key=jr.key(0)), 3, "name", None, np.zeros(4, "i4")]
    shardings = es.sharding(tree, mesh, {...: P("data")})
    assert shardings[1:4] == [None, None, None]
    assert shardings[0].activation is None
    placed = eqx.filter_shard(tree, shardings)
    assert placed[0].layers[0].weight.sharding.spec == P("data")
    assert placed[1:4] == tree[1:4]
    assert placed[4].sharding == shardings[4]


def test_a_tree_without_arrays():
    assert es.sharding([], ABSTRACT, {}) == []
    assert es.sharding((1, None), ABSTRACT, {es.Parameter: P("data")}) == (None, None)


def test_one_array(mesh):
    x = jnp.zeros((8, 2))
    assert es.sharding(x, mesh, {...: P("data")}) == NamedSharding(mesh, P("data"))
    keys = jr.split(jr.key(0), 8)
    placed = jax.device_put(keys, es.sharding(keys, mesh, {es.Rng: P("data")}))
    assert placed.addressable_shards[0].data.shape == (2,)
    assert (placed == keys).all()


# --- Creating and training ------------------------------------------------------------

RULES = {"mlp": "model", "embed": "data"}
ADAM = optax.adam(1e-2)


def make():
    model = Block(jr.key(0))
    return model, es.Optimizer(ADAM).init(model)


def test_a_model_is_created_in_shards(mesh):
    shardings = es.sharding(jax.eval_shape(make), mesh, RULES)
    model, optimizer = jax.jit(make, out_shardings=shardings)()
    mu = optimizer.opt_state[0].mu
    for made in model, mu:
        assert made.up.sharding == NamedSharding(mesh, P("model", "data"))
        assert {s.data.shape for s in made.up.addressable_shards} == {(8, 2)}
        assert {s.data.shape for s in made.down.weight.addressable_shards} == {(2, 8)}
    assert mu.plain.weight.sharding.is_fully_replicated
    np.testing.assert_allclose(model.up, make()[0].up, rtol=1e-6)


BY_PATH = {es.path_matches("*down.weight"): P("data"), es.Parameter: P("model")}


@pytest.mark.parametrize(("rules", "with_model"), [(RULES, False), (BY_PATH, True)])
def test_moments_and_averages_are_sharded_like_their_parameters(rules, with_model):
    model, optimizer = jax.eval_shape(make)
    ema = jax.eval_shape(lambda: es.Ema(0.9).init(Block(jr.key(0))))
    followers = {"optimizer": optimizer, "ema": ema}
    tree = followers | ({"model": model} if with_model else {})
    of_model, of_tree = specs(model, rules), specs(tree, rules)
    for part in es.parts(es.filter(model, es.Parameter)):
        copies = [f"['ema'].means.{part.name}"]
        copies += [f"['optimizer'].opt_state[0].{m}.{part.name}" for m in ("mu", "nu")]
        for name in copies:
            assert of_tree[name] == of_model[part.name]
    assert of_tree["['optimizer'].opt_state[0].count"] == P()


def test_a_rule_for_the_moments_themselves():
    tree = jax.eval_shape(make)
    found = specs(tree, {"mlp": "model", es.OptState: P()})
    assert found["[0].up"] == P("model", None)
    assert found["[1].opt_state[0].mu.up"] == P()
    rules = {es.path_matches("*.count"): P(), es.OptState: P("data")}
    found = specs(tree, rules)
    assert found["[0].up"] == found["[1].opt_state[0].count"] == P()
    assert found["[1].opt_state[0].mu.up"] == P("data")


def test_an_optimizer_without_moments_has_the_names_of_its_parameters():
    block = Block(jr.key(0))
    plain = es.Optimizer(optax.sgd(optax.constant_schedule(0.1))).init(block)
    assert set(specs(plain, RULES).values()) == {P()}  # the spec of a count
    # Only the biases have moments, and their axes are not `mlp`.
    groups = {es.path_matches("*.bias"): ADAM, ...: optax.sgd(0.1)}
    of_groups = es.Optimizer(groups).init(block)
    assert set(specs(of_groups, {"mlp": "model"}).values()) == {P()}
    with pytest.raises(ValueError, match=r"`mpl`. The names are: `mlp` \(`up`\)"):
        es.sharding(plain, ABSTRACT, {"mpl": "model"})
    with pytest.raises(ValueError, match=r"an axis `mlp`. The names are: none"):
        es.sharding(es.Optimizer(optax.sgd(0.1)), ABSTRACT, RULES)  # before `init`


def test_moments_unlike_their_parameters_are_not_split_like_them():
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    optimizer = es.Optimizer(tx).init(Block(jr.key(0)))
    weights = {es.path_matches("down.*"): P("data")}
    for rules in RULES, weights, {es.Parameter: P("data")}:
        found = specs(optimizer, rules)
        rows = {n: s for n, s in found.items() if ".v_row." in n or ".v_col." in n}
        assert set(rows.values()) == {P()}
        assert [s for n, s in found.items() if n.endswith(".v.down.bias")] == [
            P("data")
        ]


# --- Meshes with `Explicit` axes ------------------------------------------------------


@pytest.fixture(scope="module")
def explicit():
    return jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)


def test_an_explicit_mesh(explicit):
    shardings = es.sharding(jax.eval_shape(make), explicit, RULES)
    made, _ = jax.jit(make, out_shardings=shardings)()
    put, _ = jax.device_put(make(), shardings)
    for model in made, put:
        assert jax.typeof(model.up).sharding.spec == P("model", "data")
        assert jax.typeof(model.plain.weight).sharding.spec == P(None, None)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="JAX < 0.10 cannot draw from keys whose type says how they are split",
)
def test_dropout_of_activations_that_are_split_along_both_axes(explicit):
    dropout = es.nn.Dropout(0.5, key=jr.key(0))
    xs = jnp.ones((8, 4))
    expected, _ = es.mutable(es.vmap(dropout))(xs)
    split = jax.device_put(xs, NamedSharding(explicit, P("data", "model")))
    ys, _ = es.jit(es.mutable(es.vmap(dropout)))(split)
    assert ys.sharding.spec == P("data", "model")
    assert (np.asarray(ys) == expected).all()


def test_unconstrained_axes_need_a_mesh_whose_axes_are_auto(block, explicit, mesh):
    rules = {es.path_matches("up"): P(P.UNCONSTRAINED, "data")}
    assert specs(block, rules, mesh)["up"] == P(P.UNCONSTRAINED, "data")
    alone = specs(jnp.ones(3), {...: P(P.UNCONSTRAINED)}, mesh)
    assert alone == {"": P(P.UNCONSTRAINED)}
    with pytest.raises(ValueError, match=r"`up`, .*UNCONSTRAINED.*Explicit"):
        es.sharding(block, explicit, rules | {"mlp": "model"})


# --- Errors ---------------------------------------------------------------------------

UP = r"`up`, of shape \(16, 8\) and with axes `mlp embed`, cannot be split"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"mpl": "model"},
            r"no array has an axis `mpl`. The names are: .*`mlp` \(`up`\)",
        ),
        ({es.path_matches("pu"): P()}, r"path_matches\('pu'\)` matches no array"),
        # A mesh axis that does not exist.
        ({"mlp": "modle"}, rf"{UP}.*modle.*not found in mesh: \('data', 'model'\)"),
        ({es.OptState: P("x")}, r"\('x',?\) is not found in mesh"),
        # One mesh axis, twice in a spec.
        ({"mlp": "model", "embed": "model"}, rf"{UP}.*duplicate entries for `model`"),
        # More entries than the array has axes.
        ({es.Parameter: P("data", None)}, r"`down.bias`, .* \(8,\).* has 2 entries"),
        ({...: P("data")}, r"`key`, of shape \(\) .* has 1 entries"),
    ],
    ids=str,
)
def test_invalid_rules_are_errors(rules, message, block, mesh):
    for each in ABSTRACT, mesh:
        with pytest.raises(ValueError, match=message):
            es.sharding(block, each, rules)


def test_invalid_rules_are_errors_in_a_tree_without_names():
    with pytest.raises(ValueError, match=r"`mlp`. The names are: none. They come"):
        es.sharding([jnp.zeros(2)], ABSTRACT, {"mlp": "model"})
    with pytest.raises(ValueError, match=r"`es.sharding`: the array, of shape"):
        es.sharding(jnp.zeros(()), ABSTRACT, {...: P("data")})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mlp": "model"}, "array axis 0 is partitioned 4 times, .* size is 6"),
        ({es.path_matches("up"): P(None, "data")}, "axis 1 is partitioned 3 times"),
    ],
    ids=["name", "spec"],
)
def test_an_axis_that_cannot_be_split_into_equal_parts(rules, message, block):
    mesh = AbstractMesh((3, 4), ("data", "model"))
    uneven = block.replace(up=block.up[:6], down=None, mean=block.mean[:12])
    match = rf"`up`, of shape \(6, 8\) and with axes `mlp embed`.*{message}"
    with pytest.raises(ValueError, match=match):
        es.sharding(uneven, mesh, rules)


def test_two_axes_of_the_same_name():
    class Square(es.Module):
        weight: es.Parameter[Float[Array, "embed embed"]]

    square = Square(jnp.zeros((8, 8)))
    with pytest.raises(ValueError, match=r"`weight`, .*`model`.* add a rule for it"):
        es.sharding(square, ABSTRACT, {"embed": "model"})
    by_path = {es.path_matches("weight"): P("model", None), "embed": "model"}
    assert specs(square, by_path) == {"weight": P("model", None)}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mlp": P("model")}, r"the rule `'mlp': P.*\(.*The name of an axis maps to"),
        (
            {es.Parameter: "model"},
            r"`es.Parameter: 'model'`.*a `jax.sharding.PartitionSpec",
        ),
        ({...: ("model",)}, r"the rule `\.\.\.: \('model',\)`"),
        ({0: P()}, "`0` is not a filter"),
        ([("mlp", "model")], r"`es.sharding`: rules are a mapping"),
    ],
    ids=str,
)
def test_rules_of_the_wrong_type(rules, message, block):
    with pytest.raises(TypeError, match=message):
        es.sharding(block, ABSTRACT, rules)


def test_an_annotation_that_does_not_fit_is_an_error_here_too(block):
    with pytest.raises(ValueError, match=r"`Block.up` is annotated with more axes"):
        es.sharding(block.replace(up=jnp.zeros(4)), ABSTRACT, {"mlp": "model"})


def test_a_model_before_init_has_no_shardings():
    class Late(es.Module):
        up: Annotated[eqx.nn.Linear, es.Axes(weight="mlp embed")]

    late = Late(es.lazy(eqx.nn.Linear, 2, 8))
    with pytest.raises(es.NotInitializedError, match="`up`"):
        es.sharding(late, ABSTRACT, {"mlp": "model"})
    abstract = jax.eval_shape(late.init, jr.key(0))
    places = es.sharding(abstract, ABSTRACT, {"mlp": "model"})
    assert places.up.weight.spec == P("model", None)
