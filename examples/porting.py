"""Port a program that uses `eqx.nn.State`: before, half way, and after.

The old program trains a network with batch normalization and dropout in the style of
Equinox's documentation: stateful layers take a state and return a new one, and the
program splits keys by hand. Two ported programs start from the same weights, and
compute the same losses. A last program is for users of Treex, with lazy initialization
and whole batches.

- `es.nn.Stateful` wraps an old model with its state. You rewrite nothing in the model.
- The methods of an `es.Module` take no `state` and no `key`.
- `es.to_equinox` converts a model for code that still uses `eqx.nn.State`.
- `init`, `filter`, `eval` and the kinds have the same names as in Treex.

Run `python examples/porting.py [output.png]`; it takes under a minute on two cores.
"""

# %%
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE, WIDTH = 96, 128
TX = optax.adam(1e-3)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


# %% Before
# Every call takes a state and a key.
class OldNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, p: float, *, key: Key[Array, ""]):
        first, last = jr.split(key)
        self.first = eqx.nn.Linear(64, WIDTH, use_bias=False, key=first)
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", momentum=0.9, mode="batch")
        self.dropout = eqx.nn.Dropout(p)
        self.last = eqx.nn.Linear(WIDTH, 10, key=last)

    def __call__(self, x: Float[Array, "64"], state: eqx.nn.State, *, key=None):
        x, state = self.norm(self.first(x), state)
        x = self.dropout(jax.nn.relu(x), key=key)
        return self.last(x), state


def old_loss(model, state, xs, ys, key):
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = apply(xs, state, key=jr.split(key, len(xs)))
    return cross_entropy(logits, ys).mean(), state


@eqx.filter_jit
def old_step(model, state, opt_state, xs, ys, key):
    grad_fn = eqx.filter_value_and_grad(old_loss, has_aux=True)
    (loss, state), grads = grad_fn(model, state, xs, ys, key)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = TX.update(grads, opt_state, params)
    return loss, eqx.apply_updates(model, updates), state, opt_state


@eqx.filter_jit
def old_predict(model, state, xs):
    model = eqx.nn.inference_mode(model)
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, _ = apply(xs, state)
    return jnp.argmax(logits, axis=1)


# %% Half way
# `es.nn.Stateful` combines a model of the old class and its state in one tree. The old
# class expects keys, so the program still passes them.
def halfway_loss(model: es.nn.Stateful, xs, ys, key):
    keys = jr.split(key, len(xs))
    logits = es.vmap(model, axis_name="batch")(xs, key=keys)
    return cross_entropy(logits, ys).mean()


@es.jit
def halfway_step(model, optimizer, xs, ys, key):
    (loss, model), grads = es.value_and_grad(halfway_loss)(model, xs, ys, key)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


# %% After
# State and keys are fields of the model, which `es.value_and_grad` returns.
class Net(es.Module):
    first: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, p: float, *, key: Key[Array, ""]):
        first, last, dropout = jr.split(key, 3)
        self.first = eqx.nn.Linear(64, WIDTH, use_bias=False, key=first)
        self.norm = es.nn.BatchNorm(WIDTH, "batch", momentum=0.9)
        self.dropout = es.nn.Dropout(p, key=dropout)
        self.last = eqx.nn.Linear(WIDTH, 10, key=last)

    def __call__(self, x: Float[Array, "64"]) -> Float[Array, "10"]:
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def loss_fn(model: Net, xs, ys):
    logits = es.vmap(model, axis_name="batch")(xs)
    return cross_entropy(logits, ys).mean()


@es.jit
def step(model, optimizer, xs, ys):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, xs, ys)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


@es.jit
def predict(model, xs):
    return jnp.argmax(es.vmap(model.eval())(xs), axis=1)


# %% As in Treex
# A layer learns its sizes from its first input, in `model.init`.
class Dense(es.Module):
    size: int = eqx.field(static=True)
    w: es.Parameter[Array | None] = None
    b: es.Parameter[Array | None] = None

    def __call__(self, x: Float[Array, "b inputs"]) -> Float[Array, "b size"]:
        if self.initializing and self.w is None:
            shape = x.shape[-1], self.size
            self.w = es.Initializer(lambda key: 0.1 * jr.normal(key, shape))
            self.b = jnp.zeros(self.size)
        return x @ self.w + self.b


