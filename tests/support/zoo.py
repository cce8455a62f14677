"""Models that are written twice: in place, and by hand with the state passed along.

`__call__` runs in a scope of `es.mutable`, and may use transforms of `es`. `by_hand`
returns `(output, new model)`, without scopes and transforms, only with Python loops.
Input and output of a model have the same shape, so that a loop can call it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float

import eqx_state as es


def split(key: Any, num: int) -> Any:
    """`num` keys along a new leading axis; also for arrays of keys, and legacy keys."""
    ndim = 0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1
    if key.ndim == ndim:
        return jr.split(key, num)
    return jnp.stack([split(key[i], num) for i in range(key.shape[0])], axis=1)


def dropped(x: Any, key: Any, p: float) -> Any:
    return jnp.where(jr.bernoulli(key, 1 - p, x.shape), x / (1 - p), jnp.zeros_like(x))


def normalized(norm: Any, xs: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Normalize by the batch's own moments; also return the layer with new averages."""
    shape = [1 if i in axes else n for i, n in enumerate(xs.shape)]
    mean, var = jnp.mean(xs, axes), jnp.var(xs, axes)
    y = (xs - mean.reshape(shape)) / jnp.sqrt(var + norm.eps).reshape(shape)
    y = y * norm.weight.reshape(shape) + norm.bias.reshape(shape)
    count = norm.count + 1
    weight = (1 - norm.momentum) / (1 - norm.momentum**count)
    mean, var = (
        norm.mean + weight * (mean - norm.mean),
        norm.var + weight * (var - norm.var),
    )
    mean, var = jax.lax.stop_gradient((mean, var))
    return y, norm.replace(mean=mean, var=var, count=count)


class Dense(es.Module):
    weight: es.Parameter[Float[Array, "features features"]]
    bias: es.Parameter[Float[Array, " features"]]

    def __init__(self, size: int = 2, *, key: Any):
        wkey, bkey = jr.split(key)
        self.weight = jr.normal(wkey, (size, size))
        self.bias = jr.normal(bkey, (size,))

    def __call__(self, x, *, key=None):
        return jnp.tanh(self.weight @ x + self.bias)


class Counted(es.Module):
    """Counts its calls, and stores a running mean, which is differentiated."""

    dense: Dense
    count: es.State
    mean: es.BatchStat

    def __init__(self, *, key: Any):
        self.dense = Dense(key=key)
        self.count = jnp.array(0)
        self.mean = jnp.zeros(2)

    def __call__(self, x, *, key=None):
        y = self.dense(x)
        self.count = self.count + 1
        self.mean = 0.5 * self.mean + 0.5 * y
        return y - 0.1 * self.mean

    def by_hand(self, x):
        y = jnp.tanh(self.dense.weight @ x + self.dense.bias)
        mean = 0.5 * self.mean + 0.5 * y
        return y - 0.1 * mean, self.replace(count=self.count + 1, mean=mean)


