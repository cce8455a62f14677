"""Leaves whose key paths print alike, or are equal: told apart by their position."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from helpers import close

import eqx_state as es


XS = jnp.arange(3.0)


@jtu.register_pytree_with_keys_class
class Twins:
    """A node that gives both its children one key."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten_with_keys(self):
        return [(jtu.GetAttrKey("x"), self.a), (jtu.GetAttrKey("x"), self.b)], None

    def tree_flatten(self):
        return [self.a, self.b], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def plus(self, n):
        return Twins(self.a + n, self.b + 2 * n)


class Key:
    """Two of them are equal and print alike only if their numbers do not matter."""

    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return "Key"

    def __lt__(self, other):
        return self.n < other.n


class Tally(es.Module):
    twins: es.State[Twins]
    named: dict[Key, es.BatchStat]
    weights: es.Parameter[Twins]

    def __call__(self, x):
        self.twins = self.twins.plus(1)
        self.named = {key: value + key.n for key, value in self.named.items()}
        return self.weights.a * x + self.weights.b


def tally(like=0.0):
    like = jnp.asarray(like)
    twins = Twins(like, like + 10)
    weights = Twins(like + 1, like + 2)
    return Tally(twins, {Key(1): like, Key(2): like + 5}, weights)


TRANSFORMS = {
    "none": lambda m, x: m(x),
    "jit": lambda m, x: es.jit(lambda x: m(x))(x),
    "jit of an argument": lambda m, x: es.jit(lambda m, x: m(x))(m, x),
    "checkpoint": lambda m, x: es.checkpoint(m)(x),
    "vmap": lambda m, x: es.vmap(m)(x[None])[0],
    "cond": lambda m, x: es.cond(x[1] > 0, m, lambda x: x, x),
    "switch": lambda m, x: es.switch(0, [lambda x, m: m(x), lambda x, m: x], x, m),
    "scan": lambda m, x: es.scan(lambda c, _: (c, m(x)), 0, None, 1)[1][0],
    "fori_loop": lambda m, x: es.fori_loop(0, 1, lambda i, x: m(x), x),
    "while_loop": lambda m, x: es.while_loop(lambda x: x[2] < 3, m, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_state_goes_where_it_was_written(name):
    model = tally()
    y, new = es.mutable(lambda m: TRANSFORMS[name](m, XS))(model)
    close(y, XS + 2)
    assert (new.twins.a, new.twins.b) == (1.0, 12.0)
    assert [*new.named.values()] == [1.0, 7.0]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_init_keeps_what_is_there_and_draws_what_is_missing(name):
    class Lazy(es.Module):
        tally: Tally
        bias: es.Parameter | None = None

        def __call__(self, x):
            if self.initializing and self.bias is None:
                self.bias = jnp.ones(3)
            return self.tally(x) + self.bias

    model = Lazy(tally()).init(0, XS, call=TRANSFORMS[name])
    assert (model.bias == 1).all()
    weights, expected = model.tally.weights, tally()
    assert (weights.a, weights.b) == (1.0, 2.0)
    assert (model.tally.twins.a, model.tally.twins.b) == (0.0, 10.0)
    assert [*model.tally.named.values()] == [*expected.named.values()]


def test_stacks_and_the_carry():
    def f(m):
        def step(carry, layer):
            y = carry(1.0) * layer(1.0)
            return carry, (y, layer.twins.b)

        return es.scan(step, m[0], m[1])

    (carry, (_, seen)), (_, new) = es.mutable(f)((tally(), tally(XS)))
    assert (carry.twins.a, carry.twins.b) == (3.0, 16.0)
    assert new.twins.b.tolist() == seen.tolist() == [12.0, 13.0, 14.0]
    assert new.twins.a.tolist() == [1.0, 2.0, 3.0]


def test_axes_of_arguments():
    d = {Key(1): XS, Key(2): 2 * XS}
    assert es.vmap(lambda d: sum(d.values()))(d).tolist() == [0.0, 3.0, 6.0]
    twins = Twins(XS, 1.0)
    assert es.vmap(lambda t: t.a + t.b)(twins).tolist() == [1.0, 2.0, 3.0]
    _, new = es.mutable(lambda m: es.vmap(lambda m, x: m(x))(m, XS))(tally(XS))
    assert new.twins.b.tolist() == [12.0, 13.0, 14.0]


def test_values_that_are_not_arrays_in_a_carry():
    twins, named = Twins("a", "b"), {Key(1): "a", Key(2): "b"}

    def body(carry, x):
        (twins, named), n = carry
        return ((twins, named), n + x), None

    ((after, _), n), _ = es.scan(body, ((twins, named), 0.0), XS)
    assert (after.a, after.b, n) == ("a", "b", 3.0)

    def swapped(carry, x):
        twins, n = carry
        return (Twins(twins.b, twins.a), n + x), None

    with pytest.raises(TypeError, match=r"returned another value at `\[0\]\.x`"):
        es.scan(swapped, (twins, 0.0), XS)


def test_what_is_written_to_a_module_of_the_carry():
    def f(m):
        def wrong(carry, x):
            old = jax.tree.map(lambda x: x, carry)
            carry(x)
            return old, x

        return es.scan(wrong, m, XS)

    with pytest.raises(ValueError, match=r"`twins\.x` was written in a module"):
        es.mutable(f)(tally())
