"""The table of a model: its rows and its sizes."""

from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import zoo
from jaxtyping import Array, Float
from tables import cells

import eqx_state as es


def linear(i: int = 2, o: int = 3) -> eqx.nn.Linear:
    return eqx.nn.Linear(i, o, key=jr.key(0))


def total(arrays: list[Any]) -> str:
    """Elements and bytes, as the table says them, counted another way."""
    count = sum(x.size for x in arrays)
    size = 0
    for x in arrays:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        size += (jr.key_data(x) if is_key else x).nbytes
    assert size < 1_000_000
    return (
        f"{count:,} ({size} B)" if size < 1000 else f"{count:,} ({size / 1e3:.1f} KB)"
    )


# --- What it looks like ---------------------------------------------------------------


class Net(es.Module):
    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    calls: es.State = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.norm(self.linear(x))


PLAIN = """\
┏━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┓
┃ path   ┃ module    ┃ Parameter        ┃ State        ┃ BatchStat    ┃
┡━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━┩
│        │ Net       │                  │ calls: i32[] │              │
│        │           │                  │ 1 (4 B)      │              │
├────────┼───────────┼──────────────────┼──────────────┼──────────────┤
│ linear │ Linear    │ weight: f32[3,2] │              │              │
│        │           │ bias: f32[3]     │              │              │
│        │           │ 9 (36 B)         │              │              │
├────────┼───────────┼──────────────────┼──────────────┼──────────────┤
│ norm   │ BatchNorm │ weight: f32[3]   │              │ mean: f32[3] │
│        │           │ bias: f32[3]     │              │ var: f32[3]  │
│        │           │ 6 (24 B)         │              │ 6 (24 B)     │
├────────┼───────────┼──────────────────┼──────────────┼──────────────┤
│ Total  │           │ 15 (60 B)        │ 1 (4 B)      │ 6 (24 B)     │
└────────┴───────────┴──────────────────┴──────────────┴──────────────┘
Total: 22 (88 B)
Trainable: 15 (60 B)
"""

CALLED = """\
┏━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┓
┃ path   ┃ module             ┃ inputs ┃ outputs ┃ Parameter        ┃ State        ┃ BatchStat    ┃
┡━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━┩
│        │ Net                │ f32[2] │ f32[3]  │                  │ calls: i32[] │              │
│        │                    │        │         │                  │ 1 (4 B)      │              │
├────────┼────────────────────┼────────┼─────────┼──────────────────┼──────────────┼──────────────┤
│ linear │ Linear             │ f32[2] │ f32[3]  │ weight: f32[3,2] │              │              │
│        │                    │        │         │ bias: f32[3]     │              │              │
│        │                    │        │         │ 9 (36 B)         │              │              │
├────────┼────────────────────┼────────┼─────────┼──────────────────┼──────────────┼──────────────┤
│ norm   │ BatchNorm (frozen) │ f32[3] │ f32[3]  │ weight: f32[3]   │              │ mean: f32[3] │
│        │                    │        │         │ bias: f32[3]     │              │ var: f32[3]  │
│        │                    │        │         │ 6 (24 B)         │              │ 6 (24 B)     │
├────────┼────────────────────┼────────┼─────────┼──────────────────┼──────────────┼──────────────┤
│ Total  │                    │        │         │ 15 (60 B)        │ 1 (4 B)      │ 6 (24 B)     │
└────────┴────────────────────┴────────┴─────────┴──────────────────┴──────────────┴──────────────┘
Total: 22 (88 B)
Trainable: 9 (36 B)
"""  # noqa: E501


def test_a_small_model():
    net = Net(linear(), es.nn.BatchNorm(3))
    assert es.tabulate(net) == PLAIN


def test_a_small_model_with_inputs():
    net = Net(linear(), es.nn.BatchNorm(3, axis_name="batch").freeze())
    assert es.tabulate(es.vmap(net, axis_name="batch"), jnp.ones((8, 2))) == CALLED
    assert es.tabulate(net, jnp.ones(2)) == CALLED