class MLP(es.Module):
    layers: list[Dense]

    def __init__(self, *, key: Any):
        self.layers = [Dense(key=k) for k in jr.split(key, 2)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def by_hand(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer.weight @ x + layer.bias)
        return x, self


class ConvNet(es.Module):
    """Convolves and normalizes one image at a time, under a named axis."""

    conv: eqx.nn.Conv2d
    norm: es.nn.BatchNorm

    def __init__(self, *, key: Any):
        self.conv = eqx.nn.Conv2d(1, 1, 3, padding=1, key=key)
        self.norm = es.nn.BatchNorm(1, axis_name="batch", momentum=0.5)

    def __call__(self, xs):
        return es.vmap(lambda x: self.norm(self.conv(x)), axis_name="batch")(xs)

    def by_hand(self, xs):
        xs = jnp.stack([self.conv(x) for x in xs])
        y, norm = normalized(self.norm, xs, (0, 2, 3))
        return y, self.replace(norm=norm)


class BatchNet(es.Module):
    """Normalizes a whole batch."""

    dense: Dense
    norm: es.nn.BatchNorm

    def __init__(self, *, key: Any):
        self.dense = Dense(key=key)
        self.norm = es.nn.BatchNorm(2, momentum=0.5)

    def __call__(self, xs):
        return self.norm(jax.vmap(self.dense)(xs))

    def by_hand(self, xs):
        xs = jnp.tanh(xs @ self.dense.weight.T + self.dense.bias[None])
        y, norm = normalized(self.norm, xs, (0,))
        return y, self.replace(norm=norm)


class DropoutNet(es.Module):
    linear: eqx.nn.Linear
    dropout: es.nn.Dropout

    def __init__(self, *, key: Any):
        self.linear = eqx.nn.Linear(2, 2, key=key)
        self.dropout = es.nn.Dropout(0.4, key=jr.fold_in(key, 1))

    def __call__(self, x):
        return jnp.tanh(self.dropout(self.linear(x)))

    def by_hand(self, x):
        rng, key = jr.split(self.dropout.rng)
        x = dropped(self.linear.weight @ x + self.linear.bias, key, 0.4)
        return jnp.tanh(x), self.replace(dropout=self.dropout.replace(rng=rng))


class Nested(es.Module):
    """Modules and states in lists, dicts and tuples."""

    blocks: dict[str, Any]
    pairs: list[tuple[es.Parameter, es.State]]
    stats: dict[str, es.BatchStat]

    def __init__(self, *, key: Any):
        a, b, c = jr.split(key, 3)
        self.blocks = {"a": [Counted(key=a), Counted(key=b)], "b": (Dense(key=c),)}
        self.pairs = [(jnp.ones(2), jnp.zeros(2)), (jnp.full(2, 2.0), jnp.ones(2))]
        self.stats = {"last": jnp.zeros(2), "steps": jnp.array(0)}

    def __call__(self, x):
        for block in (*self.blocks["a"], *self.blocks["b"]):
            x = block(x)
        self.pairs = [(w, s + w * x) for w, s in self.pairs]
        self.stats = {**self.stats, "last": x}
        self.stats = {**self.stats, "steps": self.stats["steps"] + 1}
        return x + 0.1 * self.pairs[1][1]

    def by_hand(self, x):
        blocks = []
        for block in self.blocks["a"]:
            x, block = block.by_hand(x)
            blocks.append(block)
        x = self.blocks["b"][0](x)
        pairs = [(w, s + w * x) for w, s in self.pairs]
        stats = {"last": x, "steps": self.stats["steps"] + 1}
        blocks = {**self.blocks, "a": blocks}
        new = self.replace(blocks=blocks, pairs=pairs, stats=stats)
        return x + 0.1 * pairs[1][1], new


class RNN(es.Module):
    """Stores its hidden state between calls."""

    w: es.Parameter
    u: es.Parameter
    h: es.State

    def __init__(self, *, key: Any):
        self.w, self.u = jr.normal(key, (2, 2, 2))
        self.h = jnp.zeros(2)

    def __call__(self, x):
        self.h = jnp.tanh(self.w @ x + self.u @ self.h)
        return self.h

    def by_hand(self, x):
        h = jnp.tanh(self.w @ x + self.u @ self.h)
        return h, self.replace(h=h)


class Sequence(es.Module):
    """Scans over time, with a cell and a dropout in its fields."""

    cell: RNN
    dropout: es.nn.Dropout

    def __init__(self, *, key: Any):
        self.cell = RNN(key=key)
        self.dropout = es.nn.Dropout(0.4, key=jr.fold_in(key, 1))

    def __call__(self, xs):
        def step(total, x):
            y = self.dropout(self.cell(x))
            return total + y, y - total

        total, ys = es.scan(step, jnp.zeros(2), xs)
        return ys + total[None]

    def by_hand(self, xs):
        total, ys, cell, rng = jnp.zeros(2), [], self.cell, self.dropout.rng
        for x in xs:
            y, cell = cell.by_hand(x)
            rng, key = jr.split(rng)
            y = dropped(y, key, 0.4)
            ys.append(y - total)
            total = total + y
        new = self.replace(cell=cell, dropout=self.dropout.replace(rng=rng))
        return jnp.stack(ys) + total[None], new


class Stack(es.Module):
    """A stack of layers, run by a scan."""

    layers: Counted

    def __init__(self, *, key: Any):
        self.layers = eqx.filter_vmap(lambda k: Counted(key=k))(jr.split(key, 3))

    def __call__(self, x):
        return es.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]

    def by_hand(self, x):
        new = []
        for i in range(3):
            layer = jax.tree.map(lambda a, i=i: a[i], self.layers)
            x, layer = layer.by_hand(x)
            new.append(layer)
        return x, self.replace(layers=jax.tree.map(lambda *a: jnp.stack(a), *new))


