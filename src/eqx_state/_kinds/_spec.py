"""What an annotation declares, as a small tree that follows its containers.

`dict[str, es.State]` declares nothing for the dict itself and `State` for its values.
"""

import itertools
from typing import Any, NamedTuple, TypeAlias

from .._compat import Dims
from ._axes import Axes
from ._kinds import Kind


class Spec(NamedTuple):
    """What an annotation declares for a value and, one level down, for its elements.

    `items` is for the first elements of a tuple, `each` for all others. `records` are
    the named classes whose own annotations declare more, each with what its type
    variables stand for here.
    """

    kind: Kind | None = None
    each: "Spec | None" = None
    items: "tuple[Spec, ...]" = ()
    records: "tuple[tuple[type, Given], ...]" = ()
    unresolved: bool = False
    dims: tuple[Dims, ...] = ()
    axes: tuple[Axes, ...] = ()

    def element(self, node: Any, index: int | None) -> "Spec":
        """The declaration for an element of the container `node`.

        `index`: its place in a list or a tuple, `None` in any other container.
        """
        each = self.each or NOTHING
        # `list[A] | tuple[B, C]`; without the list a list may stand for the tuple.
        if not self.items or not (isinstance(node, tuple) or each is NOTHING):
            return each
        has_item = index is not None and index < len(self.items)
        return self.items[index] if has_item else each

    def below(self) -> "list[Spec]":
        """All specs one level down."""
        given = [inner for _, given in self.records for _, inner in given]
        return [*([] if self.each is None else [self.each]), *self.items, *given]


NOTHING = Spec()
# Type variables, and what each stands for.
Given: TypeAlias = tuple[tuple[Any, Spec], ...]


def is_unresolved(spec: Spec) -> bool:
    """Whether a name in the annotation, however deep, could not be resolved."""
    return spec.unresolved or any(map(is_unresolved, spec.below()))


def kinds_in(spec: Spec) -> set[Kind]:
    """The kinds that an annotation names, however deep."""
    own = set() if spec.kind is None else {spec.kind}
    return own.union(*map(kinds_in, spec.below()))


def as_resolved(spec: Spec) -> Spec:
    """`spec` without its unresolved names, which declare nothing then."""
    each = None if spec.each is None else as_resolved(spec.each)
    items = tuple(map(as_resolved, spec.items))
    records = tuple(
        (cls, tuple((variable, as_resolved(inner)) for variable, inner in given))
        for cls, given in spec.records
    )
    return Spec(spec.kind, each, items, records, False, spec.dims, spec.axes)


class StandIn(type):
    """A class in the place of an annotation whose `spec` is known already.

    Anything may be done with it, as with a name that stands for a class or a module.
    """

    spec: Spec

    def __getattr__(cls, name: str) -> Any:
        return unresolved(f"{cls.__name__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    __iter__ = None  # or `*Missing` would get items without end


def stand_in(spec: Spec, name: str = "stated") -> type:
    """A class that is read as `spec`; it can be in any annotation."""
    return StandIn(name, (), {"spec": spec})


def unresolved(name: str) -> type:
    """A stand-in for a name that does not exist (yet)."""
    return stand_in(Spec(unresolved=True), name)


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
    columns = itertools.zip_longest(*(s.items for s in specs), fillvalue=NOTHING)
    return Spec(
        kind=next(iter(kinds), None),
        each=merge(each) if each else None,
        items=tuple(merge(list(column)) for column in columns),
        records=_merge_records([record for s in specs for record in s.records]),
        unresolved=any(s.unresolved for s in specs),
        dims=tuple(dict.fromkeys(dims for s in specs for dims in s.dims)),
        axes=tuple(dict.fromkeys(axes for s in specs for axes in s.axes)),
    )


def _merge_records(records: list[tuple[type, Given]]) -> tuple[tuple[type, Given], ...]:
    found: dict[type, dict[Any, Spec]] = {}
    for cls, given in records:
        here = found.setdefault(cls, {})
        for variable, spec in given:
            here[variable] = merge([here.get(variable, NOTHING), spec])
    return tuple((cls, tuple(given.items())) for cls, given in found.items())
