"""Every program of the other tables in `docs/troubleshooting.md` ends as it says."""

import copy
import dataclasses
import functools as ft
import pickle
import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import reuses_keys
from misuse import fails, FROZEN, Layer, loss_fn, Net, Page, XS

import eqx_state as es


PAGE = Page(messages=False)
program = PAGE.program


@reuses_keys
@pytest.mark.parametrize("title", PAGE.rows)
def test_what_happens(title, net):
    PAGE.programs[title](net)


def trained(loss, model):
    """The model and the optimizer after one step."""
    grads, model = es.grad(loss)(model)
    sgd = optax.sgd(optax.constant_schedule(0.1))  # which counts its steps
    return es.Optimizer(sgd).init(model).update(grads, model)


# --- Programs that work ---------------------------------------------------------------


@program("drop the result of `train`, `eval`, `freeze`, `update`, `replace` or `init`")
def _(net):
    net.eval()
    net.freeze()
    net.update(es.map(lambda w: w + 1.0, net, on=es.Parameter))
    net.replace(mean=XS)
    net.init(0)
    net.train(False)
    assert net.training
    assert not net.eval().training


@program("write `self.mean.at[0].set(1.0)` and drop the result")
def _(net):
    before = net.mean
    _, new = es.mutable(lambda net: net.mean.at[0].set(1.0))(net)
    assert (new.mean == before).all()


@program("keep a number to train in a plain field: `scale: float = 1.0`")
def _(net):
    class Scale(es.Module):
        net: Net
        scale: float = 1.0

    new, _ = trained(lambda model: model.scale * loss_fn(model.net), Scale(net))
    assert new.scale == 1.0


@program("declare a constant as `table: jax.Array`")
def _(net):
    class Table(es.Module):
        table: jax.Array
        constant: es.Buffer

    model = Table(jnp.ones(3), jnp.ones(3))
    new, _ = trained(lambda model: jnp.sum(model.table * model.constant), model)
    assert (new.table != 1).all()
    assert (new.constant == 1).all()


@program("create a layer in `__call__`, as Flax does")
def _(net):
    class Compact(es.Module):
        net: Net

        def __call__(self, x):
            return eqx.nn.Linear(3, 1, key=jax.random.key(0))(self.net(x))

    new, _ = trained(lambda model: model(XS).sum(), Compact(net))
    assert [part.name for part in es.parts(new)] == [
        f"net.{part.name}" for part in es.parts(net)
    ]


@program("use the model from before the call again")
def _(net):
    first, second = es.mutable(net)(XS), es.mutable(net)(XS)
    assert eqx.tree_equal(first, second)
    assert first[1].layer.count == 1


@program("forget `eval` when you test a model in `es.mutable`")
def _(net):
    norm = es.nn.BatchNorm(3)
    assert (es.mutable(norm)(XS[None])[1].mean != norm.mean).any()
    assert eqx.tree_equal(es.mutable(norm.eval())(XS[None])[1], norm.eval())


@program("switch the mode by `eqx.nn.inference_mode(model)`")
def _(net):
    model = [es.nn.BatchNorm(3), eqx.nn.Dropout(0.5), {"net": net}]
    new = eqx.nn.inference_mode(model)
    assert eqx.tree_equal(new, es.eval(model))
    assert not new[0].training
    assert eqx.tree_equal(eqx.nn.inference_mode(new, value=False), model)


@program("switch the mode of an array: `es.eval(x)`")
def _(net):
    assert es.eval(XS) is XS


@program("call `init` twice")
def _(net):
    model = es.init([es.lazy(eqx.nn.Linear, 3, 1)], 0)
    assert eqx.tree_equal(es.init(model, 1), model)


@program("share an Equinox layer without state between two places")
def _(net):
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    assert len(es.parts({"a": linear, "b": linear})) == 4


@program("compute from state in a `functools.cached_property`")
def _(net):
    class Scaled(es.Module):
        count: es.State = 1.0

        @ft.cached_property
        def double(self):
            return 2 * self.count

        def __call__(self):
            before = self.double
            self.count = self.count + 1
            return before, self.double

    model = Scaled()
    result, new = es.mutable(model)()
    assert result == (2.0, 4.0)
    assert (model.double, new.double) == (2.0, 4.0)


