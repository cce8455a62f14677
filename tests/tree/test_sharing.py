"""A module that occurs twice: an error if it has state, and two allowed ways."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import rejects
from models import Layer

import eqx_state as es


class Cache(es.State):
    pass


class Held(eqx.Module):
    """A plain Equinox parent."""

    inner: Any


class Two(es.Module):
    a: Any
    b: Any


# --- Detected -----------------------------------------------------------------------


class Caching(es.Module):
    cache: Cache = 0


STATEFUL = {
    "statistics": lambda: es.nn.BatchNorm(2),
    "a user's kind": Caching,
    "state further in": lambda: Two([{"x": Layer()}], 1),
    "state in plain Equinox": lambda: Two(Held(Layer()), 1),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_every_form_of_state_is_detected(name):
    module = STATEFUL[name]()
    with rejects(module, ValueError, "stateful module.*`a`", "`b`", "store one"):
        Two(module, module)


PLACES = {
    "dict": (lambda m: {"x": {"y": m}}, r"\['x'\]\['y'\]"),
    "es module": (lambda m: Two(1, m), r"\.b"),
    "partial": (lambda m: eqx.Partial(lambda *xs: None, m), r"\.args\[0\]"),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_message_has_both_paths_for_every_container(place):
    put, path = PLACES[place]
    layer = Layer()
    with rejects(layer, ValueError, f"`a{path}`", "`b`"):
        Two(put(layer), layer)
    # `eqx.filter_jit` around the call is not tested: it turns one module into two.
    tree = {"p": put(layer), "q": put(layer)}
    with rejects(tree, ValueError, rf"`\['p'\]{path}`", rf"`\['q'\]{path}`"):
        es.grad(lambda t: jnp.array(0.0))(tree)


TRANSFORMS = {
    "jit": lambda f, tree: es.jit(f)(tree),
    "vmap": lambda f, tree: es.vmap(f, in_axes=None, axis_size=2)(tree),
    "cond": lambda f, tree: es.cond(True, f, f, tree),
    "scan": lambda f, tree: es.scan(lambda c, x: (c, f(c)), tree, None, 2),
    "scan of xs": lambda f, tree: es.scan(lambda c, t: (c, f(t)), 0, tree),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_detected_in_an_argument_of_a_transform_outside_a_scope(name):
    # Each call of `f` would write to one of two copies, which would then differ.
    def f(t):
        return es.mutable(lambda t: jnp.zeros(()))(t)[0]

    rng = es.RngStream(jr.split(jr.key(0), 2))
    tree = [Layer(count=jnp.zeros(2)), {"a": rng}, rng]
    with rejects(tree, ValueError, r"\[1\]\['a'\]`", r"\[2\]`", "store one"):
        TRANSFORMS[name](f, tree)


@pytest.mark.parametrize("name", ["jit", "cond", "scan of xs"])
def test_a_module_of_a_scope_may_occur_twice_in_an_argument(name):
    def run(layer):
        def f(layers):
            assert layers[0] is layers[1]
            return layers[0](1.0) * layers[1](1.0)

        return TRANSFORMS[name](f, [layer, layer])

    _, new = es.mutable(run)(Layer(jnp.ones(2), jnp.zeros(2)))
    assert new.count.tolist() == [2, 2]


@pytest.mark.parametrize("way", ["mutable", "bound method", "functional"])
def test_detected_in_the_model_that_a_callable_contains(way):
    layer = Layer()
    model = eqx.nn.Sequential([layer, eqx.nn.Identity(), layer])
    run = {
        "mutable": lambda: es.mutable(model)(1.0),
        "bound method": lambda: es.mutable(model.__call__)(1.0),
        "functional": lambda: (lambda f, p, s: f(p, s, 1.0))(*es.functional(model)),
    }[way]
    with rejects(model, ValueError, r"`layers\[0\]`", r"`layers\[2\]`"):
        run()


ENTRANCES = {
    "Optimizer.init": lambda model: es.Optimizer(optax.sgd(0.1)).init(model),
    "init": lambda model: es.init(model, 0),
    "to_equinox": es.to_equinox,
    "functional": es.functional,
    "train": es.train,
    "eval": es.eval,
    "freeze": es.freeze,
    "unfreeze": es.unfreeze,
}


@pytest.mark.parametrize("enter", ENTRANCES.values(), ids=ENTRANCES)
def test_detected_by_functions_that_would_make_two_modules_of_one(enter):
    layer = Layer()
    model = eqx.nn.Sequential([layer, eqx.nn.Identity(), layer])
    with rejects(
        model, ValueError, "same stateful module", r"`layers\[0\]`", r"`layers\[2\]`"
    ):
        enter(model)
    enter(eqx.nn.Sequential([Layer(), eqx.nn.Identity(), Layer()]))


# --- Allowed ------------------------------------------------------------------------


def test_a_stateless_module_may_occur_several_times():
    class Plain(es.Module):
        layer: eqx.nn.Linear

    plain = Plain(eqx.nn.Linear(1, 1, key=jr.key(0)))
    es.mutable(lambda tree: None)([plain, plain, {"a": plain}])


@pytest.mark.parametrize("first", ["model", "average"])
def test_a_constant_copy_does_not_count_as_a_second_module(first):
    # A moving average may start as the model itself.
    class ModelFirst(es.Module):
        model: Layer
        average: es.Buffer[Layer]

    class AverageFirst(es.Module):
        average: es.Buffer[Layer]
        model: Layer

    layer = Layer()
    cls = ModelFirst if first == "model" else AverageFirst
    _, new = es.mutable(lambda m: m.model(1.0))(cls(model=layer, average=layer))
    assert (new.model.count, new.average.count) == (1, 0)


# --- Tied by `eqx.nn.Shared` ---------------------------------------------------------


class Around(eqx.Module):
    """A block without state of its own, around a layer that is tied."""

    layer: Layer

    def __call__(self, x):
        return jnp.sin(self.layer(x))


class Counting(es.Module):
    """A block with its own state, around a layer that is tied."""

    layer: Layer
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.layer(x)


def tied(block):
    both = block(Layer(1.5)), block(Layer(1.5))
    return eqx.nn.Shared(both, lambda t: t[1].layer, lambda t: t[0].layer)


def twice(shared, x):
    first, second = shared()
    return second(first(x))


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_a_tied_module_is_updated_by_both_its_users(jit):
    f = jit(es.value_and_grad(twice))
    (out, new), grads = f(tied(Around), 0.5)
    expected = jax.value_and_grad(lambda w: jnp.sin(w * jnp.sin(w * 0.5)))(1.5)
    (weight,) = jax.tree.leaves(grads)
    assert jnp.allclose(jnp.array([out, weight]), jnp.array(expected))
    assert [int(x) for x in jax.tree.leaves(es.filter(new, es.State))] == [2]


def test_shared_opened_twice_has_one_state():
    def f(shared, x):
        (a, _), (_, b) = shared(), shared()
        return b(a(x))

    shared = eqx.nn.Shared((Layer(), Layer()), lambda t: t[1], lambda t: t[0])
    y, new = es.mutable(f)(shared, 1.0)
    assert (y, new.pytree[0].count) == (4.0, 2)


def test_writing_state_around_a_tied_node_is_an_error():
    # The call creates the second block, with a tied node that the tree stores only
    # once.
    model = tied(Counting)
    with rejects(model, dataclasses.FrozenInstanceError, "Counting.calls"):
        es.mutable(twice)(model, 1.0)


def test_two_nodes_tied_by_one_shared():
    both = ((Layer(), Layer()), (Layer(), Layer()))
    shared = eqx.nn.Shared(both, lambda t: t[1], lambda t: t[0])
    pairs = eqx.nn.Shared(both, lambda t: [*t[1]], lambda t: [*t[0]])

    def f(shared, x):
        first, second = shared()
        return second[0](first[0](x)) + second[1](x)

    for tied in (shared, pairs):
        _, new = es.mutable(f)(tied, 1.0)
        assert [layer.count for layer in new.pytree[0]] == [2, 1]


# --- A model that contains itself -----------------------------------------------------


class Child(es.Module):
    parent: Any


class Parent(es.Module):
    child: Any

    def __init__(self, make):
        self.child = make(self)

    def __call__(self, x):
        self.child = {"self": [self]}
        return x


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda self: self, "child"),
        (Child, "child.parent"),
        (lambda self: {"a": [(1, self)]}, r"child\['a'\]\[0\]\[1\]"),
    ],
)
def test_a_model_that_contains_itself_is_an_error(make, path):
    with pytest.raises(ValueError, match=f"`{path}` is the `Parent` itself.*parent"):
        Parent(make)


def test_a_call_that_puts_a_model_into_itself_is_an_error():
    model = Parent(lambda self: {"self": [jnp.ones(1)]})
    with pytest.raises(ValueError, match=r"`child\['self'\]\[0\]` is the `Parent`"):
        es.mutable(model)(1.0)


def test_other_trees_that_contain_themselves_are_an_error_of_python():
    inner: Any = [1]
    inner.append([inner])
    with pytest.raises(RecursionError, match="recursion"):
        es.parts(inner)


def test_a_tree_that_is_too_deep_remains_an_error_of_python():
    deep: Any = [1]
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RecursionError, match="recursion"):
        es.parts(deep)
