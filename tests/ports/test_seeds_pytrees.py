"""Seeds 003 and 004 (pytrees): programs V6 and V7 and the rows which they describe.

Every test holds for plain containers and for an `es.Module`, because a model here is
one pytree. A test is named after its row in PEERS.md.
"""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_state as es


class Box(es.Module):
    value: Any


class Affine(es.Module):
    W: es.Parameter
    b: es.Parameter

    def __call__(self, x):
        return jnp.dot(x, self.W) + self.b


def sgd(lr):
    return lambda p, g: p - lr * g


# --- A: pytrees ---------------------------------------------------------------------

thing = object()
TREES = [
    ((1, 2, 3), [1, 2, 3]),
    ([1, 1.0, "string", True], [1, 1.0, "string", True]),
    ({"key1": 3.4, "key2": 6.0}, [3.4, 6.0]),
    ([3, 2, (6, 0, 9), 2, ()], [3, 2, 6, 0, 9, 2]),
    (
        [3.0, (1, 2), {"key1": "val1", "key2": "val2", "key3": "val3"}],
        [3.0, 1, 2, "val1", "val2", "val3"],
    ),
    ([1, "a", thing], [1, "a", thing]),
    ((1, (2, 3), ()), [1, 2, 3]),
    ([1, {"k1": 2, "k2": (3, 4)}, 5], [1, 2, 3, 4, 5]),
    ([(1, 2), "123", {"1": 1, "2": [4, 5]}], [1, 2, "123", 1, 4, 5]),
]


@pytest.mark.parametrize("wrap", [lambda tree: tree, Box], ids=["plain", "module"])
@pytest.mark.parametrize(("tree", "leaves"), TREES)
def test_A1_leaves_and_structure_round_trip(tree, leaves, wrap):
    tree = wrap(tree)
    flat, treedef = jtu.tree_flatten(tree)
    assert flat == jax.tree.leaves(tree) == leaves
    assert treedef == jax.tree.structure(tree)
    assert eqx.tree_equal(jtu.tree_unflatten(treedef, flat), tree)
    assert es.parts(tree) == []  # numbers and strings have no kind
    assert jax.tree.leaves(es.filter(tree)) == []
    assert eqx.tree_equal(es.update(tree, es.filter(tree)), tree)


@pytest.mark.parametrize("wrap", [lambda tree: tree, Box], ids=["plain", "module"])
@pytest.mark.parametrize("array", [jnp.arange(2), jnp.zeros(3), np.ones(2)], ids=str)
def test_A1_an_array_is_one_leaf(array, wrap):
    (leaf,) = jax.tree.leaves(wrap(array))
    assert leaf is array
    (part,) = es.parts(wrap(array))
    assert part.value is array
    inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    assert part.kind is (es.Parameter if inexact else None)


def with_functions(cls):
    jtu.register_pytree_node(
        cls, lambda c: ([c.a, c.b, c.c], c.name), lambda name, abc: cls(name, *abc)
    )


def with_methods(cls):
    cls.tree_flatten = lambda self: ((self.a, self.b, self.c), self.name)
    cls.tree_unflatten = classmethod(lambda cls, name, abc: cls(name, *abc))
    jtu.register_pytree_node_class(cls)


@pytest.mark.parametrize("register", [with_functions, with_methods])
def test_V7_A2_my_container_before_and_after_registration(register):
    class MyContainer:
        def __init__(self, name, a, b, c):
            self.name, self.a, self.b, self.c = name, a, b, c

    pair = [MyContainer("Alice", 1, 2, 3), MyContainer("Bob", 4, 5, 6)]
    boxes = Box(MyContainer("Carol", jnp.ones(1), jnp.arange(1), None))
    assert jax.tree.leaves(pair) == pair
    assert es.parts(boxes) == []

    register(MyContainer)
    assert jax.tree.leaves(pair) == [1, 2, 3, 4, 5, 6]
    assert [part.kind for part in es.parts(boxes)] == [es.Parameter, None]
    params = es.filter(boxes, es.Parameter)
    assert params.value.name == "Carol"
    assert (params.value.a, params.value.b) == (1.0, None)
    assert es.update(boxes, params).value.b == 0


