"""Results of `es.jit` are built when they are read, and no program can tell."""

import copy
import dataclasses
import functools as ft
import gc
import pathlib
import pickle
import re
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_state as es
from eqx_state._jit import results
from eqx_state._tree.unbuilt import build, dict_of, Unbuilt


def is_unbuilt(module):
    return type(dict_of(module)) is Unbuilt


class Layer(es.Module):
    weight: es.Parameter
    count: es.State = 0
    rate: float = eqx.field(static=True, default=0.5)
    label: str = "layer"  # a class default, which the ordinary lookup would find

    def __call__(self, x):
        if self.training:
            self.count = self.count + 1
        return self.weight * x

    @property
    def double(self):
        return 2 * self.weight

    @ft.cached_property
    def triple(self):
        return 3 * self.weight


class Net(es.Module):
    layers: list[Layer]
    norm: eqx.nn.LayerNorm
    note: Any = eqx.field(static=True, default=None)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def net(note=None, n=4):
    layers = [Layer(jnp.full(2, 1.0 + i), rate=0.25, label="x") for i in range(n)]
    return Net(layers, eqx.nn.LayerNorm(2), note)


@es.jit
def same(tree):
    return tree


def result(note=None):
    """An unbuilt module, and the module as it should be."""
    model = net(note)
    for _ in range(3):
        unbuilt = same(model)
    assert is_unbuilt(unbuilt)
    return unbuilt, model


# --- A loop ---------------------------------------------------------------------------


@es.jit
def step(model, copies, x):
    y, model = es.mutable(model)(x)
    return y, {"model": model}, [es.update(copy, es.filter(model)) for copy in copies]


def loop(steps):
    x, model, copies = jnp.ones(2), net(), [net(), net().eval()]
    for _ in range(steps):
        _, out, copies = step(model, copies, x)
        model = out["model"]
    return model, *copies


def test_a_loop_builds_nothing(monkeypatch):
    loop(3)
    built = []
    make = results.Recipe.make

    def count(recipe, arrays):
        built.append(recipe)
        return make(recipe, arrays)

    monkeypatch.setattr(results.Recipe, "make", count)
    found = loop(3)
    assert all(map(is_unbuilt, found))
    # The first step of a loop takes modules that this test has created.
    assert not built
    with jax.disable_jit():
        wanted = loop(3)
    assert eqx.tree_equal(found, wanted)
    assert len(built) >= 3


# --- Whatever looks first -------------------------------------------------------------


