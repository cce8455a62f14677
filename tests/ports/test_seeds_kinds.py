"""Seed 001 (Treex): declaring kinds, initializing, selecting. The programs are in
`test_seeds_treex.py`. A test is named after its row in PEERS.md.
"""

import itertools
from typing import cast, Dict, List  # noqa: UP035 (the seed's own spelling)

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_state as es


class Linear(es.Module):
    w: es.Parameter
    b: es.Parameter

    def __init__(self, din, dout):
        self.w = es.Initializer(lambda key: jr.uniform(key, (din, dout)))
        self.b = jnp.zeros((dout,))

    def __call__(self, x):
        return jnp.dot(x, self.w) + self.b


class MLP(es.Module):
    layers: List[eqx.nn.Linear]  # noqa: UP006

    def __init__(self, features):
        self.layers = [
            es.lazy(eqx.nn.Linear, din, dout)
            for din, dout in itertools.pairwise(features)
        ]

    def __call__(self, x):
        for linear in self.layers[:-1]:
            x = jax.nn.relu(linear(x))
        return self.layers[-1](x)


class CountedLinear(es.Module):
    """A model whose leaves are not all parameters."""

    linear: Linear
    calls: es.State

    def __init__(self, din, dout):
        self.linear = Linear(din, dout)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return jax.vmap(self.linear)(x)


class Stats(es.Module):
    a: es.Parameter = np.array([1])
    b: es.BatchStat = np.array([2])


class Mixed(es.Module):
    w: es.Parameter
    table: jax.Array
    name: str
    size: int = eqx.field(static=True)


# --- B, C: declaring ----------------------------------------------------------------


def test_B1_kind_by_annotation():
    model = Linear(3, 5).init(42)
    assert {part.name: part.kind for part in es.parts(model)} == {
        "w": es.Parameter,
        "b": es.Parameter,
    }


def test_B8_other_annotations_have_no_kind():
    mixed = Mixed(jnp.ones(2), jnp.arange(3), "mixed", 3)
    assert [(part.name, part.kind) for part in es.parts(mixed)] == [
        ("w", es.Parameter),
        ("table", None),
    ]
    assert repr(mixed.filter()) == "Mixed(w=f32[2], table=None, name=None, size=3)"


@pytest.mark.parametrize(
    ("kind", "parent"),
    [
        (es.Parameter, es.TreePart),
        (es.State, es.TreePart),
        (es.Rng, es.State),
        (es.BatchStat, es.State),
    ],
)
def test_B10_hierarchy(kind, parent):
    assert kind.__base__ is parent


def test_B12_parent_kind_is_the_union():
    class Noisy(es.Module):
        w: es.Parameter
        rng: es.Rng
        mean: es.BatchStat

    model = Noisy(jnp.ones(2), jr.key(0), jnp.zeros(2))
    rngs, stats = model.filter(es.Rng), model.filter(es.BatchStat)
    assert eqx.tree_equal(model.filter(es.State), eqx.combine(rngs, stats))


def test_B16_state_objects_which_are_no_layers():
    class Momentum(es.Module):
        trace: es.OptState
        decay: float = eqx.field(static=True, default=0.9)

        def step(self, grads):
            self.trace = jax.tree.map(
                lambda t, g: self.decay * t + g, self.trace, grads
            )

    momentum = Momentum({"w": jnp.ones(2)})
    _, momentum = es.mutable(momentum.step)({"w": jnp.ones(2)})
    assert jnp.allclose(momentum.trace["w"], 1.9)
    assert [part.kind for part in es.parts(momentum)] == [es.OptState]


def test_C1_kinds_through_generics():
    class Model(es.Module):
        weights: List[es.Parameter]  # noqa: UP006
        stats: Dict[str, es.BatchStat]  # noqa: UP006
        heads: Dict[str, Linear]  # noqa: UP006

    heads = {"a": Linear(1, 2).init(0)}
    model = Model([jnp.ones(1), jnp.ones(2)], {"mean": jnp.zeros(3)}, heads)
    shapes = [leaf.shape for leaf in jax.tree.leaves(model.filter(es.Parameter))]
    assert shapes == [(1,), (2,), (1, 2), (2,)]
    (mean,) = jax.tree.leaves(model.filter(es.BatchStat))
    assert mean.shape == (3,)