def test_A6_key_paths():
    tree = [3.0, (1, 2), {"key1": "val1"}]
    box = Box(tree)
    plain = [
        ((jtu.SequenceKey(0),), 3.0),
        ((jtu.SequenceKey(1), jtu.SequenceKey(0)), 1),
        ((jtu.SequenceKey(1), jtu.SequenceKey(1)), 2),
        ((jtu.SequenceKey(2), jtu.DictKey("key1")), "val1"),
    ]
    assert jtu.tree_flatten_with_path(tree)[0] == plain
    attribute = jtu.GetAttrKey("value")
    paths = [((attribute, *path), leaf) for path, leaf in plain]
    assert jtu.tree_flatten_with_path(box)[0] == paths
    arrays = jax.tree.map(lambda _: jnp.ones(1), box)
    assert [part.path for part in es.parts(arrays)] == [path for path, _ in paths]


@pytest.mark.parametrize("wrap", [lambda tree: tree, Box], ids=["plain", "module"])
def test_A7_map_over_several_trees(wrap):
    trees = [
        wrap({f"key{i}": float(start + i) for i in range(3)}) for start in (1, 4, 7)
    ]
    tripled = jax.tree.map(lambda x: 3 * x, trees[0])
    assert jax.tree.leaves(tripled) == [3.0, 6.0, 9.0]
    combined = jax.tree.map(lambda x, y, z: x * y + z, *trees)
    assert jax.tree.leaves(combined) == [11.0, 18.0, 27.0]
    assert type(combined) is type(trees[0])
    lists = wrap([[1, 1, 1], (2, 2, 2, 2), 3]), wrap([[0, 5, 1], (2, 2, 2, 2), 3])
    summed = jax.tree.map(lambda x, y: x + y, *lists)
    assert eqx.tree_equal(summed, wrap([[1, 6, 2], (4, 4, 4, 4), 6]))


@pytest.mark.parametrize("wrap", [lambda tree: tree, Box], ids=["plain", "module"])
@pytest.mark.parametrize(
    ("tree", "other", "message"),
    [
        ([[0, 5], (2, 2, 2)], [[0, 5], (2, 2, 2, 2)], "tuple.*(3.*4|4 != 3)"),
        ([[0, 5, 1], (2,)], [[0, 5, 1, 2], (2,)], "list.*(3.*4|4 != 3)"),
        ({"key1": 1}, {"key2": 1}, "(metadata|dict key mismatch).*key1.*key2"),
    ],
)
def test_V6_A7_U3_other_structure_is_an_error(tree, other, message, wrap):
    # JAX < 0.10.2 says "Tuple arity mismatch: 4 != 3"
    with pytest.raises(ValueError, match=f"(?is){message}"):
        jax.tree.map(lambda x, y: x + y, wrap(tree), wrap(other))


def test_U3_update_names_the_first_path_that_differs():
    tree = {"a": [jnp.ones(1), (jnp.ones(1),) * 3]}
    with pytest.raises(ValueError, match=r"a.*\[1\]"):
        es.update(tree, {"a": [jnp.ones(1), (jnp.ones(1),) * 4]})


@pytest.mark.parametrize("wrap", [lambda tree: tree, Box], ids=["plain", "module"])
def test_V6_A8_transposition(wrap):
    trees = [wrap({"key1": 1.0, "key2": 2.0, "key3": 3.0})] * 3
    transposed = jax.tree.map(lambda *x: list(x), *trees)
    expected = wrap({f"key{i}": [float(i)] * 3 for i in (1, 2, 3)})
    assert eqx.tree_equal(transposed, expected)


