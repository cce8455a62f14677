"""Programs that declare a field wrongly, or assign one that they must not."""

import asyncio
import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from misuse import fails, FROZEN, Layer, Net, XS

import eqx_state as es


# --- Declarations ---------------------------------------------------------------------


@fails(
    TypeError, "Static.n`", "a static field is part of the tree's structure", "Remove"
)
def test_a_static_field_with_a_kind():
    class Static(es.Module):
        n: es.State = eqx.field(static=True)


@fails(TypeError, "a static field is part of the tree's structure", "kind=es.State")
def test_es_field_with_a_kind_and_static():
    es.field(kind=es.State, static=True)


@pytest.mark.parametrize("kind", ["Parameter", jax.Array, 0])
@fails(TypeError, "a kind is a class such as `es.Parameter`")
def test_a_kind_that_is_not_one(kind):
    es.field(kind=kind)


@fails(TypeError, "Job.training`: this name is taken", "`training_`")
def test_a_field_with_the_name_of_a_flag():
    class Job(es.Module):
        training: bool


@fails(FROZEN, "has no field `layers`", "body: `layers: list`.")
def test_a_list_of_layers_that_is_not_declared():
    class Model(es.Module):
        def __init__(self):
            self.layers = [eqx.nn.Identity()]

    Model()


class Plain(eqx.Module):
    count: es.State

    def __call__(self):
        self.count = self.count + 1


@fails(FROZEN, "Only an `es.Module` can write", "`Plain`, which declares `count`")
def test_a_write_in_an_equinox_module_that_declares_a_kind():
    es.mutable(lambda m: m[1]())([eqx.nn.Identity(), Plain(jnp.array(0))])


def test_an_equinox_module_that_is_not_to_blame_is_not_named(net):
    with pytest.raises(FROZEN, match="'count'") as info:
        es.mutable(lambda net: Plain(0)())(net)
    assert not any("Plain" in note for note in getattr(info.value, "__notes__", ()))
    with pytest.raises(AttributeError, match="no attribute 'moving'") as info:
        es.mutable(lambda plain: plain.moving)(Plain(jnp.array(0)))
    assert not any("Plain" in note for note in getattr(info.value, "__notes__", ()))


@fails(FROZEN, "Legacy.rng`", "is an array without a kind", "`rng: es.Rng`")
def test_a_legacy_key_without_a_kind():
    class Legacy(es.Module):
        rng: jax.Array

        def __call__(self):
            self.rng, _ = jr.split(self.rng)

    es.mutable(Legacy(jr.PRNGKey(0)))()


# --- What a call may not write --------------------------------------------------------


def clip(net):
    net.layer.weight = jnp.clip(net.layer.weight, -1.0, 1.0)


@fails(
    FROZEN,
    "`Layer.weight`",
    "is a `Parameter`, but this call can write only `State`",
    "kinds=(es.State, es.Parameter)",
    "weight: es.State",
)
def test_a_parameter(net):
    assert es.mutable(clip, kinds=es.TreePart)(net)[1].layer.weight == 1.0
    es.mutable(clip)(net)


@pytest.mark.parametrize(
    "write",
    [
        lambda net: object.__setattr__(net.layer, "weight", jnp.ones(())),
        lambda net: net.layer.__dict__.update(weight=jnp.ones(())),
        lambda net: setattr(net, "layer", Layer(7.0)),
    ],
    ids=["object", "__dict__", "a new layer"],
)
@fails(FROZEN, "layer.weight` is a `Parameter`", "kinds=es.TreePart")
def test_a_parameter_around_its_assignment(net, write):
    es.mutable(write)(net)


class Around(es.Module):
    linear: eqx.nn.Linear


@fails(FROZEN, "`linear.weight` is a `Parameter`", "declare what it is")
def test_a_layer_of_equinox_that_is_replaced():
    first, second = (eqx.nn.Linear(2, 2, key=jr.key(n)) for n in range(2))
    es.mutable(lambda m: setattr(m, "linear", second))(Around(first))


class Constants(es.Module):
    table: es.Buffer
    net: es.Buffer[Net]


@fails(
    FROZEN,
    "Constants.table`",
    "is a `Buffer`",
    "kinds=(es.State, es.Buffer)",
    "declare what it is: `table: es.State`",
)
def test_a_buffer(net):
    es.mutable(lambda m: setattr(m, "table", 2 * m.table))(Constants(XS, net))


@fails(FROZEN, "`net.layer.count`", "is a `Buffer`", "self.teacher.eval()(x)")
def test_inside_a_buffer(net):
    es.mutable(lambda m: m.net(XS))(Constants(XS, net))


