"""Loops and branches outside `jit` are traced once for each function."""

import functools as ft
import gc
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

import eqx_state as es


XS = jnp.arange(1.0, 4.0)
TRACED: list[int] = []


@pytest.fixture(autouse=True)
def _none_traced():
    TRACED.clear()


def classes():
    """New ones, whose methods have not been traced."""

    class Cell(es.Module):
        weight: es.Parameter
        total: es.State

        def step(self, c, x):
            TRACED.append(1)
            self.total = self.total + self.weight * x
            return c + self.weight * x, self.total

        def after(self, c):
            return self.step(c, 1.0)[0]

        def indexed(self, i, c):
            return self.step(c, i)[0]

        def go_on(self, c):
            return c < 5.0

    class Net(es.Module):
        cell: Cell

        def scan(self, x):
            return es.scan(self.cell.step, x, XS)[0]

        def while_loop(self, x):
            return es.while_loop(self.cell.go_on, self.cell.after, x)

        def fori_loop(self, x):
            return es.fori_loop(0, 3, self.cell.indexed, x)

        def cond(self, x):
            return es.cond(x > 0, self.cell.after, self.cell.after, x)

        def switch(self, x):
            return es.switch(1, [self.cell.after, self.cell.after], x)

    return Cell, Net


@pytest.fixture
def net():
    Cell, Net = classes()
    return lambda weight=1.0, total=0.0: Net(Cell(weight * ONE, total * ONE))


ONE = jnp.array(1.0)
Cell, _ = classes()

# The methods of a `Net`, and the state that one call with 1.0 adds for a weight of 1.
WAYS = {"scan": 6.0, "while_loop": 4.0, "fori_loop": 3.0, "cond": 1.0, "switch": 1.0}


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


def test_a_method_in_a_scope_is_traced_once(way, net):
    model, totals = net(), []
    for _ in range(3):
        _, model = es.mutable(getattr(model, way))(ONE)
        totals.append(float(model.cell.total))
    assert totals == [WAYS[way] * n for n in (1, 2, 3)]
    assert len(TRACED) == 1


def test_arrays_of_modules_are_inputs(way, net):
    run = es.mutable(lambda net: getattr(net, way)(ONE) + net.cell.total)
    for model in (net(), net(weight=2.0), net(total=3.0)):
        got, new = run(model)
        want, same = es.jit(run)(model)  # where nothing is kept
        assert got == want
        assert eqx.tree_equal(new, same)
    assert len(TRACED) == 1 + 1


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"while_loop"}))
def test_under_gradients(way, net):
    grad = es.value_and_grad(lambda net: getattr(net, way)(ONE) ** 2 + net.cell.total)
    for weight in (1.0, 2.0):
        (value, new), grads = grad(net(weight))
    assert len(TRACED) == 1
    (same_value, same), same_grads = es.jit(grad)(net(2.0))
    assert value == same_value
    assert eqx.tree_equal((new, grads), (same, same_grads))


def test_under_vmap(way, net):
    run = es.mutable(lambda net, xs: es.vmap(getattr(net, way), axes={es.State: 0})(xs))
    for weight in (1.0, 2.0):
        model = net(weight, jnp.zeros(2))
        ys, new = run(model, jnp.array([1.0, 2.0]))
    assert len(TRACED) == 1
    same_ys, same = es.jit(run)(model, jnp.array([1.0, 2.0]))
    assert eqx.tree_equal((ys, new), (same_ys, same))


def test_in_a_jit_there_is_nothing_to_keep(way, net):
    jaxpr = jax.make_jaxpr(lambda x: es.mutable(getattr(net(), way))(x)[0])(ONE)
    assert "jit" not in str(jaxpr).replace("jitted", "")


# --- What a program depends on --------------------------------------------------------


class Dropped(es.Module):
    dropout: es.nn.Dropout
    layer: Cell

    def __call__(self, c, x):
        TRACED.append(1)
        self.sow("seen", c)
        return self.dropout(self.layer.step(c, x)[0]), None

    def run(self):
        return es.scan(self, ONE, XS)[0]


