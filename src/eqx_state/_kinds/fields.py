"""The declarations of each field of a module class.

Each annotation is parsed once per class. Nothing here looks at values.
"""

import dataclasses
import inspect
import re
import sys
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import equinox as eqx
import jax.tree_util as jtu

from .._compat import own_annotations
from .annotations import is_record, is_typed_dict, Names, names_around, parse
from .kinds import is_kind, Kind, kind_name, merge, NOTHING, Record, Spec


KIND: Final = "eqx_state.kind"  # the metadata key of `field(kind=…)`


_STATIC: Final = """{}: a static field is part of the tree's structure, so its value \
cannot be an array with a kind. Remove the kind or `static=True`."""


def field(
    *,
    kind: Kind | None = None,
    converter: Callable[[Any], Any] | None = None,
    static: bool = False,
    **kwargs: Any,
) -> Any:
    """An `equinox.field` that also declares the kind of the field's arrays.

    Use it if the annotation does not contain the kind, as in `w: Array`.

    **Arguments:**

    - `kind`: a kind (`es.Parameter`, `es.State`, your own), or `None` to declare none.
    - `converter`, `static`: as for `equinox.field`.
    - `**kwargs`: every argument of `dataclasses.field`: `default`, `default_factory`,
        `metadata`, …

    **Raises:**

    - `TypeError`: `kind` is not a kind, or the field is also `static`.

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
    """`field`; a default that is an array becomes a factory that copies the array."""
    if eqx.is_array(field.default):
        field.default_factory = ArrayDefault(field.default)
        field.default = dataclasses.MISSING
    return field


class ArrayDefault:
    """Returns a copy of an array on each call; NumPy arrays remain NumPy arrays."""

    def __init__(self, array: Any):
        self.array = array

    def __call__(self) -> Any:
        return self.array.copy()


# The declarations of each class, for each assignment of its type variables. If some
# names are undefined, also the number of names in the modules before they were parsed.
# One entry holds both, because threads may parse a class at the same time.
_Declared = tuple[dict[str, Spec], int | None]
_declared = weakref.WeakKeyDictionary[type, dict[Record | None, _Declared]]()


def declarations(cls: type, record: Record | None = None) -> dict[str, Spec]:
    """The declarations of a class by field, without fields that declare nothing.

    `record`: `cls` or a base of it, and the declarations of its type variables.

    Raises `TypeError`, naming class and field, for a contradictory declaration. An
    undefined name is not an error here: it sets `Spec.unresolved`, and a later call
    tries again once the modules define more names.
    """
    known = _declared.setdefault(cls, {})
    if record in known:
        specs, count = known[record]
        if count is None or count == _count_names(cls):
            return specs
    count = _count_names(cls)
    if issubclass(cls, eqx.Module) and not _keeps_fields(cls):
        raise TypeError(_BY_VALUE.format(cls.__name__, cls.__module__))
    specs, names = {}, names_around(cls, record)
    for name in _names_of_fields(cls):
        try:
            spec = _declaration(cls, name, names)
        except TypeError as e:
            raise TypeError(
                f"The annotation of `{cls.__qualname__}.{name}` cannot be used: {e}. "
                "A field has one kind. For several kinds, use a container or a "
                "submodule whose elements or fields have one each."
            ) from None
        if spec != NOTHING:
            specs[name] = spec
    has_missing = any(x.has_missing for x in names.values())
    known[record] = specs, count if has_missing else None
    return specs


def _keeps_fields(cls: type) -> bool:
    """Whether the pytree of a module class contains all of its fields.

    Equinox reads the fields when the class is created, so later fields are lost.
    """
    if inspect.isabstract(cls):  # it has no instances
        return True
    module = object.__new__(cls)
    # Leave out properties, which may replace a field of a base.
    found = {
        f.name: inspect.getattr_static(cls, f.name, None)
        for f in dataclasses.fields(cls)
    }
    names = [k for k, x in found.items() if not inspect.isdatadescriptor(x)]
    vars(module).update(dict.fromkeys(names))
    below, structure = jtu.tree_flatten(module, is_leaf=lambda x: x is not module)
    return vars(jtu.tree_unflatten(structure, below)).keys() >= {*names}


_BY_VALUE: Final = """`{0}`, defined in `{1}`, was pickled by value, as cloudpickle \
does with classes of `__main__` and of notebooks. Such a class is created without \
fields, which are set afterwards, but Equinox reads the fields of a module when its \
class is created. Define the class in a module that both processes can import: \
`from my_models import {0}`."""


def _names_of_fields(cls: Any) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [f.name for f in dataclasses.fields(cls)]
    return list(own_annotations(cls)) if is_typed_dict(cls) else list(cls._fields)


def _count_names(cls: type) -> int:
    modules = (sys.modules.get(base.__module__) for base in cls.__mro__)
    return sum(len(vars(module)) for module in modules if module)


def _declaration(cls: type, name: str, names: dict[type, Names]) -> Spec:
    """The declaration of a field by the most derived class that annotates it.

    If that class declares no kind, the nearest base that does decides the kind.
    """
    owners = _owners(cls, name)
    nearest = _own_declaration(owners[0], name, names)
    if nearest.has_kind or _metadata(owners[0], name).get("static", False):
        return nearest
    for base in owners[1:]:
        kept = _own_declaration(base, name, names)
        if kept.has_kind:
            merged = merge([nearest, kept])
            # The axes of the array, and whether a name is undefined, are said anew.
            return merged._replace(
                dims=nearest.dims, axes=nearest.axes, unresolved=nearest.unresolved
            )
    return nearest


def _own_declaration(owner: type, name: str, names: dict[type, Names]) -> Spec:
    """The declaration of a field in the body of `owner` alone."""
    spec = parse(own_annotations(owner).get(name, Any), names[owner])
    kind = _metadata(owner, name).get(KIND)
    if kind is None:
        return spec
    if spec.kind not in (None, kind):
        said = f"the annotation says `{spec.kind.__name__}`"
        raise TypeError(f"{said}, `es.field` says `{kind.__name__}`")
    return spec._replace(kind=kind, unresolved=False)


def _owners(cls: type, name: str) -> list[type]:
    """The classes that annotate a field of `cls`. Only modules and records count."""
    has_fields = {"__dataclass_fields__", "_fields"}
    bases = (c for c in cls.__mro__ if has_fields & c.__dict__.keys())
    return [c for c in bases if name in own_annotations(c)] or [cls]


def _metadata(owner: type, name: str) -> Mapping[str, Any]:
    """The metadata of a field, as `owner` itself declares it."""
    field = owner.__dict__.get("__dataclass_fields__", {}).get(name)
    return {} if field is None else field.metadata


def declared_inside(cls: type, spec: Spec) -> dict[str, Spec]:
    """The declarations of the fields of a class, inside a value with this spec."""
    for record in spec.records:
        if record[0] in cls.__mro__:
            return declarations(cls, record)
    return declarations(cls)


def declared_child(spec: Spec, node: Any, key: Any) -> Spec:
    """The declaration for the child under `key` of a node that is not a module."""
    element = spec.element(node, getattr(key, "idx", None))
    if isinstance(node, dict):
        # Only the annotation says that this is a `TypedDict`: the value is a dict.
        records = [x for x in spec.records if is_typed_dict(x[0])]
        found = [declarations(x[0], x).get(key.key, NOTHING) for x in records]
        return merge([element, *found]) if found else element
    if not is_record(type(node)):
        return element
    name = getattr(key, "name", getattr(key, "key", None))
    return declared_inside(type(node), spec).get(name, element)


def check_declarations(cls: type) -> None:
    """Raise `TypeError` if a static field of a module class declares a kind."""
    declared = declarations(cls)
    for f in dataclasses.fields(cls):
        kind = declared.get(f.name, NOTHING).kind
        if kind is not None and f.metadata.get("static", False):
            place = f"`{cls.__qualname__}.{f.name}`"
            text = f"{place}, declared `{kind.__name__}` and static"
            raise TypeError(_STATIC.format(text))
    # The class may not be complete: cloudpickle first creates a class without
    # attributes, and then sets all of them. So parse it again at the first instance.
    _declared.pop(cls, None)


def is_class_var(annotation: Any) -> bool:
    """Whether an annotation, which may be a string, is a `ClassVar`."""
    if isinstance(annotation, str):
        return re.match(r"(\w+\.)*ClassVar\b", annotation) is not None
    return annotation is ClassVar or typing.get_origin(annotation) is ClassVar
