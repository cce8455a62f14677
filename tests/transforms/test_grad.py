"""`es.value_and_grad` and `es.grad`."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import rejects, reuses_keys

import eqx_state as es


class Scale(es.Module):
    factor: es.Parameter = 3.0
    calls: es.State = 0
    mean: es.BatchStat = 0.0
    table: es.Buffer = 2.0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))
    index: jax.Array = dataclasses.field(default_factory=lambda: jnp.arange(2))
    name: str = "scale"

    def __call__(self, x):
        self.calls = self.calls + 1
        self.mean = self.mean + x
        _, self.rng = jr.split(self.rng)
        return self.factor * self.table * x

    def loss(self, x):
        return self(x) ** 2

    def loss_and_aux(self, x):
        return self(x) ** 2, {"calls": self.calls, "text": "aux"}


def loss_fn(model, x):
    return model(x) ** 2


def loss_and_aux(model, x):
    return model.loss_and_aux(x)


X = 2.0  # (3 * 2 * 2)² = 144, and its derivative is 2 * 12 * 4 = 96


def check(model, grads, before):
    assert grads.factor == 96.0
    assert jax.tree.leaves(grads) == [96.0]
    assert (model.calls, model.mean, before.calls) == (1, X, 0)
    assert model.rng != before.rng
    assert model.factor == before.factor
    for tree in (model, grads):
        flags = jax.tree.structure(before, is_leaf=lambda x: x is None)
        assert jax.tree.structure(tree, is_leaf=lambda x: x is None) == flags
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(model))


@reuses_keys
def test_the_results_are_gradients_and_the_new_model():
    before, jit = Scale(), eqx.filter_jit
    (loss, model), grads = jit(es.value_and_grad(loss_fn))(before, X)
    assert loss == 144.0
    check(model, grads, before)
    grads, model = jit(es.grad(loss_fn))(before, X)
    check(model, grads, before)
    (out, model), grads = jit(es.value_and_grad(loss_and_aux, has_aux=True))(before, X)
    assert out == (144.0, {"calls": 1, "text": "aux"})
    check(model, grads, before)
    grads, (aux, model) = jit(es.grad(loss_and_aux, has_aux=True))(before, X)
    assert aux == {"calls": 1, "text": "aux"}
    check(model, grads, before)


def test_plain_pytrees_and_equinox_layers():
    mlp = eqx.nn.MLP(2, 1, 4, 1, key=jr.key(0))
    x = jnp.ones(2)
    f = lambda m, x: jnp.sum(m(x))  # noqa: E731
    expected, grads = eqx.filter_value_and_grad(f)(mlp, x)
    (loss, model), ours = es.value_and_grad(f)(mlp, x)
    assert loss == expected
    assert eqx.tree_equal(model, mlp)
    assert jax.tree.structure(grads) == jax.tree.structure(ours)
    jax.tree.map(np.testing.assert_array_equal, ours, grads)
    for w in (3.0 * x[0], np.array(3.0)):  # NumPy's float64 works, too
        grads, _ = es.grad(lambda d: d["w"] * d["n"])({"w": w, "n": 2})
        assert grads == {"w": 2.0, "n": None}


# --- `wrt` --------------------------------------------------------------------------


class Two(es.Module):
    a: Scale = dataclasses.field(default_factory=Scale)
    b: Scale = dataclasses.field(default_factory=Scale)
    extra: es.State = 1.0

    def __call__(self, x):
        return self.a(x) * self.b(x) * self.extra


WRT = {
    "default": (None, ["a.factor", "b.factor"]),
    "state": (es.State, ["a.mean", "b.mean", "extra"]),
    "path": (es.path_matches("b.factor"), ["b.factor"]),
}


@pytest.mark.parametrize("name", WRT)
def test_wrt(name):
    wrt, expected = WRT[name]
    options = {} if wrt is None else {"wrt": wrt}
    (_, model), grads = es.value_and_grad(lambda m, x: m(x), **options)(Two(), X)
    names = [part.name for part in es.parts(grads)]
    assert len(names) == len(expected)
    for path, start in zip(names, expected, strict=True):
        assert path.startswith(start)
    assert model.a.calls == model.b.calls == 1


def test_gradients_flow_through_state_within_a_call_and_not_into_the_next():
    class Ema(es.Module):
        w: es.Parameter = 2.0
        last: es.State = 1.0

        def __call__(self):
            before = self.last
            self.last = self.w * before
            return self.last + before

    grads, model = es.grad(lambda m: m())(Ema())
    assert (grads.w, model.last) == (1.0, 2.0)
    grads, model = es.grad(lambda m: m())(model)
    assert (grads.w, model.last) == (2.0, 4.0)


# --- Use ----------------------------------------------------------------------------


def test_as_a_decorator_of_a_method():
    class Net(Scale):
        @ft.partial(es.value_and_grad, has_aux=True)
        def both(self, x):
            return self.loss_and_aux(x)

    ((_, aux), new), grads = (net := Net()).both(X)
    assert aux["calls"] == 1
    check(new, grads, net)


@reuses_keys
def test_unwritten_numpy_arrays_are_the_callers_own():
    arrays = np.array([1.0, 2.0]), np.array(3.0), np.array([4, 5])
    model = {"w": arrays[0], "net": Scale(factor=jnp.ones(())), "index": arrays[2]}
    model = eqx.tree_at(lambda m: m["net"].factor, model, arrays[1])

    def loss(model, x):
        return jnp.sum(model["w"]) * model["net"](x), model["net"].factor

    (((_, factor), new), grads) = es.value_and_grad(loss, has_aux=True)(model, 2.0)
    assert isinstance(factor, jax.Array)
    assert isinstance(grads["w"], jax.Array)
    assert new["w"] is arrays[0]
    assert new["net"].factor is arrays[1]
    assert new["index"] is arrays[2]
    assert new["net"].calls == 1
    grads, _ = es.grad(loss, has_aux=True, kinds=es.TreePart)(model, 2.0)
    assert grads["net"].factor == 3.0 * 2.0 * 2.0


class Distilled(es.Module):
    """A student and its teacher, whose statistics change, too."""

    student: Scale = dataclasses.field(default_factory=Scale)
    teacher: es.Buffer[Scale] = dataclasses.field(default_factory=Scale)

    def loss(self, x):
        return (self.student(x) - self.teacher(x) + 1) ** 2


def test_kinds_names_what_the_loss_may_write():
    x = jnp.float32(1.0)
    model = Distilled()
    with rejects(
        model,
        dataclasses.FrozenInstanceError,
        r"`teacher\.\w+` is a `Buffer`.*can write only `State`",
        r"`kinds=\(es\.State, es\.Buffer\)`.*`es\.value_and_grad`",
        r"A field further up.*eval mode: `self\.teacher\.eval\(\)\(x\)`",
    ):
        es.value_and_grad(model.loss)(x)
    both = (es.State, es.Buffer)
    (loss, new), grads = es.value_and_grad(Distilled.loss, kinds=both)(Distilled(), x)
    assert (new.student.calls, new.teacher.calls, new.teacher.mean) == (1, 1, 1.0)
    assert (loss, grads.student.factor, grads.teacher.factor) == (1.0, 4.0, None)
    grads, new = es.grad(Distilled().loss, kinds=both)(x)
    assert (new.teacher.calls, grads.teacher.factor) == (1, None)

    def halve(model, x):
        model.factor = model.factor / 2
        return model(x)

    (value, new), grads = es.value_and_grad(halve, kinds=es.TreePart)(Scale(), x)
    assert (value, new.factor, grads.factor) == (3.0, 1.5, 1.0)


def test_kinds_of_a_capture_and_of_its_gradient_add_up():
    captured = es.capture(
        es.value_and_grad(Distilled.loss, kinds=es.Buffer), outputs=Scale
    )
    (((_, new), _), found) = captured(Distilled(), jnp.float32(1.0))
    assert (new.student.calls, new.teacher.calls) == (1, 1)
    assert list(found) == ["student", "teacher"]


@pytest.mark.parametrize("kinds", [Scale, (es.State, 1)])
def test_kinds_must_be_kinds(kinds):
    with pytest.raises(TypeError, match="es.grad.*must be a kind such as"):
        es.grad(loss_fn, kinds=kinds)


@pytest.mark.parametrize("run", [es.value_and_grad, es.grad], ids=["both", "grad"])
def test_nothing_to_differentiate(run):
    with pytest.raises(TypeError, match=r"es\.(value_and_)?grad"):
        run(lambda: 1.0)()
    with pytest.raises(TypeError, match="filter"):
        run(loss_fn, wrt="weights")(Scale(), X)
    with pytest.raises(TypeError, match=rf"under `es\.{run.__name__}` returned"):
        run(lambda model, x: jnp.stack([x, x]))(Scale(), X)


def test_a_loss_that_is_a_number_has_no_gradient():
    with pytest.raises(TypeError, match=r"returned `4\.0` .*`\.item\(\)`"):
        es.grad(lambda m: (m["w"] ** 2).item())({"w": jnp.array(2.0)})
    grads, _ = es.grad(lambda m: jnp.array(0.0))({"w": jnp.array(2.0)})
    assert grads["w"] == 0


def test_has_aux_requires_a_pair():
    with pytest.raises(TypeError, match=r"must return a pair, `\(out, aux\)`"):
        es.grad(lambda m: (m["w"], 1, 2), has_aux=True)({"w": jnp.array(2.0)})


@pytest.mark.parametrize("run", [es.mutable, es.capture])
def test_a_model_under_jax_jit_raises_no_warning(run):
    class Loss(es.Module):
        weight: float = 2.0  # not an array, so that `jax.jit` can hash it

        def __call__(self, x):
            return self.weight * x

    f = es.jit(run(es.checkpoint(jax.jit(Loss()))))
    out = f(jnp.ones(()))
    assert len(out) == 2
