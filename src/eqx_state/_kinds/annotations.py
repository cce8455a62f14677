"""Parses annotations into `Spec`s. Nothing here looks at values."""

import builtins
import collections
import collections.abc
import dataclasses
import inspect
import re
import sys
import traceback
import typing
import weakref
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, ForwardRef, NamedTuple

import equinox as eqx

from .._compat import dims_of, own_annotations
from .kinds import Axes, is_kind, merge, NOTHING, Record, Spec


class _MissingType(type):
    # Lets `np.ndarray`, `Box[int]` and `*Shape` evaluate if the name that they begin
    # with is not defined. A module may import it only under `TYPE_CHECKING`.

    def __getattr__(cls, name: str) -> Any:
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls

    __iter__ = None  # else `*Shape` would call `__getitem__` forever


class Missing(metaclass=_MissingType):
    """Replaces a name in an annotation that is not defined, or not yet."""


class Names(collections.ChainMap[str, Any]):
    """The namespace in which the annotations of a class are evaluated.

    `types` maps type variables to their declarations.
    """

    def __init__(self, cls: type):
        module = vars(sys.modules.get(cls.__module__, builtins))
        local, module, outer = _statements.get(cls, ({}, module, {}))
        fields = own_annotations(cls)
        # Leave out the fields: after `jax: Array = field()`, the name `jax` in other
        # annotations is still the module.
        body = {k: v for k, v in vars(cls).items() if k not in fields}
        variables = {x.__name__: x for x in getattr(cls, "__type_params__", ())}
        around = (variables, local, module, outer, vars(builtins))
        super().__init__({cls.__name__: cls}, body, *around)
        self.cls = cls
        self.types: dict[Any, Spec] = {}
        self.has_missing = False
        # Whether a missing name might be a kind. In a record (a `NamedTuple`, say) of
        # some library it is not. But a record that is defined in a function is the
        # user's, and the missing name is probably a kind that is local to the function.
        self.is_strict = not is_record(cls) or "<locals>" in cls.__qualname__
        self._open_aliases: list[Any] = []

    def __missing__(self, name: str) -> Any:
        self.has_missing = True
        return Missing

    def evaluate(self, annotation: str | ForwardRef) -> Any:
        """Evaluate a string annotation."""
        text, scope = annotation, self
        if isinstance(text, ForwardRef):
            # A `TypedDict` copies the annotations of its bases, which may be defined in
            # other modules.
            module = sys.modules.get(text.__forward_module__ or "")
            scope = collections.ChainMap(getattr(module, "__dict__", {}), self)
            text = text.__forward_arg__
        return self._resolved(lambda: eval(text, {}, scope))

    def of_alias(self, alias: Any, args: tuple[Any, ...]) -> Spec:
        """The declarations of an alias from a `type` statement, for these arguments."""
        if alias in self._open_aliases:  # `type Tree = Array | dict[str, Tree]`
            return NOTHING
        given = zip(alias.__type_params__, args, strict=False)
        outer, self.types = self.types, {v: parse(arg, self) for v, arg in given}
        self._open_aliases.append(alias)
        spec = parse(self._resolved(lambda: alias.__value__), self)
        self._open_aliases.pop()
        self.types = outer
        return spec

    def _resolved(self, value: Callable[[], Any]) -> Any:
        try:
            return value()
        except Exception:
            self.has_missing = True
            return Missing


def names_around(cls: type, record: Record | None) -> dict[type, Names]:
    """The namespace of each class that `cls` inherits from.

    `record`: one of these classes, and the declarations of its type variables.
    """
    found = {base: Names(base) for base in cls.__mro__}
    if record is not None:
        origin, given = record
        found[origin].types.update(given)
    for names in found.values():
        for generic in names.cls.__dict__.get("__orig_bases__", ()):
            origin, args = typing.get_origin(generic), typing.get_args(generic)
            variables = getattr(origin, "__parameters__", ())
            if origin in found:
                types = found[origin].types
                for variable, arg in zip(variables, args, strict=False):
                    if isinstance(arg, typing.TypeVar) and variable in types:
                        # `class Child(Box[T])`, in a field annotated `Box[es.State]`.
                        names.types.setdefault(arg, types[variable])
                    if (spec := parse(arg, names)) != NOTHING:
                        types[variable] = spec
    return found


