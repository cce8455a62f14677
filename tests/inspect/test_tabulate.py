"""`es.tabulate`: rows, sizes, and the inputs and outputs of calls."""

import io
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import zoo
from helpers import reuses_keys, untouched
from tables import cells

import eqx_state as es


def linear(i: int = 2, o: int = 3) -> eqx.nn.Linear:
    return eqx.nn.Linear(i, o, key=jr.key(0))


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")


# --- Layout ---------------------------------------------------------------------------


class Net(es.Module):
    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.norm(self.linear(x))


CALLED = """\
path    module              inputs  outputs  Parameter         State         BatchStat
──────────────────────────────────────────────────────────────────────────────────────────
        Net                 f32[2]  f32[3]                     calls: i32[]
                                                               1 (4 B)
──────────────────────────────────────────────────────────────────────────────────────────
linear  Linear              f32[2]  f32[3]   weight: f32[3,2]
                                             bias: f32[3]
                                             9 (36 B)
──────────────────────────────────────────────────────────────────────────────────────────
norm    BatchNorm (frozen)  f32[3]  f32[3]   weight: f32[3]                  mean: f32[3]
                                             bias: f32[3]                    var: f32[3]
                                             6 (24 B)                        6 (24 B)
──────────────────────────────────────────────────────────────────────────────────────────
Total                                        15 (60 B)         1 (4 B)       6 (24 B)
Total: 22 (88 B)
Trainable: 9 (36 B)
"""  # noqa: E501


def test_a_small_model():
    norm = es.nn.BatchNorm(3, axis_name="batch", debias=False)
    net = Net(linear(), norm.freeze())
    assert es.tabulate(es.vmap(net, axis_name="batch"), jnp.ones((8, 2))) == CALLED
    assert es.tabulate(net, jnp.ones(2)) == CALLED
    plain, called = cells(es.tabulate(net)), cells(CALLED)
    assert plain == {path: row[:1] + row[3:] for path, row in called.items()}
    assert es.tabulate(es.vmap(net)) == es.tabulate(net.__call__) == es.tabulate(net)
    assert "Vmap" in es.tabulate(es.vmap(lambda x: x))


def test_the_row_of_the_model_has_the_call_of_a_method():
    class Encoder(es.Module):
        linear: eqx.nn.Linear

        def encode(self, x):
            return self.linear(x)

    rows = cells(es.tabulate(Encoder(linear()).encode, jnp.ones(2)))
    assert rows[""][:3] == ["Encoder", "f32[2]", "f32[3]"]