@program("set an entry of a dict of state: `self.stats[name] = x`")
def _(net):
    f = es.mutable(lambda net, x: net.stats.__setitem__("last", x.sum()))
    for run in (f, es.jit(f)):
        assert run(net, XS)[1].stats["last"] == 3.0


class Draw(es.Module):
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def __call__(self, x):
        self.rng, key = jr.split(self.rng)
        return x + jr.normal(key, x.shape)


@program("draw from `self.rng` without advancing it")
def _(net):
    class Wrong(Draw):
        def __call__(self, x):
            return x + jr.normal(self.rng, x.shape)

    a, new = es.mutable(Wrong())(XS)
    assert (es.mutable(new)(XS)[0] == a).all()


@program("make two layers with one key")
def _(net):
    models = [Draw(), Draw()]
    draw = es.mutable(lambda ms: [m(XS) for m in ms])
    (a, b), _ = draw(models)
    (c, d), _ = draw(es.reseed(models, jr.key(5)))
    assert (a == b).all()
    assert (c != d).any()


@program("pass two kinds: `es.filter(model, es.Parameter, es.State)`")
def _(net):
    kinds = es.Parameter, es.State
    assert jax.tree.leaves(es.filter(net, *kinds)) == []
    with pytest.raises(ValueError, match=r"es\.any_of\(es\.Parameter, es\.State\)"):
        es.save("net.safetensors", net, *kinds)
    # A kind and its subclass are no mistake.
    with pytest.raises(FileNotFoundError, match="missing"):
        es.save("missing/net.safetensors", net, es.State, es.BatchStat)


@program("select by a name that no array has")
def _(net):
    typo = es.path_matches("layer.wieght")
    selected = es.filter(net, typo), es.partition(net, typo)[0]
    assert jax.tree.leaves(selected) == []
    assert not any(jax.tree.leaves(es.mask(net, typo)))
    assert eqx.tree_equal(es.map(lambda x: x + 1.0, net, on=typo), net)


@program("ask `isinstance(x, es.Parameter)`")
def _(net):
    assert isinstance(net.mean, es.Parameter)
    assert es.parts(net.mean)[0].kind is es.Parameter  # alone, outside of its field
    assert {part.name: part.kind for part in es.parts(net)}["mean"] is es.BatchStat


@program("use PyTorch's `momentum=0.1` in `es.nn.BatchNorm`")
def _(net):
    for momentum, mean in ((0.1, 2.8), (0.9, 1.2)):
        norm = es.nn.BatchNorm(1, momentum=momentum)
        for value in [1.0] * 30 + [3.0]:  # many batches of ones, and one of threes
            _, norm = es.mutable(norm)(jnp.full((2, 1), value))
        assert jnp.allclose(norm.mean, mean, atol=0.01)


@program("normalize a batch of one example in train mode")
def _(net):
    norm = es.nn.BatchNorm(3)
    loss = lambda x: es.mutable(norm)(x)[0].sum()  # noqa: E731
    assert (es.mutable(norm)(XS[None])[0][0] == norm.bias).all()
    assert (jax.grad(loss)(XS[None]) == 0).all()


@program("sow without `es.capture`")
def _(net):
    class Sower(es.Module):
        def __call__(self, x):
            self.sow("y", 2 * x)
            return x

    model = Sower()
    assert (jax.vmap(model)(XS) == XS).all()
    assert eqx.tree_equal(es.mutable(model)(XS), (XS, model))


@program("call one model in many threads at once")
def _(net):
    results = []
    run = lambda: results.append(es.mutable(net)(XS))  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(eqx.tree_equal(r, es.mutable(net)(XS)) for r in results)


@program("raise an exception after some state was written")
def _(net):
    kept = []

    def f(net):
        net(XS)
        kept.append(net)
        raise KeyboardInterrupt("half-way")

    for run in (es.mutable(f), es.jit(es.mutable(f)), es.value_and_grad(f)):
        with pytest.raises(KeyboardInterrupt, match="half-way"):
            run(net)
    assert kept[0].layer.count == 1


@program("catch a `TraceError` and go on")
def _(net):
    def f(net, x):
        with fails(es.TraceError, "`layer.count`"):
            jax.vmap(lambda x: net.layer(x))(x)
        return net.layer(x)

    for run in (es.mutable(f), es.jit(es.mutable(f))):
        assert run(net, XS)[1].layer.count == 1


