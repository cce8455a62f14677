"""Entries that a function puts into a dict or a list of a module that no scope owns."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rejects
from jax.sharding import Mesh, PartitionSpec as P

import eqx_state as es


class Stats(es.Module):
    stats: es.State[dict] = dataclasses.field(default_factory=dict)
    scale: es.Parameter = 1.0

    def __call__(self, x):
        self.stats["max"] = jnp.max(x)
        return self.scale * x


class Layers(eqx.Module):
    layers: tuple  # with a list in it

    def __call__(self, x):
        self.layers[0].append(x)
        return x


def call(model, x):
    return model(x)


def step(x, model):
    return model(x), None


@es.custom_vjp
def rule(model, x):
    return model(x)


rule.defvjp(lambda model, x: (model(x), x), lambda x, g: (None, g))

FROZEN = dataclasses.FrozenInstanceError
X, XS = jnp.ones(()), jnp.ones(2)
MESH = Mesh(np.array(jax.devices()[:2]), "data")
SPECS = {"mesh": MESH, "out_specs": P("data")}


def stacked(model):
    return jax.tree.map(lambda x: jnp.stack([x, x]), model)


WAYS = {
    "jit": lambda m: es.jit(call)(m, X),
    "jit of it": lambda m: es.jit(m)(X),
    "jit of a method": lambda m: es.jit(m.__call__)(X),
    "jit of a partial": lambda m: es.jit(eqx.Partial(call, m))(X),
    "a keyword": lambda m: es.jit(call)(x=X, model=m),
    "in a list": lambda m: es.jit(lambda ms: ms[0](X))([m]),
    "jit of jit": lambda m: es.jit(lambda m, x: es.jit(call)(m, x))(m, X),
    "vmap": lambda m: es.vmap(call, (None, 0))(m, XS),
    "vmap of it": lambda m: es.vmap(m)(XS),
    "shard_map": lambda m: es.shard_map(call, in_specs=(P(), P("data")), **SPECS)(
        m, XS
    ),
    "checkpoint": lambda m: es.checkpoint(call)(m, X),
    "checkpoint of it": lambda m: es.checkpoint(m)(X),
    "cond": lambda m: es.cond(True, call, lambda m, x: x, m, X),
    "cond of it": lambda m: es.cond(True, m, lambda x: x, X),
    "switch": lambda m: es.switch(1, [lambda m, x: x, call], m, X),
    "scan, a carry": lambda m: es.scan(
        lambda m, x: (jax.tree.map(jnp.sin, m), m(x)), m, XS
    ),
    "scan, a slice": lambda m: es.scan(step, X, stacked(m)),
    "scan of it": lambda m: es.scan(eqx.Partial(lambda m, c, x: (m(c), x), m), X, XS),
    "while_loop": lambda m: es.while_loop(lambda x: x < 1, m, X),
    "a condition": lambda m: es.while_loop(
        eqx.Partial(lambda m, x: m(x) < 1, m), lambda x: x, X
    ),
    "fori_loop": lambda m: es.fori_loop(0, 2, eqx.Partial(lambda m, i, x: m(x), m), X),
    "vjp": lambda m: es.vjp(call, m, X),
    "jvp": lambda m: es.jvp(m, (X,), (X,)),
    "linearize": lambda m: es.linearize(m, X),
    "jacfwd": lambda m: es.jacfwd(m)(X),
    "jacrev": lambda m: es.jacrev(m)(X),
    "hessian": lambda m: es.hessian(m)(X),
    "custom_vjp": lambda m: rule(m, X),
    "grad, a later argument": lambda m: es.grad(lambda x, m: m(x))(X, m),
    "grad, a keyword": lambda m: es.value_and_grad(lambda x, m: m(x))(X, m=m),
    "beside a scope": lambda m: es.mutable(lambda o: es.jit(call)(m, X))(Stats()),
}


@pytest.mark.parametrize("entries", [(), ("max",)], ids=["new", "replaced"])
@pytest.mark.parametrize("name", WAYS)
def test_an_entry_that_would_be_lost_is_an_error(name, entries):
    model = Stats({key: jnp.zeros(()) for key in entries})
    with rejects(None, FROZEN, r"`Stats\.stats`", r"\*\*self\.stats", r"es\.mutable"):
        WAYS[name](model)


def test_so_is_an_item_of_a_list_in_a_module_of_equinox():
    model = Layers(([], {}))
    with rejects(model, FROZEN, r"`Layers\.layers`", r"\[\*self\.layers, x\]"):
        es.jit(call)(model, X)


def test_an_outdated_state_of_equinox_is_no_entry():
    class Normed(eqx.Module):
        norm: eqx.nn.BatchNorm
        states: list

        def __call__(self, x):
            y, _ = jax.vmap(
                lambda x: self.norm(x, self.states[0]),
                axis_name="batch",
                out_axes=(0, None),
            )(x)
            return y

    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    norm, state = make(3, "batch", mode="batch")
    assert es.jit(Normed(norm, [state]))(jnp.ones((2, 3))).shape == (2, 3)


def test_a_module_that_the_function_returns_has_the_entry():
    for transform in (
        es.jit,
        es.checkpoint,
        lambda f: es.vmap(f, (None, 0), (None, 0)),
    ):
        new, _ = transform(lambda m, x: (m, [m(0 * X), x][1]))(Stats(), XS)
        assert new.stats == {"max": 0}
    # Also if the container has modules in it, and the entry is none.
    for entry in (None, jax.tree_util.Partial(jnp.add, X), Stats()):
        grown = es.jit(lambda m, e: [m.layers[0].append(e), m][1])
        new = grown(Layers(([Stats()],)), entry)
        assert len(new.layers[0]) == 2
    # A dict outside of modules is Python's.
    assert es.jit(lambda d, x: [d.update(x=x), d["x"]][1])({}, X) == 1


# --- Containers of modules as arguments -----------------------------------------------


class Count(es.Module):
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return x


def assign(nets, x):
    y, nets["g"] = es.mutable(nets["g"])(x)
    return y


AROUND = {
    "jit": lambda nets: es.jit(assign)(nets, X),
    "a keyword": lambda nets: es.jit(lambda x, *, nets: assign(nets, x))(X, nets=nets),
    "checkpoint": lambda nets: es.checkpoint(assign)(nets, X),
    "cond": lambda nets: es.cond(True, assign, lambda nets, x: x, nets, X),
    "vjp": lambda nets: es.vjp(lambda x: es.jit(assign)(nets, x), X),
    "vmap": lambda nets: es.vmap(assign, (None, 0))(nets, XS),
    "a list": lambda nets: es.jit(lambda ms: ms.append(Count(1)))([*nets.values()]),
}


@pytest.mark.parametrize("scoped", [False, True], ids=["no scope", "in a scope"])
@pytest.mark.parametrize("way", AROUND)
def test_an_entry_in_a_container_of_modules_is_an_error(way, scoped):
    run = es.mutable(AROUND[way]) if scoped else AROUND[way]
    with pytest.raises(FROZEN, match=r"(?s)new entry .* of modules .* Return the"):
        run({"g": Count(), "d": Count()})


@pytest.mark.parametrize(
    "f",
    [
        lambda nets, x: (assign(nets, x), nets),
        lambda nets, x: (assign(nets, x), {**nets}),
        lambda nets, x: (assign(nets, x), nets["g"]),
        lambda nets, x: nets.pop("d").eval(),
    ],
    ids=["the container", "a copy of it", "the entry", "taken out"],
)
def test_an_entry_that_is_returned_or_taken_out_is_none(f):
    nets = {"g": Count(), "d": Count()}
    es.jit(f)(nets, X)
    assert nets["g"].calls == 0
    assert len(nets) == 2
