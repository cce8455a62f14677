"""Programs that save, pickle and compare; and habits from other libraries."""

import copy
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
from catalogue_entry import FROZEN, Layer, Net, Theme, XS

import eqx_state as es


FILES = Theme("Saving, pickling, comparing")
HABITS = Theme("Habits from other libraries")


@FILES.raises(
    "save in a jitted function",
    TypeError,
    "traced; save outside of `jit`",
    "`es.save` cannot write these arrays",
    "layer.count",
    instead="save what the function returns",
)
def _(case):
    net = case.keep(Net(), XS)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        with case.error():
            es.jit(lambda net: es.save(path, net))(net)
        assert os.listdir(folder) == []


@FILES.works(
    "save in a call",
    "the state at that moment is saved",
    "save the model that the call returns",
)
def _(case):
    net = case.keep(Net(), XS)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")

        def f(net):
            net(XS)
            es.save(path, net)
            net(XS)

        assert es.mutable(f)(net)[1].layer.count == 2
        assert es.load(path, net).layer.count == 1


@FILES.raises(
    "load into another model",
    ValueError,
    "does not fit the tree",
    "missing",
    "unexpected",
    "layer.weight",
    instead="the model that was saved, or `es.load(path, like, filter)` of a part",
)
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


@FILES.raises(
    "load arrays of other shapes",
    ValueError,
    "does not fit the tree",
    "wrong shape",
    "mean: (3,) instead of (5,)",
    instead="`like` with the shapes of the file",
)
def _(case):
    net, other = case.keep(Net(), XS), case.keep(Net(mean=jnp.zeros(5)))
    with case.error():
        es.load_state_dict(other, es.state_dict(net))


@FILES.works(
    "load a file that lacks some arrays, or has more",
    "with `strict=False` missing arrays stay as in `like`",
    "`es.load(path, like, strict=False)`; or a filter, if you know what the file has",
)
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


@FILES.raises(
    "save numbers as metadata: `es.save(path, model, metadata={'step': 3})`",
    TypeError,
    "takes a dictionary of strings",
    "`'step'` has a `int`",
    "json.dumps(config)",
    instead="`metadata={'step': '3'}`; or `es.save(path, (model, np.int32(3)))`",
)
def _(case):
    net = case.keep(Net(), XS)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        with case.error():
            es.save(path, net, metadata={"step": 3})
        es.save(path, net, metadata={"step": "3"})
        assert es.load_metadata(path) == {"step": "3"}


@FILES.works(
    "pickle a model, or a threaded call, and send it to another process",
    "the copy is frozen, and works",
)
def _(case):
    net = case.keep(Net(), XS)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        model, run = pickle.loads(pickle.dumps((net, es.mutable(net)), protocol))
        assert eqx.tree_equal(model, net)
        assert eqx.tree_equal(run(XS), es.mutable(net)(XS))
        with pytest.raises(FROZEN, match="this one is in no scope"):
            model(XS)


@FILES.works(
    "pickle or copy a model in a call",
    "the copy is frozen and has the state at that moment",
)
def _(case):
    net = case.keep(Net(), XS)

    def f(net):
        net(XS)
        copies = pickle.loads(pickle.dumps(net)), copy.deepcopy(net)
        net(XS)
        return copies

    copies, new = es.mutable(f)(net)
    assert [m.layer.count.item() for m in copies] == [1, 1]
    assert new.layer.count == 2
    assert [es.mutable(m)(XS)[1].layer.count.item() for m in copies] == [2, 2]