@program("catch an exception from `es.vmap` or `es.scan` in a call")
def _(net):
    def lane(net, x):
        net.layer(x)
        raise KeyError("in a lane")

    def f(net):
        net.layer(XS)
        for run in (
            lambda: es.vmap(lambda x: lane(net, x))(XS),
            lambda: es.scan(lambda c, x: (c, lane(net, x)), None, XS),
            lambda: es.jit(lambda x: lane(net, x))(XS),
        ):
            with fails(KeyError, "in a lane"):
                run()
        net.layer(XS)

    assert es.mutable(f)(net)[1].layer.count == 2


@program("compare models by `==`")
def _(net):
    assert net == Net()
    assert net != es.mutable(net)(XS)[1]
    assert net != net.eval()


@program("pickle a model, or a function of `es.mutable`")
def _(net):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        model, run = pickle.loads(pickle.dumps((net, es.mutable(net)), protocol))
        assert eqx.tree_equal(model, net)
        assert eqx.tree_equal(run(XS), es.mutable(net)(XS))


@program("copy by `dataclasses.replace(model, …)`")
def _(net):
    assert dataclasses.replace(net.layer.eval(), count=5).training
    assert not net.layer.eval().replace(count=5).training


@program("load a file that lacks some arrays, or has more, with `strict=False`")
def _(net):
    there = es.state_dict({"layer": Layer(weight=5.0), "more": XS})
    like = {"layer": net.layer, "other": XS}
    with pytest.raises(ValueError, match="strict=False"):
        es.load_state_dict(like, there)
    loaded = es.load_state_dict(like, there, strict=False)
    assert loaded["layer"].weight == 5.0
    assert loaded["other"] is like["other"]


@program("assign a field with `object.__setattr__(model, …)`")
def _(net):
    other = copy.copy(net.layer)
    object.__setattr__(other, "count", jnp.array(5))
    assert (other.count, net.layer.count) == (5, 0)
    assert jax.tree.structure(other) == jax.tree.structure(net.layer)


@program("append to a list in a static field")
def _(net):
    class Log(es.Module):
        log: list = eqx.field(static=True, default_factory=list)

        def __call__(self, x):
            self.log.append(x)

    model = Log()
    es.mutable(model)(1.0)
    assert model.log == [1.0]


# --- Transforms and training ----------------------------------------------------------


@program(
    "bind a teacher by a partial: "
    "`es.value_and_grad(ft.partial(distill, teacher))(student, x)`"
)
def _(net):
    def distill(teacher, student, x):
        return jnp.sum((student(x) - teacher(x)) ** 2)

    loss_fn = ft.partial(distill, Layer(3.0).eval())
    (loss, new), grads = es.value_and_grad(loss_fn)(Layer(1.0), XS)
    assert (new.weight, new.count, loss) == (1.0, 1, 4 * (XS**2).sum())
    assert grads.weight == -4 * (XS**2).sum()


@program(
    "differentiate a method of a plain object: "
    "`es.value_and_grad(trainer.loss)(model, x)`"
)
def _(net):
    class Trainer:
        def loss(self, model, x):
            return jnp.sum(model(x))

    (_, new), grads = es.value_and_grad(Trainer().loss)(net, XS)
    assert (new.layer.count, grads.layer.weight) == (1, XS.sum())


@program(
    "unpack the result like JAX's: `loss, grads = es.value_and_grad(loss_fn)(model)`"
)
def _(net):
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    (loss, new), grads = es.value_and_grad(loss_fn)(net)
    assert (loss, new.layer.count) == (6.0, 1)
    # With the model from before, the optimizer works, and the state is lost.
    with pytest.warns(es.LostStateWarning, match=r"`layer\.count`"):
        assert optimizer.update(grads, net)[0].layer.count == 0


@program("unpack it like JAX's with `has_aux=True`: `(loss, aux), grads = …`")
def _(net):
    f = es.value_and_grad(lambda net: (loss_fn(net), "aux"), has_aux=True)
    (loss, aux), _ = f(net)
    assert loss[1] == "aux"
    assert aux.layer.count == 1


