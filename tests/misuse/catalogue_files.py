"""Programs that save, pickle and compare; and habits from other libraries."""

import dataclasses
import os
import pickle
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


@program(
    "save in a jitted function", "`es.save` cannot write these arrays", "layer.count"
)
def _(case):
    net = case.keep(Net(), XS)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        with case.error():
            es.jit(lambda net: es.save(path, net))(net)
        assert os.listdir(folder) == []


@program("load into a different model", "missing", "unexpected", "layer.weight")
def _(case):
    net, other = case.keep(Net(), XS), case.keep({"net": Net()})
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        es.save(path, net)
        with case.error():
            es.load(path, other)
        assert eqx.tree_equal(es.load(path, net), net)
    with case.error():
        es.load_state_dict(other, es.state_dict(net))


@program("load arrays of different shapes", "wrong shape", "mean: (3,) instead of (5,)")
def _(case):
    net, other = case.keep(Net(), XS), case.keep(Net(mean=jnp.zeros(5)))
    with case.error():
        es.load_state_dict(other, es.state_dict(net))


@program("load a file that lacks some arrays, or has more")
def _(case):
    net, like = case.keep(Net(), XS), case.keep({"layer": Layer(), "other": XS})
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        es.save(path, {"layer": Layer(weight=5.0), "more": XS})
        with pytest.raises(ValueError, match="strict=False"):
            es.load(path, like)
        loaded = es.load(path, like, strict=False)
        assert loaded["layer"].weight == 5.0
        assert loaded["other"] is like["other"]
        with pytest.raises(ValueError, match=r"missing[\s\S]*layer.weight"):
            es.load(path, net)


@program(
    "save numbers as metadata: `es.save(path, model, metadata={'step': 3})`",
    "'int' object",
)
def _(case):
    net = case.keep(Net(), XS)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        with case.error():
            es.save(path, net, metadata={"step": 3})
        es.save(path, net, metadata={"step": "3"})
        assert es.load_metadata(path) == {"step": "3"}


@program("pickle a model, or a function of `es.mutable`")
def _(case):
    net = case.keep(Net(), XS)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        model, run = pickle.loads(pickle.dumps((net, es.mutable(net)), protocol))
        assert eqx.tree_equal(model, net)
        assert eqx.tree_equal(run(XS), es.mutable(net)(XS))


@program("use a model as the key of a dict, or in a set")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        hash(net)
    with case.error():
        _ = {net}


@program("compare models by `==`")
def _(case):
    net = case.keep(Net(), XS)
    assert net == Net()
    assert net != es.mutable(net)(XS)[1]
    assert net != net.eval()


@program("copy by `dataclasses.replace(model, …)`")
def _(case):
    layer = case.keep(Layer(), XS)
    assert dataclasses.replace(layer.eval(), count=5).training
    assert not layer.eval().replace(count=5).training


@program("append to a list in a static field")
def _(case):
    class Log(es.Module):
        log: list = eqx.field(static=True, default_factory=list)

        def __call__(self, x):
            self.log.append(x)

    model = case.keep(Log())
    es.mutable(model)(1.0)
    assert model.log == [1.0]


# --- Habits -------------------------------------------------------------------------


@program("write `model.parameters()`, `model.apply_gradients(…)`, `optimizer.step()`")
def _(case):
    net = case.keep(Net(), XS)
    for use in (
        lambda: net.parameters(),
        lambda: net.apply_gradients({}),
        lambda: es.Optimizer(optax.sgd(1.0)).step(),
    ):
        with case.error():
            use()


@program("write `self.count.value += 1`, as in Flax NNX")
def _(case):
    class Counter(es.Module):
        count: es.State = 0

        def __call__(self):
            self.count.value += 1

    with case.error():
        es.mutable(case.keep(Counter()))()


