"""`es.jit`: exactly one program for each set of static values."""

import collections
import copy
import dataclasses
import enum
import functools as ft
from collections import OrderedDict
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import untouched
from jit_cases import counted, Layer, Model, X

import eqx_state as es


# --- Static values are compared by type and value -------------------------------------


class Color(enum.IntEnum):
    ONE = 1


class Name(enum.StrEnum):
    ONE = "1"


@dataclasses.dataclass(frozen=True)
class Config:
    n: Any


class Derived(Config):
    """Compared by the `__eq__` that `dataclass` has generated."""


class Settings(eqx.Module):
    n: Any
    fixed: Any = eqx.field(static=True, default=None)


class Pair(NamedTuple):
    a: Any
    b: Any


class Integer(int):
    def __repr__(self):
        return f"Integer({int(self)})"


@jtu.register_pytree_node_class
class Node:
    def __init__(self, aux):
        self.aux = aux

    def tree_flatten(self):
        return (), self.aux

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(aux)


NUMBERS = [0, 1, False, True, 0.0, -0.0, 1.0, 0j, complex(0.0, -0.0), complex(-0.0, 0)]
SPECIAL = [
    float("inf"),
    Color.ONE,
    Integer(1),
    "1",
    Name.ONE,
    b"1",
    None,
    int,
    float,
    jnp.int32,
]
NESTED = [(1, 0), (1.0, 0), (True, 0), (1, -0.0), (1, 0.0), ((1,), 0), ((True,), 0)]
TUPLES = [Pair(1, 0), Pair(True, 0), (), ((),)]
CONFIGS = [Config(1), Config(True), Config(Config(1.0)), Config(Config(1))]
CONFIGS += [Derived(1), Derived(True), Derived(1.0)]
MODULES = [Settings(1), Settings(True), Settings(1.0), Settings(0.0), Settings(-0.0)]
MODULES += [Settings(1, 1), Settings(1, True), Settings(Settings(1)), Settings((1.0,))]
NUMPY = [np.float32(0), np.float32(-0.0), np.float64(0), np.int32(0), np.bool_(False)]
SETS = [frozenset({1}), frozenset({True}), frozenset({1.0}), frozenset({(1, 0.0)})]
HASHABLE = [*NUMBERS, *SPECIAL, *NESTED, *TUPLES, *CONFIGS, *MODULES, *SETS]

# Ways to pass a value to `es.jit(f)`; inside, `read(argument)` returns it.
PLACES = {
    "argument": (lambda x: x, lambda x: x),
    "named tuple": (lambda x: Pair(X, x), lambda tree: tree.b),
    "key of a dict": (lambda x: {x: X}, lambda tree: next(iter(tree))),
    "node": (lambda x: [Node(x)], lambda tree: tree[0].aux),
    "static field": (lambda x: Layer(1.0, x), lambda layer: layer.tag),
    "partial": (lambda x: eqx.Partial(max, x), lambda f: f.args[0]),
}


@pytest.mark.parametrize("place", PLACES)
def test_static_values_are_compared_by_type_and_value(place):
    put, read = PLACES[place]
    f, traces = counted(lambda tree, x: (repr(read(tree)), x))
    jitted = es.jit(f)

    def check():
        for _ in range(2):
            for value in values:
                assert jitted(put(value), X)[0] == repr(value)

    # At other places, NumPy's numbers are arrays, and Equinox warns of them.
    values = [*HASHABLE, *NUMPY] if place == "node" else HASHABLE
    eqx.filter_eval_shape(check)  # traces every program without compiling any
    for value in NUMBERS[:6]:
        assert jitted(put(value), X)[0] == repr(value)
    assert len(traces) == len(values)


def test_the_factory_of_a_defaultdict_is_compared():
    jitted = es.jit(lambda layer: jnp.asarray(layer.tag["missing"]))
    for factory in (int, float):
        y = jitted(Layer(1.0, collections.defaultdict(factory)))
        assert y.dtype == jnp.result_type(factory)


warns_of_arrays = pytest.mark.filterwarnings(
    "ignore:A JAX array is being set as static"
)
NANS = {
    "float": lambda: float("nan"),
    "complex": lambda: complex(0.0, float("nan")),
    "tuple": lambda: (float("nan"), 1),
}