class Trainer(es.Module):
    net: Net

    def assigned(self, rows):
        total = 0.0
        for x in rows:
            (_, self.net), grads = es.value_and_grad(squared)(self.net, x)
            total = total + grads.layer.weight
        return total

    def scanned(self, rows):
        def step(total, x):
            (loss, self.net), grads = es.value_and_grad(squared)(self.net, x)
            return total + grads.layer.weight, loss

        return es.scan(step, 0.0, rows)[0]

    def dropped(self, rows):
        net, total = self.net, 0.0
        for x in rows:
            (_, net), grads = es.value_and_grad(squared)(net, x)
            total = total + grads.layer.weight
        return total


def squared(net, x):
    return jnp.sum(net(x) ** 2)


ROWS = jnp.arange(12.0).reshape(4, 3)
TOTAL = 4 * (ROWS**2).sum()  # the weight is 2


@program("train with Equinox: `eqx.filter_grad`, `eqx.apply_updates`")
def _(net):
    class Table(es.Module):
        constant: es.Buffer

    model = Table(jnp.ones(3))
    grads = eqx.filter_grad(lambda model: jnp.sum(model.constant))(model)
    assert (eqx.apply_updates(model, grads).constant == 2).all()


@program("pass a new model to `eqx.apply_updates`")
def _(net):
    new, _ = trained(loss_fn, net)
    added = eqx.apply_updates(net, new)
    assert (added.layer.weight == net.layer.weight + new.layer.weight).all()


@program("create the optimizer in the training step")
def _(net):
    _, optimizer = trained(loss_fn, net)
    _, again = trained(loss_fn, net)
    assert optimizer.opt_state[1].count == again.opt_state[1].count == 1


@program("assign `model = model.eval()` to validate, and train on")
def _(net):
    norm = es.nn.BatchNorm(3).eval()
    new, _ = trained(lambda norm: norm(XS[None]).sum(), norm)
    assert (new.bias != norm.bias).all()
    assert (new.mean == norm.mean).all()


@program("create an ensemble from copies of one model")
def _(net):
    ensemble = jax.tree.map(lambda *xs: jnp.stack(xs), net, net)
    first = es.map(lambda x: x[0], ensemble, on=es.TreePart)
    assert eqx.tree_equal(first, es.map(lambda x: x[1], ensemble, on=es.TreePart))


@program("accumulate gradients in a scope, and assign each new module")
def _(net):
    for run in (Trainer(net).assigned, Trainer(net).scanned):
        total, trainer = es.mutable(run)(ROWS)
        assert (total, trainer.net.layer.count) == (TOTAL, 4)


@program("rebind a variable to the new module in a scope: `(loss, net), grads = …`")
def _(net):
    total, trainer = es.mutable(Trainer(net).dropped)(ROWS)
    assert (total, trainer.net.layer.count) == (TOTAL, 0)


@program("adapt a model in a loss (MAML), and drop it")
def _(net):
    def adapted_loss(net, x):
        grads, fast = es.grad(squared)(net, x)
        fast = es.map(lambda p, g: p - 0.1 * g, fast, grads, on=es.trainable)
        return squared(fast.eval(), x)

    def by_hand(weight, x):
        fast = weight - 0.1 * 2 * weight * jnp.sum(x**2)
        return jnp.sum((fast * x) ** 2)

    x = jnp.array([0.1, 0.2, 0.3])
    (loss, new), grads = es.value_and_grad(adapted_loss)(net, x)
    value, slope = jax.value_and_grad(by_hand)(net.layer.weight, x)
    assert jnp.allclose(loss, value)
    assert jnp.allclose(grads.layer.weight, slope)
    assert eqx.tree_equal(new, net)

    def of_tasks(net, xs):
        return jnp.mean(jax.vmap(lambda x: adapted_loss(net, x))(xs))

    (_, new), _ = es.value_and_grad(of_tasks)(net, jnp.stack([x, 2 * x]))
    assert eqx.tree_equal(new, net)


@program("call `es.mutable` in a call, and drop the new model")
def _(net):
    def keep(net):
        _, net.layer = es.mutable(net.layer)(XS)

    _, new = es.mutable(lambda net: es.mutable(net.layer)(XS)[0])(net)
    assert new.layer.count == 0
    assert es.mutable(keep)(net)[1].layer.count == 1


