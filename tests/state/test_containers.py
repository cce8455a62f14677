"""Containers in a scope: replacing them, and writing to them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from helpers import rejects

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


class Stats(es.Module):
    stats: es.State[dict]
    heads: es.Parameter[dict]
    history: es.State[list]

    def __init__(self):
        self.stats = {"a": jnp.zeros(2), "b": {"c": jnp.array(0)}}
        self.heads = {"w": jnp.zeros(2)}
        self.history = [jnp.zeros(()), jnp.zeros(())]


def test_a_container_is_replaced():
    def f(m):
        m.stats = {**m.stats, "a": jnp.ones(2)}
        m.history = [*m.history[1:], 3]

    _, new = es.mutable(f)(Stats())
    assert (new.stats["a"] == 1).all()
    assert new.stats["b"]["c"] == 0
    assert [float(x) for x in new.history] == [0.0, 3.0]
    assert new.history[1].dtype == jnp.float32


INTO = {
    "parameter": (lambda m, x: m.heads.update(w=x), FROZEN, ["heads", "`Parameter`"]),
    "lost key": (lambda m, x: m.stats.pop("a"), ValueError, ["stats"]),
    "tracer": (
        lambda m, x: jax.vmap(lambda x: m.history.__setitem__(1, x))(x),
        es.TraceError,
        [r"history\[1\]", r"self\.stats = \{\*\*self\.stats"],
    ),
    "parameter's tracer": (
        lambda m, x: jax.vmap(lambda y: m.heads.update(w=x + y))(x),
        (es.TraceError, FROZEN),
        [r"heads\['w'\]"],
    ),
}


@pytest.mark.parametrize("transform", [lambda f: f, es.jit])
def test_a_write_to_a_module_that_is_removed_is_an_error(transform):
    class Counter(es.Module):
        n: es.State = 0

        def __call__(self):
            self.n = self.n + 1

    class Net(es.Module):
        layers: list[Counter]

        def __call__(self):
            transform(self.layers[1])()
            self.layers[1] = Counter()

    model = Net([Counter(), Counter()])
    with rejects(model, ValueError, r"`layers\[1\]\.n` was written, but its module is"):
        es.mutable(model)()


@pytest.mark.parametrize("name", INTO)
@jax.check_tracer_leaks(False)  # some leak on purpose
def test_invalid_writes_to_containers(name):
    f, error, fragments = INTO[name]
    with rejects(model := Stats(), error, *fragments):
        es.mutable(f)(model, jnp.ones(2))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.5, r"the number 0\.5 would make it float32\. State keeps its dtype"),
        (jnp.ones(()), r"from `i32\[\]` to `f32\[\]`\. State keeps its shape"),
        (2**40, r"1099511627776 does not fit into `i32\[\]`"),
    ],
)
def test_the_error_says_why_a_value_does_not_fit(value, said):
    model = Stats()
    with rejects(model, ValueError, rf"stats\['b'\]\['c'\].*{said}"):
        es.mutable(lambda m: m.stats["b"].update(c=value))(model)