def test_nothing_is_cut_or_colored(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    long = {"a" * 300: linear(), "[red]b[/]": linear()}
    table = es.tabulate(long)
    assert "a" * 300 in table
    assert "[red]b[/]" in table
    assert "\x1b" not in table
    assert len({len(line) for line in table.splitlines()[:-2]}) == 1


def test_modes_are_marked():
    dropout = es.nn.Dropout(0.5, key=jr.key(0))
    model = [es.nn.BatchNorm(2).freeze(), dropout, eqx.nn.Dropout(0.5)]
    for tree, marks in (
        (model, ["list\n+ Dropout", "BatchNorm (frozen)", "Dropout"]),
        (
            es.eval(model),
            ["list\n+ Dropout (eval)", "BatchNorm (eval, frozen)", "Dropout (eval)"],
        ),
    ):
        rows = cells(es.tabulate(tree))
        assert [rows[path][0] for path in ("", "[0]", "[1]")] == marks


class Block(eqx.Module):
    net: eqx.nn.Sequential
    act: eqx.nn.Lambda
    pool: eqx.nn.Pool

    def __call__(self, x, *, key=None):
        return self.pool(self.act(self.net(x, key=key))[None])[0]


def block() -> Block:
    def act() -> eqx.nn.Lambda:
        return eqx.nn.Lambda(jnp.tanh)

    nothing = eqx.nn.Sequential([act(), act()])
    net = eqx.nn.Sequential([linear(), act(), eqx.nn.Dropout(0.1), nothing, act()])
    return Block(net, act(), eqx.nn.MaxPool1d(2))


def test_what_holds_nothing_is_named_in_the_row_around_it():
    rows = cells(es.tabulate([block()]))
    assert list(rows) == ["path", "", "[0]", "[0].net", "[0].net.layers[0]", "Total"]
    assert rows["[0]"] == ["Block\n+ Lambda, MaxPool1d", ""]
    assert rows["[0].net"][0] == "Sequential\n+ 2 Lambda, Dropout, Sequential"
    assert rows["[0].net.layers[0]"][0] == "Linear"
    rows = cells(es.tabulate([block()], depth=1))
    assert list(rows) == ["path", "", "[0]", "Total"]
    assert rows["[0]"][0] == "Block\n+ Lambda, MaxPool1d"
    lambdas = eqx.nn.Sequential([eqx.nn.Lambda(jnp.tanh)])
    assert cells(es.tabulate(lambdas))[""] == ["Sequential\n+ Lambda"]


def test_what_changes_a_shape_or_is_called_twice_has_a_row():
    x = jnp.ones(2)
    rows = cells(es.tabulate(block(), x))
    assert list(rows)[2:-1] == ["net", "net.layers[0]", "pool"]
    assert rows["pool"] == ["MaxPool1d", "f32[1,3]", "f32[1,2]", ""]
    assert rows[""][0] == "Block\n+ Lambda"

    class Twice(eqx.Module):
        act: eqx.nn.Lambda
        drop: eqx.nn.Dropout

        def __call__(self, x):
            return self.drop(self.act(self.act(x)), key=jr.key(0))

    twice = Twice(eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(0.1))
    rows = cells(es.tabulate(twice, x))
    assert rows[""][0] == "Twice\n+ Dropout"
    assert rows["act"] == ["Lambda", "f32[2]\n(2 calls)", "f32[2]"]


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


def test_the_names_of_axes_are_shown_where_there_are_any():
    class Block(es.Module):
        up: es.Parameter[Float[Array, "mlp embed"]]
        down: Annotated[eqx.nn.Linear, es.Axes(weight="embed mlp")]
        sizes: es.State[Float[Array, "3 _"]]
        name: es.Parameter | None = None

    block = Block(jnp.zeros((3, 2)), linear(), jnp.zeros((3, 2)))
    rows = cells(es.tabulate([block, eqx.filter_vmap(lambda _: block)(jnp.arange(4))]))
    assert rows["[0]"][1:] == [
        "up: f32[3,2] (mlp embed)\n6 (24 B)",
        "sizes: f32[3,2]\n6 (24 B)",
    ]
    assert rows["[0].down"][1] == "weight: f32[3,2] (embed mlp)\nbias: f32[3]\n9 (36 B)"
    assert rows["[1]"][1] == "up: f32[4,3,2] (_ mlp embed)\n24 (96 B)"
    # A table is for looking at a model, also at one whose annotation is wrong.
    rows = cells(es.tabulate(block.replace(up=jnp.zeros(3))))
    assert rows[""][1] == "up: f32[3]\n3 (12 B)"


def test_large_sizes_are_readable():
    big = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (300, 10**6, 10**10)]
    table = es.tabulate(big)
    assert "Total: 10,001,000,300 (40.0 GB)" in table
    assert "300 (1.2 KB)" in es.tabulate(big[0])
    assert "250 (1.0 KB)" in es.tabulate(jax.ShapeDtypeStruct((250,), jnp.float32))
    assert "1,000,000 (4.0 MB)" in es.tabulate(big[1])
    assert "(4,000.0 TB)" in es.tabulate(jax.ShapeDtypeStruct((10**15,), jnp.float32))


# --- Sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.CASES)
def test_totals_are_those_of_the_parts(name):
    model = zoo.CASES[name].model()
    for depth in (None, 0, 1):
        check_totals(model, es.tabulate(model, depth=depth))


def check_totals(model: Any, table: str) -> None:
    parts = es.parts(model)
    rows = cells(table)
    for header, footer in zip(rows["path"][1:], rows["Total"][1:], strict=True):
        kinds = {
            p.kind for p in parts if getattr(p.kind, "__name__", "no kind") == header
        }
        assert len(kinds) == 1
        assert footer == total([p.value for p in parts if p.kind in kinds])
    assert len(rows["path"]) == 1 + len({p.kind for p in parts})
    assert f"Total: {total([p.value for p in parts])}\n" in table
    trainable = es.parts(es.filter(model, es.trainable))
    assert f"Trainable: {total([p.value for p in trainable])}\n" in table