def test_nothing_is_cut_or_colored(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    long = {"a" * 300: linear(), "[red]b[/]": linear()}
    table = es.tabulate(long)
    assert "a" * 300 in table
    assert "[red]b[/]" in table
    assert "\x1b" not in table

    for width in (20, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = es.tabulate(long).splitlines()[:-2]
        paths = "".join(line.split(" ")[0] for line in lines if line[0] != "─")
        assert "a" * 300 in paths
        assert "[red]b[/]" in paths
        assert max(map(len, lines)) <= width


def test_the_lines_do_not_depend_on_the_encoding_of_the_terminal(monkeypatch):
    text = es.tabulate(eqx.nn.Linear(2, 2, key=jr.key(0)))
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert es.tabulate(eqx.nn.Linear(2, 2, key=jr.key(0))) == text


def test_modes_are_marked():
    dropout = es.nn.Dropout(0.5, key=jr.key(0))
    model = [es.nn.BatchNorm(2).freeze(), dropout, eqx.nn.Dropout(0.5)]
    rows = cells(es.tabulate(model))
    assert list(rows)[1:-1] == ["", "[0]", "[1]", "[2]"]
    marks = ["list", "BatchNorm (frozen)", "Dropout", "Dropout"]
    assert [row[0] for row in rows.values()][1:-1] == marks
    marks = ["list", "BatchNorm (eval, frozen)", "Dropout (eval)", "Dropout (eval)"]
    rows = cells(es.tabulate(es.eval(model)))
    assert [row[0] for row in rows.values()][1:-1] == marks


def test_each_kind_has_a_column():
    class Cache(es.State):
        pass

    class Model(es.Module):
        cache: Cache
        steps: Any
        keys: list[es.Rng]
        w: es.Parameter

    model = Model(jnp.ones(2), jnp.arange(3), [jr.key(0), jr.PRNGKey(0)], jnp.ones(()))
    rows = cells(es.tabulate(model))
    assert rows["path"] == ["module", "Parameter", "Cache", "Rng", "no kind"]
    assert rows[""] == [
        "Model",
        "w: f32[]\n1 (4 B)",
        "cache: f32[2]\n2 (8 B)",
        "keys[0]: key<fry>[]\nkeys[1]: u32[2]\n3 (16 B)",
        "steps: i32[3]\n3 (12 B)",
    ]
    assert rows["Total"][1:] == ["1 (4 B)", "2 (8 B)", "3 (16 B)", "3 (12 B)"]


def test_large_sizes_are_readable():
    big = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (300, 10**6, 10**10)]
    table = es.tabulate(big)
    assert "Total: 10,001,000,300 (40.0 GB)" in table
    assert "300 (1.2 KB)" in es.tabulate(big[0])
    assert "250 (1.0 KB)" in es.tabulate(jax.ShapeDtypeStruct((250,), jnp.float32))
    assert "1,000,000 (4.0 MB)" in es.tabulate(big[1])
    assert "(4,000.0 TB)" in es.tabulate(jax.ShapeDtypeStruct((10**15,), jnp.float32))


# --- A terminal that is too narrow ---------------------------------------------------


class Center(es.Module):
    gain: es.Parameter
    mean: es.BatchStat
    steps: es.State = 0

    def __call__(self, x):
        self.steps = self.steps + 1
        return self.gain * (x - self.mean)


class Tour(es.Module):
    hidden: eqx.nn.Linear
    center: Center
    dropout: es.nn.Dropout
    head: eqx.nn.Linear


TOUR = """\
path     module   Parameter        BatchStat      State         Rng
────────────────────────────────────────────────────────────────────────────────
         Tour
────────────────────────────────────────────────────────────────────────────────
hidden   Linear   weight:
                  f32[16,4]
                  bias: f32[16]
                  80 (320 B)
────────────────────────────────────────────────────────────────────────────────
center   Center   gain: f32[16]    mean: f32[16]  steps: i32[]
                  16 (64 B)        16 (64 B)      1 (4 B)
────────────────────────────────────────────────────────────────────────────────
dropout  Dropout                                                rng: key<fry>[]
                                                                1 (8 B)
────────────────────────────────────────────────────────────────────────────────
head     Linear   weight:
                  f32[1,16]
                  bias: f32[1]
                  17 (68 B)
────────────────────────────────────────────────────────────────────────────────
Total             113 (452 B)      16 (64 B)      1 (4 B)       1 (8 B)
Total: 131 (528 B)
Trainable: 113 (452 B)
"""


def test_a_table_that_does_not_fit_has_broken_lines(monkeypatch):
    center = Center(jnp.ones(16), jnp.zeros(16))
    dropout = es.nn.Dropout(0.1, key=jr.key(0))
    tour = Tour(linear(4, 16), center, dropout, linear(16, 1))
    wide = es.tabulate(tour)
    width = max(map(len, wide.splitlines()))
    monkeypatch.setenv("COLUMNS", str(width))
    assert es.tabulate(tour) == wide
    monkeypatch.setenv("COLUMNS", "80")
    assert es.tabulate(tour) == TOUR
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.__stdout__", None)  # no terminal
    assert es.tabulate(tour) == TOUR


# --- Sizes ----------------------------------------------------------------------------


def test_depth_folds_rows_into_those_around():
    model = [eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0)), Net(linear(), es.nn.BatchNorm(3))]
    assert list(cells(es.tabulate(model, depth=0))) == ["path", "", "Total"]
    rows = cells(es.tabulate(model, depth=1))
    assert list(rows) == ["path", "", "[0]", "[1]", "Total"]
    assert rows["[0]"][1] == "22 (88 B)"
    assert rows["[1]"][3] == "calls: i32[]\n1 (4 B)"
    everything = es.tabulate(model, depth=7)
    assert everything == es.tabulate(model)
    assert "[0].layers[1]" in cells(everything)


TREES = [
    ([linear(), {"a": linear()}], ["", "[0]", "[1]['a']"]),
    (eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0)), ["", "layers[0]", "layers[1]"]),
    (es.Optimizer(optax.sgd(0.1)), [""]),
    (jnp.ones(2), [""]),
    (None, [""]),
    (eqx.nn.BatchNorm(2, "batch", mode="batch"), [""]),
]


@pytest.mark.parametrize(("tree", "rows"), TREES, ids=range(len(TREES)))
def test_any_pytree(tree, rows):
    table = es.tabulate(tree)
    assert list(cells(table))[1:-1] == rows
    assert "Sentinel" not in table  # an object in Equinox's `StateIndex`