@program("use weight decay with `paramax.NonTrainable` constants")
def _(net):
    class NonTrainable(eqx.Module):
        tree: Any

        def unwrap(self):
            return jax.lax.stop_gradient(self.tree)

    def loss(model):
        return jnp.sum(model["scale"].unwrap() * model["w"])

    model = {"scale": NonTrainable(jnp.ones(2)), "w": jnp.ones(2)}
    tx = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))
    wrt = es.all_of(es.trainable, es.not_(es.inside(NonTrainable)))
    for which, scale in ((es.trainable, 0.5), (wrt, 1.0)):
        (_, new), grads = es.value_and_grad(loss, wrt=which)(model)
        new, _ = es.Optimizer(tx, wrt=which).init(model).update(grads, new)
        assert (new["scale"].tree == scale).all()


@program("return a jitted step's loss without its new model")
def _(net):
    @es.jit
    def step(net, x):
        y, net = es.mutable(net)(x)
        return y

    for _ in range(2):
        assert (step(net, XS) == 2 * XS).all()
    assert net.layer.count == 0


@program("pass `es.jit` a function that closes over a model")
def _(net):
    layer = net.layer.eval()

    def apply(x):
        return layer(x)

    for jit in (es.jit, eqx.filter_jit):
        y, same = jit(lambda f, x: (f(x), f))(apply, XS)
        assert (y == 2 * XS).all()
        assert same is apply


@program("close over a model in `es.jit`, and rebind the name")
def _(net):
    traces = []

    @es.jit
    def predict(x):
        traces.append(None)
        return model(x)

    model = net.eval()
    assert (predict(XS) == 2 * XS).all()
    model = eqx.tree_at(lambda m: m.layer.weight, model, model.layer.weight + 1.0)
    assert (predict(XS) == 2 * XS).all()
    assert len(traces) == 1


@program("pass `es.jit` a `functools.partial`, an optax transformation, a bound method")
def _(net):
    traces = []

    @es.jit
    def f(act, x):
        traces.append(None)
        return act(x)

    double = ft.partial(jnp.multiply, 2.0)
    for _ in range(2):
        assert (f(double, XS) == 2 * XS).all()
    f(ft.partial(jnp.multiply, 2.0), XS)
    assert len(traces) == 2


@program("map an ensemble without `axes`: `es.vmap(ensemble)(xs)`")
def _(net):
    ensemble = eqx.filter_vmap(Layer)(jnp.ones(3), jnp.zeros(3, int)).eval()
    assert es.vmap(ensemble)(jnp.ones((3, 3))).shape == (3, 3)
    assert es.vmap(ensemble, axes={...: 0})(jnp.ones((3, 5))).shape == (3, 5)


@program("carry a module through `es.scan`, and drop the new one")
def _(net):
    def step(cell, x):
        y = cell(x)
        return cell, y

    def dropped(net):
        _, ys = es.scan(step, net.layer, XS)

    def assigned(net):
        net.layer, ys = es.scan(step, net.layer, XS)

    assert es.mutable(dropped)(net)[1].layer.count == 0
    assert es.mutable(assigned)(net)[1].layer.count == 3


@program("scan over one layer that is not a stack, and contains no scalar")
def _(net):
    layer = Layer(XS + 1, jnp.zeros(3, int))
    f = es.mutable(lambda layer: es.scan(lambda x, m: (m(x), None), XS[1], layer)[0])
    y, new = f(layer)
    assert y == 1 * 2 * 3
    assert new.count.tolist() == [1, 1, 1]


@program("let a gradient flow through state that an `es.custom_vjp` writes")
def _(net):
    class Tracked(es.Module):
        weight: es.Parameter
        mean: es.BatchStat = 0.0

        @es.custom_vjp
        def __call__(self, x):
            self.mean = self.mean + x
            return self.weight * x

        def _fwd(self, x):
            self.mean = self.mean + x
            return self.weight * x, None

        __call__.defvjp(_fwd, lambda _, g: (None, g))

    def loss(model, x):
        return model(x) + 5 * model.mean

    (grads, by_x), (new, _) = es.grad(loss, argnums=(0, 1))(Tracked(2.0), XS[1])
    assert (by_x, grads.weight, new.mean) == (1.0, 0.0, 1.0)


