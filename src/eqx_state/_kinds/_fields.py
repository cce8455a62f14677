"""What each field of a module class declares.

A field's annotation is read once per class. Nothing here looks at values.
"""

import abc
import dataclasses
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, ForwardRef

import equinox as eqx

from .._compat import own_annotations
from ._annotations import (
    Given,
    is_record,
    is_typed_dict,
    is_unresolved,
    kinds_in,
    lineage,
    merge,
    Namespace,
    NOTHING,
    parse,
    Spec,
    type_arguments,
)
from ._kinds import is_kind, kind_name, TreePart


KIND = "eqx_state.kind"  # the metadata key under which `field(kind=…)` is kept


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

    - `TypeError`: `kind` is not a kind, or the field is `static` too (a static value is
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


# By what the type variables of the class stand for.
_specs: weakref.WeakKeyDictionary[type, dict[Given, dict[str, Spec]]] = (
    weakref.WeakKeyDictionary()
)
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


def declarations(cls: type, given: Given = ()) -> dict[str, Spec]:
    """What the fields of a class declare; those that declare nothing left out.

    `given`: what its type variables stand for.

    Raises `TypeError`, naming class and field, for a contradictory declaration. A name
    that cannot be resolved is not an error here: it stays in `Spec.unresolved`, and is
    tried again at the next call.
    """
    known = _known_names(cls)
    if cls not in _specs or _pending.get(cls, known) != known:
        _specs[cls] = {}
    # Kept here: another thread may begin anew meanwhile.
    by_given = _specs[cls]
    if given in by_given:
        return by_given[given]
    specs = {}
    for name in _names_of_fields(cls):
        try:
            spec = _declared(cls, name, given)
        except TypeError as e:
            raise TypeError(
                f"The annotation of `{cls.__qualname__}.{name}` cannot be used: {e}. "
                "A field has one kind; a submodule or a container may hold fields or "
                "elements of several."
            ) from None
        if spec != NOTHING:
            specs[name] = spec
    has_unresolved = any(map(is_unresolved, specs.values()))
    if is_record(cls) and "<locals>" not in cls.__qualname__:
        # Libraries have names that exist for type checkers alone. In a function it is
        # rather a kind made there, which a string does not lead to.
        specs = {name: _as_resolved(spec) for name, spec in specs.items()}
    by_given[given] = specs
    if has_unresolved:
        _pending[cls] = known
    elif given == ():
        _pending.pop(cls, None)
    return specs


def _as_resolved(spec: Spec) -> Spec:
    """`spec`, declaring nothing where a name in it could not be resolved."""
    each = None if spec.each is None else _as_resolved(spec.each)
    items = None if spec.items is None else tuple(map(_as_resolved, spec.items))
    records = tuple(
        (cls, tuple((variable, _as_resolved(inner)) for variable, inner in given))
        for cls, given in spec.records
    )
    return Spec(spec.kind, each, items, records)


def _names_of_fields(cls: Any) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [f.name for f in dataclasses.fields(cls)]
    return list(own_annotations(cls)) if is_typed_dict(cls) else list(cls._fields)


def _known_names(cls: type) -> int:
    """How many names there are around `cls`: more of them, and it may be resolved."""
    if cls in _specs and cls not in _pending:
        return 0
    modules = (sys.modules.get(base.__module__) for base in lineage(cls))
    others = len(_statements[cls][1]) if cls in _statements else 0
    return others + sum(len(vars(module)) for module in modules if module)


def _declared(cls: type, name: str, given: Given) -> Spec:
    """What the class declares that annotates the field last; it has both forms."""
    owner = _owner(cls, name)
    types = type_arguments(cls, given)
    # A base without arguments has the type variables that it was made with.
    names = Namespace(owner, _statements.get(owner), types.get(owner, types[cls]))
    spec = parse(own_annotations(owner).get(name, Any), names)
    fields = getattr(cls, "__dataclass_fields__", {})
    fields = owner.__dict__.get("__dataclass_fields__", fields)
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
    """The class that gives `cls` a field: a mixin without fields gives none."""
    if is_typed_dict(cls):  # which has the annotations of those before it, too
        annotation = own_annotations(cls)[name]
        bases = (c for c in reversed(lineage(cls)))
        return next(c for c in bases if own_annotations(c).get(name) is annotation)
    has_fields = {"__dataclass_fields__", "_fields"}
    bases = (c for c in lineage(cls) if has_fields & c.__dict__.keys())
    return next((c for c in bases if name in own_annotations(c)), cls)


def declared_inside(cls: type, spec: Spec) -> tuple[dict[str, Spec], Spec]:
    """What is declared for the fields of a class, where its values are of `spec`.

    And for all that is below: by type variables that no field of the class mentions.
    """
    for origin, given in spec.records:
        if given and origin in cls.__mro__:
            # `cls` has other names for the variables of `origin`, or none for those
            # that it has settled.
            types = type_arguments(cls).get(origin, {})
            named = ((types.get(v, v), inner) for v, inner in given)
            own = tuple(x for x in named if isinstance(x[0], typing.TypeVar))
            return declarations(cls, own), _declared_below(cls, own)
    return declarations(cls), NOTHING


def _declared_below(cls: type, given: Given) -> Spec:
    kinds: set[type[TreePart]] = set()
    for variable, spec in given:
        with_nothing = declarations(cls, ((variable, NOTHING),))
        if declarations(cls, ((variable, spec),)) == with_nothing:
            kinds |= kinds_in(spec)
    try:
        return merge([Spec(kind=kind) for kind in kinds])
    except TypeError as e:
        raise TypeError(
            f"The arguments of `{cls.__qualname__}[...]`: {e}. No field of the class"
            " mentions its type variables, so that they count for everything in it."
        ) from None


def declared_child(spec: Spec, node: Any, key: Any) -> Spec:
    """What is declared for the child under `key` of a node that is not a module."""
    element = spec.element(node, getattr(key, "idx", None))
    if isinstance(node, dict):
        # A `TypedDict` is known from the annotation alone: its values are plain dicts.
        records = [x for x in spec.records if is_typed_dict(x[0])]
        return _merge_entries(records, key.key, element) if records else element
    if not is_record(type(node)):
        return element
    declared, below = declared_inside(type(node), spec)
    name = getattr(key, "name", getattr(key, "key", None))
    return declared.get(name, below if element is NOTHING else element)


def _merge_entries(records: list[tuple[type, Given]], name: Any, element: Spec) -> Spec:
    try:
        found = [declarations(*record).get(name, NOTHING) for record in records]
        return merge([element, *found])
    except TypeError as e:
        classes = " or ".join(f"`{cls.__qualname__}`" for cls, _ in records)
        raise TypeError(f"The entry {name!r} of {classes}: {e}.") from None


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
