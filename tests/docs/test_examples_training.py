"""The examples about training, shortened: that they run, and assert what they say."""

import jax
import pytest
from load_scripts import example


@pytest.fixture(autouse=True)
def _as_users_run_them():
    """JAX's own defaults: optax promotes, and so do the examples."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def picture(tmp_path):
    """A path at which there is a picture in the end."""
    path = tmp_path / "picture.png"
    yield path
    assert path.read_bytes().startswith(b"\x89PNG")


def test_gan_comes_closer_to_the_digits(picture, capsys):
    # The estimates of the norms follow the weights, which still change fast.
    bounds = {"least_share": 0.0, "closer": 1.5, "norm": 1.2}
    example("gan").main(steps=150, path=picture, **bounds)
    assert "spectral norms" in capsys.readouterr().out


def test_ensemble_is_better_than_its_members(picture):
    assert example("ensemble").main(path=picture, tolerance=0.1) <= 0.1


def test_fine_tuning_leaves_the_frozen_layer_alone(picture, capsys):
    example("fine_tuning").main(steps=40, path=picture, at_least=0.8, better_by=0.0)
    assert "groups: 16,901 trained" in capsys.readouterr().out


def test_eight_devices_compute_what_one_does(picture):
    # In full: a short training hides that more steps are under way than devices allow.
    assert example("data_parallel").main(path=picture) >= 0.96


def test_gpt_learns_the_same_on_eight_devices_as_on_one(picture, capsys):
    loss, samples = example("gpt").main(steps=30, both=10, path=picture, better_by=-3)
    assert loss < 4
    assert all(sample.startswith("The ") for sample in samples)
    printed = capsys.readouterr().out
    for text in ("(_ mlp width)", "eight devices", "largest difference", "▁"):
        assert text in printed


def test_ported_programs_compute_what_the_old_ones_did(picture):
    accuracies = example("porting").main(steps=60, path=picture, at_least=0.7)
    assert list(accuracies) == [
        "eqx.nn.State",
        "es.nn.Stateful",
        "es.Module",
        "from Treex",
    ]
