"""An ensemble of networks that knows how far its predictions are off.

Ten small networks are trained on scikit-learn's diabetes study (442 patients, ten
measurements, the progression of the disease after a year). Each predicts a mean and a
variance (Lakshminarayanan et al., 2017), and learns from a bootstrap sample of the
patients (Breiman, 1996). To test on every patient there is one such ensemble for each
of five folds: fifty networks.

- `eqx.filter_vmap` makes the networks: one pytree, whose arrays have two more axes.
- `es.vmap(nets, axes={...: 0})` maps over them. Each network has its own weights, batch
  statistics and dropout key, and its code is that of one network, for one patient.
- One compiled step trains all fifty, with one `es.Optimizer`.
- State is threaded through three nested `es.vmap`s as through none.

Run `python examples/ensemble.py [output.png]`. The picture is written to `ensemble.png`
in the current directory if no path is given. It takes under a minute on two cores.
"""

# %%
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.scipy.stats as jstats
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_diabetes

import eqx_state as es


FOLDS, MEMBERS, WIDTH = 5, 10, 32
LEVELS = np.linspace(0.05, 0.95, 19)


# %% One network, for one patient. It does not know of the others.
class Net(es.Module):
    first: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout
    second: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, *, key: Key[Array, ""]):
        first, dropout, second, last = jr.split(key, 4)
        self.first = eqx.nn.Linear(10, WIDTH, use_bias=False, key=first)
        self.norm = es.nn.BatchNorm(WIDTH, axis_name="patients", momentum=0.9)
        self.dropout = es.nn.Dropout(0.2, key=dropout)
        self.second = eqx.nn.Linear(WIDTH, WIDTH, key=second)
        self.last = eqx.nn.Linear(WIDTH, 2, key=last)

    def __call__(self, x: Float[Array, "10"]) -> tuple[Array, Array]:
        x = self.dropout(jax.nn.relu(self.norm(self.first(x))))
        mean, spread = self.last(jax.nn.relu(self.second(x)))
        return mean, jax.nn.softplus(spread) + 1e-3  # the variance


# %% All of them, over the folds, the members, and the patients.
def predict(nets: Net, xs: Float[Array, "f m n 10"]) -> tuple[Array, Array]:
    """The means and the variances, each of shape `(folds, members, patients)`."""
    of_one = es.vmap(nets, axis_name="patients")
    return es.vmap(es.vmap(of_one, axes={...: 0}), axes={...: 0})(xs)


def nll(mean: Array, variance: Array, y: Array) -> Array:
    return -jstats.norm.logpdf(y, mean, jnp.sqrt(variance))


def loss_fn(
    nets: Net, xs: Float[Array, "f m n 10"], ys: Float[Array, "f m n"]
) -> Float[Array, ""]:
    # A sum over the networks: the gradient of each is that of its own loss.
    return jnp.sum(jnp.mean(nll(*predict(nets, xs), ys), axis=-1))


@es.jit
def train_step(nets: Net, optimizer: es.Optimizer, xs: Array, ys: Array):
    (loss, nets), grads = es.value_and_grad(loss_fn)(nets, xs, ys)
    nets, optimizer = optimizer.update(grads, nets)
    return nets, optimizer, loss


# %% The ensemble's prediction: the mean and the variance of the mixture of its members.
def mix(means: Float[Array, "f m n"], variances: Float[Array, "f m n"]):
    mean = jnp.mean(means, axis=1)
    return mean, jnp.mean(variances + means**2, axis=1) - mean**2


def coverage(mean: Array, variance: Array, y: Array) -> Float[np.ndarray, " levels"]:
    """How many of the true values lie in the central interval of each level."""
    inside = jnp.abs(2 * jstats.norm.cdf(y, mean, jnp.sqrt(variance)) - 1)
    return np.array([np.mean(inside <= level) for level in LEVELS])


