"""The examples, shortened: each runs, asserts its result, and draws and prints.

`nox -s examples` runs these tests, and then `data_parallel` and `sharded` in full.
"""

import json
import shutil
import subprocess
import sys
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from audited import audited
from load_scripts import example, EXAMPLES

import eqx_state as es


# Arguments of `main` and constants that shorten the run, and texts that it prints.
SHORTENED = {
    "linear_regression": ({"steps": 100, "tolerance": 0.05}, {}, ["50,000 examples"]),
    "digits": (
        {"seeds": (0, 1), "epochs": 1, "at_least": 0.0},
        {"BATCH_SIZE": 192},
        ["Buffer", "Parameter", "BatchStat", "Rng"],
    ),
    "vae": ({"epochs": 1, "better_by": -600.0}, {}, ["test images:"]),
    "transformer": (
        {"steps": 10, "better_by": -2.0},
        {"EVERY": 5, "CONTEXT": 24, "BATCH_SIZE": 8, "WIDTH": 32},
        ["The dataset "],
    ),
    "characters": (
        {"steps": 20, "better_by": -2.0, "gain": -2.0, "halvings": 0},
        {"EVERY": 10, "LENGTH": 16},
        ["The object "],
    ),
    "rnn": ({"epochs": 2, "at_least": 0.0}, {"WIDTH": 32}, []),
    "gan": (
        {"steps": 10, "least_share": 0.0, "closer": 0.0, "norm": 99.0},
        {"CRITIC_STEPS": 2, "WIDTH": 64},
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


def any_traces(**_):
    return lambda f: f


@pytest.mark.parametrize("name", SHORTENED)
def test_an_example_asserts_its_result_and_draws_it(name, tmp_path, capsys):
    arguments, constants, printed = SHORTENED[name]
    path = tmp_path / "picture.png"
    # The defaults of JAX, because optax and the examples promote.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # The audit is one more trace.
        with mock.patch.object(eqx.debug, "assert_max_traces", any_traces):
            module = example(name)
        vars(module).update(constants)
        with audited(set()) as findings:
            module.main(path=path, **arguments)
    assert findings == []
    assert path.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert [text for text in printed if text not in out] == []


@jax.numpy_dtype_promotion("standard")  # for `optax.adam`
def test_quickstart_is_about_forty_lines_that_learn(capsys):
    with audited(set()) as findings:
        quickstart = example("quickstart")  # the script asserts its result
    assert findings == []
    assert "% of the variance" in capsys.readouterr().out
    means = jnp.mean(quickstart.xs, axis=0)
    assert jnp.allclose(quickstart.model[0].mean, means, atol=1e-4)
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 42


def stop_at(call, function):
    """Wrap `function` so that the `call`-th call raises an error."""

    def stopping(*args):
        nonlocal call
        call -= 1
        if call == 0:
            raise RuntimeError("stopped")
        return function(*args)

    return stopping


@jax.numpy_dtype_promotion("standard")  # for `optax.adamw`
def test_a_training_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path, monkeypatch
):
    training = example("training")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    training.train(whole, epochs=3)
    # First in the second epoch, then in the same one between the log and the
    # checkpoint.
    for owner, name, call in [(training, "step", 15), (es, "save", 2)]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stop_at(call, getattr(owner, name)))
            with pytest.raises(RuntimeError, match="stopped"):
                training.train(parts, epochs=3)
    assert len((parts / "log.jsonl").read_text().splitlines()) == 2
    training.train(parts, epochs=3)
    assert sorted(f.name for f in whole.iterdir()) == [
        "best.safetensors",
        "log.jsonl",
        "run.safetensors",
    ]
    for file in whole.iterdir():
        assert (parts / file.name).read_bytes() == file.read_bytes(), file.name


@jax.numpy_dtype_promotion("standard")
def test_a_training_run_stops_when_the_loss_no_longer_falls(tmp_path, monkeypatch):
    training = example("training")
    monkeypatch.setattr(training, "PATIENCE", 2)
    monkeypatch.setattr(training, "validate", lambda *_: {"loss": 1.0})
    training.train(tmp_path, epochs=9)
    log = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in log] == [0, 1, 2]


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_the_best_model_is_that_of_the_lowest_loss_at_any_scale(
    scale, tmp_path, monkeypatch
):
    training = example("training")
    loss_fn, validate, losses = training.loss_fn, training.validate, []

    def scaled(*args):
        loss, metrics = loss_fn(*args)
        return scale * loss, {**metrics, "loss": scale * loss}

    def recorded(*args):
        metrics = validate(*args)
        losses.append(float(metrics["loss"]))
        return metrics

    monkeypatch.setattr(training, "loss_fn", scaled)
    monkeypatch.setattr(training, "validate", recorded)
    best = training.train(tmp_path, epochs=8)
    assert len(losses) == 8
    assert len({round(x / scale, 3) for x in losses}) == 8  # they do change
    held_out = training.load_data(1, 512)
    assert float(validate(best, *held_out)["loss"]) == min(losses)
    log = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["valid_loss"] for row in log] == pytest.approx(losses, rel=1e-5)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(
    ("what", "value"), [("train_loss", jnp.nan), ("valid_loss", jnp.inf)]
)
def test_a_loss_that_is_not_finite_names_itself_and_the_epoch(
    what, value, tmp_path, monkeypatch
):
    training = example("training")
    training.train(tmp_path, epochs=1)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    name = {"train_loss": "step", "valid_loss": "validate"}[what]
    function = getattr(training, name)

    def spoiled(*args):
        if name == "validate":
            return function(*args) | {"loss": jnp.float32(value)}
        metrics, run = function(*args)
        return metrics | {"loss": jnp.float32(value)}, run

    monkeypatch.setattr(training, name, spoiled)
    with pytest.raises(FloatingPointError, match=f"`{what}` is {value} in epoch 1"):
        training.train(tmp_path, epochs=2)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@jax.numpy_dtype_promotion("standard")
def test_a_training_program_says_that_it_continues(tmp_path, capsys):
    training = example("training")
    training.train(tmp_path, epochs=1)
    assert "contains a run" not in capsys.readouterr().out
    training.train(tmp_path, epochs=1)
    assert (
        f"{tmp_path} contains a run: continuing at epoch 1" in capsys.readouterr().out
    )


# --- Copied alone ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(EXAMPLES.glob("[!_]*.py"))]
)
def test_an_example_that_is_copied_alone_needs_only_packages(
    name, tmp_path, monkeypatch
):
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x != str(EXAMPLES)])
    for missing in ("_pictures", "matplotlib"):
        monkeypatch.setitem(sys.modules, missing, None)
    with jax.numpy_dtype_promotion("standard"):  # `quickstart` runs
        assert example(name, tmp_path).__doc__


def test_an_example_that_is_copied_alone_runs(tmp_path):
    shutil.copy(EXAMPLES / "linear_regression.py", tmp_path)
    command = [sys.executable, "linear_regression.py"]
    done = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "least squares: y = " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["linear_regression.py"]