@pytest.mark.parametrize("name", zoo.CASES)
def test_each_array_is_in_one_row(name):
    model = zoo.CASES[name].model()
    rows = cells(es.tabulate(model))
    listed = []
    for path, row in rows.items():
        for line in (
            "\n".join(row[1:]).splitlines() if path not in ("path", "Total") else ()
        ):
            if ": " in line:
                inner = line.partition(": ")[0]
                dot = "." if path and not inner.startswith("[") else ""
                listed.append(f"{path}{dot}{inner}")
    assert sorted(listed) == sorted(part.name for part in es.parts(model))


def test_depth_folds_rows_into_those_around():
    model = [eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0)), Net(linear(), es.nn.BatchNorm(3))]
    assert list(cells(es.tabulate(model, depth=0))) == ["path", "", "Total"]
    rows = cells(es.tabulate(model, depth=1))
    assert list(rows) == ["path", "", "[0]", "[1]", "Total"]
    assert rows["[0]"][1] == "+ 4 below\n22 (88 B)"
    assert rows["[1]"][3] == "calls: i32[]\n1 (4 B)"
    everything = es.tabulate(model, depth=7)
    assert everything == es.tabulate(model)
    assert "[0].layers[1]" in cells(everything)


def test_a_negative_depth_is_an_error():
    with pytest.raises(
        ValueError, match=r"es\.tabulate\(\.\.\., depth=-1\).*depth=None"
    ):
        es.tabulate(linear(), depth=-1)


@pytest.mark.parametrize(
    ("tree", "rows"),
    [
        ([linear(), {"a": linear()}], ["", "[0]", "[1]['a']"]),
        (eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0)), ["", "layers[0]", "layers[1]"]),
        (es.Optimizer(optax.sgd(0.1)), [""]),
        (jnp.ones(2), [""]),
        (np.ones(2, np.float32), [""]),
        ((), [""]),
        (None, [""]),
        ({"a": jnp.ones(2), "f": jnp.tanh}, [""]),
        (eqx.nn.BatchNorm(2, "batch", mode="batch"), [""]),
    ],
    ids=[
        "containers",
        "equinox",
        "optimizer",
        "array",
        "numpy",
        "empty",
        "none",
        "dict",
        "state index",
    ],
)
def test_any_pytree(tree, rows):
    assert list(cells(es.tabulate(tree)))[1:-1] == rows


def test_an_optimizer_shows_its_moments_by_module():
    net = Net(linear(), es.nn.BatchNorm(3))
    rows = cells(es.tabulate(es.Optimizer(optax.sgd(0.1, momentum=0.9)).init(net)))
    assert rows["path"][1:] == ["OptState"]
    assert rows["opt_state[0].trace.linear"][0] == "Linear"


def test_abstract_models():
    net = Net(linear(), es.nn.BatchNorm(3, axis_name="batch"))
    abstract = eqx.filter_eval_shape(lambda: net)
    assert es.tabulate(abstract) == es.tabulate(net)
    xs = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    assert es.tabulate(es.vmap(abstract), xs) == es.tabulate(
        es.vmap(net), jnp.ones((4, 2))
    )


def test_a_stack_of_layers_has_the_shapes_of_the_stack():
    rows = cells(es.tabulate(zoo.CASES["stack of layers"].model()))
    assert "weight: f32[3,2,2]" in rows["layers.dense"][1]


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


def test_what_is_not_initialized_says_so():
    rows = cells(es.tabulate(Lazy()))
    assert rows["path"][1:] == ["Parameter", "State", "no kind"]
    assert rows[""][1] == "weight: not initialized"
    assert rows[""][3] == "layer: not initialized"
    assert rows["Total"][1:] == ["0 (0 B)", "1 (4 B)", "0 (0 B)"]


def test_with_inputs_a_model_is_shown_as_it_will_be():
    x = jnp.ones(2)
    assert es.tabulate(Lazy(), x) == es.tabulate(Lazy().init(0), x)
    assert cells(es.tabulate(Lazy(), x))["layer"][1:3] == ["f32[2]", "f32[3]"]


def test_a_stateful_layer_of_equinox_is_one_row():
    norm, _ = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")
    assert "Sentinel" not in es.tabulate(norm)
    assert list(cells(es.tabulate(norm))) == ["path", "", "Total"]


def test_without_inputs_a_callable_is_its_model_or_a_tree():
    net = Net(linear(), es.nn.BatchNorm(3))
    assert es.tabulate(es.vmap(net)) == es.tabulate(net.__call__) == es.tabulate(net)
    assert "Vmap" in es.tabulate(es.vmap(lambda x: x))


def test_what_is_frozen_by_its_path_is_marked():
    net = Net(linear(), es.nn.BatchNorm(3))
    for where, frozen in (
        (lambda m: m.linear, {"linear"}),
        (lambda m: m.norm, {"norm"}),
        (lambda m: m, {"", "linear", "norm"}),
        (lambda m: m.linear.bias, set()),  # a part of a row; see the last line
    ):
        rows = cells(es.tabulate(es.freeze(net, where)))
        marked = {path for path in ("", "linear", "norm") if "frozen" in rows[path][0]}
        assert marked == frozen
