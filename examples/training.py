"""A training program: copy it, and insert your own model and data.

It has batches with a progress bar, a learning rate schedule, an average of the weights,
validation, a log, early stopping, and a checkpoint after each epoch. You can stop it at
any time. If you start it again with the same folder, it continues, with the numbers of
an uninterrupted run. After a change to the program, pass a new folder.

Run `python examples/training.py [folder]`; it takes about ten seconds on two cores.
"""

# %%
import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from rich.console import Console
from rich.progress import track

import eqx_state as es


EPOCHS, BATCH_SIZE, PATIENCE = 60, 64, 5


# %% The data: three spirals
# The order of the batches depends only on the epoch.
def load_data(seed, size):
    rng = np.random.default_rng(seed)
    ys = rng.integers(3, size=size)
    radius = rng.uniform(0.05, 1, size)
    angle = 6 * radius + ys * 2 * np.pi / 3 + rng.normal(0, 0.4, size)
    xs = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return xs.astype(np.float32), ys.astype(np.int32)


def batches(xs, ys, epoch):
    order = np.random.default_rng(epoch).permutation(len(xs))
    for i in range(0, len(xs) - BATCH_SIZE + 1, BATCH_SIZE):  # only full batches
        rows = order[i : i + BATCH_SIZE]
        yield xs[rows], ys[rows]


# %% The model
class Net(es.Module):
    first: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    last: eqx.nn.MLP

    def __init__(self, key):
        a, b, c = jr.split(key, 3)
        self.first = eqx.nn.Linear(2, 64, key=a)
        self.norm = es.nn.BatchNorm(64, axis_name="batch", momentum=0.9)
        self.dropout = es.nn.Dropout(0.05, key=b)
        self.last = eqx.nn.MLP(64, 3, 64, depth=1, key=c)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.first(x)))
        return self.last(self.dropout(x))


# %% The run: everything that training changes, and that a checkpoint must contain
class Run(es.Module):
    model: Net
    optimizer: es.Optimizer
    ema: es.Ema
    epoch: es.State = 0
    best: es.State = jnp.inf  # the lowest validation loss
    since_best: es.State = 0  # epochs


# %% The loss with metrics, a training step, and validation of the averaged model
def loss_fn(model, xs, ys):
    logits = es.vmap(model, axis_name="batch")(xs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ys)
    loss, accuracy = jnp.mean(losses), jnp.mean(jnp.argmax(logits, axis=1) == ys)
    return loss, {"loss": loss, "accuracy": accuracy}


@es.jit
def step(run, xs, ys):
    grad_fn = es.value_and_grad(loss_fn, has_aux=True)
    ((_, metrics), model), grads = grad_fn(run.model, xs, ys)  # the new model
    model, optimizer = run.optimizer.update(grads, model)
    run = run.replace(model=model, optimizer=optimizer, ema=run.ema.update(model))
    return metrics, run


@es.jit
def validate(model, xs, ys):
    return loss_fn(model.eval(), xs, ys)[1]


def means(name, metrics):
    """The mean of each metric over batches of the same size, not rounded."""
    columns = {key: [float(m[key]) for m in metrics] for key in metrics[0]}
    return {f"{name}_{k}": float(np.mean(x)) for k, x in columns.items()}


# %% The training loop
# If there is a checkpoint, it continues from there.
def train(folder, epochs=EPOCHS):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data, held_out = load_data(0, 640), load_data(1, 512)
    steps = len(data[0]) // BATCH_SIZE
    total = epochs * steps
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, total // 30, total)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    model = Net(jr.key(0))
    run, log = Run(model, es.Optimizer(tx).init(model), es.Ema(0.95).init(model)), []
    if (folder / "run.safetensors").exists():
        run = es.load(folder / "run.safetensors", run)
        log = (folder / "log.jsonl").read_text().splitlines()[: int(run.epoch)]
        print(f"{folder} contains a run: continuing at epoch {run.epoch}")
    for finding in es.audit(step)(run, *next(batches(*data, 0))):
        print(finding)  # what the step loses or does not train; it costs one trace

    bar = {"total": steps, "transient": True, "console": Console(stderr=True)}
    while run.epoch < epochs and run.since_best < PATIENCE:
        epoch, metrics = int(run.epoch), []
        for xs, ys in track(batches(*data, epoch), f"epoch {epoch}", **bar):
            metric, run = step(run, xs, ys)
            metrics.append(metric)  # arrays, so the loop does not wait for values
        valid = [validate(run.ema.model, *held_out)]
        row = means("train", metrics) | means("valid", valid)
        for name in ("train_loss", "valid_loss"):
            if not np.isfinite(row[name]):
                raise FloatingPointError(f"`{name}` is {row[name]} in epoch {epoch}")
        if row["valid_loss"] < run.best:
            es.save(folder / "best.safetensors", run.ema.model)
            run = run.replace(best=row["valid_loss"], since_best=0)
        else:
            run = run.replace(since_best=run.since_best + 1)
        run = run.replace(epoch=epoch + 1)
        rounded = {name: float(f"{x:.6g}") for name, x in row.items()}
        log.append(json.dumps({"epoch": epoch, **rounded}))
        print(log[-1])
        (folder / "log.tmp").write_text("\n".join(log) + "\n")
        (folder / "log.tmp").replace(folder / "log.jsonl")
        es.save(folder / "run.safetensors", run)  # last: this completes the epoch
    return es.load(folder / "best.safetensors", model).eval()


# %%
def main(folder="training_run"):
    metrics = validate(train(folder), *load_data(2, 1000))
    print(f"test accuracy: {metrics['accuracy']:.1%}")
    assert metrics["accuracy"] > 0.8


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
