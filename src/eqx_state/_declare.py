"""From annotations to kinds: what each field of a module class declares.

A field's annotation is read once per class into a `Spec`, a small tree that follows the
containers in the annotation: `dict[str, es.State]` declares nothing for the dict itself
and `State` for what is in it. Nothing here looks at values.
"""

import abc
import builtins
import collections.abc
import contextlib
import dataclasses
import itertools
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, ForwardRef, NamedTuple, Union

import equinox as eqx
import jax.tree_util as jtu

from ._compat import own_annotations
from ._kinds import is_kind, kind_name, TreePart


KIND = "eqx_state.kind"  # the metadata key under which `field(kind=…)` is kept


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


def field(
    *,
    kind: type[TreePart[Any]] | None = None,
    converter: Callable[[Any], Any] | None = None,
    static: bool = False,
    **kwargs: Any,
) -> Any:
    """`equinox.field` with the kind of the field's arrays.

    For a field whose annotation cannot say it, such as `w: Array`.

    **Arguments:**

    - `kind`: a kind (`es.Parameter`, `es.State`, your own), or `None` for no
        declaration.
    - `converter`, `static`: as for `equinox.field`.
    - `**kwargs`: every argument of `dataclasses.field`: `default`, `default_factory`,
        `metadata`, …

    **Raises:**

    - `TypeError`: `kind` is no kind, or the field is `static` too (a static value is
        part of the tree's structure and cannot be an array with a kind).

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp
        from jaxtyping import Array


        class Scale(es.Module):
            factor: Array = es.field(kind=es.Parameter, converter=jnp.asarray)


        assert es.parts(Scale(2.0))[0].kind is es.Parameter
        ```
    """
    if kind is not None:
        if not is_kind(kind):
            raise TypeError(
                f"`es.field(kind={kind!r})`: a kind is a class such as `es.Parameter`, "
                "or your own `class Cache(es.State): ...`."
            )
        if static:
            raise TypeError(
                f"`es.field(kind={kind_name(kind)}, static=True)`: a static field is"
                " part of the tree's structure and its value is never an array with a"
                " kind. Drop one of the two."
            )
        kwargs["metadata"] = {**(kwargs.get("metadata") or {}), KIND: kind}
    return own_default(eqx.field(converter=converter, static=static, **kwargs))


def own_default(field: Any) -> Any:
    """An array as a default becomes a factory of copies: each instance its own."""
    if eqx.is_array(field.default):
        field.default_factory = ArrayDefault(field.default)
        field.default = dataclasses.MISSING
    return field


class ArrayDefault:
    """Makes a copy of an array. NumPy arrays stay NumPy arrays."""

    def __init__(self, array: Any):
        self.array = array

    def __call__(self) -> Any:
        return self.array.copy()


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
    """Where the names in the string annotations of `cls` are looked up."""

    def __init__(self, cls: type):
        super().__init__()
        module = vars(sys.modules.get(cls.__module__, builtins))
        self.open_aliases: list[Any] = []
        self.types: dict[Any, Any] = {}  # what type variables stand for
        fields = own_annotations(cls)
        local, frame_globals = _statements.get(cls, ({}, module))
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


_specs: weakref.WeakKeyDictionary[type, dict[str, Spec]] = weakref.WeakKeyDictionary()
# Classes with names not resolved yet, and how many names there were to look in.
_pending: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
# What only the frame of the class statement knew: the names local to its function, and
# its globals.
_statements: weakref.WeakKeyDictionary[
    type, tuple[dict[str, Any], Mapping[str, Any]]
] = weakref.WeakKeyDictionary()


def remember_statement(cls: type) -> None:
    """Keep the names around the statement of `cls`, just made, that annotations need.

    Of the local names only those that occur in a string annotation; no frame is kept.
    """
    texts = [a for a in own_annotations(cls).values() if _has_string(a)]
    if not texts:
        return
    names = set(re.findall(r"\w+", " ".join(map(repr, texts))))
    frame: types.FrameType | None = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame):
        frame = frame.f_back
    found: dict[str, Any] = {}
    frame_globals, code = frame.f_globals, frame.f_code
    while frame is not None:
        # Only what is around the statement in the text counts, not who called it.
        if frame.f_code is code or code in frame.f_code.co_consts:
            code = frame.f_code
            if frame.f_locals is not frame_globals:
                local = frame.f_locals.items()
                new = {k: v for k, v in local if k in names and not eqx.is_array(v)}
                found = {**new, **found}
        frame = frame.f_back
    _statements[cls] = found, frame_globals


