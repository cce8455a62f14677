"""`es.save` and `es.load`: the loaded arrays, and the format of a file."""

import json
import os
import re
import struct
import sys
import types

import equinox as eqx
import hypothesis as hp
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
from helpers import rejects

import eqx_state as es


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


class Net(es.Module):
    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    table: es.Buffer
    index: jax.Array
    rate: float

    def __init__(self, seed):
        a, b, c, d, e = jr.split(jr.key(seed), 5)
        self.linear = eqx.nn.Linear(2, 3, key=a)
        self.norm = es.nn.BatchNorm(3).replace(mean=jr.normal(b, (3,)))
        self.dropout = es.nn.Dropout(0.5, key=c)
        self.table = jr.normal(d, (2,), jnp.bfloat16)
        self.index = jr.bernoulli(e, shape=(4,))
        self.rate = 0.1


# --- Laws -----------------------------------------------------------------------------


def test_a_model_its_optimizer_and_a_step_into_an_abstract_tree(path):
    tx = optax.adam(0.1)

    def start(seed):
        model = Net(seed)
        optimizer = es.Optimizer(tx).init(model)
        return {"trained": (model, optimizer), "step": jnp.array(0)}

    tree = {**start(0), "step": jnp.array(7)}
    es.save(path, tree)
    loaded = es.load(path, eqx.filter_eval_shape(lambda: start(1)))
    assert eqx.tree_equal(loaded, tree)


ARRAYS = hnp.arrays(
    st.sampled_from("? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8".split()),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)


@hp.settings(suppress_health_check=[hp.HealthCheck.function_scoped_fixture])
@hp.given(tree=st.lists(ARRAYS, max_size=4), is_swapped=st.booleans())
def test_arrays_of_numpy_of_every_shape_and_order(tree, is_swapped, path):
    tree = [x.T for x in tree]  # not contiguous
    swapped = [x.astype(x.dtype.newbyteorder()) for x in tree] if is_swapped else tree
    es.save(path, swapped)
    for like in (tree, swapped):
        zeros = [np.zeros_like(x) for x in like]
        for loaded in (
            es.load(path, zeros),
            es.load_state_dict(zeros, es.state_dict(swapped)),
        ):
            for old, new in zip(like, loaded, strict=True):
                assert type(new) is np.ndarray
                assert (new.dtype, new.shape) == (old.dtype, old.shape)
                assert new.tobytes() == old.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_the_order_of_bytes_does_not_matter(dtype, path):
    big, little = (np.arange(6, dtype=order + dtype).reshape(2, 3) for order in "><")
    es.save(path, {"x": big})
    with safetensors.safe_open(path, "np") as file:
        assert (file.get_tensor("['x']") == little).all()
    ours = {"x": jnp.zeros((2, 3), little.dtype)}
    for loaded in (es.load(path, ours), es.load_state_dict(ours, {"['x']": big})):
        assert isinstance(loaded["x"], jax.Array)
        assert (loaded["x"] == little).all()
    with rejects(ours, ValueError, "wrong dtype", "float64 instead of"):
        es.load_state_dict(ours, {"['x']": np.zeros((2, 3), ">f8")})


OF_JAX = """bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
float8_e8m0fnu complex64 bool""".split()


@pytest.mark.parametrize("dtype", [*OF_JAX, "float64", "int64"])
def test_dtypes_of_jax(dtype, path):
    with jax.enable_x64("64" in dtype):
        tree = [jnp.ones(shape, dtype) for shape in [(), (0, 2), (3,), (2, 2)]]
        es.save(path, tree)
        loaded = es.load(path, [jnp.zeros_like(x) for x in tree])
        assert all(isinstance(x, jax.Array) and x.dtype == dtype for x in loaded)
        assert eqx.tree_equal(loaded, tree)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_are_restored_as_typed_keys(impl, path):
    tree = [jr.key(1, impl=impl), jr.split(jr.key(2, impl=impl), (2, 3))]
    es.save(path, tree)
    loaded = es.load(
        path, [jr.key(0, impl=impl), jr.split(jr.key(0, impl=impl), (2, 3))]
    )
    assert eqx.tree_equal(loaded, tree)
    assert [jr.key_impl(x) for x in loaded] == [impl, impl]


