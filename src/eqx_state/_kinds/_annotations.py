"""From an annotation to what it declares, as a `Spec`.

A `Spec` is a small tree that follows the containers in the annotation: `dict[str,
es.State]` declares nothing for the dict itself and `State` for what is in it. Nothing
here looks at values.
"""

import builtins
import collections
import collections.abc
import contextlib
import dataclasses
import itertools
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ForwardRef, NamedTuple, Union

import equinox as eqx

from .._compat import own_annotations
from ._kinds import is_kind, TreePart


class Spec(NamedTuple):
    """What an annotation declares for a value and, one level down, for its elements.

    `items`: for the first elements of a tuple; `each`: for all others. `records`: the
    classes named in it whose own annotations declare what is inside, each with what
    its type variables stand for here.
    """

    kind: type[TreePart] | None = None
    each: "Spec | None" = None
    items: "tuple[Spec, ...] | None" = None
    records: "tuple[tuple[type, Given], ...]" = ()
    unresolved: bool = False

    def element(self, node: Any, index: int | None) -> "Spec":
        """The declaration for an element of the container `node`.

        `index`: its place in a list or a tuple, `None` in any other container.
        """
        each = NOTHING if self.each is None else self.each
        # `list[A] | tuple[B, C]`; without the list a list may stand for the tuple.
        if self.items is None or not (isinstance(node, tuple) or each is NOTHING):
            return each
        has_item = index is not None and index < len(self.items)
        return self.items[index] if has_item else each


NOTHING = Spec()
Given = tuple[tuple[Any, Spec], ...]  # type variables, and what each stands for


def specs_below(spec: Spec) -> list[Spec]:
    """The specs that are parts of a spec, one level down."""
    given = [inner for _, given in spec.records for _, inner in given]
    return [*([] if spec.each is None else [spec.each]), *(spec.items or ()), *given]


def is_unresolved(spec: Spec) -> bool:
    """Whether a name in the annotation, however deep, could not be resolved."""
    return spec.unresolved or any(map(is_unresolved, specs_below(spec)))


def kinds_in(spec: Spec) -> set[type[TreePart]]:
    """The kinds that an annotation names, however deep."""
    own = set() if spec.kind is None else {spec.kind}
    return own.union(*map(kinds_in, specs_below(spec)))


class _Stated(type):
    """A stand-in for an annotation that has been read, as what a type variable is."""

    spec: Spec


def stated(spec: Spec) -> type:
    """A class that is read as `spec`; it can be in any annotation."""
    return _Stated("stated", (), {"spec": spec})


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


def merge(specs: list[Spec]) -> Spec:
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
        each=merge(each) if each else None,
        items=_merge_items(items) if items else None,
        records=_merge_records([record for s in specs for record in s.records]),
        unresolved=any(s.unresolved for s in specs),
    )


def _merge_items(tuples: list[tuple[Spec, ...]]) -> tuple[Spec, ...]:
    columns = itertools.zip_longest(*tuples, fillvalue=NOTHING)
    return tuple(merge(list(column)) for column in columns)


def _merge_records(records: list[tuple[type, Given]]) -> tuple[tuple[type, Given], ...]:
    found: dict[type, dict[Any, Spec]] = {}
    for cls, given in records:
        here = found.setdefault(cls, {})
        for variable, spec in given:
            here[variable] = merge([here.get(variable, NOTHING), spec])
    return tuple((cls, tuple(given.items())) for cls, given in found.items())


