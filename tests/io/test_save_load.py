"""`es.save` and `es.load`: what comes back, and what a file is like."""

import collections
import json
import os
import re
import struct
import sys
import types
from pathlib import Path

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
from helpers import rejects, untouched
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from zoo import CASES

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


@pytest.mark.parametrize("name", CASES)
def test_loading_what_was_saved_gives_the_model(name, path):
    model, other = CASES[name].model(), CASES[name].make(key=jr.key(8))
    with untouched(model), untouched(other):
        es.save(path, model)
        loaded = es.load(path, other)
    expected = es.load_state_dict(other, es.state_dict(model))
    assert eqx.tree_equal(loaded, expected)


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


NATIVE = "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8".split()
DTYPES = st.sampled_from([*NATIVE, *(f">{d}" for d in NATIVE[2:] if d[1:] != "1")])
ARRAYS = hnp.arrays(
    DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
)


@hp.settings(suppress_health_check=[hp.HealthCheck.function_scoped_fixture])
@hp.given(tree=st.lists(ARRAYS, max_size=4))
def test_arrays_of_numpy_of_every_shape_and_order(tree, path):
    tree = [x.T for x in tree]  # not contiguous
    es.save(path, tree)
    loaded = es.load(path, [np.zeros_like(x) for x in tree])
    for old, new in zip(tree, loaded, strict=True):
        assert type(new) is np.ndarray
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert new.tobytes() == old.tobytes()


OF_JAX = """bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
float8_e8m0fnu float16 float32 complex64 bool int8 uint8 int16 uint32""".split()


@pytest.mark.parametrize("shape", [(), (0, 2), (3,)], ids=["scalar", "empty", "vector"])
@pytest.mark.parametrize("dtype", OF_JAX)
def test_dtypes_of_jax(dtype, shape, path):
    tree = {"x": jnp.ones(shape, dtype)}
    es.save(path, tree)
    loaded = es.load(path, {"x": jnp.zeros(shape, dtype)})
    assert isinstance(loaded["x"], jax.Array)
    assert eqx.tree_equal(loaded, tree)


def test_64_bits(path):
    with jax.enable_x64(True):
        tree = [jnp.arange(3), jnp.arange(3.0)]
        es.save(path, tree)
        loaded = es.load(path, [jnp.zeros(3, int), jnp.zeros(3)])
        assert eqx.tree_equal(loaded, tree)
        assert [x.dtype for x in loaded] == ["int64", "float64"]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_come_back_as_such(impl, path):
    tree = [jr.key(1, impl=impl), jr.split(jr.key(2, impl=impl), (2, 3))]
    es.save(path, tree)
    loaded = es.load(
        path, [jr.key(0, impl=impl), jr.split(jr.key(0, impl=impl), (2, 3))]
    )
    assert eqx.tree_equal(loaded, tree)
    assert [jr.key_impl(x) for x in loaded] == [impl, impl]


def test_only_what_the_filters_select_is_saved_and_loaded(path):
    saved, model = Net(0), Net(1)
    es.save(path, saved)
    for filters in ([es.Parameter], [es.not_(es.Rng)], [es.State, es.not_(es.Rng)]):
        loaded = es.load(path, model, *filters)
        assert eqx.tree_equal(loaded, model.update(saved.filter(*filters)))
    es.save(path, saved, es.BatchStat)
    assert safetensors.numpy.load_file(path).keys() == {"norm.mean", "norm.var"}
    loaded = es.load(path, model, es.BatchStat)
    assert eqx.tree_equal(loaded, model.update(saved.filter(es.BatchStat)))


def test_what_is_not_loaded_stays_abstract(path):
    es.save(path, Net(0), es.Parameter)
    abstract = eqx.filter_eval_shape(lambda: Net(1))
    loaded = es.load(path, abstract, es.Parameter)
    assert loaded.norm.mean is abstract.norm.mean
    assert eqx.tree_equal(loaded.linear, Net(0).linear)


