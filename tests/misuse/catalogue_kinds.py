"""Programs with contradictory declarations, or changes of type and structure."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


_T = TypeVar("_T")


# --- Kinds --------------------------------------------------------------------------


@program(
    "wrap a value in a kind, as in Flax NNX: `self.w = es.Parameter(x)`",
    "`Parameter` is a kind",
    "w: es.Parameter",
)
def _(case):
    class Wrapped(es.Module):
        w: es.Parameter

        def __init__(self):
            self.w = es.Parameter(jnp.ones(3))

    with case.error():
        Wrapped()


@program("declare a union of two kinds", "Both.w`", "A field has one kind")
def _(case):
    with case.error():

        class Both(es.Module):
            w: es.Parameter | es.State


@program("give a static field a kind", "Remove the kind")
def _(case):
    with case.error("Static.n`"):

        class Static(es.Module):
            n: es.State = eqx.field(static=True)

    with case.error("es.field(kind=es.State"):
        es.field(kind=es.State, static=True)


@program('give a kind by its name: `es.field(kind="Parameter")`')
def _(case):
    for kind in ("Parameter", jax.Array, 0):
        with case.error():
            es.field(kind=kind)


@program(
    'misspell a kind in a string: `w: "es.Paramter"`',
    "Misspelt.w",
    "Import the name at run time",
)
def _(case):
    class Misspelt(es.Module):
        w: "es.Paramter"

    model = Misspelt(jnp.ones(3))
    for f in (es.parts, es.filter, es.state_dict, es.grad(lambda m: m.w[0])):
        with case.error():
            f(model)


@program("call a field `training` or `frozen`", "Job.training`", "`training_`")
def _(case):
    with case.error():

        class Job(es.Module):
            training: bool


@program("put an array into a static field")
def _(case):
    class Static(es.Module):
        w: Any = eqx.field(static=True)

    with case.error():
        Static(jnp.ones(3))


@program('give kinds by name: `es.mutable(f, kinds="state")`')
def _(case):
    with case.error():
        es.mutable(case.keep(Net(), XS), kinds="state")


@program(
    'give a filter by name: `model.filter("Parameter")`',
    "`es.Parameter`",
    "es.path_matches",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        net.filter("Parameter")
    with case.error():
        net.filter({es.Parameter})
    assert net.filter(es.path_matches("*.weight")).layer.weight == 2.0


# --- Types and structure ------------------------------------------------------------


class Memory(es.Module):
    last: es.State[Any]

    def __call__(self, x):
        self.last = x


for title, before, wrong, right, hints in (
    (
        "write a longer array than before",
        jnp.zeros(2),
        XS,
        XS[:2],
        ("f32[2]", "f32[3]"),
    ),
    (
        "write fewer elements than before",
        XS,
        0.0,
        jnp.zeros(3),
        ("f32[3]", "f32[]"),
    ),
    (
        "write a different dtype than before",
        jnp.zeros(3, jnp.bfloat16),
        XS,
        XS.astype(jnp.bfloat16),
        ("bf16[3]", "f32[3]", "astype"),
    ),
):

    @program(title, "`last`", *hints)
    def _(case, before=before, wrong=wrong, right=right):
        model = case.keep(Memory(before), right)
        for run in (es.mutable(model), es.jit(es.mutable(model))):
            with case.error():
                run(wrong)
            assert eqx.tree_equal(run(right)[1].last, right)


@program(
    "write a float into an integer state",
    "`count`",
    "i32[]",
    "jnp.asarray(value, dtype=jnp.int32)",
)
def _(case):
    model = case.keep(Layer(), XS)
    for value in (0.5, jnp.array(0.5)):
        with case.error():
            es.mutable(lambda m, value=value: setattr(m, "count", value))(model)


@program(
    "write an integer that the dtype of the state cannot hold",
    "`count`",
    "i32[]",
    "a wider dtype",
)
def _(case):
    model = case.keep(Layer(), XS)
    for value in (2**40, np.int64(2**40)):
        with case.error():
            es.mutable(lambda m, value=value: setattr(m, "count", value))(model)


@program("use a NumPy array of a model in `es.mutable`")
def _(case):
    table = np.arange(3.0, dtype=np.float32)
    layer = case.keep(Layer(weight=jnp.ones(())), XS)
    layer = eqx.tree_at(lambda layer: layer.weight, layer, table)
    is_jax, new = es.mutable(lambda m: isinstance(m.weight, jax.Array))(layer)
    assert is_jax
    assert new.weight is table


@program("write a `jax.ShapeDtypeStruct` into state", "`count`")
def _(case):
    model = case.keep(Layer(), XS)
    struct = jax.ShapeDtypeStruct((), jnp.int32)
    with case.error():
        es.mutable(lambda m: setattr(m, "count", struct))(model)


for title, before, change in (
    ("begin with `None`, and write an array", None, lambda m: setattr(m, "last", XS)),
    ("append to a list of state", [XS], lambda m: m.last.append(XS)),
    ("add an entry to a dict of state", {"a": XS}, lambda m: m.last.update(b=XS)),
):

    @program(title, "`last")
    def _(case, before=before, change=change):
        model = case.keep(Memory(before))
        for run in (es.mutable(change), es.jit(es.mutable(change))):
            with case.error():
                run(model)


@program("write `if self.count > 3:` under `jit`")
def _(case):
    class Late(Layer):
        def wrong(self, x):
            self.count += 1
            return x if self.count > 3 else 2 * x

        def right(self, x):
            self.count += 1
            return es.cond(self.count > 3, lambda: x, lambda: 2 * x)

    model = case.keep(Late(), XS)
    with case.error():
        es.jit(lambda m: es.mutable(m.wrong)(XS))(model)
    y, new = es.jit(lambda m: es.mutable(m.right)(XS))(model)
    assert (y == 2 * XS).all()
    assert new.count == 1
