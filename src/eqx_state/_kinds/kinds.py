"""Kinds: what the arrays of a field are.

A kind is a class that is only ever named, in an annotation or in a filter, and never
instantiated: arrays stay raw arrays. Asking for a kind means it and its subclasses.
"""

import itertools
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TYPE_CHECKING, TypeAlias, TypeVar

from .._compat import Dims, read_dims


if TYPE_CHECKING:
    # To a type checker a kind is a data descriptor (SQLAlchemy's `Mapped` idea), so
    # that `self.w` of a field `w: Parameter[X]` is an `X`, and of a bare `w: Parameter`
    # an `Array`. Where checkers do not apply descriptors (`list[Parameter]`), the base
    # class lets an element still be used as an array.
    from typing import Generic

    from jaxtyping import Array
    from typing_extensions import TypeVar as DefaultTypeVar

    _T = DefaultTypeVar("_T", default=Array)

    class TreePart(Array, Generic[_T]):
        """The root of all kinds: every leaf that has a kind is a `TreePart`."""

        def __init_subclass__(cls, *, covering: bool = False) -> None: ...
        def __get__(self, instance: object, owner: Any = None, /) -> _T: ...
        def __set__(self, instance: object, value: _T, /) -> None: ...

    class Parameter(TreePart[_T]):
        """What training changes by gradients: weights, biases."""

    class Buffer(TreePart[_T], covering=True):
        """Constants: never trained, never written. Covers everything below it."""

    class State(TreePart[_T]):
        """What a forward pass may write."""

    class Rng(State[_T]):
        """A PRNG key that a layer draws from and advances."""

    class BatchStat(State[_T]):
        """A running statistic over the batches seen in training."""

    class OptState(State[_T], covering=True):
        """An optimizer's moments and counts. Covers everything below it."""

else:

    class _KindType(type):
        # A bare kind says what an array is for, not its type: run-time type checkers
        # must accept any value for `w: es.Parameter`.
        def __instancecheck__(cls, instance):
            return True

    class TreePart(metaclass=_KindType):
        """The root of all kinds: every leaf that has a kind is a `TreePart`.

        Subclass it, or one of the kinds below, to make your own kind. A kind with
        `covering=True` holds for everything below the field, whatever the modules
        inside declare; subclasses inherit this.

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
            )

        def __init_subclass__(cls, *, covering=None, **kwargs):
            super().__init_subclass__(**kwargs)
            if covering is not None:
                cls.covering = covering

        def __class_getitem__(cls, item):
            if isinstance(item, tuple) and len(item) == 1:
                (item,) = item  # as `typing.get_type_hints` gives it
            if isinstance(item, TypeVar):
                # `class Cache(State[_T])` keeps a kind generic for type checkers, and
                # nothing inherits from an `Annotated`.
                return GenericAlias(cls, (item,))
            return Annotated[item, cls]

    class Parameter(TreePart):
        """What training changes by gradients: weights, biases.

        An inexact array without any declaration counts as one, as in Equinox.
        """

    class Buffer(TreePart, covering=True):
        """Constants: never trained, never written. Covers everything below it.

        Positional codes, normalization constants, a frozen pretrained network.
        """

    class State(TreePart):
        """What a forward pass may write: counters, caches, running values."""

    class Rng(State):
        """A PRNG key that a layer draws from and advances.

        A typed key (`jax.random.key`) without any declaration counts as one.
        """

    class BatchStat(State):
        """A running statistic over the batches seen in training."""

    class OptState(State, covering=True):
        """An optimizer's moments and counts. Covers everything below it."""


Kind: TypeAlias = type[TreePart[Any]]


def kind_name(kind: type) -> str:
    """A kind as users write it: `es.State`, or the bare name of a user's own."""
    return ("es." if kind.__module__ == __name__ else "") + kind.__name__


def is_kind(x: object) -> bool:
    """Whether `x` is a kind (`isinstance` cannot tell: see `__instancecheck__`)."""
    return isinstance(x, type) and issubclass(x, TreePart)


class Axes:
    """Names for the axes of a layer's arrays, beside the field that holds the layer.

    For layers without names of their own, such as Equinox's. `es.axis_names` reads
    them, and with them `es.sharding`.

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

    # By the path of each array below the field, `layers[0].weight`.
    dims: dict[str, Dims]

    def __init__(self, **paths: str):
        """**Arguments:**

        - `**paths`: for the path of an array below the field, the names of its axes as
            in a jaxtyping annotation. A path that is not an identifier is written
            `es.Axes(**{"layers[0].weight": "mlp embed"})`. With `es.Axes` on a field
            further out, too, that one counts.

        **Raises:**

        - `TypeError`: the axes are not text.
        - `ValueError`: jaxtyping would not accept the text.
        """
        self._texts = paths
        self.dims = {}
        for path, dims in paths.items():
            what = f"`es.Axes({path}={dims!r})`"
            if not isinstance(dims, str):
                raise TypeError(f"{what}: give text, as to jaxtyping, 'mlp embed'.")
            try:
                self.dims[path] = read_dims(dims)
            except ValueError as e:
                raise ValueError(f"{what}: {e}") from None

    def below(self, outer: "Axes") -> "Axes":
        """These axes inside of others, which count where both say something."""
        return Axes(**self._texts | outer._texts)

    # In an annotation it must have a hash, and two made alike are equal.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axes) and self.dims == other.dims

    def __hash__(self) -> int:
        return hash(frozenset(self.dims.items()))

    def __repr__(self) -> str:
        return f"es.Axes(**{self._texts!r})"


class Spec(NamedTuple):
    """What an annotation declares for a value and, one level down, for its elements.

    `dict[str, es.State]` declares nothing for the dict itself and `State` for `each`
    value. `items` is for the elements of a `tuple[A, B]`, by place. `records` are the
    classes whose own annotations declare more, each with what its type variables stand
    for here. A union declares what its members do.
    """

    kind: Kind | None = None
    each: "Spec | None" = None
    items: "tuple[Spec, ...]" = ()
    records: "tuple[Record, ...]" = ()
    unresolved: bool = False  # whether a name that could not be found decides the kind
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


Record: TypeAlias = tuple[type, tuple[tuple[Any, Spec], ...]]
NOTHING = Spec()


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
    # `Box[es.State] | Box[list[es.State]]` says two things of one variable.
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
        unresolved=any(s.unresolved for s in specs),
        dims=tuple(dict.fromkeys(dims for s in specs for dims in s.dims)),
        axes=tuple(dict.fromkeys(axes for s in specs for axes in s.axes)),
    )