def dropped():
    return Dropped(es.nn.Dropout(0.5, key=jr.key(0)), Cell(ONE, ONE))


def test_another_mode_is_another_program():
    run = es.mutable(lambda m: m.run())
    train, _ = run(dropped())
    still, _ = run(dropped().eval())
    again, _ = run(dropped())
    assert train == again != still == 7.0


def test_what_is_captured_is_part_of_it():
    def run(model):
        return model.run()

    for _ in range(2):
        es.mutable(run)(dropped())
        _, sown = es.capture(run)(dropped())
        assert sown["seen"].shape == (3,)
        _, outputs = es.capture(run, outputs=es.nn.Dropout)(dropped())
        assert outputs["dropout"].shape == (3,)


def test_frozen_parts_stay_frozen(net):
    es.mutable(lambda n: n.scan(ONE))(net())
    frozen = net().freeze()
    _, grads = es.value_and_grad(lambda n: n.scan(ONE))(frozen)
    assert grads.cell.weight is None


def test_another_structure_is_another_program():
    def body(c, x):
        TRACED.append(1)
        return jax.tree.map(lambda c: c + x, c), None

    for init in (0.0, (0.0, 1.0), {"a": 0.0}, (0.0, 1.0), 0.0):
        got, _ = es.scan(body, init, XS)
        assert eqx.tree_equal(got, lax.scan(body, init, XS)[0])
    TRACED.clear()
    for init in (0.0, (0.0, 1.0), {"a": 0.0}):
        es.scan(body, init, XS)
    assert not TRACED


def test_settings_are_a_part_of_it():
    def body(c, x):
        return c * 2 + x, c

    for options in ({}, {"reverse": True}, {"unroll": 3}, {"reverse": True}):
        got = es.scan(body, 1.0, XS, **options)
        assert eqx.tree_equal(got, lax.scan(body, 1.0, XS, **options))


# --- What is read by name -------------------------------------------------------------


def namespace(source):
    space = {"es": es, "jnp": jnp, "eqx": eqx, "TRACED": TRACED, "Cell": Cell}
    exec(source, space)
    return space


def test_a_model_in_a_closure_is_an_input(net):
    model = net()

    def body(c, x):
        TRACED.append(1)
        return c + model.cell.weight * x, None

    for weight in (1.0, 2.0, 3.0):
        model = net(weight)
        assert es.scan(body, 0.0, XS)[0] == 6 * weight
    assert len(TRACED) == 1


def test_a_model_in_the_closure_of_another_function():
    def make():
        return lambda x: model.weight * x

    space = namespace("""
def by_name(c, x):
    return c + helper(x), None

def given(c, x):
    return (c[0] + c[1](x), c[1]), None
""")
    helper = space["helper"] = make()
    for weight in (1.0, 2.0):
        model = Cell(weight * ONE, ONE)
        assert es.scan(space["by_name"], 0.0, XS)[0] == 6 * weight
        assert es.scan(space["given"], (0.0, helper), XS)[0][0] == 6 * weight


@pytest.mark.parametrize("name", ["model", "scale", "helper", "settings"])
def test_a_global_name_that_stands_for_something_else(name):
    space = namespace("""
def helper(x):
    return scale * x

def body(c, x):
    TRACED.append(1)
    return c + model.weight * settings[0] * helper(x), None
""")
    old = {
        "model": Cell(ONE, ONE),
        "scale": 1.0,
        "helper": space["helper"],
        "settings": (1.0,),
    }
    new = {
        "model": Cell(2 * ONE, ONE),
        "scale": 2.0,
        "helper": lambda x: 2 * x,
        "settings": (2.0,),
    }
    space |= old
    for _ in range(2):
        assert es.scan(space["body"], 0.0, XS)[0] == 6
    assert len(TRACED) == 1
    space[name] = new[name]
    for _ in range(2):
        assert es.scan(space["body"], 0.0, XS)[0] == 12
    assert len(TRACED) == 2


