"""`es.value_and_grad` and `es.grad`."""

import dataclasses
import functools as ft
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

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


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_what_comes_back(jit):
    before = Scale()
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


def test_the_value_is_the_result_of_mutable():
    result, _ = es.value_and_grad(loss_fn)(Scale(), X)
    assert eqx.tree_equal(result, es.mutable(loss_fn)(Scale(), X))


TARGETS = {
    "function": lambda m: (loss_fn, (m, X)),
    "bound method": lambda m: (m.loss, (X,)),
    "unbound method": lambda m: (Scale.loss, (m, X)),
    "module": lambda m: (m, (X,)),
    "partial": lambda m: (ft.partial(loss_fn, m), (X,)),
    "jax partial": lambda m: (jtu.Partial(loss_fn, m), (X,)),
    "eqx partial": lambda m: (eqx.Partial(loss_fn, m), (X,)),
    "partial of a method": lambda m: (ft.partial(m.loss, x=X), ()),
    "keywords": lambda m: (ft.partial(loss_fn, x=X), (m,)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_differentiated(name):
    before = Scale(table=1.0)
    f, args = TARGETS[name](before)
    (_, model), grads = es.value_and_grad(f)(*args)
    # of 3 * 2, or of its square
    assert jax.tree.leaves(grads) == [X if name == "module" else 24.0]
    assert model.calls == 1
    assert type(grads) is Scale


def test_keyword_arguments():
    (loss, _), _ = es.value_and_grad(loss_fn)(Scale(), x=X)
    assert loss == 144.0


@pytest.mark.parametrize(
    "wrap",
    [lambda m: [m], lambda m: (0, m), lambda m: {"m": m, "f": jnp.tanh}],
    ids=["list", "tuple", "dict"],
)
def test_containers_of_models(wrap):
    def find(tree):
        is_model = lambda x: isinstance(x, Scale)  # noqa: E731
        return next(filter(is_model, jax.tree.leaves(tree, is_leaf=is_model)))

    before = wrap(Scale())
    (_, model), grads = es.value_and_grad(lambda t, x: find(t).loss(x))(before, X)
    assert type(grads) is type(before)
    check(find(model), find(grads), find(before))


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
    grads, _ = es.grad(lambda d: d["w"] * d["n"])({"w": 3.0 * x[0], "n": 2})
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
    "trainable": (es.trainable, ["a.factor", "b.factor"]),
    "kind": (es.BatchStat, ["a.mean", "b.mean"]),
    "buffers": (es.any_of(es.Buffer, es.Parameter), ["a.f", "a.t", "b.f", "b.t"]),
    "state": (es.State, ["a.mean", "b.mean", "extra"]),
    "everything": (es.TreePart, ["a.f", "a.m", "a.t", "b.f", "b.m", "b.t", "extra"]),
    "under": (es.all_of(es.trainable, es.under(lambda m: m.a)), ["a.factor"]),
    "not under": (
        es.all_of(es.trainable, es.not_(es.under(lambda m: m.a))),
        ["b.factor"],
    ),
    "path": (es.path_matches("b.factor"), ["b.factor"]),
    "callable": (lambda part: part.name == "a.factor", ["a.factor"]),
    "nothing": (lambda part: False, []),
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


def test_what_is_frozen_has_no_gradient():
    model = Two().freeze(lambda m: m.a)
    grads, new = es.grad(lambda m, x: m(x))(model, X)
    assert grads.a.factor is None
    assert grads.b.factor is not None
    assert new.a.frozen
    assert new.a.calls == 1


def test_gradients_are_zero_where_nothing_depends():
    grads, _ = es.grad(lambda m, x: m.a(x))(Two(), X)
    assert grads.b.factor == 0.0
    assert grads.extra is None


def test_integer_parameters_have_no_gradient():
    class Mixed(es.Module):
        w: es.Parameter = 2.0
        n: es.Parameter = 3

    grads, _ = es.grad(lambda m: m.w * m.n.astype(float))(Mixed())
    assert (grads.w, grads.n) == (3.0, None)


def test_what_a_buffer_covers_has_no_gradient():
    class Ema(es.Module):
        model: Scale
        ema: es.Buffer[Scale]

    grads, _ = es.grad(lambda m: m.model.factor * m.ema.factor)(Ema(Scale(), Scale()))
    assert grads.model.factor == 3.0
    assert jax.tree.leaves(grads.ema) == []


def test_state_does_not_carry_gradients_into_the_next_step():
    class Ema(es.Module):
        w: es.Parameter = 2.0
        last: es.State = 1.0

        def __call__(self):
            out = self.w * self.last
            self.last = self.w
            return out

    model = Ema()
    grads, model = es.grad(lambda m: m())(model)
    assert grads.w == 1.0
    grads, model = es.grad(lambda m: m())(model)
    assert grads.w == 2.0


def test_gradients_flow_through_state_within_a_call():
    class Ema(es.Module):
        w: es.Parameter = 2.0
        last: es.State = 1.0

        def __call__(self):
            self.last = self.last * self.w
            self.last = self.last * self.w
            return self.last

    grads, new = es.grad(lambda m: m())(Ema())
    assert grads.w == 4.0
    assert new.last == 4.0


# --- Use ----------------------------------------------------------------------------


@jax.numpy_dtype_promotion("standard")
def test_grads_are_what_optax_and_equinox_take():
    model, tx = Scale(), optax.adam(0.1)
    params = model.filter(es.trainable)
    opt_state = tx.init(params)
    (_, model), grads = es.value_and_grad(loss_fn)(model, X)
    updates, _ = tx.update(grads, opt_state, params)
    new = eqx.apply_updates(model, updates)
    np.testing.assert_allclose(new.factor, 2.9, rtol=1e-5)
    assert new.calls == 1


def test_a_jitted_loop_compiles_once_and_equals_the_handwritten_version():
    traces = []

    @eqx.filter_jit
    def step(model, x):
        traces.append(1)
        (loss, model), grads = es.value_and_grad(loss_fn)(model, x)
        grads = jax.tree.map(lambda g: -0.001 * g, grads)
        return loss, eqx.apply_updates(model, grads)

    model, factor = Scale(), jnp.array(3.0)
    for _ in range(3):
        expected, grad = jax.value_and_grad(lambda f: (f * 2.0 * X) ** 2)(factor)
        factor = factor - 0.001 * grad
        loss, model = step(model, jnp.array(X))
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        np.testing.assert_allclose(model.factor, factor, rtol=1e-6)
    assert model.calls == 3
    assert len(traces) == 1


@jax.debug_key_reuse(False)  # on purpose: the same draw twice
def test_as_decorators():
    @es.value_and_grad
    def step(model, x):
        """Doc."""
        return loss_fn(model, x)

    (loss, _), _ = step(Scale(), X)
    assert loss == 144.0
    assert step.__doc__ == "Doc."
    assert step.__wrapped__.__name__ == step.__name__ == "step"
    assert list(inspect.signature(step).parameters) == ["model", "x"]
    assert hash(es.grad(loss_fn)) == hash(es.grad(loss_fn))

    class Net(Scale):
        @es.grad
        def gradient(self, x):
            return self.loss(x)

        @ft.partial(es.value_and_grad, has_aux=True)
        def both(self, x):
            return self.loss_and_aux(x)

    net = Net()
    grads, new = net.gradient(X)
    check(new, grads, net)
    ((_, aux), new), grads = net.both(X)
    assert aux["calls"] == 1
    check(new, grads, net)


def test_inside_a_scope_it_is_a_scope_of_its_own():
    def f(model, x):
        grads, new = es.grad(loss_fn)(model.a, x)
        assert model.a.calls == 0
        model.extra = grads.factor
        model.a = new
        model.a(x)

    _, new = es.mutable(f)(Two(), X)
    assert new.extra == 96.0
    assert new.a.calls == 2


def test_what_the_loss_closes_over_is_not_written():
    def f(model, x):
        return es.grad(lambda a, x: a(x) * model.b(x))(model.a, x)

    with pytest.raises(es.TraceError, match=r"Scale\.\w+.*b\."):
        es.mutable(f)(Two(), X)


def test_second_derivatives():
    def inner(model, x):
        grads, _ = es.grad(lambda m, x: m.factor**3 * x)(model, x)
        return grads.factor

    grads, _ = es.grad(inner)(Scale(), X)
    assert grads.factor == 6 * 3.0 * X


def test_in_vmap_and_under_jax_grad():
    run = lambda x: es.grad(loss_fn)(Scale(), x)  # noqa: E731
    grads, models = jax.vmap(lambda x: [m.filter(es.TreePart) for m in run(x)])(
        jnp.arange(3.0)
    )
    assert grads.factor.tolist() == [0.0, 24.0, 96.0]
    assert models.mean.tolist() == [0.0, 1.0, 2.0]
    # d/dx of 2 * factor * (table * x)²
    assert jax.grad(lambda x: run(x)[0].factor)(X) == 96.0


@pytest.mark.parametrize("run", [es.value_and_grad, es.grad], ids=["both", "grad"])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (lambda m: jnp.ones(2) * m.factor, {}),
        (lambda m: (m.factor, 1), {}),
        (lambda m: m.factor.astype(int), {}),
        (lambda m: m.factor.astype(complex), {}),
        (lambda m: None, {}),
        (lambda m: (jnp.ones(2) * m.factor, 1), {"has_aux": True}),
    ],
    ids=["vector", "tuple", "integer", "complex", "none", "vector and aux"],
)
@jax.numpy_dtype_promotion("standard")
def test_the_loss_is_one_real_number(run, loss, options):
    with pytest.raises(TypeError, match="loss"):
        run(loss, **options)(Scale())


