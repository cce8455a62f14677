"""Seed 000 (PAX): program V4 and the rows of PEERS.md which it describes.

A test is named after its row. Where a frozen module needs another spelling than the
seed's, or the seed has a fault, one line says so. Seed 001 is in `test_seeds_treex.py`
and `test_seeds_kinds.py`, 002 in `test_seeds_brachy.py`, 003 and 004 in
`test_seeds_pytrees.py`.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_state as es


class Linear(es.Module):
    weight: es.Parameter
    bias: es.Parameter
    count: es.State

    def __init__(self, weight=1.0, bias=0.0):
        self.weight = jnp.array(weight)
        self.bias = jnp.array(bias)
        self.count = jnp.array(0)

    def __call__(self, x):
        self.count += 1  # the seed's `self.counter` is a name it never made
        return x * self.weight + self.bias


class UnmarkedLinear(es.Module):
    """The same, kinds found by value alone."""

    weight: jax.Array
    bias: jax.Array
    count: jax.Array

    def __init__(self):
        self.weight = jnp.ones(())
        self.bias = jnp.zeros(())
        self.count = jnp.array(0)


class Counter(es.Module):
    count: es.State = 0

    def step(self):
        self.count = self.count + 1


class ModuleV0(es.Module):
    mylist: list


class Stack(es.Module):
    layers: list


class Named(es.Module):
    w: es.Parameter
    name: str
    activation: Any


# --- V4: PAX, step by step ----------------------------------------------------------


def test_V4_A2_A4_module_v0_keeps_its_flag():
    mod = ModuleV0([1, 2, 3])
    assert repr(mod) == "ModuleV0(mylist=[1, 2, 3])"
    for mode in (mod, mod.eval()):
        leaves, treedef = jax.tree_util.tree_flatten(mode)
        assert leaves == [1, 2, 3]
        new = jax.tree_util.tree_unflatten(treedef, leaves)
        assert eqx.tree_equal(new, mode)
        assert new.training == mode.training
        assert hash(treedef) == hash(jax.tree.structure(new))  # the seed's has none
    assert jax.tree.structure(mod) != jax.tree.structure(mod.eval())


def test_V4_G1_counter():
    counter = Counter()
    _, counter = es.mutable(counter.step)()
    leaves, treedef = jax.tree_util.tree_flatten(counter)
    assert leaves == [1]
    assert jax.tree_util.tree_unflatten(treedef, leaves).count == 1
    _, counter = es.mutable(Counter.step)(counter)
    assert counter.count == 2
    assert Counter().count == 0


@pytest.mark.parametrize("cls", [Linear, UnmarkedLinear])
def test_V4_E3_B5_B7_parameters_are_a_filter(cls):
    # `parameters()` is `filter(es.Parameter)`; arrays print as dtype and shape
    params = cls().filter(es.Parameter)
    assert repr(params) == f"{cls.__name__}(weight=f32[], bias=f32[], count=None)"
    assert jax.tree.leaves(params) == [1.0, 0.0]


def test_V4_a_call_changes_only_the_count():
    y, fc = es.mutable(Linear())(2.0)
    assert y == 2.0
    assert jax.tree.leaves(fc) == [1.0, 0.0, 1]
    assert jax.tree.leaves(fc.filter(es.Parameter)) == [1.0, 0.0]


@pytest.mark.parametrize("cls", [Linear, UnmarkedLinear])
def test_V4_B6_B7_tree_part_names(cls):
    names = frozenset(part.name for part in es.parts(cls()))
    assert names == {"bias", "count", "weight"}


# --- rows of seed 000 ---------------------------------------------------------------


def test_A3_subclasses_register_themselves():
    class Child(Counter):
        extra: es.Parameter = 1.0

    child = Child()
    assert jax.tree.leaves(child) == [0, 1.0]
    assert type(jax.tree.map(lambda x: x, child)) is Child


def test_A4_the_flag_retraces_once_per_value():
    @jax.jit
    @eqx.debug.assert_max_traces(max_traces=2)
    def f(module):
        return (1.0 if module.training else -1.0) * module.bias

    fc = Linear(bias=3.0)
    outs = [f(fc), f(fc.eval()), f(fc.eval().train()), f(fc.eval())]
    assert outs == [3.0, -3.0, 3.0, -3.0]


def test_A5_leaves_which_are_no_arrays():
    named = Named(jnp.ones(2), "named", jnp.tanh)
    assert repr(named.filter()) == "Named(w=f32[2], name=None, activation=None)"
    with pytest.raises(TypeError, match="<class 'str'>"):
        jax.jit(lambda m: m)(named)
    assert eqx.tree_equal(eqx.filter_jit(lambda m: m)(named), named)


def test_B5_C3_parameters_below_containers_are_found():
    # the seed's own `parameters()` loses modules which sit in a list
    stack = Stack([Linear(), {"a": (Linear(), jnp.arange(2))}])
    assert jax.tree.leaves(stack.filter(es.Parameter)) == [1.0, 0.0, 1.0, 0.0]
    assert jax.tree.leaves(stack.filter(es.State)) == [0, 0]
    assert eqx.tree_equal(stack.update(stack.filter(es.Parameter)), stack)


def test_B6_B8_fields_outside_the_tree():
    class Registered(es.Module):
        w: jax.Array = es.field(kind=es.State)
        config: tuple = es.field(static=True)

    module = Registered(jnp.ones(1), ("a", 2))
    assert jax.tree.leaves(module) == [1.0]
    assert [part.kind for part in es.parts(module)] == [es.State]
    other = Registered(jnp.ones(1), ("a", 3))
    assert jax.tree.structure(module) != jax.tree.structure(other)


def test_D13_a_hook_runs_after_init():
    class Checked(es.Module):
        w: es.Parameter

        def __init__(self, size):
            self.w = jnp.ones(size)

        def __check_init__(self):
            if self.w.size == 0:
                raise ValueError("`w` is empty")

    assert [part.name for part in es.parts(Checked(1))] == ["w"]
    with pytest.raises(ValueError, match="`w` is empty"):
        Checked(0)


def test_M1_G12_replace_is_a_shallow_copy():
    weight = jnp.ones(())
    fc = Linear()
    new = fc.replace(weight=weight)
    assert new.weight is weight
    assert new.bias is fc.bias
    assert fc.weight is not weight
    with pytest.raises(TypeError, match="wieght"):
        fc.replace(wieght=weight)
    with pytest.raises(dataclasses.FrozenInstanceError, match="weight"):
        new.weight = fc.weight