def test_only_selected_arrays_are_saved_and_loaded(path):
    saved, model = Net(0), Net(1)
    es.save(path, saved)
    for filters in ([es.Parameter], [es.not_(es.Rng)], [es.State, es.not_(es.Rng)]):
        loaded = es.load(path, model, *filters)
        assert eqx.tree_equal(loaded, model.update(saved.filter(*filters)))
    es.save(path, saved, es.BatchStat)
    names = {"norm.mean", "norm.var", "norm.count"}
    assert safetensors.numpy.load_file(path).keys() == names
    loaded = es.load(path, model, es.BatchStat)
    assert eqx.tree_equal(loaded, model.update(saved.filter(es.BatchStat)))
    abstract = eqx.filter_eval_shape(lambda: Net(1))
    loaded = es.load(path, abstract, es.BatchStat)  # the rest stays abstract
    assert loaded.linear.weight is abstract.linear.weight
    assert eqx.tree_equal(loaded.norm.mean, saved.norm.mean)


# --- The file -------------------------------------------------------------------------


def test_every_reader_of_safetensors_finds_the_arrays_by_name(path):
    model = Net(0)
    es.save(path, model)
    arrays = safetensors.numpy.load_file(path)
    expected = {**es.state_dict(model), "dropout.rng": jr.key_data(model.dropout.rng)}
    assert arrays.keys() == expected.keys()
    for name, x in expected.items():
        assert arrays[name].dtype == x.dtype
        assert np.array_equal(arrays[name], x)
    with safetensors.safe_open(path, "np") as file:
        about = json.loads(file.metadata()["eqx_state"])
    assert about == {"version": 1, "keys": {"dropout.rng": "threefry2x32"}}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_files_of_other_programs(metadata, path):
    model = Net(0)
    arrays = es.state_dict(model, es.Parameter)
    tensors = {name: np.asarray(x) for name, x in arrays.items()}
    safetensors.numpy.save_file(tensors, path, metadata)
    loaded = es.load(path, Net(1), es.Parameter)
    assert eqx.tree_equal(loaded, Net(1).update(model.filter(es.Parameter)))
    assert es.load_metadata(path) == (metadata or {})


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("like", [jnp.zeros((2, 2), bool), np.zeros((2, 2), bool)])
def test_each_byte_of_a_bool_but_0_is_true(like, path):
    entries = {
        "['m']": {"dtype": "BOOL", "shape": [2, 2], "data_offsets": [0, 4]},
        "['n']": {"dtype": "BOOL", "shape": [], "data_offsets": [4, 5]},
    }
    write(path, entries, bytes([0, 1, 2, 255, 128]))
    loaded = es.load(path, {"m": like, "n": like[0, 0]})
    for found, true in [(loaded["m"], 3), (loaded["n"], 1)]:
        # A bool with another byte counts as true, but is not equal to `True`.
        assert np.asarray(found).view("uint8").sum() == true
        assert int(found.astype(int).sum()) == int((found == True).sum()) == true  # noqa: E712


def test_an_unknown_dtype_is_an_error_only_if_it_is_selected(path):
    x = {"dtype": "F4", "shape": [4], "data_offsets": [4, 6]}
    y = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    write(path, {"['y']": y, "['x']": x}, struct.pack("<f", 2.0) + b"ab")
    like = {"x": jnp.zeros(4), "y": jnp.array(0.0)}
    assert es.load(path, like, es.path_matches("*y*"))["y"] == 2.0
    with rejects(like, ValueError, r"\['x'\]: .*F4.* instead of float32"):
        es.load(path, like)


