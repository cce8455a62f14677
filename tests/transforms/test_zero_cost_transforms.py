"""Loops and branches of the library compile to the programs of plain JAX, too."""

import collections
import re

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import reuses_keys

import eqx_state as es


def opcodes(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    counts = collections.Counter(re.findall(r"= \S+ ([a-z\-]+)\(", text))
    assert counts["parameter"] > 0
    return counts


class Cell(es.Module):
    weight: es.Parameter
    h: es.State
    drop: es.nn.Dropout

    def __call__(self, x):
        h = jnp.tanh(self.weight @ self.h + x)
        if self.training:
            self.h = h
        return self.drop(h)


class Scanned(es.Module):
    cell: Cell

    def __call__(self, xs):
        return es.scan(lambda carry, x: (carry, self.cell(x)), None, xs)[1]


class Branching(es.Module):
    positive: es.State = 0
    total: es.State = 0.0
    weight: es.Parameter = 2.0

    def __call__(self, x):
        def on_positive(x):
            if self.training:
                self.positive = self.positive + 1
            return x * self.weight

        def otherwise(x):
            if self.training:
                self.total = self.total + x
            return x

        return es.cond(x > 0, on_positive, otherwise, x)


def scanned():
    cell = Cell(jnp.ones((4, 4)), jnp.zeros(4), es.nn.Dropout(0.5, key=0))
    return Scanned(cell), jnp.ones((5, 4))


def scan_by_hand(model, xs):
    cell = model.cell

    def step(carry, x):
        h, rng = carry
        h = jnp.tanh(cell.weight @ h + x)
        rng, key = jr.split(rng)
        mask = jr.bernoulli(key, 0.5, h.shape)
        return (h, rng), jnp.where(mask, h / 0.5, jnp.zeros_like(h))

    (h, rng), ys = jax.lax.scan(step, (cell.h, cell.drop.rng), xs)
    return ys, model.replace(cell=cell.replace(h=h, drop=cell.drop.replace(rng=rng)))


def scan_by_hand_in_eval(model, xs):
    cell = model.cell

    def step(carry, x):
        return carry, jnp.tanh(cell.weight @ cell.h + x)

    return jax.lax.scan(step, None, xs)[1], model


def branching():
    return Branching(), jnp.array(1.0)


def cond_by_hand(model, x):
    y, positive, total = jax.lax.cond(
        x > 0,
        lambda x: (x * model.weight, model.positive + 1, model.total),
        lambda x: (x, model.positive, model.total + x),
        x,
    )
    return y, model.replace(positive=positive, total=total)


def cond_by_hand_in_eval(model, x):
    return jax.lax.cond(x > 0, lambda x: x * model.weight, lambda x: x, x), model


CASES = {
    "scan": (scanned, scan_by_hand, scan_by_hand_in_eval),
    "cond": (branching, cond_by_hand, cond_by_hand_in_eval),
}


@reuses_keys
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_the_program_equals_the_hand_written_one(name, mode):
    make, in_train, in_eval = CASES[name]
    model, x = make()
    model = model.train(mode == "train")
    by_hand = in_train if mode == "train" else in_eval

    def by_library(model, x):
        return es.mutable(model)(x)

    assert opcodes(by_library, model, x) == opcodes(by_hand, model, x)
    ours, theirs = jax.jit(by_library)(model, x), jax.jit(by_hand)(model, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jnp.all(a == b)
