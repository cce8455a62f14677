"""What `es.vmap` does not map: axes that are not there, kinds, values of the lanes."""

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import rejects
from jax.sharding import PartitionSpec as P

import eqx_state as es


XS = jnp.array([0.5, -1.0, 2.0])


class Cache(es.State):
    pass


class Wide(es.Module):
    weight: es.Parameter
    mean: es.BatchStat
    rng: es.Rng

    def __call__(self, x):
        self.mean = self.mean + x
        return self.weight * x


def wide():
    return Wide(jnp.ones(()), jnp.zeros((3, 2)), jr.key(0))


OUT_OF_RANGE = {
    "a kind": ({es.BatchStat: 2}, r"`mean` has shape \(3, 2\).*no axis 2"),
    "negative": ({es.State: -3, es.Rng: es.SPLIT}, r"`mean`.*no axis -3"),
    "a scalar": ({es.Parameter: 0}, r"`weight` has shape \(\).*no axis 0"),
    "the rest": ({...: 0, es.Rng: None}, r"`weight`.*axis 0"),
    "a key": ({es.Rng: 0}, r"`rng` has shape \(\).*no axis 0"),
}


@pytest.mark.parametrize("case", OUT_OF_RANGE)
@pytest.mark.parametrize("where", ["axes", "in_axes", "closure"])
def test_an_axis_that_the_state_does_not_have(case, where):
    by_kind, match = OUT_OF_RANGE[case]
    match = rf"(?s)es\.vmap.*{match}.*share it with `None`"
    f = {
        "axes": lambda m: es.vmap(m, axes=by_kind),
        "in_axes": lambda m: es.vmap(lambda x, m: m(x), (0, by_kind)),
        "closure": lambda m: es.vmap(lambda x: m(x), axes=by_kind),
    }[where]
    model = wide()

    def call(model):
        return f(model)(XS, model) if where == "in_axes" else f(model)(XS)

    with rejects(model, ValueError, match):
        es.mutable(call)(model)


def test_reduced_over_one_axis_of_two_is_not_reduced():
    class Mean(es.Module):
        mean: es.BatchStat = 0.0

        def __call__(self, x):
            self.mean = lax.pmean(x, "inner")
            return x

    def f(model, xs):
        inner = es.vmap(lambda x: model(x), axis_name="inner")
        return es.vmap(inner, axis_name="outer")(xs)

    model, xs = Mean(), jnp.arange(6.0).reshape(2, 3)
    with rejects(model, ValueError, "`mean`", "axis_name", r"axes=\{es\.State: 0\}"):
        es.mutable(f)(model, xs)
    with rejects(model, ValueError, "`mean`", "axis_name"):
        es.grad(lambda m, xs: jnp.sum(f(m, xs)))(model, xs)


def test_an_axis_that_is_no_integer():
    # As in `eqx.filter_vmap`, where functions say which leaves have an axis.
    with pytest.raises(ValueError, match=r"`mean` is `batch`.*integer.*in_axes=0"):
        es.vmap(wide(), axes={es.BatchStat: "batch"})(XS)
    with pytest.raises(ValueError, match=r"axis of `x`.*eqx\.if_array\(0\)"):
        es.vmap(jnp.sin, in_axes=eqx.if_array(0))(jnp.ones(3))


class Caller(es.Module):
    layer: Wide

    def both(self, d, *rest, by=0.0):
        return d["x"], rest, by


NAMES = {
    "arguments": (lambda: es.vmap(lambda d, y: 0)({"x": XS}, jnp.ones(2)), "d['x']"),
    "more": (lambda: es.vmap(Caller(wide()).both)({"x": XS}, 1 + XS[:2]), "args[1]"),
    "by name": (lambda: es.vmap(Caller(wide()).both)({"x": XS}, by=XS[:2]), "by"),
    "of a partial": (lambda: es.vmap(eqx.Partial(max, 1))(XS, XS[:2]), "args[0]"),
    "of a transform": (
        lambda: es.vmap(es.checkpoint(wide()), axes={es.BatchStat: 0})(XS[:2]),
        "mean",
    ),
    "of a closure": (
        lambda: (lambda w: es.vmap(lambda x: w(x), axes={es.BatchStat: 0}))(wide())(
            XS[:2]
        ),
        "w.mean",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_arrays_are_named_as_the_user_names_them(case):
    call, name = NAMES[case]
    with pytest.raises(ValueError, match="the mapped axes differ in size") as info:
        call()
    assert f"`{name}` has " in str(info.value)


def test_mapped_axes_that_are_spread_over_devices_in_different_ways():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=explicit)
    with jax.set_mesh(mesh):
        spread = jax.device_put(jnp.ones((2, 3)), jax.NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"`x` by `'data'`, `t\['y'\]` by `None`"):
            es.vmap(lambda x, t: x + t["y"])(spread, {"y": jnp.ones((2, 3))})
        with pytest.raises(ValueError, match="^mine"):
            es.vmap(fail)(spread)


def fail(x):
    raise ValueError("mine")
