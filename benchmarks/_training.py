"""One training step, written with this library and with others."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
from _common import by_hand, EPS, hand_block
from jaxtyping import Array, Float, Int

import eqx_state as es


DROP, CLASSES, MOMENTUM = 0.1, 10, 0.99
ADAM = optax.adam(1e-3)
FLOOR, REFERENCE = "jax.jit, flat list", "jax.jit, nested dicts"
OURS, READ = "es.jit", "es.jit, result read"
FILTER_JIT, NNX = "es model, eqx.filter_jit", "NNX, nnx.jit"
PLAIN_JIT = "jax.jit"
WARM_UP = 5

Batch = Float[Array, "batch width"]
Labels = Int[Array, " batch"]
Loss = Float[Array, ""]
Step = Callable[..., tuple[Loss, Any]]
Data = tuple[Batch, Labels]


def cross_entropy(logits: Float[Array, "batch classes"], y: Labels) -> Loss:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@dataclasses.dataclass
class Times:
    """Seconds of each step: until the call returned, until it was ready, CPU time."""

    returned: list[float] = dataclasses.field(default_factory=list)
    ready: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Program:
    """A step, from a state to a loss and the next state, with its measurements.

    `times` has the times of steps in a row, as a user runs them. `turns` has those of
    single steps, when the programs take turns after every step.
    """

    step: Step
    state: Any
    first_loss: float = 0.0
    times: Times = dataclasses.field(default_factory=Times)
    turns: Times = dataclasses.field(default_factory=Times)

    def warm_up(self, data: Data) -> None:
        losses = []
        for _ in range(WARM_UP):
            loss, self.state = self.step(self.state, *data)
            losses.append(float(loss))
        self.first_loss = losses[0]

    def run(self, data: Data, times: Times | None = None) -> None:
        times = self.times if times is None else times
        cpu, start = time.thread_time(), time.perf_counter()
        loss, self.state = self.step(self.state, *data)
        returned = time.perf_counter() - start
        times.cpu.append(time.thread_time() - cpu)
        times.returned.append(returned)
        loss.block_until_ready()  # the outputs of one program are ready together
        times.ready.append(time.perf_counter() - start)


# With `eqx_state`.
class Block(es.Module):
    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm
    dropout: es.nn.Dropout

    def __init__(self, width: int, key: Array):
        linear, dropout = jr.split(key)
        self.linear = eqx.nn.Linear(width, width, key=linear)
        self.norm = es.nn.BatchNorm(width, momentum=MOMENTUM, debias=False)
        self.dropout = es.nn.Dropout(DROP, key=dropout)

    def __call__(self, x: Batch) -> Batch:
        y = self.norm(jax.vmap(self.linear)(x))
        return self.dropout(jax.nn.relu(y))


class Net(es.Module):
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, depth: int, width: int, key: Array):
        head, *keys = jr.split(key, depth + 1)
        self.blocks = [Block(width, key) for key in keys]
        self.head = eqx.nn.Linear(width, CLASSES, key=head)

    def __call__(self, x: Batch) -> Float[Array, "batch classes"]:
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def es_model(depth: int, width: int) -> tuple[Net, es.Optimizer]:
    net = Net(depth, width, jr.key(0))
    return net, es.Optimizer(ADAM).init(net)


def is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def touch(model: tuple[Net, es.Optimizer], x: Batch, y: Labels) -> tuple[Loss, Any]:
    """A step with the same arrays, which XLA compiles quickly at any depth."""
    new = jtu.tree_map(lambda x: x + 1 if eqx.is_inexact_array(x) else x, model)
    return jnp.sum(x), new


def es_loss(net: Net, x: Batch, y: Labels) -> Loss:
    return cross_entropy(net(x), y)


def es_step(model: tuple[Net, es.Optimizer], x: Batch, y: Labels) -> tuple[Loss, Any]:
    net, optimizer = model
    (loss, net), grads = es.value_and_grad(es_loss)(net, x, y)
    return loss, optimizer.update(grads, net)


# The same by hand.
def hand_model(model: tuple[Net, es.Optimizer]) -> Any:
    """The parameters, the state of the layers, and the state of adam."""
    net, _ = model
    blocks, layers = by_hand(net.blocks)
    head = {"matrix": net.head.weight, "offset": net.head.bias}
    params = {"blocks": blocks, "head": head}
    return params, layers, ADAM.init(params)


def hand_loss(params: Any, layers: Any, x: Batch, y: Labels) -> tuple[Loss, Any]:
    new = []
    for p, s in zip(params["blocks"], layers, strict=True):
        x, s = hand_block(p, s, x, jax.nn.relu, MOMENTUM)
        new.append(s)
    return cross_entropy(_hand_linear(params["head"], x), y), new


def hand_step(state: Any, x: Batch, y: Labels) -> tuple[Loss, Any]:
    params, layers, opt_state = state
    value_and_grad = jax.value_and_grad(hand_loss, has_aux=True)
    (loss, layers), grads = value_and_grad(params, layers, x, y)
    updates, opt_state = ADAM.update(grads, opt_state)
    return loss, (optax.apply_updates(params, updates), layers, opt_state)


def hand_eval_loss(state: Any, x: Batch, y: Labels) -> Loss:
    params, layers, _ = state
    for p, s in zip(params["blocks"], layers, strict=True):
        z = _hand_linear(p, x)
        scale = jax.lax.rsqrt(s["var"] + EPS) * p["scale"]
        x = jax.nn.relu((z - s["mean"]) * scale + p["shift"])
    return cross_entropy(_hand_linear(params["head"], x), y)


def _hand_linear(params: Any, x: Batch) -> Float[Array, "batch out"]:
    return jax.vmap(lambda x: params["matrix"] @ x + params["offset"])(x)


# The same function, with the arrays of the model in other containers.
def numbered(tree: Any) -> dict[str, Any]:
    """Nested dicts with the paths of this tree, and the numbers of its leaves."""
    dicts: dict[str, Any] = {}
    for i, (path, _) in enumerate(jtu.tree_leaves_with_path(tree)):
        *way, last = (jtu.keystr((key,)) for key in path)
        node = dicts
        for key in way:
            node = node.setdefault(key, {})
        node[last] = i
    return dicts


def es_and_hand(
    depth: int, width: int, step: Step = es_step
) -> Iterator[tuple[str, Program]]:
    return ways(es_model(depth, width), step)


def ways(model: Any, step: Step) -> Iterator[tuple[str, Program]]:
    """A step of this model under `es.jit`, `eqx.filter_jit` and `jax.jit`."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    flat, treedef = jtu.tree_flatten(arrays)
    numbers, dicts_def = jtu.tree_flatten(numbered(arrays))

    def flat_step(flat: list[Array], x: Batch, y: Labels) -> tuple[Loss, list[Array]]:
        model = eqx.combine(jtu.tree_unflatten(treedef, flat), rest)
        loss, model = step(model, x, y)
        return loss, jtu.tree_leaves(eqx.filter(model, eqx.is_array))

    def to_dicts(flat: list[Array]) -> Any:
        return jtu.tree_unflatten(dicts_def, [flat[i] for i in numbers])

    def dict_step(dicts: Any, x: Batch, y: Labels) -> tuple[Loss, Any]:
        of_number = dict(zip(numbers, jtu.tree_leaves(dicts), strict=True))
        loss, flat = flat_step([of_number[i] for i in range(len(numbers))], x, y)
        return loss, to_dicts(flat)

    yield FLOOR, Program(jax.jit(flat_step), flat)
    yield REFERENCE, Program(jax.jit(dict_step), to_dicts(flat))

    def step_and_read(model: Any, x: Batch, y: Labels) -> tuple[Loss, Any]:
        loss, model = jitted(model, x, y)
        jtu.tree_map(vars, model, is_leaf=is_module)  # as any attribute does
        return loss, model

    jitted = es.jit(lambda *args: step(*args))  # with plans of its own
    yield OURS, Program(es.jit(step), model)
    yield READ, Program(step_and_read, model)
    yield FILTER_JIT, Program(eqx.filter_jit(step), model)