def test_modes_stay_those_of_like(path):
    es.save(path, Net(0).eval())
    assert eqx.tree_equal(es.load(path, Net(1)), Net(0))
    es.save(path, Net(0))
    assert eqx.tree_equal(es.load(path, Net(1).eval().freeze()), Net(0).eval().freeze())


def test_an_array_on_many_devices_is_one_in_the_file_and_is_spread_again(path):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, P("a", "b"))
    model = {"x": jnp.arange(32.0).reshape(8, 4), "key": jr.split(jr.key(0), (4, 2))}
    spread = jax.device_put(model, sharding)
    es.save(path, spread)
    assert np.array_equal(safetensors.numpy.load_file(path)["['x']"], model["x"])
    assert eqx.tree_equal(es.load(path, model), model)
    loaded = es.load(path, spread)
    assert {x.sharding for x in loaded.values()} == {sharding}
    assert eqx.tree_equal(jax.device_put(loaded, jax.devices()[0]), model)


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


def test_equal_arrays_make_equal_files(path):
    items = [(f"{i}", es.nn.Dropout(key=i)) for i in range(20)] + [("net", Net(0))]
    es.save(path, collections.OrderedDict(items))
    first = path.read_bytes()
    es.save(path, collections.OrderedDict(reversed(items)))
    assert path.read_bytes() == first


def test_files_of_other_programs(path):
    model = Net(0)
    arrays = es.state_dict(model, es.Parameter)
    tensors = {name: np.asarray(x) for name, x in arrays.items()}
    safetensors.numpy.save_file(tensors, path)
    loaded = es.load(path, Net(1), es.Parameter)
    assert eqx.tree_equal(loaded, Net(1).update(model.filter(es.Parameter)))
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    assert eqx.tree_equal(es.load(path, Net(1), es.Parameter), loaded)


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_dtype_that_no_array_has_only_matters_where_it_is_wanted(path):
    x = {"dtype": "F4", "shape": [4], "data_offsets": [4, 6]}
    y = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    write(path, {"['y']": y, "['x']": x}, struct.pack("<f", 2.0) + b"ab")
    like = {"x": jnp.zeros(4), "y": jnp.array(0.0)}
    assert es.load(path, like, es.path_matches("*y*"))["y"] == 2.0
    with rejects(like, ValueError, r"\['x'\]: .*F4.* instead of float32"):
        es.load(path, like)


# --- Files that cannot be read --------------------------------------------------------

