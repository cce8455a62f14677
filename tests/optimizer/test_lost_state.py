"""`es.LostStateWarning`: gradients and the model from before their call."""

import copy
import gc
import pickle
import warnings
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import reuses_keys

import eqx_state as es


class Net(es.Module):
    w: es.Parameter
    mean: es.BatchStat
    old: es.State

    def __init__(self):
        self.w, self.mean, self.old = jnp.ones(()), jnp.zeros(()), jnp.ones(())

    def __call__(self, x):
        if self.training:
            self.old, self.mean = self.mean, 0.9 * self.mean + 0.1 * x
        return self.w * (x - self.mean)


class Plain(eqx.Module):
    net: Net
    size: int = 3

    def __call__(self, x):
        return self.net(x)


def loss_fn(model, x=2.0):
    first = jax.tree.leaves(model, is_leaf=callable)
    return sum(m(x) ** 2 for m in first if callable(m))


def warned(f, *args):
    """The result, and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = f(*args)
    assert all(x.category is es.LostStateWarning for x in caught)
    assert all(x.filename == __file__ for x in caught)
    return out, [str(x.message) for x in caught]


def step(grads, model):
    optimizer = es.Optimizer(optax.sgd(0.1)).init(model)
    return optimizer.update(grads, model)[0]


MODELS = {
    "module": (Net, "mean"),
    "plain module": (lambda: Plain(Net()), "net.mean"),
    "list": (lambda: [Net(), Net()], "[0].mean"),
    "dict": (lambda: {"net": Net()}, "['net'].mean"),
    "stack": (lambda: es.nn.Stacked([Net(), Net()]), "layers.mean"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_from_before_is_a_warning_that_names_a_field(name):
    make, field = MODELS[name]
    model = make()
    (_, new), grads = es.value_and_grad(loss_fn)(model)
    _, (said,) = warned(step, grads, model)
    assert f"`{field}`" in said
    assert "(loss, model), grads = es.value_and_grad" in said
    assert warned(step, grads, new)[1] == []


def test_it_shows_the_line_of_the_function():
    aux = lambda model: (loss_fn(model), "aux")  # noqa: E731
    model, lines = Net(), []
    grads, _ = es.grad(loss_fn)(model)
    lines += warned(step, grads, model)[1]
    grads, _ = es.grad(aux, has_aux=True)(model)
    lines += warned(step, grads, model)[1]
    _, grads = es.value_and_grad(aux, has_aux=True)(model)
    lines += warned(step, grads, model)[1]
    expected = (
        "grads, model = ",
        "grads, (aux, model) = ",
        "((loss, aux), model), grads",
    )
    assert all(x in line for x, line in zip(expected, lines, strict=True))


def test_several_models():
    models = Net(), Net().eval()
    f = lambda a, b: a(2.0) ** 2 + b(2.0) ** 2  # noqa: E731
    (_, new), grads = es.value_and_grad(f, argnums=(0, 1))(*models)
    assert len(warned(step, grads, models)[1]) == 1
    assert len(warned(step, grads[0], models[0])[1]) == 1
    assert warned(step, grads[1], models[1])[1] == []  # wrote nothing
    assert warned(step, grads, (new[0], models[1]))[1] == []


def scaled(grads):
    return jax.tree.map(lambda g: 0.5 * g, grads)


SILENT = {
    "a different gradient": lambda grads, model: (scaled(grads), model),
    "only parameters": lambda grads, model: (grads, model.filter(es.Parameter)),
    "copy": lambda grads, model: (copy.copy(grads), model),
    "deepcopy": lambda grads, model: (copy.deepcopy(grads), model),
    "pickle": lambda grads, model: (pickle.loads(pickle.dumps(grads)), model),
    "arrays that are gone": lambda grads, model: (grads, jax.tree.map(jnp.copy, model)),
    "another model": lambda grads, model: (grads, Net()),
}


@pytest.mark.parametrize("name", SILENT)
def test_anything_else_is_silent(name):
    model = Net()
    grads, _ = es.grad(loss_fn)(model)
    assert warned(step, *SILENT[name](grads, model))[1] == []


def test_a_call_that_wrote_nothing_is_silent():
    model = Net().eval()
    grads, _ = es.grad(loss_fn)(model)
    assert warned(step, grads, model)[1] == []


def test_an_old_array_in_another_place_is_silent():
    # `old` of the new model is `mean` from before.
    model = Net()
    grads, new = es.grad(loss_fn)(model)
    assert new.old is model.mean
    assert warned(step, grads, new)[1] == []


def test_nothing_is_kept_alive():
    model = Net()
    grads, new = es.grad(loss_fn)(model)
    refs = weakref.ref(model), weakref.ref(model.mean), weakref.ref(new)
    mean = weakref.ref(model.old)
    del model, new
    gc.collect()
    assert [ref() for ref in (*refs[:1], refs[2], mean)] == [None] * 3
    assert warned(step, grads, Net())[1] == []


def test_under_jit_it_warns_once_at_the_trace():
    @es.jit
    def train(model, optimizer):
        _, grads = es.value_and_grad(loss_fn)(model)
        return optimizer.update(grads, model)

    model = Net()
    optimizer = es.Optimizer(optax.sgd(0.1)).init(model)
    (model, optimizer), said = warned(train, model, optimizer)
    assert len(said) == 1
    assert warned(train, model, optimizer)[1] == []
    # The result of a compiled call has no note.
    grads, _ = es.jit(es.grad(loss_fn))(model)
    assert warned(step, grads, model)[1] == []


class Trainer(es.Module):
    net: Net
    optimizer: es.Optimizer

    def right(self):
        (_, self.net), grads = es.value_and_grad(loss_fn)(self.net)
        self.net, self.optimizer = self.optimizer.update(grads, self.net)

    def wrong(self):
        _, grads = es.value_and_grad(loss_fn)(self.net)
        self.net, self.optimizer = self.optimizer.update(grads, self.net)


@pytest.mark.parametrize("in_scan", [False, True])
def test_in_a_scope_and_a_loop(in_scan):
    net = Net()
    trainer = Trainer(net, es.Optimizer(optax.sgd(0.1)).init(net))

    def run(trainer, method):
        if not in_scan:
            return method(trainer)
        return es.scan(lambda c, _: (c, method(trainer)), None, length=2)

    kinds = es.TreePart
    f = es.mutable(run, kinds=kinds)
    assert len(warned(f, trainer, Trainer.wrong)[1]) == 1
    (_, new), said = warned(f, trainer, Trainer.right)
    assert said == []
    assert new.net.mean != 0


@reuses_keys
def test_a_key_that_was_drawn_from_is_state():
    model = [es.nn.Dropout(0.5, key=jr.key(0)), eqx.nn.Linear(2, 2, key=jr.key(1))]
    f = lambda model: jnp.sum(model[0](model[1](jnp.ones(2))))  # noqa: E731
    grads, new = es.grad(f)(model)
    assert "`[0].rng`" in warned(step, grads, model)[1][0]
    assert warned(step, grads, new)[1] == []


def test_state_that_is_a_numpy_array():
    model = Net()
    object.__setattr__(model, "mean", np.float32(0))
    object.__setattr__(model, "old", np.ones(()))
    grads, _ = es.grad(loss_fn)(model)
    assert "`old`" in warned(step, grads, model)[1][0]
