"""Random models for random programs, each built twice: with the library and without.

Values are scalars and stacks of two. Each method is written once: the helpers below
accept JAX's values and those of `program_reference`.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqx_state as es


@dataclasses.dataclass(frozen=True)
class PlainKey:
    """A PRNG key of the reference, or an array of keys, as JAX's key data."""

    data: Any

    def __getitem__(self, i: int) -> "PlainKey":
        return PlainKey(self.data[i])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainKey) and np.array_equal(self.data, other.data)


@ft.lru_cache(maxsize=100_000)
def _split(data: tuple[int, int], num: int) -> Any:
    key = jr.wrap_key_data(jnp.array(data, jnp.uint32))
    return np.asarray(jr.key_data(jr.split(key, num)))


# --- Functions for programs -----------------------------------------------------------


def split(key: Any, num: int = 2) -> Any:
    if isinstance(key, PlainKey):
        parts = [_split(tuple(row), num) for row in key.data.reshape(-1, 2).tolist()]
        return PlainKey(np.stack(parts, 1).reshape(num, *key.data.shape))
    return jr.split(key, num)


def uniform(key: Any) -> Any:
    """A number in [0, 1) that distinguishes keys, and is cheaper than a draw."""
    if isinstance(key, PlainKey):
        return int(key.data[1]) % 1024 / 1024
    return jnp.asarray(jr.key_data(key)[1] % 1024, jnp.float32) / 1024


def mix(a: Any, b: Any) -> Any:
    """Combine two numbers so that both matter, and the result stays small."""
    return 0.5 * a + 0.25 * b + 0.0625


def flt(n: Any) -> Any:
    """Convert an integer to a float."""
    return 0.125 * (float(n) if isinstance(n, int) else jnp.asarray(n, jnp.float32))


def two(x: Any) -> Any:
    """An array of two numbers, computed from one."""
    if isinstance(x, float):
        return np.array([x, 0.5 * x + 0.25])
    return jnp.stack([x, 0.5 * x + 0.25])


def total(xs: Any) -> Any:
    """The weighted sum of two numbers."""
    weights = (0.5, 0.375)
    if isinstance(xs, np.ndarray) and xs.dtype == np.float64:
        return float(sum(weights * xs))
    return jnp.sum(jnp.array(weights, jnp.float32) * xs)


@dataclasses.dataclass(frozen=True)
class Scale:
    """A static value that has its own `__eq__`."""

    name: str
    k: dataclasses.InitVar[float]

    def __post_init__(self, k: float) -> None:
        object.__setattr__(self, "_k", k)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale) and self._k == other._k

    def __hash__(self) -> int:
        return hash((self.name, self._k))


def half(x: Any) -> Any:
    return 0.5 * x


def double(x: Any) -> Any:
    return 2 * x


# Static values, some of which compare equal in Python.
STATICS = (
    *(1, True, 1.0, 0, False, 0.0, -0.0, (1, 2), (True, 2), (1.0, 2), "cold", "warm"),
    *(Scale("s", 1.0), Scale("s", 2.0), half, double),
)


def worth(x: Any) -> float:
    """A number that distinguishes the static values."""
    index = next(i for i, y in enumerate(STATICS) if repr(x) == repr(y) and x == y)
    return 0.25 + index / len(STATICS)


def each(x: Any) -> list[Any]:
    """The modules in a container, or the module itself."""
    if isinstance(x, (list, tuple)):
        return [m for y in x for m in each(y)]
    if isinstance(x, dict):
        return [m for name in sorted(x) for m in each(x[name])]
    return [x]


# --- Modules --------------------------------------------------------------------------
#
# `__call__` writes nothing that depends on its argument, `push` does, `peek` writes
# nothing at all.


class Cache(es.State):
    """A user-defined kind."""


class Cell(es.Module):
    w: es.Parameter
    n: es.State
    s: es.BatchStat

    def __call__(self, x):
        if self.training:
            self.n = self.n + 1
            self.s = mix(self.s, self.w)
        return 0.5 * self.w * x + self.s

    def peek(self, x):
        return 0.5 * self.w * x + self.s + flt(self.n)

    def push(self, x):
        self.s = mix(self.s, x)


class Noise(es.Module):
    """Two keys: one of a kind that is not `es.Rng`."""

    w: es.Parameter
    rng: es.Rng
    s: Cache
    key: Cache

    def __call__(self, x):
        if not self.training:
            return x
        keys = split(self.rng)
        self.rng = keys[0]
        self.s = mix(self.s, self.w)
        return mix(self.draw(x), uniform(keys[1])) + self.w

    def draw(self, x):
        keys = split(self.key)
        self.key = keys[0]
        return mix(x, uniform(keys[1]))

    def peek(self, x):
        return mix(mix(x, self.s), uniform(self.key)) + self.w * uniform(self.rng)

    def push(self, x):
        self.s = mix(self.s, x)


class Tally(es.Module):
    """A buffer, and state in containers."""

    k: es.Buffer
    n: es.State
    d: dict[str, es.State]
    ws: list[es.Parameter]

    def __call__(self, x):
        if self.training:
            self.n = self.n + 2
            self.d = {**self.d, "a": mix(self.d["b"], self.ws[0])}
        return mix(x, self.k) * self.ws[1] + self.d["a"]

    def peek(self, x):
        return mix(x, self.k) * self.ws[0] + self.d["a"] - self.d["b"] + flt(self.n)

    def push(self, x):
        self.d = {**self.d, "b": mix(self.d["a"], x)}


