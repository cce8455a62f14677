"""`examples/gpt.py`, shortened; as a script, one process of two that share a mesh."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import gpt
import jax
import numpy as np
import processes
from jax.sharding import Mesh
from sharded_loading import are_shards_of, Counted, held, through_orbax

import eqx_state as es


STEPS, SAVED_AFTER = 6, 3


def mesh_of_all() -> Mesh:
    """Each of two processes has two of the four places along `data`."""
    return gpt.mesh_of(4, 2)


def train(trained: gpt.Trained, start: int, stop: int) -> tuple[list[float], Any]:
    """The losses on these batches, and what is trained after them."""
    texts, _ = gpt.load_texts()
    rows = np.random.default_rng(0).integers(len(texts), size=(STEPS, gpt.BATCH_SIZE))
    return gpt.train(trained, mesh_of_all(), texts[rows[start:stop]], "train")


def main(address: str, process: str, path: str, folder: str) -> None:
    """Train, load what one process saved and go on; write down what was seen."""
    processes.join(address, process)
    mesh = mesh_of_all()
    losses, trained = train(gpt.make_on(mesh), 0, SAVED_AFTER)

    np.memmap = Counted
    loaded = gpt.load(Path(path), mesh)
    seen: dict[str, Any] = {"read": Counted.read, "held": held(loaded)}
    whole = es.load(path, jax.eval_shape(gpt.make))
    seen["whole"] = held(whole)
    seen["shards"] = are_shards_of(loaded, whole)
    more, _ = train(loaded, SAVED_AFTER, STEPS)
    seen["losses"] = losses + more

    if importlib.util.find_spec("orbax") is not None:
        restored = through_orbax(Path(folder, "orbax"), trained, trained)
        seen["restored"], _ = train(restored, SAVED_AFTER, SAVED_AFTER + 1)
    Path(folder, f"{process}.json").write_text(json.dumps(seen))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
