"""What must be an error, says why, and says what to write instead.

Every test checks that the caller's model is afterwards bit for bit what it was.
"""

import contextlib
import copy
import dataclasses
import re
import threading

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import rejects
from models import Layer

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


class Net(es.Module):
    layer: Layer = dataclasses.field(default_factory=Layer)
    other: Layer = dataclasses.field(default_factory=lambda: Layer(3.0, 10))
    table: es.Buffer = dataclasses.field(default_factory=lambda: jnp.ones(2))
    steps: es.State = 0
    index: jax.Array = dataclasses.field(default_factory=lambda: jnp.arange(3))
    stats: es.BatchStat[dict] = dataclasses.field(
        default_factory=lambda: {"a": jnp.zeros(2)}
    )
    heads: es.Parameter[dict] = dataclasses.field(
        default_factory=lambda: {"w": jnp.ones(2)}
    )
    name: str = eqx.field(static=True, default="net")
    label: str = "label"


# --- No scope -----------------------------------------------------------------------


def test_a_write_outside_any_scope():
    model = Layer()
    fix = r"y, model = es\.mutable\(model\)\(x\)"
    with rejects(model, FROZEN, r"Layer\.count", fix, r"model\.eval\(\)"):
        model(1.0)
    assert model.eval()(1.0) == 2.0


@pytest.mark.parametrize("name", ["count", "weight", "nonsense", "training", "__x"])
def test_an_assignment_from_outside(name):
    model = Layer()
    with rejects(model, FROZEN, rf"Layer\.{name}"):
        setattr(model, name, 1)


def test_a_deletion():
    model = Layer()
    with rejects(model, FROZEN, r"Layer\.count|`count`"):
        del model.count
    with rejects(model, FROZEN, r"Layer\.count|`count`"):
        es.mutable(lambda m: delattr(m, "count"))(model)


def test_a_module_the_function_closes_over_is_in_no_scope():
    model = Layer()
    with rejects(model, FROZEN, r"Layer\.count", r"es\.mutable"):
        es.mutable(lambda x: model(x))(1.0)


# --- Plain JAX transforms -----------------------------------------------------------


PLAIN = {
    "vmap": lambda f, x: jax.vmap(f)(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "scan": lambda f, x: lax.scan(lambda c, x: (c, f(x)), 0.0, x),
    "map": lambda f, x: lax.map(f, x),
    "grad": lambda f, x: jax.grad(f)(x[0]),
    "value_and_grad": lambda f, x: jax.value_and_grad(f)(x[0]),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x[0]),
    "jvp": lambda f, x: jax.jvp(f, (x[0],), (x[0],)),
    "vjp": lambda f, x: jax.vjp(f, x[0]),
    "linearize": lambda f, x: jax.linearize(f, x[0]),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: lax.cond(True, f, lambda x: x, x),
    "switch": lambda f, x: lax.switch(0, [f, lambda x: x], x),
    "while_loop": lambda f, x: lax.while_loop(lambda x: False, f, x),
    "while_cond": lambda f, x: lax.while_loop(lambda x: f(x) < 0, lambda x: x, x[0]),
    "fori_loop": lambda f, x: lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "associative_scan": lambda f, x: lax.associative_scan(lambda a, b: f(a), x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
    "filter_jit": lambda f, x: eqx.filter_jit(f)(x),
    "filter_vmap": lambda f, x: eqx.filter_vmap(f)(x),
    "filter_grad": lambda f, x: eqx.filter_grad(f)(x[0]),
    "filter_checkpoint": lambda f, x: eqx.filter_checkpoint(f)(x),
    "vmap of vmap": lambda f, x: jax.vmap(jax.vmap(f))(x[None]),
    "grad of jit": lambda f, x: jax.grad(jax.jit(f))(x[0]),
}
# `associative_scan` calls its function in the trace around it, under no transform.
UNTRACED = {"associative_scan"}


@pytest.mark.parametrize("name", sorted(PLAIN.keys() - UNTRACED))
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_write_through_a_plain_transform(name, jit):
    class Outer(es.Module):
        layer: Layer

        def __call__(self, x):
            return PLAIN[name](lambda x: self.layer(x), x)

    model, run = Outer(Layer()), es.mutable
    if jit:
        run = lambda m: eqx.filter_jit(es.mutable(m))  # noqa: E731
    with rejects(
        model,
        es.TraceError,
        r"Layer\.count",
        r"layer\.count",
        r"es\.vmap\(lambda x: self\.layer\(x\)\)",
        r"es\.value_and_grad",
    ):
        run(model)(jnp.arange(3.0))


def test_what_calls_the_function_in_the_same_trace_is_no_transform():
    _, new = es.mutable(lambda m, x: PLAIN["associative_scan"](m, x))(
        Layer(), jnp.arange(3.0)
    )
    assert new.count > 0


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint, jax.grad])
def test_a_bound_call_is_no_copy(transform):
    # `__call__` is Python's bound method: JAX sees no module to take apart.
    model = Layer()
    x = 1.0 if transform is jax.grad else jnp.ones(3)
    with rejects(model, es.TraceError, r"Layer\.count"):
        es.mutable(lambda m: transform(m.__call__)(x))(model)