def test_abstract_models():
    net = Net(linear(), es.nn.BatchNorm(3, axis_name="batch"))
    abstract = eqx.filter_eval_shape(lambda: net)
    assert es.tabulate(abstract) == es.tabulate(net)
    xs = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    assert es.tabulate(es.vmap(abstract), xs) == es.tabulate(
        es.vmap(net), jnp.ones((4, 2))
    )


def test_shared_nodes_are_counted_once():
    rows = cells(es.tabulate(zoo.CASES["tied weights"].model()))
    assert "weight: f32[2,2]" in rows["shared.pytree[0]"][1]
    assert "weight" not in rows["shared.pytree[1]"][1]


# --- Before `init` --------------------------------------------------------------------


class Lazy(es.Module):
    weight: es.Parameter
    count: es.State
    layer: eqx.nn.Linear

    def __init__(self):
        self.weight = es.Initializer(lambda key: jr.normal(key, (2,)))
        self.count = 0
        self.layer = es.lazy(eqx.nn.Linear, 2, 3)

    def __call__(self, x):
        return self.layer(self.weight * x)


def test_uninitialized_fields_are_shown_as_such():
    rows = cells(es.tabulate(Lazy()))
    assert rows["path"][1:] == ["Parameter", "State", "no kind"]
    assert rows[""][1] == "weight: not initialized"
    assert rows[""][3] == "layer: not initialized"
    assert rows["Total"][1:] == ["0 (0 B)", "1 (4 B)", "0 (0 B)"]


def test_with_inputs_a_model_is_shown_as_it_will_be():
    x = jnp.ones(2)
    assert es.tabulate(Lazy(), x) == es.tabulate(Lazy().init(0), x)
    assert cells(es.tabulate(Lazy(), x))["layer"][1:3] == ["f32[2]", "f32[3]"]


def test_frozen_rows_are_marked():
    net = Net(linear(), es.nn.BatchNorm(3))
    for where, frozen in (
        (lambda m: m.linear, {"linear"}),
        (lambda m: m.norm, {"norm"}),
        (lambda m: m, {"", "linear", "norm"}),
        (lambda m: m.linear.bias, set()),  # a part of a row is not marked
    ):
        rows = cells(es.tabulate(es.freeze(net, where)))
        marked = {path for path in ("", "linear", "norm") if "frozen" in rows[path][0]}
        assert marked == frozen


# --- Calls ----------------------------------------------------------------------------


def calls(tree: Any, *inputs: Any) -> dict[str, tuple[str, str]]:
    rows = cells(es.tabulate(tree, *inputs))
    return {path: tuple(row[1:3]) for path, row in rows.items()}


TRANSFORMS = {
    "es.vmap": lambda layer, xs: es.vmap(layer)(xs),
    "eqx.filter_jit": lambda layer, xs: eqx.filter_jit(layer)(xs[0]),
    "jax.lax.scan": lambda layer, xs: jax.lax.scan(lambda c, x: (c, layer(x)), 0, xs),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_calls_are_recorded_in_a_transform(transform):
    class Model(es.Module):
        layers: list[Any]

        def __call__(self, xs):
            for layer in self.layers:
                TRANSFORMS[transform](layer, xs)

    dense = zoo.Dense(key=jr.key(0))
    found = calls(Model([linear(2, 2), linear(2, 2), dense, dense]), jnp.ones((4, 2)))
    assert found[""] == ("f32[4,2]", "None")
    for i in range(4):
        inputs, output = found[f"layers[{i}]"]
        assert inputs.splitlines()[0] == "f32[2]"
        assert output == "f32[2]"


def test_the_first_call_is_shown_and_a_module_that_is_not_called_has_no_shapes():
    class Twice(es.Module):
        layer: Any
        unused: Any

        def __call__(self, x):
            return self.layer(self.layer(x)[None, 0] * 1.0)

    double = eqx.nn.Lambda(lambda x: jnp.concatenate([x, x]))
    found = calls(Twice(double, linear()), jnp.ones(2))
    assert found["layer"] == ("f32[2]", "f32[4]")
    assert found[""] == ("f32[2]", "f32[2]")
    assert found["unused"] == ("", "")


def test_nested_inputs_and_outputs_are_readable():
    class Model(es.Module):
        inner: Any

        def __call__(self, batch, flag, layer):
            return self.inner(batch["x"], scale=2.0, key=None), flag

    class Inner(eqx.Module):
        def __call__(self, x, scale, key):
            return {"y": x, "n": x.astype(int)}

    inputs = {"x": np.ones((2, 3), np.float32), "k": jr.key(0)}
    found = calls(Model(Inner()), inputs, "mean", linear())
    assert found[""] == (
        "{'k': key<fry>[], 'x': f32[2,3]}\n'mean'\nLinear(...)",
        "({'n': i32[2,3], 'y': f32[2,3]}, 'mean')",
    )
    assert found["inner"][0] == "f32[2,3]\nscale=2.0"
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "b", mode="batch")
    found = calls(eqx.nn.Sequential([linear(), norm]), jnp.ones(2), state)
    assert found["layers[1]"] == ("f32[3]\nstate=State(...)", "(f32[3], State(...))")