class Ensemble(es.Module):
    """Members with their own parameters, statistics and keys."""

    members: tuple[DropoutNet, Counted]

    def __init__(self, *, key: Any):
        self.members = eqx.filter_vmap(
            lambda k: (DropoutNet(key=k), Counted(key=jr.fold_in(k, 2)))
        )(jr.split(key, 3))

    def __call__(self, x):
        def member(x):
            a, b = self.members
            return b(a(x))

        return jnp.mean(es.vmap(member, axes={...: 0}, axis_size=3, in_axes=None)(x), 0)

    def by_hand(self, x):
        ys, new = [], []
        for i in range(3):
            a, b = jax.tree.map(lambda leaf, i=i: leaf[i], self.members)
            y, a = a.by_hand(x)
            y, b = b.by_hand(y)
            ys.append(y)
            new.append((a, b))
        members = jax.tree.map(lambda *leaves: jnp.stack(leaves), *new)
        return jnp.mean(jnp.stack(ys), 0), self.replace(members=members)


class Cache(es.State):
    """A user-defined kind."""


class Attention(es.Module):
    """Attends to the inputs of earlier calls; one token per call."""

    dense: Dense
    keys: Cache
    values: Cache
    index: Cache

    def __init__(self, *, key: Any):
        self.dense = Dense(key=key)
        self.keys, self.values = jnp.zeros((5, 2)), jnp.zeros((5, 2))
        self.index = jnp.array(0)

    def __call__(self, x):
        self.keys = self.keys.at[self.index].set(self.dense(x))
        self.values = self.values.at[self.index].set(x)
        self.index = self.index + 1
        seen = jnp.arange(5) < self.index
        scores = jnp.where(seen, self.keys @ x, jnp.full(5, -1e9))
        return jax.nn.softmax(scores) @ self.values

    def by_hand(self, x):
        i = self.index
        key = jnp.tanh(self.dense.weight @ x + self.dense.bias)
        keys, values = self.keys.at[i].set(key), self.values.at[i].set(x)
        scores = jnp.where(jnp.arange(5) <= i, keys @ x, jnp.full(5, -1e9))
        y = jax.nn.softmax(scores) @ values
        return y, self.replace(keys=keys, values=values, index=i + 1)


def weight_of_first(pair: Any) -> Any:
    return pair[0].weight


def weight_of_second(pair: Any) -> Any:
    return pair[1].weight


class Tied(es.Module):
    """Two layers with one weight."""

    shared: eqx.nn.Shared
    calls: es.State

    def __init__(self, *, key: Any):
        pair = (Dense(key=key), eqx.nn.Linear(2, 2, key=jr.fold_in(key, 1)))
        self.shared = eqx.nn.Shared(pair, weight_of_second, weight_of_first)
        self.calls = jnp.array(0)

    def __call__(self, x):
        first, second = self.shared()
        self.calls = self.calls + 1
        return second(first(x))

    def by_hand(self, x):
        first, second = self.shared.pytree
        x = jnp.tanh(first.weight @ x + first.bias)
        return first.weight @ x + second.bias, self.replace(calls=self.calls + 1)