@pytest.mark.parametrize("case", NANS)
def test_a_nan_is_traced_once(case):
    for place in ("argument", "static field"):
        put, read = PLACES[place]
        f, traces = counted(lambda tree, read=read: str(type(read(tree))))
        for _ in range(3):
            es.jit(f)(put(NANS[case]()))
        assert len(traces) == 1


@warns_of_arrays
def test_static_values_that_compare_equal_have_different_programs():
    f = es.jit(lambda layer: str(layer.tag))
    for a, b in (
        (np.datetime64(1, "D"), np.datetime64(1, "s")),
        (slice(1), slice(True)),
    ):
        assert (f(Layer(1.0, a)), f(Layer(1.0, b))) == (str(a), str(b))


# --- Unhashable -----------------------------------------------------------------------


def test_the_place_of_a_leaf_matters():
    same, x = es.jit(lambda tree: tree), jnp.ones(2)
    for tree in ([x, []], [[], x], [[x], []], [x, []]):
        assert jtu.tree_structure(same(tree)) == jtu.tree_structure(tree)


class Options:
    """Compared by value, and not hashable."""

    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return isinstance(other, Options) and self.n == other.n

    __hash__ = None

    def __repr__(self):
        return f"Options({self.n})"


FIELDS = [[1], [1.0], [True], (1,), {1}, {True}, {"a": 1}, {"a": True}, {"a": [1]}]
FIELDS += [([1],), ((1,),), {1: 0}, {True: 0}, Options(1), Options(2), [], {}, set()]
FIELDS += [OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)]


@pytest.mark.parametrize("place", ["static field", "node"])
def test_static_fields_need_not_be_hashable(place):
    put, read = PLACES[place]
    f, traces = counted(lambda tree: repr(read(tree)))
    jitted = es.jit(f)

    def check():
        for _ in range(2):
            for value in copy.deepcopy(FIELDS):
                assert jitted(put(value)) == repr(value)

    eqx.filter_eval_shape(check)
    assert len(traces) == len(FIELDS)


class Table:
    """Compared elementwise, like arrays and data frames."""

    __hash__ = None

    def __eq__(self, other):
        return np.array([True, True])


@pytest.mark.parametrize("place", ["static field", "node"])
def test_static_values_whose_comparison_is_not_a_bool_are_compared_by_identity(place):
    put, read = PLACES[place]
    f, traces = counted(lambda tree: type(read(tree)).__name__)
    one, other = Table(), Table()
    for value in (one, one, other, one, other):
        assert es.jit(f)(put(value)) == "Table"
    assert len(traces) == 2


class Called(Model):
    def __call__(self, x):
        return x


UNHASHABLE = {
    "argument": (lambda f: f(X, {1}), r"args\[1\]"),
    "inside": (lambda f: f([{"a": (X, {1})}]), r"args\[0\]\[0\]\['a'\]\[1\]"),
    "by name": (lambda f: f(x=[{1}]), r"kwargs\['x'\]\[0\]"),
    "field": (lambda f: f([Model(X, {1})]), r"args\[0\]\[0\]\.other"),
    "method": (lambda f: es.jit(Model(X, {1}).replace)(), "__self__.other"),
    "partial": (lambda f: es.jit(eqx.Partial(f, {1}))(), r"args\[0\]"),
    "lowered": (lambda f: f.lower(X, {1}), r"args\[1\]"),
}


@pytest.mark.parametrize("case", UNHASHABLE)
def test_the_error_for_an_unhashable_value_names_its_path(case):
    call, where = UNHASHABLE[case]
    match = rf"(?s)`es\.jit`: `{where}` is a `set`, which cannot be hashed.*or an array"
    with pytest.raises(TypeError, match=match):
        call(es.jit(lambda *args, **kwargs: 0))


def test_an_unhashable_value_of_an_owned_module_is_named():
    model = Model(Called(Layer(1.0), {1}))
    match = r"`es\.jit`: `layer\.other` is a `set`, which cannot be hashed"
    with untouched(es.filter(model)), pytest.raises(TypeError, match=match):
        es.mutable(lambda m: es.jit(lambda: m)())(model)