@program(
    "define `forward`, and give the model to `es.mutable`",
    "`Torch`",
)
def _(case):
    class Torch(es.Module):
        count: es.State = 0

        @property
        def calls(self):
            return self.count

        def forward(self, x):
            self.count += 1
            return x

    model = case.keep(Torch())
    for transform in (
        es.mutable,
        es.vmap,
        es.checkpoint,
        es.value_and_grad,
        es.capture,
    ):
        with case.error():
            transform(model)
    assert es.mutable(model.forward)(XS)[1].count == 1


@program("forget the second call: `y, model = es.mutable(model)`")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        _y, _new = es.mutable(net)


@program("pass the inputs to `es.mutable` itself: `es.mutable(model, x)`", "mutable()")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(net, XS)


@program(
    "pass the model to the function of `es.functional`",
)
def _(case):
    net = case.keep(Net(), XS)
    apply, params, state = es.functional(net)
    with case.error():
        apply(es.filter(net, es.Parameter), state, XS)
    assert (apply(params, state, XS)[0] == net.eval()(XS)).all()


@program(
    "load PyTorch's weights as they are: `es.load_state_dict(model, tensors)`",
    "bias: (2,) instead of (2, 1)",
)
def _(case):
    conv = case.keep(eqx.nn.Conv1d(1, 2, 1, key=jr.key(0)))
    tensors = {"weight": np.ones((2, 1, 1), "f4"), "bias": np.ones(2, "f4")}
    with case.error():
        es.load_state_dict(conv, tensors)
    assert es.from_torch(conv, tensors).bias.shape == (2, 1)


@program(
    "load weights of PyTorch into a model with other names",
    "head.weight",
    "unused",
    "fc.bias: (2,)",
    "`rename=",
)
def _(case):
    model = case.keep({"head": eqx.nn.Linear(1, 2, key=jr.key(0))})
    tensors = {"fc.weight": np.ones((2, 1)), "fc.bias": np.ones(2)}
    with case.error():
        es.from_torch(model, tensors)
    loaded = es.from_torch(model, tensors, rename={"head.*": "fc.*"})
    assert (loaded["head"].weight == 1).all()


@program("rename by a glob that matches nothing", "Globs must match the whole name")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.load_state_dict(net, {}, rename={"haed.*": "fc.*"})


@program("pass PyTorch's module: `es.from_torch(model, module)`", "`Module` was given")
def _(case):
    class Module:
        pass

    with case.error():
        es.from_torch(case.keep(Net(), XS), Module())


@program(
    "load a file of `es.save(path, es.state_dict(model))` into the model",
    "`es.load_state_dict(model, es.load(path, es.state_dict(model)))`",
    "`es.save(path, model)`",
)
def _(case):
    net = case.keep(Net(), XS)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        es.save(path, es.state_dict(net))
        for options in ({}, {"strict": False}):
            with case.error():
                es.load(path, net, **options)
        with case.error():
            es.load(path, net, es.Parameter)
        found = es.load_state_dict(net, es.load(path, es.state_dict(net)))
        assert eqx.tree_equal(found, net)


@program("use a pickle of a class that has gained a field", "`Net` lacks its field")
def _(case):
    net = case.keep(Net(), XS)
    old = pickle.loads(pickle.dumps(net))
    object.__delattr__(old, "layer")  # as if `Net` had been without it
    with case.error("`layer`", "es.load_state_dict(Net(...), es.state_dict(old)"):
        es.mutable(old)(XS)
    new = es.load_state_dict(Net(mean=XS), es.state_dict(old), strict=False)
    assert eqx.tree_equal(new, net)


@program(
    "map over two models in different modes: `jax.tree.map(f, model, model.eval())`"
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        jax.tree.map(jnp.add, net, net.eval())
    both = es.map(jnp.add, net, net.eval(), on=es.Parameter)
    assert both.layer.weight == 2 * net.layer.weight


@program("use JAX's name of the module: `es.lax.scan`", "`es.scan`, `es.cond`")
def _(case):
    with case.error():
        _ = es.lax
