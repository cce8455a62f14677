"""Programs that assign a field that must not be written, or a wrong value."""

import copy
import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


def both(a, b, x):
    return b(a(x))


# --- Outside a scope ----------------------------------------------------------------


@program(
    "call a model in train mode directly",
    "`Layer.count`",
    "For predictions call it in eval mode",
    "y, model = es.mutable(model)(x)",
    "model.eval()(x)",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        net(XS)
    assert (net.eval()(XS) == 2 * XS).all()
    assert es.mutable(net)(XS)[1].layer.count == 1


@program(
    "call a model in eval mode that still writes state",
    "Always.count`",
    "if self.training:",
)
def _(case):
    class Always(Layer):
        def __call__(self, x):
            self.count = self.count + 1
            return self.weight * x

    model = case.keep(Always(), XS)
    with case.error():
        model.eval()(XS)


@program("switch a mode by an assignment: `model.training = False`")
def _(case):
    net = case.keep(Net(), XS)
    for name, value in [("training", False), ("frozen", True)]:
        with case.error(f"`Net.{name}`", "model = model.eval()"):
            setattr(net, name, value)


@program("assign a field of a model: `model.layer.weight = w`", "`Layer.")
def _(case):
    net = case.keep(Net(), XS)
    with case.error("model.replace(weight=value)"):
        net.layer.weight = jnp.array(3.0)
    with case.error():
        net.layer.count += 1
    new = eqx.tree_at(lambda m: m.layer.weight, net, jnp.array(3.0))
    assert (new.eval()(XS) == 3 * XS).all()


@program("delete a field: `del model.layer`", "model.replace(")
def _(case):
    net = case.keep(Net(), XS)
    with case.error("`Net.layer`"):
        del net.layer
    with case.error("`Layer.count`"):
        es.mutable(lambda net: delattr(net.layer, "count"))(net)
    assert net.replace(layer=None).layer is None


@program(
    "write to two models, or to the second argument", "`Layer.count`", "argnums=(0, 1)"
)
def _(case):
    a, b = case.keep(Layer(), XS), case.keep(Layer(3.0), XS)
    with case.error():
        es.mutable(both)(a, b, XS)
    y, new = es.mutable(lambda pair, x: both(*pair, x))((a, b), XS)
    assert (y == 6 * XS).all()
    assert [layer.count for layer in new] == [1, 1]
    y, same = es.mutable(both, argnums=(0, 1))(a, b, XS)
    assert (y == 6 * XS).all()
    assert eqx.tree_equal(same, new)


@program(
    "call a model that the function of `es.mutable` closes over",
    "`Layer.count`",
    "argnums=(0, 1)",
    "model.eval()",
)
def _(case):
    model, teacher = case.keep(Layer(), XS), case.keep(Layer(3.0), XS)
    with case.error():
        es.mutable(lambda x: teacher(x))(XS)
    with case.error():
        es.value_and_grad(lambda m, x: (m(x) - teacher(x)).sum())(model, XS)
    silent = teacher.eval()
    _, new = es.grad(lambda m, x: (m(x) - silent(x)).sum())(model, XS)
    assert new.count == 1


@program("name an argument that does not exist: `es.mutable(f, argnums=2)(model, x)`")
def _(case):
    net = case.keep(Net(), XS)
    f = lambda net, x: net(x)  # noqa: E731
    with case.error("2 positional arguments"):
        es.mutable(f, argnums=2)(net, XS)
    with case.error("1 positional arguments"):
        es.value_and_grad(f, argnums=(0, 2))(net, x=XS)
    assert es.mutable(f, argnums=-2)(net, XS)[1].layer.count == 1


@program("name one argument twice: `es.mutable(f, argnums=(0, -2))(model, x)`")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(lambda net, x: net(x), argnums=(0, -2))(net, XS)


@program(
    "bind the model by a partial: `es.mutable(ft.partial(f, model))(x)`",
    "`Net`",
    "es.mutable(f)(model, x)",
    "argnums=0",
)
def _(case):
    net = case.keep(Net(), XS)

    def f(model, x):
        return model(x)

    for bound in (functools.partial(f, net), eqx.Partial(f, model=net)):
        with case.error():
            es.mutable(bound)(XS)
    for run, args in [(f, (net, XS)), (functools.partial(f, x=XS), (net,))]:
        assert es.mutable(run)(*args)[1].layer.count == 1


@program(
    "bind a teacher by a partial: "
    "`es.value_and_grad(ft.partial(distill, teacher))(student, x)`"
)
def _(case):
    teacher, student = case.keep((Layer(3.0).eval(), Layer(1.0)))

    def distill(teacher, student, x):
        return jnp.sum((student(x) - teacher(x)) ** 2)

    loss_fn = functools.partial(distill, teacher)
    (loss, new), grads = es.value_and_grad(loss_fn)(student, XS)
    assert (new.weight, new.count, loss) == (1.0, 1, 4 * (XS**2).sum())
    assert grads.weight == -4 * (XS**2).sum()


class Trainer:
    def loss(self, model, x):
        return jnp.sum(model(x))


@program(
    "differentiate a method of a plain object: "
    "`es.value_and_grad(trainer.loss)(model, x)`"
)
def _(case):
    layer = case.keep(Layer(), XS)
    (_, new), grads = es.value_and_grad(Trainer().loss)(layer, XS)
    assert (new.count, grads.weight) == (1, XS.sum())


@program(
    "pass the model by keyword: `es.mutable(f)(model=model)`",
    "es.mutable(f)(model, ...)",
)
def _(case):
    net = case.keep(Net(), XS)

    def f(model):
        return model(XS)

    with case.error():
        es.mutable(f)(model=net)
    assert es.mutable(f)(net)[1].layer.count == 1


@program("assign a field with `object.__setattr__(model, …)`")
def _(case):
    net = case.keep(Net(), XS)
    other = copy.copy(net.layer)
    object.__setattr__(other, "count", jnp.array(5))
    assert (other.count, net.layer.count) == (5, 0)
    assert jax.tree.structure(other) == jax.tree.structure(net.layer)


# --- Inside a scope -----------------------------------------------------------------


@program(
    "write a parameter in a forward pass: `self.layer.weight = w`",
    "`Layer.weight`",
    "kinds=(es.State, es.Parameter)",
    "weight: es.State",
)
def _(case):
    net = case.keep(Net(), XS)

    def clip(net):
        net.layer.weight = jnp.clip(net.layer.weight, -1.0, 1.0)

    with case.error():
        es.mutable(clip)(net)
    assert es.mutable(clip, kinds=es.TreePart)(net)[1].layer.weight == 1.0


@program(
    "write a parameter by `object.__setattr__` or `self.__dict__`", "`layer.weight`"
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(lambda m: object.__setattr__(m.layer, "weight", jnp.ones(())))(net)
    with case.error():
        es.mutable(lambda m: m.layer.__dict__.update(weight=jnp.ones(())))(net)


@program(
    "keep a counter in an integer array, without a kind",
    "Counter.count`",
    "count: es.State",
)
def _(case):
    class Counter(es.Module):
        count: jax.Array

        def __call__(self):
            self.count = self.count + 1

    with case.error():
        es.mutable(case.keep(Counter(jnp.array(0))))()


@program(
    "put a Python number into a field with a kind, by `eqx.tree_at`",
    "`layer.weight`",
    'jnp.asarray(0.5, "float32")',
)
def _(case):
    net = case.keep(Net(), XS)
    tuned = eqx.tree_at(lambda m: m.layer.weight, net, 0.5)
    with case.error():
        es.mutable(tuned)(XS)
    tuned = net.replace(layer=net.layer.replace(weight=0.5))
    assert es.mutable(tuned)(XS)[1].layer.weight == 0.5


@program(
    "keep a counter in a Python number, without a kind",
    "Counter.count`",
    "count: es.State",
)
def _(case):
    class Counter(es.Module):
        count: int = 0

        def __call__(self):
            self.count += 1

    with case.error():
        es.mutable(case.keep(Counter()))()


@program("keep a counter in a static field", "Counter.count`", "es.State")
def _(case):
    class Counter(es.Module):
        count: int = eqx.field(static=True, default=0)

        def __call__(self):
            self.count += 1

    with case.error():
        es.mutable(case.keep(Counter()))()


@program(
    "write a constant that is an `es.Buffer`, or inside one",
    "kinds=(es.State, es.Buffer)",
)
def _(case):
    class Frozen(es.Module):
        table: es.Buffer
        net: es.Buffer[Net]

        def __call__(self, x):
            self.table = x + 1.0

    model = case.keep(Frozen(XS, Net()))
    with case.error("Frozen.table`"):
        es.mutable(model)(XS)
    with case.error("`net.layer.count`"):
        es.mutable(lambda m: m.net(XS))(model)


@program(
    "misspell a field in `__call__`: `self.cuont = …`",
    "cuont: es.State",
)
def _(case):
    class Counter(es.Module):
        count: es.State = 0

        def __call__(self):
            self.cuont = self.count + 1

    with case.error():
        es.mutable(case.keep(Counter()))()


@program(
    "assign an undeclared array in `__init__`, as in PyTorch",
    "weight: es.Parameter",
)
def _(case):
    class Dense(es.Module):
        def __init__(self):
            self.weight = jnp.ones(3)

    with case.error():
        Dense()


@program("assign an undeclared layer in `__init__`, as in PyTorch")
def _(case):
    class Model(es.Module):
        def __init__(self, wrap):
            self.linear = wrap(eqx.nn.Linear(2, 3, key=jax.random.key(0)))

    with case.error("body: `linear: eqx.nn.Linear`."):
        Model(lambda layer: layer)
    with case.error("body: `linear: list`."):
        Model(lambda layer: [layer])


@program("switch the mode in a call: `self.training = False`", "model = model.eval()")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(lambda net: setattr(net, "training", False))(net)


@program(
    "switch the mode in a call: `self.layer = self.layer.eval()`",
    "`layer.training`: expected `True`, got `False`",
    "outside the call, by `train` and `eval`",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(lambda net: setattr(net, "layer", net.layer.eval()))(net)
    y, new = es.mutable(lambda net: net.layer.eval()(XS))(net)
    assert (y == 2 * XS).all()
    assert new.layer.count == 0


@program("write into an array of state in place: `self.mean[0] = 1.0`", ".at[")
def _(case):
    for mean in (jnp.zeros(3), np.zeros(3, np.float32)):  # NumPy's array becomes JAX's
        net = case.keep(Net(mean=mean), XS)
        with case.error():
            es.mutable(lambda net: net.mean.__setitem__(0, 1.0))(net)
        f = es.mutable(lambda net: setattr(net, "mean", net.mean.at[0].set(1.0)))
        assert f(net)[1].mean.tolist() == [1.0, 0.0, 0.0]


@program("compute from state in a `functools.cached_property`")
def _(case):
    class Scaled(es.Module):
        count: es.State = 1.0

        @functools.cached_property
        def double(self):
            return 2 * self.count

        def __call__(self, x):
            before = self.double
            self.count = self.count + 1
            return before * x, self.double * x

    model = case.keep(Scaled(), XS)
    (before, after), new = es.mutable(model)(XS)
    assert (before == 2 * XS).all()
    assert (after == 4 * XS).all()
    assert (model.double, new.double) == (2.0, 4.0)


@program("set an entry of a dict of state: `self.stats[name] = x`")
def _(case):
    net = case.keep(Net(), XS)
    f = es.mutable(lambda net, x: net.stats.__setitem__("last", x.sum()))
    for run in (f, es.jit(f)):
        assert run(net, XS)[1].stats["last"] == 3.0


@program("assign an undeclared key in `__init__`: `self.rng = key`", "no field `rng`")
def _(case):
    class Draw(es.Module):
        def __init__(self, key):
            self.rng = key

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        with case.error():
            Draw(key)


@program("assign to a property with a setter", "self.set_n(value)")
def _(case):
    class Count(es.Module):
        count: es.State = 0

        n = property(lambda self: self.count, lambda self, n: self.set_n(n))

        def set_n(self, n):
            self.count = n

        def __call__(self):
            self.n = self.n + 1

    count = case.keep(Count())
    with case.error("Count.n`"):
        es.mutable(count)()
    assert es.mutable(count.set_n)(3)[1].n == 3


class Plain(eqx.Module):
    count: es.State

    def __call__(self):
        self.count = self.count + 1

    def reads(self, name):
        return getattr(self, name)


@program("write state in an `eqx.Module` that declares a kind")
def _(case):
    model = case.keep([eqx.nn.Identity(), Plain(jnp.array(0))])
    with case.error("`Plain`, which declares `count`"):
        es.mutable(lambda model: model[1]())(model)
    # Not about this model.
    other = case.keep([Layer()])
    with pytest.raises(dataclasses.FrozenInstanceError, match="'count'") as info:
        es.mutable(lambda _: Plain(0)())(other)
    assert not any("Plain" in note for note in getattr(info.value, "__notes__", ()))


@program("read `self.training` in an `eqx.Module`", "`class Plain(es.Module)`")
def _(case):
    model = case.keep(Plain(jnp.array(0)))
    with case.error():
        es.mutable(model.reads)("training")
    with pytest.raises(AttributeError, match="no attribute 'moving'") as info:
        es.mutable(model.reads)("moving")
    assert not any("Plain" in note for note in getattr(info.value, "__notes__", ()))


@program("put a stateful layer into a `functools.partial` or a function in a field")
def _(case):
    class Scaled(es.Module):
        f: Any

        def __call__(self, x):
            return self.f(x)

    layer = case.keep(Layer(), XS)
    for f in (functools.partial(layer), lambda x: layer(x)):
        with case.error("`Layer.count`", "self.encode = eqx.Partial(layer"):
            es.mutable(Scaled(f))(XS)
    assert es.mutable(Scaled(eqx.Partial(layer)))(XS)[1].f.func.count == 1


@program(
    "pass the model to its own method: `es.value_and_grad(task.loss)(task, xs)`",
    "es.value_and_grad(model.loss)(x)             # right",
)
def _(case):
    class Task(es.Module):
        layer: Layer

        def loss(self, x):
            return self.layer(x).sum()

        def distance(self, other, x, power=1):
            return jnp.sum(abs(self.layer(x) - other.layer(x)) ** power)

    task = case.keep(Task(Layer()))
    with case.error():
        es.value_and_grad(task.loss)(task, XS)
    (_, new), _ = es.value_and_grad(task.loss)(XS)
    assert new.layer.count == 1
    # A method may take the model, too.
    assert es.mutable(task.eval().distance)(task.eval(), XS)[0] == 0
    same = task.eval()
    assert es.mutable(same.distance)(same, XS)[0] == 0
    with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
        es.mutable(same.distance)(same, XS, q=2)
