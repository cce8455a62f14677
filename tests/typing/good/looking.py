"""What looking into a model and saving it return, to a type checker."""

from pathlib import Path
from typing import Any, assert_type

import equinox as eqx
from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter

    def __call__(self, x: Array) -> Array:
        self.sow("x", x)
        return self.weight * x


def loss(layer: Layer, x: Array) -> Array:
    return layer(x).sum()


def look(layer: Layer, linear: eqx.nn.Linear, x: Array, path: Path) -> None:
    (y, new), sown = es.capture(layer)(x)
    assert_type(y, Array)
    assert_type(new, Layer)
    assert_type(sown, dict[str, Any])

    (y, new), sown = es.capture(layer, outputs=eqx.nn.Linear, replace={"": x})(x)
    assert_type(new, Layer)

    assert_type(es.find_nonfinite(layer)(x), list[str])
    assert_type(es.nonfinite({"a": x}), list[str])

    for finding in es.audit(loss)(layer, x):
        assert_type(finding, es.Finding)
        assert_type(finding.kind + finding.name + finding.text, str)

    norms = es.inside((eqx.nn.LayerNorm, eqx.nn.BatchNorm))
    assert_type(es.filter(layer, es.not_(norms), es.inside(Layer)), Layer)

    gradient = es.value_and_grad(loss)
    assert_type(es.capture(gradient)(layer, x)[1], dict[str, Any])
    assert_type(es.capture(loss, argnums=(0, 1))(layer, x)[0][0], Array)

    assert_type(es.tabulate(layer, x, depth=1), str)

    assert_type(es.state_dict(layer, es.Parameter), dict[str, Any])
    assert_type(es.load_state_dict(layer, {"weight": x}, strict=False), Layer)
    assert_type(es.load_state_dict(layer, {"w": x}, rename={"weight": "w"}), Layer)
    half = es.load_state_dict(layer, {"w": x}, es.Parameter, strict=False, rename=None)
    assert_type(half, Layer)
    assert_type(es.from_torch(layer, {"w": x}, rename=lambda name: name[0]), Layer)
    apply, params, state = es.functional(layer)
    assert_type(params, dict[str, Any])
    assert_type(apply(params, state, x), tuple[Any, dict[str, Any]])
    es.save(path, layer, es.not_(es.Rng))
    assert_type(es.load(path, layer, es.not_(es.Rng)), Layer)
    assert_type(es.load("model.safetensors", linear, strict=False), eqx.nn.Linear)
    assert_type(es.load(path, layer, es.Parameter, cast=True), Layer)
    es.save(path, layer, es.Parameter, metadata={"epoch": "3"})
    assert_type(es.load_metadata(path), dict[str, str])