def _is_machinery(frame: types.FrameType) -> bool:
    """Whether a frame only helps to make the class: ours, Equinox's, Python's."""
    if frame.f_globals is vars(abc) or frame.f_globals is vars(types):
        return True
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("eqx_state", "equinox")


def _has_string(annotation: Any) -> bool:
    return isinstance(annotation, (str, ForwardRef)) or any(
        map(_has_string, typing.get_args(annotation))
    )


def declarations(cls: type) -> dict[str, Spec]:
    """What the fields of a module class declare; those that declare nothing left out.

    Raises `TypeError`, naming class and field, for a contradictory declaration. A name
    that cannot be resolved is no error here: it stays in `Spec.unresolved`, and is
    tried again at the next call.
    """
    known = _known_names(cls)
    if cls in _specs and _pending.get(cls, known) == known:
        return _specs[cls]
    specs = {}
    for f in dataclasses.fields(cls):
        try:
            spec = _declared(cls, f.name)
        except TypeError as e:
            raise TypeError(
                f"The annotation of `{cls.__qualname__}.{f.name}` cannot be used: {e}. "
                "A field has one kind; a submodule or a container may hold fields or "
                "elements of several."
            ) from None
        if spec != NOTHING:
            specs[f.name] = spec
    _specs[cls] = specs
    if any(map(_is_unresolved, specs.values())):
        _pending[cls] = known
    else:
        _pending.pop(cls, None)
    return specs


def _known_names(cls: type) -> int:
    """How many names there are around `cls`: more of them, and it may be resolved."""
    if cls in _specs and cls not in _pending:
        return 0
    modules = (sys.modules.get(base.__module__) for base in cls.__mro__)
    others = len(_statements[cls][1]) if cls in _statements else 0
    return others + sum(len(vars(module)) for module in modules if module)


def _declared(cls: type, name: str) -> Spec:
    """What the class declares that annotates the field last; it has both forms."""
    owner = _owner(cls, name)
    names = Namespace(owner)
    names.types = _type_arguments(cls).get(owner, {})
    spec = parse(own_annotations(owner).get(name, Any), names)
    fields = owner.__dict__.get("__dataclass_fields__", cls.__dataclass_fields__)
    kind = fields[name].metadata.get(KIND) if name in fields else None
    if kind is None:
        return spec
    if spec.kind not in (None, kind):
        raise TypeError(
            f"the annotation says `{spec.kind.__name__}`, `es.field` says"
            f" `{kind.__name__}`"
        )
    return spec._replace(kind=kind, unresolved=False)


def _owner(cls: type, name: str) -> type:
    """The class that gives `cls` a field: a mixin that is no dataclass gives none."""
    bases = (c for c in cls.__mro__ if "__dataclass_fields__" in c.__dict__)
    return next((c for c in bases if name in own_annotations(c)), cls)


def _type_arguments(cls: type) -> dict[type, dict[Any, Any]]:
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


def check_declarations(cls: type) -> None:
    """Raise `TypeError` for what a module class cannot declare."""
    declared = declarations(cls)
    for f in dataclasses.fields(cls):
        kind = declared.get(f.name, NOTHING).kind
        if kind is not None and f.metadata.get("static", False):
            raise TypeError(
                f"`{cls.__qualname__}.{f.name}` is declared `{kind.__name__}` and"
                " static: a static field is part of the tree's structure and its value"
                " is never an array with a kind. Drop one of the two."
            )


def is_class_var(annotation: Any) -> bool:
    """Whether an annotation, maybe still a string, makes no dataclass field."""
    if isinstance(annotation, str):
        return re.match(r"(\w+\.)*ClassVar\b", annotation) is not None
    return annotation is ClassVar or typing.get_origin(annotation) is ClassVar


def annotation_of(cls: type, name: str) -> str:
    """The annotation of a field as it was written, for messages."""
    annotation = own_annotations(_owner(cls, name))[name]
    return annotation if isinstance(annotation, str) else repr(annotation)


def _is_unresolved(spec: Spec) -> bool:
    below = [*([] if spec.each is None else [spec.each]), *(spec.items or ())]
    return spec.unresolved or any(map(_is_unresolved, below))
