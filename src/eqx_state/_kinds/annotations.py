"""From an annotation to what it declares, as a `Spec`. Nothing here looks at values."""

import abc
import builtins
import collections
import collections.abc
import contextlib
import dataclasses
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, ForwardRef, Union

import equinox as eqx

from .._compat import dims_of, own_annotations
from .kinds import (
    Axes,
    Given,
    is_kind,
    kinds_in,
    merge,
    NOTHING,
    Spec,
    stand_in,
    StandIn,
    unresolved,
)


# --- The names that string annotations may use, and where each is looked up.
#
# Annotations are read when they are first needed, long after the class statement.
# Names that were local to the function around it are gone by then, so those that an
# annotation mentions are remembered when the class is made.


# What only the frame of the class statement knew: local names and globals.
_Statement = tuple[dict[str, Any], Mapping[str, Any]]
_statements = weakref.WeakKeyDictionary[type, _Statement]()


def remember_statement(cls: type) -> None:
    """Keep the names that the string annotations of `cls`, just made, may need.

    Only local names that occur in one of them are kept, and no frame.
    """
    texts = [a for a in own_annotations(cls).values() if _has_string(a)]
    if not texts:
        return
    names = set(re.findall(r"\w+", " ".join(map(repr, texts))))
    frame: types.FrameType | None = sys._getframe()
    while frame.f_back is not None and _is_machinery(frame):
        frame = frame.f_back
    found: dict[str, Any] = {}
    frame_globals, code = frame.f_globals, frame.f_code
    while frame is not None:
        # Only the functions that lexically enclose the statement count, not callers.
        if frame.f_code is code or code in frame.f_code.co_consts:
            code = frame.f_code
            if frame.f_locals is not frame_globals:
                for name, value in frame.f_locals.items():
                    if name in names and not eqx.is_array(value):
                        found.setdefault(name, value)
        frame = frame.f_back
    _statements[cls] = found, frame_globals


def globals_of(cls: type) -> Mapping[str, Any]:
    """The globals of the code around the statement of `cls`, if they are known."""
    return _statements[cls][1] if cls in _statements else {}


def _is_machinery(frame: types.FrameType) -> bool:
    """Whether a frame only helps to make the class: ours, Equinox's or Python's."""
    if frame.f_globals is vars(abc) or frame.f_globals is vars(types):
        return True
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("eqx_state", "equinox")


def _has_string(annotation: Any) -> bool:
    return isinstance(annotation, (str, ForwardRef)) or any(
        map(_has_string, typing.get_args(annotation))
    )


class Namespace(collections.ChainMap[str, Any]):
    """Where the names in the string annotations of `cls` are looked up.

    `types`: what type variables stand for.
    """

    def __init__(self, cls: type, types: dict[Any, Any]):
        module = vars(sys.modules.get(cls.__module__, builtins))
        local, frame_globals = _statements.get(cls, ({}, module))
        fields = own_annotations(cls)
        # A field's default hides nothing: `jax: Array = field()` in the body.
        body = {k: v for k, v in vars(cls).items() if k not in fields}
        around = (local, frame_globals, vars(builtins))
        super().__init__({cls.__name__: cls}, body, *around)
        self.types = types
        self.open_aliases: list[Any] = []

    @contextlib.contextmanager
    def where(self, types: dict[Any, Any]) -> Iterator[None]:
        """Let the type variables stand for these meanwhile."""
        outer, self.types = self.types, types
        try:
            yield
        finally:
            self.types = outer

    def __missing__(self, name: str) -> Any:
        return unresolved(name)


_BARE_AXES: Final = """`es.Axes` is without its names: write \
`Annotated[eqx.nn.Linear, es.Axes(weight="mlp embed")]`"""


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
    if isinstance(annotation, StandIn):
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
        spec = merge([parse(x, names) for x in below if x is not None])
        dims = dims_of(annotation)
        return spec if dims is None else spec._replace(dims=(dims,))
    if _is_alias(origin):
        return _parse_alias(origin, args, names)
    if origin is typing.Annotated:
        return _annotated(parse(args[0], names), annotation.__metadata__)
    if is_kind(origin):  # of a type variable
        return _annotated(parse(args[0], names), (origin,))
    if origin in (typing.Literal, type, collections.abc.Callable):
        return NOTHING
    if origin in (Union, types.UnionType):
        return merge([parse(a, names) for a in args])
    if is_record(origin) or _is_a(origin, eqx.Module):
        return _parse_generic(origin, args, names)
    if origin is tuple and args[-1] is not Ellipsis:
        return _parse_tuple(args, names)
    if _is_a(origin, collections.abc.Collection):
        if issubclass(origin, collections.abc.Mapping):
            args = args[-1:]
        each = merge([parse(a, names) for a in args if a is not Ellipsis])
        return NOTHING if each == NOTHING else Spec(each=each)
    # `Final[X]`, a generic pytree node: the arguments count for everything below it.
    return merge([parse(a, names) for a in args])


def _resolved(value: Callable[[], Any]) -> Any:
    """An annotation that is evaluated only now; if that fails, a stand-in."""
    try:
        return value()
    except Exception:
        return unresolved("")


def _is_a(x: Any, cls: type) -> bool:
    return isinstance(x, type) and issubclass(x, cls)


