"""`es.find_nonfinite`, `es.nonfinite`: who makes the first NaN, and who holds one."""

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
from helpers import close, leaks_on_purpose, untouched
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


class BadAt(es.Module):
    """Returns a NaN in one of its calls."""

    at: es.Buffer
    calls: es.State = 0

    def __call__(self, x, *, key=None):
        self.calls = self.calls + 1
        return jnp.where(self.calls == self.at, jnp.nan, x)


def net() -> Net:
    return Net([Pass(), Log(), Pass(), Log()])


# --- The first call -------------------------------------------------------------------


def test_it_names_the_first_and_innermost_call():
    model = net()
    with untouched(model):
        assert es.find_nonfinite(model)(ZEROS) == ["layers[1]"]
        assert es.find_nonfinite(model)(jnp.array([1.5, 1.5])) == ["layers[3]"]
        assert es.find_nonfinite(Net([Pass()]))(ZEROS) == []
    assert es.find_nonfinite(Net([net()]))(ZEROS) == ["layers[0].layers[1]"]


def test_the_root_is_named_if_it_computes_it_itself():
    class Root(es.Module):
        layer: Pass

        def __call__(self, x):
            return self.layer(x / 0)

    assert es.find_nonfinite(Root(Pass()))(X) == [""]
    assert es.find_nonfinite(lambda m, x: m(x) / 0)(Pass(), X) == []  # no module


def test_what_comes_in_is_not_the_modules_fault():
    assert es.find_nonfinite(net())(jnp.array([jnp.nan, 1.0])) == []
    assert es.find_nonfinite(net())(jnp.array([jnp.inf, 1.0])) == []

    def f(model, x):
        return model.layers[0](x / 0) + model.layers[1](0 * x)

    assert es.find_nonfinite(f)(net(), X) == ["layers[1]"]


def test_keywords_trees_and_other_dtypes_are_looked_at():
    class Tree(eqx.Module):
        def __call__(self, x, *, scale):
            return {"y": [x["x"] * scale, 1, "text", jr.key(0)], "n": None}

    def run(x, scale):
        return es.find_nonfinite(lambda m: m({"x": x}, scale=scale))(Tree())

    assert run(X, 1e30) == []
    assert run(X, 1e39) == []  # infinite as a float32, and so is the input
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


# --- In transforms --------------------------------------------------------------------


TRANSFORMS = {
    "es.vmap": lambda f, x: es.vmap(f, axes={es.State: None})(x),
    "jax.vmap": lambda f, x: jax.vmap(lambda x: f.eval()(x))(x),
    "es.jit": lambda f, x: es.jit(f)(x),
    "es.checkpoint": lambda f, x: es.checkpoint(f)(x),
    "es.scan": lambda f, x: es.scan(lambda c, x: (c, f(x)), 0, x)[1],
    "es.fori_loop": lambda f, x: es.fori_loop(0, 1, lambda i, x: f(x), x),
    "es.while_loop": lambda f, x: es.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x)
    ),
    "es.cond": lambda f, x: es.cond(x.sum() > -1, f, lambda x: x, x),
    "es.switch": lambda f, x: es.switch(1, [lambda x: x, f], x),
    "es.value_and_grad": lambda f, x: es.value_and_grad(lambda f: f(x).sum())(f)[0][0],
    "es.grad": lambda f, x: es.grad(lambda f: f(x).sum())(f)[0],
    "es.mutable": lambda f, x: es.mutable(f)(x),
    "es.capture": lambda f, x: es.capture(f)(x),
    "es.linearize": lambda f, x: es.linearize(f, x)[0],
    "es.jvp": lambda f, x: es.jvp(f, (x,), (x,)),
    "grad of scan": lambda f, x: es.grad(
        lambda f: es.scan(lambda c, x: (c, es.checkpoint(f)(x)), 0, x)[1].sum()
    )(f)[0],
    "vmap of while": lambda f, x: es.vmap(
        lambda x: es.while_loop(
            lambda c: c[0] < x + 1, lambda c: (c[0] + 1, f(c[1])), (0.0, x)
        ),
        axes={es.State: None},
    )(x),
    "vmap of cond": lambda f, x: es.vmap(
        lambda x: es.cond(x < 1, f, lambda x: x, x), axes={es.State: None}
    )(x),
    "jax.vmap of es.vmap": lambda f, x: jax.vmap(es.vmap(f.eval()))(x[None]),
    "jax.vmap of es.jit": lambda f, x: jax.vmap(es.jit(f.eval()))(x),
    "jax.vmap of es.scan": lambda f, x: jax.vmap(
        lambda x: es.scan(lambda c, _: (c, f.eval()(x)), 0, None, 2)
    )(x),
}


class Quiet(es.Module):
    def __call__(self, x):
        return jnp.sin(x)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_looks_into_transforms(name):
    f = TRANSFORMS[name]
    model = Net([Quiet(), Log(), Quiet(), Log()])
    assert es.find_nonfinite(f)(model, ZEROS) == ["layers[1]"]
    model = Net([Quiet(), Quiet()])
    assert es.find_nonfinite(f)(model, ZEROS) == []