def parse(annotation: Any, names: Names) -> Spec:
    """Parse one annotation. Raises `TypeError` for a union of two kinds."""
    if isinstance(annotation, (str, ForwardRef)):
        return parse(names.evaluate(annotation), names)
    if annotation is Missing:
        return Spec(unresolved=names.is_strict)
    if is_kind(annotation):
        return Spec(kind=annotation)
    if isinstance(annotation, typing.TypeVar):
        if annotation in names.types:
            return names.types[annotation]
        bound = annotation.__bound__
        return NOTHING if bound is None else parse(bound, names)
    if hasattr(annotation, "__supertype__"):  # `NewType`
        return parse(annotation.__supertype__, names)
    origin = typing.get_origin(annotation) or annotation
    args = typing.get_args(annotation)
    if type(origin).__name__ == "TypeAliasType":  # `type Weights = …`
        return names.of_alias(origin, args)
    if is_record(origin) or _is_a(origin, eqx.Module):
        return _parse_class(origin, args, names)
    if not args:  # a class, or a bare `typing.List`
        # jaxtyping's `PyTree[X]` and `Float[X, "…"]` are classes without arguments.
        below = (getattr(annotation, n, None) for n in ("leaftype", "array_type"))
        spec = merge([parse(x, names) for x in below if x is not None])
        dims = dims_of(annotation)
        return spec if dims is None else spec._replace(dims=(dims,))
    if origin is typing.Annotated:
        return _annotated(parse(args[0], names), args[1:])
    if is_kind(origin):  # `es.State[T]` of a type variable
        return _annotated(parse(args[0], names), (origin,))
    if origin in (typing.Literal, type, collections.abc.Callable):
        return NOTHING
    if _is_a(origin, collections.abc.Collection):
        return _parse_container(origin, args, names)
    # A union, `Final[X]`, or a generic pytree node, whose declaration applies to
    # everything in it.
    return merge([parse(a, names) for a in args])


def _parse_class(cls: Any, args: tuple[Any, ...], names: Names) -> Spec:
    """Parse a record or a module, perhaps with type arguments: `Box[X]`."""
    specs = [parse(a, names) for a in args]
    variables = getattr(cls, "__parameters__", ())
    if args and len(variables) != len(args):  # `Box[*Ts]`: one spec for all contents
        return merge(specs)
    # A walk finds the annotations of a module by the class of the value, so a module
    # needs no spec. A `TypedDict` needs one, because its value is a plain dict. Other
    # records need one, because `strengthen` skips a value whose spec is `NOTHING`.
    if all(spec == NOTHING for spec in specs) and not is_record(cls):
        return NOTHING
    return Spec(records=((cls, tuple(zip(variables, specs, strict=False))),))


def _parse_container(cls: type, args: tuple[Any, ...], names: Names) -> Spec:
    num_items = 0
    if issubclass(cls, Mapping):
        args = args[-1:]
    elif cls is tuple and args[-1] is not Ellipsis:
        # In `tuple[A, *tuple[B, ...], C]` all elements after `A` share one declaration.
        starred = (i for i, a in enumerate(args) if _is_starred(a))
        num_items = next(starred, len(args))
    items = tuple(parse(a, names) for a in args[:num_items])
    rest = [_parse_element(a, names) for a in args[num_items:] if a is not Ellipsis]
    each = merge(rest)
    if each == NOTHING and all(spec == NOTHING for spec in items):
        return NOTHING
    return Spec(items=items, each=None if each == NOTHING else each)


def _parse_element(annotation: Any, names: Names) -> Spec:
    spec = parse(annotation, names)
    return (spec.each or NOTHING) if _is_starred(annotation) else spec


def _is_starred(annotation: Any) -> bool:
    """Whether an annotation is `*tuple[B, ...]` or `Unpack[tuple[B, ...]]`."""
    is_unpack = typing.get_origin(annotation) is typing.Unpack
    return is_unpack or getattr(annotation, "__unpacked__", None) is True


def _annotated(inner: Spec, metadata: tuple[Any, ...]) -> Spec:
    """Parse `Annotated[X, …]`: the outermost covering kind, else the innermost kind."""
    for outer in metadata:
        if isinstance(outer, Axes):
            axes = tuple(axes.below(outer) for axes in inner.axes) or (outer,)
            inner = inner._replace(axes=axes)
    kinds = [k for k in (inner.kind, *metadata) if is_kind(k)]
    if not kinds:
        return inner
    covering = [k for k in kinds if k.covering]
    return inner._replace(kind=covering[-1] if covering else kinds[0], unresolved=False)


def _is_a(x: Any, cls: type) -> bool:
    return isinstance(x, type) and issubclass(x, cls)


def is_typed_dict(cls: Any) -> bool:
    """Whether `cls` is a `TypedDict`, of `typing` or of `typing_extensions`."""
    return _is_a(cls, dict) and hasattr(cls, "__required_keys__")