def parse(annotation: Any, names: Namespace) -> Spec:
    """Read one annotation. Raises `TypeError` for a union of two kinds."""
    home: Mapping[str, Any] = {}
    if isinstance(annotation, ForwardRef):  # a `TypedDict`'s may be inherited
        module = sys.modules.get(annotation.__forward_module__ or "")
        home = getattr(module, "__dict__", {})
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        text, scope = annotation, collections.ChainMap(home, names)
        annotation = _resolved(lambda: eval(text, {}, scope))
        if isinstance(annotation, str):
            return parse(annotation, names)
    if isinstance(annotation, _UnresolvedType):
        return Spec(unresolved=True)
    if isinstance(annotation, _Stated):
        return annotation.spec
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
    if is_record(annotation):
        return Spec(records=((annotation, ()),))
    if origin is None or not args:  # a class, or a bare `typing.List`
        # jaxtyping's `PyTree[X]` and `Float[X, "…"]` are classes of their own.
        below = (getattr(annotation, n, None) for n in ("leaftype", "array_type"))
        return merge([parse(x, names) for x in below if x is not None])
    if _is_alias(origin):
        return _parse_alias(origin, args, names)
    if origin is typing.Annotated:
        return _annotated(parse(args[0], names), annotation.__metadata__)
    if origin in (typing.Literal, type, collections.abc.Callable):
        return NOTHING
    if origin in (Union, types.UnionType):
        return merge([parse(a, names) for a in args])
    if is_record(origin) or _is_module(origin):
        return _parse_generic(origin, args, names)
    if origin is tuple and args[-1] is not Ellipsis:
        return _parse_tuple(args, names)
    if _is_collection(origin):
        if issubclass(origin, collections.abc.Mapping):
            args = args[-1:]
        each = merge([parse(a, names) for a in args if a is not Ellipsis])
        return NOTHING if each == NOTHING else Spec(each=each)
    # `Final[X]`, a generic node of a pytree: what is said counts for all that is below.
    return merge([parse(a, names) for a in args])


def _resolved(value: Callable[[], Any]) -> Any:
    """An annotation that is evaluated only now; a stand-in, if it cannot be."""
    try:
        return value()
    except Exception:
        return unresolved("")


def _is_collection(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, collections.abc.Collection)


def _is_module(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, eqx.Module)


def is_typed_dict(cls: Any) -> bool:
    """Whether `cls` is a `TypedDict`, of `typing` or of `typing_extensions`."""
    is_dict = isinstance(cls, type) and issubclass(cls, dict)
    return is_dict and hasattr(cls, "__required_keys__")


def is_record(cls: Any) -> bool:
    """Whether annotations in the body of `cls` say what is in it; not for modules.

    A `NamedTuple`, a `TypedDict`, a dataclass.
    """
    if not isinstance(cls, type) or issubclass(cls, eqx.Module):
        return False
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_named_tuple or dataclasses.is_dataclass(cls) or is_typed_dict(cls)


def _parse_generic(cls: Any, args: tuple[Any, ...], names: Namespace) -> Spec:
    """`Box[X]`: what its type variables stand for."""
    specs = [parse(a, names) for a in args]
    parameters = cls.__parameters__
    if len(parameters) != len(args):  # `Box[*Ts]`: what is said counts for all in it
        return merge([Spec(kind=kind) for spec in specs for kind in kinds_in(spec)])
    if _is_module(cls) and all(spec == NOTHING for spec in specs):
        return NOTHING  # its class says the same
    return Spec(records=((cls, tuple(zip(parameters, specs, strict=True))),))


def _parse_tuple(args: tuple[Any, ...], names: Namespace) -> Spec:
    """`tuple[A, B]`; in `tuple[A, *tuple[B, ...], C]` what follows is in one heap."""
    first = next((i for i, a in enumerate(args) if _is_starred(a)), len(args))
    items = tuple(parse(a, names) for a in args[:first])
    rest = merge([_parse_starred(a, names) for a in args[first:]])
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
    return merge([_parse_starred(a, names) for a in args])


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


def lineage(cls: type) -> tuple[type, ...]:
    """A class and those that it inherits from; a `TypedDict` hides them."""
    if not is_typed_dict(cls):
        return cls.__mro__
    bases = [typing.get_origin(b) or b for b in cls.__dict__.get("__orig_bases__", ())]
    return (cls, *(c for b in bases if is_typed_dict(b) for c in lineage(b)))


def type_arguments(cls: type, given: Given = ()) -> dict[type, dict[Any, Any]]:
    """For each base of `cls`, what its type variables stand for in `cls`."""
    own = {variable: stated(spec) for variable, spec in given}
    found: dict[type, dict[Any, Any]] = {cls: own}
    for base in lineage(cls):
        for generic in base.__dict__.get("__orig_bases__", ()):
            origin, args = typing.get_origin(generic), typing.get_args(generic)
            parameters = getattr(origin, "__parameters__", ())
            here = found.get(base, own)
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