@pytest.mark.parametrize("at", [1, 3])
def test_in_a_loop_the_step_counts(at):
    def body(model, x):
        return model["b"](model["a"](x))

    model = {"a": BadAt(2), "b": BadAt(at)}
    expected = {1: "['b']", 3: "['a']"}[at]
    loops = (
        lambda m, x: es.scan(lambda c, _: (body(m, c), 0), x, None, 4),
        lambda m, x: es.fori_loop(0, 4, lambda i, x: body(m, x), x),
    )
    for loop in loops:
        assert es.find_nonfinite(loop)(model, X) == [expected]
        assert es.find_nonfinite(es.jit(loop))(model, X) == [expected]


def test_the_earliest_of_the_lanes_counts():
    class Makes(eqx.Module):
        def __call__(self, x):
            return jnp.where(x == 2.0, jnp.nan, x)

    def lanes(model, xs):
        def one(x):
            def step(c, _):
                a = model["a"](jnp.where(c == x[0], 2.0, 1.0))
                b = model["b"](jnp.where(c == x[1], 2.0, 1.0))
                return c + 1, a + b

            return es.scan(step, 0.0, None, 5)[1]

        return es.vmap(one)(xs)

    model = {"a": Makes(), "b": Makes()}
    for first, expected in (
        ([[3.0, 9.0], [9.0, 2.0]], ["['b']"]),  # lane 1 at step 2
        ([[1.0, 9.0], [9.0, 2.0]], ["['a']"]),
        ([[2.0, 9.0], [9.0, 2.0]], ["['a']"]),  # at one step the first module
        ([[9.0, 9.0], [9.0, 9.0]], []),
    ):
        for f in (lanes, es.jit(lanes)):
            assert es.find_nonfinite(f)(model, jnp.array(first)) == expected

    def and_one_more(model, xs):
        return lanes(model, xs), model["b"](jnp.array(2.0))

    assert es.find_nonfinite(and_one_more)(model, jnp.full((2, 2), 9.0)) == ["['b']"]


def test_an_ensemble_and_states_by_lane():
    make = eqx.filter_vmap(lambda at: BadAt(at))
    model = make(jnp.array([9, 9, 1]))
    run = es.vmap(model, axes={...: 0})
    assert es.find_nonfinite(run)(jnp.ones(3)) == [""]
    model = make(jnp.array([9, 9, 8]))
    assert es.find_nonfinite(es.vmap(model, axes={...: 0}))(jnp.ones(3)) == []


def test_a_training_step_with_norms_dropout_and_keys():
    layers = [
        eqx.nn.Linear(2, 3, key=jr.key(0)),
        es.nn.BatchNorm(3, axis_name="batch"),
        es.nn.Dropout(0.5, key=jr.key(1)),
        Log(),
    ]
    model = eqx.nn.Sequential(layers)

    def loss_fn(model, xs):
        return jnp.mean(es.vmap(model, axis_name="batch")(xs))

    def step(model, xs):
        ((loss, model), grads) = es.value_and_grad(loss_fn)(model, xs)
        return loss, eqx.apply_updates(model, grads)

    for f in (step, es.jit(step), es.value_and_grad(loss_fn)):
        assert es.find_nonfinite(f)(model, jnp.eye(2)) == ["layers[3]"]


@pytest.mark.parametrize("jit", [lambda f: f, es.jit], ids=["plain", "jit"])
def test_a_step_with_trees_that_were_made_outside(jit):
    model = Net([eqx.nn.Linear(2, 2, key=jr.key(0)), Log()])
    model = eqx.tree_at(lambda m: m.layers[0].bias, model, jnp.array([9.0, 9.0]))
    optimizer = es.Optimizer(optax.sgd(0.1, momentum=0.9)).init(model)
    average = es.Ema(0.9).init(model)

    @jit
    def step(model, optimizer, average, x):
        loss_fn = lambda m, x: m(x).sum()  # noqa: E731
        (loss, model), grads = es.value_and_grad(loss_fn)(model, x)
        model, optimizer = optimizer.update(grads, model)
        average = average.update(model)
        model = es.update(model, es.filter(average.model, es.BatchStat))
        es.map(lambda a, b: a + b, average.model, model)
        return loss, model, optimizer, average

    args = model, optimizer, average
    assert es.find_nonfinite(step)(*args, X) == []
    assert es.find_nonfinite(step)(*args, -1e3 * X) in ([], ["layers[1]"])
    (out, _), found = es.capture(step, outputs="*")(*args, X)
    assert [*found] == ["layers[0]", "layers[1]", ""]
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


def test_methods_partials_models_in_trees_and_inner_models():
    class Model(Net):
        def encode(self, x, scale):
            return self.layers[0](scale * x)

    model = Model([Log()])
    assert es.find_nonfinite(model.encode)(X, 0.0) == ["layers[0]"]
    assert es.find_nonfinite(ft.partial(model.encode, scale=0.0))(X) == ["layers[0]"]
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


