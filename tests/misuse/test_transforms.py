"""Programs that use the transforms of `es`, or stacks of layers, wrongly."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from misuse import fails, Layer, XS

import eqx_state as es


X = jnp.array(3.0)


# --- Lanes and devices ----------------------------------------------------------------


def averaged(net, x):
    net.mean = jnp.mean(x) * jnp.ones(3)
    return x


@pytest.mark.parametrize("transform", [lambda f: f, es.jit], ids=["vmap", "jit"])
@fails(
    ValueError,
    "each lane wrote its own value to `mean`",
    '`self.mean = jax.lax.pmean(mean, "batch")`, or `pmax`, `psum`',
    "axes={es.State: 0}",
)
def test_a_different_statistic_in_each_lane(net, transform):
    es.mutable(transform(es.vmap(averaged, (None, 0))))(net, XS)


@fails(ValueError, '`self.stats = jax.lax.pmean(stats, "batch")`')
def test_a_different_entry_of_a_dict_in_each_lane(net):
    def note(net, x):
        net.stats = {"last": x}

    es.mutable(es.vmap(note, (None, 0)))(net, XS)


class Tally(es.Module):
    n: es.State = 0
    total: es.State = 0.0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def draw(self):
        self.rng, key = jr.split(self.rng)
        return jr.normal(key)


def counts(tally, x):
    tally.n = tally.n + jnp.sum(x > 0)


def adds(tally, x):
    tally.total = tally.total + jnp.sum(x)


def replaces(tally, x):
    tally.total = jnp.sum(x)


def draws(tally, x):
    tally.total = tally.draw()


def draws_beside_data(tally, x):
    tally.total = tally.draw() + jnp.sum(x)


def runs_once(tally, x, calls=[]):  # noqa: B006
    calls.append(x)
    assert len(calls) == 1  # as a program that reads a file may do
    tally.total = tally.total + jnp.sum(x)


SUM = "`self.total = self.total + jax.lax.psum(increment, {})`; in a running average"
MEAN = "`self.total = jax.lax.pmean(total, {})`, or `pmax`, `psum`"
ADVICE = [
    (counts, "`self.n = self.n + jax.lax.psum(increment, {})`; or give"),
    (adds, SUM),
    (replaces, MEAN),
    (draws, "`es.vmap(f, axes={{es.Rng: None}})`; or give every lane"),
    (draws_beside_data, MEAN),
    (runs_once, MEAN),
]


@pytest.mark.parametrize(("f", "advice"), ADVICE)
def test_a_different_state_in_each_lane(f, advice):
    with fails(ValueError, advice.format('"batch"')):
        es.mutable(es.vmap(f, (None, 0)))(Tally(), XS)


@pytest.mark.parametrize(("f", "advice"), ADVICE[:-1])
def test_a_different_state_on_each_device(f, advice):
    mesh = Mesh(jax.devices()[:2], "data")
    run = es.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    advice = "axes={{es.Rng: P()}}`; or give every device" if f is draws else advice
    with fails(ValueError, advice.format('"data"')):
        es.mutable(run)(Tally(), jnp.arange(4.0))


@fails(
    ValueError,
    "the devices wrote different values to `mean`",
    'jax.lax.pmean(mean, "data")',
)
def test_a_different_statistic_on_each_device(net):
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    mesh = Mesh(jax.devices()[:2], "data")
    run = lambda net, xs: es.shard_map(  # noqa: E731
        lambda xs: averaged(net, xs), mesh=mesh, **specs
    )(xs)
    es.mutable(run)(net, jnp.arange(4.0))


@fails(
    ValueError,
    "each lane wrote its own value to `mean`, `var`",
    '`es.nn.BatchNorm(3, axis_name="batch", channel_axis=1)`',
    "If each lane has one example instead of a batch, leave out `channel_axis`",
)
def test_batch_norm_of_batches_with_one_image():
    es.mutable(es.vmap(es.nn.BatchNorm(3)))(jnp.ones((2, 3, 3, 3)))


@fails(TypeError, "returned `i32[]` as its loss", "use a loss without them")
def test_a_loss_that_counts(net):
    es.grad(lambda net: jnp.sum(net.mean > 0))(net)


@fails(TypeError, "keys of rules are filters", "`{es.State: value}`")
def test_a_kind_by_its_name(net):
    es.vmap(net, axes={"State": 0})(XS)


@pytest.mark.parametrize("axis", [None, "other"])
@fails(
    NameError,
    "averages over an axis of that name",
    "es.vmap(model, axis_name='batch')(xs)",
)
def test_batch_norm_without_its_axis(axis):
    norm = es.nn.BatchNorm(3, axis_name="batch")
    es.mutable(es.vmap(norm, axis_name=axis))(XS[None])


@fails(ValueError, "vmap got inconsistent sizes", "size 3: axis 0 of argument args[0]")
def test_arrays_of_different_lengths(net):
    es.mutable(lambda net: es.vmap(lambda x, y: net(x) + y)(XS, XS[:2]))(net)


@fails(
    TypeError,
    "would return a copy of the model for each lane",
    "`ys, model = es.mutable(es.vmap(model))(xs)`",
    "axes={...: 0}",
)
def test_a_call_that_returns_a_model_for_each_lane(net):
    es.vmap(es.mutable(net))


def test_a_call_that_returns_a_model_for_each_lane_may_be_meant():
    ensemble = eqx.filter_vmap(Layer)(jnp.ones(2), jnp.zeros(2, int))
    _, new = es.vmap(es.mutable(ensemble), axes={...: 0})(jnp.ones(2))
    assert new.count.tolist() == [1, 1]
    _, new = es.vmap(es.mutable(lambda m, x: m(x)))(ensemble, jnp.ones(2))
    assert new.count.tolist() == [1, 1]


# --- Loops and branches ---------------------------------------------------------------


@fails(
    ValueError,
    "`layer.count` was written, but its module is no longer in the model",
    "self.cell, ys = es.scan(step, self.cell, xs)",
    "loss, m = es.mutable(loss_fn)(m, xs)",
)
def test_the_result_of_a_scan_is_written_and_not_assigned(net):
    def f(net):
        cell, _ = es.scan(lambda cell, x: (cell, cell(x)), net.layer, XS)
        cell(XS)

    es.mutable(f)(net)


@fails(TypeError, "must return a pair, `(carry, y)`", "returned `f32[]`", "carry, None")
def test_a_body_that_returns_only_the_carry(net):
    es.scan(lambda c, x: net.eval()(x), 0.0, XS)


@fails(TypeError, "must return a pair, `(carry, y)`", "returned `tuple of 3`")
def test_a_body_that_returns_three_values(net):
    es.scan(lambda c, x: (c, x, x), 0.0, XS)


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (
            lambda f: es.scan(f, jnp.zeros(()), jnp.ones((4, 3))),
            "at the root: expected `f32[]`, got `f32[3]`",
        ),
        (
            lambda f: es.scan(lambda m, _: (m.eval(), None), Layer(), None, 2),
            "Switch modes outside the loop",
        ),
        (
            lambda f: es.while_loop(lambda x: True, lambda x: (x, x), XS),
            "expected `f32[3]`, got `(f32[3], f32[3])`",
        ),
        (
            lambda f: es.fori_loop(0, 2, lambda i, x: (x, x), XS),
            "expected `f32[3]`, got `(f32[3], f32[3])`",
        ),
        (
            lambda f: es.nn.Stacked([eqx.nn.Lambda(lambda x: x[None])] * 2)(XS),
            "got `f32[1,3]`",
        ),
    ],
    ids=["swapped", "mode", "while_loop", "fori_loop", "stack"],
)
def test_a_carry_that_changes(loop, says):
    def swapped(x, carry):
        return carry + x.sum(), None

    with fails(TypeError, "a carry of a different structure or shape", says):
        loop(swapped)


@fails(ValueError, "no first axis to scan over", "es.scan(f, init, xs)", "`xs`")
def test_xs_that_is_a_number():
    es.scan(lambda carry, x: (carry + x, None), XS, 0.0)


@fails(ValueError, "`layer.weight`", "es.nn.Stacked(layers)(x)")
def test_one_layer_that_is_not_a_stack(net):
    f = lambda net: es.scan(lambda x, m: (m(x), None), XS, net.layer)[0]  # noqa: E731
    es.mutable(f)(net)


@fails(
    ValueError,
    "The `cond_fun` of `es.while_loop` wrote",
    "`layer.count`",
    "Write in `body_fun`",
)
def test_a_write_in_cond_fun(net):
    f = lambda net: es.while_loop(lambda x: net(x) < 9, lambda x: 2 * x, X)  # noqa: E731
    es.mutable(f)(net)


class Machine(es.Module):
    phase: es.State = "cold"

    def __call__(self, x):
        self.phase = "warm"
        return x


@pytest.mark.parametrize(
    "run",
    [
        lambda f, x: es.jit(f)(x),
        lambda f, x: es.checkpoint(f)(x),
        lambda f, x: es.vmap(lambda _: f(x), out_axes=None)(XS),
        lambda f, x: es.cond(x < 1, f, lambda x: x, x),
        lambda f, x: es.switch(0, [f, lambda x: x], x),
        lambda f, x: es.scan(lambda c, _: (f(c), None), x, XS)[0],
        lambda f, x: es.fori_loop(0, 2, lambda i, c: f(c), x),
        lambda f, x: es.while_loop(lambda c: c < 1, lambda c: f(c) + 1, x),
        lambda f, x: es.scan(lambda c, _: (c, c(x)), f, XS)[1],
    ],
    ids="jit checkpoint vmap cond switch scan fori_loop while_loop carry".split(),
)
@fails(
    ValueError, "Only arrays can leave a transform", "`phase`", "phase: es.State = 0"
)
def test_a_value_that_is_not_an_array_is_written_in_a_transform(run):
    assert es.mutable(Machine())(X)[1].phase == "warm"
    es.mutable(run)(Machine(), X)


@pytest.mark.parametrize(
    ("branches", "texts"),
    [
        (
            (lambda: (XS, "a"), lambda: (XS, "b")),
            ("return different values at `[1]`", "which are not arrays"),
        ),
        (
            (lambda: XS, lambda: (XS, XS)),
            ("pytree structure", "expected `'array'`, got `('array', 'array')`"),
        ),
        (
            (lambda: Layer(), lambda: Layer().eval()),
            ("pytree structure", "first at `training`: expected `True`, got `False`"),
        ),
    ],
    ids=["values", "structure", "mode"],
)
def test_branches_that_return_different_things(branches, texts):
    with fails(TypeError, *texts):
        es.cond(X > 0, *branches)


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda: es.cond(True, jnp.sin(XS), jnp.cos(XS)), ("`es.cond`", "`f32[3]`")),
        (lambda: es.switch(0, [jnp.sin, jnp.sum(XS)], XS), ("`es.switch`", "`f32[]`")),
    ],
    ids=["cond", "switch"],
)
def test_branches_that_are_called(call, texts):
    says = "takes functions, and calls one of them"
    with fails(TypeError, says, "`es.cond(p, f, g, x)`", *texts):
        call()


# --- jit ------------------------------------------------------------------------------


@fails(
    es.TraceError,
    "returned a function or an object that contains `layer`",
    "later calls would return the module of the first call",
)
def test_a_function_that_holds_a_module_of_the_scope(net):
    es.mutable(lambda n, x: es.jit(lambda m: lambda: m(x))(n.layer)())(net, XS)


@pytest.mark.parametrize(
    "x", [None, 3, property(lambda self: 1)], ids=["None", "3", "property"]
)
@fails(TypeError, "which cannot be called", "@property")
def test_what_cannot_be_called(x):
    es.jit(x)


# --- Stacks of layers -----------------------------------------------------------------


def stack(n=3):
    return es.nn.Stacked([Layer(float(i + 1)) for i in range(n)])


def linear(dtype):
    return eqx.nn.Linear(2, 2, key=jr.key(0), dtype=dtype)


@pytest.mark.parametrize(
    ("a", "b", "texts"),
    [
        (
            Layer(),
            Layer(jnp.ones(2)),
            ["`weight`", "Put layers that must differ into a"],
        ),
        (
            linear("f4"),
            linear("f2"),
            ["`weight`", "Put layers that must differ into a"],
        ),
        (
            Layer(),
            Layer().eval(),
            ["first at `training`", "the values of their arrays"],
        ),
        (
            Layer(),
            Layer().freeze(),
            ["first at `frozen`", "the values of their arrays"],
        ),
    ],
    ids=["shape", "dtype", "eval", "frozen"],
)
def test_layers_that_differ(a, b, texts):
    with fails(ValueError, "layers 0 and 1 differ", *texts):
        es.nn.Stacked([a, b])


@fails(TypeError, "was given the class `Layer`", "make(lambda key: Layer(..., key=key)")
def test_a_stack_of_classes():
    es.nn.Stacked([Layer, Layer])


@fails(TypeError, "takes one key for each layer")
def test_a_stack_with_one_key():
    es.nn.Stacked.make(lambda key: Layer(jr.normal(key)), jr.key(0))


@fails(
    ValueError,
    "has 3 layers and an array of shape (2, 3)",
    "`es.vmap(model, axes={...: 0})`",
)
def test_an_ensemble_of_stacks_without_vmap():
    ensemble = jax.tree.map(lambda x: jnp.stack([x, x]), stack())
    run = es.mutable(es.vmap(ensemble, in_axes=None, axes={...: 0}))
    assert run(XS)[1].layers.count.tolist() == [[1] * 3] * 2
    es.mutable(ensemble)(XS)


class LoRA(es.Module):
    base: Layer
    down: es.Parameter

    def __call__(self, x):
        return self.base(x) + self.down * x


def adapted(module, name=""):
    return LoRA(module, jnp.zeros(1)) if isinstance(module, Layer) else module


@pytest.mark.parametrize(
    "wrong",
    [
        lambda stack: es.map_modules(adapted, stack),
        lambda stack: stack.replace(layers=adapted(stack.layers))(XS),
    ],
    ids=["map_modules", "replace"],
)
@fails(
    ValueError,
    "If a function added this array, such as one that adds an adapter",
    "has 3 layers and an array of shape (1,), `down`",
    "es.nn.Stacked([add(b, key) for b, key in zip(stack, keys)])",
)
def test_adapters_in_a_stack(wrong):
    right = es.nn.Stacked([adapted(layer) for layer in stack()])
    assert (es.mutable(right)(XS)[0] == 6 * XS).all()
    wrong(stack())
