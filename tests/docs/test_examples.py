"""The examples, shortened: that they run, and assert what they say."""

import jax
import pytest
from run_examples import example


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
