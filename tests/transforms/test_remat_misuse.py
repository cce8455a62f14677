"""`es.checkpoint` of what fails, and while a model is initialized."""

import dataclasses
import functools as ft

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


class Cell(es.Module):
    weight: es.Parameter = 0.5
    total: es.State = 0.0

    def __call__(self, x):
        self.total = self.total + x
        return self.weight * x


class Net(es.Module):
    a: Cell = dataclasses.field(default_factory=Cell)
    b: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5, 0.5))
    steps: es.State = 0
    phase: es.State = "cold"


def plain(f):
    return f


# --- Bad input ----------------------------------------------------------------------


WRITES = {
    "shape": (lambda n: setattr(n, "steps", jnp.zeros(2)), ValueError, "`steps`"),
    "dtype": (lambda n: setattr(n, "steps", 0.5), ValueError, "`steps`"),
    "parameter": (lambda n: setattr(n.a, "weight", 1.0), FROZEN, r"Cell\.weight"),
    "no array": (lambda n: setattr(n, "phase", "warm"), ValueError, "Only arrays come"),
    "was none": (lambda n: setattr(n, "phase", 1.0), ValueError, "Only arrays come"),
    "raises": (lambda n: n.a(1.0) / "x", TypeError, "unsupported|type"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_failure_inside_leaves_nothing_half_written(name):
    write, error, fragment = WRITES[name]

    def f(net):
        with pytest.raises(error, match=fragment):
            es.checkpoint(lambda x: (net.b(x), write(net))[0])(0.5)
        assert (net.steps, net.a.total, net.b.total) == (0, 0.0, 0.5)
        return es.checkpoint(lambda x: net.a(x))(0.5)

    _, new = es.mutable(f)(Net())
    assert (new.a.total, new.b.total) == (0.5, 0.5)


def test_a_field_that_has_no_value_yet_has_none_after_a_failure():
    class Counter(es.Module):
        n: es.State = 0

    class Late(es.Module):
        counter: Counter
        late: Counter | None = None

        def __init__(self):
            self.counter = Counter()  # the other field is not even in the pytree

    def f(model):
        def write():
            model.late = Counter()

        with pytest.raises(ValueError, match="this one changed it, first at"):
            es.checkpoint(write)()
        return model.late

    assert es.mutable(f)(Late())[0] is None


def test_a_module_kept_from_inside():
    kept = []
    es.mutable(lambda m: es.checkpoint(lambda m: kept.append(m))(m))(Cell())
    with pytest.raises(FROZEN, match="closed"):
        kept[0](1.0)


def test_a_model_that_is_not_initialized():
    class Scale(es.Module):
        weight: es.Parameter = es.Initializer(jr.normal)

        def __call__(self, x):
            return self.weight * x

    for use in (
        lambda m: es.checkpoint(m)(0.5),
        lambda m: es.checkpoint(lambda x: m(x))(0.5),
        lambda m: es.checkpoint(lambda m: m)(m),
        es.mutable(es.checkpoint(Scale())),
    ):
        with pytest.raises(es.NotInitializedError, match="weight"):
            use(Scale())


def test_what_init_draws_does_not_depend_on_it():
    class Lazy(es.Module):
        weight: es.Parameter | None = None
        calls: es.State = 0

        def __call__(self, x):
            if self.initializing and self.weight is None:
                self.weight = es.Initializer(lambda key: jr.normal(key, (x.size,)))
            self.calls = self.calls + 1
            return self.weight * x

    def forward(m, x, checkpoint):
        g = checkpoint(lambda x: m[0](checkpoint(m[1])(x)))
        return checkpoint(lambda m, x: m(x))(m[2], g(x))

    ours, expected = (
        es.init(
            [Lazy(), Lazy(), Lazy()],
            0,
            jnp.ones(3),
            call=ft.partial(forward, checkpoint=c),
        )
        for c in (es.checkpoint, plain)
    )
    assert eqx.tree_equal(ours, expected)
    _, new = es.mutable(ft.partial(forward, checkpoint=es.checkpoint))(
        ours, jnp.ones(3)
    )
    assert [m.calls for m in new] == [1, 1, 1]
