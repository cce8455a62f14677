"""Train a convolutional network on scikit-learn's 1,797 handwritten digits.

Plain Equinox layers stand next to layers with state: batch normalisation keeps running
statistics, dropout keeps a key. The model is one pytree all the same: the training loop
hands on the model and the optimizer, and there is no second tree of state.

- `es.value_and_grad` and `es.vmap` thread the state through the forward pass.
- `es.Optimizer` is an optax optimizer and its state; it sees the parameters alone.
- `model.eval()` switches every layer, and `es.parts` tells what the model holds.
- Models from three seeds share one compiled step: writing state never recompiles.

Run `python examples/digits.py [output.png]`. The picture is written to `digits.png` in
the current directory if no path is given. It takes under a minute on two cores.
"""

# %%
import sys
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE = 96


# %% The model. An annotation says what a field's arrays are. Each layer of `es.nn` says
# it of its own; the weights of Equinox's layers are parameters without a word.
class Net(es.Module):
    average: es.Buffer[Float[Array, "1 8 8"]]  # constant: neither trained nor written
    layers: eqx.nn.Sequential

    def __init__(self, average: Float[Array, "1 8 8"], *, key: Key[Array, ""]):
        conv1, conv2, conv3, dropout, linear = jr.split(key, 5)
        relu = eqx.nn.Lambda(jax.nn.relu)
        self.average = average
        self.layers = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(1, 32, 3, padding=1, key=conv1),
                es.nn.BatchNorm(32, axis_name="batch", momentum=0.9),
                relu,
                eqx.nn.Conv2d(32, 32, 3, padding=1, key=conv2),
                es.nn.BatchNorm(32, axis_name="batch", momentum=0.9),
                relu,
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Conv2d(32, 64, 3, padding=1, key=conv3),
                es.nn.BatchNorm(64, axis_name="batch", momentum=0.9),
                relu,
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Lambda(jnp.ravel),
                es.nn.Dropout(0.4, key=dropout),
                eqx.nn.Linear(256, 10, key=linear),
            ]
        )

    def __call__(self, image: Float[Array, "1 8 8"]) -> Float[Array, "10"]:
        return self.layers(image - self.average)


# %% One training step. In it layers write `self.mean = …` and `self.rng = …`; outside,
# the new model is a result, as the loss and the gradients are.
def loss_fn(
    model: Net, images: Float[Array, "b 1 8 8"], labels: Int[Array, " b"]
) -> Float[Array, ""]:
    logits = es.vmap(model, axis_name="batch")(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.debug.assert_max_traces(max_traces=None)  # counts them
def train_step(model: Net, optimizer: es.Optimizer, images: Array, labels: Array):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, images, labels)
    model, optimizer = optimizer.update(grads, model)
    return model, optimizer, loss


@eqx.filter_jit
def predict(model: Net, images: Float[Array, "b 1 8 8"]) -> Int[Array, " b"]:
    # In train mode layers still write their state, and we let that go.
    logits, _ = es.mutable(es.vmap(model, axis_name="batch"))(images)
    return jnp.argmax(logits, axis=1)


# %% What the arrays of a pytree are, and how much memory they take.
def by_kind(tree) -> Table:
    table = Table("kind", "arrays", "elements", "bytes")
    kinds: dict[str, list[Array]] = {}
    for part in es.parts(tree):
        kinds.setdefault(part.kind.__name__, []).append(part.value)
    for kind, arrays in kinds.items():
        elements, size = (
            sum(getattr(a, n) for a in arrays) for n in ("size", "nbytes")
        )
        table.add_row(kind, f"{len(arrays)}", f"{elements:,}", f"{size:,}")
    return table


def plot(losses, images, labels, guesses) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for seed, curve in losses.items():
        axes.semilogy(curve, label=f"seed {seed}")
    axes.set(xlabel="epoch", ylabel="training loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    mistakes_first = np.argsort(guesses == labels, kind="stable")
    for i, ax in zip(mistakes_first, right.subplots(4, 6).flat, strict=False):
        ax.imshow(images[i, 0], cmap="gray_r")
        ax.set_title(guesses[i], color="k" if guesses[i] == labels[i] else "r")
        ax.axis("off")
    return figure


# %% Train a model from each seed, and look at what came out.
def main(
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 20,
    path: str | Path = "digits.png",
    at_least: float = 0.98,
) -> dict[int, float]:
    """The test accuracy of each seed's model, in eval mode."""
    digits = load_digits()
    train_images, images, train_labels, labels = train_test_split(
        np.float32(digits.images[:, None] / 16),
        digits.target,
        test_size=0.2,
        stratify=digits.target,
        random_state=0,
    )
    steps = len(train_images) // BATCH_SIZE
    schedule = optax.cosine_onecycle_schedule(epochs * steps, peak_value=3e-3)
    optimizer = es.Optimizer(optax.adamw(schedule, weight_decay=1e-2))
    step = eqx.filter_jit(train_step)
    traces = eqx.debug.get_num_traces(train_step)

    console = Console()
    losses, accuracies = {}, {}
    for seed in seeds:
        model = Net(jnp.mean(train_images, axis=0), key=jr.key(seed))
        optimizer = optimizer.init(model)
        rng, losses[seed] = np.random.default_rng(seed), []
        for _ in track(range(epochs), f"seed {seed}", console=console):
            batches = rng.permutation(len(train_images))[: steps * BATCH_SIZE]
            for batch in batches.reshape(steps, BATCH_SIZE):
                model, optimizer, loss = step(
                    model, optimizer, train_images[batch], train_labels[batch]
                )
            losses[seed].append(float(loss))
        in_train_mode = np.mean(predict(model, images) == labels)
        guesses = np.asarray(predict(model.eval(), images))
        accuracies[seed] = float(np.mean(guesses == labels))
        console.print(
            f"test accuracy {accuracies[seed]:.2%} in eval mode,"
            f" {in_train_mode:.2%} in train mode"
        )

    console.print(by_kind((model, optimizer)))
    plot(losses, images, labels, guesses).savefig(path)
    console.print(f"Loss curves and predictions: {Path(path).resolve()}")

    assert min(accuracies.values()) >= at_least, accuracies
    assert eqx.debug.get_num_traces(train_step) == traces + 1
    return accuracies


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "digits.png")