def test_a_trace_error_that_is_caught_leaves_no_tracer():
    def f(model, x):
        with contextlib.suppress(es.TraceError):
            jax.vmap(model)(x)
        return model(x)

    y, new = es.mutable(f)(Layer(), jnp.ones(3))
    assert (y == 2.0).all()
    assert new.count == 1
    assert not isinstance(new.count, jax.core.Tracer)


def test_a_write_of_a_constant_in_a_transform():
    def f(model, x):
        def body(x):
            model.count = 5
            return x

        return jax.vmap(body)(x)

    model = Layer()
    with rejects(model, es.TraceError, r"Layer\.count"):
        es.mutable(f)(model, jnp.ones(3))


def test_another_thread_inside_a_trace():
    errors = []

    def f(model, x):
        def run():
            try:
                model.count = 5
            except es.TraceError:
                errors.append("written in another thread")

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return x

    model = Layer()
    _, new = jax.jit(lambda m, x: es.mutable(f)(m, x))(model, 1.0)
    assert len(errors) == 1
    assert new.count == 0


# --- Copies inside a scope ----------------------------------------------------------


COPIES = {
    "train": (lambda layer, x: layer.train()(x), "train"),
    "freeze": (lambda layer, x: layer.freeze()(x), "copies"),
    "filter_vmap": (lambda layer, x: eqx.filter_vmap(layer)(x), r"es\.vmap"),
    "filter_jit": (lambda layer, x: eqx.filter_jit(layer)(x), r"es\."),
    "filter_jit of a method": (lambda layer, x: eqx.filter_jit(layer.apply)(x), "es"),
    "argument of jit": (lambda layer, x: jax.jit(lambda m: m(x))(layer), r"es\."),
    "argument of checkpoint": (
        lambda layer, x: jax.checkpoint(lambda m: m(x))(layer),
        r"es\.",
    ),
    "filter_checkpoint": (
        lambda layer, x: eqx.filter_checkpoint(layer)(x),
        r"es\.",
    ),
    "tree.map": (lambda layer, x: jax.tree.map(lambda x: x, layer)(x), r"tree\.map"),
    "copy": (lambda layer, x: copy.copy(layer)(x), "copy"),
    "tree_at": (
        lambda layer, x: eqx.tree_at(lambda m: m.weight, layer, x[0])(x),
        "copy",
    ),
    "argument of filter_jit": (
        lambda layer, x: eqx.filter_jit(lambda m, x: m(x))(layer, x),
        r"es\.",
    ),
    "argument of filter_grad": (
        lambda layer, x: eqx.filter_grad(lambda m: m(x[0]))(layer),
        r"es\.",
    ),
    "scanned": (
        lambda layer, x: lax.scan(lambda m, x: (m, m(x)), layer, x),
        r"es\.",
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_write_to_a_copy(name):
    use, fragment = COPIES[name]
    model = Net()
    with rejects(model, FROZEN, r"Layer\.count", fragment, r"es\.vmap\("):
        es.mutable(lambda m, x: use(m.layer, x))(model, jnp.ones(3))


# --- What may not be written --------------------------------------------------------


WRITES = {
    "parameter": ("heads", {"w": jnp.zeros(2)}, r"Net\.heads", "`Parameter`"),
    "buffer": ("table", jnp.zeros(2), r"Net\.table", "`Buffer`"),
    "no kind": ("index", jnp.arange(3) + 1, r"Net\.index", "without a kind"),
    "static": ("name", "other", r"Net\.name", "static"),
    "not an array": ("label", "other", r"Net\.label", "not an array"),
    "unknown": ("nonsense", 1, r"Net\.nonsense", "no field", "es.State"),
    "flag": ("training", False, r"Net\.training", r"model\.eval\(\)"),
    "flag frozen": ("frozen", True, r"Net\.frozen", "static"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_is_not_allowed(name):
    field, value, *fragments = WRITES[name]
    model = Net()
    with rejects(model, FROZEN, *fragments):
        es.mutable(lambda m: setattr(m, field, value))(model)


UNDECLARED = {
    "a layer of Equinox": (lambda: eqx.nn.Linear(1, 1, key=jr.key(0)), "eqx.nn.Linear"),
    "a layer of ours": (lambda: es.nn.BatchNorm(2), "es.nn.BatchNorm"),
    "a stream of keys": (lambda: es.RngStream(0), "es.RngStream"),
    "a module": (Layer, "Layer"),
    "modules in a list": (lambda: [Layer(), None], "list"),
    "a module to be drawn": (lambda: es.lazy(eqx.nn.Linear, 1, 1), "eqx.nn.Linear"),
    "an array to be drawn": (lambda: es.Initializer(jr.normal), "es.Parameter"),
    "a float array": (lambda: jnp.ones(2), "es.Parameter"),
    "a NumPy array": (lambda: np.ones(2), "es.Parameter"),
    "float arrays in a dict": (lambda: {"w": jnp.ones(2)}, "es.Parameter"),
    "a key": (lambda: jr.key(0), "es.Rng"),
    "a legacy key": (lambda: jr.PRNGKey(0), "es.Rng"),
    "several keys": (lambda: tuple(jr.split(jr.key(0))), "es.Rng"),
    "an integer array": (lambda: jnp.arange(2), "es.State"),
    "a key and an array": (lambda: [jr.key(0), jnp.ones(2)], "es.State"),
    "a number": (lambda: 2, "es.State` (or, for a constant, `held: int"),
    "nothing": (lambda: None, "es.State"),
    "a function": (lambda: jax.nn.relu, "Callable"),
    "a string": (lambda: "same", "str"),
}


@pytest.mark.parametrize("name", UNDECLARED)
def test_how_to_declare_what_is_held_undeclared(name):
    make, annotation = UNDECLARED[name]

    class Net(es.Module):
        other: es.State = 0

        def __init__(self):
            self.held = make()

    fragments = rf"`held: {re.escape(annotation)}`", "The fields are: other"
    with pytest.raises(FROZEN, match=fragments[0]) as info:
        Net()
    info.match(fragments[1])

    class Drawn(es.Module):
        def module_init(self, key):
            self.held = make()

    with rejects(model := Drawn(), FROZEN, fragments[0], "It declares no fields"):
        model.init(0)


def test_a_float_array_that_a_forward_pass_assigns_undeclared_is_state():
    class Net(es.Module):
        def __call__(self, x):
            self.last = x

    for x in (jnp.ones(2), 2.0):
        with rejects(model := Net(), FROZEN, "`last: es.State`. It declares no field"):
            es.mutable(model)(x)


def test_a_module_without_fields_says_so():
    class Empty(es.Module):
        pass

    with rejects(model := Empty(), FROZEN, "no field `w`", "It declares no fields"):
        model.w = 1
    with rejects(model, TypeError, "no field `w`", "It declares no fields"):
        model.replace(w=1)
    with rejects(model, ValueError, "has an attribute `w`. No module has a field"):
        es.configure(model, w=1)


@pytest.mark.parametrize("name", ["parameter", "buffer"])
def test_the_kinds_to_name_are_in_the_message(name):
    field, value, *_ = WRITES[name]
    model = Net()
    kind = name.capitalize()
    fix = rf"kinds=es\.{kind}"
    with rejects(model, FROZEN, fix, r"kinds=es\.TreePart"):
        es.mutable(lambda m: setattr(m, field, value))(model)
    for kinds in (es.TreePart, getattr(es, kind), (es.State, getattr(es, kind))):
        f = es.mutable(lambda m: setattr(m, field, value), kinds=kinds)
        _, new = f(model)
        assert eqx.tree_equal(getattr(new, field), value)


@pytest.mark.parametrize("kinds", [es.Parameter, es.Rng, (es.Rng, es.BatchStat)])
def test_state_that_is_not_among_the_kinds(kinds):
    model = Net()
    with rejects(model, FROZEN, r"Net\.steps", "`State`"):
        es.mutable(lambda m: setattr(m, "steps", 1), kinds=kinds)(model)


@pytest.mark.parametrize("kinds", [es.TreePart, es.State])
def test_no_kinds_reach_what_has_no_kind(kinds):
    model = Net()
    for field in ("index", "name", "label", "nonsense"):
        with rejects(model, FROZEN, rf"Net\.{field}"):
            es.mutable(lambda m, f=field: setattr(m, f, 1), kinds=kinds)(model)


def test_what_a_buffer_covers_is_not_written():
    class Frozen(es.Module):
        net: es.Buffer[Layer]

        def __call__(self, x):
            return self.net(x)

    model = Frozen(Layer())
    with rejects(model, FROZEN, r"Layer\.count", "`Buffer`", r"net\.count"):
        es.mutable(model)(1.0)


# --- After the scope ----------------------------------------------------------------


def test_a_write_after_the_scope_has_closed():
    kept = []
    model = Net()
    _, new = es.mutable(lambda m: kept.extend([m, m.layer, m.layer.__call__]))(model)
    with rejects((model, new), FROZEN, r"Net\.steps", "closed", r"es\.mutable"):
        kept[0].steps = 1
    with rejects((model, new), FROZEN, r"Layer\.count", "closed", r"es\.mutable"):
        kept[1](1.0)
    with rejects((model, new), FROZEN, r"Layer\.count", "closed"):
        kept[2](1.0)
    kept[0].stats["a"] = jnp.ones(2)  # nothing sees a container: but nothing shares it
    assert (new.stats["a"] == 0).all()
    assert (model.stats["a"] == 0).all()


@pytest.mark.parametrize("transform", [es.jit, es.checkpoint, es.vmap])
@jax.check_tracer_leaks(False)  # the module that is kept leaks, on purpose
def test_a_write_after_the_trace_in_which_a_module_was_made(transform):
    kept = []

    class Outer(es.Module):
        inner: Layer

        def make(self, x):
            self.inner = Layer(weight=self.inner.weight)
            kept.append(self.inner)
            return self.inner(x)

        def __call__(self, x):
            y = transform(self.make)(x)
            kept[0].count = 1
            return y

    model = Outer(Layer())
    with rejects(model, FROZEN, r"Layer\.count", "closed"):
        es.mutable(model)(jnp.ones(3))


def test_a_write_after_an_exception_has_closed_the_scope():
    kept = []

    def f(m):
        kept.append(m)
        raise KeyError("half-way")

    model = Layer()
    with rejects(model, KeyError, "half-way"):
        es.mutable(f)(model)
    with rejects(model, FROZEN, "closed"):
        kept[0].count = 1


class Threaded(es.Module):
    n: es.State = 0

    def __call__(self, x):
        return x


@pytest.mark.parametrize("name", ["mutable", "value_and_grad", "grad", "capture"])
def test_a_class_in_the_place_of_a_model_is_an_error(name):
    transform = getattr(es, name)
    with pytest.raises(TypeError, match=r"(?s)the class `Threaded`.*es.mutable\(model"):
        transform(Threaded)
    assert es.vmap(Threaded)(jnp.arange(3)).n.shape == (3,)  # which makes models


@pytest.mark.parametrize("name", ["mutable", "value_and_grad", "vmap", "checkpoint"])
def test_what_cannot_be_called_is_refused_at_once(name):
    for x in (3, None, [Threaded()]):
        with pytest.raises(TypeError, match=r"which cannot be called"):
            getattr(es, name)(x)


ONE_FUNCTION = ["mutable", "value_and_grad", "grad", "capture", "find_nonfinite"]


@pytest.mark.parametrize("name", ONE_FUNCTION)
def test_the_arguments_go_to_what_is_returned(name):
    transform = getattr(es, name)
    match = rf"(?s)given 2 arguments.* es.{name}\(f\)\(x\)     # right"
    with pytest.raises(TypeError, match=match):
        transform(Threaded(), jnp.ones(2))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        transform()
    assert callable(transform(f=Threaded()))