def test_A8_stacking_a_list_of_models_is_an_ensemble():
    models = [Affine(jr.normal(jr.key(i), (3, 2)), jnp.zeros(2)) for i in range(4)]
    x = jnp.arange(3.0)
    ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    expected = jnp.stack([model(x) for model in models])
    ys = es.vmap(ensemble, in_axes=None, axes={...: 0})(x)
    assert jnp.allclose(ys, expected)
    assert jnp.allclose(jax.vmap(lambda model: model(x))(ensemble), expected)


@pytest.mark.parametrize(
    "apply",
    [
        lambda model, x: jax.jit(lambda m, x: m(x))(model, x),
        lambda model, x: jax.jit(lambda x: model(x))(x),
        lambda model, x: jax.vmap(model)(x[None])[0],
        lambda model, x: jax.checkpoint(lambda m, x: m(x))(model, x),
        lambda model, x: lax.scan(lambda m, x: (m, m(x)), model, x[None])[1][0],
        lambda model, x: lax.cond(True, lambda m: m(x), lambda m: -m(x), model),
        lambda model, x: lax.fori_loop(0, 3, lambda _, m: m, model)(x),
    ],
    ids=["jit", "jit of a closure", "vmap", "checkpoint", "scan", "cond", "fori_loop"],
)
def test_A10_plain_transforms_work_on_a_module(apply):
    model, x = Affine(jnp.ones((3, 2)), jnp.ones(2)), jnp.arange(3.0)
    assert jnp.allclose(apply(model, x), model(x))


@pytest.mark.parametrize(
    "model",
    [
        {"W": jnp.ones((3, 2)), "b": jnp.ones(2)},
        [dict(weights=jnp.ones((1, 4)), biases=jnp.ones(4))] * 2,
        Affine(jnp.ones((3, 2)), jnp.ones(2)),
    ],
    ids=["dict", "list of dicts", "module"],
)
def test_A9_A11_K7_gradients_have_the_type_of_the_model(model):
    def loss(model):
        return sum(jnp.sum(leaf**2) / 2 for leaf in jax.tree.leaves(model))

    grads = jax.grad(loss)(model)
    assert eqx.tree_equal(grads, model)
    assert eqx.tree_equal(es.grad(loss)(model), (grads, model))
    new = jax.tree.map(sgd(1.0), model, grads)
    assert eqx.tree_equal(new, jax.tree.map(jnp.zeros_like, model))
    assert {part.kind for part in es.parts(model)} == {es.Parameter}


# --- V6: a multi-layer perceptron as a list of dicts --------------------------------


def jax_layer(key, n_in, n_out):
    weights = jr.normal(key, (n_in, n_out)) * jnp.sqrt(2 / n_in)
    return dict(weights=weights, biases=jnp.ones(n_out))


def numpy_layer(rng, n_in, n_out):
    weights = rng.normal(size=(n_in, n_out)) * np.sqrt(2 / n_in)
    return dict(weights=weights, biases=np.ones(shape=(n_out,)))


def init_with_jax(widths):
    # a key for each layer; the seed draws all of them from one
    keys = jr.split(jr.PRNGKey(11), len(widths) - 1)
    return [jax_layer(*args) for args in zip(keys, widths, widths[1:], strict=False)]


def init_with_numpy(widths):
    rng = np.random.default_rng(11)
    return [numpy_layer(rng, *io) for io in itertools.pairwise(widths)]


def forward(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["weights"] + layer["biases"][None])
    return x @ last["weights"] + last["biases"][None]


def mlp_loss(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


@pytest.mark.parametrize(
    ("init", "grad"),
    [
        (init_with_jax, jax.grad),
        (init_with_numpy, lambda f: lambda *args: es.grad(f)(*args)[0]),
    ],
    ids=["jax", "es"],
)
def test_V6_V7_N5_mlp_as_a_list_of_dicts(init, grad):
    params = init([1, 128, 128, 1])
    assert jax.tree.map(lambda x: x.shape, params) == [
        {"biases": (128,), "weights": (1, 128)},
        {"biases": (128,), "weights": (128, 128)},
        {"biases": (1,), "weights": (128, 1)},
    ]

    @jax.jit
    def update(params, x, y):
        grads = grad(mlp_loss)(params, x, y)
        return jax.tree.map(sgd(0.0001), params, grads)

    x = jr.normal(jr.PRNGKey(3), (128, 1))
    y = x**2
    losses = [jax.jit(mlp_loss)(params, x, y)]
    for _ in range(2):
        for _ in range(500):
            params = update(params, x, y)
        losses.append(jax.jit(mlp_loss)(params, x, y))
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] / 4


