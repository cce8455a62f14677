"""Programs that use the transforms of `es` wrongly."""

import contextlib
import dataclasses

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import pytest
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


class Stacked(es.Module):
    """Two stacked layers, to be scanned."""

    layers: Layer = dataclasses.field(
        default_factory=lambda: Layer(jnp.array([1.0, 3.0]), jnp.array([0, 1]))
    )

    def __call__(self, x):
        return es.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]

    def shares(self, x):
        def share(x, layer):
            return x * layer.weight / self.layers.weight.sum(), None

        return es.scan(share, x, self.layers)[0]


class Mean(es.Module):
    mean: es.BatchStat = 0.0

    def __call__(self, x):
        self.mean = x
        return x

    def reduced(self, x):
        self.mean = lax.pmean(x, "batch")
        return x


class Sower(es.Module):
    def __call__(self, x):
        self.sow("y", 2 * x)
        return x


@program(
    "write a different value to shared state in each lane of `es.vmap`",
    "`mean`",
    'jax.lax.pmean(mean, "batch")',
    "axes={es.State: 0}",
)
def _(case):
    model = case.keep(Mean(), XS[0])
    for f in (es.vmap(model), es.jit(es.vmap(model)), es.vmap(es.checkpoint(model))):
        with case.error():
            es.mutable(f)(XS)
    f = es.vmap(model.reduced, axis_name="batch")
    assert es.mutable(f)(XS)[1].mean == 1.0
    each = es.mutable(es.vmap(Mean(jnp.zeros(3)), axes={es.State: 0}))(XS)[1]
    assert (each.mean == XS).all()


@program(
    "forget `axis_name` around an `es.nn.BatchNorm` that has one",
    "es.vmap(model, axis_name='batch')(xs)",
)
def _(case):
    norm = case.keep(es.nn.BatchNorm(3, axis_name="batch"))
    batch = jnp.stack([XS, 2 * XS])
    for f in (es.vmap(norm), es.vmap(norm, axis_name="other")):
        with case.error():
            es.mutable(f)(batch)
    new = es.mutable(es.vmap(norm, axis_name="batch"))(batch)[1]
    assert jnp.allclose(new.mean, 1.5 * XS)


@program("map over arrays of different lengths", "size 3: axis 0 of argument args[0]")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(lambda net: es.vmap(lambda x, y: net(x) + y)(XS, XS[:2]))(net)


@program("misspell a name in the `axes` of `es.vmap`", "weigth")
def _(case):
    net = case.keep(Net(), XS)
    axes = {es.path_matches("weigth"): 0}
    with case.error():
        es.mutable(es.vmap(net, axes=axes))(XS)
    with case.error():
        es.mutable(lambda net: es.vmap(net, axes=axes)(XS))(net)


@program(
    "carry a module through `es.scan`, and call the original in the body",
    "`layer.count`",
    "# right",
)
def _(case):
    net = case.keep(Net(), XS)

    def wrong(net):
        net.layer, ys = es.scan(lambda c, x: (c, net.layer(x)), net.layer, XS)

    def right(net):
        net.layer, ys = es.scan(lambda c, x: (c, c(x)), net.layer, XS)

    def also_right(net):
        _, ys = es.scan(lambda c, x: (c, net.layer(x)), 0, XS)

    with case.error():
        es.mutable(wrong)(net)
    for f in (right, also_right):
        assert es.mutable(f)(net)[1].layer.count == 3


@program(
    "return the old module, not the one in the carry, from the body of `es.scan`",
    "`layer.count`",
    "return cell, y",
)
def _(case):
    net = case.keep(Net(), XS)

    def wrong(net):
        return es.scan(lambda cell, x: (net.layer, cell(x)), net.layer, XS)

    def right(net):
        def step(cell, x):
            y = cell(x)
            return cell, y

        net.layer, ys = es.scan(step, net.layer, XS)
        return ys

    with case.error():
        es.mutable(wrong)(net)
    ys, new = es.mutable(right)(net)
    assert (ys == 2 * XS).all()
    assert new.layer.count == 3


@program(
    "write to the module that `es.scan` returns in its carry, without assigning it",
    "`layer.count`",
    "self.cell, ys = es.scan(step, self.cell, xs)",
)
def _(case):
    net = case.keep(Net(), XS)

    def step(cell, x):
        y = cell(x)
        return cell, y

    def f(net):
        cell, ys = es.scan(step, net.layer, XS)
        cell(XS)
        return ys

    with case.error():
        es.mutable(f)(net)


