# pyright: strict
"""The layers of a stack have the type of a layer."""

from typing import assert_type

import equinox as eqx
import jax
import jax.random as jr
from jaxtyping import Array

import eqx_state as es


class Block(es.Module):
    w: es.Parameter

    def __call__(self, x: Array) -> Array:
        return self.w * x


def make_linear(key: Array) -> eqx.nn.Linear:
    return eqx.nn.Linear(2, 2, key=key)


class Net(es.Module):
    blocks: es.nn.Stacked[Block]
    linears: es.nn.Stacked[eqx.nn.Linear]


keys = jr.split(jr.key(0), 2)
blocks: es.nn.Stacked[Block] = es.nn.Stacked(
    [Block(keys), Block(keys)], checkpoint=True
)
assert_type(blocks[0], Block)
assert_type(blocks[1:], es.nn.Stacked[Block])
assert_type(list(blocks), list[Block])
assert_type(len(blocks), int)

policy = jax.checkpoint_policies.dots_saveable
linears = es.nn.Stacked.make(make_linear, keys, checkpoint=policy, unroll=2)
assert_type(linears, es.nn.Stacked[eqx.nn.Linear])
assert_type(linears[0].use_bias, bool)

net = Net(blocks, linears)
assert_type(net.blocks[0](keys), Array)
