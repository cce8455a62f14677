"""Kinds: what the arrays of a field are.

A kind is a class that is only ever named, in an annotation or in a filter, and never
instantiated: arrays stay raw arrays. Asking for a kind means it and its subclasses.
"""

from types import GenericAlias
from typing import Annotated, Any, TYPE_CHECKING, TypeAlias, TypeVar


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
                f" Write `w: {kind_name(cls)}` in the body of the class, and assign the"
                " array itself: `self.w = value`."
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
