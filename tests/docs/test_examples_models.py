"""The examples that train one model, shortened: they run, and assert what they say."""

import jax
import numpy as np
import pytest
from load_scripts import example


@pytest.fixture
def run(tmp_path, capsys):
    """Runs an example; returns its result, and what it has printed."""

    def run(name, **arguments):
        path = tmp_path / f"{name}.png"
        result = example(name).main(path=path, **arguments)
        assert path.read_bytes().startswith(b"\x89PNG")
        return result, capsys.readouterr().out

    return run


def test_linear_regression_finds_the_line_of_least_squares(run):
    model, printed = run("linear_regression", steps=100, tolerance=0.01)
    assert np.allclose((model.w[0, 0], model.b[0]), (1.4, -0.3), atol=0.05)
    assert "50,000 examples" in printed


@jax.numpy_dtype_promotion("standard")  # for `optax.adam`
def test_vae_learns_and_draws(run):
    loss, printed = run("vae", epochs=5, better_by=-60.0)  # pixels alone: 108
    assert f"test images: {loss:.1f} nats" in printed


@jax.numpy_dtype_promotion("standard")  # for `optax.adamw`
def test_transformer_learns_and_reads_with_a_cache_as_without(run):
    (loss, samples), printed = run("transformer", steps=50, better_by=-0.6)
    assert loss < 3.3  # unigrams have 3.37
    assert {sample[:12] for sample in samples} == {"The dataset "}
    assert len(set(samples)) == 3


@jax.numpy_dtype_promotion("standard")  # for `optax.adamw`
def test_characters_learns_with_one_compilation(run):
    (curves, rates), printed = run(
        "characters", steps=100, better_by=-0.2, gain=-1.0, halvings=0
    )
    assert curves["average"][-1] < 3.0
    assert np.allclose(rates, 0.02)
    assert "The object " in printed


@jax.numpy_dtype_promotion("standard")  # for `optax.adam`
def test_rnn_reads_rows_as_they_come(run):
    accuracies, _ = run("rnn", epochs=6, at_least=0.4)
    assert accuracies[-1] > accuracies[0]
