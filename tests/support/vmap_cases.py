"""Models with a statistic over the lanes of `es.vmap`."""

import dataclasses

import jax.lax as lax

import eqx_state as es


class Norm(es.Module):
    """Writes a statistic that is reduced over the lanes."""

    scale: es.Parameter = 2.0
    mean: es.BatchStat = 0.0

    def __call__(self, x, *, key=None):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * lax.pmean(x, "batch")
        return self.scale * (x - self.mean)

    def apply(self, x, shift=0.0):
        return self(x) + shift


class Net(es.Module):
    a: Norm = dataclasses.field(default_factory=Norm)
    b: Norm = dataclasses.field(default_factory=lambda: Norm(3.0))
    bias: es.Parameter = 1.0

    def __call__(self, xs):
        return es.vmap(lambda x: self.b(self.a(x)) + self.bias, axis_name="batch")(xs)
