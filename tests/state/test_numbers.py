"""A Python number in a field that declares a kind, put there by pytree surgery."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import rejects
from jaxtyping import Array

import eqx_state as es


class Model(es.Module):
    temp: es.Parameter
    stats: es.State[dict[str, Any]]
    means: dict[str, es.BatchStat]
    rate: float = 0.5  # declares nothing

    def __call__(self, x: Any) -> Any:
        return self.temp * x


def make() -> Model:
    return Model(jnp.ones(()), {"n": [jnp.zeros(())]}, {"a": jnp.ones(())})


SGD = optax.sgd(0.1)

PROGRAMS = {
    "mutable": lambda m, good: es.mutable(m)(1.0),
    "value_and_grad": lambda m, good: es.value_and_grad(lambda m: m(1.0))(m),
    "Optimizer.init": lambda m, good: es.Optimizer(SGD).init(m),
    "Optimizer.update": lambda m, good: es.Optimizer(SGD).init(good).update(good, m),
    "Ema.init": lambda m, good: es.Ema(0.5).init(m),
    "save": lambda m, good: es.save("never-written.safetensors", m),
}
PLACES = {
    ".temp": lambda m: m.temp,
    ".stats['n'][0]": lambda m: m.stats["n"][0],
    ".means['a']": lambda m: m.means["a"],
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("place", "number"), [*zip(PLACES, [0.5, 3, True], strict=True)]
)
def test_a_number_is_an_error_where_the_model_is_used(program, place, number):
    model = eqx.tree_at(PLACES[place], make(), number)
    name = place.removeprefix(".")
    dtype = jnp.result_type(type(number)).name
    with pytest.raises(ValueError, match="Python number") as info:
        PROGRAMS[program](model, make())
    text = str(info.value)
    assert f"`{name}` is the Python number {number!r}" in text
    kind = {float: "Parameter", int: "State", bool: "BatchStat"}[type(number)]
    assert f"`Model.{name.partition('[')[0]}` declares `es.{kind}`" in text
    assert f'lambda m: m{place}, model, jnp.asarray({number!r}, "{dtype}")' in text


def test_a_number_in_a_plain_equinox_module():
    class Scale(eqx.Module):
        temp: es.Parameter

    texts = r"`temp`", r"Scale\.temp` declares `es\.", r"class .*Scale\(es\.Module\)"
    with rejects(Scale(0.5), ValueError, *texts):
        es.mutable(lambda m: m.temp)(Scale(0.5))


def test_a_number_in_a_record():
    class Stats(NamedTuple):
        mean: es.BatchStat
        momentum: float

    model = (Stats(jnp.ones(()), 0.9), make())
    assert es.mutable(lambda m: m[1](1.0))(model)[0] == 1.0
    model = (Stats(1.0, 0.9), make())
    with rejects(model, ValueError, r"`\[0\]\.mean`", r"lambda m: m\[0\]\.mean"):
        es.mutable(lambda m: m[1](1.0))(model)


def test_numbers_elsewhere_are_numbers():
    class Net(es.Module):
        teacher: es.Buffer[eqx.nn.Dropout]
        states: es.State[list[eqx.nn.StateIndex]]
        w: es.Parameter
        pair: tuple[es.Parameter, float]

    net = Net(eqx.nn.Dropout(0.25), [eqx.nn.StateIndex(0.5)], 1.0, (jnp.ones(()), 0.5))
    (loss, net), grads = es.value_and_grad(lambda m: m.w + m.pair[0] + m.pair[1])(net)
    net, optimizer = es.Optimizer(SGD).init(net).update(grads, net)
    net, optimizer = optimizer.update(grads, net)
    assert es.Ema(0.5).init(net).update(net).model.pair[1] == 0.5
    assert (loss, net.teacher.p, net.states[0].init) == (2.5, 0.25, 0.5)


def test_an_average_of_a_dict_keeps_its_numbers():
    ema = es.Ema(0.5).init({"w": jnp.ones(3), "rate": 0.1})
    _, new = es.mutable(lambda ema: None)(ema)
    assert new.model["rate"] == 0.1


def test_trees_of_axes_masks_and_labels_have_numbers():
    model = make()
    axes = es.spec(model, {es.TreePart: 0})
    assert es.filter(axes).temp is None
    assert es.update(axes, axes).temp == 0
    assert len(es.parts(es.mask(model, es.Parameter))) == 0
    assert es.state_dict(axes) == {}
    assert es.eval(axes).temp == 0
    axes = es.spec(model, {es.TreePart: 0}, default=None)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), es.filter(model))
    assert eqx.filter_vmap(lambda m: m(1.0), in_axes=(axes,))(stacked).shape == (2,)


def test_an_array_of_the_optimizers_model_becomes_a_number_below_no_kind():
    class Plain(eqx.Module):
        w: Array

    model = Plain(jnp.ones(()))
    optimizer = es.Optimizer(SGD).init(model)
    with rejects(model, ValueError, "what `wrt` selects", "`w`"):
        optimizer.update(model, Plain(1.0))


# --- `replace` ------------------------------------------------------------------------


@pytest.mark.parametrize("old", ["float16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("number", [0, False, 1.5, 300, 1j], ids=repr)
def test_replace_keeps_a_dtype_that_can_hold_the_number(old, number):
    model = make().replace(temp=jnp.ones((), old))
    new = model.replace(temp=number).temp
    with jax.numpy_dtype_promotion("standard"):
        fits = jnp.result_type(jnp.ones((), old), number) == old
    fits = fits and not (old == "uint8" and number == 300)
    expected = old if fits else jnp.result_type(type(number))
    assert new.item() == number
    assert (new.dtype, new.weak_type) == (expected, False)


def test_replace_keeps_the_dtypes_in_a_container():
    half = jnp.ones((), "float16")
    model = make().replace(stats={"n": [half], "m": half})
    new = model.replace(stats={"n": [0], "m": jnp.array(0.0), "k": 0}).stats
    assert [new[k].dtype for k in ("m", "k")] == ["float16", "int32"]
    assert new["n"][0].dtype == "float16"
