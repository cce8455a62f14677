"""Assigning submodules in a scope: new ones, moved ones, replaced ones."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import rejects, untouched
from state_cases import Counter, Layer, Pair

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError
ONES = jnp.ones(2)


class Group(es.Module):
    layers: list = dataclasses.field(default_factory=lambda: [Counter(), Counter(5)])
    spare: dict = dataclasses.field(default_factory=lambda: {"x": Counter(9)})


def counts(tree):
    return [int(x) for x in jax.tree.leaves(es.filter(tree, es.State))]


def test_the_new_submodule_is_mutable_in_turn():
    def f(m):
        m.a = Counter(3)
        m.a.step()
        m.a.count += 10

    _, new = es.mutable(f)(Pair())
    assert counts(new) == [14, 5]


def test_a_new_submodule_has_modules_of_its_own():
    class Outer(es.Module):
        pair: Pair

    def f(m):
        m.pair = Pair(Counter(1), Counter(2))
        m.pair.b.step()
        m.pair.b = Counter(7)
        m.pair.b.step()

    _, new = es.mutable(f)(Outer(Pair()))
    assert counts(new) == [1, 8]


def test_the_object_that_was_assigned_stays_frozen():
    fresh = Counter(3)

    def f(m):
        m.a = fresh
        m.a.step()
        with pytest.raises(FROZEN, match=r"Counter\.count"):
            fresh.step()

    _, new = es.mutable(f)(Pair())
    assert counts(new) == [4, 5]
    assert fresh.count == 3
    with rejects(fresh, FROZEN, r"Counter\.count"):
        fresh.step()


def test_a_container_of_submodules():
    def f(m):
        m.layers = [Counter(1), m.layers[0]]
        m.layers[0].step()
        m.layers[1].step()

    _, new = es.mutable(f)(Group())
    assert counts(new.layers) == [2, 1]


def test_a_changed_copy_of_the_submodule():
    model = Pair(Layer(), Layer())

    def f(m):
        m.a = m.a.replace(count=jnp.array(4))
        m.b = eqx.tree_at(lambda m: m.count, m.b, jnp.array(6))
        m.a.step()

    _, new = es.mutable(f)(model)
    assert counts(new) == [5, 6]
    assert new.a.weight is model.a.weight


def test_a_result_of_a_nested_scope_is_assigned():
    def f(m):
        _, m.a = es.mutable(m.a.step)(2)
        (_, m.b) = es.mutable(lambda b: b.step())(m.b)
        m.b.step()

    assert counts(es.mutable(f)(Pair())[1]) == [2, 7]


CHANGED = {
    "class": (lambda: Layer(), ["`a", "Layer"]),
    "flag": (lambda: Counter().eval(), ["a.training"]),
    "shape": (lambda: Counter(jnp.zeros(3, jnp.int32)), [r"a\.count", r"i32\[3\]"]),
    "dtype": (lambda: Counter(0.5), [r"a\.count", r"f32\[\]", r"i32\[\]"]),
    "None": (lambda: None, ["`a", "None"]),
    "containers": (lambda: [Counter()], ["`a"]),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_submodule_of_another_structure(name):
    make, fragments = CHANGED[name]
    model = Pair()
    with rejects(model, ValueError, *fragments):
        es.mutable(lambda m: setattr(m, "a", make()), kinds=es.TreePart)(model)


def test_a_static_field_of_a_new_submodule_stays():
    class Sized(Counter):
        size: int = eqx.field(static=True, default=1)

    model = Pair(Sized(), Sized())
    with rejects(model, ValueError, r"a\.size", "1", "2"):
        es.mutable(lambda m: setattr(m, "a", Sized(size=2)))(model)


def test_parameters_are_not_smuggled():
    model = Pair(Layer(), Layer())

    def whole(m):
        m.a = Layer()

    def inside(m):
        m.a = eqx.tree_at(lambda m: m.weight, m.a, jnp.zeros(2))

    for f in (whole, inside):
        with rejects(model, FROZEN, r"a\.weight", "`Parameter`", "kinds="):
            es.mutable(f)(model)
        _, new = es.mutable(f, kinds=es.TreePart)(model)
        assert new.a.weight.shape == (2,)


def test_parameters_are_not_smuggled_through_a_container():
    model = Group([Layer(), Layer()])

    def f(m):
        m.layers[0] = Layer(weight=jnp.zeros(2))

    with rejects(model, FROZEN, r"layers\[0\]\.weight", "`Parameter`"):
        es.mutable(f)(model)
    _, new = es.mutable(f, kinds=es.TreePart)(model)
    assert (new.layers[0].weight == 0).all()


def test_a_plain_equinox_layer_is_not_smuggled():
    class Net(es.Module):
        linear: eqx.nn.Linear

        def __call__(self):
            self.linear = eqx.nn.Linear(2, 2, key=jr.key(1))

    model = Net(eqx.nn.Linear(2, 2, key=jr.key(0)))
    with rejects(model, FROZEN, r"linear\.weight", "`Parameter`"):
        es.mutable(model)()


# --- Replaced, moved, swapped -------------------------------------------------------


def replaced_field(m):
    old, m.a = m.a, Counter(1)
    old.step()


def replaced_below(m):
    old = m.pair.a
    m.pair = Pair()
    old.step()


def replaced_list(m):
    old = m.layers[0]
    m.layers = [Counter(), Counter()]
    old.step()


def replaced_in_list(m):
    old = m.layers[0]
    m.layers[0] = Counter(1)
    old.step()


def popped(m):
    old = m.layers.pop()
    m.layers.append(Counter(1))
    old.step()


def replaced_in_dict(m):
    old = m.spare["x"]
    m.spare["x"] = Counter(1)
    old.step()


class Outer(es.Module):
    pair: Pair = dataclasses.field(default_factory=Pair)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, es.jit, es.checkpoint, lambda f: lambda m: es.cond(True, f, f, m)],
    ids=["eager", "jit", "checkpoint", "cond"],
)
@pytest.mark.parametrize(
    ("f", "make"),
    [
        (replaced_field, Pair),
        (replaced_below, Outer),
        (replaced_list, Group),
        (replaced_in_list, Group),
        (popped, Group),
        (replaced_in_dict, Group),
    ],
)
def test_a_replaced_module_is_written_afterwards(f, make, transform):
    # What is written there could not come out: it is not to be lost silently.
    model = make()
    with rejects(model, (FROZEN, ValueError), "count"):
        es.mutable(transform(f))(model)


def test_swap():
    def f(m):
        m.a, m.b = m.b, m.a
        m.a.step()

    assert counts(es.mutable(f)(Pair())[1]) == [6, 0]


def test_swap_with_parameters_needs_their_kind():
    model = Pair(Layer(1), Layer(2, weight=jnp.zeros(2)))

    def f(m):
        m.a, m.b = m.b, m.a

    with rejects(model, FROZEN, r"weight", "`Parameter`"):
        es.mutable(f)(model)
    _, new = es.mutable(f, kinds=es.TreePart)(model)
    assert counts(new) == [2, 1]
    assert (new.a.weight == 0).all()


def test_swap_with_parameters_there_and_back():
    def f(m):
        m.layers = m.layers[::-1]
        m.layers = m.layers[::-1]
        m.layers[0].step()

    model = Group([Layer(1), Layer(2, weight=jnp.zeros(2))])
    assert counts(es.mutable(f)(model)[1].layers) == [2, 2]


@pytest.mark.parametrize("keep", [0, 1])
def test_what_lies_beside_a_module_in_a_list_is_looked_at(keep):
    steps = []

    def f(m):
        m.layers[keep].step()
        m.layers = [*m.layers[:-1], 2 * ONES]
        steps.append("reached")

    model = Group([*(Counter() for _ in range(keep + 1)), ONES])
    with rejects(model, FROZEN, rf"layers.*\[{keep + 1}\]", "`Parameter`"):
        es.mutable(f)(model)
    assert steps == []  # it is told where it is written


def test_swap_in_a_list():
    def f(m):
        m.layers[0], m.layers[1] = m.layers[1], m.layers[0]
        m.layers[0].step()

    assert counts(es.mutable(f)(Group())[1].layers) == [6, 0]


def test_rotate_a_list():
    def f(m):
        m.layers = [*m.layers[1:], m.layers[0]]
        m.layers[1].step()

    assert counts(es.mutable(f)(Group())[1].layers) == [5, 1]


def test_move():
    def f(m):
        m.a = m.b
        m.b = Counter(9)
        m.a.step()
        m.b.step()

    assert counts(es.mutable(f)(Pair())[1]) == [6, 10]


def test_there_and_back():
    def f(m):
        old = m.a
        m.a = Counter(1)
        m.a = old
        old.step()

    assert counts(es.mutable(f)(Pair())[1]) == [1, 5]


def test_moved_into_a_container_and_back():
    def f(m):
        m.spare = {"x": m.layers[0]}
        m.layers = [Counter(1), m.layers[1]]
        m.spare["x"].step()

    assert counts(es.mutable(f)(Group())[1]) == [1, 5, 1]


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
    # What was put into it in place belongs to nobody yet.
    def replaced(m):
        m.layers[0] = Counter(1)
        m.layers = [Counter(2), Counter(3)]

    def kept(m):
        m.layers[0] = Counter(1)
        m.layers = [m.layers[1], m.layers[0]]
        m.layers[1].step()

    assert counts(es.mutable(replaced)(Group())[1].layers) == [2, 3]
    assert counts(es.mutable(kept)(Group())[1].layers) == [5, 2]


# --- Containers that are changed in place, and transforms ---------------------------

THROUGH = {
    "jit": es.jit,
    "checkpoint": es.checkpoint,
    "vmap": lambda f: es.vmap(f, in_axes=None, axis_size=2),
    "cond": lambda f: lambda m: es.cond(True, f, f, m),
    "scan": lambda f: lambda m: es.scan(lambda c, x: (f(m), None), None, length=1),
    "fori_loop": lambda f: lambda m: es.fori_loop(0, 1, lambda i, c: f(m), None),
}
through = pytest.mark.parametrize("transform", THROUGH.values(), ids=THROUGH)


@through
def test_what_the_caller_has_put_into_a_list_stays_the_callers(transform):
    mine = Counter(1)

    def f(m):
        m.layers[0] = mine
        transform(lambda m: m.layers[0].step())(m)
        assert mine.count == 1

    model = Group()
    with untouched(mine), untouched(model):
        assert counts(es.mutable(f)(model)[1].layers) == [2, 5]


@through
def test_modules_that_are_moved_from_outside(transform):
    def f(m):
        layers = m.layers

        def swap(m):
            layers[0], layers[1] = layers[1], layers[0]
            m.layers[0].step()

        transform(swap)(m)

    with rejects(Group(), es.TraceError, "was changed", "closes over"):
        es.mutable(f)(Group())


@through
def test_a_module_that_is_taken_out_from_outside(transform):
    def f(m):
        layers = m.layers

        def take(m):
            layers.pop()
            m.layers[0].step()

        transform(take)(m)

    with rejects(Group(), es.TraceError, "was changed", "closes over"):
        es.mutable(f)(Group())


@pytest.mark.parametrize("transform", THROUGH.values(), ids=THROUGH)
def test_modules_that_are_moved_inside(transform):
    def swap(m):
        m.layers[0], m.layers[1] = m.layers[1], m.layers[0]
        m.layers[0].step()

    model = Group()
    with untouched(model):
        assert counts(es.mutable(transform(swap))(model)[1].layers) == [6, 0]


@pytest.mark.parametrize(
    "transform",
    [es.jit, es.checkpoint, lambda f: es.vmap(f, in_axes=None, axis_size=2)],
)
def test_modules_of_two_roots_are_not_tied(transform):
    def f(m):
        def tie(a, b):
            a.pair = b.pair

        transform(tie)(*m)

    model = [Outer(), Outer()]
    with rejects(model, ValueError, r"`\[0\]\.pair` and `\[1\]\.pair`"):
        es.mutable(f)(model)