def test_layers_of_one_jitted_function_are_all_recorded_each_time():
    class Model(es.Module):
        layers: list[Any]

        def __call__(self, x):
            return run(self.layers[1], run(self.layers[0], x))

    @eqx.filter_jit
    def run(layer, x):
        return layer(x)

    model = Model([linear(2, 2), linear(2, 2)])
    for _ in range(2):
        assert calls(model, jnp.ones(2))["layers[1]"] == ("f32[2]", "f32[2]")


def test_nothing_is_computed():
    ran = []

    class Model(es.Module):
        layer: Any
        constant: Any

        def __call__(self, x):
            jax.debug.callback(lambda: ran.append(1))
            shape = jax.ShapeDtypeStruct((3,), jnp.float32)
            y = jax.pure_callback(lambda _: ran.append(2), shape, jnp.ones(3))
            return self.layer(x) + y * jnp.asarray(self.constant)

    model = Model(linear(), np.ones(3, np.float32))
    assert calls(model, np.ones(2, np.float32))["layer"] == ("f32[2]", "f32[3]")
    jax.effects_barrier()
    assert ran == []


@reuses_keys
def test_compiled_functions_stay_compiled():
    model = zoo.CASES["average and keys"].model()
    traces = []

    @eqx.filter_jit
    def step(model, x):
        traces.append(1)
        return es.mutable(model)(x)

    step(model, jnp.ones(2))
    with untouched(model):
        es.tabulate(model, jnp.ones(2))
    step(model, jnp.ones(2))
    assert traces == [1]


def test_an_error_of_the_model_is_raised_unchanged():
    class Model(es.Module):
        layer: Any

        def __call__(self, x):
            raise RuntimeError("mine")

    model = Model(linear())
    with untouched(model), pytest.raises(RuntimeError, match="^mine(\n|$)"):
        es.tabulate(model, jnp.ones(2))
    with pytest.raises(TypeError, match="dot_general requires contracting"):
        es.tabulate(linear(), jnp.ones(5))


def test_inputs_are_for_a_model_that_can_be_called():
    def forward(x, layer=linear()):  # noqa: B008
        return layer(x)

    for what in ([linear()], forward):
        with pytest.raises(TypeError, match=r"inputs, but `(list|forward)` is not a"):
            es.tabulate(what, jnp.ones(2))


# --- Costs ----------------------------------------------------------------------------


class Centered(es.Module):
    layers: list[eqx.nn.Linear]
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        for layer in self.layers:
            x = layer(x)
        return x - jax.lax.pmean(x, "batch")


def test_costs_are_those_of_xla_for_the_call_in_each_row(monkeypatch):
    compiled = []
    compile = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self, *args: compiled.append(1) or compile(self, *args),
    )
    one = linear(64, 64)
    model = Centered([one, one, linear(64, 32)])
    run = es.vmap(model, axis_name="batch")
    rows = cells(es.tabulate(run, jnp.ones((8, 64)), cost=True))
    i = rows["path"].index("FLOPs")
    flops = {path: row[i] for path, row in rows.items()}
    assert flops["layers[2]"] == f"{2 * 64 * 32 + 32:,}"
    assert flops["layers[0]"] == flops["layers[1]"] == f"{2 * 64 * 64 + 64:,}"
    assert flops[""] == "-"  # it needs the axis of the batch
    whole = 8 * (2 * 8256 + 4128)
    assert whole <= int(flops["Total"].replace(",", "")) <= 1.02 * whole
    size, unit = rows["layers[2]"][i + 1].split()
    assert unit == "KB"
    # The table rounds to a tenth.
    assert float(size) >= 4 * (64 * 32 + 32 + 64 + 32) / 1000 - 0.05
    assert len(compiled) == 3  # equal layers are compiled once
    # Arrays are listed in the row of their own module, and the shares sum to 100%.
    shares = [row[i + 2].rpartition(", ")[2] for row in rows.values()]
    assert shares[1:-1] == ["", "40.0%", "40.0%", "20.0%"]


def test_costs_without_a_call_are_an_error():
    with pytest.raises(TypeError, match=r"needs a call: `es\.tabulate\(model, x, cost"):
        es.tabulate(linear(), cost=True)
