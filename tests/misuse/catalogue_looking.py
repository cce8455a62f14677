"""Programs that look inside in a way that fails, or may seem to fail."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


X = jnp.ones(2)


def mlp():
    return eqx.nn.MLP(2, 2, 3, 1, key=jr.key(0))


class Log(eqx.Module):
    def __call__(self, x):
        return jnp.log(x)


@program(
    "capture the output of a module under JAX's own `jit`, `scan`, …",
    "did not see what `layers[0]`, `layers[1]`",
)
def _(case):
    model = case.keep(mlp())
    f = lambda m, x, jit: jit(m)(x)  # noqa: E731
    run = es.capture(f, outputs="layers[?]")
    with case.error():
        run(model, X, eqx.filter_jit)
    assert list(run(model, X, es.jit)[1]) == ["layers[0]", "layers[1]"]


class Recurrent(eqx.Module):
    embed: eqx.nn.Linear
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __call__(self, xs):
        step = lambda h, x: (self.cell(x, h), None)  # noqa: E731
        return self.read(jax.lax.scan(step, jnp.zeros(2), jax.vmap(self.embed)(xs))[0])

    @eqx.filter_jit
    def read(self, h):
        return self.head(h)


@program(
    "capture a third-party model that uses `jax.lax.scan` or `eqx.filter_jit`",
    "with jax.disable_jit():",
)
def _(case):
    linear, cell = (
        eqx.nn.Linear(2, 2, key=jr.key(0)),
        eqx.nn.GRUCell(2, 2, key=jr.key(1)),
    )
    xs = jnp.stack([X, 2 * X])
    model = case.keep(Recurrent(linear, cell, linear), xs)
    for _ in range(2):  # a cached trace must not suppress the error
        for look in (es.capture(model, outputs="*"), es.find_nonfinite(model)):
            with case.error():
                look(xs)
    with warnings.catch_warnings(action="ignore"):
        (y, _), found = es.capture(model, outputs="*")(xs)
    assert sorted(found) == ["", "embed"]
    broken = eqx.tree_at(lambda m: m.cell.bias, model, jnp.full(6, jnp.nan))
    with jax.disable_jit():
        (z, _), found = es.capture(model, outputs="*")(xs)
        assert es.find_nonfinite(broken)(xs) == ["cell"]
    assert sorted(found) == ["", "cell", "embed", "head"]
    assert jnp.allclose(y, z)


@program(
    "capture the output of a module in a step of `es.fori_loop`",
    "the output of `layer`",
)
def _(case):
    net = case.keep(Net(), XS)
    loop = lambda n, x: es.fori_loop(0, 2, lambda i, x: n(x), x)  # noqa: E731
    with case.error():
        es.capture(loop, outputs=Layer)(net, XS)
    scan = lambda n, x: es.scan(lambda x, _: (n(x), 0), x, None, 2)  # noqa: E731
    assert es.capture(scan, outputs=Layer)(net, XS)[1]["layer"].shape == (2, 3)


@program('mistype a name: `es.capture(model, outputs="layer[0]")`', '`"layers[0]"`')
def _(case):
    model = case.keep(mlp())
    with case.error():
        es.capture(model, outputs="layer[0]")(X)
    assert list(es.capture(model, outputs="layers[0]")(X)[1]) == ["layers[0]"]


@program(
    'mistype a name: `es.capture(model, replace={"layer[0]": 0.0})`', '`"layers[0]"`'
)
def _(case):
    model = case.keep(mlp())
    with case.error():
        es.capture(model, replace={"layer[0]": 0.0})(X)
    (y, _), _ = es.capture(model, replace={"layers[1]": 0.0})(X)
    assert (y == 0).all()


@program(
    "replace the output of a module that is never called, only read",
    "not the use of its arrays",
)
def _(case):
    class Tied(es.Module):
        embed: eqx.nn.Linear

        def __call__(self, x):
            return x @ self.embed.weight.T

    model = case.keep(Tied(eqx.nn.Linear(2, 2, key=jr.key(0))))
    with case.error():
        es.capture(model, replace={"embed": 0.0})(X)
    assert (es.capture(model, replace={"": 0.0})(X)[0][0] == 0).all()


@program(
    "replace the output of one lane by the outputs of a batch",
    "`f32[3]`",
    "`f32[2,3]`",
)
def _(case):
    model, xs = case.keep(mlp()), jnp.stack([X, 2 * X])
    name = "layers[0]"
    _, found = es.capture(es.vmap(model), outputs=name)(xs)
    with case.error():
        es.capture(es.vmap(model), replace=found)(xs)

    def lane(model, x, value):
        return es.capture(model, replace={name: value})(x)[0][0]

    ys = es.vmap(lane, in_axes=(None, 0, 0))(model, xs, found[name])
    assert jnp.allclose(ys, jax.vmap(model)(xs), atol=1e-6)


@program("compile the search: `es.jit(es.find_nonfinite(step))(model, x)`")
def _(case):
    model = case.keep(Log())
    with case.error():
        es.jit(es.find_nonfinite(model))(X)
    assert es.find_nonfinite(es.jit(model))(0 * X) == [""]