@program("use a NumPy array of a model in `es.mutable`")
def _(net):
    table = np.arange(3.0, dtype=np.float32)
    layer = eqx.tree_at(lambda layer: layer.weight, net.layer, table)
    is_jax, new = es.mutable(lambda m: isinstance(m.weight, jax.Array))(layer)
    assert is_jax
    assert new.weight is table


# --- Habits: PyTorch ------------------------------------------------------------------


@program("assign an undeclared array in `__init__`: `self.weight = w`", "weight: es.St")
def _(net):
    class Dense(es.Module):
        def __init__(self):
            self.weight = jnp.ones(3)

    Dense()


@program("assign an undeclared layer in `__init__`: `self.linear = layer`")
def _(net):
    class Model(es.Module):
        def __init__(self):
            self.linear = eqx.nn.Linear(2, 3, key=jr.key(0))

    Model()


@program("define `forward`, and give the model to `es.mutable`", "`Torch`")
def _(net):
    class Torch(es.Module):
        def forward(self, x):
            return x

    assert es.mutable(Torch().forward)(1) == (1, Torch())
    es.mutable(Torch())


@program("call `model.parameters()`, `optimizer.step()`")
def _(net):
    with pytest.raises(AttributeError, match="step"):
        es.Optimizer(optax.sgd(1.0)).step()
    net.parameters()


@program('register an array: `self.register_buffer("table", x)`')
def _(net):
    class Torch(es.Module):
        table: es.Buffer

        def __init__(self):
            self.register_buffer("table", XS)

    Torch()


@program("call `model.state_dict()`")
def _(net):
    net.state_dict()


@program("tie weights in `__init__`: `self.head.weight = self.embedding.weight`")
def _(net):
    class Tied(es.Module):
        embedding: eqx.nn.Embedding
        head: eqx.nn.Linear

        def __init__(self, a, b):
            self.embedding = eqx.nn.Embedding(3, 3, key=a)
            self.head = eqx.nn.Linear(3, 3, key=b)
            self.head.weight = self.embedding.weight

    Tied(*jr.split(jr.key(0)))


@program("use a scope as a context: `with es.mutable(model):`")
def _(net):
    with es.mutable(net):
        net(XS)


@program("switch a mode by an assignment: `model.training = False`", "`Net.training`")
def _(net):
    net.training = False


@program("assign a field of a model: `model.layer.weight = w`", "replace(weight=value)")
def _(net):
    net.layer.weight = jnp.array(3.0)


@program("write into an array of state in place: `self.mean[0] = 1.0`", ".at[")
def _(net):
    numpy = net.replace(mean=np.zeros(3, np.float32))  # NumPy's array becomes JAX's
    es.mutable(lambda net: net.mean.__setitem__(0, 1.0))(numpy)


@program("return several losses from a loss function", "`f32[3]`", "has_aux=True")
def _(net):
    es.value_and_grad(lambda net: net(XS))(net)


@program("create an average of a model: `es.Ema(model)`", "es.Ema(0.999).init(model)")
def _(net):
    es.Ema(net)


@program(
    "load PyTorch's weights as they are: `es.load_state_dict(model, tensors)`",
    "bias: (2,) instead of (2, 1)",
)
def _(net):
    conv = eqx.nn.Conv1d(1, 2, 1, key=jr.key(0))
    tensors = {"weight": np.ones((2, 1, 1), "f4"), "bias": np.ones(2, "f4")}
    assert es.from_torch(conv, tensors).bias.shape == (2, 1)
    es.load_state_dict(conv, tensors)


@program(
    "load weights of PyTorch into a model with other names",
    "head.weight",
    "unused",
    "fc.bias: (2,)",
    "`rename=",
)
def _(net):
    model = {"head": eqx.nn.Linear(1, 2, key=jr.key(0))}
    es.from_torch(model, {"fc.weight": np.ones((2, 1)), "fc.bias": np.ones(2)})


@program("pass PyTorch's module: `es.from_torch(model, module)`", "`Module` was given")
def _(net):
    class Module:
        pass

    es.from_torch(net, Module())


# --- Habits: Flax ---------------------------------------------------------------------


@program("wrap a value in a kind: `self.w = es.Parameter(x)`", "`Parameter` is a kind")
def _(net):
    es.Parameter(jnp.ones(3))


@program("write `self.count.value += 1`")
def _(net):
    es.mutable(lambda net: net.mean.value)(net)


