"""Teach a pretrained network new digits from a few examples.

A plain Equinox network, whose class does not use this library, learns the digits 0 to
4. With a new head, it then learns 5 to 9 from ten images of each. The first layer is
frozen, the second layer learns slowly, and the head learns fast, all in bfloat16. For
comparison, the program also trains only the head, and everything.

- `freeze(where)` also freezes a layer of Equinox. The layer gets no gradient, uses no
  optimizer memory, and does not change.
- `es.Optimizer` takes rules, with one optax transformation per group of parameters.
- `cast=` computes in bfloat16. Parameters, gradients and statistics remain float32.

Run `python examples/fine_tuning.py [output.png]`; it takes under a minute on two cores.
"""

# %%
import sys
from typing import Any

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


BATCH_SIZE, SHOTS = 50, 50
HALF = {es.Parameter: jnp.bfloat16}


# %% The pretrained network: plain Equinox, without this library
class Features(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, *, key: Key[Array, ""]):
        first, second = jr.split(key)
        self.layers = [
            eqx.nn.Linear(64, 256, key=first),
            eqx.nn.Linear(256, 64, key=second),
        ]

    def __call__(self, image: Float[Array, "64"]) -> Float[Array, "64"]:
        for layer in self.layers:
            image = jax.nn.relu(layer(image))
        return image


# %% Our model around it: a normalization with running statistics, and a new head
class Classifier(es.Module):
    features: Features
    norm: es.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, features: Features, *, key: Key[Array, ""]):
        self.features = features
        self.norm = es.nn.BatchNorm(64, axis_name="batch", momentum=0.9)
        self.head = eqx.nn.Linear(64, 5, key=key)

    def __call__(self, image: Float[Array, "64"]) -> Float[Array, "5"]:
        return self.head(self.norm(self.features(image)))


# %% One training step, in half precision
def loss_fn(model: Classifier, images: Float[Array, "b 64"], labels: Int[Array, " b"]):
    logits = es.vmap(model, axis_name="batch")(images.astype(jnp.bfloat16))
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@es.jit
def step(model, optimizer, images, labels):
    (loss, model), grads = es.value_and_grad(loss_fn, cast=HALF)(model, images, labels)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


@es.jit
def accuracy(model: Classifier, images, labels) -> Float[Array, ""]:
    return jnp.mean(jnp.argmax(jax.vmap(model.eval())(images), axis=1) == labels)


def train(model: Classifier, tx: Any, data: Any, steps: int):
    """The test accuracy after every tenth step, the model, and its optimizer."""
    images, test_images, labels, test_labels = data
    optimizer = es.Optimizer(tx).init(model)
    rng = np.random.default_rng(0)
    curve = [float(accuracy(model, test_images, test_labels))]
    for i in range(1, steps + 1):
        batch = rng.choice(len(images), BATCH_SIZE)
        _, model, optimizer = step(model, optimizer, images[batch], labels[batch])
        if i % 10 == 0:
            curve.append(float(accuracy(model, test_images, test_labels)))
    return curve, model, optimizer


# %% Train on the digits 0 to 4, then on 5 to 9 in three ways
def trained(model: Classifier) -> int:
    return sum(part.value.size for part in es.parts(model) if es.trainable(part))


def main(path=None, *, steps=100, at_least=0.88, better_by=0.03):
    """The test accuracy on the new digits for each way to learn them."""
    digits = load_digits()
    images, labels = np.float32(digits.data / 16), digits.target

    def split(chosen, size):
        x, y = images[chosen], labels[chosen] % 5
        return train_test_split(x, y, train_size=size, stratify=y, random_state=0)

    old, new = split(labels < 5, 0.7), split(labels >= 5, SHOTS)
    features, tuned, head = jr.split(jr.key(0), 3)
    untrained = Classifier(Features(key=features), key=head)
    curve, pretrained, _ = train(untrained, optax.adam(1e-3), old, 300)
    print(f"digits 0 to 4: test accuracy {curve[-1]:.2%}")

    fast, slow = optax.adamw(1e-2, weight_decay=1e-2), optax.adam(1e-3)
    groups = {es.under(lambda model: model.features): slow, ...: fast}
    model = Classifier(pretrained.features, key=tuned)
    ways = {
        "head": (model.freeze(lambda model: model.features), groups),
        "groups": (model.freeze(lambda model: model.features.layers[0]), groups),
        "everything": (model, groups),
    }
    curves, counts, models, accuracies = {}, {}, {}, {}
    for name, (start, tx) in ways.items():
        curves[name], models[name], optimizer = train(start, tx, new, steps)
        counts[name], accuracies[name] = trained(start), curves[name][-1]
        print(f"{name}: {counts[name]:,} trained, accuracy {accuracies[name]:.2%}")
        # The state contains two moments for each trained parameter, and step counts.
        moments = sum(x.size for x in jax.tree.leaves(optimizer.opt_state) if x.ndim)
        assert moments == 2 * counts[name]
    if path is not None:
        import _pictures  # needs matplotlib

        _pictures.fine_tuning(path, curves, counts)

    layers = models["groups"].features.layers, pretrained.features.layers
    assert eqx.tree_equal(*(pair[0] for pair in layers))  # frozen, so unchanged
    assert not eqx.tree_equal(*(pair[1] for pair in layers))
    assert {part.value.dtype.name for part in es.parts(models["groups"])} == {"float32"}
    assert accuracies["groups"] >= at_least, accuracies
    assert accuracies["groups"] >= accuracies["head"] + better_by, accuracies
    assert accuracies["groups"] >= accuracies["everything"] - 0.03, accuracies
    return accuracies


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