# --- Dataclasses ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OwnEquality:
    name: str
    k: dataclasses.InitVar[float]

    def __post_init__(self, k):
        object.__setattr__(self, "value", k)

    def __eq__(self, other):
        return (self.name, self.value) == (other.name, other.value)

    def __hash__(self):
        return hash((self.name, self.value))


@dataclasses.dataclass(frozen=True)
class Tagged:
    value: Any
    tag: str = dataclasses.field(compare=False, default="")


@dataclasses.dataclass(frozen=True)
class TaggedMore(Tagged):
    more: int = 0


class Parsed(Tagged):
    # A method that is not a plain function.
    __eq__ = ft.partialmethod(lambda a, b: a.value == b.value)

    def __hash__(self):
        return hash(self.value)


@pytest.mark.parametrize("cls", [OwnEquality, Tagged, TaggedMore, Parsed])
def test_dataclasses_are_compared_by_their_own_eq(cls):
    traces = []

    @es.jit
    def f(config, x):
        traces.append(config)
        return config.value * x

    for _ in range(2):
        assert [f(cls("s", k) if cls is OwnEquality else cls(k), X)[1] for k in (1, 2)]
    assert len(traces) == 2
    assert jnp.array_equal(f(traces[1], X), 2 * X)


def test_a_field_with_compare_false_does_not_need_a_new_program():
    traces = []

    @es.jit
    def f(config, x):
        traces.append(1)
        return config.value * x

    for tag in "ab":
        f(Tagged(1, tag), X)
    f(Tagged(1.0, "a"), X)  # the type differs
    assert len(traces) == 2


# --- Static values that can change in place -------------------------------------------


@dataclasses.dataclass
class Mutable:
    n: Any


@dataclasses.dataclass(frozen=True)
class Noted:
    n: int
    notes: list = dataclasses.field(compare=False, default_factory=list)


@dataclasses.dataclass
class Slotted(Mutable):
    parent: Any = None
    unset: Any = dataclasses.field(init=False, repr=False)


class Holder(es.Module):
    xs: list[es.Parameter]
    value: Any = eqx.field(static=True)
    below: Any = None


# A value, the list, dict, set or array in it, and how to change that.
CHANGES = {
    "list": (lambda: [1], lambda x: x.append(2)),
    "dict": (lambda: {"a": 1}, lambda x: x.update(a=2)),
    "set": (lambda: {1}, lambda x: x.add(2)),
    "deque": (lambda: collections.deque([[1]]), lambda x: x[0].append(2)),
    "default dict": (
        lambda: collections.defaultdict(list, a=[1]),
        lambda x: x["a"].append(2),
    ),
    "counter": (lambda: collections.Counter("aab"), lambda x: x.update("b")),
    "dict in a tuple": (lambda: (0, {"a": [1]}), lambda x: x[1]["a"].append(2)),
    "in a named tuple": (lambda: Pair(0, [1]), lambda x: x.b.append(2)),
    "dataclass": (lambda: Mutable([1]), lambda x: x.n.append(2)),
    "its field": (lambda: Mutable(1), lambda x: setattr(x, "n", 2)),
    "without a field": (lambda: Slotted(1, [2]), lambda x: x.parent.append(3)),
    "frozen": (lambda: Config([1]), lambda x: x.n.append(2)),
    "not compared": (lambda: Noted(1), lambda x: x.notes.append(2)),
    "array": (lambda: np.arange(3), lambda x: x.fill(7)),
}
AROUND = {
    "static field": (lambda x: Holder([X] * 9, x), lambda h: h.value),
    "field of a small module": (lambda x: Layer(1.0, x), lambda h: h.tag),
    "nested module": (
        lambda x: Holder([X] * 9, 0, {"a": eqx.nn.Sequential([Layer(1.0, x)])}),
        lambda h: h.below["a"].layers[0].tag,
    ),
}


def equal(a, b):
    return repr(a) == repr(b)


