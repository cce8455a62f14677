"""The fast path of `es.jit`: only a call with the same signature takes it."""

import collections
import dataclasses
import functools as ft
import itertools
import types
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis as hp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_state as es
from eqx_state._jit import results
from eqx_state._jit.call import cache_key_of, JitCall
from eqx_state._jit.form import form_of
from eqx_state._jit.options import Options
from eqx_state._jit.programs import form_of_call, Plan, programs_of
from eqx_state._jit.results import Output
from eqx_state._jit.static import is_hashable
from eqx_state._transforms.transform import method_as_pytree
from eqx_state._tree.compare import identical


class Pair(NamedTuple):
    a: Any
    b: Any


class Leaf(es.Module):
    weight: es.Parameter
    rate: Any = eqx.field(static=True)
    note: Any = None


class Plain(eqx.Module):
    inner: Any
    size: int = eqx.field(static=True)


@jtu.register_pytree_node_class
class Custom:
    def __init__(self, x, aux):
        self.x, self.aux = x, aux

    def tree_flatten(self):
        return (self.x,), self.aux

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, aux)


@jtu.register_pytree_node_class
class Fresh(Custom):
    """A node whose static data are new objects each time that JAX flattens it."""

    def tree_flatten(self):
        return (self.x,), (Pair({"aux": self.aux}, [self.aux]), {"aux": self.aux})

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, aux[1]["aux"])


@pytest.fixture(autouse=True, scope="module")
def _modules_of_any_size_are_unbuilt():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "_FEW", 0)
        yield


def arrays_of(tree):
    return [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]


def origin():
    """The function that the plans in these tests are for."""


def takes(one, other):
    """Whether the plan of a call with `one` takes a call with `other`."""
    return Plan(None, form_of(one, origin)).fits(form_of(other, origin))


# --- Laws -----------------------------------------------------------------------------


X = np.ones(2, np.float32)
STATIC = st.sampled_from([0, 1, True, 1.0, -0.0, "a", (1, 2.0), None, jax.nn.relu])
ARRAYS = st.builds(lambda n: np.full(2, n, np.float32), st.integers(0, 9))
LEAVES = st.one_of(ARRAYS, STATIC)


def several(inner):
    """Containers of two to four nodes that differ only in their arrays."""
    columns = st.tuples(inner, st.integers(2, 4)).map(
        lambda pair: [
            jax.tree.map(lambda x, i=i: x + i if eqx.is_array(x) else x, pair[0])
            for i in range(pair[1])
        ]
    )
    return st.one_of(
        columns,
        columns.map(tuple),
        columns.map(lambda xs: Pair(*xs[:2])),
        columns.map(lambda xs: dict(zip("dacb", xs, strict=False))),
        columns.map(lambda xs: dict(enumerate(xs))),
    )


TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        several(inner),
        several(st.builds(Leaf, ARRAYS, STATIC, inner)),
        st.builds(Leaf, ARRAYS, STATIC, inner).map(es.eval),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("zyx"), inner, max_size=3),
        st.dictionaries(st.integers(0, 3), inner, max_size=2),
        st.builds(Pair, inner, inner),
        st.builds(Custom, inner, STATIC),
        st.lists(st.builds(Fresh, inner, STATIC), min_size=1, max_size=4),
        st.builds(Plain, inner, st.sampled_from([1, True, 2])),
        st.builds(Leaf, ARRAYS, STATIC, inner),
    ),
    max_leaves=8,
)


@hp.given(TREES)
@hp.settings(max_examples=150)
def test_flatten_and_build_are_inverse(tree):
    found = form_of(tree, origin).arrays
    assert all(x is y for x, y in zip(found, arrays_of(tree), strict=True))
    rebuilt = Output(tree, (), origin).put(found, [], False)
    again = form_of(rebuilt, origin).arrays
    assert jax.tree.structure(rebuilt) == jax.tree.structure(tree)
    leaves = jax.tree.leaves(rebuilt)
    for x, y in zip(leaves, jax.tree.leaves(tree), strict=True):
        assert x is y or (type(x) is type(y) and x == y)
    assert all(x is y for x, y in zip(found, again, strict=True))