def test_a_module_that_is_there_only_in_the_call_is_a_part_of_the_one_around():
    class Model(es.Module):
        layers: list[Any]

        def __call__(self, x):
            before, self.layers = self.layers, [*self.layers, Log()]
            y = self.layers[-1](x)
            self.layers = before
            return y

    assert es.find_nonfinite(Model([Quiet()]))(ZEROS) == [""]


# --- Misuse ---------------------------------------------------------------------------


FOREIGN = {
    "jax.jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "eqx.filter_jit": lambda f, x: eqx.filter_jit(f)(x),
    "jax.lax.scan": lambda f, x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x),
    "jax.grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "es.jit in jax.jit": lambda f, x: jax.jit(lambda x: es.jit(lambda: f(x))())(x),
    "es.vmap in jax.jit": lambda f, x: jax.jit(lambda x: es.vmap(f)(x))(x),
}


@leaks_on_purpose
@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("cls", [Log, Quiet])
def test_in_another_transform_of_jax_it_is_an_error(cls, name):
    with pytest.raises(es.TraceError, match=r"(?s)Cannot see whether .*es\.scan\("):
        es.find_nonfinite(FOREIGN[name])(cls(), ZEROS)


AROUND = {"es.jit": es.jit, "eqx.filter_jit": eqx.filter_jit, "jax.vmap": jax.vmap}


@pytest.mark.parametrize("around", AROUND.values(), ids=list(AROUND))
def test_it_is_called_outside_of_transforms(around):
    with pytest.raises(TypeError, match=r"es\.find_nonfinite\(es\.jit\(step\)\)"):
        around(lambda x: es.find_nonfinite(Log())(x))(X)


def test_a_module_in_the_condition_of_a_loop_is_an_error():
    def f(model, x):
        return es.while_loop(lambda x: model(x).sum() < 0, lambda x: x, x)

    with pytest.raises(ValueError, match="A module was called in the `cond_fun`"):
        es.find_nonfinite(f)(Log(), X)


@pytest.mark.parametrize(
    "options",
    [{}, {"check_vma": False}, {"axes": {es.State: P("data")}}],
    ids=["checked", "unchecked", "axes"],
)
@pytest.mark.parametrize("jit", [lambda f: f, es.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("spec", [P("data", "model"), P()], ids=["split", "same"])
def test_the_devices_of_a_shard_map_are_all_looked_at(options, spec, jit):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

    @jit
    def f(model, x):
        inside = lambda x: es.scan(lambda x, _: (model(x), None), x, None, 1)[0]  # noqa: E731
        mapped = es.shard_map(
            inside, mesh=mesh, in_specs=spec, out_specs=spec, **options
        )
        return mapped(x)

    model = Net([Log(), Log()])
    x = jnp.full((2, 2), 2.0)
    assert es.find_nonfinite(f)(model, x) == []
    x = x.at[0, 0].set(0.5)  # its logarithm has none
    assert es.find_nonfinite(f)(model, x) == ["layers[1]"]
    assert es.find_nonfinite(f)(model, x.at[1, 1].set(-1.0)) == ["layers[0]"]


@pytest.mark.parametrize(
    "model", [X, 1.0, [{"w": X}, eqx.nn.Linear]], ids=["array", "number", "list"]
)
def test_a_model_without_modules_is_an_error_since_nothing_would_be_seen(model):
    with pytest.raises(ValueError, match="No module in it can be called"):
        es.find_nonfinite(lambda _: Log()(ZEROS))(model)


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


def test_models_gradients_and_optimizers():
    model = Net([eqx.nn.Linear(2, 2, key=jr.key(0)), Log()])
    assert es.nonfinite(model) == []
    bad = ["layers[0].weight", "layers[0].bias"]
    grads, _ = es.grad(lambda m, x: jnp.sqrt(0 * m(x)).sum())(model, X)
    assert es.nonfinite(grads) == bad
    optimizer = es.Optimizer(optax.sgd(0.1, momentum=0.9)).init(model)
    grads = jax.tree.map(lambda x: x * jnp.nan, model.filter(es.Parameter))
    model, optimizer = optimizer.update(grads, model)
    assert es.nonfinite(model) == bad
    assert [name[:9] for name in es.nonfinite(optimizer)] == ["opt_state"] * 2


@pytest.mark.parametrize("jit", [jax.jit, es.jit], ids=["jax", "es"])
def test_what_has_no_values_is_an_error_that_names_it(jit):
    with pytest.raises(TypeError, match=r"nonfinite`: `\['a'\]` has no values"):
        es.nonfinite({"a": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert es.nonfinite({"a": jax.ShapeDtypeStruct((2,), jnp.int32)}) == []
    with pytest.raises(TypeError, match=r"nonfinite`: `the tree` has no values"):
        jit(lambda x: es.nonfinite(x) or x)(X)