FIRST = {
    "a field": lambda m: m.layers[0].label,
    "vars": lambda m: sorted(vars(m)),
    "dir": dir,
    "repr": repr,
    "isinstance": lambda m: isinstance(m, (int, Layer)),
    "flatten": jax.tree.structure,
    "a deep copy": lambda m: copy.deepcopy(m).layers[0].label,
    "a pickle": lambda m: pickle.loads(pickle.dumps(m)).layers[0].label,
    "parts": lambda m: [part.name for part in es.parts(m)],
    "tree_at": lambda m: eqx.tree_at(lambda m: m.norm.weight, m, 1),
    "a scope": lambda m: es.mutable(m)(jnp.ones(2))[1].layers[0].count.shape,
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_look_finds_what_any_look_finds(name):
    unbuilt, model = result("note")
    assert repr(FIRST[name](unbuilt)) == repr(FIRST[name](model))
    assert not is_unbuilt(unbuilt)
    assert eqx.tree_equal(unbuilt, model)


def test_class_defaults_properties_and_cached_properties():
    class Child(Layer):
        def __getattr__(self, name):
            return f"no {name}"

    class Grandchild(Child):
        extra: Any = None

    model = Grandchild(jnp.ones(2), extra=[jnp.ones(1)] * 8, label="mine")
    f = es.jit(lambda m: m)
    for read, wanted in (
        (lambda m: m.label, "mine"),
        (lambda m: m.absent, "no absent"),
        (lambda m: m.double.sum(), 4),
        (lambda m: m.triple.sum(), 6),
    ):
        unbuilt = f(f(model))
        assert is_unbuilt(unbuilt)
        assert read(unbuilt) == wanted
        assert not is_unbuilt(unbuilt)


def test_a_write_by_object_setattr_before_the_first_read_is_kept():
    unbuilt, model = result()
    layers = [Layer(jnp.zeros(2), rate=0.25, label="x") for _ in range(4)]
    object.__setattr__(unbuilt, "layers", layers)
    again = same(unbuilt)
    assert unbuilt.layers is layers
    assert jnp.all(again.layers[0].weight == 0.0)
    assert eqx.tree_equal(unbuilt.norm, model.norm)


def test_a_second_thread_keeps_what_the_first_has_built():
    unbuilt, _ = result()
    layers = unbuilt.layers
    object.__setattr__(unbuilt, "note", "written")
    assert build(unbuilt)["layers"] is layers
    assert unbuilt.note == "written"


# --- In the arguments of a call -------------------------------------------------------


def test_a_result_below_a_new_module():
    traces = []

    class Pair(es.Module):
        a: Any
        b: Any

    @es.jit
    def f(pair):
        traces.append(1)
        return pair.a, pair.b.layers[0]

    a, b = net(), net()
    for _ in range(5):
        a, b = f(Pair(a, eqx.nn.Sequential([b])))
        assert is_unbuilt(a)
        assert is_unbuilt(b)
    assert len(traces) == 1
    assert eqx.tree_equal((a, b), (net(), net()))


def test_modes_and_static_values_are_compared():
    @es.jit
    def f(model):
        return model, jnp.array([model.training, model.note == "a"])

    modes = []
    model, _ = f(net("a"))
    for change in (lambda m: m, es.eval, lambda m: m.replace(note="b"), es.train):
        model, found = f(change(f(change(model))[0]))
        modes.append(found.tolist())
    assert modes == [[True, True], [False, True], [False, False], [True, False]]


def test_a_plan_is_not_confused_by_other_arguments():
    f = es.jit(lambda a, b: (a, b))
    unbuilt, model = result()
    wanted = f(model, model)
    for a, b in ((unbuilt, 1), (1, unbuilt), (unbuilt, unbuilt), (model, unbuilt)):
        for _ in range(2):
            out = f(a, b)
        assert eqx.tree_equal(out, (a, b))
    assert eqx.tree_equal(f(unbuilt, result()[0]), wanted)
    assert eqx.tree_equal(f(net(n=5), unbuilt)[0], net(n=5))


# --- Built at once --------------------------------------------------------------------


def test_classes_that_look_up_attributes_themselves():
    class Mixin:
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            return "mine" if name == "label" else found

    class Before(Mixin, Layer):
        xs: Any = None

    class After(Layer, Mixin):
        xs: Any = None

    f = es.jit(lambda m: m)
    xs = [jnp.ones(1)] * 8
    before, after = f(f((Before(jnp.ones(2), xs=xs), After(jnp.ones(2), xs=xs))))
    assert not is_unbuilt(before)
    assert is_unbuilt(after)
    assert before.label == after.label == "mine"


def test_fields_in_slots():
    class Slotted:
        __slots__ = ("xs",)

    class Model(Slotted, es.Module):
        xs: list[es.Parameter]
        w: es.Parameter

    model = Model([jnp.ones(1)] * 8, jnp.ones(2))
    new = same(same(model))
    assert not is_unbuilt(new)
    assert eqx.tree_equal(new, model)


@jax.tree_util.register_pytree_node_class
class Parts:
    """A node whose children are new objects each time that JAX flattens it."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten(self):
        return (self.a.eval(), self.b.eval()), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_modules_that_flattening_creates():
    f = es.jit(lambda parts: parts)
    g = es.jit(lambda m: jnp.array("ab".index(m.note)))
    for _ in range(3):
        parts = f(Parts(net("a"), net("b")))
        assert (parts.a.note, parts.b.note) == ("a", "b")
        assert [int(g(parts.a)), int(g(parts.b))] == [0, 1]
        assert parts.a.norm.weight.shape == (2,)


@jax.tree_util.register_pytree_node_class
class Checked:
    """Checks its arrays as the documentation of JAX recommends, and computes."""

    def __init__(self, q):
        if not (type(q) is object or q is None or isinstance(q, Checked)):
            q = jnp.asarray(q)
            self.value = 2 * q
        self.q = q

    def tree_flatten(self):
        return (self.q,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_nodes_that_the_user_unflattens():
    class Model(es.Module):
        xs: list[es.Parameter]
        checked: Checked

        def __call__(self, x):
            return x * self.checked.value

    model = same(same(Model([jnp.ones(1)] * 9, Checked(3.0))))
    assert not is_unbuilt(model)
    assert jax.jit(lambda x: model(x))(1.0) == 6.0
    assert model(1.0) == 6.0


def test_static_values_that_can_change_in_place():
    @dataclasses.dataclass
    class Config:
        n: int
        __hash__ = lambda self: 0  # noqa: E731

    class Many(list):
        __hash__ = object.__hash__

    class Strange:
        __hash__ = lambda self: 0  # noqa: E731

        def __eq__(self, other):
            return np.array([True, False])

    g = es.jit(lambda m: jnp.array(m.note.n))
    config = Config(1)
    model = same(same(net(config)))
    assert g(net(Config(1))) == g(model) == 1
    config.n = 2
    assert g(model) == 1
    model.note.n = 3
    assert g(model) == 3
    many = Many()
    model = same(same(net(many)))
    many.append(1)
    assert model.note == []
    for _ in range(2):
        assert isinstance(es.jit(lambda m: m)(net(Strange())).note, Strange)
    assert not is_unbuilt(same(same(net((1, Config(1))))))


def test_static_values_that_cannot_change():
    @dataclasses.dataclass(frozen=True)
    class Config:
        n: int
        dtype: Any = jnp.float32

    notes = [Config(1), (1.0, "a", frozenset({2})), jax.nn.relu, es.Parameter, 1j]
    notes += [jnp.float32, jnp.dtype("int8"), jax.tree.structure([1]), es.trainable]
    for note in notes:
        model = same(same(net(note)))
        assert is_unbuilt(model)
        assert model.note == note


def test_a_class_that_defines_del():
    deleted = []

    class Model(Net):
        def __del__(self):
            deleted.append(1)

    model = Model(net().layers, net().norm)
    model = same(same(model))
    gc.collect()
    before = len(deleted)
    assert len(model.layers) == 4
    gc.collect()
    assert len(deleted) == before


def test_a_module_that_is_deep():
    class Wrap(es.Module):
        inner: Any

    model = net()
    for _ in range(300):
        model = Wrap(model)
    new = same(same(model))
    assert eqx.tree_equal(new, model)


def test_results_in_an_open_scope():
    unbuilt, states = same(same(net())), []

    def f(m, x):
        states.append(is_unbuilt(same(unbuilt)))
        return m(x)

    _, new = es.mutable(f)(same(same(net())), jnp.ones(2))
    assert states == [False]
    assert not is_unbuilt(new)


def test_small_modules_and_plain_modules():
    small, plain = same(
        same((Layer(jnp.ones(2)), eqx.nn.MLP(2, 2, 2, 9, key=jr.key(0))))
    )
    assert not is_unbuilt(small)
    assert type(vars(plain)) is dict


# --- Memory ---------------------------------------------------------------------------


def test_a_result_keeps_neither_the_function_nor_older_results_alive():
    def f(model):
        return model

    jitted, ref = es.jit(f), weakref.ref(f)
    model = jitted(jitted(net()))
    older = weakref.ref(model)
    model = jitted(model)
    del f, jitted
    gc.collect()
    assert ref() is None
    assert older() is None
    assert model.layers[0].weight[0] == 1.0


def test_a_module_that_contains_the_function_does_not_keep_it_alive():
    class Holder(es.Module):
        xs: list[es.Parameter]
        f: Any

    def f(holder, x):
        return x

    jitted, ref = es.jit(f), weakref.ref(f)
    holder = Holder([jnp.ones(1)] * 8, f)
    for _ in range(3):
        jitted(holder, jnp.ones(1))
    del f, jitted, holder
    gc.collect()
    assert ref() is None


def test_tokens_are_freed():
    f = es.jit(lambda m: m)
    model = f(f(net("a note of this test")))
    token = weakref.ref(dict_of(model).token)
    assert token() in results._TOKENS.values()
    del f, model
    jax.clear_caches()
    gc.collect()
    assert token() is None


# --- The source -----------------------------------------------------------------------


def test_only_few_files_read_a_dict_directly():
    root = pathlib.Path(es.__file__).parent
    allowed = {
        "_tree/unbuilt.py",  # `fields_of`, and `__getattribute__`
        "_tree/base.py",  # `ownership_of`: an unbuilt module has no owner
        "_jit/form.py",  # the arguments of a call
    }
    pattern = re.compile(r"object\.__getattribute__\(|\bdict_of\b")
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert found == allowed