def test_an_attribute_is_not_a_global_name():
    space = namespace("""
def body(c, x):
    TRACED.append(1)
    return c + model.weight * x, None
""")
    space["model"] = Cell(ONE, ONE)
    for weight in (1.0, 2.0):
        space["weight"] = weight
        assert es.scan(space["body"], 0.0, XS)[0] == 6.0
    assert len(TRACED) == 1


def test_a_global_name_in_a_method():
    space = namespace("""
rate = 1.0

class Layer(es.Module):
    def __call__(self, x):
        return rate * x

    @property
    def twice(self):
        return 2 * rate

class Outer(es.Module):
    layer: Layer

    def step(self, c, x):
        return c + self.layer(x) + self.layer.twice, None
""")
    outer = space["Outer"](space["Layer"]())
    for rate in (1.0, 2.0, 1.0):
        space["rate"] = rate
        assert es.scan(outer.step, 0.0, XS)[0] == 12 * rate
        got, _ = es.mutable(lambda m: es.scan(m.step, 0.0, XS)[0])(outer)
        assert got == 12 * rate


def test_a_closed_over_number_that_changes():
    scale = 1.0

    def body(c, x):
        return c + scale * x, None

    for scale in (1.0, 2.0, 1.0):
        assert es.scan(body, 0.0, XS)[0] == 6 * scale


def test_a_function_in_a_closure_that_is_another_one():
    def make(scale):
        return lambda x: jnp.multiply(scale, x)

    def body(c, x):
        return c + helper(x), None

    for scale in (1.0, 2.0, 1.0):
        helper = make(scale)
        assert es.scan(body, 0.0, XS)[0] == 6 * scale


def test_a_function_in_a_list_that_is_gone():
    def body(c, x):
        TRACED.append(1)
        return c + helpers[0](x), None

    helpers = [None]
    for scale in (1.0, 2.0):
        helpers[0] = lambda x, scale=scale: scale * x
        for _ in range(2):
            assert es.scan(body, 0.0, XS)[0] == 6 * scale
    assert len(TRACED) == 2


def test_a_function_that_calls_itself_and_counts():
    space = namespace("""
count = 0

def power(x, n):
    global count
    count += 1
    return x * power(x, n - 1) if n else 1.0

def body(c, x):
    return c + power(x, 2), None
""")
    for _ in range(2):
        assert es.scan(space["body"], 0.0, XS)[0] == 14.0
    assert space["count"] == 3


def test_a_name_that_is_assigned_later():
    def body(c, x):
        TRACED.append(1)
        try:
            return c + (x if late is None else late * x), None
        except NameError:
            return c, None

    for _ in range(2):
        assert es.scan(body, 0.0, XS)[0] == 0.0
    assert len(TRACED) == 1
    for late, expected in [(None, 6.0), (2.0, 12.0)]:  # noqa: B007
        assert es.scan(body, 0.0, XS)[0] == expected


def test_a_bare_array_is_read_once_as_in_jax():
    bias = jnp.array(1.0)

    def ours(c, x):
        return c + bias, None

    def theirs(c, x):
        return c + bias, None

    for bias in (1.0 * ONE, 2.0 * ONE):  # noqa: B007 (the functions read it)
        assert es.scan(ours, 0.0, XS)[0] == lax.scan(theirs, 0.0, XS)[0] == 3.0


def test_counters_of_the_function_itself():
    count = 0

    def body(c):
        nonlocal count
        count += 1
        return c + 1.0

    for _ in range(3):
        es.while_loop(lambda c: c < 3.0, body, 0.0)
    assert count == 3  # a lambda each time is another function
    go_on, count = (lambda c: c < 3.0), 0
    for _ in range(3):
        es.while_loop(go_on, body, 0.0)
    assert count == 1


def test_counters_that_start_anew():
    space = namespace("""
count = 0

def body(c, x):
    global count
    count += 1
    return c + x, None
""")

    def body(c, x):
        nonlocal count
        count += 1
        return c + x, None

    for traces in (1, 0):
        space["count"] = count = 0
        assert es.scan(space["body"], 0.0, XS)[0] == 6.0
        assert es.scan(body, 0.0, XS)[0] == 6.0
        assert space["count"] == count == traces


def test_no_branch():
    with pytest.raises(ValueError, match="branch"):
        es.switch(0, [], 0.0)