# With other libraries. The state includes the random keys and the optimizer's state.
class StockBlock(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, width: int, key: Array):
        self.linear = eqx.nn.Linear(width, width, key=key)
        self.norm = eqx.nn.BatchNorm(width, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(DROP)

    def __call__(self, x: Any, state: eqx.nn.State, key: Array) -> Any:
        y, state = self.norm(self.linear(x), state)
        return self.dropout(jax.nn.relu(y), key=key), state


class StockNet(eqx.Module):
    blocks: list[StockBlock]
    head: eqx.nn.Linear

    def __init__(self, depth: int, width: int, key: Array):
        head, *keys = jr.split(key, depth + 1)
        self.blocks = [StockBlock(width, key) for key in keys]
        self.head = eqx.nn.Linear(width, CLASSES, key=head)

    def __call__(self, x: Any, state: eqx.nn.State, key: Array) -> Any:
        for block, k in zip(self.blocks, jr.split(key, len(self.blocks)), strict=True):
            x, state = block(x, state, k)
        return self.head(x), state


def equinox(depth: int, width: int) -> Iterator[tuple[str, Program]]:
    net, layers = eqx.nn.make_with_state(StockNet)(depth, width, jr.key(0))

    def loss_fn(net: StockNet, layers: Any, key: Array, x: Batch, y: Labels) -> Any:
        forward = jax.vmap(
            net, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch"
        )
        logits, layers = forward(x, layers, jr.split(key, len(x)))
        return cross_entropy(logits, y), layers

    def step(state: Any, x: Batch, y: Labels) -> tuple[Loss, Any]:
        net, layers, opt_state, next_key = state
        next_key, key = jr.split(next_key)
        value_and_grad = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, layers), grads = value_and_grad(net, layers, key, x, y)
        updates, opt_state = ADAM.update(grads, opt_state)
        return loss, (eqx.apply_updates(net, updates), layers, opt_state, next_key)

    opt_state = ADAM.init(eqx.filter(net, eqx.is_inexact_array))
    state = net, layers, opt_state, jr.key(1)
    yield "Equinox stock, eqx.filter_jit", Program(eqx.filter_jit(step), state)


