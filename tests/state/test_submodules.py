"""Assigning submodules in a scope: new, moved and replaced ones."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import rejects, untouched
from state_cases import Counter, Layer, Pair

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


class Group(es.Module):
    layers: list = dataclasses.field(default_factory=lambda: [Counter(), Counter(5)])
    spare: dict = dataclasses.field(default_factory=lambda: {"x": Counter(9)})


def counts(tree):
    return [int(x) for x in jax.tree.leaves(es.filter(tree, es.State))]


CHANGED = {
    "class": (lambda: Layer(), ["`a", "Layer"]),
    "flag": (lambda: Counter().eval(), ["a.training"]),
    "None": (lambda: None, ["`a", "None"]),
    "layer": (lambda: eqx.nn.Linear(2, 1, key=jax.random.key(0)), ["`a`", "Linear"]),
    "array": (lambda: jnp.ones(2), ["`a`", r"f32\[2\]"]),
    "container": (lambda: {"b": Counter()}, ["`a`", "{'b': "]),
}


@pytest.mark.parametrize("kinds", [es.State, es.TreePart])
@pytest.mark.parametrize("name", CHANGED)
def test_a_submodule_of_a_different_structure_is_an_error(name, kinds):
    make, fragments = CHANGED[name]
    model = Pair()
    with rejects(model, ValueError, *fragments):
        es.mutable(lambda m: setattr(m, "a", make()), kinds=kinds)(model)


@pytest.mark.parametrize("kinds", [es.State, es.TreePart])
def test_a_longer_list_is_an_error_and_what_is_none_needs_init(kinds):
    model = Group([Layer()])
    with rejects(model, ValueError, "`layers`", r"`list of \[0\], \[1\]`"):
        es.mutable(lambda m: setattr(m, "layers", [*m.layers, Layer()]), kinds=kinds)(
            model
        )
    empty = Group([None])
    error = FROZEN if kinds is es.State else ValueError
    with rejects(empty, error, r"`layers\[0\]", "init|`None`"):
        es.mutable(lambda m: setattr(m, "layers", [Layer()]), kinds=kinds)(empty)


def whole(m):
    m.layers = [Layer(), m.layers[1]]


def below(m):
    m.layers[0] = eqx.tree_at(lambda m: m.weight, m.layers[0], jnp.zeros(2))


def swapped(m):
    m.layers = m.layers[::-1]


@pytest.mark.parametrize("f", [whole, below, swapped])
def test_parameters_cannot_be_changed_by_replacing_a_module(f):
    model = Group([Layer(), Layer(5)])
    with rejects(model, FROZEN, r"layers.*\[0\]\.weight", "`Parameter`", "kinds="):
        es.mutable(f)(model)
    _, new = es.mutable(f, kinds=es.TreePart)(model)
    assert new.layers[0].weight.shape == (2,)


# --- Replaced, moved, swapped -------------------------------------------------------


def swap(m):
    m.layers[0], m.layers[1] = m.layers[1], m.layers[0]
    m.layers[0].step()


def rotate(m):
    m.layers = [*m.layers[1:], m.layers[0]]
    m.layers[1].step()


def move(m):
    m.layers[0] = m.layers[1]
    m.layers[1] = Counter(9)
    m.layers[0].step()


def there_and_back(m):
    old = m.layers[0]
    m.layers = [Counter(1), m.layers[1]]
    m.layers = [old, m.layers[1]]
    old.step()


def into_a_dict(m):
    m.spare = {"x": m.layers[0]}
    m.layers = [Counter(1), m.layers[1]]
    m.spare["x"].step()


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (swap, [6, 0, 9]),
        (rotate, [5, 1, 9]),
        (move, [6, 9, 9]),
        (there_and_back, [1, 5, 9]),
        (into_a_dict, [1, 5, 1]),
    ],
)
def test_a_module_is_moved(f, expected):
    with untouched(model := Group()):
        assert counts(es.mutable(f)(model)[1]) == expected


class Outer(es.Module):
    pair: Pair = dataclasses.field(default_factory=Pair)


def test_a_module_of_an_outer_scope_is_copied():
    def outer(m):
        def inner(other):
            other.a = m.b
            other.a.step()
            m.b.step(10)

        _, new = es.mutable(inner)(Pair())
        return new

    new, model = es.mutable(outer)(Pair())
    assert counts(new) == [6, 5]
    assert counts(model) == [0, 15]


def test_a_container_that_was_written_into_is_replaced():
    # A module that was put into a list in place does not belong to a scope yet.
    def replaced(m):
        m.layers[0] = Counter(1)
        m.layers = [Counter(2), Counter(3)]

    def kept(m):
        m.layers[0] = Counter(1)
        m.layers = [m.layers[1], m.layers[0]]
        m.layers[1].step()

    assert counts(es.mutable(replaced)(Group())[1].layers) == [2, 3]
    assert counts(es.mutable(kept)(Group())[1].layers) == [5, 2]


# --- Containers that are changed in place, with transforms --------------------------

THROUGH = {
    "jit": es.jit,
    "scan": lambda f: lambda m: es.scan(lambda c, x: (f(m), None), None, length=1),
}
through = pytest.mark.parametrize("transform", THROUGH.values(), ids=THROUGH)


@through
def test_a_module_of_the_caller_in_a_list_does_not_change(transform):
    mine = Counter(1)

    def f(m):
        m.layers[0] = mine
        transform(lambda m: m.layers[0].step())(m)
        assert mine.count == 1

    model = Group()
    with untouched(mine), untouched(model):
        assert counts(es.mutable(f)(model)[1].layers) == [2, 5]


@through
def test_removing_a_module_from_a_closed_over_list_is_an_error(transform):
    def f(m):
        layers = m.layers

        def take(m):
            layers.pop()
            m.layers[0].step()

        transform(take)(m)

    with rejects(Group(), es.TraceError, "changed a list", "closes over"):
        es.mutable(f)(Group())


@through
def test_a_module_that_a_transform_wrote_must_stay_in_the_model(transform):
    def f(m):
        transform(lambda m: m.layers[0].step())(m)
        m.layers[0] = Counter(1)

    lost = r"`layers\[0\]\.count` was written, but its module is no longer in the model"
    with rejects(Group(), ValueError, lost):
        es.mutable(f)(Group())


def test_one_module_must_not_be_assigned_to_two_models():
    def f(m):
        def tie(a, b):
            a.pair = b.pair

        es.jit(tie)(*m)

    model = [Outer(), Outer()]
    with rejects(model, ValueError, r"`\[0\]\.pair` and `\[1\]\.pair`"):
        es.mutable(f)(model)
