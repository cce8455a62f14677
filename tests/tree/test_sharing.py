"""A module that occurs twice: an error if it has state, and two allowed ways."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.lax as lax
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
    "state": Layer,
    "statistics": lambda: es.nn.BatchNorm(2),
    "keys": lambda: es.RngStream(0),
    "a user's kind": Caching,
    "state further in": lambda: Two([{"x": Layer()}], 1),
    "state in plain Equinox": lambda: Two(Held(Layer()), 1),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_every_form_of_state_is_detected(name):
    module = STATEFUL[name]()
    with rejects(module, ValueError, "stateful module.*`a`", "`b`", "store one"):
        Two(module, module)
    with rejects(module, ValueError, r"`\[0\]`", r"`\[1\]`"):
        es.mutable(lambda t: None)([module, module])


PLACES = {
    "tuple": (lambda m: (0, m), r"\[1\]"),
    "dict": (lambda m: {"x": {"y": m}}, r"\['x'\]\['y'\]"),
    "Sequential": (lambda m: eqx.nn.Sequential([m]), r"\.layers\[0\]"),
    "plain module": (lambda m: Held([m]), r"\.inner\[0\]"),
    "es module": (lambda m: Two(1, m), r"\.b"),
    "partial": (lambda m: eqx.Partial(lambda *xs: None, m), r"\.args\[0\]"),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_message_has_both_paths_for_every_container(place):
    put, path = PLACES[place]
    layer = Layer()
    with rejects(layer, ValueError, "`a`", f"`b{path}`"):
        Two(layer, put(layer))
    with rejects(layer, ValueError, f"`a{path}`", "`b`"):
        Two(put(layer), layer)
    # `eqx.filter_jit` around the call is not tested: it turns one module into two.
    tree = {"p": put(layer), "q": put(layer)}
    for enter in (
        es.mutable(lambda t: None),
        es.grad(lambda t: jnp.array(0.0)),
        es.mutable(es.vmap(lambda t: None, axis_size=2, in_axes=None)),
    ):
        with rejects(tree, ValueError, rf"`\['p'\]{path}`", rf"`\['q'\]{path}`"):
            enter(tree)


TRANSFORMS = {
    "jit": lambda f, tree: es.jit(f)(tree),
    "vmap": lambda f, tree: es.vmap(f, in_axes=None, axis_size=2)(tree),
    "checkpoint": lambda f, tree: es.checkpoint(f)(tree),
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


@pytest.mark.parametrize("name", ["jit", "vmap", "checkpoint", "cond", "scan of xs"])
def test_a_module_of_a_scope_may_occur_twice_in_an_argument(name):
    def run(layer):
        def f(layers):
            assert layers[0] is layers[1]
            return layers[0](1.0) * layers[1](1.0)

        return TRANSFORMS[name](f, [layer, layer])

    _, new = es.mutable(run)(Layer(jnp.ones(2), jnp.zeros(2)))
    assert new.count.tolist() == [2, 2] if name != "vmap" else [2.0, 2.0]


@pytest.mark.parametrize("way", ["mutable", "vmap", "bound method", "functional"])
def test_detected_in_the_model_that_a_callable_contains(way):
    layer = Layer()
    model = eqx.nn.Sequential([layer, eqx.nn.Identity(), layer])
    run = {
        "mutable": lambda: es.mutable(model)(1.0),
        "vmap": lambda: es.mutable(es.vmap(model))(jnp.ones(3)),
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


class Norm(es.Module):
    """Scales by a parameter, and shifts by a running mean of the batch."""

    scale: es.Parameter
    mean: es.BatchStat = 0.0

    def __call__(self, x):
        self.mean = 0.5 * self.mean + 0.5 * lax.pmean(x, "batch")
        return self.scale * x + self.mean


class Batched(es.Module):
    def __call__(self, xs):
        return es.vmap(self.one, axis_name="batch")(xs)


def by_hand(scale, mean, xs):
    """Two calls of one `Norm`, without modules: the loss and the final mean."""
    mean = 0.5 * mean + 0.5 * jnp.mean(xs)
    xs = jnp.sin(scale * xs + mean)
    mean = 0.5 * mean + 0.5 * jnp.mean(xs)
    return jnp.mean((scale * xs + mean) ** 2), mean


def loss_fn(model, xs):
    return jnp.mean(model(xs) ** 2)


XS = jnp.array([0.5, -1.0, 2.0])


def run(model, xs, how):
    """`(loss, model, grads)`; the gradients are `None` unless `how` contains 'grad'."""
    f = es.value_and_grad(loss_fn) if "grad" in how else es.mutable(loss_fn)
    out = (eqx.filter_jit(f) if "jit" in how else f)(model, xs)
    return (*out[0], out[1]) if "grad" in how else (*out, None)


every_how = pytest.mark.parametrize("how", ["eager", "jit", "grad", "jit grad"])


class Around(eqx.Module):
    """A block without state of its own, around a `Norm` that is tied."""

    norm: Norm

    def __call__(self, x):
        return self.norm(x)


class Counting(es.Module):
    """A block with its own state, around a `Norm` that is tied."""

    norm: Norm
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.norm(x)


class TiedNorm(Batched):
    """The tied node is stateful: two blocks use one `Norm`."""

    shared: eqx.nn.Shared

    def one(self, x):
        first, second = self.shared()
        return second(jnp.sin(first(x)))


def tied_norm(block):
    norm = Norm(1.5)
    return TiedNorm(
        eqx.nn.Shared(
            (block(norm), block(norm)), lambda t: t[1].norm, lambda t: t[0].norm
        )
    )


@every_how
def test_a_tied_module_is_updated_by_both_its_users(how):
    (loss, mean), grad = jax.value_and_grad(by_hand, has_aux=True)(
        jnp.array(1.5), jnp.array(0.0), XS
    )
    out, new, grads = run(tied_norm(Around), XS, how)
    assert jnp.allclose(out, loss, rtol=1e-6)
    first, _ = new.shared.pytree
    assert jnp.allclose(first.norm.mean, mean, rtol=1e-6)
    assert len(jax.tree.leaves(es.filter(new, es.BatchStat))) == 1
    if grads is not None:
        assert jnp.allclose(grads.shared.pytree[0].norm.scale, grad, rtol=1e-5)
        assert len(jax.tree.leaves(grads)) == 1


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_shared_opened_twice_has_one_state(jit):
    def f(shared, x):
        (a, _), (_, b) = shared(), shared()
        return b(a(x))

    shared = eqx.nn.Shared((Layer(), Layer()), lambda t: t[1], lambda t: t[0])
    y, new = (eqx.filter_jit(es.mutable(f)) if jit else es.mutable(f))(shared, 1.0)
    assert (y, new.pytree[0].count) == (4.0, 2)


def test_writing_state_around_a_tied_node_is_an_error():
    # The call creates the second block, with a tied node that the tree stores only
    # once.
    model = tied_norm(Counting)
    with rejects(model, dataclasses.FrozenInstanceError, "Counting.calls"):
        es.mutable(model)(XS)


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
