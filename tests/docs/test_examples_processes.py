"""An example in two processes, which share its mesh, computes what it does in one."""

import json

import jax
import numpy as np
import pytest
import sharded_gpt
from processes import run_two
from sharded_gpt import gpt, mesh_of_all, SAVED_AFTER, STEPS, train

import eqx_state as es


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpt")


@pytest.fixture(scope="module")
def losses(folder):
    """The losses in one process, which saves what it has trained in the middle."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        first, saved = train(gpt.make_on(mesh_of_all()), 0, SAVED_AFTER)
        es.save(folder / "gpt.safetensors", saved)
        second, _ = train(saved, SAVED_AFTER, STEPS)
    return first + second


@pytest.fixture(scope="module")
def seen(folder, losses):
    """What each of two processes has seen."""
    run_two(sharded_gpt.__file__, folder / "gpt.safetensors", folder)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


def test_gpt_has_the_losses_of_one_process(seen, losses):
    assert losses[-1] < losses[0] - 0.05
    for of_process in seen:
        np.testing.assert_allclose(of_process["losses"], losses, rtol=1e-3)


def test_each_process_reads_its_part_of_the_checkpoint(seen):
    for of_process in seen:
        assert of_process["read"] == of_process["held"] < 0.6 * of_process["whole"]
        assert of_process["shards"]


def test_training_goes_on_from_what_both_processes_saved(seen, losses):
    pytest.importorskip("orbax.checkpoint")
    for of_process in seen:
        assert of_process["restored"] == pytest.approx([losses[SAVED_AFTER]], rel=1e-3)
