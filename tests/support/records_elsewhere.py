"""Records with annotations that only this module can resolve."""

from __future__ import annotations

import dataclasses
from typing import Generic, NamedTuple, TYPE_CHECKING, TypedDict, TypeVar

import jax.tree_util as jtu

import eqx_state as library


if TYPE_CHECKING:
    from nowhere import Missing  # pyright: ignore[reportMissingImports]


T = TypeVar("T")


class Tuple(NamedTuple):
    mean: library.BatchStat
    other: list[Missing]


class Dict(TypedDict, total=False):
    mean: library.BatchStat
    other: list[Missing]


class GenericDict(TypedDict, Generic[T]):
    value: T
    many: list[T]


@dataclasses.dataclass
class Base:
    mean: library.BatchStat
    other: list[Missing]


@jtu.register_dataclass
@dataclasses.dataclass
class Record(Base):
    pass
