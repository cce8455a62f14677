"""Modules of the reference: plain objects whose fields store their state."""

import dataclasses
import functools as ft
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from program_models import CLASSES, Noise, PARAMETERS


@dataclasses.dataclass(eq=False)
class Scope:
    """Modules of a scope can be written until it closes."""

    is_open: bool = True
    captures: bool = False
    sown: list[tuple[str, float]] = dataclasses.field(default_factory=list)


class Object:
    """A module. Its fields store its state, and it is frozen without a scope."""

    __slots__ = ("__dict__", "path", "scope", "training", "world")

    def __init__(self, world: Any, values: dict[str, Any]):
        put = object.__setattr__
        put(self, "world", world)
        put(self, "scope", None)
        put(self, "path", "")
        put(self, "training", True)
        self.__dict__.update(values)
        world.live.append(self)

    def __setattr__(self, name: str, value: Any) -> None:
        assert self.scope is not None, "the program writes to a frozen module"
        assert self.scope.is_open, "the program writes to a module of a closed scope"
        assert name in self.__dict__
        path = f"{self.path}.{name}" if self.path else name
        self.__dict__[name] = self.world.adopt(value, self.scope, path)

    def sow(self, name: str, value: float) -> None:
        if self.scope is not None and self.scope.is_open and self.scope.captures:
            prefix = f"{self.path}." if self.path else ""
            self.scope.sown.append((f"{prefix}{name}", value))


METHODS = ("__call__", "peek", "push", "draw")


def _class_of(cls: type) -> type:
    methods = {name: x for name, x in vars(cls).items() if name in METHODS}
    return type(cls.__name__, (Object,), {"__slots__": (), **methods})


OBJECTS = {cls: _class_of(cls) for cls in CLASSES}
PARAMETERS_OF = {OBJECTS[cls]: names for cls, names in PARAMETERS.items()}
KEYED = OBJECTS[Noise]
KEYS = ("rng", "key")


# --- Calls ----------------------------------------------------------------------------


@dataclasses.dataclass
class Transformed:
    """A function under a transform, called as `run(f, *args)`."""

    f: Any
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.f, *args, **kwargs)


def target(f: Any, args: Any, kwargs: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The model that a call makes writable, and the call as a function of the model."""
    if (found := _carried(f)) is not None:
        return found[0], lambda model: found[1](model)(*args, **kwargs)
    return args[0], lambda model: f(model, *args[1:], **kwargs)


def _carried(f: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    if isinstance(f, Transformed):
        if (inner := _carried(f.f)) is None:
            return None
        return inner[0], lambda model: Transformed(inner[1](model), f.run)
    if isinstance(f, ft.partial):
        # What the partial binds does not count: `ft.partial(distill, teacher)`.
        if (inner := _carried(f.func)) is None:
            return None
        return inner[0], lambda m: ft.partial(inner[1](m), *f.args, **f.keywords)
    if isinstance(f, types.MethodType) and isinstance(f.__self__, Object):
        return f.__self__, lambda model: types.MethodType(f.__func__, model)
    return (f, lambda model: model) if isinstance(f, Object) else None


# --- Trees ----------------------------------------------------------------------------


def children(tree: Any) -> Iterator[Any]:
    """The children, in the order in which JAX flattens."""
    if isinstance(tree, Object):
        yield from tree.__dict__.values()
    elif isinstance(tree, (list, tuple)):
        yield from tree
    elif isinstance(tree, dict):
        yield from (tree[name] for name in sorted(tree))


def objects_in(tree: Any) -> list[Object]:
    own = [tree] if isinstance(tree, Object) else []
    return [*own, *(x for child in children(tree) for x in objects_in(child))]


def leaves_of(tree: Any) -> list[Any]:
    """The values in a tree, except for functions and static fields."""
    if isinstance(tree, (Object, list, tuple, dict)):
        return [x for child in children(tree) for x in leaves_of(child)]
    return [] if callable(tree) or isinstance(tree, str) else [tree]


def parameters(model: Any) -> list[tuple[Object, str, int | None, int | None]]:
    """Each number in a parameter: owner, field, index in a list, index in an array."""
    found = []
    for x in objects_in(model):
        for name in PARAMETERS_OF.get(type(x), ()):
            value = x.__dict__[name]
            items = enumerate(value) if isinstance(value, list) else [(None, value)]
            for place, y in items:
                of = range(len(y)) if isinstance(y, np.ndarray) else [None]
                found += [(x, name, place, j) for j in of]
    return found


def plus(x: Any, j: int | None, by: float) -> Any:
    if j is None:
        return x + by
    x = x.copy()
    x[j] += by
    return x


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple, dict)):
        return all(map(equal, children(a), children(b)))
    return bool(np.all(a == b))