class Phase(es.Module):
    """State that is not an array."""

    phase: es.State
    n: es.State
    w: es.Parameter

    def __call__(self, x):
        if self.training:
            self.n = self.n + 1
        return mix(x, flt(self.n)) * worth(self.phase)

    def peek(self, x):
        return mix(x, self.w) * worth(self.phase) + flt(self.n)


class Plain(eqx.Module):
    """An Equinox module with a function and a static field."""

    w: Any
    f: Callable[[Any], Any]
    name: str = eqx.field(static=True)

    def __call__(self, x):
        return self.f(self.w * x)

    peek = __call__


class Both(es.Module):
    a: Any
    b: Any
    n: es.State

    def __call__(self, x):
        if self.training:
            self.n = self.n + 1
        for module in each([self.a, self.b]):
            x = module(x)
        return x

    def peek(self, x):
        for module in each([self.b, self.a]):
            x = module.peek(x)
        return x + flt(self.n)

    def push(self, x):
        for module in each(self.a):
            if hasattr(module, "push"):
                module.push(x)


class Wrap(eqx.Module):
    inner: Any

    def __call__(self, x):
        for module in each(self.inner):
            x = module(x)
        return x

    def peek(self, x):
        for module in each(self.inner):
            x = module.peek(x)
        return x


class Net(es.Module):
    """The root of a model: a body, and a stack that only transforms call."""

    body: Any
    stack: Any
    n: es.State

    def __call__(self, x):
        if self.training:
            self.n = self.n + 1
        for module in each(self.body):
            x = module(x)
        return x

    def peek(self, x):
        for module in each(self.body):
            x = module.peek(x)
        return mix(x, flt(self.n))


LEAVES = (Cell, Noise, Tally, Phase, Plain)
CLASSES = (*LEAVES, Both, Wrap, Net)
# For each class, its parameters; and the state that programs write directly.
PARAMETERS = {Cell: ("w",), Noise: ("w",), Tally: ("ws",), Phase: ("w",), Plain: ("w",)}
NUMBERS = {Cell: "s", Noise: "s"}
COUNTERS = {Cell: "n", Tally: "n", Phase: "n", Both: "n", Net: "n"}


# --- Building -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spec:
    """A model to build: its class or container, its children, a seed for values.

    If `is_stack` is true, two of them are stacked.
    """

    cls: type
    children: tuple["Spec", ...] = ()
    seed: int = 0
    is_stack: bool = False


class Jax:
    """Creates values for the library. One array in three is a NumPy array."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}  # with equal seeds, one array occurs twice

    def number(self, i: int) -> Any:
        if i not in self.memo:
            self.memo[i] = _array(_number(i), i, np.float32, np.float64)
        return self.memo[i]

    def integer(self, i: int) -> Any:
        return _array(i % 5, i, np.int32, np.int64)

    def key(self, i: int) -> Any:
        return jr.key(i)

    def new(self, cls: type, *values: Any) -> Any:
        return cls(*values)

    def stack(self, a: Any, b: Any) -> Any:
        return jax.tree.map(_stacked, a, b)


def _array(value: Any, i: int, dtype: Any, wide: Any) -> Any:
    if i % 3:
        return jnp.array(value, dtype)
    # JAX has no arrays of the wide dtype.
    return np.array(value, wide if i % 2 else dtype)


def _stacked(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.stack([a, b])
    return jnp.stack([a, b]) if eqx.is_array(a) else a


def _number(i: int) -> float:
    return (7 * i % 11 - 5) / 8


def _fields(cls: type, lib: Any, i: int) -> tuple[Any, ...]:
    """The values of a module without submodules."""
    if cls is Cell:
        return lib.number(i), lib.integer(i), lib.number(i + 1)
    if cls is Noise:
        return lib.number(i), lib.key(i), lib.number(i + 2), lib.key(i + 1)
    if cls is Tally:
        stats = {"b": lib.number(i + 3), "a": lib.number(i + 4)}
        weights = [lib.number(i), lib.number(i + 5)]
        return lib.number(i + 6), lib.integer(i), stats, weights
    if cls is Phase:
        return "cold", lib.integer(i), lib.number(i)
    return lib.number(i), half, "name"


def build(spec: Spec, lib: Any) -> Any:
    """The model, with the values of the library or of the reference."""
    if spec.is_stack:
        one = dataclasses.replace(spec, is_stack=False)
        return lib.stack(build(one, lib), build(_shifted(one), lib))
    children = [build(child, lib) for child in spec.children]
    if spec.cls in (list, tuple):
        return spec.cls(children)
    if spec.cls is dict:
        return dict(zip("ba", children, strict=False))
    if spec.cls in (Both, Net):
        return lib.new(spec.cls, *children, lib.integer(spec.seed))
    if spec.cls is Wrap:
        return lib.new(Wrap, *children)
    return lib.new(spec.cls, *_fields(spec.cls, lib, spec.seed))


def _shifted(spec: Spec) -> Spec:
    children = tuple(map(_shifted, spec.children))
    return dataclasses.replace(spec, children=children, seed=spec.seed + 5)
