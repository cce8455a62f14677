"""`es.state_dict` and `es.load_state_dict`: the arrays of a tree by name."""

import collections
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import rejects, untouched
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_state as es


class Everything(es.Module):
    """Arrays of every kind, of none and of NumPy, and values that are not arrays."""

    weight: es.Parameter
    table: es.Buffer
    mean: es.BatchStat
    rng: es.Rng
    index: jax.Array
    host: np.ndarray
    act: object
    rate: float

    def __init__(self, key):
        a, b, c = jr.split(key, 3)
        self.weight = jr.normal(a, (2, 3))
        self.table = jnp.full(2, 0.5, jnp.bfloat16)
        self.mean = jr.normal(b, ())
        self.rng = jr.split(c, 3)
        self.index = jnp.array([True, False])
        self.host = np.arange(3, dtype=np.int8)
        self.act, self.rate = jnp.tanh, 0.1


def everything(seed=0):
    return Everything(jr.key(seed))


NAMES = ["weight", "table", "mean", "rng", "index", "host"]

# --- Laws -----------------------------------------------------------------------------


def test_it_contains_every_array_itself_and_nothing_else():
    model = everything()
    arrays = es.state_dict(model)
    assert list(arrays) == NAMES == [part.name for part in es.parts(model)]
    for name, x in arrays.items():
        assert x is getattr(model, name)


@pytest.mark.parametrize("filters", [[], [es.Parameter], [es.State, es.not_(es.Rng)]])
def test_filters_select_as_in_filter_and_without_any_all_arrays(filters):
    model, other = everything(0), everything(1)
    arrays = es.state_dict(model, *filters)
    expected = es.filter(model, *filters or (lambda part: True,))
    assert arrays.keys() == {part.name for part in es.parts(expected)}
    loaded = es.load_state_dict(other, arrays, strict=False)
    assert eqx.tree_equal(loaded, es.update(other, expected))


def test_inside_jit_and_with_weak_types():
    @es.jit
    def copied(tree, other):
        return es.load_state_dict(other, es.state_dict(tree))

    weak = jnp.array(1.0)
    assert weak.weak_type
    loaded = copied([everything(0), weak], [everything(1), jnp.float32(0)])
    assert eqx.tree_equal(es.state_dict(loaded[0]), es.state_dict(everything(0)))
    assert not loaded[1].weak_type
    assert not es.load_state_dict([jnp.float32(0)], {"[0]": weak})[0].weak_type


def test_a_tree_without_arrays():
    for empty in ((), None, [1, "a"], es.Optimizer(optax.sgd(1.0))):
        assert es.state_dict(empty) == {}
        assert es.load_state_dict(empty, {}) == empty


def test_filters_say_what_is_loaded_and_what_must_be_there():
    model, other = everything(0), everything(1)
    d = es.state_dict(other)
    for filters in ([es.Parameter], [es.State, es.not_(es.Rng)]):
        loaded = es.load_state_dict(model, {**d, "more": 0}, *filters)
        assert eqx.tree_equal(loaded, model.update(other.filter(*filters)))
        assert loaded.rng is model.rng
    del d["weight"]
    text = r"missing:\n    weight\n`strict"
    with rejects(model, ValueError, text):
        es.load_state_dict(model, d, es.any_of(es.Parameter, es.BatchStat))
    half = es.any_of(es.Parameter, es.BatchStat)
    loaded = es.load_state_dict(model, d, half, strict=False)
    assert eqx.tree_equal(loaded, model.replace(mean=other.mean))
    theirs = {"m": other.mean, "weight": jnp.ones(7)}
    loaded = es.load_state_dict(model, theirs, es.BatchStat, rename={"mean": "m"})
    assert eqx.tree_equal(loaded, model.replace(mean=other.mean))
    with pytest.raises(TypeError, match="`False` is no.* filter"):
        es.load_state_dict(model, d, False)