GOOD = {"": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def about(**metadata):
    return {"__metadata__": {"eqx_state": json.dumps(metadata)}, **GOOD}


BROKEN = {
    "empty": b"",
    "text": b"a file of some other kind, and long enough to have a header",
    "zip": b"PK\x03\x04" + bytes(100),
    "no JSON": (b"{nothing", b""),
    "short of data": (GOOD, bytes(7)),
    "more data": (GOOD, bytes(9)),
    "another size": ({"": {**GOOD[""], "shape": [3]}}, bytes(8)),
    "outside": ({"": {**GOOD[""], "data_offsets": [8, 16]}}, bytes(8)),
    "a gap": ({"": {**GOOD[""], "data_offsets": [8, 16]}}, bytes(16)),
    "two in one place": ({**GOOD, "a": GOOD[""]}, bytes(8)),
    "no header": (b"", bytes(8)),
    "metadata is no JSON": (
        {"__metadata__": {"eqx_state": "{"}, **GOOD},
        bytes(8),
    ),
    "metadata is something else": (
        {"__metadata__": {"eqx_state": "[]"}, **GOOD},
        bytes(8),
    ),
    "later version": (about(version=2), bytes(8)),
    "no such key": (about(keys={"a": "rbg"}), bytes(8)),
    "key of floats": (about(keys={"": "threefry2x32"}), bytes(8)),
    "no such generator": (about(keys={"": "dice"}), bytes(8)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_broken(name, path):
    if isinstance(BROKEN[name], bytes):
        path.write_bytes(BROKEN[name])
    else:
        write(path, *BROKEN[name])
    model = jnp.zeros(2)
    with rejects(model, ValueError, r"`es.load` cannot read `.*/model.safetensors`"):
        es.load(path, model)


def test_a_file_cut_off_anywhere(path):
    es.save(path, Net(0))
    whole = path.read_bytes()
    for size in [*range(0, 40), *range(40, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cannot read.*is truncated"):
            es.load(path, Net(1))


def test_a_header_that_is_cut_off_is_told_by_its_size(path):
    text = json.dumps(GOOD).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text[:-1])
    sizes = f"a header of {len(text)} bytes does not fit in the {len(text) - 1} there"
    with pytest.raises(ValueError, match=sizes):
        es.load(path, jnp.zeros(2))


def test_there_is_no_file(tmp_path):
    model = Net(0)
    for path in (tmp_path / "none", str(tmp_path / "none" / "a")):
        with rejects(model, FileNotFoundError, "none"):
            es.load(path, model)
    with rejects(model, IsADirectoryError, str(tmp_path)):
        es.load(tmp_path, model)


def test_one_error_lists_all_that_does_not_fit(path):
    saved = {"b": jnp.zeros(2), "c": jnp.zeros(2), "k": jr.key(0), "z": jnp.zeros(1)}
    like = {"a": jnp.zeros(1), "b": jnp.zeros(3), "c": jnp.zeros(2, int)}
    like["k"] = jr.key(0, impl="rbg")
    es.save(path, saved)
    before = path.read_bytes()
    fragments = (
        r"the file `.*/model.safetensors` does not fit",
        r"missing:\n    \['a'\]\n",
        r"unexpected:\n    \['z'\]\n",
        r"wrong shape:\n    \['b'\]: \(2,\) instead of \(3,\)\n",
        r"wrong dtype:\n    \['c'\]: float32 instead of int32\n"
        r"    \['k'\]: key<fry> instead of key<rbg>\n",
        r"Filters say what must be in the file",
    )
    with rejects(like, ValueError, *fragments):
        es.load(path, like)
    assert path.read_bytes() == before


def test_names_that_like_has_not_are_unexpected_without_filters(path):
    es.save(path, {"a": jnp.zeros(1), "b": jnp.zeros(1)})
    only_a = es.path_matches("*a*")
    like = {"a": jnp.ones(1), "b": jnp.zeros(7), "c": 0}
    assert es.load(path, like, only_a)["a"] == 0
    assert es.load(path, {"a": like["a"]}, only_a) == {"a": 0}
    with rejects(like, ValueError, r"unexpected:\n    \['b'\]\n"):
        es.load(path, {"a": like["a"]})


def test_what_the_filters_select_must_be_in_the_file(path):
    es.save(path, Net(0), es.Parameter)
    model = Net(1)
    with rejects(model, ValueError, r"missing:\n    norm.mean\n    norm.var\nFilters"):
        es.load(path, model, es.BatchStat)


def test_a_model_before_init(path):
    lazy = [es.lazy(eqx.nn.Linear, 2, 3)]
    with pytest.raises(es.NotInitializedError, match=r"`\[0\]`"):
        es.save(path, lazy)
    assert not path.exists()
    es.save(path, lazy[0].f(jr.key(0)))
    with pytest.raises(es.NotInitializedError, match=r"`\[0\]`"):
        es.load(path, lazy)


def test_safetensors_is_not_installed(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r'extra `io`.* pip install "\.\[io\]"'):
        es.save(path, Net(0))
    assert not os.listdir(path.parent)


def test_a_part_is_loaded_from_the_file_of_the_whole(tmp_path):
    path = tmp_path / "whole.safetensors"
    whole = {"body": es.nn.Dropout(0.5, key=0), "head": jnp.ones(2, jnp.float8_e5m2)}
    es.save(path, whole)
    like = {"body": es.nn.Dropout(0.5, key=1)}
    loaded = es.load(path, like, es.TreePart)
    assert loaded["body"].rng == whole["body"].rng
    with pytest.raises(ValueError, match=r"(?s)unexpected:.*head.*es\.TreePart"):
        es.load(path, like)


# --- Metadata -------------------------------------------------------------------------


METADATA = {
    "epoch": "3",
    "config": '{"width": 8}',
    "": "",
    "ö \x00\n\x7f\u2028": "ß🙂\\/",
}


def test_metadata_comes_back(path):
    es.save(path, Net(0), metadata=METADATA)
    assert es.load_metadata(path) == METADATA
    assert es.load_metadata(str(path)) == METADATA
    assert eqx.tree_equal(es.load(path, Net(1)), Net(0))
    # As any program sees them.
    with safetensors.safe_open(path, "numpy") as file:
        seen = file.metadata()
    del seen["eqx_state"]
    assert seen == METADATA


def test_without_metadata_there_is_none(path):
    for options in ({}, {"metadata": None}, {"metadata": {}}):
        es.save(path, Net(0), **options)
        assert es.load_metadata(path) == {}


def test_metadata_is_a_snapshot_of_any_mapping(path):
    es.save(path, Net(0), metadata=types.MappingProxyType({"a": "b"}))
    assert es.load_metadata(path) == {"a": "b"}


def test_equal_metadata_make_equal_files(path):
    files = set()
    items = [(f"name {i}", str(i)) for i in range(20)]
    for i in range(5):
        es.save(path, Net(0), metadata=dict(items[i:] + items[:i]))
        files.add(path.read_bytes())
    assert len(files) == 1


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"step": 3}, "`'step'` has a `int`"),
        ({3: "step"}, "`3` has a `str`"),
        ({"a": "b", "x": jnp.ones(2)}, "`'x'` has a `ArrayImpl`"),
        ({"a": None}, "`'a'` has a `NoneType`"),
        ([("a", "b")], "a `list` was given"),
        ("text", "a `str` was given"),
    ],
)
def test_metadata_are_strings(path, metadata, says):
    with pytest.raises(TypeError, match=rf"dictionary of strings, and {says}.*json"):
        es.save(path, Net(0), metadata=metadata)
    assert os.listdir(path.parent) == []