@FILES.raises(
    "use a model as the key of a dict, or in a set",
    TypeError,
    "unhashable type: a `Net` with arrays",
    instead="`id(model)`; a name",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        hash(net)
    with case.error():
        _ = {net}


@FILES.works(
    "compare models by `==`",
    "they are compared by value, like `eqx.tree_equal`, including modes",
)
def _(case):
    net = case.keep(Net(), XS)
    assert net == Net()
    assert net != es.mutable(net)(XS)[1]
    assert net != net.eval()


@FILES.works(
    "copy by `dataclasses.replace(model, …)`",
    "the new model comes from `__init__`, so it is in train mode and not frozen",
    "`model.replace(…)`, which keeps the modes and does not run `__init__`",
)
def _(case):
    layer = case.keep(Layer(), XS)
    assert dataclasses.replace(layer.eval(), count=5).training
    assert not layer.eval().replace(count=5).training


@FILES.works(
    "append to a list in a static field",
    "all copies share Python's list, so the caller's grows, too",
    "`es.State`; or return the values; or `self.sow` with `es.capture`",
)
def _(case):
    class Log(es.Module):
        log: list = eqx.field(static=True, default_factory=list)

        def __call__(self, x):
            self.log.append(x)

    model = case.keep(Log())
    es.mutable(model)(1.0)
    assert model.log == [1.0]


# --- Habits -------------------------------------------------------------------------


@HABITS.raises(
    "write `model.parameters()`, `model.apply_gradients(…)`, `optimizer.step()`",
    AttributeError,
    "has no attribute",
    instead="`model.filter(es.Parameter)`, `optimizer.update(grads, model)`",
)
def _(case):
    net = case.keep(Net(), XS)
    for use in (
        lambda: net.parameters(),
        lambda: net.apply_gradients({}),
        lambda: es.Optimizer(optax.sgd(1.0)).step(),
    ):
        with case.error():
            use()


@HABITS.raises(
    "write `self.count.value += 1`, as in Flax NNX",
    AttributeError,
    "has no attribute 'value'",
    instead="`self.count += 1`: fields hold the arrays themselves",
)
def _(case):
    class Counter(es.Module):
        count: es.State = 0

        def __call__(self):
            self.count.value += 1

    with case.error():
        es.mutable(case.keep(Counter()))()


@HABITS.raises(
    "define `forward`, and give the model to `es.mutable`",
    TypeError,
    "cannot be called: its class has no `__call__`",
    "es.mutable(model.forward)(x)",
    "`Torch`",
    instead="define `__call__`; or `es.mutable(model.forward)(x)`",
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

    class Data(es.Module):
        count: es.State = 0

    with pytest.raises(TypeError, match=r"`Data` cannot.*[\s\S]*model\.method\)"):
        es.mutable(Data())
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


@HABITS.raises(
    "define `forward`, and call the model",
    TypeError,
    "object is not callable",
    instead="define `__call__`; or `model.forward(x)`",
)
def _(case):
    class Torch(es.Module):
        def forward(self, x):
            return x

    model = case.keep(Torch())
    with case.error():
        model(XS)
    assert (model.forward(XS) == XS).all()


@HABITS.works(
    "call `super().__init__()` in `__init__`, as in PyTorch",
    "it does nothing",
    "leave it out",
)
def _(case):
    class Torch(es.Module):
        weight: es.Parameter
        count: es.State = 0

        def __init__(self):
            super().__init__()
            self.weight = 2.0

        def __call__(self, x):
            self.count += 1
            return self.weight * x

    y, new = es.mutable(case.keep(Torch(), XS))(XS)
    assert (y == 2 * XS).all()
    assert new.count == 1


@HABITS.raises(
    "forget the second call: `y, model = es.mutable(model)`",
    TypeError,
    "cannot unpack non-iterable",
    instead="`y, model = es.mutable(model)(x)`",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        _y, _new = es.mutable(net)


@HABITS.raises(
    "pass the inputs to `es.mutable` itself: `es.mutable(model, x)`",
    TypeError,
    "takes a function, and returns one of the same arguments",
    "es.mutable(f)(x)     # right",
    instead="`es.mutable(model)(x)`",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(net, XS)


@HABITS.raises(
    "call first, and thread the result: `es.mutable(model(x))`",
    FROZEN,
    "this one is in no scope of `es.mutable`",
    "y, model = es.mutable(model)(x)",
    instead="`es.mutable(model)(x)`",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(net(XS))


@HABITS.works(
    "thread state by hand, as with `eqx.nn.State`",
    "a model with its state is one value: pass it and return it",
    "`es.to_equinox(model)`, where `layer(x, state)` is expected",
)
def _(case):
    net = case.keep(Net(), XS)
    layer, state = es.to_equinox(net)
    y, state = layer(XS, state)
    y, state = layer(XS, state)
    assert (y == 2 * XS).all()
    _, new = es.mutable(es.mutable(net)(XS)[1])(XS)
    assert new.layer.count == 2


@HABITS.works(
    "keep the pure pair of `es.functional`, and drop the new state",
    "the same call returns the same result",
    "`y, state = apply(params, state, x)`",
)
def _(case):
    net = case.keep(Net(), XS)
    apply, params, state = es.functional(net)
    run = jax.jit(apply)
    (_, once), (_, again) = run(params, state, XS), run(params, state, XS)
    _, twice = run(params, once, XS)
    assert eqx.tree_equal(once, again)
    assert es.load_state_dict(net, {**params, **twice}).layer.count == 2


@HABITS.raises(
    "pass the model, or a part of it, to the function of `es.functional`",
    TypeError,
    "`params` is of type `Net`",
    "es.state_dict(model, es.Parameter)",
    instead="its own `params` and `state`, dictionaries by name",
)
def _(case):
    net = case.keep(Net(), XS)
    apply, params, state = es.functional(net)
    with case.error():
        apply(es.filter(net, es.Parameter), state, XS)
    assert (apply(params, state, XS)[0] == net.eval()(XS)).all()


@HABITS.raises(
    "call the function of `es.functional` with the arrays of a larger model",
    ValueError,
    "unknown in `state`: more.count",
    instead="the names of this model only",
)
def _(case):
    apply, params, state = es.functional(case.keep(Net(), XS))
    with case.error():
        apply(params, {**state, "more.count": jnp.array(0)}, XS)


@HABITS.raises(
    "load PyTorch's weights as they are: `es.load_state_dict(model, tensors)`",
    ValueError,
    "wrong shape",
    "bias: (2,) instead of (2, 1)",
    instead="`es.from_torch(model, tensors)`, which knows both layouts",
)
def _(case):
    conv = case.keep(eqx.nn.Conv1d(1, 2, 1, key=jr.key(0)))
    tensors = {"weight": np.ones((2, 1, 1), "f4"), "bias": np.ones(2, "f4")}
    with case.error():
        es.load_state_dict(conv, tensors)
    assert es.from_torch(conv, tensors).bias.shape == (2, 1)


@HABITS.raises(
    "load weights of PyTorch into a model that calls a layer otherwise",
    ValueError,
    "missing",
    "head.weight",
    "unused",
    "fc.bias: (2,)",
    "`rename=",
    instead="`es.from_torch(model, tensors, rename={'head.*': 'fc.*'})`",
)
def _(case):
    model = case.keep({"head": eqx.nn.Linear(1, 2, key=jr.key(0))})
    tensors = {"fc.weight": np.ones((2, 1)), "fc.bias": np.ones(2)}
    with case.error():
        es.from_torch(model, tensors)
    loaded = es.from_torch(model, tensors, rename={"head.*": "fc.*"})
    assert (loaded["head"].weight == 1).all()


@HABITS.raises(
    "rename by a glob that matches nothing",
    ValueError,
    "no array has a name that matches 'haed.*'",
    "Globs match the whole name",
    instead="the names that `es.state_dict` has, or PyTorch's in `es.from_torch`",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.load_state_dict(net, {}, rename={"haed.*": "fc.*"})


@HABITS.raises(
    "pass PyTorch's module: `es.from_torch(model, module)`",
    TypeError,
    "takes a dictionary from names to tensors",
    "was given a `Module`",
    instead="`es.from_torch(model, module.state_dict())`",
)
def _(case):
    class Module:
        pass

    with case.error():
        es.from_torch(case.keep(Net(), XS), Module())