def test_one_function_in_several_places():
    def up(c):
        return c + 1.0

    def down(c):
        return c - 1.0

    for branches in ([up], [up, up], [up, down], [down, up], [up, up, up]):
        for i, f in enumerate(branches):
            assert es.switch(i, branches, 0.0) == f(0.0)
    assert es.scan(lambda c, x: (up(c), None), 0.0, XS)[0] == 3.0
    assert es.while_loop(lambda c: c < 3.0, up, 0.0) == 3.0
    assert es.fori_loop(0, 3, lambda i, c: up(c), 0.0) == 3.0


def test_one_body_of_two_loops():
    def body(c):
        return c + 1.0

    few, more = (lambda c: c < 3.0), (lambda c: c < 5.0)
    for _ in range(2):
        assert es.while_loop(few, body, 0.0) == 3.0
        assert es.while_loop(more, body, 0.0) == 5.0


OTHER_FILE = """
gain = 1.0  # a name that occurs only here

def helper(x):
    return gain * x
"""


def around(f):
    return lambda x: f(x)


# After the change, the body adds twice as much.
@pytest.mark.parametrize(
    ("body", "change"),
    [
        ("module.gain * x", "module.gain = 2.0"),
        ("module.helper(x)", "module.gain = 2.0"),
        ("module.helper(x)", "module.helper = lambda x: 2 * x"),
        ("(lambda x: helper(x))(x)", "module.gain = 2.0"),
        ("setting.scale * x", "setting.scale = 2.0"),
        ("setting.twice() * x / 2", "setting.scale = 2.0"),
        ("Setting.kind * x", "Setting.kind = 2.0"),
        ("factor * x", "body.__defaults__ = (2.0,)"),
        ("x", "body.__code__ = twice.__code__"),
        ("len([x]) * x", "len = lambda xs: 2"),
        ("layer(x)", "Base.__call__ = lambda self, x: 2 * x"),
        ("layer(x)", "Layer.__call__ = lambda self, x: 2 * x"),
        ("layer.one * x", "Base.one = property(lambda self: 2.0)"),
        ("layer.two() * x", "Base.two = staticmethod(lambda: 2.0)"),
        ("layer.rate * x", "Base.rate = 2.0"),
        ("layer.setting.scale * x", "setting.scale = 2.0"),
        ("known.functions[0](x)", "module.gain = 2.0"),
        ("inner(x)", "module.gain = 2.0"),
        ("partial(x)", "module.gain = 2.0"),
        ("setting.inner.scale * x", "setting.inner.scale = 2.0"),
        ("layer.setting.inner.scale * x", "setting.inner = Setting(2.0, None)"),
        ("layer.setting.inner.scale * x", "setting.inner.scale = 2.0"),
    ],
)
def test_what_is_read_is_another(body, change):
    other = types.ModuleType("other")
    exec(OTHER_FILE, other.__dict__)
    space = namespace(f"""
class Setting:
    kind = 1.0

    def __init__(self, scale, inner):
        self.scale, self.inner = scale, inner

    def twice(self):
        return 2 * self.scale

setting = Setting(1.0, Setting(1.0, None))

class Base(es.Module):
    weight: es.Parameter
    setting: Setting = eqx.field(static=True)
    functions: tuple = ()
    rate = 1.0

    def __call__(self, x):
        return x

    @property
    def one(self):
        return 1.0

    @staticmethod
    def two():
        return 1.0

class Layer(Base):
    pass

def body(c, x, factor=1.0):
    TRACED.append(1)
    layer = c[0]
    return (layer, c[1] + {body}), None

def twice(c, x, factor=1.0):
    return (c[0], c[1] + 2 * x), None
""")
    space |= {"module": other, "helper": other.helper}
    space |= {"inner": around(other.helper), "partial": ft.partial(other.helper)}
    space["known"] = space["Layer"](ONE, None, (other.helper,))

    def run():
        init = space["Layer"](ONE, space["setting"]), 0.0
        return es.scan(space["body"], init, XS)[0][1]

    assert [run(), run()] == [6.0, 6.0]
    assert len(TRACED) == 1
    exec(change, space)
    assert [run(), run()] == [12.0, 12.0]