def test_V7_gradients_of_numpy_parameters():
    params = init_with_numpy([1, 8, 1])
    x = jnp.ones((2, 1))
    grads, same = es.grad(mlp_loss)(params, x, x)
    expected = jax.grad(mlp_loss)(jax.tree.map(jnp.asarray, params), x, x)
    assert eqx.tree_equal(grads, expected, rtol=1e-6)
    assert jax.tree.map(jnp.shape, same) == jax.tree.map(jnp.shape, params)


# --- V7: linear regression ----------------------------------------------------------

LOSSES = """
10.971409 1.0798324 0.37958255 0.17855294 0.09441521 0.054522194 0.03448924
0.024058027 0.018480862 0.015438682 0.01375394 0.0128103 0.012277315 0.011974388
0.011801447 0.011702419 0.011645544 0.011612837 0.011594015 0.011583163 0.011576912
"""
TRUE_GRADIENT_OF_B = [0.0193719, -0.00509552, -0.00823335, -0.01260918, 0.00415814]


@pytest.fixture(scope="module")
def problem():
    """The true parameters and the samples, drawn as JAX drew when it was written."""
    with jax.threefry_partitionable(False):
        key = jr.PRNGKey(0)
        k1, k2 = jr.split(key)
        W_true = jr.normal(k1, (10, 5))
        b_true = jr.normal(k2, (5,))
        key_sample, key_noise = jr.split(k1)  # a key used twice, kept for the figures
        x = jr.normal(key_sample, (20, 10))
        y = x @ W_true + b_true[None] + 0.1 * jr.normal(key_noise, (20, 5))
    return W_true, b_true, x, y


def apply(params, x):
    if isinstance(params, Affine):
        return params(x)
    return jnp.dot(x, params["W"]) + params["b"]


def loss(params, x_batched, y_batched):
    def squared_error(x, y):
        error = y - apply(params, x)
        return jnp.inner(error, error) / 2.0

    return jnp.mean(jax.vmap(squared_error)(x_batched, y_batched), axis=0)


def jax_step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return value, jax.tree.map(sgd(0.3), params, grads)


def es_step(params, x, y):
    (value, params), grads = es.value_and_grad(loss)(params, x, y)
    return value, es.map(sgd(0.3), params, grads, on=es.trainable)


@pytest.mark.parametrize("model", [dict, Affine])
@pytest.mark.parametrize("step", [jax_step, es_step])
def test_V7_J7_linear_regression_gives_the_figures_of_the_seed(problem, model, step):
    W, b, x, y = problem
    params = model(W=jnp.zeros_like(W), b=jnp.zeros_like(b))
    losses = []
    for _ in range(102):
        value, params = jax.jit(step)(params, x, y)
        losses.append(value.item())  # taken before the step, the seed's after it
    assert type(params) is model
    expected = [float(figure) for figure in LOSSES.split()]
    assert np.allclose(losses[1::5], expected, rtol=1e-5)


@pytest.mark.parametrize("model", [dict, Affine])
def test_V7_J5_loss_and_gradient_at_the_true_parameters(problem, model):
    W, b, x, y = problem
    (value, same), grads = es.value_and_grad(loss)(model(W=W, b=b), x, y)
    assert np.isclose(value, 0.023639793, rtol=1e-5)
    assert eqx.tree_equal(same, model(W=W, b=b))
    b_grad = grads.b if model is Affine else grads["b"]
    assert np.allclose(b_grad, TRUE_GRADIENT_OF_B, atol=1e-6)
