"""Programs about modes, `init` and the optimizer."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from catalogue_entry import Layer, Net, Theme, XS

import eqx_state as es


MODES = Theme("Modes, `init`, and what they return")
TRAINING = Theme("The optimizer")


@MODES.works(
    "drop the result of `train`, `eval`, `freeze`, `update`, `replace` or `init`",
    "nothing changes: each returns a new model",
    "`model = model.eval()`",
)
def _(case):
    net = case.keep(Net(), XS)
    net.eval()
    net.freeze()
    net.update(es.map(lambda w: w + 1.0, net.filter(es.Parameter)))
    net.replace(mean=XS)
    net.init(0)
    net.train(False)
    assert net.training
    assert not net.eval().training


@MODES.works(
    "use the model from before the call again",
    "it is unchanged, and the same call returns the same result",
    "`y, model = es.mutable(model)(x)`",
)
def _(case):
    net = case.keep(Net(), XS)
    first, second = es.mutable(net)(XS), es.mutable(net)(XS)
    assert eqx.tree_equal(first, second)
    assert first[1].layer.count == 1


@MODES.works(
    "forget `eval` when you test a model in `es.mutable`",
    "it runs in train mode, and the new model has other statistics",
    "`model.eval()(x)`, which does not need a scope",
)
def _(case):
    norm = case.keep(es.nn.BatchNorm(3), XS[None])
    _, new = es.mutable(norm)(XS[None])
    assert (new.mean != norm.mean).any()
    _, same = es.mutable(norm.eval())(XS[None])
    assert eqx.tree_equal(same, norm.eval())


@MODES.works(
    "switch the mode by `eqx.nn.inference_mode(model)`",
    "it is `es.eval(model)`, and with `value=False` `es.train(model)`",
)
def _(case):
    model = case.keep([es.nn.BatchNorm(3), eqx.nn.Dropout(0.5), {"net": Net()}])
    new = eqx.nn.inference_mode(model)
    assert eqx.tree_equal(new, es.eval(model))
    assert not new[0].training
    _, after = es.mutable(lambda m: m[0](XS[None]))(new)
    assert eqx.tree_equal(after, new)
    assert eqx.tree_equal(eqx.nn.inference_mode(new, value=False), model)


@MODES.raises(
    "use a model before `init`",
    es.NotInitializedError,
    "The model is used before it is initialized",
    "`linear` is an `es.Initializer`",
    "model = model.init(42)",
    instead="`model = model.init(42)`",
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


@MODES.raises(
    "call a layer made by `es.lazy` directly",
    es.NotInitializedError,
    "a placeholder for a value",
    "model = model.init(42)",
    instead="`model = model.init(42)`",
)
def _(case):
    layers = case.keep([es.lazy(eqx.nn.Linear, 3, 1)], call=lambda m: es.init(m, 0))
    with case.error():
        layers[0](XS)
    with case.error():
        XS + es.Initializer(lambda key: jr.normal(key, (3,)))


@MODES.works(
    "call `init` twice",
    "initialized values stay; another key changes nothing",
    "make a new model; for the random keys `es.reseed`",
)
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


@MODES.raises(
    "stack layers that take their sizes from an input, then call `init`",
    ValueError,
    "is made by `init` in one step of `es.scan`",
    "Initialize the modules one by one, and stack them",
    instead="`eqx.filter_vmap(lambda key: Layer().init(key, x))(keys)`",
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


@MODES.works(
    "freeze a plain Equinox layer, or one array: `model.freeze(lambda m: m.linear)`",
    "the nearest `es.Module` above remembers its path",
)
def _(case):
    class Model(es.Module):
        linear: eqx.nn.Linear

    model = case.keep(Model(eqx.nn.Linear(3, 1, key=jr.key(0))))
    flags = [part.frozen for part in es.parts(model.freeze(lambda m: m.linear.bias))]
    assert flags == [False, True]
    assert all(part.frozen for part in es.parts(model.freeze(lambda m: m.linear)))


@MODES.raises(
    "freeze a layer of a model without any `es.Module`",
    ValueError,
    "There is no `es.Module` to freeze here",
    "es.Buffer[",
    "es.not_(es.under(",
    instead="`linear: es.Buffer[eqx.nn.Linear]`; or `wrt=es.all_of(es.trainable, "
    "es.not_(es.under(where)))`",
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


@MODES.works(
    "wrap a frozen layer by `eqx.tree_at`, or put another in its place",
    "what is there is frozen, too, new parameters included",
    "`model.unfreeze(lambda m: m.part.scale)`",
)
def _(case):
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    model = case.keep(Scaled(linear).freeze(lambda m: m.inner), XS)
    wrapped = eqx.tree_at(lambda m: m.inner, model, Scaled(model.inner))
    assert [part.frozen for part in es.parts(wrapped)] == [True, True, True, False]
    tuned = wrapped.unfreeze(lambda m: m.inner.scale)
    assert [part.frozen for part in es.parts(tuned)] == [True, True, False, False]
    # A frozen `es.Module` brings its flag along.
    inside = {part.name: part.frozen for part in es.parts(Scaled(model.freeze()))}
    assert inside["inner.inner.weight"]
    assert not inside["scale"]


@MODES.works(
    "take a frozen layer of Equinox out of a model, and put it into a new one",
    "it trains there: the old model knew that it was frozen, and the layer does not",
    "`new.freeze(where)`, or wrap it in the model by `eqx.tree_at`",
)
def _(case):
    model = case.keep(Scaled(eqx.nn.Linear(3, 3, key=jr.key(0))).freeze(), XS)
    new = Scaled(model.inner)
    assert not any(part.frozen for part in es.parts(new))
    assert all(part.frozen for part in es.parts(new.freeze()))


@MODES.raises(
    "freeze a plain layer by its path, and change the structure around it",
    ValueError,
    "was frozen, or unfrozen, by its path",
    "es.unfreeze(model, lambda m: m.inner)",
    instead="`model.unfreeze(where)`, then `freeze` what is meant now",
)
def _(case):
    layers = [eqx.nn.Linear(3, 3, key=jr.key(i)) for i in range(2)]
    model = case.keep(Scaled(layers).freeze(lambda m: m.inner[0]))
    shorter = model.replace(inner=layers[1:])
    with case.error():
        es.filter(shorter, es.trainable)
    with case.error():
        es.value_and_grad(lambda model: jnp.sum(model.scale))(shorter)


@MODES.works(
    "unfreeze a part by itself: `model.replace(head=model.head.unfreeze())`",
    "the part stays frozen, since the model remembers its path",
    "`model.unfreeze(lambda m: m.head)`",
)
def _(case):
    model = case.keep(Scaled(Scaled(eqx.nn.Identity())).freeze(), XS)
    stays = model.replace(inner=model.inner.unfreeze())
    assert not stays.inner.frozen
    assert [part.frozen for part in es.parts(stays)] == [True, True]
    new = model.unfreeze(lambda m: m.inner)
    assert [part.frozen for part in es.parts(new)] == [False, True]


@MODES.raises(
    "hold a bare `eqx.nn.BatchNorm`, and call it without its state",
    TypeError,
    "missing 1 required positional argument: 'state'",
    instead="`es.nn.Stateful(eqx.nn.BatchNorm(…))`, or `es.nn.BatchNorm`",
)
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


@MODES.raises(
    "put an `eqx.nn.BatchNorm` into an `eqx.nn.Sequential`, and call it without state",
    TypeError,
    "whose state is in an `eqx.nn.State`, and was called without one",
    "`layers[1]` is a `BatchNorm`",
    "es.nn.Stateful(BatchNorm(...))",
    instead="`es.nn.Stateful(eqx.nn.BatchNorm(…))`, or `es.nn.BatchNorm`",
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


@MODES.raises(
    "wrap a layer without state in `es.nn.Stateful`",
    TypeError,
    "holds no `eqx.nn.StateIndex`",
    "`Linear`",
    "A layer without state is used as it is",
    instead="use the layer itself",
)
def _(case):
    linear = case.keep(eqx.nn.Linear(3, 3, key=jr.key(0)))
    with case.error():
        es.nn.Stateful(linear)


@MODES.works(
    "make an `es.nn.BatchNorm` with `dtype=jnp.bfloat16`",
    "its parameters are bfloat16, its statistics float32",
)
def _(case):
    norm = case.keep(es.nn.BatchNorm(3, dtype=jnp.bfloat16), XS[None])
    assert norm.weight.dtype == jnp.bfloat16
    y, new = es.mutable(norm)(XS[None].astype(jnp.bfloat16))
    assert (y.dtype, new.mean.dtype) == (jnp.bfloat16, jnp.float32)


@MODES.works(
    "give a padded batch to `es.nn.BatchNorm`",
    "the padding is in the statistics; with a `mask` it is not",
    "`norm(x, mask=is_data[:, None])`",
)
def _(case):
    norm = case.keep(es.nn.BatchNorm(3), XS[None])
    batch, padded = jnp.stack([XS, 2 * XS]), jnp.stack([XS, 2 * XS, 0 * XS])
    _, expected = es.mutable(norm)(batch)
    assert (es.mutable(norm)(padded)[1].mean != expected.mean).any()
    is_data = jnp.array([True, True, False])
    _, new = es.mutable(norm)(padded, mask=is_data[:, None])
    assert jnp.allclose(new.mean, expected.mean)


@MODES.raises(
    "give complex numbers to `es.nn.BatchNorm`",
    ValueError,
    "and normalizes real numbers",
    "complex64",
    "jnp.concatenate([x.real, x.imag], axis=1)",
    instead="both parts, as twice as many channels",
)
def _(case):
    norm = case.keep(es.nn.BatchNorm(3), XS[None])
    for wrong in (norm, norm.eval()):
        with case.error():
            es.mutable(wrong)(jax.lax.complex(XS, XS)[None])


@MODES.raises(
    "misspell an attribute: `es.configure(model, rate=0.1)`, `model.replace(rate=0.1)`",
    ValueError,
    "no module in the tree has an attribute `rate`",
    instead="a name of the list in the message",
)
def _(case):
    dropout = case.keep(es.nn.Dropout(0.5, key=0), XS)
    with case.error():
        es.configure(dropout, rate=0.1)
    assert es.configure(dropout, p=0.1).p == 0.1


# --- The optimizer ------------------------------------------------------------------


def loss_fn(net):
    return net(XS).sum()


@TRAINING.raises(
    "update before `init`",
    es.NotInitializedError,
    "`es.Optimizer.update` was called before `init`",
    "es.Optimizer(tx).init(model)",
    instead="`optimizer = es.Optimizer(tx).init(model)`",
)
def _(case):
    net = case.keep(Net(), XS)
    grads, net = es.grad(loss_fn)(net)
    optimizer = es.Optimizer(optax.sgd(1.0))
    optimizer.init(net)  # what it returns is dropped
    with case.error():
        optimizer.update(grads, net)
    assert optimizer.init(net).update(grads, net)[0].layer.weight == -1.0


@TRAINING.raises(
    "update a model other than that of `init`",
    ValueError,
    "is not what `init` was given",
    "es.Optimizer(tx).init(model)",
    instead="an optimizer for each model; a new one after freezing or surgery",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.adam(1.0)).init(net)
    for other in ([net], net.freeze(), net.replace(layer=[Layer(), Layer()])):
        grads = es.filter(other, es.trainable)
        with case.error():
            optimizer.update(grads, other)


@TRAINING.raises(
    "pass the model to `es.Optimizer` itself: `es.Optimizer(model, tx)`, "
    "`es.Optimizer(tx, model)`",
    TypeError,
    "The model is given to `init`",
    ".init(model)",
    instead="`es.Optimizer(tx).init(model)`",
)
def _(case):
    net, tx = case.keep(Net(), XS), optax.sgd(1.0)
    for use in (lambda: es.Optimizer(net, tx), lambda: es.Optimizer(tx, net)):
        with case.error("`Net` was given"):
            use()


@TRAINING.raises(
    "pass `es.Optimizer` a learning rate, or a function of optax: "
    "`es.Optimizer(optax.adam)`",
    TypeError,
    "`tx` is an optax transformation",
    "es.Optimizer(optax.adam(1e-3))",
    instead="`es.Optimizer(optax.adam(1e-3))`",
)
def _(case):
    with case.error("a `float` was given"):
        es.Optimizer(1e-3)
    with case.error("the function `adam` was given; call it"):
        es.Optimizer(optax.adam)


@TRAINING.raises(
    "give a group of `es.Optimizer` a learning rate in place of a transformation",
    TypeError,
    "leads to an optax transformation",
    "es.Optimizer({es.Parameter: optax.adam(1e-3)})",
    instead="`es.Optimizer({es.Parameter: optax.adam(1e-3)})`",
)
def _(case):
    with case.error("the rule of `es.Parameter`", "a `float` was given"):
        es.Optimizer({es.Parameter: 1e-3})
    with case.error("the rule of `...`", "the function `adam` was given; call it"):
        es.Optimizer({...: optax.adam})


@TRAINING.raises(
    "have a parameter that belongs to no group",
    ValueError,
    "no rule matches `layer.weight`",
    "...: None",
    instead="`...: tx` for all others, or `...: None`, which leaves them as they are",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer({es.Buffer: optax.sgd(1.0)})
    with case.error():
        optimizer.init(net)


@TRAINING.raises(
    "misspell a name in rules",
    ValueError,
    "matches no array",
    "wieght",
    instead="a name as `es.parts(model)` has it",
)
def _(case):
    net = case.keep(Net(), XS)
    rules = {es.path_matches("*.wieght"): optax.sgd(1.0), ...: optax.sgd(0.1)}
    with case.error("`es.Optimizer`"):
        es.Optimizer(rules).init(net)
    with case.error("`es.spec`"):
        es.spec(net, dict.fromkeys(rules, 0))


@TRAINING.works(
    "have a group whose arrays are all frozen",
    "the group is empty, and takes no memory",
)
def _(case):
    net = case.keep(Net(), XS).freeze()
    rules = {es.path_matches("layer.weight"): optax.adam(1.0), ...: optax.sgd(0.1)}
    optimizer = es.Optimizer(rules).init(net)
    assert jax.tree.leaves(optimizer) == []
    new, _ = optimizer.update(es.filter(net, es.trainable), net)
    assert eqx.tree_equal(new, net)


@TRAINING.raises(
    "set a learning rate that was not injected, or that a schedule drives",
    ValueError,
    "`es.Optimizer.set`",
    "learning_rate",
    instead="`optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`",
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


@TRAINING.raises(
    "update with gradients of other shapes, for instance one for each example",
    ValueError,
    "A gradient has the shape of its parameter",
    "layer.weight",
    "(5,)",
    instead="`jax.tree.map(lambda g: g.mean(axis=0), grads)`",
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


@TRAINING.raises(
    "update a model whose parameters have other shapes than at `init`",
    ValueError,
    "is not what `init` was given",
    "layer.weight",
    "es.Optimizer(tx).init(model)",
    instead="a new optimizer",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.sgd(1.0, momentum=0.9)).init(net)
    wide = net.replace(layer=Layer(weight=jnp.ones(3)))
    with case.error():
        optimizer.update(es.filter(wide, es.trainable), wide)


@TRAINING.works(
    "use `optax.lookahead`",
    "the model is a pair; pass the gradients of its `fast`",
    "`optimizer.init(optax.LookaheadParams(model, model))`",
)
def _(case):
    net = case.keep(Net(), XS)
    pair = optax.LookaheadParams(net, net)
    tx = optax.lookahead(optax.sgd(1.0), 1, 0.5)
    optimizer = es.Optimizer(tx).init(pair)
    grads, fast = es.grad(loss_fn)(pair.fast)
    with jax.numpy_dtype_promotion("standard"):
        pair, optimizer = optimizer.update(grads, pair._replace(fast=fast))
    assert pair.fast.layer.weight == pair.slow.layer.weight == 0.5
    assert (pair.fast.layer.count, pair.slow.layer.count) == (1, 0)


@TRAINING.raises(
    "swap the arguments: `optimizer.update(model, grads)`",
    ValueError,
    "The gradients come first",
    "layer.count",
    instead="`optimizer.update(grads, model)`, as in optax",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    grads, net = es.grad(loss_fn)(net)
    with case.error():
        optimizer.update(net, grads)


@TRAINING.works(
    "update twice with the old optimizer, or the old model",
    "the same update twice: nothing is written to either",
    "`model, optimizer = optimizer.update(grads, model)`",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = case.keep(es.Optimizer(optax.sgd(1.0, 0.9)).init(net))
    grads, _ = es.grad(loss_fn)(net)
    first, second = (optimizer.update(grads, net) for _ in range(2))
    assert eqx.tree_equal(first, second)
    assert eqx.tree_equal(net.layer.weight, jnp.array(2.0))


@TRAINING.works(
    "use weight decay with constants in a wrapper such as `paramax.NonTrainable`",
    "the wrapper stops gradients, not the decay: exclude its class",
    "`wrt=es.all_of(es.trainable, es.not_(es.inside(paramax.NonTrainable)))`",
)
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


@TRAINING.works(
    "differentiate a frozen model",
    "its gradients are `None`, and an update changes nothing",
    "`model.unfreeze()`, and a new optimizer",
)
def _(case):
    net = case.keep(Net().freeze(), XS)
    grads, new = es.grad(loss_fn)(net)
    assert grads.layer.weight is None
    assert new.layer.count == 1
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    assert optimizer.update(grads, net)[0].layer.weight == 2.0


@TRAINING.works(
    "switch between train and eval mode between updates",
    "the optimizer's state fits both",
)
def _(case):
    net = case.keep(Net(), XS)
    optimizer = es.Optimizer(optax.sgd(1.0, 0.9)).init(net.eval())
    grads, new = es.grad(loss_fn)(net)
    updated, _ = optimizer.update(grads, new)
    assert updated.training
    assert updated.layer.weight < 2.0


@TRAINING.works(
    "unpack the result like JAX's: `loss, grads = es.value_and_grad(loss_fn)(model)`",
    "`loss` is the pair `(loss, model)`; with the old model its state is dropped",
    "`(loss, model), grads = es.value_and_grad(loss_fn)(model)`",
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


@TRAINING.works(
    "update the model from before the call with its gradients",
    "only parameters are updated; the state is that of the model you pass",
)
def _(case):
    net = case.keep(Net(), XS)
    grads, new = es.grad(loss_fn)(net)
    optimizer = es.Optimizer(optax.sgd(1.0)).init(net)
    assert optimizer.update(grads, new)[0].layer.count == 1
    assert optimizer.update(grads, net)[0].layer.count == 0


@TRAINING.raises(
    "give the model to `es.Ema`, and the decay to `init`",
    TypeError,
    "`decay` is a number, or a function of the step",
    "es.Ema(0.999).init(model)",
    instead="`es.Ema(0.999).init(model)`",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.Ema(net)
    with case.error():
        es.Ema("0.999")


@TRAINING.raises(
    "update an `es.Ema` before its `init`",
    es.NotInitializedError,
    "was used before `init`: there is no average yet",
    instead="`ema = es.Ema(0.999).init(model)`",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.Ema(0.999).update(net)


@TRAINING.raises(
    "update an `es.Ema` with a model of another structure",
    ValueError,
    "has another structure than that of `init`, first at `layer`",
    instead="a new average for another model; modes may differ",
)
def _(case):
    net = case.keep(Net(), XS)
    ema = es.Ema(0.5).init(net)
    with case.error():
        ema.update(net.replace(layer=[Layer(), Layer()]))
    assert ema.update(net.eval()).model.training is False


@TRAINING.works(
    "hold an `es.Ema` in a model that is trained",
    "its arrays count as `es.Buffer`: they are neither trained nor written",
)
def _(case):
    net = case.keep(Net(), XS)
    grads, _ = es.grad(lambda pair: loss_fn(pair[0]))((net, es.Ema(0.5).init(net)))
    assert es.parts(grads[1]) == []


@TRAINING.works(
    "compute in half precision, and keep statistics in float32",
    "`cast=` changes dtypes inside of the call alone",
    "`es.value_and_grad(loss_fn, cast={es.Parameter: jnp.bfloat16})`",
)
def _(case):
    net = case.keep(Net(), XS)

    def loss_fn(net, x):
        return jnp.sum(net(x)).astype(jnp.float32)

    grads, new = es.grad(loss_fn, cast={es.Parameter: jnp.bfloat16})(
        net, jnp.ones(3, jnp.bfloat16)
    )
    assert grads.layer.weight.dtype == jnp.float32
    assert es.map(lambda x: x.dtype, new) == es.map(lambda x: x.dtype, net)


@TRAINING.raises(
    "cast to a dtype that is not a real floating one: `cast={...: jnp.int8}`",
    TypeError,
    "arrays are cast to a real floating dtype",
    instead="`cast={es.Parameter: jnp.bfloat16}`, `None` for what stays as it is",
)
def _(case):
    case.keep(Net(), XS)
    with case.error():
        es.value_and_grad(loss_fn, cast={...: jnp.int8})
    with case.error():
        es.mutable(loss_fn, cast={es.State: jnp.complex64})


@TRAINING.raises(
    "cast by a filter that matches nothing: a typo in a name",
    ValueError,
    "matches no array",
    instead="a name from `es.parts(model)`",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.grad(loss_fn, cast={es.path_matches("wieght"): jnp.bfloat16})(net)


@TRAINING.raises(
    "write a wider float into a field, inside of a `cast` or not",
    ValueError,
    "State keeps its shape and dtype",
    instead="`value.astype(self.field.dtype)`; a `cast` widens narrower floats only",
)
def _(case):
    class Mean(es.Module):
        mean: es.State

        def __call__(self, x):
            self.mean = x

    model = case.keep(Mean(jnp.zeros((), jnp.bfloat16)))
    for cast in (None, {es.Parameter: jnp.bfloat16}):
        with case.error():
            es.mutable(model, cast=cast)(jnp.zeros((), jnp.float32))
