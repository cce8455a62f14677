"""`es.nn.Stacked` against a Python loop over the same layers."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, reuses_keys

import eqx_state as es


pytestmark = reuses_keys  # the tests create their layers from the same keys

SIZE, DEPTH = 4, 3
KEYS = jr.split(jr.key(0), DEPTH)
XS = jr.normal(jr.key(1), (5, SIZE))


class Block(es.Module):
    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    calls: es.State = 0

    def __init__(self, key):
        a, b = jr.split(key)
        self.linear = eqx.nn.Linear(SIZE, SIZE, key=a)
        self.norm = es.nn.BatchNorm(SIZE, axis_name="batch", momentum=0.9)
        self.dropout = es.nn.Dropout(0.5, key=b)

    def __call__(self, x, scale=1.0):
        if self.training:
            self.calls = self.calls + 1
        return x + scale * self.dropout(jnp.tanh(self.norm(self.linear(x))))


class Scale(es.Module):
    """A small layer, for tests that do not depend on the arithmetic."""

    w: es.Parameter
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.w * x


POLICY = jax.checkpoint_policies.dots_saveable


def make_linear(key):
    return eqx.nn.Linear(SIZE, SIZE, key=key)


def scales(*values):
    return [Scale(v) for v in values]


def in_turn(layers, x, *args, **kwargs):
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


# --- Running the layers ---------------------------------------------------------------


def loss_of_stack(stacked, xs):
    return jnp.mean(es.vmap(stacked, axis_name="batch")(xs) ** 2)


def loss_of_list(layers, xs):
    run = es.vmap(lambda x: in_turn(layers, x), axis_name="batch")
    return jnp.mean(run(xs) ** 2)


@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": POLICY, "unroll": 2}],
)
def test_a_stack_trains_as_a_list_of_layers(options):
    layers = [Block(key) for key in KEYS]
    stacked = es.nn.Stacked(layers, **options)
    expected = es.jit(es.value_and_grad(loss_of_list))(layers, XS)
    (loss, new), grads = es.jit(es.value_and_grad(loss_of_stack))(stacked, XS)
    close(loss, expected[0][0])
    close(list(new), expected[0][1])
    close(list(grads), expected[1])
    assert new.layers.calls.tolist() == [1] * DEPTH


def test_arguments_are_given_to_each_layer():
    stacked = es.eval(es.nn.Stacked.make(Block, KEYS))
    expected = in_turn(list(stacked), XS[0], 2.0)
    close(stacked(XS[0], 2.0), expected)
    close(stacked(XS[0], scale=2.0), expected)


def test_a_carry_may_be_a_pytree_or_a_number():
    class Pair(eqx.Module):
        w: jax.Array

        def __call__(self, pair):
            return {"a": pair["a"] * self.w, "b": pair["b"] + pair["a"]}

    stacked = es.nn.Stacked([Pair(jnp.array(2.0)), Pair(jnp.array(3.0))])
    out = stacked({"a": jnp.array(1.0), "b": np.float32(0)})
    assert (out["a"], out["b"]) == (6.0, 3.0)
    y, new = es.mutable(es.nn.Stacked(scales(2.0, 3.0)))(1)
    assert y == 6.0
    assert new.layers.calls.tolist() == [1, 1]


def test_functions_are_layers_too():
    assert es.nn.Stacked([jnp.tanh] * 2)(0.5) == jnp.tanh(jnp.tanh(0.5))


# --- Keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", [jr.key(3), jr.PRNGKey(3)])
def test_a_key_is_split_among_the_layers_as_in_a_sequential(key):
    class Noise(eqx.Module):
        scale: jax.Array

        def __call__(self, x, *, key=None):
            return x if key is None else x + self.scale * jr.normal(key)

    layers = [Noise(jnp.array(s)) for s in (1.0, 2.0)]
    stacked = es.nn.Stacked(layers)
    x = jnp.array(0.0)
    keys = jr.split(jr.clone(key), 2)
    assert stacked(x) == stacked(x, key=None) == 0.0
    expected = layers[1](layers[0](x, key=keys[0]), key=keys[1])
    close(stacked(x, key=key), expected)


def test_a_key_is_kept_from_layers_that_do_not_take_one():
    stacked = es.nn.Stacked(scales(2.0, 3.0))
    model = eqx.nn.Sequential([stacked, eqx.nn.Dropout(0.5, inference=True)])
    y, new = es.mutable(model)(jnp.array(1.0), key=jr.key(0))
    assert y == 6.0
    assert new[0].layers.calls.tolist() == [1, 1]


def test_each_layer_draws_from_its_own_key():
    stacked = es.nn.Stacked.make(lambda key: es.nn.Dropout(0.5, key=key), KEYS)
    x = jnp.ones(8)
    y, new = es.mutable(stacked)(x)
    close((y, list(new)), es.mutable(in_turn)(list(stacked), x))
    assert es.reseed(stacked, 1).layers.rng[0] != es.reseed(stacked, 1).layers.rng[1]


def test_reading_a_key_does_not_use_it_up():
    keys = jr.split(jr.key(5), 2)
    stacked = es.nn.Stacked.make(lambda key: es.nn.Dropout(0.5, key=key), keys)
    for look in (list, es.state_dict, lambda s: es.mask(s, lambda p: p.value is None)):
        before = jax.config.jax_debug_key_reuse
        jax.config.update("jax_debug_key_reuse", True)
        try:
            look(stacked)
            look(stacked)
            stacked = es.load_state_dict(stacked, es.state_dict(stacked))
            _, stacked = es.mutable(stacked)(jnp.ones(3))
        finally:
            jax.config.update("jax_debug_key_reuse", before)


# --- A sequence -----------------------------------------------------------------------


def test_a_stack_is_a_sequence_of_its_layers():
    layers = scales(1.0, 2.0, 3.0)
    stacked = es.nn.Stacked(layers, checkpoint=True)
    assert len(stacked) == 3
    assert eqx.tree_equal(list(stacked), layers)
    for i in (0, 2, -1, -3, np.int64(1)):
        assert eqx.tree_equal(stacked[i], layers[i])
    for s in (slice(1, None), slice(0, 1), slice(None, None, -1), slice(-2, 9)):
        part = stacked[s]
        assert eqx.tree_equal(part, es.nn.Stacked(layers[s], checkpoint=True))
    nothing = stacked[3:]
    assert len(nothing) == 0
    assert list(nothing) == []
    assert es.mutable(nothing)(2.0)[0] == 2.0


def test_an_index_out_of_range():
    with pytest.raises(IndexError, match="out of range"):
        es.nn.Stacked(scales(1.0, 2.0, 3.0))[3]


def test_numpy_arrays_stay_numpy_arrays():
    class Table(eqx.Module):
        table: np.ndarray
        number: np.ndarray

    layers = [Table(np.arange(i, i + 2.0), np.array(i)) for i in range(2)]
    stacked = es.nn.Stacked(layers)
    assert isinstance(stacked.layers.table, np.ndarray)
    assert eqx.tree_equal(list(stacked), layers)


def test_abstract_layers_make_an_abstract_stack():
    layer = eqx.filter_eval_shape(make_linear, KEYS[0])
    stacked = es.nn.Stacked([layer] * DEPTH)
    expected = eqx.filter_eval_shape(es.nn.Stacked.make, make_linear, KEYS)
    assert eqx.tree_equal(stacked, expected)
    assert eqx.tree_equal(stacked[0], layer)
    assert stacked[1:].layers.weight.shape == (2, SIZE, SIZE)


def test_abstract_layers_keep_the_sharding_of_their_axes():
    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
    stacked = eqx.filter_eval_shape(es.nn.Stacked.make, make_linear, KEYS)
    place = jax.sharding.NamedSharding(mesh, jax.P(None, "a", "b"))
    weight = jax.ShapeDtypeStruct((DEPTH, SIZE, SIZE), jnp.float32, sharding=place)
    stacked = eqx.tree_at(lambda s: s.layers.weight, stacked, weight)
    assert stacked[0].weight.sharding.spec == jax.P("a", "b")
    assert stacked[1:].layers.weight.sharding.spec == jax.P(None, "a", "b")
    assert stacked[0].bias.sharding is None


def test_a_stack_has_the_leaves_of_its_layers():
    stack = es.nn.Stacked(scales(1.0, 2.0), checkpoint=POLICY, unroll=2)
    leaves, treedef = jax.tree.flatten(stack)
    assert [*map(id, leaves)] == [*map(id, jax.tree.leaves(stack.layers))]
    assert hash(treedef) == hash(jax.tree.structure(stack.eval().train()))


# --- Containers -----------------------------------------------------------------------


def test_a_stack_of_stacks():
    make = lambda key: es.nn.Stacked.make(Scale, jr.uniform(key, (2,)))  # noqa: E731
    stacked = es.nn.Stacked.make(make, KEYS)
    assert stacked.layers.layers.w.shape == (DEPTH, 2)
    assert eqx.tree_equal(stacked, es.nn.Stacked([make(key) for key in KEYS]))
    y, new = es.mutable(stacked)(2.0)
    close(y, 2.0 * jnp.prod(stacked.layers.layers.w))
    assert new.layers.layers.calls.tolist() == [[1, 1]] * DEPTH
    assert eqx.tree_equal(stacked[1][0], Scale(stacked.layers.layers.w[1, 0]))


def test_an_ensemble_of_stacks():
    stacks = [
        es.nn.Stacked(scales(1.0, 2.0, 3.0)),
        es.nn.Stacked(scales(2.0, 2.0, 2.0)),
    ]
    ensemble = jax.tree.map(lambda *xs: jnp.stack(xs), *stacks)
    ys, new = es.mutable(es.vmap(ensemble, in_axes=None, axes={...: 0}))(1.0)
    assert ys.tolist() == [6.0, 8.0]
    assert new.layers.calls.tolist() == [[1] * 3] * 2
    with pytest.raises(ValueError, match=r"3 layers and an array of shape \(2, 3\)"):
        es.mutable(ensemble)(1.0)


@pytest.mark.parametrize(
    ("length", "options", "found"),
    [
        (3, {"checkpoint": False}, []),
        (2, {"checkpoint": True}, ["False"]),
        (3, {"checkpoint": POLICY}, ["False"]),
        # Without a loop, XLA must not merge the repeated computation with the first.
        (1, {"checkpoint": True}, ["True"]),
        (3, {"checkpoint": True, "unroll": True}, ["True"]),
        (3, {"checkpoint": True, "unroll": 2}, ["True"]),
    ],
)
def test_checkpoint_prevents_cse_only_without_a_loop(length, options, found):
    stacked = es.nn.Stacked([jnp.sin] * length, **options)
    program = str(jax.make_jaxpr(stacked)(1.0))
    assert re.findall(r"prevent_cse=(\w+)", program) == found
    without_policy = found if options.get("checkpoint") is True else []
    assert len(re.findall("policy=None", program)) == len(without_policy)


def test_the_program_does_not_grow_with_the_number_of_layers():
    def step(stacked, xs):
        decayed = es.filter(stacked, lambda part: part.value.ndim >= 2)
        return es.value_and_grad(loss_of_stack)(stacked, xs), decayed

    sizes = set()
    for n in (2, 7):
        stacked = es.nn.Stacked.make(Block, jr.split(jr.key(0), n), checkpoint=True)
        sizes.add(str(jax.make_jaxpr(step)(stacked, XS)).count(" = "))
    assert len(sizes) == 1


# --- Initialization -------------------------------------------------------------------


class Lazy(es.Module):
    linear: eqx.nn.Linear
    hooked: es.Parameter | None = None

    def __init__(self):
        self.linear = es.lazy(eqx.nn.Linear, SIZE, SIZE)

    def module_init(self, key):
        self.hooked = jr.normal(key)

    def __call__(self, x):
        return self.hooked * self.linear(x)


@pytest.mark.parametrize("is_made", [False, True])
def test_init_creates_the_layers_of_a_stack(is_made):
    if is_made:
        net = {"blocks": es.nn.Stacked.make(lambda key: Lazy(), KEYS[:2])}
    else:
        net = {"blocks": es.nn.Stacked([Lazy(), Lazy()])}
    assert len(net["blocks"]) == 2
    assert not net["blocks"].initialized
    for use in (lambda s: s(XS[0]), lambda s: s[0], lambda s: s[1:]):
        with pytest.raises(es.NotInitializedError, match=r"layers.*Initializer"):
            use(net["blocks"])
    stacked = es.init(net, 0)["blocks"]
    assert stacked.initialized
    assert stacked.layers.linear.weight.shape == (2, SIZE, SIZE)
    assert stacked.layers.hooked[0] != stacked.layers.hooked[1]
    close(stacked(XS[0]), in_turn(list(stacked), XS[0]))
    assert eqx.tree_equal(es.init(net, 0)["blocks"], stacked)
    shapes = eqx.filter_eval_shape(es.init, net, 0)["blocks"]
    assert shapes.layers.hooked.shape == (2,)


def test_a_number_between_the_layers():
    assert es.nn.Stacked([lambda x: x.at[...].mul(2.0)] * 3)(1.5) == 12.0
    assert es.nn.Stacked([lambda x: 2.0] * 3)(1.5) == 2.0


# --- Wrong input ----------------------------------------------------------------------


def frozen_in_part():
    net = eqx.nn.Sequential([Scale(1.0)])
    return [net, es.freeze(eqx.nn.Sequential([Scale(1.0)]))]


DIFFERENT = {
    "shape": (lambda: scales(1.0, jnp.ones(2)), r"layers 0 and 1 .*`w`"),
    "dtype": (lambda: scales(1.0, jnp.array(1)), r"layers 0 and 1 .*`w`"),
    "structure": (lambda: [{"a": [1]}, {"a": [1]}, {"a": [1, 2]}], r"0 and 2 .*'a'"),
    "class": (lambda: [make_linear(KEYS[0]), eqx.nn.Identity()], "at the root"),
    "static": (
        lambda: [es.nn.Dropout(p, key=i) for i, p in enumerate((0.1, 0.2))],
        r"first at `p`: expected `0.1`, got `0.2`",
    ),
    "training": (
        lambda: [Scale(1.0), es.eval(Scale(1.0))],
        r"first at `training`: expected `True`, got `False`",
    ),
    "frozen": (frozen_in_part, r"first at `layers\[0\]\.frozen`"),
    "number": (lambda: [1, 2], "first at the root: expected `1`, got `2`"),
    "array": (
        lambda: [jnp.ones(2), 1.0],
        r"first at the root: expected `f32\[2\]`, got `1.0`",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_layers_that_differ(case):
    make, message = DIFFERENT[case]
    with pytest.raises(ValueError, match=message):
        es.nn.Stacked(make())


def test_stateful_layers_of_equinox():
    def norm(_=None):
        return eqx.nn.BatchNorm(SIZE, "batch", mode="ema")

    with pytest.raises(ValueError, match=r"es\.nn\.Stateful\(eqx"):
        es.nn.Stacked([norm(), norm()])
    layers = [es.nn.Stateful(norm()) for _ in range(2)]
    stacked = es.nn.Stacked(layers)
    made = es.nn.Stacked.make(lambda _: es.nn.Stateful(norm()), KEYS[:2])
    assert eqx.tree_equal(made, stacked)


def test_layers_that_differ_after_init():
    stacked = es.nn.Stacked([es.lazy(eqx.nn.Linear, 2, n) for n in (2, 3)])
    with pytest.raises(ValueError, match="layers 0 and 1 differ"):
        es.init(stacked, 0)


def test_a_stack_needs_a_layer():
    with pytest.raises(ValueError, match="at least one layer"):
        es.nn.Stacked([])


def test_a_list_of_keys():
    stacked = es.nn.Stacked.make(make_linear, list(KEYS))
    close(stacked, es.nn.Stacked.make(make_linear, KEYS))


def test_a_module_may_make_layers():
    class Factory(es.Module):
        """A module may be the function that makes layers."""

        scale: es.Parameter

        def __call__(self, key):
            return eqx.tree_at(lambda m: m.bias, make_linear(key), self.scale * XS[0])

    assert len(es.nn.Stacked.make(Factory(2.0), KEYS)) == len(KEYS)


def test_configure_does_not_change_the_number_of_layers():
    class Memory(es.Module):
        length: es.State = 3

        def __call__(self, x):
            return x * self.length

    stacked = es.configure(
        es.nn.Stacked([Memory(), Memory()]), length=jnp.array([2, 2])
    )
    assert len(stacked) == 2
    assert stacked(jnp.array(1)) == 4


# --- Keys -----------------------------------------------------------------------------


class Keyed(es.Module):
    """A layer that may hold one key, several, or a legacy one."""

    key: es.Rng | None
    state: es.State
    table: es.Buffer

    def __call__(self, x):
        return x


def keyed(key=None, state=None, table=None):
    return Keyed(key, state, table)


def constant(key):
    return es.nn.Dropout(0.5, key=0)


EQUAL = {
    "seed": lambda: [es.nn.Dropout(0.5, key=0) for _ in range(3)],
    "two of three": lambda: [es.nn.Dropout(0.5, key=i % 2) for i in range(3)],
    "legacy": lambda: [keyed(jr.PRNGKey(0)) for _ in range(2)],
    "one of several": lambda: [
        keyed(jr.wrap_key_data(jnp.array([[i, i], [0, 1]], "uint32"))) for i in range(2)
    ],
    "typed key in state": lambda: [keyed(state=jr.key(0)) for _ in range(2)],
    "in a stack": lambda: [
        es.nn.Stacked([es.nn.Dropout(key=0), es.nn.Dropout(key=i + 1)])
        for i in range(2)
    ],
}


@pytest.mark.parametrize("layers", EQUAL.values(), ids=EQUAL)
def test_layers_with_equal_keys_are_an_error(layers):
    with pytest.raises(ValueError, match=r"two layers have the same key, `.*reseed"):
        es.nn.Stacked(layers())


def test_make_with_a_constant_key_is_an_error():
    with pytest.raises(ValueError, match="two layers have the same key, `rng`"):
        es.nn.Stacked.make(constant, jr.split(jr.key(0), 3))
    lazy = es.nn.Stacked.make(lambda key: es.nn.Dropout(0.5), jr.split(jr.key(0), 3))
    assert len(lazy.init(0)) == 3  # a key for each


def test_keys_that_draw_nothing_or_are_unknown_are_not_compared():
    layers = [keyed(table=jr.key(0)) for _ in range(2)]
    assert es.nn.Stacked(layers).layers.table.shape == (2,)
    keys = jr.split(jr.key(0), 3)
    traced = es.jit(lambda keys: es.nn.Stacked.make(constant, keys))(keys)
    assert traced.layers.rng.shape == (3,)
    shapes = eqx.filter_eval_shape(es.nn.Stacked.make, constant, keys)
    assert shapes.layers.rng.shape == (3,)
    drop = eqx.filter_eval_shape(constant, keys)
    assert es.nn.Stacked([drop, jax.tree.map(lambda x: x, drop)]).layers.rng.shape == (
        2,
    )
    # Equal numbers at different places of a layer.
    data = jnp.array([[[0, 1], [0, 2]], [[0, 2], [0, 1]]], "uint32")
    assert len(es.nn.Stacked([keyed(jr.wrap_key_data(d)) for d in data])) == 2


def test_checkpoint_may_be_switched_off_later():
    stack = es.nn.Stacked([eqx.nn.Lambda(jnp.tanh)] * 2, checkpoint=True)
    x = jnp.ones(2)
    plain = es.configure(stack, checkpoint=False)
    assert "remat" not in str(jax.make_jaxpr(jax.grad(lambda x: plain(x).sum()))(x))
    assert jnp.array_equal(plain(x), stack(x))