# --- Files that cannot be read --------------------------------------------------------

GOOD = {"": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def about(text):
    text = text if isinstance(text, str) else json.dumps(text)
    return {"__metadata__": {"eqx_state": text}, **GOOD}, bytes(8)


BROKEN_HEADERS = {
    "empty": b"",
    "no JSON": (b"{nothing", b""),
    "deeply nested": (b"[" * 200_000 + b"]" * 200_000, b""),
    "more data": (GOOD, bytes(9)),
    "metadata of numbers": ({"__metadata__": {"a": 3}, **GOOD}, bytes(8)),
}
BROKEN_BY_US = {
    "ours is no JSON": about("{"),
    "ours is something else": about("[]"),
    "ours is deeply nested": about("[" * 200_000),
    "later version": about({"version": 2}),
    "no such key": about({"keys": {"a": "rbg"}}),
    "key of floats": about({"keys": {"": "threefry2x32"}}),
    "no such generator": about({"keys": {"": "dice"}}),
}
MESSAGE = r"`es\.{}` cannot read `.*/model.safetensors`: it is not a safetensors file"


@pytest.mark.parametrize("name", [*BROKEN_HEADERS, *BROKEN_BY_US])
def test_a_file_that_is_broken(name, path):
    content = {**BROKEN_BY_US, **BROKEN_HEADERS}[name]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write(path, *content)
    with pytest.raises(ValueError, match=MESSAGE.format("load")):
        es.load(path, jnp.zeros(2))
    if name in BROKEN_HEADERS:
        with pytest.raises(ValueError, match=MESSAGE.format("load_metadata")):
            es.load_metadata(path)


def test_a_file_cut_off_anywhere(path):
    es.save(path, Net(0))
    whole = path.read_bytes()
    for size in [0, 4, 8, 9, 40, *range(100, len(whole), 400), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cannot read.*is truncated"):
            es.load(path, Net(1))


def test_a_file_that_does_not_exist(tmp_path):
    for path in (tmp_path / "none", str(tmp_path / "none" / "a")):
        with pytest.raises(FileNotFoundError, match="none"):
            es.load(path, Net(0))
        with pytest.raises(FileNotFoundError, match="none"):
            es.load_metadata(path)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        es.load(tmp_path, Net(0))


def test_one_error_lists_all_that_does_not_fit(path):
    es.save(path, {"b": jnp.zeros(2), "k": jr.key(0), "z": jnp.zeros(1)})
    like = {"a": jnp.zeros(1), "b": jnp.zeros(3), "k": jr.key(0, impl="rbg")}
    fragments = (
        r"the file `.*/model.safetensors` does not fit",
        r"missing:\n    \['a'\]\n",
        r"unexpected:\n    \['z'\]\n",
        r"wrong shape:\n    \['b'\]: \(2,\) instead of \(3,\)\n",
        r"wrong dtype:\n    \['k'\]: key<fry> instead of key<rbg>\n",
        r"strict=False.*To require all arrays that a filter selects",
    )
    with rejects(like, ValueError, *fragments):
        es.load(path, like)
    with rejects(like, ValueError, r"wrong shape:\n    \['b'\]"):
        es.load(path, like, strict=False)


def test_selected_arrays_must_be_in_the_file(path):
    es.save(path, {"a": jnp.zeros(1), "b": jnp.zeros(1)})
    only_a = es.path_matches("*a*")
    like = {"a": jnp.ones(1), "b": jnp.zeros(7), "c": 0}
    assert es.load(path, like, only_a)["a"] == 0
    assert es.load(path, {"a": like["a"]}, only_a) == {"a": 0}
    with rejects(like, ValueError, r"unexpected:\n    \['b'\]\n"):
        es.load(path, {"a": like["a"]})
    es.save(path, Net(0), es.Parameter)
    model = Net(1)
    text = r"missing:\n    norm.count\n    norm.mean\n    norm.var\n`like` must be"
    with rejects(model, ValueError, text):
        es.load(path, model, es.BatchStat)


def test_the_message_has_the_code_that_loads_a_part(path):
    model = eqx.nn.MLP(2, 2, 2, 1, key=jr.key(0))
    es.save(path, {"model": model, "step": jnp.array(1)})
    zeros = es.map(jnp.zeros_like, model, on=es.Parameter)
    with pytest.raises(ValueError, match="saved dict: `") as info:
        es.load(path, zeros)
    code = re.search(r"saved dict: `([^`]*)`", str(info.value))[1]
    assert eqx.tree_equal(eval(code, {"es": es, "path": path, "model": zeros}), model)


def test_a_model_before_init(path):
    lazy = [es.lazy(eqx.nn.Linear, 2, 3)]
    with pytest.raises(es.NotInitializedError, match=r"`\[0\]`"):
        es.save(path, lazy)
    assert not path.exists()
    es.save(path, lazy[0].f(jr.key(0)))
    with pytest.raises(es.NotInitializedError, match=r"`\[0\]`"):
        es.load(path, lazy)


def test_safetensors_is_not_installed(path, monkeypatch):
    es.save(path, Net(0))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for use in (lambda: es.save(path, Net(0)), lambda: es.load(path, Net(0))):
        with pytest.raises(ImportError, match="safetensors.*the extra `io`") as info:
            use()
    # From a clone or from a wheel.
    assert '`python -m pip install "safetensors>=0.8"`' in str(info.value)


# --- Metadata -------------------------------------------------------------------------

METADATA = {"epoch": "3", "": "", "ö \x00\n\x7f\u2028": "ß🙂\\/"}


@pytest.mark.parametrize("metadata", [types.MappingProxyType(METADATA), {}])
def test_metadata_is_restored(path, metadata):
    es.save(path, Net(0), metadata=metadata)
    assert es.load_metadata(path) == metadata
    assert eqx.tree_equal(es.load(path, Net(1)), Net(0))
    # Other programs see the same entries.
    with safetensors.safe_open(path, "numpy") as file:
        assert {
            k: x for k, x in file.metadata().items() if k != "eqx_state"
        } == metadata


def test_one_key_of_the_metadata_is_reserved(path):
    with pytest.raises(ValueError, match="the key `'eqx_state'` of `metadata`"):
        es.save(path, Net(0), metadata={"eqx_state": "3"})
    assert os.listdir(path.parent) == []


def test_an_array_cannot_have_the_name_of_the_metadata(path):
    class Meta(eqx.Module):
        __metadata__: jax.Array
        other: jax.Array

    tree = Meta(jnp.ones(2), jnp.ones(2))
    with rejects(
        tree, ValueError, "called `__metadata__`", r'`es.save\(path, {"model"'
    ):
        es.save(path, tree)
    assert os.listdir(path.parent) == []
    es.save(path, tree, es.path_matches("other"))
    es.save(path, {"model": tree})
    assert eqx.tree_equal(es.load(path, {"model": tree}), {"model": tree})


# --- Not strict -----------------------------------------------------------------------


def test_not_strict_requires_a_name_in_common(path):
    es.save(path, {"model": jnp.ones(2)})
    like = {"a": jnp.zeros(2), "b": jnp.zeros(2, int)}
    message = r"(?s)missing:\n    \['a'\]\n.*\['b'\]"
    with rejects(like, ValueError, message, r"unexpected:\n    \['model'\]"):
        es.load(path, like, strict=False)
    with rejects(like, ValueError, r"missing:\n    \['b'\]\n`like` must be a tree"):
        es.load(path, like, es.path_matches("*b*"), strict=False)
    es.save(path, {})
    with rejects(like, ValueError, message):
        es.load(path, like, strict=False)
    assert es.load(path, {}, strict=False) == {}


def test_strict_is_given_by_name(path):
    es.save(path, Net(0))
    with pytest.raises(TypeError, match="`False` is no.* filter"):
        es.load(path, Net(0), False)


WEIGHTS, BIASES = (es.path_matches(f"*.{name}") for name in ("weight", "bias"))


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        ([es.path_matches("layer.*")], r"layer\.\*.*no array.*layers\[0\]"),
        ([es.BatchStat], "`es.BatchStat` selects no array"),
        ([es.Parameter, es.not_(es.any_of(WEIGHTS, BIASES))], "not_.*no array"),
        ([WEIGHTS, BIASES], "weight.*, .*bias.*no array.*satisfy all"),
    ],
    ids=["typo", "kind", "combined", "together"],
)
@pytest.mark.parametrize("strict", [True, False])
def test_filters_that_select_nothing_are_an_error(filters, text, strict, path):
    model = eqx.nn.MLP(2, 2, 2, 1, key=jr.key(0))
    d = es.state_dict(model)
    es.save(path, model)
    before = path.read_bytes()
    for call in (
        lambda: es.save(path, model, *filters),
        lambda: es.load(path, model, *filters, strict=strict),
        lambda: es.load_state_dict(model, d, *filters, strict=strict),
    ):
        with rejects(model, ValueError, text):
            call()
    assert path.read_bytes() == before
    assert es.state_dict(model, *filters) == {}  # an answer, which nothing relies on