@warns_of_arrays
@pytest.mark.parametrize("place", AROUND)
@pytest.mark.parametrize("case", CHANGES)
def test_a_result_has_static_values_as_they_were_when_traced(case, place):
    make, change = CHANGES[case]
    put, read = AROUND[place]
    jitted, traces = counted(lambda tree: tree)
    jitted = es.jit(jitted)
    first = put(make())
    results = [jitted(first)]
    change(read(first))  # by the caller of the trace
    results += [jitted(put(make())) for _ in range(3)]
    results.append(jitted(results[-1]))
    assert len(traces) == 1
    for result in results:
        assert equal(read(result), make())
        change(read(result))  # by the owner of one result
        assert not equal(read(result), make())
    jitted(first)  # a value that has changed is a different one, if it is compared
    assert len(traces) == (1 if case == "not compared" else 2)
    assert equal(read(jitted(put(make()))), make())


def test_static_values_in_plain_results_belong_to_one_result():
    make = {"set": lambda: {1}, "dataclass": lambda: Mutable([1])}
    jitted = es.jit(lambda x: (x, {k: new() for k, new in make.items()}))
    _, one = jitted(X)
    one["set"].add(2)
    one["dataclass"].n.append(2)
    assert jitted(X)[1] == {"set": {1}, "dataclass": Mutable([1])}


def test_a_result_of_a_call_in_init_lacks_the_static_fields_that_are_not_set_yet():
    class Early(es.Module):
        w: es.Parameter
        sizes: list = eqx.field(static=True)
        name: str = eqx.field(static=True)

        def __init__(self):
            self.w, self.sizes = X, [1]
            early = es.jit(lambda module: module)(self)
            assert early.sizes == [1]
            assert early.sizes is not self.sizes
            assert not hasattr(early, "name")
            self.name = "a"

    assert Early().name == "a"


def test_modules_of_one_result_keep_their_own_static_objects():
    jitted, xs = es.jit(lambda *holders: holders), [X] * 9
    shared = [1]
    for _ in range(2):
        a, b = jitted(Holder(xs, Tagged(1, "a")), Holder(xs, Tagged(1, "b")))
        assert (a.value.tag, b.value.tag) == ("a", "b")
        a, b, c = jitted(Holder(xs, shared), Holder(xs, shared), Holder(xs, [1]))
        assert a.value is b.value
        assert a.value is not c.value
        assert a.value is not shared


def test_functions_and_objects_that_equal_only_themselves_stay_the_same():
    @dataclasses.dataclass(eq=False)
    class Identity:
        n: list

    values = [lambda x: x, Identity([1]), object(), Integer, np.dtype("int8")]
    held = [Holder([X] * 9, x) for x in values]
    held.append(Holder([X] * 9, values))  # in a list that is copied
    jitted, traces = counted(lambda holders: (holders, values[1], values[0]))
    jitted = es.jit(jitted)
    for _ in range(3):
        held, one, function = jitted(held)
        for holder, x in zip(held, values, strict=False):
            assert holder.value is x
        for x, y in zip(held[-1].value, values, strict=True):
            assert x is y
        assert (one, function) == (values[1], values[0])
    assert len(traces) == 1


def test_a_dataclass_with_the_equality_of_a_string_is_copied():
    @dataclasses.dataclass(eq=False)
    class Tag(str):
        extra: list

        def __new__(cls, extra):
            return super().__new__(cls, "tag")

    held, jitted = Holder([X] * 9, Tag([1])), es.jit(lambda x: x)
    a, b = jitted(held), jitted(held)
    a.value.extra.append(2)
    assert held.value.extra == b.value.extra == jitted(held).value.extra == [1]


@warns_of_arrays
def test_equal_arrays_of_numpy_share_a_program():
    jitted, traces = counted(lambda layer, x: float(layer.tag.sum()) * x)
    jitted = es.jit(jitted)
    for n in (1, 1, 2, 1):
        assert jnp.array_equal(jitted(Layer(1.0, np.full(3, n)), X), 3 * n * X)
    jitted(Layer(1.0, np.full(3, 1.0)), X)
    assert len(traces) == 3


def test_an_object_whose_hash_has_changed_is_a_different_value():
    class Config:
        n = 1

        def __eq__(self, other):
            return self.n == other.n

        def __hash__(self):
            return self.n

    jitted, layer = es.jit(lambda layer, x: layer.tag.n * x), Layer(1.0, Config())
    assert jnp.array_equal(jitted(layer, X), X)
    layer.tag.n = 2
    for _ in range(2):
        assert jnp.array_equal(jitted(layer, X), 2 * X)