@program("carry a module through `es.scan`, and drop the new one")
def _(case):
    net = case.keep(Net(), XS)

    def step(cell, x):
        y = cell(x)
        return cell, y

    def dropped(net):
        _, ys = es.scan(step, net.layer, XS)
        return ys

    def assigned(net):
        net.layer, ys = es.scan(step, net.layer, XS)
        return ys

    assert es.mutable(dropped)(net)[1].layer.count == 0
    assert es.mutable(assigned)(net)[1].layer.count == 3


@program("change a list of modules that a function closes over", "self.layers = [")
def _(case):
    class Layers(es.Module):
        layers: list[Layer]

        def run(self, transform):
            layers = self.layers

            def swapped(x):
                layers[0], layers[1] = layers[1], layers[0]
                return self.layers[0](x)

            return transform(swapped)(XS)

    def scan(f):
        return lambda xs: es.scan(lambda carry, x: (carry, f(x)), None, xs)

    model = case.keep(Layers([Layer(), Layer()]))
    for transform in (es.jit, es.checkpoint, es.vmap, scan):
        with case.error():
            es.mutable(model.run, kinds=es.TreePart)(transform)


@program("return only the carry from the body of `es.scan`", "return carry, None")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(lambda net: es.scan(lambda c, x: net.layer(x), 0.0, XS))(net)
    f = es.mutable(lambda net: es.scan(lambda c, x: (net.layer(x), None), 0.0, XS))
    assert f(net)[1].layer.count == 3


@program(
    "scan over one layer that is not a stack, and contains a scalar",
    "`es.nn.Stacked(layers)(x)`",
)
def _(case):
    one = case.keep([Layer()])
    stack = case.keep([eqx.filter_vmap(Layer)(jnp.ones(2), jnp.zeros(2, int))])
    f = es.mutable(lambda layers: es.scan(lambda x, m: (m(x), None), XS, layers[0])[0])
    with case.error("`[0].weight`"):
        f(one)
    with case.error("`xs[0].weight`"):
        es.scan(lambda x, layers: (layers[0](x), None), XS, one)
    y, new = f(stack)
    assert (y == XS).all()
    assert new[0].count.tolist() == [1, 1]


@program("scan over one layer that is not a stack, and contains no scalar")
def _(case):
    layer = case.keep(Layer(XS + 1, jnp.zeros(3, int)))
    f = es.mutable(lambda layer: es.scan(lambda x, m: (m(x), None), XS[1], layer)[0])
    y, new = f(layer)
    assert y == 1 * 2 * 3
    assert new.count.tolist() == [1, 1, 1]


@program(
    "write state in the `cond_fun` of `es.while_loop`",
    "`layer.count`",
    "Write in `body_fun`",
)
def _(case):
    net = case.keep(Net(), XS)

    def wrong(net):
        return es.while_loop(lambda x: net.layer(x) < 9, lambda x: 2 * x, XS[1])

    def right(net):
        return es.while_loop(lambda x: x < 9, net.layer, XS[1])

    with case.error():
        es.mutable(wrong)(net)
    y, new = es.mutable(right)(net)
    assert (y, new.layer.count) == (16, 4)


@program(
    'write a value that is not an array under a transform: `self.phase = "warm"`',
    "`phase`",
    "phase: es.State = 0",
)
def _(case):
    class Machine(es.Module):
        phase: es.State = "cold"

        def __call__(self, x):
            self.phase = "warm"
            return x

    class Numbered(Machine):
        phase: es.State = 0

        def __call__(self, x):
            self.phase = 1
            return x

    transforms = {
        "jit": es.jit,
        "vmap": lambda f: lambda x: es.vmap(lambda _: f(x), out_axes=None)(XS),
        "checkpoint": es.checkpoint,
        "cond": lambda f: lambda x: es.cond(x < 1, f, lambda x: x, x),
        "switch": lambda f: lambda x: es.switch(0, [f, lambda x: x], x),
        "scan": lambda f: lambda x: es.scan(lambda c, _: (f(c), None), x, XS)[0],
        "fori_loop": lambda f: lambda x: es.fori_loop(0, 2, lambda i, c: f(c), x),
        "while_loop": lambda f: (
            lambda x: es.while_loop(lambda c: c < 1, lambda c: f(c) + 1, x)
        ),
        "carry": lambda f: lambda x: es.scan(lambda c, _: (c, c(x)), f, XS)[1],
    }
    model, numbered = case.keep(Machine()), case.keep(Numbered())
    x = jnp.zeros(())
    assert es.mutable(model)(x)[1].phase == "warm"
    for name, transform in transforms.items():
        with case.error():
            es.mutable(lambda m, t=transform: t(m)(x))(model)
        new = es.mutable(lambda m, t=transform: t(m)(x))(numbered)[1]
        assert new.phase == (0 if name == "carry" else 1)