def test_one_name_in_the_metadata_is_taken(path):
    with pytest.raises(ValueError, match="'eqx_state'.*Choose another"):
        es.save(path, Net(0), metadata={"eqx_state": "3"})
    assert os.listdir(path.parent) == []


def test_metadata_of_files_of_other_programs(path):
    safetensors.numpy.save_file({"x": np.ones(2)}, path)
    assert es.load_metadata(path) == {}
    safetensors.numpy.save_file({"x": np.ones(2)}, path, {"format": "pt"})
    assert es.load_metadata(path) == {"format": "pt"}
    with pytest.raises(ValueError, match=r"(?s)unexpected:\n    x\n.*No name is in"):
        es.load(path, {"x": np.ones(2)}, strict=False)


def file_of(header):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        file_of({})[:-1],
        file_of(b""),
        file_of(b"not JSON"),
        file_of(b"\xff\xfe"),
        file_of([]),
        file_of({"__metadata__": 3}),
        file_of({"__metadata__": {"a": 3}}),
        (2**63).to_bytes(8, "little") + b"{}",
    ],
    ids=range(10),
)
def test_metadata_of_a_file_that_is_not_safetensors(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="`es.load_metadata` cannot read.*truncated"):
        es.load_metadata(path)


def test_metadata_of_no_file(path):
    with pytest.raises(FileNotFoundError, match=path.name):
        es.load_metadata(path)


def test_metadata_need_no_safetensors(path, monkeypatch):
    es.save(path, Net(0), metadata={"a": "b"})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    assert es.load_metadata(path) == {"a": "b"}


