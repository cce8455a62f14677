"""`es.from_torch`: PyTorch's weights, against outputs that PyTorch computed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import torch_weights as reference
from helpers import rejects, reuses_keys, untouched

import eqx_state as es


pytestmark = reuses_keys  # the drawn values do not matter
nn, KEY = eqx.nn, jr.key(0)

# --- Layers ---------------------------------------------------------------------------


def each(layer):
    return lambda x: jax.vmap(layer)(x)


def stacked(cell):
    return lambda x, h, c: jnp.stack(cell(x, (h, c)))


def attention(**sizes):
    flags = ["use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"]
    return nn.MultiheadAttention(
        **({"num_heads": 2, "query_size": 6, "key": KEY} | dict.fromkeys(flags, True)),
        **sizes,
    )


LAYERS = {
    "linear": lambda: nn.Linear(5, 3, key=KEY),
    "conv2d": lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (0, 1), groups=2, key=KEY),
    "conv_transpose2d": lambda: nn.ConvTranspose2d(
        4, 3, (3, 2), (2, 1), padding=(1, 0), key=KEY
    ),
    "conv_transpose2d_in_groups": lambda: nn.ConvTranspose2d(
        6, 4, 3, 2, groups=2, key=KEY
    ),
    "conv_transpose3d": lambda: nn.ConvTranspose3d(
        3, 6, (2, 3, 1), 2, groups=3, use_bias=False, key=KEY
    ),
    "layer_norm": lambda: nn.LayerNorm((2, 6)),
    "group_norm": lambda: nn.GroupNorm(2, 6),
    "embedding": lambda: nn.Embedding(reference.TOKENS, 4, key=KEY),
    "gru_cell": lambda: nn.GRUCell(3, 4, key=KEY),
    "gru_cell_without_bias": lambda: nn.GRUCell(3, 4, use_bias=False, key=KEY),
    "lstm_cell": lambda: nn.LSTMCell(3, 4, key=KEY),
    "lstm_cell_without_bias": lambda: nn.LSTMCell(3, 4, use_bias=False, key=KEY),
    "attention": attention,
    "attention_without_bias": lambda: nn.MultiheadAttention(3, 6, key=KEY),
    "attention_of_other_sizes": lambda: attention(key_size=3, value_size=2),
}
CALLS = {"embedding": each, "lstm_cell": stacked, "lstm_cell_without_bias": stacked}


def check(case, model, call=lambda model: model):
    got = eqx.filter_jit(call(model))(*map(jnp.asarray, reference.inputs(case)))
    np.testing.assert_allclose(got, reference.output(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_equals_that_of_pytorch(case):
    layer = LAYERS[case]()
    with untouched(layer):
        loaded = es.from_torch(layer, reference.state_dict(case))
    check(case, loaded, CALLS.get(case, lambda layer: layer))


def norms(affine=True):
    options = {"axis_name": "batch", "channelwise_affine": affine}
    return {
        "es": es.nn.BatchNorm(3, **options),
        "batch": es.nn.Stateful(nn.BatchNorm(3, mode="batch", **options)),
        "batch, momentum 0.5": es.nn.Stateful(
            nn.BatchNorm(3, mode="batch", momentum=0.5, **options)
        ),
        "ema": es.nn.Stateful(nn.BatchNorm(3, mode="ema", **options)),
        "plain": nn.BatchNorm(3, mode="ema", **options),
    }


@pytest.mark.parametrize(
    "case", ["batch_norm", "batch_norm_new", "batch_norm_without_affine"]
)
def test_batch_norms_equal_those_of_pytorch(case):
    for name, norm in norms("without" not in case).items():
        loaded = es.from_torch(norm, reference.state_dict(case))
        if name == "plain":
            loaded = es.nn.Stateful(loaded)
        check(case, loaded.eval())


@pytest.mark.parametrize("name", ["es", "batch"])
def test_the_count_of_batches_continues(name):
    norm = es.from_torch(norms()[name], reference.state_dict("batch_norm"))
    _, norm = es.mutable(es.vmap(norm, axis_name="batch"))(jr.normal(KEY, (8, 3, 4)))
    count = norm.count if name == "es" else norm.layer.batch_counter.init
    assert (count == 8).all()


QKV = {f"{name}_proj.*": f"self.{name}.*" for name in ("query", "key", "value")}


@pytest.mark.parametrize("case", [case for case in LAYERS if "attention" in case])
def test_query_key_and_value_may_be_three_tensors(case):
    layer = LAYERS[case]()
    loaded = es.from_torch(layer, reference.state_dict(case))
    names, theirs = QKV | {"output_proj.*": "output.dense.*"}, {}
    for name, x in es.state_dict(loaded).items():
        place, last = name.split(".")
        theirs[names[f"{place}.*"].replace("*", last)] = x
    rename = QKV | {"out_proj.*": "output.dense.*"}
    assert eqx.tree_equal(es.from_torch(layer, theirs, rename=rename), loaded)
    del theirs["self.value.weight"]
    text = r"missing:\n    .*\(for value_proj.weight\)\n"
    with rejects(layer, ValueError, text, r'rename=\{"\*.query_proj.\*": "'):
        es.from_torch(layer, theirs, rename=rename)


# --- Values of the dictionary ---------------------------------------------------------


class Tensor:
    """Like a tensor of PyTorch: on a device, part of a graph, with its own dtype."""

    def __init__(self, values, dtype="float32", place="cuda", graph=True):
        self.values, self.dtype = np.asarray(values), dtype
        self.place, self.graph = place, graph
        self.shape = self.values.shape

    def detach(self):
        return Tensor(self.values, self.dtype, self.place, graph=False)

    def cpu(self):
        return Tensor(self.values, self.dtype, "cpu", self.graph)

    def float(self):
        return Tensor(self.values.astype(np.float32), "float32", self.place, self.graph)

    def numpy(self):
        if self.graph or self.place != "cpu":
            raise RuntimeError("Can't call numpy() on this tensor")
        if self.dtype == "bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.values  # shares its memory

    def __array__(self, dtype=None, copy=None):
        return self.numpy()


def linear(**options):
    return nn.Linear(2, 2, key=KEY, **options)


WEIGHT, BIAS = np.array([[1, 2], [3, 4]], np.float32), np.array([5, 6], np.float32)


def is_it(layer):
    return layer.weight.tolist() == WEIGHT.tolist() and layer.bias.tolist() == [5, 6]


BFLOAT16 = lambda x: Tensor(x, "bfloat16")  # noqa: E731


@pytest.mark.parametrize("make", [Tensor, BFLOAT16, np.array, jnp.asarray])
def test_tensors_and_arrays_of_any_library_are_copied(make):
    weight = np.array(WEIGHT)
    tree = {"linear": linear(), "host": np.zeros((2, 2), np.float32)}
    tensors = {"linear.weight": make(weight), "linear.bias": make(BIAS)}
    loaded = es.from_torch(tree, tensors | {"host": make(weight)})
    weight[:] = 0
    assert is_it(loaded["linear"])
    assert type(loaded["host"]) is np.ndarray
    assert (loaded["host"] == WEIGHT).all()


def test_biases_in_half_precision_are_added_in_full_precision():
    cell = nn.LSTMCell(1, 1, key=KEY)
    tensors = {name: np.ones((4, 1), np.float16) for name in ("weight_ih", "weight_hh")}
    tensors["bias_ih"] = np.full(4, 2048, np.float16)
    tensors["bias_hh"] = np.ones(4, np.float16)
    assert es.from_torch(cell, tensors).bias.tolist() == [2049] * 4


def test_integers_and_bools():
    tree = {"index": np.zeros(2, np.int32), "mask": jnp.zeros(2, bool)}
    tensors = {"index": np.array([1, 2**31 - 1]), "mask": np.array([True, False])}
    loaded = es.from_torch(tree, tensors)
    assert loaded["index"].tolist() == tensors["index"].tolist()
    assert loaded["mask"].tolist() == [True, False]
    wrong = {"index": np.array([1, 2**31]), "mask": np.array([1, 0])}
    text = r"(?s)wrong dtype:.*index.*too large: int64 cannot be cast to int32\n.*mask"
    with rejects(tree, ValueError, text):
        es.from_torch(tree, wrong)
    with rejects(tree, ValueError, "index.*: float32 cannot be cast to int32"):
        es.from_torch(tree, tensors | {"index": BIAS})


@pytest.mark.parametrize(
    ("array", "dtype"),
    [(1e300, "float32"), (1e5, "float16"), (500.0, "float8_e4m3fn"), (2**17, "f2")],
)
def test_numbers_that_are_too_large_for_the_floats_of_the_model(array, dtype):
    tree = {"a": jnp.zeros(2, dtype), "b": jnp.zeros(2, dtype), "c": jnp.zeros(2)}
    tensors = {"a": np.array([array, 1]), "b": np.array([0, -array]), "c": BIAS}
    text = r"(?s)    a .*: too large: .*cast to .*\n    b .*: too large: .*64 cannot"
    with rejects(tree, ValueError, text):
        es.from_torch(tree, tensors)


def test_a_sum_that_is_too_large_for_the_floats_of_the_model():
    cell = nn.LSTMCell(1, 1, key=KEY, dtype=jnp.float16)
    tensors = {f"weight_{x}": np.ones((4, 1), np.float16) for x in ("ih", "hh")}
    tensors |= {f"bias_{x}": np.full(4, 6e4, np.float16) for x in ("ih", "hh")}
    with rejects(cell, ValueError, "    bias: too large: float32 cannot be cast"):
        es.from_torch(cell, tensors)


def test_floats_and_integers_become_the_floats_of_the_model():
    tree = {"a": jnp.zeros(2, jnp.float16), "b": jnp.zeros(2, jnp.bfloat16)}
    tensors = {"a": np.array([1.0, -np.inf]), "b": np.array([1e30, np.nan])}
    loaded = es.from_torch(tree, tensors)
    assert loaded["a"].tolist() == [1.0, -np.inf]
    assert jnp.isfinite(loaded["b"]).tolist() == [True, False]
    # Floats of every width can represent these.
    whole = {"a": np.array([1, 2]), "b": np.array([3, 4])}
    assert es.from_torch(tree, whole)["b"].tolist() == [3, 4]


# --- Types of models ------------------------------------------------------------------


class Net(es.Module):
    """One of everything that has a different name in PyTorch."""

    first: nn.Linear
    norm: es.nn.BatchNorm
    drop: es.nn.Dropout
    layers: list[nn.Linear]
    scale: es.Parameter
    heads: dict[str, nn.Linear]
    mask: es.Buffer
    legacy: es.Rng

    def __init__(self, fill=0.0):
        def filled(layer):
            return es.map(lambda x: jnp.full_like(x, fill), layer, on=es.TreePart)

        self.first = filled(linear())
        self.norm = filled(es.nn.BatchNorm(2))
        self.drop = es.nn.Dropout(key=0)
        self.layers = [filled(linear()), filled(linear())]
        self.scale = fill
        self.heads = {"a": filled(linear())}
        self.mask = jnp.full(2, fill)
        self.legacy = jr.PRNGKey(0)


def tensors_of_net():
    tensors = {
        f"{name}.{last}": np.full(shape, 3.0)
        for name in ("first", "layers.0", "layers.1", "heads.a")
        for last, shape in (("weight", (2, 2)), ("bias", 2))
    }
    for last in ("weight", "bias", "running_mean", "running_var"):
        tensors[f"norm.{last}"] = np.full(2, 3.0)
    tensors["norm.num_batches_tracked"] = np.array(3)
    return tensors | {"scale": np.array(3.0), "mask": np.full(2, 3.0)}


def test_default_names_and_keys_that_do_not_change():
    model = Net()
    loaded = es.from_torch(model, tensors_of_net())
    assert eqx.tree_equal(loaded, Net(3.0))
    assert loaded.drop.rng is model.drop.rng


def test_a_model_in_any_mode_inside_jit_and_a_scope():
    model, tensors = Net().eval().freeze(), tensors_of_net()
    filled = Net(3.0).eval().freeze()
    assert eqx.tree_equal(es.from_torch(model, tensors), filled)

    def load(model):
        return es.from_torch(model, tensors)

    assert eqx.tree_equal(es.jit(load)(model), filled)
    assert eqx.tree_equal(es.mutable(load)(model), (filled, model))


def test_an_abstract_model_is_filled():
    def make():
        norm = es.nn.Stateful(nn.BatchNorm(3, "batch", mode="batch"))
        return {"norm": norm, "attention": attention()}

    abstract = eqx.filter_eval_shape(make)
    norm = {f"norm.{k}": x for k, x in reference.state_dict("batch_norm").items()}
    parts = reference.state_dict("attention")
    tensors = norm | {f"attention.{k}": x for k, x in parts.items()}
    loaded = es.from_torch(abstract, tensors)
    assert eqx.tree_equal(loaded, es.from_torch(make(), tensors))


def test_a_single_array_and_an_empty_tree():
    assert es.from_torch(jnp.zeros(2), {"": BIAS}).tolist() == [5, 6]
    assert es.from_torch({"act": jnp.tanh}, {}) == {"act": jnp.tanh}


def test_a_sequential_may_have_the_names_of_either_library():
    norm = es.nn.Stateful(nn.BatchNorm(2, "batch", mode="ema"))
    model = {"net": nn.Sequential([linear(), nn.Sequential([norm])])}
    layer = {"weight": WEIGHT, "bias": BIAS}
    stats = {"running_mean": BIAS, "running_var": BIAS, "weight": BIAS, "bias": BIAS}

    def tensors(first, second):
        found = {f"{first}.{k}": x for k, x in layer.items()}
        return found | {f"{second}.{k}": x for k, x in stats.items()}

    ours = tensors("net.layers.0", "net.layers.1.layers.0")
    other = tensors("net.first", "net.1.0")
    rename = {"net.0.*": "net.first.*"}
    for loaded in (
        es.from_torch(model, tensors("net.0", "net.1.0")),
        es.from_torch(model, ours),
        es.from_torch(model, ours, rename={name: name for name in ours}.__getitem__),
        es.from_torch(model, other, rename=rename),
    ):
        assert is_it(loaded["net"].layers[0])
        assert loaded["net"].layers[1].layers[0].layer.bias.tolist() == [5, 6]
    with rejects(model, ValueError, r"net\.layers\.0\.bias", r"net\.first\.bias: \(2,"):
        es.from_torch(model, other)


# --- Errors ---------------------------------------------------------------------------


def test_one_error_lists_missing_unused_and_invalid_entries():
    model, tensors = Net(), tensors_of_net()
    del tensors["first.weight"], tensors["norm.running_var"]
    tensors |= {
        "layers.0.weight": WEIGHT[:1],
        "layers.1.bias": "5, 6",
        "scale": np.array(1j),
        "head.weight": Tensor(WEIGHT),
        "epoch": 3,
    }
    with untouched(model), pytest.raises(ValueError, match="does not fit") as info:
        es.from_torch(model, tensors)
    text = str(info.value)
    assert text.startswith("`es.from_torch`: the state dict does not fit the tree.\n")
    assert text.splitlines()[1:-1] == [
        "  missing:",
        "    first.weight",
        "    norm.running_var (for norm.var)",
        "  unused:",
        "    epoch: ()",
        "    head.weight: (2, 2)",
        "  wrong shape:",
        "    layers.0.weight (for layers[0].weight): (1, 2) instead of (2, 2)",
        "  not an array:",
        "    layers.1.bias (for layers[1].bias): `str`",
        "  wrong dtype:",
        "    scale: complex128 cannot be cast to float32",
    ]
    assert "rename=" in text


def test_values_that_cannot_be_arrays_of_the_model():
    for value in (np.array(["a"]), [[1, 2], [3, 4]]):
        with pytest.raises(ValueError, match="not an array:\n    weight: "):
            es.from_torch(linear(), {"weight": value, "bias": BIAS})
    wide = [jax.ShapeDtypeStruct((2,), jnp.float64)]  # the values would be truncated
    with pytest.raises(ValueError, match=r"dtype:\n    \[0\]: .*converted to float32"):
        es.from_torch(wide, {"0": BIAS})


def mixed():
    return nn.MultiheadAttention(2, 6, use_query_bias=True, key=KEY)


@pytest.mark.parametrize(
    ("make", "more", "text"),
    [
        (
            mixed,
            (),
            r"in_proj_bias \(for query_.*\): \(18,\) instead of \(6,\)",
        ),
        (attention, ("bias_k", "bias_v"), "unused:\n    bias_k: .*\n    bias_v: "),
        (
            lambda: nn.MultiheadAttention(2, 6, key=KEY),
            (),
            "unused:\n    in_proj_bias: .*\n    out_proj.bias: .*\nThese are PyTorch's",
        ),
        (lambda: attention(value_size=3), (), "missing:\n    k_proj_weight"),
    ],
    ids=["some biases", "`add_bias_kv`", "no biases", "other sizes"],
)
def test_attention_that_only_one_of_the_libraries_can_express(make, more, text):
    tensors = reference.state_dict("attention") | dict.fromkeys(
        more, np.ones((1, 1, 6))
    )
    with rejects(model := make(), ValueError, text):
        es.from_torch(model, tensors)


def test_a_batch_norm_without_its_state_cannot_store_statistics():
    norm, state = nn.make_with_state(nn.BatchNorm)(3, "batch", mode="batch")
    tensors = reference.state_dict("batch_norm")
    text = r"unused:\n    running_mean: \(3,\)[\s\S]*`es\.nn\.Stateful\(layer, state\)`"
    with rejects(norm, ValueError, text):
        es.from_torch(norm, tensors)
    loaded = es.from_torch(es.nn.Stateful(norm, state), tensors)
    check("batch_norm", loaded.eval())


def test_a_counter_of_a_missing_norm_is_unused():
    tensors = {"weight": WEIGHT, "bias": BIAS, "num_batches_tracked": np.array(1)}
    assert is_it(es.from_torch(linear(), tensors))
    other = {f"0.{k}": x for k, x in tensors.items()}
    other["1.num_batches_tracked"] = np.array(1)
    with pytest.raises(ValueError, match="unused:\n    1.num_batches_tracked"):
        es.from_torch([linear()], other)


def test_a_norm_of_equinox_needs_the_counter():
    tensors = reference.state_dict("batch_norm")
    del tensors["num_batches_tracked"]
    loaded = es.from_torch(norms()["ema"], tensors)
    assert not loaded.layer.ema_first_time_index.init
    with rejects(model := norms()["batch"], ValueError, "missing:\n    num_batches_tr"):
        es.from_torch(model, tensors)


OF_SEVERAL = ["conv_transpose2d_in_groups", "gru_cell", "lstm_cell", "attention"]


@pytest.mark.parametrize("case", [*OF_SEVERAL, "es", "batch", "ema"])
def test_a_stack_of_tensors_is_a_stack_of_layers(case):
    make = LAYERS.get(case, lambda: norms()[case])
    first = reference.state_dict(case if case in LAYERS else "batch_norm")
    second = {name: x + 1 for name, x in first.items()}
    tensors = {name: np.stack([x, second[name]]) for name, x in first.items()}
    stack = es.from_torch(eqx.filter_vmap(lambda _: make())(jnp.arange(2)), tensors)
    for i, each in enumerate((first, second)):
        layer = es.map(lambda x, i=i: x[i], stack, on=lambda part: True)
        assert eqx.tree_equal(layer, es.from_torch(make(), each))


def test_an_invalid_rename_is_an_error():
    tensors = {"weight": WEIGHT, "bias": BIAS}
    model = [linear()]
    text = r"`es.from_torch.*matches '\[0\]\.\*'.*like `0\.weight`, `0\.bias`\."
    with rejects(model, ValueError, text):
        es.from_torch(model, tensors, rename={"[0].*": "*"})
    with pytest.raises(TypeError, match="`es.from_torch.*takes a function from our"):
        es.from_torch(linear(), tensors, rename=3)
    with pytest.raises(ValueError, match="missing:\n    4 "):
        es.from_torch(linear(), tensors, rename=len)
    with pytest.raises(TypeError, match=r"module\.state_dict.* `Linear` was given"):
        es.from_torch(model, linear())


def test_one_batch_makes_an_average():
    norm = norms()["batch"]
    tensors = reference.state_dict("batch_norm") | {"num_batches_tracked": np.array(1)}
    loaded = es.from_torch(norm, tensors)
    x = jnp.ones(3)
    expected = (x - tensors["running_mean"]) / np.sqrt(tensors["running_var"] + 1e-5)
    expected = expected * tensors["weight"] + tensors["bias"]
    assert np.allclose(loaded.eval()(x), expected, rtol=1e-5)
