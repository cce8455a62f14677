"""From an annotation to what it declares, as a `Spec`.

A `Spec` is a small tree that follows the containers in the annotation: `dict[str,
es.State]` declares nothing for the dict itself and `State` for what is in it. Nothing
here looks at values.
"""

import builtins
import collections.abc
import contextlib
import itertools
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ForwardRef, NamedTuple, Union

import equinox as eqx
import jax.tree_util as jtu

from ._compat import own_annotations
from ._kinds import is_kind, TreePart


class Spec(NamedTuple):
    """What an annotation declares for a value and, one level down, for its elements.

    `items`: for the first elements of a tuple; `each`: for all others.
    """

    kind: type[TreePart] | None = None
    each: "Spec | None" = None
    items: "tuple[Spec, ...] | None" = None
    unresolved: bool = False

    def child(self, node: Any, key: Any) -> "Spec":
        """The declaration for the child of the container `node` under `key`."""
        each = NOTHING if self.each is None else self.each
        # `list[A] | tuple[B, C]`; without the list a list may stand for the tuple.
        if self.items is None or not (isinstance(node, tuple) or each is NOTHING):
            return each
        index = key.idx if isinstance(key, jtu.SequenceKey) else len(self.items)
        return self.items[index] if index < len(self.items) else each


NOTHING = Spec()


def is_unresolved(spec: Spec) -> bool:
    """Whether a name in the annotation, however deep, could not be resolved."""
    below = [*([] if spec.each is None else [spec.each]), *(spec.items or ())]
    return spec.unresolved or any(map(is_unresolved, below))


