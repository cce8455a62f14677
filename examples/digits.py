"""Train a convolutional network on scikit-learn's 1,797 handwritten digits.

The model combines Equinox's layers with layers that have state: batch normalization
stores running statistics, and dropout stores a random key. Statistics and keys are
leaves of the model, so a training step takes and returns only model and optimizer.

- `es.value_and_grad` and `es.vmap` pass the state through the forward pass.
- `es.Optimizer` contains an optax transformation and its state. It updates only
  parameters.
- `model.eval()` switches every layer, and `es.tabulate` lists the arrays of the model.
- `es.jit` compiles the step once: the models of three seeds share it.

Run `python examples/digits.py [output.png]`; it takes under a minute on two cores.
"""

# %%
import sys

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


BATCH_SIZE = 96


# %% The model
# The layers of `es.nn` declare the kinds of their fields. The weights of Equinox's
# layers are parameters without a declaration.
class Net(es.Module):
    average: es.Buffer[Float[Array, "1 8 8"]]  # a constant: not trained, not written
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


# %% One training step
def loss_fn(model: Net, images: Float[Array, "b 1 8 8"], labels: Int[Array, " b"]):
    logits = es.vmap(model, axis_name="batch")(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@es.jit
@eqx.debug.assert_max_traces(max_traces=1)  # one compilation for all seeds
def step(model, optimizer, images, labels):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, images, labels)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


@es.jit
def predict(model: Net, images: Float[Array, "b 1 8 8"]) -> Int[Array, " b"]:
    return jnp.argmax(jax.vmap(model.eval())(images), axis=1)


# %% Train one model
def train(model: Net, optimizer, images, labels, epochs: int, seed: int):
    """The trained model, its optimizer, and the loss after each epoch."""
    steps = len(images) // BATCH_SIZE
    rng, losses = np.random.default_rng(seed), []
    for epoch in range(1, epochs + 1):
        batches = rng.permutation(len(images))[: steps * BATCH_SIZE]
        for batch in batches.reshape(steps, BATCH_SIZE):
            data = images[batch], labels[batch]
            loss, model, optimizer = step(model, optimizer, *data)
        losses.append(float(loss))
        print(f"seed {seed}, epoch {epoch:2}: training loss {losses[-1]:.4f}")
    return model, optimizer, losses


# %% Train and test one model for each seed
def main(path=None, *, seeds=(0, 1, 2), epochs=20, at_least=0.98):
    """The test accuracy of the model of each seed."""
    digits = load_digits()
    images, labels = np.float32(digits.images[:, None] / 16), digits.target
    train_images, images, train_labels, labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    print(f"{len(train_images):,} images; the first step takes some seconds to compile")
    steps = epochs * (len(train_images) // BATCH_SIZE)
    schedule = optax.cosine_onecycle_schedule(steps, peak_value=3e-3)
    untrained = es.Optimizer(optax.adamw(schedule, weight_decay=1e-2))
    losses, accuracies = {}, {}
    for seed in seeds:
        model = Net(jnp.mean(train_images, axis=0), key=jr.key(seed))
        optimizer = untrained.init(model)
        data = train_images, train_labels
        trained = train(model, optimizer, *data, epochs, seed)
        model, optimizer, losses[seed] = trained
        guesses = np.asarray(predict(model, images))
        accuracies[seed] = float(np.mean(guesses == labels))
        print(f"seed {seed}: test accuracy {accuracies[seed]:.2%}")

    count = sum(x.size for x in jax.tree.leaves(model.filter(es.BatchStat)))
    print(f"No code passes {count} statistics, a key or the mode from layer to layer.")
    print("They are in the model, in the columns BatchStat and Rng:")
    print(es.tabulate(model, depth=1))
    if path is not None:
        import _pictures  # needs matplotlib

        _pictures.digits(path, losses, images, labels, guesses)

    assert min(accuracies.values()) >= at_least, accuracies
    return accuracies


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
