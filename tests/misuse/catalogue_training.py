"""Programs about modes, `init` and the optimizer."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


@program("drop the result of `train`, `eval`, `freeze`, `update`, `replace` or `init`")
def _(case):
    net = case.keep(Net(), XS)
    net.eval()
    net.freeze()
    net.update(es.map(lambda w: w + 1.0, net, on=es.Parameter))
    net.replace(mean=XS)
    net.init(0)
    net.train(False)
    assert net.training
    assert not net.eval().training


@program("use the model from before the call again")
def _(case):
    net = case.keep(Net(), XS)
    first, second = es.mutable(net)(XS), es.mutable(net)(XS)
    assert eqx.tree_equal(first, second)
    assert first[1].layer.count == 1


@program("forget `eval` when you test a model in `es.mutable`")
def _(case):
    norm = case.keep(es.nn.BatchNorm(3), XS[None])
    _, new = es.mutable(norm)(XS[None])
    assert (new.mean != norm.mean).any()
    _, same = es.mutable(norm.eval())(XS[None])
    assert eqx.tree_equal(same, norm.eval())


@program("switch the mode by `eqx.nn.inference_mode(model)`")
def _(case):
    model = case.keep([es.nn.BatchNorm(3), eqx.nn.Dropout(0.5), {"net": Net()}])
    new = eqx.nn.inference_mode(model)
    assert eqx.tree_equal(new, es.eval(model))
    assert not new[0].training
    _, after = es.mutable(lambda m: m[0](XS[None]))(new)
    assert eqx.tree_equal(after, new)
    assert eqx.tree_equal(eqx.nn.inference_mode(new, value=False), model)


@program(
    "use a model before `init`",
    "`linear` is an `es.Initializer`",
    "model = model.init(42)",
)
def _(case):
    class Lazy(es.Module):
        linear: eqx.nn.Linear

        def __init__(self):
            self.linear = es.lazy(eqx.nn.Linear, 3, 1)

        def __call__(self, x):
            return self.linear(x)[0]

    model = case.keep(Lazy(), call=lambda m: es.mutable(m.init(0))(XS))
    uses = (
        lambda: es.mutable(model)(XS),
        lambda: es.grad(lambda m: m(XS))(model),
        lambda: es.vmap(model)(XS[None]),
        lambda: es.jit(es.mutable(model))(XS),
        lambda: es.Optimizer(optax.sgd(1.0)).init(model),
        lambda: es.state_dict(model),
    )
    for use in uses:
        with case.error():
            use()


@program("call a layer made by `es.lazy` directly", "model = model.init(42)")
def _(case):
    layers = case.keep([es.lazy(eqx.nn.Linear, 3, 1)], call=lambda m: es.init(m, 0))
    with case.error():
        layers[0](XS)
    with case.error():
        XS + es.Initializer(lambda key: jr.normal(key, (3,)))


@program("call `init` twice")
def _(case):
    model = es.init([es.lazy(eqx.nn.Linear, 3, 1)], 0)
    assert eqx.tree_equal(es.init(case.keep(model), 1), model)


class Sized(es.Module):
    """Takes its size from the input."""

    count: es.State
    weight: es.Parameter | None = None

    def __call__(self, x):
        if self.initializing and self.weight is None:
            self.weight = jnp.ones(x.shape)
        return x * self.weight


@program(
    "stack layers that take sizes from an input, then call `init`",
    "eqx.filter_vmap(lambda key: Layer().init(key, x))",
)
def _(case):
    def run(stack, x):
        return es.scan(lambda x, layer: (layer(x), None), x, stack)[0]

    keys = jr.split(jr.key(0), 2)
    one = Sized(jnp.zeros(()))
    case.keep(
        eqx.filter_vmap(lambda key: one.init(key, XS[0]))(keys),
        call=lambda stack: run(stack, XS[0]),
    )
    with case.error():
        es.init(eqx.filter_vmap(Sized)(jnp.zeros(2)), 0, XS[0], call=run)


@program(
    "freeze a layer of a model without any `es.Module`",
    "es.Buffer[",
    "es.not_(es.under(",
)
def _(case):
    model = case.keep(eqx.nn.Sequential([eqx.nn.Linear(3, 1, key=jr.key(0))]))
    with case.error():
        es.freeze(model)
    with case.error():
        es.freeze(model, lambda m: m[0])


class Scaled(es.Module):
    inner: Any
    scale: es.Parameter = 1.0

    def __call__(self, x):
        return self.scale * self.inner(x)


@program(
    "freeze a plain layer, then change the structure around it",
    "es.unfreeze(model, lambda m: m.inner)",
)
def _(case):
    layers = [eqx.nn.Linear(3, 3, key=jr.key(i)) for i in range(2)]
    model = case.keep(Scaled(layers).freeze(lambda m: m.inner[0]))
    shorter = model.replace(inner=layers[1:])
    with case.error():
        es.filter(shorter, es.trainable)
    with case.error():
        es.value_and_grad(lambda model: jnp.sum(model.scale))(shorter)


@program("call an `eqx.nn.BatchNorm` without its state")
def _(case):
    class Model(es.Module):
        norm: Any

        def __call__(self, x):
            return self.norm(x)

    norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
    model = case.keep(Model(norm))
    batch = jnp.stack([XS, 2 * XS])
    with case.error():
        es.mutable(es.vmap(model, axis_name="batch"))(batch)
    right = Model(es.nn.Stateful(norm))
    _, new = es.mutable(es.vmap(right, axis_name="batch"))(batch)
    assert new.norm.layer.batch_counter.init == 1


@program(
    "call an `eqx.nn.BatchNorm` in an `eqx.nn.Sequential` without state",
    "`layers[1]` is a `BatchNorm`",
    "es.nn.Stateful(BatchNorm(...))",
)
def _(case):
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
    model = case.keep(eqx.nn.Sequential([linear, norm]))
    batch = jnp.stack([XS, 2 * XS])
    with case.error():
        es.mutable(es.vmap(model, axis_name="batch"))(batch)
    with case.error():
        f = lambda m, xs: es.vmap(m, axis_name="batch")(xs).sum()  # noqa: E731
        es.value_and_grad(f)(model, batch)
    right = eqx.nn.Sequential([linear, es.nn.Stateful(norm)])
    _, new = es.mutable(es.vmap(right, axis_name="batch"))(batch)
    assert new.layers[1].layer.batch_counter.init == 1


@program(
    "wrap a layer that takes no `state` in `es.nn.Stateful`",
    "`Linear`",
    "Use a layer without state directly",
)
def _(case):
    linear = case.keep(eqx.nn.Linear(3, 3, key=jr.key(0)))
    with case.error():
        es.nn.Stateful(linear)


@program(
    "give complex numbers to `es.nn.BatchNorm`",
    "complex64",
    "jnp.concatenate([x.real, x.imag], axis=1)",
)
def _(case):
    norm = case.keep(es.nn.BatchNorm(3), XS[None])
    for wrong in (norm, norm.eval()):
        with case.error():
            es.mutable(wrong)(jax.lax.complex(XS, XS)[None])


@program(
    "misspell an attribute: `es.configure(model, rate=0.1)`, `model.replace(rate=0.1)`"
)
def _(case):
    dropout = case.keep(es.nn.Dropout(0.5, key=0), XS)
    with case.error():
        es.configure(dropout, rate=0.1)
    assert es.configure(dropout, p=0.1).p == 0.1


@program('pass the name of the axis first: `es.nn.BatchNorm("batch", 8)`')
def _(case):
    with case.error("es.nn.BatchNorm('batch', 8)", 'es.nn.BatchNorm(8, "batch")'):
        es.nn.BatchNorm("batch", 8)


@program("pass only a key: `es.nn.Dropout(key)`", "`es.nn.Dropout(0.5, key=key)`")
def _(case):
    for key in (jr.key(0), jr.PRNGKey(0)):
        with case.error():
            es.nn.Dropout(key)


# --- The optimizer ------------------------------------------------------------------


def loss_fn(net):
    return net(XS).sum()


@program("update before `init`", "es.Optimizer(tx).init(model)")
def _(case):
    net = case.keep(Net(), XS)
    grads, net = es.grad(loss_fn)(net)
    optimizer = es.Optimizer(optax.sgd(1.0))
    optimizer.init(net)  # the returned optimizer is dropped
    with case.error():
        optimizer.update(grads, net)
    assert optimizer.init(net).update(grads, net)[0].layer.weight == -1.0


@program("update a model other than that of `init`", "optimizer.refit(model)")
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.adam(1.0)).init(net)
    for other in (net.freeze(), net.replace(layer=[Layer(), Layer()])):
        grads = es.filter(other, es.trainable)
        with case.error():
            optimizer.update(grads, other)
    wide = net.replace(layer=Layer(weight=jnp.ones(3)))
    with case.error("layer.weight"):
        optimizer.update(es.filter(wide, es.trainable), wide)


@program(
    "pass the model to `es.Optimizer` itself: `es.Optimizer(model, tx)`, "
    "`es.Optimizer(tx, model)`",
    ".init(model)",
)
def _(case):
    net, tx = case.keep(Net(), XS), optax.sgd(1.0)
    for use in (lambda: es.Optimizer(net, tx), lambda: es.Optimizer(tx, net)):
        with case.error("`Net` was given"):
            use()


@program(
    "pass `es.Optimizer`, or a group of it, a learning rate or a function: "
    "`es.Optimizer(optax.adam)`",
    "es.Optimizer(optax.adam(1e-3))",
)
def _(case):
    with case.error("`float` was given"):
        es.Optimizer(1e-3)
    with case.error("`adam` was given"):
        es.Optimizer(optax.adam)
    with case.error("`float` was given"):
        es.Optimizer({es.Parameter: 1e-3})
    with case.error("`adam` was given"):
        es.Optimizer({...: optax.adam})


@program("train with `optax.lookahead`", "optax.LookaheadParams", "es.partition(model")
def _(case):
    model = case.keep(Net(), XS)
    lookahead = optax.lookahead(optax.sgd(0.1), 5, 0.5)
    pair = optax.LookaheadParams.init_synced(model)
    for tx in (lookahead, optax.chain(optax.clip(1.0), lookahead), {...: lookahead}):
        for given in (model, pair):
            with case.error():
                es.Optimizer(tx).init(given)


@program("have a parameter that belongs to no group", "...: None")
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer({es.Buffer: optax.sgd(1.0)})
    with case.error():
        optimizer.init(net)


@program("misspell a name in rules of `es.Optimizer` or `es.spec`", "wieght")
def _(case):
    net = case.keep(Net(), XS)
    rules = {es.path_matches("*.wieght"): optax.sgd(1.0), ...: optax.sgd(0.1)}
    with case.error("`es.Optimizer`"):
        es.Optimizer(rules).init(net)
    with case.error("`es.spec`"):
        es.spec(net, dict.fromkeys(rules, 0))


@program(
    "set a learning rate that was not injected, or that a schedule drives",
    "learning_rate",
)
def _(case):
    net, sgd = case.keep(Net(), XS), optax.inject_hyperparams(optax.sgd)
    with case.error("optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)"):
        es.Optimizer(optax.sgd(1.0)).init(net).set(learning_rate=0.1)
    with case.error("driven by a schedule"):
        optimizer = es.Optimizer(sgd(lambda step: 0.5)).init(net)
        optimizer.set(learning_rate=0.1)
    new = es.Optimizer(sgd(1.0)).init(net).set(learning_rate=0.5)
    assert new.hyperparams["learning_rate"] == 0.5


@program(
    "update with gradients of different shapes, such as one per example",
    "layer.weight",
    "f32[5]",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    grads = jax.tree.map(
        lambda p: jnp.ones((5, *p.shape)), es.filter(net, es.trainable)
    )
    with case.error():
        optimizer.update(grads, net)
    mean = jax.tree.map(lambda g: g.mean(axis=0), grads)
    assert optimizer.update(mean, net)[0].layer.weight == 1.0


@program(
    "give `wrt=` to the gradient only: `es.grad(loss_fn, wrt=wrt)`",
    "selects `[0].layer.weight`",
    "es.Optimizer(tx, wrt=wrt)",
)
def _(case):
    model = case.keep([Net(), jnp.ones(3)], call=lambda m: es.mutable(m[0])(XS))
    wrt = es.all_of(es.trainable, es.under(lambda m: m[1]))
    grads, model = es.grad(lambda m: m[1].sum(), wrt=wrt)(model)
    with case.error():
        es.Optimizer(optax.sgd(1.0)).init(model).update(grads, model)
    es.Optimizer(optax.sgd(1.0), wrt=wrt).init(model).update(grads, model)


@program(
    "swap the arguments: `optimizer.update(model, grads)`, with state or a function in"
    " the model",
    "layer.count",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    grads, net = es.grad(loss_fn)(net)
    with case.error():
        optimizer.update(net, grads)


@program(
    "swap model and optimizer: `optimizer, model = optimizer.update(grads, model)`",
    "model, optimizer = optimizer.update(grads, model)",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)

    def step(model, optimizer):
        grads, model = es.grad(loss_fn)(model)
        return optimizer.update(grads, model)

    for f in (step, es.jit(step)):
        with case.error():
            f(optimizer, net)
        optimizer_, net_ = f(net, optimizer)
        with case.error():
            f(net_, optimizer_)
    with case.error():
        es.Optimizer(optax.sgd(1.0)).init(optimizer)


@program("use weight decay with `paramax.NonTrainable` constants")
def _(case):
    class NonTrainable(eqx.Module):
        tree: Any

        def unwrap(self):
            return jax.lax.stop_gradient(self.tree)

    def loss(model):
        return jnp.sum(model["scale"].unwrap() * model["w"])

    model = case.keep({"scale": NonTrainable(jnp.ones(2)), "w": jnp.ones(2)}, call=loss)
    tx = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))
    wrt = es.all_of(es.trainable, es.not_(es.inside(NonTrainable)))
    for which, scale in ((es.trainable, 0.5), (wrt, 1.0)):
        (_, new), grads = es.value_and_grad(loss, wrt=which)(model)
        new, _ = es.Optimizer(tx, wrt=which).init(model).update(grads, new)
        assert (new["scale"].tree == scale).all()


@program(
    r"select by a regular expression: `es.path_matches(r'.*\.bias$')`",
    'write `es.path_matches("*.bias")`',
)
def _(case):
    case.keep(Net(), XS)
    with case.error():
        es.path_matches(r".*\.bias$")


@program("swap the arguments: `es.update(params, model)`", "`es.update(model, params)`")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.update(net.filter(es.not_(es.BatchStat)), net)


@program(
    "map without a filter: `es.map(f, model)`", "on=es.Parameter", "on=es.TreePart"
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.map(lambda w: 0.9 * w, net)


@program(
    "differentiate a frozen model, or by a misspelled filter: "
    "`wrt=es.path_matches('haed.*')`",
    "`es.parts(model)` lists",
)
def _(case):
    net = case.keep(Net().freeze(), XS)
    with case.error("1 of them frozen"):
        es.grad(loss_fn)(net)
    with case.error("1 of them frozen"):
        es.Optimizer(optax.sgd(1.0)).init(net)
    typo = es.path_matches("laeyr.*")
    with case.error("0 of them frozen", "`layer.weight`"):
        es.value_and_grad(loss_fn, wrt=typo)(net.unfreeze())


@program(
    "unpack the result like JAX's: `loss, grads = es.value_and_grad(loss_fn)(model)`"
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    loss, grads = es.value_and_grad(loss_fn)(net)
    assert optimizer.update(grads, net)[0].layer.count == 0
    with pytest.raises(TypeError, match="tuple"):
        float(loss)
    (loss, new), grads = es.value_and_grad(loss_fn)(net)
    assert optimizer.update(grads, new)[0].layer.count == 1
    assert float(loss) == 6.0


@program(
    "give the model to `es.Ema`, and the decay to `init`", "es.Ema(0.999).init(model)"
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.Ema(net)
    with case.error():
        es.Ema("0.999")


@program("update an `es.Ema` before its `init`")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.Ema(0.999).update(net)


@program("update an `es.Ema` with a model of a different structure")
def _(case):
    net = case.keep(Net(), XS)
    ema = es.Ema(0.5).init(net)
    with case.error():
        ema.update(net.replace(layer=[Layer(), Layer()]))
    assert ema.update(net.eval()).model.training is False


@program("cast to a dtype that is not a real floating one: `cast={...: jnp.int8}`")
def _(case):
    case.keep(Net(), XS)
    with case.error():
        es.value_and_grad(loss_fn, cast={...: jnp.int8})
    with case.error():
        es.mutable(loss_fn, cast={es.State: jnp.complex64})


@program(
    "name an array in `cast={'weight': jnp.bfloat16}`", "es.path_matches('weight')"
)
def _(case):
    case.keep(Net(), XS)
    with case.error("`es.mutable(cast=...)`"):
        es.mutable(loss_fn, cast={"weight": jnp.bfloat16})


@program("misspell a name in rules of `cast=`")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.grad(loss_fn, cast={es.path_matches("wieght"): jnp.bfloat16})(net)


@program(
    "assign the pair: `model = optimizer.update(grads, model)`",
    "`es.Optimizer` was passed",
    "`model, optimizer = optimizer.update(grads, model)`",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    grads, net = es.grad(loss_fn)(net)
    pair = optimizer.update(grads, net)
    with case.error():
        optimizer.update(grads, pair)
    with pytest.raises(TypeError, match="in a tuple with it"):
        es.mutable(pair)


@program(
    "assign the pair: `grads = es.grad(loss_fn)(model)`", "`grads, model = es.grad("
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    pair = es.grad(loss_fn)(net)
    with case.error():
        optimizer.update(pair, net)
    models = (net, Net())
    optimizer = es.Optimizer(optax.sgd(1.0)).init(models)
    grads, _ = es.grad(lambda models: loss_fn(models[0]))(models)
    assert optimizer.update(grads, models)[0][0].layer.weight == -1.0


@program("unpack it like JAX's with `has_aux=True`: `(loss, aux), grads = …`")
def _(case):
    net = case.keep(Net(), XS)
    f = es.value_and_grad(lambda net: (loss_fn(net), "aux"), has_aux=True)
    (loss, aux), _ = f(net)
    assert loss[1] == "aux"
    assert aux.layer.count == 1


@program("call an average: `ema(x)`", "`ema.model.eval()(x)`")
def _(case):
    ema = case.keep(es.Ema(0.9).init(Net()))
    with case.error():
        ema(XS)
    assert (ema.model.eval()(XS) == 2 * XS).all()
