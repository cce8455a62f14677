"""An ensemble of networks that estimates the uncertainty of its predictions.

Ten small networks learn from scikit-learn's diabetes study (442 patients, ten
measurements, the progression of the disease after a year). Each network predicts a mean
and a variance (Lakshminarayanan et al., 2017), and learns from a bootstrap sample of
the patients (Breiman, 1996). To test on every patient, each of five folds has its own
ensemble, so there are fifty networks.

- `eqx.filter_vmap` creates the networks: one pytree, whose arrays have two extra axes.
- `es.vmap(nets, axes={...: 0})` maps over them. Each network has its own weights, batch
  statistics and dropout key, and the class is written for one network and one patient.
- One compiled step trains all fifty, with one `es.Optimizer`.
- State passes through three nested `es.vmap`s.

Run `python examples/ensemble.py [output.png]`; it takes under a minute on two cores.
"""

# %%
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.scipy.stats as jstats
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from sklearn.datasets import load_diabetes

import eqx_state as es


FOLDS, MEMBERS, WIDTH = 5, 10, 32
LEVELS = np.linspace(0.05, 0.95, 19)


# %% One network, for one patient
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
        """The mean and the variance."""
        x = self.dropout(jax.nn.relu(self.norm(self.first(x))))
        mean, spread = self.last(jax.nn.relu(self.second(x)))
        return mean, jax.nn.softplus(spread) + 1e-3


# %% All networks, mapped over the folds, the members and the patients
def predict(nets: Net, xs: Float[Array, "f m n 10"]) -> tuple[Array, Array]:
    """The means and the variances, each of shape `(folds, members, patients)`."""
    of_one = es.vmap(nets, axis_name="patients")
    return es.vmap(es.vmap(of_one, axes={...: 0}), axes={...: 0})(xs)


def nll(mean: Array, variance: Array, y: Array) -> Array:
    return -jstats.norm.logpdf(y, mean, jnp.sqrt(variance))


def loss_fn(nets: Net, xs: Float[Array, "f m n 10"], ys: Float[Array, "f m n"]):
    # A sum over the networks, so each network gets the gradient of its own loss.
    return jnp.sum(jnp.mean(nll(*predict(nets, xs), ys), axis=-1))


@es.jit
def step(nets, optimizer, xs, ys):
    (loss, nets), grads = es.value_and_grad(loss_fn)(nets, xs, ys)
    nets, optimizer = optimizer.update(grads, nets)
    return loss, nets, optimizer


# %% Train all of them at once
def train(xs, ys, steps: int) -> Net:
    keys = jr.split(jr.key(0), (FOLDS, MEMBERS))
    nets = eqx.filter_vmap(eqx.filter_vmap(lambda key: Net(key=key)))(keys)
    optimizer = es.Optimizer(optax.adamw(5e-4, weight_decay=1e-2)).init(nets)
    for i in range(1, steps + 1):
        loss, nets, optimizer = step(nets, optimizer, xs, ys)
        if i % 10 == 0:
            print(f"step {i}: mean loss {loss / FOLDS / MEMBERS:.3f}")
    return nets


# %% The ensemble's prediction: the mean and the variance of the mixture of its members
def mix(means: Float[Array, "f m n"], variances: Float[Array, "f m n"]):
    mean = jnp.mean(means, axis=1)
    return mean, jnp.mean(variances + means**2, axis=1) - mean**2


def coverage(mean: Array, variance: Array, y: Array) -> Float[np.ndarray, " levels"]:
    """The share of true values in the central interval of each level."""
    inside = jnp.abs(2 * jstats.norm.cdf(y, mean, jnp.sqrt(variance)) - 1)
    return np.array([np.mean(inside <= level) for level in LEVELS])


# %% Train, and predict for each patient with networks that were trained without them
def main(path=None, *, steps=130, tolerance=0.06) -> float:
    """The largest difference between a level and the share of true values within."""
    xs, ys = load_diabetes(return_X_y=True)
    xs, ys = np.float32(xs / xs.std(0)), np.float32(ys)
    center, scale = ys.mean(), ys.std()
    # Five folds of 88. The two remaining patients are always in the training set.
    rng = np.random.default_rng(0)
    order = rng.permutation(len(xs))
    held_out = order[: len(xs) // FOLDS * FOLDS].reshape(FOLDS, -1)
    rest = [np.setdiff1d(order, fold) for fold in held_out]
    chosen = np.stack([rng.choice(rows, (MEMBERS, len(rows))) for rows in rest])
    nets = train(xs[chosen], (ys[chosen] - center) / scale, steps)

    # In the test, all members of a fold see the same patients.
    tests = np.repeat(xs[held_out][:, None], MEMBERS, axis=1)
    means, variances = es.jit(predict)(nets.eval(), tests)
    means, variances = center + scale * means, scale**2 * variances
    mean, variance = mix(means, variances)
    true = ys[held_out]

    of_ensemble = coverage(mean, variance, true)
    of_members = np.stack(
        [coverage(means[:, m], variances[:, m], true) for m in range(MEMBERS)]
    )
    ensemble_nll = jnp.mean(nll(mean, variance, true))
    member_nll = jnp.mean(nll(means, variances, true[:, None]))
    error = float(np.abs(of_ensemble - LEVELS).max())
    member_error = np.abs(of_members - LEVELS).max(axis=1).mean()
    print(f"negative log likelihood {ensemble_nll:.3f}; of a member {member_nll:.3f}")
    print(f"largest error of an interval {error:.1%}; of a member {member_error:.1%}")
    if path is not None:
        import _pictures  # needs matplotlib

        shown = (np.ravel(x) for x in (mean, variance, true))
        _pictures.ensemble(path, LEVELS, of_ensemble, of_members, *shown)

    assert ensemble_nll + 0.02 <= member_nll, (ensemble_nll, member_nll)
    assert error <= tolerance, of_ensemble
    assert error < member_error, (error, member_error)
    return error


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