def nnx(depth: int, width: int) -> Iterator[tuple[str, Program]]:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(width, width, rngs=rngs)
            self.norm = nnx.BatchNorm(width, rngs=rngs)
            self.dropout = nnx.Dropout(DROP, rngs=rngs)

        def __call__(self, x: Batch) -> Batch:
            return self.dropout(nnx.relu(self.norm(self.linear(x))))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
            self.head = nnx.Linear(width, CLASSES, rngs=rngs)

        def __call__(self, x: Batch) -> Float[Array, "batch classes"]:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def make() -> tuple[Net, nnx.Optimizer]:
        net = Net(nnx.Rngs(0))
        return net, nnx.Optimizer(net, ADAM, wrt=nnx.Param)

    def step(net: Net, optimizer: nnx.Optimizer, x: Batch, y: Labels) -> Loss:
        def loss_fn(net: Net) -> Loss:
            return cross_entropy(net(x), y)

        loss, grads = nnx.value_and_grad(loss_fn)(net)
        optimizer.update(net, grads)
        return loss

    jitted = nnx.jit(step)
    yield NNX, Program(lambda model, x, y: (jitted(*model, x, y), model), make())

    cached = nnx.cached_partial(jitted, *make())
    yield "NNX, cached_partial", Program(lambda _, x, y: (cached(x, y), None), None)

    partial = nnx.jit_partial(step, *make(), graph=False)
    yield "NNX, jit_partial", Program(lambda _, x, y: (partial(x, y), None), None)

    tree = nnx.jit(step, graph=False)
    yield "NNX, nnx.jit as a tree", Program(lambda m, x, y: (tree(*m, x, y), m), make())

    graph, state = nnx.split(make())

    def pure_step(state: Any, x: Batch, y: Labels) -> tuple[Loss, Any]:
        model = nnx.merge(graph, state)
        return step(*model, x, y), nnx.as_pure(nnx.state(model))

    pure = nnx.as_pure(state)
    yield "NNX, jax.jit on pure state", Program(jax.jit(pure_step), pure)


def haiku(depth: int, width: int) -> Iterator[tuple[str, Program]]:
    import haiku as hk

    def forward(x: Batch) -> Float[Array, "batch classes"]:
        for _ in range(depth):
            norm = hk.BatchNorm(True, True, MOMENTUM)
            y = jax.nn.relu(norm(hk.Linear(width)(x), is_training=True))
            x = hk.dropout(hk.next_rng_key(), DROP, y)
        return hk.Linear(CLASSES)(x)

    net = hk.transform_with_state(forward)

    def loss_fn(params: Any, layers: Any, key: Array, x: Batch, y: Labels) -> Any:
        logits, layers = net.apply(params, layers, key, x)
        return cross_entropy(logits, y), layers

    def step(state: Any, x: Batch, y: Labels) -> tuple[Loss, Any]:
        params, layers, opt_state, next_key = state
        next_key, key = jr.split(next_key)
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, layers), grads = value_and_grad(params, layers, key, x, y)
        updates, opt_state = ADAM.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return loss, (params, layers, opt_state, next_key)

    params, layers = net.init(jr.key(0), jnp.ones((2, width)))
    state = params, layers, ADAM.init(params), jr.key(1)
    yield "Haiku, jax.jit", Program(jax.jit(step), state)