def key_of(tree):
    """Equal only for trees that may share a plan."""

    def typed(x):
        return type(x), repr(x)

    def node(treedef):
        if (data := treedef.node_data()) is None:
            return None
        return data[0], typed(data[1]), [node(child) for child in treedef.children()]

    leaves, treedef = jax.tree.flatten(tree)
    return node(treedef), [None if eqx.is_array(x) else typed(x) for x in leaves]


@hp.given(TREES, TREES)
@hp.settings(max_examples=300)
def test_a_plan_takes_only_equal_trees(one, other):
    copied = jax.tree.map(lambda x: x, one)
    assert takes(one, copied)
    assert takes(one, other) == (key_of(one) == key_of(other))


# --- Laws of the called function ------------------------------------------------------


def scale(held, x):
    return held.weight * x


@dataclasses.dataclass(frozen=True)
class Times:
    """A decorator. All objects of this class share their programs."""

    f: Any = scale
    factor: Any = 2.0  # `True` is not 1

    def __call__(self, *args):
        return (5.0 if self.factor is True else self.factor) * self.f(*args)


class Model(es.Module):
    weight: es.Parameter


class Trainer:
    def __init__(self, weight):
        self.weight = weight


class WithoutWeakReferences:
    __slots__ = ("weight",)
    __init__ = Trainer.__init__


class Weights(NamedTuple):
    weight: Any


def bound(f, held):
    """A method, as Equinox binds it."""
    return method_as_pytree(types.MethodType(f, held))


HELD = (
    *(cls(jnp.array(x)) for cls in (Model, Weights) for x in (2.0, 3.0)),
    *(cls(x) for cls in (Trainer, WithoutWeakReferences) for x in (2.0, 3.0)),
)
FUNCTIONS = (
    scale,
    *(Times(scale, x) for x in (1, True, 2.0)),
    *(es.vmap(scale, in_axes=(None, i)) for i in (0, 1)),
)
WRAPPERS = {
    "none": [],
    "vmap": [es.vmap],
    "checkpoint": [es.checkpoint, eqx.Partial],
    "Equinox's": [eqx.filter_vmap],
    "Partial": [eqx.Partial],
    "JAX's Partial": [jtu.Partial],
    "partial": [ft.partial],
    "decorator": [Times],
    "two": [eqx.Partial, ft.partial(es.vmap, in_axes=1)],
}
BINDINGS = bound, types.MethodType, eqx.Partial, ft.partial
Y = jnp.arange(8.0).reshape(2, 2, 2)


@pytest.mark.parametrize("name", WRAPPERS)
def test_callables_that_share_a_plan_or_a_program_do_the_same(name):
    by_programs = collections.defaultdict(list)
    for bind, f, held in itertools.product(BINDINGS, FUNCTIONS, HELD):
        f = es.jit(ft.reduce(lambda f, wrap: wrap(f), WRAPPERS[name], bind(f, held))).f
        call, form = JitCall(f, (Y,), {}), form_of_call(f, (Y,), {})
        if all(is_hashable(x) for x in call.leaves if not eqx.is_array(x)):
            assert identical(call.arrays(), form.arrays)
            found = f, cache_key_of(call), form, Plan(None, form)
            by_programs[programs_of(f, Options())].append(found)
    for found in by_programs.values():
        alike = collections.defaultdict(list)
        for f, key, form, _ in found:
            assert all(key == other for _, other, _, plan in found if plan.fits(form))
            weights = tuple(map(float, form.arrays[:-1]))  # all arrays but `Y`
            alike[key, weights].append(f)
        for first, *others in alike.values():
            assert not others or all(jnp.array_equal(first(Y), f(Y)) for f in others)


def nodes_of(n):
    """Nodes with `n` arrays."""
    xs = [jnp.ones(())] * n
    return [xs, (*xs,), dict(enumerate(xs)), {f"x{i}": x for i, x in enumerate(xs)}]


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_plan_refuses_a_node_with_more_or_fewer_children(num):
    for more in (num - 1, num + 1):
        for one, other in zip(nodes_of(num), nodes_of(more), strict=True):
            assert not takes(one, other)
            assert not takes([one, one], [one, other])


# --- Through `es.jit` -----------------------------------------------------------------