@pytest.mark.parametrize("run", [es.value_and_grad, es.grad], ids=["both", "grad"])
def test_nothing_to_differentiate(run):
    with pytest.raises(TypeError, match=r"es\.(value_and_)?grad"):
        run(lambda: 1.0)()
    with pytest.raises(TypeError, match="filter"):
        run(loss_fn, wrt="weights")(Scale(), X)


def test_an_exception_leaves_the_model_alone():
    def f(model, x):
        model(x)
        raise KeyError("half-way")

    model = Scale()
    leaves = jax.tree.leaves(model)
    with pytest.raises(KeyError, match="half-way"):
        es.grad(f)(model, X)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(model), strict=True))


@pytest.mark.parametrize(
    "out", [lambda x: x, lambda x: (x, 1, 2)], ids=["one", "three"]
)
def test_has_aux_wants_a_pair(out):
    model = {"w": jnp.array(2.0)}
    with pytest.raises(TypeError, match=r"returns a pair, `\(loss, aux\)`"):
        es.grad(lambda m: out(m["w"]), has_aux=True)(model)


@pytest.mark.parametrize("run", [es.mutable, es.capture, es.grad, es.value_and_grad])
@pytest.mark.parametrize("around", [lambda f: f, es.jit, es.checkpoint, es.vmap])
def test_a_model_under_jax_jit_raises_no_warning(run, around):
    class Loss(es.Module):
        weight: float = 2.0  # no array, so that `jax.jit` can hash it

        def __call__(self, x):
            return self.weight * x

    f = around(run(es.checkpoint(jax.jit(Loss()))))
    out = f(jnp.ones(3) if around is es.vmap else jnp.ones(()))
    assert len(out) == 2