def is_typed_dict(cls: Any) -> bool:
    """Whether `cls` is a `TypedDict`, of `typing` or of `typing_extensions`."""
    return _is_a(cls, dict) and hasattr(cls, "__required_keys__")


def is_record(cls: Any) -> bool:
    """Whether `cls` is a `NamedTuple`, a `TypedDict` or a dataclass, but not a module.

    The annotations in its body say what is in it.
    """
    if not isinstance(cls, type) or issubclass(cls, eqx.Module):
        return False
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_named_tuple or dataclasses.is_dataclass(cls) or is_typed_dict(cls)


def _parse_generic(cls: Any, args: tuple[Any, ...], names: Namespace) -> Spec:
    """`Box[X]`: what its type variables stand for."""
    specs = [parse(a, names) for a in args]
    parameters = cls.__parameters__
    if len(parameters) != len(args):  # `Box[*Ts]`: the arguments count for all in it
        return merge([Spec(kind=kind) for spec in specs for kind in kinds_in(spec)])
    if _is_a(cls, eqx.Module) and all(spec == NOTHING for spec in specs):
        return NOTHING  # its class says the same
    return Spec(records=((cls, tuple(zip(parameters, specs, strict=True))),))


def _parse_tuple(args: tuple[Any, ...], names: Namespace) -> Spec:
    """`tuple[A, B]`; in `tuple[A, *tuple[B, ...], C]` all after `A` share one spec."""
    first = next((i for i, a in enumerate(args) if _is_starred(a)), len(args))
    items = tuple(parse(a, names) for a in args[:first])
    rest = merge([_parse_starred(a, names) for a in args[first:]])
    if rest == NOTHING and all(s == NOTHING for s in items):
        return NOTHING
    return Spec(items=items, each=None if rest == NOTHING else rest)


def _is_starred(annotation: Any) -> bool:
    """Whether it is `*tuple[B, ...]`, or `Unpack[tuple[B, ...]]`."""
    is_unpack = typing.get_origin(annotation) is typing.Unpack
    return is_unpack or getattr(annotation, "__unpacked__", None) is True


def _parse_starred(annotation: Any, names: Namespace) -> Spec:
    spec = parse(annotation, names)
    return merge(spec.below()) if _is_starred(annotation) else spec


def _is_alias(x: Any) -> bool:
    return type(x).__name__ == "TypeAliasType"


def _parse_alias(alias: Any, args: tuple[Any, ...], names: Namespace) -> Spec:
    if alias in names.open_aliases:  # `type Tree = Array | dict[str, Tree]`
        return NOTHING
    types = _assigned(alias.__type_params__, args, names.types)
    names.open_aliases.append(alias)
    try:
        with names.where(types):
            return parse(_resolved(lambda: alias.__value__), names)
    finally:
        names.open_aliases.pop()


def _annotated(inner: Spec, metadata: tuple[Any, ...]) -> Spec:
    """`Annotated[X, …]`: its outermost covering kind, else its innermost kind."""
    if Axes in metadata:
        raise TypeError(_BARE_AXES)
    for outer in metadata:
        if isinstance(outer, Axes):
            axes = tuple(axes.below(outer) for axes in inner.axes) or (outer,)
            inner = inner._replace(axes=axes)
    kinds = [inner.kind, *(k for k in metadata if is_kind(k))]
    kinds = [k for k in kinds if k is not None]
    if not kinds:
        return inner
    covering = [k for k in kinds if k.covering]
    return inner._replace(kind=covering[-1] if covering else kinds[0], unresolved=False)


def lineage(cls: type) -> tuple[type, ...]:
    """A class and those that it inherits from."""
    if not is_typed_dict(cls):  # whose `__mro__` does not show them
        return cls.__mro__
    bases = [typing.get_origin(b) or b for b in cls.__dict__.get("__orig_bases__", ())]
    return (cls, *(c for b in bases if is_typed_dict(b) for c in lineage(b)))


def type_arguments(cls: type, given: Given = ()) -> dict[type, dict[Any, Any]]:
    """For each base of `cls`, what its type variables stand for in `cls`."""
    own = {variable: stand_in(spec) for variable, spec in given}
    found: dict[type, dict[Any, Any]] = {cls: own}
    for base in lineage(cls):
        for generic in base.__dict__.get("__orig_bases__", ()):
            origin, args = typing.get_origin(generic), typing.get_args(generic)
            parameters = getattr(origin, "__parameters__", ())
            types = _assigned(parameters, args, found.get(base, own))
            found.setdefault(origin, types)
    return found


def _assigned(parameters: Any, args: Any, types: dict[Any, Any]) -> dict[Any, Any]:
    """What type parameters stand for, where `types` is what those in `args` do."""
    pairs = zip(parameters, args, strict=False)
    return {parameter: _substituted(arg, types) for parameter, arg in pairs}


def _substituted(annotation: Any, types: dict[Any, Any]) -> Any:
    """`list[T]` with what `T` stands for in place of `T`."""
    if isinstance(annotation, typing.TypeVar):
        return types.get(annotation, annotation)
    parameters = getattr(annotation, "__parameters__", ())
    if isinstance(annotation, type) or not any(p in types for p in parameters):
        return annotation
    return _resolved(lambda: annotation[tuple(types.get(p, p) for p in parameters)])
