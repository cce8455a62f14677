"""Programs that name axes and split arrays over devices."""

from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from catalogue_entry import Theme
from jax.sharding import AbstractMesh, PartitionSpec as P
from jaxtyping import Array, Float

import eqx_state as es


AXES = Theme("Axes and shardings")
MESH = AbstractMesh((4, 2), ("data", "model"))


class Block(es.Module):
    up: es.Parameter[Float[Array, "mlp embed"]]
    down: Annotated[eqx.nn.Linear, es.Axes(weight="embed mlp", bias="embed")]


def block():
    return Block(jnp.ones((8, 4)), eqx.nn.Linear(8, 4, key=jr.key(0)))


def refused(case, rules, mesh=MESH):
    model = case.keep(block())
    with case.error():
        es.sharding(model, mesh, rules)


# --- Names --------------------------------------------------------------------------


@AXES.raises(
    "give a field `Float[Array, 'mlp embed']` an array with one axis",
    ValueError,
    "is annotated with more axes than it has",
    "`Block.up`",
    "`mlp embed` at `up`, and the array has shape (8,)",
    instead="correct the annotation, or `'... embed'`",
)
def _(case):
    model = case.keep(block().replace(up=jnp.ones(8)))
    with case.error():
        es.axis_names(model)


@AXES.works(
    "give that field a stack of arrays, with an axis in front",
    "the axis in front has no name: `(None, 'mlp', 'embed')`",
)
def _(case):
    stack = case.keep(block().replace(up=jnp.ones((3, 8, 4))))
    assert es.axis_names(stack).up == (None, "mlp", "embed")


@AXES.raises(
    "misspell a path in `es.Axes(wieght='mlp embed')`",
    ValueError,
    "there is no `wieght` below it",
    "Net.up` declares",
    "There are `weight`, `bias`.",
    instead="the path of an array below the field, as `es.parts` has it",
)
def _(case):
    class Net(es.Module):
        up: Annotated[eqx.nn.Linear, es.Axes(wieght="mlp embed")]

    model = case.keep(Net(eqx.nn.Linear(8, 4, key=jr.key(0))))
    with case.error():
        es.axis_names(model)


@AXES.raises(
    "name the axes of an array by `es.Axes('mlp embed')`",
    TypeError,
    "say which array below the field has which axes",
    'Float[Array, "mlp embed"]',
    instead="`Float[Array, 'mlp embed']`; `es.Axes` is for a field that holds a layer",
)
def _(case):
    with case.error():
        es.Axes("mlp embed")


# --- Rules --------------------------------------------------------------------------


@AXES.raises(
    "misspell a name: `es.sharding(model, mesh, {'mpl': 'model'})`",
    ValueError,
    "no array has an axis `mpl`",
    "`mlp` (`up`)",
    instead="a name that `es.axis_names(model)` shows",
)
def _(case):
    refused(case, {"mpl": "model"})


@AXES.raises(
    "misspell a mesh axis: `{'mlp': 'modle'}`",
    ValueError,
    "which the mesh does not have",
    "axis 0 (`mlp`) of `up`",
    "`data` (4), `model` (2)",
    instead="a name of the mesh",
)
def _(case):
    refused(case, {"mlp": "modle"})


@AXES.raises(
    "split an axis over devices that do not divide its size",
    ValueError,
    "JAX splits arrays into equal parts only",
    "axis 0 (`mlp`) of `up` has size 8",
    instead="another size, or `es.path_matches('up'): P()` for this array",
)
def _(case):
    refused(case, {"mlp": "model"}, AbstractMesh((3,), ("model",)))


@AXES.raises(
    "split two axes of an array over one mesh axis",
    ValueError,
    "would use the mesh axis `model` twice",
    "`up`",
    "axis 0 (`mlp`)",
    "axis 1 (`embed`)",
    instead="another mesh axis, or `None`, for one of them",
)
def _(case):
    refused(case, {"mlp": "model", "embed": "model"})


@AXES.raises(
    "split all parameters by a spec that only the matrices have axes for",
    ValueError,
    "A spec has at most one entry for each axis",
    "`down.bias` gets",
    instead="a filter: `lambda part: part.value.ndim == 2`; or names",
)
def _(case):
    refused(case, {es.Parameter: P("data", "model")})


@AXES.raises(
    "give the name of an axis a `PartitionSpec`: `{'mlp': P('model')}`",
    TypeError,
    "is for axes of that name",
    instead="`{'mlp': 'model'}`",
)
def _(case):
    refused(case, {"mlp": P("model")})


@AXES.raises(
    "give a kind the name of a mesh axis: `{es.Parameter: 'model'}`",
    TypeError,
    "is for whole arrays",
    instead="`{es.Parameter: P('model')}`, or a name of an axis",
)
def _(case):
    refused(case, {es.Parameter: "model"})


@AXES.raises(
    "pass devices in place of a mesh",
    TypeError,
    "the mesh is a `list`",
    instead="`jax.sharding.Mesh(devices, 'data')`",
)
def _(case):
    refused(case, {}, jax.devices())


@AXES.works(
    "give a rule for a kind that no array has",
    "it reaches nothing, as everywhere where rules are given",
)
def _(case):
    model = case.keep(block())
    assert es.sharding(model, MESH, {es.Rng: P("data")}).up.spec == P()