@pytest.mark.parametrize("call", [lambda f: f, es.mutable], ids=["outside", "inside"])
@fails(FROZEN, "`Net.layer`", "Set it to `None` in a copy", "model.replace(")
def test_a_field_is_deleted(net, call):
    call(lambda net: delattr(net, "layer"))(net)


@fails(FROZEN, "Count.n`", "is a property", "self.set_n(value)")
def test_a_property_with_a_setter():
    class Count(es.Module):
        count: es.State = 0

        n = property(lambda self: self.count, lambda self, n: self.set_n(n))

        def set_n(self, n):
            self.count = n

    assert es.mutable(Count().set_n)(3)[1].n == 3
    es.mutable(lambda model: setattr(model, "n", 3))(Count())


@pytest.mark.parametrize(
    "wrap", [ft.partial, lambda f: lambda x: f(x)], ids=["partial", "function"]
)
@fails(FROZEN, "`Layer.count`", "in a `functools.partial`", "in an `eqx.Partial`")
def test_a_layer_in_a_partial_or_a_function(net, wrap):
    class Model(es.Module):
        f: Any

    run = es.mutable(lambda model: model.f(XS))
    assert run(Model(eqx.Partial(net.layer)))[1].f.func.count == 1
    run(Model(wrap(net.layer)))


@fails(FROZEN, "`Layer.count`", "a field, which stores a copy. Write through the field")
def test_a_layer_that_was_assigned_and_is_written_by_its_old_name(net):
    def f(net):
        new = net.layer = net.layer.replace(count=0)
        new(XS)

    es.mutable(f)(net)


# --- After the call -------------------------------------------------------------------


class Late(Layer):
    def stream(self, xs):
        for x in xs:
            yield self(x)

    async def serve(self, x):
        await asyncio.sleep(0)
        return self(x)


@pytest.mark.parametrize(
    "late",
    [
        lambda model: next(es.mutable(model.stream)(XS)[0]),
        lambda model: asyncio.run(es.mutable(model.serve)(XS)[0]),
        lambda model: es.mutable(lambda m: m.__call__)(model)[0](XS),
    ],
    ids=["generator", "coroutine", "method"],
)
@fails(FROZEN, "`Late.count`", "to has ended", "y, model = es.mutable(model)(x)")
def test_a_write_after_the_call(late):
    late(Late())


def test_a_generator_that_runs_in_the_call_may_write():
    ys, new = es.mutable(lambda m, xs: list(m.stream(xs)))(Late(), XS)
    assert (new.count, len(ys)) == (3, 3)


# --- What is written ------------------------------------------------------------------


@pytest.mark.parametrize(
    "run", [es.mutable, lambda f: es.jit(es.mutable(f))], ids=["", "jit"]
)
@fails(ValueError, "`last", "A call keeps the structure of the model")
def test_a_list_that_becomes_longer(run):
    class Memory(es.Module):
        last: es.State[list]

    run(lambda m: m.last.append(XS))(Memory([XS]))


@fails(
    ValueError,
    "`layer.training`: expected `True`, got `False`",
    "outside the call, by `train` and `eval`",
)
def test_a_layer_in_a_different_mode(net):
    es.mutable(lambda net: setattr(net, "layer", net.layer.eval()))(net)


@fails(ValueError, "`layer.count`", "does not fit into `i32[]`", "a wider dtype")
def test_an_integer_that_is_too_large(net):
    es.mutable(lambda net: setattr(net.layer, "count", 2**40))(net)


@fails(ValueError, "`layer.count`", "has no values")
def test_a_shape_instead_of_an_array(net):
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    es.mutable(lambda net: setattr(net.layer, "count", shape))(net)


# --- Which argument is written --------------------------------------------------------


def run(net, x):
    return net(x)


@pytest.mark.parametrize(
    ("wrong", "number"),
    [
        (lambda net: es.mutable(run, argnums=2)(net, XS), "2 positional arguments"),
        (lambda net: es.grad(run, argnums=(0, 2))(net, x=XS), "1 positional arguments"),
    ],
    ids=["mutable", "grad"],
)
def test_an_argument_that_does_not_exist(net, wrong, number):
    with fails(TypeError, "so argument 2 does not exist", number):
        wrong(net)


@fails(ValueError, "names argument 0 twice")
def test_one_argument_named_twice(net):
    es.mutable(run, argnums=(0, -2))(net, XS)


class Task(es.Module):
    layer: Layer = dataclasses.field(default_factory=Layer)

    def distance(self, other, x):
        return jnp.sum(abs(self.layer(x) - other.layer(x)))


def test_a_method_may_take_the_model_as_well():
    task = Task().eval()
    assert es.mutable(task.distance)(task, XS)[0] == 0