@program(
    "return different strings, or functions, from the branches of `es.cond`",
    "which are not arrays",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error("`[1]`"):
        es.mutable(
            lambda net: es.cond(
                XS[0] > 0, lambda: (net.layer(XS), "a"), lambda: (net.layer(XS), "b")
            )
        )(net)


@program("return different structures from the branches of `es.cond`")
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.mutable(
            lambda net: es.cond(XS[0] > 0, lambda: net.layer(XS), lambda: (XS, XS))
        )(net)
    with case.error("first at `training`: expected `True`, got `False`"):
        es.cond(XS[0] > 0, lambda net: net, lambda net: net.eval(), net)
    with case.error("expected `'array'`, got `('array', 'array')`"):
        es.cond(XS[0] > 0, lambda: XS, lambda: (XS, XS))


@program("call the branches: `es.cond(pred, f(x), g(x))`", "`es.cond(p, f, g, x)`")
def _(case):
    with case.error("`es.cond`", "`f32[3]`"):
        es.cond(True, jnp.sin(XS), jnp.cos(XS))
    with case.error("`es.switch`", "`f32[]`"):
        es.switch(0, [jnp.sin, jnp.sum(XS)], XS)


@program("swap the arguments of the body of `es.scan`: `def body(x, carry)`")
def _(case):
    def body(x, carry):
        return carry + x.sum(), None

    with case.error("at the root: expected `f32[]`, got `f32[3]`"):
        es.scan(body, jnp.zeros(()), jnp.ones((4, 3)))
    layer = case.keep(Layer())
    with case.error("first at `training`", "Switch modes outside the loop"):
        es.scan(lambda layer, _: (layer.eval(), None), layer, None, 2)
    for loop in (
        lambda f: es.while_loop(lambda x: True, f, XS),
        lambda f: es.fori_loop(0, 2, lambda i, x: f(x), XS),
    ):
        with case.error("expected `f32[3]`, got `(f32[3], f32[3])`"):
            loop(lambda x: (x, x))


@program("swap arguments: `es.scan(f, xs, 0.0)`", "es.scan(f, init, xs)", "`xs`")
def _(case):
    with case.error():
        es.scan(lambda carry, x: (carry + x, None), XS, 0.0)


@program("scan over a list of plain layers: `es.scan(f, x, layers)`")
def _(case):
    layers = case.keep([eqx.nn.Linear(3, 3, key=jax.random.key(i)) for i in range(3)])
    with case.error():
        es.scan(lambda x, layer: (layer(x), None), XS, layers)
    assert es.nn.Stacked(layers)(XS).shape == (3,)


# --- Batches and ensembles ------------------------------------------------------------


@program(
    "map a call that returns a new model: `es.vmap(es.mutable(model))(xs)`",
    "`ys, model = es.mutable(es.vmap(model))(xs)`",
    "axes={...: 0}",
)
def _(case):
    model = case.keep(Layer())
    for f in (es.mutable(model), es.mutable(lambda x: model(x))):
        wrong = f.f is model
        with case.error() if wrong else contextlib.nullcontext():
            es.vmap(f)
    ensemble = case.keep(eqx.filter_vmap(Layer)(jnp.ones(2), jnp.zeros(2, int)))
    _, new = es.vmap(es.mutable(ensemble), axes={...: 0})(jnp.ones(2))
    assert new.count.tolist() == [1, 1]
    _, new = es.vmap(es.mutable(lambda m, x: m(x)))(ensemble, jnp.ones(2))
    assert new.count.tolist() == [1, 1]


@program("pass one example to `es.vmap(model)`")
def _(case):
    model = case.keep(eqx.nn.Linear(3, 3, key=jax.random.key(0)))
    with case.error():
        es.vmap(model)(XS)


@program("pass a batch to a model of one example: `model.eval()(xs)`")
def _(case):
    model = case.keep(eqx.nn.Linear(3, 3, key=jax.random.key(0)))
    with case.error():
        model(jnp.ones((4, 3)))
    assert es.vmap(model)(jnp.ones((4, 3))).shape == (4, 3)


@program("create an ensemble from one key: `eqx.filter_vmap(Net)(key)`")
def _(case):
    def make(key):
        return eqx.nn.Linear(3, 3, key=key)

    with case.error():
        eqx.filter_vmap(make)(jax.random.key(0))
    with pytest.raises(ValueError, match=r"One key .*`jax\.random\.split\(key, n\)`"):
        es.vmap(make)(jax.random.key(0))


@program("map an ensemble without `axes`: `es.vmap(ensemble)(xs)`")
def _(case):
    ensemble = case.keep(eqx.filter_vmap(Layer)(jnp.ones(3), jnp.zeros(3, int))).eval()
    assert es.vmap(ensemble)(jnp.ones((3, 3))).shape == (3, 3)
    assert es.vmap(ensemble, axes={...: 0})(jnp.ones((3, 5))).shape == (3, 5)


@program("index an ensemble: `ensemble[0]`")
def _(case):
    ensemble = case.keep(eqx.filter_vmap(Layer)(jnp.ones(3), jnp.zeros(3, int)))
    with case.error():
        ensemble[0]
    assert es.map(lambda x: x[0], ensemble, on=lambda part: True).weight == 1


@program(
    "return several losses from a loss function",
    "`f32[3]`",
    "jnp.mean(loss)",
    "has_aux=True",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.value_and_grad(lambda net: net(XS))(net)
    (loss, new), _ = es.value_and_grad(lambda net: net(XS).mean())(net)
    assert (loss, new.layer.count) == (2.0, 1)


@program("sow without `es.capture`")
def _(case):
    model = case.keep(Sower(), XS)
    assert (model(XS) == XS).all()
    assert (jax.vmap(model)(XS) == XS).all()
    assert eqx.tree_equal(es.mutable(model)(XS), (XS, model))


@program("sow under a transform of JAX", "Cannot sow `y`")
def _(case):
    model = case.keep(Sower(), XS)
    with case.error():
        es.capture(lambda m, x: jax.vmap(lambda x: m(x))(x))(model, XS)
    _, sown = es.capture(es.vmap(model))(XS)
    assert (sown["y"] == 2 * XS).all()
    assert es.mutable(lambda m, x: jax.vmap(lambda x: m(x))(x))(model, XS)


@program(
    "capture a function of `es.mutable`: `es.capture(es.mutable(model))`",
    "es.capture(model)(x)",
)
def _(case):
    net = case.keep(Net(), XS)
    for f in (es.mutable(net), es.capture(net), es.jit(es.grad(net))):
        with case.error():
            es.capture(f)


@program(
    "pass `es.jit` a set, or a list or dict with other values than arrays",
    "is a `set`",
)
def _(case):
    net = case.keep(Net(), XS)
    f = es.jit(lambda net, rows: es.mutable(lambda m: [m(XS[i]) for i in rows])(net))
    with case.error():
        f(net, {0, 2})
    assert f(net, frozenset({0, 2}))[1].layer.count == 2


@program(
    'donate inside a call: `es.jit(f, donate="all")(self.layer, x)`',
    "es.jit(step, donate='all')(model, x)",
)
def _(case):
    net = case.keep(Net(), XS)
    f = es.jit(lambda layer, x: layer(x), donate="all")
    with case.error():
        es.mutable(lambda net: f(net.layer, XS))(net)
    _, new = es.jit(es.mutable(lambda net, x: net(x)), donate="all")(
        jax.tree.map(jnp.copy, net), XS + 0
    )
    assert new.layer.count == 1


@program("use a model that was donated")
def _(case):
    net = case.keep(Net(), XS)
    given = jax.tree.map(jnp.copy, net)
    step = es.jit(lambda net: es.mutable(net)(XS), donate="all")
    _, new = step(given)
    with case.error():
        float(given.layer.count)
    assert step(new)[1].layer.count == 2