class Frozen(es.Module):
    """A frozen part, a part that is a buffer, and a head that is trained."""

    backbone: BatchNet
    constant: es.Buffer[Dense]
    head: Counted

    def __init__(self, *, key: Any):
        a, b, c = jr.split(key, 3)
        self.backbone = BatchNet(key=a).freeze()
        self.constant = Dense(key=b)
        self.head = Counted(key=c)

    def __call__(self, x):
        return self.head(self.constant(self.backbone(x[None])[0]))

    def by_hand(self, x):
        norm = self.backbone.norm
        x = self.backbone.dense(x)
        x = (x - norm.mean) / jnp.sqrt(norm.var + norm.eps) * norm.weight + norm.bias
        x = jnp.tanh(self.constant.weight @ x + self.constant.bias)
        y, head = self.head.by_hand(x)
        return y, self.replace(head=head)


SGD = optax.sgd(0.1, momentum=0.9)


class Learner(es.Module):
    """Contains an optimizer, and takes one step of it per call."""

    dense: Dense
    fast: es.State
    optimizer: es.Optimizer

    def __init__(self, *, key: Any):
        self.dense = Dense(key=key)
        self.fast = jnp.ones(2)
        self.optimizer = es.Optimizer(SGD).init({"fast": self.fast})

    def __call__(self, x):
        y = self.dense(x)
        grads = {"fast": 2 * (self.fast - y)}
        fast, self.optimizer = self.optimizer.update(grads, {"fast": self.fast})
        self.fast = fast["fast"]
        return y * self.fast

    def by_hand(self, x):
        y = jnp.tanh(self.dense.weight @ x + self.dense.bias)
        where = lambda o: o.opt_state[0].trace["fast"]  # noqa: E731
        trace = 0.9 * where(self.optimizer) + 2 * (self.fast - y)
        fast = self.fast - 0.1 * trace
        optimizer = eqx.tree_at(where, self.optimizer, trace)
        return y * fast, self.replace(fast=fast, optimizer=optimizer)


class Spectral(es.Module):
    """Wraps a stateful Equinox layer."""

    layer: es.nn.Stateful

    def __init__(self, *, key: Any):
        linear = eqx.nn.Linear(2, 2, use_bias=False, key=key)
        norm = eqx.nn.SpectralNorm(linear, "weight", key=jr.fold_in(key, 1))
        self.layer = es.nn.Stateful(norm)

    def __call__(self, x):
        return self.layer(x)

    def by_hand(self, x):
        norm = self.layer.layer
        weight, (_, v) = norm.layer.weight, norm.uv_index.init
        fixed = jax.lax.stop_gradient(weight)
        u = fixed @ v
        u = u / jnp.sqrt(u @ u)
        v = fixed.T @ u
        v = v / jnp.sqrt(v @ v)
        y = weight @ x / (u @ weight @ v)
        return y, eqx.tree_at(lambda m: m.layer.layer.uv_index.init, self, (u, v))


class Average(es.State, covering=True):
    """A covering kind."""


class Averaged(es.Module):
    """Averages its parameters, and draws from a typed and a legacy key."""

    dense: Dense
    average: Average[Dense]
    stream: es.RngStream
    legacy: es.Rng

    def __init__(self, *, key: Any):
        self.dense = Dense(key=key)
        self.average = Dense(key=jr.fold_in(key, 1))
        self.stream = es.RngStream(jr.fold_in(key, 2))
        self.legacy = jr.PRNGKey(3)

    def __call__(self, x):
        self.average = es.map(
            lambda a, b: 0.5 * (a + b), self.average, self.dense, on=es.Parameter
        )
        self.legacy, key = jr.split(self.legacy)
        x = x + jr.normal(self.stream(), x.shape) + jr.normal(key, x.shape)
        return self.average(x)

    def by_hand(self, x):
        a, b = self.average, self.dense
        a = a.replace(weight=0.5 * (a.weight + b.weight), bias=0.5 * (a.bias + b.bias))
        (key, key0), (legacy, key1) = jr.split(self.stream.key), jr.split(self.legacy)
        x = x + jr.normal(key0, x.shape) + jr.normal(key1, x.shape)
        stream = self.stream.replace(key=key)
        new = self.replace(average=a, stream=stream, legacy=legacy)
        return jnp.tanh(a.weight @ x + a.bias), new


