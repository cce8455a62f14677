"""The examples, shortened: each runs, asserts its result, and draws and prints.

`nox -s examples` runs them in full. `.ci/run` does that for `data_parallel` and
`sharded`, which are not here.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from load_scripts import example, EXAMPLES


# What shortens `main`, or a constant of the module, and what is printed.
SHORTENED = {
    "linear_regression": ({"steps": 100, "tolerance": 0.05}, {}, ["50,000 examples"]),
    "digits": (
        {"seeds": (0, 1), "epochs": 2, "at_least": 0.5},
        {},
        ["Buffer", "Parameter", "BatchStat", "Rng", "OptState"],
    ),
    "vae": ({"epochs": 1, "better_by": -600.0}, {}, ["test images:"]),
    "transformer": (
        {"steps": 10, "better_by": -2.0},
        {"EVERY": 5, "CONTEXT": 32, "BATCH_SIZE": 8},
        ["The dataset "],
    ),
    "characters": (
        {"steps": 20, "better_by": -2.0, "gain": -2.0, "halvings": 0},
        {"EVERY": 10, "LENGTH": 16},
        ["The object "],
    ),
    "rnn": ({"epochs": 2, "at_least": 0.0}, {"WIDTH": 32}, []),
    "gan": (
        {"steps": 30, "least_share": 0.0, "closer": 0.0, "norm": 9.0},
        {},
        ["spectral norms"],
    ),
    "ensemble": ({"steps": 60, "tolerance": 1.0}, {"FOLDS": 2, "MEMBERS": 5}, []),
    "fine_tuning": (
        {"steps": 40, "at_least": 0.5, "better_by": -1.0},
        {},
        ["groups: 16,901 trained"],
    ),
    "gpt": (
        {"steps": 4, "both": 2, "better_by": -9.0},
        {"DEPTH": 2, "CONTEXT": 16, "BATCH_SIZE": 8},
        ["eight devices", "largest difference", "▁"],
    ),
    "porting": (
        {"steps": 10, "at_least": 0.1},
        {},
        ["eqx.nn.State", "es.nn.Stateful", "es.Module", "from Treex"],
    ),
}


@pytest.mark.parametrize("name", SHORTENED)
def test_an_example_asserts_its_result_and_draws_it(name, tmp_path, capsys):
    arguments, constants, printed = SHORTENED[name]
    path = tmp_path / "picture.png"
    # JAX's own defaults: optax promotes, and so do the examples.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        module = example(name)
        vars(module).update(constants)
        module.main(path=path, **arguments)
    assert path.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert [text for text in printed if text not in out] == []


@jax.numpy_dtype_promotion("standard")  # for `optax.adam`
def test_quickstart_is_forty_lines_that_learn():
    quickstart = example("quickstart")  # asserts its result
    means = jnp.mean(quickstart.xs, axis=0)
    assert jnp.allclose(quickstart.model[0].mean, means, atol=1e-4)
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 40


def test_an_example_runs_from_another_folder(tmp_path):
    command = [sys.executable, EXAMPLES / "linear_regression.py", "line.png"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