def plot(mean, variance, y, of_ensemble, of_members) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    left.plot([0, 1], [0, 1], "k:", lw=1)
    left.plot(LEVELS, of_members.T, color="C1", lw=0.7, alpha=0.6)
    left.plot([], [], color="C1", label="each member")
    left.plot(LEVELS, of_ensemble, "o-", ms=4, color="C0", label="ensemble")
    left.set(xlabel="level of the interval", ylabel="true values in it", aspect="equal")
    left.legend()
    order = np.argsort(mean)[::5]
    bars = 1.645 * np.sqrt(variance[order])
    right.errorbar(
        range(len(order)),
        mean[order],
        bars,
        fmt=".",
        lw=1,
        label="prediction, 90 %",
    )
    missed = np.abs(y[order] - mean[order]) > bars
    colours = np.where(missed, "r", "k")
    right.scatter(range(len(order)), y[order], s=9, c=colours, zorder=3, label="true")
    right.set(
        xlabel="patients, in the order of the prediction",
        ylabel="progression of the disease",
    )
    right.legend(loc="upper left")
    return figure


# %% Train, and predict for each patient with the networks that have not seen him.
def main(
    steps: int = 130,
    path: str | Path = "ensemble.png",
    tolerance: float = 0.06,
) -> float:
    """The largest difference between a level and the share of true values within."""
    xs, ys = load_diabetes(return_X_y=True)
    xs, ys = np.float32(xs / xs.std(0)), np.float32(ys)
    centre, scale = ys.mean(), ys.std()
    # Five folds of 88; the two patients who are left over are always trained on.
    rng = np.random.default_rng(0)
    order = rng.permutation(len(xs))
    held_out = order[: len(xs) // FOLDS * FOLDS].reshape(FOLDS, -1)
    rest = [np.setdiff1d(order, fold) for fold in held_out]
    chosen = np.stack([rng.choice(rows, (MEMBERS, len(rows))) for rows in rest])

    keys = jr.split(jr.key(0), (FOLDS, MEMBERS))
    nets = eqx.filter_vmap(eqx.filter_vmap(lambda key: Net(key=key)))(keys)
    optimizer = es.Optimizer(optax.adamw(5e-4, weight_decay=1e-2)).init(nets)
    console = Console()
    inputs, targets = xs[chosen], (ys[chosen] - centre) / scale
    for _ in track(range(steps), "training", console=console):
        nets, optimizer, _ = train_step(nets, optimizer, inputs, targets)

    # All members of a fold see the same patients now.
    of_all = np.repeat(xs[held_out][:, None], MEMBERS, axis=1)
    means, variances = es.jit(predict)(nets.eval(), of_all)
    means, variances = centre + scale * means, scale**2 * variances
    mean, variance = mix(means, variances)
    true = ys[held_out]

    of_ensemble = coverage(mean, variance, true)
    of_members = np.stack(
        [coverage(means[:, m], variances[:, m], true) for m in range(MEMBERS)]
    )
    ensemble_nll = float(jnp.mean(nll(mean, variance, true)))
    member_nlls = np.mean(nll(means, variances, true[:, None]), axis=(0, 2))
    error = float(np.abs(of_ensemble - LEVELS).max())
    member_error = float(np.abs(of_members - LEVELS).max(axis=1).mean())
    console.print(
        f"negative log likelihood: {ensemble_nll:.3f}; of the members"
        f" {member_nlls.mean():.3f} on average, {member_nlls.min():.3f} at best"
    )
    console.print(
        f"largest error of an interval: {error:.1%}; of a member {member_error:.1%}"
    )
    rmse = float(jnp.sqrt(jnp.mean((mean - true) ** 2)))
    console.print(f"root mean square error: {rmse:.1f}, of {scale:.1f} in the data")

    shown = (np.ravel(x) for x in (mean, variance, true))
    plot(*shown, of_ensemble, of_members).savefig(path)
    console.print(f"Calibration and predictions: {Path(path).resolve()}")

    assert ensemble_nll + 0.02 <= member_nlls.mean(), (ensemble_nll, member_nlls)
    assert error <= tolerance, of_ensemble
    assert error < member_error
    return error


# %%
if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else "ensemble.png")
