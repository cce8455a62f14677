"""The example, shortened: that it runs, and asserts what it says."""

import importlib.util
from pathlib import Path

import jax
import pytest


PATH = Path(__file__).parents[1] / "examples" / "digits.py"


@pytest.fixture
def digits():
    spec = importlib.util.spec_from_file_location("digits", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@jax.numpy_dtype_promotion("standard")  # for `optax.adamw`
def test_digits_learns_from_two_seeds_with_one_compilation(digits, tmp_path, capsys):
    path = tmp_path / "digits.png"
    accuracies = digits.main(seeds=(0, 1), epochs=3, path=path, at_least=0.9)
    assert list(accuracies) == [0, 1]
    assert path.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for kind in ("Buffer", "Parameter", "BatchStat", "Rng", "OptState"):
        assert kind in printed