def test_a_tree_without_arrays_may_be_saved_but_no_filter_selects_in_it(path):
    es.save(path, {"rate": 0.1})
    assert es.load(path, {"rate": 0.2}) == {"rate": 0.2}
    with pytest.raises(ValueError, match=r"`es.Parameter` selects no array"):
        es.save(path, {}, es.Parameter)


# --- Values that change, if dtypes do -------------------------------------------------

TOO_LARGE = [
    (np.array([1_700_000_000_000, 1]), jnp.int32),
    (np.array([[-1, 2**40]], np.int64), jnp.int32),
    (np.uint64(2**63), jnp.uint32),
    (np.array([1.0, -1e300, np.inf]), jnp.float32),
]


def both(path, tree, like, **options):
    """The tree in a file and in a dictionary, loaded into `like`."""
    es.save(path, tree)
    yield lambda: es.load(path, like, **options)
    yield lambda: es.load_state_dict(like, es.state_dict(tree), **options)


@pytest.mark.parametrize(("array", "dtype"), TOO_LARGE, ids=range(4))
def test_a_number_that_is_too_large_for_jax_is_listed(array, dtype, path):
    small = np.ones(3, array.dtype)
    tree = {"x": array, "y": small, "z": array[None], "wrong": np.ones(2)}
    zeros = jax.tree.map(np.zeros_like, tree)
    like = jax.eval_shape(lambda: zeros)
    assert like["x"].dtype == dtype
    name = np.dtype(dtype).name
    lines = [f"['{k}']: {array.dtype} does not fit into {name}" for k in "xz"]
    listed = r"too large:\n    " + r"\n    ".join(map(re.escape, lines))
    for load in both(path, tree, like):
        with pytest.raises(ValueError, match=listed + r"\nLoad .*`jax_enable_x64`"):
            load()
    for load in both(path, tree, {**like, "wrong": jnp.ones(3)}):  # beside the others
        with pytest.raises(ValueError, match=r"(?s)wrong shape.*" + listed):
            load()
    for load in both(path, {"y": small}, {"y": like["y"]}):
        assert load()["y"].dtype == dtype
    with jax.enable_x64(True):
        for load in both(path, tree, jax.eval_shape(lambda: zeros)):
            assert eqx.tree_equal(load(), jax.tree.map(jnp.asarray, tree))
    for load in both(path, tree, zeros):
        assert eqx.tree_equal(load(), tree)  # NumPy arrays keep their dtypes


