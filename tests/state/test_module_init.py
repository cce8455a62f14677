"""`module_init`: the hook that runs once per module."""

import pickle
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr

import eqx_state as es


def test_hooks_run_after_all_initializers_children_first():
    order = []

    class Hooked(es.Module):
        name: str = eqx.field(static=True)
        w: es.Parameter
        inner: es.Module | None = None
        b: es.Parameter | None = None

        def module_init(self, key):
            assert self.w.shape == (3,)
            assert self.inner is None or self.inner.b is not None
            order.append(self.name)
            self.b = jr.normal(key, (2,))

    later = es.Initializer(lambda key: order.append("draw") or jnp.ones(3))
    tree = Hooked("root", later, Hooked("middle", later, Hooked("leaf", later)))
    new = es.init(tree, 0)
    assert order == ["draw"] * 3 + ["leaf", "middle", "root"]
    drawn = [new.b, new.inner.b, new.inner.inner.b]
    assert len({tuple(b.tolist()) for b in drawn}) == 3


class Counted(es.Module):
    runs: es.State = 0
    extra: es.Parameter | None = None
    label: str = eqx.field(static=True, default="new")

    def module_init(self, key):
        self.runs = self.runs + 1
        self.extra = es.Initializer(lambda key: jnp.ones(3))
        self.label = "done"

    def __call__(self, x):
        return x


def test_a_hook_may_assign_any_field_and_runs_once_in_a_life():
    model = Counted()
    assert not model.initialized
    new = model.init(0)
    assert new.initialized
    assert (new.runs, new.label) == (1, "done")
    assert (new.extra == 1).all()
    assert model.runs == 0
    for twin in (new, pickle.loads(pickle.dumps(new)), es.mutable(new)(1.0)[1]):
        assert twin.initialized
        assert twin.init(1, jnp.ones(1)).runs == 1


def test_a_hook_may_replace_an_array_by_a_layer():
    class Layer(es.Module):
        calls: es.State = 0

    class Net(es.Module):
        layer: Any

        def module_init(self, key):
            self.layer = Layer()
            self.layer.calls = self.layer.calls + 1

    assert Net(jnp.zeros(())).init(0).layer.calls == 1
