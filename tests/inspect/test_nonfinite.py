"""`es.find_nonfinite` names the call that makes a NaN, `es.nonfinite` the arrays."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import close, untouched
from jax.sharding import Mesh, PartitionSpec as P
from models import Net

import eqx_state as es


X = jnp.array([1.0, 2.0])
ZEROS = jnp.zeros(2)


class Log(eqx.Module):
    """Infinite at 0, and NaN below."""

    def __call__(self, x, *, key=None):
        return jnp.log(x)


class Pass(es.Module):
    calls: es.State = 0

    def __call__(self, x, *, key=None):
        self.calls = self.calls + 1
        return jnp.sin(x)


class Quiet(es.Module):
    scale: es.Parameter = 1.0

    def __call__(self, x):
        return jnp.sin(self.scale * x)


def net() -> Net:
    return Net([Pass(), Log(), Pass(), Log()])


# --- Calls of modules -----------------------------------------------------------------


def test_it_names_the_innermost_call_and_does_not_change_the_model():
    model = net()
    with untouched(model):
        assert es.find_nonfinite(model)(ZEROS) == ["layers[1]"]
        assert es.find_nonfinite(model)(jnp.array([1.5, 1.5])) == ["layers[3]"]
        assert es.find_nonfinite(Net([Pass()]))(ZEROS) == []
    assert es.find_nonfinite(Net([net()]))(ZEROS) == ["layers[0].layers[1]"]


def test_it_names_each_module_once_in_the_order_in_which_calls_are_traced():
    def f(model, x):
        a, b, c = model.layers
        return a(x), b(1 - x), c(0 * x), a(0 * x), b(x - 1)

    # The first call of `a` is fine, so `b` comes before it.
    names = ["layers[1]", "layers[2]", "layers[0]"]
    for g in (f, es.jit(f), es.vmap(f, in_axes=(None, 0))):
        assert es.find_nonfinite(g)(Net([Log(), Log(), Log()]), jnp.ones(2)) == names


def test_a_module_is_named_if_its_own_code_makes_a_nan():
    class Root(es.Module):
        layer: eqx.Module

        def __call__(self, x):
            x = self.layer(x)
            return jnp.log(jnp.where(jnp.isfinite(x), x, 1.0))

    assert es.find_nonfinite(Root(Pass()))(-X) == [""]
    assert es.find_nonfinite(Root(Log()))(ZEROS) == ["layer"]
    assert es.find_nonfinite(Root(Log()))(jnp.ones(2)) == [""]
    # Each lane and each step is a separate call. In one of them, the layer makes the
    # NaN.
    xs = jnp.array([0.0, 1.0])
    lanes = (
        lambda m, xs: jax.vmap(m)(xs),
        lambda m, xs: es.vmap(m)(xs),
        lambda m, xs: es.scan(lambda c, x: (c, m(x)), 0, xs),
        lambda m, xs: jax.vmap(lambda x: es.scan(lambda c, x: (c, m(x)), 0, x))(
            xs[None]
        ),
    )
    for f in lanes:
        assert es.find_nonfinite(f)(Root(Log()), xs) == ["layer", ""]
        assert es.find_nonfinite(f)(Root(Log()), 0 * xs) == ["layer"]
    # The function is not a module.
    assert es.find_nonfinite(lambda m, x: m(x) / 0)(Pass(), X) == []


def test_lanes_within_lanes_belong_to_the_call_around_them():
    class Row(es.Module):
        cell: eqx.Module

        def __call__(self, row):
            out = jax.vmap(self.cell)(row)
            return jnp.where(jnp.isfinite(out), out, 1.0) + jnp.log(row[1] - 1)

    run = es.find_nonfinite(lambda m, xs: jax.vmap(m)(xs))
    for row, names in (([2.0, 3.0], ["cell"]), ([2.0, 1.0], ["cell", ""])):
        assert run(Row(Log()), jnp.array([[0.0, 1.0], row])) == names
    assert run(Row(Log()), jnp.full((2, 2), 2.0)) == []


def test_an_argument_that_is_not_finite_is_named_first_by_its_position():
    nan, inf = jnp.array([jnp.nan, 1.0]), {"x": [1, jnp.inf]}
    assert es.find_nonfinite(net())(nan) == ["argument 0"]

    def f(model, x, y=None, *, z=None):
        return model.layers[1](0 * x["x"][0])

    model = eqx.tree_at(lambda m: m.layers[0].calls, net(), nan)
    assert es.find_nonfinite(f)(model, {"x": [X]}, nan) == ["argument 2", "layers[1]"]
    assert es.find_nonfinite(f)(model, inf, z=nan)[:2] == ["argument 1", "argument z"]
    assert es.find_nonfinite(ft.partial(f, y=nan))(model, inf)[0] == "argument 1"
    grad = es.value_and_grad(lambda m, x: m(x).sum())
    assert es.find_nonfinite(grad)(Quiet(), nan) == ["argument 1"]


def test_keywords_trees_and_other_dtypes_are_checked():
    class Tree(eqx.Module):
        def __call__(self, x, *, scale):
            return {"y": [x["x"] * scale, 1, "text", jr.key(0)], "n": None}

    def run(x, scale):
        return es.find_nonfinite(lambda m: m({"x": x}, scale=scale))(Tree())

    assert run(X, 1e30) == []
    # 1e39 is infinite as a float32, so the input is infinite as well.
    assert run(X, 1e39) == []
    assert run(jnp.full(2, 1e30), jnp.array(1e30)) == [""]
    assert run(jnp.full(2, 300.0, jnp.float16), jnp.float16(300)) == [""]
    assert run(jnp.full(2, 1j), jnp.array(jnp.inf)) == []
    assert run(jnp.array([1j]) * 1e30, jnp.array(1e30 + 0j)) == [""]
    assert run(jnp.array([1, 2]), 3) == []


def test_a_parameter_that_is_not_finite_is_named_with_its_module():
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    model = eqx.tree_at(lambda m: m.bias, linear, jnp.array([0.0, jnp.nan]))
    model = eqx.nn.Sequential([linear, model])
    assert es.find_nonfinite(model)(X) == ["layers[1]"]
    assert es.nonfinite(model) == ["layers[1].bias"]


def test_methods_models_in_trees_and_inner_models():
    assert es.find_nonfinite(lambda ms, x: ms[1](x))((net(), Log()), ZEROS) == ["[1]"]
    assert es.find_nonfinite(lambda m, x: x)({}, X) == []

    class Looking(es.Module):
        net: Any

        @es.find_nonfinite
        def look(self, x):
            return self.net(x)

    assert Looking(Net([Log()])).look(ZEROS) == ["net.layers[0]"]
    inner = es.find_nonfinite(lambda m, x: es.find_nonfinite(m.layers[0])(x) and m(x))
    assert inner(Net([Log()]), ZEROS) == ["layers[0]"]


# --- In transforms --------------------------------------------------------------------


TRANSFORMS = {
    "jax.vmap": lambda f, x: jax.vmap(lambda x: f.eval()(x))(x),
    "es.jit": lambda f, x: es.jit(f)(x),
    "es.cond": lambda f, x: es.cond(x.sum() > -1, f, lambda x: f(x), x),
    "grad of scan": lambda f, x: es.grad(
        lambda f: es.scan(lambda c, x: (c, es.checkpoint(f)(x)), 0, x)[1].sum()
    )(f)[0],
    "jax.vmap of es.vmap": lambda f, x: jax.vmap(es.vmap(f.eval()))(x[None]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_looks_into_transforms(name):
    f = TRANSFORMS[name]
    model = Net([Quiet(), Log(), Quiet(), Log()])
    assert es.find_nonfinite(f)(model, ZEROS) == ["layers[1]"]
    model = Net([Quiet(), Quiet()])
    assert es.find_nonfinite(f)(model, ZEROS) == []


@pytest.mark.parametrize("cls", [Log, Quiet])
def test_calls_in_other_transforms_of_jax_are_reported_as_missed(cls):
    def scan(f, x):
        return jax.lax.scan(lambda c, x: (c, f(x)), 0, x)

    made = [""] if cls is Log else []
    with pytest.raises(es.TraceError, match=r"`the model` returned(?s:.*)disable_jit"):
        es.find_nonfinite(scan)(cls(), ZEROS)

    class Around(eqx.Module):
        layer: eqx.Module

        def __call__(self, x):
            return scan(self.layer, x)

    with pytest.warns(UserWarning, match=r"find_nonfinite` .* what `layer`"):
        assert es.find_nonfinite(Around(cls()))(ZEROS) == made
    with jax.disable_jit():
        assert es.find_nonfinite(Around(cls()))(ZEROS) == ["layer" for _ in made]


def test_a_model_without_modules_is_an_error():
    for model in (X, [{"w": X}, eqx.nn.Linear]):
        with pytest.raises(ValueError, match="no module that can be called"):
            es.find_nonfinite(lambda _: Log()(ZEROS))(model)


def test_an_optimizer_and_an_average_from_outside_are_used_in_a_step():
    model = Net([eqx.nn.Linear(2, 2, key=jr.key(0)), Log()])
    model = eqx.tree_at(lambda m: m.layers[0].bias, model, jnp.array([9.0, 9.0]))
    optimizer = es.Optimizer(optax.sgd(0.1, momentum=0.9)).init(model)
    average = es.Ema(0.9).init(model)

    @es.jit
    def step(model, optimizer, average, x):
        loss_fn = lambda m, x: m(x).sum()  # noqa: E731
        (loss, model), grads = es.value_and_grad(loss_fn)(model, x)
        model, optimizer = optimizer.update(grads, model)
        average = average.update(model)
        model = es.update(model, es.filter(average.model, es.BatchStat))
        es.map(lambda a, b: a + b, average.model, model, on=es.Parameter)
        return loss, model, optimizer, average

    args = model, optimizer, average
    assert es.find_nonfinite(step)(*args, jnp.array([jnp.inf, 0])) == ["argument 3"]
    (out, _), _ = es.capture(step, outputs="*")(*args, X)
    plain = step(*args, X)
    assert jax.tree.structure(out) == jax.tree.structure(plain)
    close(out, plain)


def test_again_with_a_function_that_is_compiled_already():
    traces = []

    @es.jit
    def run(model, x):
        traces.append(1)
        return model(x)

    model = Net([Quiet(), Log()])
    for x, expected in ((ZEROS, ["layers[1]"]), (X, []), (-X, ["layers[1]"])):
        assert es.find_nonfinite(run)(model, x) == expected
    assert len(traces) == 1
    es.mutable(run)(model, X)
    assert len(traces) == 2


@pytest.mark.parametrize("options", [{}, {"check_vma": False}])
def test_all_devices_of_a_shard_map_are_checked(options):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    specs = {"in_specs": P("data", "model"), "out_specs": P("data", "model")}

    @es.jit
    def f(model, x):
        inside = lambda x: es.scan(lambda x, _: (model(x), None), x, None, 1)[0]  # noqa: E731
        return es.shard_map(inside, mesh=mesh, **specs, **options)(x)

    model = Net([Log(), Log()])
    x = jnp.full((2, 2), 2.0)
    assert es.find_nonfinite(f)(model, x) == []
    x = x.at[0, 0].set(0.5)  # the second logarithm is NaN
    assert es.find_nonfinite(f)(model, x) == ["layers[1]"]
    x = x.at[1, 1].set(-1.0)
    assert es.find_nonfinite(f)(model, x) == ["layers[0]", "layers[1]"]
    model = Net([Quiet(), eqx.nn.Lambda(jnp.sqrt)])
    step = es.value_and_grad(lambda m, x: f(m, x).sum())
    assert es.find_nonfinite(step)(model, jnp.ones((2, 2))) == []
    x = jnp.ones((2, 2)).at[1, 0].set(0.0)
    assert es.find_nonfinite(step)(model, x) == ["layers[1] (gradient)"]


# --- The backward pass ----------------------------------------------------------------


class Norm(es.Module):
    """Its derivative at 0 is NaN."""

    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return jnp.sqrt(jnp.sum(x**2))


class Root(es.Module):
    """Its derivative with respect to `w` is infinite at 0."""

    w: es.Parameter

    def __call__(self, x):
        return jnp.sqrt(self.w) + x


PLAIN = eqx.nn.Lambda(lambda x: jnp.sqrt(jnp.sum(x**2)))


class Pair(es.Module):
    first: eqx.Module
    last: eqx.Module

    def __call__(self, x):
        return self.last(self.first(x))


def grad(f):
    return es.value_and_grad(lambda model, x: jnp.sum(f(model, x)))


def total(model, xs):
    return es.scan(lambda c, x: (c + model(x), None), jnp.zeros(()), xs)[0]


# The model with its last layer, of a batch whose first example is 0.
BACKWARD = {
    "grad": grad(lambda m, xs: m(xs[0])),
    "jit of grad": es.jit(grad(lambda m, xs: m(xs[0]))),
    "grad of jit": grad(lambda m, xs: es.jit(m)(xs[0])),
    "grad of es.vmap": grad(lambda m, xs: es.vmap(m)(xs)),
    "grad of jax.vmap": grad(lambda m, xs: jax.vmap(lambda x: es.eval(m)(x))(xs)),
    "es.vmap of grad": lambda m, xs: es.vmap(
        lambda m, x: es.grad(lambda m, x: m(x))(m, x)[0], in_axes=(None, 0)
    )(m, xs),
    "checkpoint": grad(lambda m, xs: es.checkpoint(m)(xs[0])),
    "scan": es.jit(grad(total)),
    "scan of checkpoint": grad(lambda m, xs: total(es.checkpoint(m), xs)),
    "cond": grad(lambda m, xs: es.cond(xs.sum() > -1, m, lambda x: 0 * m(x), xs[0])),
    "hessian": lambda m, xs: es.hessian(lambda x: m(x))(xs[0]),
    "jacrev": lambda m, xs: es.jacrev(lambda x: m(x))(xs[0]),
    "vjp": lambda m, xs: es.vjp(lambda x: m(x), xs[0])[1](1.0),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_call_that_makes_a_nan_in_the_backward_pass_is_named(name):
    last = PLAIN if name == "grad of jax.vmap" else Norm()
    model = Pair(Quiet(), last)
    run = es.find_nonfinite(BACKWARD[name])
    xs = jnp.array([[0.0, 0.0], [1.0, 2.0]])
    with untouched(model):
        for _ in range(2):  # the second time with a compiled function
            assert run(model, xs) == ["last (gradient)"]
            assert run(model, xs[::-1].at[1].set(1.0)) == []


def test_forward_mode_and_infinite_inputs_name_no_backward_pass():
    model = Pair(Quiet(), Norm())
    for f in (
        lambda m, x: es.jvp(lambda x: m(x), (x,), (x,)),
        lambda m, x: es.jacfwd(lambda x: m(x))(x),
        lambda m, x: es.linearize(lambda x: m(x), x)[1](x),
    ):
        assert es.find_nonfinite(f)(model, ZEROS) == []
    step = es.find_nonfinite(grad(lambda m, x: m(x)))
    assert step(model, jnp.array([jnp.inf, 1.0])) == ["argument 1"]
    assert step(Pair(Root(1.0), Log()), -X) == ["last"]


def test_parameters_and_written_state_have_cotangents_too():
    class Cache(es.Module):
        root: es.State
        w: es.Parameter = 0.0

        def __call__(self, x):
            self.root = jnp.sqrt(self.w)
            return x

    class Uses(es.Module):
        cache: Cache
        last: eqx.Module

        def __call__(self, x):
            return self.last(self.cache(x) + self.cache.root)

    step = es.find_nonfinite(grad(lambda m, x: m(x)))
    assert step(Root(0.0), X) == ["(gradient)"]
    assert step(Root(1.0), X) == []
    assert step(Uses(Cache(0.0), Quiet()), X) == ["cache (gradient)"]
    assert step(Uses(Cache(0.0), Root(0.0)), X) == [
        "last (gradient)",
        "cache (gradient)",
    ]
    # The NaN comes in through the state, so the module that wrote it is not to blame.
    model = Uses(Cache(0.0, 1.0), Quiet())
    bad = grad(lambda m, x: m(x) + jnp.sqrt(m.cache.root - m.cache.root))
    assert es.find_nonfinite(bad)(model, X) == []


def test_a_stack_is_named_as_a_whole_and_calls_in_the_order_of_the_backward_pass():
    stack = es.nn.Stacked([Root(1.0), Root(0.0)])
    step = es.find_nonfinite(grad(lambda m, x: m(x)))
    assert step(Pair(stack, Quiet()), X) == ["first.layers (gradient)"]
    both = lambda m, x: m.first(x) + m.last(x)  # noqa: E731
    model = Pair(Root(0.0), Root(0.0))
    for run in (grad(both), es.jit(grad(both))):
        names = es.find_nonfinite(run)(model, X)
        assert names == ["last (gradient)", "first (gradient)"]
    # One gradient after the other.
    each = lambda m, x: [grad(lambda m, x: m(x))(y, x) for y in (m.first, m.last)]  # noqa: E731
    assert es.find_nonfinite(each)(model, X) == names[::-1]


def test_of_nested_calls_the_innermost_is_named_also_in_a_recursion():
    class Again(es.Module):
        w: es.Parameter = 0.0

        def __call__(self, x, n=2):
            return self(x, n - 1) if n else jnp.sqrt(self.w) + x

    step = es.find_nonfinite(grad(lambda m, x: m(x)))
    assert step(Again(), X) == ["(gradient)"]
    assert step(Pair(Pair(Quiet(), Again()), Quiet()), X) == ["first.last (gradient)"]


def test_a_search_in_a_search_and_one_that_failed_leave_no_names():
    step = grad(lambda m, x: m(x))

    def nested(model, x):
        assert es.find_nonfinite(step)(model, x) == ["(gradient)"]
        return model(x)

    assert es.find_nonfinite(nested)(Root(0.0), X) == []

    def fails(model, x):
        step(model, x)
        raise KeyError("after the backward pass")

    with pytest.raises(KeyError, match="after the backward pass"):
        es.find_nonfinite(fails)(Root(0.0), X)
    assert es.find_nonfinite(step)(Root(1.0), X) == []


# --- Arrays ---------------------------------------------------------------------------


def test_it_names_the_arrays_of_a_tree():
    tree = {
        "fine": jnp.ones(2),
        "nan": jnp.array([1.0, jnp.nan]),
        "infinite": np.array([-np.inf]),
        "list": [None, jnp.array(np.inf), jnp.zeros(0)],
        "integers": np.array([2**31 - 1]),
        "bools": jnp.array([True]),
        "complex": jnp.array([1j * np.inf]),
        "key": jr.key(0),
        "half": jnp.array([jnp.inf], jnp.bfloat16),
        "eighth": jnp.array([jnp.nan], jnp.float8_e4m3fn),
        "double": np.array(np.nan, np.float64),
        "numpy half": np.array([np.nan], ml_dtypes.bfloat16),
        "number": float("nan"),
        "text": "nan",
    }
    names = ["complex", "double", "eighth", "half", "infinite", "list", "nan"]
    expected = [f"['{name}']" for name in [*names, "numpy half"]]
    expected[5] += "[1]"
    assert es.nonfinite(tree) == expected
    assert es.nonfinite({}) == es.nonfinite(None) == es.nonfinite(3) == []
    assert es.nonfinite(jnp.array(jnp.nan)) == [""]


def test_values_that_are_not_known_are_an_error():
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        es.nonfinite({"a": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert es.nonfinite({"a": jax.ShapeDtypeStruct((2,), jnp.int32)}) == []
    with pytest.raises(TypeError, match=r"outside.*es\.find_nonfinite\("):
        es.jit(lambda x: es.nonfinite(x) or x)(X)
