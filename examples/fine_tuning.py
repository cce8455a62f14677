"""Teach a frozen network new digits with low-rank adapters (LoRA).

A plain Equinox network, in whose class nothing of this library appears, learns to tell
the digits 0 to 4 apart. Then it is frozen, and learns 5 to 9 through a small change of
each matrix, `weight + up @ down` (Hu et al., 2021). For comparison the same is done
by training the last layer alone, and by training everything.

- `class LoRA(es.Parameter)` is a kind of our own: all that is said of it is its name.
- `es.map_modules` puts an adapter around each linear layer, and takes it off again.
- `es.Buffer[eqx.nn.Linear]` freezes a layer of Equinox: no gradient, no weight decay.
- `wrt=LoRA` is what gradients and optimizer see, and `es.under(...)` the last layer.

Run `python examples/fine_tuning.py [output.png]`. The picture is written to
`fine_tuning.png` in the current directory if no path is given. It takes under a minute
on two cores.
"""

# %%
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE, RANK = 64, 4


# %% The network: somebody else's, as it were.
class Classifier(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, *, key: Key[Array, ""]):
        first, second, last = jr.split(key, 3)
        self.layers = [
            eqx.nn.Linear(64, 256, key=first),
            eqx.nn.Linear(256, 256, key=second),
            eqx.nn.Linear(256, 5, key=last),
        ]

    def __call__(self, image: Float[Array, "64"]) -> Float[Array, "5"]:
        for layer in self.layers[:-1]:
            image = jax.nn.relu(layer(image))
        return self.layers[-1](image)


# %% The adapters. At first `up` is zero, and an adapted network computes what it did.
class LoRA(es.Parameter):
    """A low-rank change of a frozen matrix."""


class Adapted(eqx.Module):
    linear: es.Buffer[eqx.nn.Linear]
    down: LoRA
    up: LoRA

    def __init__(self, linear: eqx.nn.Linear, *, key: Key[Array, ""]):
        outputs, inputs = linear.weight.shape
        self.linear = linear
        self.down = jr.normal(key, (RANK, inputs)) / np.sqrt(inputs)
        self.up = jnp.zeros((outputs, RANK))

    def __call__(self, x: Float[Array, " inputs"]) -> Float[Array, " outputs"]:
        return self.linear(x) + self.up @ (self.down @ x)


def adapt(model: Any, key: Key[Array, ""]) -> Any:
    """`model` with an adapter around each linear layer."""

    def around(module: Any, name: str) -> Any:
        if not isinstance(module, eqx.nn.Linear):
            return module
        return Adapted(module, key=jr.fold_in(key, names.index(name)))

    names = [name for name, _ in es.modules(model)]
    return es.map_modules(around, model)


def replace_adapters(model: Any, f: Callable[[Adapted], eqx.nn.Linear]) -> Any:
    return es.map_modules(
        lambda module, name: f(module) if isinstance(module, Adapted) else module, model
    )


def merge(adapted: Adapted) -> eqx.nn.Linear:
    """One matrix, so that the change costs nothing any more."""
    weight = adapted.linear.weight + adapted.up @ adapted.down
    return eqx.tree_at(lambda linear: linear.weight, adapted.linear, weight)


# %% Training, the same for all: `optimizer.wrt` says what is trained.
def loss_fn(model, images: Float[Array, "b 64"], labels: Int[Array, " b"]):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@es.jit
def train_step(model, optimizer: es.Optimizer, images: Array, labels: Array):
    value_and_grad = es.value_and_grad(loss_fn, wrt=optimizer.wrt)
    (loss, model), grads = value_and_grad(model, images, labels)
    model, optimizer = optimizer.update(grads, model)
    return model, optimizer, loss


@es.jit
def accuracy(model, images: Array, labels: Array) -> Float[Array, ""]:
    return jnp.mean(jnp.argmax(jax.vmap(model)(images), axis=1) == labels)