@program("assign an undeclared key in `__init__`: `self.rng = key`", "no field `rng`")
def _(net):
    class Noise(es.Module):
        def __init__(self, key):
            self.rng = key

    with fails(FROZEN, "`rng: es.Rng`"):
        Noise(jr.PRNGKey(0))
    Noise(jr.key(0))


@program("draw from an `es.RngStream` in `__init__`", "split(key)", "RngStream(b)")
def _(net):
    class Model(es.Module):
        def __init__(self):
            es.RngStream(0)()

    Model()


@program("draw from a stream without a call: `jax.random.normal(self.keys)`", "RngStr")
def _(net):
    es.mutable(lambda keys: jr.normal(keys, (3,)))(es.RngStream(0))


@program("pass the model to the optimizer itself: `es.Optimizer(model, tx)`", "`Net` w")
def _(net):
    with pytest.raises(TypeError, match=r"`Net` was given.*\.init\(model\)"):
        es.Optimizer(optax.sgd(1.0), net)
    es.Optimizer(net, optax.sgd(1.0))


@program("swap the arguments: `optimizer.update(model, grads)`", "layer.count")
def _(net):
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    grads, net = es.grad(loss_fn)(net)
    optimizer.update(net, grads)


@program('name kinds by strings: `es.mutable(f, kinds="batch_stats")`')
def _(net):
    es.mutable(net, kinds="batch_stats")


@program('give a filter by name: `model.filter("Parameter")`', "es.path_matches")
def _(net):
    net.filter("Parameter")


@program("pass the model to the function of `es.functional`")
def _(net):
    apply, _, state = es.functional(net)
    apply(es.filter(net, es.Parameter), state, XS)


# --- Habits: JAX and Equinox ----------------------------------------------------------


@program("use JAX's name of the module: `es.lax.scan`", "`es.scan`, `es.cond`")
def _(net):
    _ = es.lax


@program(
    "put a function into a list of layers: `eqx.nn.Sequential([linear, jax.nn.relu])`"
)
def _(net):
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    eqx.nn.Sequential([linear, jax.nn.relu])(XS)


@program("forget the second call: `y, model = es.mutable(model)`")
def _(net):
    _y, _new = es.mutable(net)


@program("pass the inputs to `es.mutable` itself: `es.mutable(model, x)`", "mutable()")
def _(net):
    es.mutable(net, XS)


@program("pass a layer its state: `y, state = norm(x, state)`")
def _(net):
    y, state = es.nn.BatchNorm(3)(XS[None], eqx.nn.State(net))


@program("pass a layer its mode: `dropout(x, inference=True)`")
def _(net):
    es.nn.Dropout(key=0)(XS, inference=True)


@program("decorate a method that writes state with `jax.jit`", "Jitted.count")
def _(net):
    class Jitted(es.Module):
        count: es.State = 0

        @jax.jit
        def step(self):
            self.count = self.count + 1

    es.mutable(Jitted().step)()


@program("assign the pair: `grads = es.grad(loss_fn)(model)`", "`grads, model = es.g")
def _(net):
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    optimizer.update(es.grad(loss_fn)(net), net)


@program(
    "assign the pair: `model = optimizer.update(grads, model)`",
    "`es.Optimizer` was passed",
    "`model, optimizer = optimizer.update(grads, model)`",
)
def _(net):
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    grads, net = es.grad(loss_fn)(net)
    pair = optimizer.update(grads, net)
    with pytest.raises(TypeError, match="in a tuple with it"):
        es.mutable(pair)
    optimizer.update(grads, pair)


@program("pass a function of optax: `es.Optimizer(optax.adam)`", "`adam` was given")
def _(net):
    with pytest.raises(TypeError, match="`float` was given"):
        es.Optimizer({es.Parameter: 1e-3})
    es.Optimizer(optax.adam)


@program("keep a counter in a Python number: `count: int = 0`", "`count: es.State`")
def _(net):
    class Counter(es.Module):
        count: int = 0

        def __call__(self):
            self.count += 1

    es.mutable(Counter())()


@program("share one stateful layer: `es.nn.Stacked([layer] * 3)`", "call it twice")
def _(net):
    es.nn.Stacked([net.layer] * 3)


@program("put an array into a static field")
def _(net):
    class Static(es.Module):
        w: Any = eqx.field(static=True)

    Static(jnp.ones(3))
