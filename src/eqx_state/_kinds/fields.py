"""What each field of a module class declares.

A field's annotation is read once per class. Nothing here looks at values.
"""

import dataclasses
import re
import sys
import typing
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Final

import equinox as eqx

from .._compat import own_annotations
from .annotations import (
    globals_of,
    is_record,
    is_typed_dict,
    lineage,
    Namespace,
    parse,
    type_arguments,
)
from .kinds import (
    as_resolved,
    Given,
    is_kind,
    is_unresolved,
    Kind,
    kind_name,
    kinds_in,
    merge,
    NOTHING,
    Spec,
)


KIND: Final = "eqx_state.kind"  # the metadata key of `field(kind=…)`


_STATIC: Final = """{}: a static field is part of the tree's structure and its value \
is never an array with a kind. Drop one of the two."""


def field(
    *,
    kind: Kind | None = None,
    converter: Callable[[Any], Any] | None = None,
    static: bool = False,
    **kwargs: Any,
) -> Any:
    """`equinox.field` with the kind of the field's arrays.

    Use it where the annotation cannot say the kind, as in `w: Array`.

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
            what = f"`es.field(kind={kind_name(kind)}, static=True)`"
            raise TypeError(_STATIC.format(what))
        kwargs["metadata"] = {**(kwargs.get("metadata") or {}), KIND: kind}
    return own_default(eqx.field(converter=converter, static=static, **kwargs))


def own_default(field: Any) -> Any:
    """`field` with a default that is an array replaced by a factory of copies."""
    if eqx.is_array(field.default):
        field.default_factory = ArrayDefault(field.default)
        field.default = dataclasses.MISSING
    return field


class ArrayDefault:
    """Makes copies of an array; those of a NumPy array are NumPy arrays."""

    def __init__(self, array: Any):
        self.array = array

    def __call__(self) -> Any:
        return self.array.copy()


# What each class declares, by what its type variables stand for.
_specs = weakref.WeakKeyDictionary[type, dict[Given, dict[str, Spec]]]()
# Classes with unresolved names, and how many names there were to look in.
_pending = weakref.WeakKeyDictionary[type, int]()


def declarations(cls: type, given: Given = ()) -> dict[str, Spec]:
    """What the fields of a class declare, without those that declare nothing.

    `given`: what its type variables stand for.

    Raises `TypeError`, naming class and field, for a contradictory declaration. A name
    that cannot be resolved is not an error here: it stays in `Spec.unresolved`, and the
    next call tries again.
    """
    known = _known_names(cls)
    if cls not in _specs or _pending.get(cls, known) != known:
        _specs[cls] = {}
    # In a variable, since another thread may replace the entry meanwhile.
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
        # Ignore unresolved names: libraries import many under `TYPE_CHECKING` only. But
        # in a class made in a function the name is more likely a kind made there, which
        # a string cannot reach.
        specs = {name: as_resolved(spec) for name, spec in specs.items()}
    by_given[given] = specs
    if has_unresolved:
        _pending[cls] = known
    elif given == ():
        _pending.pop(cls, None)
    return specs


def _names_of_fields(cls: Any) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [f.name for f in dataclasses.fields(cls)]
    return list(own_annotations(cls)) if is_typed_dict(cls) else list(cls._fields)


def _known_names(cls: type) -> int:
    """How many names there are around `cls`: with more, one may be resolved."""
    if cls in _specs and cls not in _pending:
        return 0
    modules = (sys.modules.get(base.__module__) for base in lineage(cls))
    return len(globals_of(cls)) + sum(len(vars(module)) for module in modules if module)


def _declared(cls: type, name: str, given: Given) -> Spec:
    """What the last class to annotate the field declares, in either form."""
    owner = _owner(cls, name)
    types = type_arguments(cls, given)
    # A base named without arguments keeps its own type variables.
    names = Namespace(owner, types.get(owner, types[cls]))
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
    """The class that gives `cls` a field. A mixin that is not a record gives none."""
    if is_typed_dict(cls):  # its annotations include those of its bases
        annotation = own_annotations(cls)[name]
        bases = reversed(lineage(cls))
        return next(c for c in bases if own_annotations(c).get(name) is annotation)
    has_fields = {"__dataclass_fields__", "_fields"}
    bases = (c for c in lineage(cls) if has_fields & c.__dict__.keys())
    return next((c for c in bases if name in own_annotations(c)), cls)


def declared_inside(cls: type, spec: Spec) -> tuple[dict[str, Spec], Spec]:
    """What `spec` and the class declare: for each field, and for everything below.

    The latter comes from type variables that no field of the class mentions.
    """
    for origin, given in spec.records:
        if given and origin in cls.__mro__:
            # `cls` may have renamed the variables of `origin`, or bound them.
            types = type_arguments(cls).get(origin, {})
            named = ((types.get(v, v), inner) for v, inner in given)
            own = tuple(x for x in named if isinstance(x[0], typing.TypeVar))
            return declarations(cls, own), _declared_below(cls, own)
    return declarations(cls), NOTHING


def _declared_below(cls: type, given: Given) -> Spec:
    kinds: set[Kind] = set()
    for variable, spec in given:
        with_nothing = declarations(cls, ((variable, NOTHING),))
        if declarations(cls, ((variable, spec),)) == with_nothing:
            kinds |= kinds_in(spec)
    try:
        return merge([Spec(kind=kind) for kind in kinds])
    except TypeError as e:
        raise TypeError(
            f"The arguments of `{cls.__qualname__}[...]`: {e}. No field of the class"
            " mentions its type variables, so they count for everything in it."
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
    """Raise `TypeError` if a static field of a module class declares a kind."""
    declared = declarations(cls)
    for f in dataclasses.fields(cls):
        kind = declared.get(f.name, NOTHING).kind
        if kind is not None and f.metadata.get("static", False):
            what = (
                f"`{cls.__qualname__}.{f.name}`, declared `{kind.__name__}` and static"
            )
            raise TypeError(_STATIC.format(what))


def is_class_var(annotation: Any) -> bool:
    """Whether an annotation, maybe still a string, is a `ClassVar`."""
    if isinstance(annotation, str):
        return re.match(r"(\w+\.)*ClassVar\b", annotation) is not None
    return annotation is ClassVar or typing.get_origin(annotation) is ClassVar


def annotation_of(cls: type, name: str) -> str:
    """The annotation of a field as it was written, for messages."""
    annotation = own_annotations(_owner(cls, name))[name]
    return annotation if isinstance(annotation, str) else repr(annotation)
