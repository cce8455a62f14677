"""Kinds: classes that say what the arrays of a field are for.

A kind is named in annotations and filters, and never instantiated: the field contains a
raw array. A filter for a kind also selects its subclasses.
"""

import itertools
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TYPE_CHECKING, TypeAlias

from jaxtyping import Array
from typing_extensions import TypeVar  # with a default, before Python 3.13

from .._compat import Dims, read_dims


_T = TypeVar("_T", default=Array)


if TYPE_CHECKING:
    # To a type checker, a kind is a data descriptor, like SQLAlchemy's `Mapped`:
    # `self.w` is an `X` for `w: Parameter[X]`, an `Array` for a bare `w: Parameter`.
    # Descriptors do not apply to the elements in `list[Parameter]`, which are arrays
    # because of the base class `Array`.
    from typing import Generic

    class TreePart(Array, Generic[_T]):
        """The base class of all kinds. As a filter: every leaf that has a kind."""

        def __init_subclass__(cls, *, covering: bool = False) -> None: ...
        def __get__(self, instance: object, owner: Any = None, /) -> _T: ...
        def __set__(self, instance: object, value: _T, /) -> None: ...

else:

    class _KindType(type):
        # beartype must accept any value for `w: es.Parameter`: a bare kind declares the
        # role of an array, not its type.
        def __instancecheck__(cls, instance):
            return True

    class TreePart(metaclass=_KindType):
        """The base class of all kinds. As a filter: every leaf that has a kind.

        To define your own kind, subclass this or one of the kinds below. A kind that is
        defined with `covering=True`, as in `class Ema(es.TreePart, covering=True)`,
        applies to everything below the field, whatever the modules inside declare. Its
        subclasses inherit `covering`.

        !!! example

            ```python
            import equinox as eqx
            import eqx_state as es
            import jax.numpy as jnp


            class Cache(es.State):
                pass


            class Memory(es.Module):
                last: Cache
                weight: es.Parameter


            memory = Memory(jnp.zeros(3), jnp.ones(3))
            assert memory.filter(es.State).weight is None
            assert memory.filter(Cache).last is memory.last
            ```
        """

        covering = False

        def __new__(cls, *args, **kwargs):
            raise TypeError(
                f"`{cls.__name__}` is a kind: it annotates a field and is never called."
                f" Write `w: {kind_name(cls)}`, and assign the array: `self.w = value`."
                " As a filter, pass it only to functions of `es`:"
                f" `es.partition(model, {kind_name(cls)})`."
            )

        def __init_subclass__(cls, *, covering=None, **kwargs):
            super().__init_subclass__(**kwargs)
            if covering is not None:
                cls.covering = covering

        def __class_getitem__(cls, item):
            if isinstance(item, tuple) and len(item) == 1:
                (item,) = item  # `typing.get_type_hints` passes a tuple
            if isinstance(item, TypeVar):
                # In `class Cache(State[_T])`, a kind that is generic to type checkers,
                # the base cannot be an `Annotated`.
                return GenericAlias(cls, (item,))
            return Annotated[item, cls]


class Parameter(TreePart[_T]):
    """Arrays that gradients train: weights, biases.

    An inexact array without a declaration is a `Parameter`, as in Equinox.
    """


class Buffer(TreePart[_T], covering=True):
    """Constants: never trained, never written. Covers everything below it.

    Examples: positional encodings, normalization constants, a pretrained network.
    """


class State(TreePart[_T]):
    """Arrays that a forward pass may write: counters, caches, running values."""


class Rng(State[_T]):
    """A PRNG key that a layer draws from and advances.

    A typed key (`jax.random.key`) without a declaration is an `Rng`.
    """


class BatchStat(State[_T]):
    """A running statistic over the batches seen in training."""


class OptState(State[_T], covering=True):
    """An optimizer's moments and counts. Covers everything below it."""


Kind: TypeAlias = type[TreePart[Any]]


def kind_name(kind: type) -> str:
    """The name of a kind as users write it: `es.State`, or `Cache` for their own."""
    return ("es." if kind.__module__ == __name__ else "") + kind.__name__


def is_kind(x: object) -> bool:
    """Whether `x` is a kind (`isinstance` cannot tell: see `__instancecheck__`)."""
    return isinstance(x, type) and issubclass(x, TreePart)


