# pyright: strict
"""Postponed annotations and forward references mean the same."""

from __future__ import annotations

from typing import assert_type

from jaxtyping import Array

import eqx_state as es


class Model(es.Module):
    weight: es.Parameter
    cache: Cache
    quoted: "es.Parameter[dict[str, Array]]"  # noqa: UP037
    child: es.Buffer[Model | None]


class Cache(es.State): ...


def check(model: Model, x: Array) -> None:
    assert_type(model.weight, Array)
    assert_type(model.cache, Array)
    assert_type(model.quoted, dict[str, Array])
    assert_type(model.child, Model | None)
    assert_type(Model(x, x, {"a": x}, Model(x, x, {}, None)), Model)
