"""Move two programs over, one of `eqx.nn.State` and one of Treex: before and after.

The first trains a network with batch normalisation and dropout the way Equinox's
documentation does: layers that are stateful take a state and return one, and keys are
split by hand. It runs here next to its successor, from the same weights, and both
compute the same losses. The second is shown as text, since Treex does not run on
current JAX; the program that replaces it runs.

- `es.nn.Stateful` takes an old model as it is, with its state: nothing is rewritten.
- An `es.Module` in its place has neither `state` nor `key` in its signatures.
- `es.to_equinox` is the way back, for code that still threads `eqx.nn.State`.
- What Treex's users know is there by the same names: kinds, `init`, `filter`, `eval`.

Run `python examples/porting.py [output.png]`. The picture is written to `porting.png`
in the current directory if no path is given. It takes under a minute on two cores.
"""

# %%
import sys
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
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_state as es


BATCH_SIZE, WIDTH = 96, 128
TX = optax.adam(1e-3)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


# %% 1, before. The state goes through every call and out of it again, and so do keys.
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


def old_loss(model, state: eqx.nn.State, xs: Array, ys: Array, key: Key[Array, ""]):
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = apply(xs, state, key=jr.split(key, len(xs)))
    return cross_entropy(logits, ys).mean(), state


@eqx.filter_jit
def old_step(model, state, opt_state, xs: Array, ys: Array, key: Key[Array, ""]):
    grad_fn = eqx.filter_value_and_grad(old_loss, has_aux=True)
    (loss, state), grads = grad_fn(model, state, xs, ys, key)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = TX.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), state, opt_state, loss


@eqx.filter_jit
def old_predict(model, state: eqx.nn.State, xs: Array) -> Int[Array, " b"]:
    model = eqx.nn.inference_mode(model)
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, _ = apply(xs, state)
    return jnp.argmax(logits, axis=1)


def train_old(model, state: eqx.nn.State, batches):
    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    key, losses = jr.key(1), []
    for xs, ys in batches:
        key, step_key = jr.split(key)
        model, state, opt_state, loss = old_step(
            model, state, opt_state, xs, ys, step_key
        )
        losses.append(loss)
    return model, state, np.array(losses)


# %% 1, half way. The old class stays; `es.nn.Stateful` holds a model and its state, and
# the training loop has one tree. The old class asks for keys, which are still passed.
def halfway_loss(model: es.nn.Stateful, xs: Array, ys: Array, key: Key[Array, ""]):
    keys = jr.split(key, len(xs))
    logits = es.vmap(model, axis_name="batch")(xs, key=keys)
    return cross_entropy(logits, ys).mean()


# %% 1, after. State and keys are fields; what threads them is `es.value_and_grad`.
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


def loss_fn(model: Net, xs: Array, ys: Array) -> Float[Array, ""]:
    logits = es.vmap(model, axis_name="batch")(xs)
    return cross_entropy(logits, ys).mean()


@es.jit
def step(loss_fn, model, optimizer: es.Optimizer, *batch: Array):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, *batch)
    model, optimizer = optimizer.update(grads, model)
    return model, optimizer, loss


@es.jit
def predict(model: Net, xs: Array) -> Int[Array, " b"]:
    return jnp.argmax(es.vmap(model.eval())(xs), axis=1)


def train(loss_fn, model, batches, key: Key[Array, ""] | None = None):
    optimizer, losses = es.Optimizer(TX).init(model), []
    for xs, ys in batches:
        batch = [xs, ys]
        if key is not None:  # for half way
            key, step_key = jr.split(key)
            batch.append(step_key)
        model, optimizer, loss = step(loss_fn, model, optimizer, *batch)
        losses.append(loss)
    return model, np.array(losses)


# %% 2, before: a Treex program (0.6). A call writes into the module itself, and under
# `jit` into a copy: where the step forgets to return the model, the state is lost.
#
#     class Dense(tx.Module):
#         w: jnp.ndarray = tx.Parameter.node()
#         b: jnp.ndarray = tx.Parameter.node()
#
#         def __init__(self, size: int):
#             self.size = size
#
#         def __call__(self, x):
#             if self.initializing():
#                 shape = x.shape[-1], self.size
#                 self.w = 0.1 * jax.random.normal(tx.next_key(), shape)
#                 self.b = jnp.zeros(self.size)
#             return x @ self.w + self.b
#
#     class Model(tx.Module):
#         def __init__(self, width: int):
#             self.first, self.last = Dense(width), Dense(10)
#             self.norm, self.dropout = tx.BatchNorm(), tx.Dropout(0.3)
#
#         def __call__(self, xs):
#             xs = self.dropout(jax.nn.relu(self.norm(self.first(xs))))
#             return self.last(xs)
#
#     def loss_fn(params, model, xs, ys):
#         model = model.merge(params)
#         return cross_entropy(model(xs), ys).mean(), model
#
#     @jax.jit
#     def train_step(model, optimizer, xs, ys):
#         params = model.parameters()
#         grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
#         (loss, model), grads = grad_fn(params, model, xs, ys)
#         params = optimizer.update(grads, params)
#         return loss, model.merge(params), optimizer
#
#     model = Model(128).init(42, xs)
#     optimizer = tx.Optimizer(optax.adam(1e-3)).init(model.parameters())
#     ...
#     logits = model.eval()(test_xs)