class LazyNet(es.Module):
    first: Dense
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    last: Dense

    def __init__(self, width: int):
        self.first, self.last = Dense(width), Dense(10)
        self.norm = es.nn.BatchNorm(width, momentum=0.9)
        self.dropout = es.nn.Dropout(0.3)

    def __call__(self, xs: Float[Array, "b 64"]) -> Float[Array, "b 10"]:
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(xs)))))


def lazy_loss(model: LazyNet, xs, ys):
    return cross_entropy(model(xs), ys).mean()


@es.jit
def lazy_step(model, optimizer, xs, ys):
    (loss, model), grads = es.value_and_grad(lazy_loss)(model, xs, ys)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


# %% The training loops: one for the old program, one for all others
def train_old(model, state, batches, keys):
    opt_state, losses = TX.init(eqx.filter(model, eqx.is_inexact_array)), []
    for (xs, ys), key in zip(batches, keys, strict=True):
        loss, model, state, opt_state = old_step(model, state, opt_state, xs, ys, key)
        losses.append(loss)
    return np.array(losses), model, state


def train(step, model, batches):
    optimizer, losses = es.Optimizer(TX).init(model), []
    for batch in batches:
        loss, model, optimizer = step(model, optimizer, *batch)
        losses.append(loss)
    return np.array(losses), model


# %% Run them all, and compare
def main(path=None, *, steps=300, at_least=0.93) -> dict[str, float]:
    """The test accuracy of each program."""
    digits = load_digits()
    images, labels = np.float32(digits.data / 16), digits.target
    train_images, images, train_labels, labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    rng = np.random.default_rng(0)
    rows = rng.integers(len(train_images), size=(steps, BATCH_SIZE))
    batches = [(train_images[i], train_labels[i]) for i in rows]
    keys = jr.split(jr.key(1), steps)
    with_keys = [(*batch, key) for batch, key in zip(batches, keys, strict=True)]

    # The old program; and its model in `es.nn.Stateful`, with the same keys.
    old, state = eqx.nn.make_with_state(OldNet)(0.3, key=jr.key(0))
    wrapped = es.nn.Stateful(old, state)
    old_losses, old, state = train_old(old, state, batches, keys)
    wrapped_losses, wrapped = train(halfway_step, wrapped, with_keys)

    # The new model draws its own dropout masks. Without dropout, it is equal, too.
    new_losses, new = train(step, Net(0.3, key=jr.key(0)), batches)
    plain, plain_state = eqx.nn.make_with_state(OldNet)(0.0, key=jr.key(0))
    moved = Net(0.0, key=jr.key(0)).replace(first=plain.first, last=plain.last)
    plain_losses, *_ = train_old(plain, plain_state, batches, keys)
    moved_losses, moved = train(step, moved, batches)

    # The way back: the old functions run the new model.
    back_losses, *_ = train_old(*es.to_equinox(moved), batches[:5], keys[:5])
    continued_losses, _ = train(step, moved, batches[:5])

    lazy = LazyNet(WIDTH).init(42, batches[0][0])
    lazy_losses, lazy = train(lazy_step, lazy, batches)

    guesses = {
        "eqx.nn.State": old_predict(old, state, images),
        "es.nn.Stateful": predict(wrapped, images),
        "es.Module": predict(new, images),
        "from Treex": jnp.argmax(lazy.eval()(images), axis=1),
    }
    accuracies = {name: float(np.mean(g == labels)) for name, g in guesses.items()}
    for name, accuracy in accuracies.items():
        print(f"{name}: test accuracy {accuracy:.2%}")
    if path is not None:
        import _pictures  # needs matplotlib

        same = {"eqx.nn.State": plain_losses, "es.Module": moved_losses}
        similar = {"eqx.nn.State": old_losses, "es.Module": new_losses}
        _pictures.porting(path, same, {**similar, "from Treex": lazy_losses})

    # The first steps agree up to rounding. Later, rounding errors grow, by an amount
    # that depends on the processor.
    for one, other in [
        (wrapped_losses[:20], old_losses[:20]),
        (moved_losses[:20], plain_losses[:20]),
        (back_losses, continued_losses),
    ]:
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    in_eval = old_predict(*es.to_equinox(moved), images) == predict(moved, images)
    assert np.mean(in_eval) >= 0.99
    assert min(accuracies.values()) >= at_least, accuracies
    return accuracies


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
