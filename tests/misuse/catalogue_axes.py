"""Programs that declare axis names or split arrays wrongly."""

from typing import Annotated

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from catalogue_entry import program
from jax.sharding import AbstractMesh, PartitionSpec as P
from jaxtyping import Array, Float

import eqx_state as es


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


@program(
    "give `Float[Array, 'mlp embed']` an array with one axis",
    "`Block.up`",
    "`mlp embed` at `up`, but the array has shape (8,)",
)
def _(case):
    model = case.keep(block().replace(up=jnp.ones(8)))
    with case.error():
        es.axis_names(model)


@program(
    "misspell a path in `es.Axes(wieght='mlp embed')`",
    "Net.up` declares",
    "It contains `weight`, `bias`.",
)
def _(case):
    class Net(es.Module):
        up: Annotated[eqx.nn.Linear, es.Axes(wieght="mlp embed")]

    model = case.keep(Net(eqx.nn.Linear(8, 4, key=jr.key(0))))
    with case.error():
        es.axis_names(model)


# --- Rules --------------------------------------------------------------------------


@program(
    "misspell a name: `es.sharding(model, mesh, {'mpl': 'model'})`", "`mlp` (`up`)"
)
def _(case):
    refused(case, {"mpl": "model"})


@program(
    "misspell a mesh axis: `{'mlp': 'modle'}`",
    "`up`",
    "axes `mlp embed`",
)
def _(case):
    refused(case, {"mlp": "modle"})


@program(
    "split an axis over devices that do not divide its size",
    "`up`, of shape (8, 4) and with axes `mlp embed`",
)
def _(case):
    refused(case, {"mlp": "model"}, AbstractMesh((3,), ("model",)))


@program(
    "split two axes of an array over one mesh axis",
    "`up`",
    "axes `mlp embed`",
)
def _(case):
    refused(case, {"mlp": "model", "embed": "model"})


@program(
    "split all parameters by a spec for matrices",
    "`down.bias`, of shape",
)
def _(case):
    refused(case, {es.Parameter: P("data", "model")})


@program("give the name of an axis a `PartitionSpec`: `{'mlp': P('model')}`")
def _(case):
    refused(case, {"mlp": P("model")})


@program("give a kind the name of a mesh axis: `{es.Parameter: 'model'}`")
def _(case):
    refused(case, {es.Parameter: "model"})
