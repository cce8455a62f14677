"""Random models: classes created at run time, with all forms of field declarations.

A class is drawn as a tuple of *forms*. Each form gives a field its annotation and its
values. The expected kinds are derived here from the rules, without the library:
`Built.kinds` contains them for each array.
"""

import dataclasses
import functools as ft
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Generic, Optional, TypeVar

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

import eqx_state as es


class Cache(es.State):
    """A user-defined kind."""


class Ema(es.TreePart, covering=True):
    """A user-defined covering kind."""


COVERING = (es.Buffer, es.OptState, Ema)
KINDS = (es.Parameter, es.Buffer, es.State, es.Rng, es.BatchStat, Cache, Ema)

# Values, and the kind of each without a declaration. No array occurs twice: that is
# allowed, but hides which of the two was returned.
VALUES: dict[str, tuple[Callable[[int], Any], type | None]] = {
    "float": (lambda i: jnp.arange(i, i + 2, dtype=jnp.float32), es.Parameter),
    "scalar": (lambda i: jnp.array(i, jnp.float32), es.Parameter),
    "bfloat16": (lambda i: jnp.full((2, 1), i, jnp.bfloat16), es.Parameter),
    "complex": (lambda i: jnp.full(1, i + 1j, jnp.complex64), es.Parameter),
    "integer": (lambda i: jnp.arange(i, i + 3), None),
    "bool": (lambda i: jnp.array([i % 2 == 0, True]), None),
    "empty": (lambda i: jnp.zeros((0, 3), jnp.float32), es.Parameter),
    "numpy": (lambda i: np.arange(i, i + 2, dtype=np.float32), es.Parameter),
    "key": (jr.key, es.Rng),
    "keys": (lambda i: jr.split(jr.key(i), 2), es.Rng),
}
# Values that are not arrays.
OTHERS: dict[str, Callable[[int], Any]] = {
    "none": lambda i: None,
    "number": lambda i: i,
    "text": str,
    "function": lambda i: len,
}


@dataclasses.dataclass(frozen=True)
class Built:
    """A value, and the kinds of its arrays, in the order of flattening.

    For each array a pair: the kind that is declared inside the value, and the default.
    """

    value: Any
    kinds: tuple[tuple[type | None, type | None], ...]

    def declared(self, kind: type | None) -> "Built":
        """The same value below a declaration of this kind."""
        if kind is None:
            return self
        return Built(
            self.value,
            tuple(
                (kind if issubclass(kind, COVERING) else inner or kind, default)
                for inner, default in self.kinds
            ),
        )

    @property
    def effective(self) -> list[type | None]:
        return [inner or default for inner, default in self.kinds]


def together(make: Callable[..., Any], *parts: Built) -> Built:
    """A container with the leaves of the parts, in the same order."""
    kinds = tuple(kind for part in parts for kind in part.kinds)
    return Built(make(*(part.value for part in parts)), kinds)


# --- Leaves and containers ------------------------------------------------------------


@st.composite
def arrays(draw: Any) -> Built:
    make, default = VALUES[draw(st.sampled_from(list(VALUES)))]
    return Built(make(draw(st.integers(0, 99))), ((None, default),))


@st.composite
def others(draw: Any, is_lazy: bool) -> Built:
    if is_lazy and draw(st.booleans()):
        return Built(es.Initializer(jr.normal), ())
    make = OTHERS[draw(st.sampled_from(list(OTHERS)))]
    return Built(make(draw(st.integers(0, 99))), ())


def _in_a_dict(*x: Any) -> Any:
    return dict(zip("abc", x, strict=False))


def containers(inner: Any) -> Any:
    """Lists, tuples and dicts of the values that `inner` draws."""
    lists = st.lists(inner, max_size=3)
    return st.one_of(
        lists.map(lambda xs: together(lambda *x: list(x), *xs)),
        lists.map(lambda xs: together(lambda *x: x, *xs)),
        lists.map(
            lambda xs: together(lambda *x: dict(zip("abc", x, strict=False)), *xs)
        ),
    )


# --- Fields ---------------------------------------------------------------------------

_T = TypeVar("_T")

# Forms that declare a kind for a whole field, whatever it contains.
WHOLE: dict[str, Callable[[Any], Any]] = {
    "bare": lambda kind: kind,
    "subscripted": lambda kind: kind[Any],
    "shaped": lambda kind: kind[Float[Array, "..."]],
    "annotated": lambda kind: Annotated[Any, kind],
    "twice": lambda kind: Annotated[Annotated[Any, "a note"], kind],
    "optional": lambda kind: kind | None,
    "old optional": lambda kind: Optional[kind],  # noqa: UP045
    "specifier": lambda kind: Any,
}
# Forms that declare a kind for the elements of a container.
INSIDE: dict[str, Callable[[Any], Any]] = {
    "list": lambda kind: list[kind],
    "typing.List": lambda kind: typing.List[kind],  # noqa: UP006
    "tuple": lambda kind: tuple[kind, ...],
    "dict": lambda kind: dict[str, kind],
    "dict of lists": lambda kind: dict[str, list[kind]],
    "list or nothing": lambda kind: list[kind] | None,
}