def test_C2_lists_of_submodules():
    mlp = MLP([3, 5, 2])
    assert not mlp.initialized
    mlp = mlp.init(42)
    assert mlp.initialized
    assert mlp(jnp.ones(3)).shape == (2,)
    assert [part.name for part in es.parts(mlp)] == [
        "layers[0].weight",
        "layers[0].bias",
        "layers[1].weight",
        "layers[1].bias",
    ]
    assert all(part.kind is es.Parameter for part in es.parts(mlp))


def test_C7_layers_have_the_signature_and_numerics_of_equinox():
    # where the seed's `tx.nn` wraps Flax
    xs = jr.normal(jr.key(0), (8, 3))
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    layer = es.nn.BatchNorm(3, "batch")
    batched = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    for _ in range(2):
        expected, state = batched(xs, state)
        ys, layer = es.mutable(es.vmap(layer, axis_name="batch"))(xs)
        assert jnp.allclose(ys, expected, atol=1e-5)


def test_C8_pretrained_submodule_in_a_new_module():
    class Classifier(es.Module):
        backbone: MLP
        head: Linear

        def __call__(self, x):
            return self.head(self.backbone(x))

    backbone = MLP([3, 5, 2]).init(1)
    model = Classifier(backbone, Linear(2, 4)).init(42)
    assert eqx.tree_equal(model.backbone, backbone)
    assert len(jax.tree.leaves(model.filter(es.Parameter))) == 6
    assert model(jnp.ones(3)).shape == (4,)


def test_S1_a_kind_hidden_behind_cast_is_still_a_kind():
    class Cache(es.TreePart):
        pass

    Alias = cast(type[jax.Array], Cache)

    class MyModule(es.Module):
        memory: Alias

    (part,) = es.parts(MyModule(jnp.ones(1)))
    assert part.kind is Cache


# --- D, E, F: initializing and selecting --------------------------------------------


@pytest.mark.parametrize("key", [42, jr.key(42), jr.PRNGKey(42)], ids=str)
def test_D1_D2_init_takes_a_seed_or_a_key(key):
    lazy = MLP([3, 5, 2])
    model = lazy.init(key)
    assert model.initialized
    assert not lazy.initialized
    assert eqx.tree_equal(model, MLP([3, 5, 2]).init(42))
    assert not eqx.tree_equal(model, MLP([3, 5, 2]).init(43))


@pytest.mark.parametrize(
    ("kind", "text", "leaves"),
    [
        (es.Parameter, "Stats(a=i64[1](numpy), b=None)", [[1]]),
        (es.BatchStat, "Stats(a=None, b=i64[1](numpy))", [[2]]),
        (es.State, "Stats(a=None, b=i64[1](numpy))", [[2]]),
        (es.Rng, "Stats(a=None, b=None)", []),
    ],
)
def test_V3_B13_E1_E2_N1_filter_of_array_defaults(kind, text, leaves):
    part = Stats().filter(kind)
    assert type(part) is Stats
    assert repr(part) == text
    assert [leaf.tolist() for leaf in jax.tree.leaves(part)] == leaves


@pytest.mark.parametrize("kind", [es.Parameter, es.State, es.Rng, es.TreePart])
def test_E5_update_is_the_inverse_of_filter(kind):
    model = CountedLinear(3, 5).init(42)
    assert eqx.tree_equal(model.update(model.filter(kind)), model)


def test_E5_a_hole_keeps_the_old_value():
    model = Stats()
    part = jax.tree.map(lambda x: x + 10, model.filter(es.Parameter))
    new = model.update(part)
    assert (new.a.tolist(), new.b.tolist()) == ([11], [2])
    assert model.a.tolist() == [1]


def test_E6_params_first_differentiates_only_the_parameters():
    @jax.grad
    def loss_fn(params, model, x, y):
        # the seed calls a stateful model directly; here the new state is returned
        y_pred, _ = es.mutable(model.update(params))(x)
        return jnp.mean((y_pred - y) ** 2)

    model = CountedLinear(3, 5).init(42)
    params = model.filter(es.Parameter)
    grads = loss_fn(params, model, jnp.ones((2, 3)), jnp.zeros((2, 5)))
    assert grads.calls is None
    assert grads.linear.w.shape == (3, 5)
    assert model.calls == 0


def test_F1_filters_by_type_or_callable():
    model = CountedLinear(3, 5).init(42)
    scalar = model.filter(lambda part: part.value.ndim == 0)
    assert eqx.tree_equal(scalar, model.filter(es.State))