@pytest.mark.parametrize("name", ["cell", "setting.cell", "cells[0]"])
def test_a_module_of_a_scope_that_is_found_by_name(name):
    space = namespace(f"""
def body(c, x):
    return c + {name}.total * x, None
""")
    space |= {"setting": types.SimpleNamespace(), "cells": [None]}
    body = space["body"]

    def run(cell):
        space["cell"] = space["setting"].cell = space["cells"][0] = cell
        before = es.scan(body, 0.0, XS)[0]
        cell.total = cell.total + 1
        return before, es.scan(body, 0.0, XS)[0]

    for _ in range(2):
        assert es.mutable(run)(Cell(ONE, ONE))[0] == (6.0, 12.0)


def test_what_an_earlier_program_read():
    space = namespace("""
scale = 1.0

class Scaled(es.Module):
    weight: es.Parameter

    def __call__(self, x):
        return scale * x

class Plain(es.Module):
    weight: es.Parameter

    def __call__(self, x):
        return x

def body(c, x):
    return (c[0], c[1] + c[0](x)), None
""")

    def run(cls):
        return es.scan(space["body"], (space[cls](ONE), 0.0), XS)[0][1]

    assert [run("Scaled"), run("Plain")] == [6.0, 6.0]
    space["scale"] = 2.0
    assert [run("Scaled"), run("Plain")] == [12.0, 6.0]


def test_what_is_read_after_a_failure():
    space = namespace("""
scale = None

def body(c, x):
    return c + scale * x, None
""")
    with pytest.raises(TypeError, match="NoneType"):
        es.scan(space["body"], 0.0, XS)
    for scale in (1.0, 2.0):
        space["scale"] = scale
        assert es.scan(space["body"], 0.0, XS)[0] == 6 * scale


def test_counters_of_traces():
    space = namespace("""
class Traces:
    count = 0

    def __init__(self):
        self.count = 0

traces = Traces()

def body(c, x):
    traces.count += 1
    Traces.count += 1
    return c + x.sum(), None
""")
    for _ in range(3):
        for xs in (XS, XS[:2], jnp.ones((2, 2))):
            es.scan(space["body"], 0.0, xs)
    assert space["traces"].count == space["Traces"].count == 3


class Simulation:
    def __init__(self):
        self.scale, self.model = 1.0, Cell(ONE, ONE)

    def step(self, c, x):
        return c + self.scale * self.model.weight * x, None


@pytest.mark.parametrize("of", [lambda f: f, ft.partial, es.checkpoint])
def test_methods_of_objects_are_traced_each_time(of):
    simulation = Simulation()
    assert es.scan(of(simulation.step), 0.0, XS)[0] == 6.0
    simulation.scale = 2.0
    assert es.scan(of(simulation.step), 0.0, XS)[0] == 12.0
    simulation.model = Cell(2 * ONE, ONE)
    assert es.scan(of(simulation.step), 0.0, XS)[0] == 24.0


def test_a_class_that_cannot_be_looked_at():
    class OfInstances:
        def __get__(self, instance, owner):
            if instance is None:
                raise ValueError("only of instances")
            return 1.0

    class Steps(es.Module):
        count: es.State
        one = OfInstances()

        def step(self, c, x):
            self.count = self.count + self.one
            return c, None

        def run(self):
            return es.scan(self.step, 0.0, XS)[0]

    model = Steps(0.0)
    for count in (3.0, 6.0):
        _, model = es.mutable(model.run)()
        assert model.count == count


def test_arrays_in_a_partial_are_inputs():
    def body(w, c, x):
        TRACED.append(1)
        return c + w["w"] * x, None

    kept = []
    for w in (1.0, 2.0, 3.0):
        w = jnp.array(w)
        kept.append(weakref.ref(w))
        assert es.scan(ft.partial(body, {"w": w}), 0.0, XS)[0] == 6 * w
    assert len(TRACED) == 1
    del w
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


# --- What cannot be kept --------------------------------------------------------------