def is_record(cls: Any) -> bool:
    """Whether `cls` is a `NamedTuple`, a `TypedDict` or a non-module dataclass."""
    if not isinstance(cls, type) or issubclass(cls, eqx.Module):
        return False
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_named_tuple or dataclasses.is_dataclass(cls) or is_typed_dict(cls)


# --- Local names. Annotations are parsed when they are first needed, long after the
# class statement. In
#
#     def make():
#         class Cache(es.State): ...
#         class Layer(es.Module):
#             last: "Cache"
#         return Layer
#
# only the frame of `make` contains `Cache`.


class _Statement(NamedTuple):
    """The names around a class statement that the annotations of the class mention."""

    local: dict[str, Any]  # in functions
    module: Mapping[str, Any]
    outer: dict[str, Any]  # in the bodies of classes


_statements = weakref.WeakKeyDictionary[type, _Statement]()


def remember_statement(cls: type) -> None:
    """Store the local names that the annotations of the new class `cls` may need."""
    # Do not store a frame: its other locals would live as long as the class. (Nor this
    # function's own frame in `stack`, a reference cycle.)
    written = own_annotations(cls), cls.__dict__.get("__orig_bases__")
    names = set(re.findall(r"\w+", repr(written)))
    stack = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    # Metaclasses, decorators and `__init_subclass__` run above the statement.
    start = next((i for i, x in enumerate(stack) if _contains(x, cls)), len(stack))
    around = _enclosing(stack[start:])
    if around:
        module = around[0].f_globals
        hidden = _out_of_reach(cls, around, names)
    else:  # `types.new_class`, say, which a function of the module may have called
        module = vars(sys.modules.get(cls.__module__, builtins))
        callers = [x.f_code for x in stack if _is_in_module(x, cls)]
        hidden = {name for code in callers for name in _locals_of(code)}
    statement = _statements[cls] = _Statement({}, module, {})
    for frame in around:
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
        # Python does not look into the bodies of outer classes, so do that last.
        known = statement.local if is_function else statement.outer
        if frame.f_locals is not module:
            for name, value in frame.f_locals.items():
                # In `Float[Array, "n"]`, `n` is an axis; storing a tracer of that name
                # would leak it.
                if name in names and not eqx.is_array(value):
                    known.setdefault(name, value)
    # Do not take a global of the same name instead.
    for name in names & hidden:
        statement.local.setdefault(name, Missing)


def _is_in_module(frame: FrameType, cls: type) -> bool:
    # `exec(code, {})` has no `__name__`, and Python takes that of `builtins`.
    return frame.f_globals.get("__name__", "builtins") == cls.__module__


def _contains(frame: FrameType, cls: type) -> bool:
    """Whether the code of a frame contains the class statement of `cls`."""
    inner = [code.co_qualname for code in _codes_in(frame.f_code)]
    return _is_in_module(frame, cls) and cls.__qualname__ in inner


def _codes_in(code: CodeType) -> list[CodeType]:
    return [x for x in code.co_consts if isinstance(x, CodeType)]


def _enclosing(stack: list[FrameType]) -> list[FrameType]:
    """The first frame, and those that lexically enclose it, but not callers."""
    found = stack[:1]
    for frame in stack[1:]:
        inner = found[-1].f_code
        if frame.f_code is inner or inner in _codes_in(frame.f_code):
            found.append(frame)
    return found


def _locals_of(code: CodeType) -> set[str]:
    return {*code.co_varnames, *code.co_cellvars}


def _out_of_reach(cls: type, around: list[FrameType], names: set[str]) -> set[str]:
    """Local names without a value: not assigned yet, or of a function that returned."""
    hidden = {name for x in around for name in _locals_of(x.f_code)}
    scopes, module = cls.__qualname__.split(".<locals>.")[:-1], around[0].f_globals
    gone = {".<locals>.".join(scopes[: i + 1]) for i in range(len(scopes))}
    gone -= {x.f_code.co_qualname for x in around}
    if gone:
        first, *rest = scopes[0].split(".")
        outermost: Any = module.get(first)
        for name in rest:
            outermost = getattr(outermost, name, None)
        codes = [getattr(inspect.unwrap(outermost), "__code__", None)]
        for code in filter(None, codes):  # which grows
            codes += _codes_in(code)
            if code.co_qualname in gone:
                gone.remove(code.co_qualname)
                hidden |= _locals_of(code)
    # If the code of a function is not found, it may have a kind of the same name.
    return hidden | {x for x in names if gone and is_kind(module.get(x))}