class Block(es.Module):
    leaf: Leaf
    plain: Plain
    xs: list[Any]
    by_name: dict[str, Any]


def blocks():
    """Modules of equal structure, in a list, a dict and a tuple."""
    made = [
        Block(
            Leaf(jnp.full(2, float(i)), 1000),
            Plain(jnp.full(3, float(i)), 7),
            [jnp.array(i), jnp.array(i + 1)],
            {"a": jnp.array(1.0 + i), "b": jnp.array(2.0 + i)},
        )
        for i in range(4)
    ]
    return {
        "list": made[:2],
        "dict": {"x": made[2]},
        "tuple": (made[3], np.ones(2, np.float32)),
    }


def put(module, name, value):
    object.__setattr__(module, name, value)


IN_PLACE = {
    "an array": lambda t: put(t["list"][1].leaf, "weight", jnp.zeros(2)),
    "through vars": lambda t: vars(t["tuple"][0].leaf).update(weight=jnp.zeros(2)),
    "a static value": lambda t: put(t["list"][0].leaf, "rate", 2000),
    "its type": lambda t: put(t["list"][0].leaf, "rate", 1000.0),
    "a flag": lambda t: put(t["dict"]["x"].leaf, "frozen", True),
    "the mode": lambda t: put(t["list"][1].leaf, "training", False),
    "another module": lambda t: put(t["list"][1], "leaf", t["list"][0].plain),
    "the class": lambda t: put(t["list"][1].leaf, "__class__", type("L", (Leaf,), {})),
    "one more attribute": lambda t: put(t["list"][1].plain, "cache", jnp.ones(1)),
    "one less": lambda t: vars(t["list"][1].leaf).pop("note"),
    "an array for a hole": lambda t: put(t["list"][1].leaf, "note", jnp.ones(1)),
    "a list": lambda t: t["list"][1].xs.append(jnp.array(3)),
    "a key": lambda t: t["list"][0].by_name.update(c=t["list"][0].by_name.pop("b")),
    "the order of keys": lambda t: t["list"][0].by_name.update(
        a=t["list"][0].by_name.pop("a")
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place_of_a_result_is_detected(name):
    f = es.jit(lambda tree: tree)
    tree = f(f(f(blocks())))
    other = f(tree)
    IN_PLACE[name](tree)
    for _ in range(2):
        out = f(tree)
        assert key_of(out) == key_of(tree)
        assert eqx.tree_equal(out, tree)
    # The change must not appear in a different result.
    assert eqx.tree_equal(other, f(f(blocks())))
    assert eqx.tree_equal(f(other), other)


def test_a_named_tuple_is_built_by_its_registered_function():
    class Length(Pair):
        unit = "m"

    def unflatten(unit, children):
        new = Length(*children)
        new.unit = unit
        return new

    jtu.register_pytree_node(Length, lambda x: (tuple(x), x.unit), unflatten)
    length, f = unflatten("km", [jnp.ones(1), jnp.ones(2)]), es.jit(lambda x: x)
    for _ in range(3):
        length = f(length)
        assert length.unit == "km"


def test_static_values_that_are_equal_but_not_identical_take_the_fast_path():
    @dataclasses.dataclass(frozen=True)
    class Config:
        sizes: tuple[int, ...]

    traces = []

    @es.jit
    def f(leaf):
        traces.append(1)
        return leaf.weight * sum(leaf.rate.sizes)

    for _ in range(4):
        config = Config((1000, 2000))
        assert jnp.all(f(Leaf(jnp.ones(2), config)) == 3000.0)
        assert jnp.all(f(Leaf(jnp.ones(2), config)) == 3000.0)
    assert len(traces) == 1
    assert jnp.all(f(Leaf(jnp.ones(2), Config((1000, 1)))) == 1001.0)
    assert jnp.all(f(Leaf(jnp.ones(2), Config((1000, 2000)))) == 3000.0)
    assert len(traces) == 2


def test_a_call_that_jax_cannot_flatten_is_the_error_of_jax():
    tree = {1: jnp.ones(2), "a": jnp.ones(2)}
    for jit in (jax.jit, es.jit):
        with pytest.raises(ValueError, match="sorting pytree dictionary keys"):
            jit(lambda tree: tree)(tree)