class Axes:
    """Names the axes of a layer's arrays, in the annotation of the layer's field.

    Use it for layers whose own annotations have no axis names, such as Equinox's.
    `es.axis_names` and `es.sharding` read these names.

    !!! example

        ```python
        from typing import Annotated

        import equinox as eqx
        import eqx_state as es
        import jax.random as jr


        class Block(es.Module):
            up: Annotated[eqx.nn.Linear, es.Axes(weight="mlp embed", bias="mlp")]


        names = es.axis_names(Block(eqx.nn.Linear(2, 8, key=jr.key(0))))
        assert names.up.weight == ("mlp", "embed")
        assert names.up.bias == ("mlp",)
        ```
    """

    __slots__ = ("_texts", "dims")

    # The key is the path of an array below the field, such as `layers[0].weight`.
    dims: dict[str, Dims]

    def __init__(self, **paths: str):
        """**Arguments:**

        - `**paths`: for the path of an array below the field, the names of its axes as
            in a jaxtyping annotation. Write a path that is not an identifier as
            `es.Axes(**{"layers[0].weight": "mlp embed"})`. If several nested fields
            have an `es.Axes` for one array, the outermost applies.

        **Raises:**

        - `TypeError`: the axes are not a string.
        - `ValueError`: jaxtyping does not accept the string.
        """
        self._texts = paths
        self.dims = {}
        for path, dims in paths.items():
            what = f"`es.Axes({path}={dims!r})`"
            if not isinstance(dims, str):
                raise TypeError(f"{what}: pass a string, as to jaxtyping: 'mlp embed'.")
            try:
                self.dims[path] = read_dims(dims)
            except ValueError as e:
                raise ValueError(f"{what}: {e}") from None

    def below(self, outer: "Axes") -> "Axes":
        """These axes merged with those of a field further out, which take priority."""
        return Axes(**self._texts | outer._texts)

    # Annotations have to be hashable, and equal if they are written twice.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axes) and self.dims == other.dims

    def __hash__(self) -> int:
        return hash(frozenset(self.dims.items()))

    def __repr__(self) -> str:
        return f"es.Axes(**{self._texts!r})"


class Spec(NamedTuple):
    """The declarations of an annotation: for a value, and for its elements.

    `dict[str, es.State]` declares nothing for the dict itself and `State` for `each`
    value. `items` is for the elements of a `tuple[A, B]`, by index. `records` are
    classes with annotations of their own, each with the declarations that its type
    variables have here. A union declares what all its members declare.
    """

    kind: Kind | None = None
    each: "Spec | None" = None
    items: "tuple[Spec, ...]" = ()
    records: "tuple[Record, ...]" = ()
    unresolved: bool = False  # whether an undefined name decides the kind
    dims: tuple[Dims, ...] = ()
    axes: tuple[Axes, ...] = ()

    @property
    def has_kind(self) -> bool:
        """Whether a kind is declared, for the value or for something in it."""
        given = (spec for _, types in self.records for _, spec in types)
        inner = (self.each, *self.items, *given)
        return self.kind is not None or any(x and x.has_kind for x in inner)

    def element(self, node: Any, index: int | None) -> "Spec":
        """The declaration for an element of the container `node`.

        `index`: its index in a list or a tuple, `None` in any other container.
        """
        each = self.each or NOTHING
        # In `list[A] | tuple[B, C]`, `items` are for tuples only. In `tuple[B, C]`
        # alone, they also apply to a list in the field.
        is_tuple = isinstance(node, tuple) or each is NOTHING
        has_item = is_tuple and index is not None and index < len(self.items)
        return self.items[index] if has_item else each


Record: TypeAlias = tuple[type, tuple[tuple[Any, Spec], ...]]
NOTHING = Spec()


def merge(specs: list[Spec]) -> Spec:
    """Merge the specs of the members of a union, or of the arguments of a generic."""
    specs = [s for s in specs if s != NOTHING]
    if not specs:
        return NOTHING
    kinds = {s.kind for s in specs} - {None}
    if len(kinds) > 1:
        names = " and ".join(sorted(f"`{k.__name__}`" for k in kinds if k is not None))
        raise TypeError(f"it names two different kinds, {names}, for one value")
    each = [s.each for s in specs if s.each is not None]
    columns = itertools.zip_longest(*(s.items for s in specs), fillvalue=NOTHING)
    # `Box[es.State] | Box[list[es.State]]` has two specs for one type variable.
    records: dict[type, dict[Any, Spec]] = {}
    for cls, given in (record for s in specs for record in s.records):
        here = records.setdefault(cls, {})
        for variable, spec in given:
            here[variable] = merge([here.get(variable, NOTHING), spec])
    return Spec(
        kind=next(iter(kinds), None),
        each=merge(each) if each else None,
        items=tuple(merge(list(column)) for column in columns),
        records=tuple((cls, tuple(given.items())) for cls, given in records.items()),
        unresolved=not kinds and any(s.unresolved for s in specs),
        dims=tuple(dict.fromkeys(dims for s in specs for dims in s.dims)),
        axes=tuple(dict.fromkeys(axes for s in specs for axes in s.axes)),
    )
