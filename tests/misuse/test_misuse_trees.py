"""Errors about whole trees: one module in two places, before `init`, unreduced state.

Every test checks that the caller's model is afterwards bit for bit what it was.
"""

import dataclasses

import equinox as eqx
import jax.lax as lax
import jax.numpy as jnp
import pytest
from helpers import rejects

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter = 2.0
    count: es.State = 0

    def __call__(self, x, *, key=None):
        self.count = self.count + 1
        return self.weight * x


# --- One module in two places -------------------------------------------------------


class Two(es.Module):
    a: Layer
    b: list[Layer]


def test_shared_in_construction():
    layer = Layer()
    with rejects(layer, ValueError, "`a`", r"`b\[1\]`"):
        Two(layer, [Layer(), layer])
    with rejects(layer, ValueError, "`a`", r"`b\[0\]\.a`"):
        Two(layer, [Two(layer, [])])


ENTRIES = {
    "mutable": lambda tree: es.mutable(lambda t: 0.0)(tree),
    "mutable partial": lambda tree: es.mutable(eqx.Partial(lambda t: 0.0, tree))(),
    "value_and_grad": lambda tree: es.value_and_grad(lambda t: jnp.array(0.0))(tree),
    "grad": lambda tree: es.grad(lambda t: jnp.array(0.0))(tree),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_shared_on_entering(entry):
    layer = Layer()
    for tree, a, b in (
        ([layer, layer], r"`\[0\]`", r"`\[1\]`"),
        ({"x": layer, "y": (0, layer)}, r"`\['x'\]`", r"`\['y'\]\[1\]`"),
        (eqx.nn.Sequential([layer, layer]), r"`layers\[0\]`", r"`layers\[1\]`"),
    ):
        with rejects(tree, ValueError, a, b):
            ENTRIES[entry](tree)


class Counter(es.Module):
    count: es.State = 0


class Counters(es.Module):
    a: Counter = dataclasses.field(default_factory=Counter)
    b: Counter = dataclasses.field(default_factory=lambda: Counter(5))
    more: list[Counter] = dataclasses.field(default_factory=lambda: [Counter(7)])


LEAVING = {
    "field": (lambda m: setattr(m, "a", m.b), "`a`", "`b`"),
    "into a container": (lambda m: setattr(m, "more", [m.b]), "`b`", r"`more\[0\]`"),
    "in a container": (lambda m: m.more.__setitem__(0, m.b), "`b`", r"`more\[0\]`"),
    "out of a container": (lambda m: setattr(m, "a", m.more[0]), "`a`", "`more"),
}


@pytest.mark.parametrize("name", LEAVING)
def test_shared_on_leaving(name):
    f, *fragments = LEAVING[name]
    model = Counters()
    with rejects(model, ValueError, *fragments):
        es.mutable(f)(model)


def test_shared_with_parameters_on_leaving():
    model = Two(Layer(), [Layer()])
    f = es.mutable(lambda m: setattr(m, "a", m.b[0]), kinds=es.TreePart)
    with rejects(model, ValueError, "`a`", r"`b\[0\]`"):
        f(model)


def test_sharing_what_has_no_state_is_allowed():
    class Dense(es.Module):
        w: es.Parameter

    dense = Dense(jnp.ones(2))
    _, new = es.mutable(lambda m: None)([dense, dense])
    assert len(new) == 2
    count = jnp.array(0)
    assert es.mutable(lambda m: None)([Layer(1.0, count), Layer(1.0, count)])


# --- Before `init` ------------------------------------------------------------------


class Lazy(es.Module):
    weight: es.Parameter

    def __init__(self):
        self.weight = es.Initializer(lambda key: jnp.ones(3))

    def __call__(self, x, *, key=None):
        return jnp.sum(self.weight * x)


class Hooked(es.Module):
    weight: es.Parameter | None = None

    def module_init(self, key):
        self.weight = jnp.ones(3)

    def __call__(self, x, *, key=None):
        return jnp.sum(self.weight * x)


BEFORE = {
    "mutable": lambda m, x: es.mutable(m)(x),
    "mutable function": lambda m, x: es.mutable(lambda m, x: m(x))(m, x),
    "value_and_grad": lambda m, x: es.value_and_grad(lambda m, x: m(x))(m, x),
    "grad": lambda m, x: es.grad(lambda m, x: m(x))(m, x),
    "vmap": lambda m, x: es.vmap(m)(x[None]),
    "vmap closure": lambda m, x: es.vmap(lambda x: m(x))(x[None]),
    "vmap argument": lambda m, x: es.vmap(lambda m, x: m(x), in_axes=(None, 0))(
        m, x[None]
    ),
    "vmap of list": lambda m, x: es.vmap(eqx.nn.Sequential([m]))(x[None]),
    "mutable of vmap": lambda m, x: es.mutable(es.vmap(m))(x[None]),
    "functional": lambda m, x: es.functional(m),
}


@pytest.mark.parametrize("entry", BEFORE)
@pytest.mark.parametrize("holder", ["itself", "below"])
def test_before_init(entry, holder):
    class Outer(es.Module):
        inner: Lazy

        def __call__(self, x, *, key=None):
            return self.inner(x)

    model = Lazy() if holder == "itself" else Outer(Lazy())
    name = r"`weight`" if holder == "itself" else r"`inner\.weight`"
    name = r"weight`" if entry.startswith("vmap") else name
    with pytest.raises(es.NotInitializedError, match=name) as info:
        BEFORE[entry](model, jnp.ones(3))
    info.match(r"model\.init\(42\)")
    BEFORE[entry](model.init(0), jnp.ones(3))


@pytest.mark.parametrize("entry", BEFORE)
def test_before_a_module_init_has_run(entry):
    with pytest.raises(es.NotInitializedError, match="Hooked|module_init"):
        BEFORE[entry](Hooked(), jnp.ones(3))


# --- Unreduced state ----------------------------------------------------------------


class Mean(es.Module):
    mean: es.BatchStat = 0.0
    total: es.State = 0.0

    def __call__(self, x):
        self.mean = x
        self.total = lax.psum(x, "batch")
        return x


@pytest.mark.parametrize("nested", [False, True], ids=["model", "list"])
def test_an_unreduced_state(nested):
    model = [Mean()] if nested else Mean()
    f = (lambda ms, x: ms[0](x)) if nested else (lambda m, x: m(x))
    g = es.mutable(es.vmap(f, in_axes=(None, 0), axis_name="batch"))
    name = r"`\[0\]\.mean`" if nested else "`mean`"
    with rejects(model, ValueError, name, "axis_name", r"axes=\{", "pmean"):
        g(model, jnp.arange(3.0))


def test_only_the_unreduced_field_is_named():
    model = Mean()
    with pytest.raises(ValueError, match="`mean`") as info:
        es.mutable(es.vmap(model, axis_name="batch"))(jnp.arange(3.0))
    assert "total" not in str(info.value)


def test_an_error_in_a_lane_stays_what_it_is():
    def body(x):
        raise ValueError("my own out_axes is None")

    model = Mean()
    with rejects(model, ValueError, "my own"):
        es.mutable(lambda m, x: es.vmap(body)(x))(model, jnp.ones(2))
