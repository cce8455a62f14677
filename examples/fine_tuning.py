"""Teach a frozen network new digits with low-rank adapters (LoRA).

A plain Equinox network, whose class does not use this library, learns the digits 0 to
4. Then it is frozen and learns 5 to 9 through a low-rank change of each matrix,
`weight + up @ down` (Hu et al., 2021). Training the last layer only, and training
everything, are the comparison.

- `class LoRA(es.Parameter)` is a kind of our own.
- `es.map_modules` wraps each linear layer in an adapter, and removes it again.
- `es.Buffer[eqx.nn.Linear]` freezes a layer of Equinox: no gradient, no weight decay.
- `wrt=LoRA` selects what is trained; `es.under(...)` selects the last layer.

Run `python examples/fine_tuning.py [output.png]`; it takes under a minute on two cores.
"""

# %%
import sys
from collections.abc import Callable
from typing import Any

import _pictures
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE, RANK = 64, 4


# %% The network, which somebody else may have written.
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


# %% The adapters. `up` starts at zero, so an untrained adapter changes nothing.
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
    names = [name for name, _ in es.modules(model)]

    def around(module: Any, name: str) -> Any:
        if not isinstance(module, eqx.nn.Linear):
            return module
        return Adapted(module, key=jr.fold_in(key, names.index(name)))

    return es.map_modules(around, model)


def replace_adapters(model: Any, f: Callable[[Adapted], eqx.nn.Linear]) -> Any:
    return es.map_modules(
        lambda module, name: f(module) if isinstance(module, Adapted) else module, model
    )


def merge(adapted: Adapted) -> eqx.nn.Linear:
    """One matrix, so that the adapter costs nothing at inference."""
    weight = adapted.linear.weight + adapted.up @ adapted.down
    return eqx.tree_at(lambda linear: linear.weight, adapted.linear, weight)


# %% Training is the same for all: `optimizer.wrt` says what is trained.
def loss_fn(model, images: Float[Array, "b 64"], labels: Int[Array, " b"]):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@es.jit
def step(model, optimizer, images, labels):
    value_and_grad = es.value_and_grad(loss_fn, wrt=optimizer.wrt)
    (loss, model), grads = value_and_grad(model, images, labels)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


@es.jit
def accuracy(model, images, labels) -> Float[Array, ""]:
    return jnp.mean(jnp.argmax(jax.vmap(model)(images), axis=1) == labels)


def train(model, wrt, data, steps: int, learning_rate: float = 1e-2):
    """The test accuracy after every tenth step, and the trained model."""
    images, test_images, labels, test_labels = data
    tx = optax.adamw(learning_rate, weight_decay=1e-2)
    optimizer = es.Optimizer(tx, wrt=wrt).init(model)
    rng = np.random.default_rng(0)
    curve = [float(accuracy(model, test_images, test_labels))]
    for i in range(1, steps + 1):
        batch = rng.choice(len(images), BATCH_SIZE)
        loss, model, optimizer = step(model, optimizer, images[batch], labels[batch])
        if i % 10 == 0:
            curve.append(float(accuracy(model, test_images, test_labels)))
    return curve, model


# %% Train on the digits 0 to 4, then on 5 to 9 in three ways from the same network.
def size(tree: Any, *filters: Any) -> int:
    return sum(part.value.size for part in es.parts(es.filter(tree, *filters)))


def main(path="fine_tuning.png", *, steps=300, at_least=0.92, better_by=0.03):
    """The test accuracy on the new digits for each way to learn them."""
    digits = load_digits()
    images, labels = np.float32(digits.data / 16), digits.target
    old, new = (
        train_test_split(images[w], labels[w] % 5, test_size=0.3, random_state=0)
        for w in (labels < 5, labels >= 5)
    )
    untrained = Classifier(key=jr.key(0))
    curve, pretrained = train(untrained, es.trainable, old, 300, learning_rate=1e-3)
    print(f"digits 0 to 4: test accuracy {curve[-1]:.2%}")

    adapted = adapt(pretrained, jr.key(1))
    ways = {
        "last layer": (pretrained, es.under(lambda model: model.layers[-1])),
        "LoRA": (adapted, LoRA),
        "everything": (pretrained, es.trainable),
    }
    models, curves, counts, accuracies = {}, {}, {}, {}
    for name, (model, wrt) in ways.items():
        curves[name], models[name] = train(model, wrt, new, steps)
        counts[name], accuracies[name] = size(model, wrt), curves[name][-1]
        print(f"{name}: {counts[name]:,} trained, accuracy {accuracies[name]:.2%}")
    _pictures.fine_tuning(path, curves, counts)

    # Without adapters it is bit for bit the old network, which knows the old digits.
    without = replace_adapters(models["LoRA"], lambda adapted: adapted.linear)
    assert eqx.tree_equal(without, pretrained)
    # With the adapters merged it is a plain network again, which knows the new ones.
    merged = replace_adapters(models["LoRA"], merge)
    assert jax.tree.structure(merged) == jax.tree.structure(pretrained)
    assert abs(accuracy(merged, new[1], new[3]) - accuracies["LoRA"]) < 0.01
    assert counts["LoRA"] < 0.1 * size(pretrained)
    assert accuracies["LoRA"] >= at_least, accuracies
    assert accuracies["LoRA"] >= accuracies["last layer"] + better_by, accuracies
    return accuracies


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