def _in_a_list(*x: Any) -> Any:
    return list(x)


def _in_a_dict_of_lists(*x: Any) -> Any:
    return {"k": list(x)}


CONTAINER: dict[str, Callable[..., Any]] = {
    "list": _in_a_list,
    "typing.List": _in_a_list,
    "tuple": lambda *x: x,
    "dict": _in_a_dict,
    "dict of lists": _in_a_dict_of_lists,
    "list or nothing": _in_a_list,
}


_NAMES: list[str] = []


@ft.cache
def make_class(
    base: type, fields: tuple[tuple[str, Any], ...], is_generic: bool
) -> Any:
    """A class with fields of these forms. Cached, since JAX never frees a class."""
    body: dict[str, Any] = {"__annotations__": {}, "__module__": __name__}
    for i, (form, kind) in enumerate(fields):
        name = f"f{i}"
        if kind is None:
            annotation: Any = Any
        else:
            annotation = {**WHOLE, **INSIDE}[form](kind)
        if form == "specifier" and kind is not None:
            body[name] = es.field(kind=kind)
        body["__annotations__"][name] = annotation
    body["__annotations__"]["static"] = str
    body["static"] = eqx.field(static=True, default="static")
    bases = (base, Generic[_T]) if is_generic else (base,)
    name = f"Random{len(_NAMES)}"
    _NAMES.append(name)
    cls = types.new_class(name, bases, {}, lambda namespace: namespace.update(body))
    setattr(sys.modules[__name__], name, cls)  # so that pickle finds the class
    return cls


@st.composite
def modules(draw: Any, inner: Any) -> Built:
    base = draw(st.sampled_from([es.Module, es.Module, eqx.Module]))
    forms, parts = [], []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.none() | st.sampled_from(KINDS))
        if kind is not None and draw(st.booleans()):
            form = draw(st.sampled_from(list(INSIDE)))
            built = together(CONTAINER[form], *draw(st.lists(inner, max_size=3)))
        else:
            form = draw(st.sampled_from(list(WHOLE))) if kind else "none"
            built = draw(inner)
        if kind is not None:
            built = _without_numbers(built)
        forms.append((form, kind))
        parts.append(built.declared(kind))
    cls = make_class(base, tuple(forms), draw(st.booleans()))
    built = together(cls, *parts)
    if base is es.Module:
        module = built.value
        if draw(st.booleans()):
            module = es.eval(module)
        if draw(st.booleans()):
            module = es.freeze(module)
        built = Built(module, built.kinds)
    return built


def _without_numbers(built: Built) -> Built:
    """Replace numbers outside of modules, which a field that declares a kind rejects.

    In an `es.Module`, it would convert them to arrays.
    """

    def is_module(x: Any) -> bool:
        return isinstance(x, eqx.Module)

    leaves = jax.tree.leaves(built.value, is_leaf=is_module)
    if not any(type(x) in (bool, int, float, complex) for x in leaves):
        return built
    value = jax.tree.map(
        lambda x: "number" if type(x) in (bool, int, float, complex) else x,
        built.value,
        is_leaf=is_module,
    )
    return Built(value, built.kinds)


LAYERS: dict[str, Callable[[int], Built]] = {
    "Linear": lambda i: Built(
        eqx.nn.Linear(2, 1, key=jr.key(i)), ((None, es.Parameter),) * 2
    ),
    "Dropout": lambda i: Built(eqx.nn.Dropout(0.5), ()),
    "es BatchNorm": lambda i: Built(
        es.nn.BatchNorm(2),
        ((es.Parameter, es.Parameter),) * 2 + ((es.BatchStat, es.Parameter),) * 3,
    ),
    "es Dropout": lambda i: Built(es.nn.Dropout(0.5, key=i), ((es.Rng, es.Rng),)),
    "stream": lambda i: Built(es.RngStream(i), ((es.Rng, es.Rng),)),
}


@st.composite
def layers(draw: Any) -> Built:
    return LAYERS[draw(st.sampled_from(list(LAYERS)))](draw(st.integers(0, 9)))


def trees(is_lazy: bool = False) -> Any:
    """Any tree: leaves, containers, modules of Equinox and `es`, also lazy ones."""
    return st.recursive(
        st.one_of(arrays(), arrays(), others(is_lazy), layers()),
        lambda inner: st.one_of(containers(inner), modules(inner), modules(inner)),
        max_leaves=10,
    )
