"""What branches may not do, and branches while a model is initialized."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import pytest
from branch_cases import Cell, Net

import eqx_state as es


FROZEN = dataclasses.FrozenInstanceError


def by_cond(i, branches, *operands):
    return es.cond(i == 0, branches[0], branches[1], *operands)


CHOICES = {"cond": by_cond, "switch": es.switch}


@pytest.fixture(params=CHOICES)
def choose(request):
    return CHOICES[request.param]


# --- Bad input ----------------------------------------------------------------------


def test_a_branch_that_changes_the_structure_of_state(choose):
    class Keeper(es.Module):
        stats: es.State[dict] = dataclasses.field(
            default_factory=lambda: {"a": jnp.zeros(2)}
        )

    def more(m):
        m.stats = {**m.stats, "b": jnp.ones(2)}

    def in_place(m):
        m.stats["b"] = jnp.ones(2)

    def shape(m):
        m.stats = {"a": jnp.zeros(3)}

    def dtype(m):
        m.stats = {"a": jnp.zeros(2, jnp.int32)}

    def ok(m):
        m.stats = {"a": jnp.ones(2)}

    for write in (more, in_place, shape, dtype):

        def f(m, write=write):
            with pytest.raises(ValueError, match=r"`stats"):
                choose(0, [lambda: write(m), lambda: None])
            with pytest.raises(ValueError, match=r"`stats"):
                choose(0, [lambda: ok(m), lambda: write(m)])
            assert m.stats["a"].tolist() == [0, 0]

        model = Keeper()
        _, new = es.mutable(f)(model)
        assert eqx.tree_equal(new, model)


OUTPUTS = {
    "structure": (lambda: {"a": 1.0}, lambda: {"b": 1.0}, "structure"),
    "number of outputs": (lambda: (1.0,), lambda: (1.0, 2.0), "structure"),
    "shape": (lambda: {"a": jnp.ones(2)}, lambda: {"a": jnp.ones(3)}, r"\['a'\]"),
    "dtype": (lambda: {"a": jnp.ones(2)}, lambda: {"a": 1}, r"\['a'\]"),
    "function": (lambda: (1.0, jnp.sin), lambda: (1.0, jnp.cos), r"`\[1\]`"),
    "string": (lambda: {"a": "x"}, lambda: {"a": "y"}, r"a"),
    "function or none": (lambda: (1.0, jnp.sin), lambda: (1.0, None), r"`\[1\]`"),
    "none or function": (lambda: (1.0, None), lambda: (1.0, jnp.sin), r"`\[1\]`"),
    "array or none": (lambda: (1.0, 1.0), lambda: (1.0, None), r"\[1\]|structure"),
    "array or string": (lambda: (1.0, 1.0), lambda: (1.0, "x"), r"\[1\]|structure"),
    "mode": (lambda: Cell(), lambda: Cell().eval(), "structure"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_branches_whose_outputs_differ(name, choose):
    *branches, text = OUTPUTS[name]
    for i in (0, 1):
        with pytest.raises(TypeError, match=text):
            choose(i, branches)


def test_what_jax_refuses():
    for run, error, text in (
        (lambda: es.cond(None, Cell(), Cell(), 1.0), TypeError, "predicate is None"),
        (lambda: es.cond(jnp.ones(2) > 0, abs, abs, 1.0), TypeError, "scalar"),
        (lambda: es.switch(0, [], 1.0), ValueError, "[Ee]mpty"),
        (lambda: es.switch(0.0, [abs, abs], 1.0), TypeError, "integer"),
    ):
        with pytest.raises(error, match=text):
            run()


def test_an_exception_in_a_branch_leaves_nothing_half_written(choose):
    def f(net):
        def raises(x):
            net.a(x)
            raise KeyError("half-way")

        for branches in ([net.b, raises], [raises, net.b]):
            with pytest.raises(KeyError, match="half-way"):
                choose(0, branches, 1.0)
        assert (net.a.total, net.b.total) == (0.0, 1.0)
        return choose(0, [net.a, net.b], 1.0)

    _, new = es.mutable(f)(Net())
    assert new.a.total == 1.0


def test_a_module_kept_from_a_branch(choose):
    kept = []

    def f(net):
        choose(0, [lambda cell: kept.append(cell), lambda cell: None], net.a)

    es.mutable(f)(Net())
    with pytest.raises(FROZEN, match="closed"):
        kept[0](1.0)


def test_a_model_that_is_not_initialized(choose):
    class Scale(es.Module):
        weight: es.Parameter = es.Initializer(jr.normal)

        def __call__(self, x):
            return self.weight * x

    for use in (
        lambda m: choose(0, [m, m], 1.0),
        lambda m: choose(0, [lambda m: 1.0, lambda m: 2.0], m),
        es.mutable(lambda m: choose(0, [m, m], 1.0)),
    ):
        with pytest.raises(es.NotInitializedError, match="weight"):
            use(Scale())


# --- While a model is initialized ---------------------------------------------------


def test_what_init_draws_does_not_depend_on_the_branch(choose):
    class Lazy(es.Module):
        weight: es.Parameter | None = None
        calls: es.State = 0

        def __call__(self, x):
            if self.initializing and self.weight is None:
                self.weight = es.Initializer(lambda key: jr.normal(key, (x.size,)))
            self.calls = self.calls + 1
            return self.weight * x

    def forward(m, x):
        return choose(0, [m[0], lambda x: choose(1, [m[1], m[2]], x)], x)

    ours = es.init([Lazy(), Lazy(), Lazy()], 0, jnp.ones(3), call=forward)
    expected = es.init(
        [Lazy(), Lazy(), Lazy()], 0, jnp.ones(3), call=lambda m, x: [f(x) for f in m]
    )
    assert eqx.tree_equal(ours, expected)
    as_operands = es.init(
        [Lazy(), Lazy(), Lazy()],
        0,
        jnp.ones(3),
        call=lambda m, x: choose(0, [lambda m: m[0](m[1](x)), lambda m: m[2](x)], m),
    )
    assert eqx.tree_equal(as_operands, expected)


def test_the_place_of_what_differs_between_branches_is_named():
    match = r"`es\.cond` return different values at `\[1\]`.*at run time.*every branch"
    with pytest.raises(TypeError, match=match):
        es.cond(True, lambda x: (x, "a"), lambda x: (x, "b"), 1.0)
    with pytest.raises(TypeError, match=r"`es\.switch`.*at `the output`"):
        es.switch(0, [lambda: "a", lambda: "b"])