# %% 2, after. Line for line the same, but for the loss, which threads the model itself,
# and for `optimizer.update`, which returns the new optimizer, too.
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


class Model(es.Module):
    first: Dense
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    last: Dense

    def __init__(self, width: int):
        self.first, self.last = Dense(width), Dense(10)
        self.norm = es.nn.BatchNorm(width, momentum=0.9)  # of a whole batch
        self.dropout = es.nn.Dropout(0.3)

    def __call__(self, xs: Float[Array, "b 64"]) -> Float[Array, "b 10"]:
        xs = self.dropout(jax.nn.relu(self.norm(self.first(xs))))
        return self.last(xs)


def model_loss(model: Model, xs: Array, ys: Array) -> Float[Array, ""]:
    return cross_entropy(model(xs), ys).mean()


# %% The picture: what must be one curve, and what has masks of its own.
def plot(same, similar) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, losses), style in zip(same.items(), ("C0", "k:"), strict=True):
        left.semilogy(losses, style, lw=4 if style == "C0" else 1.2, label=name)
    for name, losses in similar.items():
        right.semilogy(losses, lw=0.8, label=name)
    left.set(title="the same computation", xlabel="step", ylabel="training loss")
    right.set(title="dropout masks of their own", xlabel="step")
    for axes in (left, right):
        axes.legend()
    return figure


# %% Run them all.
def main(
    steps: int = 300,
    path: str | Path = "porting.png",
    at_least: float = 0.95,
) -> dict[str, float]:
    """The test accuracy of each program."""
    digits = load_digits()
    train_images, images, train_labels, labels = train_test_split(
        np.float32(digits.data / 16),
        digits.target,
        test_size=0.2,
        stratify=digits.target,
        random_state=0,
    )
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(train_images), size=(steps, BATCH_SIZE))
    batches = [(train_images[batch], train_labels[batch]) for batch in chosen]

    # With dropout the old program and the old model in `es.nn.Stateful` agree: both are
    # given the same keys.
    old, state = eqx.nn.make_with_state(OldNet)(0.3, key=jr.key(0))
    wrapped = es.nn.Stateful(old, state)
    old, state, old_losses = train_old(old, state, batches)
    wrapped, halfway_losses = train(halfway_loss, wrapped, batches, jr.key(1))

    # The new model draws masks of its own. Without dropout it agrees, too.
    new, losses = train(loss_fn, Net(0.3, key=jr.key(0)), batches)
    plain, plain_state = eqx.nn.make_with_state(OldNet)(0.0, key=jr.key(0))
    moved = Net(0.0, key=jr.key(0)).replace(first=plain.first, last=plain.last)
    plain, plain_state, plain_losses = train_old(plain, plain_state, batches)
    moved, moved_losses = train(loss_fn, moved, batches)

    # And back: the old functions run the new model.
    layer, layer_state = es.to_equinox(moved)
    _, _, continued = train_old(layer, layer_state, batches[:3])
    _, expected = train(loss_fn, moved, batches[:3])

    model = Model(WIDTH).init(42, batches[0][0])
    model, model_losses = train(model_loss, model, batches)

    guesses = {
        "eqx.nn.State": old_predict(old, state, images),
        "es.nn.Stateful": predict(wrapped, images),
        "es.Module": predict(new, images),
        "from Treex": jnp.argmax(model.eval()(images), axis=1),
    }
    accuracies = {name: float(np.mean(g == labels)) for name, g in guesses.items()}
    console = Console()
    for name, accuracy in accuracies.items():
        console.print(f"{name}: test accuracy {accuracy:.2%}")
    same = {"eqx.nn.State": plain_losses, "es.Module": moved_losses}
    similar = {"eqx.nn.State": old_losses, "es.Module": losses}
    similar["from Treex"] = model_losses
    plot(same, similar).savefig(path)
    console.print(f"Losses: {Path(path).resolve()}")

    close = dict(rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(halfway_losses, old_losses, **close)
    np.testing.assert_allclose(moved_losses, plain_losses, **close)
    np.testing.assert_allclose(continued, expected, **close)
    assert (guesses["eqx.nn.State"] == guesses["es.nn.Stateful"]).all()
    in_eval = old_predict(layer, layer_state, images), predict(moved, images)
    assert (in_eval[0] == in_eval[1]).all()
    assert min(accuracies.values()) >= at_least, accuracies
    return accuracies


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "porting.png")