# --- Names ----------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Pair:
    """A container without key paths."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_children_without_keys_are_named_by_their_position(tmp_path):
    class Model(es.Module):
        scale: Pair

        def __call__(self, x):
            return x

    model = Model(Pair(Pair(jnp.zeros(1), jnp.ones(2)), [jnp.ones(3)]))
    names = ["scale[0][0]", "scale[0][1]", "scale[1][0]"]
    assert [*es.state_dict(model)] == [part.name for part in es.parts(model)] == names
    assert "scale[0][1]: f32[2]" in es.tabulate(model)
    es.save(tmp_path / "model", model)
    loaded = es.load(tmp_path / "model", jax.tree.map(jnp.empty_like, model))
    assert eqx.tree_equal(es.state_dict(loaded), es.state_dict(model))
    frozen = es.freeze(model, lambda m: m.scale.a)
    assert [part.frozen for part in es.parts(frozen)] == [True, True, False]


def test_two_arrays_of_the_same_name_are_an_error():
    class Key:
        def __repr__(self):
            return "Key()"

    tree = [collections.OrderedDict({Key(): jnp.zeros(1), Key(): jnp.ones(1)})]
    for use in (es.state_dict, lambda tree: es.load_state_dict(tree, {})):
        with rejects(tree, ValueError, r"same name, `\[0\]\[Key\(\)\]`", r"repr"):
            use(tree)


# --- Errors ---------------------------------------------------------------------------


def test_one_error_lists_all_that_is_wrong():
    model = [jnp.zeros(2), jnp.zeros(2), jnp.zeros(2), jr.key(0), jnp.zeros(2)]
    d = {
        "z": jnp.zeros(1),
        "y": jnp.zeros(1),
        "[1]": jnp.zeros((2, 1)),
        "[2]": np.zeros(2),
        "[3]": jr.key(0, impl="rbg"),
        "[4]": [0.0, 0.0],
    }
    expected = """\
`es.load_state_dict`: the dictionary does not fit the tree.
  missing:
    [0]
  unexpected:
    y
    z
  wrong shape:
    [1]: (2, 1) instead of (2,)
  wrong dtype:
    [2]: float64 instead of float32
    [3]: key<rbg> instead of key<fry>
  not an array:
    [4]: `list`
