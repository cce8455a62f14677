"""The examples, shortened: that they run, and assert what they say."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from load_scripts import example, EXAMPLES


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


@pytest.fixture
def digits():
    return example("digits")


@jax.numpy_dtype_promotion("standard")  # for `optax.adamw`
def test_digits_learns_from_two_seeds_with_one_compilation(digits, tmp_path, capsys):
    path = tmp_path / "digits.png"
    accuracies = digits.main(seeds=(0, 1), epochs=3, path=path, at_least=0.9)
    assert list(accuracies) == [0, 1]
    assert path.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for kind in ("Buffer", "Parameter", "BatchStat", "Rng", "OptState"):
        assert kind in printed


def test_sharded_learns_in_two_processes(capsys):
    assert example("sharded").main(epochs=3, at_least=0.9) >= 0.9
    assert "bytes on each device" in capsys.readouterr().out