# --- Not strict -----------------------------------------------------------------------


def test_not_strict_passes_over_names_that_one_of_the_two_has(path):
    es.save(path, {"a": jnp.ones(2), "c": jnp.ones(3)})
    like = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    with rejects(
        like, ValueError, r"missing:\n    \['b'\]", "unexpected", "strict=False"
    ):
        es.load(path, like)
    loaded = es.load(path, like, strict=False)
    assert loaded["a"].tolist() == [1, 1]
    assert loaded["b"] is like["b"]


def test_not_strict_with_filters_loads_what_is_selected_and_there(path):
    es.save(path, {"a": jnp.ones(2), "b": jnp.ones(2)})
    like = {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": jnp.zeros(2)}
    only = es.not_(es.path_matches("*'b'*"))
    with rejects(like, ValueError, r"missing:\n    \['c'\]\nFilters"):
        es.load(path, like, only)
    loaded = es.load(path, like, only, strict=False)
    assert loaded["a"].tolist() == [1, 1]
    assert loaded["b"] is like["b"]
    assert loaded["c"] is like["c"]


def test_not_strict_wants_the_same_shapes_and_dtypes(path):
    es.save(path, {"a": jnp.ones(2)})
    for wrong in (jnp.zeros(3), jnp.zeros(2, int)):
        like = {"a": wrong, "b": jnp.zeros(2)}
        with rejects(like, ValueError, r"wrong (shape|dtype):\n    \['a'\]"):
            es.load(path, like, strict=False)


def test_not_strict_wants_a_name_in_common(path):
    es.save(path, {"model": jnp.ones(2)})
    like = {"a": jnp.zeros(2), "b": jnp.zeros(2, int)}
    message = r"(?s)missing:\n    \['a'\]\n.*\['b'\]\n.*No name is in both"
    with rejects(like, ValueError, message, r"unexpected:\n    \['model'\]"):
        es.load(path, like, strict=False)
    with rejects(like, ValueError, r"missing:\n    \['b'\]\nNo name is in both"):
        es.load(path, like, es.path_matches("*b*"), strict=False)
    # Where there is nothing to load, nothing is missing.
    assert es.load(path, like, es.Rng, strict=False)["a"] is like["a"]
    es.save(path, {})
    assert es.load(path, like, strict=False)["a"] is like["a"]


def test_the_path_comes_first_and_the_tree_has_arrays(path):
    match = r"^`es\.{}`: the path comes first, .* and a `Net` was given\.$"
    calls = {
        r"save\(path, model\)": lambda: es.save(Net(0), path),
        r"load\(path, like\)": lambda: es.load(Net(0), path),
        r"load_metadata\(path\)": lambda: es.load_metadata(Net(0)),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=match.format(name)):
            call()
    es.save(path, Net(0))
    with pytest.raises(ValueError, match=r"\n`like` has no arrays\. .*eval_shape"):
        es.load(path, Net)
    assert es.load(path, {}, es.Parameter) == {}


def test_strict_is_given_by_name(path):
    es.save(path, Net(0))
    with pytest.raises(TypeError, match="`False` is no.* filter"):
        es.load(path, Net(0), False)


def test_the_two_ways_to_install_the_extra_are_one(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match="safetensors") as info:
        es.save(path, Net(0))
    command = re.search("`(python -m pip install [^`]*)`", str(info.value))[1]
    root = Path(__file__).parents[2]
    for page in ("README.md", "docs/tour.md", "docs/guides/checkpoints.md"):
        assert command in (root / page).read_text()


def test_a_file_of_another_tree_is_an_error_that_says_so(tmp_path):
    model = [jnp.ones(2)]
    es.save(tmp_path / "run.safetensors", {"model": model, "step": jnp.array(1)})
    with pytest.raises(ValueError, match="No name is in both"):
        es.load(tmp_path / "run.safetensors", model)