def test_a_body_that_asks_for_values():
    class Steps(es.Module):
        n: es.Buffer
        total: es.State

        def __call__(self, x):
            return es.scan(self.step, x, XS)[0]

        def step(self, c, x):
            TRACED.append(1)
            for _ in range(int(self.n)):
                c = c + x
            self.total = self.total + c
            return c, None

    model = Steps(jnp.array(2), ONE)
    for n in (2, 3, 4):
        y, model = es.mutable(model.replace(n=jnp.array(n)))(0.0)
        assert y == 6 * n
    assert len(TRACED) == 1 + 3  # the first time, to find out


def test_while_a_model_is_initialized_nothing_is_traced():
    class Lazy(es.Module):
        weight: es.Parameter | None = None
        calls: es.State = 0

        def run(self, x):
            return es.scan(self.step, x, XS)[0]

        def step(self, c, x):
            TRACED.append(isinstance(c, jax.core.Tracer))
            if self.initializing:
                self.weight = es.Initializer(lambda key: ONE)
            self.calls = self.calls + 1
            return c + self.weight * x, None

    model = Lazy().init(0, ONE, call=lambda model, x: model.run(x))
    assert not any(TRACED[:1])
    for calls in (3, 6):
        y, model = es.mutable(model.run)(0.0)
        assert (y, model.calls) == (6.0, calls)
    assert len(TRACED) == 1 + 1 + 1


def test_what_fails_while_a_model_is_initialized_runs_once():
    class Lazy(es.Module):
        weight: es.Parameter | None = None

        def step(self, c, x):
            TRACED.append(1)
            raise ZeroDivisionError("mine")

    def call(model, x):
        return es.scan(model.step, x, XS)

    with pytest.raises(ZeroDivisionError, match="mine"):
        Lazy().init(0, ONE, call=call)
    assert len(TRACED) == 1


def test_static_values_without_a_hash():
    @jax.tree_util.register_static
    class Names(list):
        __hash__ = None

    def body(c, x):
        return c + x, None

    xs = (XS, Names(["a"]))
    got, _ = es.scan(lambda c, x: (c + x[0] * len(x[1]), None), 0.0, xs)
    assert got == 6.0


def test_an_error_is_the_one_of_the_trace():
    def body(c, x):
        TRACED.append(1)
        raise ZeroDivisionError("mine")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            es.scan(body, 0.0, XS)
        assert caught.value.__context__ is None


def test_a_check_that_fails():
    def body(c, x):
        TRACED.append(1)
        return eqx.error_if(c + x, x > 2, "too much"), None

    for _ in range(2):
        with pytest.raises(eqx.EquinoxRuntimeError, match="too much"):
            es.scan(body, 0.0, XS)
    assert len(TRACED) == 1
    assert es.scan(body, 0.0, XS[:2])[0] == 3.0


def test_what_cannot_be_called():
    with pytest.raises(TypeError, match="callable"):
        es.scan(3, 0.0, XS)


def test_without_jit_each_step_is_a_call():
    def body(c, x):
        TRACED.append(1)
        return c + float(x), None

    with jax.disable_jit():
        assert es.scan(body, 0.0, XS)[0] == 6.0
    assert len(TRACED) == 3


# --- Inputs and outputs ---------------------------------------------------------------


LOOPS = {
    "scan": lambda body, c: es.scan(lambda c, _: (body(c), None), c, XS)[0],
    "while_loop": lambda body, c: es.while_loop(lambda c: c[-1] < 6.0, body, c),
    "fori_loop": lambda body, c: es.fori_loop(0, 3, lambda _, c: body(c), c),
}


@pytest.fixture(params=LOOPS)
def loop(request):
    return LOOPS[request.param]


def test_what_a_loop_leaves_as_it_is(loop):
    cell = Cell(ONE, ONE)
    number, array, module, last = loop(lambda c: (*c[:-1], c[-1] + 2), (3, XS, cell, 0))
    assert type(number) is int
    assert array is XS
    assert module.weight is cell.weight
    assert last == 6