class _UnresolvedType(type):
    """A stand-in for a name that does not exist (yet); anything may be done with it."""

    def __getattr__(cls, name: str) -> Any:
        return unresolved(f"{cls.__name__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    __iter__ = None  # or `*Missing` would get items without end


def unresolved(name: str) -> type:
    """A stand-in for `name`."""
    return _UnresolvedType(name, (), {})


class Namespace(dict[str, Any]):
    """Where the names in the string annotations of `cls` are looked up.

    `statement`: the names local to the function around its statement, and its globals.
    `types`: what type variables stand for.
    """

    def __init__(
        self,
        cls: type,
        statement: tuple[dict[str, Any], Mapping[str, Any]] | None = None,
        types: dict[Any, Any] | None = None,
    ):
        super().__init__()
        module = vars(sys.modules.get(cls.__module__, builtins))
        self.open_aliases: list[Any] = []
        self.types = types or {}
        fields = own_annotations(cls)
        local, frame_globals = statement or ({}, module)
        self.layers = (
            {cls.__name__: cls},
            # A field's default hides nothing: `jax: Array = field()` in the body.
            {k: v for k, v in vars(cls).items() if k not in fields},
            local,
            frame_globals,
            vars(builtins),
        )

    @contextlib.contextmanager
    def where(self, types: dict[Any, Any]) -> Iterator[None]:
        """Meanwhile the type variables stand for these."""
        outer, self.types = self.types, types
        try:
            yield
        finally:
            self.types = outer

    def __missing__(self, name: str) -> Any:
        for layer in self.layers:
            if name in layer:
                return layer[name]
        return unresolved(name)


def _merge(specs: list[Spec]) -> Spec:
    """One declaration out of the members of a union, or of a generic's arguments."""
    specs = [s for s in specs if s != NOTHING]
    if not specs:
        return NOTHING
    kinds = {s.kind for s in specs} - {None}
    if len(kinds) > 1:
        names = " and ".join(sorted(f"`{k.__name__}`" for k in kinds if k is not None))
        raise TypeError(f"it names two different kinds, {names}, for one place")
    each = [s.each for s in specs if s.each is not None]
    items = [s.items for s in specs if s.items is not None]
    return Spec(
        kind=next(iter(kinds), None),
        each=_merge(each) if each else None,
        items=_merge_items(items) if items else None,
        unresolved=any(s.unresolved for s in specs),
    )


def _merge_items(tuples: list[tuple[Spec, ...]]) -> tuple[Spec, ...]:
    columns = itertools.zip_longest(*tuples, fillvalue=NOTHING)
    return tuple(_merge(list(column)) for column in columns)


def parse(annotation: Any, names: Namespace) -> Spec:
    """Read one annotation. Raises `TypeError` for a union of two kinds."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        text = annotation
        annotation = _resolved(lambda: eval(text, {}, names))
        if isinstance(annotation, str):
            return parse(annotation, names)
    if isinstance(annotation, _UnresolvedType):
        return Spec(unresolved=True)
    if is_kind(annotation):
        return Spec(kind=annotation)
    if isinstance(annotation, typing.TypeVar):
        meaning = names.types.get(annotation, annotation.__bound__)
        with names.where({}):
            return NOTHING if meaning is None else parse(meaning, names)
    if _is_alias(annotation):  # `type Weights = …`
        return _parse_alias(annotation, (), names)
    if hasattr(annotation, "__supertype__"):  # `NewType`
        return parse(annotation.__supertype__, names)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is None or not args:  # a class, or a bare `typing.List`
        # jaxtyping's `PyTree[X]` and `Float[X, "…"]` are classes of their own.
        below = (getattr(annotation, n, None) for n in ("leaftype", "array_type"))
        return _merge([parse(x, names) for x in below if x is not None])
    if _is_alias(origin):
        return _parse_alias(origin, args, names)
    if origin is typing.Annotated:
        return _annotated(parse(args[0], names), annotation.__metadata__)
    if origin in (typing.Literal, type, collections.abc.Callable):
        return NOTHING
    if origin in (Union, types.UnionType):
        return _merge([parse(a, names) for a in args])
    if origin is tuple and args[-1] is not Ellipsis:
        return _parse_tuple(args, names)
    if _is_collection(origin):
        if issubclass(origin, collections.abc.Mapping):
            args = args[-1:]
        each = _merge([parse(a, names) for a in args if a is not Ellipsis])
        return NOTHING if each == NOTHING else Spec(each=each)
    # `Final[X]`, a generic module `Box[X]`: what is said counts for all that is below.
    return _merge([parse(a, names) for a in args])


def _resolved(value: Callable[[], Any]) -> Any:
    """An annotation that is evaluated only now; a stand-in, if it cannot be."""
    try:
        return value()
    except Exception:
        return unresolved("")


def _is_collection(cls: Any) -> bool:
    # A module may be one, too: what is said counts for all that is below.
    is_type = isinstance(cls, type) and not issubclass(cls, eqx.Module)
    return is_type and issubclass(cls, collections.abc.Collection)


def _parse_tuple(args: tuple[Any, ...], names: Namespace) -> Spec:
    """`tuple[A, B]`; in `tuple[A, *tuple[B, ...], C]` what follows is in one heap."""
    first = next((i for i, a in enumerate(args) if _is_starred(a)), len(args))
    items = tuple(parse(a, names) for a in args[:first])
    rest = _merge([_parse_starred(a, names) for a in args[first:]])
    if rest == NOTHING and all(s == NOTHING for s in items):
        return NOTHING
    return Spec(items=items, each=None if rest == NOTHING else rest)


def _is_starred(annotation: Any) -> bool:
    is_unpack = typing.get_origin(annotation) is typing.Unpack
    return is_unpack or getattr(annotation, "__unpacked__", None) is True


def _parse_starred(annotation: Any, names: Namespace) -> Spec:
    if not _is_starred(annotation):
        return parse(annotation, names)
    args = [a for a in typing.get_args(annotation) if a is not Ellipsis]
    if typing.get_origin(annotation) is typing.Unpack:
        args = [a for a in typing.get_args(args[0]) if a is not Ellipsis]
    return _merge([_parse_starred(a, names) for a in args])


def _is_alias(x: Any) -> bool:
    return type(x).__name__ == "TypeAliasType"


def _parse_alias(alias: Any, args: tuple[Any, ...], names: Namespace) -> Spec:
    if alias in names.open_aliases:  # `type Tree = Array | dict[str, Tree]`
        return NOTHING
    types = {
        p: _substituted(x, names.types)
        for p, x in zip(alias.__type_params__, args, strict=False)
    }
    names.open_aliases.append(alias)
    try:
        with names.where(types):
            return parse(_resolved(lambda: alias.__value__), names)
    finally:
        names.open_aliases.pop()


def _annotated(inner: Spec, metadata: tuple[Any, ...]) -> Spec:
    """`Annotated[X, …]`: of its kinds the outermost covering, else the innermost."""
    kinds = [inner.kind, *(k for k in metadata if is_kind(k))]
    kinds = [k for k in kinds if k is not None]
    if not kinds:
        return inner
    covering = [k for k in kinds if k.covering]
    return inner._replace(kind=covering[-1] if covering else kinds[0], unresolved=False)


def type_arguments(cls: type) -> dict[type, dict[Any, Any]]:
    """For each base of `cls`, what its type variables stand for in `cls`."""
    found: dict[type, dict[Any, Any]] = {}
    for base in cls.__mro__:
        for generic in base.__dict__.get("__orig_bases__", ()):
            origin, args = typing.get_origin(generic), typing.get_args(generic)
            parameters = getattr(origin, "__parameters__", ())
            here = found.get(base, {})
            types = {
                p: _substituted(x, here) for p, x in zip(parameters, args, strict=False)
            }
            found.setdefault(origin, types)
    return found


def _substituted(annotation: Any, types: dict[Any, Any]) -> Any:
    """`list[T]` with what `T` stands for."""
    if isinstance(annotation, typing.TypeVar):
        return types.get(annotation, annotation)
    parameters = getattr(annotation, "__parameters__", ())
    if isinstance(annotation, type) or not any(p in types for p in parameters):
        return annotation
    return _resolved(lambda: annotation[tuple(types.get(p, p) for p in parameters)])