FLOATS = ["bfloat16", "float16", "float32", "float64", "float8_e5m2"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("is_numpy", [True, False])
def test_cast_converts_floats(given, dtype, is_numpy, path):
    x = np.array([[0.1, -3.0], [np.inf, np.nan]]).astype(given)
    tree = {"x": x, "n": np.arange(2, dtype=np.int32), "k": jr.key(0)}
    zeros = np.zeros((2, 2), dtype)
    zeros = zeros if is_numpy else jnp.asarray(zeros)
    dtype = zeros.dtype.name
    like = {"x": zeros, "n": jnp.zeros(2, int), "k": jr.key(1)}
    es.save(path, tree)
    for each in [like] if is_numpy else [like, jax.eval_shape(lambda: like)]:
        loaded = es.load(path, each, cast=True)
        assert loaded["x"].dtype == dtype
        assert np.asarray(loaded["x"]).tobytes() == x.astype(dtype).tobytes()
        assert loaded["k"] == tree["k"]
        assert loaded["n"].tolist() == [0, 1]
    if given != dtype:
        text = rf"{given} instead of {dtype} \(`cast=True` converts floats\)"
        with pytest.raises(ValueError, match=text):
            es.load(path, like)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_cast_that_overflows_is_listed(dtype, path):
    tree = {"a": jnp.array([1.0, 1e6]), "b": jnp.ones(2)}
    es.save(path, tree)
    like = {"a": jnp.zeros(2, dtype), "b": jnp.zeros(2, dtype)}
    text = rf"too large:\n    \['a'\]: float32 does not fit into {dtype}\nLoad"
    with rejects(like, ValueError, text):
        es.load(path, like, cast=True)


@pytest.mark.parametrize(
    ("array", "like"),
    [
        (np.arange(2), jnp.zeros(2)),
        (np.arange(2, dtype="i4"), np.zeros(2, "i8")),
        (np.ones(2, "f4"), jnp.zeros(2, int)),
        (np.ones(2, "f4"), jnp.zeros(2, complex)),
        (np.ones(2, bool), np.ones(2, "f4")),
        (jr.key_data(jr.key(0)), jr.key(0)),
        (np.ones(2, "f4"), jax.ShapeDtypeStruct((2,), jnp.float64)),
    ],
    ids=range(7),
)
def test_cast_converts_nothing_but_floats(array, like, path):
    es.save(path, {"x": array})
    with pytest.raises(ValueError, match="wrong"):
        es.load(path, {"x": like}, cast=True)


@pytest.mark.parametrize("cast", [jnp.bfloat16, "float32", None])
def test_cast_is_a_bool(cast, path):
    with pytest.raises(TypeError, match="floats get the dtypes of"):
        es.load(path, {}, cast=cast)


@pytest.mark.parametrize(
    "make",
    [lambda: es.Optimizer(optax.adam(1.0)), lambda: es.Ema(0.9)],
    ids=["optimizer", "average"],
)
def test_an_optimizer_or_an_average_before_init_has_nothing_to_load(path, make):
    model = {"w": jnp.ones(2)}
    trained = model, make().init(model)
    es.save(path, trained)
    message = r"(?s)unexpected:.*before `init`.*es\.Optimizer\(tx\)\.init\(model\)"
    with pytest.raises(ValueError, match=message):
        es.load(path, (model, make()))
    assert eqx.tree_equal(es.load(path, trained), trained)
    # A part of the file may still be loaded.
    assert es.load(path, (model, make()), es.path_matches("*'w'*"))[0]["w"][0] == 1


def test_a_file_of_a_state_dict_is_not_one_of_a_model(path):
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    es.save(path, es.state_dict(linear))
    call = "es.load_state_dict(model, es.load(path, es.state_dict(model)))"
    with rejects(linear, ValueError, re.escape(call)):
        es.load(path, linear)