class Router(es.Module):
    """Calls one of several experts, which is recomputed for the gradient."""

    experts: list[Any]
    uses: es.State

    def __init__(self, *, key: Any):
        a, b, c = jr.split(key, 3)
        self.experts = [Counted(key=a), DropoutNet(key=b), Dense(key=c)]
        self.uses = jnp.array(0)

    def __call__(self, x):
        self.uses = self.uses + 1
        branches = [es.checkpoint(expert) for expert in self.experts]
        return es.switch((self.uses - 1) % 3, branches, x)

    def by_hand(self, x):
        i = int(self.uses) % 3
        if i == 2:
            return self.experts[2](x), self.replace(uses=self.uses + 1)
        y, expert = self.experts[i].by_hand(x)
        experts = [expert if i == j else old for j, old in enumerate(self.experts)]
        return y, self.replace(experts=experts, uses=self.uses + 1)


# --- Models that are not an `es.Module` ---------------------------------------------


def make_sequential(*, key: Any) -> Any:
    a, b, c, d = jr.split(key, 4)
    dropout, tanh = es.nn.Dropout(0.4, key=c), eqx.nn.Lambda(jnp.tanh)
    linear = eqx.nn.Linear(2, 2, key=a)
    return eqx.nn.Sequential([linear, dropout, tanh, Counted(key=b), Dense(key=d)])


def sequential_by_hand(model: Any, x: Any) -> Any:
    linear, dropout, _, counted, dense = model.layers
    rng, key = jr.split(dropout.rng)
    x = jnp.tanh(dropped(linear.weight @ x + linear.bias, key, 0.4))
    x, counted = counted.by_hand(x)
    where = lambda m: (m.layers[1].rng, m.layers[3])  # noqa: E731
    return dense(x), eqx.tree_at(where, model, (rng, counted))


def make_tree(*, key: Any) -> Any:
    keys = jr.split(key, 3)
    a, b, c = (Counted(key=keys[0]), DropoutNet(key=keys[1]), Counted(key=keys[2]))
    return {"nets": [a, b], "scale": jnp.array([1.0, 2.0]), "pair": (c, "name")}


def call_tree(model: Any, x: Any) -> Any:
    for net in (*model["nets"], model["pair"][0]):
        x = net(x)
    return x * model["scale"]


def tree_by_hand(model: Any, x: Any) -> Any:
    new = []
    for net in (*model["nets"], model["pair"][0]):
        x, net = net.by_hand(x)
        new.append(net)
    x = x * model["scale"]
    return x, {**model, "nets": new[:2], "pair": (new[2], "name")}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in both versions, and the shape of its input and output."""

    make: Callable[..., Any]
    shape: tuple[int, ...] = (2,)
    call: Callable[[Any, Any], Any] = lambda model, x: model(x)
    by_hand: Callable[[Any, Any], Any] = lambda model, x: model.by_hand(x)

    def model(self) -> Any:
        """A new model for each call, with keys that have not been drawn from."""
        return self.make(key=jr.key(7))

    def inputs(self, num: int = 3) -> Any:
        return jr.normal(jr.key(11), (num, *self.shape))


# JAX < 0.10.2 cannot compile the gradient of a `switch` whose branches are checkpointed
# if one of them draws from a typed key.
WITHOUT_GRADS = {"router"} if jax.__version_info__ < (0, 10, 2) else set()

CASES = {
    "mlp": Case(MLP),
    "conv and batch norm": Case(ConvNet, (2, 1, 3, 3)),
    "batch norm": Case(BatchNet, (3, 2)),
    "nested containers": Case(Nested),
    "rnn": Case(RNN),
    "sequence": Case(Sequence, (3, 2)),
    "stack of layers": Case(Stack),
    "ensemble": Case(Ensemble),
    "cache": Case(Attention),
    "tied weights": Case(Tied),
    "frozen halves": Case(Frozen),
    "optimizer inside": Case(Learner),
    "spectral norm": Case(Spectral),
    "average and keys": Case(Averaged),
    "router": Case(Router),
    "sequential": Case(make_sequential, by_hand=sequential_by_hand),
    "tree": Case(make_tree, call=call_tree, by_hand=tree_by_hand),
}