def test_modules_in_the_carry_stay_in_their_scope(loop, net):
    def body(c):
        cell, x = c
        cell.total = cell.total + 1
        return cell, x + 2

    def f(net):
        net.cell, _ = loop(body, (net.cell, 0))
        net.cell.total = 2 * net.cell.total

    _, new = es.mutable(f)(net())
    assert new.cell.total == 6


@pytest.mark.parametrize("x", [1, 2.0, np.ones(2), np.float32(1), ONE])
def test_what_other_outputs_are(x):
    """Arrays, as JAX returns them."""

    def same(x):
        return x

    def pair(c, x):
        return c, x

    xs = np.arange(3)
    for ours, theirs in (
        (es.cond(True, same, same, x), lax.cond(True, same, same, x)),
        (es.switch(1, [same] * 2, x), lax.switch(1, [same] * 2, x)),
        (es.switch(0, [same], x), lax.switch(0, [same], x)),
        (es.scan(pair, 0.0, xs)[1], lax.scan(pair, 0.0, xs)[1]),
    ):
        assert type(ours) is type(theirs)
        assert eqx.tree_equal(ours, theirs)


def test_numbers_are_inputs():
    def body(c):
        TRACED.append(1)
        return c + 1

    def go_on(c):
        return c < 10

    for start in range(5):
        got = es.while_loop(go_on, body, start)
        assert got == 10
        assert got.weak_type == lax.while_loop(go_on, lambda c: c + 1, start).weak_type
    assert len(TRACED) == 1


@pytest.mark.parametrize("bound", [int, np.int32, jnp.array])
def test_bounds_that_are_known_are_a_number_of_steps(bound):
    def body(i, c):
        TRACED.append(1)
        return c * i

    def f(x, n):
        return es.fori_loop(bound(1), bound(n), body, x)

    for n in (3, 4, 3, 4):
        # A loop with a known number of steps can be differentiated in reverse.
        assert float(jax.grad(f)(2.0, n)) == np.prod(range(1, n))
    assert len(TRACED) == 2


def test_bounds_that_are_traced():
    def body(i, c):
        TRACED.append(1)
        return c + i

    run = jax.vmap(lambda n: es.fori_loop(0, n, body, 0))
    for _ in range(2):
        assert run(jnp.array([2, 4])).tolist() == [1, 6]
    assert len(TRACED) == 1


# --- Memory ---------------------------------------------------------------------------


def test_programs_go_with_their_functions(net):
    def make():
        model = net()

        def go_on(c):
            return c < 3.0

        def body(c):
            return c + model.cell.weight

        return go_on, body

    refs = []
    for _ in range(2):
        go_on, body = make()
        es.while_loop(go_on, body, 0.0)
        es.while_loop(go_on, body, 0.0)
        refs += [weakref.ref(go_on), weakref.ref(body)]
    del go_on, body
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


def test_programs_go_with_the_last_of_their_functions():
    def go_on(c):
        return c < 3.0

    ref = None
    for _ in range(2):
        body = types.FunctionType((lambda c: c + 1.0).__code__, {})
        es.while_loop(go_on, body, 0.0)
        ref = ref or weakref.ref(body)
    del body
    gc.collect()
    assert ref() is None


def test_settings_without_end_do_not_fill_the_memory():
    def body(n, c, x):
        return c + n * x, None

    kept = []
    for n in range(70):
        n = Marker(n)
        kept.append(weakref.ref(n))
        es.scan(ft.partial(body, n), 0.0, XS)
    del n
    gc.collect()
    assert sum(ref() is not None for ref in kept) <= 64


def test_programs_go_where_they_are_not_used_again():
    def body(n, c, x):
        return c + (n if isinstance(n, Marker) else int(n)) * x, None

    n = Marker(1)
    kept = weakref.ref(n)
    es.scan(ft.partial(body, n), 0.0, XS)
    del n
    assert es.scan(ft.partial(body, jnp.array(2)), 0.0, XS)[0] == 12.0
    gc.collect()
    assert kept() is None


class Marker:
    """A static value, of which a weak reference shows whether it is kept."""

    def __init__(self, n):
        self.n = n

    def __mul__(self, x):
        return self.n * x