def train(model, wrt, data, steps: int, learning_rate: float = 1e-2):
    """The model after training, and its test accuracy after each tenth step."""
    images, test_images, labels, test_labels = data
    tx = optax.adamw(learning_rate, weight_decay=1e-2)
    optimizer = es.Optimizer(tx, wrt=wrt).init(model)
    rng = np.random.default_rng(0)
    curve = [float(accuracy(model, test_images, test_labels))]
    for step in range(1, steps + 1):
        batch = rng.choice(len(images), BATCH_SIZE)
        model, optimizer, _ = train_step(model, optimizer, images[batch], labels[batch])
        if step % 10 == 0:
            curve.append(float(accuracy(model, test_images, test_labels)))
    return model, curve


def elements(tree: Any, *filters: Any) -> int:
    return sum(part.value.size for part in es.parts(es.filter(tree, *filters)))


def plot(curves, counts) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
    for name, curve in curves.items():
        left.plot(10 * np.arange(len(curve)), curve, label=name)
    left.set(xlabel="step", ylabel="test accuracy on the digits 5 to 9", ylim=(0.5, 1))
    left.legend(loc="lower right")
    colours = [f"C{i}" for i in range(len(counts))]
    bars = right.bar(list(counts), list(counts.values()), color=colours)
    right.bar_label(bars, [f"{count:,}" for count in counts.values()])
    right.set(ylabel="elements that are trained", yscale="log")
    right.margins(y=0.15)
    return figure


# %% Digits 0 to 4 first, then 5 to 9 in three ways, all from the same network.
def main(
    steps: int = 300,
    path: str | Path = "fine_tuning.png",
    at_least: float = 0.94,
    better_by: float = 0.04,
) -> dict[str, float]:
    """The test accuracy on the new digits of each way to learn them."""
    digits = load_digits()
    images, labels = np.float32(digits.data / 16), digits.target

    def split(which):
        data = images[which], labels[which] % 5
        return train_test_split(*data, test_size=0.3, random_state=0)

    old, new = split(labels < 5), split(labels >= 5)
    pretrained, (*_, old_accuracy) = train(
        Classifier(key=jr.key(0)), es.trainable, old, 300, learning_rate=1e-3
    )

    adapted = adapt(pretrained, jr.key(1))
    ways = {
        "last layer": (pretrained, es.under(lambda model: model.layers[-1])),
        "LoRA": (adapted, LoRA),
        "everything": (pretrained, es.trainable),
    }
    results = {name: train(*way, new, steps) for name, way in ways.items()}
    curves = {name: curve for name, (_, curve) in results.items()}
    counts = {name: elements(model, wrt) for name, (model, wrt) in ways.items()}
    accuracies = {name: curve[-1] for name, curve in curves.items()}

    table = Table("trained", "elements", "test accuracy")
    for name in ways:
        table.add_row(name, f"{counts[name]:,}", f"{accuracies[name]:.2%}")
    console = Console()
    console.print(f"test accuracy on the digits 0 to 4: {old_accuracy:.2%}")
    console.print(table)
    plot(curves, counts).savefig(path)
    console.print(f"Accuracies and counts: {Path(path).resolve()}")

    tuned, _ = results["LoRA"]
    # The adapters off: bit for bit the old network, which still knows the old digits.
    assert eqx.tree_equal(replace_adapters(tuned, lambda x: x.linear), pretrained)
    # The adapters merged: a plain network again, which knows the new ones.
    merged = replace_adapters(tuned, merge)
    assert jax.tree.structure(merged) == jax.tree.structure(pretrained)
    assert abs(accuracy(merged, new[1], new[3]) - accuracies["LoRA"]) < 0.01
    assert counts["LoRA"] < 0.1 * elements(pretrained)
    assert accuracies["LoRA"] >= at_least, accuracies
    assert accuracies["LoRA"] >= accuracies["last layer"] + better_by, accuracies
    return accuracies


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "fine_tuning.png")