`strict=False` skips"""
    with untouched(d), rejects(model, ValueError, "^" + re.escape(expected)):
        es.load_state_dict(model, d)


def test_names_may_differ_if_not_strict_but_shapes_and_dtypes_never():
    model = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    loaded = es.load_state_dict(model, {"['a']": jnp.ones(2), "c": 0}, strict=False)
    assert loaded["b"] is model["b"]
    assert loaded["a"].tolist() == [1, 1]
    for wrong in (jnp.ones(3), jnp.ones(2, int), jr.key(0)):
        with rejects(model, ValueError, "wrong"):
            es.load_state_dict(model, {"['a']": wrong}, strict=False)


@pytest.mark.parametrize("rename", [None, lambda name: f"theirs.{name}"])
def test_if_not_one_name_fits_it_is_an_error_even_if_not_strict(rename):
    model = {"a": jnp.zeros(2), "b": np.zeros(2)}
    d = {name: jnp.ones(2) for name in ["model", "more"]}
    text = r"(?s)missing:\n    \['a'\].*    \['b'\].*Not one name fits.*`rename=`"
    with untouched(d), rejects(model, ValueError, text, r"unexpected:\n    model\n"):
        es.load_state_dict(model, d, strict=False, rename=rename)
    with rejects(model, ValueError, text):
        es.load_state_dict(model, {}, strict=False, rename=rename)
    assert es.load_state_dict({}, d, strict=False) == {}  # nothing could fit


STRUCT = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.mark.parametrize(
    ("leaf", "value", "text"),
    [
        *((STRUCT, x, "not an array: `") for x in (1.0, [1], STRUCT)),
        (STRUCT, np.array("a"), "wrong dtype: <U1 instead of float32"),
        (STRUCT, np.array(1), "wrong dtype: int64 (converted to int32 by JAX) instead"),
        (jr.key(0), np.array(0, np.uint32), "wrong dtype: uint32 instead of key<fry>"),
        (np.float32(0), np.float64(0), "wrong dtype: float64 instead of float32"),
        # The value would be truncated.
        (
            jax.ShapeDtypeStruct((), jnp.float64),
            np.float64(0),
            "wrong dtype: float64 (converted to float32 by JAX) instead of float64",
        ),
    ],
    ids=range(8),
)
def test_a_value_that_cannot_be_the_leaf(leaf, value, text):
    kind, _, why = text.partition(": ")
    with pytest.raises(ValueError, match=rf"{kind}:\n    \['x'\]: {re.escape(why)}"):
        es.load_state_dict({"x": leaf}, {"['x']": value})


def test_a_value_that_is_not_a_dictionary():
    model = everything()
    with rejects(model, TypeError, "`d` is a dictionary, and `Everything` was"):
        es.load_state_dict(model, model)


def test_a_model_before_init():
    lazy = [es.lazy(eqx.nn.Linear, 2, 3)]
    uses = (es.state_dict, lambda tree: es.load_state_dict(tree, {}))
    for use in uses:
        with pytest.raises(es.NotInitializedError, match=r"`\[0\]`"):
            use(lazy)


# --- Types and devices of loaded arrays -----------------------------------------------


def test_numpy_arrays_stay_numpy_arrays_and_are_copied():
    tree = {"host": np.zeros(2, "f4"), "device": jnp.zeros(2), "scalar": np.float32(0)}
    d = {
        "['host']": jnp.ones(2),
        "['device']": np.ones(2, "f4"),
        "['scalar']": np.ones((), "f4"),
    }
    loaded = es.load_state_dict(tree, d)
    assert type(loaded["host"]) is np.ndarray
    assert loaded["host"].dtype == "f4"
    assert type(loaded["scalar"]) is np.float32
    assert type(es.load_state_dict([np.float64(1)], {"[0]": np.float64(5)})[0]) is (
        np.float64
    )
    assert isinstance(loaded["device"], jax.Array)
    d["['device']"][:] = 2
    assert loaded["device"].tolist() == loaded["host"].tolist() == [1, 1]
    traced = jax.jit(lambda d: es.load_state_dict(tree, d))(es.state_dict(tree))
    assert traced["host"].tolist() == [0, 0]
    again = es.load_state_dict(tree, es.state_dict(tree))
    again["host"][:] = 2
    assert tree["host"].tolist() == [0, 0]


def test_arrays_of_other_libraries_are_copied():
    memory = np.ones(2, "f4")

    class Tensor:
        shape, dtype = "unlike", "NumPy's"

        def __array__(self, dtype=None, copy=None):
            return memory.copy() if copy else memory

    for tree in (jnp.zeros(2), np.zeros(2, "f4")):
        loaded = es.load_state_dict(tree, {"": Tensor()})
        memory[:] = 2
        assert loaded.tolist() == [1, 1]
        memory[:] = 1


def test_arrays_are_loaded_onto_the_devices_of_the_tree():
    mesh = Mesh(jax.devices(), "devices")
    rows, whole = NamedSharding(mesh, P("devices")), NamedSharding(mesh, P())
    other = jax.devices()[3]
    tree = {
        "rows": jax.device_put(jnp.zeros(8), rows),
        "keys": jax.device_put(jr.split(jr.key(0), 8), whole),
        "other": jax.device_put(jnp.zeros(8), other),
        "abstract": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=rows),
        "anywhere": jnp.zeros(8),
    }
    ones = np.ones(8, "f4")
    d = dict.fromkeys(es.state_dict(tree), ones) | {"['keys']": jr.split(jr.key(1), 8)}
    loaded = es.load_state_dict(tree, d)
    assert loaded["rows"].sharding == loaded["abstract"].sharding == rows
    assert loaded["keys"].sharding.is_equivalent_to(whole, ndim=1)
    assert loaded["other"].devices() == {other}
    assert not loaded["anywhere"].committed
    assert all(jnp.array_equal(loaded[k], d[f"['{k}']"]) for k in tree)


def test_an_abstract_model_of_a_mesh_is_loaded_into_that_mesh():
    def split_over_it():
        return {"w": jax.sharding.reshard(jnp.ones((4, 2)), P("i"))}

    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((2,), ("i",), axis_types=explicit)):
        abstract = eqx.filter_eval_shape(split_over_it)
        loaded = es.load_state_dict(abstract, {"['w']": np.ones((4, 2), np.float32)})
    assert len(loaded["w"].sharding.device_set) == 2
    assert loaded["w"].sharding.spec[0] == "i"


def test_an_array_alone_has_the_empty_name():
    x = jnp.arange(3)
    assert es.state_dict(x) == {"": x}
    assert es.load_state_dict(jnp.zeros(3, int), {"": x}) is x
    with pytest.raises(ValueError, match=r"the array itself: \(2,\) instead of \(1,\)"):
        es.load_state_dict(jnp.ones(1), {"": jnp.ones(2)})


# --- Renaming -------------------------------------------------------------------------


def stack(seed=0):
    keys = jr.split(jr.key(seed), 2)
    return {"layers": [eqx.nn.Linear(2, 2, key=key) for key in keys]}


OURS = [f"['layers'][{i}].{name}" for i in range(2) for name in ("weight", "bias")]
THEIRS = ["blocks.0.w", "blocks.0.b", "blocks.1.w", "blocks.1.b"]
RENAMES = {
    "function": dict(zip(OURS, THEIRS, strict=True)).__getitem__,
    "names": dict(zip(OURS, THEIRS, strict=True)),
    "globs": {
        "['layers'][*].weight": "blocks.*.w",
        "['layers'][*].bias": "blocks.*.b",
    },
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_a_dictionary_with_other_names(rename):
    a, b = stack(0), stack(1)
    d = dict(zip(THEIRS, es.state_dict(b).values(), strict=True))
    assert eqx.tree_equal(es.load_state_dict(a, d, rename=rename), b)
    with pytest.raises(ValueError, match="missing") as info:
        es.load_state_dict(a, {"blocks.0.w": d["blocks.0.w"], "more": 0}, rename=rename)
    listed = str(info.value)
    assert "['layers'][1].bias (there: blocks.1.b)" in listed
    assert "unexpected:\n    more\n" in listed
    d["blocks.1.b"] = jnp.ones(3)
    text = r"wrong shape:\n    \['layers'\]\[1\]\.bias \(there: blocks\.1\.b\): \(3,\)"
    with rejects(a, ValueError, text):
        es.load_state_dict(a, d, strict=False, rename=rename)


def test_the_first_matching_glob_applies_and_a_star_matches_as_little_as_possible():
    tree = {"a": {"b": jnp.zeros(1), "c": jnp.zeros(2)}, "d": jnp.zeros(3)}
    d = {"first": jnp.ones(1), "a/c": jnp.ones(2), "['d']": jnp.ones(3)}
    rename = {"['a']['b']": "first", "['a']['*']": "a/*"}
    loaded = es.load_state_dict(tree, d, rename=rename)
    assert all((x == 1).all() for x in jax.tree.leaves(loaded))
    last = {"['a']['*']": "a/*", "['a']['b']": "first"}
    with rejects(tree, ValueError, r"\['a'\]\['b'\] \(there: a/b\)", "first"):
        es.load_state_dict(tree, d, rename=last)
    tree, d = {"x": [[jnp.zeros(1)]]}, {"x.0.[0]": jnp.ones(1)}
    assert es.load_state_dict(tree, d, rename={"['x'][*]*": "x.*.*"}) == {"x": [[1]]}


def test_one_entry_of_the_dictionary_may_be_loaded_twice():
    tree = {"a": jnp.zeros(2), "b": jnp.zeros(2), "k": jr.key(0), "l": jr.key(0)}
    d = {"w": jnp.ones(2), "key": jr.key(1)}
    loaded = es.load_state_dict(
        tree, d, rename=lambda name: "w" if name in "['a']['b']" else "key"
    )
    assert loaded["a"].tolist() == loaded["b"].tolist() == [1, 1]
    assert loaded["k"] == loaded["l"] == jr.key(1)
    assert loaded["a"] is not loaded["b"]
    assert loaded["k"] is not loaded["l"]
    host = {"a": np.zeros(2), "b": np.zeros(2)}
    loaded = es.load_state_dict(host, {"w": np.ones(2)}, rename=lambda name: "w")
    assert not np.shares_memory(loaded["a"], loaded["b"])


def test_a_glob_without_a_match():
    tree = stack()
    rename = {"['layers'][*].weight": "*", "layer[*].*": "*.*", "head.w": "w"}
    with rejects(tree, ValueError, r"no array has a name.* 'layer\[\*\]\.\*', 'head"):
        es.load_state_dict(tree, {}, strict=False, rename=rename)


@pytest.mark.parametrize(
    ("rename", "error", "text"),
    [
        ("blocks", TypeError, "takes a function .* `str` was given"),
        (lambda name: None, ValueError, r"\[0\]\.weight \(there: None\)"),
        ({"*.*": "*"}, ValueError, r'rename=\{"\*\.\*": "\*"\}.*both sides must'),
    ],
)
def test_an_invalid_rename_is_an_error(rename, error, text):
    tree = stack()
    with rejects(tree, error, text):
        es.load_state_dict(tree, {}, rename=rename)
